"""A lock, so that one job at a time writes to a directory. The system releases it when its process ends."""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
import struct
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO

from fdp.errors import ArgumentError, build_message

_LOG = logging.getLogger("fdp")
_NAME = ".lock"
_here: weakref.WeakValueDictionary[str, DirectoryLock] = weakref.WeakValueDictionary()
"""Locks of this process, some of which the system would give to it twice."""
_UNKNOWN = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""What systems and file systems say that know no locks of open files."""


class DirectoryLock:
    """Held from `acquire` to `release`, or until no reference to it is left.

    A lock of the open file, where the system has these (Linux): whatever else the process does with its own directory,
    such as to copy it, the lock stays. Otherwise one of POSIX records, which any closing of the file gives back. Worker
    processes, which are copies of this one, hold neither. Where there are no locks (Windows), only managers of one
    process keep out of each other's way.

    Args:
        directory: an existing one.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._key = directory, ""
        self._release: weakref.finalize[..., DirectoryLock] | None = None

    def acquire(self) -> None:
        """Take the lock, if it is not held already.

        Raises:
            ArgumentError: another run has it, which is named; or its file is a link.
            OSError: the directory cannot be written to.
        """
        if self._release is not None:
            return
        key = os.path.realpath(self._directory)
        if key in _here:
            raise _taken(self._directory, "another CheckpointManager of this process")
        file = _opened(self._directory / _NAME)
        try:
            _lock(file)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                file.seek(0)
                owner = file.read(200).strip()
                file.close()
                raise _taken(self._directory, owner or "another process") from None
            _LOG.warning("%s cannot be locked (%s): let no other run save there", self._directory, error.strerror)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        self._key = key
        self._release, _here[key] = weakref.finalize(self, _give_back, file), self
        self._file = file

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._release is not None:
            _here.pop(self._key, None)
            self._release()
            self._release = None

    def forget(self) -> None:
        """Forget the lock in a forked copy of the process that holds it.

        The copy has the open file as well. It would keep the lock when the process that took it has ended.
        """
        if self._release is not None:
            self._release.detach()  # it would empty the file
            self._release = None
            with suppress(OSError):
                self._file.close()


def _opened(path: Path) -> IO[str]:
    """The file of a lock, which will be emptied and written to: so nothing that a link of a stranger's leads to."""
    with suppress(FileNotFoundError):
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            raise ArgumentError(
                build_message(
                    f"{os.fspath(path)!r} is a link, or no file, and what it leads to would be overwritten.",
                    remedy="delete it, and find out what made it.",
                )
            )
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
    return os.fdopen(os.open(path, flags, 0o666), "a+")


def _give_back(file: IO[str]) -> None:
    with suppress(OSError), file:
        file.truncate(0)


def _lock(file: IO[str]) -> None:
    try:
        import fcntl
    except ImportError:
        return
    kind = getattr(fcntl, "F_OFD_SETLK", None)
    if kind is not None:
        try:
            # struct flock: all of the file, by no particular process.
            fcntl.fcntl(file, kind, struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
            return
        except OSError as error:
            if error.errno not in _UNKNOWN:
                raise
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _forget_all() -> None:
    for lock in list(_here.values()):
        lock.forget()
    _here.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def _taken(directory: Path, owner: str) -> ArgumentError:
    return ArgumentError(
        build_message(
            f"another run writes checkpoints to {os.fspath(directory)!r}: {owner}.",
            remedy="let each run have a directory of its own; or end the other one, or close its CheckpointManager.",
        )
    )
