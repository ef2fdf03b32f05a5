"""Save a state to disk and load it again, through torch.distributed.checkpoint; the structure is checked on load."""

from __future__ import annotations

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
from fdp.axis import refuse_inside
from fdp.errors import ArgumentError, FdpError, build_message
from fdp.group import resolve_group
from fdp.pytree import Tree, leaf_names


def save(path: str | os.PathLike[str], state: Tree, group: Any = None) -> None:
    """Write a replicated state to a directory; every rank of the group takes part.

    Args:
        path: the directory, on storage that all ranks see; made if it is not there. A checkpoint that it held is
            replaced; if this save is cut short there is none. Keep the last one by saving to a new directory.
        state: pytree of tensors that ranks hold alike, and plain Python values.
        group: as for `data_parallel`.

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
    leaves = dict(zip(leaf_names(state, "state"), pytree.leaves_of(state), strict=True))
    named = {name: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for name, leaf in leaves.items()}
    if ranks.rank == 0:
        # Without it nothing can be loaded: a save that is cut short must not leave half of it beside half of an older.
        (Path(path) / ".metadata").unlink(missing_ok=True)
    if ranks.process_group is not None:
        dist.barrier(ranks.process_group)
    with _as_errors_of_fdp("save"):
        dcp.save(
            named,
            storage_writer=dcp.FileSystemWriter(Path(path), overwrite=True),
            process_group=ranks.process_group,
            no_dist=ranks.process_group is None,
        )


def load(path: str | os.PathLike[str], like: Tree, group: Any = None) -> Tree:
    """Read a state that `save` wrote; every rank of the group takes part and gets all of it.

    Args:
        path: the directory.
        like: a state of the same structure; its tensors give shapes, dtypes and devices, and are not changed.
        group: as for `data_parallel`; it may have another size than the one that saved.

    Returns:
        A tree of the structure of `like`, with new tensors, bit for bit as they were saved.

    Raises:
        ArgumentError: there is no checkpoint at the path, or it holds another structure; names each leaf that is
            missing, in excess, or of another shape or dtype.

    Example:
        See `save`.
    """
    refuse_inside("load")
    ranks = resolve_group(group)
    names = leaf_names(like, "state")
    leaves = pytree.leaves_of(like)
    reader = dcp.FileSystemReader(Path(path))
    if not (Path(path) / ".metadata").is_file():
        raise ArgumentError(
            build_message(
                f"fdp.load found no checkpoint in {os.fspath(path)!r}.",
                remedy="pass the directory that was passed to fdp.save; a save that was cut short leaves none.",
            )
        )
    _check_structure(os.fspath(path), reader.read_metadata().state_dict_metadata, names, leaves)
    named = {
        name: torch.empty_like(leaf, requires_grad=False) if isinstance(leaf, torch.Tensor) else leaf
        for name, leaf in zip(names, leaves, strict=True)
    }
    with _as_errors_of_fdp("load"):
        dcp.load(named, storage_reader=reader, process_group=ranks.process_group, no_dist=ranks.process_group is None)
    return pytree.unflatten(pytree.structure_of(like), [named[name] for name in names])


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
    offenders += [f"{name}: in the checkpoint only" for name in saved if name not in set(names)]
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
