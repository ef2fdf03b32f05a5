"""What changed between two signatures of a step, in words, and what to do if it keeps changing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fdp import pytree
from fdp.trace.calls.arguments import Flat, describe_static

LeafFacts = tuple[tuple[str, object], ...]
"""What decides on a trace in a tensor, part by part with its value; an object that is no tensor has one part.

They become text only when a message needs it: there are as many as leaves, and most calls change nothing.
"""

_REMEDIES = {
    "shape": "pad to few sizes; each is traced once, and the 64 that were called last are kept",
    "strides": "call .contiguous() before the step",
    "dtype": "convert it before the step",
    "device": "move it before the step",
    "value": "pass a number that changes as a tensor",
    "structure": "pass the same keys, and lists of the same length, at every call; None is structure, too",
    "static": "pass what changes often as a tensor, or as part of the state",
    "outside": "pass what changes often as an argument: a tensor, or as part of the state",
    "group": "make process groups once, and a step for each",
    "settings": "set autocast, the default dtype and oneDNN once, or inside the step",
    "sharing": "clone what shares memory",
    "memory": "clone arguments before the step",
}


@dataclass(frozen=True)
class Summary:
    """A summary of a call for a later message; it holds no tensors.

    Attributes:
        spec: the structure of its arguments.
        static: its static arguments.
        leaves: of each leaf what decides on a trace.
        shared: which of its tensors share memory.
        group: the ranks, as what equals itself alone.
        settings: those of torch around the call.
    """

    spec: pytree.Spec
    static: tuple[Any, ...]
    leaves: tuple[LeafFacts, ...]
    shared: tuple[tuple[int, int], ...] | None
    group: object
    settings: object


def summarise(flat: Flat, group: object, settings: object) -> Summary:
    """Describe a call without holding on to its tensors."""
    return Summary(flat.spec, flat.static, tuple(map(_kind_of_leaf, flat.leaves)), flat.shared, group, settings)


def describe_change(old: Summary, new: Summary, names: Sequence[str], outside: str = "") -> tuple[str, str]:
    """Say what differs between two signatures: the first argument that changed, with its old and new value.

    Args:
        old: the earlier call.
        new: the later one.
        names: of the leaves of the later one.
        outside: what has changed that the function reads from outside; empty for nothing.

    Returns:
        What changed, and what to do about it.
    """
    if old.spec != new.spec:
        return f"the structure of the arguments: {old.spec} became {new.spec}", _REMEDIES["structure"]
    if describe_static(old.static) != describe_static(new.static):
        return f"the static arguments: {old.static!r} became {new.static!r}", _REMEDIES["static"]
    changed = [
        (name, before, after)
        for name, before, after in zip(names, old.leaves, new.leaves, strict=True)
        if before != after
    ]
    if not changed and outside:
        return outside, _REMEDIES["outside"]
    if not changed and old.group != new.group:
        return "its process group, which is another one", _REMEDIES["group"]
    if not changed and old.settings != new.settings:
        return "autocast, the default dtype, or whether oneDNN is on", _REMEDIES["settings"]
    if not changed and old.shared != new.shared:
        return "which arguments share memory", _REMEDIES["sharing"]
    if not changed:
        return "how arguments lie in their memory", _REMEDIES["memory"]
    name, before, after = changed[0]
    more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
    if [part for part, _ in before] != [part for part, _ in after]:
        return f"{name}: {_kind_text(before)} became {_kind_text(after)}{more}", _REMEDIES["value"]
    part, was, now = next((part, a, b) for (part, a), (_, b) in zip(before, after, strict=True) if a != b)
    return f"{name}: {'' if part == 'value' else part + ' '}{_text(was)} became {_text(now)}{more}", _REMEDIES[part]


def _kind_of_leaf(leaf: object) -> LeafFacts:
    if not isinstance(leaf, torch.Tensor):
        return (("value", repr(leaf)),)
    # The shape first: if it changes, so do strides, and need no mention.
    return (
        ("shape", leaf.shape),
        ("dtype", leaf.dtype),
        ("device", leaf.device),
        ("strides", leaf.stride()),
    )


def _text(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _kind_text(kind: LeafFacts) -> str:
    first = _text(kind[0][1])
    return first if len(kind) == 1 else f"a tensor of shape {first} and {kind[1][1]}"
