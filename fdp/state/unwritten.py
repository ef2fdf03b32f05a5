"""Why a checkpoint could not be written, from the system's error: the disk is full, read-only, or the like."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fdp.errors import FdpError, build_message, first_line

_NEARLY_FULL = 2**20
"""Bytes. Less is free after a write failed: that is why, also where the error does not say so."""
_FULL = (errno.ENOSPC, errno.EDQUOT)

NOT_SEEN = "what ranks wrote is not all"
"""How a line begins that says where the rank that writes the index did not find something."""


class NotWritten(FdpError):
    """One line that says what a rank could not write, and why. It becomes part of an error on all ranks."""


@contextmanager
def with_reasons(directory: Path) -> Iterator[None]:
    """Turn errors of the disk into a `NotWritten`, on the rank that sees the disk at that moment.

    Args:
        directory: that is written to.
    """
    try:
        yield
    except FdpError:
        raise
    except (OSError, RuntimeError) as error:
        raise NotWritten(reason(error, directory)) from error


def reason(error: BaseException, directory: Path) -> str:
    """Why something could not be written to a directory, in one line."""
    found = _of_the_system(error) or error
    text = f"{type(found).__name__}: {first_line(found)}"
    number = found.errno if isinstance(found, OSError) else None
    free = _free_bytes(directory)
    if free is not None and (number in _FULL or (number is None and free < _NEARLY_FULL)):
        return f"the disk is full: {free} bytes free ({text})"
    if number is None and not os.access(_nearest(directory), os.W_OK):
        return f"the directory cannot be written to ({text})"
    return text


def not_written(caller: str, what: str, directory: Path, reasons: Iterable[str]) -> FdpError:
    """The error of all ranks.

    Args:
        caller: the function that the user called.
        what: that was to be written.
        directory: where to.
        reasons: a line for each rank that could not write.
    """
    reasons = list(reasons)
    remedy = "look at the disk and its permissions, then call it again."
    if any("the disk is full" in line for line in reasons):
        remedy = "free some space on the disk, or keep fewer checkpoints, then call it again."
    if any(NOT_SEEN in line for line in reasons):
        remedy = "pass one directory on all ranks, on storage that all of them see, and that no other job saves to."
    return FdpError(
        build_message(
            f"{caller} could not write {what} to {os.fspath(directory)!r}. Checkpoints that were there stay.",
            reasons,
            remedy=remedy,
        )
    )


def _of_the_system(error: BaseException | None) -> OSError | None:
    """The system's error behind another one, because torch's archive writer raises a later one."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _free_bytes(directory: Path) -> int | None:
    with suppress(OSError):
        return shutil.disk_usage(_nearest(directory)).free
    return None


def _nearest(directory: Path) -> Path:
    """The directory, or the nearest existing one above it."""
    return next((each for each in (directory, *directory.absolute().parents) if each.exists()), Path("/"))
