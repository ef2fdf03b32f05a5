"""Run a step once on fake tensors and keep every operator that it calls, in order, as one flat graph.

What tracing needs from private parts of torch is in this file and in switches.py: here `make_fx`, the fake-tensor
mode, the shape environment, and graph modules whose code is written when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx, set_proxy_slot

from fdp.context.axis import step_axis
from fdp.distributed.group import Group
from fdp.distributed.wire import Wire
from fdp.errors import FdpError, PurityError, TraceError, build_message, error_text, first_line
from fdp.pytorch import parts
from fdp.pytorch.fake_modes import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from fdp.pytorch.overloads import OpOverload
from fdp.pytorch.recomputation import why_not
from fdp.trace.capture.raw_messages import raw_messages_refused, refused_operators
from fdp.trace.capture.remedies import MADE_SHAPE, READ_VALUE, remedy_for
from fdp.trace.capture.reshapes import refuse_foreign
from fdp.trace.capture.rng_replay import drop_unused_replays, replaying_rng_state
from fdp.trace.capture.silent_changes import UndispatchedChanges
from fdp.trace.capture.switches import (
    TRACING,
    caching_casts,
    compiling,
    copyable,
    recording,
    silenced,
    without_fused_lstm,
)
from fdp.trace.capture.value_reads import value_read_decompositions, value_reads_patched
from fdp.trace.operators.effects import effects_of, is_marker, storages_of
from fdp.trace.operators.fake_rules import add_fake_rules
from fdp.trace.operators.source import Source, failing_line, library_line, source_lines, users_lines

Geometry = tuple[Sequence[int], Sequence[int], int, torch.dtype, torch.device]
"""Shape, strides and offset in elements, dtype, device."""

_VALUE_READ_TEXTS = (
    "trying to get value out of a tracing tensor",
    "Cannot cast FakeTensor",
    ".numpy() is not supported",
    ".tolist() is not supported",
    "FakeTensor.__format__",
    "its data is not allocated yet",
    # A number that was read from a tensor, where only a plain one will do: printed with a format, as a length.
    "passed to Sym",
    "of type Sym",
    "dispatch_on_subclass called with NO overloaded args",
)


def capture(
    name: str,
    flat_step: Callable[..., Sequence[Any]],
    tensors: Sequence[torch.Tensor],
    group: Group,
    wire: Wire | None = None,
    names: Sequence[str] = (),
    closed_over: Callable[[], Mapping[int, tuple[str, torch.Tensor]]] = dict,
) -> fx.GraphModule:
    """Trace a step into a flat graph of operators; none of them runs on the values of the step.

    Of some operators the kernel is called once with zeros: no rule says how it lays its results out (`kernel_strides`).

    Args:
        name: the user's function, for messages.
        flat_step: takes fake tensors, one for each of `tensors`, and returns a flat list of tensors.
        tensors: the inputs, of which only shape, dtype, strides, device and shared memory matter.
        group: the ranks that the step runs on.
        wire: in which dtype gradients are sent; None for their own.
        names: key paths of `tensors`, for messages.
        closed_over: finds the tensors that the step can reach without being passed them: by `id`, name and tensor.

    Returns:
        A graph module with a placeholder for each tensor. Every node has an example value (`meta["val"]`, a fake
        tensor), and every operator the line of the user's code that called it (`meta["source"]`).

    Raises:
        TraceError: the step's control flow, or a shape, depends on the value of a tensor.
        PurityError: it changes a closed-over tensor, or gives an argument memory of another kind, out of the
            dispatcher's sight.
    """
    parts.require(TRACING)
    parts.warn_if_untested()
    why_not()  # looked at here, before any tracer is at work
    # Closed-over tensors are real; they become constants of the graph and are judged later.
    fake_mode = _fake_mode(allow_non_fake_inputs=True)
    fakes = _without_values(fake_mode, tensors)
    tracers: list[Any] = []
    recorded = _recorded(flat_step, names, closed_over, tracers.append)
    # Derivatives make zeros without memory. Where an operator does not know those, torch fills in zeros, and mistakes
    # the device of a fake tensor for "meta".
    with_memory: dict[Any, Callable[..., Any]] = {
        torch.ops.aten._efficientzerotensor.default: torch.ops.aten.zeros.default
    }
    # The tracer takes its arguments' mode, or that which is on.
    with step_axis("traced", group, wire), _tracing_settings(fakes), nullcontext() if fakes else fake_mode:
        try:
            table = {
                **value_read_decompositions(is_fake, _forget_false_constant),
                **with_memory,
                **refused_operators(),
            }
            tracer = make_fx(recorded, decomposition_table=table, tracing_mode="fake", _allow_non_fake_inputs=True)
            graph_module = tracer(*fakes)
        except Exception as error:
            if not isinstance(error, PurityError):
                for tracer in tracers:
                    _refuse_foreign(name, tracer, fake_mode, names, closed_over)
            if isinstance(error, FdpError):
                _add_location(name, error)
                # Of the way through the tracer, which is long, the author of the step wants to see his own lines.
                raise error.with_traceback(users_lines(error.__traceback__)) from None
            refusal = _explain(name, error)
            if refusal is None:
                raise
            raise refusal from error
    called = [node for node in graph_module.graph.nodes if node.op == "call_function"]
    if called and not any("source" in node.meta for node in called):
        raise parts.unsupported_torch(TRACING, ["the tracer makes nodes in another way than by its create_node"])
    _drop_ranges(graph_module)
    drop_unused_replays(graph_module.graph)
    _drop_dead_code(graph_module)
    _complete_examples(graph_module.graph, graph_module, fake_mode)
    return graph_module


def _without_values(fake_mode: FakeTensorMode, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Fake tensors like the inputs of a step.

    Each has memory of its own: to a pure function it does not matter which of its arguments overlap.
    """
    taught = add_fake_rules(fake_mode)
    with fake_mode, recording():
        fakes = [
            torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            for tensor in tensors
        ]
    if fakes and not (taught() and all(type(fake) is FakeTensor for fake in fakes)):
        raise parts.unsupported_torch(TRACING, ["tensors without values are not made by FakeTensorMode.dispatch"])
    return fakes


@contextmanager
def _tracing_settings(fakes: Sequence[torch.Tensor]) -> Iterator[None]:
    """The settings of torch and libraries while a step runs on fake tensors."""
    with ExitStack() as stack:
        stack.enter_context(compiling())
        stack.enter_context(recording())
        stack.enter_context(replaying_rng_state(fakes))
        # That of oneDNN cannot be replayed: its backward takes a tensor that the trace does not have.
        stack.enter_context(without_fused_lstm())
        stack.enter_context(torch.autograd.set_detect_anomaly(False))  # which reads gradients, and there are none yet
        # The code of the graph module is never run: what is emitted is. Writing it would take a tenth of the time.
        stack.enter_context(_use_lazy_graph_module(True))
        stack.enter_context(copyable(FakeTensor))
        # A mistake of the step's own is raised; torch would print it as well.
        stack.enter_context(silenced("torch._subclasses.fake_tensor"))
        yield


def _recorded(
    flat_step: Callable[..., Sequence[Any]],
    names: Sequence[str],
    closed_over: Callable[[], Mapping[int, tuple[str, torch.Tensor]]],
    begun: Callable[[Any], None],
) -> Callable[..., Sequence[Any]]:
    """The function that the tracer calls: the step, and what follows changes that call no operator. It calls `begun`
    first."""
    caches = torch.is_autocast_cache_enabled()

    def recorded(*inputs: torch.Tensor) -> Sequence[Any]:
        mode = get_proxy_mode()
        assert mode is not None
        tracer: Any = mode.tracer
        begun(tracer)

        def stand_for(tensor: Any, other: Any) -> None:
            set_proxy_slot(tensor, tracer, get_proxy_slot(other, tracer))
            tensor.fake_device, tensor.constant = other.fake_device, None

        def tracing() -> bool:
            return get_proxy_mode() is mode

        changes = UndispatchedChanges(
            inputs, names or [f"argument {i}" for i in range(len(inputs))], is_fake, stand_for,
            lambda: next(reversed(tracer.graph.nodes)), tracing, closed_over,
        )  # fmt: skip
        # Under autocast around the call, `make_fx` has a parameter converted anew at each use: its gradients would be
        # added up in another dtype.
        with (
            source_lines(tracer),
            caching_casts(caches),
            changes.patched(),
            value_reads_patched(is_fake, tracing),
            raw_messages_refused(tracing),
        ):
            return changes.write_back(flat_step(*inputs))

    return recorded


def _refuse_foreign(
    name: str,
    tracer: Any,
    fake_mode: FakeTensorMode,
    names: Sequence[str],
    closed_over: Callable[[], Mapping[int, tuple[str, torch.Tensor]]],
) -> None:
    """Refuse a step whose trace failed, if the cause is that it reshaped a tensor of its caller in place."""
    graph = tracer.graph
    _complete_examples(graph, tracer.root, fake_mode)
    inputs = names or [f"argument {i}" for i in range(len(graph.find_nodes(op="placeholder")))]
    refuse_foreign(name, graph, tracer.root, inputs, {number: known for number, (known, _) in closed_over().items()})


def _fake_mode(**options: Any) -> FakeTensorMode:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # imports sympy

    return FakeTensorMode(
        allow_fallback_kernels=True,
        # A number read from a tensor (Tensor.item() in an optimizer) is read anew at every replay. Python cannot branch
        # on it while it is traced, and no shape may depend on one.
        shape_env=ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=False),
        static_shapes=True,
        **options,
    )


def capture_functional(
    carry_out: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[Geometry],
    decompositions: Mapping[Any, Callable[..., Any]],
) -> fx.GraphModule:
    """Trace a flat function on fake tensors into a functional graph.

    Args:
        carry_out: takes one tensor for each input, and returns a flat list of tensors; it may change tensors in place.
        inputs: the geometry of each input.
        decompositions: for each operator that is not to be in the graph, the function to take it apart with.

    Returns:
        A graph module. Inputs that the function changed in place are changed at the very end of it, by `copy_`.
    """
    fake_mode = _fake_mode()
    add_fake_rules(fake_mode)
    with fake_mode:
        fakes = [
            torch.empty(
                offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if 0 not in shape else offset,
                dtype=dtype,
                device=device,
            ).as_strided(shape, stride, offset)
            for shape, stride, offset, dtype, device in inputs
        ]
    functional = torch.func.functionalize(carry_out, remove="mutations")
    with torch.no_grad(), silenced("torch._subclasses.fake_tensor"):
        return make_fx(functional, decomposition_table=dict(decompositions), tracing_mode="fake")(*fakes)


def is_fake(value: object) -> bool:
    """Whether a value is a fake tensor of a trace."""
    return isinstance(value, FakeTensor)


def _forget_false_constant(tensor: Any) -> None:
    """Unmark a constant that the fake-tensor mode does not know as one: the tracer takes closed-over tensors for
    constants."""
    mode = get_proxy_mode()
    slot: Any = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    if slot is not None and tensor.constant is None:
        slot.constant = None


def _add_location(name: str, error: FdpError) -> None:
    """Add the step's name and line to a refusal that was raised inside of the step."""
    if f"step {name!r}" in str(error):
        return
    first, *rest = str(error).split("\n")
    error.args = ("\n".join([first, f"  in step {name!r}, {_at(failing_line(error.__traceback__))}", *rest]),)


def untraceable(name: str, error: Exception) -> TraceError:
    """The refusal of a step that runs untraced, and that the tracer cannot trace."""
    line = failing_line(error.__traceback__)
    first = first_line(error) or type(error).__name__
    return TraceError(
        build_message(
            f"step {name!r} runs by itself but cannot be traced.",
            [f"{_at(line)}: {type(error).__name__}: {first}"],
            remedy=remedy_for(
                error,
                "move what needs real values or real memory out of the step, or replace it by operators that "
                "torch.compile can trace.",
            ),
        )
    )


def _explain(name: str, error: Exception) -> TraceError | None:
    """The refusal for a failure with a known remedy; None for any other."""
    line = failing_line(error.__traceback__)
    inner = library_line(error.__traceback__)
    text = error_text(error)
    if isinstance(error, DynamicOutputShapeException):
        return TraceError(
            build_message(
                f"step {name!r} makes a tensor whose shape depends on the values of another.",
                [f"{_at(line)}: {error.func}"],
                remedy=remedy_for(error, MADE_SHAPE, str(error.func)),
            )
        )
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    reads_value = isinstance(error, (DataDependentOutputException, GuardOnDataDependentSymNode))
    if reads_value or any(part in text for part in _VALUE_READ_TEXTS):
        if line is not None and line.text.startswith("assert "):
            return TraceError(
                build_message(
                    f"step {name!r} asserts something about the value of a tensor, which a traced step does not have.",
                    [f"{_at(line)}: {line.text}"],
                    remedy="check data before the step; an assertion in a library's code is left out by python -O.",
                )
            )
        return TraceError(
            build_message(
                f"step {name!r} reads the value of a tensor, which a traced step does not have: its control flow "
                "would be frozen to one branch.",
                [
                    f"{_at(line)}: if, while, bool(), float(), int(), .item(), .tolist() or .numpy() of a tensor",
                    *([] if inner is None else [f"called from there: {inner}, of torch"]),
                ],
                remedy=remedy_for(error, READ_VALUE),
            )
        )
    return None


def _at(line: Source | None) -> str:
    return str(line) if line else "at an unknown line"


def _drop_ranges(graph_module: fx.GraphModule) -> None:
    """Drop the operators that begin and end profiler ranges: the plan changes the order, so ranges would mean nothing.

    Every optimizer of torch opens one.
    """
    for module in graph_module.modules():
        if isinstance(module, fx.GraphModule):  # branches of conditions are some as well
            for node in reversed(module.graph.nodes):
                if isinstance(node.target, OpOverload) and node.target.namespace == "profiler":
                    module.graph.erase_node(node)


def _drop_dead_code(graph_module: fx.GraphModule) -> None:
    def matters(node: fx.Node) -> bool:
        if node.op in ("placeholder", "output"):
            return True
        if is_marker(node):
            # Every rank drops the same collectives: they have the same graph.
            return is_marker(node, "loop_begin", "loop_end")
        return not effects_of(node).pure

    # Not Graph.eliminate_dead_code, which first checks the whole graph for consistency.
    for node in reversed(graph_module.graph.nodes):
        if not node.users and not matters(node):
            graph_module.graph.erase_node(node)
    graph_module.recompile()


def _complete_examples(graph: fx.Graph, holder: object, fake_mode: FakeTensorMode) -> None:
    """Give each closed-over tensor one example value; the tracer makes one with new memory for each use.

    Relied on: what stands for a real tensor in a fake-tensor mode, and its memory, is remembered as long as anything of
    the graph looks at it. If it were not, views of a closed-over tensor would have other memory than the tensor.
    """
    for node in graph.nodes:
        real = getattr(holder, node.target, None) if node.op == "get_attr" else None
        if isinstance(real, torch.Tensor) and not isinstance(real, FakeTensor):
            node.meta["val"] = fake_mode.from_tensor(real, static_shapes=True)
            views = (user for user in node.users if user.op == "call_function" and effects_of(user).view)
            own = set(storages_of(node))
            if real.layout == torch.strided and any(not own.issuperset(storages_of(user)) for user in views):
                raise AssertionError("this release of PyTorch gives closed-over tensors other memory at each use")
