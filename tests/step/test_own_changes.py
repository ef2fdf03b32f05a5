"""A step that reads what it changes itself is warned of; one that counts, or keeps something for later, is not."""

from __future__ import annotations

import pytest
import torch

import fdp

W, BATCH = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, -1.0])


class Counts:
    """Steps that count their calls, each in another place."""

    calls, every = 0, 16

    def __init__(self) -> None:
        self.table = {"calls": 0}

    def by_attribute(self, w: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return w if self.calls % self.every else -w

    def by_item(self, w: torch.Tensor) -> torch.Tensor:
        self.table["calls"] = self.table["calls"] + 1
        return w if self.table["calls"] % self.every else -w

    def by_method(self, w: torch.Tensor) -> torch.Tensor:
        return w if self.tick() % self.every else -w

    def tick(self) -> int:
        self.calls += 1
        return self.calls

    def only_counting(self, w: torch.Tensor) -> torch.Tensor:
        self.calls += self.every
        self.table["calls"] = self.table["calls"] + 1
        return w

    def by_string(self, w: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return w if getattr(self, "calls") % self.every else -w  # noqa: B009

    def takes_away(self, w: torch.Tensor) -> torch.Tensor:
        if self.table:
            w = w + 0 * self.table["calls"]
            del self.table["calls"]
        return w

    def once(self, w: torch.Tensor) -> torch.Tensor:
        if len(w) > self.calls:
            self.calls = len(w)
        return w


@pytest.mark.parametrize("way", ["by_attribute", "by_item", "by_method", "by_string"])
def test_a_step_that_reads_what_it_counts_is_warned_of(way: str) -> None:
    method = getattr(Counts(), way)
    step = fdp.data_parallel(lambda w, b: method(w) + fdp.pmean(b.sum()))
    step(W, BATCH)
    with pytest.warns(UserWarning, match=r"reads what it changes itself: .*calls.* \(it was 2, and is 3\)") as caught:
        step(W, BATCH)
    assert [warning.filename for warning in caught] == [__file__]
    for _ in range(4):
        step(W, BATCH)
    assert step.traces == 1


@pytest.mark.parametrize("way", ["only_counting", "once", "takes_away"])
def test_counting_and_what_is_kept_for_later_calls_are_no_reason_to_warn(way: str) -> None:
    held = Counts()
    step = fdp.data_parallel(lambda w, b: getattr(held, way)(w) + fdp.pmean(b.sum()))
    for _ in range(5):
        step(W, BATCH)
    assert (held.calls or not held.table) and step.traces == 1


def test_objects_of_libraries_that_only_move_on_are_no_reason_to_trace_again() -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    class Trainer:
        def step(self, w: torch.Tensor) -> torch.Tensor:
            return w if scheduler is not None else -w

    trainer = Trainer()
    step = fdp.data_parallel(lambda w, b: trainer.step(w) + fdp.pmean(b.sum()))
    for _ in range(12):
        step(W, BATCH)
        optimizer.step()
        scheduler.step()
    assert step.traces == 1
