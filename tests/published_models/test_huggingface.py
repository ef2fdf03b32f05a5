"""Models of Hugging Face transformers as they are: in train mode, on two ranks, against plain autograd of the model.

Each model is built alike on both ranks; the data are drawn anew per rank and per call, and so is the dropout. The
reference is the model itself under torch.autograd on each rank, averaged with a plain all_reduce. Two calls of one
step: data of the first call that got into the graph as a constant shows in the second. FDP_ALL_SAMPLES=1 takes all of
`MORE`, and each family in both forms: with the loss that the model computes, and with one that the user computes.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from checked_families import check_family, close, worst
from families import FAMILIES, MORE, REFUSED, Batch
from family_forms import (
    INSTALLED,
    RELEASE,
    RIGHT,
    TABLE_IS_OF,
    batch_of,
    in_chunks,
)
from samples import ALL_SAMPLES, exhaustive, some

import fdp

pytestmark = pytest.mark.skipif(not INSTALLED, reason="no transformers: pip install fdp[huggingface]")


@pytest.mark.parametrize("names", in_chunks([*FAMILIES, *MORE] if ALL_SAMPLES else ["ResNet"], 4), ids=", ".join)
def test_families_are_right(names: list[str]) -> None:
    allowed = {RIGHT} if RELEASE >= TABLE_IS_OF else {RIGHT, "TraceError"}
    wrong = {form: verdict for form, verdict in worst(names).items() if verdict[0] not in allowed}
    assert not wrong, "\n\n".join(f"{form}: {kind}: {message}" for form, (kind, message) in wrong.items())


@pytest.mark.parametrize("name", list(REFUSED) if ALL_SAMPLES else ["XLM"])
def test_what_cannot_be_traced_is_refused(name: str) -> None:
    family, file = REFUSED[name]
    with warnings.catch_warnings(), pytest.raises(fdp.TraceError) as caught:
        warnings.simplefilter("ignore")
        check_family(family, labelled=True)
    lines = str(caught.value).splitlines()
    assert "'fine_tune'" in lines[0]
    assert f"{file}:" in lines[1]
    assert lines[-1].startswith("Remedy: ")


@pytest.mark.parametrize("name", some(["GPT-2", "T5"]))
def test_training_is_what_the_model_and_its_optimizer_do(name: str) -> None:
    """Four steps of AdamW with tied and frozen parameters, in old state's memory; then back into the model."""
    family = FAMILIES[name]
    model = family.build()
    frozen = next(key for key, _ in model.named_parameters() if "norm" in key or "ln_" in key)
    model.get_parameter(frozen).requires_grad_(False)
    apply, params, buffers = fdp.from_module(model)
    optimizer = fdp.optim.from_torch(torch.optim.AdamW, lr=0.01, weight_decay=0.1)

    @fdp.data_parallel(donate_argnums=0)
    def fine_tune(state: Any, buffers: Any, batch: Batch) -> Any:
        loss, grads = fdp.value_and_grad(lambda p: apply(p, buffers, **batch)[0].loss)(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt}, fdp.pmean(loss)

    state = {"params": params, "opt": optimizer.init(params)}
    plain = copy.deepcopy(model)
    by_hand = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)
    for seed in range(4):
        batch = batch_of(family, seed, labelled=True)
        torch.manual_seed(seed)
        state, loss = fine_tune(state, buffers, batch)
        torch.manual_seed(seed)
        expected = plain(**batch).loss
        by_hand.zero_grad()
        expected.backward()
        by_hand.step()
        close("loss", loss, expected.detach())
    model.load_state_dict({**state["params"], **buffers}, strict=False)
    model.eval(), plain.eval()
    batch = batch_of(family, 9, labelled=True)
    torch.testing.assert_close(model(**batch).logits, plain(**batch).logits, rtol=1e-3, atol=1e-4)
    assert torch.equal(model.get_parameter(frozen), family.build().get_parameter(frozen))


@pytest.mark.parametrize("mode", ["autocast", pytest.param("bfloat16", marks=exhaustive)])
@pytest.mark.parametrize("name", list(FAMILIES) if ALL_SAMPLES else ["ResNet"])
def test_narrow_types(name: str, mode: str) -> None:
    """Under autocast with wide parameters, and with narrow ones."""
    family = FAMILIES[name]
    model = family.build()
    if mode == "bfloat16":
        model = model.bfloat16()
    apply, params, buffers = fdp.from_module(model)

    def narrowed() -> Any:
        return torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast")

    @fdp.data_parallel
    def fine_tune(params: Any, buffers: Any, batch: Batch) -> Any:
        def loss_fn(params: Any) -> Any:
            with narrowed():
                return apply(params, buffers, **batch)[0].loss.float()

        loss, grads = fdp.value_and_grad(loss_fn)(params)
        return fdp.pmean(loss), grads

    for seed in (1, 2):
        batch = batch_of(family, seed, labelled=True)
        if mode == "bfloat16":
            batch = {key: x.bfloat16() if x.is_floating_point() else x for key, x in batch.items()}
        torch.manual_seed(seed)
        loss, grads = fine_tune(params, buffers, batch)
        plain = copy.deepcopy(model)
        torch.manual_seed(seed)
        with narrowed():
            expected = plain(**batch).loss.float()
        expected.backward()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-2, atol=1e-3)
        for key, p in plain.named_parameters():
            if p.grad is not None:
                largest = p.grad.abs().max().item()
                torch.testing.assert_close(grads[key], p.grad, rtol=0, atol=2e-2 * largest + 1e-4, msg=key)
