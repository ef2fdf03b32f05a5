"""Batch normalisation over the samples of all ranks, as a pure function: one message forward, and one back.

Each rank computes mean and centred second moment of its own samples, ranks gather those with their counts, and combine
them as Chan et al. do. There is no difference of large numbers, so the variance is accurate for data far from zero.
What is kept for the backward pass is the input, as in torch's own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fdp.collectives.markers import all_gather, vary
from fdp.collectives.operators import in_forward_mode
from fdp.collectives.transposes import Spread, StackRanks
from fdp.context.accumulating import refuse_while_accumulating
from fdp.context.axis import current_axis
from fdp.errors import ArgumentError, build_message
from fdp.pytorch.parts import require
from fdp.tracebacks import hiding_frames

_LABEL = "sync_batch_norm"


@hiding_frames
def sync_batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = True,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    active: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Normalise each channel by the statistics of the samples of all ranks.

    Results and gradients are those of one process that holds the samples of all ranks, however many each rank has;
    one may have none. Inside a step it is part of the trace, outside ranks of the default group run it together.

    Args:
        x: [samples, channels, ...], floating point; statistics of 16-bit inputs are computed in float32.
        running_mean: [channels], or None not to track it; it is not changed.
        running_var: [channels], or None.
        weight: [channels], the scale; None for one.
        bias: [channels], the shift; None for zero.
        training: whether to use the statistics of these samples, and not the running ones, where there are some.
        momentum: the share of the new statistics in the running ones; for a plain average over all batches so far
            a 0-dim tensor that holds one divided by their number, this one included.
        eps: added to the variance.
        active: 0-dim tensor; False or zero on a rank whose samples are not to count, such as a batch that `fdp.join`
            repeats: the weight that it yields will do. They are normalised all the same. None where all count.

    Returns:
        `(y, new_mean, new_var)`: y has shape and dtype of x; the running statistics, equal on every rank, are new
        tensors if `training`, else those that were given.

    Raises:
        ArgumentError: x has no channels, or others than the rest; `active` is no scalar; a single number a
            channel in a world of one.

    Example:
        >>> x = torch.tensor([[1.0], [3.0]])
        >>> y, mean, var = sync_batch_norm(x, torch.zeros(1), torch.ones(1), momentum=1.0, eps=0.0)
        >>> y.tolist(), mean.tolist(), var.tolist()
        ([[-1.0], [1.0]], [2.0], [2.0])

    References:
        Ioffe and Szegedy, Batch Normalization (2015). Chan, Golub and LeVeque, Updating Formulae and a Pairwise
        Algorithm for Computing Sample Variances (1979). `torch.nn.SyncBatchNorm`.
    """
    _check(x, active)
    _check_channels(x, running_mean=running_mean, running_var=running_var, weight=weight, bias=bias)
    if not training and running_mean is not None and running_var is not None:
        # The statistics may be wider than the input; F.batch_norm takes those of float32 for halves as well.
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, 0.0, eps), running_mean, running_var
    refuse_while_accumulating(
        "fdp.sync_batch_norm",
        "normalise each microbatch by its own samples, with nn.BatchNorm, and average the statistics that "
        "fdp.accumulate returns; or take the batch in one piece.",
    )
    axis = current_axis()
    count = x.numel() // x.shape[1]
    if count == 1 and axis.size == 1:
        raise ArgumentError(
            build_message(
                f"fdp.sync_batch_norm was given one number a channel, {list(x.shape)}, which have no variance.",
                remedy="normalise over more samples, or with training=False.",
            )
        )
    forward = in_forward_mode()  # in which what is saved for a backward pass is of no use, and plain operators do
    mean, squares = _Moments.forward(x) if forward else _Moments.apply(x)
    # A number that is this rank's own: batches may differ in length.
    own = vary(torch.tensor(float(count), dtype=mean.dtype, device="cpu"), "number").to(x.device)
    if active is not None:
        counts = active.to(x.device) != 0
        mean, squares, own = (torch.where(counts, value, 0) for value in (mean, squares, own))
    gather = all_gather if forward else StackRanks.apply
    parts = gather(torch.cat([mean, squares, own.reshape(1)]), axis.size, axis.name, _LABEL)
    means, squares, counted = parts.split([x.shape[1], x.shape[1], 1], dim=1)
    total = counted.sum()
    some = total.clamp(min=1)  # where all ranks are empty, what follows is zero and not NaN
    mean = (counted / some * means).sum(0)
    squares = (squares + counted * (means - mean).square()).sum(0)
    new_mean = _moved(running_mean, mean, momentum, total) if training else running_mean
    new_var = _moved(running_var, squares / (total - 1).clamp(min=1), momentum, total) if training else running_var
    both = torch.stack([mean, squares / some])
    mean, var = (both if forward else Spread.apply(both, axis.name, _LABEL)).unbind()
    scale = torch.rsqrt(var + eps)
    normalise = _Normalised.forward if forward else _Normalised.apply
    return normalise(x, mean, scale if weight is None else scale * weight, bias), new_mean, new_var


def synchronised_forward(module: nn.SyncBatchNorm, x: Tensor) -> Tensor:
    """What `nn.SyncBatchNorm.forward` does, on every device, by `sync_batch_norm`.

    Args:
        module: in whose place it runs; its buffers are assigned, not changed.
        x: the input.

    Returns:
        The output.

    Raises:
        ArgumentError: the module was made for another process group than the one that this runs on.
    """
    require("nn.SyncBatchNorm")
    module._check_input_dim(x)  # private to torch: it raises for a number of dimensions that the module does not take
    if not module.training:
        return nn.SyncBatchNorm.forward(module, x)
    own, running = module.process_group, current_axis().group.process_group
    if own is not None and own is not running:
        raise ArgumentError(
            build_message(
                "a SyncBatchNorm was made for one process group, and called in a step on another.",
                remedy="make it without a group: it then takes that of the step.",
            )
        )
    if not module.track_running_stats:
        return sync_batch_norm(x, None, None, module.weight, module.bias, eps=module.eps)[0]
    assert module.num_batches_tracked is not None
    module.num_batches_tracked = module.num_batches_tracked + 1
    momentum = module.momentum if module.momentum is not None else 1 / module.num_batches_tracked.double()
    y, module.running_mean, module.running_var = sync_batch_norm(
        x, module.running_mean, module.running_var, module.weight, module.bias, True, momentum, module.eps
    )
    return y


def _check(x: Tensor, active: Tensor | None) -> None:
    if x.dim() < 2 or x.shape[1] == 0 or not x.is_floating_point():
        raise ArgumentError(
            build_message(
                f"fdp.sync_batch_norm was given a {x.dtype} tensor of shape {list(x.shape)}.",
                remedy="pass floating-point numbers of shape [samples, channels, ...], with at least one channel.",
            )
        )
    if active is not None and (not isinstance(active, Tensor) or active.dim() != 0):
        got = f"shape {list(active.shape)}" if isinstance(active, Tensor) else f"type {type(active).__name__}"
        raise ArgumentError(
            build_message(
                f"fdp.sync_batch_norm was given `active` of {got}.",
                remedy="pass one scalar tensor a rank, such as the weight that fdp.join yields.",
            )
        )


def _check_channels(x: Tensor, **given: Tensor | None) -> None:
    """Refuse tensors of another number of channels: a single number would be expanded, and statistics change their
    shape."""
    odd = [f"{name}: shape {list(t.shape)}" for name, t in given.items() if t is not None and t.shape != x.shape[1:2]]
    if odd:
        raise ArgumentError(
            build_message(
                f"fdp.sync_batch_norm was given {x.shape[1]} channels, x of shape {list(x.shape)}, and others.",
                odd,
                remedy=f"pass tensors of shape [{x.shape[1]}], or None.",
            )
        )


def _moved(running: Tensor | None, new: Tensor, momentum: float | Tensor, total: Tensor) -> Tensor | None:
    """Running statistics after a batch; unchanged after one without samples."""
    if running is None:
        return None
    if isinstance(momentum, Tensor):
        momentum = momentum.to(running.device)
    moved = ((1 - momentum) * running + momentum * new.detach()).to(running.dtype)
    return torch.where(total.detach() > 0, moved, running)


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.reshape(1, -1, *[1] * (x.dim() - 2))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _others(x: Tensor) -> list[int]:
    """All dimensions but that of channels."""
    return [0, *range(2, x.dim())]


class _Moments(torch.autograd.Function):
    """Mean, and sum of squared differences from it, of each channel."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        # In two passes: as sound as Welford's algorithm, which torch.var_mean has, and much faster on CPUs.
        wide, others = _wide(x), _others(x)
        mean = wide.sum(others) / max(1, x.numel() // x.shape[1])
        return mean, (wide - _per_channel(mean, x)).square().sum(others)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(inputs[0], output[0])

    @staticmethod
    def backward(ctx: Any, grad_mean: Tensor, grad_squares: Tensor) -> Any:
        x, mean = ctx.saved_tensors
        count = max(1, x.numel() // x.shape[1])
        centred = _wide(x) - _per_channel(mean, x)
        return (centred * _per_channel(2 * grad_squares, x) + _per_channel(grad_mean / count, x)).to(x.dtype)


class _Normalised(torch.autograd.Function):
    """(x - mean) * scale + bias, of which only x is kept."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, mean: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        # Not x * scale + (bias - mean * scale), which is the difference of large numbers for data far from zero.
        y = (_wide(x) - _per_channel(mean, x)) * _per_channel(scale, x)
        return (y if bias is None else y + _per_channel(bias, x)).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, mean, scale, bias = inputs
        ctx.save_for_backward(x, mean, scale)
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, mean, scale = ctx.saved_tensors
        grad, others = _wide(grad), _others(x)
        centred = _wide(x) - _per_channel(mean, x)
        total = grad.sum(others)
        grad_scale = (grad * centred).sum(others)
        grad_bias = None if ctx.bias_dtype is None else total.to(ctx.bias_dtype)
        return (grad * _per_channel(scale, x)).to(x.dtype), -total * scale, grad_scale, grad_bias
