"""The generators that a process draws from without a key: their seeds and their states."""

from __future__ import annotations

import importlib
import random
import sys
from numbers import Integral
from typing import Any

import torch

from fdp.context.axis import refuse_inside
from fdp.distributed.group import Ranks, resolve_group
from fdp.errors import ArgumentError, build_message
from fdp.random.keys import fold_in, key
from fdp.tracebacks import hiding_frames

_ACCELERATORS = ("cuda", "xpu", "mps")


@hiding_frames
def seed(n: int, group: Ranks = None) -> int:
    """Seed torch's generators, on the CPU and on every other device, with another number on each rank.

    Dropout and whatever else draws without a key then differs from rank to rank, and a run that is started again with
    the same number, and on as many ranks, draws the same. The seeds of ranks are hashes of the number and the
    rank, so that neighbouring numbers and ranks have nothing in common. Python's and NumPy's generators are left as
    they are, since programs shuffle file names with them, alike on all ranks; seed them with what is returned to
    have them differ.

    Args:
        n: any Python integer, the same on every rank.
        group: as for `data_parallel`.

    Returns:
        This rank's seed, from 0 to 2**63 - 1.

    Raises:
        ArgumentError: `n` is no integer.

    Example:
        >>> own = seed(0)
        >>> first = torch.rand(3)
        >>> seed(0) == own, torch.equal(torch.rand(3), first)
        (True, True)

    References:
        `torch.manual_seed`.
    """
    refuse_inside("seed")
    if isinstance(n, bool) or not isinstance(n, Integral):
        raise ArgumentError(build_message(f"fdp.seed was given {n!r}.", remedy="pass a Python integer."))
    own = int(fold_in(key(int(n)), resolve_group(group).rank)) & 2**63 - 1
    torch.manual_seed(own)
    return own


def generator_states() -> dict[str, torch.Tensor]:
    """Read the states of the process's generators.

    Returns:
        A tensor on the CPU for each: torch's on the CPU and on the current device of each accelerator in use, Python's,
        and NumPy's if that is imported.
    """
    states = {"cpu": torch.get_rng_state()}
    for kind in _ACCELERATORS:
        module: Any = getattr(torch, kind, None)
        if _in_use(module):
            states[kind] = module.get_rng_state().cpu()
    version, words, gauss = random.getstate()
    states["python"] = torch.tensor([version, *words], dtype=torch.int64, device="cpu")
    states["python_gauss"] = _number(gauss)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        held = numpy.random.get_state(legacy=False)
        if held["bit_generator"] == "MT19937":
            words = [*held["state"]["key"].tolist(), held["state"]["pos"], held["has_gauss"]]
            states["numpy"] = torch.tensor(words, dtype=torch.int64, device="cpu")
            states["numpy_gauss"] = _number(held["gauss"])
    return states


def set_generator_states(states: dict[str, torch.Tensor]) -> None:
    """Put the process's generators into states that `generator_states` read; those of accelerators it lacks are left.

    Args:
        states: what it returned.
    """
    torch.set_rng_state(states["cpu"])
    for kind in _ACCELERATORS:
        module = getattr(torch, kind, None)
        if kind in states and module is not None and module.is_available():
            module.set_rng_state(states[kind])
    version, *words = states["python"].tolist()
    gauss = float(states["python_gauss"])
    random.setstate((version, tuple(words), None if gauss != gauss else gauss))
    numpy = _numpy() if "numpy" in states else None
    if numpy is not None:
        *keys, position, has_gauss = states["numpy"].tolist()
        numpy.random.set_state(("MT19937", keys, position, has_gauss, float(states["numpy_gauss"])))


def _numpy() -> Any:
    """NumPy, which the program may import later; None if it is not installed."""
    try:
        return importlib.import_module("numpy")
    except ImportError:
        return None


def _in_use(module: Any) -> bool:
    if module is None or not module.is_available():
        return False
    # Reading the generator of a device that nothing ran on yet would take memory there.
    return bool(module.is_initialized()) if hasattr(module, "is_initialized") else True


def _number(value: float | None) -> torch.Tensor:
    """A number or None; NaN stands for None, because no generator makes a NaN."""
    return torch.tensor(float("nan") if value is None else value, dtype=torch.float64, device="cpu")
