"""From the rewards of a group to advantages."""

from __future__ import annotations

import torch

from agentbench_prefix.training.losses.checks import check_vector, floating


def _spread(
    rewards: torch.Tensor, groups: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each rollout's group index, the number of rollouts of each group, whether it is mixed."""
    check_vector("rewards", rewards)
    check_vector("groups", groups, len(rewards))
    if groups.is_floating_point():
        raise ValueError(f"groups has dtype {groups.dtype}, expected integers that name the groups")
    _, index, size = torch.unique(groups, return_inverse=True, return_counts=True)
    zeros = torch.zeros(len(size), dtype=rewards.dtype, device=rewards.device)
    top = zeros.scatter_reduce(0, index, rewards, "amax", include_self=False)
    bottom = zeros.scatter_reduce(0, index, rewards, "amin", include_self=False)
    return index, size, top > bottom


def group_advantages(
    rewards: torch.Tensor,
    groups: torch.Tensor,
    *,
    normalize: bool = True,
    epsilon: float = 1e-6,
) -> torch.Tensor:
    """Advantage of each rollout relative to its group.

    Equation (GRPO, Shao et al. 2024)::

        A_i = (R_i - mean_g R) / (std_g R + epsilon),   std with n - 1

    and without the division (Dr. GRPO, Liu et al. 2025) if ``normalize`` is false. Every query is a
    group of its own: rollouts of a raw task and of its replayed states share no baseline. A group
    whose rewards are all equal, a group of one included, gets exactly 0.

    Args:
        rewards: ``[B]``.
        groups: Integer that names each rollout's group, ``[B]``, in any order.
        normalize: Whether to divide by the standard deviation.
        epsilon: Added to the standard deviation.

    Returns:
        ``[B]``, floating point, without gradient.

    Raises:
        ValueError: A shape or dtype is wrong.
    """
    rewards = floating(rewards.detach())
    index, size, mixed = _spread(rewards, groups)
    zeros = torch.zeros(len(size), dtype=rewards.dtype, device=rewards.device)
    centred = rewards - (zeros.index_add(0, index, rewards) / size)[index]
    if normalize:
        variance = zeros.index_add(0, index, centred**2) / (size - 1).clamp(min=1)
        centred = centred / (variance.sqrt()[index] + epsilon)
    return torch.where(mixed[index], centred, torch.zeros_like(centred))


def mixed_groups(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Whether each rollout's group has more than one reward: else its advantages are zero.

    Equation (DAPO, Yu et al. 2025, eq. 11: dynamic sampling keeps a group if)::

        0 < |{i : R_i is a success}| < G

    for binary rewards; here for any: the greatest differs from the smallest. To decide on success
    alone where rewards are shaped, pass successes.

    Args:
        rewards: ``[B]``.
        groups: Integer that names each rollout's group, ``[B]``.

    Returns:
        Boolean ``[B]``.

    Raises:
        ValueError: A shape or dtype is wrong.
    """
    index, _, mixed = _spread(floating(rewards.detach()), groups)
    return mixed[index]


def overlong_penalty(
    lengths: torch.Tensor, *, limit: int, buffer: int, factor: float = 1.0
) -> torch.Tensor:
    """Soft punishment of long rollouts, to be added to their rewards.

    Equation (DAPO, Yu et al. 2025, eq. 13), times ``factor``::

        0                                    |y| <= limit - buffer
        (limit - buffer - |y|) / buffer      limit - buffer < |y| <= limit
        -1                                   limit < |y|

    Args:
        lengths: Tokens of each rollout, ``[B]``; counted as ``limit`` counts them.
        limit: Greatest length, tokens.
        buffer: Stretch before it over which the penalty grows, tokens.
        factor: Greatest penalty.

    Returns:
        ``[B]``, between ``-factor`` and 0.

    Raises:
        ValueError: A shape is wrong, ``buffer`` is not in (0, limit], or ``factor`` is negative.
    """
    check_vector("lengths", lengths)
    if not 0 < buffer <= limit:
        raise ValueError(f"buffer is {buffer}, expected more than 0 and at most limit ({limit})")
    if factor < 0:
        raise ValueError(f"factor is {factor}, expected 0 or more: it is subtracted from rewards")
    return -factor * ((floating(lengths) - (limit - buffer)) / buffer).clamp(0, 1)
