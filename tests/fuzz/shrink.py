"""Make a program that fails smaller, as long as it fails in the same way: by delta debugging of its lines and options.

References: Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input (IEEE TSE 2002).
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator

from fuzz.oracle import run_plain
from fuzz.program import Leaf, Options, Program, Result, accesses, flat

Fails = Callable[[Program], bool]


def shrunk(program: Program, fails: Fails, seconds: float = 90.0, most: int = 400) -> Program:
    """A smaller program that fails in the same way.

    Args:
        program: one that fails.
        fails: whether another one fails in the same way.
        seconds: so long it may take.
        most: so many programs may be tried.
    """
    end, tried = time.monotonic() + seconds, 0
    seen = {repr(program)}  # an option may be a list
    changed = True
    while changed:
        changed = False
        for passage in (_options, _lines, _results, _leaves, _others, _expressions):
            again = True
            while again:
                again = False
                for candidate in passage(program):
                    if repr(candidate) in seen:
                        continue
                    if tried >= most or time.monotonic() > end:
                        return program
                    seen.add(repr(candidate))
                    if not _valid(candidate):
                        continue
                    tried += 1
                    if fails(candidate):
                        program, again, changed = candidate, True, True
                        break
    return program


def _valid(program: Program) -> bool:
    try:
        run_plain([program])
    except Exception:
        return False
    return True


def _options(p: Program) -> Iterator[Program]:
    o, plain = p.options, Options()
    if p.world > 1:
        yield dataclasses.replace(p, world=p.world - 1)
    for calls in range(1, o.calls):
        yield dataclasses.replace(p, options=dataclasses.replace(o, calls=calls))
    if o.shard:
        yield dataclasses.replace(p, options=dataclasses.replace(o, shard=False))
    if o.wire_dtype:
        yield dataclasses.replace(p, options=dataclasses.replace(o, wire_dtype=None, accumulate_dtype=None))
    for name in ("accumulate_dtype", "compile", "donate", "check_trace"):
        if getattr(o, name) != getattr(plain, name):
            yield dataclasses.replace(p, options=dataclasses.replace(o, **{name: getattr(plain, name)}))
    if not o.same_batch:
        yield dataclasses.replace(p, options=dataclasses.replace(o, same_batch=True))
    if (o.bucket_cap_mb, o.latency_s) != (25.0, None):
        yield dataclasses.replace(p, options=dataclasses.replace(o, bucket_cap_mb=25.0, latency_s=None))
    if p.between:
        yield dataclasses.replace(p, between=())


def _lines(p: Program) -> Iterator[Program]:
    """Without some lines of the body: half of them, a quarter, ..., one."""
    size = len(p.body)
    while size >= 1:
        for start in range(len(p.body) - size, -1, -size):
            yield dataclasses.replace(p, body=p.body[:start] + p.body[start + size :])
        size //= 2


def _results(p: Program) -> Iterator[Program]:
    for index in range(len(p.results)):
        yield dataclasses.replace(p, results=p.results[:index] + p.results[index + 1 :])
    for index, result in enumerate(p.results):
        name = re.match(r"\w+", result.text)
        if name is not None and name.group() != result.text:
            new = Result(name.group(), result.own)
            yield dataclasses.replace(p, results=(*p.results[:index], new, *p.results[index + 1 :]))


def _leaves(p: Program) -> Iterator[Program]:
    names = [leaf.name for leaf in p.leaves]
    for leaf in reversed(p.leaves):
        others = tuple(x for x in p.leaves if x is not leaf)
        if others:
            yield dataclasses.replace(p, leaves=others, tree=flat([x.name for x in others]))
    if p.tree != flat(names) and set(accesses(p.tree)) == set(names):
        yield dataclasses.replace(p, tree=flat(names))
    for index, leaf in enumerate(p.leaves):
        for new in _plainer(leaf):
            yield dataclasses.replace(p, leaves=(*p.leaves[:index], new, *p.leaves[index + 1 :]))


def _plainer(leaf: Leaf) -> Iterator[Leaf]:
    if leaf.new != leaf.name:
        yield dataclasses.replace(leaf, new=leaf.name)
    plain = re.match(r"kit\.num\(\((\d), (\d)\), (\d+)\)", leaf.make)
    if plain and leaf.make != (make := f"kit.num((4, 4), {plain.group(3)})"):
        yield dataclasses.replace(leaf, make=make)


def _others(p: Program) -> Iterator[Program]:
    for name in ("batch", "closed", "setup"):
        items = getattr(p, name)
        for index in range(len(items)):
            if name != "batch" or len(items) > 1:
                yield dataclasses.replace(p, **{name: items[:index] + items[index + 1 :]})


def _expressions(p: Program) -> Iterator[Program]:
    """One line with another name, or with a part of itself, in the place of an expression."""
    for index, line in enumerate(p.body):
        match = re.match(r"(\s*\w+ = )(.+)$", line)
        if match is None:
            continue
        head, text = match.groups()
        names = re.findall(r"\b(?:v\d+|[a-ex]|p\d|table|loss\d+_\d+)\b", text)
        for simple in dict.fromkeys([*names, *(f"{name} * 2" for name in names)]):
            if len(simple) < len(text):
                yield dataclasses.replace(p, body=(*p.body[:index], head + simple, *p.body[index + 1 :]))
