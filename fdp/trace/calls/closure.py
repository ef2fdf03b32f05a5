"""Names for the tensors that a function closes over, as its author would write them."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from fdp.trace.calls.finite_flags import ReturnsFiniteFlags

_MAX_DEPTH = 4


def closed_over_names(function: object) -> dict[int, str]:
    """Find the tensors that a function can reach without being passed them.

    Args:
        function: any callable: its closure, the globals it names, defaults and bound object are searched, and
            those of functions found there.

    Returns:
        For the `id` of each tensor, an expression such as `model.layers[0].weight`.

    Example:
        >>> w = torch.ones(2)
        >>> closed_over_names(lambda x: x * w)[id(w)]
        'w'
    """
    return {key: name for key, (name, _) in closed_over_tensors(function).items()}


def closed_over_where(function: object, wanted: Callable[[torch.Tensor], bool]) -> list[str]:
    """The names of the closed-over tensors of a function for which a predicate holds."""
    return [name for name, tensor in closed_over_tensors(function).values() if wanted(tensor)]


def closed_over_tensors(function: object) -> dict[int, tuple[str, torch.Tensor]]:
    """Find the tensors that a function can reach without being passed them: by `id`, name and tensor."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    seen: set[int] = set()
    for name, value in _reachable(function):
        _visit(name, value, found, seen, _MAX_DEPTH)
    return found


def closed_over_modules(function: object) -> list[tuple[str, torch.nn.Module]]:
    """Find the modules, and the parts of modules, that a function can reach without being passed them, with names."""
    found: dict[int, tuple[str, torch.nn.Module]] = {}
    seen: set[int] = set()
    for name, value in _reachable(function):
        _visit(name, value, {}, seen, _MAX_DEPTH, found)
    return list(found.values())


def _reachable(function: object) -> Iterator[tuple[str, Any]]:
    if isinstance(function, ReturnsFiniteFlags):
        function = function.step
    if isinstance(function, functools.partial):
        yield from _reachable(function.func)
        yield from ((f"argument {i}", value) for i, value in enumerate(function.args))
        yield from function.keywords.items()
        return
    if isinstance(function, types.MethodType):
        yield "self", function.__self__
        function = function.__func__
    if not isinstance(function, types.FunctionType):
        yield getattr(function, "__name__", type(function).__name__), function
        return
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a variable that has not been assigned yet
            continue
    for name in _global_names(code):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    yield from (function.__kwdefaults__ or {}).items()


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _visit(
    name: str,
    value: Any,
    found: dict[int, tuple[str, torch.Tensor]],
    seen: set[int],
    depth: int,
    modules: dict[int, tuple[str, torch.nn.Module]] | None = None,
) -> None:
    try:
        is_tensor = isinstance(value, torch.Tensor)
    except Exception:  # a proxy of an object that has died, for example
        return
    if is_tensor:
        found.setdefault(id(value), (name, value))
        return
    if id(value) in seen or depth == 0:
        return
    seen.add(id(value))
    inner: Iterable[tuple[str, Any]] = ()
    if isinstance(value, torch.nn.Module):
        for path, tensor in [*value.named_parameters(), *value.named_buffers()]:
            found.setdefault(id(tensor), (f"{name}.{path}", tensor))
        if modules is not None:
            for path, module in value.named_modules():
                modules.setdefault(id(module), (f"{name}.{path}" if path else name, module))
    elif isinstance(value, dict):
        inner = ((f"{name}[{key!r}]", item) for key, item in list(value.items()))
    elif isinstance(value, (list, tuple)):
        inner = ((f"{name}[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        inner = _reachable(value)
    elif not isinstance(value, (type, types.ModuleType)) and hasattr(value, "__dict__"):
        inner = ((f"{name}.{attribute}", item) for attribute, item in list(vars(value).items()))
    for known, item in inner:
        _visit(known, item, found, seen, depth - 1, modules)
