"""Functions of state and batch that read something from outside, each with what changes that later."""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

import fdp

SCALE = 2.0
SETTINGS = {"scale": 2.0, "deep": {"scale": [3.0, 4.0]}}


@dataclasses.dataclass
class Config:
    scale: float = 2.0
    unread: int = 0


@dataclasses.dataclass
class Slotted:
    __slots__ = ("scale",)
    scale: float


class Meta:
    scale = 2.0


class Trainer:
    def __init__(self) -> None:
        self.scale, self.epoch, self.config, self.log = 2.0, 0, Config(), []  # type: ignore[var-annotated]

    @property
    def doubled(self) -> float:
        return 2 * self.scale

    def __call__(self, w: torch.Tensor) -> torch.Tensor:
        return w * self.config.scale

    def step(self, w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return self(w) * self.doubled + fdp.pmean(batch.sum())


class Scaled(torch.nn.Module):
    shift = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = torch.nn.Dropout(0.5), 2.0
        self.table = torch.nn.Buffer(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shift + x * self.scale * SCALE * self.table + (1.0 if self.inner.training else 0.0)


def by_helper(w: torch.Tensor, config: Any) -> torch.Tensor:
    return w * config.scale


Case = tuple[Callable[..., Any], list[Callable[[], None]]]
"""A function of state and batch, and what changes what it reads."""


def of_a_global() -> Case:
    def change() -> None:
        global SCALE
        SCALE += 0.5

    return lambda w, b: w * SCALE + fdp.pmean(b.sum()), [change] * 2


def of_a_variable() -> Case:
    scale = 2.0

    def change() -> None:
        nonlocal scale
        scale = -0.0 if scale == 0 else 0.0

    return lambda w, b: 1 / (w * scale) + fdp.pmean(b.sum()), [change] * 2


def of_two_variables_of_one_name() -> Case:
    def scaled_by(scale: float) -> tuple[Callable[..., Any], Callable[[], None]]:
        def change() -> None:
            nonlocal scale
            scale += 1

        return lambda w: w * scale, change

    (one, change_one), (other, change_other) = scaled_by(2.0), scaled_by(3.0)
    return lambda w, b: one(w) + other(w) ** 2 + fdp.pmean(b.sum()), [change_one, change_other]


def of_a_dict() -> Case:
    settings = copy.deepcopy(SETTINGS)
    changes = [
        lambda: settings.update(scale=1.0),
        lambda: settings["deep"]["scale"].__setitem__(1, 5.0),
        lambda: settings.update(deep={"scale": [1.0]}),
        lambda: settings["deep"]["scale"].append(7.0),
    ]

    def fn(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return w * settings["scale"] * sum(settings["deep"]["scale"]) + fdp.pmean(b.sum())

    return fn, changes  # type: ignore[return-value]


def of_an_object() -> Case:
    held = types.SimpleNamespace(config=Config(), slotted=Slotted(2.0))

    def fn(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return by_helper(w, held.config) * held.slotted.scale + fdp.pmean(b.sum())

    def another() -> None:
        held.config = Config(5.0)

    return fn, [lambda: setattr(held.config, "scale", 4.0), another, lambda: setattr(held.slotted, "scale", 3.0)]


def of_a_module_of_python() -> Case:
    settings = types.ModuleType("settings_of_mine")
    settings.__file__, settings.scale, settings.deep = "settings_of_mine.py", 2.0, Config()  # type: ignore[attr-defined]
    sys.modules["settings_of_mine"] = settings

    def fn(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        import settings_of_mine  # type: ignore[import-not-found]
        from settings_of_mine import deep

        return w * settings_of_mine.scale * getattr(deep, "scale", 1.0) + fdp.pmean(b.sum())

    return fn, [
        lambda: setattr(settings, "scale", 3.0),
        lambda: setattr(settings, "deep", Config(4.0)),
        lambda: setattr(settings.deep, "scale", 5.0),
    ]


def of_a_class() -> Case:
    return lambda w, b: w * Meta.scale + fdp.pmean(b.sum()), [lambda: setattr(Meta, "scale", Meta.scale + 1)] * 2


def of_a_class_and_its_objects() -> Case:
    class Base:
        scale, shift = 2.0, 1.0

        def scaled(self, w: torch.Tensor) -> torch.Tensor:
            return w * self.scale + self.shift + getattr(self, "more", 0.0)

    class Derived(Base):
        pass

    held, other = Derived(), Base()

    def fn(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return held.scaled(w) + other.scaled(w) ** 2 + fdp.pmean(b.sum())

    return fn, [
        lambda: setattr(held, "scale", 3.0),
        lambda: setattr(Derived, "shift", 4.0),
        lambda: setattr(Base, "shift", 5.0),
        lambda: setattr(held, "more", 6.0),
        lambda: delattr(held, "scale"),
        lambda: setattr(Base, "scaled", lambda self, w: w * self.scale),
        lambda: setattr(held, "scaled", lambda w: w * 7),
    ]


def of_a_method() -> Case:
    trainer = Trainer()
    return trainer.step, [
        lambda: setattr(trainer, "scale", 3.0),
        lambda: setattr(trainer.config, "scale", 3.0),
        lambda: setattr(trainer, "config", Config(7.0)),
    ]


def of_a_partial() -> Case:
    config = Config()

    def fn(c: Config, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return w * c.scale + fdp.pmean(b.sum())

    return functools.partial(fn, config), [lambda: setattr(config, "scale", 3.0)]


def of_what_is_differentiated() -> Case:
    config = Config()
    grad = fdp.value_and_grad(lambda w, b: (by_helper(w, config) * b.sum()).sum())
    return lambda w, b: grad(w, b)[1], [lambda: setattr(config, "scale", 3.0)]


def of_another_function() -> Case:
    held = types.SimpleNamespace(act=torch.relu)
    return lambda w, b: held.act(w) + fdp.pmean(b.sum()), [
        lambda: setattr(held, "act", torch.tanh),
        lambda: setattr(held, "act", lambda w: w * 2),
        lambda: setattr(held, "act", lambda w: w * 3),
    ]


def of_another_step() -> Case:
    config = Config()
    inner = fdp.data_parallel(lambda w, b: w * config.scale + fdp.pmean(b.sum()))
    return lambda w, b: inner(w, b) * 2, [lambda: setattr(config, "scale", 3.0)]


def of_closed_over_tensors() -> Case:
    state = {"w": torch.ones(3), "inner": [torch.ones(3)]}

    def fn(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return w * state["w"] * state["inner"][0] + fdp.pmean(b.sum())

    def another() -> None:
        nonlocal state
        state = {"w": torch.full((3,), 7.0), "inner": [torch.full((3,), 2.0)]}

    def of_another_shape() -> None:
        state["w"] = torch.tensor(2.0)

    changes: list[Callable[[], None]] = [
        lambda: state.update(w=torch.full((3,), 2.0)),
        lambda: state["inner"].__setitem__(0, torch.full((3,), 5.0)),
        another,
        of_another_shape,
        lambda: state["w"].fill_(11.0),
    ]  # type: ignore[list-item]
    return fn, changes


def of_a_module() -> Case:
    module = Scaled()

    def another_part() -> None:
        module.inner = torch.nn.Dropout(0.5).eval()

    return lambda w, b: module(w) + fdp.pmean(b.sum()), [
        lambda: setattr(module, "scale", 3.0),
        lambda: module.eval(),
        lambda: module.train(),
        lambda: setattr(module, "shift", 1.0),
        another_part,
        lambda: setattr(module, "table", torch.full((3,), 2.0)),
        lambda: setattr(module.table, "data", torch.full((3,), 4.0)),
    ]


def of_a_module_taken_apart() -> Case:
    module = Scaled()
    apply, params, buffers = fdp.from_module(module)

    def change() -> None:
        global SCALE
        SCALE += 0.5

    def gone() -> None:
        nonlocal module
        module.scale = 5.0
        module = Scaled()

    return lambda w, b: apply(params, buffers, w)[0] + fdp.pmean(b.sum()), [
        lambda: setattr(module, "scale", 3.0),
        lambda: module.eval(),
        lambda: module.inner.train(),
        lambda: setattr(module, "shift", 1.0),
        lambda: setattr(module, "forward", lambda x: x * SCALE),
        change,
        gone,
    ]


CASES = [of_a_global, of_a_variable, of_two_variables_of_one_name, of_a_dict, of_an_object, of_a_module_of_python,
         of_a_class, of_a_class_and_its_objects, of_a_method, of_a_partial, of_what_is_differentiated,
         of_another_function, of_another_step, of_closed_over_tensors, of_a_module,
         of_a_module_taken_apart]  # fmt: skip
