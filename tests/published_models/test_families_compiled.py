"""Every family can be compiled: the graph that the compiler would get is made, and proved.

FDP_ALL_SAMPLES=1 takes all of them, and compiles two for good; by default none, since tests/emit/compiled has models.
"""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import models
import optree
import pytest
import torch
from families import FAMILIES, MORE, Family
from family_forms import INSTALLED, batch_of, forms_of, model_loss, own_loss
from samples import ALL_SAMPLES, exhaustive

import fdp
from fdp.distributed.group import resolve_group
from fdp.emit.backend import resolve_backend
from fdp.emit.compiled import compiler

pytestmark = pytest.mark.skipif(not INSTALLED, reason="no transformers: pip install fdp[huggingface]")

EVERY = {**FAMILIES, **MORE}
NO_CACHE = ("T5",)


class Proved(Exception):
    """A graph would be compiled now."""


def stop(*_: Any) -> Any:
    raise Proved


def program(name: str, caches: bool = False) -> tuple[Any, Any, Any]:
    """A step of gradient descent, its state and a batch.

    Args:
        name: of the family.
        caches: whether the model keeps keys and values, as it does by default.
    """
    family: Family = EVERY[name]
    labelled = forms_of(name)[0]
    loss_of = model_loss if labelled else own_loss
    model = family.build()
    for part in model.modules() if caches else ():
        if hasattr(part, "config"):
            part.config.use_cache = True
    apply, params, buffers = fdp.from_module(model)

    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            output, new = apply(params, state["buffers"], **batch, **family.keywords)
            return loss_of(output), new

        (loss, new), grads = fdp.value_and_grad(loss_fn, has_aux=True)(state["params"])
        params = optree.tree_map(lambda p, g: p - 0.1 * g, state["params"], fdp.pmean(grads))
        return {"params": params, "buffers": models.mean_statistics(new)}, fdp.pmean(loss)

    return step, {"params": params, "buffers": buffers}, batch_of(family, 0, labelled)


@exhaustive
@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize("name", sorted(EVERY))
def test_the_graph_of_every_family_is_made_and_proved(name: str, caches: bool) -> None:
    if caches and name in NO_CACHE:
        pytest.skip(f"{name} refuses to keep keys and values of an encoder")
    step, state, batch = program(name, caches)
    plan = fdp.data_parallel(step, donate_argnums=0).trace(state, batch).plan()
    with warnings.catch_warnings(), mock.patch.object(compiler, "lower", stop):
        warnings.filterwarnings("error", message="fdp: ")
        with pytest.raises(Proved):
            resolve_backend(True).program(plan, resolve_group(None), False)


@exhaustive
@pytest.mark.parametrize("name", ["GPT-2", "Swin"] if ALL_SAMPLES else ["GPT-2"])
def test_a_family_is_compiled_with_what_it_does_by_default(name: str) -> None:
    step, state, batch = program(name, caches=True)
    results = []
    for how in (True, False):
        torch.manual_seed(3)  # of dropout, which draws the same numbers in both
        results.append(fdp.data_parallel(step, compile=how)(state, batch))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
