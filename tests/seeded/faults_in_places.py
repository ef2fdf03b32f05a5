"""Mistakes in values at fixed places, and in operators that write to them."""

from __future__ import annotations

from seeded_fault import Fault

PLACES = (
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
        "emit/memory/message_memory.py",
        "return bucket.row_numel if bucket.collective.scatters else math.prod(arriving_shape(bucket, world_size))",
        "return bucket.row_numel if bucket.collective.scatters else bucket.numel",
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

FORMS = (
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
        'OutVariant("fill", value=value) if isinstance(value, (int, float))',
        'OutVariant("fill", value=int(value)) if isinstance(value, (int, float))',
        "0.75 becomes 0",
    ),
    Fault(
        "results the other way round",
        "emit/memory/out_variants.py",
        "return tuple(argument.name for argument in schema_of(operator).arguments if argument.is_out)",
        "return tuple(argument.name for argument in schema_of(operator).arguments if argument.is_out)[::-1]",
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
