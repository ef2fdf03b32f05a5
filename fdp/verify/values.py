"""Makes terms from literals, constants, and calls of operators on terms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fdp.pytorch.tensors import bytes_of, generator_id
from fdp.verify.combined import IN_PLACE, Combination, OwnRank, shape_of
from fdp.verify.extents import comparable_number
from fdp.verify.memory import Memory, View
from fdp.verify.terms import Term, Terms

_FOLDED_BYTES = 2**18
"""Results that depend on no input are computed up to this size; larger ones are terms like any other."""

ReadArguments = dict[Any, Any]


class Values:
    """Makes terms.

    Attributes:
        terms: where they come from.
        memory: what is read from.
        ranks: of the step.
        held: objects that occur in terms by their identity, which must stay what they are.
        tensors: the constants, in numbers.
        symbols: of numbers that are read from tensors, those that are the same as others.
        late: whether something was found to be a constant after it had become a part of other terms.
    """

    def __init__(self, ranks: OwnRank) -> None:
        self.terms = Terms()
        self.memory = Memory(self.terms)
        self.ranks = ranks
        self.held: dict[int, Any] = {}
        self.tensors: dict[Term, torch.Tensor] = {}
        self.symbols: dict[Any, Any] = {}
        self.late = False
        self._folded: dict[Term, dict[Any, Term]] = {}
        self._unfolded: set[Term] = set()  # calls of which a result is part of terms that do not know its bytes
        self._elements: dict[Any, tuple[bytes, torch.Tensor]] = {}

    # Literals, and tensors that are read.

    def read(self, view: View) -> Term:
        """The value of a tensor; a constant under another shape is a constant."""
        return self._simplified(self.memory.read(view))

    def encode(self, value: Any) -> Any:
        """An argument as part of a term: views are read."""
        kind = type(value)
        if kind is View:
            return self.read(value)
        if value is None or kind is int or kind is str or kind is torch.dtype or kind is Term:
            return value
        if kind is bool:
            return ("bool", value)  # not the same as 1
        if kind is float:
            return ("float", repr(value))  # tells 0.0 from -0.0, and NaN is NaN
        if isinstance(value, (list, tuple)):
            return tuple(map(self.encode, value))
        if kind is complex:
            return ("complex", repr(value))
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            found = comparable_number(value)
            return ("number", found.xreplace(self.symbols) if hasattr(found, "xreplace") else found)
        if isinstance(value, torch.Generator):
            return ("generator", generator_id(value))  # the same one may be another object
        if isinstance(value, (int, float)):  # of a subclass
            return (type(value).__name__, repr(value))
        if isinstance(value, (torch.device, torch.layout, torch.memory_format)):
            return value
        self.held[id(value)] = value
        return (type(value).__name__, id(value))

    # Calls.

    def call(self, name: str, arguments: ReadArguments) -> Term:
        """A call of an operator; its results are further terms."""
        return self.terms.make(("call", name, frozenset(arguments.items())))

    def result(self, call: Term, index: Any, shape: Any, dtype: torch.dtype) -> Term:
        """A result of a call."""
        folded = self._folded.get(call)
        if folded is not None and index in folded:
            return folded[index]
        self._unfolded.add(call)
        return self.terms.make(("result", call, index, shape, dtype), shape, dtype)

    def folded(self, call: Term) -> bool:
        """Whether the results of a call are known by their bytes."""
        return call in self._folded

    def same(self, term: Term, known: Term) -> Term:
        """Replace the result of another call by a constant that is known by its bytes."""
        if term.key[0] == "result":
            self._folded.setdefault(term.key[1], {})[term.key[2]] = known
        return known

    def apply(self, name: str, arguments: ReadArguments, shape: Any, dtype: torch.dtype) -> Term:
        """The only result of a call."""
        return self.result(self.call(name, arguments), 0, shape, dtype)

    def cast(self, term: Term, dtype: torch.dtype) -> Term:
        """A value in another dtype."""
        if term.dtype == dtype:
            return term
        if term.key[0] == "full":
            return self.full(self.element(term).to(dtype), term.shape, dtype)
        if term.key[0] == "constant" and _is_small(term):
            return self.constant(self.tensors[term].to(dtype))
        return self.terms.make(("cast", term, dtype), term.shape, dtype)

    def expand(self, term: Term, shape: Any) -> Term:
        """A value in another shape, repeated along dimensions of size one."""
        if term.shape == shape:
            return term
        if term.key[0] == "full":
            return self.full(self.element(term), shape, term.dtype)
        if term.key[0] == "constant" and _fits(shape, term.dtype):
            return self.constant(self.tensors[term].expand(shape))
        return self.terms.make(("expand", term, shape), shape, term.dtype)

    def combined(self, how: Combination, term: Term) -> Term:
        """The result of a collective."""
        size = self.ranks.along(how.along).size
        if how.op in IN_PLACE and size == 1:
            return term  # one rank's mean, sum, maximum or broadcast is its own value
        shape = shape_of(how.op, term.shape, size)
        return self.terms.make(("combined", how, term, shape), shape, term.dtype)

    def share(self, term: Term, along: str) -> Term:
        """What a value of one rank counts for in a mean: the value times 1/N."""
        share = {"self": term, "other": self.encode(1 / self.ranks.along(along).size)}
        return self.apply("aten::mul", share, term.shape, term.dtype)

    def unshared(self, term: Term, along: str) -> Term | None:
        """The value whose share of a mean this is: a number times 1/N, or a view of such. None if it is no share."""
        if term.key[0] == "result" and term.key[1].key[1] == "aten::mul":
            factors, share = dict(term.key[1].key[2]), self.encode(1 / self.ranks.along(along).size)
            whole = factors.get("self")
            if type(whole) is not Term or factors != {"self": whole, "other": share}:
                return None
            return whole if (whole.shape, whole.dtype) == (term.shape, term.dtype) else None
        if term.key[0] != "load":
            return None
        # Each element is multiplied by itself, so a view of the shares is the share of the view.
        pieces = []
        for low, high, layers in term.key[4]:
            wholes = [(self.unshared(layer[0], along), *layer[1:]) for layer in layers]
            if not wholes or any(whole[0] is None or whole[-1] != term.dtype for whole in wholes):
                return None
            pieces.append((low, high, tuple(wholes)))
        return self.terms.make((*term.key[:4], tuple(pieces)), term.shape, term.dtype)

    # Constants.

    def full(self, value: Any, shape: Any, dtype: torch.dtype) -> Term:
        """A tensor whose elements are all one number."""
        key = (type(value), repr(value), dtype) if not isinstance(value, torch.Tensor) else None
        known = self._elements.get(key)
        if known is None:
            element = torch.full((), value, dtype=dtype, device="cpu") if key else value.detach().cpu().reshape(())
            known = (bytes_of(element), element)
            if key:
                self._elements[key] = known
        raw, element = known
        term = self.terms.make(("full", raw, shape, dtype), shape, dtype)
        self._elements[term] = known
        return term

    def element(self, term: Term) -> torch.Tensor:
        """The number of a tensor whose elements are all equal, as a 0-dim tensor."""
        return self._elements[term][1]

    def constant(self, tensor: torch.Tensor) -> Term:
        """A constant, known by its bytes."""
        tensor = tensor.detach()
        shape, dtype = tuple(tensor.shape), tensor.dtype
        if tensor.numel() == 0:
            return self.terms.make(("empty", shape, dtype), shape, dtype)
        flat = tensor.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        raw = bytes_of(flat)
        if raw == raw[: dtype.itemsize] * flat.numel():
            return self.full(flat[0], shape, dtype)
        term = self.terms.make(("constant", raw, shape, dtype), shape, dtype)
        self.tensors.setdefault(term, tensor)
        return term

    def number_in(self, term: Any) -> Any:
        """The number of a constant 0-dim value; None for any other value."""
        if type(term) is Term and term.key[0] == "full" and term.shape == ():
            return self.element(term).item()
        return None

    def is_constant(self, call: Term) -> bool:
        """Whether a call depends on no input."""
        return all(_is_known(argument) for _, argument in call.key[2])

    def fold(self, call: Term, results: Sequence[View], compute: Callable[[], Any]) -> None:
        """Compute a call that depends on no input, so that its results are known by their bytes.

        If a result of the call is part of another term by now, such as the product in `addmm`, it comes too late for
        that: see `anew`.

        Args:
            call: as a term, of an operator that computes and does nothing else.
            results: of the call.
            compute: what computes them; it may be called under no circumstances but these.
        """
        if call in self._folded or not all(map(_is_small, results)):
            return
        with torch.no_grad():
            made = compute()
        made = [made] if isinstance(made, torch.Tensor) else list(made)
        if any(x.layout != torch.strided for x in made):
            return
        if [(tuple(x.shape), x.dtype) for x in made] == [(view.shape, view.dtype) for view in results]:
            self._folded[call] = dict(enumerate(map(self.constant, made)))
            self.late |= call in self._unfolded

    def anew(self) -> None:
        """New values for a second pass that know all constants found so far from the beginning."""
        self.memory, self.late = Memory(self.terms), False
        self._unfolded.clear()

    def realised(self, term: Term, device: torch.device) -> torch.Tensor:
        """A constant as a tensor of numbers."""
        if term.key[0] == "full":
            return self.element(term).to(device).expand(term.shape).contiguous()
        if term.key[0] == "empty":
            return torch.empty(term.shape, dtype=term.dtype, device=device)
        return self.tensors[term].to(device)

    def _simplified(self, term: Term) -> Term:
        """A view of a constant is a constant, and so is its conjugate or its negative."""
        if (kind := term.key[0]) in ("conj", "neg"):
            inner = self._simplified(term.key[1])
            if not _is_known(inner):
                return term
            number = self.realised(inner, torch.device("cpu"))
            return self.constant(number.conj() if kind == "conj" else -number)
        if kind != "load":
            return term
        _, shape, stride, dtype, pieces = term.key
        if len(pieces) != 1 or len(pieces[0][2]) != 1:
            return term
        inner, start, inner_shape, inner_stride, inner_dtype = pieces[0][2][0]
        if inner.key[0] == "full" and inner_dtype == dtype:
            return self.full(self.element(inner), shape, dtype)
        if inner.key[0] == "constant" or (inner.key[0] == "full" and _is_small(inner)):
            number = self.realised(inner, torch.device("cpu"))
            lies = torch.empty_strided(inner_shape, inner_stride, dtype=inner_dtype, device="cpu").copy_(number)
            seen = torch.empty(0, dtype=dtype, device="cpu")
            return self.constant(seen.set_(lies.untyped_storage(), -start // dtype.itemsize, shape, stride))
        return term


def _is_small(lies: Any) -> bool:
    """Whether a value may be computed ahead."""
    return _fits(lies.shape, lies.dtype)


def _fits(shape: Sequence[Any], dtype: torch.dtype) -> bool:
    numel = 1
    for size in shape:
        if type(size) is not int:
            return False
        numel *= size
    return numel * dtype.itemsize <= _FOLDED_BYTES


def _is_known(argument: Any) -> bool:
    if type(argument) is Term:
        return argument.key[0] in ("constant", "full", "empty") and _is_small(argument)
    if type(argument) is tuple:
        return argument[:1] not in (("number",), ("generator",), ("like",)) and all(map(_is_known, argument))
    return True
