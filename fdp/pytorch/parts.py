"""Which torch fdp runs on: the releases that it was tested with, and the private parts of torch that it relies on.

Every private part that is used anywhere in fdp is listed here, by what is done with it (a test compares the list with
the code). What a use cannot do without is looked for before the first such use, and the use is refused where it is
missing. That a part exists does not say that torch still calls it: code that replaces one also looks, once, whether
its own is reached, and refuses by `unsupported_torch` as well.
"""

from __future__ import annotations

import functools
import importlib
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fdp.errors import FdpError, build_message

TESTED = ("2.13", "2.15")
"""The oldest and the newest release that fdp takes without a warning; docs/reference/torch.md has what was run."""

NEEDED: Mapping[str, tuple[str, ...]] = {
    # Of modules that fdp imports when it is imported, and of what every call asks for.
    "importing fdp": (
        "torch._C._AutoDispatchBelowAutograd",
        "torch._C._VariableFunctions",
        "torch._C._dispatch_has_kernel_for_dispatch_key",
        "torch._C._functorch.get_unwrapped",
        "torch._C._functorch.is_functorch_wrapped_tensor",
        "torch._C._functorch.peek_interpreter_stack",
        "torch._C._get_mkldnn_enabled",
        "torch._C._is_any_autocast_enabled",
        "torch._C._nn",
        "torch._C._set_mkldnn_enabled",
        "torch._C.TensorBase._version",
        "torch._foreach_mul",
        "torch._neg_view",
        "torch._ops.OpOverload",
        "torch._prims_common.suggest_memory_format",
        "torch._subclasses.fake_tensor.DataDependentOutputException",
        "torch._subclasses.fake_tensor.DynamicOutputShapeException",
        "torch._subclasses.fake_tensor.FakeTensor",
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "torch.autograd.forward_ad._current_level",
        "torch.autograd.profiler._is_profiler_enabled",
        "torch.fx._lazy_graph_module._use_lazy_graph_module",
        "torch.fx.experimental.proxy_tensor.get_proxy_mode",
        "torch.fx.experimental.proxy_tensor.get_proxy_slot",
        "torch.fx.experimental.proxy_tensor.make_fx",
        "torch.fx.experimental.proxy_tensor.set_proxy_slot",
        "torch.nn.Module._apply",
        "torch.optim._adafactor",
        "torch.utils._python_dispatch.TorchDispatchMode",
        "torch.utils._python_dispatch._get_current_dispatch_mode",
        "torch.utils._python_dispatch._pop_mode_temporarily",
        "torch.utils._pytree.GetAttrKey",
        "torch.utils._pytree.SUPPORTED_NODES",
        "torch.utils._pytree.register_pytree_node",
        "torch.Generator._cdata",
        "torch.Tensor._is_zerotensor",
        "torch.UntypedStorage._cdata",
        "torch.UntypedStorage._new_with_weak_ptr",
        "torch.ops.aten.add.Tensor._op",
        "torch.ops.aten.add.Tensor._overloadname",
        "torch.ops.aten.add.Tensor._schema",
    ),
    "tracing a step": (
        "torch._C._autograd._get_sequence_nr",
        "torch._C._current_autograd_node",
        "torch._C._dispatch_get_all_op_names",
        "torch._C._swap_tensor_impl",
        "torch._VF.lstm",
        "torch._dynamo.config.error_on_nested_fx_trace",
        "torch._dynamo.config.patch",
        "torch._dynamo.eval_frame._callback_from_stance",
        "torch._dynamo.run",
        "torch._higher_order_ops.utils._in_hop_compile",
        "torch._subclasses.fake_tensor.FakeTensorMode.dispatch",
        "torch.compiler._compile_session_context",
        "torch.distributions.Distribution._validate_args",
        "torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode",
        "torch.fx.experimental.symbolic_shapes.ShapeEnv",
    ),
    "saving and loading": ("torch.distributed.checkpoint.filesystem._StorageInfo",),
    "fdp.optim.from_torch": (
        "torch._guards.detect_fake_mode",
        "torch.compiler._is_compiling_flag",
    ),
    "nn.SyncBatchNorm": ("torch.nn.SyncBatchNorm._check_input_dim",),
    "activation checkpointing": (
        "torch.utils.checkpoint.CheckpointFunction",
        "torch.utils.checkpoint.SAC_IGNORED_OPS",
        "torch.utils.checkpoint._CachedTorchDispatchMode",
        "torch.utils.checkpoint._CachingTorchDispatchMode",
        "torch.utils.checkpoint._is_compiling",
    ),
    "a process group": (
        "torch.distributed.ProcessGroup._get_backend",
        "torch.distributed.distributed_c10d._world.pg_backend_config",
        "torch.distributed.distributed_c10d._world.pg_map",
    ),
    "a process group of some ranks": ("torch.distributed.distributed_c10d._process_group_name",),
    "compile=": (
        "torch._C._functorch.is_functionaltensor",
        "torch._functionalize_commit_update",
        "torch._functionalize_replace",
        "torch._functionalize_sync",
        "torch._inductor.config.fallback_random",
        "torch._inductor.config.get_config_copy",
        "torch._inductor.config.get_type",
        "torch._inductor.list_mode_options",
    ),
}
"""What is needed for what. Without a part, that is refused."""

KNOWN_OTHERWISE: Mapping[str, tuple[str, ...]] = {
    # One of two: `recomputation` looks which.
    "activation checkpointing": (
        "torch.utils.checkpoint._checkpoint_without_reentrant_generator",
        "torch.utils.checkpoint._checkpoint_without_reentrant_generator_impl",
    ),
    # Without these steps are not compiled.
    "inductor's own entry": (
        "torch._guards.TracingContext",
        "torch._guards.tracing",
        "torch._inductor.bounds.BoundVars.get_bounds",
        "torch._inductor.codecache.CppPythonBindingsCodeCache.suffix_template",
        "torch._inductor.codegen.common.KernelArgs.cpp_argdefs",
        "torch._inductor.compile_fx._recursive_joint_graph_passes",
        "torch._inductor.compile_fx.compile_fx_inner",
        "torch._inductor.config.patch",
        "torch._inductor.cpp_builder._get_optimization_cflags",
        "torch._inductor.decomposition.select_decomp_table",
        "torch._inductor.fx_passes.reinplace.inplaceable_foreach_ops",
        "torch._inductor.fx_passes.reinplace.inplaceable_ops",
        "torch._inductor.graph.GraphLowering.call_function",
        "torch._inductor.index_propagation.IndexPropagation.fallback",
        "torch._inductor.index_propagation.IndexPropagation.propagate_sympy",
        "torch._inductor.index_propagation.IndexPropVar.new_symbolic",
        "torch._inductor.index_propagation.TypedExpr.is_constant",
        "torch._inductor.ir.ExternKernel.require_exact_strides",
        "torch._inductor.ir.TensorBox",
        "torch._inductor.lowering._full",
        "torch._inductor.lowering.lowerings",
        "torch._inductor.lowering.make_fallback",
        "torch._inductor.output_code.CompiledFxGraph._boxed_call",
        "torch._inductor.scheduler.Scheduler.fusable_weak_dep",
        "torch._inductor.scheduler.SchedulerNode",
        "torch._inductor.virtualized.V",
        "torch.utils._sympy.value_ranges.ValueRanges.unknown",
        "torch.utils._sympy.value_ranges.bound_sympy",
    ),
    # Without it tracebacks show one frame of torch.
    "tracebacks": (
        "torch._C._dynamo.eval_frame._FrameAction",
        "torch._C._dynamo.eval_frame._FrameExecStrategy",
        "torch._C._dynamo.eval_frame.set_code_exec_strategy",
        "torch._C._dynamo.eval_frame.set_eval_frame",
    ),
    # Without these a slower way is taken.
    "substitutes": (
        "torch._C._dynamo.guards.TensorGuards",
        "torch._inductor.config.cpp.vec_isa_ok",
        "torch._inductor.cpu_vec_isa.supported_vec_isa_list",
        "torch._inductor.cpu_vec_isa.valid_vec_isa_list",
        "torch._inductor.cpu_vec_isa.x86_isa_checker",
    ),
    # Those of objects whose class does not tell: they are refused where an object has none.
    "refused": (
        "Module._buffers",
        "Module._modules",
        "Module._parameters",
        "Node._sequence_nr",
        "OptimizedModule._orig_mod",
    ),
    # Checkpoints have their names: one that has another name is refused.
    "checkpoints": (
        "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
        "torch.serialization._get_layout",
    ),
    # Looked for where they are used, with an answer for objects that have none.
    "objects": (
        "Module._compiled_call_impl",
        "Optimizer._init_group",
        "Options._timeout",
        "TypedStorage._untyped_storage",
        "function._is_torch_compile",
        "function._torchdynamo_disable",
        "function._torchdynamo_orig_backend",
        "function._torchdynamo_orig_callable",
    ),
}
"""Parts whose absence is noticed, and dealt with, where they are used."""


def missing(what: str) -> tuple[str, ...]:
    """The parts that something needs and this torch does not have.

    Args:
        what: a key of `NEEDED`.

    Example:
        >>> missing("tracing a step")
        ()
    """
    return tuple(path for path in NEEDED[what] if not exists(path))


def exists(path: str) -> bool:
    """Whether this torch has a part of this name; its module is imported if need be."""
    found: Any = torch
    parts = path.split(".")
    for depth, name in enumerate(parts[1:], 2):
        if not hasattr(found, name):
            try:
                found = importlib.import_module(".".join(parts[:depth]))
            except ImportError:
                return False
        else:
            found = getattr(found, name)
    return True


@functools.cache
def require(what: str) -> None:
    """Look, once, whether this torch has all that something needs.

    Args:
        what: a key of `NEEDED`.

    Raises:
        FdpError: it has not; names the parts.
    """
    gone = missing(what)
    if gone:
        raise unsupported_torch(what, [f"{path} does not exist" for path in gone])


def unsupported_torch(what: str, reasons: Iterable[str]) -> FdpError:
    """The error for what cannot be done on this torch, since it differs in parts that fdp relies on."""
    return FdpError(
        build_message(
            f"torch {torch.__version__} is not supported: {what} relies on private parts of torch, and these "
            "have changed.",
            reasons,
            remedy=f"install a torch from {TESTED[0]} to {TESTED[1]}, with which fdp was tested.",
        )
    )


@functools.cache
def warn_if_untested() -> None:
    """Say once if this torch is newer than those that fdp was tested with."""
    if release(str(torch.__version__)) > release(TESTED[1]):
        warnings.warn(
            f"fdp was tested with torch {TESTED[0]} to {TESTED[1]}, and this is {torch.__version__}. fdp refuses "
            "what needs parts of torch that are missing there. The rest has not been tested with this release.",
            stacklevel=2,
        )


def release(version: str) -> tuple[int, int]:
    """The first two numbers of a version.

    Example:
        >>> release("2.15.0a0+git1234"), release("2.9") < release("2.13")
        ((2, 15), True)
    """
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


require("importing fdp")
