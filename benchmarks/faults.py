"""How soon the other ranks know that one is gone, and which: fdp beside DistributedDataParallel (DDP).

    python benchmarks/faults.py [--ranks N]... [--kind KIND]... [--patience S] [--soak N [--seed S]]

Each row is one run of as many gloo ranks as its column says, plain processes on this machine, one thread each. At the
fifth step one of them, neither the first nor the last where there are more than two, does something wrong; printed are
the seconds until the first and until the last of all others has raised an error, and whom the error names. A run is
given up after `--patience` seconds.

With `--soak` random kinds, ranks and moments are tried with fdp alone, in runs that save a checkpoint every five steps.
Printed is what went wrong: a rank that did not raise, an error that names another rank or another reason, or a
checkpoint that is lost. The exit code is 1 if anything did. FDP_LIVENESS_S=3 makes it quicker.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from rich.console import Console
from rich.table import Table

KINDS = ("killed", "frozen", "raises and stays", "leaves", "raises and ends")
REASONS = {
    "killed": "died", "killed at a random moment": "died", "frozen": "frozen", "raises and stays": "raised",
    "leaves": "left", "raises and ends": "raised",
}  # fmt: skip
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

        @fdp.data_parallel
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

    def tell(**facts: Any) -> None:
        (folder / f"rank{rank}").write_text(json.dumps({"rank": rank, "when_s": time.time(), **facts}))

    def kill() -> None:
        tell(event="fault")
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        for call in range(1, CALLS + 1):
            batch = torch.randn(16, 64)
            if rank == victim and call == at:
                if kind == "killed at a random moment":
                    threading.Timer(random.uniform(0, 0.02), kill).start()
                elif kind == "killed":
                    kill()
                else:
                    tell(event="fault")
                if kind == "frozen":
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif kind == "raises and ends":
                    raise ValueError("a mistake")
                elif kind == "leaves":
                    break
                elif kind == "raises and stays":
                    batch = torch.randn(16, 63)
            train(batch)
            if manager is not None:
                (folder / f"call{rank}").write_text(str(call))
                if call % SAVES_EVERY == 0:
                    manager.save(call, state)
            time.sleep(0.005)
    except Exception as error:
        if rank != victim:
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
    contender: str, kind: str, size: int, victim: int, at: int, patience_s: float, look: Any = None
) -> dict[int, dict[str, Any]]:
    """What each of the other ranks wrote, with `after_s`: seconds since the fault; `look` is given their folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        folder, started = pathlib.Path(name), []
        for rank in range(size):
            environment = {
                **os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR",
            }  # fmt: skip
            command = [sys.executable, __file__, "--as-rank", contender, kind, str(victim), str(at), name]
            started.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            )
        try:
            others = [folder / f"rank{rank}" for rank in range(size) if rank != victim]
            if not _wait(lambda: (folder / f"rank{victim}").exists(), 120):
                raise RuntimeError("the fault did not happen")
            _wait(lambda: all(path.exists() for path in others), patience_s)
            time.sleep(0.2)  # for the last of them to be whole
            fault_s = json.loads((folder / f"rank{victim}").read_text())["when_s"]
            found = [json.loads(path.read_text()) for path in others if path.exists()]
        finally:
            for process in started:
                process.kill()
            for process in started:
                process.communicate()
        if look is not None:
            look(folder)
    return {each["rank"]: {**each, "after_s": each["when_s"] - fault_s} for each in found}


def _wait(true: Any, seconds: float) -> bool:
    end_s = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.02)
    return True


def cell(found: dict[int, dict[str, Any]], size: int, victim: int, patience_s: float) -> str:
    """Seconds until the first and the last error, and whom the errors name."""
    seconds = sorted(each["after_s"] for each in found.values())
    missing = size - 1 - len(found)
    last = f"> {patience_s:.0f}" if missing else f"{seconds[-1]:.1f}"
    first = f"{seconds[0]:.1f}" if seconds else last
    named = sum(each["ranks"] == [victim] for each in found.values())
    return f"{first if first == last else f'{first} to {last}'} ({named} of {size - 1})"


def compare(sizes: list[int], kinds: list[str], patience_s: float) -> None:
    """Print the table."""
    table = Table(title="seconds from the fault to an error on each other rank (how many name the rank)")
    table.add_column("what a rank does")
    for size in sizes:
        table.add_column(f"{size} ranks: fdp", justify="right")
        table.add_column("DDP", justify="right")
    for kind in kinds:
        row = [kind]
        for size in sizes:
            victim = 1
            for contender in ("fdp", "ddp"):
                found = run(contender, kind, size, victim, 5, patience_s)
                row.append(cell(found, size, victim, patience_s))
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


def soak(runs: int, seed: int, sizes: list[int]) -> int:
    """Random faults; how many of them went wrong."""
    draw, wrong, longest = random.Random(seed), 0, 0.0
    for number in range(runs):
        kind, size = draw.choice(list(REASONS)), draw.choice(sizes)
        victim, at = draw.randrange(size), draw.randrange(1, 30)
        lost: list[str] = []
        found = run("fdp and checkpoints", kind, size, victim, at, 45.0, lambda folder: lost.extend(losses(folder)))  # noqa: B023
        bad = [rank for rank in range(size) if rank != victim and rank not in found]
        bad += [
            rank
            for rank, each in found.items()
            if (each["kind"], each["ranks"], each["reason"]) != ("PeerError", [victim], REASONS[kind])
        ]
        longest = max([longest, *(each["after_s"] for each in found.values())])
        if bad or lost:
            wrong += 1
            where = f"run {number}: {kind}, rank {victim} of {size}, call {at}"
            print(f"{where}: wrong on ranks {bad}: {found} {' '.join(lost)}", flush=True)
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
    parser.add_argument("--kind", action="append", choices=KINDS, help="default: all")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds after which a run is given up")
    parser.add_argument("--soak", type=int, default=0, help="so many random faults, with fdp alone")
    parser.add_argument("--seed", type=int, default=0, help="of the random faults")
    arguments = parser.parse_args()
    if arguments.soak:
        sys.exit(soak(arguments.soak, arguments.seed, arguments.ranks or [2, 3, 4]) > 0)
    compare(arguments.ranks or [2, 4, 8], arguments.kind or list(KINDS), arguments.patience)


if __name__ == "__main__":
    main()
