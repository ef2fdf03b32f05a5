"""Do fdp's own operators for compilers do what the proof of graphs (`lowered.py`) assumes?

Such an operator declares to the compiler which arguments it changes, and calls a function. Each of these functions is
called here on tensors without values, and its effects are compared with what the proof assumes. That depends on no
graph, so it is done once in a process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from fdp.errors import build_message
from fdp.pytorch.dispatch import TorchDispatchMode
from fdp.pytorch.overloads import schema_of
from fdp.trace.trace import Loop, Trace
from fdp.verify.combined import OwnRank
from fdp.verify.decomposed import changed_by
from fdp.verify.extents import Extent, extent_of
from fdp.verify.failure import VerificationError
from fdp.verify.followed import Followed
from fdp.verify.schemas import operator_of
from fdp.verify.terms import Term, term_text
from fdp.verify.values import Values

Running = Callable[[Any, Any, Any], AbstractContextManager[Any]]
"""(start, wait, loops) -> a context in which the operators call these."""

_CHANGED = {
    "start_": "slots", "wait_": "slots", "loop_": "changed", "multiply_into": "target", "replay_": "state",
    "resume_": "state",
}  # fmt: skip
"""What operators have to say that they change, so that a compiler keeps them where they are."""

_FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
_FLOAT = torch.float32


def verify_implementations(implementations: Mapping[str, Callable[..., Any]], running: Running) -> None:
    """Prove that fdp's own operators for compilers do what the proof of graphs assumes.

    Args:
        implementations: what each operator of the namespace `fdp_compiled` calls, by its name.
        running: says what those do that start messages, wait for them, or run loops.

    Raises:
        VerificationError: names each that does something else.
    """
    offenders = [
        *_undeclared(), *_products(implementations["multiply_into"]), *_copies(implementations),
        *_draws(implementations), *_updates(implementations), *_messages(implementations, running),
    ]  # fmt: skip
    if offenders:
        raise VerificationError(
            build_message(
                "operators of fdp for compilers do not do what their names say.",
                offenders,
                remedy="report this to the authors of fdp.",
            )
        )


def _undeclared() -> Iterator[str]:
    for name, changed in _CHANGED.items():
        schema = schema_of(getattr(torch.ops.fdp_compiled, name).default)
        says = [each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]
        if says != [changed]:
            yield f"{name} says that it changes {says}, not {changed}"


def _products(multiply: Callable[..., Any]) -> Iterator[str]:
    """A product times a number, in a place of any shape, independent of the old content."""
    for factor in (1.0, 0.25):
        for shape in ((2, 5), (10,), (5, 2)):
            followed = Followed(Values(OwnRank(0, 1)))
            one, two = followed.given((2, 3), _FLOAT, "one"), followed.given((3, 5), _FLOAT, "two")
            target = followed.given(shape, _FLOAT, "what was there")
            values = followed.values
            expected = values.apply(
                "aten::mm", {"self": followed.read(one), "mat2": followed.read(two)}, (2, 5), _FLOAT
            )
            if factor != 1.0:
                expected = values.apply("aten::mul", {"self": expected, "other": values.encode(factor)}, (2, 5), _FLOAT)
            with followed:
                multiply(target, one, two, factor)
            yield from _unlike("multiply_into", followed.read(target.view(2, 5)), expected)


def _copies(implementations: Mapping[str, Callable[..., Any]]) -> Iterator[str]:
    followed = Followed(Values(OwnRank(0, 1)))
    value, target = followed.given((2, 3), _FLOAT, "a value"), followed.given((2, 3), _FLOAT, "what was there")
    expected = followed.read(value)
    with followed:
        made, turned = implementations["snapshot"](value), implementations["snapshot"](value, [1, 2])
        implementations["copy_into"](target, value)
    yield from _unlike("snapshot", followed.read(made), expected)
    yield from _unlike("snapshot", followed.read(turned), expected)
    if turned.stride() != (1, 2):
        yield "snapshot does not have the strides that it is given"
    yield from _unlike("copy_into", followed.read(target), expected)
    if followed.view(made).block is followed.view(value).block:
        yield "snapshot returns what it was given"


def _draws(implementations: Mapping[str, Callable[..., Any]]) -> Iterator[str]:
    """A draw calls the operator of its text once, on its arguments or on copies of them."""
    layout = {"size": [2, 3], "stride": [3, 1], "dtype": "float32", "device": "meta"}
    read = {"read": 0, "stride": [3, 1]}
    keywords = {"dtype": {"dtype": "float32"}, "device": {"device": "meta"}}
    kind: dict[str, Any] = {"dtype": _FLOAT, "device": "meta"}
    calls: tuple[tuple[str, str, list[Any], dict[str, Any], Callable[[torch.Tensor], torch.Tensor]], ...] = (
        ("draw", "aten.bernoulli.default", [read], {}, torch.bernoulli),
        ("draw", "aten.bernoulli_.float", [read, 0.25], {}, lambda value: value.bernoulli_(0.25)),
        ("draw_without_inputs", "aten.rand.default", [[2, 3]], keywords, lambda _: torch.rand([2, 3], **kind)),
    )
    for name, operator, arguments, named, directly in calls:
        changes = operator.split(".")[1].endswith("_")
        said = {"operator": operator, "arguments": arguments, "keywords": named}
        text = json.dumps({**said, "results": [None if changes else layout], "written": [layout] if changes else []})
        values = Values(OwnRank(0, 1))
        ours, theirs = Followed(values), Followed(values)
        value, other = (each.given((2, 3), _FLOAT, "a value") for each in (ours, theirs))
        before = ours.read(value)
        with ours:
            inputs = () if name == "draw_without_inputs" else ([value],)
            made = implementations[name](*inputs, text)
        with theirs:
            expected = directly(other)
        yield from _unlike(f"{name} of {operator}", ours.read(made[0]), theirs.read(expected))
        if len(made) != 1 or ours.drawn is not theirs.drawn:
            yield f"{name} of {operator} draws something else as well"
        if ours.read(value) is not before:
            yield f"{name} of {operator} changes what it is given"


def _updates(implementations: Mapping[str, Callable[..., Any]]) -> Iterator[str]:
    """Fused optimizers get the arguments of the operator."""
    for stem in _FUSED:
        packet = getattr(torch.ops.aten, stem)
        for overload in packet.overloads():
            target = getattr(packet, overload)
            bind = operator_of(target).bind
            bare = stem.strip("_") + ("" if overload == "default" else f"__{overload}")
            args, kwargs = _distinct_arguments(target)
            for name in (bare, f"{bare}_"):
                noted = _Noting()
                with noted:
                    implementations[name](*args, **kwargs)
                calls = [(func, _identities(bind(*given))) for func, *given in noted.calls]
                if calls != [(target, _identities(bind(args, kwargs)))]:
                    yield f"{name} does not hand {target} what it is given"


def _distinct_arguments(target: object) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of an operator that all differ."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for at, argument in enumerate(schema_of(target).arguments):
        kind = str(argument.type)
        value: Any = {
            "List[Tensor]": [torch.empty(at + 1, device="meta")], "Tensor": torch.empty((), device="meta"),
            "float": 0.5 + at, "bool": bool(at % 2),
        }.get(kind)  # fmt: skip
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def _messages(implementations: Mapping[str, Callable[..., Any]], running: Running) -> Iterator[str]:
    noted: list[Any] = []
    slots, others = [torch.empty(1, device="meta")], [torch.empty(2, device="meta")]

    def loop(number: int) -> Callable[..., None]:
        return lambda *operands: noted.append(("loop", number, _identities(operands)))

    with running(
        lambda index: noted.append(("start", index)), lambda index: noted.append(("wait", index)), [loop(0), loop(1)]
    ):
        for name in ("start", "start_", "wait", "wait_"):
            implementations[name](slots, 3)
            if noted != [(name.strip("_"), 3)]:
                yield f"{name} of bucket 3 calls {noted}"
            noted.clear()
        for name in ("loop", "loop_"):
            implementations[name](slots, others, 1)
            if noted != [("loop", 1, _identities((slots, others)))]:
                yield f"{name} does not run the loop that it is given, or runs it on other tensors"
            noted.clear()


def verify_loops(trace: Trace, made_for: Callable[[Any, Loop], Callable[..., None]]) -> None:
    """Prove that the function that runs a loop runs its body the right number of times, on the loop's arguments.

    Args:
        trace: of the step.
        made_for: makes what runs a loop, given the program of its body and the loop: a function of the tensors that the
            loop changes, and of the others.

    Raises:
        VerificationError: it does something else.
    """
    for loop in trace.loops:
        writes = changed_by(loop.body)
        inputs = [node.meta["val"] for node in loop.body.graph.graph.find_nodes(op="placeholder")][1:]
        operands = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in inputs]
        otherwise = [torch.empty_strided(x.shape, [7 * step + 5 for step in x.stride()], device="meta") for x in inputs]
        body, other = _Body(), _Body()
        try:
            for takes, given in ((body, operands), (other, otherwise)):
                left = [given[at] for at in range(len(given)) if at not in writes]
                made_for(takes, loop)([given[at] for at in sorted(writes)], left)
        except Exception as error:
            raise _wrong_loop(trace, loop) from error
        expected = [([at], _identities(operands)) for at in range(loop.count)]
        found = [(number.tolist(), _identities(given)) for number, *given in body.given]
        # The body was written, or compiled, for tensors that lie like this, however those that it is given lie.
        if found != expected or any(_lying(given) != _lying(operands) for _, *given in other.given):
            raise _wrong_loop(trace, loop)


def _lying(tensors: Sequence[torch.Tensor]) -> list[Extent]:
    return [extent_of(tuple(tensor.shape), tensor.stride()) for tensor in tensors]


def _wrong_loop(trace: Trace, loop: Loop) -> VerificationError:
    return VerificationError(
        build_message(
            f"the function that runs a loop of step {trace.name!r} runs its body on wrong tensors.",
            [loop.node],
            remedy="report this to the authors of fdp, with the step.",
        )
    )


class _Body:
    """A stand-in for the program of a loop's body that records its arguments."""

    layouts: Mapping[torch.device, Any] = {}

    def __init__(self) -> None:
        self.given: list[list[torch.Tensor]] = []

    def function(self, inputs: list[torch.Tensor], start: object, wait: object) -> None:
        self.given.append(list(inputs))


class _Noting(TorchDispatchMode):
    """Records operators with their arguments, and runs none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch's
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))


def _identities(value: object) -> Any:
    """Arguments in a form that can be compared: tensors by their identity."""
    if isinstance(value, torch.Tensor):
        return ("tensor", id(value))
    return [_identities(each) for each in value] if isinstance(value, (list, tuple)) else value


def _unlike(name: str, found: Term, expected: Term) -> Iterator[str]:
    if found is not expected:
        yield f"{name} computes {term_text(found)}, not {term_text(expected)}"
