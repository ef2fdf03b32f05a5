"""What changed between two signatures of a step, in words, and what to do if it keeps changing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fdp import pytree
from fdp.trace.calls.arguments import Flat, Roles, describe_inputs

Kind = tuple[tuple[str, str], ...]
"""What decides on a trace in a tensor, part by part with its value; an object that is no tensor has one part."""

_REMEDIES = {
    "shape": "pad to few sizes; each is traced once, and the 64 that were called last are kept",
    "strides": "call .contiguous() before the step",
    "dtype": "convert it before the step",
    "device": "move it before the step",
    "value": "pass a number that changes as a tensor",
    "structure": "pass the same keys, and lists of the same length, at every call; None is structure, too",
    "static": "pass what changes often as a tensor, or as part of the state",
    "outside": "pass what changes often as an argument: a tensor, or as part of the state",
    "other": "clone what shares memory, and keep settings such as autocast as they are",
}


@dataclass(frozen=True)
class Summary:
    """A summary of a call for a later message; it holds no tensors.

    Attributes:
        spec: the structure of its arguments.
        static: its static arguments.
        leaves: of each leaf what decides on a trace.
    """

    spec: pytree.Spec
    static: tuple[Any, ...]
    leaves: tuple[Kind, ...]


def summarise(flat: Flat) -> Summary:
    """Describe a call without holding on to its tensors."""
    return Summary(flat.spec, flat.static, tuple(map(_kind_of_leaf, flat.leaves)))


def describe_change(old: Summary, new: Flat, step_name: str, roles: Roles, outside: str = "") -> tuple[str, str]:
    """Say what differs between two signatures: the first argument that changed, with its old and new value.

    Args:
        old: the earlier call.
        new: the arguments of the later one.
        step_name: the user's function, for messages.
        roles: what each argument is.
        outside: what has changed besides arguments; empty for nothing.

    Returns:
        What changed, and what to do about it.
    """
    if old.spec != new.spec:
        return f"the structure of the arguments: {old.spec} became {new.spec}", _REMEDIES["structure"]
    if old.static != new.static:
        return f"the static arguments: {old.static!r} became {new.static!r}", _REMEDIES["static"]
    names, _ = describe_inputs(step_name, new, roles)
    changed = [
        (name, before, after)
        for name, before, after in zip(names, old.leaves, map(_kind_of_leaf, new.leaves), strict=True)
        if before != after
    ]
    if not changed and outside:
        return outside, _REMEDIES["outside"]
    if not changed:
        return "which arguments share memory, or a setting of torch", _REMEDIES["other"]
    name, before, after = changed[0]
    more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
    if [part for part, _ in before] != [part for part, _ in after]:
        return f"{name}: {_kind_text(before)} became {_kind_text(after)}{more}", _REMEDIES["value"]
    part, was, now = next((part, a, b) for (part, a), (_, b) in zip(before, after, strict=True) if a != b)
    return f"{name}: {'' if part == 'value' else part + ' '}{was} became {now}{more}", _REMEDIES[part]


def _kind_of_leaf(leaf: Any) -> Kind:
    if not isinstance(leaf, torch.Tensor):
        return (("value", repr(leaf)),)
    # The shape first: if it changes, so do strides, and need no mention.
    return (
        ("shape", str(list(leaf.shape))),
        ("dtype", str(leaf.dtype)),
        ("device", str(leaf.device)),
        ("strides", str(list(leaf.stride()))),
    )


def _kind_text(kind: Kind) -> str:
    return kind[0][1] if len(kind) == 1 else f"a tensor of shape {kind[0][1]} and {kind[1][1]}"
