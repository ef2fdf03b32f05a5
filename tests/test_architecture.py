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

# A file imports only from lower floors. The packages trace/, plan/, verify/ and emit/ are one floor each, and optim/
# counts as one file of its floor; inside a package files import freely. Other files of one floor know nothing of each
# other. A new file gets its floor here.
FLOORS = (
    ("errors", "dispatch"),
    ("torch_parts",),
    # helpers
    ("pytree", "table", "stages", "group", "fingerprint", "skeleton", "dynamo", "wire", "recomputation", "hashing"),
    ("other_ranks",),
    ("comparable", "exchange", "in_step", "labels", "rank_local"),
    ("axis", "surroundings", "deferral", "random"),
    ("generators",),
    ("markers",),
    ("transposes",),
    ("collectives", "batch_norm"),
    ("autodiff", "optim", "modules", "state"),
    ("accumulation", "checkpoint", "join"),
    # the flow
    ("trace",),
    ("plan",),
    ("verify",),
    ("emit",),
    ("measure",),
    ("plans_on_disk",),
    ("automatic",),
    ("preparation", "signatures"),
    ("transform",),
    ("__init__",),
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}

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


def part_of(module: str) -> str:
    """The entry of FLOORS that a module belongs to."""
    return module.split(".")[1] if "." in module else "__init__"


def upward_imports(trees: dict[str, ast.Module]) -> list[str]:
    """Describe each import of fdp's own that does not go down a floor."""
    known = frozenset(trees)
    found = []
    for module, tree in trees.items():
        for name, line in imported(module, tree):
            target = own_module(name, known)
            if target is None:
                continue
            here, there = part_of(module), part_of(target)
            if here == there and module != target and here != "__init__":
                continue  # inside one package
            if {here, there} <= FLOOR_OF.keys() and FLOOR_OF[there] >= FLOOR_OF[here]:
                found.append(f"{module}, line {line}: imports {target}")
    return found


def cycles(trees: dict[str, ast.Module]) -> list[str]:
    """Describe one import cycle for each file that lies on one."""
    known = frozenset(trees)
    graph = {
        module: {own_module(name, known) for name, _ in imported(module, tree)} - {None, module}
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
    # fdp/__init__.py is the module "fdp" itself.
    assert {part_of(module) for module in files()} == set(FLOOR_OF)


@pytest.mark.parametrize("module", [m for m in sorted(files()) if m.count(".") and path_of(m).name != "__init__.py"])
def test_every_file_is_in_the_picture_of_the_design(module: str) -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    picture = text[text.index("## Files and floors") : text.index("`Trace.plan` and `Plan.emit` are methods")]
    *_, package, file = module.split(".")
    rows = picture.split("─────\n")
    row = next(r for r in rows if f" {package}/" in r) if package not in ("fdp", "compiled") else picture
    assert re.search(rf"\b{file}\b", row), f"{module} is missing from docs/design.md, 'Files and floors'"


def test_imports_go_down() -> None:
    assert upward_imports(files()) == []


def test_no_import_cycles() -> None:
    assert cycles(files()) == []


@pytest.mark.parametrize(
    "source",
    [
        "from fdp.transform import Step",
        "import fdp.transform",
        "import fdp",
        "from fdp import Step",
        "from .transform import Step",
        "from . import transform",
        "def f():\n    from fdp.transform import Step",
        "if TYPE_CHECKING:\n    from fdp.transform import Step",
    ],
)
def test_an_import_upwards_is_seen_however_it_is_written(source: str) -> None:
    # The rule above is worth something only if it can fail.
    assert upward_imports({**files(), "fdp.errors": ast.parse(source)})


def test_an_import_of_a_sibling_is_seen() -> None:
    assert upward_imports({**files(), "fdp.optim": ast.parse("import fdp.modules")})
    assert not upward_imports({**files(), "fdp.trace.build": ast.parse("from fdp.trace import record")})
    assert cycles({**files(), "fdp.trace.record": ast.parse("from fdp.trace.build import x")})


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
