"""Checks that the pieces of a checkpoint's files hold the bits that were written.

`torch.save` writes an archive of zip's format, with a checksum of each record in it. `torch.load` does not look at
these. So a flipped bit would be another number, and nothing would show it.
"""

from __future__ import annotations

import io
import os
import zipfile

from fdp.errors import ArgumentError, build_message


class ChangedCheckpoint(ArgumentError):
    """A checkpoint does not hold what was saved; raised on all ranks, or on none.

    Args:
        message: what to say.
        lines: what has changed, a line each.

    Attributes:
        lines: likewise.
    """

    def __init__(self, message: str, lines: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.lines = lines

    def __reduce__(self) -> tuple[type[ChangedCheckpoint], tuple[object, ...]]:
        return type(self), (str(self), self.lines)


def refuse_changed(path: str | os.PathLike[str], lines: list[str]) -> None:
    """Refuse a checkpoint if any rank found a change in it.

    Args:
        path: of the checkpoint, for messages.
        lines: what has, of all ranks.

    Raises:
        ChangedCheckpoint: names it.
    """
    if lines:
        lines = list(dict.fromkeys(lines))
        message = build_message(
            f"the checkpoint in {os.fspath(path)!r} has been changed since it was saved, on its disk or on the way "
            "from there.",
            lines,
            remedy="load another checkpoint, and check the disk.",
        )
        raise ChangedCheckpoint(message, tuple(lines))


def is_intact(piece: bytes) -> bool:
    """Whether the checksums in a piece of a checkpoint are those of its records.

    Args:
        piece: what `torch.save` wrote.

    Returns:
        Whether they are. Also True of a piece that was written without any
        (`torch.serialization.set_crc32_options(False)`).
    """
    try:
        with zipfile.ZipFile(io.BytesIO(piece)) as archive:
            records = archive.infolist()
            if any(record.compress_type != zipfile.ZIP_STORED for record in records):
                return False  # torch compresses none
            return not any(record.CRC for record in records) or archive.testzip() is None
    except Exception:  # whatever the module raises for a damaged archive
        return False
