"""Values as terms: two values are called equal if they are computed by the same operators from equal values.

Terms are hash-consed: the same key gives the same object, so that equality is identity, whatever a value's history is.

References: Ershov, On Programming of Arithmetic Operations (CACM 1958); Filliâtre and Conchon, Type-Safe Modular
Hash-Consing (2006).
"""

from __future__ import annotations

from typing import Any

import torch


class Term:
    """A value, as the operators that compute it.

    Attributes:
        key: an operator or a kind of leaf, then what it is applied to.
        shape: shape of the value; an entry that is not known ahead is an expression.
        dtype: its dtype. None for a call of an operator, which may have several results.
        traced: whether the trace computes it, too.
        origin: what it is called in messages, if it has a name: a node of the trace, an input.
    """

    __slots__ = ("dtype", "key", "origin", "shape", "traced")

    def __init__(self, key: tuple[Any, ...], shape: Any, dtype: Any, traced: bool) -> None:
        self.key, self.shape, self.dtype, self.traced = key, shape, dtype, traced
        self.origin: str | None = None

    def __repr__(self) -> str:
        return term_text(self)


class Terms:
    """All terms of one comparison.

    Attributes:
        tracing: whether new terms come from the trace; from then on they come from the program alone.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Term] = {}
        self.tracing = True

    def __len__(self) -> int:
        return len(self._known)

    def make(self, key: tuple[Any, ...], shape: Any = None, dtype: torch.dtype | None = None) -> Term:
        """The term of a key, which says everything about the value, its shape and dtype included."""
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Term(key, shape, dtype, self.tracing)
        return found


def term_text(term: Any, depth: int = 3) -> str:
    """A value in words, for messages."""
    if isinstance(term, tuple):
        if len(term) == 2 and term[0] in ("float", "bool", "complex"):
            return str(term[1])
        return "[" + ", ".join(term_text(each, depth) for each in term) + "]"
    if not isinstance(term, Term):
        return str(term)
    if term.origin is not None:
        return term.origin
    if depth <= 0:
        return "..."
    kind = term.key[0]
    if kind == "result":
        return term_text(term.key[1], depth) + (f"[{term.key[2]}]" if term.key[2] not in (0, "self") else "")
    if kind == "call":
        arguments = sorted(term.key[2], key=lambda pair: str(pair[0]))
        return f"{term.key[1]}({', '.join(f'{name}={term_text(value, depth - 1)}' for name, value in arguments)})"
    if kind == "load":
        pieces = [term_text(layer[0], depth - 1) for piece in term.key[4] for layer in piece[2]]
        return f"a view of {', '.join(dict.fromkeys(pieces))}"
    if kind == "combined":
        how, value = term.key[1:3]
        return f"{how.op}{f' along {how.along}' if how.along else ''}({term_text(value, depth - 1)})"
    if kind == "full":
        return f"a constant {list(term.shape)}"
    parts = [term_text(each, depth - 1) for each in term.key[1:] if isinstance(each, Term)]
    return f"{kind}({', '.join(parts)})" if parts else str(kind)
