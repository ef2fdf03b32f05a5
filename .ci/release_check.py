"""Is this checkout a release? Builds it, installs what was built in a clean environment, and trains with that.

    make release-check [ARGS="--out dist --tag v0.1.0"]

It checks the version (one in pyproject.toml, fdp and CITATION.cff, with a dated entry in CHANGELOG.md), what wheel and
sdist hold, that the wheel installs with no more than its requirements, and that it trains on two ranks. A version with
no dated entry is reported last, so that everything else can be tried before. With `--out` it leaves wheel and sdist in
that folder if all is well. With `--tag` the version has to be that of the tag.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import venv
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]

SMOKE = """
    import torch, fdp
    assert "site-packages" in fdp.__file__, fdp.__file__
    fdp.initialize()
    optimizer = fdp.optim.from_torch(torch.optim.AdamW, lr=0.1)

    @fdp.data_parallel(donate_argnums=0)
    def step(state, batch):
        loss, grads = fdp.value_and_grad(lambda p: (batch @ p["w"] - 1).square().mean())(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt}, fdp.pmean(loss)

    params = {"w": torch.zeros(4)}
    state = fdp.replicate({"params": params, "opt": optimizer.init(params)})
    losses = []
    for number in range(30):
        state, loss = step(state, torch.eye(4) + 0.1 * fdp.axis_index())
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 2, losses
    fdp.assert_replicated(state)
    torch.distributed.destroy_process_group()
"""


def run(*command: str, **options: object) -> None:
    """Run a command, whose output is shown only if it fails."""
    ended = subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if ended.returncode:
        sys.exit(f"failed: {' '.join(command)}\n{ended.stdout}{ended.stderr}")


def version() -> str:
    """The version, which is the same wherever it is written."""
    places = {
        "pyproject.toml": r'^version = "(.+)"$',
        "fdp/__init__.py": r'^__version__ = "(.+)"$',
        "CITATION.cff": r"^version: (.+)$",
    }
    found = {}
    for file, pattern in places.items():
        match = re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)
        found[file] = match and match[1]
    if len(set(found.values())) != 1 or None in found.values():
        sys.exit(f"failed: versions differ: {found}")
    return str(found["pyproject.toml"])


def build(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """A wheel and an sdist of the files that git has."""
    copy = folder / "copy"
    run("git", "clone", "--quiet", str(ROOT), str(copy))
    program = "from setuptools import build_meta as b; b.build_wheel('../dist'); b.build_sdist('../dist')"
    run(sys.executable, "-c", program, cwd=copy)
    (wheel,), (sdist,) = (list((folder / "dist").glob(end)) for end in ("*.whl", "*.tar.gz"))
    return wheel, sdist


def compare_contents(wheel: pathlib.Path, sdist: pathlib.Path) -> None:
    """The wheel has all of fdp/ and nothing else; the sdist has what the wheel is built from."""
    listed = subprocess.run(["git", "ls-files", "fdp"], cwd=ROOT, capture_output=True, text=True, check=True)
    sources = set(listed.stdout.split())
    with zipfile.ZipFile(wheel) as file:
        packed = {name for name in file.namelist() if ".dist-info/" not in name}
        licensed = any(name.endswith("licenses/LICENSE") for name in file.namelist())
    if packed != sources or not licensed:
        sys.exit(f"failed: the wheel lacks {sources - packed}, and has {packed - sources}; license: {licensed}")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    if missing := {*sources, "pyproject.toml", "README.md", "LICENSE"} - names:
        sys.exit(f"failed: the sdist lacks {missing}")


def train(wheel: pathlib.Path, folder: pathlib.Path) -> None:
    """Install the wheel in an environment of its own, and train with it on two ranks."""
    venv.create(folder / "venv", with_pip=True)
    python = str(folder / "venv" / "bin" / "python")
    pinned = re.search(r"^torch==.*$", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert pinned is not None
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel), pinned[0])
    run(python, "-m", "pip", "check")
    (folder / "smoke.py").write_text(textwrap.dedent(SMOKE))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    launch = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "smoke.py"]
    run(*launch, cwd=folder, env=environment)


def main() -> None:
    """Check one after the other, and say what was done."""
    parser = argparse.ArgumentParser(description="Is this checkout a release?")
    parser.add_argument("--out", type=pathlib.Path, help="where wheel and sdist are left")
    parser.add_argument("--tag", help="the tag of the release: v and the version")
    options = parser.parse_args()
    number = version()
    print(f"version {number}, the same everywhere")
    if options.tag not in (None, f"v{number}"):
        sys.exit(f"failed: the tag {options.tag} is not that of version {number}")
    dated = rf"^## \[{re.escape(number)}\] - \d{{4}}-\d\d-\d\d$"
    is_dated = re.search(dated, (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE) is not None
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        wheel, sdist = build(folder)
        print(f"built {wheel.name} and {sdist.name}")
        compare_contents(wheel, sdist)
        print("they hold the package, all of it, and the license")
        train(wheel, folder)
        print("installed in a clean environment, it trains on two ranks")
        if options.out is not None and is_dated:
            options.out.mkdir(parents=True, exist_ok=True)
            for built in (wheel, sdist):
                shutil.copy(built, options.out)
    if not is_dated:
        sys.exit(f"not released: CHANGELOG.md has no entry of version {number} with a date")
    print("CHANGELOG.md has its entry, with a date")


if __name__ == "__main__":
    main()
