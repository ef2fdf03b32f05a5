"""What a user asks of the compiler: the argument `compile` of `data_parallel`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fdp.emit.compiled.inductor import KEPT, modes, settings_now, type_of
from fdp.errors import ArgumentError, build_message
from fdp.pytorch.dynamo import function_behind_compile
from fdp.pytorch.parts import require

_NOT_FOR_STEPS: Mapping[str, str] = {
    "freezing": "it turns parameters into constants, and a step changes them",
    "cpp_wrapper": "a wrapper in C++ cannot call the operators that start and await messages",
    "fx_wrapper": "it leaves out the program that fdp calls",
    "aot_inductor": "a step is compiled when it is called",
}

_KEEPS_THE_PLAN = (
    "undo the plan",
    "starts and waits stay where the plan puts them",
    "leave it out; bucket_cap_mb decides what shares a message.",
)
_KEPT_BECAUSE: Mapping[str, tuple[str, str, str]] = {
    "joint_graph_constant_folding": (
        "share memory between results and donated state",
        "with it, state * 1 is the memory of the state, which the next call changes",
        "leave it out; the compiler folds such arithmetic in the loops that it writes.",
    ),
}
"""Why a setting is kept: what the other value would let the compiler do, what holds now, and the remedy."""


@dataclass(frozen=True)
class Options:
    """How to compile a step.

    Attributes:
        settings: settings of inductor that differ from what holds around the call, by name.
        records: whether the whole step is to be recorded as one CUDA graph.
    """

    settings: tuple[tuple[str, Any], ...] = ()
    records: bool = False

    def settled(self, devices: Iterable[torch.device]) -> Options:
        """The options with what follows from the devices of a step.

        On a CPU it draws the random numbers that it would draw without a compiler; inductor's own take longer there,
        since their generator is made for a device that draws thousands at once. And pictures stay laid out as they
        are: inductor would have convolutions take channels last, and turn weights and gradients around at every step.
        """
        if {device.type for device in devices} - {"cpu"}:
            return self
        wanted = {"fallback_random": True, "layout_optimization": False, **dict(self.settings)}
        return Options(tuple(sorted(wanted.items())), self.records)

    @property
    def draws_alike(self) -> bool:
        """Whether the compiled step draws the random numbers that the step itself would."""
        return bool((settings_now() | dict(self.settings))["fallback_random"])

    @property
    def multiplies(self) -> bool:
        """Whether products are left to the library: without a search for a faster kernel there is nothing else."""
        settings = settings_now() | dict(self.settings)
        return not (settings["max_autotune"] or settings["max_autotune_gemm"])


def resolve_options(asked: Any) -> Options | None:
    """Read the argument `compile` of `data_parallel`.

    Args:
        asked: False, True, or a dict of inductor's settings, in which "mode" may stand for a set of them, as in
            `torch.compile`.

    Returns:
        The options, None for False.

    Raises:
        ArgumentError: a setting does not exist, has another type, or would undo the plan.
    """
    if asked is False or isinstance(asked, Options):
        return asked or None
    require("compile=")
    if asked is True:
        return Options()
    if not isinstance(asked, Mapping):
        raise ArgumentError(
            build_message(
                f"compile={asked!r} is neither True nor False nor a dict of options.",
                remedy='pass compile=True, or settings of torch._inductor.config: compile={"mode": "max-autotune"}.',
            )
        )
    settings: dict[str, Any] = {}
    if asked.get("mode") is not None:
        settings.update(_settings_of_mode(asked["mode"]))
    settings.update((str(name).replace("-", "_"), value) for name, value in asked.items() if name != "mode")
    for name, value in settings.items():
        _check(name, value)
    records = settings.pop("triton.cudagraphs", False)
    return Options(tuple(sorted(settings.items())), records)


def _settings_of_mode(mode: Any) -> Mapping[str, Any]:
    known = modes()
    if mode not in known:
        raise ArgumentError(
            build_message(f"compile has no mode {mode!r}.", remedy=f"the modes are {', '.join(map(repr, known))}.")
        )
    return dict(known[mode])


def _check(name: str, value: Any) -> None:
    if name in KEPT and value != KEPT[name]:
        what, kept, remedy = _KEPT_BECAUSE.get(name, _KEEPS_THE_PLAN)
        raise ArgumentError(
            build_message(
                f"compile={{{name!r}: {value!r}}} would let the compiler {what}.",
                [f"fdp keeps {name}={KEPT[name]!r}: {kept}"],
                remedy=remedy,
            )
        )
    refused = next((why for stem, why in _NOT_FOR_STEPS.items() if name == stem or name.startswith(f"{stem}.")), None)
    if refused is not None and value:
        what = f"compile={{{name!r}: {value!r}}} is not for a training step: {refused}."
        raise ArgumentError(build_message(what, remedy="leave it out."))
    known = settings_now()
    if name not in known:
        near = difflib.get_close_matches(name, [*known, "mode"], n=3)
        raise ArgumentError(
            build_message(
                f"compile has no option {name!r}.",
                [f"near to it: {', '.join(near)}"] if near else (),
                remedy="torch._inductor.list_options() lists them.",
            )
        )
    kind = type_of(name)
    if isinstance(kind, type) and not isinstance(value, kind):
        raise ArgumentError(
            build_message(
                f"compile={{{name!r}: {value!r}}}: {type(value).__name__}, where inductor takes {kind.__name__}.",
                remedy=f"its value now is {known[name]!r}.",
            )
        )


def unwrap_compiled(step_fn: Any) -> tuple[Any, Any]:
    """Take what `torch.compile` made of a function apart.

    Args:
        step_fn: perhaps the result of `torch.compile`.

    Returns:
        The function, and the settings that it was to be compiled with; None if it was not to be.

    Raises:
        ArgumentError: it was to be compiled by another backend.
    """
    parts = function_behind_compile(step_fn)
    if parts is None:
        return step_fn, None
    inner, wanted = parts
    if wanted is None:
        raise ArgumentError(
            build_message(
                f"data_parallel was given step {getattr(inner, '__name__', inner)!r} as compiled by a backend other "
                "than inductor, and lowers whole steps with inductor alone.",
                remedy="decorate the plain function with fdp.data_parallel(compile=True).",
            )
        )
    now = settings_now()
    differing = {name: value for name, value in wanted.items() if name in now and value != now[name]}
    innermost, _ = unwrap_compiled(inner)
    return innermost, differing
