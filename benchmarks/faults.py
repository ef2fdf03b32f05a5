"""How soon the other ranks know that one is gone, and which: fdp beside DistributedDataParallel (DDP).

    python benchmarks/faults.py [--ranks N]... [--kind KIND]... [--patience S] [--soak N [--seed S] [--at CALL]]

Each row is one run of as many gloo ranks as its column says, plain processes on this machine, one thread each. At the
fifth step one of them, neither the first nor the last where there are more than two, does something wrong; printed are
the seconds until the first and until the last of all others has raised an error, and whom the error names. A run is
given up after `--patience` seconds. For a bit that flips, and for a NaN, the rank that holds it is one of those that
have to raise. To cut a cable, ranks run on two hosts that are network namespaces, which root alone can make.

With `--soak` random kinds, ranks and moments are tried with fdp alone, in runs that save a checkpoint every five steps.
Printed is what went wrong: a rank that did not raise, an error that names another rank or another reason, or a
checkpoint that is lost; then of each rank where it was (fdp's report and all stacks), and how it ended. The exit code
is 1 if anything did. FDP_LIVENESS_S=3 makes it quicker; `--kind` tries some kinds alone.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

CUT = "the cable between two hosts is cut"
KINDS = (
    "killed", "killed in a step", "killed in the first call", "frozen", "raises and stays", "leaves", "raises and ends",
    CUT, "a bit of a parameter flips", "a gradient is NaN",
)  # fmt: skip
ON_ALL = ("a bit of a parameter flips", "a gradient is NaN")
"""Faults of which the rank itself hears as well."""

REASONS = {
    "killed": "died", "killed at a random moment": "died", "frozen": "frozen", "frozen at a random moment": "frozen",
    "raises and stays": "raised", "leaves": "left", "raises and ends": "raised",
}  # fmt: skip
"""What the errors of a soak have to say, by its kinds of fault."""

MOMENTS_S = 0.05
"""A random moment is one of so many seconds after a call begins: the call, and what is saved after it."""
CALLS = 400
SAVES_EVERY = 5
STAYS_S = 300.0


# --- a rank ---------------------------------------------------------------------------------------------------------


def program(contender: str, kind: str, victim: int, at: int, folder: pathlib.Path) -> None:
    """Train as one rank; write down the fault, or the error."""
    import torch
    import torch.distributed as dist

    import fdp

    torch.set_num_threads(1)
    fdp.initialize()
    rank = dist.get_rank()
    model = network()
    manager = fdp.CheckpointManager(folder / "run") if contender == "fdp and checkpoints" else None

    if contender != "ddp":
        apply, params, _ = fdp.from_module(model)
        state = fdp.replicate(params)

        @fdp.data_parallel(check_finite=kind == "a gradient is NaN")
        def step(params: Any, batch: Any) -> Any:
            loss, grads = fdp.value_and_grad(lambda p: apply(p, {}, batch)[0].square().mean())(params)
            return {name: value - 0.01 * grads[name] for name, value in params.items()}, fdp.pmean(loss)

        def train(batch: Any) -> None:
            nonlocal state
            state, _ = step(state, batch)
    else:
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

        def train(batch: Any) -> None:
            ddp(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    faulthandler.register(signal.SIGUSR2, all_threads=True)

    def tell(**facts: Any) -> None:
        path = folder / ("fault" if facts["event"] == "fault" else f"rank{rank}")
        path.with_suffix(".part").write_text(json.dumps({"rank": rank, "when_s": time.time(), **facts}))
        os.replace(path.with_suffix(".part"), path)

    def stop(number: int) -> None:
        tell(event="fault")
        os.kill(os.getpid(), number)

    try:
        for call in range(1, CALLS + 1):
            batch = torch.randn(16, 64)
            if call == at:
                (folder / f"at{rank}").touch()
            if rank == victim and call == at and kind != CUT:
                if kind.startswith(("killed", "frozen")):
                    number = signal.SIGKILL if kind.startswith("killed") else signal.SIGSTOP
                    if kind in ("killed", "frozen"):
                        stop(number)
                    else:
                        threading.Timer(float(os.environ["FAULT_DELAY_S"]), stop, (number,)).start()
                else:
                    tell(event="fault")
                if kind == "raises and ends":
                    raise ValueError("a mistake")
                elif kind == "leaves":
                    break
                elif kind == "raises and stays":
                    batch = torch.randn(16, 63)
                elif kind == "a gradient is NaN":
                    batch[0, 0] = float("nan")
                elif kind == "a bit of a parameter flips":
                    weights = state["0.weight"] if contender != "ddp" else model[0].weight.data
                    weights.view(torch.int32)[0, 0] ^= 1
            train(batch)
            if manager is not None:
                (folder / f"call{rank}").write_text(str(call))
                if call % SAVES_EVERY == 0:
                    manager.save(call, state)
            time.sleep(0.005)
    except Exception as error:
        if rank != victim or kind in (CUT, *ON_ALL):
            facts = {name: getattr(error, name, None) for name in ("ranks", "reason")}
            tell(event="error", kind=type(error).__name__, text=str(error)[:500], **facts)
        elif kind == "raises and stays":
            time.sleep(STAYS_S)
        else:
            raise


def network() -> Any:
    """What is trained."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))


# --- the ranks of a run ---------------------------------------------------------------------------------------------


def run(
    contender: str,
    kind: str,
    size: int,
    victim: int,
    at: int,
    patience_s: float,
    look: Any = None,
    delay_s: float = 0.002,
) -> dict[int, dict[str, Any]]:
    """What each rank wrote that has to raise, with `after_s`: seconds since the fault; `look` is given their folder."""
    hosts = _hosts() if kind == CUT else None
    with (
        socket.socket() as free,
        tempfile.TemporaryDirectory() as name,
        hosts.two_hosts() if hosts else NOTHING as both,
    ):
        free.bind(("127.0.0.1", 0))
        port, folder, started = free.getsockname()[1], pathlib.Path(name), []
        free.close()
        for rank in range(size):
            environment = {
                **os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
                "MASTER_ADDR": hosts.address(0) if hosts else "127.0.0.1", "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": hosts.DEVICE if hosts else "lo",
                "TORCH_CPP_LOG_LEVEL": "ERROR", "FAULT_DELAY_S": str(delay_s),
            }  # fmt: skip
            prefix = both.prefix(2 * rank // size) if hosts else []
            command = [*prefix, sys.executable, __file__, "--as-rank", contender, kind, str(victim), str(at), name]
            with (folder / f"log{rank}").open("w") as log:
                started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        others = {rank: folder / f"rank{rank}" for rank in range(size) if rank != victim or kind in (CUT, *ON_ALL)}
        try:
            if kind == CUT:
                _wait(lambda: all((folder / f"at{rank}").exists() for rank in range(size)), 120)
                time.sleep(1.0)  # monitors have met
                both.pull_cable(1)
                (folder / "fault").write_text(json.dumps({"when_s": time.time()}))
            if not _wait((folder / "fault").exists, 120):
                raise RuntimeError("the fault did not happen")
            _wait(lambda: all(path.exists() for path in others.values()), patience_s)
            fault_s = json.loads((folder / "fault").read_text())["when_s"]
            found = [json.loads(path.read_text()) for path in others.values() if path.exists()]
            _ask_where(started, [rank for rank, path in others.items() if not path.exists()], folder)
        finally:
            for process in started:
                process.kill()
            for process in started:
                process.wait()
        if look is not None:
            look(folder)
    return {each["rank"]: {**each, "after_s": each["when_s"] - fault_s} for each in found}


NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


def _hosts() -> Any:
    """What makes two hosts that are network namespaces, which the tests have as well."""
    sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests" / "oracles"))
    import hosts

    return hosts


def _ask_where(started: list[subprocess.Popen[bytes]], ranks: list[int], folder: pathlib.Path) -> None:
    """Have ranks write to their logs where they are; note of those that have ended how."""
    for rank in ranks:
        if started[rank].poll() is None:
            started[rank].send_signal(signal.SIGUSR1)  # fdp's report
            time.sleep(0.5)
            started[rank].send_signal(signal.SIGUSR2)  # all stacks
            time.sleep(0.5)
        else:
            with (folder / f"log{rank}").open("a") as log:
                log.write(f"rank {rank} has ended with exit code {started[rank].returncode}\n")


def logs(folder: pathlib.Path) -> str:
    """What the ranks of a run have printed last."""
    return "\n".join(f"--- {path.name}\n{path.read_text()[-6000:]}" for path in sorted(folder.glob("log*")))


def _wait(true: Callable[[], bool], seconds: float) -> bool:
    end_s = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.02)
    return True


def cell(found: dict[int, dict[str, Any]], kind: str, size: int, victim: int, patience_s: float) -> str:
    """Seconds until the first and the last error, and how many errors name whom they should."""
    seconds = sorted(each["after_s"] for each in found.values())
    expected = size if kind in (CUT, *ON_ALL) else size - 1
    missing = expected - len(found)
    last = f"> {patience_s:.0f}" if missing else f"{seconds[-1]:.1f}"
    first = f"{seconds[0]:.1f}" if seconds else last
    named = sum(_names(each, kind, size, victim) for each in found.values())
    return f"{first if first == last else f'{first} to {last}'} ({named} of {expected})"


def _names(error: dict[str, Any], kind: str, size: int, victim: int) -> bool:
    """Whether an error names the rank, or after a cut all ranks of the other side."""
    if kind == CUT:
        return bool(error["ranks"] == [rank for rank in range(size) if 2 * rank // size != 2 * error["rank"] // size])
    if error["kind"] == "ReplicationError":  # it has no `ranks`: its second line says which differ
        return str(victim) in re.findall(r"\d+", error["text"].partition(": rank")[2].partition(";")[0])
    return bool(error["ranks"] == [victim])


def _tells(error: dict[str, Any], kind: str, victim: int, call: int) -> bool:
    """Whether an error of a soak says which rank it was, and what became of it."""
    # What a step raises in its first call is told to all ranks before anything runs.
    if call == 1 and kind == "raises and stays" and error["kind"] == "AgreementError":
        return f"rank {victim} could not prepare step" in error["text"]
    return (error["kind"], error["ranks"], error["reason"]) == ("PeerError", [victim], REASONS[kind])


def compare(sizes: list[int], kinds: list[str], patience_s: float) -> None:
    """Print the table."""
    table = Table(title="seconds from the fault to an error on each other rank (how many name the rank)")
    table.add_column("what a rank does")
    for size in sizes:
        table.add_column(f"{size} ranks: fdp", justify="right")
        table.add_column("DDP", justify="right")
    for kind in kinds:
        if kind == CUT and (why := _hosts().why_not()) is not None:
            print(f"{kind}: left out, since {why}")
            continue
        row = [kind]
        for size in sizes:
            victim = 1
            for contender in ("fdp", "ddp"):
                found = run(contender, kind, size, victim, 1 if kind == "killed in the first call" else 5, patience_s)
                row.append(cell(found, kind, size, victim, patience_s))
        table.add_row(*row)
    Console(width=140).print(table)


def losses(folder: pathlib.Path) -> list[str]:
    """What is wrong with the checkpoints of a run: one that was whole is not there, or cannot be read."""
    import fdp

    calls = [int(path.read_text() or 0) for path in folder.glob("call*")]
    # A save waits for the one before; so when the second to last was begun, the one before that was whole.
    whole = (max(calls, default=0) - 1) // SAVES_EVERY * SAVES_EVERY - SAVES_EVERY
    with fdp.CheckpointManager(folder / "run") as manager:
        latest = manager.latest_step()
        if latest is None:
            return [f"there is no checkpoint, and step {whole} was whole"] if whole > 0 else []
        try:
            _, step = manager.restore(fdp.from_module(network())[1], random=False)
        except fdp.FdpError as error:
            return [f"step {latest} cannot be restored: {error}"]
        return [f"step {step} was restored, and step {whole} was whole"] if step < whole else []


def soak(runs: int, seed: int, sizes: list[int], kinds: list[str], call: int | None) -> int:
    """Random faults; how many of them went wrong."""
    draw, wrong, longest = random.Random(seed), 0, 0.0
    for number in range(runs):
        kind, size = draw.choice(kinds), draw.choice(sizes)
        victim, at, delay_s = draw.randrange(size), draw.randrange(1, 30), draw.uniform(0, MOMENTS_S)
        at = at if call is None else call
        lost: list[str] = []
        printed: list[str] = []

        def look(folder: pathlib.Path, lost: list[str] = lost, printed: list[str] = printed) -> None:
            lost.extend(losses(folder))
            printed.append(logs(folder))

        found = run("fdp and checkpoints", kind, size, victim, at, 45.0, look, delay_s)
        bad = [rank for rank in range(size) if rank != victim and rank not in found]
        bad += [rank for rank, each in found.items() if not _tells(each, kind, victim, at)]
        longest = max([longest, *(each["after_s"] for each in found.values())])
        if bad or lost:
            wrong += 1
            where = f"run {number}: {kind}, rank {victim} of {size}, call {at}, {delay_s * 1000:.1f} ms after it began"
            print(f"{where}: wrong on ranks {bad}: {found} {' '.join(lost)}\n{printed[0]}", flush=True)
        elif number % 20 == 19:
            print(f"{number + 1} runs, {wrong} wrong, the slowest error after {longest:.1f} s", flush=True)
    print(f"{runs} random faults (seed {seed}): {wrong} wrong; the slowest error came after {longest:.1f} s")
    return wrong


def main() -> None:
    """Measure, and print the table; or soak."""
    if sys.argv[1:2] == ["--as-rank"]:
        contender, kind, victim, at, folder = sys.argv[2:]
        return program(contender, kind, int(victim), int(at), pathlib.Path(folder))
    parser = argparse.ArgumentParser(description="How soon the other ranks know that one is gone.")
    parser.add_argument("--ranks", type=int, action="append", help="default: 2, 4 and 8")
    parser.add_argument("--kind", action="append", choices=sorted({*KINDS, *REASONS}), help="default: all")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds after which a run is given up")
    parser.add_argument("--soak", type=int, default=0, help="so many random faults, with fdp alone")
    parser.add_argument("--at", type=int, help="in a soak: the call of all faults; default: random ones")
    parser.add_argument("--seed", type=int, default=0, help="of the random faults")
    arguments = parser.parse_args()
    if arguments.soak:
        kinds, sizes = arguments.kind or list(REASONS), arguments.ranks or [2, 3, 4]
        sys.exit(soak(arguments.soak, arguments.seed, sizes, kinds, arguments.at) > 0)
    compare(arguments.ranks or [2, 4, 8], arguments.kind or list(KINDS), arguments.patience)


if __name__ == "__main__":
    main()
