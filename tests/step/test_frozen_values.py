"""What a trace would freeze is found when it is compared with the step."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from bits import same_bits_or_equal
from steps import shifted

import fdp

Tree = Any


class Counter:
    n = 0


def frozen_python(w: Tree, b: Tree) -> Tree:
    return w * random.random() + fdp.pmean(b)


def frozen_numpy(w: Tree, b: Tree) -> Tree:
    return w * float(np.random.rand()) + fdp.pmean(b)


def frozen_numpy_array(w: Tree, b: Tree) -> Tree:
    return w + torch.as_tensor(np.random.rand(2), dtype=torch.float32) + fdp.pmean(b)


def frozen_small_noise(w: Tree, b: Tree) -> Tree:
    return w + 1e-3 * random.random() + fdp.pmean(b)


def frozen_seed(w: Tree, b: Tree) -> Tree:
    torch.manual_seed(1)
    return fdp.pmean(w + torch.rand(2)) + fdp.pmean(b)


def frozen_counter(w: Tree, b: Tree) -> Tree:
    Counter.n += 1
    return w * Counter.n + fdp.pmean(b)


def frozen_structure(w: Tree, b: Tree) -> Tree:
    Counter.n += 1
    return [w + fdp.pmean(b)] * (1 + Counter.n % 2)


def frozen_constant(w: Tree, b: Tree) -> Tree:
    Counter.n += 1
    return w + fdp.pmean(b), Counter.n


FROZEN = [frozen_python, frozen_numpy, frozen_numpy_array, frozen_small_noise, frozen_seed, frozen_counter,
          frozen_structure, frozen_constant]  # fmt: skip


@pytest.mark.parametrize("step", FROZEN, ids=lambda f: f.__name__)
def test_what_a_trace_would_freeze_is_found(step: Callable[..., Any]) -> None:
    Counter.n = 0
    random.seed(0)
    np.random.seed(0)
    with pytest.raises(fdp.TraceError) as caught:
        fdp.data_parallel(step)(torch.ones(2), torch.ones(2))
    lines = str(caught.value).splitlines()
    assert step.__name__ in lines[0] and lines[-1].startswith("Remedy: ")
    if step in (frozen_counter, frozen_python, frozen_numpy):
        assert "output: [2] torch.float32 differs by" in lines[1]


@pytest.mark.parametrize("step", FROZEN, ids=lambda f: f.__name__)
def test_the_check_can_be_switched_off(step: Callable[..., Any]) -> None:
    Counter.n = 0
    transform = fdp.data_parallel(step, check_trace=False)
    one, two = (transform(torch.ones(2), torch.ones(2)) for _ in range(2))
    if step is not frozen_seed:
        assert same_bits_or_equal(one, two)


def test_the_check_does_not_disturb_pythons_random_numbers() -> None:
    """A step that draws none leaves their state as it is; so does one that is refused for drawing them."""
    random.seed(3)
    state = random.getstate()
    fdp.data_parallel(shifted)(torch.ones(2), torch.ones(2))
    assert random.getstate() == state
