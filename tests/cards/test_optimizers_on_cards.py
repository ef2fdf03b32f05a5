"""Every class of torch.optim on a CUDA device, beside the class itself there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cards import needs_a_card, on_card
from optimizer_classes import CLASSES, NEW_LR, NEW_LR_AT, sample

import fdp


# inductor recommends other products than those that torch takes by default.
@pytest.mark.filterwarnings("ignore:TensorFloat32")
@needs_a_card
@pytest.mark.parametrize("compile", [False, True], ids=["op by op", "compiled"])
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_updates_are_those_of_the_class(cls: type[torch.optim.Optimizer], compile: bool) -> None:
    given: dict[str, Any] = {"momentum": 0.9} if cls in (torch.optim.SGD, torch.optim.RMSprop) else {}
    params, data = on_card(sample(torch.float32, ndim_2_only=cls is torch.optim.Muon))
    hand = {name: p.detach().clone() for name, p in params.items()}
    reference = cls(list(hand.values()), **given)
    optimizer = fdp.optim.from_torch(cls, **given)
    step = fdp.data_parallel(
        lambda state, grads: optimizer.update(fdp.pmean(grads), state[1], state[0]), compile=compile
    )
    state = (params, optimizer.init(params))
    for call, grads in enumerate(data):
        if call == NEW_LR_AT:
            reference.param_groups[0]["lr"] = NEW_LR
            state[1]["lr"] = torch.tensor(NEW_LR, dtype=torch.float64)
        for name, p in hand.items():
            p.grad = grads[name].clone()
        reference.step()
        state = step(state, grads)
        # torch takes its kernels for lists here, and fdp others: the same numbers but for their last bits.
        # Muon's products are of eight bits.
        torch.testing.assert_close(state[0], hand, rtol=1e-4, atol=1e-3 if cls is torch.optim.Muon else 1e-5)
