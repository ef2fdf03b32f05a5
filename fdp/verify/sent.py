"""The check that messages of a program carry what its proof assumes, and leave in memory what it assumes.

To the proof of a program `start(k)` sends bucket k, and after `wait(k)` the result is in its place. What does that is
carried out here: on tensors without values that lie as the buckets do, with ranks that note what they are asked for and
say what each message leaves in memory. The ranks themselves (`fdp/distributed/messages.py`, `sending.py`) are trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from fdp.errors import build_message
from fdp.plan.plan import Bucket, Plan, Start, Wait
from fdp.verify.bucket_memory import Parts, bucket_parts, rows_added_to
from fdp.verify.combined import IN_PLACE, SPLIT, Combination, OwnRank, combination_in
from fdp.verify.failure import VerificationError
from fdp.verify.followed import Followed
from fdp.verify.memory import View
from fdp.verify.program_protocol import ProgramProtocol
from fdp.verify.terms import Term, term_text
from fdp.verify.values import Values


class Sender(Protocol):
    """The object that sends the messages of one call."""

    def start(self, index: int, into: torch.Tensor | None = None) -> None:
        """Start the message of a bucket, of what is gathered into some memory."""

    def wait(self, index: int) -> None:
        """Wait for it."""


Sending = Callable[[Mapping[torch.device, torch.Tensor], Any, Any], Sender]
"""(memory, ranks, what says of a call which it is) -> what sends the messages of a call."""


def verify_sent(plan: Plan, program: ProgramProtocol, rank: int, sending: Sending) -> None:
    """Prove that the sender of a program's messages sends what the proof of the program assumes.

    Args:
        plan: that the program was written for.
        program: places and layouts of its buckets, and which hold shares of means.
        rank: this process's.
        sending: makes what sends them.

    Raises:
        VerificationError: it does not; names the bucket.
    """
    for looks_first in (False, True):
        try:
            _MessagesOfCall(plan, program, rank, looks_first).follow(sending)
        except Exception as error:
            what = str(error) if isinstance(error, VerificationError) else f"{type(error).__name__}: {error}"
            raise VerificationError(
                build_message(
                    f"the messages of step {plan.trace.name!r} do not carry what its program sends.",
                    [what],
                    remedy="report this to the authors of fdp, with the step.",
                )
            ) from error


class _Numbered:
    """A stand-in for the number of a call, which is written into a header before the first message starts."""

    def __init__(self, looks_first: bool) -> None:
        self.awaits_first = looks_first

    def before_start(self, buffer: Any) -> None:
        pass

    def after_wait(self, buffer: Any) -> None:
        pass


class _MessagesOfCall:
    """The messages of one call.

    Args:
        plan: that says when each starts and is waited for.
        program: where buckets lie.
        rank: this process's.
        looks_first: whether the first message has to be there before anything that came back is read.
    """

    def __init__(self, plan: Plan, program: ProgramProtocol, rank: int, looks_first: bool) -> None:
        self._plan, self._program, self._order = plan, program, _Numbered(looks_first)
        self._sizes = OwnRank(rank, plan.trace.world_size, plan.trace.dimensions)
        self._followed = Followed(Values(self._sizes))
        self._blocks = {
            device: self._followed.memory_of(layout.size_bytes, f"memory of the step on {device}")
            for device, layout in program.layouts.items()
        }
        self._wire = _Wire(self._followed)
        self._ranks = _Ranks(self._wire, self._sizes)
        self._into = {index: self._room_for(plan.buckets[index]) for index in program.gathered}
        self._where = {
            (kind, bucket.index): layout.offsets[kind, bucket.index]
            for device, layout in program.layouts.items()
            for bucket in plan.buckets
            for kind in ("bucket", "result")
            if bucket.device == device and (kind, bucket.index) in layout.offsets
        }

    def follow(self, sending: Sending) -> None:
        sender, order = sending(self._blocks, self._ranks, self._order), []
        for item in self._plan.schedule:
            if not isinstance(item, (Start, Wait)) or ("bucket", item.bucket) not in self._where:
                continue
            bucket = self._plan.buckets[item.bucket]
            if isinstance(item, Start):
                self._fill(bucket)
                with self._followed:
                    sender.start(item.bucket, self._into.get(item.bucket))
                order.append(item.bucket)
            else:
                with self._followed:
                    sender.wait(item.bucket)
                self._compare(bucket)
        if self._wire.under_way:
            raise VerificationError(f"{self._wire.under_way} messages are not waited for")

    def _room_for(self, bucket: Bucket) -> torch.Tensor:
        """Memory for an all-gather: that of an input, which the program names at each call."""
        size = self._sizes.along(bucket.along).size
        block = self._followed.memory_of(
            size * bucket.numel * bucket.dtype.itemsize, f"where bucket {bucket.index} goes"
        )
        return block.view(bucket.dtype).view(size, bucket.numel)

    def _view(self, bucket: Bucket, start_bytes: int, *shape: int, kind: str = "bucket") -> View:
        """Memory of a bucket or of its result, from a byte on."""
        start = self._where[kind, bucket.index] + start_bytes
        tensor = self._blocks[bucket.device][start:]
        numel = 1
        for each in shape:
            numel *= each
        tensor = tensor[: numel * bucket.dtype.itemsize].view(bucket.dtype).view(shape)
        return self._followed.view(tensor)

    def _fill(self, bucket: Bucket) -> None:
        """Fill a bucket with the values to send: its members, and the header."""
        parts = bucket_parts(bucket, self._sizes.along(bucket.along).size)
        for start_bytes, numel in _pieces(parts):
            term = self._own(bucket, start_bytes, numel)
            view = self._view(bucket, start_bytes, *term.shape)
            self._followed.memory.write(view, term)
            # Buckets may share memory one after the other.
            self._wire.parts = [part for part in self._wire.parts if not part.overlaps(view)] + [view]
        if bucket.accumulate_dtype is not None and parts.whole:
            self._wire.widened[self._own(bucket, 0, parts.sent)] = bucket.accumulate_dtype
        if bucket.pieces:
            self._wire.in_two_levels.add(self._own(bucket, 0, parts.sent))

    def _own(self, bucket: Bucket, start_bytes: int, numel: int) -> Term:
        name = f"bucket {bucket.index}" if not start_bytes else f"the header of bucket {bucket.index}"
        terms, size = self._followed.values.terms, self._sizes.along(bucket.along).size
        shape = (size, numel // size) if bucket.op in SPLIT else (numel,)
        term = terms.make(("own", bucket.index, start_bytes, shape, bucket.dtype), shape, bucket.dtype)
        term.origin = name
        return term

    def _compare(self, bucket: Bucket) -> None:
        """Check that the result is in its place."""
        values, size = self._followed.values, self._sizes.along(bucket.along).size
        parts, how = bucket_parts(bucket, size), combination_in(bucket)
        if bucket.index in self._program.scaled:
            how = replace(how, op="sum")
        for start_bytes, numel in _pieces(parts):
            own = self._own(bucket, start_bytes, numel)
            expected = values.combined(how, own)
            into = self._into.get(bucket.index)
            if into is not None:
                view = self._followed.view(into)
            elif bucket.op in IN_PLACE:
                view = self._view(bucket, start_bytes, *expected.shape)
            else:
                view = self._view(bucket, 0, *expected.shape, kind="result")
            found = values.read(view)
            if found is not expected:
                raise VerificationError(
                    f"after its message bucket {bucket.index} holds {term_text(found)}, not {term_text(expected)}"
                )


def _pieces(parts: Parts) -> list[tuple[int, int]]:
    """A sent piece: its first byte, and its number of elements."""
    if parts.whole:
        return [(0, parts.sent)]
    pieces = [(0, parts.numel), (parts.numel * parts.itemsize, parts.header)]
    return [piece for piece in pieces if piece[1]]


@dataclass
class _Wire:
    """What has become of the messages so far.

    Attributes:
        followed: computes it.
        parts: of what may be sent: what has been filled.
        widened: for what is added up in a wider dtype, in which.
        under_way: messages that have started and are not waited for.
        means: for each mean that a rank has added up of the pieces of all ranks, of which value.
        in_two_levels: values that ranks of a mesh reduce piece by piece.
        pieces: for each piece that they have reduced along some dimensions: of which value, how, and along which.
    """

    followed: Followed
    parts: list[View] = field(default_factory=list)
    widened: dict[Term, torch.dtype] = field(default_factory=dict)
    under_way: int = 0
    means: dict[Term, Term] = field(default_factory=dict)
    in_two_levels: set[Term] = field(default_factory=set)
    pieces: dict[Term, tuple[Term, str, tuple[str, ...]]] = field(default_factory=dict)


class _Ranks:
    """A stand-in for `fdp.distributed.group.Group` that computes what a message leaves in memory.

    A backend may read what it sends, and write to where results go, at any time from the start to the wait.

    Args:
        wire: what messages do.
        ranks: who takes part.
        dimension: of the mesh, along which they do.
    """

    def __init__(self, wire: _Wire, ranks: OwnRank, dimension: str = "") -> None:
        self._wire, self._followed, self._all, self._along = wire, wire.followed, ranks, dimension
        own = ranks.along(dimension)
        self.size, self.rank = own.size, own.own

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        return self._all.dimensions

    def along(self, dimension: str) -> _Ranks:
        return _Ranks(self._wire, self._all, dimension) if dimension else self

    def _made(self, op: str, term: Term, root_or_pairs: Any = 0, accumulate: Any = None) -> Term:
        """What ranks make of a value together."""
        return self._followed.values.combined(Combination(op, root_or_pairs, accumulate, self._along), term)

    def all_reduce(self, buffer: torch.Tensor, op: str, arrived: Any = None) -> Callable[[], None]:
        return self._combine(buffer, op, 0)

    def broadcast(self, buffer: torch.Tensor, root: int, arrived: Any = None) -> Callable[[], None]:
        return self._combine(buffer, "broadcast", root)

    def all_gather(self, out: torch.Tensor, own: torch.Tensor, arrived: Any = None) -> Callable[[], None]:
        into, source = self._contiguous(out), self._contiguous(own)
        if into.shape != (self.size, *source.shape) or into.dtype != source.dtype:
            raise VerificationError(f"{list(source.shape)} elements are gathered as {list(into.shape)}")
        term = self._followed.values.read(source)
        mean, piece = self._wire.means.get(term), self._wire.pieces.get(term)
        if piece is not None:
            # Each rank of a host gathers the pieces, of which each has been reduced along all dimensions.
            results = [(self._followed.view(out.view(-1)), self._put_together(*piece))]
        elif mean is None:
            results = [(into, self._made("all_gather", term))]
        else:
            # Each rank gathers what all of them have added up, each a piece.
            whole = self._followed.view(out.view(-1))
            results = [(whole, self._made("mean", mean, 0, self._wire.widened[mean]))]
        return self._send([source, into], results)

    def reduce_scatter(
        self,
        result: torch.Tensor,
        arriving: torch.Tensor,
        own: torch.Tensor,
        op: str,
        arrived: Any = None,
        accumulate: Any = None,
    ) -> Callable[[], None]:
        into, source, values = self._contiguous(arriving), self._contiguous(own), self._followed.values
        made = self._contiguous(result)
        fits = source.shape[0] == self.size and into.shape == (rows_added_to(self.size), *source.shape[1:])
        fits = fits and made.shape == source.shape[1:]
        if not fits or not into.dtype == source.dtype == made.dtype:
            shapes = f"{list(into.shape)} beside, into {list(made.shape)}"
            raise VerificationError(f"{list(source.shape)} elements are reduced with {shapes}")
        term, whole = values.read(source), values.read(self._followed.view(own.view(-1)))
        # The rows hold what was sent or has arrived, or what a backend left there: nothing may look at it.
        rest = [self._followed.view(row) for row in (*own, *arriving)]
        left = [values.terms.make(("left over", term, at), row.shape, row.dtype) for at, row in enumerate(rest)]
        if whole in self._wire.in_two_levels:
            reduced = self._piece(whole, op, (self._along,), made)
        else:
            reduced = self._made(f"{op}_scatter", term, 0, accumulate)
        return self._send([source, into, made], [*zip(rest, left, strict=True), (made, reduced)])

    def _piece(self, whole: Term, op: str, along: tuple[str, ...], view: View) -> Term:
        """This rank's piece of a value, reduced along some dimensions."""
        made = self._followed.values.terms.make(("reduced", whole, op, along, view.shape), view.shape, view.dtype)
        self._wire.pieces[made] = whole, op, along
        return made

    def _put_together(self, whole: Term, op: str, along: tuple[str, ...]) -> Term:
        """The value of which all pieces are gathered: a mean of means of equally many is a mean, and so with sums."""
        if sorted(along) != sorted(name for name, _ in self._all.dimensions) or along[0] != self._along:
            raise VerificationError(f"pieces are gathered along {self._along} that were reduced along {list(along)}")
        return self._followed.values.combined(Combination(op), whole)

    def permute(
        self, out: torch.Tensor, own: torch.Tensor, pairs: Sequence[tuple[int, int]], arrived: Any = None
    ) -> Callable[[], None]:
        into, source, values = self._contiguous(out), self._contiguous(own), self._followed.values
        if into.shape != source.shape or into.dtype != source.dtype:
            raise VerificationError(f"{list(source.shape)} elements are sent for {list(into.shape)}")
        result = self._made("permute", values.read(source), tuple(map(tuple, pairs)))
        return self._send([source, into], [(into, result)])

    def all_to_all(self, out: torch.Tensor, own: torch.Tensor, arrived: Any = None) -> Callable[[], None]:
        into, source, values = self._contiguous(out), self._contiguous(own), self._followed.values
        numel = source.numel // self.size
        if into.shape != source.shape or into.dtype != source.dtype or source.numel != numel * self.size:
            raise VerificationError(f"{list(source.shape)} elements are exchanged for {list(into.shape)}")
        term = values.read(source)
        if len(source.shape) == 2:
            return self._send([source, into], [(into, self._made("all_to_all", term))])
        pieces = [values.terms.make(("piece", each, term), (numel,), source.dtype) for each in range(self.size)]
        if (wide := self._wire.widened.get(term)) is not None:
            self._wire.means[self._mean(pieces, wide, source.dtype)] = term
        views = [self._followed.view(each) for each in out.view(self.size, numel).unbind(0)]
        return self._send([source, into], list(zip(views, pieces, strict=True)))

    def _mean(self, pieces: list[Term], wide: torch.dtype, dtype: torch.dtype) -> Term:
        """The mean of the pieces of all ranks, added up in the order of ranks and rounded once."""
        values, shape = self._followed.values, pieces[0].shape
        total = values.cast(pieces[0], wide)
        for piece in pieces[1:]:
            total = values.apply("aten::add", {"self": total, "other": piece}, shape, wide)
        total = values.apply("aten::div", {"self": total, "other": values.encode(self.size)}, shape, wide)
        return values.cast(total, dtype)

    def _combine(self, buffer: torch.Tensor, op: str, root: int) -> Callable[[], None]:
        """Combine the content of a bucket element by element, part by part."""
        whole, values = self._contiguous(buffer), self._followed.values
        piece = self._wire.pieces.get(values.read(whole)) if self._wire.pieces else None
        if piece is not None:
            value, before, along = piece
            if op != before:
                raise VerificationError(f"the {op} of pieces is taken of which the {before} was taken")
            return self._send([whole], [(whole, self._piece(value, op, (*along, self._along), whole))])
        inside = [
            part
            for part in self._wire.parts
            if part.block is whole.block and whole.start <= part.start < whole.start + whole.span
        ]
        if sum(part.span for part in inside) != whole.span or any(part.dtype != whole.dtype for part in inside):
            raise VerificationError(f"{whole.span} bytes are sent that are not those of a bucket")
        results = [(part, self._made(op, values.read(part), root)) for part in inside]
        return self._send([whole], results)

    def _contiguous(self, tensor: torch.Tensor) -> View:
        if not tensor.is_contiguous():
            raise VerificationError("a message is not contiguous")
        return self._followed.view(tensor)

    def _send(self, touched: list[View], results: list[tuple[View, Term]]) -> Callable[[], None]:
        memory, left = self._followed.memory, [1]
        for view in touched:
            memory.take_off(view.block, view.start, view.span)
        self._wire.under_way += 1

        def wait() -> None:
            if not left:
                return
            left.clear()
            self._wire.under_way -= 1
            for view in touched:
                memory.land(view.block, view.start, view.span)
            for view, term in results:
                memory.write(view, term)

        return wait
