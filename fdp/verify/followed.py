"""Functions that call operators, run on terms: called on tensors without values, as programs are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fdp.pytorch.tensors import storage_id
from fdp.verify.failure import VerificationError
from fdp.verify.machine import Dispatch, TermMachine
from fdp.verify.memory import Block, View, view_of
from fdp.verify.schemas import operator_of
from fdp.verify.terms import Term
from fdp.verify.values import Values


class Followed(TermMachine):
    """Records what functions do to memory: `with followed: function(tensor, ...)`.

    Args:
        values: makes terms.
    """

    def __init__(self, values: Values) -> None:
        super().__init__(values)
        self._blocks: dict[int, Block] = {}
        self._kept: list[torch.Tensor] = []
        self._dispatch = Dispatch(self.operator)

    def __enter__(self) -> None:
        self._dispatch.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._dispatch.__exit__(*raised)

    def memory_of(self, size_bytes: int, name: str) -> torch.Tensor:
        """New memory that holds nothing, as bytes."""
        made = torch.empty(size_bytes, dtype=torch.uint8, device="meta")
        self._keep(made, Block("arena", name))
        return made

    def given(self, shape: Sequence[int], dtype: torch.dtype, name: str) -> torch.Tensor:
        """A tensor in new memory, with an unknown value."""
        made = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self._keep(made, Block("input", name))
        term = self.values.terms.make(("given", name, tuple(shape), dtype), tuple(shape), dtype)
        term.origin = name
        self.memory.write(self.view(made), term)
        return made

    def view(self, tensor: torch.Tensor) -> View:
        """A tensor as a view of its memory."""
        block = self._blocks.get(storage_id(tensor.untyped_storage()))
        if block is None:
            raise VerificationError("a tensor lies in memory that the proof does not know")
        return view_of(block, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)

    def read(self, tensor: torch.Tensor) -> Term:
        """The value of a tensor."""
        return self.values.read(self.view(tensor))

    def operator(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator of a function on terms."""
        operator = operator_of(func)
        if operator.number or operator.views or operator.reshapes:
            return func(*args, **kwargs)
        raw = operator.bind(args, kwargs)
        made: list[Any] = []

        def fresh(call: Term, reads: list[View]) -> list[Any]:
            found = func(*args, **kwargs)
            found = list(found) if len(operator.results) > 1 else [found]
            made.extend(each for each, owner in zip(found, operator.results, strict=True) if owner is None)
            for each in made:
                self._keep(each, Block("fresh"))
            return [self.view(each) for each in made]

        self.perform(operator, [self._views(value) for value in raw], fresh)
        if not operator.results:
            return None
        rest = iter(made)
        results = [next(rest) if owner is None else raw[owner] for owner in operator.results]
        return results[0] if len(results) == 1 else tuple(results)

    def _keep(self, tensor: torch.Tensor, block: Block) -> None:
        self._blocks[storage_id(tensor.untyped_storage())] = block
        self._kept.append(tensor)

    def _views(self, value: object) -> Any:
        if isinstance(value, torch.Tensor):
            return self.view(value)
        return [self._views(each) for each in value] if isinstance(value, (list, tuple)) else value
