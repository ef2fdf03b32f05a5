"""What the fused optimizers of torch compute, in elementary operators: for a compiler that cannot take the fused ones.

Each function takes the arguments of the operator of its name, and changes in place what that one changes. Numbers are
as wide as in the kernels: at least float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_Tensors = Sequence[torch.Tensor]


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _number(tensor: Any) -> Any:
    """A tensor of one element, as one without dimensions: those do not widen what they are multiplied with."""
    return tensor.reshape(()) if isinstance(tensor, torch.Tensor) else tensor


def _put(target: torch.Tensor, value: torch.Tensor, found_inf: torch.Tensor | None) -> None:
    """Change a value, unless gradients were found to be infinite."""
    target.copy_(value if found_inf is None else torch.where(found_inf == 1, _wide(target), value))


def _adam(
    decoupled: bool, params: _Tensors, grads: _Tensors, exp_avgs: _Tensors, exp_avg_sqs: _Tensors, maxima: _Tensors,
    steps: _Tensors, *, lr: Any, beta1: float, beta2: float, weight_decay: float, eps: float, amsgrad: bool,
    maximize: bool, grad_scale: torch.Tensor | None = None, found_inf: torch.Tensor | None = None,
) -> None:  # fmt: skip
    lr = _number(lr)
    for at, (target, step) in enumerate(zip(params, steps, strict=True)):
        param, grad = _wide(target), _wide(grads[at])
        grad = -grad if maximize else grad
        if weight_decay and decoupled:
            param = param - lr * weight_decay * param
        elif weight_decay:
            grad = grad + weight_decay * param
        first, second = _wide(exp_avgs[at]), _wide(exp_avg_sqs[at])
        first = first + (1 - beta1) * (grad - first)
        second = second * beta2 + (1 - beta2) * grad * grad
        largest = torch.maximum(_wide(maxima[at]), second) if amsgrad else second
        # Powers of numbers near one lose their digits in float32.
        count = _number(step).double()
        size, root = lr / (1 - beta1**count), (1 - beta2**count).sqrt()
        param = param - size.to(param.dtype) * first / (largest.sqrt() / root.to(param.dtype) + eps)
        _put(target, param, found_inf)
        _put(exp_avgs[at], first, found_inf)
        _put(exp_avg_sqs[at], second, found_inf)
        if amsgrad:
            _put(maxima[at], largest, found_inf)


def _fused_adam_(*args: Any, **kwargs: Any) -> None:
    _adam(False, *args, **kwargs)


def _fused_adamw_(*args: Any, **kwargs: Any) -> None:
    _adam(True, *args, **kwargs)


def _fused_sgd_(
    params: _Tensors, grads: _Tensors, momenta: _Tensors, *, weight_decay: float, momentum: float, lr: Any,
    dampening: float, nesterov: bool, maximize: bool, is_first_step: bool, grad_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
) -> None:  # fmt: skip
    lr = _number(lr)
    for at, target in enumerate(params):
        param, grad = _wide(target), _wide(grads[at])
        grad = -grad if maximize else grad
        if weight_decay:
            grad = grad + weight_decay * param
        if momentum:
            kept = grad if is_first_step else momentum * _wide(momenta[at]) + (1 - dampening) * grad
            _put(momenta[at], kept, found_inf)
            grad = grad + momentum * kept if nesterov else kept
        _put(target, param - lr * grad, found_inf)


def _fused_adagrad_(
    params: _Tensors, grads: _Tensors, sums: _Tensors, steps: _Tensors, *, lr: Any, lr_decay: float,
    weight_decay: float, eps: float, maximize: bool, grad_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
) -> None:  # fmt: skip
    lr = _number(lr)
    for at, (target, step) in enumerate(zip(params, steps, strict=True)):
        param, grad = _wide(target), _wide(grads[at])
        grad = -grad if maximize else grad
        if weight_decay:
            grad = grad + weight_decay * param
        size = lr / (1 + (_number(step).double() - 1) * lr_decay)
        total = _wide(sums[at]) + grad * grad
        _put(sums[at], total, found_inf)
        _put(target, param - size.to(param.dtype) * grad / (total.sqrt() + eps), found_inf)


UPDATES: Mapping[str, Callable[..., None]] = {
    update.__name__: update for update in (_fused_adam_, _fused_adamw_, _fused_sgd_, _fused_adagrad_)
}
"""By the bare name of the operator."""
