"""The house rules that a program can check: rooms and floors, imports, files, also of the tests."""

from __future__ import annotations

import ast
import functools
import pathlib
import re
from collections import Counter
from collections.abc import Iterable

import pytest
from imports import Import, cycles, imports_of, own_module

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE, TESTS = ROOT / "fdp", ROOT / "tests"

# The rooms of the house, from the ground up; a room is a folder, or a single file. In each room its floors, from the
# ground up. A file imports from lower rooms, and from lower floors of its own room. Files of one floor know nothing of
# each other. A new file gets its floor here.
ROOMS: dict[str, tuple[str, ...]] = {
    # the ground: no knowledge of steps
    "errors": (),
    "tracebacks": (), "endless_trees": (),
    "pytree": (),
    "tables": (),
    "pytorch": (
        "dispatch fake_modes guards overloads parts process_flags tensors",
        "dynamo group_names recomputation registries",
    ),
    "distributed": (
        "liveness.addresses liveness.fault liveness.links liveness.machines liveness.news liveness.places "
        "liveness.process liveness.session liveness.status liveness.threads",
        "liveness.neighbour liveness.own_monitor liveness.tree",
        "liveness.connections liveness.introduction liveness.watched",
        "liveness.monitor liveness.unreached liveness.watch",
        "liveness.on_signal liveness.once_a_second liveness.patience", "liveness.elsewhere mesh",
        "collective comparable fingerprint other_ranks sending wire", "messages", "group",
        "attempt by_collective checksum desynchronised exchange header", "launch second_group",
    ),
    "context": ("accumulating ambient axis garbage labelled looking",),
    # what a user calls
    "random": ("hashing", "keys", "generators"),
    "data": ("permutation", "batch_sampler"),
    "state": (
        "labels lock pace pieces rank_local seal shards unwritten", "containers index", "replicate storage", "shard",
        "contents", "checkpoint", "checkpoint_manager",
    ),
    "collectives": ("operators", "markers", "over_pytrees own_rank transposes", "exchanges"),
    "gradients": ("mean_over_ranks", "autodiff", "accumulation"),
    "nn": ("batch_norm meta_copy", "modules"),
    "optim": (
        "argument_checks first_state kept_elsewhere tracing", "rule", "optimizer", "entries gradient_transformations",
        "clipping partition schedules", "skipping",
        "averaging loss_scale",
    ),
    "join": (),
    # the flow
    "trace": (
        "operators.control operators.effects operators.source", "operators.kernel_strides", "operators.fake_rules",
        "sharding.inserted", "trace",
        "equality calls.finite_flags calls.keywords calls.libraries calls.names_in_code calls.overlap calls.structure",
        "calls.arguments calls.closure calls.watched_places", "calls.expressions", "calls.outside_search",
        "calls.outside_values", "calls.changes calls.pairing calls.recognise calls.results", "capture.functional "
        "capture.lists capture.remedies capture.reshapes capture.rng_replay capture.silent_changes capture.untouched",
        "capture.raw_messages capture.switches capture.value_reads", "capture.capture", "capture.calling",
        "graph.dependencies graph.replicated graph.variance", "graph.loops", "graph.precedence graph.wire_cast",
        "checks.checks checks.memory_checks checks.uncertain_strides",
        "sharding.reductions_of_parts sharding.scatters sharding.units", "sharding.gathers sharding.placements",
        "sharding.computations sharding.shared_gathers", "sharding.owners", "sharding.spmd", "sharding.sharded",
        "tracer",
    ),
    "timeline": ("style timeline", "rows", "perfetto picture report"),
    "plan": (
        "cost.costs cost.network", "cost.estimate cost.forecast cost.ticks",
        "plan", "buckets schedule simulate", "ddp",
        "search.chain", "search.layers", "search.optimum", "search.planner",
        "build", "scaling", "scaling_picture",
    ),
    "verify": (
        "extents failure program_protocol runs schemas terms", "combined", "bucket_memory visible_writes",
        "made memory", "kernels meta_tensors values", "message_checks rules", "machine", "followed higher",
        "decomposed reference sent", "execution graphs implementations", "drawn obligations", "lowered",
    ),
    "emit": (
        "memory.constants memory.elements memory.layout memory.liveness memory.map_picture memory.out_variants "
        "memory.savings memory.views",
        "memory.deferred_products memory.message_memory memory.own_memory", "memory.analysis", "memory.donation",
        "memory.planning",
        "memory.instructions", "memory.memory_plan", "memory.allocation", "memory.memory_table memory.decisions",
        "memory.peak", "memory.peak_picture",
        "codegen.bindings codegen.lines", "codegen.writer",
        "codegen.added_products codegen.loop_bodies codegen.packing codegen.shortcuts", "codegen.calls",
        "codegen.program",
        "proved",
        "compiled.barriers compiled.computed_once compiled.layouts compiled.numbers compiled.recording",
        "compiled.folded_values compiled.kernel_corrections compiled.special_values compiled.unaliased",
        "compiled.corrections",
        "compiled.drawing compiled.inductor compiled.storage_indexing", "compiled.passes",
        "compiled.draws compiled.options", "compiled.graph", "compiled.compiler", "backend",
    ),
    "runtime": (
        "agreement arena closed_over diagnostics frames memory_map replication rounds signature written_early",
        "in_passing two_levels wide_mean", "buffers", "order",
        "consensus in_flight", "proofs", "residence", "messages_of_call runner", "emitted",
    ),
    "compare": (
        "copies exact_operators leaves recheck refusals replay ulps", "fits_in_memory restored",
        "lockstep partitioned rounding side_by_side strides", "other_way", "op_by_op", "compiled", "by_backend",
    ),
    "measure": ("agreed clock fit", "device_speed intervals link", "operations", "profile"),
    "step": (
        "buckets_on_disk compile_together finite live_line memory_limit one_at_a_time", "progress",
        "automatic_buckets cache comparisons", "first_call", "step", "transform",
    ),
}  # fmt: skip

# `Trace.plan`, `Plan.emit` and the like are methods of values that lie below what they call. Each is a function-local
# import, and a type under TYPE_CHECKING: a type checker follows it, and nothing else may do so.
TO_THE_NEXT_STAGE = {
    "fdp.trace.trace": {"fdp.plan", "fdp.plan.buckets", "fdp.plan.build"},
    "fdp.timeline.timeline": {"fdp.timeline.perfetto", "fdp.timeline.picture", "fdp.timeline.report"},
    "fdp.plan.plan": {
        "fdp.emit.memory.decisions",
        "fdp.emit.memory.memory_plan",
        "fdp.emit.memory.peak",
        "fdp.plan.simulate",
        "fdp.runtime",
        "fdp.runtime.emitted",
    },
    "fdp.plan.scaling": {"fdp.plan.scaling_picture"},
    "fdp.emit.memory.memory_plan": {"fdp.emit.memory.memory_table"},
    "fdp.emit.memory.peak": {"fdp.emit.memory.peak_picture"},
}

# Where tests lie beside the rooms of the package.
NO_ROOMS = {"cards", "docs", "faults", "fuzz", "oracles", "published_models", "seeded"}

MAX_LINES, MAX_LINES_OF_TESTS, MAX_LINES_OF_FUNCTIONS = 420, 400, 60
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NAMES_THAT_SAY_NOTHING = {"utils", "util", "common", "misc", "helpers", "tools"}


@functools.cache
def files() -> dict[str, ast.Module]:
    """Dotted module name -> syntax tree, for every file of the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(), filename=str(path))
    return found


def path_of(module: str) -> pathlib.Path:
    base = ROOT.joinpath(*module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


@functools.cache
def imported(module: str, tree: ast.Module) -> list[Import]:
    """What a file of the package imports."""
    return imports_of(tree, module if path_of(module).name == "__init__.py" else module.rpartition(".")[0])


@functools.cache
def height_of(module: str, known: frozenset[str]) -> tuple[int, int]:
    """The room of a file, and its floor there, as numbers; what a folder exports is its top floor."""
    if module == "fdp":
        return len(ROOMS), 0
    room, _, rest = module.removeprefix("fdp.").partition(".")
    floors = ROOMS[room]
    if not rest:
        return list(ROOMS).index(room), len(floors)
    inside = {name for name in known if name.startswith(f"{module}.")}
    if inside:  # a folder in a room: as high as the highest of its files
        return list(ROOMS).index(room), max(height_of(name, known)[1] for name in inside)
    return list(ROOMS).index(room), next(floor for floor, names in enumerate(floors) if rest in names.split())


def upward_imports(trees: dict[str, ast.Module]) -> list[str]:
    """Describe each import of fdp's own that does not go down a floor."""
    known = frozenset(trees)
    found = []
    for module, tree in trees.items():
        for each in imported(module, tree):
            target = own_module(each.name, known)
            if target is None or target == module:
                continue
            if each.deferred and target in TO_THE_NEXT_STAGE.get(module, ()):
                continue
            if target.startswith(f"{module}.") and path_of(module).name == "__init__.py":
                continue  # what a folder exports
            if height_of(target, known) >= height_of(module, known):
                found.append(f"{module}, line {each.line}: imports {target}")
    return found


def rings(trees: dict[str, ast.Module]) -> list[str]:
    """Describe one import cycle for each file of the package that lies on one."""
    return cycles({module: imported(module, tree) for module, tree in trees.items()}, TO_THE_NEXT_STAGE)


def test_every_file_has_a_floor() -> None:
    planned = {f"fdp.{room}.{name}" for room, floors in ROOMS.items() for names in floors for name in names.split()}
    planned |= {f"fdp.{room}" for room, floors in ROOMS.items() if not floors}
    assert {module for module in files() if path_of(module).name != "__init__.py"} == planned


def drawn_rooms() -> dict[str, set[str]]:
    """Folder -> the names of its files, as explanation/design.md draws them; files that lie in none are under ""."""
    text = (ROOT / "docs" / "explanation" / "design.md").read_text()
    found: dict[str, set[str]] = {}
    for line in text[text.index("## Rooms and floors") : text.index("`Trace.plan`, `Plan.timeline`")].splitlines():
        heading = re.match(r"    (\S+)/ ", line)
        if heading:
            room = heading[1]
        elif line.startswith("    ──"):
            room = ""
        elif line.startswith(" " * 10):
            found.setdefault(room, set()).update(line[at:].split()[0] for at in (10, 64) if line[at:].strip())
    return found


def test_the_design_draws_every_file() -> None:
    built: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        if path.name != "__init__.py":
            built.setdefault(path.parent.relative_to(PACKAGE).as_posix().strip("."), set()).add(path.stem)
    assert drawn_rooms() == built


def test_imports_go_down() -> None:
    assert upward_imports(files()) == []


def test_no_import_cycles() -> None:
    assert rings(files()) == []


def test_no_import_cycles_among_benchmarks() -> None:
    paths = list((ROOT / "benchmarks").glob("*.py"))
    assert paths and cycles({path.stem: imports_of(ast.parse(path.read_text())) for path in paths}, {}) == []


def test_one_file_imports_by_names_that_it_computes() -> None:
    # Where such an import leads no test can read. That file looks for private parts of torch, by a list.
    found = {module for module, tree in files().items() if any(each.name is None for each in imported(module, tree))}
    assert found == {"fdp.pytorch.parts"}


@pytest.mark.parametrize(
    "source",
    [
        "from fdp.step.transform import Step",
        "import fdp.step.transform",
        "import fdp",
        "from fdp import Step",
        "from .transform import Step",
        "from . import transform",
        "def f():\n    from fdp.step.transform import Step",
        "if TYPE_CHECKING:\n    from fdp.step.transform import Step",
        "importlib.import_module('fdp.step.transform')",
        "__import__('fdp.step')",
        "pkgutil.resolve_name('fdp.step.transform:Step')",
    ],
)
def test_an_import_upwards_is_seen_however_it_is_written(source: str) -> None:
    # The rule above is worth something only if it can fail.
    assert upward_imports({**files(), "fdp.errors": ast.parse(source)})


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("fdp.optim.rule", "import fdp.optim.optimizer"),  # up, inside of a room
        ("fdp.optim.rule", "def f():\n    from fdp.optim import optimizer"),
        ("fdp.optim.rule", "from fdp.optim import from_torch"),  # what the room exports is above its files
        ("fdp.trace.calls.pairing", "from fdp.trace.calls.recognise import x"),  # a sibling
        ("fdp.trace.calls.arguments", "from fdp.trace import capture"),  # a higher folder of its room
        ("fdp.plan.cost.costs", "from fdp.plan import plan_trace"),
        ("fdp.plan.cost.costs", "from fdp.plan import search"),
        ("fdp.emit.memory.layout", "from fdp.emit import codegen"),
        ("fdp.trace.trace", "from fdp.runtime import Emitted"),  # the next stage but one
        ("fdp.trace.trace", "from fdp.plan import Plan"),  # the next stage, as the file is imported
        ("fdp.trace.trace", "if TYPE_CHECKING:\n    pass\nelse:\n    from fdp.plan import Plan"),
        ("fdp.trace.trace", "import_module('fdp.plan')"),
    ],
)
def test_an_import_inside_of_a_room_is_seen(module: str, source: str) -> None:
    assert upward_imports({**files(), module: ast.parse(source)})


def test_an_import_downwards_is_let_through() -> None:
    assert not upward_imports({**files(), "fdp.trace.tracer": ast.parse("from fdp.trace import trace")})
    assert not upward_imports({**files(), "fdp.step.cache": ast.parse("from fdp.emit.memory import layout")})
    later = "def f():\n    from fdp.plan.build import plan_trace"
    assert not upward_imports({**files(), "fdp.trace.trace": ast.parse(later)})
    checked = "if typing.TYPE_CHECKING:\n    from fdp.plan.build import plan_trace"
    assert not upward_imports({**files(), "fdp.trace.trace": ast.parse(checked)})


def test_a_cycle_is_seen() -> None:
    assert rings({**files(), "fdp.trace.operators.source": ast.parse("from fdp.trace.tracer import x")})


def names_used_twice(modules: Iterable[str]) -> list[str]:
    """Base names that more than one of them has; a name names one idea."""
    return [name for name, count in Counter(module.rpartition(".")[2] for module in modules).items() if count > 1]


def test_base_names_are_unique() -> None:
    modules = [module for module in files() if path_of(module).name != "__init__.py"]
    assert names_used_twice(modules) == []
    assert names_used_twice([*modules, "fdp.compare.planning"]) == ["planning"]


def test_class_names_are_unique() -> None:
    classes = [node.name for tree in files().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert names_used_twice(classes) == []
    assert names_used_twice([*classes, "Trace"]) == ["Trace"]


@pytest.mark.parametrize("module", files())
def test_file_holds_one_named_idea(module: str) -> None:
    lines = len(path_of(module).read_text().splitlines())
    assert ast.get_docstring(files()[module]), "a file says in its first lines what it is for"
    assert lines <= MAX_LINES, "split it: it holds more than one idea"
    assert not NAMES_THAT_SAY_NOTHING & set(module.split(".")), "name it after its idea"


def test_threads_that_do_not_keep_a_process_are_started_in_one_file() -> None:
    starting = {
        module
        for module, tree in files().items()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and any(keyword.arg == "daemon" for keyword in call.keywords)
    }
    assert starting == {"fdp.distributed.liveness.threads"}  # which waits until they are out of torch


def written_badly(name: str, text: str) -> list[str]:
    """What a file of the tests, by its path below tests/, has against the rules for them."""
    *folders, file = pathlib.PurePath(name).with_suffix("").parts
    tree = ast.parse(text)
    found = []
    if folders and folders[0] not in NO_ROOMS and not PACKAGE.joinpath(*folders).is_dir():
        found.append("lies in no room")
    if len(text.splitlines()) > MAX_LINES_OF_TESTS:
        found.append("holds more than one theme: split it")
    if not ast.get_docstring(tree) or file in NAMES_THAT_SAY_NOTHING:
        found.append("does not say what it is for")
    imports = [each for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names]
    sources = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    if any(each.startswith("test_") for each in [*(alias.name for alias in imports), *sources]):
        found.append("imports another test file: what they share is for tests/oracles")
    return found


def test_files_of_tests_lie_in_rooms_and_hold_one_theme() -> None:
    found = {path.relative_to(TESTS).as_posix(): path.read_text() for path in TESTS.rglob("*.py")}
    assert {name: bad for name, text in found.items() if (bad := written_badly(name, text))} == {}
    # A test file is imported by its base name, in the processes of tests as well.
    names = Counter(name.rpartition("/")[2] for name in found)
    assert [name for name, count in names.items() if count > 1 and name.startswith("test_")] == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("traces/test_x.py", '"""X."""'),
        ("emit/decompiled/test_x.py", '"""X."""'),
        ("trace/test_x.py", "\n" * MAX_LINES_OF_TESTS + '"""X."""'),
        ("trace/test_x.py", "import torch"),
        ("oracles/utils.py", '"""X."""'),
        ("trace/test_x.py", '"""X."""\nfrom test_y import z'),
        ("trace/test_x.py", '"""X."""\ndef f():\n    import test_y as t'),
    ],
)
def test_a_file_of_tests_that_breaks_a_rule_is_seen(name: str, text: str) -> None:
    assert len(written_badly(name, text)) == 1
    assert written_badly("emit/compiled/test_x.py", '"""X."""\nimport ranks') == []


def long_functions(trees: dict[str, ast.Module]) -> dict[str, int]:
    """The functions of more lines than that, without their docstrings."""
    found = {}
    for node in (node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, FUNCTIONS)):
        text = node.body[:1] if ast.get_docstring(node) is not None else []
        own, *docstring = ((each.end_lineno or 0) - each.lineno + 1 for each in (node, *text))
        if own - sum(docstring) > MAX_LINES_OF_FUNCTIONS:
            found[node.name] = own - sum(docstring)
    return found


def test_functions_are_short() -> None:
    assert long_functions(files()) == {}, "split it at an idea"
    for longer in (0, 1):  # a docstring does not count
        source = 'def f():\n    """One.\n\n    Two.\n    """\n' + "    x = 1\n" * (MAX_LINES_OF_FUNCTIONS - 1 + longer)
        assert len(long_functions({"fdp.x": ast.parse(source)})) == longer
