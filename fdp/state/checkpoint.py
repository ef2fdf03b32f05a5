"""Save a state to disk and load it again, through torch.distributed.checkpoint; the structure is checked on load.

The state of each rank's random number generators can go with it, so that a run continues as if it had not stopped.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from fdp import pytree
from fdp.context.axis import refuse_inside
from fdp.distributed.comparable import comparable
from fdp.distributed.desynchronised import mark_desynchronised, refuse_desynchronised
from fdp.distributed.exchange import announce_failure, come_together, tell_all
from fdp.distributed.fingerprint import fingerprint
from fdp.distributed.group import Group, Ranks, is_destroyed, resolve_group
from fdp.distributed.liveness.elsewhere import Elsewhere
from fdp.distributed.liveness.patience import explain
from fdp.errors import (
    AgreementError,
    ArgumentError,
    FdpError,
    PeerError,
    ReplicationError,
    build_message,
    first_line,
    ranks_text,
)
from fdp.pytree import Tree
from fdp.random.generators import generator_states, seed, set_generator_states
from fdp.state.containers import containers_of
from fdp.state.contents import (
    changed,
    check_owners,
    check_structure,
    fingerprints,
    fingerprints_of,
    first_generator,
    generator_name,
    generator_templates,
    key_path_of,
    names_of,
    refuse_unreadable,
    states_of_generators,
)
from fdp.state.index import INDEX
from fdp.state.pace import Pace
from fdp.state.pieces import ChangedCheckpoint, refuse_changed
from fdp.state.replicate import differing, mark_of, plain_tensor
from fdp.state.storage import CheckpointWriter, LoadPlanner, Reader, directory_of, process_group_destroyed
from fdp.state.unwritten import NotWritten, not_written
from fdp.tracebacks import hiding_frames


@hiding_frames
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
        ArgumentError: a leaf is a value of a class that `load` would not read, such as a function; names it. Or `path`
            is no path: it comes first, other than in `torch.save`.
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
    directory = directory_of("fdp.save", path, ranks)
    named = prepared("fdp.save", state, ranks, random)
    with warnings.catch_warnings():
        ignore_what_is_meant()
        write("fdp.save", directory, named, ranks)


def prepared(caller: str, state: Tree, ranks: Group, random: bool) -> dict[str, Any]:
    """Check that a state may be saved, and name its leaves as a checkpoint does; on all ranks together.

    Args:
        caller: the function that the user called, for messages.
        state: as for `save`.
        ranks: the ranks.
        random: as for `save`.

    Returns:
        This rank's leaves, and the states of its generators.

    Raises:
        ArgumentError, ReplicationError, AgreementError: as for `save`.
    """
    with ready_on_all_ranks(ranks, caller):
        leaves, spec = pytree.flatten(state)
        containers = containers_of(leaves, spec)
        saved = [container.saved(leaf) for leaf, container in zip(leaves, containers, strict=True)]
        named = {
            name: plain_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf
            for name, leaf in zip(names_of(spec, containers, ranks), saved, strict=True)
        }
        refuse_unreadable(caller, named)
        marks = [mark_of(leaf) for leaf in saved]
        at = zip(named, marks, saved, strict=True)
        kept = {name: mark for name, mark, x in at if isinstance(x, torch.Tensor)}
        if random:
            states = {generator_name(ranks, kind): value for kind, value in generator_states().items()}
            kept.update({name: mark_of(value) for name, value in states.items()})
            named.update(states)
        named.update(fingerprints(kept))
    _refuse_differing(caller, differing(caller, "state", leaves, spec, ranks, marks))
    return named


def write(
    caller: str,
    path: Path,
    named: dict[str, Any],
    ranks: Group,
    pace: Pace | None = None,
    among: Any = None,
    what: str = "the checkpoint",
) -> None:
    """Write a checkpoint; every rank takes part.

    Args:
        caller: the function that the user called, for messages.
        path: the directory.
        named: what this rank writes, by the names of `prepared`; what several ranks name is written once.
        ranks: the ranks.
        pace: how fast to write; None for as fast as it goes.
        among: the process group that plans are exchanged on, where it is not that of `ranks`.
        what: what is written, for messages.

    Raises:
        FdpError: the disk is full, or the like; on every rank.
    """
    writer, process_group = CheckpointWriter(path, ranks.size, pace), among or ranks.process_group
    # The library waits for other ranks as long as their process group does.
    saving = Elsewhere(
        lambda: dcp.save(named, storage_writer=writer, process_group=process_group, no_dist=process_group is None),
        caller,
    )
    try:
        with _as_errors_of_fdp(caller, ranks, path, what):
            saving.wait(ranks.process_group, among)
    except BaseException as error:
        if saving.is_running and among is None:
            mark_desynchronised(ranks, f"{caller} was left in the middle by {type(error).__name__}")
        if not isinstance(error, ValueError) or process_group is None or not is_destroyed(process_group):
            raise
        raise process_group_destroyed(path) from error
    finally:
        if ranks.rank == 0 and not saving.is_running:
            writer.settle()


@hiding_frames
def load(path: str | os.PathLike[str], like: Tree, group: Ranks = None, *, random: bool = False) -> Tree:
    """Read a state that `save` wrote; every rank of the group gets the replicated leaves, and its own labelled leaves.

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
        AgreementError: another rank was refused like that, did not come, or reads another checkpoint.
        FdpError: the disk cannot be read; on every rank.

    Example:
        See `save`.
    """
    refuse_inside("load")
    ranks = resolve_group(group)
    refuse_desynchronised(ranks, "fdp.load")
    leaves, spec = pytree.flatten(like)
    containers = containers_of(leaves, spec)
    names = names_of(spec, containers, ranks)
    wanted = [container.saved(leaf) for leaf, container in zip(leaves, containers, strict=True)]
    directory = directory_of("fdp.load", path, ranks)
    reader = Reader(directory)
    with ready_on_all_ranks(ranks, "fdp.load"):
        if not (directory / INDEX).is_file():
            raise ArgumentError(
                build_message(
                    f"fdp.load found no checkpoint in {os.fspath(path)!r}.",
                    remedy="pass the directory that was passed to fdp.save; a first save, cut short, leaves none.",
                )
            )
        saved = reader.read_metadata().state_dict_metadata
        check_structure(path, saved, names, wanted)
        check_owners(path, saved, ranks)
        generators = generator_templates(ranks, path, saved) if random else {}
        named = {
            name: torch.empty_like(leaf, requires_grad=False) if isinstance(leaf, torch.Tensor) else leaf
            for name, leaf in zip(names, wanted, strict=True)
        }
        named.update(generators)
        named.update(fingerprints_of(path, saved, ranks))
        index = hashlib.sha256(comparable(reader.read_metadata()).encode()).hexdigest()
    _refuse_other_checkpoints(path, tell_all(ranks, {"index": index}, "fdp.load", "was called"))
    planner = LoadPlanner({name: leaf for name, leaf in named.items() if not isinstance(leaf, torch.Tensor)})
    _read("fdp.load", named, reader, ranks, planner)
    with ready_on_all_ranks(ranks, "fdp.load"):
        lines = changed(named, saved)
    found = tell_all(ranks, {"changed": lines}, "fdp.load", "was called")
    refuse_changed(path, [line for each in found for line in each["changed"]])
    if random:
        with ready_on_all_ranks(ranks, "fdp.load"):
            _set_generators(path, states_of_generators(named))
    found_leaves = zip(containers, leaves, names, strict=True)
    return pytree.unflatten(spec, [container.with_tensor(leaf, named[name]) for container, leaf, name in found_leaves])


def _refuse_other_checkpoints(path: str | os.PathLike[str], told: list[dict[str, Any]]) -> None:
    """Refuse to put a state together from parts of several checkpoints."""
    odd = [rank for rank, each in enumerate(told) if each["index"] != told[0]["index"]]
    if odd:
        raise AgreementError(
            build_message(
                f"fdp.load was called with {os.fspath(path)!r}, and not all ranks read one checkpoint there. Nothing "
                f"was loaded. Another one than rank 0 was read by {ranks_text(odd)}.",
                remedy="pass one path on all ranks (CheckpointManager.restore lets rank 0 choose the step). If it is "
                "one, wait until all machines see the new files.",
            )
        )


def _read(caller: str, named: dict[str, Any], reader: Reader, ranks: Group, planner: LoadPlanner | None = None) -> None:
    """Fill tensors from a checkpoint; every rank takes part."""
    group = ranks.process_group
    with warnings.catch_warnings(), _as_errors_of_fdp(caller, ranks, Path(reader.path)):
        ignore_what_is_meant()
        loading = Elsewhere(
            lambda: dcp.load(named, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None),
            caller,
        )
        try:
            loading.wait(group)
        except BaseException as error:
            if loading.is_running:
                mark_desynchronised(ranks, f"{caller} was left in the middle by {type(error).__name__}")
            raise


def _set_generators(path: str | os.PathLike[str], states: dict[str, torch.Tensor]) -> None:
    try:
        set_generator_states(states)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ArgumentError(
            build_message(
                f"the checkpoint in {os.fspath(path)!r} holds invalid states of generators.",
                [f"{type(error).__name__}: {first_line(error)}"],
                remedy="load it with random=False, and find out what wrote it.",
            )
        ) from error


def _refuse_differing(caller: str, offenders: list[str]) -> None:
    if offenders:
        raise ReplicationError(
            build_message(
                f"{caller} was given a state that is not the same on every rank. Nothing was written. These leaves do "
                "not hold the bits that they hold on rank 0:",
                offenders,
                remedy="label what is each rank's own: fdp.per_rank(leaf), outside of a step. For the rest, start from "
                "fdp.replicate(state), and let every update be a function of replicated values.",
            )
        )


def seed_anew(path: Path, ranks: Group) -> None:
    """Seed torch's generators as a function of a checkpoint and of the rank; every rank takes part.

    Args:
        path: the directory, of a checkpoint that holds states of generators.
        ranks: the ranks.
    """
    reader = Reader(path)
    with ready_on_all_ranks(ranks, "CheckpointManager.restore"):
        state = first_generator(path, reader.read_metadata().state_dict_metadata)
    _read("CheckpointManager.restore", state, reader, ranks)
    (generator,) = state.values()
    seed(fingerprint(generator), ranks)


@contextmanager
def ready_on_all_ranks(ranks: Group, caller: str) -> Iterator[None]:
    """Runs the work before messages are sent: if it fails on one rank, all raise, and none waits for a message.

    A `NotWritten` of one rank is an `FdpError` of all: no rank should report that another one called something else.
    """
    refused = ""
    try:
        yield
    except NotWritten as error:
        refused = str(error)
    except Exception as error:
        announce_failure(ranks, error)
        raise
    found = come_together(ranks, caller, "was called", {"refused": refused})
    for text in (each["refused"] for each in found if each.get("refused")):
        raise FdpError(text)


def ignore_what_is_meant() -> None:
    """Silence warnings of torch.distributed.checkpoint about things that fdp does on purpose."""
    for message in (
        "torch.distributed is disabled, unavailable or uninitialized",
        "Detected an existing checkpoint",
    ):
        warnings.filterwarnings("ignore", message=message, category=UserWarning)


@contextmanager
def _as_errors_of_fdp(caller: str, ranks: Group, path: Path, written: str = "") -> Iterator[None]:
    """Failures as FdpError; the library's own is no Exception."""
    try:
        yield
    except dcp.CheckpointException as error:
        found = [cause for cause, *_ in error.failures.values() if isinstance(cause, ChangedCheckpoint)]
        if len(found) == len(error.failures):
            refuse_changed(path, [key_path_of(line) for each in found for line in each.lines])
        for cause, *_ in error.failures.values():
            if isinstance(cause, FdpError) and not isinstance(cause, NotWritten):
                raise cause from error
        causes = [
            f"rank {rank}: {cause if isinstance(cause, NotWritten) else repr(cause)}"
            for rank, (cause, *_) in error.failures.items()
        ]
        if written:
            raise not_written(caller, written, path, causes) from error
        remedy = "look at the disk and its permissions, then call it again."
        what = f"{caller} could not read the checkpoint in {os.fspath(path)!r}."
        raise FdpError(build_message(what, causes, remedy=remedy)) from error
    except (RuntimeError, dist.DistError) as error:  # of a message: what else fails is among the library's own
        if (explained := explain(ranks.process_group, caller)) is not None:
            raise explained from error
        raise PeerError(
            build_message(
                f"{caller} lost another rank.",
                [first_line(error)],
                remedy="look for the first error among the logs of all ranks. The last checkpoint is whole.",
            )
        ) from error
