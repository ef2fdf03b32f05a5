"""The ambient context of a step: settings of the thread, and how the process was launched."""

from __future__ import annotations

import os
import warnings
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from fdp.distributed.group import Group
from fdp.pytorch.process_flags import any_autocast_enabled, onednn_enabled


def warn_if_alone_by_mistake(group: Group) -> None:
    """Warn if several ranks were launched, and this one has no process group."""
    launched = os.environ.get("WORLD_SIZE", "1")
    if group.reference is None and launched not in ("", "1"):
        warnings.warn(
            f"fdp: {launched} ranks were launched (WORLD_SIZE), but torch.distributed is not initialised: this process "
            "trains alone. Call fdp.initialize() first.",
            stacklevel=7,
        )


def ambient_context() -> Any:
    """What besides its arguments decides what a step traces to: autocast around the call, the default dtype, and
    whether oneDNN is on, whose kernels lay their results out in other ways."""
    plain = torch.get_default_dtype(), onednn_enabled()
    if not any_autocast_enabled():  # one call that asks for all devices
        return plain
    kinds = [device for device in ("cpu", "cuda", "xpu") if torch.is_autocast_enabled(device)]
    return plain, tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds)


def plain_context() -> AbstractContextManager[object]:
    """Casts are part of the program already: autocast around the call must not add to them. Results are tensors that
    autograd may use later: inference mode around the call must not mark them."""
    inference = torch.is_inference_mode_enabled()
    if not inference and not any_autocast_enabled():
        return nullcontext()
    stack = ExitStack()
    if inference:
        stack.enter_context(torch.inference_mode(False))
    for device in ("cpu", "cuda", "xpu"):
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack
