"""Which output is the new value of which input: the one that has the input's key path, from the root or a child of it.

Two decisions follow: the output that is the new value of a donated input may take its memory, and the new value of an
input that lies in a container comes out in one as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fdp import pytree
from fdp.state.containers import PLAIN, Container, places_in
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


def assign_containers(
    outputs: Sequence[Output], out_spec: pytree.Spec, inputs: Sequence[Input], flat: Flat, roles: Roles
) -> tuple[list[Output], list[int | None]]:
    """For each output, its container: that of the input that it is the new value of, or one that the step itself made.

    Args:
        outputs: of whole shapes, as the inputs.
        out_spec: their structure.
        inputs: of the step.
        flat: its arguments.
        roles: what each argument is.

    Returns:
        The outputs with their containers. And for each the input that it is the new value of, if that lies in a
        container and the step made none. If that is sharded, the output is still whole, and in no container.
    """
    found: list[Output] = []
    sources: list[int | None] = []
    taken = _in_place_of_containers(outputs, out_spec, inputs, flat, roles)
    for at, (output, made) in enumerate(zip(outputs, places_in(out_spec), strict=True)):
        source = taken.get(at) if output.node is not None and made.container is PLAIN else None
        container = made.container if source is None else inputs[source].container
        is_whole = output.node is not None and container.role != "part"
        found.append(replace(output, container=container) if is_whole else output)
        sources.append(source)
    return found, sources


def _in_place_of_containers(
    outputs: Sequence[Output], out_spec: pytree.Spec, inputs: Sequence[Input], flat: Flat, roles: Roles
) -> dict[int, int]:
    """The outputs that are new values of inputs in containers, each with its input."""
    arguments, paths = _arguments(flat, roles), _plain_paths(out_spec)
    taken: dict[int, int] = {}
    for container in dict.fromkeys(item.container for item in inputs if item.container is not PLAIN):
        if container.role == "per rank":
            found = _paired_with_varying(paths, arguments, outputs, inputs, container)
        else:
            found = _paired_with_equal(paths, arguments, outputs, inputs)
        for at, source in found.items():
            if inputs[source].container is container:
                taken.setdefault(at, source)
    return taken


def _paired_with_varying(
    paths: Sequence[_Path],
    arguments: Sequence[dict[_Path, int]],
    outputs: Sequence[Output],
    inputs: Sequence[Input],
    container: Container,
) -> dict[int, int]:
    """Pair outputs with inputs, for a container of values that are each rank's own."""
    keyed = {source for argument in arguments for path, source in argument.items() if path}

    def goes(at: int, source: int) -> bool:
        # A whole argument that is one tensor has no keys to go by: then the shape has to be the same.
        return outputs[at].shape is not None and (source in keyed or _fits(outputs[at], inputs[source]))

    def score(found: dict[int, int]) -> Any:
        # Where two parts of what is returned look alike, the one that varies just where the containers are.
        fitting = [(at, source) for at, source in found.items() if _fits(outputs[at], inputs[source])]
        alike = sum(outputs[at].varying == (inputs[source].container is container) for at, source in fitting)
        return len(fitting), alike, len(found)

    # State first: what a batch happens to be called must not take a place from it.
    wanted = sorted(arguments, key=lambda leaves: any(inputs[s].role == "batch" for s in leaves.values()))
    return _paired(paths, wanted, goes, score)


def _paired_with_equal(
    paths: Sequence[_Path], arguments: Sequence[dict[_Path, int]], outputs: Sequence[Output], inputs: Sequence[Input]
) -> dict[int, int]:
    """Pair outputs with inputs, for a container of values that are, as a whole, the same on every rank."""

    def goes(at: int, source: int) -> bool:
        output = outputs[at]
        return output.node is not None and not output.varying and _fits(output, inputs[source])

    return _paired(paths, arguments, goes, lambda found: len(found))


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
    """Whether an entry of a key path is one that users do not write."""
    return isinstance(entry, pytree.Unseen) or is_hidden(entry)


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
