"""Fake-tensor rules for operators that have none in torch, or wrong ones.

(This relies on every operator passing through `FakeTensorMode.dispatch`. A subclass of the mode would be unknown to
torch.cond and the like.)
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch.fx.node import map_aggregate

from fdp.errors import TraceError, build_message
from fdp.pytorch.overloads import OpOverload, schema_of
from fdp.trace.operators.effects import FUSED_OPTIMIZERS
from fdp.trace.operators.kernel_strides import KernelStrides

_CTC_LOSS = (torch.ops.aten._ctc_loss.default, torch.ops.aten._ctc_loss.Tensor)

_REAL = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""Types of tensors with values: closed-over ones."""

_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
"""What `torch.tensor` calls on the numbers that it was given, as a tensor with values."""

_DROPOUT = torch.ops.aten.native_dropout.default

_FUSED_LSTM = torch.ops.aten.mkldnn_rnn_layer.default
"""An operator whose derivative cannot be replayed."""

_BATCH_NORMS = {torch.ops.aten.native_batch_norm.default: 0, torch.ops.aten.native_batch_norm_backward.default: 1}
"""Operators whose rule for fake tensors is amended, and where their input stands among the arguments."""


_RANGE = torch.ops.aten.arange.start_step
"""An operator whose rule refuses a step between -1 and 1 where the results are whole numbers: its kernel takes it."""

LOSS_GRADIENTS = tuple(
    getattr(torch.ops.aten, f"{name}_loss_backward").default for name in ("mse", "smooth_l1", "huber")
)
"""Operators whose rule divides by the number of elements, as a Python number."""


def add_fake_rules(fake_mode: Any) -> Callable[[], bool]:
    """Add rules for operators that have none for fake tensors, or wrong ones, to a mode.

    A fused optimizer does nothing to fake tensors. Some of its overloads (those whose learning rate is a tensor) have
    no rule. The mode would then run the real kernel on as many zeros as there are parameters, gradients and moments,
    only to learn that it returns nothing: seconds, and a second copy of the state.
    The table of a CTC loss is as wide as the longest target, which its rule does not know. It is taken to be as wide as
    it can be: only the operator's own derivative sees it, which gets the real one.
    Dropout that drops nothing hands its very argument back by its rule, and a new tensor by its kernel for CPUs: to the
    tracer the argument would be that result from there on.
    The gradient of a mean over no elements has none, and its rule divides by their number.
    A range of whole numbers has as many as its bounds and step say before they are made whole; with a step that becomes
    0 its kernel repeats the first one, and its rule refuses.
    A change of a list in place is counted by the kernels of its entries, which do not run. If it were not counted, the
    derivative of a view of an entry would leave it out.

    Returns:
        A function that says whether an operator has come by since.
    """
    dispatch, asked = fake_mode.dispatch, False
    kernels = KernelStrides()

    def stand_in(tensor: Any) -> Any:
        if type(tensor) not in _REAL:
            return tensor
        # Another object each time, as what is remembered for the tensor must not be turned.
        remembered = fake_mode.from_tensor(tensor, static_shapes=True)
        return dispatch(torch.ops.aten.detach.default, (), (remembered,), {})

    def dispatch_all_others(func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Any) -> object:
        nonlocal asked
        asked = True
        traits = _traits_of(func)
        if traits.fused_optimizer:
            return None
        if func in _CTC_LOSS:
            with fake_mode:
                return _ctc_results(args[0], args[1], args[3])
        if func is _RANGE and (length := _length_of_repeats(*args, **(kwargs or {}))) is not None:
            with fake_mode:
                return torch.empty(length, dtype=kwargs["dtype"], device=kwargs.get("device"))
        if func in LOSS_GRADIENTS and args[1].numel() == 0:
            with fake_mode:
                return torch.empty_like(args[1])
        if traits.runs_on_real and (traits.mutable or any(type(value) in _REAL for value in args[:2])):
            # Of closed-over tensors and numbers alone an operator would be run, as if it made a constant.
            args, kwargs = map_aggregate((tuple(args), dict(kwargs or {})), stand_in)
        if func is _FUSED_LSTM:
            raise TraceError(
                build_message(
                    "an LSTM is computed by an operator of oneDNN's whose derivative cannot be replayed.",
                    remedy="call torch.nn.LSTM or torch.lstm, which are traced operator by operator; or switch oneDNN "
                    "off around the call of the step: torch.backends.mkldnn.flags(enabled=False).",
                )
            )
        result = dispatch(func, types, args, kwargs)
        if traits.changes_a_list:
            torch.autograd.graph.increment_version(args[0])
        if func is _DROPOUT and result[0] is args[0] and (args[2] is not False or args[0].device.type == "cpu"):
            with fake_mode:
                return torch.empty_like(args[0]), result[1]
        if func in _LIFTS and result.constant is None:
            with fake_mode:
                return torch.empty_like(result)  # its own memory, and not that of the tensor with values
        if func in _BATCH_NORMS:
            return _laid_out(fake_mode, func, args, result)
        return _as_its_kernel(fake_mode, kernels, func, args, kwargs or {}, result)

    fake_mode.dispatch = dispatch_all_others
    return lambda: asked


def _length_of_repeats(
    start: object, end: object, step: object = 1, dtype: torch.dtype | None = None, **_: object
) -> int | None:
    """How often a range of whole numbers repeats its first one; None where its step does not become 0.

    Of int64 its kernel refuses such a step as well.
    """
    if dtype is None or dtype.is_floating_point or dtype.is_complex or dtype in (torch.int64, torch.bool):
        return None
    if not isinstance(step, float) or not 0 < abs(step) < 1:
        return None
    if not isinstance(start, (int, float)) or not isinstance(end, (int, float)):
        return None
    length = (end - start) / step
    return math.ceil(length) if length >= 0 else None


@dataclasses.dataclass(frozen=True)
class _Traits:
    """What the rules ask of an operator, at each call of it.

    Attributes:
        fused_optimizer: it updates every parameter of a list, and returns nothing.
        changes_a_list: it changes each tensor of a list in place.
        mutable: it writes to an argument.
        runs_on_real: on tensors with values alone, torch would run its kernel.
    """

    fused_optimizer: bool = False
    changes_a_list: bool = False
    mutable: bool = False
    runs_on_real: bool = False


@functools.cache
def _traits_of(func: object) -> _Traits:
    if not isinstance(func, OpOverload):
        return _Traits()
    schema = schema_of(func)
    return _Traits(
        fused_optimizer=schema.name.removeprefix("aten::") in FUSED_OPTIMIZERS,
        changes_a_list=schema.name.startswith("aten::_foreach_") and schema.name.endswith("_"),
        mutable=schema.is_mutable,
        runs_on_real=func.namespace != "fdp" and func not in _LIFTS,
    )


def _as_its_kernel(
    fake_mode: Any, kernels: KernelStrides, func: Any, args: Sequence[Any], kwargs: Any, result: Any
) -> Any:
    """Results with the strides that the operator's kernel returns."""
    whole = result if isinstance(result, (list, tuple)) else [result]
    results = [each for each in whole if isinstance(each, torch.Tensor)]
    strides = kernels.of(func, args, kwargs, results)
    if strides is None or all(tuple(x.stride()) == lies for x, lies in zip(results, strides, strict=True)):
        return result
    rest = iter(strides)
    with fake_mode:
        made = [
            torch.empty_strided(x.shape, next(rest), dtype=x.dtype, device=x.device)
            if isinstance(x, torch.Tensor)
            else x
            for x in whole
        ]
    if whole is not result:
        return made[0]
    return made if isinstance(result, list) else tuple(made)


def _ctc_results(log_probs: torch.Tensor, targets: torch.Tensor, lengths: Any) -> tuple[torch.Tensor, torch.Tensor]:
    time, batch, _ = log_probs.shape
    longest = targets.shape[-1] if isinstance(lengths, torch.Tensor) else max(lengths, default=0)
    return log_probs.new_empty(batch), log_probs.new_empty(batch, time, 2 * longest + 1)


def _laid_out(fake_mode: Any, func: Any, args: Sequence[Any], result: Any) -> Any:
    """The results of batch normalisation, with the strides of its CPU kernel.

    The rule for fake tensors keeps the strides of the input, and of a transposed one the kernel does not: a view of the
    result that is possible in one layout is not in the other. It also takes statistics to be of the dtype of the input,
    which under autocast is narrower than that of the parameters.
    """
    at = _BATCH_NORMS[func]
    x, (first, *others) = args[at], result
    if x.device.type != "cpu":
        return result
    wide = next((t.dtype for t in args[at + 1 : at + 4] if isinstance(t, torch.Tensor)), x.dtype)
    with fake_mode:
        if isinstance(first, torch.Tensor):
            # Private to torch, and what its kernels ask for the layout of their results.
            first = torch.empty_like(first, memory_format=suggest_memory_format(x))
        others = [torch.empty_like(t, dtype=wide) if isinstance(t, torch.Tensor) else t for t in others]
    return (first, *others)
