"""Run programs under fdp on this rank, and say what came of it.

Besides the results of each call it looks at everything that a call must leave alone: inputs that were not donated, what
the step closes over, what earlier calls returned, and the order of random numbers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import fdp
from fuzz import plain, poison
from fuzz.compare import Judge, Mismatch
from fuzz.joint import defined
from fuzz.layout import in_layout_that_is_known
from fuzz.oracle import copied, geometry, same, seed_of, strides, unshared
from fuzz.placed import mesh, two_levels, with_sharded_state
from fuzz.program import Program, accesses


@dataclasses.dataclass(frozen=True)
class Report:
    """What one rank has to say of one run.

    Attributes:
        status: "ok", "wrong", "refused" (by an FdpError), "crashed" (another error), "invalid" (plain PyTorch cannot).
        kind: what was wrong in a word, or the class of the error.
        text: the same at length.
        bits: for each call a number for the bits of each value that is called equal on all ranks, with its path.
        excused: values that are right as far as the program is well-conditioned.
        exact: nothing was rounded.
        written: inputs that plain PyTorch writes in place, by their kind.
        unequal: values that are called equal on all ranks, and are not in plain PyTorch.
        traces: how many times the step was traced; 0 where its state is sharded.
    """

    status: str
    kind: str = ""
    text: str = ""
    bits: tuple[tuple[tuple[str, str], ...], ...] = ()
    excused: int = 0
    exact: bool = False
    written: tuple[str, ...] = ()
    unequal: tuple[str, ...] = ()
    traces: int = 0


class RealKit:
    """What a program is made of beside fdp."""

    F = torch.float32
    Box = plain.Box

    def __init__(self, exact: bool) -> None:
        self._exact = exact

    def like(self, exact: bool) -> RealKit:
        return RealKit(exact)

    def num(self, shape: Any, seed: int) -> torch.Tensor:
        return plain.numbers(shape, seed, self._exact)

    def grad(self, value: Any, inputs: Any) -> Any:
        # Where nothing depends on the inputs, PyTorch raises; other terms of a loss may be switched off from outside.
        depends = value.requires_grad
        grads = torch.autograd.grad(value, inputs, allow_unused=True) if depends else [None for _ in inputs]
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        found = [torch.zeros_like(x) if grad is None else grad for grad, x in zip(grads, inputs, strict=True)]
        return [in_layout_that_is_known(x, grad, ranks) for grad, x in zip(found, inputs, strict=True)]

    def drop(self, x: torch.Tensor, p: float) -> torch.Tensor:
        return torch.nn.functional.dropout(x, p)

    def cond(self, flag: torch.Tensor, yes: Any, no: Any, given: Any) -> Any:
        return torch.cond(flag, yes, no, given)

    def label(self, x: Any, rank: int) -> Any:
        # Outside of a step, where fdp has labels: then what a rank holds is its own.
        return fdp.per_rank(x) if hasattr(fdp, "PerRank") else x


def run_programs(programs: Sequence[Program]) -> Report:
    """Run programs as one step: in plain PyTorch, under fdp, and compare. Never raises."""
    try:
        judge = Judge(programs)
    except Exception as error:
        return Report("invalid", type(error).__name__, str(error)[:500])
    written = {kind for calls in judge.calls for call in calls for kind in call.written}
    unequal = _unequal(programs, judge)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = _run(programs, judge)
    except fdp.FdpError as error:
        report = Report("refused", type(error).__name__, str(error))
        if isinstance(error, fdp.ReplicationError) and programs[0].world == 1:
            # One rank is equal to itself. Would two be?
            two = [dataclasses.replace(program, world=2) for program in programs]
            try:
                unequal = _unequal(two, Judge(two))
            except Exception as other:  # a part of a value has another shape there, and does not fit any more
                report = Report("invalid", type(other).__name__, f"on two ranks: {other}"[:500])
    except Exception as error:
        report = Report("crashed", type(error).__name__, "".join(traceback.format_exception(error))[-4000:])
    return dataclasses.replace(
        report, excused=judge.excused, exact=judge.exact(), written=tuple(sorted(written)), unequal=tuple(unequal)
    )


def make_step(programs: Sequence[Program], step: Any) -> Any:
    """The step under fdp, as the options say."""
    o = programs[0].options
    two_levels(always=programs[0].seed % 2 == 1)
    made = fdp.data_parallel(
        step,
        group=mesh(),
        donate_argnums=0 if o.donate else (),
        # For a card inductor draws numbers of its own, if nothing else is said.
        compile={"fallback_random": True} if o.compile and torch.get_default_device().type != "cpu" else o.compile,
        bucket_cap_mb=o.bucket_cap_mb,
        check_trace=o.check_trace,
        wire_dtype=getattr(torch, o.wire_dtype) if o.wire_dtype else None,
        accumulate_dtype=getattr(torch, o.accumulate_dtype) if o.accumulate_dtype else None,
        network=None if o.latency_s is None else fdp.Network(latency_s=o.latency_s, bandwidth_bytes_per_s=1e6),
    )
    return with_sharded_state(made, programs[0].seed % 3) if o.shard else made


def _run(programs: Sequence[Program], judge: Judge) -> Report:
    options, rank = programs[0].options, dist.get_rank() if dist.is_initialized() else 0
    make_state, make_batch, step_fn, between, closed = defined(programs)(fdp, RealKit(programs[0].exact))
    step, state = make_step(programs, step_fn), make_state(rank)
    kept: list[tuple[int, str, torch.Tensor, torch.Tensor]] = []
    bits, bad = [], list[tuple[str, Mismatch]]()
    for number in range(options.calls):
        batch, expected = make_batch(rank, number), judge.calls[rank][number]
        before = plain.mapped(copied, (state, batch))
        laid_out = geometry((state, batch, closed))
        torch.manual_seed(seed_of(rank, number))
        found = step(state, batch)
        drawn = float(torch.rand(()))
        poison.fill_blocks()
        leaves = plain.parts(found)
        bad += [("result", mismatch) for mismatch in judge.compare(rank, number, leaves)]
        bad += [
            ("strides", Mismatch(number, path, f"lies otherwise: {strides(leaf)}, expected {wanted}"))
            for (path, leaf), wanted in zip(leaves, expected.strides, strict=False)
            if strides(leaf) != wanted and not options.shard
        ]
        if drawn != expected.drawn:
            bad.append(("random state", Mismatch(number, "", "the generator is not where plain PyTorch leaves it")))
        inputs = (state, batch) if not options.donate else ((), batch)
        was = before if not options.donate else ((), before[1])
        bad += _changes("input", number, plain.parts(inputs), plain.parts(was))
        bad += _changes("closed-over tensor", number, plain.parts(closed), [("", x) for x in expected.closed])
        now = geometry((state, batch, closed))
        bad += [("geometry", Mismatch(number, path, f"{shape}, expected {wanted}"))
                for (path, *shape), (_, *old), (_, *wanted) in zip(now, laid_out, expected.geometry, strict=False)
                if shape not in (old, wanted)]  # fmt: skip
        bad += _changes(
            "kept result", number, [(f"{p} of call {c}", x) for c, p, x, _ in kept], [(p, y) for _, p, _, y in kept]
        )
        bits.append(tuple((path, _bits(leaf)) for path, leaf in _called_equal(programs, leaves)))
        if _on_any_rank(bool(bad)):
            break
        changeable = options.donate or any(program.between for program in programs)
        kept += [
            (number, path, leaf, copied(leaf))
            for (path, leaf), shared in zip(leaves, expected.shared, strict=True)
            if isinstance(leaf, torch.Tensor) and not (shared and changeable)
        ]
        state = unshared(found[0]) if "state" in expected.written else found[0]
        between()
    if not bad:
        return Report("ok", bits=tuple(bits), traces=getattr(step, "traces", 0))
    text = "\n".join(f"call {m.call}, {what} {m.path}: {m.text}" for what, m in bad[:12])
    return Report("wrong", bad[0][0], text, tuple(bits))


def _on_any_rank(found: bool) -> bool:
    """Whether some rank found something: then all end here, and none waits for it in the next call."""
    if not dist.is_initialized():
        return found
    on_any_rank = torch.tensor(int(found))
    dist.all_reduce(on_any_rank, dist.ReduceOp.MAX)
    return bool(on_any_rank)


def _changes(what: str, number: int, now: Any, was: Any) -> list[tuple[str, Mismatch]]:
    return [
        (what, Mismatch(number, path, f"was changed: {x}, expected {y}"))
        for (path, x), (_, y) in zip(now, was, strict=False)
        if not same(x, y)
    ]


def _called_equal(programs: Sequence[Program], leaves: Any) -> list[tuple[str, Any]]:
    """The values of a call that fdp calls equal on all ranks."""
    own = {f"[1][{n}][{k}]" for n, program in enumerate(programs) for k, mine in enumerate(program.owned) if mine}
    for n, program in enumerate(programs):
        paths = accesses(program.tree)
        own |= {f"[0][{n}]" + paths[leaf.name].replace('"', "'") for leaf in program.leaves if leaf.own}
    return [(path, leaf) for path, leaf in leaves if not any(path == o or path.startswith(o + "[") for o in own)]


def _unequal(programs: Sequence[Program], judge: Judge) -> list[str]:
    """What is called equal on all ranks and is not, as plain PyTorch has it."""
    found = []
    for calls in zip(*judge.calls, strict=False):
        first = _called_equal(programs, calls[0].leaves)
        for other in calls[1:]:
            pairs = zip(first, _called_equal(programs, other.leaves), strict=False)
            found += [path for (path, x), (_, y) in pairs if not same(x, y)]
    return sorted(set(found))


def _bits(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    dense = torch.empty(leaf.numel(), dtype=leaf.dtype, device="cpu").copy_(leaf.detach().reshape(-1))
    return hashlib.sha1(dense.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
