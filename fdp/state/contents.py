"""The names of a checkpoint's entries, and whether they fit the state that it is loaded into."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fdp import pytree
from fdp.distributed.group import Group
from fdp.errors import ArgumentError, build_message, first_line
from fdp.state.containers import Container
from fdp.state.index import INDEX, read_index
from fdp.state.replicate import NO_MARK, mark_of
from fdp.state.storage import read_plain

_OWN = re.compile(r"rank (\d+) of (\d+): (.*)", re.DOTALL)
"""The name of a labelled leaf in a checkpoint. Other leaves of the state are called state[...]."""


def names_of(spec: pytree.Spec, containers: Sequence[Container], ranks: Group) -> list[str]:
    """The names of a state's leaves in a checkpoint, given its structure and the container of each."""
    return [
        f"rank {ranks.rank} of {ranks.size}: {name}" if container.role == "per rank" else name
        for name, container in zip(pytree.names_in(spec, "state"), containers, strict=True)
    ]


_GENERATOR = re.compile(r"generators of rank (\d+) of (\d+): (\w+)")
"""The name of a generator's state in a checkpoint. Leaves of the state are called state[...]."""


def generator_name(ranks: Group, kind: str) -> str:
    """The name of the state of one of this rank's generators in a checkpoint."""
    return f"generators of rank {ranks.rank} of {ranks.size}: {kind}"


def states_of_generators(named: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The states of generators by kind, from loaded tensors."""
    return {match[3]: named[match[0]] for match in filter(None, map(_GENERATOR.fullmatch, named))}


def generator_templates(ranks: Group, path: str | os.PathLike[str], saved: dict[str, Any]) -> dict[str, torch.Tensor]:
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
    names = [name for name in saved if _GENERATOR.fullmatch(name) and _kept_with(name) == _own_fingerprints(ranks)]
    return {name: _empty(path, saved, name) for name in names}


def first_generator(path: str | os.PathLike[str], saved: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A tensor to load the state of rank 0's generator on the CPU into, from a checkpoint of any number of ranks."""
    found = filter(None, map(_GENERATOR.fullmatch, saved))
    name = next((match[0] for match in found if match[1] == "0" and match[3] == "cpu"), "generators of rank 0")
    return {name: _empty(path, saved, name)}


def _empty(path: str | os.PathLike[str], saved: dict[str, Any], name: str) -> torch.Tensor:
    """A tensor to load an entry into that `save` adds to the state."""
    kept = saved.get(name)
    dtype = getattr(getattr(kept, "properties", None), "dtype", None)
    if kept is None or dtype not in (torch.uint8, torch.int64, torch.float64) or len(kept.size) > 1:
        raise ArgumentError(
            build_message(
                f"the checkpoint in {os.fspath(path)!r} does not hold {name!r} in the form that fdp.save writes.",
                remedy="load another checkpoint, and find out what wrote this one.",
            )
        )
    return torch.empty(kept.size, dtype=dtype, device="cpu")


_FINGERPRINTS = "fingerprints"
_OWN_FINGERPRINTS = re.compile(r"fingerprints of rank (\d+) of (\d+)")
"""The names of numbers that show whether tensors are what was saved; in the order of the tensors' names."""


def fingerprints(marks: dict[str, int]) -> dict[str, torch.Tensor]:
    """The fingerprints of tensors that a checkpoint stores.

    Args:
        marks: a number for the bits of each tensor, by its name in a checkpoint.

    Returns:
        By their names in a checkpoint, the numbers of what all ranks hold, and those of this rank's own.
    """
    numbers: dict[str, list[int]] = {}
    for name in sorted(marks):
        numbers.setdefault(_kept_with(name), []).append(marks[name])
    return {kind: torch.tensor(found, dtype=torch.int64, device="cpu") for kind, found in numbers.items()}


def _kept_with(name: str) -> str:
    """The name under which the fingerprint of a tensor is stored."""
    match = _OWN.fullmatch(name) or _GENERATOR.fullmatch(name)
    return f"{_FINGERPRINTS} of rank {match[1]} of {match[2]}" if match else _FINGERPRINTS


def _own_fingerprints(ranks: Group) -> str:
    return f"{_FINGERPRINTS} of rank {ranks.rank} of {ranks.size}"


def fingerprints_of(path: str | os.PathLike[str], saved: dict[str, Any], ranks: Group) -> dict[str, torch.Tensor]:
    """Tensors to load those fingerprints into; none for a checkpoint without them, as earlier versions wrote."""
    wanted = (_FINGERPRINTS, _own_fingerprints(ranks))
    return {name: _empty(path, saved, name) for name in wanted if name in saved}


def changed(named: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    """The leaves that do not hold the bits that were saved.

    Args:
        named: what was loaded, fingerprints included.
        saved: what the checkpoint holds.

    Returns:
        A line for each tensor that has changed, and is not the same where it was loaded.
    """
    lines = []
    for kind in filter(_is_fingerprints, named):
        names = sorted(name for name, kept in saved.items() if hasattr(kept, "size") and _has_a_number(name, kind))
        kept = named[kind].tolist()
        if named[kind].dtype != torch.int64 or not isinstance(kept, list) or len(kept) != len(names):
            lines.append(f"{kind}: not those of what the checkpoint holds")
            continue
        for name, number in zip(names, kept, strict=True):
            found = mark_of(named[name]) if name in named else number
            # Of what is, or was, sharded no rank knows all bits. Its pieces are looked at when they are read.
            if found != number and NO_MARK not in (found, number):
                lines.append(f"{key_path_of(name)}: not the bits that were saved")
    return lines


def _has_a_number(name: str, kind: str) -> bool:
    """Whether a leaf has a stored fingerprint."""
    return not _is_fingerprints(name) and _kept_with(name) == kind


def _is_fingerprints(name: str) -> bool:
    return name == _FINGERPRINTS or _OWN_FINGERPRINTS.fullmatch(name) is not None


def _is_leaf(name: str) -> bool:
    """Whether something in a checkpoint is a leaf of the state."""
    return not _GENERATOR.fullmatch(name) and not _is_fingerprints(name)


def ranks_that_saved_generators(path: Path) -> int | None:
    """The number of ranks whose generators a checkpoint holds; None if it holds none, or cannot be read."""
    try:
        names = read_index(path / INDEX).state_dict_metadata
    except (ArgumentError, OSError):
        return None
    return max((int(match[2]) for match in map(_GENERATOR.fullmatch, names) if match), default=None)


def check_structure(path: str | os.PathLike[str], saved: dict[str, Any], names: list[str], leaves: list[Any]) -> None:
    """Refuse another structure than that of `like`. It does not check which ranks labelled leaves belong to."""
    at = {key_path_of(name): (name, _OWN.fullmatch(name) is not None) for name in saved if _is_leaf(name)}
    found, offenders = {key_path_of(name): saved.get(name) for name in names}, []
    for name in names:
        key, own = key_path_of(name), _OWN.fullmatch(name) is not None
        if key not in at:
            offenders.append(f"{key}: not in the checkpoint")
        elif own != at[key][1]:
            sides = ("labelled", "not labelled") if own else ("not labelled", "labelled")
            offenders.append(f"{key}: {sides[1]} in the checkpoint, {sides[0]} in `like`")
            found[key] = saved[at[key][0]]
    offenders += [f"{key}: in the checkpoint only" for key in at if key not in found]
    for name, leaf in zip(names, leaves, strict=True):
        kept = found[key_path_of(name)]
        if kept is None:
            continue
        before = f"{list(kept.size)} {kept.properties.dtype}" if hasattr(kept, "size") else "a Python value"
        now = f"{list(leaf.shape)} {leaf.dtype}" if isinstance(leaf, torch.Tensor) else "a Python value"
        if before != now:
            offenders.append(f"{key_path_of(name)}: {before} in the checkpoint, {now} in `like`")
    if offenders:
        raise ArgumentError(
            build_message(
                f"the checkpoint in {os.fspath(path)!r} does not have the structure of `like`.",
                offenders,
                remedy="build `like` by the code that built the state which was saved.",
            )
        )


def key_path_of(name: str) -> str:
    """The key path of a leaf, from its name in a checkpoint; also of a line that begins with its name."""
    match = _OWN.fullmatch(name)
    return match[3] if match else name


def refuse_unreadable(caller: str, named: dict[str, Any]) -> None:
    """Refuse values that `load` would refuse: an error at saving is early enough to act on.

    Args:
        caller: the function that the user called, for messages.
        named: the values, by their names in the checkpoint.

    Raises:
        ArgumentError: names the first of them.
    """
    for name, leaf in named.items():
        if isinstance(leaf, torch.Tensor):
            if leaf.layout != torch.strided or leaf.is_nested or leaf.is_meta:
                raise ArgumentError(
                    build_message(
                        f"{caller} was given {name}, which is no dense tensor, and a checkpoint holds no other.",
                        remedy="save the dense tensors that it is made of, such as `x.indices()` and `x.values()`.",
                    )
                )
            continue
        if type(leaf) in (bool, int, float, complex, str, type(None)):
            continue
        written = io.BytesIO()
        try:
            torch.save(leaf, written)
        except Exception as error:  # whatever its class raises where it cannot be pickled
            raise ArgumentError(
                build_message(
                    f"{caller} was given {name}, a {type(leaf).__name__}, which cannot be written to a file.",
                    [f"{type(error).__name__}: {first_line(error)}"],
                    remedy="leave it out of the state, and make it again by the code that loads.",
                )
            ) from error
        written.seek(0)
        read_plain(name, written, leaf)


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
