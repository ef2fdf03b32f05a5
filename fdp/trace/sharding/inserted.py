"""What a collective that was inserted for sharded state stands for."""

from __future__ import annotations

from dataclasses import dataclass

from fdp.state.shards import Part


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
