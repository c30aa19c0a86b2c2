"""The optimizer of the CPU tier: Muon for matrices inside the model, AdamW for the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def orthogonalize(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Replace each matrix by an approximately orthogonal one with the same row and column spaces.

    Newton-Schulz iteration with the quintic coefficients of Jordan et al. 2024 (Muon); singular
    values end between about 0.7 and 1.2.

    Args:
        matrices: Shape (n, rows, columns).
        steps: Iterations.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: torch.Tensor = x.mT if tall else x
    return result


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized (Jordan et al. 2024), scaled to AdamW's update size (Moonlight).

    The update of an (m, n) matrix is scaled by ``0.2 * sqrt(max(m, n))``, so that one learning rate
    serves Muon and AdamW. Matrices of one shape are orthogonalized in one batch and in their own
    precision: on a CPU that is several times faster than ``torch.optim.Muon``, which takes them one
    by one in bfloat16.

    Args:
        params: Two-dimensional parameters.
        lr: Learning rate.
        momentum: Nesterov momentum.
        weight_decay: Decoupled weight decay.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim != 2:
                    raise ValueError(f"Muon takes matrices, got shape {tuple(p.shape)}")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("Muon takes no closure")
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(p.shape, []).append(p)
            for shape, params in by_shape.items():
                updates = []
                for p in params:
                    assert p.grad is not None
                    buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    buffer.lerp_(p.grad, 1 - group["momentum"])
                    updates.append(p.grad.lerp(buffer, group["momentum"]))
                scale = 0.2 * max(shape) ** 0.5
                for p, update in zip(params, orthogonalize(torch.stack(updates)), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update, alpha=-group["lr"] * scale)


def split_parameters(
    model: torch.nn.Module,
) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Matrices inside the model for Muon; embeddings, norms and biases for AdamW."""
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, p in model.named_parameters():
        inside = p.ndim == 2 and "embed" not in name and "lm_head" not in name
        (matrices if inside else rest).append(p)
    return matrices, rest
