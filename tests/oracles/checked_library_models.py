"""What fdp makes of a model of timm, torchvision, diffusers or PyTorch Geometric on two ranks, beside autograd."""

from __future__ import annotations

import functools
import traceback
import warnings
from typing import Any

import models
import torch
import torch.distributed as dist
from family_forms import RIGHT as IS_RIGHT
from family_forms import averaged, by_hand, own_loss
from models_of_libraries import REFUSED, RIGHT

import fdp

EVERY = {**RIGHT, **REFUSED}


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


def verdict_on(name: str) -> tuple[str, str]:
    """One rank's verdict on a model: (right, ""), or (the kind of error, its message)."""
    try:
        check(name)
        return IS_RIGHT, ""
    except fdp.FdpError as error:
        return type(error).__name__, str(error)
    except Exception:
        return "wrong", traceback.format_exc()
