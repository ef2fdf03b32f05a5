"""What people do in steps that a trace cannot hold: each is right at every call, or refused with its line and a remedy.

One table. A case that runs is called twice, with other data, and is what the function itself returns both times. A
case that is refused names the line of this file that did it, and the remedy that helps there.
"""

from __future__ import annotations

import copy
import io
import json
import math
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import fdp

Tensor = torch.Tensor
Case = Callable[[Tensor, Tensor], Any]
NAMES = ["cat", "dog"]
SUMS = (lambda x: (x**2).sum(), lambda x: x.sum() * 3)


def data(call: int) -> tuple[Tensor, Tensor]:
    """Parameters [3], all positive, and a batch [4, 3]."""
    g = torch.Generator().manual_seed(call)
    return torch.rand(3, generator=g) + 0.5, torch.rand(4, 3, generator=g) + 0.1


def masked_assignment(w: Tensor, b: Tensor) -> Tensor:
    x = b.clone()
    x[x > 0.5] = 0.0
    return x * w


def masked_by_one_value(w: Tensor, b: Tensor) -> Any:
    """Masks without dimensions: the whole of what is assigned to is replaced, or nothing."""
    loss, rows, kept, whole, apart = b.sum(), b.clone(), b.clone(), b * w, w * 2
    loss[loss > 5] = 5.0
    rows[b.sum() > 6.5] = w
    rows[1:][b.sum() < 6.5] = torch.zeros(1, 1, 3)
    kept[b.sum() > 1e6] = float("nan")
    whole[w[0] > 0] = whole * 2
    apart.t()[w[0] > w[1]] = b[0, 0]
    return loss, rows, kept, whole, apart


def masked_by_one_value_and_differentiated(w: Tensor, b: Tensor) -> Any:
    def loss(w: Tensor) -> Tensor:
        x = w * b
        x[b.sum() > 6.5] = 0.5
        return (x**2).sum()

    return fdp.value_and_grad(loss)(w)


def constants_of_its_own(w: Tensor, b: Tensor) -> Any:
    """What `torch.tensor` makes is the step's own, and new at each call."""
    table, row, number = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor(2.0)
    table[0] = b.sum()
    table[1].mul_(5)
    row[0, 1:] = w[:2]
    number.mul_(b[0, 0])
    return table * w, row, number, torch.tensor([1, 2])[int(torch.tensor(0) + 1)]


def backward_and_grad(w: Tensor, b: Tensor) -> Any:
    p = w.clone().requires_grad_()
    (p * b).sum().backward()
    (p * p).sum().backward()
    return p.grad


def hook(w: Tensor, b: Tensor) -> Tensor:
    p = w.clone().requires_grad_()
    p.register_hook(lambda g: 3 * g)
    return torch.autograd.grad((p * b).sum(), p)[0]


def deep_copy(w: Tensor, b: Tensor) -> Any:
    tree = {"w": w.clone().requires_grad_(), "step": torch.tensor(3)}
    target = copy.deepcopy(tree)
    (target["w"] * b).sum().backward()
    return target["w"].grad, target["step"], tree["w"].grad is None


def kl_divergence(w: Tensor, b: Tensor) -> Any:
    def loss(w: Tensor) -> Tensor:
        posterior = D.Normal(w * b, w.exp())
        return (
            D.kl_divergence(posterior, D.Normal(0.0, 1.0)).sum()
            - D.Poisson(posterior.rsample().exp()).log_prob(b.round()).mean()
        )

    return fdp.value_and_grad(loss)(w)


def policy_gradient(w: Tensor, b: Tensor) -> Any:
    def loss(w: Tensor) -> Tensor:
        policy = D.Categorical(logits=b * w)
        action = policy.sample()
        return -(policy.log_prob(action) * b[:, 0]).mean() - 0.1 * policy.entropy().mean()

    return fdp.value_and_grad(loss)(w)


def ctc(w: Tensor, b: Tensor) -> Any:
    """The longest target is shorter than the targets are wide."""
    lengths = torch.tensor([2, 1]) - (b[0, 0] > 10).long()
    targets = torch.tensor([[1, 2, 1], [1, 1, 1]])

    def loss(w: Tensor) -> Tensor:
        logits = (b[:, None] * w).expand(4, 2, 3)
        return F.ctc_loss(logits.log_softmax(-1), targets, torch.tensor([4, 3]), lengths)

    return fdp.value_and_grad(loss)(w)


def conditional(w: Tensor, b: Tensor) -> Any:
    """One branch or the other, by the call; the function that is run by hand has gradients in both."""
    chosen = (lambda x: x**2, lambda x: (x * 3).sin())
    return fdp.value_and_grad(lambda w: torch.cond(b.sum() > 6.5, *chosen, (w * b,)).sum())(w)


def scanned(w: Tensor, b: Tensor, differentiate: bool = False) -> Any:
    def loss(w: Tensor) -> Tensor:
        return scan(lambda c, x: (c * 0.5 + x, c * x), torch.zeros(3), b * w)[1].sum()

    return fdp.value_and_grad(loss)(w) if differentiate else loss(w)


def product_scan(w: Tensor, b: Tensor) -> Any:
    return fdp.value_and_grad(lambda w: associative_scan(lambda x, y: x * y, b * w, 0, combine_mode="generic").sum())(w)


def repeated(w: Tensor, b: Tensor, differentiate: bool = False) -> Any:
    def loss(w: Tensor) -> Tensor:
        times = (b[:, 0] > 0.5).sum()
        return while_loop(lambda i, x: i < times, lambda i, x: (i + 1, x * 1.5), (torch.tensor(0), w * b))[1].sum()

    return fdp.value_and_grad(loss)(w) if differentiate else loss(w)


def leaky(w: Tensor, b: Tensor) -> Any:
    return fdp.value_and_grad(lambda w: (F.rrelu(w * (b - 0.5), training=True) * b).sum())(w)


RIGHT: dict[str, Case] = {
    "x[mask] = number": masked_assignment,
    "x[mask without dimensions] = number": masked_by_one_value,
    "gradient of x[mask without dimensions] = number": masked_by_one_value_and_differentiated,
    "tensors of numbers, changed": constants_of_its_own,
    "where": lambda w, b: torch.where(b > 0.5, b, w),
    "item in arithmetic": lambda w, b: w * b.sum().item() + round(w.sum().item(), 2),
    "list of a tensor": lambda w, b: torch.stack(list(w)[::-1]) * len(b),
    "sort, topk, argmax": lambda w, b: (b.sort(0)[0], b.topk(2)[0], b.argmax(1)),
    "cond": lambda w, b: torch.cond(b.sum() > 6.5, lambda w: w * 2, lambda w: w - 1, (w,)),
    "gradient of cond": conditional,
    "scan": scanned,
    "gradient of associative_scan": product_scan,
    "while_loop": repeated,
    "backward": backward_and_grad,
    "hook": hook,
    "copy.deepcopy": deep_copy,
    "repeat_interleave": lambda w, b: w.repeat_interleave(torch.tensor([1, 0, 2]), output_size=3),
    "distributions": kl_divergence,
    "policy gradient": policy_gradient,
    "ctc_loss": ctc,
    "rrelu": leaky,
    "complex numbers of sixteen bits": lambda w, b: (b * w).chalf(),
    "dropout": lambda w, b: F.dropout(b * w, 0.5),
    "permutation": lambda w, b: b[torch.randperm(4)] * w,
    "in-place on an intermediate": lambda w, b: (b * 2).add_(1).mul_(w),
    "print": lambda w, b: (w * 2, print(w.shape))[0],
}


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo asks for it, and hides the warning
@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
@pytest.mark.parametrize("name", list(RIGHT))
def test_what_a_step_can_do_is_right_at_every_call(name: str) -> None:
    step = fdp.data_parallel(RIGHT[name], check_replication=False)
    for call in range(3):
        torch.manual_seed(call)
        got = step(*data(call))
        torch.manual_seed(call)
        torch.testing.assert_close(got, RIGHT[name](*data(call)))
    assert step.traces == 1


def assertion(w: Tensor, b: Tensor) -> Tensor:
    assert (b < 100).all(), "too large"
    return w


def loop_with_break(w: Tensor, b: Tensor) -> Tensor:
    for row in b:
        if row.sum() > 2:
            break
        w = w + row
    return w


def cached(w: Tensor, b: Tensor, cache: dict[str, Tensor] = {}) -> Tensor:  # noqa: B006
    if "table" not in cache:
        cache["table"] = torch.arange(3.0) * 2
    return w * cache["table"]


def in_a_thread(w: Tensor, b: Tensor) -> Tensor:
    out: list[Tensor] = []
    thread = threading.Thread(target=lambda: out.append(w * 2))
    thread.start()
    thread.join()
    return out[0] + 1


def scaler(w: Tensor, b: Tensor) -> Any:
    p = nn.Parameter(w.clone())
    rule, scaler = torch.optim.SGD([p], 0.1), torch.amp.GradScaler("cpu")
    scaler.scale((p * b).sum()).backward()
    scaler.step(rule)
    return p.detach()


def saved(w: Tensor, b: Tensor) -> Tensor:
    torch.save(w, io.BytesIO())
    return w


SHAPE = "makes a tensor whose shape depends on the values of another"
VALUE = "reads the value of a tensor, which a traced step does not have"
PLACE = "reads "  # the value of a tensor; or, from torch 2.15 on, the place of a slice from one
RETURNED = "returns values of tensors as Python numbers"
UNSEEN = "made out of the trace's sight"
WHERE, MASK = "torch.where(condition, a, b)", "torch.where(mask, x, 0)"

# What was done; what is wrong with it; a part of the remedy.
# Since torch 2.15 a number that is read from a tensor may be an index or a length, and is refused for what it is used.
PLACE = f"{VALUE}|takes a slice at a place that it reads from a tensor"
LENGTH = f"{VALUE}|makes tensors whose shape depends on the values of others"

REFUSED: dict[str, tuple[Case, str, str]] = {
    "if": (lambda w, b: w if b.sum() > 3 else -w, VALUE, WHERE),
    "assert": (assertion, "asserts something about the value of a tensor", "check data before the step"),
    "loop with break": (loop_with_break, VALUE, WHERE),
    "float": (lambda w, b: w * float(b.sum()), VALUE, WHERE),
    "numpy": (lambda w, b: torch.from_numpy(np.sin(w.numpy())), VALUE, WHERE),
    "a function of numpy": (lambda w, b: np.sin(w), VALUE, WHERE),
    "max of tensors": (lambda w, b: max(w[0], w[1]), VALUE, "torch.maximum(a, b)"),
    "if a method": (lambda w, b: w if b.sqrt().max() > 3 else -w, VALUE, WHERE),
    "sorted": (lambda w, b: torch.stack(sorted(w)), VALUE, WHERE),
    "max of item": (lambda w, b: w * max(b.sum().item(), 1.0), VALUE, "torch.sym_max(a, b)"),
    "math.sqrt of item": (lambda w, b: w * math.sqrt(b.sum().item()), VALUE, "torch.sym_sqrt(number)"),
    "math.exp of item": (lambda w, b: w * math.exp(b.sum().item()), VALUE, "x.exp()"),
    "a whole power of item": (lambda w, b: w * 2 ** b.sum().long().item(), VALUE, "2.0 ** n"),
    "a list at the place of a tensor": (lambda w, b: NAMES[w.argmax() % 2] and w, VALUE, "index_select"),
    "a row at the place of a tensor": (lambda w, b: b[b[:, 0].argmax()], PLACE, "index_select"),
    "a slice up to a tensor": (lambda w, b: b[: b[:, 0].argmax()], VALUE, WHERE),
    "values at a mask without dimensions": (lambda w, b: b.clone()[b.sum() > 3], VALUE, WHERE),
    "a mask without dimensions, and more": (lambda w, b: b.clone().__setitem__((b.sum() > 3, 0), 1.0), VALUE, WHERE),
    "a row at the place of a tensor, assigned": (
        lambda w, b: b.clone().__setitem__(w.argmax(), 1.0), PLACE, "index_select"
    ),
    "a dict at a number": (lambda w, b: {1.0: w}.get(b.sum().item(), w), VALUE, WHERE),
    "zeros of a read length": (lambda w, b: torch.zeros(int(w.sum())), VALUE, WHERE),
    "arange of a read length": (lambda w, b: torch.arange(w.sum().item()), LENGTH, "mask what is too much"),
    "torch.tensor of tensors": (lambda w, b: torch.tensor([w[0], w[1]]), VALUE, "torch.stack"),
    "a format": (lambda w, b: (w, f"{b.sum():.2f}")[0], VALUE, "return a metric as a tensor"),
    "a format of a number": (lambda w, b: (w, f"{b.sum().item():.2f}")[0], VALUE, "return a metric as a tensor"),
    "json": (lambda w, b: (w, json.dumps({"loss": b.sum().item()}))[0], VALUE, "save what the step returns"),
    "a returned number": (lambda w, b: {"loss": b.sum().item()}, RETURNED, "return the tensor"),
    "a returned text": (lambda w, b: {"loss": str(b.sum())}, RETURNED, "return the tensor"),
    "a returned sparse tensor": (lambda w, b: {"loss": b.to_sparse()}, "returns sparse tensors", "x.to_dense()"),
    "torch.save": (saved, "runs by itself but cannot be traced", "fdp.save"),
    "mask": (lambda w, b: b[b > 0.5].mean() * w, SHAPE, MASK),
    "assignment from a mask": (lambda w, b: b.masked_scatter(b > 0.5, b[b > 0.5] * 2), SHAPE, MASK),
    "nonzero": (lambda w, b: (b > 0.5).nonzero(), SHAPE, MASK),
    "unique": (lambda w, b: b.unique(), SHAPE, "outside of the step"),
    "bincount": (lambda w, b: torch.bincount(b[0].long(), minlength=3), SHAPE, "index_add"),
    "repeat_interleave": (lambda w, b: w.repeat_interleave(b[0].long()), SHAPE, "output_size"),
    "lstsq": (lambda w, b: torch.linalg.lstsq(b, b).solution, SHAPE, "torch.linalg.pinv"),
    "pack_padded_sequence": (
        lambda w, b: nn.utils.rnn.pack_padded_sequence(b[:, None], torch.tensor([4])).data, SHAPE, "gather"
    ),
    "one_hot": (lambda w, b: F.one_hot(b.long()), VALUE, "num_classes"),
    "cov": (lambda w, b: torch.cov(b), VALUE, "x @ x.mT / (n - 1)"),
    "tensor_split": (lambda w, b: w.tensor_split(torch.tensor([1]))[0], VALUE, "Python numbers"),
    "ctc_loss with lengths that are numbers": (
        lambda w, b: F.ctc_loss(b[:, None].log_softmax(-1), torch.tensor([[1, 2]]), (4,), (2,)), VALUE, "as tensors"
    ),
    "gaussian_nll_loss": (lambda w, b: F.gaussian_nll_loss(b, b, b * w), VALUE, "0.5 * (v.log()"),
    "a norm that must be finite": (
        lambda w, b: nn.utils.get_total_norm([b], error_if_nonfinite=True), VALUE, "leave out error_if_nonfinite"
    ),
    "arguments of a distribution": (lambda w, b: D.Normal(w, w, validate_args=True).mean, VALUE, "validate_args"),
    "GradScaler": (scaler, VALUE, "use fdp.optim.loss_scaled(optimizer)"),
    "gradient of scan": (
        lambda w, b: scanned(w, b, differentiate=True), "runs by itself but cannot be traced", "a Python loop"
    ),
    "gradient of while_loop": (
        lambda w, b: repeated(w, b, differentiate=True), "a while_loop that is differentiated", "a Python loop"
    ),
    "gradient of cond with sums in it": (
        lambda w, b: fdp.grad(lambda w: torch.cond(b.sum() > 0, *SUMS, (w * b,)))(w),
        "runs by itself but cannot be traced", "sum behind torch.cond",
    ),
    "a thread": (in_a_thread, UNSEEN, "in the thread that called the step"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("name", list(REFUSED))
def test_what_a_step_cannot_do_is_refused_with_its_line_and_a_remedy(name: str) -> None:
    case, reason, remedy = REFUSED[name]
    with pytest.raises(fdp.TraceError) as caught:
        # Not by the comparison at the first call: by the trace itself.
        fdp.data_parallel(case, check_replication=False, check_trace=False)(*data(0))
    text = str(caught.value)
    what, *offenders, last = text.splitlines()
    assert re.search(reason, what) and f"step {case.__name__!r}" in what, text
    assert last.startswith("Remedy: ") and remedy in last, text
    if "returns" in reason:
        assert offenders[0].startswith("  output['loss']: "), text
    else:
        line = re.search(r"test_untraceable\.py:(\d+) in ([\w<>]+)", offenders[0])
        first = case.__code__.co_firstlineno
        # The innermost line: a case that calls a function of this file is refused for a line of that.
        assert line is not None and (line[2] == "loss" or first <= int(line[1]) <= first + 7), text


def test_the_part_of_torch_that_reads_a_value_is_named() -> None:
    with pytest.raises(fdp.TraceError, match=r"called from there: functional\.py:\d+ in gaussian_nll_loss, of torch"):
        fdp.data_parallel(REFUSED["gaussian_nll_loss"][0])(*data(0))


def test_a_tensor_that_was_kept_while_tracing_is_refused_by_name() -> None:
    """By the comparison at the first call, and without it by the next trace."""
    cache: dict[str, Tensor] = {}

    def step(w: Tensor, b: Tensor) -> Tensor:
        return cached(w, b, cache)

    with pytest.raises(
        fdp.TraceError, match=r"kept when it was traced.*\n  cache\['table'\]\nRemedy: make such tables"
    ):
        fdp.data_parallel(step)(*data(0))
    cache.clear()
    unchecked = fdp.data_parallel(step, check_trace=False)
    w, b = data(0)
    torch.testing.assert_close(unchecked(w, b), w * torch.arange(3.0) * 2)
    with pytest.raises(fdp.TraceError, match=r"\n  cache\['table'\], used at test_untraceable\.py:\d+ in cached\n"):
        unchecked(w, b[:2])
    cache["table"] = torch.arange(3.0) * 2
    torch.testing.assert_close(fdp.data_parallel(step)(w, b), w * cache["table"])


def test_values_are_validated_where_there_are_values() -> None:
    """The comparison at the first call runs the step as it is; the user's setting is as it was afterwards."""
    from torch.distributions import Distribution

    before = Distribution._validate_args
    Distribution.set_default_validate_args(True)  # torch.compile switches it off for good
    try:
        with pytest.raises(ValueError, match="Expected parameter scale"):
            fdp.data_parallel(lambda w, b: D.Normal(w, -w).mean)(*data(0))
        assert Distribution._validate_args
        fdp.data_parallel(lambda w, b: D.Normal(w, w).mean)(*data(0))
        assert Distribution._validate_args
    finally:
        Distribution.set_default_validate_args(before)


def test_numbers_that_are_read_are_computed_with_anew() -> None:
    def step(state: dict[str, Tensor], b: Tensor) -> Any:
        t = state["t"].item()
        size = torch.sym_sqrt(1 - 0.999**t) / (1 - 0.9**t) + 2.0**t + t**0.5 + abs(t - 2)
        return {"t": state["t"] + 1}, fdp.pmean(b * size * torch.sym_max(t, 2.0) * torch.sym_min(t, 2.0))

    for first in (torch.tensor(1.0), torch.tensor(1)):
        state, plain = {"t": first}, {"t": first}
        traced = fdp.data_parallel(step)
        for _ in range(3):
            t = plain["t"].item()
            size = math.sqrt(1 - 0.999**t) / (1 - 0.9**t) + 2.0**t + math.sqrt(t) + abs(t - 2)
            state, found = traced(state, torch.ones(2))
            torch.testing.assert_close(found, torch.full((2,), size * max(t, 2.0) * min(t, 2.0)))
            plain = {"t": plain["t"] + 1}
