"""Every differentiable operator that torch ships samples for: its gradient through a traced step is autograd's.

For each float32 operator of `op_db` a step takes the tensors of a sample, those that autograd follows as parameters,
and returns a weighted sum of the operator's outputs, its gradient, and the outputs. The reference is plain autograd on
the same tensors with the same random seed. Two calls of one step, with samples drawn from two seeds: data of the first
call that got into the graph as a constant shows in the second. An operator is right, or refused by an `FdpError` that
ends with a remedy; nothing else. The comparison of a new trace with the step (`check_trace`) is off: it would refuse
what the tracer gets wrong.

By default one sample of some operators; FDP_ALL_SAMPLES=1 takes all (14,000), with `check_trace` as
well, and on a few of them the method and the in-place form.
"""

from __future__ import annotations

import functools
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import optree
import pytest
import ranks
import torch
import torch.distributed as dist
from samples import ALL_SAMPLES, exhaustive, is_refused, some

import fdp

# Torch warns of operators that are deprecated, in beta, or oddly called.
pytestmark = pytest.mark.filterwarnings("ignore")

CHUNKS = 12
SEED = torch.default_generator.manual_seed  # torch.manual_seed writes down its stack for each kind of accelerator
FEW = 8
"""By default a sample is chosen among so many, the first ones."""

RIGHT, REFUSED, WRONG, SKIPPED = "right", "refused", "wrong", "skipped"
# Of an operator that is right: some gradient is neither zero nor NaN, and there were two calls.
INFORMATIVE = "informative"

# Its samples are views of memory that belongs to no argument, and it reads all of it.
NO_FUNCTION_OF_ITS_ARGUMENTS = {"as_strided_partial_views"}

# Whoever draws random numbers or looks for a rank is as exact as its matrices are well-conditioned.
TOLERANCE = {"svd_lowrank": 1e-2, "pca_lowrank": 1e-2}


@dataclass(frozen=True)
class Sample:
    """An operator's call, with its tensors apart: those that autograd follows, the others, and what puts them back."""

    params: list[torch.Tensor]
    others: list[torch.Tensor]
    whole: Callable[[Any, Any], Any]
    post: Callable[[Any], Any]

    @property
    def geometry(self) -> Any:
        """Two calls of one step have the same."""
        tensors = [*self.params, *self.others]
        return [(x.shape, x.dtype, x.layout, x.layout == torch.strided and x.stride()) for x in tensors]


@functools.cache
def operators() -> dict[str, Any]:
    """Each operator by its name with its variant."""
    from torch.testing._internal import common_methods_invocations as samples

    # It sets a seed around each random operator, which a trace does not see.
    samples.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return {
        info.formatted_name: info
        for info in samples.op_db
        if info.supports_autograd
        and torch.float32 in info.supported_backward_dtypes("cpu")
        and info.formatted_name not in NO_FUNCTION_OF_ITS_ARGUMENTS
    }


def apart(sample: Any) -> Sample:
    leaves, spec = optree.tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)), none_is_leaf=True)
    kinds = ["constant" if not isinstance(x, torch.Tensor) else "param" if x.requires_grad else "other" for x in leaves]

    def whole(params: list[torch.Tensor], others: list[torch.Tensor]) -> Any:
        given = {"param": iter(params), "other": iter(others)}
        full = [x if kind == "constant" else next(given[kind]) for x, kind in zip(leaves, kinds, strict=True)]
        return optree.tree_unflatten(spec, full)

    def of(wanted: str) -> list[torch.Tensor]:
        return [x.detach() for x, kind in zip(leaves, kinds, strict=True) if kind == wanted]

    return Sample(of("param"), of("other"), whole, sample.output_process_fn_grad)


def draw(info: Any, seed: int) -> list[Sample]:
    SEED(seed)
    # Not info.sample_inputs, which looks at the whole stack for the name of the test.
    drawn: Iterator[Any] = iter(info.sample_inputs_func(info, "cpu", torch.float32, True))
    return [apart(sample) for sample in islice(drawn, None if ALL_SAMPLES else FEW)]


def chosen(samples: list[Sample]) -> list[int]:
    """All of them; or the first that has something to differentiate."""
    if ALL_SAMPLES:
        return list(range(len(samples)))
    return [i for i, sample in enumerate(samples) if any(p.numel() > 1 for p in sample.params)][:1] or [0]


def weighted(out: Any) -> torch.Tensor:
    """Fixed weights, so that no two elements of an output can stand for each other."""
    total = torch.zeros(())
    for leaf in optree.tree_leaves(out):
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            weights = torch.linspace(-1, 1.5, leaf.numel()).reshape(leaf.shape)
            if leaf.is_complex():
                leaf = leaf.real + 0.5 * leaf.imag
            total = total + (leaf.float() * weights).sum()
    return total


def called(function: Callable[..., Any], sample: Sample, params: Any, others: Any) -> tuple[torch.Tensor, Any]:
    given, args, kwargs = sample.whole(params, others)
    out = function(given, *args, **kwargs)
    leaves = [x for x in optree.tree_leaves(out) if isinstance(x, torch.Tensor)]
    return weighted(sample.post(out)), [x if x.layout == torch.strided else x.to_dense() for x in leaves]


def by_hand(function: Callable[..., Any], sample: Sample, data: Sample, seed: int = 3) -> Any:
    """Loss, gradients, outputs, and what became of the tensors that are not differentiated."""
    params, others = [p.clone().requires_grad_() for p in data.params], [x.clone() for x in data.others]
    SEED(seed)
    loss, out = called(function, sample, params, others)
    grads: Any = [None] * len(params)
    if loss.requires_grad:
        grads = torch.autograd.grad(loss, params, allow_unused=True)
    grads = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, params, strict=True)]
    return loss.detach(), grads, [x.detach() for x in out], others


def verdict(function: Callable[..., Any], calls: list[Sample], tolerance: float = 1e-4, **options: Any) -> Any:
    """Whether a step around an operator computes what autograd computes, on the data of each call; and why not."""
    first = calls[0]

    def operator_step(params: Any, others: Any) -> Any:
        (loss, out), grads = fdp.value_and_grad(lambda p: called(function, first, p, others), has_aux=True)(params)
        return loss, grads, out, others

    step = fdp.data_parallel(operator_step, check_replication=False, **options)
    moves = False
    for number, data in enumerate(calls):
        try:
            expected = by_hand(function, first, data)
        except Exception as error:
            return SKIPPED, f"by hand: {error}"
        SEED(3)
        try:
            got = step(data.params, [x.clone() for x in data.others])
        except fdp.PurityError as error:
            if "donate_argnums" in options:
                return WRONG, str(error)
            return verdict(function, calls, tolerance, donate_argnums=1, **options)  # running statistics
        except fdp.FdpError as error:
            return (REFUSED if is_refused(error) else WRONG), f"{type(error).__name__}: {error}"
        except Exception:
            return WRONG, f"call {number}\n{traceback.format_exc()}"
        try:
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance / 10, equal_nan=True)
        except AssertionError as error:
            return WRONG, f"call {number}: {error}"
        moves = moves or any(bool((g.isfinite() & (g != 0)).any()) for g in expected[1])
    if step.traces != 1:
        return WRONG, f"traced {step.traces} times"
    return RIGHT, INFORMATIVE if moves and len(calls) == 2 else ""


def forms(info: Any, index: int) -> dict[str, Callable[..., Any]]:
    """The operator as a function; with FDP_ALL_SAMPLES also as a method, and in place of a copy, on a few samples."""
    found: dict[str, Callable[..., Any]] = {"function": info.op}
    if ALL_SAMPLES and index < FEW and info.method_variant is not None:
        found["method"] = info.method_variant
    if ALL_SAMPLES and index < FEW and info.inplace_variant is not None:
        found["in-place"] = lambda x, *args, **kwargs: info.inplace_variant(x.clone(), *args, **kwargs)
    return found


def verdicts_of(name: str) -> Iterator[tuple[str, str]]:
    info = operators()[name]
    first, second = draw(info, 0), draw(info, 1)
    for index in chosen(first):
        again = index < len(second) and first[index].geometry == second[index].geometry
        calls = [first[index], second[index]] if again else [first[index]]
        for form, function in forms(info, index).items():
            for check_trace in (False, True) if ALL_SAMPLES and form == "function" else (False,):
                kind, why = verdict(function, calls, TOLERANCE.get(name, 1e-4), check_trace=check_trace)
                yield kind, why if kind == RIGHT else f"sample {index}, {form}, check_trace={check_trace}: {why}"


@functools.cache
def worst_of(name: str) -> tuple[str, str]:
    """The worst verdict over samples; of those that are right the most informative."""
    order = [SKIPPED, RIGHT, REFUSED, WRONG]
    return max(verdicts_of(name), key=lambda row: (order.index(row[0]), row[1] == INFORMATIVE))


@pytest.mark.parametrize("chunk", some(range(CHUNKS), CHUNKS))
def test_no_operator_is_wrong(chunk: int) -> None:
    found = {name: worst_of(name) for name in list(operators())[chunk::CHUNKS]}
    wrong = [
        f"{name}: {why}"
        for name, (kind, why) in found.items()
        if kind == WRONG or (kind == SKIPPED and not ALL_SAMPLES)
    ]
    assert not wrong, "\n\n".join(wrong)


@exhaustive
def test_nearly_all_operators_are_right_and_could_have_been_wrong() -> None:
    found = {name: worst_of(name) for name in operators()}
    assert len(found) > 500
    refused = {name: why for name, (kind, why) in found.items() if kind == REFUSED}
    print(Counter(kind for kind, _ in found.values()), *(f"{k}: {v}" for k, v in refused.items()), sep="\n")
    # Shapes that depend on values, values that torch itself reads, and sparse tensors.
    assert len(refused) <= (25 if ALL_SAMPLES else 15), sorted(refused)
    dull = [name for name, (kind, why) in found.items() if kind == RIGHT and why != INFORMATIVE]
    assert len(dull) < 60, dull


# --- on two ranks, and compiled ----------------------------------------------------------------------


def over_ranks(names: list[str]) -> list[str]:
    """Each rank has data of its own; a tree of ones that is multiplied with it is the parameter. Who is wrong."""
    rank, wrong = dist.get_rank(), []
    for name in names:
        info = operators()[name]
        here, there = draw(info, 0), draw(info, 1)
        index = chosen(here)[0]
        if index >= len(there) or here[index].geometry != there[index].geometry:
            continue
        first, data = here[index], (here, there)[rank][index]

        def scaled_step(scales: Any, batch: Any, op: Any = info.op, first: Sample = first) -> Any:
            def loss_fn(scales: Any) -> torch.Tensor:
                params = [p * scale for p, scale in zip(batch[0], scales, strict=True)]
                return called(op, first, params, batch[1])[0]

            loss, grads = fdp.value_and_grad(loss_fn)(scales)
            return fdp.pmean(loss), grads

        scales = [torch.ones_like(p) for p in data.params]
        loss, grads, _, _ = by_hand(info.op, first, data)
        expected = [loss, *(g * p for g, p in zip(grads, data.params, strict=True))]
        for value in expected:
            dist.all_reduce(value)
            value /= 2
        SEED(3)
        loss, grads = fdp.data_parallel(scaled_step)(scales, (data.params, data.others))
        try:
            torch.testing.assert_close([loss, *grads], expected, rtol=1e-4, atol=1e-5, equal_nan=True)
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    return wrong


def spread(distance: int) -> list[str]:
    """Operators that are right by themselves, some way apart from each other."""
    return [name for name in list(operators())[1::distance] if worst_of(name)[0] == RIGHT]


@exhaustive
def test_operators_on_two_ranks() -> None:
    names = spread(5)
    assert len(names) > 8
    assert ranks.run(2, over_ranks, names, deadline_s=240) == [[], []]


def draws(name: str) -> bool:
    """Whether an operator draws random numbers; those of a compiled program are others."""
    sample = draw(operators()[name], 0)[0]
    first, second = by_hand(operators()[name].op, sample, sample), by_hand(operators()[name].op, sample, sample, seed=4)
    return not torch.allclose(first[0], second[0], equal_nan=True)


@exhaustive
def test_operators_in_compiled_steps() -> None:
    """Several in one step, since each compilation takes seconds; by themselves where that is refused."""
    names = [name for name in spread(4) if not draws(name)]
    size, wrong, refused = 12, [], []
    for start in range(0, len(names), size):
        for group in (names[start : start + size], *([name] for name in names[start : start + size])):
            try:
                compile_together(group)
                if len(group) > 1:
                    break
            except AssertionError as error:
                wrong += [f"{group[0]}: {error}"] if len(group) == 1 else []
            except fdp.FdpError as error:
                assert is_refused(error), error
                refused += [f"{group[0]}: {error}"] if len(group) == 1 else []
    print(len(names), "compiled;", *refused, sep="\n")
    assert not wrong, "\n\n".join(wrong)
    assert len(refused) <= len(names) // 10, refused


def compile_together(names: list[str]) -> None:
    infos = [operators()[name] for name in names]
    samples = [draw(info, 0) for info in infos]
    firsts = [found[chosen(found)[0]] for found in samples]

    def operators_step(params: Any, others: Any) -> Any:
        results = []
        for info, first, own, rest in zip(infos, firsts, params, others, strict=True):

            def loss_fn(own: Any, op: Any = info.op, first: Sample = first, rest: Any = rest) -> torch.Tensor:
                return called(op, first, own, rest)[0]

            results.append(fdp.value_and_grad(loss_fn)(own))
        return results

    got = fdp.data_parallel(operators_step, check_replication=False, compile=True, check_trace=False)(
        [first.params for first in firsts], [first.others for first in firsts]
    )
    for name, info, first, (loss, grads) in zip(names, infos, firsts, got, strict=True):
        expected = by_hand(info.op, first, first)
        torch.testing.assert_close(
            (loss, grads),
            expected[:2],
            rtol=1e-3,
            atol=1e-4,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )
