"""Mistakes that a tired programmer makes in what emits a step, each as one replacement in one file.

`make faults` makes them one at a time, and looks at two things: whether a number of `faulty_programs` changes, and
whether the validator refused the program before that number was computed. They were written without a look at how the
validator works.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One mistake.

    Attributes:
        name: short and unique.
        file: where, below the package.
        old: text that is there exactly once.
        new: what stands there with the mistake.
        why: what is wrong, in a sentence.
    """

    name: str
    file: str
    old: str
    new: str
    why: str


_LAYOUT = (
    Fault(
        "in the place of what is still read",
        "emit/memory/layout.py",
        "if last.get(key) == position and sizes[key] == size and",
        "if key in last and sizes[key] == size and",
        "a result takes the place of an argument that is read later",
    ),
    Fault(
        "given back one line early",
        "emit/memory/layout.py",
        "ending[piece.last].append(piece.key)",
        "ending[max(piece.first, piece.last - 1)].append(piece.key)",
        "the last use does not count as one",
    ),
    Fault(
        "sizes rounded down",
        "emit/memory/layout.py",
        "return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES",
        "return size_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES",
        "a piece ends in the middle of a cache line, and the next begins before its end",
    ),
    Fault(
        "sizes not aligned",
        "emit/memory/layout.py",
        "return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES",
        "return size_bytes",
        "a value of eight bytes an element begins behind one of one byte",
    ),
    Fault(
        "gap not moved",
        "emit/memory/layout.py",
        "[(offset + size, room - size)]",
        "[(offset, room - size)]",
        "what is left of a gap begins where it was taken",
    ),
    Fault(
        "block grows from any gap",
        "emit/memory/layout.py",
        "if self._gaps and sum(self._gaps[-1]) == self.size:",
        "if self._gaps:",
        "the last gap is not at the end, and what lies behind it is taken as well",
    ),
    Fault(
        "joined with a later gap",
        "emit/memory/layout.py",
        "if at < len(self._gaps) and self._gaps[at][0] == offset + size:",
        "if at < len(self._gaps):",
        "a gap is joined with one behind something that is in use",
    ),
    Fault(
        "joined with an earlier gap",
        "emit/memory/layout.py",
        "if at and sum(self._gaps[at - 1]) == offset:",
        "if at:",
        "a gap is joined with one before something that is in use",
    ),
)

_LIFETIMES = (
    Fault(
        "last use is the first",
        "emit/codegen/lines.py",
        "                last[memory] = index",
        "                last.setdefault(memory, index)",
        "lifetimes end where they begin",
    ),
    Fault(
        "last use is the second",
        "emit/codegen/lines.py",
        "                last[memory] = index",
        "                last[memory] = index if last.get(memory) == first[memory] else last.get(memory, index)",
        "the last use is only moved once",
    ),
    Fault(
        "in the place of what is read first",
        "emit/codegen/lines.py",
        "    for index, line in enumerate(lines):\n        for name in sorted(line.uses):",
        "    for index, line in enumerate(lines[:-2]):\n        for name in sorted(line.uses):",
        "off by two at the end of the program",
    ),
    Fault(
        "views without a place keep nothing",
        "emit/memory/planning.py",
        "                    self.places.memory[name] = found[0]\n"
        "                    if isinstance(value, torch.Tensor) and not value.is_conj() and not value.is_neg():\n",
        "                    if isinstance(value, torch.Tensor) and not value.is_conj() and not value.is_neg():\n"
        "                        self.places.memory[name] = found[0]\n",
        "the memory of a conjugate is given away while the conjugate is still read",
    ),
    Fault(
        "entries without a place keep nothing",
        "emit/codegen/calls.py",
        "            writer.pieces.update(dict.fromkeys(targets, memory))\n",
        "            pass\n",
        "the pieces of a conjugate do not keep its memory",
    ),
    Fault(
        "result over any argument",
        "emit/codegen/calls.py",
        "if form.pointwise and outs == [node.name]:",
        "if outs == [node.name]:",
        "a product is computed over one of its factors",
    ),
    Fault(
        "result over an argument of another shape",
        "emit/codegen/calls.py",
        "(p.shape, p.stride, p.offset, p.dtype) == (own.shape, own.stride, own.offset, own.dtype) for p in there",
        "p.dtype == own.dtype for p in there",
        "a result takes the place of an argument that is transposed, or spread",
    ),
    Fault(
        "loop gets half of its memory",
        "emit/codegen/program.py",
        "piece_of[called], sizes[key] = key, size",
        "piece_of[called], sizes[key] = key, (size[0], size[1] // 2)",
        "the memory of a loop's body overlaps what lives across the loop",
    ),
    Fault(
        "memory of a loop at the beginning",
        "emit/codegen/loops.py",
        "start = around.layouts[device].offsets[key]",
        "start = 0",
        "the body of a loop works where other values lie",
    ),
    Fault(
        "unused random numbers are dropped",
        "emit/codegen/writer.py",
        "pure=effects.pure and (bool(defines) or effects.view)",
        "pure=not effects.writes",
        "an operator that draws for nothing is left out, and the next draws its numbers",
    ),
)

_DONATION = (
    Fault(
        "clone elided while it is read",
        "emit/memory/donation.py",
        "accesses.last_read(home, except_by=clone) < accesses.first_write(memory)",
        "accesses.last_read(home, except_by=clone) <= accesses.first_write(memory)",
        "the update itself reads the old value",
    ),
    Fault(
        "clone elided before its last change",
        "emit/memory/donation.py",
        "accesses.last_read(home, except_by=clone) < accesses.first_write(memory)",
        "accesses.last_read(home, except_by=clone) < accesses.last_write(memory)",
        "the old value is read between two changes of the new one",
    ),
    Fault(
        "home of a returned value is overwritten",
        "emit/memory/donation.py",
        "elif home in taken or home in accesses.writes or",
        "elif home in accesses.writes or",
        "another result is a view of the old state",
    ),
    Fault(
        "a new value lies as the old one did",
        "emit/memory/donation.py",
        " or not _fits(node, target):",
        ":",
        "the next call finds state in another order than the step returned",
    ),
    Fault(
        "copies have no gaps",
        "emit/codegen/program.py",
        "    elif has_gaps(value):\n",
        "    elif False:\n",
        "the next call does not copy what it should: it writes to the state",
    ),
    Fault(
        "copies have each element once",
        "emit/codegen/program.py",
        "    if not has_each_element_once(value):\n",
        "    if False:\n",
        "a value that is repeated in one place comes back whole",
    ),
    Fault(
        "home is written by the step as well",
        "emit/memory/donation.py",
        "elif home in taken or home in accesses.writes or",
        "elif home in taken or",
        "the new value is written into an input that the step changes later",
    ),
    Fault(
        "taken means without a target",
        "emit/memory/donation.py",
        "if target is None or not _is_same(node, target)",
        "if target is None",
        "two leaves of the state that change places",
    ),
    Fault(
        "one value written into two inputs",
        "emit/memory/donation.py",
        "elif memory not in owned and _can_write(",
        "elif _can_write(",
        "a value that is the new state of two leaves is written into one",
    ),
    Fault(
        "written before the old value is read",
        "emit/memory/donation.py",
        "    if accesses.last_read(home, except_by=node) >= accesses.ran[node]:\n        return False\n",
        "",
        "a later operator reads the new value as the old one",
    ),
    Fault(
        "written by what reads elsewhere",
        "emit/memory/donation.py",
        "    return not read or (\n        form.pointwise and ",
        "    return not read or (\n        form.pointwise or ",
        "a product is written over its factor",
    ),
    Fault(
        "copied back before the last reader",
        "emit/memory/donation.py",
        "last = max(accesses.last_read(home), accesses.last_write(memory),",
        "last = max(accesses.last_write(memory),",
        "the old state is read after the new one was copied over it",
    ),
    Fault(
        "copied back before the last change",
        "emit/memory/donation.py",
        "last = max(accesses.last_read(home), accesses.last_write(memory),",
        "last = max(accesses.last_read(home),",
        "the new state is copied before it is whole",
    ),
    Fault(
        "copied back one item early",
        "emit/memory/instructions.py",
        "        update(at)\n",
        "        update(at + 1)\n",
        "off by one",
    ),
    Fault(
        "not copied back before the step",
        "emit/memory/instructions.py",
        "    update(BEFORE)\n",
        "",
        "state that becomes an input is not copied",
    ),
    Fault(
        "bucket returned",
        "emit/memory/donation.py",
        'node.op == "get_attr" or is_marker(node, "all_reduce", "all_gather", "broadcast")',
        'node.op == "get_attr" or is_marker(node, "all_gather", "broadcast")',
        "an average is returned in its bucket, which the next call fills",
    ),
    Fault(
        "gathered values returned",
        "emit/memory/donation.py",
        'node.op == "get_attr" or is_marker(node, "all_reduce", "all_gather", "broadcast")',
        'node.op == "get_attr" or is_marker(node, "all_reduce", "broadcast")',
        "gathered values are returned in their bucket",
    ),
    Fault(
        "closed-over tensor returned",
        "emit/memory/donation.py",
        'node.op == "get_attr" or is_marker(node, "all_reduce", "all_gather", "broadcast")',
        'is_marker(node, "all_reduce", "all_gather", "broadcast")',
        "the caller gets a closed-over tensor, and may write to it",
    ),
    Fault(
        "owned memory returned",
        "emit/memory/donation.py",
        "borrowed = donated | owned | _foreign_memory(trace)",
        "borrowed = _foreign_memory(trace)",
        "a result is a view of the new state, which the next call overwrites",
    ),
    Fault(
        "messages read nothing",
        "emit/memory/liveness.py",
        "self.reads[storage].append((at, marker))",
        "self.reads[storage].append((-1, marker))",
        "state is overwritten before it is packed",
    ),
    Fault(
        "averages are there early",
        "emit/memory/liveness.py",
        "self.made.update(dict.fromkeys(storages_of(marker), at))",
        "self.made.update(dict.fromkeys(storages_of(marker), at - 1))",
        "an average is copied into the state before it is waited for",
    ),
    Fault(
        "last write is the first",
        "emit/memory/liveness.py",
        "return max(self.writes.get(memory, ()), default=-1)",
        "return min(self.writes.get(memory, ()), default=-1)",
        "the first change is taken for the last",
    ),
)

_PACKING = (
    Fault(
        "bytes for elements in a bucket",
        "emit/memory/planning.py",
        "start_bytes = offset * itemsize",
        "start_bytes = offset",
        "members of a bucket overlap",
    ),
    Fault(
        "gathered values read at one's own",
        "emit/memory/planning.py",
        "(key, behind if gathers else start_bytes)",
        "(key, start_bytes)",
        "the pieces of all ranks begin behind this rank's own",
    ),
    Fault(
        "read after the bucket started",
        "emit/memory/planning.py",
        "            and self.accesses.last_read(number, except_by=marker) < start\n",
        "",
        "a gradient is computed in its bucket, and read there when it is an average",
    ),
    Fault(
        "changed after the bucket started",
        "emit/memory/planning.py",
        "            and self.accesses.last_write(number) < start\n",
        "",
        "what is on the wire is changed",
    ),
    Fault(
        "copied out after the bucket started",
        "emit/memory/planning.py",
        "            and self.late.get(number, -1) < start\n",
        "",
        "what is computed in a bucket is copied to the state when it is an average",
    ),
    Fault(
        "transposed value in its bucket",
        "emit/memory/planning.py",
        "            and value.is_contiguous()\n            and value.storage_offset() == 0\n",
        "            and value.storage_offset() == 0\n",
        "a value lies in its bucket in another order than the average is read in",
    ),
    Fault(
        "part of a value in its bucket",
        "emit/memory/planning.py",
        "            and value.untyped_storage().nbytes() == value.numel() * bucket.dtype.itemsize\n",
        "",
        "the rest of the value lies over the next member",
    ),
    Fault(
        "divided although it is read",
        "emit/memory/planning.py",
        "if bucket.index in self.places.scaled and untouched and unread:",
        "if bucket.index in self.places.scaled and untouched:",
        "this rank's own value is divided for another reader, too",
    ),
    Fault(
        "divided before it is whole",
        "emit/memory/planning.py",
        "if bucket.index in self.places.scaled and untouched and unread:",
        "if bucket.index in self.places.scaled and unread:",
        "a value is divided, and then changed",
    ),
    Fault(
        "divided once more",
        "emit/codegen/calls.py",
        "if marker is not None and not divides_itself:",
        "if marker is not None:",
        "a product that is divided on its way is divided again",
    ),
    Fault(
        "not divided by the product",
        "emit/codegen/calls.py",
        '"alpha": 1 / writer.memory.plan.trace.world_size',
        '"alpha": 1',
        "the division by the number of ranks is left out",
    ),
    Fault(
        "beta left out",
        "emit/codegen/calls.py",
        'kwargs = {"beta": 0, "alpha"',
        'kwargs = {"alpha"',
        "a product is added to what the bucket held before",
    ),
    Fault(
        "divided at the start as well",
        "emit/memory/instructions.py",
        "elif bucket in places.scaled and marker not in divided:",
        "elif bucket in places.scaled:",
        "a value that was divided when it was made is divided again",
    ),
    Fault(
        "not divided at the start",
        "emit/memory/instructions.py",
        "elif bucket in places.scaled and marker not in divided:",
        "elif bucket in places.scaled and marker in divided:",
        "a value that has readers is sent undivided",
    ),
    Fault(
        "other buckets are divided",
        "emit/codegen/packing.py",
        "    if bucket in writer.memory.places.scaled:\n",
        "    if bucket not in writer.memory.places.scaled:\n",
        "copies into buckets that the backend averages are divided, and others not",
    ),
    Fault(
        "sums are divided",
        "emit/memory/planning.py",
        'return world_size > 1 and bucket.op == "mean" and fits',
        "return world_size > 1 and fits",
        "large sums are filled with divided values",
    ),
    Fault(
        "packed before it is whole",
        "emit/memory/instructions.py",
        "            if any(storage in accesses.writes for storage in storages_of(maker)):\n                continue\n",
        "",
        "a value that is changed in place is copied when it is made",
    ),
    Fault(
        "packed in another order",
        "emit/codegen/packing.py",
        "[{', '.join(slots)}], [",
        "[{', '.join(slots[::-1])}], [",
        "members are copied to each other's places",
    ),
    Fault(
        "first member not packed",
        "emit/codegen/packing.py",
        "for slot, source in zip(slots, sources, strict=True):",
        "for slot, source in list(zip(slots, sources, strict=True))[len(slots) > 1 :]:",
        "the first is taken to be there already",
    ),
    Fault(
        "packed from the one before",
        "emit/codegen/packing.py",
        "writer.memory.markers[pack.bucket][member].args[0]",
        "writer.memory.markers[pack.bucket][pack.members[0]].args[0]",
        "every member is filled from the first that is missing",
    ),
)

_PLACES = (
    Fault(
        "offset of a view dropped",
        "emit/memory/planning.py",
        "return Place(*found, shape, stride, offset, dtype)",
        "return Place(*found, shape, stride, 0, dtype)",
        "a view begins where its base begins",
    ),
    Fault(
        "stride of a view dropped",
        "emit/memory/planning.py",
        "return Place(*found, shape, stride, offset, dtype)",
        'return Place(*found, shape, tuple(torch.empty(shape, device="meta").stride()), offset, dtype)',
        "a view is read in another order",
    ),
    Fault(
        "elements for bytes",
        "emit/memory/planning.py",
        "(value.device, value.untyped_storage().nbytes())",
        "(value.device, value.numel())",
        "values get an eighth of the memory that they need",
    ),
    Fault(
        "returned values have places",
        "emit/memory/planning.py",
        "        if position not in placement.cloned:\n",
        "        if position in placement.cloned:\n",
        "the next call overwrites what this one returned",
    ),
    Fault(
        "constants are written to",
        "emit/memory/planning.py",
        "builder.kept | accesses.writes.keys()",
        "builder.kept",
        "a buffer of zeros is a constant, and is added to at every call",
    ),
    Fault(
        "constants are returned",
        "emit/memory/planning.py",
        "builder.kept | accesses.writes.keys()",
        "accesses.writes.keys()",
        "the caller gets the constant itself",
    ),
    Fault(
        "conjugates are plain places",
        "emit/memory/planning.py",
        "if isinstance(value, torch.Tensor) and not value.is_conj() and not value.is_neg():",
        "if isinstance(value, torch.Tensor):",
        "the conjugate of a value is the value",
    ),
    Fault(
        "gathered memory for one rank",
        "emit/memory/planning.py",
        "return gathered_at_bytes(bucket) + world_size * bucket.numel * bucket.dtype.itemsize",
        "return gathered_at_bytes(bucket) + bucket.numel * bucket.dtype.itemsize",
        "what is gathered lies over other values",
    ),
    Fault(
        "alone, and changed by its owner",
        "emit/memory/planning.py",
        "storage in inputs or self.accesses.last_write(storage)",
        "self.accesses.last_write(storage)",
        "the mean over one rank is the donated input itself",
    ),
    Fault(
        "alone, and changed itself",
        "emit/memory/planning.py",
        "            and not any(storage in written for storage in storages_of(node))\n",
        "",
        "the mean over one rank is changed, and its argument with it",
    ),
    Fault(
        "alone, and changed before",
        "emit/memory/planning.py",
        "self.accesses.last_write(storage) > self.accesses.last_read_by(storage, node)",
        "self.accesses.first_write(storage) < self.accesses.last_read_by(storage, node)",
        "the argument of a mean over one rank is changed later",
    ),
    Fault(
        "random constants",
        "emit/memory/constants.py",
        "effects.pure and not effects.uninitialised",
        "not effects.writes and not effects.uninitialised",
        "random numbers are drawn once, when the program is written",
    ),
    Fault(
        "constants that depend on an input",
        "emit/memory/constants.py",
        '"new_zeros", "new_full")',
        '"new_zeros", "new_full", "tril")',
        "a mask is taken to depend on a shape alone",
    ),
    Fault(
        "views by shape and stride alone",
        "emit/memory/views.py",
        'if geometry(candidate.meta["val"]) == geometry(node.meta["val"]):',
        'if geometry(candidate.meta["val"])[:2] == geometry(node.meta["val"])[:2] and (\n'
        '                candidate.meta["val"].dtype == node.meta["val"].dtype\n            ):',
        "a view that begins elsewhere is taken for its base",
    ),
    Fault(
        "views of another type",
        "emit/memory/views.py",
        'if geometry(candidate.meta["val"]) == geometry(node.meta["val"]):',
        'if geometry(candidate.meta["val"])[:3] == geometry(node.meta["val"])[:3]:',
        "the bits of a value are taken for the value",
    ),
    Fault(
        "conjugates are redundant",
        "emit/memory/views.py",
        'if geometry(candidate.meta["val"]) == geometry(node.meta["val"]):',
        'if geometry(candidate.meta["val"])[:4] == geometry(node.meta["val"])[:4]:',
        "the conjugate of a value is taken for the value",
    ),
    Fault(
        "views of another base",
        "emit/memory/views.py",
        "base_of[node] = base",
        "base_of[node] = next(iter(base_of.values()), base)",
        "a view of a view is replaced by what another view looks at",
    ),
)

_FORMS = (
    Fault(
        "relu keeps what is below",
        "emit/memory/out_variants.py",
        "_aten.relu.default: (_aten.clamp_min.out, (0,))",
        "_aten.relu.default: (_aten.clamp_max.out, (0,))",
        "minimum for maximum",
    ),
    Fault(
        "relu from one",
        "emit/memory/out_variants.py",
        "_aten.relu.default: (_aten.clamp_min.out, (0,))",
        "_aten.relu.default: (_aten.clamp_min.out, (1,))",
        "another constant",
    ),
    Fault(
        "ones are zeros",
        "emit/memory/out_variants.py",
        '"ones": 1, "ones_like": 1, "new_ones": 1',
        '"ones": 1, "ones_like": 0, "new_ones": 1',
        "a wrong entry in a table",
    ),
    Fault(
        "filled with whole numbers",
        "emit/memory/out_variants.py",
        'Form("fill", value=value) if isinstance(value, (int, float))',
        'Form("fill", value=int(value)) if isinstance(value, (int, float))',
        "0.75 becomes 0",
    ),
    Fault(
        "results the other way round",
        "emit/memory/out_variants.py",
        "return tuple(argument.name for argument in operator._schema.arguments if argument.is_out)",
        "return tuple(argument.name for argument in operator._schema.arguments if argument.is_out)[::-1]",
        "of several results each is written to another's place",
    ),
    Fault(
        "zeros have a form that does nothing",
        "emit/memory/out_variants.py",
        "    if effects_of(node).uninitialised:\n",
        '    if effects_of(node).uninitialised or name.startswith("zeros"):\n',
        "a place is not filled",
    ),
    Fault(
        "statistics are added up",
        "emit/memory/out_variants.py",
        'if name == "native_batch_norm" and not _is_contiguous(node.args[0]):',
        'if name == "native_batch_norm" and node.args[0] is None:',
        "the out variant adds to what the place held, for an input in an odd order",
    ),
)

_WRITING = (
    Fault(
        "changes in place left out",
        "emit/codegen/calls.py",
        "elif node.name in memory.places.named and not _changes_memory(node):",
        "elif node.name in memory.places.named and node.users:",
        "an operator that changes a fixed place is taken for a view of it",
    ),
    Fault(
        "places of several results",
        "emit/codegen/calls.py",
        'result_name(node, index) for index in range(len(node.meta["val"]))',
        'result_name(node, min(index, 1)) for index in range(len(node.meta["val"]))',
        "the third result is written where the second is",
    ),
    Fault(
        "entries in another order of the list",
        "emit/codegen/calls.py",
        "targets = tuple(_entry_name(node, entry) for entry in entries)",
        "targets = tuple(_entry_name(node, entry) for entry in reversed(entries))",
        "results of a list operator that runs in parts change places",
    ),
    Fault(
        "entries in a row",
        "emit/codegen/calls.py",
        "chosen = [value[entry] for entry in entries]",
        "chosen = list(value[entries[0] : entries[0] + len(entries)])",
        "the entries of one bucket need not follow one another",
    ),
    Fault(
        "another rank's number",
        "emit/codegen/calls.py",
        "own = torch.tensor(writer.rank,",
        "own = torch.tensor(writer.rank + 1,",
        "ranks count from one",
    ),
    Fault(
        "rank in a loop",
        "emit/codegen/program.py",
        "write_program(body, rank, communicates=False",
        "write_program(body, 0, communicates=False",
        "the body of a loop is written for rank 0",
    ),
    Fault(
        "one name for two objects",
        "emit/codegen/writer.py",
        'known = stem if stem not in writer.bound else f"{stem}_{len(writer.bound)}"',
        "known = stem",
        "the second closed-over tensor takes the name of the first",
    ),
    Fault(
        "short numbers",
        "emit/codegen/writer.py",
        "        return repr(value)\n",
        '        return f"{value:.4g}" if type(value) is float else repr(value)\n',
        "numbers lose digits when they are written",
    ),
    Fault(
        "the other branch",
        "emit/codegen/writer.py",
        'return bind_object(writer, choose, "cond")',
        'return bind_object(writer, lambda c, one, two, given: choose(c, two, one, given), "cond")',
        "a condition is taken the other way round",
    ),
    Fault(
        "no wait for lone members",
        "emit/codegen/program.py",
        '            writer.lines.append(Line(text, {bucket_name(bucket)}, part=Part("wait", bucket)))\n',
        "            if len(writer.memory.markers[bucket]) > 1:\n"
        '                writer.lines.append(Line(text, {bucket_name(bucket)}, part=Part("wait", bucket)))\n',
        "a bucket of one member is not waited for",
    ),
    Fault(
        "first microbatch left out",
        "emit/codegen/loops.py",
        "torch.arange(count, device=device)",
        "torch.arange(1, count, device=device)",
        "off by one",
    ),
    Fault(
        "one microbatch again and again",
        "emit/codegen/loops.py",
        "torch.arange(count, device=device)",
        "torch.arange(count, device=device).clamp(max=0)",
        "the number of the time is not passed on",
    ),
)

_SHORTCUTS = (
    Fault(
        "anything is a transposed weight",
        "emit/codegen/shortcuts.py",
        "if columns.target is not _aten.t.default or columns.name in writer.memory.places.named:",
        'if columns.op != "call_function" or columns.name in writer.memory.places.named:',
        "a weight that is turned upside down is taken for a transposed one",
    ),
    Fault(
        "deferred without a word",
        "emit/memory/products.py",
        "            accesses.defer(product, node)\n",
        "",
        "a product is computed later than everybody else believes",
    ),
    Fault(
        "deferred past a change",
        "emit/memory/products.py",
        "            and not _may_change(product, node, accesses, donated)\n",
        "",
        "a factor of a deferred product is changed before it is read",
    ),
    Fault(
        "total among the factors",
        "emit/memory/products.py",
        "first < at <= last for storage in operands",
        "first < at < last for storage in operands",
        "a product is added to one of its own factors",
    ),
    Fault(
        "deferred although others read it",
        "emit/memory/products.py",
        "and _readers(product) == {node}",
        "and node in _readers(product)",
        "a product that is not computed is read",
    ),
    Fault(
        "alpha of a sum dropped",
        "emit/memory/products.py",
        "if node.target is not _aten.add_.Tensor or node.kwargs or",
        "if node.target is not _aten.add_.Tensor or",
        "half of a product is added as a whole",
    ),
    Fault(
        "factors the other way round",
        "emit/codegen/products.py",
        "for argument in (node.args[0], *product.args))\n    call",
        "for argument in (node.args[0], *reversed(product.args)))\n    call",
        "a product is not commutative",
    ),
)

_SCHEDULE = (
    Fault(
        "levels of direct needs alone",
        "plan/schedule.py",
        "level = max(level, levels[need], bucket_of.get(need, -1))",
        "level = max(level, bucket_of.get(need, -1))",
        "what is computed from what needs a bucket does not seem to need it",
    ),
    Fault(
        "start before the last member",
        "plan/schedule.py",
        "and not self._missing[self._next_start]",
        "and len(self._missing[self._next_start]) <= 1",
        "off by one",
    ),
    Fault(
        "calls do not wait",
        "plan/schedule.py",
        "                self._wait_for(index)\n            self._run(call)",
        "                pass\n            self._run(call)",
        "an average is read before it is there",
    ),
    Fault(
        "calls wait for one bucket",
        "plan/schedule.py",
        "                self.schedule.append(Wait(bucket))\n",
        "                self.schedule.append(Wait(bucket))\n                return\n",
        "an operation that needs two buckets waits for one",
    ),
    Fault(
        "no wait for what is only returned",
        "plan/schedule.py",
        "        self.schedule.extend("
        "Wait(bucket.index) for bucket in self._buckets if bucket.index not in self._waited)\n",
        "",
        "an average is returned before it is there",
    ),
    Fault(
        "buckets do not wait for buckets",
        "plan/schedule.py",
        "                self._wait_for(self._reductions[member].operation)\n",
        "",
        "a bucket is filled from the result of another that is not there",
    ),
    Fault(
        "waits come behind",
        "plan/schedule.py",
        "                self._wait_for(index)\n            self._run(call)",
        "                pass\n            self._run(call)\n"
        "            for index in call:\n                self._wait_for(index)",
        "a wait stands behind the reader",
    ),
    Fault(
        "reductions of reductions share a bucket",
        "plan/buckets.py",
        "        for needed in [k for k, bits in open_bits.items() if upstream[index] & bits]:\n"
        "            close(needed)\n",
        "",
        "a bucket has to wait for itself, and is left out",
    ),
    Fault(
        "broadcasts share a bucket",
        "plan/buckets.py",
        "reduction.op, reduction.root, str(reduction.dtype)",
        "reduction.op, str(reduction.dtype)",
        "two roots",
    ),
    Fault(
        "sums and means share a bucket",
        "plan/buckets.py",
        "reduction.op, reduction.root, str(reduction.dtype)",
        'reduction.op.replace("sum", "mean"), reduction.root, str(reduction.dtype)',
        "a sum is averaged",
    ),
    Fault(
        "all-gathers share a bucket",
        "plan/buckets.py",
        'return (*kind, index) if reduction.op == "all_gather" else kind',
        "return kind",
        "the pieces of one lie between those of the other",
    ),
    Fault(
        "members overlap",
        "plan/buckets.py",
        "            numel = -(-numel // step) * step\n",
        "            numel = numel // step * step\n",
        "a member begins before the end of the one before",
    ),
    Fault(
        "members at each other's places",
        "plan/buckets.py",
        "                tuple(members),\n",
        "                tuple(members[::-1]),\n",
        "offsets are those of the members in another order",
    ),
)

_ARENA = (
    Fault(
        "gathered behind the last byte",
        "runtime/buffers.py",
        "start + gathered_at_bytes(bucket), size * bucket.numel",
        "start + bucket.numel * bucket.dtype.itemsize, size * bucket.numel",
        "messages write elsewhere than the program reads",
    ),
    Fault(
        "nothing is scaled",
        "runtime/buffers.py",
        "scaled = bucket.index in program.scaled",
        "scaled = False",
        "divided values are averaged",
    ),
    Fault(
        "start of a place dropped",
        "runtime/buffers.py",
        "start = (offset_bytes + place.start_bytes) // place.dtype.itemsize + place.offset",
        "start = offset_bytes // place.dtype.itemsize + place.offset",
        "members of a bucket are read at its beginning",
    ),
    Fault(
        "offset of a place dropped",
        "runtime/buffers.py",
        "// place.dtype.itemsize + place.offset",
        "// place.dtype.itemsize",
        "a view begins where its base begins",
    ),
    Fault(
        "buckets at the beginning",
        "runtime/buffers.py",
        "own = _flat(block, start, numel, bucket.dtype)",
        "own = _flat(block, 0, numel, bucket.dtype)",
        "messages carry other memory than the program fills",
    ),
    Fault(
        "everything is scaled",
        "runtime/buffers.py",
        "scaled = bucket.index in program.scaled",
        "scaled = True",
        "what is not divided is added up",
    ),
    Fault(
        "strides of a place dropped",
        "runtime/buffers.py",
        "return block.as_strided(place.shape, place.stride, block.storage_offset() + start)",
        "return block.as_strided(place.shape, torch.empty(place.shape, device='meta').stride(), "
        "block.storage_offset() + start)",
        "a view is made in another order",
    ),
    Fault(
        "one type for all places",
        "runtime/buffers.py",
        "block = typed.get((device, place.dtype))",
        "block = next((each for each in typed.values() if each.itemsize == place.dtype.itemsize), None)",
        "integers are looked at as numbers of the same size",
    ),
)

_HEADER = (
    Fault(
        "header without memory",
        "emit/memory/planning.py",
        "return (bucket.numel + header_numel(bucket, world_size)) * bucket.dtype.itemsize",
        "return bucket.numel * bucket.dtype.itemsize",
        "what says which call a message belongs to lies over another value",
    ),
    Fault(
        "header over the last member",
        "runtime/buffers.py",
        "header = message[bucket.numel : bucket.numel + extra]",
        "header = message[bucket.numel - 1 : bucket.numel - 1 + extra]",
        "off by one",
    ),
)

_SENDING = (
    Fault(
        "shares are averaged",
        "runtime/buffers.py",
        '"sum" if self.scaled else self.bucket.op',
        "self.bucket.op",
        "values that were divided when the bucket was filled are divided once more",
    ),
    Fault(
        "rank 0 is every root",
        "runtime/buffers.py",
        "return group.broadcast(self.own, self.bucket.root, arrived)",
        "return group.broadcast(self.own, 0, arrived)",
        "values come from another rank than asked for",
    ),
    Fault(
        "not divided in the wider type",
        "runtime/wide_mean.py",
        "copy_(total.div_(self._group.size))",
        "copy_(total)",
        "a sum in place of a mean",
    ),
    Fault(
        "the last rank is left out",
        "runtime/wide_mean.py",
        "for piece in self._pieces[1:]:",
        "for piece in self._pieces[1:-1]:",
        "off by one",
    ),
    Fault(
        "means are not waited for",
        "runtime/wide_mean.py",
        "        assert self._finish is not None\n        self._finish()\n",
        "        assert self._finish is not None\n",
        "the second message of a mean may be under way when it is read",
    ),
)

FAULTS: dict[str, tuple[Fault, ...]] = {
    "layout": _LAYOUT,
    "lifetimes": _LIFETIMES,
    "donation": _DONATION,
    "packing": _PACKING,
    "places": _PLACES,
    "forms": _FORMS,
    "writing": _WRITING,
    "shortcuts": _SHORTCUTS,
    "schedule": _SCHEDULE,
    "arena": _ARENA,
    "header": _HEADER,
    "sending": _SENDING,
}
"""Faults in what emits a step operator by operator, by what they are in."""

_GRAPH = (
    Fault(
        "compiled, not divided",
        "emit/compiled/graph.py",
        "value = value * (1 / self.trace.world_size)",
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
        "outputs.append(_own(value) if position in placement.cloned else value)",
        "outputs.append(value)",
        "an average is returned in its bucket",
    ),
    Fault(
        "compiled, copies are dense",
        "emit/compiled/graph.py",
        "outputs.append(_own(value) if position in placement.cloned else value)",
        "outputs.append(value.clone() if position in placement.cloned else value)",
        "a copy of state with gaps has none: the next call does not copy it where it should",
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
        "emit/codegen/loops.py",
        "run([given[at] for at in back])",
        "run([given[at] for at in order])",
        "a permutation for its inverse",
    ),
    Fault(
        "compiled, gathered values read at one's own",
        "emit/memory/planning.py",
        "self.home[result] = (key, behind if gathers else start_bytes)",
        "self.home[result] = (key, start_bytes)",
        "the pieces of all ranks begin behind this rank's own",
    ),
)

_PASSES = (
    Fault(
        "compiled, copies taken for originals",
        "emit/compiled/passes.py",
        "    _keep_snapshots(graph)\n",
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

_BARRIERS = (
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

_DRAWS = (
    Fault(
        "compiled, drawn row by row",
        "emit/compiled/draws.py",
        '"stride": _narrowed(example), **kind',
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

COMPILED_FAULTS: dict[str, tuple[Fault, ...]] = {
    "graph": _GRAPH,
    "passes": _PASSES,
    "barriers": _BARRIERS,
    "draws": _DRAWS,
}
"""Faults in what is handed to the compiler."""

COMPILED_PROGRAMS = (
    "lies_otherwise",
    "adamw",
    "foreach",
    "accumulate",
    "large",
    "early",
    "in_the_bucket",
    "old_values",
    "returned",
    "drawn_anywhere",
)
"""The steps that these are tried on."""
