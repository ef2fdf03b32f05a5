"""What a collective that was inserted for sharded state stands for: a value, and when the memory of a value had it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fdp.state.shards import Part
from fdp.trace.operators.effects import effects_of, storages_of


@dataclass(frozen=True)
class Link:
    """A collective that was inserted for sharded state, and the value of the whole step that it stands for.

    Attributes:
        node: the name of its node.
        whole: the name of the node, in the graph on whole values, of whose value it is.
        kind: "gathered" (the whole of a value that lies in parts), "scattered" (a part of a sum over ranks),
            "combined" (a reduction, of what each rank makes of its part); or, of a value that has owners, "given" (its
            whole, on the owners), "returned" (a part, of what an owner has computed) or "shared" (the whole of that).
        made: the name of the node that has the value, of which the collective is a part.
        after: the name of the node, in the graph on whole values, that made or changed the value last before.
        part: how the value is divided.
        label: what it is, for the user.
        entry: which of the results of `whole`; None if there is one.
        number: of what is combined, the name of the node that makes one number of this rank's part.
        start: of what is gathered together with other values, how many elements of a rank's row lie before its own.
        owners: the ranks that compute with the whole value, if not all do.
    """

    node: str
    whole: str
    kind: str
    made: str
    after: str
    part: Part
    label: str
    entry: int | None = None
    number: str | None = None
    start: int = 0
    owners: tuple[int, ...] = ()


class History:
    """What the memory of a graph on whole values holds, and since when; it is told of each node in turn."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[fx.Node, fx.Node]] = {}
        self._changed: set[int] = set()

    def begin(self, placeholder: fx.Node) -> None:
        """An input lies in its memory."""
        self._last.update(dict.fromkeys(storages_of(placeholder), (placeholder, placeholder)))

    def call(self, node: fx.Node) -> set[int]:
        """A call has been made; returns the memory that it has changed."""
        for number in storages_of(node):
            self._last.setdefault(number, (node, node))
        written = {number: each for each in effects_of(node).writes for number in storages_of(each)}
        self._last.update((number, (each, node)) for number, each in written.items())
        self._changed.update(written)
        return set(written)

    def value_in(self, node: fx.Node) -> fx.Node:
        """The node whose value the memory of a node holds."""
        return self._last.get(storages_of(node)[0], (node, node))[0]

    def changed_by(self, node: fx.Node) -> fx.Node:
        """The call that made or changed last what the memory of a node holds."""
        return self._last.get(storages_of(node)[0], (node, node))[1]

    def is_changed(self, node: fx.Node) -> bool:
        """Whether any of the memory of a node has been changed."""
        return not self._changed.isdisjoint(storages_of(node))
