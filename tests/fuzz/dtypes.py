"""Statements on values that are not float32: sixteen bits, whole numbers that wrap, positions, numbers that are read.

What is rounded to few bits has to be exact before, or it is rounded otherwise in the wider of the two runs that a
program is compared with. So values of a program that is not exact get in only as numbers of the type that it runs in.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from fuzz.author import Author, Refused, overlaps_itself, place
from fuzz.exchanges import MESHES
from fuzz.statements import VIEWS, Statement

NARROW = ("torch.bfloat16", "torch.float16")
WHOLE = ("torch.uint8", "torch.int8", "torch.int16", "torch.int32", "torch.int64")
TYPES = (*NARROW, *WHOLE, *NARROW, "torch.float64", "torch.bool")

FIRST = (
    "torch.arange(16).reshape(4, 4).to({d})", "torch.full((4,), 3, dtype={d})", "torch.tensor(2, dtype={d})",
    "torch.arange(8).to({d})[::2]", "torch.tensor([250, 3, 7, 129]).to({d})", "torch.zeros(4, 4, dtype={d})",
    "(torch.arange(16) * 37 - 90).reshape(4, 4).to({d}).t()",
)  # fmt: skip
"""State that a program may begin with."""

POSITIONS = (
    "torch.arange({n}).to({d})", "torch.arange({n}, dtype={d})", "torch.arange({k}, {k} + 16).to({d}).view(4, 4)",
    "(torch.arange(16) * {k}).to({d}).view(4, 4)", "torch.arange(16).to({d}).view(4, 4) * {c}",
    "torch.full((4, 4), {c}).to({d})", "torch.full((4,), {c}, dtype={d})", "torch.ones(4, dtype={d}) * {c}",
    "torch.arange({k} + 4).to({d})[-4:]", "(torch.arange(4).to({d}) + {c}) * {c}", "torch.eye(4, dtype={d})",
    "torch.arange(4 * {k}).to({d})[::{k}] * {c}", "torch.linspace(0, 3, 4).to({d})", "torch.tensor({c}).to({d})",
    "torch.arange(4, dtype=torch.int32).mul({k}).mul({k}).to({d})", "torch.ones((), dtype={d}) * {k}",
    "(torch.arange({k}, {k} + 4) << 4).to({d})", "torch.arange({k} + 4).to({d}).cumsum(0)[-4:]",
    "torch.linspace(0, 7, {k}).long()[::{k} // 3]", "(torch.arange(0, 10, 0.3) * 10).long()[-8:]",
    "torch.linspace(4.3, -3, 16, dtype={d}).view(4, 4)", "torch.arange(0, 4.8, 0.3, dtype={d}).view(4, 4)",
    "torch.arange({k} + 4).to({e}).to({d})[-4:]", "(torch.arange(4).to({e}) * {k}).to({d})",
)  # fmt: skip

CASTS = (
    "{a}.to(torch.bfloat16)", "{a}.half()", "{a}.clamp(0, 200).to(torch.uint8)", "{a}.clamp(-100, 100).to(torch.int8)",
    "{a}.to(torch.int32)", "{a}.to(torch.int16)", "{a}.double()", "{a} > 0", "{a}.bool()", "{a}.long()",
)  # fmt: skip
"""Of float32."""

OF_ONE = (
    "{a} + 1", "{a} * 3", "{a} - 7", "{a} // 2", "{a} % 5", "{a} << 1", "{a} >> 1", "~{a}", "-{a}", "{a} * 0.5",
    "{a}.abs()", "{a}.clamp(-2, 2)", "{a}.clamp(max={c})", "{a}.sum()", "{a}.sum(0)", "{a}.cumsum(0)", "{a}.amax(0)",
    "{a}.argmax()", "{a}.argmin()", "{a}.max(0)[0]", "{a}.prod()", "{a}.flip(0)", "{a}.square()", "{a}.any()",
    "{a}.all()", "torch.relu({a})", "{a} / 2", "{a} / 3", "{a} * {c}", "{a} + {c}", "{a} - {c}", "{c} - {a}",
    "{a} & 3", "{a} ^ 1", "{a}.to(F)", "{a}.to(F) * 0.5", "torch.where({a} > 1, {a}, 0)", "torch.zeros_like({a})",
    "{a} == 1", "{a} > {c}", "{a}.sum(dtype={w})", "{a}.mean()", "{a} ** 2", "{a}.sign()", "{a}.clone()", "{a}.t()",
    "{a}.sort(0)[0]", "{a}.amin(-1)", "{a}.logical_not()", "{a}.masked_fill({a} > 1, 1)", "{a}.repeat(2)",
    "{a} + {c} * {a}", "torch.add({a}, 1, alpha=3)", "torch.rsub({a}, 3, alpha=2)",
    "{a}.sub(1, alpha=2)", "{a}.cumprod(0)", "{a}.contiguous()",
    "{a}.count_nonzero()", "{a}.ne(0).sum(0)", "torch.ones_like({a}) * {k}", "torch.full_like({a}, 3)",
    "{a}.rsub({k})", "torch.floor({a} * 0.5)", "{a}.roll(1, 0)", "{a}.trunc()", "{a}.sqrt()",
    "{a}.reshape(-1).unfold(0, 2, 1).sum(1)", "{a}.any(0)", "{a}.to(torch.int64).bitwise_left_shift({k} % 40)",
    "{a}.fmod(3)",
    "torch.lerp({a}, {a} * 2, torch.tensor(0.25))",
)  # fmt: skip

OF_TWO = (
    "{a} + {b}", "{a} - {b}", "{a} * {b}", "torch.maximum({a}, {b})", "torch.minimum({a}, {b})", "{a} == {b}",
    "torch.where({a} > {b}, {a}, {b})", "torch.add({a}, {b}, alpha=2)", "{a} & {b}", "{a} | {b}", "{a} ^ {b}",
    "{a} // ({b} % 7 + 1)", "{a} % ({b} % 7 + 1)", "{a} < {b}", "torch.cat([{a}.reshape(-1), {b}.reshape(-1)])",
    "torch.div({a}, {b} % 7 + 1, rounding_mode='trunc')", "torch.where({a}.bool(), {b}, 1)", "{a} * {b}.to({a}.dtype)",
    "torch.sub({a}, {b}, alpha=3)", "torch._foreach_add([{a}], [{b}])[0]", "torch._foreach_mul([{a}, {b}], 3)[0]",
    "{a} @ {b}", "torch.addcmul({a}, {a}, {b}, value=2)", "{a}.type_as({b}) if {b}.dtype != torch.bool else ~{b}",
    "{a}.masked_fill({b} > 0, 2)", "torch.stack([{a}, {b}])", "{a} << ({b} % 4)", "{a} / ({b} % 7 + 1)",
)  # fmt: skip

WRITTEN = (
    "{a}.add_(1)", "{a}.mul_(2)", "{a}[0] = 3", "{a}.fill_(1)", "{a}.zero_()", "{a}.neg_()", "{a}.clamp_(-3, 3)",
    "{a}.bitwise_xor_(1)", "torch._foreach_add_([{a}], 1)", "torch._foreach_mul_([{a}], 2)", "{a}.cumsum_(0)",
    "{a}.floor_divide_(2)", "{a}.remainder_(3)", "{a} += 1", "{a}[1:] *= 2", "{a}[{a} > 1] = 1",
    "{a}.add_(3, alpha=2)", "{a}.masked_fill_({a} > 2, 0)", "{a}.mul_({c})", "{a}.add_({c})", "{a}.logical_not_()",
    "{a}.t().add_(2)", "{a}[-1] = {k}", "{a}.sub_({k})", "torch.add({a}, 1, out={a})",
    "{a}.index_fill_(0, torch.tensor([1]), 2)",
)  # fmt: skip

WRITTEN_OF = (
    "{a}.add_({b})", "{a}.copy_({b})", "{a}.mul_({b})", "{a} += {b}", "{a} -= {b}", "{a}[:2] = {b}[:2]",
    "{a}.index_add_(0, torch.tensor([0, 1]), {b}[:2])", "{a}.masked_fill_({b} > 0, 1)", "{a}.sub_({b}, alpha=2)",
    "{a}.index_put_((torch.tensor([1, 1]),), {b}[:2], accumulate=True)", "torch._foreach_add_([{a}], [{b}])",
    "{a}.scatter_(0, torch.zeros_like({b}, dtype=torch.int64), {b})", "torch.add({b}, 1, out={a})",
    "{a}.bitwise_or_({b})", "{a}.scatter_add_(0, torch.ones_like({b}, dtype=torch.int64), {b})",
    "torch._foreach_copy_([{a}], [{b}])", "{a}.addcmul_({b}, {b}, value=2)", "{a}[{b} > 1] = 0", "{a}.t().copy_({b})",
    "torch.mul({a}, {b}, out={a})", "{a}.fill_({b}.sum().to({a}.dtype))",
)  # fmt: skip

PLACES = (
    "{a}[({i}.long() % {a}.shape[0]).reshape(-1)]", "{a}.index_select(0, {i}.reshape(-1).long() % {a}.shape[0])",
    "{a}.reshape(-1)[({i}.view(-1) * {k}).long() % {a}.numel()]",
    "{a}.gather(0, {i}.long().expand_as({a}) % {a}.shape[0])",
    "torch.nn.functional.one_hot({i}.reshape(-1)[:4].long() % 4, 4).to(F)",
    "{a}.reshape(-1)[{i}.view(-1).long().clamp(0, 3)]",
    "{a}[torch.arange({k} + 4).to({d})[-4:].long() % {a}.shape[0]]",
    "{a}[{i}.view(-1).long().clamp(-{a}.shape[0], -1)]", "torch.where({i}.expand_as({a}) > {c}, {a}, 0)",
    "{a}.take({i}.long() % {a}.numel())", "{a} * ({i} > {c})",
    "{a}[(torch.arange(4).to({d}) * {k}).long() % {a}.shape[0]]", "{a}.masked_fill({i}.expand_as({a}) < {c}, 0)",
)  # fmt: skip
"""Of a value, and another one that says where."""

READ = (
    "{a} * {s}.item()", "{a} + {s}.item()", "{a} - {s}.item()", "{a}.clamp(max={s}.item())", "{a} * (1 - {s}.item())",
    "torch.add({a}, {a}, alpha={s}.item())", "{a} * (0.5 * {s}.item() + 1)", "{s}.item() - {a}", "{a} > {s}.item()",
    "torch.full((4,), {s}.item(), dtype={d})", "torch._foreach_mul([{a}], {s}.item())[0]", "{a}.clamp(min={s}.item())",
    "{a} / (abs({s}.item()) + 1)", "{a} + {s}.to(torch.int64).item()", "{a} * {s}.to(torch.int64).item()",
)  # fmt: skip
"""Of a value and a number that is read."""

THROUGH = (
    "({a}.bfloat16() * 2).to(F)", "{a}.half().to(F)", "({a}.bfloat16() @ {b}.bfloat16()).to(F)",
    "({a}.half() @ {b}.half().t()).to(F)", "{a}.double().square().to(F) * 0.25", "({a}.half() * {b}.half()).to(F)",
    "({a}.bfloat16() + {b}.bfloat16()).to(F)", "torch.where({a}.half() > 1, {a}, 0)",
    "{a} * {b}.detach().to(torch.int32)", "{a}.bfloat16().sum(0).to(F)", "({a}.bfloat16().relu() + {b}).to(F)",
    "({a}.bfloat16() * {b}).to(F)", "torch.cat([{a}.half(), {b}.half()]).to(F)",
    "{a}.bfloat16()[torch.arange(2)].to(F)", "({a}.half() / 4).to(F)", "({a}.bfloat16().mean(-1) * 2).to(F)",
    "{a}.bfloat16().amax(0).to(F)",
)  # fmt: skip
"""Of float32, through other dtypes and back: gradients take the same way."""

NOT_SENT = (torch.bool, torch.int16)
"""Sums and extremes over ranks are not defined for these."""

SENT = ("psum", "pmax", "pmin", "broadcast", "all_gather", "pmean")

_CONSTANTS = ("0.1", "0.5", "1.5", "-2", "3", "7.3", "0.3", "100", "1e-3", "257")
_NUMBERS = ("3", "17", "60", "129", "300")


def other(x: torch.Tensor) -> bool:
    return x.dtype != torch.float32


def _pick(author: Author, fits: Callable[[torch.Tensor], bool], writable: bool = False) -> str:
    """A value that fits, later ones more often."""
    names = author.tensors(fits, writable)
    if not names:
        raise Refused
    return author.rng.choice(names[-5:] if author.rng.random() < 0.6 else names)


def _filled(author: Author, text: str, **names: str) -> str:
    rng = author.rng
    return text.format(
        d=rng.choice(TYPES), e=rng.choice(NARROW + WHOLE), w=rng.choice(WHOLE), c=rng.choice(_CONSTANTS),
        k=rng.choice(_NUMBERS), n=rng.choice(["4", "8", "16"]), **names,
    )  # fmt: skip


def _let(author: Author, text: str, *operands: str) -> None:
    """Write a new value. What is float32 though no operand is has to be of the type that the program runs in."""
    if re.search("<<|>>", text) and any(author.env[name].dtype == torch.bool for name in operands):
        raise Refused  # eager shifts truth values, and torch's tracer refuses to
    if not any(author.env[name].dtype == torch.float32 for name in operands):
        state = torch.get_rng_state()
        try:
            value = eval(text, author.env)
        except Exception as error:
            raise Refused from error
        finally:
            torch.set_rng_state(state)
        if value.dtype == torch.float32:
            text = f"({text}).to(F)"
    author.write(f"{(v := author.fresh())} = {text}", {v: None})


def _taken(author: Author, x: torch.Tensor) -> bool:
    """Whether a float32 value may be rounded to few bits, compared, and so on."""
    return author.exact or other(x)


def positions(author: Author) -> None:
    _let(author, _filled(author, author.rng.choice(POSITIONS)))


def cast(author: Author) -> None:
    if not author.exact:
        raise Refused
    _let(author, author.rng.choice(CASTS).format(a=(a := author.pick())), a)


def of_one(author: Author) -> None:
    a = _pick(author, other)
    _let(author, _filled(author, author.rng.choice(OF_ONE), a=a), a)


def of_two(author: Author) -> None:
    a, b = _pick(author, other), _pick(author, lambda x: _taken(author, x))
    if author.rng.random() < 0.3:
        a, b = b, a
    _let(author, _filled(author, author.rng.choice(OF_TWO), a=a, b=b), a, b)


def view(author: Author) -> None:
    a = _pick(author, other)
    bits = ("{a}.view(torch.int16)", "{a}.view(torch.uint8)", "{a}.view(torch.int8)", "{a}.view(torch.int32)")
    fits = author.env[a].dtype not in (torch.float64, torch.bool)
    _let(author, author.rng.choice(bits if fits and author.rng.random() < 0.2 else VIEWS).format(a=a), a)


def written(author: Author) -> None:
    author.write(_filled(author, author.rng.choice(WRITTEN), a=_pick(author, other, writable=True)))


def written_of(author: Author) -> None:
    a = _pick(author, other, writable=True)
    b = _pick(author, lambda x: _taken(author, x))
    x, y = author.env[a], author.env[b]
    if place(x) == place(y):
        raise Refused
    if y.is_floating_point() and not x.is_floating_point():
        b = f"{b}.clamp(0, 100)"  # what does not fit is anything
    author.write(author.rng.choice(WRITTEN_OF).format(a=a, b=b))


def places(author: Author) -> None:
    a, i = author.pick(dtype=None), _pick(author, other)
    if overlaps_itself(author.env[a]) and author.rng.random() < 0.5:
        raise Refused
    within = f"{i}.clamp(-100, 100)" if author.env[i].is_floating_point() else i
    _let(author, _filled(author, author.rng.choice(PLACES), a=a, i=within), a)


def read_number(author: Author) -> None:
    s = _pick(author, lambda x: x.dim() == 0 and (author.exact or other(x)) and x.dtype != torch.bool)
    a = _pick(author, lambda x: True)
    _let(author, _filled(author, author.rng.choice(READ), a=a, s=s), a)


def through(author: Author) -> None:
    if not author.exact:
        raise Refused
    text, a = author.rng.choice(THROUGH), author.pick()
    b = author.pick(author.env[a].shape)
    author.write(f"{(v := author.fresh())} = {text.format(a=a, b=b)}", {v: None})


def sent(author: Author) -> None:
    """Messages of values of several types."""
    names = author.tensors(lambda x: other(x) and x.dtype not in NOT_SENT)
    if not names:
        raise Refused
    chosen = [author.rng.choice(names[-6:]) for _ in range(author.rng.choice([1, 1, 2, 3]))]
    if author.rng.random() < 0.4:
        chosen.append(author.pick())
    name = author.rng.choice(SENT)
    types = {author.env[each].dtype for each in chosen}
    if name == "psum" and types & {torch.bfloat16, torch.float16}:
        raise Refused
    if name == "pmean" and not all(dtype.is_floating_point for dtype in types):
        raise Refused
    made = [author.fresh() for _ in chosen]
    given = chosen[0] if len(chosen) == 1 else f"({', '.join(chosen)})"
    axis = author.rng.choice([None, "hosts", "local"]) if author.env["fdp"].axis_size() in MESHES else None
    more = f", axis={axis!r}" if axis else ""
    author.write(f"{', '.join(made)} = fdp.{name}({given}{more})", dict.fromkeys(made, axis is not None))


OF_TYPES: tuple[tuple[float, Statement], ...] = (
    (1.2, positions), (1, cast), (2, of_one), (2, of_two), (0.7, view), (1, written), (1.2, written_of), (1, places),
    (0.7, read_number), (0.7, sent), (0.5, through),
)  # fmt: skip
"""What may be written, and how often."""
