"""One training step of a case under each contender: DDP, plain PyTorch, fdp, compiled and not; and parts of it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import optree
import torch
import torch.distributed as dist
from cases import Batch, Case
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fdp

ADAMW: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01, "fused": True}
CAPS_MB = (1, 5, 25, 100)
"""Bucket sizes that a user may try by hand; with 25 DDP differs from its default, whose first bucket has 1 MiB."""

MICROBATCHES = 4
"""Into so many a batch is cut by those who accumulate."""

_UNLIKE = 0.3
"""Two contenders that train the same differ by rounding; without one rank's gradients they differ by about one."""
_ALIKE = 0.01
"""Rounding leaves them less apart than this where nothing is drawn; masks of their own move them much further."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """A training loop in progress.

    Attributes:
        step: runs the next training step.
        params: the parameters as they are now, by the module's names.
        live_bytes: the size of what persists from one step to the next: parameters, buffers, the optimizer's
            state and the batches, each tensor counted once.
        planned: the plan of the next step, and the tensors that it gets, in the order of the plan's inputs; None of a
            contender that has no plan.
    """

    step: Callable[[], None]
    params: Callable[[], Mapping[str, torch.Tensor]]
    live_bytes: Callable[[], int]
    planned: Callable[[], tuple[fdp.Plan, list[torch.Tensor]]] | None = None


def _size_bytes(tree: Any) -> int:
    # By the tensor and not by its storage: of a larger buffer only the part that is state persists.
    tensors = (leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


def _batches(case: Case) -> list[Batch]:
    torch.manual_seed(100 + (dist.get_rank() if dist.is_initialized() else 0))
    return [{name: t.to(case.device) for name, t in case.batch().items()} for _ in range(4)]


def _model(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.model().to(case.device)


def _module(*wrappers: Callable[[nn.Module], nn.Module]) -> Callable[[Case], Contender]:
    """A module in these wrappers, the innermost first, `loss.backward()`, and a `torch.optim` optimizer."""

    def start(case: Case) -> Contender:
        inner = model = _model(case)
        for wrap in wrappers:
            model = wrap(model)
        return _train(case, inner, model)

    return start


class _Whole(nn.Module):
    """A module whose `forward` is not one of torch's own.

    Under `torch.compile(DDP(module))` the compiler begins anew inside of DDP's forward, at `module.forward`; if that is
    `nn.Sequential`'s, it is skipped, and of a perceptron nothing is compiled at all.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.module(x)
        return out


def _ddp(**options: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda model: DistributedDataParallel(model, **options)


def _compile(**options: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda model: cast(nn.Module, torch.compile(model, **options))


def _train(case: Case, inner: nn.Module, model: nn.Module) -> Contender:
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    batches, count = _batches(case), 0

    def step() -> None:
        nonlocal count
        batch = batches[count % len(batches)]
        count += 1
        optimizer.zero_grad(set_to_none=True)
        with case.precision():
            loss = case.loss(model(batch["x"]), batch)
        loss.backward()
        optimizer.step()

    def live_bytes() -> int:
        # Not the gradients, though they live until the next step begins: it begins by giving them back.
        state = dict(optimizer.state_dict()["state"])
        return _size_bytes([list(model.parameters()), list(model.buffers()), state, batches])

    return Contender(step, lambda: dict(inner.named_parameters()), live_bytes)


def _fdp(**options: Any) -> Callable[[Case], Contender]:
    return lambda case: _fdp_step(case, **options)


def _fdp_step(case: Case, **options: Any) -> Contender:
    """The same step under fdp.data_parallel with the state donated; it also averages the loss over ranks."""
    apply, params, buffers = fdp.from_module(_model(case))
    optimizer = fdp.optim.from_torch(torch.optim.AdamW, **ADAMW)
    batches, count = _batches(case), 0

    def one_step(state: Any, batch: Batch) -> Any:
        def loss_fn(params: Any) -> Any:
            with case.precision():
                out, buffers = apply(params, state["buffers"], batch["x"])
                return case.loss(out, batch), buffers

        (loss, buffers), grads = fdp.value_and_grad(loss_fn, has_aux=True)(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        # Rank 0's BatchNorm statistics for everybody, which is what DDP does (broadcast_buffers=True).
        return {"params": params, "buffers": fdp.broadcast(buffers), "opt": opt}, fdp.pmean(loss)

    train_step = fdp.data_parallel(one_step, donate_argnums=0, **options)
    state: Any = fdp.replicate({"params": params, "buffers": buffers, "opt": optimizer.init(params)})
    del params, buffers

    def step() -> None:
        nonlocal count, state
        batch = batches[count % len(batches)]
        count += 1
        state, _ = train_step(state, batch)

    def planned() -> tuple[fdp.Plan, list[torch.Tensor]]:
        args = (state, batches[count % len(batches)])
        return train_step.plan(*args), [leaf for leaf in optree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]

    return Contender(step, lambda: state["params"], lambda: _size_bytes([state, batches]), planned)


def _in_microbatches(**options: Any) -> Callable[[Case], Contender]:
    """DDP with gradient accumulation: all but the last microbatch under `no_sync()`."""

    def start(case: Case) -> Contender:
        model = DistributedDataParallel(_model(case), **options)
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        batches, count = _batches(case), 0

        def step() -> None:
            nonlocal count
            pieces = [dict(zip(batches[0], cut, strict=True)) for cut in _cut(batches[count % len(batches)])]
            count += 1
            # With views the gradients are the buckets, which are kept.
            optimizer.zero_grad(set_to_none="gradient_as_bucket_view" not in options)
            for number, piece in enumerate(pieces):
                with model.no_sync() if number + 1 < MICROBATCHES else contextlib.nullcontext():
                    (case.loss(model(piece["x"]), piece) / MICROBATCHES).backward()
            optimizer.step()

        def live_bytes() -> int:
            state = dict(optimizer.state_dict()["state"])
            return _size_bytes([list(model.parameters()), list(model.buffers()), state, batches])

        return Contender(step, lambda: dict(model.module.named_parameters()), live_bytes)

    return start


def _cut(batch: Batch) -> Iterable[tuple[torch.Tensor, ...]]:
    return zip(*(tensor.chunk(MICROBATCHES) for tensor in batch.values()), strict=True)


def _fdp_in_microbatches(case: Case) -> Contender:
    """The same with fdp.accumulate, for modules without buffers."""
    apply, params, buffers = fdp.from_module(_model(case))
    optimizer = fdp.optim.from_torch(torch.optim.AdamW, **ADAMW)
    batches, count = _batches(case), 0

    def loss_fn(params: Any, batch: Batch) -> torch.Tensor:
        return case.loss(apply(params, buffers, batch["x"])[0], batch)

    @fdp.data_parallel(donate_argnums=0)
    def train_step(state: Any, batch: Batch) -> Any:
        grad_fn = fdp.accumulate(fdp.value_and_grad(loss_fn), microbatches=MICROBATCHES)
        loss, grads = grad_fn(state["params"], batch)
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt}, fdp.pmean(loss)

    state: Any = fdp.replicate({"params": params, "opt": optimizer.init(params)})
    del params

    def step() -> None:
        nonlocal count, state
        batch = batches[count % len(batches)]
        count += 1
        state, _ = train_step(state, batch)

    return Contender(step, lambda: state["params"], lambda: _size_bytes([state, batches]))


def _forward(case: Case) -> Contender:
    """The part of a step before its first gradient; trains nothing."""
    model, batches, count = _model(case), _batches(case), 0

    def step() -> None:
        nonlocal count
        batch = batches[count % len(batches)]
        count += 1
        with case.precision():
            case.loss(model(batch["x"]), batch)

    return Contender(step, lambda: dict(model.named_parameters()), lambda: _size_bytes(list(model.parameters())))


def _communication(case: Case) -> Contender:
    """One all-reduce of as many bytes as there are gradients, and nothing else; trains nothing."""
    message = torch.zeros(gradient_bytes(case) // 4, device=case.device)
    return Contender(lambda: dist.all_reduce(message), lambda: {}, lambda: _size_bytes(message))


def gradient_bytes(case: Case) -> int:
    """The size of all gradients of a case."""
    return sum(4 * parameter.numel() for parameter in case.model().parameters())


CONTENDERS: dict[str, Callable[[Case], Contender]] = {
    "eager": _module(),
    "eager-compile": _module(_compile()),
    "ddp": _module(_ddp()),
    "ddp-views": _module(_ddp(gradient_as_bucket_view=True)),
    "ddp-static": _module(_ddp(static_graph=True)),
    "ddp-static-views": _module(_ddp(static_graph=True, gradient_as_bucket_view=True)),
    "ddp-compile": _module(_Whole, _ddp(), _compile()),
    "ddp-compile-views": _module(_Whole, _ddp(gradient_as_bucket_view=True), _compile()),
    "ddp-compile-inner": _module(_compile(), _ddp(gradient_as_bucket_view=True)),
    "ddp-compile-graphs": _module(_Whole, _ddp(), _compile(mode="reduce-overhead")),
    **{f"ddp-cap-{cap}": _module(_ddp(bucket_cap_mb=cap)) for cap in CAPS_MB},
    "forward": _forward,
    "communication": _communication,
    "fdp": _fdp(),
    **{f"fdp-cap-{cap}": _fdp(bucket_cap_mb=cap) for cap in CAPS_MB},
    "fdp-bf16": _fdp(wire_dtype=torch.bfloat16),
    "fdp-bf16-in-f32": _fdp(wire_dtype=torch.bfloat16, accumulate_dtype=torch.float32),
    "ddp-accumulates": _in_microbatches(),
    "ddp-views-accumulates": _in_microbatches(gradient_as_bucket_view=True),
    "fdp-accumulates": _fdp_in_microbatches,
    "fdp-compile": _fdp(compile=True),
    "fdp-compile-graphs": _fdp(compile={"mode": "reduce-overhead"}),
}
DDP = ("ddp", "ddp-views", "ddp-static", "ddp-static-views")
DDP_CAPS = ("ddp", *(f"ddp-cap-{cap}" for cap in CAPS_MB))
FDP_CAPS = tuple(f"fdp-cap-{cap}" for cap in CAPS_MB)
FDP_WIRE = ("fdp-bf16", "fdp-bf16-in-f32")
DDP_COMPILE = ("ddp-compile", "ddp-compile-views", "ddp-compile-inner")


class SamenessCheck:
    """Refuses to compare contenders that do not do the same thing.

    Args:
        case: what they train.
    """

    def __init__(self, case: Case):
        self._case = case
        self._start = {name: t.detach().cpu() for name, t in _model(case).named_parameters()}
        self._first: tuple[str, list[torch.Tensor]] | None = None

    def add(self, name: str, params: Mapping[str, torch.Tensor]) -> None:
        """Take note of a contender.

        Args:
            name: what to call it.
            params: its parameters after as many steps as everybody has made, on the CPU.

        Raises:
            RuntimeError: it moved the parameters elsewhere than the first one that was added, or not at all.
        """
        moved = _difference(params, self._start)
        if self._first is None:
            self._first = (name, moved)
        first, far, apart = self._beside_first(moved)
        if not (far > 0 and apart <= _UNLIKE * far):
            raise RuntimeError(
                f"{name} does not train {self._case.name} as {first} does: after equally many steps its parameters "
                f"differ by {apart:.3g}, and {first} moved them by {far:.3g}."
            )

    def refuse_alike(self, name: str, params: Mapping[str, torch.Tensor]) -> None:
        """Make sure that a contender draws dropout masks, once those without have been added.

        Args:
            name: what to call it.
            params: its parameters after as many steps, on the CPU.

        Raises:
            RuntimeError: it trains as if it drew none.
        """
        first, far, apart = self._beside_first(_difference(params, self._start))
        if not apart > _ALIKE * far:
            raise RuntimeError(
                f"{name} trains {self._case.name} as {first} does without dropout: its parameters differ by "
                f"{apart:.3g}, and {first} moved them by {far:.3g}."
            )

    def _beside_first(self, moved: list[torch.Tensor]) -> tuple[str, float, float]:
        """The contender that was added first, how far it moved the parameters, and how far from there these are."""
        assert self._first is not None
        first, expected = self._first
        return first, _norm(expected), _norm(a - b for a, b in zip(moved, expected, strict=True))


def _difference(now: Mapping[str, torch.Tensor], start: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    if now.keys() != start.keys():
        raise RuntimeError(f"parameters {sorted(now.keys() ^ start.keys())} are not in both contenders.")
    return [now[name] - start[name] for name in start]


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    return float(sum(float(t.double().square().sum()) for t in tensors) ** 0.5)
