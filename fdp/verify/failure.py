"""The error for a program that does not compute what its trace says."""

from __future__ import annotations

from fdp.errors import FdpError


class VerificationError(FdpError):
    """A generated program does not compute what the trace says; it must not run."""
