"""Sparse matrices that a step closes over, as graph networks have them: beside the same matrices made dense."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fdp

DENSE = (torch.rand(4, 4, generator=torch.Generator().manual_seed(0)) > 0.5) * torch.arange(1.0, 17).view(4, 4) / 16
START, BATCH = torch.linspace(-1, 1, 16).view(4, 4), torch.linspace(1, -2, 16).view(4, 4)

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

PRODUCTS: list[Product] = [
    lambda matrix, w: matrix @ w,
    lambda matrix, w: matrix @ torch.relu(matrix @ w),
    lambda matrix, w: matrix.t() @ w,
    lambda matrix, w: matrix.transpose(0, 1) @ (matrix @ w),
    lambda matrix, w: matrix.t().t() @ w,
    lambda matrix, w: (matrix * 2) @ w,
    lambda matrix, w: w + matrix.t(),
    lambda matrix, w: torch.mv(matrix, w[:, 0])[:, None] * w,
]


def training(matrix: torch.Tensor, product: Product) -> Callable[..., Any]:
    def step(w: torch.Tensor, batch: torch.Tensor) -> Any:
        loss, grad = fdp.value_and_grad(lambda w: ((product(matrix, w) - batch) ** 2).mean())(w)
        return w - 0.1 * fdp.pmean(grad), fdp.pmean(loss)

    return step


@pytest.mark.parametrize("donated", [(), (0,)])
@pytest.mark.parametrize("at", range(len(PRODUCTS)))
def test_a_product_by_a_sparse_matrix_is_that_by_a_dense_one(at: int, donated: tuple[int, ...]) -> None:
    run = fdp.data_parallel(training(DENSE.to_sparse(), PRODUCTS[at]), donate_argnums=donated)
    by_itself = training(DENSE, PRODUCTS[at])
    state, due = START.clone(), START.clone()
    for _ in range(3):
        (state, loss), (due, expected) = run(state, BATCH), by_itself(due, BATCH)
        torch.testing.assert_close(state, due)
        torch.testing.assert_close(loss, expected)


def test_a_compiled_step_refuses_sparse_matrices() -> None:
    run = fdp.data_parallel(training(DENSE.to_sparse(), PRODUCTS[0]), compile=True)
    with pytest.raises(fdp.CompileError, match=r"layout torch.sparse_coo.\n  test_sparse_matrices.py:\d+"):
        run(START, BATCH)


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_a_view_of_a_sparse_matrix_that_is_made_in_a_step(layout: str) -> None:
    def step(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return w + fdp.pmean((getattr(torch.eye(4), layout)().detach() @ batch).sum())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.testing.assert_close(fdp.data_parallel(step)(START, BATCH), START + BATCH.sum())


def test_another_sparse_layout_is_refused_with_a_way_out() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says that this layout is in beta
        run = fdp.data_parallel(training(DENSE.to_sparse_csr(), PRODUCTS[0]))
        with pytest.raises(fdp.TraceError, match=r"A.to_sparse_coo\(\)"):
            run(START, BATCH)
