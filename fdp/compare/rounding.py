"""How much rounding can change each element of a result, amplified or not: measured, not assumed.

Compiled arithmetic is fused, so there is no operator whose inputs could be given to another one. In its place the graph
runs several times, operator by operator, and the results of every operator that rounds are changed in their last
places, at random. What comes out differs by what rounding does: by a unit in the last place mostly, by a whole step of
Adam where a gradient is zero but for rounding. An element may differ by so much, and no other by more on its account.
Where rounding turns a number into infinity or NaN, these are allowed, but no other number.

References: Parker, Monte Carlo Arithmetic (UCLA CSD-970002, 1997); Vignes, A stochastic arithmetic for reliable
scientific computation (Mathematics and Computers in Simulation 1993).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fdp.compare.exact_operators import rounds_nothing
from fdp.compare.leaves import distances, pieces_of
from fdp.compare.replay import Lookup, Replay, makes_values
from fdp.compare.restored import undisturbed
from fdp.compare.ulps import change_last_places_
from fdp.context.ambient import plain_context
from fdp.distributed.other_ranks import OtherRanks
from fdp.runtime.emitted import Emitted
from fdp.trace.operators.effects import effects_of, tensors_in

RUNS = 8
"""An element that rounding turns (a comparison, a cast) is turned in about half of the runs."""

_LAST_PLACES = {torch.float64: 8.0, torch.float32: 8.0, torch.complex128: 8.0, torch.complex64: 8.0}
_LAST_PLACES_NARROW = 2.0
_TIMES, _TIMES_ALIKE = 16.0, 2.0
"""An element may differ by so many times what it does in these runs: fused arithmetic rounds in other places, and long
sums round more often. The same kernels, which only do not repeat themselves, differ by less."""

_aten = torch.ops.aten
_AVERAGING = {_aten.var_mean, _aten.std_mean, _aten.var, _aten.std, _aten.native_layer_norm, _aten.native_group_norm}
_AVERAGING |= {_aten._native_batch_norm_legit, _aten.native_batch_norm}
"""Operators that compilers compute by running averages."""

_TURNED = 100.0
"""An element that differs by so many units in its last place has been turned: by a comparison, or a step of Adam."""

_MISSED, _STEPS = 1 / 32, 2.0
"""Of elements that can be turned, a few are turned in none of the runs: so many of them may differ by so many of the
steps that others take (there and back)."""


def replay(
    emitted: Emitted,
    inputs: Sequence[torch.Tensor],
    others: OtherRanks,
    seed: int | None = None,
) -> list[torch.Tensor]:
    """Run the graph of a step by itself, with the random numbers that the step draws.

    Args:
        emitted: the step.
        inputs: of it; they may be changed.
        others: what this rank takes the other ranks to hold.
        seed: where there is one, results are changed in their last places.

    Returns:
        The tensors among its results.
    """
    after = None if seed is None else _Changing(seed)
    with undisturbed(emitted), plain_context():
        if after is not None:
            inputs = [after.change(tensor) for tensor in inputs]
        return Replay(emitted.plan.trace.graph, inputs, others, after).run()


class Excuses:
    """How much rounding can change some results of a step. Measured when it is first asked for.

    Args:
        emitted: the step.
        inputs: makes copies of its inputs.
        others: what this rank takes the other ranks to hold.
        positions: which of the tensors among its results may be asked for.
    """

    def __init__(
        self, emitted: Emitted, inputs: Callable[[], list[torch.Tensor]], others: OtherRanks, positions: Sequence[int]
    ) -> None:
        self._run = functools.partial(_some_results, emitted, inputs, others, sorted(set(positions)))

    @functools.cached_property
    def exact(self) -> dict[int, torch.Tensor]:
        """By position, what the graph computes."""
        return self._run()

    def rounded(self, seed: int) -> dict[int, torch.Tensor]:
        """By position, what the graph computes if results are changed in their last places: one of `RUNS` runs."""
        return self._run(seed)

    @functools.cached_property
    def _moves(self) -> dict[int, _Moves]:
        found = {at: _Moves(value) for at, value in self.exact.items()}
        for seed in range(RUNS):
            run = self.rounded(seed)
            for at, moves in found.items():
                moves.add(run.pop(at))
        return found

    def excused(self, at: int, found: object, alike: bool = False) -> bool:
        """Whether a result differs from the graph's by no more than rounding can make of it.

        Args:
            at: its position.
            found: it.
            alike: whether it was computed by the same kernels.
        """
        exact = self.exact[at]
        if not isinstance(found, torch.Tensor) or (found.shape, found.dtype) != (exact.shape, exact.dtype):
            return False
        return not found.numel() or self._moves[at].explain(found, _TIMES_ALIKE if alike else _TIMES)


def _some_results(
    emitted: Emitted,
    inputs: Callable[[], list[torch.Tensor]],
    others: OtherRanks,
    positions: Sequence[int],
    seed: int | None = None,
) -> dict[int, torch.Tensor]:
    """Those results of a run that are asked for, by position."""
    whole = replay(emitted, inputs(), others, seed)
    return {at: whole[at] for at in positions}


class _Moves:
    """How far rounding has moved each element of a result.

    Args:
        exact: the result without it.
    """

    def __init__(self, exact: torch.Tensor) -> None:
        # Of the result's own size and place: there may be many of them, and no other memory is known to be there.
        narrow = exact.is_floating_point() and exact.dtype != torch.float64
        wide = torch.float32 if narrow else torch.float64
        self._exact = exact
        self._farthest = torch.zeros(exact.numel(), dtype=wide, device=exact.device)
        self._lost = torch.zeros(exact.numel(), dtype=torch.bool, device=exact.device)

    def add(self, moved: torch.Tensor) -> None:
        """Take note of one run."""
        largest = torch.finfo(self._farthest.dtype).max
        for exact, other, farthest, lost in pieces_of(self._exact, moved, self._farthest, self._lost):
            away = distances(other, exact)
            gone = away == torch.inf
            lost |= gone.to(lost.device)
            away = away.masked_fill_(gone, 0.0).clamp_(max=largest)
            torch.maximum(farthest, away.to(farthest.device, farthest.dtype), out=farthest)

    def explain(self, found: torch.Tensor, times: float) -> bool:
        """Whether a result differs by no more than so many times that."""
        is_rounded = self._exact.is_floating_point() or self._exact.is_complex()
        eps = torch.finfo(self._exact.dtype).eps if is_rounded else 0.0
        beyond, steps = [], []
        for exact, other, farthest, lost in pieces_of(self._exact, found, self._farthest, self._lost):
            away = distances(other, exact)
            bar, lost = farthest.to(away.device, away.dtype), lost.to(away.device)
            # As it is in one of the runs: infinite, or no number, where it is one without rounding; or the reverse.
            away.masked_fill_((away == torch.inf) & lost, 0.0)
            if not is_rounded:
                if not (away <= bar).all():
                    return False
                continue
            last_place = eps * exact.detach().to(away.device).abs().nan_to_num(0, 0, 0)
            beyond.append(away[away > times * bar + _TIMES * last_place])
            steps.append(bar[bar > _TURNED * last_place])
        if sum(map(len, beyond)) > _MISSED * sum(map(len, steps)):
            return False
        return not any(map(len, beyond)) or bool(torch.cat(beyond).max() <= _STEPS * torch.cat(steps).median())


class _Changing:
    """Changes results in their last places.

    Args:
        seed: of the random numbers.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __call__(self, node: fx.Node, value_of: Lookup, result: Any) -> None:
        """Called after each operator, with its results or changed arguments."""
        if rounds_nothing(node):
            return
        self._average_anew(node, value_of, result)
        written = effects_of(node).writes
        if written:
            for argument in written:
                self.change(value_of(argument))
        elif makes_values(node):
            for tensor in tensors_in(result):
                self.change(tensor)

    def _average_anew(self, node: fx.Node, value_of: Lookup, result: object) -> None:
        """Put the results for a changed input in the place of those of an operator that averages.

        It divides on the way (Welford), so a mean that is zero may come out as a rounding of what it is a mean of.
        """
        if getattr(node.target, "overloadpacket", None) not in _AVERAGING or effects_of(node).writes:
            return
        first = node.args[0]
        moved = self.change(value_of(first).clone(), whole=True)  # type: ignore[arg-type]
        given, named = fx.map_arg((node.args[1:], node.kwargs), value_of)
        again = node.target(moved, *given, **named)  # type: ignore[operator]
        for old, new in zip(tensors_in(result), tensors_in(again), strict=True):
            old.copy_(new)

    def change(self, tensor: torch.Tensor, whole: bool = False) -> torch.Tensor:
        """Change a tensor in place; whole numbers as well, if so asked."""
        generator = self._generators.get(tensor.device)
        if generator is None:
            generator = self._generators[tensor.device] = torch.Generator(tensor.device).manual_seed(self._seed)
        return change_last_places_(tensor, _LAST_PLACES.get(tensor.dtype, _LAST_PLACES_NARROW), generator, whole)
