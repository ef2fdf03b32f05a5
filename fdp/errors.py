"""Error classes, and the one shape that their messages have.

Every refusal of fdp's own is an `FdpError`. A message says what happened, then where, then lists every
offender, and its last line is the remedy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class FdpError(Exception):
    """Base class of every error that fdp raises on its own account."""


class ArgumentError(FdpError, ValueError):
    """An argument of one of fdp's own functions has no meaning there."""


class CallError(ArgumentError, TypeError):
    """A step is called with arguments that its function does not take: as Python says so, a `TypeError`."""


class ReplicationError(FdpError):
    """A value that must be equal on every rank may differ, or does differ, between ranks."""


class PurityError(FdpError):
    """The step changes one of its inputs, or trains through a tensor that is not one of its arguments."""


class TraceError(FdpError):
    """The step cannot be traced into one graph, or its trace does not compute what the step computes."""


class CompileError(FdpError):
    """The step runs, and its trace is right, but the compiler cannot take it."""


class AgreementError(FdpError):
    """Ranks have different communication schedules, or are at different calls; or one never came to compare."""


class PeerError(FdpError):
    """A rank died, stopped, raised or left while this one was waiting for it, or cannot be reached.

    Args:
        message: what to say.
        ranks: those that are missing, by their numbers in the group; none where that is not known.
        reason: "died", "frozen", "raised", "left" or "unreachable"; empty where that is not known.
        call: which call of the step it was in which it was noticed, from 1 on; 0 outside of calls.
        details: what is known of each rank, a line each.

    Attributes:
        ranks: likewise.
        reason: likewise.
        call: likewise.
        details: likewise.
    """

    def __init__(
        self,
        message: str,
        ranks: tuple[int, ...] = (),
        reason: str = "",
        call: int = 0,
        details: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.ranks, self.reason, self.call, self.details = ranks, reason, call, details

    def __reduce__(self) -> tuple[type[PeerError], tuple[object, ...]]:
        return type(self), (str(self), self.ranks, self.reason, self.call, self.details)


class NonFiniteError(FdpError):
    """A gradient is not finite, and the step was made with `check_finite=True`; raised on every rank.

    Args:
        message: what to say.
        ranks: those on which a gradient was not finite; none where only a mean over ranks is not.
        names: key paths of the gradients.
        call: which call of the step it was, from 1 on.

    Attributes:
        ranks: likewise.
        names: likewise.
        call: likewise.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = (), names: tuple[str, ...] = (), call: int = 0) -> None:
        super().__init__(message)
        self.ranks, self.names, self.call = ranks, names, call

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[object, ...]]:
        return type(self), (str(self), self.ranks, self.names, self.call)


def error_text(error: object) -> str:
    """What an error says, which may be of a user's class.

    Example:
        >>> error_text(ValueError("no"))
        'no'
    """
    try:
        return str(error)
    except Exception:  # it is about to be reported, and is not to be replaced by what its own text runs into
        return "(its text cannot be made)"


def first_line(error: object) -> str:
    """The first line of what an error says, nothing if it says nothing.

    Example:
        >>> first_line(ValueError("no\\nyes")), first_line(ValueError())
        ('no', '')
    """
    return (error_text(error).strip().splitlines() or [""])[0]


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks by number, for a message.

    Example:
        >>> ranks_text([3]), ranks_text([0, 2, 5])
        ('rank 3', 'ranks 0, 2 and 5')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def build_message(what: str, offenders: Iterable[str] = (), remedy: str = "") -> str:
    """Lay out an error message: what happened and where, one indented line an offender, the remedy last.

    Args:
        what: one or two sentences, with the name of the user's function.
        offenders: one line each; all of them, not just the first.
        remedy: what the reader should do; printed behind "Remedy: ".

    Returns:
        The message.

    Example:
        >>> print(build_message("step 'f' changes its input", ["state['n']: aten.add_"], "return a new value."))
        step 'f' changes its input
          state['n']: aten.add_
        Remedy: return a new value.
    """
    lines = [what, *("  " + line.replace("\n", "\n    ") for line in offenders)]
    if remedy:
        lines.append("Remedy: " + remedy)
    return "\n".join(lines)
