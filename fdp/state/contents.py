"""What a checkpoint calls what it holds, and whether that is what a state to load it into needs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch

from fdp import pytree
from fdp.distributed.group import Group
from fdp.errors import ArgumentError, build_message
from fdp.state.index import INDEX, read_index
from fdp.state.labels import labelled
from fdp.state.replicate import mark_of

_OWN = re.compile(r"rank (\d+) of (\d+): (.*)", re.DOTALL)
"""The name of a labelled leaf in a checkpoint. Other leaves of the state are called state[...]."""


def names_of(spec: pytree.Spec, ranks: Group) -> list[str]:
    """What the leaves of a state are called in a checkpoint."""
    return [
        f"rank {ranks.rank} of {ranks.size}: {name}" if own else name
        for name, own in zip(pytree.names_in(spec, "state"), labelled(spec), strict=True)
    ]


_GENERATOR = re.compile(r"generators of rank (\d+) of (\d+): (\w+)")
"""The name of a generator's state in a checkpoint. Leaves of the state are called state[...]."""


def generator_name(ranks: Group, kind: str) -> str:
    """What the state of one of this rank's generators is called in a checkpoint."""
    return f"generators of rank {ranks.rank} of {ranks.size}: {kind}"


def kinds_of_generators(ranks: Group, saved: dict[str, Any]) -> list[str]:
    """Which generators' states a checkpoint holds for this rank."""
    found = map(_GENERATOR.fullmatch, saved)
    return [match[3] for match in found if match and (int(match[1]), int(match[2])) == (ranks.rank, ranks.size)]


def generators_of(ranks: Group, path: str | os.PathLike[str], saved: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors to load the states of this rank's generators into."""
    found = {(int(match[1]), int(match[2])) for match in map(_GENERATOR.fullmatch, saved) if match}
    # Of all ranks, not of this one alone: what is refused is refused on every rank, and none waits for another.
    if found != {(rank, ranks.size) for rank in range(ranks.size)}:
        what = "none"
        if found:
            size = max(size for _, size in found)
            some = "" if len(found) == size else f"only {len(found)} of "
            what = f"that of {some}{size} ranks, and this is one of {ranks.size}"
        raise ArgumentError(
            build_message(
                f"fdp.load(random=True) was to set the state of generators; the checkpoint in {os.fspath(path)!r} "
                f"holds {what}.",
                remedy="load it with random=False, and call fdp.seed with a number that was not used before.",
            )
        )
    return {
        name: _empty(saved[name])
        for name in (generator_name(ranks, kind) for kind in kinds_of_generators(ranks, saved))
    }


def first_generator(saved: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A tensor to load the state of rank 0's generator on the CPU into, from a checkpoint of any number of ranks."""
    found = filter(None, map(_GENERATOR.fullmatch, saved))
    name = next(match[0] for match in found if match[1] == "0" and match[3] == "cpu")
    return {name: _empty(saved[name])}


def _empty(kept: Any) -> torch.Tensor:
    """A tensor to load what a checkpoint holds into."""
    return torch.empty(kept.size, dtype=kept.properties.dtype)


_FINGERPRINTS = "fingerprints"
_OWN_FINGERPRINTS = re.compile(r"fingerprints of rank (\d+) of (\d+)")
"""The names of numbers that show whether tensors are what was saved; in the order of the tensors' names."""


def fingerprints(marks: dict[str, int], ranks: Group) -> dict[str, torch.Tensor]:
    """What is kept of the bits of tensors.

    Args:
        marks: a number for the bits of each tensor, by its name in a checkpoint.
        ranks: the ranks.

    Returns:
        By their names in a checkpoint, the numbers of what all ranks hold, and those of this rank's own.
    """
    numbers: dict[str, list[int]] = {}
    for name in sorted(marks):
        numbers.setdefault(_fingerprints_with(name, ranks), []).append(marks[name])
    return {kind: torch.tensor(found, dtype=torch.int64, device="cpu") for kind, found in numbers.items()}


def _fingerprints_with(name: str, ranks: Group) -> str:
    """Where the number of a tensor is kept."""
    return f"{_FINGERPRINTS} of rank {ranks.rank} of {ranks.size}" if _OWN.fullmatch(name) else _FINGERPRINTS


def fingerprints_of(path: str | os.PathLike[str], saved: dict[str, Any], ranks: Group) -> dict[str, torch.Tensor]:
    """Tensors to load those numbers into; none for a checkpoint without them, as earlier versions wrote them."""
    wanted = (_FINGERPRINTS, f"{_FINGERPRINTS} of rank {ranks.rank} of {ranks.size}")
    return {name: _empty(saved[name]) for name in wanted if name in saved}


def refuse_changed(path: str | os.PathLike[str], named: dict[str, Any], ranks: Group) -> None:
    """Refuse tensors that are not what was saved.

    Args:
        path: of the checkpoint, for messages.
        named: what was loaded, fingerprints included.
        ranks: the ranks.

    Raises:
        ArgumentError: names them.
    """
    marks = {n: mark_of(leaf) for n, leaf in named.items() if _is_leaf(n) and isinstance(leaf, torch.Tensor)}
    offenders = []
    for kind, found in fingerprints(marks, ranks).items():
        names = [name for name in sorted(marks) if _fingerprints_with(name, ranks) == kind]
        if kind in named:
            kept = named[kind]
            same = (found == kept).tolist() if found.shape == kept.shape else [False] * len(names)
            changed = [name for name, is_same in zip(names, same, strict=True) if not is_same]
            offenders += [f"{_plain(name)}: not the bits that were saved" for name in changed]
    if offenders:
        raise ArgumentError(
            build_message(
                f"the checkpoint in {os.fspath(path)!r} has been changed since it was saved, on its disk or on the way "
                "from there.",
                offenders,
                remedy="load another checkpoint, and have the disk looked at.",
            )
        )


def _is_leaf(name: str) -> bool:
    """Whether something in a checkpoint is a leaf of the state."""
    return not _GENERATOR.fullmatch(name) and name != _FINGERPRINTS and not _OWN_FINGERPRINTS.fullmatch(name)


def ranks_that_saved_generators(path: Path) -> int | None:
    """How many ranks' generators a checkpoint holds; None if it holds none, or cannot be read."""
    try:
        names = read_index(path / INDEX).state_dict_metadata
    except (ArgumentError, OSError):
        return None
    return max((int(match[2]) for match in map(_GENERATOR.fullmatch, names) if match), default=None)


def check_structure(path: str | os.PathLike[str], saved: dict[str, Any], names: list[str], leaves: list[Any]) -> None:
    """Refuse another structure than that of `like`. Which ranks labelled leaves belong to is not looked at."""
    at = {_plain(name): (name, _OWN.fullmatch(name) is not None) for name in saved if _is_leaf(name)}
    found, offenders = {_plain(name): saved.get(name) for name in names}, []
    for name in names:
        plain, own = _plain(name), _OWN.fullmatch(name) is not None
        if plain not in at:
            offenders.append(f"{plain}: not in the checkpoint")
        elif own != at[plain][1]:
            sides = ("labelled", "not labelled") if own else ("not labelled", "labelled")
            offenders.append(f"{plain}: {sides[1]} in the checkpoint, {sides[0]} in `like`")
            found[plain] = saved[at[plain][0]]
    offenders += [f"{plain}: in the checkpoint only" for plain in at if plain not in found]
    for name, leaf in zip(names, leaves, strict=True):
        kept = found[_plain(name)]
        if kept is None:
            continue
        before = f"{list(kept.size)} {kept.properties.dtype}" if hasattr(kept, "size") else "a Python value"
        now = f"{list(leaf.shape)} {leaf.dtype}" if isinstance(leaf, torch.Tensor) else "a Python value"
        if before != now:
            offenders.append(f"{_plain(name)}: {before} in the checkpoint, {now} in `like`")
    if offenders:
        raise ArgumentError(
            build_message(
                f"the checkpoint in {os.fspath(path)!r} does not have the structure of `like`.",
                offenders,
                remedy="build `like` by the code that built the state which was saved.",
            )
        )


def _plain(name: str) -> str:
    """The key path of a leaf, from its name in a checkpoint."""
    match = _OWN.fullmatch(name)
    return match[3] if match else name


def check_owners(path: str | os.PathLike[str], saved: dict[str, Any], ranks: Group) -> None:
    """Refuse labelled leaves that other ranks than these have saved."""
    owners: dict[str, set[tuple[int, int]]] = {}
    for match in filter(None, map(_OWN.fullmatch, saved)):
        owners.setdefault(match[3], set()).add((int(match[1]), int(match[2])))
    # Of all ranks, not of this one alone: what is refused is refused on every rank, and none waits for another.
    wanted = {(rank, ranks.size) for rank in range(ranks.size)}
    sizes = {name: max(size for _, size in found) for name, found in owners.items() if found != wanted}
    if sizes:
        size = max(sizes.values())
        raise ArgumentError(
            build_message(
                f"the checkpoint in {os.fspath(path)!r} holds labelled leaves of each of {size} ranks, and this is one "
                f"of {ranks.size}. fdp.load cannot tell what each rank's own is to become.",
                [f"{name}: saved by {size} ranks" for name, size in sizes.items()],
                remedy=f"load it on {size} ranks. To go on with another number, save the state there without these "
                "leaves, load that, and label new ones with fdp.per_rank.",
            )
        )
