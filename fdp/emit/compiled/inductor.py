"""Lowering a graph with inductor. All that fdp relies on in inductor's private parts is in this file.

What is relied on (torch 2.13 to 2.15; `fdp.pytorch.parts` lists the names):

- `torch._inductor.decomposition.select_decomp_table()`: how inductor wants operators taken apart, under its settings.
- `compile_fx._recursive_joint_graph_passes(graph)`, `compile_fx.compile_fx_inner(graph, inputs, is_inference=True)`:
  what `torch.compile` itself calls for a graph without gradients. The second is the only entry that takes operators
  that change their arguments; what it returns takes one list of inputs, empties it, and returns a flat sequence.
- The scheduler keeps the order of the graph where `KEPT` says so, but for what it fuses: that stands where the first
  of it stood. `V.set_choices_handler(InductorChoices)` has a say in each fusion; `min_order` of a scheduler's node is
  its place in the graph, `ancestors` are the names of all that it needs.
- `V.set_fake_mode`, and what `fake_modes` says: where inductor looks for the mode of example values.
- `torch._inductor.lowering.lowerings`, `make_fallback`: from operators to the functions that lower them;
  `V.graph.mark_buffer_mutated(name)`: lets all that reads a buffer, and has only been noted down, come before.
- `cpu_vec_isa`: `supported_vec_isa_list`, the best first, of which each is tried with the C++ compiler by `bool()`;
  `x86_isa_checker()`, the names of those that the processor has; `valid_vec_isa_list()` keeps what it found.
- `torch._inductor.config`: names, types and values of settings; `config.patch`. `make_fx` looks at one of them, too, as
  it begins to trace.
- `scheduler.Scheduler`, `scheduler.SchedulerNode`, `ir.ExternKernel`, `V.graph.current_node`,
  `reinplace.inplaceable_ops`, `reinplace.inplaceable_foreach_ops`, `codegen.common.KernelArgs`,
  `codecache.CppPythonBindingsCodeCache`, `cpp_builder._get_optimization_cflags`: what `kernel_corrections` says of
  them; `graph.GraphLowering`: what `computed_once` says of it; `index_propagation`, `bounds.BoundVars`,
  `bound_sympy`, `lowering._full`: what `folded_values` says of them.
- `CompiledFxGraph._boxed_call`, `CompiledFxGraph.source_code`: that it takes one list, and its text.
- `meta["user_visible_output_idxs"]` of the output, `meta["eager_input_vals"]` of an operator (set in `barriers`): whose
  strides are to be what they are in the graph. That copies which change nothing are taken for their originals: `passes`
  lists the operators.

Where another torch has none of that, or other arguments to it, a step is not compiled: a `CompileError` says so.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import pathlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fdp.emit.compiled.barriers import CHANGING, start_, wait_
from fdp.emit.compiled.computed_once import mark_compared, marked_are_kept
from fdp.emit.compiled.corrections import NUMBERS_BETWEEN, no_fractions, with_corrections
from fdp.emit.compiled.folded_values import folded_values_are_rounded
from fdp.emit.compiled.kernel_corrections import (
    branches_get_strides_of_graph,
    called_as_they_are,
    changed_memory_known_by_all_names,
    lists_are_not_changed_in_place,
    read_in_float64,
    reads_ordered_after_changes,
    scatters_read_other_memory,
    whole_numbers_wrap,
)
from fdp.errors import CompileError, FdpError, build_message
from fdp.pytorch.fake_modes import fake_mode_at_work, traced_with
from fdp.pytorch.overloads import schema_of

KEPT: Mapping[str, Any] = {
    # Each of these moves operations to where it sees fit: the starts of all buckets behind the backward pass, say.
    "reorder_for_peak_memory": False,
    "reorder_for_locality": False,
    "reorder_for_compute_comm_overlap": False,
    # Others put messages together by a plan of their own.
    "bucket_all_reduces_fx": "none",
    "bucket_all_gathers_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    "_fuse_ddp_communication": False,
    # Puts loops that have nothing to do with each other into one kernel: updates of one bucket into the next one's.
    "combo_kernels": False,
    # Takes x * 1 and x + 0 for x (torch 2.14), even if x is written to later, or is donated memory that a result must
    # not share. The same arithmetic with tensors of ones and zeros (torch 2.13) is left alone as well.
    "joint_graph_constant_folding": False,
}
"""Settings that keep the order of the plan or the numbers; users cannot change them."""

_SETTLED: Mapping[str, Any] = {
    # The signature of a call was compared before; the program need not do it again for every tensor.
    "size_asserts": False,
    "alignment_asserts": False,
    "nan_asserts": False,
    # Otherwise a cast to sixteen bits and back is left out: of `x - x.bfloat16().float()` nothing is left.
    "emulate_precision_casts": True,
}
"""Defaults of settings that users may change."""

InductorSettings = Mapping[str, Any]
"""Settings of inductor that a step changes, by name."""


def settings_now() -> dict[str, Any]:
    """All settings as they are now, by name."""
    from torch._inductor import config

    return dict(config.get_config_copy())


def type_of(setting: str) -> Any:
    """The type of a setting."""
    from torch._inductor import config

    return config.get_type(setting)  # type: ignore[attr-defined]


def modes() -> dict[str, dict[str, Any]]:
    """What each mode of `torch.compile` stands for."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options())


def decompositions(settings: InductorSettings) -> Mapping[Any, Callable[..., Any]]:
    """How operators are taken apart before inductor sees them."""
    with _as_expected():
        with warnings.catch_warnings():
            # Some decompositions look into modules that only compile_fx imports; it warns of what torch does there.
            warnings.simplefilter("ignore", DeprecationWarning)
            from torch._inductor import compile_fx, config  # noqa: F401
        from torch._inductor.decomposition import select_decomp_table

        with config.patch(_patches(settings)):
            return with_corrections(select_decomp_table())


@contextmanager
def traced_under(settings: InductorSettings) -> Iterator[None]:
    """Apply the settings while a graph for inductor is traced.

    The tracer notes which operators have to round to sixteen bits where `emulate_precision_casts` is on.
    """
    with _as_expected():
        from torch._inductor import config
    with _lowering, config.patch(_patches(settings)):
        yield


_lowering = threading.RLock()
"""Held while inductor is at work: its settings, and how it lowers operators, hold for the whole process."""


def _unusable(why: str) -> CompileError:
    """The refusal if the private parts of inductor are not what this file expects."""
    return CompileError(
        build_message(
            f"torch {torch.__version__} does not have the entry to inductor that fdp knows.",
            [why],
            remedy="compile=False runs steps operator by operator; or install a torch that fdp was tested with.",
        )
    )


@contextmanager
def _as_expected() -> Iterator[None]:
    try:
        yield
    except (ImportError, AttributeError, TypeError) as error:
        raise _unusable(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}") from error


def _patches(settings: InductorSettings) -> dict[str, Any]:
    return {**_SETTLED, **settings, **KEPT, "triton.cudagraphs": False}


@dataclass(frozen=True)
class Lowered:
    """A graph that inductor compiled.

    Attributes:
        function: takes one list of inputs, empties it, and returns the outputs.
        source: the generated program.
    """

    function: Callable[[list[Any]], Sequence[torch.Tensor]]
    source: str


def lower(name: str, graph: fx.GraphModule, settings: InductorSettings) -> Lowered:
    """Compile a graph.

    Args:
        name: the user's function, for messages.
        graph: of operators that inductor's decompositions leave; it may say that operators change arguments in place.
        settings: how.

    Returns:
        The compiled graph.

    Raises:
        CompileError: inductor cannot compile it (names the operator), or is another one than fdp knows.
    """
    if _computes_nothing(graph):
        return Lowered(_run_identity(graph), graph.code)
    examples = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    with _lowering, ExitStack() as stack:
        with _as_expected():
            from torch._inductor import compile_fx, config, cpp_builder, index_propagation, lowering
            from torch._inductor.bounds import BoundVars
            from torch._inductor.codecache import CppPythonBindingsCodeCache
            from torch._inductor.codegen.common import KernelArgs
            from torch._inductor.fx_passes.reinplace import inplaceable_foreach_ops, inplaceable_ops
            from torch._inductor.graph import GraphLowering
            from torch._inductor.ir import ExternKernel
            from torch._inductor.scheduler import Scheduler, SchedulerNode
            from torch._inductor.virtualized import V
            from torch.utils._sympy import value_ranges

            mode = fake_mode_at_work([node.meta.get("val") for node in graph.graph.nodes])
            output: Any = graph.graph.output_node()
            # Results keep the strides that the step gives them; values inside may have others.
            output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
            tag = f"{torch.compiler.config.cache_key_tag} fdp {_cache_key()}"
            stack.enter_context(config.patch(_patches(settings)))
            stack.enter_context(torch.compiler.config.patch(cache_key_tag=tag))  # type: ignore[attr-defined]
            stack.enter_context(V.set_fake_mode(mode))
            stack.enter_context(V.set_choices_handler(_keeping_message_order(V.choices)))
            stack.enter_context(traced_with(mode))
            stack.enter_context(torch.no_grad())
            stack.enter_context(_cards_draw_nothing(examples))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\._inductor")  # about itself
            _lower_readers_first()
            stack.enter_context(called_as_they_are(lowering, NUMBERS_BETWEEN, no_fractions))
            stack.enter_context(reads_ordered_after_changes(SchedulerNode))
            stack.enter_context(changed_memory_known_by_all_names(Scheduler))
            stack.enter_context(scatters_read_other_memory(inplaceable_ops))
            stack.enter_context(lists_are_not_changed_in_place(inplaceable_foreach_ops))
            stack.enter_context(read_in_float64(KernelArgs, CppPythonBindingsCodeCache))
            stack.enter_context(branches_get_strides_of_graph(lowering.lowerings, ExternKernel, V))
            stack.enter_context(folded_values_are_rounded(index_propagation, lowering, value_ranges, BoundVars))
            stack.enter_context(whole_numbers_wrap(cpp_builder))
            stack.enter_context(marked_are_kept(GraphLowering))
            prepare, compile_inner = compile_fx._recursive_joint_graph_passes, compile_fx.compile_fx_inner
            inspect.signature(prepare).bind(graph)
            inspect.signature(compile_inner).bind(graph, examples, is_inference=True)
        try:
            if any(example.device.type == "cpu" for example in examples):
                _try_best_vector_isa_only()  # the first to ask for a C++ compiler
            prepared = prepare(graph)
            if _computes_nothing(prepared):
                return Lowered(_run_identity(prepared), prepared.code)
            mark_compared(prepared)
            compiled: Any = compile_inner(prepared, examples, is_inference=True)
        except FdpError:
            raise
        except Exception as error:
            raise lowering_refusal(name, error) from error
    if not getattr(compiled, "_boxed_call", False) or not hasattr(compiled, "source_code"):
        raise _unusable("what compile_fx_inner returns does not take one list of inputs, or has no text")
    return Lowered(compiled, str(compiled.source_code))


@contextmanager
def _cards_draw_nothing(examples: Sequence[torch.Tensor]) -> Iterator[None]:
    """Put the generators of CUDA devices back: to time a product, inductor draws numbers to multiply there.

    That of the CPU is left alone (`torch.random.fork_rng` would turn it back): other threads may draw meanwhile.
    """
    indices = sorted({example.device.index or 0 for example in examples if example.device.type == "cuda"})
    states = [torch.cuda.get_rng_state(index) for index in indices]
    try:
        yield
    finally:
        for index, state in zip(indices, states, strict=True):
            torch.cuda.set_rng_state(state, index)


def _computes_nothing(graph: fx.GraphModule) -> bool:
    """Whether there is nothing to compile: inductor returns such a graph itself, without source code."""
    return all(node.op in ("placeholder", "output") for node in graph.graph.nodes)


def _run_identity(graph: fx.GraphModule) -> Callable[[list[Any]], Sequence[torch.Tensor]]:
    """A graph that only returns some of its inputs, with the calling convention of a compiled one."""

    def run(inputs: list[Any]) -> Sequence[torch.Tensor]:
        given = list(inputs)
        inputs.clear()
        made: Sequence[torch.Tensor] = graph(*given)
        return made

    return run


@functools.cache
def _cache_key() -> str:
    """A hash of this package's files, for the cache key: results of another version are not reused."""
    texts = [path.read_bytes() for path in sorted(pathlib.Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:16]


def _keeping_message_order(choices: Any) -> Any:
    """Inductor's choices, but without fusions that would move work across a message.

    What is fused stands where the first part stood, and all that any part needs is moved before it. A gradient that is
    fused with another one from further back in the backward pass would put off the start of its bucket until then; an
    update that is fused with one of the next bucket would wait for that as well.
    """
    allowed = choices.can_fuse
    messages: dict[Any, list[int]] = {}

    class Keeping(type(choices)):  # type: ignore[misc]
        @staticmethod
        def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            if not allowed(scheduler, node1, node2, shared_data_score):
                return False
            parts = {part.get_name(): part.min_order for node in (node1, node2) for part in node.get_nodes()}
            first, last = min(parts.values()), max(parts.values())
            if scheduler not in messages:
                messages[scheduler] = _messages(scheduler)
            crossed = [order for order in messages[scheduler] if first < order < last]
            if not crossed:
                return True
            # What needs nothing that comes after a message may be computed before it.
            known = scheduler.name_to_node
            return not any(
                parts[part.get_name()] > crossed[0] <= known[need].min_order
                for node in (node1, node2)
                for part in node.get_nodes()
                for need in part.ancestors
                if need not in parts
            )

    return Keeping()


def _messages(scheduler: Any) -> list[int]:
    """The positions of all starts and waits in a graph, ascending."""
    return sorted(
        node.min_order
        for node in scheduler.name_to_node.values()
        if getattr(node.node, "op_overload", None) in (start_, wait_)
    )


@functools.cache
def _try_best_vector_isa_only() -> None:
    """Try the C++ compiler with this processor's best vector instructions only, not with every kind.

    Inductor tries each kind, which takes seconds where nothing is cached, and then takes the best that works. A
    compiler that knows the best of an x86 processor knows the others, which are older. Where anything is not as
    expected, inductor is left to try all.
    """
    try:
        from torch._inductor import config, cpu_vec_isa

        if config.cpp.vec_isa_ok is not None:
            return  # it has been said already
        names = cpu_vec_isa.x86_isa_checker()
        known = [isa for isa in cpu_vec_isa.supported_vec_isa_list if set(str(isa).split()) <= set(names)]
        if names and known and bool(known[0]):
            with config.patch({"cpp.vec_isa_ok": True}):
                cpu_vec_isa.valid_vec_isa_list()
    except (ImportError, AttributeError, TypeError):
        return


_lowered_last: set[Any] = set()
"""Operators that inductor now lowers after everything that reads what they change."""


def _lower_readers_first() -> None:
    """Have inductor compute readers of a tensor's old value before the operator that changes it.

    It notes pointwise arithmetic down until the result is needed. Of an operator that it does not know it computes
    what still reads changed tensors as well, but puts that behind the operator.
    """
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    def lowered(operator: Any, otherwise: Callable[..., Any]) -> Callable[..., Any]:
        arguments = schema_of(operator).arguments

        def lower_changing(*args: Any, **kwargs: Any) -> Any:
            for argument, value in zip(arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for tensor in value if isinstance(value, (list, tuple)) else [value]:
                        assert isinstance(tensor, ir.TensorBox)
                        tensor.realize()
                        V.graph.mark_buffer_mutated(tensor.get_name())
            return otherwise(*args, **kwargs)

        return lower_changing

    for operator in CHANGING:
        if operator not in _lowered_last:
            lowering.make_fallback(operator, warn=False)
            lowering.lowerings[operator] = lowered(operator, lowering.lowerings[operator])
            _lowered_last.add(operator)


def lowering_refusal(name: str, error: Exception) -> CompileError:
    """The refusal for a step that inductor cannot compile."""
    inner = getattr(error, "inner_exception", None) or error
    lines = [line.strip() for line in str(inner).strip().splitlines() if line.strip()]
    operators = [line.removeprefix("target: ") for line in lines if line.startswith("target: ")]
    first = lines[0] if lines else type(inner).__name__
    what = f"operator {operators[0]}" if operators else "an operator, or the C++ compiler"
    missing = type(inner).__name__ == "InvalidCxxCompiler"
    remedy = "install a C++ compiler (g++ or clang++), or name one in the environment variable CXX; " if missing else ""
    return CompileError(
        build_message(
            f"step {name!r} cannot be compiled: inductor "
            + ("found no C++ compiler." if missing else f"failed on {what}."),
            [f"{type(inner).__name__}: {first}"],
            remedy=remedy + "compile=False runs it operator by operator.",
        )
    )
