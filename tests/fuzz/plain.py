"""Plain eager PyTorch in one process: every rank is a thread, collectives are written out on lists. No fdp in it.

`run_ranks(size, fn)` calls `fn(plain, kit)` once a rank. `plain` has the names of fdp that random programs use. Threads
take turns: one runs until it meets the others at a collective, so runs repeat exactly. All ranks share one autograd
graph: a gradient is that of the sum of all ranks' losses, which is what the transposes of collectives amount to.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import torch

from fuzz.exchanges import along, exchanged, members_along, permuted, scattered, sum_of
from fuzz.layout import in_layout_of, in_layout_that_is_known, with_rows
from fuzz.numbers import numbers, random_state, set_random_state


@dataclasses.dataclass
class Box:
    """A container that is a dataclass."""

    x: Any
    y: Any


def parts(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    """The leaves of a tree with their paths, dicts in the order of their keys."""
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in parts(tree[key], f"{path}[{key!r}]")]
    if isinstance(tree, (list, tuple)):
        return [leaf for index, item in enumerate(tree) for leaf in parts(item, f"{path}[{index}]")]
    if isinstance(tree, Box):
        return parts(tree.x, f"{path}.x") + parts(tree.y, f"{path}.y")
    if type(tree).__name__ == "PerRank":  # fdp's label of a tensor; its path is that of the tensor
        return [(path, tree.value)]
    return [(path, tree)]


def rebuilt(tree: Any, leaves: Any) -> Any:
    """A tree of the same structure with other leaves, taken from an iterator in the order of `parts`."""
    if isinstance(tree, dict):
        new = {key: rebuilt(tree[key], leaves) for key in sorted(tree)}
        return {key: new[key] for key in tree}
    if isinstance(tree, (list, tuple)):
        return type(tree)([rebuilt(item, leaves) for item in tree])
    if isinstance(tree, Box):
        return Box(rebuilt(tree.x, leaves), rebuilt(tree.y, leaves))
    if type(tree).__name__ == "PerRank":
        return type(tree)(next(leaves))
    return next(leaves)


def mapped(fn: Any, tree: Any) -> Any:
    return rebuilt(tree, iter([fn(leaf) for _, leaf in parts(tree)]))


def up_to(tree: Any, like: Any) -> list[Any]:
    """What stands in a tree in the places of the leaves of another one."""
    if isinstance(like, dict):
        return [found for key in sorted(like) for found in up_to(tree[key], like[key])]
    if isinstance(like, (list, tuple)):
        return [found for item, other in zip(tree, like, strict=False) for found in up_to(item, other)]
    return [tree]


class Stopped(Exception):
    """Another rank raised."""


class World:
    """Ranks as threads of which one runs at a time."""

    def __init__(
        self, size: int, wire: Any = None, wide: bool = False, noise: float = 0.0, noise_seed: int = 0
    ) -> None:
        self.size, self.wire, self.wide, self.noise = size, wire, wide, noise
        self.generator = torch.Generator().manual_seed(noise_seed)
        self.turn, self.error = 0, None
        self._lock = threading.Condition()
        self._values: dict[int, Any] = {}
        self._results: list[Any] = []
        self._meetings = 0
        self._done: set[int] = set()

    def run(self, fn: Any) -> list[Any]:
        """Call fn(rank) on every rank; what each returned, or the first error."""
        if self.size == 1:
            return [fn(0)]
        results: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            try:
                self._await(rank, lambda: True, None)
                results[rank] = fn(rank)
            except BaseException as error:
                with self._lock:
                    if self.error is None or isinstance(self.error, Stopped):
                        self.error = error
                    self._lock.notify_all()
            with self._lock:
                self._done.add(rank)
                self._pass_on(rank)

        device = torch.get_default_device()

        def on_device(rank: int) -> None:
            with torch.device(device):  # each thread has a default of its own
                one(rank)

        threads = [threading.Thread(target=on_device, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error
        return results

    def meet(self, rank: int, value: Any, combine: Any) -> Any:
        """Give a value, and get this rank's entry of combine(values of all ranks)."""
        if self.size == 1:
            return combine([value])[0]
        state = random_state()
        with self._lock:
            self._values[rank] = value
            if len(self._values) == self.size:
                values = [self._values[r] for r in range(self.size)]
                self._values = {}
                self._results = list(combine(values))
                self._meetings += 1
                mine = self._results[rank]
                return mine
            if self._done:
                raise Stopped("a rank has returned while another is at a collective")
            number = self._meetings
            self._pass_on(rank)
        self._await(rank, lambda: self._meetings > number, state)
        return self._results[rank]

    def _pass_on(self, rank: int) -> None:
        others = [(rank + k) % self.size for k in range(1, self.size + 1)]
        free = [r for r in others if r not in self._values and r not in self._done]
        if free:
            self.turn = free[0]
        self._lock.notify_all()

    def _await(self, rank: int, ready: Any, state: Any) -> None:
        with self._lock:
            self._lock.wait_for(lambda: self.error is not None or (self.turn == rank and ready()))
            if self.error is not None:
                raise Stopped("another rank raised")
        if state is not None:
            set_random_state(state)

    def perturbed(self, x: Any) -> Any:
        """A value moved by rounding, to see how far that goes."""
        if not self.noise or not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        signs = torch.randint(0, 2, x.shape, generator=self.generator, device="cpu") * 2.0 - 1.0
        return x * (1 + self.noise * signs.to(x))


class Plain:
    """The names of fdp that random programs use, for one rank of a `World`."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.optim = self
        self.random: Any = None
        self._deferred = False

    def _collect(self, tree: Any, combine: Any, axis: Any = None) -> Any:
        return mapped(lambda x: self.world.meet(self.rank, x, along(axis, combine)), tree)

    def _each(self, make: Any, lies: torch.memory_format = torch.contiguous_format) -> Any:
        # Every rank gets memory of its own; fdp's collectives return contiguous tensors, also in the backward pass.
        return lambda xs: [with_rows(self.world.perturbed(make(xs)).clone(memory_format=lies)) for _ in xs]

    def psum(self, tree: Any, axis: Any = None) -> Any:
        return self._collect(tree, self._each(sum_of), axis)

    def pmean(self, tree: Any, axis: Any = None) -> Any:
        return self._collect(tree, self._each(lambda xs: sum_of(xs) / len(xs)), axis)

    def pmax(self, tree: Any, axis: Any = None) -> Any:
        return self._collect(tree, self._each(lambda xs: torch.stack(xs).amax(0)), axis)

    def pmin(self, tree: Any, axis: Any = None) -> Any:
        return self._collect(tree, self._each(lambda xs: torch.stack(xs).amin(0)), axis)

    def all_gather(self, tree: Any, axis: Any = None) -> Any:
        return self._collect(tree, self._each(torch.stack), axis)

    def broadcast(self, tree: Any, root: int = 0, axis: Any = None) -> Any:
        return self._collect(tree, self._each(lambda xs: xs[root]), axis)

    def _parts(self, make: Any) -> Any:
        # Each rank gets another one.
        lies = torch.contiguous_format
        return lambda xs: [with_rows(self.world.perturbed(x).clone(memory_format=lies)) for x in make(xs)]

    def psum_scatter(self, tree: Any, axis: int = 0, axis_name: Any = None) -> Any:
        return self._collect(tree, self._parts(lambda xs: scattered(xs, axis, mean=False)), axis_name)

    def pmean_scatter(self, tree: Any, axis: int = 0, axis_name: Any = None) -> Any:
        return self._collect(tree, self._parts(lambda xs: scattered(xs, axis, mean=True)), axis_name)

    def all_to_all(self, tree: Any, split_axis: int, concat_axis: int, axis: Any = None) -> Any:
        return self._collect(tree, self._parts(lambda xs: exchanged(xs, split_axis, concat_axis)), axis)

    def ppermute(self, tree: Any, perm: Any, axis: Any = None) -> Any:
        return self._collect(tree, self._parts(lambda xs: permuted(xs, perm)), axis)

    def axis_index(self, axis: Any = None) -> torch.Tensor:
        if axis is None:
            return torch.tensor(self.rank)
        return torch.tensor(next(m.index(self.rank) for m in members_along(axis, self.world.size) if self.rank in m))

    def axis_size(self, axis: Any = None) -> int:
        return self.world.size if axis is None else len(members_along(axis, self.world.size)[0])

    def per_rank(self, tree: Any) -> Any:
        return mapped(lambda x: x.clone(memory_format=torch.contiguous_format), tree)

    # --- gradients ---

    def value_and_grad(self, fn: Any, has_aux: bool = False) -> Any:
        def wrapped(tree: Any, *rest: Any) -> Any:
            leaves = [leaf for _, leaf in parts(tree)]
            outer = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
            with torch.enable_grad():
                inputs = [x.view_as(x) if outer and x.requires_grad else x.detach().requires_grad_() for x in leaves]
                out = fn(rebuilt(tree, iter(inputs)), *rest)
                value, aux = out if has_aux else (out, None)
                grads = self.gradients(value, inputs, create_graph=outer)
            if not outer:
                value, aux = value.detach(), mapped(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, aux)
            # fdp's gradients lie in memory as their parameters do.
            grads = [in_layout_of(x, grad) for x, grad in zip(leaves, grads, strict=True)]
            if not self._deferred:
                grads = [self._average(grad) for grad in grads]
            grads = rebuilt(tree, iter(grads))
            return ((value, aux) if has_aux else value), grads

        return wrapped

    def grad(self, fn: Any) -> Any:
        both = self.value_and_grad(fn)
        return lambda *args: both(*args)[1]

    def gradients(self, value: Any, inputs: Any, create_graph: bool = False) -> Any:
        """Of the sum of all ranks' values, with respect to this rank's inputs; zeros where nothing depends on them."""

        def combine(given: Any) -> Any:
            total = [value for value, _ in given if value.requires_grad]
            flat = [x for _, inputs in given for x in inputs]
            if not total:
                found: Any = [None] * len(flat)
            else:
                # An outer differentiation goes on through the graph; a sum over ranks may share parts of it. Each
                # rank by itself: gradients of one call (of sums, say) may be one piece of memory.
                whole = sum_of(total)
                found = [
                    grad
                    for _, inputs in given
                    for grad in torch.autograd.grad(
                        whole, inputs, create_graph=create_graph, allow_unused=True, retain_graph=True
                    )
                ]
            each = iter(torch.zeros_like(x) if g is None else g for g, x in zip(found, flat, strict=False))
            return [[next(each) for _ in inputs] for _, inputs in given]

        return self.world.meet(self.rank, (value, list(inputs)), combine)

    def _average(self, grad: Any) -> Any:
        wire = None if self.world.wide else self.world.wire

        def mean(xs: Any) -> Any:
            if wire is None or xs[0].dtype.itemsize <= wire.itemsize:
                return sum_of(xs) / len(xs)
            return (sum_of([x.to(wire).to(x.dtype) for x in xs]) / len(xs)).to(wire).to(xs[0].dtype)

        return self.world.meet(self.rank, grad, self._each(mean, torch.preserve_format))

    def accumulate(self, grad_fn: Any, microbatches: int) -> Any:
        def wrapped(tree: Any, *rest: Any) -> Any:
            *others, batch = rest
            outs = []
            self._deferred = True
            for index in range(microbatches):
                piece = mapped(lambda x, index=index: x.chunk(microbatches)[index], batch)
                outs.append(grad_fn(tree, *others, piece))
            self._deferred = False

            def mean(trees: Any) -> Any:
                columns = zip(*([leaf for _, leaf in parts(tree)] for tree in trees), strict=False)
                return rebuilt(trees[0], iter([sum_of([x / microbatches for x in column]) for column in columns]))

            if isinstance(outs[0], tuple):
                values, grads = mean([v for v, _ in outs]), mean([g for _, g in outs])
                return values, mapped(self._average, grads)
            return mapped(self._average, mean(outs))

        return wrapped

    # --- optimizers: the classes of torch.optim, on copies ---

    def from_torch(self, cls: Any, **settings: Any) -> Any:
        return PlainOptimizer(cls, settings)


FIRST: dict[str, tuple[str, ...]] = {
    "SGD": (), "Adam": ("exp_avg", "exp_avg_sq"), "AdamW": ("exp_avg", "exp_avg_sq"), "RMSprop": ("square_avg",),
    "Adagrad": ("sum",),
}  # fmt: skip

FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
"""Classes of which fdp takes the fused kernel where nothing else is said; that of the last one runs on CPUs alone."""


class PlainOptimizer:
    """A class of torch.optim as two functions."""

    def __init__(self, cls: Any, settings: Any) -> None:
        self.cls, self.settings = cls, dict(settings)

    def init(self, params: Any) -> Any:
        names = FIRST[self.cls.__name__]

        def first(p: torch.Tensor) -> Any:
            state = {name: torch.zeros_like(p) for name in names}
            if self.settings.get("momentum"):
                state["momentum_buffer"] = torch.zeros_like(p)
            if names:
                state["step"] = torch.tensor(0.0)
            return state

        lr = torch.tensor(self.settings["lr"], dtype=torch.float64, device="cpu")
        return {"lr": lr, "state": mapped(first, params)}

    def update(self, grads: Any, opt: Any, params: Any) -> Any:
        copies = [p.detach().clone() for _, p in parts(params)]
        states = [{key: value.clone() for key, value in state.items()} for state in up_to(opt["state"], params)]
        fused = FUSED if copies[0].device.type == "cpu" else FUSED[:3]
        chosen = self.settings.get("fused", self.cls.__name__ in fused and "foreach" not in self.settings)
        if chosen:
            # Fused kernels know no strides: fdp lays all that they get out as the parameter lies.
            states = [
                {key: in_layout_of(p, value) if value.shape == p.shape else value for key, value in state.items()}
                for p, state in zip(copies, states, strict=True)
            ]
        settings = {**self.settings, "lr": float(opt["lr"]), "foreach": False}
        settings.pop("fused", None)
        if chosen and copies[0].device.type == "cuda":
            # There the fused kernel takes 1 - beta2 in float32, which is off by a hundredth of a thousandth.
            settings |= {"foreach": None, "fused": True}
        optimizer = self.cls(copies, **settings)
        for p, (_, g), state in zip(copies, parts(grads), states, strict=False):
            p.grad = g.detach().clone()
            optimizer.state[p] = state
        optimizer.step()
        new = rebuilt(params, iter([dict(optimizer.state[p]) for p in copies]))
        return rebuilt(params, iter(copies)), {**opt, "state": new}


class Kit:
    """What a program is made of beside fdp, as plain PyTorch has it; the same names as in `RealKit`."""

    def __init__(self, plain: Plain, exact: bool) -> None:
        self.world, self.plain, self.exact = plain.world, plain, exact
        self.F = torch.float64 if plain.world.wide else torch.float32

    Box = Box

    def like(self, exact: bool) -> Kit:
        return Kit(self.plain, exact)

    def label(self, x: Any, rank: int) -> Any:
        return torch.empty_like(x, requires_grad=False).copy_(x.detach())  # as a label lies: in memory of its own

    def num(self, shape: Any, seed: int) -> torch.Tensor:
        return self.world.perturbed(numbers(shape, seed, self.exact).to(self.F))

    def grad(self, value: Any, inputs: Any) -> Any:
        grads = self.plain.gradients(value, inputs)
        return [in_layout_that_is_known(x, grad, self.plain.world.size) for x, grad in zip(inputs, grads, strict=True)]

    def drop(self, x: torch.Tensor, p: float) -> torch.Tensor:
        mask = torch.nn.functional.dropout(torch.empty_like(x, dtype=torch.float32).fill_(1.0), p)
        return x * mask.to(x.dtype)

    def cond(self, flag: torch.Tensor, yes: Any, no: Any, given: Any) -> Any:
        return yes(*given) if bool(flag) else no(*given)
