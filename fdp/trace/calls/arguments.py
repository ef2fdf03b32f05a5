"""The arguments of a step: roles, flat list of tensors, and the signature that decides on a retrace."""

from __future__ import annotations

import collections
import enum
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fdp import pytree
from fdp.distributed.group import Group, resolve_group
from fdp.errors import ArgumentError, TraceError, build_message
from fdp.pytorch.tensors import is_zero_without_memory
from fdp.state.containers import flatten_apart, places_in
from fdp.state.shards import ShardLayout, contiguous_strides, layout_in, sharded
from fdp.trace.calls.overlap import memory_groups
from fdp.trace.trace import Input

PLAIN_TYPES = (int, float, complex, bool, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format,
          enum.Enum)  # fmt: skip
_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


@dataclass(frozen=True)
class Roles:
    """The role of each positional argument: batch, static, donated, or replicated state.

    Attributes:
        names: parameter names.
        batch: positions that differ from rank to rank.
        static: positions whose value is a constant of the trace.
        donated: positions whose memory the step may reuse.
    """

    names: tuple[str, ...]
    batch: frozenset[int]
    static: frozenset[int]
    donated: frozenset[int]


@dataclass(frozen=True)
class Flat:
    """The arguments of one call.

    Attributes:
        leaves: all leaves of all arguments that are not static.
        spec: their tree structure, a tuple of those arguments.
        static: the static arguments.
        donated: indices of leaves of donated arguments.
        shared: which tensors share memory, as in `sharing_pattern`; None if that does not matter.
        key: equal for two calls exactly if one trace serves both.
        args: the arguments themselves.
    """

    leaves: list[Any]
    spec: pytree.Spec
    static: tuple[Any, ...]
    donated: tuple[int, ...]
    shared: tuple[tuple[int, int], ...] | None
    key: tuple[Any, ...]
    args: tuple[Any, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The leaves that are tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]


def resolve_roles(
    step: Callable[..., Any],
    count: int,
    batch: int | Iterable[int],
    static: int | Iterable[int],
    donated: int | Iterable[int],
) -> Roles:
    """Turn `*_argnums` into positions, for a call with `count` positional arguments.

    Raises:
        ArgumentError: a number is out of range, or two roles exclude each other.
    """
    step_name = getattr(step, "__name__", "step")

    def positions(option: str, numbers: int | Iterable[int]) -> frozenset[int]:
        found = set()
        listed = numbers if isinstance(numbers, Iterable) and not isinstance(numbers, str) else (numbers,)
        for number in listed:
            if isinstance(number, bool) or not isinstance(number, int) or not -count <= number < count:
                raise ArgumentError(
                    build_message(
                        f"{option}={number!r}, but step {step_name!r} was called with {count} positional arguments.",
                        remedy="count positions from 0, or from -1 at the end.",
                    )
                )
            found.add(number % count)
        return frozenset(found)

    fixed = positions("static_argnums", static)
    # The default, -1, means the last argument that carries data.
    moving = positions("batch_argnums", batch) if count else frozenset[int]()
    given = positions("donate_argnums", donated)
    if batch == -1 and moving & fixed:
        free = [i for i in range(count) if i not in fixed]
        moving = frozenset(free[-1:])
    for option, other in (("batch_argnums", moving), ("donate_argnums", given)):
        if other & fixed:
            raise ArgumentError(
                build_message(
                    f"argument {min(other & fixed)} of step {step_name!r} is in static_argnums and in {option}.",
                    remedy="a static argument is a constant: take it out of one of the two.",
                )
            )
    return Roles(_parameter_names(step, count), moving, fixed, given)


def _parameter_names(step: Callable[..., Any], count: int) -> tuple[str, ...]:
    names: list[str] = []
    try:
        for parameter in inspect.signature(step).parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                names += [f"{parameter.name}[{i}]" for i in range(count - len(names))]
            elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                names.append(parameter.name)
    except (TypeError, ValueError):
        pass
    names += [f"arg{i}" for i in range(len(names), count)]
    return tuple(names[:count])


def split_static(args: tuple[Any, ...], roles: Roles) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Split arguments into pytrees and static ones; runs at every call."""
    if not roles.static:
        return args, ()
    trees = tuple(arg for i, arg in enumerate(args) if i not in roles.static)
    return trees, tuple(args[i] for i in sorted(roles.static))


def describe_leaf(leaf: object) -> tuple[Any, ...]:
    """The part of a signature that describes a leaf."""
    if isinstance(leaf, torch.Tensor):
        if type(leaf) not in _TENSOR_TYPES or leaf.layout != torch.strided:
            return type(leaf), leaf.layout, leaf.shape  # to be refused, whatever else it is
        # Not the storage offset: batches are often slices, and few graphs depend on it
        # (`Trace.depends_on_storage_offsets`).
        return (
            leaf.shape,
            leaf.dtype,
            leaf.device,
            leaf.stride(),
            leaf.is_conj(),
            leaf.is_neg(),
            is_zero_without_memory(leaf),
        )
    return (type(leaf), repr(leaf) if isinstance(leaf, (float, complex)) else leaf)


def describe_static(static: tuple[Any, ...]) -> tuple[Any, ...]:
    """The part of a signature that describes the static arguments."""
    return tuple((type(value), value, _exact(value)) for value in static)


def sharing_pattern(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, int], ...]:
    """For each tensor that shares memory with one before it, the index of the first such one, and its own."""
    memories = memory_groups(tensors)
    if len(set(memories)) == len(memories):
        return ()
    owners: dict[int, int] = {}
    return tuple(
        (owners[memory], index) for index, memory in enumerate(memories) if owners.setdefault(memory, index) != index
    )


def flatten_call(args: tuple[Any, ...], roles: Roles) -> Flat:
    """Flatten the arguments, and compute the whole signature."""
    trees, static = split_static(args, roles)
    leaves, spec = flatten_apart(trees)
    key: tuple[Any, ...] = (spec, describe_static(static), *map(describe_leaf, leaves))
    if not roles.donated:
        return Flat(leaves, spec, static, (), None, key, args)
    donated = _leaves_of(roles.donated, spec, roles)
    # Whether tensors share memory decides what may be written in place; so does what autograd keeps of them.
    shared = sharing_pattern([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
    history = tuple(i for i in donated if isinstance(leaf := leaves[i], torch.Tensor) and _is_bound(leaf))
    return Flat(leaves, spec, static, donated, shared, (*key, shared, history), args)


def _leaves_of(positions: frozenset[int], spec: pytree.Spec, roles: Roles) -> tuple[int, ...]:
    """The indices of the leaves that belong to some arguments."""
    found: list[int] = []
    start = 0
    trees = [i for i in range(len(roles.names)) if i not in roles.static]
    for position, child in zip(trees, spec.children(), strict=True):
        if position in positions:
            found += range(start, start + child.num_leaves)
        start += child.num_leaves
    return tuple(found)


def _is_bound(tensor: torch.Tensor) -> bool:
    """Whether autograd forbids in-place changes of a tensor from outside of its graph."""
    return tensor.grad_fn is not None or tensor.is_inference()


def _exact(value: object) -> str | None:
    """What tells equal values apart: 1 == True == 1.0, 0.0 == -0.0, also inside of tuples and dataclasses."""
    text = repr(value)
    return None if " at 0x" in text else text


def refuse_unhashable(step_name: str, flat: Flat, roles: Roles) -> None:
    """Refuse arguments that cannot be part of a signature.

    Raises:
        ArgumentError: a static argument cannot be hashed.
        TraceError: a leaf of another argument cannot.
    """
    offenders = []
    for position, value in zip(sorted(roles.static), flat.static, strict=True):
        try:
            hash(value)
        except TypeError:
            offenders.append(f"{roles.names[position]}: {type(value).__qualname__}")
    if offenders:
        raise ArgumentError(
            build_message(
                f"step {step_name!r} was called with static arguments that cannot be hashed.",
                offenders,
                remedy="pass a tuple for a list, a frozen dataclass for a dict, or leave the argument out of "
                "static_argnums.",
            )
        )
    describe_inputs(step_name, flat, roles)


def describe_inputs(
    step_name: str, flat: Flat, roles: Roles, ranks: Group | None = None
) -> tuple[list[str], list[Input]]:
    """Name and describe every leaf of a call, and refuse those that a step cannot take.

    Args:
        step_name: the user's function, for messages.
        flat: the flattened call.
        roles: what each argument is.
        ranks: those of the step; None if it does not matter whether sharded leaves are divided among them.

    Returns:
        The key path of every leaf, and an `Input` for each that is a tensor.

    Raises:
        TraceError: names each leaf that is neither a tensor nor a plain constant, is a number in a batch, or is
            sharded in a way that is not that of `fdp.shard`.
    """
    positions = [i for i in range(len(roles.names)) if i not in roles.static]
    names: list[str] = []
    owner: list[int] = []
    for position, child in zip(positions, flat.spec.children(), strict=True):
        found = pytree.names_in(child, roles.names[position])
        names += found
        owner += [position] * len(found)
    _refuse_foreign_leaves(step_name, names, owner, flat.leaves, roles)
    layouts = [None if found is None else layout_in(found) for found in sharded(flat.spec)]
    _refuse_other_shards(step_name, names, owner, flat.leaves, layouts, roles, ranks)
    found_tensors = [
        (name, position, place.container, leaf, layout)
        for name, position, place, leaf, layout in zip(
            names, owner, places_in(flat.spec), flat.leaves, layouts, strict=True
        )
        if isinstance(leaf, torch.Tensor)
    ]
    inputs = [
        Input(
            name=name,
            shape=tuple(leaf.shape),
            dtype=leaf.dtype,
            device=leaf.device,
            stride=leaf.stride(),
            offset=int(leaf.storage_offset()),
            role="batch" if position in roles.batch else container.role,
            donated=position in roles.donated,
            shares_memory=shared,
            part=None if layout is None else layout.part,
            container=container,
        )
        for (name, position, container, leaf, layout), shared in zip(
            found_tensors, sharing([leaf for *_, leaf, _ in found_tensors]), strict=True
        )
    ]
    return names, inputs


def sharing(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """For each tensor, whether it overlaps itself or shares memory with another one."""
    groups = memory_groups(tensors)
    counts = collections.Counter(groups)
    return [counts[group] > 1 or overlaps_itself(tensor) for group, tensor in zip(groups, tensors, strict=True)]


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory: a stride is smaller than the extent of the dimensions inside of it."""
    inside = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= inside:
                return True
            inside += stride * (size - 1)
    return False


def _refuse_foreign_leaves(
    step_name: str, names: Sequence[str], owner: Sequence[int], leaves: Sequence[Any], roles: Roles
) -> None:
    offenders = []
    for name, position, leaf in zip(names, owner, leaves, strict=True):
        kind = pytree.describe_kind(leaf)
        if isinstance(leaf, torch.Tensor):
            if type(leaf) not in _TENSOR_TYPES:
                offenders.append(f"{name}: the tensor subclass {kind}")
            elif leaf.layout != torch.strided:
                offenders.append(f"{name}: a tensor of layout {leaf.layout}")
            elif leaf.is_conj() or leaf.is_neg():
                offenders.append(f"{name}: a lazily conjugated or negated view; call .resolve_conj().resolve_neg()")
            elif is_zero_without_memory(leaf):
                offenders.append(f"{name}: zeros that take no memory; pass a clone")
            elif position in roles.donated and leaf.grad_fn is not None:
                offenders.append(f"{name}: donated, but autograd may go back through it; pass x.detach()")
            elif position in roles.donated and leaf.is_inference():
                offenders.append(f"{name}: donated, but made under torch.inference_mode(); pass a clone")
        elif position in roles.batch:
            offenders.append(f"{name}: {kind} {leaf!r:.40}, in a batch argument, which holds tensors only")
        elif not isinstance(leaf, PLAIN_TYPES):
            offenders.append(f"{name}: {kind}, which is neither a tensor nor a plain constant")
    if offenders:
        raise TraceError(
            build_message(
                f"step {step_name!r} was called with leaves that it cannot take.",
                offenders,
                remedy="convert data with torch.as_tensor; pass other objects by static_argnums, or close over them; "
                "make a container of your own a dataclass, or register it with optree.",
            )
        )


def _refuse_other_shards(
    step_name: str,
    names: Sequence[str],
    owner: Sequence[int],
    leaves: Sequence[Any],
    layouts: Sequence[ShardLayout | None],
    roles: Roles,
    ranks: Group | None,
) -> None:
    """Refuse `DTensor`s that are not divided as `fdp.shard` does it."""
    offenders = []
    for name, position, leaf, layout in zip(names, owner, leaves, layouts, strict=True):
        if layout is None:
            continue
        part = layout.part
        if position in roles.batch:
            offenders.append(f"{name}: a DTensor in a batch argument, of which each rank passes its own tensors")
        elif part is None:
            how = f"{layout.placements} over a mesh of shape {tuple(layout.mesh.shape)}"
            offenders.append(f"{name}: a DTensor of shape {list(layout.shape)} that is divided by {how}")
        elif tuple(leaf.shape) != part.of(layout.shape) or not leaf.is_contiguous():
            how = f"a part of shape {list(leaf.shape)} and strides {list(leaf.stride())}"
            offenders.append(f"{name}: a DTensor of shape {list(layout.shape)} with {how}")
        elif tuple(layout.stride) != contiguous_strides(layout.shape):
            offenders.append(f"{name}: a DTensor of shape {list(layout.shape)} and strides {list(layout.stride)}")
        elif ranks is not None and resolve_group(layout.mesh) != ranks:
            offenders.append(f"{name}: a DTensor of another mesh: {layout.mesh}")
    if offenders:
        raise TraceError(
            build_message(
                f"step {step_name!r} was called with DTensors that it cannot take.",
                offenders,
                remedy="shard state with fdp.shard(tree), over the ranks of the step: equal parts along one dimension "
                "of a contiguous tensor. fdp.unshard(tree) makes plain tensors of others.",
            )
        )
