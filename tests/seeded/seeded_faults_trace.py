"""Mistakes in what traces a step, each as one replacement in one file, with a program whose numbers it changes.

`python tests/seeded/seeded_faults_trace.py [name ...]` makes them one at a time in a copy of the package, and says what
became of each: "refused" with the error, "wrong" if a number changed and nothing was said, "same" if no number changed.
Mistakes about what varies from rank to rank are not here: they change no number that one rank can see.
"""

from __future__ import annotations

import json
import multiprocessing
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from seeded_fault import Fault
from torch.utils.checkpoint import checkpoint

PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "fdp"


@dataclass(frozen=True)
class TraceFault(Fault):
    """One mistake in what traces a step.

    Attributes:
        program: which of `PROGRAMS` shows it.
    """

    program: str


FAULTS = (
    TraceFault("reads not waited for", "trace/graph/dependencies.py",
               "        yield from before.readers\n", "",
               "a value is changed before it was read", "read then changed"),
    TraceFault("readers are forgotten", "trace/graph/dependencies.py",
               "                memory[storage].readers.append(index)\n", "                pass\n",
               "a value is changed before it was read", "read then changed"),
    TraceFault("writers are forgotten", "trace/graph/dependencies.py",
               "                memory[storage] = _LastAccesses(writer=index)\n",
               "                memory[storage] = _LastAccesses()\n",
               "memory is read before it was changed", "changed then read"),
    TraceFault("changes not waited for", "trace/graph/dependencies.py",
               "        if (writer := memory[storage].writer) is not None:\n",
               "        if (writer := memory[storage].writer) is None:\n            continue\n"
               "        elif writer < 0:\n",
               "memory is read before it was changed", "changed then read"),
    TraceFault("changes in any order", "trace/graph/dependencies.py",
               "        if before.writer is not None:\n",
               "        if before.writer is not None and before.writer < 0:\n",
               "of two changes the wrong one is the last", "changed twice"),
    TraceFault("random numbers in any order", "trace/graph/dependencies.py",
               "                last_random = index\n", "                last_random = None\n",
               "random numbers are drawn in another order", "drawn in order"),
    TraceFault("randomness not seen", "trace/operators/effects.py",
               "        random=torch.Tag.nondeterministic_seeded in target.tags and _draws(node),",
               "        random=False,", "nothing keeps random numbers in order", "drawn in order"),
    TraceFault("one microbatch is lost", "trace/graph/loops.py",
               "(held, begin.args[1], operands)", "(held, begin.args[1] - 1, operands)",
               "a loop runs one time too few", "microbatches"),
    TraceFault("random numbers are not drawn again", "trace/capture/rng_replay.py",
               "    _set(state, device)\n    return before", "    return before",
               "what is recomputed drops other elements", "checkpointed dropout"),
    TraceFault("no replay", "trace/capture/rng_replay.py",
               "            if drawn[node] == drawn[resume]:", "            if drawn[node] <= drawn[resume]:",
               "the replay of the generator's state is left out", "checkpointed dropout"),
    TraceFault("a mean is a sum", "trace/tracer.py",
               "op=collective.name,",
               'op="sum" if collective.reduces else collective.name,',
               "gradients are added up and not averaged", "read then changed"),
    TraceFault("a maximum is a minimum", "trace/tracer.py",
               "op=collective.name,", 'op=collective.name.replace("max", "min"),',
               "the smallest value of all ranks is taken for the largest", "largest"),
    TraceFault("rank 0 is every root", "trace/tracer.py",
               'root=given.get("root", 0),', "root=0,",
               "values come from another rank than asked for", "broadcast"),
    TraceFault("changes are dead code", "trace/capture/capture.py",
               "        return not effects_of(node).pure\n", "        return bool(effects_of(node).random)\n",
               "an operator that only changes memory is left out", "changed twice"),
    TraceFault("nothing is read", "trace/operators/effects.py",
               "        reads=() if view or name in _UNINITIALISED or target is _aten.bernoulli.p else tuple(reads),",
               "        reads=(),", "memory changes before it was read", "read then changed"),
    TraceFault("updates are dead code", "trace/operators/effects.py",
               '            written = node.kwargs.get("grad_scale") is not None\n',
               '            written = node.kwargs.get("grad_scale") is not None\n'
               '        if name in FUSED_OPTIMIZERS and argument.name != "grads":\n            written = False\n',
               "a fused update is taken for a function without a result", "fused updates"),
    TraceFault("statistics are not changed", "trace/operators/effects.py",
               "        if argument.name in _UNDECLARED_WRITES.get(target, ()):\n",
               "        if argument.name in _UNDECLARED_WRITES.get(target, ()) and not nodes:\n",
               "batch normalisation changes memory that nobody knows to change", "running statistics"),
    TraceFault("arguments in another order", "trace/capture/calling.py",
               "    it = iter(values)\n", "    it = iter(values[::-1])\n",
               "the step gets another argument than it was given", "arguments that look alike"),
    TraceFault("static arguments in another order", "trace/capture/calling.py",
               "    fixed = iter(flat.static)\n", "    fixed = iter(flat.static[::-1])\n",
               "the step gets another constant than it was given", "static arguments"),
    TraceFault("the first argument again and again", "trace/capture/calling.py",
               "leaves = [next(it) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat.leaves]",
               "leaves = [values[0] if isinstance(leaf, torch.Tensor) else leaf for leaf in flat.leaves]",
               "an argument takes the place of the others", "arguments that look alike"),
    TraceFault("numbers that are not the caller's", "trace/capture/calling.py",
               "leaves = [next(it) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat.leaves]",
               "leaves = [next(it) if isinstance(leaf, torch.Tensor) else type(leaf)(1) for leaf in flat.leaves]",
               "a constant is another one", "arguments that look alike"),
    TraceFault("static arguments taken apart in another order", "trace/calls/arguments.py",
               "    return trees, tuple(args[i] for i in sorted(roles.static))",
               "    return trees, tuple(args[i] for i in sorted(roles.static, reverse=True))",
               "the step gets another constant than it was given", "static arguments"),
)  # fmt: skip


def _programs() -> dict[str, Callable[[], tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    import fdp

    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    w = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))

    def read_then_changed(w: Any, x: Any) -> Any:
        h = (x @ w).sum(0)
        mean = fdp.pmean(h * 2)
        y = h * mean
        h.add_(1.0)
        return fdp.per_rank((y, h)), mean

    def changed_then_read(w: Any, x: Any) -> Any:
        held = torch.zeros(4)
        row = held[:2]
        held.copy_(fdp.pmean(x.sum(0)))
        return row.sum() * w, held

    def changed_twice(w: Any, x: Any) -> Any:
        held = w * 1.0
        flat = held.view(-1)
        held.copy_(fdp.pmean(x[:4]))
        flat.fill_(3.0)
        return held

    def drawn_in_order(w: Any, x: Any) -> Any:
        mean = fdp.pmean(x.abs().mean(0)).clamp(0.2, 0.8)
        return fdp.per_rank((torch.bernoulli(mean), torch.rand_like(x)))

    def fused_updates(state: Any, x: Any) -> Any:
        rule = fdp.optim.from_torch(torch.optim.SGD, lr=0.1, fused=True)
        grads = fdp.grad(lambda p: ((x @ p["b"]).tanh() @ p["a"]).square().mean())(state)
        return rule.update(grads, rule.init(state), state)[0]

    def microbatches(w: Any, x: Any) -> Any:
        grads = fdp.accumulate(fdp.grad(lambda w, x: (x @ w).square().mean()), microbatches=3)(w, x)
        return w - 0.1 * grads

    def checkpointed(w: Any, x: Any) -> Any:
        def block(h: Any, w: Any) -> Any:
            return F.dropout(h @ w, 0.5, True).tanh()

        return fdp.grad(lambda w: checkpoint(block, x, w, use_reentrant=False).square().sum())(w)

    def largest(w: Any, x: Any) -> Any:
        return fdp.pmax(x.sum(0)) + w

    def broadcast(w: Any, x: Any) -> Any:
        return fdp.broadcast(x.sum(0), root=1) + w

    def statistics(state: Any, x: Any) -> Any:
        mean, var = state["mean"].clone(), state["var"].clone()
        seen = fdp.pmean(x.mean(0)) + mean
        out = F.batch_norm(x, mean, var, training=True)
        return {"mean": fdp.pmean(mean), "var": fdp.pmean(var)}, seen, fdp.pmean(out.square().sum() + mean.sum())

    def alike(state: Any, other: Any, x: Any) -> Any:
        mean = fdp.pmean(x.sum(0))
        return {"a": state["a"] - 2 * state["b"] * other["rate"], "b": other["b"] * mean}, state["a"] @ other["b"]

    def with_static(w: Any, x: Any, factor: float, other: float) -> Any:
        return w * factor + fdp.pmean(x.sum(0)) / other

    ab = {"a": w[:, 0].contiguous(), "b": w}
    bn = {"mean": torch.zeros(4), "var": torch.ones(4)}
    small = {"bucket_cap_mb": 0.00001}
    pair, others = {"a": w, "b": w + 1}, {"b": w * 3, "rate": 0.25}
    static = {"static_argnums": (2, 3), "batch_argnums": 1}
    return {
        "read then changed": lambda: (read_then_changed, (w, x), {}),
        "changed then read": lambda: (changed_then_read, (w, x), {}),
        "changed twice": lambda: (changed_twice, (w, x), {}),
        "drawn in order": lambda: (drawn_in_order, (w, x), {"check_replication": False}),
        "fused updates": lambda: (fused_updates, (ab, x), {**small, "donate_argnums": 0}),
        "microbatches": lambda: (microbatches, (w, x), {}),
        "checkpointed dropout": lambda: (checkpointed, (w, x), {}),
        "largest": lambda: (largest, (w, x), {}),
        "broadcast": lambda: (broadcast, (w, x), {}),
        "arguments that look alike": lambda: (alike, (pair, others, x[:4]), {"check_replication": False}),
        "static arguments": lambda: (with_static, (w, x, 3.0, 5.0), static),
        "running statistics": lambda: (statistics, (bn, x), {"donate_argnums": 0}),
    }


def outcome(program: str) -> tuple[str, str]:
    """What becomes of a program under the package that is imported now: ("refused" | "wrong" | "same", text)."""
    import fdp
    from fdp import pytree
    from fdp.compare import check_emitted
    from fdp.distributed.group import Group
    from fdp.plan import plan_trace
    from fdp.runtime import Emitted
    from fdp.trace import run_untraced

    class _Ranks(Group):
        def backend_for(self, device: torch.device) -> str:
            return "gloo"

    step, args, options = _programs()[program]()
    group = _Ranks(None, 2, 0)
    made = fdp.data_parallel(step, group=group, **options)
    try:
        flat, roles, (_, group, *_) = made._resolve(args, {})
        trace = made._preparation.trace(flat, roles, group)
        emitted = Emitted(plan_trace(trace, options.get("bucket_cap_mb", "auto")), group)
        torch.manual_seed(7)
        check_emitted(emitted, step, flat, roles)
    except Exception as error:
        if isinstance(error, fdp.FdpError):
            return "refused", str(error)
        return "refused", f"{type(error).__name__}: {error}"
    runs = []
    for run in (
        lambda values: run_untraced(step, flat, roles, group, values, trace.wire),
        lambda values: emitted.dry_run(values, "different"),
    ):
        torch.manual_seed(7)
        runs.append(pytree.leaves_of(run([tensor.clone() for tensor in flat.tensors])))
    same = all(torch.allclose(one.detach(), two, rtol=1e-4, atol=1e-6) for one, two in zip(*runs, strict=True))
    return ("same" if same else "wrong"), ""


def _in_a_copy(fault: TraceFault | None, program: str, answer: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        package = pathlib.Path(folder) / "fdp"
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        if fault is not None:
            path = package / fault.file
            text = path.read_text()
            assert text.count(fault.old) == 1, f"{fault.name}: {text.count(fault.old)} times in {fault.file}"
            path.write_text(text.replace(fault.old, fault.new))
        sys.dont_write_bytecode = True
        sys.path.insert(0, folder)
        answer.put(outcome(program))


def outcomes(faults: list[TraceFault | None], programs: list[str]) -> list[tuple[str, str]]:
    """The outcome of each program with its fault, or with none; each in a process of its own."""
    # Not a fork: where the tests run, fdp has been imported already, without the fault.
    context = multiprocessing.get_context("spawn")
    found = []
    for fault, program in zip(faults, programs, strict=True):
        answer = context.SimpleQueue()
        process = context.Process(target=_in_a_copy, args=(fault, program, answer))
        process.start()
        process.join()
        found.append(answer.get() if process.exitcode == 0 else ("failed", f"exit code {process.exitcode}"))
    return found


if __name__ == "__main__":
    chosen = [fault for fault in FAULTS if not sys.argv[1:] or fault.name in sys.argv[1:]]
    right = list(dict.fromkeys(fault.program for fault in chosen))
    for program, (what, text) in zip(right, outcomes([None] * len(right), right), strict=True):
        print(json.dumps([None, program, what, text.splitlines()[:3]]), flush=True)
    for fault in chosen:
        ((what, text),) = outcomes([fault], [fault.program])
        print(json.dumps([fault.name, fault.program, what, text.splitlines()[:3]]), flush=True)
