"""Learning from the tokens of a replayed prefix, beside those of the continuation."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from agentbench_prefix.training.losses.checks import check_vector, floating
from agentbench_prefix.training.losses.surrogate import (
    SYMMETRIC,
    ClipRange,
    clipped_surrogate,
    token_mean,
)

Signal = Literal["constant", "positive", "success", "lift", "magnitude"]


def prefix_advantages(
    signal: Signal,
    mean_advantages: torch.Tensor,
    *,
    rewards: torch.Tensor | None = None,
    lift: torch.Tensor | None = None,
) -> torch.Tensor:
    """How strongly the prefix of each rollout is learnt; never negative.

    Equation (Prefix-GRPO eq. 5 and section 8.1.0.1), with ``a`` the mean of the rollout's
    advantages over its continuation::

        constant     1
        positive     max(a, 0)
        success      1 if R > 0 else 0
        lift         |a| + lift        see family_lift
        magnitude    |a|               the main form

    The source does not say how lift and magnitude are combined, nor what success is: they are added
    here, and a reward above 0 is a success.

    Args:
        signal: Which.
        mean_advantages: ``a``, ``[B]``; see
            :func:`~agentbench_prefix.training.losses.surrogate.mean_advantages`.
        rewards: Unshaped, ``[B]``; needed by ``success``.
        lift: That of each rollout's query, ``[B]``; needed by ``lift``.

    Returns:
        ``[B]``, without gradient.

    Raises:
        ValueError: There is no such signal, what it needs is missing, or a shape is wrong.
    """
    check_vector("mean_advantages", mean_advantages)
    values = floating(mean_advantages.detach())
    if signal == "constant":
        return torch.ones_like(values)
    if signal == "positive":
        return values.clamp(min=0)
    if signal == "magnitude":
        return values.abs()
    if signal == "success":
        if rewards is None:
            raise ValueError("signal 'success' needs rewards")
        check_vector("rewards", rewards, len(values))
        return (rewards.detach() > 0).to(values.dtype)
    if signal == "lift":
        if lift is None:
            raise ValueError("signal 'lift' needs lift: compute it with family_lift")
        check_vector("lift", lift, len(values))
        return values.abs() + lift.detach().to(values.dtype)
    raise ValueError(
        f"unknown signal {signal!r}; valid: constant, positive, success, lift, magnitude"
    )


def _raw_means(
    values: torch.Tensor, families: torch.Tensor, raw: torch.Tensor, wanted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean value of each wanted family's raw queries, and whether it has any."""
    check_vector("families", families, len(values))
    check_vector("raw", raw, len(values))
    member = (wanted[:, None] == families[None, :]) & raw.bool()[None, :]
    total = torch.where(member, values[None, :], torch.zeros_like(values)[None, :]).sum(1)
    count = member.sum(1)
    return total / count.clamp(min=1), count > 0


def family_lift(success: torch.Tensor, families: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
    """How much more often a query is solved than the raw query of the same teacher trajectory.

    Equation (Prefix-GRPO section 8.1.0.1, in words there)::

        lift_q = max(success_q - success_raw, 0)

    where success is the share of a query's rollouts that succeed. Only what is in one batch of
    rollouts is compared: without a raw query of its family in it, a query has lift 0. Several raw
    queries of one family count as their mean.

    Args:
        success: Share of successful rollouts of each query, ``[Q]``.
        families: Integer that names each query's teacher trajectory, ``[Q]``.
        raw: Whether the query has no prefix, ``[Q]``.

    Returns:
        ``[Q]``; 0 for raw queries.

    Raises:
        ValueError: A shape is wrong.
    """
    check_vector("success", success)
    values = floating(success.detach())
    baseline, known = _raw_means(values, families, raw, families)
    lift = (values - baseline).clamp(min=0)
    return torch.where(known & ~raw.bool(), lift, torch.zeros_like(lift))


def demonstration_advantages(
    demonstrated: torch.Tensor,
    demonstrated_families: torch.Tensor,
    rewards: torch.Tensor,
    families: torch.Tensor,
    raw: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantage of a whole teacher trajectory that is added to the batch as a query of its own.

    Equation (Prefix-GRPO section 8.1.0.1)::

        A_demo = clamp(R_demo - mean R_raw, 0, 1)

    The source does not say which raw rollouts: here those of the same trajectory's raw query in the
    same batch. It is not normalised within a group. A demonstration without such a query is left
    out: its tokens belong in no mask and no denominator.

    Args:
        demonstrated: Reward of each demonstration, ``[D]``.
        demonstrated_families: Integer that names its trajectory, ``[D]``.
        rewards: Mean reward of each query's rollouts, ``[Q]``.
        families: Integer that names each query's teacher trajectory, ``[Q]``.
        raw: Whether the query has no prefix, ``[Q]``.

    Returns:
        Advantages ``[D]``, 0 where left out; and which are in, boolean ``[D]``.

    Raises:
        ValueError: A shape is wrong.
    """
    check_vector("demonstrated", demonstrated)
    check_vector("demonstrated_families", demonstrated_families, len(demonstrated))
    check_vector("rewards", rewards)
    means, known = _raw_means(floating(rewards.detach()), families, raw, demonstrated_families)
    advantages = (demonstrated.detach().to(means.dtype) - means).clamp(0, 1)
    return torch.where(known, advantages, torch.zeros_like(advantages)), known


class Branch(NamedTuple):
    """Tokens of one origin.

    Attributes:
        logprobs: Under the policy that is trained, ``[B, T]``.
        old_logprobs: Under the branch's old policy, ``[B, T]``.
        advantages: ``[B]`` or ``[B, T]``.
        mask: Tokens to learn from, ``[B, T]``.
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor


class TwoBranchLoss(NamedTuple):
    """A loss and its parts.

    Attributes:
        total: What is minimised, a scalar.
        continuation: Share of the continuation, a scalar.
        prefix: Share of the prefix, weighted as it enters ``total``, a scalar.
    """

    total: torch.Tensor
    continuation: torch.Tensor
    prefix: torch.Tensor


def prefix_continuation_loss(
    continuation: Branch,
    prefix: Branch,
    *,
    objective: Literal["split", "joint"] = "split",
    prefix_weight: float = 1.0,
    clip: ClipRange = SYMMETRIC,
    prefix_clip: ClipRange = SYMMETRIC,
    denominator: torch.Tensor | float | None = None,
    prefix_denominator: torch.Tensor | float | None = None,
) -> TwoBranchLoss:
    """Clipped loss over the tokens of continuations and of replayed prefixes.

    Equation (Prefix-GRPO eq. 6, with token means in the place of its sums; pass denominators of 1
    for the sums)::

        split:  L = -(1/D) sum_{M_cont} g(r, A; clip) - (w/D_pre) sum_{M_pre} g(r, A; prefix_clip)
        joint:  L = -(1/(D + D_pre)) (sum_{M_cont} g(r, A; clip) + sum_{M_pre} g(r, A; clip))

    The source gives ``joint`` no equation: here all tokens share one mean and the continuation's
    range, and ``prefix_weight`` is not used. The two denominators are added up: numbers of rollouts
    or 1, as sums have them, count twice then. A rollout without prefix has an empty mask in that
    branch, a demonstration one in the other. A prefix that is shared by the rollouts of a group is
    a row, and counts, once for each of them. With advantages that are never negative only the upper
    end of ``prefix_clip`` ever binds.

    Args:
        continuation: Generated tokens, ``[B, T]``.
        prefix: Prefix tokens, ``[B', S]``.
        objective: ``split`` or ``joint``.
        prefix_weight: ``w``, lambda_pre in the source.
        clip: Range of the continuation.
        prefix_clip: Range of the prefix with ``split``.
        denominator: ``D``; ``None`` for the continuation mask's own count.
        prefix_denominator: ``D_pre``; ``None`` for the prefix mask's own count.

    Returns:
        The loss and its parts; an empty branch is exactly 0 with its graph attached.

    Raises:
        ValueError: A shape or a range is wrong, or there is no such objective.
    """
    if objective not in ("split", "joint"):
        raise ValueError(f"unknown objective {objective!r}; valid: split, joint")
    joint = objective == "joint"
    values = clipped_surrogate(*continuation, clip=clip)
    prefix_values = clipped_surrogate(*prefix, clip=clip if joint else prefix_clip)
    if joint:
        own, others = denominator, prefix_denominator
        own = continuation.mask.bool().sum() if own is None else own
        others = prefix.mask.bool().sum() if others is None else others
        denominator = prefix_denominator = own + others
    loss = -token_mean(values, continuation.mask, denominator)
    prefix_loss = -token_mean(prefix_values, prefix.mask, prefix_denominator)
    if not joint:
        prefix_loss = prefix_weight * prefix_loss
    return TwoBranchLoss(loss + prefix_loss, loss, prefix_loss)
