"""Each example runs on two ranks, learns, and ends with the same bits on both; what it says of itself is true.

They run on the session's ranks, which have torch imported already: there `main` is called, as the file itself does
once it has joined the ranks. All take a few steps only. (The one with a file of its own is launched by torchrun, as a
reader would.)
"""

from __future__ import annotations

import ast
import contextlib
import io
import math
import pathlib
import re
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from run_examples import EXAMPLES, example, numbers, on_two_ranks, printed
from samples import exhaustive
from tensorboard.backend.event_processing import event_accumulator

# --- every example ----------------------------------------------------------------------------------------


@exhaustive
def test_digits() -> None:
    text = on_two_ranks("digits", "--epochs", "1")
    assert "all 2 ranks hold the same bits" in text
    (accuracy,) = set(numbers("test accuracy @%", text))
    assert accuracy > 80


def test_comparison_with_ddp() -> None:
    text = on_two_ranks("compare_with_ddp", "--steps", "60")
    assert "losses of all steps equal, bit for bit" in text
    assert "parameters equal, bit for bit" in text
    first, last = numbers("loss @ at first, @ at last", text)
    assert last < first / 3
    assert min(numbers("later ones @ ms", text)) > 0


@exhaustive
def test_comparison_with_ddp_of_another_model() -> None:
    text = on_two_ranks("compare_with_ddp", "--steps", "3", "--model", "deep")
    assert "parameters equal, bit for bit" in text


def test_train(tmp_path: pathlib.Path) -> None:
    """The program with everything: it learns, goes on with other numbers of ranks, and writes scalars."""
    options = ["--folder", str(tmp_path), "--workers=0", "--tensorboard"]
    with contextlib.redirect_stderr(io.StringIO()):
        first = on_two_ranks("train", *options, "--epochs=1")
        assert "step 25: test accuracy" in first and "all 2 ranks hold the same bits" in first
        second = on_two_ranks("train", *options, "--epochs=2")
    assert "goes on from step 25, on 2 ranks" in second
    (accuracy,) = numbers("step 50: test accuracy @,", second)
    assert accuracy > 0.85
    scalars = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert scalars.Tags()["scalars"] == ["loss", "lr", "test accuracy", "test loss"]
    assert [(each.step, round(each.value, 4)) for each in scalars.Scalars("test accuracy")][1] == (50, accuracy)


@exhaustive
def test_train_with_ddp(tmp_path: pathlib.Path) -> None:
    first, second = ranks.run(2, printed, "train_ddp", "--folder", str(tmp_path), "--workers=0", "--epochs=2")
    (accuracy,) = numbers("step 50: test accuracy @,", first)
    assert second == "" and accuracy > 0.85


@exhaustive
def test_gpt() -> None:
    small = ["--layers=2", "--width=32", "--length=32", "--batch-size=16", "--steps=40", "--sample=20", "--lr=0.01"]
    text = on_two_ranks("gpt", *small, "--microbatches=2")
    assert "all 2 ranks hold the same bits" in text and "Plan of train_step" in text
    bits = numbers("  @ bits per byte", text)
    assert 7 < bits[0] < 9  # of 256 bytes, none is likelier than another yet
    (held_out,) = numbers("held-out files: @ bits per byte", text)
    assert 1 < held_out < 5.5


@exhaustive
def test_maml() -> None:
    text = on_two_ranks("maml", "--steps=200", "--tasks=20", "--lr=0.02")
    (before, *_, after) = numbers("MAML    @   @   @   @", text)
    (*_, pretrained) = numbers("rates    @   @   @   @", text)
    assert after < before / 2 and after < pretrained
    assert "all 2 ranks hold the same bits" in text


@exhaustive
def test_dp_sgd() -> None:
    text = on_two_ranks("dp_sgd", "--steps=25", "--noise-per-rank")
    accuracy, epsilon = numbers("test accuracy @% at epsilon @", text)
    assert accuracy > 40 and 0 < epsilon < 5
    assert "all 2 ranks hold the same bits" in text


@exhaustive
def test_wgan_gp() -> None:
    text = on_two_ranks("wgan_gp", "--steps=25")
    (before,) = numbers("kept apart: @ before training", text)
    (after, real) = numbers("Frechet distance @; that of the real digits to train on @", text)
    assert real < after < before / 2
    assert "all 2 ranks hold the same bits" in text


@exhaustive
def test_a_world_of_one(tmp_path: pathlib.Path) -> None:
    """Without torchrun the same programs run in one process; and the picture is one."""
    assert "all 1 ranks" in printed("maml", "--steps=2", "--tasks=2", "--first-order")
    assert "epsilon inf" in printed("dp_sgd", "--steps=1", "--noise=0", "--clip=inf")
    pytest.importorskip("matplotlib")
    assert "wrote" in printed("wgan_gp", "--steps=1", "--critic-steps=1", f"--picture={tmp_path / 'digits.png'}")
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.stem)
def test_the_command_is_at_the_top(path: pathlib.Path) -> None:
    top = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[:6]
    name = path.relative_to(EXAMPLES)
    torchrun = rf"    torchrun --standalone --nproc-per-node 2( --max-restarts \d+)? examples/{name}\b"
    assert any(re.match(torchrun, line) for line in top)
    assert any(line.startswith(f"    python examples/{name}") for line in top)


# --- what they claim --------------------------------------------------------------------------------------


def test_epsilon_against_integration() -> None:
    """One step's Renyi divergence by adding up a density, in place of the formula."""
    noise, rate, steps, delta = 1.5, 0.1, 20, 1e-4
    x = torch.linspace(-60, 80, 2_000_001, dtype=torch.float64)
    without = torch.distributions.Normal(0.0, noise).log_prob(x)
    with_it = torch.distributions.Normal(1.0, noise).log_prob(x)
    ratio = torch.logaddexp(without + math.log1p(-rate), with_it + math.log(rate)) - without
    found = math.inf
    for order in range(2, 40):
        moment = torch.trapezoid((without + order * ratio).exp(), x).log().item()
        spent = steps * moment / (order - 1)
        found = min(found, spent + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))
    assert example("dp_sgd").epsilon(noise, rate, steps, delta) == pytest.approx(found, rel=1e-6)


def private_sums() -> list[torch.Tensor]:
    import fdp

    module = example("dp_sgd")
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    grads = {"w": torch.randn(8, 3, 2, generator=generator), "b": torch.randn(8, 4, generator=generator)}
    counts = torch.tensor([1.0, 1, 0, 1, 1, 0, 1, 1])
    own = {name: g[rank::2] for name, g in grads.items()}

    @fdp.data_parallel
    def clipped_sum(key: Any, own: Any) -> Any:
        return module.private_sum(own["grads"], own["counts"], 0.7, 0.0, key)[0]

    key = fdp.random.key(0)
    got = clipped_sum(key, {"grads": own, "counts": counts[rank::2]})
    expected = {name: torch.zeros_like(g[0]) for name, g in grads.items()}
    for i in range(8):
        one = {name: g[i].clone().requires_grad_() for name, g in grads.items()}
        for p in one.values():
            p.grad = p.detach().clone()
        torch.nn.utils.clip_grad_norm_(list(one.values()), 0.7)
        for name, p in one.items():
            expected[name] += counts[i] * p.grad  # type: ignore[operator]
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)

    @fdp.data_parallel(static_argnums=2)
    def noise_alone(key: Any, zeros: Any, per_rank: bool) -> Any:
        return module.private_sum({"w": zeros}, zeros[:, 0], 0.5, 3.0, key, per_rank)[0]["w"]

    zeros = torch.zeros(1, 40_000)
    noises = [noise_alone(key, zeros, per_rank) for per_rank in (False, True)]
    fdp.assert_replicated(noises)
    return noises


def test_clipped_sum_and_noise_of_dp_sgd() -> None:
    """The sum is that of a loop over digits; noise has the deviation that the accounting presumes, either way."""
    noises, _ = ranks.run(2, private_sums)
    for noise in noises:
        assert noise.std().item() == pytest.approx(1.5, rel=0.03)
        assert abs(noise.mean().item()) < 0.05
    assert not torch.equal(*noises)


def test_frechet_distance() -> None:
    """Of two Gaussians with diagonal covariances it is known: of the means, and of the deviations."""
    x = torch.randn(4000, 3, dtype=torch.float64)
    x = torch.linalg.solve_triangular(torch.linalg.cholesky(torch.cov(x.T)), (x - x.mean(0)).T, upper=False).T
    shift, scale = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([2.0, 1.0, 0.25])
    expected = shift.square().sum() + (scale - 1).square().sum()
    assert example("wgan_gp").frechet_distance(x, x * scale + shift) == pytest.approx(expected.item(), rel=1e-6)


def test_maml_differentiates_through_adaptation() -> None:
    """The second-order gradient of the example against autograd through a loop, the first-order one without."""
    maml = example("maml")
    params = {name: p.double() for name, p in maml.init_params(torch.Generator().manual_seed(0)).items()}
    x, y = torch.randn(2, 6, 1, dtype=torch.float64)
    for first_order in (False, True):

        def outer(params: Any, first_order: bool = first_order) -> torch.Tensor:
            return maml.error(maml.adapt(params, x, y, 2, 0.1, first_order), x + 1, y)

        got = torch.func.grad(outer)(params)
        leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
        adapted = dict(leaves)
        for _ in range(2):
            loss = maml.error(adapted, x, y)
            slopes = torch.autograd.grad(loss, list(adapted.values()), create_graph=not first_order)
            adapted = {name: p - 0.1 * g for (name, p), g in zip(adapted.items(), slopes, strict=True)}
        expected = torch.autograd.grad(maml.error(adapted, x + 1, y), list(leaves.values()))
        torch.testing.assert_close(got, dict(zip(leaves, expected, strict=True)))
