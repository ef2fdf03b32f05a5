"""What an optimizer chooses for a CUDA device, where there is none: of fake tensors it sees the device alone."""

from __future__ import annotations

import pytest
import torch
from optimizer_classes import CLASSES
from torch._subclasses.fake_tensor import FakeTensorMode

import fdp
from fdp.optim.rule import Rule


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_class_takes_parameters_on_a_cuda_device(cls: type[torch.optim.Optimizer]) -> None:
    """Adagrad was refused: its fused kernel, which fdp had chosen, runs on CPUs alone."""
    optimizer = fdp.optim.from_torch(cls)
    with FakeTensorMode():
        p = torch.empty(4, 3, device="cuda")
        state = optimizer.init({"w": p})
        own = state["state"]["w"]
        assert all(x.device == p.device for x in own.values() if x.dim()), own
        assert state["lr"].device.type == "cpu"


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD], ids=lambda cls: cls.__name__)
def test_fused_kernels_take_a_learning_rate_on_their_device(
    cls: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that is one CUDA graph can read it nowhere else; it was refused. There the kernel reads a float."""
    optimizer, given = fdp.optim.from_torch(cls), []
    # No fake tensor can go through the kernel itself.
    monkeypatch.setattr(Rule, "_take", lambda self, built: given.extend(group["lr"] for group in built.param_groups))
    with FakeTensorMode():
        params = {name: torch.empty(4, 3, device="cuda") for name in ("v", "w")}
        for device in ("cpu", "cuda"):
            state = optimizer.init(params)
            state["lr"] = torch.full((), 0.1, dtype=torch.float64, device=device)
            new, after = optimizer.update(params, state, params)
            assert after["lr"] is state["lr"] and new["w"].device.type == "cuda"
            kernel_lr = given.pop()
            expected = torch.float32 if device == "cuda" else torch.float64
            assert not given and (kernel_lr.device.type, kernel_lr.dtype) == (device, expected)
        elsewhere = {**params, "w": torch.empty(4, 3, device="cuda:1")}
        with pytest.raises(fdp.ArgumentError, match="on the CPU"):
            optimizer.update(elsewhere, {**optimizer.init(elsewhere), "lr": state["lr"]}, elsewhere)


def test_code_that_reads_a_number_takes_none_from_a_device() -> None:
    optimizer = fdp.optim.from_torch(torch.optim.RMSprop)
    with FakeTensorMode():
        params = {"w": torch.empty(4, 3, device="cuda")}
        state = {**optimizer.init(params), "lr": torch.full((), 0.1, device="cuda")}
        with pytest.raises(fdp.ArgumentError, match="on the CPU"):
            optimizer.update(params, state, params)
