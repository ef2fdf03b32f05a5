"""Functions that read something from outside through objects of rarer kinds, each with what changes that later."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable
from typing import Any

import torch
from hidden_reads import case
from outside_cases import Case, Config


class Scaled:
    """A descriptor."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __get__(self, held: Any, owner: type) -> float:
        return self.by * 2


def of_a_descriptor() -> Case:
    class Rates:
        rate = Scaled(1.0)

    held = Rates()
    return case(
        lambda w: w * held.rate,
        lambda: setattr(vars(Rates)["rate"], "by", 2.0),
        lambda: setattr(Rates, "rate", Scaled(3.0)),
    )


def of_an_object_in_a_set() -> Case:
    class Part:
        rate = 1.0

    part, other = Part(), Part()
    parts = {part, other}
    return case(
        lambda w: w * sum(each.rate for each in parts),
        lambda: setattr(part, "rate", 2.0),
        lambda: setattr(other, "rate", 5.0),
        lambda: (parts.remove(part), parts.add(Part())),
    )


def of_a_method_of_a_dict() -> Case:
    held = {"rate": 2.0}
    get = held.get
    return case(lambda w: w * get("rate", 1.0), lambda: held.update(rate=3.0), lambda: held.pop("rate"))


def of_a_method_of_a_list() -> Case:
    held = [2.0, 3.0]
    at = held.__getitem__
    return case(lambda w: w * at(1), lambda: held.__setitem__(1, 4.0))


def of_views_of_a_dict() -> Case:
    held = {"rate": 2.0}
    rates, names, both = held.values(), held.keys(), held.items()
    return case(
        lambda w: w * sum(rates) + len(names) + len(both),
        lambda: held.update(rate=3.0),
        lambda: held.update(more=1.0),
    )


def of_a_module_that_was_made() -> Case:
    made = types.ModuleType("made_by_a_test")
    made.rate = 2.0  # type: ignore[attr-defined]
    return case(lambda w: w * made.rate, lambda: setattr(made, "rate", 3.0))  # type: ignore[attr-defined]


def of_an_attribute_of_a_tensor() -> Case:
    held: Any = torch.ones(3)
    held.rate = 2.0
    return case(lambda w: w * held * held.rate, lambda: setattr(held, "rate", 3.0))


def of_what_a_class_defines() -> Case:
    class Rates:
        @property
        def one(self) -> float:
            return 1.0

        @classmethod
        def two(cls) -> float:
            return 2.0

        @staticmethod
        def three() -> float:
            return 3.0

    held = Rates()
    return case(
        lambda w: w * held.one + w * held.two() + w * held.three(),
        lambda: setattr(Rates, "one", property(lambda self: 5.0)),
        lambda: setattr(Rates, "two", classmethod(lambda cls: 7.0)),
        lambda: setattr(Rates, "three", staticmethod(lambda: 11.0)),
        lambda: setattr(Rates, "one", 13.0),
    )


def of_a_class_that_comes_to_hide_its_base() -> Case:
    class Rates:
        rate = 2.0

        @classmethod
        def of(cls) -> float:
            return 1.0

    class Own(Rates):
        pass

    held = Own()
    return case(
        lambda w: w * held.rate * held.of(),
        lambda: setattr(Own, "rate", 3.0),
        lambda: setattr(Rates, "of", classmethod(lambda cls: 2.0)),
    )


def of_default_arguments() -> Case:
    def scaled(w: torch.Tensor, by: float = 2.0, *, and_by: float = 1.0) -> torch.Tensor:
        return w * by * and_by

    return case(
        lambda w: scaled(w),
        lambda: setattr(scaled, "__defaults__", (3.0,)),
        lambda: setattr(scaled, "__kwdefaults__", {"and_by": 5.0}),
    )


def of_hooks_of_all_modules() -> Case:
    model, added = torch.nn.Linear(3, 3).requires_grad_(False), []  # type: ignore[var-annotated]
    hooks = torch.nn.modules.module
    changes: list[Callable[[], Any]] = [
        lambda: added.append(hooks.register_module_forward_hook(lambda module, args, output: output * 2)),
        lambda: added.append(hooks.register_module_forward_pre_hook(lambda module, args: (args[0] + 1,))),
        lambda: added.pop().remove(),
        lambda: added.pop().remove(),
    ]
    return case(lambda w: model(w), *changes)


def of_members_of_an_enum() -> Case:
    class Mode(enum.Enum):
        FAST = Config()

        @property
        def doubled(self) -> float:
            return 2 * self.value.scale

    return case(lambda w: w * Mode.FAST.doubled, lambda: setattr(Mode.FAST.value, "scale", 3.0))


def of_a_property_of_a_metaclass() -> Case:
    held = Config()

    class Kind(type):
        @property
        def rate(cls) -> float:
            return held.scale

    class Rates(metaclass=Kind):
        pass

    return case(
        lambda w: w * Rates.rate,
        lambda: setattr(held, "scale", 3.0),
        lambda: setattr(Kind, "rate", property(lambda cls: 5.0)),
    )


def of_a_number_with_attributes() -> Case:
    class Named(float):
        rate = 1.0

    class Text(str):
        rate = 1.0

    number, text = Named(2.0), Text("a")
    return case(
        lambda w: w * number * number.rate * text.rate,
        lambda: setattr(number, "rate", 3.0),
        lambda: setattr(text, "rate", 5.0),
        lambda: setattr(Named, "rate", 7.0),
        lambda: delattr(number, "rate"),
    )


RARE = [value for name, value in list(globals().items()) if name.startswith("of_")]
