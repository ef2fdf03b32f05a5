"""Every module that torch ships samples for: its gradients through fdp on two ranks against plain autograd.

For each sample of `module_db` the module is built alike on both ranks, the inputs are drawn anew per rank and
per call. A tree of ones, as large as the first floating-point input and multiplied with it, is one more
parameter: its gradient covers the gradient with respect to that input, so modules without parameters are
compared too. The reference is the module itself under torch.autograd on each rank, averaged with a plain
all_reduce. Two calls of one step: data of the first call that got into the graph as a constant shows in the
second.
"""

from __future__ import annotations

import copy
import functools
import traceback
from collections import Counter
from typing import Any

import models
import optree
import pytest
import ranks
import torch
import torch.distributed as dist
from samples import ALL_SAMPLES, exhaustive, is_refused

CHUNKS = 12
QUICK = 8
"""The chunk that is taken by default."""

# Samples of some modules are a product of every option with every other (857 in one case): about so many are taken,
# at a distance that is odd, so that no option of two values is always the same. FDP_ALL_SAMPLES=1 takes all.
MOST_SAMPLES = 2

RIGHT, REFUSED, WRONG = "right", "refused", "wrong"
# Of a sample that is right: its gradients are not all zero or NaN, and the two calls have different losses.
INFORMATIVE = "informative"


def module_names() -> list[str]:
    from torch.testing._internal.common_modules import module_db

    # A lazy module has no parameters before its first input, so it is not a function of them.
    return [info.name for info in module_db if "Lazy" not in info.name]


def samples(info: Any, seed: int) -> list[Any]:
    torch.manual_seed(seed)
    options = {"device": "cpu", "dtype": torch.float32, "requires_grad": False, "training": True}
    found = list(info.module_inputs_func(info, **options))
    distance = 1 if ALL_SAMPLES else -(-len(found) // MOST_SAMPLES)
    return found[:: distance | 1]


def floats(tree: Any) -> list[torch.Tensor]:
    return [x for x in optree.tree_leaves(tree) if isinstance(x, torch.Tensor) and x.is_floating_point()]


def scale_first_float(tree: Any, scale: torch.Tensor | None) -> Any:
    """The tree with its first floating-point leaf multiplied by `scale`."""
    leaves, spec = optree.tree_flatten(tree)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            leaves[i] = leaf * scale
            break
    return optree.tree_unflatten(spec, leaves)


def weights_like(out: Any) -> list[torch.Tensor]:
    """Fixed random weights, so that no two elements of an output can stand for each other."""
    g = torch.Generator().manual_seed(5)
    return [torch.randn(x.shape, generator=g) for x in floats(out)]


def weighted_mean(out: Any, weights: list[torch.Tensor]) -> torch.Tensor:
    pairs = zip(floats(out), weights, strict=True)
    return sum(((x * w).sum() for x, w in pairs), torch.zeros(())) / sum(w.numel() for w in weights)


def inputs_of(sample: Any) -> dict[str, Any]:
    return {"args": tuple(sample.forward_input.args), "kwargs": dict(sample.forward_input.kwargs)}


def positive(tree: Any) -> Any:
    """The tree with its floating-point leaves made positive."""
    return optree.tree_map(lambda x: x.abs() if isinstance(x, torch.Tensor) and x.is_floating_point() else x, tree)


def built(info: Any, sample: Any) -> torch.nn.Module:
    """The sample's module, with the same parameters every time."""
    args, kwargs = sample.constructor_input.args, sample.constructor_input.kwargs
    # FractionalMaxPool's samples are drawn in float64 whatever the dtype asked for, which it then refuses.
    args, kwargs = optree.tree_map(
        lambda x: x.float() if isinstance(x, torch.Tensor) and x.dtype == torch.float64 else x, (args, kwargs)
    )
    torch.manual_seed(1)
    return info.module_cls(*args, **kwargs).train()


def by_hand(module: torch.nn.Module, scale: torch.Tensor, batch: Any, seed: int) -> dict[str, Any]:
    """The module as it is, under torch.autograd: this rank's loss, gradients, output and new buffers."""
    module = copy.deepcopy(module)
    scale = scale.clone().requires_grad_()
    params = {k: p for k, p in module.named_parameters() if p.requires_grad}
    torch.manual_seed(seed)
    fed = scale_first_float(batch, scale)
    out = module(*fed["args"], **fed["kwargs"])
    loss = weighted_mean(out, weights_like(out))
    wrt = [*params.values(), scale]
    grads: Any = [None] * len(wrt)
    if loss.requires_grad:
        grads = torch.autograd.grad(loss, wrt, allow_unused=True)
    grads = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, wrt, strict=True)]
    return {
        "loss": loss.detach(),
        "grads": {"module": dict(zip(params, grads[:-1], strict=True)), "scale": grads[-1]},
        "buffers": {k: b.detach().clone() for k, b in module.named_buffers()},
        "out": optree.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, out),
    }


def averaged(tree: Any) -> Any:
    leaves, spec = optree.tree_flatten(tree)
    out = []
    for leaf in leaves:
        leaf = leaf.clone()
        if leaf.is_floating_point():
            dist.all_reduce(leaf)
            leaf /= dist.get_world_size()
        out.append(leaf)
    return optree.tree_unflatten(spec, out)


def tensors_apart(tree: Any) -> tuple[list[torch.Tensor], Any]:
    """The tensors of a tree, and the function that puts them back between its other leaves."""
    leaves, spec = optree.tree_flatten(tree)
    is_tensor = [isinstance(x, torch.Tensor) for x in leaves]

    def whole(tensors: list[torch.Tensor]) -> Any:
        it = iter(tensors)
        return optree.tree_unflatten(spec, [next(it) if t else x for t, x in zip(is_tensor, leaves, strict=True)])

    return [x for x, t in zip(leaves, is_tensor, strict=True) if t], whole


def make_step(module: torch.nn.Module, sample: Any) -> tuple[Any, Any, Any]:
    import fdp

    apply, params, buffers = fdp.from_module(module)
    # A batch holds tensors only; the lengths that CTCLoss takes as numbers are closed over.
    whole = tensors_apart(inputs_of(sample))[1]

    @fdp.data_parallel
    def module_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            fed = scale_first_float(whole(batch), params["scale"])
            out, new = apply(params["module"], state["buffers"], *fed["args"], **fed["kwargs"])
            return weighted_mean(out, state["weights"]), (out, new)

        (loss, (out, new)), grads = fdp.value_and_grad(loss_fn, has_aux=True)(state["params"])
        averages = {"loss": fdp.pmean(loss), "grads": grads, "buffers": models.mean_statistics(new)}
        return averages, fdp.per_rank(out)

    return module_step, params, buffers


def check_sample(info: Any, seeds: list[list[Any]], index: int) -> bool:
    """Raises if fdp is wrong about a sample; whether the sample could have shown it (see INFORMATIVE)."""
    rank, losses, moves = dist.get_rank(), [], True
    module = built(info, seeds[0][index])
    step, params, buffers = make_step(module, seeds[0][index])
    for call in (1, 2):
        batch = inputs_of(seeds[call][index])
        first = floats(batch)
        scale = torch.ones(first[0].shape if first else ())
        reference = by_hand(module, scale, batch, 7 + rank)
        if not reference["loss"].isfinite():  # the logarithm or a root of a negative sample
            batch = positive(batch)
            reference = by_hand(module, scale, batch, 7 + rank)
        weights = weights_like(reference["out"])
        state = {"params": {"module": params, "scale": scale}, "buffers": buffers, "weights": weights}
        local = reference.pop("out")
        torch.manual_seed(7 + rank)
        averages, out = step(state, tensors_apart(batch)[0])
        # A frozen parameter rides with the buffers, and the reference lists it nowhere.
        averages["buffers"] = {k: averages["buffers"][k] for k in reference["buffers"]}
        torch.testing.assert_close(out, local, equal_nan=True, msg=lambda m, c=call: f"call {c}, output: {m}")
        expected = averaged(reference)
        for key, value in expected.items():
            torch.testing.assert_close(
                averages[key],
                value,
                rtol=1e-5,
                atol=1e-7,
                equal_nan=True,
                msg=lambda m, c=call, k=key: f"call {c}, {k}: {m}",
            )
        losses.append(expected["loss"].item())
        moves = moves and any(bool((g.isfinite() & (g != 0)).any()) for g in floats(expected["grads"]))
    return moves and losses[0] != losses[1]


def check_modules(names: list[str]) -> dict[str, list[tuple[str, str]]]:
    """One rank's verdict on every sample of the named modules."""
    from torch.testing._internal.common_modules import module_db

    import fdp

    verdicts: dict[str, list[tuple[str, str]]] = {}
    for info in module_db:
        if info.name not in names:
            continue
        print(info.name, flush=True)  # into the rank's log: where it was, should it not come back
        # The sample of seed 0 gives the constructor's arguments, equal on both ranks.
        seeds = [samples(info, 0), *(samples(info, 100 * call + dist.get_rank()) for call in (1, 2))]
        rows = verdicts[info.name] = []
        for index in range(len(seeds[0])):
            try:
                rows.append((RIGHT, INFORMATIVE if check_sample(info, seeds, index) else ""))
            except fdp.TraceError as error:
                rows.append((REFUSED if is_refused(error) else WRONG, str(error)))
            except Exception:  # whatever else it is, it is not a refusal
                rows.append((WRONG, f"sample {index} on rank {dist.get_rank()}\n{traceback.format_exc()}"))
    return verdicts


@functools.cache
def verdicts_of_chunk(chunk: int) -> dict[str, tuple[str, str]]:
    """Module name to its worst verdict over samples and ranks, with the reason."""
    worst: dict[str, tuple[str, str]] = {}
    order = [(RIGHT, False), (RIGHT, True), (REFUSED, True), (WRONG, True)]
    for by_module in ranks.run(2, check_modules, module_names()[chunk::CHUNKS], deadline_s=240):
        for name, rows in by_module.items():
            seen = [*rows, worst.get(name, (RIGHT, ""))]
            worst[name] = max(seen, key=lambda row: order.index((row[0], bool(row[1]))))
    return worst


@pytest.mark.parametrize(
    "chunk", [pytest.param(chunk, marks=exhaustive if chunk != QUICK else ()) for chunk in range(CHUNKS)]
)
def test_no_module_is_wrong(chunk: int) -> None:
    verdicts = verdicts_of_chunk(chunk)
    assert sorted(verdicts) == sorted(module_names()[chunk::CHUNKS])
    wrong = {name: reason for name, (verdict, reason) in verdicts.items() if verdict == WRONG}
    assert not wrong, "\n\n".join(f"{name}: {reason}" for name, reason in wrong.items())
    # A module all of whose samples give zero or NaN gradients would be right whatever fdp did.
    assert not [name for name, verdict in verdicts.items() if verdict == (RIGHT, "")]


@exhaustive
def test_most_modules_are_right_and_the_rest_refused() -> None:
    verdicts = {name: v for chunk in range(CHUNKS) for name, v in verdicts_of_chunk(chunk).items()}
    assert len(verdicts) >= 107
    counts = Counter(verdict for verdict, _ in verdicts.values())
    refused = {name: reason for name, (verdict, reason) in verdicts.items() if verdict == REFUSED}
    print(dict(counts), *(f"{name}: {reason}" for name, reason in refused.items()), sep="\n")
    assert counts[RIGHT] >= 98, (counts, sorted(refused))
