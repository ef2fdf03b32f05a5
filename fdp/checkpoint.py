"""Save a state to disk and load it again, through torch.distributed.checkpoint; the structure is checked on load.

The state of each rank's random number generators can go with it, so that a run continues as if it had not stopped.
"""

from __future__ import annotations

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
from fdp.axis import refuse_inside
from fdp.errors import ArgumentError, FdpError, build_message
from fdp.exchange import announce_failure, come_together
from fdp.generators import generator_states, set_generator_states
from fdp.group import Group, resolve_group
from fdp.in_step import refuse_left_behind
from fdp.pytree import Tree, leaf_names


def save(path: str | os.PathLike[str], state: Tree, group: Any = None, *, random: bool = False) -> None:
    """Write a replicated state to a directory; every rank of the group takes part.

    Args:
        path: the directory, on storage that all ranks see; made if it is not there. A checkpoint that it held is
            replaced; if this save is cut short there is none. Keep the last one by saving to a new directory.
        state: pytree of tensors that ranks hold alike, and plain Python values.
        group: as for `data_parallel`.
        random: whether to save the state of each rank's generators as well: torch's on the CPU and on the current
            accelerator, Python's, and NumPy's if it is imported. With them a run continues bit for bit.

    Raises:
        AgreementError: another rank failed before it could write, or did not come.
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
    refuse_left_behind(ranks, "fdp.save")
    with _ready_on_all_ranks(ranks, "fdp.save"):
        leaves = dict(zip(leaf_names(state, "state"), pytree.leaves_of(state), strict=True))
        named = {name: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for name, leaf in leaves.items()}
        if random:
            named.update({_generator_name(ranks, kind): value for kind, value in generator_states().items()})
        if ranks.rank == 0:
            # Without it nothing can be loaded: a save that is cut short must not leave half of it beside half of an
            # older one.
            (Path(path) / ".metadata").unlink(missing_ok=True)
    with _as_errors_of_fdp("save"):
        dcp.save(
            named,
            storage_writer=dcp.FileSystemWriter(Path(path), overwrite=True),
            process_group=ranks.process_group,
            no_dist=ranks.process_group is None,
        )


def load(path: str | os.PathLike[str], like: Tree, group: Any = None, *, random: bool = False) -> Tree:
    """Read a state that `save` wrote; every rank of the group takes part and gets all of it.

    Args:
        path: the directory.
        like: a state of the same structure; its tensors give shapes, dtypes and devices, and are not changed.
        group: as for `data_parallel`; it may have another size than the one that saved.
        random: whether to set this rank's generators to the states that it saved with `random=True`.

    Returns:
        A tree of the structure of `like`, with new tensors, bit for bit as they were saved.

    Raises:
        ArgumentError: there is no checkpoint at the path, or it holds another structure; names each leaf that is
            missing, in excess, or of another shape or dtype. With `random=True`: it holds no states of generators, or
            those of another number of ranks.
        AgreementError: another rank was refused like that, or did not come.
        FdpError: the disk cannot be read; on every rank.

    Example:
        See `save`.
    """
    refuse_inside("load")
    ranks = resolve_group(group)
    refuse_left_behind(ranks, "fdp.load")
    names = leaf_names(like, "state")
    leaves = pytree.leaves_of(like)
    reader = dcp.FileSystemReader(Path(path))
    with _ready_on_all_ranks(ranks, "fdp.load"):
        if not (Path(path) / ".metadata").is_file():
            raise ArgumentError(
                build_message(
                    f"fdp.load found no checkpoint in {os.fspath(path)!r}.",
                    remedy="pass the directory that was passed to fdp.save; a save that was cut short leaves none.",
                )
            )
        saved = reader.read_metadata().state_dict_metadata
        _check_structure(os.fspath(path), saved, names, leaves)
        generators = _generators_of(ranks, os.fspath(path), saved) if random else {}
        named = {
            name: torch.empty_like(leaf, requires_grad=False) if isinstance(leaf, torch.Tensor) else leaf
            for name, leaf in zip(names, leaves, strict=True)
        }
        named.update(generators)
    with _as_errors_of_fdp("load"):
        dcp.load(named, storage_reader=reader, process_group=ranks.process_group, no_dist=ranks.process_group is None)
    if random:
        set_generator_states({kind: named[_generator_name(ranks, kind)] for kind in _kinds(ranks, saved)})
    return pytree.unflatten(pytree.structure_of(like), [named[name] for name in names])


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
            causes = [f"rank {rank}: {cause[0]!r}" for rank, cause in error.failures.items()]
            raise FdpError(
                build_message(
                    f"fdp.{name} failed.", causes, remedy="look at the disk and its permissions, then call it again."
                )
            ) from error


def _check_structure(path: str, saved: dict[str, Any], names: list[str], leaves: list[Any]) -> None:
    offenders = [f"{name}: not in the checkpoint" for name in names if name not in saved]
    known = set(names)
    offenders += [
        f"{name}: in the checkpoint only" for name in saved if name not in known and not _GENERATOR.fullmatch(name)
    ]
    for name, leaf in zip(names, leaves, strict=True):
        kept = saved.get(name)
        if kept is None:
            continue
        before = f"{list(kept.size)} {kept.properties.dtype}" if hasattr(kept, "size") else "a Python value"
        now = f"{list(leaf.shape)} {leaf.dtype}" if isinstance(leaf, torch.Tensor) else "a Python value"
        if before != now:
            offenders.append(f"{name}: {before} in the checkpoint, {now} in `like`")
    if offenders:
        raise ArgumentError(
            build_message(
                f"the checkpoint in {path!r} does not have the structure of `like`.",
                offenders,
                remedy="build `like` by the code that built the state which was saved.",
            )
        )
