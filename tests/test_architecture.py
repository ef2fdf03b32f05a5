"""The house rules that a program can check: import floors, files, exports, docstrings, links."""

from __future__ import annotations

import ast
import functools
import inspect
import pathlib
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

import fdp

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fdp"

# The rooms of the house, from the ground up; a room is a folder, or a single file. In each room its floors, from the
# ground up. A file imports from lower rooms, and from lower floors of its own room. Files of one floor know nothing of
# each other. A new file gets its floor here.
ROOMS: dict[str, tuple[str, ...]] = {
    # the ground: no knowledge of steps
    "errors": (),
    "tracebacks": (),
    "pytree": (),
    "tables": (),
    "pytorch": ("dispatch guards parts", "dynamo recomputation"),
    "distributed": ("comparable fingerprint group header other_ranks wire", "desynchronised exchange"),
    "context": ("accumulating ambient axis",),
    # what a user calls
    "random": ("hashing", "keys", "generators"),
    "state": ("labels rank_local", "replicate", "checkpoint"),
    "collectives": ("markers", "over_pytrees transposes"),
    "gradients": ("autodiff", "accumulation"),
    "nn": ("batch_norm meta_copy", "modules"),
    "optim": (
        "checks tracing", "rule", "optimizer", "entries", "clipping partition schedules", "skipping",
        "averaging loss_scale",
    ),
    "join": (),
    # the flow
    "trace": (
        "closure control effects keywords overlap source structure",
        "kernel_strides remedies replicated rng_replay silent_changes trace untouched variance",
        "arguments dependencies fake_rules reshapes switches value_reads",
        "capture changes loops pairing recognise results",
        "checks uncertain_strides wire_cast",
        "build",
    ),
    "timeline": ("timeline", "rows", "perfetto picture report"),
    "plan": (
        "cost.costs cost.network", "cost.estimate cost.forecast cost.ticks",
        "plan", "buckets schedule simulate", "ddp",
        "search.chain", "search.layers", "search.optimum", "search.planner",
        "build", "scaling", "scaling_picture",
    ),
    "verify": (
        "buckets extents failure operators program terms", "made memory", "kernels values", "messages rules", "machine",
        "followed higher", "decomposed reference sent", "execution graphs implementations", "draws obligations",
        "lowered",
    ),
    "emit": (
        "memory.constants memory.elements memory.layout memory.liveness memory.out_variants memory.views",
        "memory.donation memory.products", "memory.planning", "memory.instructions", "memory.memory_plan",
        "codegen.bindings codegen.lines", "codegen.writer",
        "codegen.loops codegen.packing codegen.products codegen.shortcuts", "codegen.calls", "codegen.program",
        "proved",
        "compiled.barriers compiled.recording compiled.unaliased compiled.updates",
        "compiled.drawing compiled.inductor compiled.passes", "compiled.draws compiled.options",
        "compiled.graph", "compiled.public", "compiled.compiler",
    ),
    "runtime": (
        "agreement arena closed_over diagnostics memory_map replication signature wide_mean", "buffers", "order",
        "consensus in_flight", "verified", "residence", "emitted",
    ),
    "compare": (
        "copies leaves recheck refusals replay ulps", "fits_in_memory restored",
        "lockstep rounding side_by_side strides", "op_by_op", "compiled",
    ),
    "measure": ("agreed clock dry_run fit", "intervals link machine", "operations", "profile"),
    "step": ("buckets_on_disk cache compile_together progress", "automatic_buckets", "first_call", "transform"),
}  # fmt: skip

# `Trace.plan`, `Plan.emit` and the like are methods of values that lie below what they call. Each is a function-local
# import, and a type under TYPE_CHECKING: a type checker follows it, and nothing else may do so.
TO_THE_NEXT_STAGE = {
    "fdp.trace.trace": {"fdp.plan", "fdp.plan.buckets", "fdp.plan.build"},
    "fdp.timeline.timeline": {"fdp.timeline.perfetto", "fdp.timeline.picture", "fdp.timeline.report"},
    "fdp.plan.plan": {"fdp.plan.simulate", "fdp.runtime", "fdp.runtime.emitted"},
    "fdp.plan.scaling": {"fdp.plan.scaling_picture"},
}

MAX_LINES = 420
NAMES_THAT_SAY_NOTHING = {"utils", "util", "common", "misc", "helpers", "tools"}

# What other programs call, from the table of public names. A name leaves NOT_YET in the change that adds it.
PUBLIC_FUNCTIONS = {
    "accumulate", "all_gather", "assert_replicated", "axis_index", "axis_size", "broadcast", "data_parallel",
    "from_module", "grad", "join", "load", "per_rank", "pmax", "pmean", "pmin", "psum", "replicate", "save",
    "scaling", "seed", "sync_batch_norm", "value_and_grad",
}  # fmt: skip
PUBLIC_ERRORS = {
    "AgreementError", "ArgumentError", "CompileError", "FdpError", "PeerError", "PurityError", "ReplicationError",
    "TraceError",
}  # fmt: skip
# Of `fdp.optim`, beside the class `Optimizer`.
PUBLIC_IN_OPTIM = {
    "averaged", "clip_by_global_norm", "clipped", "ema", "from_torch", "global_norm", "loss_scaled", "partition",
    "schedule_from_torch", "scheduled", "skip_nonfinite",
}  # fmt: skip
PUBLIC_STAGES = {"Step", "Trace", "Plan"}
PUBLIC_VALUES = {"Network", "PerRank", "Scaling", "Timeline"}
PUBLIC = PUBLIC_FUNCTIONS | PUBLIC_ERRORS | PUBLIC_STAGES | PUBLIC_VALUES | {"optim", "random"}
NOT_YET: set[str] = set()


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


def imported(module: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every (dotted name, line) that a file imports: in functions and under TYPE_CHECKING, too."""
    package = module if path_of(module).name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno


def own_module(name: str, known: frozenset[str]) -> str | None:
    """The file of fdp that an imported dotted name lies in; None if it is not fdp's."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or None


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
        for name, line in imported(module, tree):
            target = own_module(name, known)
            if target is None or target == module:
                continue
            if target in TO_THE_NEXT_STAGE.get(module, ()) and is_deferred(tree, line):
                continue
            if target.startswith(f"{module}.") and path_of(module).name == "__init__.py":
                continue  # what a folder exports
            if height_of(target, known) >= height_of(module, known):
                found.append(f"{module}, line {line}: imports {target}")
    return found


def is_deferred(tree: ast.Module, line: int) -> bool:
    """Whether a line lies in a function, or under TYPE_CHECKING: nothing of it is imported with the file."""
    return any(
        node.lineno <= line <= (node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    )


def cycles(trees: dict[str, ast.Module]) -> list[str]:
    """Describe one import cycle for each file that lies on one."""
    known = frozenset(trees)
    graph = {
        module: {own_module(name, known) for name, _ in imported(module, tree)}
        - {None, module}
        - TO_THE_NEXT_STAGE.get(module, set())
        for module, tree in trees.items()
    }
    found = []
    for start in graph:
        trails = [(start,)]
        seen: set[Any] = set()
        while trails:
            trail = trails.pop()
            for following in sorted(str(name) for name in graph[trail[-1]]):
                if following == start:
                    found.append(" -> ".join((*trail, start)))
                    trails = []
                    break
                if following not in seen:
                    seen.add(following)
                    trails.append((*trail, following))
    return found


def test_every_file_has_a_floor() -> None:
    planned = {f"fdp.{room}.{name}" for room, floors in ROOMS.items() for names in floors for name in names.split()}
    planned |= {f"fdp.{room}" for room, floors in ROOMS.items() if not floors}
    assert {module for module in files() if path_of(module).name != "__init__.py"} == planned


def drawn_rooms() -> dict[str, set[str]]:
    """Folder -> the names of its files, as docs/design.md draws them; files that lie in none are under ""."""
    text = (ROOT / "docs" / "design.md").read_text()
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
    assert cycles(files()) == []


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
        ("fdp.trace.arguments", "from fdp.trace.dependencies import x"),  # a sibling
        ("fdp.plan.cost.costs", "from fdp.plan import plan_trace"),
        ("fdp.plan.cost.costs", "from fdp.plan import search"),
        ("fdp.emit.memory.layout", "from fdp.emit import codegen"),
        ("fdp.trace.trace", "from fdp.runtime import Emitted"),  # the next stage but one
        ("fdp.trace.trace", "from fdp.plan import Plan"),  # the next stage, as the file is imported
    ],
)
def test_an_import_inside_of_a_room_is_seen(module: str, source: str) -> None:
    assert upward_imports({**files(), module: ast.parse(source)})


def test_an_import_downwards_is_let_through() -> None:
    assert not upward_imports({**files(), "fdp.trace.build": ast.parse("from fdp.trace import trace")})
    assert not upward_imports({**files(), "fdp.step.cache": ast.parse("from fdp.emit.memory import layout")})
    later = "def f():\n    from fdp.plan.build import plan_trace"
    assert not upward_imports({**files(), "fdp.trace.trace": ast.parse(later)})


def test_a_cycle_is_seen() -> None:
    assert cycles({**files(), "fdp.trace.source": ast.parse("from fdp.trace.build import x")})


@pytest.mark.parametrize("module", files())
def test_file_holds_one_named_idea(module: str) -> None:
    lines = len(path_of(module).read_text().splitlines())
    assert ast.get_docstring(files()[module]), "a file says in its first lines what it is for"
    assert lines <= MAX_LINES, "split it: it holds more than one idea"
    assert not NAMES_THAT_SAY_NOTHING & set(module.split(".")), "name it after its idea"


def private_torch(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Private module of torch -> the files that import it."""
    found: dict[str, set[str]] = {}
    for module, tree in trees.items():
        for name, _ in imported(module, tree):
            private = re.match(r"torch\.(?:[a-z]\w*\.)*_\w+|torch\.fx\.experimental\.\w+", name)
            if private:
                found.setdefault(private[0], set()).add(module)
    return found


def test_each_private_torch_module_is_imported_in_one_file() -> None:
    # What torch does not promise may change with any release: then one file has to change, not five.
    assert {name: users for name, users in private_torch(files()).items() if len(users) > 1} == {}


def test_private_torch_modules_are_recognised() -> None:
    source = "import torch._inductor.compile_fx\nfrom torch.utils._pytree import tree_map\nimport torch.fx\n"
    source += "from torch.fx.experimental.proxy_tensor import make_fx\nfrom torch._subclasses import FakeTensorMode"
    assert set(private_torch({"fdp.x": ast.parse(source)})) == {
        "torch._inductor", "torch.utils._pytree", "torch.fx.experimental.proxy_tensor", "torch._subclasses",
    }  # fmt: skip


def test_public_names_are_the_documented_ones() -> None:
    assert set(fdp.__all__) == PUBLIC - NOT_YET
    assert len(fdp.__all__) == len(set(fdp.__all__))
    assert [name for name in NOT_YET if hasattr(fdp, name)] == []


def sections(docstring: str) -> dict[str, str]:
    """Google-style sections of a docstring; the text before the first is under ""."""
    parts = re.split(r"^(Args|Attributes|Returns|Raises|Example|References):\n", docstring, flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def docstring_gaps(name: str, obj: Any, needs_example: bool) -> list[str]:
    """What the docstring of a function lacks."""
    found = sections(inspect.getdoc(obj) or "")
    gaps = []
    first = found[""].split("\n\n")[0]
    if not first.strip().endswith("."):
        gaps.append("a first sentence that says what it promises")
    signature = inspect.signature(obj)
    for parameter in signature.parameters:
        if parameter != "self" and not re.search(rf"^\s+\*{{0,2}}{parameter}:", found.get("Args", ""), re.MULTILINE):
            gaps.append(f"Args: {parameter}")
    takes_arguments = any(parameter != "self" for parameter in signature.parameters)
    if takes_arguments and signature.return_annotation not in (None, "None") and "Returns" not in found:
        gaps.append("Returns")
    raises = any(isinstance(node, ast.Raise) for node in ast.walk(syntax_of(obj)))
    if raises and "Raises" not in found:
        gaps.append("Raises")
    example = found.get("Example", "")
    elsewhere = re.search(r"See `(\w+)`", example)
    shown = ">>> " in example or (elsewhere and ">>> " in (getattr(fdp, elsewhere[1]).__doc__ or ""))
    if needs_example and not shown:
        gaps.append("Example that runs")
    return [f"{name}: {gap}" for gap in gaps]


def syntax_of(obj: Any) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(obj)))


@pytest.mark.parametrize("name", sorted(PUBLIC_FUNCTIONS - NOT_YET))
def test_public_function_is_documented(name: str) -> None:
    assert docstring_gaps(name, getattr(fdp, name), needs_example=True) == []


@pytest.mark.parametrize("name", sorted(PUBLIC_STAGES | PUBLIC_VALUES))
def test_stage_and_its_methods_are_documented(name: str) -> None:
    stage = getattr(fdp, name)
    assert (stage.__doc__ or "").split("\n\n")[0].strip().endswith(".")
    methods = {key: value for key, value in vars(stage).items() if inspect.isfunction(value) and key[0] != "_"}
    assert [gap for key in methods for gap in docstring_gaps(f"{name}.{key}", methods[key], False)] == []


@pytest.mark.parametrize("name", sorted(PUBLIC_ERRORS))
def test_error_is_documented_and_a_refusal_of_fdp(name: str) -> None:
    error = getattr(fdp, name)
    assert issubclass(error, fdp.FdpError)
    assert (error.__doc__ or "").strip().endswith(".")


@pytest.mark.parametrize("name", sorted(PUBLIC_IN_OPTIM))
def test_public_function_of_optim_is_documented(name: str) -> None:
    assert docstring_gaps(f"optim.{name}", getattr(fdp.optim, name), needs_example=True) == []


def test_public_names_of_optim_are_the_documented_ones() -> None:
    assert set(fdp.optim.__all__) == PUBLIC_IN_OPTIM | {"Optimizer", "Schedule"}
    assert docstring_gaps("optim.Schedule", fdp.optim.Schedule.__call__, needs_example=False) == []


@pytest.mark.parametrize("name", fdp.random.__all__)
def test_random_function_is_documented(name: str) -> None:
    assert docstring_gaps(name, getattr(fdp.random, name), needs_example=True) == []


def test_a_gap_in_a_docstring_is_seen() -> None:
    def bad(x: int, y: int) -> int:
        """No full stop

        Args:
            x: a number.
        """
        raise ValueError

    gaps = docstring_gaps("bad", bad, needs_example=True)
    assert [gap.removeprefix("bad: ") for gap in gaps] == [
        "a first sentence that says what it promises", "Args: y", "Returns", "Raises", "Example that runs",
    ]  # fmt: skip


DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_files_lead_somewhere(path: pathlib.Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text())
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []
