"""What a program computes: its function is called itself, on tensors without values at the places of its own.

PyTorch itself makes the views and changes shapes in place, on the objects that the program holds. Each operator is seen
as it reaches the dispatcher, with its arguments at that moment. The proof trusts only data of the program: where it
says that places lie, and which buckets it says hold shares of means.

References: Pnueli, Siegel and Singerman, Translation Validation (TACAS 1998).
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from fdp.pytorch.dispatch import without_autograd_kernels
from fdp.pytorch.overloads import schema_of
from fdp.pytorch.tensors import negative_view
from fdp.trace.operators.control import Repeated, choose
from fdp.verify.failure import VerificationError
from fdp.verify.higher import apply_loop, function_name, higher_order
from fdp.verify.kernels import why_not_trusted
from fdp.verify.machine import Dispatch, TermMachine
from fdp.verify.memory import Block, View, view_of
from fdp.verify.meta_tensors import MetaTensors
from fdp.verify.program_protocol import PlaceProtocol, ProgramProtocol
from fdp.verify.reference import Record, Reference, hidden, layout_arguments
from fdp.verify.schemas import Operator, is_taken_apart, operator_of
from fdp.verify.terms import Term, term_text


@dataclass(frozen=True)
class Suspect:
    """The first value that a program computes and the trace does not."""

    line: int
    call: str
    term: Term


class MessageListener(Protocol):
    """Is called when a message starts, and when it is waited for."""

    def start(self, execution: Execution, index: int, into: View | None) -> None:
        """Start the message of a bucket; an all-gather may receive into given memory."""

    def wait(self, execution: Execution, index: int) -> None:
        """Wait for it."""


class Execution(TermMachine):
    """One run of a program on terms.

    Attributes:
        reference: the trace, carried out.
        program: it.
        arena: for each device, the memory that its places are in.
        inputs: the tensors that it was given.
        held: tensors that outlive a call, by what they are called, with what they were like before it.
        suspect: the first thing that it computed and the trace does not.
    """

    def __init__(
        self, reference: Reference, program: ProgramProtocol, messages: MessageListener, tick: Callable[[], None] | None
    ) -> None:
        super().__init__(reference.values)
        self.reference, self.program, self._messages = reference, program, messages
        self.arena: dict[torch.device, Block] = {}
        self.held: list[tuple[str, torch.Tensor, View]] = []
        self.suspect: Suspect | None = None
        self._meta = MetaTensors()
        self._outside: dict[Block, Block] = {}
        self._dispatch = Dispatch(self.operator)
        self._tick = tick
        self.where: dict[Any, tuple[torch.device, int]] = {}
        for device, layout in program.layouts.items():
            self.arena[device] = block = Block("arena", f"memory of the step on {device}")
            self._meta.allocate(block, layout.size_bytes)
            self.where.update((memory, (device, offset)) for memory, offset in layout.offsets.items())
        self._places = {
            name: t for name, place in program.places.items() if (t := self._place(name, place)) is not None
        }
        self.inputs = [self._from_outside(view) for view in reference.inputs]
        for item, tensor in zip(reference.trace.inputs, self.inputs, strict=True):
            self._hold(item.name, tensor)
        self._code = program.function.__code__
        self._traced = {node.target for node in reference.trace.graph.graph.nodes}
        # Torch takes some operators apart for tensors without values that it has kernels of for others.
        self._whole = any(map(is_taken_apart, self._traced))

    # Tensors without values.

    def _place(self, name: str, place: PlaceProtocol) -> torch.Tensor | None:
        if place.memory not in self.where:
            return None  # a value that turned out not to be used
        device, offset = self.where[place.memory]
        begin = offset + place.start_bytes
        view = view_of(self.arena[device], place.offset, place.shape, place.stride, place.dtype)
        size = self.program.layouts[device].size_bytes
        if begin % place.dtype.itemsize or begin + view.start + view.span > size:
            raise VerificationError(f"{name} lies at byte {begin} of the {size} bytes of the step on {device}")
        tensor = self._meta.tensor(self.arena[device], begin + view.start, place.shape, place.stride, place.dtype)
        self.held.append((name, tensor, view._replace(start=begin + view.start)))
        return tensor

    def _from_outside(self, view: View) -> torch.Tensor:
        """A tensor from outside, in separate or shared memory as in the trace."""
        block = self._outside.get(view.block)
        if block is None:
            block = self._outside[view.block] = self.reference.pristine[view.block].copied()
            self._meta.allocate(block, self.reference.sizes[view.block])
        tensor = self._meta.tensor(block, view.start, view.shape, view.stride, view.dtype)
        for mark in view.marks:
            tensor = tensor.conj() if mark == "conj" else negative_view(tensor)
        return tensor

    def _hold(self, name: str, tensor: torch.Tensor) -> None:
        self.held.append((name, tensor, self.view(tensor)))

    def view(self, tensor: torch.Tensor) -> View:
        """A tensor of the program as a view of its memory."""
        return self._meta.view(tensor)

    def outside(self, block: Block) -> Block:
        """The block for memory from outside; a new one if the program has not touched it."""
        return self._outside.get(block, self.reference.pristine[block])

    # The program.

    def run(self) -> list[torch.Tensor]:
        """Call the program; returns what it returns.

        Raises:
            VerificationError: memory of a message under way is touched, or an operator cannot be followed.
        """
        function: Any = self.program.function
        bound = {name: self._bound(name, value) for name, value in (function.__kwdefaults__ or {}).items()}
        around = {"__builtins__": __builtins__, **self._places}
        copy = types.FunctionType(function.__code__, around, function.__name__, function.__defaults__)
        copy.__kwdefaults__ = bound
        try:
            with without_autograd_kernels() if self._whole else nullcontext(), self._dispatch:
                result: list[torch.Tensor] = copy(list(self.inputs), self._start, self._wait)
                return result
        except Exception as error:
            line = _line_of(error, function.__code__)
            what = str(error) if isinstance(error, VerificationError) else f"{type(error).__name__}: {error}"
            raise VerificationError(f"{self.text(line)}: {what}") from error
        finally:
            del self._dispatch  # it refers back: without it, all this goes when its last user does

    def text(self, line: int) -> str:
        """A line of the program, for messages."""
        lines = self.program.source.splitlines()
        return f"line {line}, `{lines[line - 1].strip()}`" if 0 < line <= len(lines) else "the program"

    def _bound(self, name: str, value: object) -> Any:
        """The stand-in for an object that the program holds."""
        if isinstance(value, torch.Tensor):
            return self._bound_tensor(name, value)
        if value is self._tick and value is not None:
            return _nothing
        if isinstance(value, Repeated):
            return self._repeated(value)
        if value is choose:
            return self._higher(torch.ops.higher_order.cond)
        if not isinstance(value, fx.GraphModule) and id(value) in self.reference.higher:
            return self._higher(value)
        return value

    def _bound_tensor(self, name: str, value: torch.Tensor) -> torch.Tensor:
        closed = self.reference.closed.get(id(value))
        if closed is not None:
            tensor = self._from_outside(closed[1])
        else:
            tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            block = self._meta.enter(tensor, Block("constant", name))
            self.memory.write(self.view(tensor), self.values.constant(value))
            block.initial = block.writes
        self._hold(name, tensor)
        return tensor

    def _start(self, index: int, into: torch.Tensor | None = None) -> None:
        self._aside(self._messages.start, self, index, None if into is None else self.view(into))

    def _wait(self, index: int) -> None:
        self._aside(self._messages.wait, self, index)

    def _aside(self, function: Callable[..., Any], *args: Any) -> Any:
        self._dispatch.idle = True
        try:
            return function(*args)
        finally:
            self._dispatch.idle = False

    def _repeated(self, value: Repeated) -> Callable[..., None]:
        found = [name for name, body in self.program.loops.items() if body.function is value.function]
        name = found[0] if found else ""

        def run(operands: Sequence[torch.Tensor]) -> None:
            if name not in self.reference.bodies:
                raise VerificationError("a loop runs whose body is not in the trace")
            if [number.tolist() for number in value.numbers] != [[at] for at in range(len(value.numbers))]:
                raise VerificationError("a loop does not count from 0 in steps of 1")
            for device, layout in self.program.loops[name].layouts.items():
                if layout.size_bytes:
                    where, offset = self.where["loop", name, device]
                    self.memory.give_up(self.arena[where], offset, layout.size_bytes)
            body = self.reference.bodies[name]
            apply_loop(self, name, len(value.numbers), list(map(self.view, operands)), body.changed, body.draws)

        return lambda operands: self._aside(run, operands)

    def _higher(self, target: object) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = (*args, *kwargs.values())
            made: list[Any] = []

            def fresh(call: Term, reads: list[View]) -> list[Any]:
                record = self._recorded(call, (), reads)
                if record is None:
                    raise VerificationError(f"{target} is called with what it is not given in the trace")
                views, tensors = self._like(record, reads)
                made.extend((record.single, tensors))
                return views

            higher_order(self, function_name(target), self._views(given), fresh)
            single, tensors = made
            return tensors[0] if single else tuple(tensors)

        return lambda *args, **kwargs: self._aside(call, *args, **kwargs)

    # Operators.

    def operator(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator of the program on terms."""
        if self._whole and func not in self._traced and is_taken_apart(func):
            with self._dispatch:
                return func.decompose(*args, **kwargs)
        operator = operator_of(func)
        if operator.number or operator.views or operator.reshapes:
            return func(*args, **kwargs)
        raw = operator.bind(args, kwargs)
        given = self._views(raw)
        # Where the trace calls an out variant itself, that one is meant.
        if operator.out and func not in self._traced and (why := why_not_trusted(operator, given)) is not None:
            raise VerificationError(why)
        made: list[Any] = []

        def fresh(call: Term, reads: list[View]) -> list[Any]:
            record = self._recorded(call, layout_arguments(self.values, operator, raw), reads)
            if record is not None and operator.entrywise and not _as_many(record, operator, raw):
                record = None  # of the entries of a call in the trace, these are some
            views, tensors = self._by_kernel(func, operator, raw) if record is None else self._like(record, reads)
            made.extend(tensors)
            return views

        self.perform(operator, given, fresh)
        if not operator.results:
            return None
        rest = iter(made)
        results = [next(rest) if owner is None else raw[owner] for owner in operator.results]
        return results[0] if len(results) == 1 else tuple(results)

    def _views(self, value: object) -> Any:
        if isinstance(value, torch.Tensor):
            return self.view(value)
        if isinstance(value, (list, tuple)):
            return [self._views(each) for each in value]
        return value

    def _recorded(self, call: Term, layout: tuple[Any, ...], reads: list[View]) -> Record | None:
        """A call of the trace with the same arguments in the same layout. Its results have the same layout."""
        for record in self.reference.records.get(call, ()):
            if record.layout == layout and all(
                one.shape == two.shape and one.stride == two.stride and one.dtype == two.dtype
                for one, two in zip(record.reads, reads, strict=True)
            ):
                return record
        return None

    def _like(self, record: Record, reads: list[View]) -> tuple[list[Any], list[Any]]:
        """Results in new memory, with the layout of a call of the trace."""
        blocks: dict[Block, Block] = {}
        owners = {view.block: at for at, view in enumerate(record.reads)}
        sizes: dict[Block, int] = {}
        for view in _flat(record.results):
            if type(view.span + view.start) is int:
                sizes[view.block] = max(sizes.get(view.block, 0), view.start + view.span)

        def like(view: Any, example: Any) -> tuple[Any, Any]:
            if type(view) is not View:
                return view, example
            if (at := owners.get(view.block)) is not None:
                start = reads[at].start + view.start - record.reads[at].start
                return None, self._meta.tensor(reads[at].block, start, example.shape, example.stride(), example.dtype)
            if view.numel < 0 or (view.start == 0 and sizes[view.block] == view.span and view.block not in blocks):
                tensor = torch.empty_strided(example.shape, _strides(view, example), dtype=view.dtype, device="meta")
                blocks[view.block] = self._meta.enter(tensor, Block("fresh"))
            else:
                if view.block not in blocks:
                    blocks[view.block] = Block("fresh")
                    self._meta.allocate(blocks[view.block], sizes[view.block])
                tensor = self._meta.tensor(blocks[view.block], view.start, view.shape, view.stride, view.dtype)
            return self.view(tensor), tensor

        views, tensors = [], []
        for view, example in zip(record.results, record.examples, strict=True):
            if isinstance(view, list):
                pairs = [like(*pair) for pair in zip(view, example, strict=True)]
                one, two = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            else:
                one, two = like(view, example)
            views.append(one)
            tensors.append(two)
        return views, tensors

    def _by_kernel(self, func: Any, operator: Operator, raw: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Results in new memory, with the layout that the operator gives tensors without values."""
        args, kwargs = [], {}
        for parameter, argument, value in zip(operator.parameters, schema_of(func).arguments, raw, strict=True):
            if parameter.name == "device":
                value = torch.device("meta")
            elif parameter.name == "pin_memory":
                value = None
            if argument.kwarg_only:
                kwargs[parameter.name] = value
            else:
                args.append(value)
        made = func(*args, **kwargs)
        made = list(made) if len(operator.results) > 1 else [made]
        tensors = [each for each, owner in zip(made, operator.results, strict=True) if owner is None]
        views = [self._registered(each) for each in tensors]
        return views, tensors

    def _registered(self, value: object) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._registered(each) for each in value]
        if not isinstance(value, torch.Tensor):
            return value
        if self._meta.knows(value):
            return hidden(self.view(value))
        self._meta.enter(value, Block("fresh"))
        return self.view(value)

    def wrote(self, term: Term) -> None:
        if not term.traced and self.suspect is None and term.key[0] not in ("full", "constant", "empty"):
            frame: Any = sys._getframe(1)
            while frame is not None and frame.f_code is not self._code:
                frame = frame.f_back
            self.suspect = Suspect(0 if frame is None else frame.f_lineno, term_text(term), term)


def _as_many(record: Record, operator: Operator, raw: Sequence[Any]) -> bool:
    """Whether a call of the trace has as many entries as a call of the program."""
    given = {len(value) for p, value in zip(operator.parameters, raw, strict=True) if p.entries and value}
    return all(len(each) in given for each in record.results if isinstance(each, list))


def _flat(results: object) -> list[View]:
    if type(results) is View:
        return [results]
    return [view for each in results for view in _flat(each)] if isinstance(results, (list, tuple)) else []


def _strides(view: View, example: Any) -> Any:
    return example.stride() if example.layout is torch.strided else view.stride


def _nothing() -> None:
    """Replaces a time stamp, which does not belong to the program."""


def _line_of(error: BaseException, code: types.CodeType) -> int:
    traceback, line = error.__traceback__, 0
    while traceback is not None:
        if traceback.tb_frame.f_code is code:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line
