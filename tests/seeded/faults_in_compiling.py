"""Mistakes in what is handed to the compiler."""

from __future__ import annotations

from seeded_fault import Fault

GRAPH = (
    Fault(
        "compiled, not divided",
        "emit/compiled/graph.py",
        "value = value * self.memory.share_of(marker)",
        "value = value * 1.0",
        "the division by the number of ranks is left out",
    ),
    Fault(
        "compiled, packed before it is whole",
        "emit/memory/instructions.py",
        "            if any(storage in accesses.writes for storage in storages_of(maker)):\n                continue\n",
        "",
        "a value that is changed in place is copied when it is made",
    ),
    Fault(
        "compiled, bucket returned",
        "emit/compiled/graph.py",
        "outputs.append(_copy_with_strides(value) if position in placement.cloned else value)",
        "outputs.append(value)",
        "an average is returned in its bucket",
    ),
    Fault(
        "compiled, copies are dense",
        "emit/compiled/graph.py",
        "outputs.append(_copy_with_strides(value) if position in placement.cloned else value)",
        "outputs.append(value.clone() if position in placement.cloned else value)",
        "a copy of state with gaps has none: the next call does not copy it where it should",
    ),
    Fault(
        "compiled, values lie as they are computed",
        "emit/compiled/layouts.py",
        "return empty_like(example).copy_(value)",
        "return value",
        "a view by places sees other elements of what an operator is taken apart into",
    ),
    Fault(
        "compiled, changed values lie as they are computed",
        "emit/compiled/layouts.py",
        "keep_strides(value, example.stride())",
        "pass",
        "a view by places sees other elements of what was changed through a transposed view",
    ),
    Fault(
        "compiled, changed values are computed and left there",
        "trace/capture/functional.py",
        "if value.numel() == 0 or all(lies):",
        "if True:",
        "the same; the proof asks for it in the same words",
    ),
    Fault(
        "compiled, entries in another order",
        "emit/compiled/graph.py",
        "for entry, one in zip(entries, result, strict=True)",
        "for entry, one in zip(entries[::-1], result, strict=True)",
        "results of a list operator that runs in parts change places",
    ),
    Fault(
        "compiled, loop takes its operands in another order",
        "emit/codegen/loop_bodies.py",
        "for at, stride in zip(back, strides, strict=True)]",
        "for at, stride in zip(order, strides, strict=True)]",
        "a permutation for its inverse",
    ),
    Fault(
        "compiled, gathered values read at one's own",
        "emit/memory/planning.py",
        'result_key: Hashable = key if collective.in_place else ("result", bucket.index)',
        "result_key: Hashable = key",
        "the pieces of all ranks lie apart from this rank's own",
    ),
)

PASSES = (
    Fault(
        "compiled, copies taken for originals",
        "emit/compiled/passes.py",
        "    _keep_snapshots,\n",
        "",
        "the compiler reads what was changed where a copy of the old value was made",
    ),
    Fault(
        "compiled, copied before the last reader",
        "emit/compiled/passes.py",
        "behind = [value, *(readers[number] for number in storages_of(target) if number in readers)]",
        "behind = [value]",
        "the old state is read after the new one was copied over it",
    ),
    Fault(
        "compiled, copied before the last change",
        "emit/compiled/passes.py",
        "        behind += [writers[number] for number in storages_of(value) if number in writers]\n",
        "",
        "the new state is copied before a message or an optimizer has changed it",
    ),
    Fault(
        "compiled, product not divided",
        "emit/compiled/passes.py",
        "factor, value = value.args[1], value.args[0]",
        "value = value.args[0]",
        "a product that is moved into its bucket loses its factor",
    ),
    Fault(
        "compiled, transposed product in its bucket",
        "emit/compiled/passes.py",
        '            and all(each.meta["val"].is_contiguous() for each in (product, value, slot))\n',
        "",
        "a product lies in its bucket in another order than the average is read in",
    ),
)

BARRIERS = (
    Fault(
        "compiled, beta left out",
        "emit/compiled/barriers.py",
        "torch.addmm(out, one, two, beta=0, alpha=factor, out=out)",
        "torch.addmm(out, one, two, alpha=factor, out=out)",
        "a product is added to what the bucket held before",
    ),
    Fault(
        "compiled, a wait changes nothing",
        "emit/compiled/barriers.py",
        'wait_ = define("wait_", "(Tensor(a!)[] slots, int bucket) -> ()", _wait)',
        'wait_ = define("wait_", "(Tensor[] slots, int bucket) -> ()", _wait)',
        "the compiler may read a result before it is there",
    ),
    Fault(
        "compiled, a loop changes nothing",
        "emit/compiled/barriers.py",
        '"(Tensor(a!)[] changed, Tensor[] others, int number) -> ()", _loop, _random)',
        '"(Tensor[] changed, Tensor[] others, int number) -> ()", _loop, _random)',
        "the compiler may read a total before the loop",
    ),
)

DRAWS = (
    Fault(
        "compiled, drawn row by row",
        "emit/compiled/draws.py",
        '"stride": _strides_with_small_gaps(example), **kind',
        '"stride": torch.empty(example.shape, device="cpu").stride(), **kind',
        "a draw fills memory in the order of the rows, and not as the step does",
    ),
    Fault(
        "compiled, drawn without gaps",
        "emit/compiled/draws.py",
        "stride[at] = new_end + (step != end)",
        "stride[at] = new_end",
        "an operator that draws otherwise for memory with gaps gets memory without",
    ),
    Fault(
        "compiled, drawn without a use",
        "emit/compiled/graph.py",
        "            self._value(each).copy_(value)\n        results = [",
        "            pass\n        results = [",
        "what an operator in place has drawn is left out",
    ),
)
