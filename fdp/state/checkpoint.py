"""Save a state to disk and load it again, through torch.distributed.checkpoint; the structure is checked on load.

The state of each rank's random number generators can go with it, so that a run continues as if it had not stopped.
"""

from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from fdp import pytree
from fdp.context.axis import refuse_inside
from fdp.distributed.desynchronised import refuse_desynchronised
from fdp.distributed.exchange import announce_failure, come_together
from fdp.distributed.group import Group, Ranks, resolve_group
from fdp.errors import ArgumentError, FdpError, ReplicationError, build_message
from fdp.pytree import Tree
from fdp.random.generators import generator_states, set_generator_states
from fdp.state.index import INDEX
from fdp.state.labels import labelled
from fdp.state.replicate import differing
from fdp.state.storage import LoadPlanner, Reader, Writer, read_plain


def save(path: str | os.PathLike[str], state: Tree, group: Ranks = None, *, random: bool = False) -> None:
    """Write a state to a directory; every rank of the group takes part.

    What is replicated is compared between ranks first, bit for bit, and written once. Of leaves labelled with
    `fdp.per_rank` each rank writes its own.

    Args:
        path: the directory, on storage that all ranks see; made if it is not there. A checkpoint that it held is
            replaced at once, when this one is whole: whatever cuts a save short, the last one is there. Until then
            both take their space on the disk. Other files `*.distcp` that it held are deleted. One job at a time may
            save to a directory.
        state: pytree of tensors, labelled or equal on every rank, and plain Python values, equal on every rank.
        group: as for `data_parallel`.
        random: whether to save the state of each rank's generators as well: torch's on the CPU and on the current
            accelerator, Python's, and NumPy's if it is imported. With them a run continues bit for bit.

    Raises:
        ArgumentError: a leaf is a value of a class that `load` would not read, such as a function; names it.
        ReplicationError: names, on every rank, each leaf that should be equal and is not, and the ranks; nothing is
            written, and what the directory held stays.
        AgreementError: another rank failed before it could write, or did not come; ranks hold states of different
            structure, shapes or dtypes.
        FdpError: the disk is full, or the like; on every rank.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(folder + "/step-1", {"w": torch.ones(2), "epoch": 3})
        ...     load(folder + "/step-1", like={"w": torch.zeros(2), "epoch": 0})
        {'w': tensor([1., 1.]), 'epoch': 3}

    References:
        torch.distributed.checkpoint.
    """
    refuse_inside("save")
    ranks = resolve_group(group)
    refuse_desynchronised(ranks, "fdp.save")
    with _ready_on_all_ranks(ranks, "fdp.save"):
        leaves, spec = pytree.flatten(state)
        named = {
            name: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
            for name, leaf in zip(_names_of(spec, ranks), leaves, strict=True)
        }
        _refuse_unreadable(named)
        if random:
            named.update({_generator_name(ranks, kind): value for kind, value in generator_states().items()})
    _refuse_differing(differing("fdp.save", "state", leaves, spec, ranks))
    writer, written = Writer(Path(path)), False
    try:
        with _as_errors_of_fdp("save"):
            dcp.save(
                named, storage_writer=writer, process_group=ranks.process_group, no_dist=ranks.process_group is None
            )
        written = True
    finally:
        if ranks.rank == 0:
            writer.settle(written)


def load(path: str | os.PathLike[str], like: Tree, group: Ranks = None, *, random: bool = False) -> Tree:
    """Read a state that `save` wrote; every rank of the group gets what is replicated, and its own of labelled leaves.

    Args:
        path: the directory.
        like: a state of the same structure and with the same labels; its tensors give shapes, dtypes and devices, and
            are not changed.
        group: as for `data_parallel`; it may have another size than the one that saved, if no leaf is labelled.
        random: whether to set this rank's generators to the states that it saved with `random=True`.

    Returns:
        A tree of the structure of `like`, with new tensors, bit for bit as they were saved.

    Raises:
        ArgumentError: there is no checkpoint at the path, or it holds another structure; names each leaf that is
            missing, in excess, labelled on one side only, or of another shape or dtype. It holds labelled leaves of
            another number of ranks; names each of them. With `random=True`: it holds no states of generators, or
            those of another number of ranks. It was not written by `save`, or is damaged: nothing of a checkpoint is
            run, whoever wrote it.
        AgreementError: another rank was refused like that, or did not come.
        FdpError: the disk cannot be read; on every rank.

    Example:
        See `save`.
    """
    refuse_inside("load")
    ranks = resolve_group(group)
    refuse_desynchronised(ranks, "fdp.load")
    leaves, spec = pytree.flatten(like)
    names = _names_of(spec, ranks)
    reader = Reader(Path(path))
    with _ready_on_all_ranks(ranks, "fdp.load"):
        if not (Path(path) / INDEX).is_file():
            raise ArgumentError(
                build_message(
                    f"fdp.load found no checkpoint in {os.fspath(path)!r}.",
                    remedy="pass the directory that was passed to fdp.save; a first save, cut short, leaves none.",
                )
            )
        saved = reader.read_metadata().state_dict_metadata
        _check_structure(os.fspath(path), saved, names, leaves)
        _check_owners(os.fspath(path), saved, ranks)
        generators = _generators_of(ranks, os.fspath(path), saved) if random else {}
        named = {
            name: torch.empty_like(leaf, requires_grad=False) if isinstance(leaf, torch.Tensor) else leaf
            for name, leaf in zip(names, leaves, strict=True)
        }
        named.update(generators)
    with _as_errors_of_fdp("load"):
        dcp.load(
            named,
            storage_reader=reader,
            planner=LoadPlanner({name: leaf for name, leaf in named.items() if not isinstance(leaf, torch.Tensor)}),
            process_group=ranks.process_group,
            no_dist=ranks.process_group is None,
        )
    if random:
        set_generator_states({kind: named[_generator_name(ranks, kind)] for kind in _kinds(ranks, saved)})
    return pytree.unflatten(spec, [named[name] for name in names])


_OWN = re.compile(r"rank (\d+) of (\d+): (.*)", re.DOTALL)
"""The name of a labelled leaf in a checkpoint. Other leaves of the state are called state[...]."""


def _names_of(spec: pytree.Spec, ranks: Group) -> list[str]:
    """What the leaves of a state are called in a checkpoint."""
    return [
        f"rank {ranks.rank} of {ranks.size}: {name}" if own else name
        for name, own in zip(pytree.names_in(spec, "state"), labelled(spec), strict=True)
    ]


def _refuse_unreadable(named: dict[str, Any]) -> None:
    """Refuse values that `load` would refuse: whoever saves them should know, and not whoever wants them back."""
    for name, leaf in named.items():
        if isinstance(leaf, torch.Tensor) or type(leaf) in (bool, int, float, complex, str, type(None)):
            continue
        written = io.BytesIO()
        torch.save(leaf, written)
        written.seek(0)
        read_plain(name, written, leaf)


def _refuse_differing(offenders: list[str]) -> None:
    if offenders:
        raise ReplicationError(
            build_message(
                "fdp.save was given a state that is not the same on every rank. Nothing was written. These leaves do "
                "not hold the bits that they hold on rank 0:",
                offenders,
                remedy="label what is each rank's own: fdp.per_rank(leaf), outside of a step. For the rest, start from "
                "fdp.replicate(state), and let every update be a function of replicated values.",
            )
        )


_GENERATOR = re.compile(r"generators of rank (\d+) of (\d+): (\w+)")
"""The name of a generator's state in a checkpoint. Leaves of the state are called state[...]."""


def _generator_name(ranks: Group, kind: str) -> str:
    return f"generators of rank {ranks.rank} of {ranks.size}: {kind}"


def _kinds(ranks: Group, saved: dict[str, Any]) -> list[str]:
    """Which generators' states a checkpoint holds for this rank."""
    found = map(_GENERATOR.fullmatch, saved)
    return [match[3] for match in found if match and (int(match[1]), int(match[2])) == (ranks.rank, ranks.size)]


def _generators_of(ranks: Group, path: str, saved: dict[str, Any]) -> dict[str, torch.Tensor]:
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
                f"fdp.load(random=True) was to set the state of generators; the checkpoint in {path!r} holds {what}.",
                remedy="load it with random=False, and call fdp.seed with a number that was not used before.",
            )
        )
    empty: dict[str, torch.Tensor] = {}
    for name in (_generator_name(ranks, kind) for kind in _kinds(ranks, saved)):
        empty[name] = torch.empty(saved[name].size, dtype=saved[name].properties.dtype)
    return empty


@contextmanager
def _ready_on_all_ranks(ranks: Group, caller: str) -> Iterator[None]:
    """What a rank does before messages are sent: where one fails, no other waits for it in a message."""
    try:
        yield
    except Exception as error:
        announce_failure(ranks, error)
        raise
    come_together(ranks, caller, "was called")


@contextmanager
def _as_errors_of_fdp(name: str) -> Iterator[None]:
    """Failures as FdpError (the library's own is no Exception), and no warnings about what is meant here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
        try:
            yield
        except dcp.CheckpointException as error:
            for cause, *_ in error.failures.values():
                if isinstance(cause, FdpError):
                    raise cause from error
            causes = [f"rank {rank}: {cause[0]!r}" for rank, cause in error.failures.items()]
            raise FdpError(
                build_message(
                    f"fdp.{name} failed.", causes, remedy="look at the disk and its permissions, then call it again."
                )
            ) from error


def _check_structure(path: str, saved: dict[str, Any], names: list[str], leaves: list[Any]) -> None:
    """Refuse another structure than that of `like`. Which ranks labelled leaves belong to is not looked at."""
    at = {_plain(name): (name, _OWN.fullmatch(name) is not None) for name in saved if not _GENERATOR.fullmatch(name)}
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
                f"the checkpoint in {path!r} does not have the structure of `like`.",
                offenders,
                remedy="build `like` by the code that built the state which was saved.",
            )
        )


def _plain(name: str) -> str:
    """The key path of a leaf, from its name in a checkpoint."""
    match = _OWN.fullmatch(name)
    return match[3] if match else name


def _check_owners(path: str, saved: dict[str, Any], ranks: Group) -> None:
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
                f"the checkpoint in {path!r} holds labelled leaves of each of {size} ranks, and this is one of "
                f"{ranks.size}. fdp.load cannot tell what each rank's own is to become.",
                [f"{name}: saved by {size} ranks" for name, size in sizes.items()],
                remedy=f"load it on {size} ranks. To go on with another number, save the state there without these "
                "leaves, load that, and label new ones with fdp.per_rank.",
            )
        )
