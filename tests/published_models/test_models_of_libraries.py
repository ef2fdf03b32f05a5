"""Models of timm, torchvision, diffusers and PyTorch Geometric as they are: on two ranks, beside plain autograd.

As for Hugging Face: each model is built alike on both ranks, data and dropout are drawn anew per rank and per call, and
the reference is the model itself under torch.autograd on each rank, averaged with a plain all_reduce. They are slow, so
FDP_ALL_SAMPLES=1 runs them, where the libraries are installed.
"""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import warnings
from typing import Any

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from family_forms import averaged, by_hand, own_loss
from models_of_libraries import REFUSED, RIGHT
from samples import exhaustive

import fdp

EVERY = {**RIGHT, **REFUSED}


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


def call_with(batch: Any, model: Any) -> Any:
    return model(*batch)


def check(name: str) -> None:
    """Raises if fdp is wrong about a model."""
    rank, chosen = dist.get_rank(), EVERY[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries' own
        model = chosen.build().train()
        apply, params, buffers = fdp.from_module(model)

        @fdp.data_parallel
        def train_step(state: Any, batch: Any) -> Any:
            def loss_fn(params: Any) -> Any:
                found, new = apply(params, state["buffers"], *batch)
                return own_loss(found), new

            (loss, new), grads = fdp.value_and_grad(loss_fn, has_aux=True)(state["params"])
            return {"loss": fdp.pmean(loss), "grads": grads, "buffers": models.mean_statistics(new)}

        losses = []
        for call in (1, 2):
            seed = 10 * call + rank
            batch = chosen.batch(torch.Generator().manual_seed(seed))
            expected = averaged(by_hand(model, functools.partial(call_with, batch), own_loss, seed)[0])
            torch.manual_seed(seed)
            found = train_step({"params": params, "buffers": buffers}, batch)
            close("loss", found["loss"], expected["loss"])
            close("buffers", {key: found["buffers"][key] for key in expected["buffers"]}, expected["buffers"])
            # Batch normalisation over few pixels makes much of rounding: a gradient may be off by a share of the
            # largest one. What is missing, or not averaged, is off by more.
            largest = max(float(g.abs().max()) for g in expected["grads"].values())
            close("grads", found["grads"], expected["grads"], 1e-5 * largest)
            assert 0 < largest < float("inf")
            losses.append(float(expected["loss"]))
        assert losses[0] != losses[1] and train_step.traces == 1


def close(what: str, found: Any, expected: Any, slack: float = 0.0) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6 + slack, msg=lambda m: f"{what}: {m}")


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


def test_the_tables_in_the_document_are_what_is_tested() -> None:
    text = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "reference" / "models.md").read_text()
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in text.splitlines() if row.startswith("| ")]
    names = {"PyTorch Geometric": "torch_geometric"}
    libraries = {name: names.get(name, name) for name in ("timm", "torchvision", "diffusers", "PyTorch Geometric")}
    said = {
        f"{libraries[row[0]]} {name.strip('`')}": row[3]
        for row in rows
        if len(row) == 4 and row[0] in libraries
        for name in row[2].split(", ")
    }
    assert said == {**dict.fromkeys(RIGHT, "yes"), **dict.fromkeys(REFUSED, "refused")}
