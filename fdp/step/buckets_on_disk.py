"""Buckets that were chosen for compiled steps, stored beside the compiled code from one start of a program to the next.

Compiled code is found again only if the program is the same to the letter. Buckets that are measured again would differ
at the next start, so each start would compile anew.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import tempfile
from collections.abc import Sequence, Set

import torch

from fdp.trace import Trace

Groups = tuple[tuple[int, ...], ...]


def find_groups(name: str, reductions: Set[int]) -> Groups | None:
    """Find the buckets that were stored under a name.

    Args:
        name: from `stored_plan_name`.
        reductions: the indices of those that have to be in a bucket.

    Returns:
        The members of each bucket; None if none were kept, or what was kept cannot be read.
    """
    if os.environ.get("FDP_MEASURE_AGAIN", "0") not in ("", "0"):
        return None
    try:
        groups = tuple(tuple(int(member) for member in group) for group in json.loads((_folder() / name).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    members = [member for group in groups for member in group]
    whole = all(groups) and len(members) == len(set(members)) and set(members) == reductions
    return groups if whole else None


def keep_groups(name: str, groups: Groups) -> None:
    """Store buckets under a name; if that fails, they are chosen anew at the next start."""
    with contextlib.suppress(OSError):
        _folder().mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(dir=_folder())
        with os.fdopen(handle, "w") as file:
            json.dump(groups, file)
        os.replace(path, _folder() / name)  # whole, or not at all: other programs may be reading


def stored_plan_name(trace: Trace, backend: str | None, hosts: Sequence[str], network: str) -> str:
    """A name for everything that buckets depend on, except measured times.

    Args:
        trace: of the step.
        backend: that its messages go through.
        hosts: the names of the hosts that the ranks run on.
        network: that the user gave, in words.

    Returns:
        A name for a file.
    """
    text = [
        f"{torch.__version__} {_version()} {trace.world_size} {trace.dimensions} {backend} {sorted(hosts)} "
        f"{trace.wire} {network}",
        *(f"{r.name} {r.op_along} {r.root} {r.shape} {r.dtype} {r.device} {r.operation}" for r in trace.reductions),
        *(f"{o.target} {o.needs} {o.entry}" for o in trace.operations),
        *(f"{i.shape} {i.dtype} {i.device}" for i in trace.inputs),
    ]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:32] + ".json"


@functools.cache
def _version() -> str:
    """A version that changes with the planner, so that buckets of another one are not used."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in _planner())).hexdigest()


def _planner() -> list[pathlib.Path]:
    return sorted((pathlib.Path(__file__).parents[1] / "plan").rglob("*.py"))


def _folder() -> pathlib.Path:
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if compiled:
        return pathlib.Path(compiled) / "fdp-plans"
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "fdp" / "plans"
