"""Mistakes in the text of a program, and in the order of a plan."""

from __future__ import annotations

from seeded_fault import Fault

WRITING = (
    Fault(
        "changes in place left out",
        "emit/memory/memory_plan.py",
        "node.name not in self.places.named or _changes_memory(node)",
        "node.name not in self.places.named or not node.users",
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
        "emit/memory/instructions.py",
        "chosen = [value[entry] for entry in entries]",
        "chosen = list(value[entries[0] : entries[0] + len(entries)])",
        "the entries of one bucket need not follow one another",
    ),
    Fault(
        "another rank's number",
        "emit/codegen/calls.py",
        "own = torch.tensor(place,",
        "own = torch.tensor(place + 1,",
        "ranks count from one",
    ),
    Fault(
        "the number along another dimension",
        "emit/codegen/calls.py",
        "trace.place_along(writer.rank, mesh_dimension_of(node))",
        "trace.place_along(writer.rank, writer.memory.plan.trace.sharded_along)",
        "along each dimension of a mesh a rank has the number that it has along the last",
    ),
    Fault(
        "shares along another dimension",
        "emit/memory/memory_plan.py",
        "return 1 / self.plan.trace.ranks_along(mesh_dimension_of(marker))",
        "return 1 / self.plan.trace.world_size",
        "a mean along one dimension is divided by the number of all ranks",
    ),
    Fault(
        "rank in a loop",
        "emit/codegen/program.py",
        "write_program(body, rank) for",
        "write_program(body, 0) for",
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
        '            writer.lines.append(Line(text, set(), part=ProgramPart("wait", bucket)))\n',
        "            if len(writer.memory.markers[bucket]) > 1:\n"
        '                writer.lines.append(Line(text, set(), part=ProgramPart("wait", bucket)))\n',
        "a bucket of one member is not waited for",
    ),
    Fault(
        "first microbatch left out",
        "emit/codegen/loop_bodies.py",
        "torch.arange(count, device=device)",
        "torch.arange(1, count, device=device)",
        "off by one",
    ),
    Fault(
        "one microbatch again and again",
        "emit/codegen/loop_bodies.py",
        "torch.arange(count, device=device)",
        "torch.arange(count, device=device).clamp(max=0)",
        "the number of the time is not passed on",
    ),
)

SHORTCUTS = (
    Fault(
        "anything is a transposed weight",
        "emit/codegen/shortcuts.py",
        "if columns.target is not _aten.t.default or columns.name in writer.memory.places.named:",
        'if columns.op != "call_function" or columns.name in writer.memory.places.named:',
        "a weight that is turned upside down is taken for a transposed one",
    ),
    Fault(
        "deferred without a word",
        "emit/memory/deferred_products.py",
        "            accesses.defer(product, node)\n",
        "",
        "a product is computed later than everybody else believes",
    ),
    Fault(
        "deferred past a change",
        "emit/memory/deferred_products.py",
        "            and not _may_change(product, node, accesses, donated)\n",
        "",
        "a factor of a deferred product is changed before it is read",
    ),
    Fault(
        "total among the factors",
        "emit/memory/deferred_products.py",
        "first < at <= last for storage in operands",
        "first < at < last for storage in operands",
        "a product is added to one of its own factors",
    ),
    Fault(
        "deferred although others read it",
        "emit/memory/deferred_products.py",
        "and _readers(product) == {node}",
        "and node in _readers(product)",
        "a product that is not computed is read",
    ),
    Fault(
        "alpha of a sum dropped",
        "emit/memory/deferred_products.py",
        "if node.target is not _aten.add_.Tensor or node.kwargs or",
        "if node.target is not _aten.add_.Tensor or",
        "half of a product is added as a whole",
    ),
    Fault(
        "factors the other way round",
        "emit/codegen/added_products.py",
        "for argument in (node.args[0], *product.args))\n    call",
        "for argument in (node.args[0], *reversed(product.args)))\n    call",
        "a product is not commutative",
    ),
)

SCHEDULE = (
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
        "elif self._missing[self._next_start] or",
        "elif len(self._missing[self._next_start]) > 1 or",
        "off by one",
    ),
    Fault(
        "calls do not wait",
        "plan/schedule.py",
        "            self._wait_for(index)\n        if call:",
        "            pass\n        if call:",
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
        "            self._wait_for(index)\n        if call:\n            self._run(tuple(call))",
        "            pass\n        if call:\n            self._run(tuple(call))\n"
        "        for index in call:\n            self._wait_for(index)",
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
        "return (*kind, index) if alone or not reduction.collective.shares else kind",
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
