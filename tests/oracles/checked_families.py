"""What fdp makes of a family of Hugging Face's on two ranks, beside plain autograd of the model."""

from __future__ import annotations

import functools
import traceback
import warnings
from typing import Any

import models
import ranks
import torch
import torch.distributed as dist
from families import Batch, Family
from family_forms import RIGHT, averaged, batch_of, by_hand, every, floats, forms_of, model_loss, own_loss

import fdp
from fdp import pytree


def call_with(family: Family, batch: Batch, model: Any) -> Any:
    return model(**batch, **family.keywords)


def check_family(family: Family, labelled: bool) -> None:
    """Raises if fdp is wrong about a family."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    model = family.build()
    loss_of = model_loss if labelled else own_loss
    apply, params, buffers = fdp.from_module(model)

    @fdp.data_parallel
    def fine_tune(state: Any, batch: Batch) -> Any:
        def loss_fn(params: Any) -> Any:
            output, new = apply(params, state["buffers"], **batch, **family.keywords)
            return loss_of(output), (output, new)

        (loss, (output, new)), grads = fdp.value_and_grad(loss_fn, has_aux=True)(state["params"])
        averages = {"loss": fdp.pmean(loss), "grads": grads, "buffers": models.mean_statistics(new)}
        return averages, fdp.per_rank(output)

    losses = []
    for call in (1, 2):
        seed = 10 * call + rank
        batch = batch_of(family, seed, labelled)
        call_model = functools.partial(call_with, family, batch)
        expected, local = by_hand(model, call_model, loss_of, seed)
        expected = averaged(expected)
        torch.manual_seed(seed)
        averages, output = fine_tune({"params": params, "buffers": buffers}, batch)
        averages["buffers"] = {name: averages["buffers"][name] for name in expected["buffers"]}
        assert type(output) is type(local)
        assert pytree.structure_of(output) == pytree.structure_of(local)
        close(f"call {call}, output", pytree.leaves_of(output), pytree.leaves_of(local))
        for key, value in expected.items():
            close(f"call {call}, {key}", averages[key], value)
        losses.append(expected["loss"].item())
        # A gradient of zeros would be right whatever fdp did.
        assert any(bool(g.any()) for g in floats(expected["grads"]))
        assert all(bool(g.isfinite().all()) for g in floats(expected["grads"]))
    assert losses[0] != losses[1]
    assert fine_tune.traces == 1


def close(what: str, found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, msg=lambda m: f"{what}: {m}")


def check_families(forms: list[tuple[str, bool]]) -> dict[tuple[str, bool], tuple[str, str]]:
    """One rank's verdict on each family: (right, ""), or (the kind of error, its message)."""
    verdicts = {}
    for name, labelled in forms:
        print(name, flush=True)  # into the rank's log: where it was, should it not come back
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the models' own
                check_family(every()[name], labelled)
            verdicts[name, labelled] = (RIGHT, "")
        except fdp.FdpError as error:
            verdicts[name, labelled] = (type(error).__name__, str(error))
        except Exception:
            verdicts[name, labelled] = ("wrong", traceback.format_exc())
    return verdicts


def worst(names: list[str]) -> dict[tuple[str, bool], tuple[str, str]]:
    """The verdict on each form of each family: of the rank that found the worst."""
    forms = [(name, labelled) for name in names for labelled in forms_of(name)]
    found: dict[tuple[str, bool], tuple[str, str]] = {}
    for verdicts in ranks.run(2, check_families, forms, deadline_s=240):
        for form, verdict in verdicts.items():
            if found.get(form, (RIGHT, ""))[0] == RIGHT:
                found[form] = verdict
    assert sorted(found) == sorted(forms)
    return found
