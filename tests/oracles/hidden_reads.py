"""Functions that read something from outside in ways that are easily overlooked, each with what changes that later."""

from __future__ import annotations

import argparse
import collections
import enum
import functools
import types
import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from outside_cases import Case, Config
from torch import nn

import fdp

FACTOR = 2.0


def set_factor(value: float) -> Callable[[], None]:
    def change() -> None:
        global FACTOR
        FACTOR = value

    return change


def factors() -> list[Callable[[], None]]:
    return [set_factor(3.0), set_factor(2.0), set_factor(5.0)]


def doubled(w: torch.Tensor) -> torch.Tensor:
    return w * 2


def tripled(w: torch.Tensor) -> torch.Tensor:
    return w * 3


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * -FACTOR


class Criterion:
    def __init__(self) -> None:
        self.factor = FACTOR


class Mode(enum.Enum):
    ONE, TWO = 1.0, 2.0

    def of(self, w: torch.Tensor) -> torch.Tensor:
        return w * self.value * FACTOR

    def __repr__(self) -> str:
        return "a mode"


class Pair(NamedTuple):
    x: float

    def of(self, w: torch.Tensor) -> torch.Tensor:
        return w * self.x * FACTOR


class Settings(dict[str, float]):
    def __init__(self) -> None:
        super().__init__(a=1.0)
        self.factor = 2.0


class Wrapper:
    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.factor = 2.0

    def __call__(self, w: torch.Tensor) -> torch.Tensor:
        return self.__wrapped__(w) * self.factor  # type: ignore[attr-defined,no-any-return]


class Scale(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * FACTOR


def with_message(fn: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    return lambda w, b: fn(w) + fdp.pmean(b.sum())


def case(fn: Callable[[torch.Tensor], Any], *changes: Callable[[], Any]) -> Case:
    return with_message(fn), list(changes)


def of_what_has_two_names() -> Case:
    table, held = {"one": doubled, "two": tripled}, types.SimpleNamespace(chosen=doubled)
    return case(lambda w: held.chosen(w) * len(table), lambda: setattr(held, "chosen", table["two"]))


def of_one_of_several_teachers() -> Case:
    held = types.SimpleNamespace(models=[nn.ReLU(), nn.Tanh()])
    held.teacher = held.models[0]
    return case(lambda w: held.teacher(w) + held.models[0](w) * 0, lambda: setattr(held, "teacher", held.models[1]))


def of_a_class_of_torch() -> Case:
    held = types.SimpleNamespace(act=nn.ReLU)
    return case(lambda w: held.act()(w), lambda: setattr(held, "act", nn.Tanh))


def of_a_module_of_functions() -> Case:
    held = types.SimpleNamespace(ops=F)
    mine = types.ModuleType("functions_of_mine")
    mine.relu = torch.tanh  # type: ignore[attr-defined]
    return case(lambda w: held.ops.relu(w), lambda: setattr(held, "ops", mine))


def of_the_parts_of_a_module() -> Case:
    net = nn.Sequential(nn.Identity(), nn.Tanh())
    return case(
        lambda w: net(w), lambda: net.__setitem__(1, nn.Sigmoid()), lambda: net.append(nn.ReLU()), lambda: net.pop(0)
    )


def of_settings_of_parts() -> Case:
    net = nn.Sequential(nn.AvgPool1d(2, stride=2), nn.Softmax(dim=-1))
    return case(
        lambda w: net(torch.stack([w, w * 2]))[0].sum(),
        lambda: setattr(net[0], "stride", (1,)),
        lambda: setattr(net[1], "dim", 0),
    )


def of_settings_of_parts_taken_apart() -> Case:
    net = nn.Sequential(nn.AvgPool1d(2, stride=2), nn.Softmax(dim=-1))
    apply, params, buffers = fdp.from_module(net)
    return case(
        lambda w: apply(params, buffers, torch.stack([w, w * 2]))[0][0].sum(),
        lambda: setattr(net[0], "stride", (1,)),
        lambda: setattr(net[1], "dim", 0),
        lambda: net.register_forward_hook(lambda m, i, o: o * FACTOR),
        *factors(),
    )


def of_hooks() -> Case:
    net = nn.Tanh()
    return case(lambda w: net(w), lambda: net.register_forward_hook(lambda m, i, o: o * FACTOR), *factors())


def of_a_forward_of_a_named_class() -> Case:
    net = Scale()
    return case(lambda w: net(w) if isinstance(net, Scale) else w, *factors())


def of_a_constructor() -> Case:
    return case(lambda w: w * Criterion().factor, *factors())


def of_a_backward_function() -> Case:
    return case(lambda w: torch.func.grad(lambda w: Reversed.apply(w).sum())(w), *factors())  # type: ignore[no-untyped-call]


def of_a_method_of_an_enum() -> Case:
    held = types.SimpleNamespace(mode=Mode.ONE)
    return case(lambda w: held.mode.of(w), *factors(), lambda: setattr(held, "mode", Mode.TWO))


def of_a_method_of_a_named_tuple() -> Case:
    held = types.SimpleNamespace(pair=Pair(1.0))
    return case(lambda w: held.pair.of(w), *factors(), lambda: setattr(held, "pair", Pair(2.0)))


def of_an_attribute_of_a_dict() -> Case:
    settings = Settings()
    return case(lambda w: w * settings["a"] * settings.factor, lambda: setattr(settings, "factor", 3.0))


def of_a_wrapper() -> Case:
    wrapper = Wrapper(doubled)
    return case(lambda w: wrapper(w), lambda: setattr(wrapper, "factor", 3.0))


def of_an_attribute_of_a_function() -> Case:
    def helper(w: torch.Tensor) -> torch.Tensor:
        return w * helper.factor  # type: ignore[attr-defined,no-any-return]

    helper.factor = 2.0  # type: ignore[attr-defined]
    return case(lambda w: helper(w), lambda: setattr(helper, "factor", 3.0))


def of_another_transform() -> Case:
    def loss(w: torch.Tensor) -> torch.Tensor:
        return (w**2).sum()

    held = types.SimpleNamespace(transform=torch.func.grad(loss))
    return case(lambda w: held.transform(w), lambda: setattr(held, "transform", torch.func.vmap(loss)))


def of_containers_of_the_library() -> Case:
    users, queue = collections.UserDict(a=1.0), collections.deque([1.0, 2.0])
    target = Config()
    reference = weakref.ref(target)

    def fn(w: torch.Tensor) -> torch.Tensor:
        held = reference()
        assert held is not None
        return w * users["a"] * queue[0] * held.scale

    def rotate() -> None:
        queue.rotate()

    return case(fn, lambda: users.__setitem__("a", 3.0), rotate, lambda: setattr(target, "scale", 4.0))


def of_views_and_layers_of_dicts() -> Case:
    inner, local, defaults = {"a": 1.0}, {}, {"b": 2.0}  # type: ignore[var-annotated]
    view, layers = types.MappingProxyType(inner), collections.ChainMap(local, defaults)
    return case(
        lambda w: w * view["a"] * layers["b"],
        lambda: inner.update(a=3.0),
        lambda: local.update(b=4.0),
        lambda: defaults.update(b=5.0),
        local.clear,
    )


def of_a_getter() -> Case:
    held, getter = types.SimpleNamespace(deep=Config()), attrgetter("deep.scale")
    return case(lambda w: w * getter(held), lambda: setattr(held.deep, "scale", 3.0))


def of_a_partial_method() -> Case:
    config = Config()

    class Scaling:
        def scaled(self, factor: float, w: torch.Tensor) -> torch.Tensor:
            return w * factor * config.scale

        doubled = functools.partialmethod(scaled, 2.0)

    scaling = Scaling()
    return case(lambda w: scaling.doubled(w), lambda: setattr(config, "scale", 3.0))


def of_an_activation() -> Case:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, activation=torch.sin)
    apply, params, buffers = fdp.from_module(layer.requires_grad_(False))
    return case(
        lambda w: apply(params, buffers, w[0] * torch.ones(2, 1, 4))[0].square().sum(),
        lambda: setattr(layer, "activation", torch.tanh),
        lambda: setattr(layer, "norm_first", True),
    )


def of_names_in_strings() -> Case:
    args = argparse.Namespace(lr=0.5, other=1.0, third=2.0, deep=Config())

    def helper(w: torch.Tensor, lr: float, **_: Any) -> torch.Tensor:
        return w * lr

    def fn(w: torch.Tensor) -> torch.Tensor:
        return helper(w, **vars(args)) * vars(args)["other"] * attrgetter("third")(args) * args.__dict__["deep"].scale

    changes = [lambda n=n: setattr(args, n, getattr(args, n) + 1) for n in ("lr", "other", "third")]
    return case(fn, *changes, lambda: setattr(args.deep, "scale", 5.0))


def of_a_ring() -> Case:
    one, two, three = (types.SimpleNamespace(factor=float(n)) for n in (1, 2, 3))
    one.next, two.next, three.next = two, one, one
    ring = types.SimpleNamespace(now=one)
    return case(
        lambda w: w * ring.now.next.next.factor * ring.now.next.factor,
        lambda: setattr(two, "next", three),
        lambda: setattr(ring, "now", two),
        lambda: setattr(three, "factor", 7.0),
    )


def of_keys_and_their_order() -> Case:
    weights, layers = {doubled: 1.0, tripled: 5.0}, {"a": doubled, "b": torch.tanh}

    def fn(w: torch.Tensor) -> torch.Tensor:
        for layer in layers.values():
            w = layer(w)
        return w * weights[doubled]

    def swap() -> None:
        values = list(weights.values())
        weights.clear()
        weights.update({tripled: values[0], doubled: values[1]})

    return case(fn, swap, lambda: layers.__setitem__("a", layers.pop("a")))


def of_what_is_not_there_yet() -> Case:
    more: dict[str, float] = {}
    held = types.SimpleNamespace(items=[], pair=())

    class Base:
        factor: float | None = 2.0

    base = Base()

    def fn(w: torch.Tensor) -> torch.Tensor:
        w = w * more.get("factor", 1.0) + sum(held.items) + sum(held.pair)
        return w if base.factor is None else w * base.factor

    return case(
        fn,
        lambda: more.update(factor=3.0),
        lambda: held.items.append(4.0),
        lambda: setattr(held, "pair", (5.0,)),
        lambda: setattr(base, "factor", None),
        lambda: delattr(base, "factor"),
    )


def of_equal_bits() -> Case:
    held = types.SimpleNamespace(table=torch.ones(3))

    def another() -> None:
        held.table = held.table.clone()

    return case(lambda w: w * held.table, another, lambda: held.table.add_(1), another, lambda: held.table.add_(1))


def of_an_epoch() -> Case:
    held = types.SimpleNamespace(epoch=0)

    def later() -> None:
        held.epoch += 1

    return case(lambda w: w * 2 if held.epoch >= 4 and held.epoch % 3 == 1 else w, *[later] * 12)


HIDDEN = [value for name, value in list(globals().items()) if name.startswith("of_")]
