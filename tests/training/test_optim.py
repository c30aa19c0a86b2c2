"""Muon."""

from __future__ import annotations

import pytest
import torch

from agentbench_prefix.training.optim import Muon, orthogonalize, split_parameters


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 16, 6), (4, 6, 16)])
def test_singular_values_end_near_one_and_directions_stay(shape):
    torch.manual_seed(0)
    matrices = torch.randn(shape, dtype=torch.float64)
    result = orthogonalize(matrices, steps=8)
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    singular = torch.linalg.svdvals(result)
    assert singular.min() > 0.6
    assert singular.max() < 1.25
    # The same singular vectors: u^T X v is diagonal.
    rotated = u.mT @ result @ v.mT
    off = rotated - torch.diag_embed(torch.diagonal(rotated, dim1=-2, dim2=-1))
    assert off.abs().max() < 1e-6


def test_update_is_momentum_orthogonalized_and_scaled():
    torch.manual_seed(1)
    p = torch.nn.Parameter(torch.randn(4, 6, dtype=torch.float64))
    before = p.detach().clone()
    optimizer = Muon([p], lr=0.1, momentum=0.9, weight_decay=0.01)
    buffer = torch.zeros_like(before)
    expected = before.clone()
    for _ in range(3):
        gradient = torch.randn(4, 6, dtype=torch.float64)
        p.grad = gradient.clone()
        optimizer.step()
        buffer = 0.9 * buffer + 0.1 * gradient
        update = orthogonalize((0.1 * gradient + 0.9 * buffer)[None])[0]
        expected = expected * (1 - 0.1 * 0.01) - 0.1 * 0.2 * 6**0.5 * update
    torch.testing.assert_close(p.detach(), expected)


def test_batching_by_shape_changes_nothing():
    torch.manual_seed(2)
    together = [torch.nn.Parameter(torch.randn(5, 3)) for _ in range(3)]
    alone = [torch.nn.Parameter(p.detach().clone()) for p in together]
    for p, q in zip(together, alone, strict=True):
        p.grad = torch.randn(5, 3)
        q.grad = p.grad.clone()
    Muon(together, lr=0.1).step()
    for q in alone:
        Muon([q], lr=0.1).step()
    for p, q in zip(together, alone, strict=True):
        torch.testing.assert_close(p, q)


def test_only_matrices_are_taken():
    with pytest.raises(ValueError, match="matrices"):
        Muon([torch.nn.Parameter(torch.zeros(3))], lr=0.1)


def test_embeddings_and_norms_go_to_adamw():
    model = torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(3, 4),
            "inner": torch.nn.Linear(4, 4),
            "norm": torch.nn.LayerNorm(4),
        }
    )
    matrices, rest = split_parameters(model)
    assert [p is model["inner"].weight for p in matrices] == [True]
    assert len(rest) == 4
