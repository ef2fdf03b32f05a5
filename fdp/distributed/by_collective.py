"""Each collective on flat memory: how its message starts, what is done in its place in a dry run, and what arrives."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from fdp.distributed.collective import Collective
from fdp.distributed.group import Group
from fdp.distributed.messages import Pairs, rows_arriving
from fdp.distributed.other_ranks import OtherRanks
from fdp.distributed.sending import Arrived


class Sent(Protocol):
    """What is said of a message: a bucket says it (`fdp.plan.Bucket`)."""

    @property
    def collective(self) -> Collective:
        """What ranks do with it."""

    @property
    def root(self) -> int:
        """Whose value all get, of a collective with a root."""

    @property
    def pairs(self) -> Pairs:
        """Which rank sends to which, of a permutation."""

    @property
    def accumulate_dtype(self) -> torch.dtype | None:
        """In which dtype it is added up, if not in the one that it is sent in."""

    @property
    def numel(self) -> int:
        """Elements that each rank contributes."""

    @property
    def rows(self) -> int:
        """Rows that these are in: one for each rank where the collective splits, else one."""


class FlatMessage(NamedTuple):
    """A message in memory.

    Attributes:
        sent: what is said of it.
        own: what this rank contributes, flat, with a header behind it if there is one. The result is in the same place
            unless it arrives elsewhere.
        into: memory for what arrives, where it lies apart: of `arriving_shape`; else None.
        result: of a reduce-scatter: memory for its result, flat; else None.
        scaled: the values have been divided by the number of ranks: their sum is the mean.
    """

    sent: Sent
    own: torch.Tensor
    into: torch.Tensor | None
    result: torch.Tensor | None
    scaled: bool


def start_collective(message: FlatMessage, group: Group, arrived: Arrived | None) -> Callable[[], None]:
    """Start a message.

    Args:
        message: it.
        group: the ranks.
        arrived: called when it is there, if the backend tells.

    Returns:
        The function that waits for it.
    """
    sent, own, into, result, scaled = message
    collective = sent.collective
    if into is None:
        if collective.rooted:
            return group.broadcast(own, sent.root, arrived)
        return group.all_reduce(own, "sum" if scaled else collective.name, arrived)
    if collective.paired:
        return group.permute(into, own, sent.pairs, arrived)
    if not collective.splits:
        return group.all_gather(into, own, arrived)
    if collective.reduction is None:
        return group.all_to_all(into, own.view_as(into), arrived)
    assert result is not None
    rows = own.view(sent.rows, -1)
    return group.reduce_scatter(result, into, rows, collective.reduction, arrived, sent.accumulate_dtype)


def pretend_message(message: FlatMessage, others: OtherRanks) -> None:
    """Do what a message without a header would do, with what this rank takes the others to hold."""
    sent, own, into, result, scaled = message
    collective = sent.collective
    if into is None:
        if collective.rooted:
            others.broadcast_(own, sent.root)
        else:
            others.all_reduce_(own, collective.name, scaled)
    elif collective.paired:
        others.permute_(into, own, sent.pairs)
    elif not collective.splits:
        others.all_gather_(into, own)
    elif collective.reduction is None:
        others.all_to_all_(into, own.view_as(into))
    else:
        assert result is not None
        others.reduce_scatter_(result, own.view(sent.rows, -1), collective.reduction)


def arriving_shape(sent: Sent, world_size: int) -> tuple[int, ...]:
    """The shape of what arrives, where it lies apart from what this rank sends.

    It is a row of each rank; for a reduce-scatter, if ranks are few, one of each other rank but for the one that
    becomes the result. Of a permutation it is what one rank sends.
    """
    if sent.collective.paired:
        return (sent.numel,)
    if not sent.collective.splits:
        return (world_size, sent.numel)
    return (sent.rows if sent.collective.gathers else rows_arriving(world_size), sent.numel // sent.rows)
