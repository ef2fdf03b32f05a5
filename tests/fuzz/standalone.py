"""How a script that stands alone runs and compares: what is left of the fuzzer once a program is known."""

from __future__ import annotations

import os
import tempfile
import traceback
from typing import Any

import torch
import torch.multiprocessing

import fdp
from fuzz.layout import in_layout_that_is_known, lies_upon_itself
from fuzz.plain import Box, Kit, Plain, World, mapped, numbers, parts  # fmt: skip


class RealKit:
    """What a program is made of beside fdp."""

    F = torch.float32
    Box = Box

    def __init__(self, exact: bool) -> None:
        self.exact = exact

    def num(self, shape: Any, seed: int) -> torch.Tensor:
        return numbers(shape, seed, self.exact)

    def label(self, x: Any, rank: int) -> Any:
        return fdp.per_rank(x) if hasattr(fdp, "PerRank") else x

    def grad(self, value: Any, inputs: Any) -> Any:
        # Where nothing depends on the inputs, PyTorch raises; other terms of a loss may be switched off from outside.
        depends = value.requires_grad
        grads = torch.autograd.grad(value, inputs, allow_unused=True) if depends else [None for _ in inputs]
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        found = [torch.zeros_like(x) if grad is None else grad for grad, x in zip(grads, inputs, strict=False)]
        return [in_layout_that_is_known(x, grad, ranks) for grad, x in zip(found, inputs, strict=False)]

    def drop(self, x: torch.Tensor, p: float) -> torch.Tensor:
        return torch.nn.functional.dropout(x, p)

    def cond(self, flag: torch.Tensor, yes: Any, no: Any, given: Any) -> Any:
        return torch.cond(flag, yes, no, given)


def main(defines: Any, make_step: Any, **known: Any) -> int:
    """Run a step in plain PyTorch and under fdp; 1 if they differ."""
    expected = in_plain_torch(defines, known, wide=False), in_plain_torch(defines, known, wide=True)
    world = known["world"]
    if world == 1:
        return on_rank(0, defines, make_step, known, expected, None)
    with tempfile.TemporaryDirectory() as folder:
        args = (defines, make_step, known, expected, os.path.join(folder, "store"))
        context = torch.multiprocessing.get_context("spawn")
        queue = context.SimpleQueue()
        processes = [context.Process(target=_child, args=(queue, rank, *args)) for rank in range(world)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        found = sorted(queue.get() for _ in range(world) if not queue.empty())
    bits = [b for _, b in found]
    if any(b != bits[0] for b in bits):
        print("WRONG: ranks hold different bits in what is called equal on all of them")
        return 1
    return int(any(code != 0 for code in codes))


def _child(queue: Any, rank: int, *args: Any) -> None:
    bits: list[Any] = []
    code = on_rank(rank, *args, bits=bits)
    queue.put((rank, bits))
    raise SystemExit(code)


def in_plain_torch(defines: Any, known: Any, wide: bool) -> Any:
    """For each rank and call: what is returned, and whether it shares memory with the next state or what is kept."""
    world = World(known["world"], getattr(torch, known["wire"]) if known["wire"] else None, wide)

    def one(rank: int) -> Any:
        plain = Plain(world, rank)
        plain.random = fdp.random
        made = [define(plain, Kit(plain, exact)) for define, exact in zip(defines, known["exact"], strict=False)]
        return calls_of(made, None, rank, known)

    return world.run(one)


def calls_of(made: Any, make_step: Any, rank: int, known: Any, expected: Any = None) -> Any:
    """Call a step several times; yields nothing, returns what each call returned."""

    def together(states: Any, batches: Any) -> Any:
        outs = [m[2](state, batch) for m, state, batch in zip(made, states, batches, strict=False)]
        return [state for state, _ in outs], [results for _, results in outs]

    step = together if make_step is None else make_step(together)
    state, calls, kept = [m[0](rank) for m in made], [], []
    for number in range(known["calls"]):
        batch = [m[1](rank, number) for m in made]
        before = mapped(_copy, state)
        versions = [x._version for _, x in parts(state) if isinstance(x, torch.Tensor)]
        torch.manual_seed(1000 * number + rank + 1)
        found = step(state, batch)
        after = float(torch.rand(()))
        # If only with what it held: from here on each leaf has memory of its own.
        written = versions != [x._version for _, x in parts(state) if isinstance(x, torch.Tensor)]
        for past, path, x, y in kept:
            if not _same(x, y):
                raise AssertionError(f"call {number} changed {path} that call {past} had returned: {x}, it was {y}")
        if make_step is not None:
            written = expected[number][3]
            if not known["donate"] and any(
                not _same(x, y) for (_, x), (_, y) in zip(parts(state), parts(before), strict=False)
            ):
                raise AssertionError(f"call {number} changed its state in place")
        closed = [x.untyped_storage().data_ptr() for m in made for x in m[4]]
        held = [x.untyped_storage().data_ptr() for _, x in parts(found[0]) if isinstance(x, torch.Tensor)] + closed
        shared = [isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() in held for _, x in parts(found)]
        lies = [_strides(x) for _, x in parts(found)]
        calls.append(([(path, _copy(x)) for path, x in parts(found)], shared, after, written, lies))
        if make_step is not None:
            may_change = known["donate"] or known["between"]
            pairs = zip(parts(found), expected[number][1], strict=True)
            mine = [(path, x) for (path, x), others in pairs if not (others and may_change)]
            kept += [(number, path, x, _copy(x)) for path, x in mine if isinstance(x, torch.Tensor)]
        # fdp returns nothing in the memory of closed-over tensors.
        state = mapped(
            lambda x, theirs=closed: x if not isinstance(x, torch.Tensor)
            else _apart(x) if x.untyped_storage().data_ptr() in theirs else x.detach(), found[0])  # fmt: skip
        if written:
            state = mapped(lambda x: x.contiguous().clone() if isinstance(x, torch.Tensor) else x, state)
        for m in made:
            m[3]()
    return calls


def on_rank(rank: int, defines: Any, make_step: Any, known: Any, expected: Any, store: Any, bits: Any = None) -> int:
    """Run a step under fdp on one rank, print what differs, and return 1 if anything does."""
    torch.set_num_threads(1)
    if store is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=known["world"]
        )
    made = [define(fdp, RealKit(exact)) for define, exact in zip(defines, known["exact"], strict=False)]
    narrow, wide = expected
    try:
        calls = calls_of(made, make_step, rank, known, narrow[rank])
    except Exception as error:
        print(f"rank {rank}: FAILED\n{''.join(traceback.format_exception(error))}", flush=True)
        return 1
    wrong = 0
    own = [f"[1][{n}][{k}]" for n, listed in enumerate(known["own"]) for k, mine in enumerate(listed) if mine]
    for number, (call, plainly, exactly) in enumerate(zip(calls, narrow[rank], wide[rank], strict=False)):
        for (path, x), (_, y), (_, z) in zip(call[0], plainly[0], exactly[0], strict=False):
            if bits is not None and path not in own and isinstance(x, torch.Tensor):
                bits.append(x.contiguous().numpy().tobytes())
            if not _close(x, y, z, known["rounds"]):
                wrong = 1
                print(f"rank {rank}, call {number}, {path}\n  expected {y}\n  got      {x}", flush=True)
        for (path, _), mine, lies in zip(call[0], call[4], plainly[4], strict=False):
            if mine != lies and not known["shard"]:
                wrong = 1
                print(f"rank {rank}, call {number}, {path} has strides {mine}, expected {lies}", flush=True)
        if call[2] != plainly[2]:
            wrong = 1
            print(f"rank {rank}, call {number}: the random generator is not where plain PyTorch leaves it", flush=True)
    print(f"rank {rank}: {'WRONG' if wrong else 'right'}", flush=True)
    return wrong


def _apart(x: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own that lies as a result lies which has to be copied: with its gaps."""
    return (
        _copy(x) if lies_upon_itself(x) else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x.detach())
    )


def _copy(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def _strides(x: Any) -> Any:
    if not isinstance(x, torch.Tensor) or x.numel() == 0:
        return None
    return [step for step, size in zip(x.stride(), x.shape, strict=True) if size != 1]


def _same(x: Any, y: Any) -> bool:
    if not isinstance(x, torch.Tensor):
        return bool(x == y)
    return x.shape == y.shape and torch.equal(x.detach().nan_to_num(12345.0), y.detach().nan_to_num(12345.0))


def _close(x: Any, y: Any, z: Any, rounds: bool) -> bool:
    """Whether x is y, up to some times what rounding makes of z; a compiler may round where plain PyTorch does not."""
    if not isinstance(y, torch.Tensor) or _same(x, y):
        return bool(_same(x, y))
    if not isinstance(x, torch.Tensor) or x.shape != y.shape:
        return False
    rounding = float((y.double() - z.double()).abs().max())
    allowed = 0.0 if rounding == 0 and not rounds else 64 * rounding + 1e-5 * float(y.double().abs().max())
    return float((x.double() - z.double()).abs().max()) <= allowed
