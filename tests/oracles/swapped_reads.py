"""Functions that read something from outside, and changes of it that leave sizes and other parts as they are."""

from __future__ import annotations

import types
from typing import Any

import torch
from hidden_reads import case
from outside_cases import Case


def of_an_attribute_in_the_place_of_another() -> Case:
    class Rates:
        rate = 1.0

    held = Rates()
    held.other = 1  # type: ignore[attr-defined]
    return case(lambda w: w * held.rate, lambda: (delattr(held, "other"), setattr(held, "rate", 5.0)))


def of_a_set_of_one_size() -> Case:
    names = {"head"}
    return case(lambda w: w * (2 if "body" in names else 1), lambda: (names.remove("head"), names.add("body")))


def of_what_super_calls() -> Case:
    class Plain:
        def __init__(self) -> None:
            self.rate = 0.5

        def of(self, w: torch.Tensor) -> torch.Tensor:
            return w * self.rate

    class Louder(Plain):
        def of(self, w: torch.Tensor) -> torch.Tensor:
            return super().of(w) + 1

    held = Louder()
    return case(
        lambda w: held.of(w),
        lambda: setattr(held, "rate", 0.25),
        lambda: setattr(Plain, "of", lambda self, w: w * 7),
        lambda: setattr(Louder, "of", lambda self, w: w * 3),
    )


def of_a_dict_to_which_the_step_adds() -> Case:
    held = {"rate": 2.0}

    def fn(w: torch.Tensor) -> torch.Tensor:
        held["seen"] = 1
        return w * held["rate"]

    return case(fn, lambda: held.update(rate=3.0), lambda: held.update(rate=2.0, unread=1), lambda: held.pop("unread"))


def of_a_dict_of_an_object_to_which_the_step_adds() -> Case:
    held = types.SimpleNamespace(options={"rate": 2.0})

    def fn(w: torch.Tensor) -> torch.Tensor:
        held.options.setdefault("seen", 1)
        return w * held.options["rate"]

    return case(fn, lambda: held.options.update(rate=3.0))


def of_a_set_to_which_the_step_adds() -> Case:
    names = {"head"}

    def fn(w: torch.Tensor) -> torch.Tensor:
        names.add("seen")
        return w * (2 if "body" in names else 1)

    return case(fn, lambda: names.add("body"))


def of_an_object_that_becomes_another() -> Case:
    class One:
        def of(self, w: torch.Tensor) -> torch.Tensor:
            return w * 2

    class Other:
        def of(self, w: torch.Tensor) -> torch.Tensor:
            return w * 3

    held: Any = One()
    return case(lambda w: held.of(w), lambda: setattr(held, "__class__", Other))


def of_an_object_that_gets_other_attributes() -> Case:
    class Rates:
        def __init__(self) -> None:
            self.rate = 2.0

    held = Rates()
    return case(lambda w: w * held.rate, lambda: setattr(held, "__dict__", {"rate": 3.0}))


SWAPPED = [value for name, value in list(globals().items()) if name.startswith("of_")]
