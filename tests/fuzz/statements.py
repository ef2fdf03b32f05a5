"""The kinds of statements that random steps are made of: operators, views, writes, draws, collectives."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fuzz.author import Author, Refused, place
from fuzz.exchanges import MESHES

Statement = Callable[[Author], None]

POINTWISE = (
    "{a} * 2", "{a} * 0.5", "-{a}", "{a} + 1", "torch.relu({a})", "{a}.abs()", "{a}.clamp(-2, 2)", "{a}.clone()",
    "{a} * 1.0", "{a} + 0", "torch.where({a} > 0, {a}, -{a})", "({a} > 0).to(F)", "torch.tanh({a})", "torch.sin({a})",
    "{a}.sigmoid()", "torch.exp({a} * 0.1)", "{a}.square() * 0.25", "torch.softmax({a}, -1)", "torch.zeros_like({a})",
    "{a} - {a}.mean()", "torch.ones_like({a}) * 0.5", "{a}.round()", "{a}.flip(0)", "torch.roll({a}, 1, 0)",
    "{a} / 2", "{a}.contiguous()", "{a}.reshape({a}.shape)", "torch.cumsum({a}, 0) * 0.25",
    "torch.cat([torch.empty(0, dtype=F), {a}.t()])",
    "torch.cat([torch.empty(0, dtype=F), {a}.transpose(0, -1)], -1)",
)  # fmt: skip

BINARY = (
    "{a} + {b}", "{a} - {b}", "{a} * {b}", "torch.maximum({a}, {b})", "torch.where(torch.gt({a}, {b}), {a}, {b} * 0.5)",
    "{a} + 0.5 * {b}", "torch.lerp({a}, {b}, 0.25)", "torch.addcmul({a}, {b}, {b}, value=0.25)", "{a} * {b}.tanh()",
    "torch.add({a}, {b}, alpha=2)", "torch.minimum({a}, {b})",
)  # fmt: skip

SHRINKING = ("{a}.sum()", "{a}.sum(0)", "{a}.mean(0)", "{a}.amax(-1)", "{a}.sum(-1)", "{a}.max(0)[0]", "{a}.mean()",
             "{a}.norm()", "{a}.diagonal().sum()", "torch.var_mean({a})[1]", "{a}.prod(0) * 0.25")  # fmt: skip

VIEWS = (
    "{a}.detach()", "{a}[:]", "{a}.view_as({a})", "{a}[1:]", "{a}[0]", "{a}[-1]", "{a}[::2]", "{a}.t()",
    "{a}.t().t()", "{a}.view(-1)", "{a}.unsqueeze(0)", "{a}.squeeze(0)", "{a}.expand(2, *{a}.shape)",
    "{a}.expand(2, *{a}.shape)[1]", "{a}.diagonal()", "{a}[:, 1]", "{a}[:, ::2]", "{a}.transpose(0, -1)",
    "{a}.narrow(0, 1, 2)", "{a}.unfold(0, 2, 1)", "{a}.chunk(2)[1]", "{a}.unbind(0)[1]", "{a}.reshape(-1)",
    "{a}.view(2, -1)", "{a}.contiguous().as_strided((2, 2), (2, 1))", "{a}.as_strided((2, 2), (1, 2))",
    "{a}.select(0, 2)", "{a}[None, :]",
    "{a}.movedim(0, -1)", "{a}.unflatten(0, (2, -1))", "{a}.flatten()", "{a}.view({a}.shape)",
    "{a}.alias() if False else {a}.view_as({a})", "{a}.split(2)[0]", "{a}.mT",
)  # fmt: skip

WRITES = (
    "{a}.mul_(0.5)", "{a}.add_(1)", "{a}.zero_()", "{a}.fill_(0.25)", "{a}.clamp_(-1, 1)", "{a}.neg_()",
    "{a}.relu_()", "{a}.tanh_()", "{a}[0].add_(1)", "{a}[1:] = 0.5", "{a}[-1].zero_()", "{a}.t().mul_(2)",
    "{a}[:, 0] = {a}[:, 1].clone()", "{a}.view(-1)[1:3].sub_(1)", "{a}.diagonal().add_(1)", "{a}[::2].mul_(-1)",
    "{a} += 1", "{a}[0] = {a}[1]", "{a}.index_fill_(0, torch.tensor([1]), 0.5)", "{a}.masked_fill_({a} > 0, 0.25)",
    "{a}.view(-1)[{a}.view(-1) > 1] = 1.0", "{a}.triu_()", "{a}.t().triu_()", "{a}.detach().add_(1)",
    "{a}.requires_grad_(False).mul_(2)", "{a}.exp_().mul_(0.1)",
)  # fmt: skip

WRITES_OF = (
    "{a}.add_({b})", "{a}.copy_({b})", "{a}.mul_({b}).add_(0.5)", "{a}.sub_({b}, alpha=0.5)", "{a}.lerp_({b}, 0.5)",
    "torch.add({b}, 1, out={a})", "{a}[:2] = {b}[:2]", "{a}[0].add_({b}[0])",
    "{a}.index_add_(0, torch.tensor([0, 1]), {b}[:2])", "{a}[torch.tensor([0, 2])] = {b}[:2]",
    "{a}.index_put_((torch.tensor([1, 1]),), {b}[:2], accumulate=True)",
    "{a}.index_copy_(0, torch.tensor([2, 0]), {b}[1:3])",
    "{a}.scatter_(0, torch.ones_like({b}, dtype=torch.int64).cumsum(0) - 1, {b})",
    "{a}.scatter_add_(0, torch.ones_like({b}, dtype=torch.int64), {b})", "{a}.masked_fill_({b} > 0, 0.25)",
    "{a}.addcmul_({b}, {b}, value=0.25)", "{a}.t().copy_({b})", "{a}.unfold(0, 2, 2).copy_({b}.unfold(0, 2, 2))",
    "{a}.diagonal().copy_({b}.diagonal())", "{a}.view(-1)[1:].copy_({b}.reshape(-1)[:-1])",
    "{a}.masked_scatter_({b} > 0, {b})", "{a}.t().add_({b})", "{a}[1:].add_({b}[:-1])",
    "torch.mul({a}, {b}, out={a})", "{a} -= {b} * 0.5", "torch._foreach_add_([{a}], [{b}])",
    "torch._foreach_mul_([{a}], 0.5)", "{a}.unfold(0, 3, 2).copy_({b}.unfold(0, 3, 2))",
    "{a}.swapaxes(0, -1).mul_({b})", "{a}[1:3].copy_({b}[:2])",
)  # fmt: skip

WRITES_OF_ITSELF = ("{a}.add_({b})", "{a}.mul_({b}).add_(0.5)", "{a}.sub_({b}, alpha=0.5)", "{a} -= {b} * 0.5")

WHOLE = (
    "({a} > 0).sum()", "({a} > 0).to(torch.int64)", "{a}.argmax()", "({a} > 0).any().to(torch.int64)",
    "torch.arange({a}.numel())",
)  # fmt: skip

TURNS = (
    "{a}.t_()", "{a}.transpose_(0, -1)", "{a}.unsqueeze_(0)", "{a}.squeeze_(0)", "{a}.squeeze_()",
    "{a}.unsqueeze_(-1)", "{a}.swapaxes_(0, -1)", "{a}.detach_()", "{a}.as_strided_({a}.shape, {a}.stride())",
)  # fmt: skip

PRODUCTS = ("{a} @ {b}", "{a}.t() @ {b}", "{a} @ {b}.t()", "torch.mm({a}, {b})", "torch.matmul({a}, {b})")

ALIKE = (
    "(q @ q.t()) * 0.25", "(q.t() @ (q @ q.t() * 0.25)).t()", "torch.tanh(q) @ q.mT", "(q @ q.t()).mul_(0.25)[:2]",
    "q - (q @ q.t() @ q) * 0.25", "torch.mm(q, q.t()).max(0)[0] + q.sum()", "q + (q @ q.mT).sum(0, True).tanh().sum()",
    "(q @ q.t()) * {s}.mean()", "q - (q @ (q.t() * {s}.sum() * 0.25) @ q) * 0.25",
)  # fmt: skip

ADDED = (
    "{t}.add_({a} @ {b})", "{t} += {a} @ {b}", "{t}.add_({p})", "{t}.addmm_({a}, {b})", "{t}.sub_({a} @ {b})",
    "{t}.add_({p}, alpha=0.5)", "{t}.copy_({a} @ {b})", "torch.mm({a}, {b}, out={t})", "{t}.t().add_({a} @ {b})",
)  # fmt: skip

DRAWS = (
    "torch.rand(4, 4).to(F)", "torch.randn(4).to(F)", "torch.randint(0, 4, (4, 4)).to(F)",
    "torch.randint(-2, 3, (4,)).to(F)", "torch.bernoulli(torch.full((4, 4), 0.5)).to(F)",
    "torch.bernoulli(torch.full((4,), 0.5, dtype=torch.float64)).to(F)", "kit.drop({a}.contiguous(), 0.5)",
    "kit.drop({a}.contiguous().t(), 0.5)", "torch.empty(4, 4).bernoulli_(0.5).to(F)",
    "torch.rand_like(torch.zeros(4, 4)).to(F)", "torch.randperm(4).to(F)",
    "torch.empty(4, 4, dtype=torch.float64).uniform_().to(F)", "torch.empty(4).normal_().to(F)",
    "kit.drop({a}.contiguous(), 0.5)[:2]", "(torch.rand(4) > 0.5).to(F)",
)  # fmt: skip

KEYED = (
    "(fdp.random.normal(fdp.random.key({k}), (4, 4)) * 4).round().to(F)",
    "fdp.random.uniform(fdp.random.key({k}), (4,)).to(F)",
    "fdp.random.randint(fdp.random.key({k}), (4, 4), -2, 3).to(F)",
    "fdp.random.bernoulli(fdp.random.key({k}), 0.5, (4, 4)).to(F)",
    "fdp.random.randint(fdp.random.fold_in(fdp.random.key({k}), fdp.axis_index()), (4,), 0, 5).to(F)",
    "fdp.random.permutation(fdp.random.key({k}), 4).to(F)",
)  # fmt: skip

FORBIDDEN = (
    "{a}.data = {a}.data * 0.5",
    "{a}.data = {b}.data",
    "{a}.set_({b})",
    "{a}.data.mul_(0.5)",
    "{a}.resize_(2, 2)",
)


def one(templates: tuple[str, ...]) -> Statement:
    """A new value from one."""

    def write(author: Author) -> None:
        author.write(f"{(v := author.fresh())} = {author.rng.choice(templates).format(a=author.pick())}", {v: None})

    return write


def binary(author: Author) -> None:
    a = author.pick()
    b = author.pick(author.env[a].shape)
    author.write(f"{(v := author.fresh())} = {author.rng.choice(BINARY).format(a=a, b=b)}", {v: None})


def broadcasted(author: Author) -> None:
    a, b = author.pick(dims=2), author.pick(dims=author.rng.choice([0, 1]))
    author.write(f"{(v := author.fresh())} = {a} {author.rng.choice('+-*')} {b}", {v: None})


def write_alone(author: Author) -> None:
    author.write(author.rng.choice(WRITES).format(a=author.pick(writable=True)))


def write_of(author: Author) -> None:
    a = author.pick(writable=True)
    b = author.pick(author.env[a].shape, other=a)
    # What an operator makes of memory that it reads and writes is defined if it reads each element before writing it.
    shared = place(author.env[a]) == place(author.env[b])
    if shared and author.env[a].stride() != author.env[b].stride():
        raise Refused
    author.write(author.rng.choice(WRITES_OF_ITSELF if shared else WRITES_OF).format(a=a, b=b))


def turn(author: Author) -> None:
    """An in-place change of shape, mostly behind a second name of the same memory."""
    a = author.pick(writable=author.rng.random() < 0.6)
    whose = place(author.env[a]) in author.fixed
    if whose or author.rng.random() < 0.6:
        names = [author.fresh() for _ in range(2)]
        text = author.rng.choice(["{a}.detach()", "{a}[:]", "{a}.view_as({a})", "{a}.clone()"]).format(a=a)
        author.write(f"{names[0]} = {text}", {names[0]: None})
        author.write(f"{names[1]} = {names[0]}[:]", {names[1]: None})
        a = names[0]
    if place(author.env[a]) in author.inputs:
        author.traits.add("turns an input")
    author.traits.add("turns")
    author.write(author.rng.choice(TURNS).format(a=a))


def product(author: Author) -> None:
    a = author.pick(dims=2)
    author.write(
        f"{(v := author.fresh())} = {author.rng.choice(PRODUCTS).format(a=a, b=author.pick(dims=2))}", {v: None}
    )


def alike(author: Author) -> None:
    """The same of several matrices: where they are sharded, each rank may compute it of another one."""
    names = [n for n in author.tensors(lambda x: x.dtype == torch.float32 and x.dim() == 2) if not author.varies(n)]
    if not names:
        raise Refused
    shape = author.env[author.rng.choice(names)].shape
    names = [n for n in names if author.env[n].shape == shape]
    chosen = author.rng.sample(names, min(len(names), author.rng.randint(2, 4)))
    if len(chosen) < 2:
        raise Refused
    made = [author.fresh() for _ in chosen]
    text = author.rng.choice(ALIKE).format(s=author.pick())
    author.write(f"{', '.join(made)} = [{text} for q in ({', '.join(chosen)})]", dict.fromkeys(made))
    if author.rng.random() < 0.3:  # at the end nothing shows what was read meanwhile
        author.write(f"{(v := author.fresh())} = {' + '.join(f'{each}.sum()' for each in made)}", {v: None})
        author.write("; ".join(f"{one}.copy_({q})" for one, q in zip(made, chosen, strict=True)))


def product_with_vector(author: Author) -> None:
    author.write(f"{(v := author.fresh())} = {author.pick(dims=2)} @ {author.pick(dims=1)}", {v: None})


def added(author: Author) -> None:
    """A product that is added in place."""
    a, b = author.pick(dims=2), author.pick(dims=2)
    t = author.pick(dims=2, writable=True)
    products = [line.split(" = ")[0] for line in author.lines if " @ " in line and " = " in line and line[0] != " "]
    products = [p for p in products if p in author.names]
    p = author.rng.choice(products) if products else a
    text = author.rng.choice(ADDED)
    if ("addmm_" in text or "out=" in text) and place(author.env[t]) in (place(author.env[a]), place(author.env[b])):
        raise Refused  # PyTorch does not say what that computes
    author.write(text.format(t=t, a=a, b=b, p=p))


def draw(author: Author) -> None:
    text = author.rng.choice(DRAWS)
    author.write(f"{(v := author.fresh())} = {text.format(a=author.pick())}", {v: True}, draws=True)


def keyed(author: Author) -> None:
    text = author.rng.choice(KEYED).format(k=author.rng.choice(["3", "11", "n"] if "n" in author.env else ["3", "11"]))
    author.write(f"{(v := author.fresh())} = {text}", {v: None})


def whole(author: Author) -> None:
    """Whole numbers and truth values."""
    a = author.pick()
    text = author.rng.choice(WHOLE)
    author.write(f"{(v := author.fresh())} = {text.format(a=a)}", {v: None})


def whole_again(author: Author) -> None:
    a = author.pick(dtype=torch.int64)
    text = author.rng.choice(["{a} + 1", "{a} % 3", "{a}.to(F) * 0.5", "fdp.psum({a})", "{a} * 2", "fdp.pmax({a})"])
    author.write(f"{(v := author.fresh())} = {text.format(a=a)}", {v: False if "fdp" in text else None})


def indexed(author: Author) -> None:
    a, i = author.pick(dims=2), author.pick(dtype=torch.int64)
    text = author.rng.choice(
        ["{a}[({i} % {a}.shape[0]).reshape(-1)]", "{a}.index_select(0, {i}.reshape(-1)[:2] % {a}.shape[0])"]
    )
    author.write(f"{(v := author.fresh())} = {text.format(a=a, i=i)}", {v: None})


def conditional(author: Author) -> None:
    a = author.pick()
    yes, no = author.rng.sample(
        ["lambda q: q * 2", "lambda q: q + 1", "lambda q: -q", "lambda q: q.relu()", "lambda q: q.clone()"], 2
    )
    flag = author.rng.choice(["{a}.sum() > 0", "{b}.reshape(-1)[0] > 0"]).format(a=a, b=author.pick(dims=1))
    author.write(f"{(v := author.fresh())} = kit.cond({flag}, {yes}, {no}, ({a},))", {v: None})


def collective(author: Author) -> None:
    """One message or several, of what varies if there is such a thing."""
    name = author.rng.choice(["pmean"] * 6 + ["psum"] * 3 + ["pmax", "pmin", "all_gather", "broadcast"])
    names = author.tensors(lambda x: x.dtype == torch.float32)
    varying = [n for n in names if author.varies(n)] or names
    count = author.rng.choice([1, 1, 1, 2, 2, 3])
    chosen = [author.rng.choice(varying[-6:]) for _ in range(count)]
    made = [author.fresh() for _ in chosen]
    axis = _dimension(author)
    more = f", axis={axis!r}" if axis else ""
    if name == "broadcast" and author.rng.random() < 0.5:
        more += f", root=fdp.axis_size({repr(axis) if axis else ''}) - 1"
    weighted = name == "pmean" and author.rng.random() < 0.1
    if weighted:
        raise Refused
    given = chosen[0] if count == 1 else f"({', '.join(chosen)})"
    author.write(f"{', '.join(made)} = fdp.{name}({given}{more})", dict.fromkeys(made, axis is not None))


def _dimension(author: Author) -> str | None:
    """A dimension of the mesh, or none; where it is given, values still differ between some ranks."""
    ranks = author.env["fdp"].axis_size()
    if ranks not in MESHES or author.rng.random() < 0.4:
        return None
    return author.rng.choice([name for name, _ in MESHES[ranks]])


def equal_on_all(author: Author) -> None:
    """Along one dimension after the other: then it is equal on all ranks."""
    ranks = author.env["fdp"].axis_size()
    first, second = author.rng.sample([name for name, _ in MESHES[ranks]], 2)
    one, two = author.rng.choices(["psum", "pmean", "pmax", "pmin"], k=2)
    names = author.tensors(lambda x: x.dtype == torch.float32)
    a = author.rng.choice([n for n in names if author.varies(n)][-6:] or names)
    inner = f"fdp.{one}({a}, axis={first!r})"
    author.write(f"{(v := author.fresh())} = fdp.{two}({inner}, axis={second!r})", {v: False})


def exchange(author: Author) -> None:
    """A collective that gives each rank a part of its own."""
    name = author.rng.choice(
        ["psum_scatter"] * 3 + ["pmean_scatter", "all_to_all", "all_to_all", "ppermute", "ppermute"]
    )
    dimension = _dimension(author)
    ranks = author.env["fdp"].axis_size(dimension)
    axis = author.rng.choice([0, 0, 1])
    names = author.tensors(lambda x: x.dtype == torch.float32 and x.dim() > axis and x.shape[axis] % ranks == 0)
    if not names:
        raise Refused
    chosen = [author.rng.choice(names[-6:]) for _ in range(author.rng.choice([1, 1, 2]))]
    made = [author.fresh() for _ in chosen]
    if name == "ppermute":
        ends = author.rng.sample(range(ranks), ranks)
        more = f"{list(zip(ends, author.rng.sample(range(ranks), ranks), strict=True))[: author.rng.randint(1, ranks)]}"
    else:
        more = f"{axis}, {author.rng.choice([0, axis])}" if name == "all_to_all" else f"{axis}"
    if dimension:
        more += f", {'axis_name' if 'scatter' in name else 'axis'}={dimension!r}"
    given = chosen[0] if len(chosen) == 1 else f"({', '.join(chosen)})"
    author.write(f"{', '.join(made)} = fdp.{name}({given}, {more})", dict.fromkeys(made, True))


def forbidden(author: Author) -> None:
    """What a step may be refused for."""
    text = author.rng.choice(FORBIDDEN)
    a = author.pick(writable=True)
    author.write(text.format(a=a, b=author.pick(author.env[a].shape)))
    author.traits.add("data setter")


STATEMENTS: tuple[tuple[float, Statement], ...] = (
    (4, one(POINTWISE)), (4, binary), (2, broadcasted), (2, one(SHRINKING)), (5, one(VIEWS)), (4, write_alone),
    (5, write_of), (2, turn), (4, product), (1, product_with_vector), (4, added), (1.5, draw),
    (0.7, keyed), (0.7, whole), (0.7, whole_again), (0.5, indexed), (0.15, conditional), (5, collective),
    (2, exchange),
)  # fmt: skip
"""What may be written, and how often."""

ON_A_MESH: tuple[tuple[float, Statement], ...] = ((2, equal_on_all),)
"""Likewise, where ranks are on a mesh."""

OF_PARTS: tuple[tuple[float, Statement], ...] = ((3, alike),)
"""Likewise, where state is sharded."""
