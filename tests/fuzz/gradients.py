"""Statements that differentiate: losses as functions with lines of their own, and the ways to their gradients."""

from __future__ import annotations

import torch

from fuzz.author import Author, Refused, place
from fuzz.dtypes import through
from fuzz.outside import read
from fuzz.statements import (
    BINARY,
    DRAWS,
    POINTWISE,
    SHRINKING,
    VIEWS,
    Statement,
    binary,
    broadcasted,
    one,
    product,
    product_with_vector,
    write_alone,
    write_of,
)

_INSIDE: tuple[tuple[float, Statement], ...] = (
    (4, one(POINTWISE)), (4, binary), (2, broadcasted), (1, one(SHRINKING)), (3, one(VIEWS)), (4, product),
    (1, product_with_vector), (1, write_alone), (1, write_of),
)  # fmt: skip

_SAMPLES = (
    "(row @ p).sum()", "(row @ p).tanh().sum()", "((row @ p) * row).sum()", "((row @ p).relu() ** 2).sum() * 0.25",
    "(row @ p).amax() + (p * p).sum()",
)  # fmt: skip

assert BINARY and DRAWS  # used by the statements above


def loss(author: Author, params: list[str], batch: str | None = None, messages: bool = True, aux: bool = False,
         inner: str | None = None) -> tuple[str, list[str]]:  # fmt: skip
    """Write a loss function of the values with these names.

    Returns:
        Its name and its lines.
    """
    name = author.fresh().replace(author.prefix, "loss")
    sub = Author(author.rng, author.exact, dict(author.env), prefix=f"{name}_")
    sub.varying = author.varying
    sub.outside = tuple(holder for holder in author.outside if messages or not holder.equal)
    own = []
    for index, param in enumerate(params):
        local = f"p{index}"
        sub.env[local] = author.env[param].detach().clone().requires_grad_()
        own.append(local)
    for other in author.names:
        sub.add(other, author.varies(other), fixed=True)
    for local in own:
        sub.add(local, False)
        sub.fixed.add(place(sub.env[local]))
    if batch is not None:
        sub.env["piece"] = author.env[batch][:2]
        sub.add("piece", True, fixed=True)
    for local in own:
        sub.names += [local, local]  # more often
    sub.of_types = author.of_types
    weights, kinds = zip(*_INSIDE, *([(0.7, through)] if author.of_types else []), strict=True)
    for _ in range(author.rng.randint(1, 6)):
        kind = author.rng.choices(kinds, weights)[0]
        try:
            if messages and author.rng.random() < 0.08:
                a = sub.pick()
                sub.write(f"{(v := sub.fresh())} = fdp.{author.rng.choice(['pmean', 'psum'])}({a})", {v: False})
            elif sub.outside and author.rng.random() < 0.15:
                read(sub)
            elif author.rng.random() < 0.06:
                sub.write(f"{(v := sub.fresh())} = kit.drop({sub.pick()}.contiguous(), 0.5)", {v: True}, draws=True)
            else:
                kind(sub)
        except Refused:
            continue
    grown = [n for n in sub.names if n not in own and n not in author.names and isinstance(sub.env[n], torch.Tensor)
             and sub.env[n].requires_grad and sub.env[n].is_floating_point()]  # fmt: skip
    terms = [f"{author.rng.choice(own)}.sum()"] if author.rng.random() < 0.4 or not grown else []
    if inner is not None:
        terms.append(f"(fdp.grad({inner})(p) * p).sum()")
    for term in author.rng.sample(grown[-4:], min(len(grown[-4:]), author.rng.randint(1, 2))):
        terms.append(
            author.rng.choice(["{t}.sum()", "({t} * {t}).sum() * 0.25", "{t}.mean()", "{t}.amax()"]).format(t=term)
        )
    value = " + ".join(terms)
    if messages and author.rng.random() < 0.15:
        value = f"fdp.pmean({value})"
    given = "p, piece" if batch is not None else "p"
    unpack = [f"p{i} = p" if len(params) == 1 else f'p{i} = p["{param}"]' for i, param in enumerate(params)]
    extra = f", {author.rng.choice(grown)}" if aux and grown else (", p0" if aux else "")
    back = f"return ({value}){extra}"
    return name, [f"def {name}({given}):", *(f"    {line}" for line in [*unpack, *sub.lines, back])]


def _params(author: Author) -> list[str]:
    def fits(x: torch.Tensor) -> bool:
        return x.dtype == torch.float32 and x.numel() > 0

    names = sorted(set(author.tensors(fits)))
    replicated = [name for name in names if not author.varies(name)]
    if not replicated:
        raise Refused
    return author.rng.sample(replicated, min(len(replicated), author.rng.choice([1, 1, 2, 3])))


def _tree(params: list[str]) -> str:
    return params[0] if len(params) == 1 else "{" + ", ".join(f'"{p}": {p}' for p in params) + "}"


def _taken_apart(author: Author, grads: str, params: list[str]) -> tuple[list[str], dict[str, bool]]:
    if len(params) == 1:
        return [], {grads: False}
    names = [author.fresh() for _ in params]
    taken = ", ".join(f'{grads}["{p}"]' for p in params)
    return [f"{', '.join(names)} = {taken}"], dict.fromkeys(names, False)


def averaged(author: Author) -> None:
    """`fdp.value_and_grad` and `fdp.grad`, with what `has_aux` is for."""
    params = _params(author)
    aux = author.rng.random() < 0.2
    name, lines = loss(author, params, aux=aux)
    grads, value = author.fresh(), author.fresh()
    more, made = _taken_apart(author, grads, params)
    if aux:
        other = author.fresh()
        text = f"({value}, {other}), {grads} = fdp.value_and_grad({name}, has_aux=True)({_tree(params)})"
        made = {value: None, other: None, **made}  # type: ignore[dict-item]
    elif author.rng.random() < 0.3:
        text = f"{grads} = fdp.grad({name})({_tree(params)})"
    else:
        text = f"{value}, {grads} = fdp.value_and_grad({name})({_tree(params)})"
        made = {value: None, **made}  # type: ignore[dict-item]
    author.write("\n".join([*lines, text, *more]), made, draws="kit.drop" in "".join(lines))


def accumulated(author: Author) -> None:
    """Microbatches."""
    params, batch = _params(author), "x"
    if author.env["x"].dim() == 0 or author.env["x"].shape[0] != 4:
        raise Refused
    name, lines = loss(author, params, batch, messages=False)
    grads, value = author.fresh(), author.fresh()
    more, made = _taken_apart(author, grads, params)
    parts = author.rng.choice([2, 2, 4])
    text = (
        f"{value}, {grads} = fdp.accumulate(fdp.value_and_grad({name}), microbatches={parts})({_tree(params)}, {batch})"
    )
    made = {value: None, **made}  # type: ignore[dict-item]
    author.write("\n".join([*lines, text, *more]), made, draws="kit.drop" in "".join(lines))


def per_sample(author: Author) -> None:
    """`torch.func.grad` under `vmap`."""
    w, x = author.pick((4, 4)), author.pick(dims=2)
    grads = author.fresh()
    text = (
        f"{grads} = torch.func.vmap(torch.func.grad(lambda p, row: {author.rng.choice(_SAMPLES)}), (None, 0))({w}, {x})"
    )
    after = author.fresh()
    author.write(f"{text}\n{after} = {grads}.{author.rng.choice(['mean(0)', 'sum(0)', 'amax(0)'])}", {after: None})


def twice(author: Author) -> None:
    """The gradient of a function of a gradient."""
    w = _params(author)[:1]
    inner, lines = loss(author, w, messages=False)
    outer, more = loss(author, w, messages=False, inner=inner)
    grads = author.fresh()
    text = f"{grads} = fdp.grad({outer})({w[0]})"
    author.write("\n".join([*lines, *more, text]), {grads: False}, draws="kit.drop" in "".join(lines + more))


def by_autograd(author: Author) -> None:
    """`torch.autograd.grad`: this rank's own gradient."""
    w = [author.rng.choice(author.tensors(lambda x: x.dtype == torch.float32) or ["x"])]
    name, lines = loss(author, w)
    leaf, grads = author.fresh(), author.fresh()
    text = [f"{leaf} = {w[0]}.detach().clone().requires_grad_()", f"({grads},) = kit.grad({name}({leaf}), [{leaf}])"]
    author.write("\n".join([*lines, *text]), {grads: None}, draws="kit.drop" in "".join(lines))


def descend(author: Author) -> None:
    """A step down a gradient, in place of a clone or not."""
    grads = [n for n in author.names if isinstance(author.env[n], torch.Tensor) and not author.varies(n)
             and author.env[n].dtype == torch.float32][-6:]  # fmt: skip
    if not grads:
        raise Refused
    g = author.rng.choice(grads)
    w = author.pick(author.env[g].shape, other=g)
    v = author.fresh()
    if author.rng.random() < 0.5:
        author.write(f"{v} = {w} - 0.25 * {g}", {v: None})
    else:
        author.write(f"{v} = {w}.clone()\n{v}.sub_({g}, alpha=0.5)", {v: None})


GRADIENTS: tuple[tuple[float, Statement], ...] = (
    (4, averaged), (1, accumulated), (1, per_sample), (1, twice), (1, by_autograd), (3, descend),
)  # fmt: skip
"""What may be written, and how often."""
