"""Which output is the new value of which input: the one that has the input's key path, from the root or a child of it.

Two decisions follow: the output that is the new value of a donated input may take its memory, and the new value of a
labelled input is labelled as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fdp import pytree
from fdp.state import labels
from fdp.state.shards import is_shard
from fdp.trace.calls.arguments import Flat, Roles
from fdp.trace.calls.finite_flags import is_hidden
from fdp.trace.trace import Input, Output

_Path = tuple[Any, ...]


def assign_slots(
    outputs: Sequence[Output], out_spec: pytree.Spec, inputs: Sequence[Input], flat: Flat, roles: Roles
) -> list[Output]:
    """Assign to each output the donated input whose memory it may take, if there is one."""
    if not roles.donated:
        return list(outputs)

    def fits(at: int, source: int) -> bool:
        return _fits(outputs[at], inputs[source])

    wanted = [
        {
            path: source
            for path, source in argument.items()
            if inputs[source].donated and not inputs[source].shares_memory
        }
        for argument in _arguments(flat, roles)
    ]
    slots = _paired(_plain_paths(out_spec), wanted, fits, lambda found: len(found))
    return [replace(output, slot=slots.get(at)) for at, output in enumerate(outputs)]


def assign_labels(
    outputs: Sequence[Output], out_spec: pytree.Spec, inputs: Sequence[Input], flat: Flat, roles: Roles
) -> list[Output]:
    """For each output, whether it is labelled: as the new value of a labelled input, or by the step itself."""
    per_leaf = zip(labels.labelled(flat.spec), flat.leaves, strict=True)
    flags = [flag for flag, leaf in per_leaf if isinstance(leaf, torch.Tensor)]
    taken: dict[int, int] = {}
    if any(flags):

        def goes(at: int, source: int) -> bool:
            # A whole argument that is one tensor has no keys to go by: then the shape has to be the same.
            return outputs[at].shape is not None and (source in keyed or _fits(outputs[at], inputs[source]))

        def score(found: dict[int, int]) -> Any:
            # Where two parts of what is returned look alike, the one that varies just where labels are.
            fitting = [(at, source) for at, source in found.items() if _fits(outputs[at], inputs[source])]
            return len(fitting), sum(outputs[at].varying == flags[source] for at, source in fitting), len(found)

        arguments = _arguments(flat, roles)
        keyed = {source for argument in arguments for path, source in argument.items() if path}
        # State first: what a batch happens to be called must not take a place from it.
        wanted = sorted(arguments, key=lambda leaves: any(inputs[s].role == "batch" for s in leaves.values()))
        taken = _paired(_plain_paths(out_spec), wanted, goes, score)
    made = labels.labelled(out_spec)
    return [
        replace(output, labelled=True)
        if output.node is not None and (made[at] or (at in taken and flags[taken[at]]))
        else output
        for at, output in enumerate(outputs)
    ]


def sharded_sources(
    outputs: Sequence[Output], out_spec: pytree.Spec, inputs: Sequence[Input], flat: Flat, roles: Roles
) -> list[int | None]:
    """For each output the sharded input that it is the new value of, if there is one.

    Args:
        outputs: of whole shapes, as the inputs.
        out_spec: their structure.
        inputs: of the step.
        flat: its arguments.
        roles: what each argument is.
    """

    def goes(at: int, source: int) -> bool:
        output = outputs[at]
        # Of what differs from rank to rank there are no parts.
        return output.node is not None and not output.varying and _fits(output, inputs[source])

    taken: dict[int, int] = {}
    if any(item.part is not None for item in inputs):
        taken = _paired(_plain_paths(out_spec), _arguments(flat, roles), goes, lambda found: len(found))
    found = [taken.get(at) for at in range(len(outputs))]
    return [None if source is None or inputs[source].part is None else source for source in found]


def _arguments(flat: Flat, roles: Roles) -> list[dict[_Path, int]]:
    """For each argument its tensors: key path without labels, and index among the inputs."""
    found: list[dict[_Path, int]] = [{} for _ in range(len(roles.names) - len(roles.static))]
    index = -1
    for path, leaf in zip(_plain_paths(flat.spec), flat.leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            index += 1
            found[path[0]][path[1:]] = index
    return found


def _plain_paths(spec: pytree.Spec) -> list[_Path]:
    """The key path of each leaf as its user knows it."""
    return [tuple(entry.entry for entry in accessor if not _is_unseen(entry)) for accessor in spec.accessors()]


def _is_unseen(entry: Any) -> bool:
    """Whether an entry of a key path is one that users do not write: into a label, or into a sharded leaf."""
    return entry.type is labels.PerRank or is_shard(entry) or is_hidden(entry)


def _paired(
    out_paths: Sequence[_Path],
    wanted: Iterable[dict[_Path, int]],
    goes: Callable[[int, int], bool],
    score: Callable[[dict[int, int]], Any],
) -> dict[int, int]:
    """Pair outputs with inputs, argument by argument: with the root of the outputs or its child, whichever fits
    best."""
    below: dict[_Path, list[int]] = {(): list(range(len(out_paths)))}
    for at, path in enumerate(out_paths):
        if path:
            below.setdefault(path[:1], []).append(at)
    taken: dict[int, int] = {}
    for argument in wanted:
        best: dict[int, int] = {}
        for prefix, members in below.items():
            found = {}
            for at in members:
                source = argument.get(out_paths[at][len(prefix) :])
                if source is not None and at not in taken and goes(at, source):
                    found[at] = source
            if found and (not best or score(found) > score(best)):
                best = found
        taken.update(best)
    return taken


def _fits(output: Output, item: Input) -> bool:
    return output.shape == item.shape and output.dtype == item.dtype
