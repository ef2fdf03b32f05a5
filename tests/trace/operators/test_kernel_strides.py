"""Results lie as plain PyTorch's where its rules for tensors without values say other strides than its kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from samples import exhaustive

import fdp


def rows_of(shape: tuple[int, ...], **kwargs: Any) -> Callable[[], torch.Tensor]:
    return lambda: (torch.arange(float(torch.Size(shape).numel())).view(shape) / 7).contiguous(**kwargs)


FUNCTIONS: list[tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[], torch.Tensor]]] = [
    (F.logsigmoid, lambda: rows_of((3, 2))().t()),
    (lambda x: 2**x, lambda: rows_of((3, 2))().t()),
    (lambda x: torch.roll(x, 1, 1), rows_of((2, 4, 3, 3), memory_format=torch.channels_last)),
    (lambda x: F.channel_shuffle(x, 2), rows_of((2, 4, 3, 3), memory_format=torch.channels_last)),
    (lambda x: torch.div(x, 2, rounding_mode="floor"), lambda: rows_of((3, 2))().t()),
    (lambda x: fdp.grad(lambda q: F.huber_loss(q, torch.zeros_like(x)))(x), lambda: rows_of((3, 2))().t()),
    (lambda x: F.conv2d(x, torch.ones(4, 4, 1, 1)), rows_of((2, 4, 3, 3), memory_format=torch.channels_last)),
    (
        lambda x: F.conv2d(x, torch.ones(16, 16, 3, 3), padding=1),
        rows_of((16, 16, 16, 16), memory_format=torch.channels_last),
    ),
    (lambda x: torch.softmax(x, 1), rows_of((2, 1, 3, 3), memory_format=torch.channels_last)),
]


@pytest.mark.parametrize("donate", [pytest.param((), marks=exhaustive), 0])
@pytest.mark.parametrize("number", range(len(FUNCTIONS)))
def test_a_trace_knows_how_kernels_lay_their_results_out(number: int, donate: Any) -> None:
    """Whether `contiguous` copies a value, and what channels_last takes it for; also of state that is fed back."""
    function, first = FUNCTIONS[number]

    def step(state: torch.Tensor, _: Any) -> Any:
        made = function(state)
        made.detach().contiguous().clamp_(max=-1.0)
        return made, made.sum()

    run, expected, state = fdp.data_parallel(step, donate_argnums=donate), first(), first()
    for _ in range(3):
        expected, total = step(expected, None)
        state, found = run(state, torch.ones(2))
        assert state.stride() == expected.stride()
        torch.testing.assert_close((state, found), (expected, total))


def normalised(state: torch.Tensor, _: Any) -> torch.Tensor:
    weight = torch.eye(16)[:, :, None, None].expand(16, 16, 3, 3)
    return fdp.grad(lambda x: F.group_norm(F.conv2d(x, weight, padding=1), 4).relu().square().sum())(state)


def test_kernels_are_chosen_as_around_the_call() -> None:
    """Of a convolution oneDNN makes channels_last, and torch's own kernel rows; what follows reads it accordingly."""
    state = rows_of((16, 16, 16, 16), memory_format=torch.channels_last)()
    run = fdp.data_parallel(normalised, check_trace=False)
    try:
        for enabled in (True, False, True):
            torch._C._set_mkldnn_enabled(enabled)
            found, expected = run(state, torch.ones(2)), normalised(state, None)
            assert found.stride() == expected.stride()
            torch.testing.assert_close(found, expected)
    finally:
        torch._C._set_mkldnn_enabled(True)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.SGD])
def test_numbers_that_are_read_from_tensors_stay_unread(cls: Any) -> None:
    """The learning rate, the count of steps: operators on a parameter that lies turned are given them as numbers."""
    rule = fdp.optim.from_torch(cls, lr=0.1)
    params, grads = {"w": torch.randn(4, 3).t()}, {"w": torch.randn(3, 4)}
    state = rule.init(params)
    step = fdp.data_parallel(lambda params, state, grads: rule.update(grads, state, params), batch_argnums=())
    expected = rule.update(grads, state, params)
    torch.testing.assert_close(step(params, state, grads), expected, rtol=0, atol=0)
