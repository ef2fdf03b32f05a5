"""Corrections of how inductor puts kernels together, each with the releases of torch in which it was seen.

Each is a context: inside of it inductor does it right. `inductor` hands it the parts of inductor that it changes.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from fdp.pytorch.parts import release
from fdp.trace.capture.silent_changes import replaced
from fdp.trace.operators.effects import storages

_READS_FLOAT = re.compile(r"\n *template <> inline float parse_arg<float>.*?\n *\}\}\n", re.DOTALL)


@contextmanager
def _entries(table: Any, now: Mapping[Any, Any]) -> Iterator[None]:
    """Other values for some keys of a table."""
    before = {key: table[key] for key in now}
    table.update(now)
    try:
        yield
    finally:
        table.update(before)


def branches_get_strides_of_graph(lowerings: Any, kernel: Any, virtualized: Any) -> AbstractContextManager[None]:
    """Give the branches of a condition their operands with the strides that these have in the graph.

    The branches are lowered for such strides, and inductor may have laid an operand out otherwise: then they read other
    elements, without an error where sizes are not checked (seen in torch 2.13 to 2.15; `torch.compile` fails there).

    Args:
        lowerings: from operators to what lowers them.
        kernel: `ExternKernel`. `require_exact_strides` copies a value that has others.
        virtualized: `V`. `graph.current_node` is what is lowered: a call of `cond` or `switch`, whose last argument is
            the operands.
    """
    operators = [op for name in ("cond", "switch") if (op := getattr(torch.ops.higher_order, name, None)) in lowerings]

    def lowered(otherwise: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(otherwise)
        def lower(*args: Any) -> Any:
            *first, operands = args
            laid = []
            for node, operand in zip(virtualized.graph.current_node.args[-1], operands, strict=True):
                value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
                if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                    operand = kernel.require_exact_strides(operand, value.stride())
                laid.append(operand)
            return otherwise(*first, laid)

        return lower

    return _entries(lowerings, {operator: lowered(lowerings[operator]) for operator in operators})


def reads_ordered_after_changes(node: Any) -> AbstractContextManager[None]:
    """Order reads of changed memory after the change, in inductor's scheduler.

    Before inductor fuses loops it may lay them out anew. In torch 2.13 it then forgets that a loop reads what another
    one has changed: a scatter, say, may be written behind its reader. Later releases remember.

    Args:
        node: `SchedulerNode`. `recompute_size_and_body` gives one other loops; `mutation_renames` says which change of
            a buffer it reads.
    """
    if release(str(torch.__version__)) >= (2, 14):
        return nullcontext()

    def remembering(recompute: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(recompute)
        def recomputed(self: Any, *args: Any, **kwargs: Any) -> None:
            recompute(self, *args, **kwargs)
            self.set_read_writes(self.read_writes.rename(self.mutation_renames))

        return recomputed

    return replaced(node, "recompute_size_and_body", remembering)


def scatters_read_other_memory(table: Any) -> AbstractContextManager[None]:
    """Let inductor scatter in place only if what is scattered, and where, lies in other memory.

    It looks for later readers of the old value, and not at the other arguments of the scatter itself. Of
    `index_copy(x, 0, index, x)` it writes rows that the same loop then reads (seen in torch 2.13 to 2.15, with
    `torch.compile` as well). It makes such calls itself, too, of copies that it takes for their originals.

    Args:
        table: `reinplace.inplaceable_ops`, by operator: what does the same in place (`mutated_args` are the numbers of
            the arguments that are changed), and `extra_check`, by which a call may be refused.
    """

    def checked(entry: Any) -> Any:
        def check(node: torch.fx.Node) -> bool:
            changed = {number for at in entry.mutated_args for number in _memory_of(node.args[at])}
            others = [value for at, value in enumerate(node.args) if at not in entry.mutated_args]
            read = {number for value in [*others, *node.kwargs.values()] for number in _memory_of(value)}
            return changed.isdisjoint(read) and bool(entry.extra_check(node))

        return dataclasses.replace(entry, extra_check=check)

    return _entries(table, {operator: checked(entry) for operator, entry in table.items()})


@contextmanager
def called_as_they_are(lowering: Any, operators: Sequence[Any], are_right: Callable[..., bool]) -> Iterator[None]:
    """Let inductor call the kernels of operators.

    Args:
        lowering: the module `torch._inductor.lowering`.
        operators: those that may be left whole.
        are_right: asked with the arguments of a call, whether inductor's own loops will do, if it has any.
    """
    table = lowering.lowerings
    before = {operator: table.get(operator) for operator in operators}

    def chosen(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(theirs)
        def lowered(*args: Any, **named: Any) -> Any:
            return (theirs if are_right(*args, *named.values()) else ours)(*args, **named)

        return lowered

    try:
        for operator, theirs in before.items():
            lowering.make_fallback(operator, warn=False, override_decomp=True)
            if theirs is not None:
                table[operator] = chosen(table[operator], theirs)
        yield
    finally:
        for operator, theirs in before.items():
            table.pop(operator, None)
            if theirs is not None:
                table[operator] = theirs


@contextmanager
def lists_are_not_changed_in_place(table: Any) -> Iterator[None]:
    """Keep inductor from doing operators on lists in place.

    It looks for later readers of the old values, and not at the other entries. If the results of
    `_foreach_add([a, c], [c, a])` are copied to `a` and `c`, it adds the new `a` to `c`; likewise where `a` is read by
    what it computes along the way (seen in torch 2.13 to 2.15, with `torch.compile` as well). Without, each result is
    copied in the loop that computes it, if nothing reads the old value later.

    Args:
        table: `reinplace.inplaceable_foreach_ops`, by operator.
    """
    before = dict(table)
    table.clear()
    try:
        yield
    finally:
        table.update(before)


def _memory_of(argument: Any) -> list[int]:
    """The storages of all tensors in an argument of a node."""
    found: list[torch.fx.Node] = []
    torch.fx.map_arg(argument, found.append)
    return [number for node in found for number in storages(node.meta.get("val"))]


def changed_memory_known_by_all_names(scheduler: Any) -> AbstractContextManager[None]:
    """Let a loop that changes memory be fused with one that reads it only if both get to each element at once.

    Inductor looks for such reads by the first name of the memory. After each change it has another name, so reads of
    memory that was changed before, by a message for instance, are not found. Then a loop reads elements that it has
    already overwritten (seen in torch 2.13 and 2.14, with `torch.compile` as well). Later releases find them.

    Args:
        scheduler: `Scheduler`. `fusable_weak_dep` says whether a reader and what changes memory after it may become
            one loop; `mutation_real_name` has the first names.
    """
    if release(str(torch.__version__)) >= (2, 15):
        return nullcontext()

    def asking_for_all(otherwise: Callable[..., bool]) -> Callable[..., bool]:
        @functools.wraps(otherwise)
        def fusable(self: Any, weak_dep: Any, reader: Any, changer: Any) -> bool:
            if not otherwise(self, weak_dep, reader, changer):
                return False
            first = self.mutation_real_name
            memory = first[weak_dep.mutating_buf]
            (write,) = [each for each in changer.read_writes.writes if each.name == weak_dep.mutating_buf]
            return all(
                isinstance(read, type(write)) and (read.index, read.size) == (write.index, write.size)
                for read in reader.read_writes.reads
                if first.get(read.name, read.name) == memory
            )

        return fusable

    return replaced(scheduler, "fusable_weak_dep", asking_for_all)


@contextmanager
def read_in_float64(arguments: Any, bindings: Any) -> Iterator[None]:
    """Let kernels on a CPU take numbers that a step reads from tensors as float64.

    Inductor passes them as float32 (seen in torch 2.13 to 2.15; `torch.compile` turns most of them into tensors
    before). In arithmetic with float64 tensors half of the digits would be lost, without an error.

    Args:
        arguments: `KernelArgs`. `cpp_argdefs` returns the arguments of a kernel, what it is called with, and their
            types; numbers are "const float".
        bindings: `CppPythonBindingsCodeCache`. `suffix_template` is the code that calls a kernel from Python; it has a
            `parse_arg` for each type.

    Raises:
        AttributeError: they are made otherwise on this torch.
    """
    template = bindings.suffix_template
    reads = _READS_FLOAT.search(template)
    if reads is None:
        raise AttributeError("the code that calls a kernel reads no float")
    reads_double = "" if "parse_arg<double>" in template else reads.group().replace("float", "double")

    def in_float64(made: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(made)
        def definitions_in_float64(self: Any, *args: Any, **kwargs: Any) -> Any:
            definitions, given, types = made(self, *args, **kwargs)
            definitions = [re.sub(r"^const float(?= \w+$)", "const double", each) for each in definitions]
            return definitions, given, ["const double" if each == "const float" else each for each in types]

        return definitions_in_float64

    with (
        replaced(arguments, "cpp_argdefs", in_float64),
        replaced(bindings, "suffix_template", lambda text: text[: reads.end()] + reads_double + text[reads.end() :]),
    ):
        yield


def whole_numbers_wrap(builder: Any) -> AbstractContextManager[None]:
    """Let whole numbers go on at the other end where they exceed their dtype, as in torch's kernels.

    In C++ that is undefined, and compilers conclude from a product with a position that it is a small one: of
    `arange(600) * (1 << 55)` the loop never ends, and writes beyond the tensor (seen in torch 2.13 to 2.15, with
    `torch.compile` as well).

    Args:
        builder: `cpp_builder`. `_get_optimization_cflags` returns the flags of the compiler, without dashes, and those
            of the linker.
    """

    def wrapping(otherwise: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(otherwise)
        def flags(*args: Any, **kwargs: Any) -> Any:
            compiler, linker = otherwise(*args, **kwargs)
            return [*compiler, *([] if sys.platform == "win32" else ["fwrapv"])], linker

        return flags

    return replaced(builder, "_get_optimization_cflags", wrapping)
