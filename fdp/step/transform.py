"""`data_parallel`: the transform, which makes a `Step` of a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar, overload

import torch

from fdp.distributed.group import Ranks
from fdp.distributed.wire import resolve_wire
from fdp.errors import ArgumentError, build_message
from fdp.plan import Network
from fdp.plan.buckets import Caps
from fdp.step.step import Step
from fdp.tracebacks import hiding_frames

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@overload
def data_parallel(
    step_fn: Callable[Arguments, Result],
    *,
    batch_argnums: int | Iterable[int] = -1,
    static_argnums: int | Iterable[int] = (),
    donate_argnums: int | Iterable[int] = (),
    group: Ranks = None,
    bucket_cap_mb: Caps = "auto",
    compile: bool | dict[str, Any] = False,
    check_replication: bool = True,
    check_trace: bool = True,
    check_finite: bool = False,
    wire_dtype: torch.dtype | None = None,
    accumulate_dtype: torch.dtype | None = None,
    network: Network | None = None,
    memory_limit_mb: float | None = None,
) -> Step[Arguments, Result]: ...


@overload
def data_parallel(
    step_fn: None = None,
    *,
    batch_argnums: int | Iterable[int] = -1,
    static_argnums: int | Iterable[int] = (),
    donate_argnums: int | Iterable[int] = (),
    group: Ranks = None,
    bucket_cap_mb: Caps = "auto",
    compile: bool | dict[str, Any] = False,
    check_replication: bool = True,
    check_trace: bool = True,
    check_finite: bool = False,
    wire_dtype: torch.dtype | None = None,
    accumulate_dtype: torch.dtype | None = None,
    network: Network | None = None,
    memory_limit_mb: float | None = None,
) -> Callable[[Callable[Arguments, Result]], Step[Arguments, Result]]: ...


@hiding_frames
def data_parallel(
    step_fn: Callable[..., Any] | None = None,
    *,
    batch_argnums: int | Iterable[int] = -1,
    static_argnums: int | Iterable[int] = (),
    donate_argnums: int | Iterable[int] = (),
    group: Ranks = None,
    bucket_cap_mb: Caps = "auto",
    compile: bool | dict[str, Any] = False,
    check_replication: bool = True,
    check_trace: bool = True,
    check_finite: bool = False,
    wire_dtype: torch.dtype | None = None,
    accumulate_dtype: torch.dtype | None = None,
    network: Network | None = None,
    memory_limit_mb: float | None = None,
) -> Any:
    """Make a step run on many ranks: trace it, plan its communication, and emit a step that overlaps the two.

    Args:
        step_fn: a pure function of pytrees of tensors; None makes a decorator.
        batch_argnums: positions of the arguments that differ from rank to rank; all others are replicated state.
        static_argnums: positions of arguments that are constants of the trace; they are hashed and compared.
        donate_argnums: positions of arguments whose memory the step may reuse for its results. Use what the step
            returns: a tensor that was passed holds its new value afterwards where that has the same shape, dtype and
            strides, and something else where it has not. An error in the midst of a run (a rank is gone, memory runs
            out) leaves it partly overwritten: go on from a checkpoint.
        group: a `ProcessGroup`, a `DeviceMesh`, or None for the default group (a world of one, if none is initialised).
            On a mesh of several dimensions gradients are averaged over all ranks, collectives also take `axis=`, and
            sharded state is divided along the last dimension and replicated along the others.
        bucket_cap_mb: size limit of a bucket in MiB; a list of limits (first bucket, next, ...); or "auto": the first
            call measures the step and the network, and chooses the buckets with which the step ends earliest.
        compile: False runs the emitted program operator by operator. True compiles the whole step (forward, backward,
            messages and updates) with inductor; a dict gives settings of `torch._inductor.config`, and "mode" as in
            `torch.compile`: {"mode": "max-autotune"}.
        check_replication: whether outputs must be equal on every rank unless declared with `fdp.per_rank`, and
            whether ranks compare the bits of their state: before they first communicate, and then a part at each call,
            so that every replicated leaf is compared within 100 calls. It counts if it is set on all ranks.
        check_trace: whether a new trace is compared with the step itself, and what was compiled likewise: at the first
            call, and now and then at later ones, for a hundredth of their time.
        check_finite: whether a call in which a gradient of `value_and_grad` or `grad` holds a NaN or an infinity, on
            any rank, or as a mean, raises NonFiniteError on every rank in place of returning. Its arguments stay what
            they were, so donation then saves no memory. Each call waits for the flags.
        wire_dtype: torch.bfloat16 or torch.float16, in which wider gradients of `value_and_grad` and `grad` are sent;
            None sends them as they are.
        accumulate_dtype: torch.float32, to add them up in; None adds them up in the type that they are sent in.
        network: an `fdp.Network` to choose buckets for; None measures the group's, where "auto" needs it.
        memory_limit_mb: the most that a rank may hold while the step runs, in MiB, as `Plan.memory` predicts it. If the
            step takes more, some sharded state is gathered again for the backward pass, and messages are small. If
            that is still too much, the first call raises ArgumentError with the least that is possible. None for no
            limit.

    Returns:
        A `Step`, or a decorator that makes one.

    Raises:
        ArgumentError: an option has no meaning.

    Example:
        >>> import fdp
        >>> @fdp.data_parallel
        ... def step(w, batch):
        ...     loss, grad = fdp.value_and_grad(lambda w: ((batch @ w) ** 2).mean())(w)
        ...     return w - 0.1 * grad, fdp.pmean(loss)
        >>> step(torch.tensor([1.0, 2.0]), torch.eye(2))
        (tensor([0.9000, 1.8000]), tensor(2.5000))

    References:
        Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training (VLDB 2020).
    """
    options: dict[str, Any] = {
        "batch_argnums": batch_argnums,
        "static_argnums": static_argnums,
        "donate_argnums": donate_argnums,
        "group": group,
        "bucket_cap_mb": bucket_cap_mb,
        "compile": compile,
        "check_replication": check_replication,
        "check_trace": check_trace,
        "check_finite": check_finite,
        "network": network,
        "memory_limit_mb": memory_limit_mb,
    }
    if step_fn is None:
        return lambda fn: data_parallel(fn, wire_dtype=wire_dtype, accumulate_dtype=accumulate_dtype, **options)
    if not callable(step_fn):
        raise ArgumentError(
            build_message(
                f"data_parallel was given {type(step_fn).__name__}, not a function.",
                remedy="decorate a function: @fdp.data_parallel or @fdp.data_parallel(donate_argnums=0).",
            )
        )
    if isinstance(step_fn, torch.nn.Module):
        raise ArgumentError(
            build_message(
                f"data_parallel was given the module {type(step_fn).__name__}; it transforms training steps.",
                remedy="apply, params, buffers = fdp.from_module(module), and decorate a step that calls apply.",
            )
        )
    return Step(step_fn, wire=resolve_wire(wire_dtype, accumulate_dtype), **options)
