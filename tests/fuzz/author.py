"""Writes a step line by line.

Each line is run once as it is written, so that shapes, strides and aliases are known.

A line that plain PyTorch cannot run, or whose values leave what is well-conditioned, is not written.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fuzz import plain
from fuzz.exchanges import members_along

_MOST = {True: 4096.0, False: 1000.0}
_NAME = re.compile(r"[A-Za-z_]\w*")


class DryRun(plain.Plain):
    """One rank that stands for all, for shapes."""

    def __init__(self, ranks: int) -> None:
        super().__init__(plain.World(1), 0)
        self.ranks = ranks

    def _collect(self, tree: Any, combine: Any, axis: Any = None) -> Any:
        return super()._collect(tree, combine)

    def all_gather(self, tree: Any, axis: Any = None) -> Any:
        return plain.mapped(lambda x: torch.stack([x] * self.axis_size(axis)), tree)

    def psum_scatter(self, tree: Any, axis: int = 0, axis_name: Any = None) -> Any:
        ranks = self.axis_size(axis_name)
        return plain.mapped(lambda x: (x * ranks).chunk(ranks, axis)[0].clone(), tree)

    def pmean_scatter(self, tree: Any, axis: int = 0, axis_name: Any = None) -> Any:
        return plain.mapped(lambda x: x.chunk(self.axis_size(axis_name), axis)[0].clone(), tree)

    def all_to_all(self, tree: Any, split_axis: int, concat_axis: int, axis: Any = None) -> Any:
        ranks = self.axis_size(axis)
        return plain.mapped(lambda x: torch.cat([x.chunk(ranks, split_axis)[0]] * ranks, concat_axis), tree)

    def broadcast(self, tree: Any, root: int = 0, axis: Any = None) -> Any:
        return super().broadcast(tree)

    def ppermute(self, tree: Any, perm: Any, axis: Any = None) -> Any:
        return plain.mapped(lambda x: x.clone(memory_format=torch.contiguous_format), tree)

    def axis_index(self, axis: Any = None) -> torch.Tensor:
        return super().axis_index()

    def axis_size(self, axis: Any = None) -> int:
        return self.ranks if axis is None else len(members_along(axis, self.ranks)[0])


class Refused(Exception):
    """The line is not written."""


class Author:
    """Writes lines and keeps account of the values that there are.

    Attributes:
        rng: where choices come from.
        exact: whether all values have to be small whole numbers, halves, quarters and so on.
        env: the values that there are, by name.
        lines: what has been written.
        fixed: memory of inputs that must not be written.
        inputs: memory of inputs.
        varying: memory that may differ between ranks.
        of_types: whether values may be of other dtypes than float32 (`fuzz.dtypes`).
        outside: what it may read from outside, by the ways to hold it (`fuzz.outside`).
    """

    def __init__(self, rng: random.Random, exact: bool, env: dict[str, Any], prefix: str = "v") -> None:
        self.rng, self.exact, self.env, self.prefix = rng, exact, env, prefix
        self.lines: list[str] = []
        self.fixed: set[int] = set()
        self.inputs: set[int] = set()
        self.varying: set[int] = set()
        self.names: list[str] = []
        self.traits: set[str] = set()
        self.of_types = False
        self.outside: tuple[Any, ...] = ()
        self._count = 0

    # --- what there is ---

    def add(self, name: str, varying: bool, fixed: bool = False, given: bool = False) -> None:
        """Take note of a value that is in `env` already."""
        self.names.append(name)
        value = self.env[name]
        if isinstance(value, torch.Tensor):
            if varying:
                self.varying.add(place(value))
            if given:
                self.inputs.add(place(value))
            if fixed:
                self.fixed.add(place(value))

    def tensors(self, fits: Callable[[torch.Tensor], bool], writable: bool = False) -> list[str]:
        """The names of values that fit, in the order in which they came."""
        found = []
        for name in self.names:
            value = self.env.get(name)
            if isinstance(value, torch.Tensor) and fits(value):
                if writable and (place(value) in self.fixed or overlaps_itself(value)):
                    continue
                found.append(name)
        return found

    def pick(self, shape: Any = None, dtype: Any = torch.float32, dims: int | None = None, writable: bool = False,
             other: str | None = None) -> str:  # fmt: skip
        """A value of a kind, later ones more often.

        Raises:
            Refused: there is none.
        """

        def fits(x: torch.Tensor) -> bool:
            return (
                (dtype is None or x.dtype == dtype)
                and (shape is None or tuple(x.shape) == tuple(shape))
                and (dims is None or x.dim() == dims)
            )

        names = [name for name in self.tensors(fits, writable) if name != other]
        if not names:
            raise Refused
        if len(names) > 4 and self.rng.random() < 0.6:
            names = names[-4:]
        return self.rng.choice(names)

    def varies(self, text: str) -> bool:
        """Whether anything that a text names may differ between ranks."""
        return any(
            place(value) in self.varying
            for name in set(_NAME.findall(text))
            if isinstance(value := self.env.get(name), torch.Tensor)
        )

    def fresh(self) -> str:
        self._count += 1
        return f"{self.prefix}{self._count}"

    # --- writing ---

    def write(self, text: str, made: Mapping[str, bool] | None = None, draws: bool = False) -> None:
        """Write one statement, of one line or several.

        Args:
            text: the statement.
            made: the names that it makes, each with whether it may differ between ranks for certain (None: if
                anything that the text names does).
            draws: whether it draws random numbers.

        Raises:
            Refused: it cannot be run, or its values are not well-conditioned.
        """
        varies = draws or self.varies(text) or "axis_index" in text
        versions = {name: (v._version, place(v)) for name, v in self.env.items() if isinstance(v, torch.Tensor)}
        saved = {name: (v, v.detach().clone()) for name, v in self.env.items() if isinstance(v, torch.Tensor)}
        shapes = {name: (v.shape, v.stride(), v.storage_offset()) for name, (v, _) in saved.items()}
        state = torch.get_rng_state()
        try:
            exec(text, self.env)
            self._look_at(text, made or {})
        except Refused:
            self._undo(saved, shapes, versions, made)
            raise
        except Exception as error:
            self._undo(saved, shapes, versions, made)
            raise Refused(str(error)) from error
        finally:
            torch.set_rng_state(state)
        for name, version in versions.items():
            value = self.env[name]
            # Written, or in other memory now: `x.data = y`.
            if varies and isinstance(value, torch.Tensor) and (value._version, place(value)) != version:
                self.varying.add(place(value))
        for name, varying in (made or {}).items():
            self.add(name, varies if varying is None else varying)
        self.lines += text.splitlines()

    def _look_at(self, text: str, made: Mapping[str, Any]) -> None:
        named = set(_NAME.findall(text)) | set(made)
        for name in named:
            for _, value in plain.parts(self.env.get(name)):
                if isinstance(value, torch.Tensor):
                    check_conditioned(value, self.exact)

    def _undo(self, saved: Any, shapes: Any, versions: Any, made: Any) -> None:
        for name in made or {}:
            self.env.pop(name, None)
        with torch.no_grad():
            for name, (value, copy) in saved.items():
                self.env[name] = value
                if (value.shape, value.stride(), value.storage_offset()) != shapes[name]:
                    value.as_strided_(*shapes[name])
                if not value.requires_grad and not same_values(value, copy) and not overlaps_itself(value):
                    value.copy_(copy)
                for places in (self.fixed, self.inputs, self.varying):
                    if versions[name][1] in places:
                        places.add(place(value))  # `resize_` may have moved it


def same_values(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.detach(), y)


def check_conditioned(value: torch.Tensor, exact: bool) -> None:
    """Refuse values that are not finite, large, or of which rounding could show where there is to be none."""
    if value.numel() > 256:
        raise Refused("large")
    if not value.is_floating_point():
        return
    x = value.detach()
    if not bool(x.isfinite().all()) or (x.numel() and float(x.abs().max()) > _MOST[exact]):
        raise Refused("not well-conditioned")
    few_bits = x.dtype.itemsize == 2  # these are rounded after each operation, wherever it is computed
    if exact and not few_bits and bool(((x * 64).frac() != 0).any()):
        raise Refused("rounded")


def place(value: torch.Tensor) -> int:
    """The memory of a tensor, by a number."""
    return value.untyped_storage().data_ptr()


def overlaps_itself(value: torch.Tensor) -> bool:
    """Whether two elements lie at the same place."""
    if value.numel() < 2:
        return False
    at = torch.zeros((), dtype=torch.int64)
    for n, s in zip(value.shape, value.stride(), strict=True):
        at = at.unsqueeze(-1) + torch.arange(n) * s
    return at.reshape(-1).unique().numel() != value.numel()
