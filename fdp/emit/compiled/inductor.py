"""Lowering a graph with inductor. All that fdp relies on in inductor's private parts is in this file.

What is relied on (torch 2.11 to 2.13):

- `torch._inductor.decomposition.select_decomp_table()`: how inductor wants operators taken apart, under its settings.
- `compile_fx._recursive_joint_graph_passes(graph)`, `compile_fx.compile_fx_inner(graph, inputs, is_inference=True)`:
  what `torch.compile` itself calls for a graph without gradients. The second is the only entry that takes operators
  that change their arguments; what it returns takes one list of inputs, empties it, and returns a flat sequence.
- The scheduler keeps the order of the graph where `KEPT` says so, but for what it fuses.
- `torch._guards.tracing`, `V.set_fake_mode`: where inductor looks for the mode of example values.
- `torch._inductor.config`: names, types and values of settings; `config.patch`.
- `CompiledFxGraph._boxed_call`, `CompiledFxGraph.source_code`: that it takes one list, and its text.

Where another torch has none of that, or other arguments to it, `Unusable` is raised, and the step is compiled by
`torch._inductor.compile`, which is public (see `public`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fdp.errors import ArgumentError, CompileError, FdpError, build_message

KEPT: Mapping[str, Any] = {
    # Each of these moves operations to where it sees fit: the starts of all buckets behind the backward pass, say.
    "reorder_for_peak_memory": False,
    "reorder_for_locality": False,
    "reorder_for_compute_comm_overlap": False,
    # Others put all-reduces together by a plan of their own.
    "bucket_all_reduces_fx": "none",
    "_fuse_ddp_communication": False,
}
"""Settings that keep the plan; a user cannot change them."""

_SETTLED: Mapping[str, Any] = {
    # The signature of a call was compared before; the program need not do it again for every tensor.
    "size_asserts": False,
    "alignment_asserts": False,
    "nan_asserts": False,
}
"""Settings that a user may change."""

_NOT_FOR_STEPS: Mapping[str, str] = {
    "freezing": "it turns parameters into constants, and a step changes them",
    "cpp_wrapper": "a wrapper in C++ cannot call the operators that start and await messages",
    "fx_wrapper": "it leaves out the program that fdp calls",
    "aot_inductor": "a step is compiled when it is called",
}


@dataclass(frozen=True)
class Options:
    """How to compile a step.

    Attributes:
        settings: settings of inductor that differ from what holds around the call, by name.
        records: whether the whole step is to be recorded as one CUDA graph.
    """

    settings: tuple[tuple[str, Any], ...] = ()
    records: bool = False

    @property
    def draws_alike(self) -> bool:
        """Whether the compiled step draws the random numbers that the step itself would."""
        from torch._inductor import config

        return bool(dict(self.settings).get("fallback_random", config.fallback_random))

    @property
    def multiplies(self) -> bool:
        """Whether products are left to the library: without a search for a faster kernel there is nothing else."""
        from torch._inductor import config

        settings = dict(self.settings)
        return not any(settings.get(name, getattr(config, name)) for name in ("max_autotune", "max_autotune_gemm"))


def resolve_options(asked: Any) -> Options | None:
    """Read the argument `compile` of `data_parallel`.

    Args:
        asked: False, True, or a dict of inductor's settings, in which "mode" may stand for a set of them, as in
            `torch.compile`.

    Returns:
        The options, None for False.

    Raises:
        ArgumentError: a setting does not exist, has another type, or would undo the plan.
    """
    if asked is False or isinstance(asked, Options):
        return asked or None
    if asked is True:
        return Options()
    if not isinstance(asked, Mapping):
        raise ArgumentError(
            build_message(
                f"compile={asked!r} is neither True nor False nor a dict of options.",
                remedy='pass compile=True, or settings of torch._inductor.config: compile={"mode": "max-autotune"}.',
            )
        )
    settings: dict[str, Any] = {}
    if asked.get("mode") is not None:
        settings.update(_settings_of_mode(asked["mode"]))
    settings.update((str(name).replace("-", "_"), value) for name, value in asked.items() if name != "mode")
    for name, value in settings.items():
        _check(name, value)
    records = settings.pop("triton.cudagraphs", False)
    return Options(tuple(sorted(settings.items())), records)


def _settings_of_mode(mode: Any) -> Mapping[str, Any]:
    from torch._inductor import list_mode_options

    known = list_mode_options()
    if mode not in known:
        raise ArgumentError(
            build_message(f"compile has no mode {mode!r}.", remedy=f"the modes are {', '.join(map(repr, known))}.")
        )
    return dict(known[mode])


def _check(name: str, value: Any) -> None:
    from torch._inductor import config

    if name in KEPT and value != KEPT[name]:
        raise ArgumentError(
            build_message(
                f"compile={{{name!r}: {value!r}}} would let the compiler undo the plan.",
                [f"fdp keeps {name}={KEPT[name]!r}: starts and waits stay where the plan puts them"],
                remedy="leave it out; bucket_cap_mb decides what travels together.",
            )
        )
    refused = next((why for stem, why in _NOT_FOR_STEPS.items() if name == stem or name.startswith(f"{stem}.")), None)
    if refused is not None and value:
        what = f"compile={{{name!r}: {value!r}}} is not for a training step: {refused}."
        raise ArgumentError(build_message(what, remedy="leave it out."))
    known = config.get_config_copy()
    if name not in known:
        near = difflib.get_close_matches(name, [*known, "mode"], n=3)
        raise ArgumentError(
            build_message(
                f"compile has no option {name!r}.",
                [f"near to it: {', '.join(near)}"] if near else (),
                remedy="torch._inductor.list_options() lists them.",
            )
        )
    kind = config.get_type(name)  # type: ignore[attr-defined]
    if isinstance(kind, type) and not isinstance(value, kind):
        raise ArgumentError(
            build_message(
                f"compile={{{name!r}: {value!r}}}: {type(value).__name__}, where inductor takes {kind.__name__}.",
                remedy=f"its value now is {known[name]!r}.",
            )
        )


def unwrap_compiled(step_fn: Any) -> tuple[Any, Any]:
    """Take what `torch.compile` made of a function apart.

    (`_torchdynamo_orig_callable` is the function; `get_compiler_config()` gives the settings of inductor that hold in
    it, and None for another backend.)

    Args:
        step_fn: perhaps the result of `torch.compile`.

    Returns:
        The function, and the settings that it was to be compiled with; None if it was not to be.

    Raises:
        ArgumentError: it was to be compiled by another backend.
    """
    inner = getattr(step_fn, "_torchdynamo_orig_callable", None)
    if inner is None or not getattr(step_fn, "_is_torch_compile", True):
        return step_fn, None
    wanted = step_fn.get_compiler_config() if hasattr(step_fn, "get_compiler_config") else None
    if wanted is None:
        raise ArgumentError(
            build_message(
                f"data_parallel was given step {getattr(inner, '__name__', inner)!r} as compiled by a backend other "
                "than inductor, and lowers whole steps with inductor alone.",
                remedy="decorate the plain function with fdp.data_parallel(compile=True).",
            )
        )
    from torch._inductor import config

    now = config.get_config_copy()
    differing = {name: value for name, value in wanted.items() if name in now and value != now[name]}
    innermost, _ = unwrap_compiled(inner)
    return innermost, differing


def decompositions(options: Options) -> Mapping[Any, Callable[..., Any]]:
    """How operators are taken apart before inductor sees them."""
    with _as_expected():
        # Some decompositions look into modules that only compile_fx imports.
        from torch._inductor import compile_fx, config  # noqa: F401
        from torch._inductor.decomposition import select_decomp_table

        with config.patch(_patches(options)):
            return dict(select_decomp_table())


class Unusable(Exception):
    """The private parts of inductor are not what this file takes them for."""


@contextmanager
def _as_expected() -> Iterator[None]:
    # Inductor wraps what goes wrong with an operator in an error of its own.
    try:
        yield
    except (ImportError, AttributeError, TypeError) as error:
        raise Unusable(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}") from error


def _patches(options: Options) -> dict[str, Any]:
    return {**_SETTLED, **dict(options.settings), **KEPT, "triton.cudagraphs": False}


@dataclass(frozen=True)
class Lowered:
    """What inductor made of a graph.

    Attributes:
        function: takes one list of inputs, empties it, and returns the outputs.
        source: the generated program.
    """

    function: Callable[[list[Any]], Sequence[torch.Tensor]]
    source: str


def lower(name: str, graph: fx.GraphModule, options: Options) -> Lowered:
    """Compile a graph.

    Args:
        name: the user's function, for messages.
        graph: of operators that inductor's decompositions leave; it may say that operators change arguments in place.
        options: how.

    Returns:
        The compiled graph.

    Raises:
        CompileError: inductor cannot compile it; names the operator.
        Unusable: this is another inductor.
    """
    with _as_expected():
        from torch._guards import TracingContext, tracing
        from torch._inductor import compile_fx, config
        from torch._inductor.virtualized import V

        examples = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
        mode = examples[0].fake_mode
        output: Any = graph.graph.output_node()
        # Results keep the strides that the step gives them; values inside may have others.
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
        with (
            config.patch(_patches(options)),
            V.set_fake_mode(mode),
            tracing(TracingContext(mode)),
            torch.no_grad(),
        ):
            try:
                graph = compile_fx._recursive_joint_graph_passes(graph)
                compiled: Any = compile_fx.compile_fx_inner(graph, examples, is_inference=True)
            except (FdpError, ImportError, AttributeError, TypeError):
                raise
            except Exception as error:
                raise refusal(name, error) from error
    if not getattr(compiled, "_boxed_call", False):
        raise Unusable("what compile_fx_inner returns does not take one list of inputs")
    return Lowered(compiled, str(getattr(compiled, "source_code", "")))


def lower_publicly(name: str, graph: fx.GraphModule, options: Options) -> Lowered:
    """Compile a graph without effects, but for copies into inputs, by inductor's public entry.

    Args:
        name: the user's function, for messages.
        graph: of any operators.
        options: how; what keeps the plan is asked for as far as this torch knows it.

    Returns:
        The compiled graph; its source is the text of the graph, since the public entry does not give the program.

    Raises:
        CompileError: inductor cannot compile it; names the operator.
    """
    import torch._inductor

    examples = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    known = set(torch._inductor.list_options())
    settings = {key: value for key, value in _patches(options).items() if key in known}
    with torch.no_grad():
        try:
            compiled = torch._inductor.compile(graph, examples, options=settings)
        except FdpError:
            raise
        except Exception as error:
            raise refusal(name, error) from error

    def function(inputs: list[Any]) -> Sequence[torch.Tensor]:
        values = tuple(inputs)
        inputs.clear()
        return compiled(*values)

    return Lowered(function, graph.code)


def refusal(name: str, error: Exception) -> CompileError:
    """The refusal for a step that inductor cannot compile."""
    inner = getattr(error, "inner_exception", None) or error
    lines = [line.strip() for line in str(inner).strip().splitlines() if line.strip()]
    operators = [line.removeprefix("target: ") for line in lines if line.startswith("target: ")]
    first = lines[0] if lines else type(inner).__name__
    what = f"operator {operators[0]}" if operators else "an operator, or the C++ compiler"
    return CompileError(
        build_message(
            f"step {name!r} cannot be compiled: inductor failed on {what}.",
            [f"{type(inner).__name__}: {first}"],
            remedy="compile=False runs it operator by operator.",
        )
    )
