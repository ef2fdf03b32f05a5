"""A checksum behind a file's content, so that no flipped bit of it goes unnoticed.

What is a pickle ends by itself: whoever reads it without knowing of the checksum does not see it. So
torch.distributed.checkpoint reads a sealed index as any other.
"""

from __future__ import annotations

import hashlib

_BEGINS, _ENDS = b"\nfdp sha256 ", b"\n"
_BYTES = len(_BEGINS) + 2 * hashlib.sha256().digest_size + len(_ENDS)


class BrokenSeal(Exception):
    """A file does not hold what was written."""


def seal_of(content: bytes) -> bytes:
    """What to write behind some content."""
    return _BEGINS + hashlib.sha256(content).hexdigest().encode() + _ENDS


def without_seal(found: bytes) -> tuple[bytes, bool]:
    """The content of a file, and whether it was sealed.

    Args:
        found: all of the file.

    Raises:
        BrokenSeal: its content, or its seal, has changed.

    Example:
        >>> without_seal(b"content" + seal_of(b"content")), without_seal(b"as earlier versions wrote it")
        ((b'content', True), (b'as earlier versions wrote it', False))
    """
    content, seal = found[:-_BYTES], found[-_BYTES:]
    if not seal.startswith(_BEGINS):
        return found, False
    if seal != seal_of(content):
        raise BrokenSeal("its bits are not those that were written")
    return content, True
