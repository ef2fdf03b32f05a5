"""`Emitted.memory`: what lies where in a program's memory, and from when to when."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from fake_ranks import fake_group

import fdp
from fdp.runtime import Emitted
from fdp.runtime.memory_map import MemoryMap, Piece


def train_step(state: dict[str, torch.Tensor], batch: torch.Tensor) -> Any:
    def loss_fn(state: dict[str, torch.Tensor]) -> torch.Tensor:
        return ((batch @ state["a"]).tanh() @ state["b"]).square().mean()

    loss, grads = fdp.value_and_grad(loss_fn)(state)
    return {name: state[name] - 0.1 * grads[name] for name in state}, fdp.pmean(loss)


def short_step(state: dict[str, torch.Tensor], batch: torch.Tensor) -> Any:
    return {name: state[name] + fdp.pmean(batch * factor) for factor, name in enumerate(state)}


def emitted(compile: bool = False) -> Emitted:
    arguments = {"a": torch.eye(32), "b": torch.eye(32)}, torch.ones(32, 32)
    step = fdp.data_parallel(
        short_step if compile else train_step, group=fake_group(2), bucket_cap_mb=0.002, donate_argnums=0
    )
    return step.plan(*arguments).emit(fake_group(2), compile=compile)


def overlap(one: Piece, two: Piece) -> bool:
    """Whether two pieces are there at the same time, and share bytes."""
    same_time = one.first <= two.last and two.first <= one.last
    ends = [piece.offset_bytes + piece.size_bytes for piece in (one, two)]
    return same_time and one.offset_bytes < ends[1] and two.offset_bytes < ends[0]


def test_every_bucket_and_every_value_is_there() -> None:
    program = emitted()
    found = program.memory
    assert {piece.bucket for piece in found.pieces} - {None} == set(range(len(program.plan.buckets)))
    assert {piece.name for piece in found.pieces if piece.bucket is None} <= set(program.program.places)
    assert any("train_step" in piece.source or "loss_fn" in piece.source for piece in found.pieces)
    for piece in found.pieces:
        assert 0 <= piece.first <= piece.last < found.instructions
        assert 0 <= piece.offset_bytes <= dict(found.size_bytes)[piece.device] - piece.size_bytes


def test_pieces_that_are_there_at_the_same_time_lie_apart() -> None:
    program = emitted()
    pieces = program.memory.pieces
    # A result may take the place of an argument that is read for the last time, in that very instruction.
    (layout,) = program.program.layouts.values()
    inherited = {
        (layout.offsets[each.key], each.first)
        for each in layout.pieces
        for other in layout.pieces
        if other.key in each.may_reuse
        and other.last == each.first
        and layout.offsets[other.key] == layout.offsets[each.key]
    }
    assert inherited, "no result takes the place of an argument"
    met = [(one, two) for one in pieces for two in pieces if one.first < two.first and overlap(one, two)]
    assert {(two.offset_bytes, two.first) for _, two in met} <= inherited
    assert all(one.last == two.first for one, two in met)
    assert not [
        (one, two)
        for one in pieces
        for two in pieces
        if one is not two and one.first == two.first and overlap(one, two)
    ]
    assert len({piece.offset_bytes for piece in pieces}) < len(pieces), "some memory is shared over time"


def test_a_compiled_step_holds_its_buckets() -> None:
    program = emitted(compile=True)
    assert [piece.bucket for piece in program.memory.pieces] == list(range(len(program.plan.buckets)))


def test_it_prints_as_a_table_of_the_largest() -> None:
    found = emitted().memory
    text = str(found)
    assert text.startswith("Memory of train_step: ") and "in use at once" in text and "bucket 0" in text
    assert (
        repr(MemoryMap("f", found.pieces[:1], (("cpu", 2048),), (("cpu", 1024),)))
        == "<MemoryMap of f: 1 piece, 2.0 KiB>"
    )
    many = MemoryMap(
        "f", tuple(Piece(f"x{k}", "", "cpu", k + 1, 64 * k, k, k) for k in range(30)), (("cpu", 4096),), (("cpu", 64),)
    )
    assert "... and 6 smaller pieces" in str(many) and "x29" in str(many) and "x5 " not in str(many)


def test_it_is_drawn_address_against_time(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    found = emitted().memory
    figure = found.draw(tmp_path / "memory.png")
    (axes,) = figure.axes
    assert len(axes.patches) == len(found.pieces)
    for piece, drawn in zip(found.pieces, axes.patches, strict=True):
        assert (drawn.get_x(), drawn.get_width()) == (piece.first, piece.last + 1 - piece.first)
        assert drawn.get_y() == piece.offset_bytes
        assert drawn.get_height() == piece.size_bytes
    assert (tmp_path / "memory.png").stat().st_size > 1000
    with pytest.raises(fdp.ArgumentError, match="no kind of picture"):
        found.draw("memory.txt")


def test_nothing_is_drawn_of_a_step_without_memory() -> None:
    pytest.importorskip("matplotlib")
    assert MemoryMap("f", (), (), ()).draw().axes
    assert "none" in str(MemoryMap("f", (), (), ()))
