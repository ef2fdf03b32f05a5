"""Small steps that each meet some of what an emitter decides: where values lie, what is packed when, what waits.

Each is written over `c`, which is fdp or, for the expected numbers, `simulated_ranks.Plain`. Sizes are as small as they
can be: a bucket of 1 MiB is filled with divided values, a member of 64 KiB is packed early.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

Tree = Any
DOUBLE = torch.float64


@dataclass(frozen=True)
class Program:
    """A step with its data.

    Attributes:
        step: `step(c, state, batch) -> (new_state, results)`.
        state: makes the first state.
        batch: makes the batch of a rank and call.
        donate: whether the state is donated.
        cap: `bucket_cap_mb`.
        world: number of ranks.
        options: further ones of `data_parallel`.
        tolerance: by what share of its largest value a result may differ from plain PyTorch.
        calls: how often it is called; once where the new state lies in memory otherwise than the old.
    """

    step: Callable[[Any, Tree, Tree], Any]
    state: Callable[[], Tree]
    batch: Callable[[int, int], Tree]
    donate: bool = True
    cap: Any = 25
    world: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-9
    calls: int = 3

    @property
    def name(self) -> str:
        return self.step.__name__


PROGRAMS: dict[str, Program] = {}


def _program(
    state: dict[str, Any], batch: dict[str, Any], **kwargs: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a step; shapes stand for random numbers, tensors for themselves."""

    def register(step: Callable[..., Any]) -> Callable[..., Any]:
        def make(kinds: dict[str, Any], seed: int) -> Tree:
            g = torch.Generator().manual_seed(seed)
            return {key: _make(kind, g) for key, kind in kinds.items()}

        PROGRAMS[step.__name__] = Program(
            step, lambda: make(state, 1), lambda rank, call: make(batch, 100 + 10 * call + rank), **kwargs
        )
        return step

    return register


def _make(kind: Any, g: torch.Generator) -> Any:
    if isinstance(kind, torch.Tensor):
        return copied(kind)
    if isinstance(kind, dict):
        return {key: _make(each, g) for key, each in kind.items()}
    if callable(kind):
        return kind(g)
    return torch.randn(kind, generator=g, dtype=DOUBLE) / 4


def _optimizer(cls: Any, params: dict[str, Any], **kwargs: Any) -> tuple[Any, Callable[[torch.Generator], Tree]]:
    import fdp

    optimizer = fdp.optim.from_torch(cls, **kwargs)
    g = torch.Generator().manual_seed(5)
    made = {key: _make(kind, g) for key, kind in params.items()}
    return optimizer, lambda g: optimizer.init(made)


def _indices(most: int, *shape: int) -> Callable[[torch.Generator], torch.Tensor]:
    return lambda g: torch.randint(0, most, shape, generator=g)


# --- models -------------------------------------------------------------------------------------------

_MLP = {"w1": (64, 300), "b1": (300,), "w2": (300, 600), "b2": (600,), "w3": (600, 3)}
_ADAMW, _ADAMW_STATE = _optimizer(torch.optim.AdamW, _MLP, lr=0.012345678)


@_program({"params": _MLP, "opt": _ADAMW_STATE}, {"x": (8, 64), "y": (8, 3)}, cap=[0.02, 2], tolerance=1e-6)
def adamw(c: Any, s: Tree, b: Tree) -> Any:
    """A fused optimizer on donated state, several buckets, one of them large; local values beside averages."""

    def loss_fn(p: Tree) -> torch.Tensor:
        h = torch.relu(torch.addmm(p["b1"], b["x"], p["w1"]))
        h = torch.tanh(torch.addmm(p["b2"], h, p["w2"]))
        return F.mse_loss(h @ p["w3"], b["y"])

    loss, grads = c.value_and_grad(loss_fn)(s["params"])
    params, opt = _ADAMW.update(grads, s["opt"], s["params"])
    return {"params": params, "opt": opt}, [c.pmean(loss), loss * 2]


_SMALL = {"a": (6, 5), "b": (5,), "c": (5, 5), "d": (5,), "e": (5, 2)}


@_program({"p": _SMALL, "m": _SMALL}, {"x": (4, 6), "y": (4, 2)}, cap=0.00015)
def sgd(c: Any, s: Tree, b: Tree) -> Any:
    """New values made one by one, one bucket a gradient, clipped by a norm that all ranks share."""

    def loss_fn(p: Tree) -> torch.Tensor:
        h = torch.tanh(F.linear(b["x"], p["a"].t(), p["b"]))
        return F.mse_loss(torch.relu(F.linear(h, p["c"], p["d"])) @ p["e"], b["y"])

    loss, grads = c.value_and_grad(loss_fn)(s["p"])
    norm = c.pmax(sum((g * g).sum() for g in grads.values()) + loss)
    scale = torch.clamp(1.2345678 / (norm + 1e-6), max=1.0)
    momentum = {k: 0.987654321 * s["m"][k] + grads[k] * scale for k in grads}
    new = {k: s["p"][k] - 0.123456789 * momentum[k] for k in grads}
    return {"p": new, "m": momentum}, [norm, sum(x.sum() for x in s["p"].values())]


_EQUAL = {"a": (7, 7), "b": (7, 7), "c": (7, 7), "d": (7, 7)}


@_program({"p": _EQUAL, "m": _EQUAL, "n": {k: torch.zeros(()) for k in _EQUAL}}, {"x": (4, 7)}, cap=0.0008)
def foreach(c: Any, s: Tree, b: Tree) -> Any:
    """List operators over parameters of one shape, whose gradients come in another order than they are listed in."""

    def loss_fn(p: Tree) -> torch.Tensor:
        return (
            torch.tanh(torch.tanh(torch.tanh(b["x"] @ p["c"]) @ p["a"]) @ p["d"])
            @ p["b"]
            @ torch.ones(7).double()
            @ (torch.ones(4).double())
        )

    grads = c.grad(loss_fn)(s["p"])
    params, moments, counts = ([x.clone() for x in s[k].values()] for k in ("p", "m", "n"))
    torch._foreach_add_(counts, 1)
    torch._foreach_mul_(moments, 0.9)
    torch._foreach_add_(moments, list(grads.values()))
    scaled = torch._foreach_mul(moments, 0.1)
    torch._foreach_sub_(params, scaled)
    new = [dict(zip(_EQUAL, values, strict=True)) for values in (params, moments, counts)]
    return dict(zip(("p", "m", "n"), new, strict=True)), [torch._foreach_mul(params, 2.0)]


@_program({k: (7, 7) for k in "abcd"}, {"x": (4, 7)}, cap=0.0008)
def listed(c: Any, s: Tree, b: Tree) -> Any:
    """List operators that change what they are given, with gradients in another order than their parameters."""
    grads = c.grad(lambda p: torch.tanh(torch.tanh(b["x"] @ p["c"] @ p["a"]) @ p["d"] @ p["b"]).pow(3).sum())(s)
    new = [x.clone() for x in s.values()]
    torch._foreach_mul_(new, 0.9)
    torch._foreach_add_(new, list(grads.values()))
    return dict(zip(s, new, strict=True)), []


@_program({"e": (700, 200), "b": (700,)}, {"x": _indices(700, 6, 3)}, donate=False)
def tied(c: Any, s: Tree, b: Tree) -> Any:
    """One weight at both ends: the sum of two large gradients, packed divided; also looked at before it is averaged."""

    def loss_fn(p: Tree) -> torch.Tensor:
        h = F.embedding(b["x"], p["e"]).mean(1)
        return F.cross_entropy(torch.addmm(p["b"], torch.tanh(h), p["e"].t()), b["x"][:, 0])

    loss, grads = c.value_and_grad(loss_fn)(s)
    return {k: s[k] - 0.5 * grads[k] for k in s}, [loss, grads["e"]]


_LOOP = {"w1": (200, 400), "b1": (400,), "w2": (400, 200)}


@_program(_LOOP, {"x": (6, 200)}, cap=0.7)
def accumulate(c: Any, s: Tree, b: Tree) -> Any:
    """Microbatches in a loop whose memory is inside of that of the step; products are added in place."""

    def loss_fn(p: Tree, batch: Tree) -> torch.Tensor:
        h = torch.tanh(torch.addmm(p["b1"], batch["x"], p["w1"]))
        return ((h * (c.axis_index() + 1)) @ p["w2"]).pow(2).mean()

    # It leaves a gap that the buckets, and most of what the loop needs, fit into.
    gone = torch.cat([s["w1"], s["w1"], s["w1"][:7]])
    across = torch.tanh(b["x"] @ gone[207:])
    loss, grads = c.accumulate(c.value_and_grad(loss_fn), 3)(s, b)
    return {k: s[k] - 0.5 * grads[k] for k in s}, [c.pmean(loss), across * 2 + across.sum()]


@_program(
    {
        "p": {"w": (5, 4), "g": torch.ones(4).double(), "h": torch.zeros(4).double()},
        "mean": torch.zeros(4).double(),
        "var": torch.ones(4).double(),
        "n": torch.tensor(0),
    },
    {"x": (6, 5)},
)
def batch_norm(c: Any, s: Tree, b: Tree) -> Any:
    """Running statistics are changed in place; of three results one is looked at later; one input is transposed."""
    mean, var, n = s["mean"].clone(), s["var"].clone(), s["n"].clone()
    n.add_(1)

    def loss_fn(p: Tree) -> torch.Tensor:
        y = F.batch_norm(b["x"] @ p["w"], mean, var, p["g"], p["h"], training=True)
        # Neither contiguous nor channels last.
        z = torch.tanh((y.t() @ b["x"]).reshape(2, 2, 5).transpose(0, 2))
        out, means, deviations = torch.ops.aten.native_batch_norm(z, None, None, None, None, True, 0.1, 1e-5)
        return (out * b["x"].t()[:, :2, None]).sum() + means.sum() * 2 + deviations.detach().sum() + y.pow(3).mean()

    loss, grads = c.value_and_grad(loss_fn)(s["p"])
    p = {k: s["p"][k] - 0.1 * grads[k] for k in grads}
    return {"p": p, "mean": c.pmean(mean), "var": c.pmean(var), "n": n}, [c.pmean(loss)]


@_program({"w": (2, 3, 3, 3), "v": (32, 4)}, {"x": (3, 3, 8, 8), "y": _indices(4, 3)}, donate=False)
def convolution(c: Any, s: Tree, b: Tree) -> Any:
    """Operators with several results, and strided gradients."""

    def loss_fn(p: Tree) -> torch.Tensor:
        x = b["x"].to(memory_format=torch.channels_last)
        pooled = F.max_pool2d(F.relu(F.conv2d(x, p["w"], padding=1)), 2)
        return F.nll_loss(F.log_softmax(pooled.flatten(1) @ p["v"], -1), b["y"])

    loss, grads = c.value_and_grad(loss_fn)(s)
    values, found = F.max_pool2d(b["x"] * 2, 2, return_indices=True)
    total, weight = torch.ops.aten.nll_loss_forward(b["x"].flatten(1)[:, :4] * 3, b["y"], None, 1, -100)
    return {k: s[k] - 0.5 * grads[k] for k in s}, [loss, values.sum() + found.sum(), total * 2 + weight]


# --- collectives ----------------------------------------------------------------------------------------


@_program({"w": (5, 5)}, {"x": (4, 5), "n": _indices(50, 9)}, cap=0.001, donate=False)
def mixed(c: Any, s: Tree, b: Tree) -> Any:
    """Every collective, each kind twice, on values that are also read by this rank itself; some in a row."""
    x = torch.tanh(b["x"] @ s["w"])
    gathered, other = c.all_gather(x), c.all_gather(x[:3] * 2)
    counts, large = c.psum(b["n"] * 2), c.psum(b["n"] + 1)
    first, second = c.broadcast(x * 3), c.broadcast(x * 4, root=1)
    both = c.psum(x.sum(0)) + c.pmean(x.sum(0) * 2)
    top = c.pmax(x.amax(0))
    shifted = c.pmean((x - top).exp().sum(0))
    again = c.pmean(torch.log(shifted) + top)
    last = c.pmean(again * c.psum(again * x.sum()))
    return s, [gathered * 2, other.sum(1), counts + 1, large * 2, first - second, both, shifted, again, last, x.sum()]


@_program({"w": (4, 4)}, {"x": (4, 4)}, donate=False)
def straight(c: Any, s: Tree, b: Tree) -> Any:
    """A bucket that is filled from another one, with nothing between."""
    return s, [c.psum(c.pmean(b["x"]))]


@_program({"w": (4, 4)}, {"x": (4, 4)}, cap=0.001, donate=False)
def in_a_row(c: Any, s: Tree, b: Tree) -> Any:
    """Buckets that are filled right from what another one brought, through views; results returned as they came."""
    a = c.psum(b["x"] @ s["w"])
    d = c.pmean(a.t())
    e = c.pmean(a.view(2, 8)[1])
    f = c.psum(d.sum(0) * 2)
    return s, [a, d, d.t(), e, f, c.pmax(e)]


@_program({"w": (256, 512)}, {"x": (300, 256), "y": (300, 512)}, donate=False)
def large(c: Any, s: Tree, b: Tree) -> Any:
    """Large values that go into buckets in every way: computed there, copied early, copied late; sums and means."""
    product = b["x"].t() @ b["y"]  # computed in its bucket
    read_before = b["x"].t() @ (b["y"] * 5)
    size = read_before.sum()
    unfinished = b["x"].t() @ (b["y"] * 7)
    unfinished[0].fill_(3.0)
    read_later = b["x"].t() @ b["y"] * 2
    changed = torch.tanh(product * 0.5)
    changed.mul_(3.0)
    turned = (b["y"].t() @ b["x"]).t()
    divided_alone = b["x"].t() @ (b["y"] * 3)
    norm = product.sum()
    values = (product, read_before, unfinished, read_later, changed, turned, divided_alone, b["x"][:2], b["x"][4:6])
    means = [c.pmean(value) for value in values]
    total = c.psum(read_later * 2)
    after = [read_later * 3, changed + 1, turned.sum(0)]
    return {"w": s["w"] + means[0] + total}, [norm, *(m.sum(1) + m[:, 0] for m in means), means[4] * 1.0, size, *after]


@_program({"w": (150, 300)}, {"x": (40, 150), "y": (40, 300)}, donate=False)
def early(c: Any, s: Tree, b: Tree) -> Any:
    """A value that is changed after it was made and before it is packed, and read after its bucket has started."""
    one = b["x"].t() @ b["y"]
    one[10:].mul_(2.0)
    three = torch.sin(one.clone())
    return s, [c.pmean(one), one, c.pmean(three.t()), three]


@_program({"w": (100, 90)}, {"x": (20, 100), "y": (20, 90)}, donate=False, cap=0.08)
def in_the_bucket(c: Any, s: Tree, b: Tree) -> Any:
    """Values that could be computed in their bucket but for a reader or a change after it has started, or a part."""
    read = torch.sin(b["x"].t() @ b["y"])
    mean = c.pmean(read)
    later = (mean * read).sum(0)
    scratch = torch.sigmoid(b["x"].t() @ b["y"])
    scratch[0].fill_(0.5)
    brought = c.pmean(scratch)
    scratch.zero_()
    changed = torch.cos(b["x"].t() @ b["y"])
    sent = c.pmean(changed)
    changed.add_(sent)
    part = c.pmean((b["x"].t() @ b["y"])[:50])
    turned = c.pmean(torch.tanh(b["y"].t() @ b["x"]).t()) + c.pmean((b["y"].t() @ b["x"]).t())
    square = c.pmean(torch.exp(b["x"][:, :20] @ b["y"][:, :20].t()).t())
    return s, [later, changed * 2, part + 1, mean.sum(), brought * 2, turned, square]


@_program({"w": (3, 4)}, {"x": (20, 100), "y": (20, 90), "z": (3, 4)}, donate=False)
def packed(c: Any, s: Tree, b: Tree) -> Any:
    """Members of one size, copied together; and a part of a value before one that is finished after it."""
    one, two, three = b["z"] + 1, torch.cos(b["z"]), b["z"] + s["w"]
    finished_late = torch.sin(b["x"].t() @ b["y"])
    part = (b["x"].t() @ b["y"])[:50]
    finished_late[:1].mul_(2.0)
    means = c.pmean((one, two, three, part, finished_late))
    return s, [one, two, three, *(mean * 2 for mean in means)]


@_program(
    {"w": (150, 300), "v": (300, 3)},
    {"x": (40, 150), "y": (40, 3)},
    donate=False,
    tolerance=0.02,
    options={"wire_dtype": torch.bfloat16, "accumulate_dtype": torch.float32},
    cap=0.1,
)
def wire(c: Any, s: Tree, b: Tree) -> Any:
    """Gradients that travel in two bytes and are added up in four."""
    loss, grads = c.value_and_grad(lambda p: F.mse_loss(torch.tanh(b["x"] @ p["w"]) @ p["v"], b["y"]))(s)
    behind = torch.sin(b["x"] @ s["w"])
    return {k: s[k] - grads[k] for k in s}, [loss, grads, behind * grads["v"].sum()]


@_program({"w": (3, 4)}, {"x": (3, 4), "m": lambda g: torch.rand(5, generator=g) < 0.5})
def small_pieces(c: Any, s: Tree, b: Tree) -> Any:
    """Values of one, two and eight bytes beside each other, none a multiple of 64 bytes long."""
    mask = torch.logical_not(b["m"])
    half = b["x"].to(torch.float16) * 2
    whole = b["x"] * 3
    both = torch.logical_and(mask, torch.logical_xor(b["m"], mask))
    other = torch.tanh(whole + 1)
    wide = c.pmean(half[:, :3].clone()), c.pmean(other[:, 1:].clone()), c.psum(both.to(torch.int32))
    return {"w": s["w"] + other}, [mask.sum(), both.sum(), half * 2, whole + other, *(w * 2 for w in wide)]


# --- order ----------------------------------------------------------------------------------------------


@_program({"w": (4, 3)}, {"x": (5, 4)}, cap=0.0001)
def noise(c: Any, s: Tree, b: Tree) -> Any:
    """Random numbers on both sides of a message, some of them for nothing."""
    torch.rand(3)
    x = F.dropout(b["x"], 0.5)
    grads = c.grad(lambda p: (F.dropout(x @ p["w"], 0.3)).pow(2).sum())(s)
    mean = c.pmean(x.sum(0))
    later = mean * torch.rand(4, dtype=DOUBLE)
    local = x.sum() * torch.rand((), dtype=DOUBLE)
    return {"w": s["w"] - grads["w"]}, [later, local, torch.randn(3, dtype=DOUBLE)]


@_program({"w": (5, 4)}, {"x": (6, 5)})
def drawn_anywhere(c: Any, s: Tree, b: Tree) -> Any:
    """Draws into memory in other orders than that of rows."""
    hidden = F.dropout((b["x"] @ s["w"]).t(), 0.5)
    noise = torch.empty(6, 12, dtype=DOUBLE).fill_(1.0)
    noise[:, ::2].normal_()
    noise.t()[1::2].uniform_()
    grads = c.grad(lambda p: (hidden.t() * (b["x"] @ p["w"]) * torch.rand_like(hidden).t()).pow(2).sum())(s)
    return {"w": s["w"] - grads["w"]}, [hidden, noise, torch.bernoulli(b["x"].t().sigmoid())]


@_program({"w": (6, 6)}, {"x": (6, 6)}, cap=0.0001)
def two_at_once(c: Any, s: Tree, b: Tree) -> Any:
    """Operations that need two buckets, through views and by themselves."""
    one, two = c.pmean(b["x"] @ s["w"]), c.pmean(torch.tanh(b["x"]) @ s["w"])
    three = c.psum(b["x"].t().sin() @ s["w"])
    mixed = one.t() * 2 + two[:, :3].sum() + three.view(36)[:6]
    return {"w": s["w"] + mixed}, [torch.maximum(two, one), one.sum() * two.sum(), torch.mm(one.t(), three.t())]


@_program({"w": (40, 40), "k": (40, 40)}, {"x": (40, 40)}, donate=False)
def deferred(c: Any, s: Tree, b: Tree) -> Any:
    """Products that are added in place, but for what happens to their factors, or who else reads them."""
    x = b["x"]
    left, total = x * 2, torch.ones(40, 40, dtype=DOUBLE)
    product = left @ s["w"]
    left.add_(1)
    total.add_(product)
    other, seen = torch.zeros(40, 40, dtype=DOUBLE), x @ s["k"]
    other.add_(seen)
    half, third = torch.ones(40, 40, dtype=DOUBLE), x @ s["w"]
    half.add_(third, alpha=0.5)
    turned = torch.ones(40, 40, dtype=DOUBLE)
    turned.add_(x @ s["w"])
    rows = x * 3
    rows.add_(rows @ s["w"])
    return s, [total * 2, left, other * 2, seen.sum(0) * 2, half * 2, turned * 2, rows * 2]


@_program({"w": (30, 30)}, {"x": (30, 30)}, donate=False)
def deferred_past_a_message(c: Any, s: Tree, b: Tree) -> Any:
    """A product of this rank's own value, which a message replaces before the product is needed."""
    own = b["x"].t() @ b["x"]
    product = own @ s["w"]
    h = (b["x"] @ s["w"]).tanh().sum(0)
    mean, other = c.pmean((own, h))
    total = mean * 1.0
    total.add_(product)
    return s, [total * 2, other]


# --- state ----------------------------------------------------------------------------------------------


@_program({"a": (4, 4), "b": (4, 4), "d": (4, 4), "e": (4, 4), "f": (4, 4), "g": (4, 4)}, {"x": (4, 4)})
def old_values(c: Any, s: Tree, b: Tree) -> Any:
    """New values of donated state whose old value is still read: later, by the update, or by other results."""
    a = s["a"].clone()
    a.mul_(0.9)
    late = s["a"] * c.pmean(b["x"])
    a.add_(late)
    new_b = s["b"].clone()
    new_b.addmm_(s["b"], b["x"])
    new_d = s["d"] * 0.5
    kept = s["d"].t() + c.pmean(b["x"] * 2)
    new_e = torch.flip(s["e"], (0,))
    read = torch.flip(s["e"], (1,)) + c.psum(b["x"])
    new_g = s["f"] * 1.5  # changes places
    return {"a": a, "b": new_b, "d": new_d, "e": new_e, "f": s["g"], "g": new_g}, [late, kept, read, s["d"].sum()]


@_program({"a": (3, 3), "b": (3, 3), "x": (3, 3), "d": (3, 3), "e": (3, 3), "f": (3, 3), "g": (3, 3)}, {"x": (3, 3)})
def exchanged(c: Any, s: Tree, b: Tree) -> Any:
    """Donated inputs that change places, become the batch, one value or an average, or are changed after being read."""
    one = torch.tanh(b["x"]) * 2
    mean = c.pmean(b["x"] * 3)
    doubled = s["e"] * 2
    s["e"].zero_()
    rolled = torch.roll(s["g"], 1)
    rolled.add_(c.pmean(b["x"]))
    new = {"a": s["b"], "b": s["a"], "x": b["x"], "d": one, "e": doubled, "f": mean, "g": rolled}
    return new, [one, s["x"][0], s["d"] + 1, mean, s["f"].sum(), torch.roll(s["g"], 1) * mean]


_SQUARE = {"x": (40, 40)}


@_program({key: (40, 40) for key in "abvgtq"}, _SQUARE)
def updated_by_itself(c: Any, s: Tree, b: Tree) -> Any:
    """State that is read by what makes its new value, sent after that was made, or read when that has been sent."""
    new_t = s["t"] * 3
    a = s["a"].clone()
    a.addmm_(s["a"], b["x"])
    value = torch.tanh(b["x"])
    mean, sent = c.pmean((value, s["t"]))
    g = torch.roll(s["g"], 1)
    torch._foreach_add_([g], [mean])
    return {"a": a, "b": s["b"] @ b["x"], "v": value, "g": g, "t": new_t, "q": b["x"]}, [s["v"] * mean, sent * 2]


@_program({"a": (3, 3), "b": (3, 3)}, {"x": (3, 3)})
def one_value_twice(c: Any, s: Tree, b: Tree) -> Any:
    """One value is the new state of two leaves."""
    value = s["a"] * 0.5 + b["x"]
    return {"a": value, "b": value}, [value.t()]


@_program({"w": (5, 5), "v": (5, 5), "u": (5, 5)}, {"x": (5, 5)}, cap=0.0001)
def sent_and_updated(c: Any, s: Tree, b: Tree) -> Any:
    """State that is averaged, gathered and updated by what needs no message."""
    return {"w": s["w"] + 1, "v": s["v"].clone().mul_(2.0), "u": torch.flip(s["u"], (0,))}, [
        c.pmean(s["w"] * 1.0),
        c.pmean(s["w"]),
        c.all_gather(s["v"]),
        c.psum(s["u"]),
    ]


def _with_gaps(g: torch.Generator) -> torch.Tensor:
    return torch.randn(4, 8, generator=g, dtype=DOUBLE)[:, ::2]


@_program({"w": (4, 4), "v": (4, 4), "g": _with_gaps, "h": _with_gaps}, {"x": (4, 4)}, calls=1)
def lies_otherwise(c: Any, s: Tree, b: Tree) -> Any:
    """New state that is turned, or has gaps, or has several elements in one place, and old state with gaps twice."""
    turned = (s["w"] + c.pmean(b["x"])).t().clone()
    return {"w": turned, "v": s["v"][0].expand(4, 4), "g": s["g"], "h": s["g"]}, [s["h"][1:]]


@_program({"w": (4, 4)}, {"x": (4, 4)})
def returned(c: Any, s: Tree, b: Tree) -> Any:
    """Results that share memory with buckets, constants, closed-over tensors and each other."""
    mean, gathered = c.pmean(b["x"] * 2), c.all_gather(b["x"] * 3)
    value = torch.tanh(b["x"])
    ones = torch.full((3,), 0.25, dtype=DOUBLE)
    return {"w": s["w"] + mean}, [mean, mean[1:], gathered, gathered[1], value, value.t(), ones, _RETURNED]


# --- values that lie in memory ----------------------------------------------------------------------------


@_program({"w": (6, 6), "b": (6,)}, {"x": (5, 6)}, donate=False)
def chain(c: Any, s: Tree, b: Tree) -> Any:
    """Many values of some sizes, of which most die early and some late."""
    found = []
    x = b["x"]
    for size in (6, 3, 5, 2, 6):
        h = torch.tanh(x @ s["w"] + s["b"])
        wide = torch.cat([h, h * 2, h[:size]], 0)
        kept = wide[:, :size] * 1.5
        norm = torch.sigmoid(h) @ s["w"]
        soft = torch.softmax(norm, -1)
        x = soft * norm + h
        small = kept.sum(0)
        found.append((kept, small, torch.relu(norm - 0.1)))
    total = sum(k.sum() + (n * 2).sum() for k, _, n in found)
    return s, [x * 2, total, torch.cat([m for _, m, _ in found]) * 2]


@_program({"w": (6, 6)}, {"x": (8, 6)}, donate=False)
def views(c: Any, s: Tree, b: Tree) -> Any:
    """Views by offset, stride, transposition, as other types, of complex numbers; written through, too."""
    rows = b["x"].t().sum(1)
    h = torch.tanh(b["x"] @ s["w"])
    late, early = h[3:], h[:5]
    columns, strided = h[:, 2:4], h[::2, 1::2]
    part = h.view(-1)[:24]
    moved = part.as_strided((24,), (1,), 12)
    pieces = torch.chunk(h, 3, 1)
    mixed = late * 2 - early + pieces[1].sum() - pieces[2].t()[0, 0]
    h[2:4].mul_(2.0)
    strided.add_(1.0)
    z = torch.complex(h * 1.0, torch.sin(h))
    turned = (z * z).conj()
    first = (turned + 1).abs().sum()
    halves = torch.chunk((z * 2).conj(), 2)
    second = (halves[0] + 1).abs().sum() + halves[1].abs().sum()
    cover = torch.sin(torch.cos(z) * 2) * 3 + torch.sin(z * 3)
    third = (cover * (torch.cos(z) * 2 + cover)).abs().sum() + first + second
    spread = torch.sin(h * 3)
    bits = spread.view(torch.int64)
    other = torch.cos(h) * 2
    last = [
        third + rows.sum(),
        torch.sinh(h).t().t() * 2,
        turned + other,
        halves[0] * halves[1],
        bits.to(torch.float32) * 2,
        moved * 1.0,
        part + moved,
        columns * 1.0,
    ]
    return s, [mixed, h * 1.0, *last]


@_program({"w": (5, 5), "n": torch.zeros((), dtype=torch.bfloat16)}, {"x": (5, 5)}, donate=False)
def in_place(c: Any, s: Tree, b: Tree) -> Any:
    """Operators that change fixed places, seen through earlier views; forms with numbers; products of square values."""
    h = b["x"] @ s["w"]
    seen = h.t()
    h.add_(0.5)
    torch.relu_(h)
    h[1].zero_()
    scaled = torch.addmm(h, b["x"], s["w"].t(), beta=0.3, alpha=1.7)
    upside_down = torch.addmm(h[0], scaled, s["w"].flip(0))
    squared = upside_down @ s["w"]
    filled = torch.full((5, 5), 0.75, dtype=DOUBLE)
    filled.mul_(h)
    filled = filled * 2
    zeros, ones = torch.zeros_like(h), torch.ones_like(h)
    zeros.add_(squared)
    ones.mul_(h).sub_(1)
    mask = torch.tril(torch.ones_like(h)) * h
    counts = [s["n"].clone(), s["n"] + 1]
    torch._foreach_add_(counts, 0.1)
    clipped = torch.relu(squared - 1) + torch.tril(squared) + F.mse_loss(squared, filled, reduction="none")
    return s, [seen * 2, upside_down * 2, squared * squared.t(), filled, zeros * 2, ones * 2, mask, clipped, *counts]


_TABLE = torch.arange(12.0, dtype=DOUBLE).view(3, 4) / 7
_RETURNED = _TABLE * 2  # the caller may write to what he is given
_OTHER = torch.arange(12.0, dtype=DOUBLE).view(3, 4) - 1.5


@_program({"w": (4, 4)}, {"x": (3, 4)})
def closed_over(c: Any, s: Tree, b: Tree) -> Any:
    """Closed-over tables, ranges of numbers, this rank's number, and a condition."""
    positions = torch.arange(4, dtype=DOUBLE) * 2
    h = b["x"] + _TABLE * 2 - _OTHER + positions
    buffer = torch.zeros(4, dtype=DOUBLE)
    buffer.add_(h.sum(0))
    own = h * (c.axis_index() + 1)
    return {"w": s["w"] + c.pmean(own.t() @ h)}, [buffer * 2, c.psum(own), torch.arange(4) + c.axis_index()]


@_program({"w": (4, 4)}, {"x": (3, 4)}, donate=False)
def condition(c: Any, s: Tree, b: Tree) -> Any:
    """A branch that is not taken."""
    h = torch.tanh(b["x"] @ s["w"])
    chosen = torch.cond(h.sum() > 100, lambda x, y: x * 2, lambda x, y: y * 3, (h * 1.5, h - 1))
    later = torch.sin(b["x"]) @ s["w"]
    return s, [chosen + later, later * 2, chosen.sum()]


@_program({"w": (4, 4), "v": (4, 4), "u": (4, 4)}, {"x": (3, 4)}, world=1)
def alone(c: Any, s: Tree, b: Tree) -> Any:
    """One rank: what sends nothing may return its argument, unless one of the two is changed later."""
    h = torch.tanh(b["x"] @ s["w"])
    mean = c.pmean(h)
    changed = c.psum(h * 2)
    source = h * 3
    other = c.pmean(source)
    source.add_(1)
    kept = source * 2
    doubled = c.pmean(kept)
    doubled.mul_(2)
    return {"w": s["w"] + 1, "v": s["v"] * 2, "u": c.pmean(s["u"] + h.sum())}, [
        mean,
        changed + 1,
        other,
        doubled * 1,
        kept + doubled,
        c.pmean(s["w"]),
        c.psum(s["v"]) * 2,
        c.all_gather(h),
    ]


def copied(tree: Tree) -> Tree:
    """Other memory, same values and strides."""
    if isinstance(tree, dict):
        return {k: copied(v) for k, v in tree.items()}
    span = 1 + sum((size - 1) * stride for size, stride in zip(tree.shape, tree.stride(), strict=True))
    if tree.numel() == 0 or tree.is_conj() or tree.is_neg():
        return tree.clone()
    return tree.as_strided((span,), (1,)).clone().as_strided(tree.shape, tree.stride(), 0)
