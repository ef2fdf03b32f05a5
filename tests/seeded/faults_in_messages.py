"""Mistakes in buckets: how they are packed, where they lie, their headers, and what sends them."""

from __future__ import annotations

from seeded_fault import Fault

PACKING = (
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
        "(key, behind + start_bytes)",
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

ARENA = (
    Fault(
        "gathered behind the last byte",
        "runtime/buffers.py",
        "start + arrives_at_bytes(bucket), math.prod(shape)",
        "start + bucket.numel * bucket.dtype.itemsize, math.prod(shape)",
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

HEADER = (
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

EXCHANGES = (
    Fault(
        "rows for the first member alone",
        "emit/memory/planning.py",
        "            if not dense:\n                stride = (bucket.row_numel, *stride[1:])\n",
        "",
        "a member's parts lie one behind the other: over parts of the next member, that go to other ranks",
    ),
    Fault(
        "members one behind the other",
        "plan/buckets.py",
        "rows = first.shape[0] if first.collective.splits else 1",
        "rows = 1",
        "ranks get equal shares of a bucket, and not of each member",
    ),
    Fault(
        "every part read at the first",
        "emit/memory/planning.py",
        "(key, behind + start_bytes)",
        "(key, behind or start_bytes)",
        "the wrong slice of what arrives",
    ),
    Fault(
        "sent the other way",
        "runtime/buffers.py",
        "group.permute(into, self.own, self.bucket.pairs, arrived)",
        "group.permute(into, self.own, [pair[::-1] for pair in self.bucket.pairs], arrived)",
        "values go to the rank that they should come from",
    ),
    Fault(
        "one message for two permutations",
        "plan/buckets.py",
        "        reduction.pairs, bool(upstream[index]),\n",
        "        bool(upstream[index]),\n",
        "all members go where the first goes",
    ),
    Fault(
        "parts of means are sums",
        "runtime/buffers.py",
        "self.own.view(self.bucket.rows, -1), collective.reduction, arrived)",
        'self.own.view(self.bucket.rows, -1), "sum", arrived)',
        "not divided",
    ),
    Fault(
        "parts are not waited for",
        "runtime/buffers.py",
        "            return group.all_to_all(into, self.own.view_as(into), arrived)\n",
        "            group.all_to_all(into, self.own.view_as(into), arrived)\n            return lambda: None\n",
        "what is exchanged may be under way when it is read",
    ),
    Fault(
        "parts are taken for what arrives",
        "emit/memory/planning.py",
        "return 0 if bucket.collective.reduction is not None or bucket.collective.in_place",
        "return 0 if bucket.collective.in_place",
        "the result of a reduce-scatter is read where the rows of other ranks arrive",
    ),
    Fault(
        "parts are columns",
        "runtime/buffers.py",
        "return group.reduce_scatter(into, self.own.view(self.bucket.rows, -1)",
        "return group.reduce_scatter(into, self.own.view(-1, self.bucket.rows).t().contiguous()",
        "each rank gets elements of other rows",
    ),
)

SENDING = (
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
