"""Training on real ranks, one of which does something wrong at some moment; what the others say, and how soon."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

import fdp

KINDS = (
    "killed between steps", "killed in a step", "killed in the first call", "frozen", "raised in a step",
    "raised in a loader", "destroyed its group", "destroyed a group that it refers to", "asleep", "holds the lock",
)  # fmt: skip
"""What a rank may do. After the last two it goes on, and nothing may happen."""

AT = 4
"""At this call it does it."""

Said = dict[str, Any]
"""What a rank saw: the class of the error, its facts, its text, and how long after the fault it came."""


def train(kind: str, victim: int, seconds: float = 6.0, calls: int = 8, device: str = "cpu") -> Said:
    """Train, and do something wrong on one rank; what an error says, on each rank.

    Args:
        kind: what: one of `KINDS`.
        victim: the rank.
        seconds: how long it sleeps, or holds the lock.
        calls: how many steps.
        device: where the state is. The host waits for the loss of each step, as a program does that prints it.
    """
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    is_victim = rank == victim
    if is_victim:
        store.set("victim", str(os.getpid()))

    def now_it_happens() -> None:
        store.set("when", str(time.time()))

    def model(w: Any, batch: Any) -> Any:
        if is_victim and kind == "killed in the first call":
            now_it_happens()
            os.kill(os.getpid(), signal.SIGKILL)
        loss, grads = fdp.value_and_grad(lambda w: ((batch @ w["a"] + w["b"]) ** 2).mean())(w)
        return {name: w[name] - 0.01 * grads[name] for name in w}, fdp.pmean(loss)

    def batches() -> Any:
        for call in range(1, calls + 1):
            if call == AT and is_victim and kind == "raised in a loader":
                now_it_happens()
                raise OSError("no such shard")
            yield torch.ones(3, 4, device=device) * (rank + 1)

    step = fdp.data_parallel(model, bucket_cap_mb=1)
    state = {"a": torch.ones(4, device=device), "b": torch.ones((), device=device)}
    call = 0
    try:
        data = ((batch, None) for batch in batches()) if kind != "raised in a loader" else fdp.join(batches())
        for call, (batch, _) in enumerate(data, 1):
            if call == AT and is_victim:
                _misbehave(kind, seconds, now_it_happens)
                if kind == "raised in a step":
                    batch = torch.ones(3, 5, device=device)
                if kind in ("destroyed its group", "destroyed a group that it refers to"):
                    return _said(rank, None, call, store)
            state, loss = step(state, batch)
            if not math.isfinite(loss.item()):
                return {**_said(rank, None, call, store), "error": "a loss that is not finite"}
    except Exception as error:
        said = _said(rank, error, call, store)
        if is_victim:
            time.sleep(8)  # it has caught its error, and stays
            return said
        knowing, others = store.add("knowing", 1), dist.get_world_size() - 1
        if rank == min(other for other in range(others + 1) if other != victim):
            # What is frozen does not end by itself. To kill it is another fault: not before all know of the first.
            until = time.monotonic() + 30
            while knowing < others and time.monotonic() < until:
                time.sleep(0.05)
                knowing = store.add("knowing", 0)
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(store.get("victim")), signal.SIGKILL)
        return said
    return _said(rank, None, call, store)


def _misbehave(kind: str, seconds: float, now_it_happens: Any) -> None:
    now_it_happens()
    if kind == "killed between steps":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "killed in a step":
        threading.Timer(0.0005, os.kill, (os.getpid(), signal.SIGKILL)).start()
    elif kind == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "destroyed its group":
        dist.destroy_process_group()
        time.sleep(3)
    elif kind == "destroyed a group that it refers to":
        group = dist.group.WORLD
        dist.destroy_process_group()
        time.sleep(3)
        del group
    elif kind == "asleep":
        time.sleep(seconds)
    elif kind == "holds the lock":
        ctypes.PyDLL(None).sleep(int(seconds))


def _said(rank: int, error: Exception | None, call: int, store: Any) -> Said:
    facts = {name: getattr(error, name, None) for name in ("ranks", "reason", "call")}
    after_s = -1.0
    if error is not None:
        with contextlib.suppress(Exception):
            if store.check(["when"]):  # not if it is an error of the test's own; the store would wait
                after_s = time.time() - float(store.get("when"))
    name = "" if error is None else type(error).__name__
    return {"rank": rank, "error": name, "text": str(error or ""), "at": call, "after_s": after_s, **facts}


def is_remedied(text: str) -> bool:
    """Whether an error's last line is a remedy."""
    return re.match(r"Remedy: \w", text.splitlines()[-1]) is not None
