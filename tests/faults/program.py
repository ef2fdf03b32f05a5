"""A training program as a user starts it, in which a rank does something wrong: `program.py KIND VICTIM FOLDER`.

Each rank appends what it saw to a file of its own in the folder: one JSON object a line.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import pathlib
import signal
import sys
import time

import torch
import torch.distributed as dist

import fdp
from fdp.distributed.liveness import introduction
from fdp.distributed.liveness.introduction import Introduction


def main(kind: str, victim: int, folder: pathlib.Path) -> None:
    if "HOSTS" in os.environ:  # two ranks on each
        import hosts

        hosts.enter(os.environ["HOSTS"], int(os.environ["RANK"]) // 2)
    # A job that was started in the background ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rank = int(os.environ["RANK"])
    if kind == "killed before monitors met" and rank == victim:  # no other rank finds its monitor, and it finds none
        Introduction._name = lambda self, rank: f"nowhere/{rank}"  # type: ignore[method-assign]
    if kind == "behind a firewall":  # which refuses what is for monitors
        introduction.host_name = lambda: f"host {rank}"
        introduction.own_addresses = lambda: ["127.0.0.2"]
    fdp.initialize()
    if kind == "raised, with a hook of its own":
        sys.excepthook = lambda *_: None
    assert rank == int(fdp.axis_index())

    def tell(**facts: object) -> None:
        with open(folder / f"rank{rank}", "a") as file:
            file.write(json.dumps({"rank": rank, "when_s": time.time(), **facts}) + "\n")

    def die() -> None:
        tell(event="fault")
        os.kill(os.getpid(), signal.SIGKILL)

    if kind in ("killed before the first call", "killed before monitors met") and rank == victim:
        die()
    if kind == "raised before the first call" and rank == victim:
        tell(event="fault")
        raise ValueError("a mistake of the user's")

    @fdp.data_parallel
    def step(w: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if kind == "killed in the first call" and rank == victim:
            time.sleep(1.0)  # so that the others wait already
            die()
        loss, grad = fdp.value_and_grad(lambda w: ((batch @ w) ** 2).mean())(w)
        return w - 0.01 * grad, fdp.pmean(loss)

    def saves(w: torch.Tensor, kind: str, is_victim: bool) -> None:
        if is_victim:
            dist.new_group = lambda *_, **__: die()
            if kind == "frozen before a save":
                os.kill(os.getpid(), signal.SIGSTOP)
        fdp.CheckpointManager(folder / "run").save(5, {"w": w})

    try:
        w = torch.ones(4)
        for call in range(1, int(os.environ.get("CALLS", 2000))):
            if call == 5:
                if not kind.startswith("killed") or rank != victim:
                    tell(event="fault" if rank == victim else "trains")
                if rank == victim:
                    if kind == "killed":
                        die()
                    elif kind == "frozen":
                        os.kill(os.getpid(), signal.SIGSTOP)
                    elif kind.startswith("raised"):
                        raise ValueError("a mistake of the user's")
                    elif kind in ("asleep", "behind a firewall"):
                        time.sleep(12)
                    elif kind == "left":
                        return
                if kind.endswith("a save"):
                    saves(w, kind, rank == victim)
            w, _ = step(w, torch.ones(3, 4))
            time.sleep(0.02)
    except fdp.PeerError as error:
        tell(event="error", ranks=error.ranks, reason=error.reason, call=error.call, text=str(error))
    except KeyboardInterrupt:
        tell(event="interrupted")
        raise


def run_to_the_end() -> None:
    """In a copy of another process, as Python runs a program: errors that none catches, and how it ends itself."""
    program = f"import pathlib, program\nprogram.main({sys.argv[1]!r}, {sys.argv[2]}, pathlib.Path({sys.argv[3]!r}))"
    failed = ctypes.pythonapi.PyRun_SimpleString(program.encode())
    ctypes.pythonapi.Py_Exit(-failed)


if __name__ == "__main__":
    kind, victim = sys.argv[1], int(sys.argv[2])
    ends = kind.startswith(("raised", "left")) and victim == int(os.environ["RANK"])  # which is what others hear of
    if ends and multiprocessing.parent_process() is not None:
        run_to_the_end()
    main(kind, victim, pathlib.Path(sys.argv[3]))
