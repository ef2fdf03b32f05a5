"""With which losses and data a family of models is trained, and in which release of transformers."""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any, TypeVar

import families
import torch
import torch.distributed as dist
from families import FAMILIES, MORE, REFUSED, Batch, Family
from samples import ALL_SAMPLES

from fdp import pytree

INSTALLED = importlib.util.find_spec("transformers") is not None

RIGHT = "right"
Item = TypeVar("Item")
# Python 3.10 gets an older release, where more models read values of tensors: those may be refused.
TABLE_IS_OF = (5, 23)
RELEASE = tuple(map(int, importlib.metadata.version("transformers").split(".")[:2])) if INSTALLED else TABLE_IS_OF
OWN_LOSS_ONLY = {
    # Batch normalisation over one pixel of two rows leaves nothing of them: the loss is the same for all data.
    "MobileViT", "EfficientNet",
    # It asserts something about its labels: see "ProphetNet with labels".
    "ProphetNet",
}  # fmt: skip
MODEL_LOSS_ONLY = {
    # They learn without labels.
    "ViT-MAE", "PatchTST", "CLIP",
}  # fmt: skip


def floats(tree: Any) -> list[torch.Tensor]:
    return [x for x in pytree.leaves_of(tree) if isinstance(x, torch.Tensor) and x.is_floating_point()]


def own_loss(output: Any) -> torch.Tensor:
    """A loss that the model does not compute: no two elements of the output can stand for each other."""
    return torch.stack([(x * torch.arange(x.numel()).sin().view_as(x)).mean() for x in floats(output)]).sum()


def model_loss(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output.loss
    return loss


def batch_of(family: Family, seed: int, labelled: bool) -> Batch:
    g = torch.Generator().manual_seed(seed)
    batch = family.batch(g)
    if labelled and family.labels is not None:
        batch.update(family.labels(g))
    elif "decoder_input_ids" not in batch and family.labels is families.answers:
        batch["decoder_input_ids"] = families.tokens(g, 7)
    return batch


def every() -> dict[str, Family]:
    return {**FAMILIES, **MORE, **{name: family for name, (family, _) in REFUSED.items()}}


def forms_of(name: str) -> list[bool]:
    """With the labels of the model's own loss, without, or one after the other."""
    family = every()[name]
    if name in OWN_LOSS_ONLY or (family.labels is None and name not in MODEL_LOSS_ONLY):
        return [False]
    if name in MODEL_LOSS_ONLY:
        return [True]
    return [True, False] if ALL_SAMPLES else [list(every()).index(name) % 2 == 0]


def averaged(tree: Any) -> Any:
    """The mean over ranks, by a plain all_reduce; alone, the tree itself."""

    def average(leaf: torch.Tensor) -> torch.Tensor:
        leaf = leaf.clone()
        if leaf.is_floating_point() and dist.is_initialized():
            dist.all_reduce(leaf)
            leaf /= dist.get_world_size()
        return leaf

    return pytree.map_leaves(average, tree)


def by_hand(model: Any, call: Callable[[Any], Any], loss_of: Callable[[Any], torch.Tensor], seed: int) -> Any:
    """The model as it is, under torch.autograd: this rank's loss, gradients and buffers; and what the call returned."""
    model = copy.deepcopy(model)
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    torch.manual_seed(seed)
    output = call(model)
    loss = loss_of(output)
    grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
    found = {
        "loss": loss.detach(),
        "grads": {k: torch.zeros_like(p) if g is None else g for (k, p), g in zip(params.items(), grads, strict=True)},
        "buffers": {name: b.detach().clone() for name, b in model.named_buffers()},
    }
    return found, output


def in_chunks(items: list[Item], size: int) -> list[list[Item]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
