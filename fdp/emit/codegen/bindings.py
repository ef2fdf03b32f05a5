"""The cheapest way to call an operator from Python.

`OpOverload.__call__` goes through Python, `boxed_call_of` boxes every argument; the functions that torch generates for
its operators (`torch.mm`, `Tensor.t`) parse arguments in C++ and call the operator unboxed, which takes less time.
Which operator such a function calls depends on its arguments, so it is taken only if it has been seen to call exactly
this one, with exactly these arguments.

What is relied on, beyond the documented interface of torch: that `torch._C._VariableFunctions` and `torch._C._nn` hold
those functions under the operators' names. What is not found there, or does not call the operator that is asked for, is
called through `boxed_call_of`, their common way in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fdp.pytorch.dispatch import TorchDispatchMode
from fdp.pytorch.overloads import OpOverload, boxed_call_of, schema_of

_known: dict[Any, Callable[..., Any]] = {}
"""What was found, for the rest of the process: it depends on the operator and the kinds of its arguments, not on their
shapes or values, so there are as many entries as there are ways to call an operator in the user's sources."""


def bind(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """Find the cheapest callable that calls an operator with arguments of a kind.

    Args:
        operator: the operator.
        args: example arguments, with fake tensors; nothing is computed.
        kwargs: example keyword arguments.

    Returns:
        A function that does what `operator(*args, **kwargs)` does outside of autograd.
    """
    key = (operator, *map(_parsed_as, args), *((name, _parsed_as(value)) for name, value in kwargs.items()))
    found = _known.get(key)
    if found is None:
        found = _known[key] = _search(operator, args, kwargs)
    return found


def _search(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    # Functions without a tensor argument take their device from the context of the call; operators such as
    # squeeze_ would change the examples.
    if any(map(_has_tensor, args)) and torch.Tag.inplace_view not in operator.tags:
        for candidate in _candidates(operator):
            witness = _Witness()
            try:
                with torch.no_grad(), witness:
                    candidate(*args, **kwargs)
            except Exception:
                # It takes other arguments than this overload, or needs what fake tensors lack. Whatever it says, the
                # common way in is left.
                continue
            if witness.calls == 1 and _is_call(witness, operator, args, kwargs):
                return candidate
    return boxed_call_of(operator)


def _candidates(operator: OpOverload) -> Iterator[Callable[..., Any]]:
    if operator.namespace != "aten":
        return
    name = schema_of(operator).name.removeprefix("aten::")
    for holder in (torch._C._VariableFunctions, torch._C._nn, torch._C.TensorBase):
        function = getattr(holder, name, None)
        if callable(function):
            yield function


class _Witness(TorchDispatchMode):
    """Notes which operators are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch's
        self.calls = 0
        self.called: tuple[Any, Sequence[Any], Mapping[str, Any]] = (None, (), {})
        self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside or func.namespace == "prim":  # what fake tensors ask each other
            return func(*args, **kwargs)
        self.calls += 1
        self.called = (func, args, kwargs)
        outs = [kwargs[argument.name] for argument in schema_of(func).arguments if argument.is_out]
        if outs:
            return outs[0] if len(outs) == 1 else tuple(outs)
        self._inside = True
        try:
            return func(*args, **kwargs)
        finally:
            self._inside = False


def _is_call(witness: _Witness, operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    func, seen_args, seen_kwargs = witness.called
    if func is not operator:
        return False
    wanted, seen = (_bound(operator, *call) for call in ((args, kwargs), (seen_args, seen_kwargs)))
    return wanted.keys() == seen.keys() and all(_equal(wanted[name], seen[name]) for name in wanted)


def _bound(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    given = dict(kwargs)
    for argument, value in zip(schema_of(operator).arguments, args, strict=False):
        given[argument.name] = value
    return {a.name: given.get(a.name, a.default_value) for a in schema_of(operator).arguments}


def _equal(one: object, two: object) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(two, torch.Tensor):
        return one is two
    if isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
        return len(one) == len(two) and all(map(_equal, one, two))
    return bool(one == two)


def _has_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, (list, tuple)) and any(map(_has_tensor, value)))


def _parsed_as(value: object) -> Any:
    """What decides on how Python arguments are parsed: of a list, the kinds in it, and whether it has one entry."""
    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.dim() == 0
    if isinstance(value, (list, tuple)):
        return tuple(dict.fromkeys(map(_parsed_as, value))), len(value) == 1
    return type(value)
