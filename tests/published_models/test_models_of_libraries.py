"""Models of timm, torchvision, diffusers and PyTorch Geometric as they are: on two ranks, beside plain autograd.

As for Hugging Face: each model is built alike on both ranks, data and dropout are drawn anew per rank and per call, and
the reference is the model itself under torch.autograd on each rank, averaged with a plain all_reduce. They are slow, so
FDP_ALL_SAMPLES=1 runs them, where the libraries are installed.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import ranks
from checked_library_models import EVERY, check
from models_of_libraries import REFUSED, RIGHT
from samples import exhaustive


def cases(names: Any) -> list[Any]:
    """Those models, where they can be built."""
    installed = {each: importlib.util.find_spec(each) is not None for each in {EVERY[name].library for name in names}}
    return [
        pytest.param(
            name,
            marks=[
                exhaustive,
                pytest.mark.skipif(not installed[EVERY[name].library], reason=f"no {EVERY[name].library} is installed"),
            ],
        )
        for name in names
    ]


@pytest.mark.parametrize("name", cases(RIGHT))
def test_models_are_right(name: str) -> None:
    ranks.run(2, check, name)


@pytest.mark.parametrize("name", cases(REFUSED))
def test_what_cannot_be_traced_is_refused(name: str) -> None:
    with pytest.raises(ranks.RankError) as caught:
        ranks.run(2, check, name)
    for outcome in caught.value.outcomes:
        assert outcome.error is not None and outcome.error.name == "TraceError", outcome.describe()
        lines = outcome.error.message.splitlines()
        assert "'train_step'" in lines[0] and EVERY[name].line in lines[1] and lines[-1].startswith("Remedy: ")
