"""Importance ratios, the clipped surrogate, importance weights of sequences, means over tokens."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch

from agentbench_prefix.training.losses.checks import (
    check_shape,
    check_tokens,
    floating,
    per_token,
)

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to plus or minus this before they are exponentiated."""


class ClipRange(NamedTuple):
    """Where the importance ratio is clipped.

    Attributes:
        low: Clipped below at ``1 - low``.
        high: Clipped above at ``1 + high``.
        dual: With a negative advantage A the surrogate is at least ``dual * A``; ``None`` for no
            such bound.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = 3.0

    def check(self) -> None:
        """Refuse a range that is none.

        Raises:
            ValueError: ``low`` is not in [0, 1], ``high`` is negative, or ``dual`` is not above 1.
        """
        if not 0 <= self.low <= 1:
            raise ValueError(f"low is {self.low}, expected 0 to 1: ratios are clipped at 1 - low")
        if self.high < 0:
            raise ValueError(f"high is {self.high}, expected 0 or more")
        if self.dual is not None and self.dual <= 1:
            raise ValueError(f"dual is {self.dual}, expected more than 1, or None for no bound")


SYMMETRIC = ClipRange()


# ------------------------------------------------------------------ reduction
def token_mean(
    values: torch.Tensor,
    mask: torch.Tensor,
    denominator: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """Sum over a mask, divided.

    Equation::

        (1 / D) sum_{i, t} m_it v_it

    ``D`` decides what the reduction is: the mask's tokens in the whole optimizer step, over all
    processes and micro-batches (the token mean); this micro-batch's tokens times the number of
    micro-batches (micro-batches weighing alike, as Prefix-GRPO's authors do); the number of
    rollouts, or 1 (the sums of Prefix-GRPO eq. 3 and 6).

    Args:
        values: ``[B, T]``.
        mask: ``[B, T]``.
        denominator: ``D``; ``None`` for this mask's own count. Where it is 0 nothing is divided.

    Returns:
        A scalar; exactly 0, with the graph attached, where the mask is empty.

    Raises:
        ValueError: Shapes differ, or the denominator is negative.
    """
    check_shape("mask", mask, "values", values)
    chosen = mask.bool()
    total = torch.where(chosen, values, torch.zeros_like(values)).sum()
    count = chosen.sum() if denominator is None else denominator
    if isinstance(count, torch.Tensor):
        return total / torch.where(count == 0, torch.ones_like(count), count)
    if count < 0:
        raise ValueError(f"denominator is {count}, expected 0 or more")
    return total / (count or 1)


def mean_advantages(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of each rollout's advantages over its generated tokens (inside Prefix-GRPO eq. 5).

    Args:
        advantages: ``[B]`` or ``[B, T]``.
        mask: Generated tokens, ``[B, T]``.

    Returns:
        ``[B]``; 0 for a rollout without tokens.

    Raises:
        ValueError: A shape is wrong.
    """
    check_tokens("mask", mask)
    chosen = mask.bool()
    values = floating(per_token("advantages", advantages, mask)).expand(mask.shape)
    total = torch.where(chosen, values, torch.zeros_like(values)).sum(1)
    return total / chosen.sum(1).clamp(min=1)


# ------------------------------------------------------------------ ratios
def log_ratio(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """``log pi_theta - log pi_old`` of each token, clamped to +-20; 0 outside the mask.

    Args:
        logprobs: Under the policy that is trained, ``[B, T]``.
        old_logprobs: Under the old policy, ``[B, T]``; no gradient flows to it.
        mask: ``[B, T]``.

    Returns:
        ``[B, T]``, in single precision or better.

    Raises:
        ValueError: Shapes differ.
    """
    check_tokens("logprobs", logprobs)
    check_shape("old_logprobs", old_logprobs, "logprobs", logprobs)
    check_shape("mask", mask, "logprobs", logprobs)
    difference = floating(logprobs) - floating(old_logprobs.detach())
    difference = torch.where(mask.bool(), difference, torch.zeros_like(difference))
    return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def importance_ratio(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """``r = exp(log pi_theta - log pi_old)`` of each token (Prefix-GRPO eq. 4); 1 outside the mask.

    Arguments and errors as for :func:`log_ratio`.
    """
    return log_ratio(logprobs, old_logprobs, mask).exp()


def clipped_surrogate(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip: ClipRange = SYMMETRIC,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """The clipped objective of each token, to be maximised.

    Equation (Prefix-GRPO, before eq. 6; the asymmetric range is DAPO's, eq. 10; the bound for
    negative advantages is dual-clip PPO's, Ye et al. 2020)::

        g(r, A) = min(r A, clip(r, 1 - low, 1 + high) A)
        A < 0:    max(g, dual A)

    Args:
        logprobs: Under the policy that is trained, ``[B, T]``.
        old_logprobs: Under the old policy, ``[B, T]``.
        advantages: ``[B]``, or ``[B, T]``; no gradient flows to them.
        mask: ``[B, T]``.
        clip: Range.
        weights: Factor of each rollout ``[B]`` or token ``[B, T]``, without gradient; see
            :func:`sequence_weights`.

    Returns:
        ``[B, T]``; 0 outside the mask.

    Raises:
        ValueError: A shape or the range is wrong.
    """
    clip.check()
    ratio = importance_ratio(logprobs, old_logprobs, mask)
    advantage = per_token("advantages", advantages, logprobs).to(ratio.dtype)
    value = torch.minimum(ratio * advantage, ratio.clamp(1 - clip.low, 1 + clip.high) * advantage)
    if clip.dual is not None:
        value = torch.where(advantage < 0, torch.maximum(value, clip.dual * advantage), value)
    if weights is not None:
        value = value * per_token("weights", weights, logprobs).to(ratio.dtype)
    return torch.where(mask.bool(), value, torch.zeros_like(value))


def is_clipped(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip: ClipRange = SYMMETRIC,
) -> torch.Tensor:
    """Tokens whose gradient :func:`clipped_surrogate` cuts off; its arguments, without weights.

    A token without advantage is not clipped, and neither is one at the very edge of the range.

    Returns:
        Boolean ``[B, T]``, false outside the mask. Its mean over the mask is the clip fraction.
    """
    clip.check()
    ratio = importance_ratio(logprobs.detach(), old_logprobs, mask)
    advantage = per_token("advantages", advantages, logprobs)
    too_high, too_low = ratio > 1 + clip.high, ratio < 1 - clip.low
    if clip.dual is None:
        cut = ((advantage > 0) & too_high) | ((advantage < 0) & too_low)
    else:
        cut = ((advantage > 0) & too_high) | ((advantage < 0) & (too_low | (ratio > clip.dual)))
    return cut & mask.bool()


def kl_estimate(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    estimator: Literal["k1", "k2", "k3"] = "k3",
) -> torch.Tensor:
    """Estimate of ``KL(pi_old || pi_theta)`` from each token (Schulman 2020).

    Equation, with ``d = log pi_theta - log pi_old``::

        k1 = -d        k2 = d^2 / 2        k3 = exp(d) - 1 - d

    k1 and k3 are unbiased for tokens drawn from ``pi_old``; on a teacher's tokens they measure how
    far the policies are apart there. No loss of ours has a KL term: this is for logging.

    Args:
        logprobs: ``[B, T]``.
        old_logprobs: ``[B, T]``.
        mask: ``[B, T]``.
        estimator: Which.

    Returns:
        ``[B, T]``; 0 outside the mask.

    Raises:
        ValueError: Shapes differ, or there is no such estimator.
    """
    difference = log_ratio(logprobs, old_logprobs, mask)
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference**2 / 2
    if estimator == "k3":
        return difference.expm1() - difference
    raise ValueError(f"unknown estimator {estimator!r}; valid: k1, k2, k3")


# ------------------------------------------------------------------ sequences
class SequenceWeights(NamedTuple):
    """Importance weights of whole rollouts, without gradient.

    Attributes:
        weight: ``W``, at most the upper bound; 0 where dropped, ``[B]``.
        kept: Whether the rollout is within the bounds, ``[B]``. ``mask & kept[:, None]`` is the
            mask that a token mean divides by.
    """

    weight: torch.Tensor
    kept: torch.Tensor


def sequence_weights(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    low: float = 0.2,
    high: float = 2.0,
) -> SequenceWeights:
    """Masked importance sampling between the trainer and the engine that played, per rollout.

    Equation::

        W_i = exp(sum_t m_it (log pi_it - log pi_rollout,it)),   kept if low <= W_i <= high

    The sum is clamped to +-20, and compared in the logarithm, so that the bounds themselves are
    kept exactly. A rollout without tokens has W = 1.

    Args:
        logprobs: Under the trainer's policy, ``[B, T]``: the current one's, or that of the batch
            before the update.
        rollout_logprobs: Under the rollout engine's, ``[B, T]``.
        mask: Generated tokens, ``[B, T]``.
        low: Smallest weight that is kept.
        high: Greatest weight that is kept.

    Returns:
        Weights and what is kept.

    Raises:
        ValueError: Shapes differ, or not ``0 < low <= high``.
    """
    check_tokens("logprobs", logprobs)
    check_shape("rollout_logprobs", rollout_logprobs, "logprobs", logprobs)
    check_shape("mask", mask, "logprobs", logprobs)
    if not 0 < low <= high:
        raise ValueError(f"low is {low} and high is {high}, expected 0 < low <= high")
    difference = floating(logprobs.detach()) - floating(rollout_logprobs.detach())
    difference = torch.where(mask.bool(), difference, torch.zeros_like(difference))
    total = difference.sum(1).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    kept = (total >= math.log(low)) & (total <= math.log(high))
    weight = total.exp().clamp(max=high)
    return SequenceWeights(torch.where(kept, weight, torch.zeros_like(weight)), kept)


def policy_gradient_surrogate(
    logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """The plain policy gradient's objective of each token, to be maximised; no ratio, no clipping.

    Equation::

        sg(W_i) A_it log pi_theta,it

    Args:
        logprobs: Under the policy that is trained, ``[B, T]``.
        advantages: ``[B]``, or ``[B, T]``; no gradient flows to them.
        mask: ``[B, T]``.
        weights: Factor of each rollout ``[B]`` or token ``[B, T]``, without gradient; see
            :func:`sequence_weights`.

    Returns:
        ``[B, T]``; 0 outside the mask.

    Raises:
        ValueError: A shape is wrong.
    """
    check_tokens("logprobs", logprobs)
    check_shape("mask", mask, "logprobs", logprobs)
    current = floating(logprobs)
    chosen = mask.bool()
    value = torch.where(chosen, current, torch.zeros_like(current))
    value = value * per_token("advantages", advantages, logprobs).to(current.dtype)
    if weights is not None:
        value = value * per_token("weights", weights, logprobs).to(current.dtype)
    return torch.where(chosen, value, torch.zeros_like(value))
