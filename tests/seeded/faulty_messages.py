"""Steps that meet what an emitter decides of messages: what shares a bucket, what is packed when, what waits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from faulty_program import DOUBLE, Program, Tree, indices, registering

PROGRAMS: dict[str, Program] = {}
_program = registering(PROGRAMS)


# --- collectives ----------------------------------------------------------------------------------------


@_program({"w": (5, 5)}, {"x": (4, 5), "n": indices(50, 9)}, cap=0.001, donate=False)
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
    """Gradients that are sent in two bytes and added up in four."""
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


@_program({"w": (4, 6)}, {"x": (6, 4), "n": indices(60, 12)}, donate=False)
def parts_of_ranks(c: Any, s: Tree, b: Tree) -> Any:
    """Parts of sums and means that share messages, parts that are exchanged, and values that are sent to one rank."""
    h = torch.tanh(b["x"] @ s["w"])
    one, two = c.psum_scatter((h.t() * 2, h + 1), axis=1)
    three, four = c.pmean_scatter((h @ h, h.sum(1)))
    counts = c.psum_scatter(b["n"] * 2)
    turned, kept = c.all_to_all(h * 3, 0, 1), c.all_to_all(h.t(), 1, 1)
    there, back = c.ppermute(h * 4, [(0, 1), (1, 0)]), c.ppermute(h * 5, [(1, 0)])
    also = c.ppermute(h - 1, [(1, 0)])
    again = c.psum(c.psum_scatter(one) * 2)
    return s, [one * 2, two, three.sum(), four + 1, counts, turned, kept.sum(0), there - back, also, again, h * 2]


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
