"""Learning from what a turn led to: the same reply, scored with and without its outcome in view."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch

from agentbench_prefix.training.losses.checks import (
    check_shape,
    check_tokens,
    check_vector,
    floating,
)

NO_GAP = 1e-5
"""A trajectory whose mean gap, in nats, is not above this has none: log-probabilities that are
computed twice in single precision, padded differently, differ by about 1e-6."""


def hindsight_gap(
    hindsight_logprobs: torch.Tensor,
    logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    bound: float = 1.0,
) -> torch.Tensor:
    """How much likelier a token is once its turn's outcome is in view.

    Equation (TRIAL eq. 4)::

        Delta = sg[clip(log pi_T(y | h+) - log pi(y | h), -bound, bound)]

    With pi the policy before the update this is Delta_old, from which the profile is built; with pi
    the current one, Delta_theta, which the dense term uses. The text at hand gives no value for
    ``bound``: 1 is our choice.

    Args:
        hindsight_logprobs: Of the scoring snapshot with the outcome in view, ``[B, T]``.
        logprobs: Of pi on the ordinary history, ``[B, T]``.
        mask: Eligible tokens, ``[B, T]``.
        bound: Greatest gap, nats.

    Returns:
        ``[B, T]``, without gradient; 0 outside the mask.

    Raises:
        ValueError: Shapes differ, or ``bound`` is not positive.
    """
    check_tokens("logprobs", logprobs)
    check_shape("hindsight_logprobs", hindsight_logprobs, "logprobs", logprobs)
    check_shape("mask", mask, "logprobs", logprobs)
    if bound <= 0:
        raise ValueError(f"bound is {bound}, expected more than 0")
    gap = floating(hindsight_logprobs.detach()) - floating(logprobs.detach())
    return torch.where(mask.bool(), gap.clamp(-bound, bound), torch.zeros_like(gap))


class TurnProfile(NamedTuple):
    """How dense supervision is spread over the turns of each trajectory.

    Attributes:
        scores: Mean absolute gap of each turn, nats, ``[B, K]``; 0 for a turn without tokens.
        tokens: Eligible tokens of each turn, ``[B, K]``.
        weights: Weight of each turn, ``[B, K]``; 0 for a turn without tokens. Weighted by tokens
            they have mean 1 in every trajectory.
    """

    scores: torch.Tensor
    tokens: torch.Tensor
    weights: torch.Tensor


def turn_profile(
    gap: torch.Tensor, turns: torch.Tensor, mask: torch.Tensor, *, no_gap: float = NO_GAP
) -> TurnProfile:
    """Weight each turn by its gap, relative to the mean gap of its trajectory.

    Equation (TRIAL eq. 5 and 6)::

        s_k = (1 / n_k) sum_t m_kt |Delta_kt|
        w_k = s_k / s,   s = sum_k n_k s_k / N,   N = sum_k n_k;   w_k = 1 if s <= no_gap

    A row must be a whole trajectory: build profiles before a batch is split.

    Args:
        gap: Delta_old, ``[B, T]``.
        turns: Index of each token's turn, from 0, ``[B, T]``; anything outside the mask.
        mask: Eligible tokens, ``[B, T]``.
        no_gap: Mean gap, nats, that is numerically none.

    Returns:
        The profile, without gradient; K is the greatest turn index plus one.

    Raises:
        ValueError: Shapes differ, or an eligible token has a negative turn.
    """
    check_tokens("gap", gap)
    check_shape("turns", turns, "gap", gap)
    check_shape("mask", mask, "gap", gap)
    chosen = mask.bool()
    index = torch.where(chosen, turns, torch.zeros_like(turns))
    if bool((index < 0).any()):
        raise ValueError("turns is negative at an eligible token: number turns from 0")
    sizes = floating(gap.detach())
    sizes = torch.where(chosen, sizes.abs(), torch.zeros_like(sizes))
    width = int(index.max()) + 1 if index.numel() else 1
    zeros = sizes.new_zeros(len(sizes), width)
    tokens = zeros.scatter_add(1, index, chosen.to(sizes.dtype))
    totals = zeros.scatter_add(1, index, sizes)
    scores = totals / tokens.clamp(min=1)
    mean = totals.sum(1, keepdim=True) / tokens.sum(1, keepdim=True).clamp(min=1)
    weights = torch.where(mean > no_gap, scores / mean.clamp(min=no_gap), torch.ones_like(scores))
    return TurnProfile(scores, tokens, torch.where(tokens > 0, weights, zeros))


def uniform_profile(profile: TurnProfile) -> TurnProfile:
    """The same turns, all of weight 1: a control of :func:`turn_profile` (TRIAL's Uniform)."""
    return profile._replace(weights=(profile.tokens > 0).to(profile.weights.dtype))


def derangement(size: int, seed: int) -> list[int]:
    """A permutation without fixed point, drawn evenly from all of them.

    Args:
        size: Number of elements; of one element there is none, and it is left in place.
        seed: Decides which.

    Returns:
        For each place, the element that goes there.
    """
    order = list(range(size))
    if size < 2:
        return order
    shuffle = random.Random(seed).shuffle  # noqa: S311 - no secret
    while any(place == element for place, element in enumerate(order)):
        shuffle(order)
    return order


def permuted_profile(profile: TurnProfile, seeds: Sequence[int]) -> TurnProfile:
    """The same weights on other turns: a control of :func:`turn_profile` (TRIAL's Permuted).

    Equation, over the turns that have tokens, with a derangement p of them::

        w'_k = N w_p(k) / sum_j n_j w_p(j)

    so that ``sum_k n_k w'_k = N`` still holds. The text at hand names this control without
    defining it: derangement and scaling are our choice. A single turn keeps weight 1.

    Args:
        profile: What :func:`turn_profile` returned.
        seeds: One for each trajectory, so that its permutation depends on nothing else in the
            batch.

    Returns:
        The profile with other weights.

    Raises:
        ValueError: There is not one seed for each trajectory.
    """
    if len(seeds) != len(profile.tokens):
        raise ValueError(
            f"{len(seeds)} seeds for {len(profile.tokens)} trajectories: give one each"
        )
    weights = torch.zeros_like(profile.weights)
    for row, seed in enumerate(seeds):
        active = profile.tokens[row].nonzero().flatten()
        n = profile.tokens[row, active]
        moved = profile.weights[row, active[derangement(len(active), seed)]]
        weights[row, active] = moved * n.sum() / (n * moved).sum()
    return profile._replace(weights=weights)


def token_weights(weights: torch.Tensor, turns: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Each token's share of its turn's weight.

    Args:
        weights: ``[B, K]``.
        turns: Index of each token's turn, from 0, ``[B, T]``; anything outside the mask.
        mask: Eligible tokens, ``[B, T]``.

    Returns:
        ``[B, T]``, without gradient; 0 outside the mask.

    Raises:
        ValueError: Shapes differ, or an eligible token has a turn that has no weight.
    """
    check_tokens("turns", turns)
    check_shape("mask", mask, "turns", turns)
    chosen = mask.bool()
    index = torch.where(chosen, turns, torch.zeros_like(turns))
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= weights.shape[1]):
        raise ValueError(
            f"turns is outside 0 to {weights.shape[1] - 1} at an eligible token: weights are of "
            f"{weights.shape[1]} turns"
        )
    values = weights.detach().gather(1, index)
    return torch.where(chosen, values, torch.zeros_like(values))


def dense_surrogate(
    logprobs: torch.Tensor, gap: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """The dense objective of each token, to be maximised.

    Equation (TRIAL eq. 7, of which ``-token_mean(...)`` is L_dense)::

        w_k Delta_theta log pi_theta

    Args:
        logprobs: Under the policy that is trained, on the ordinary history, ``[B, T]``.
        gap: Delta_theta, ``[B, T]``; no gradient flows to it.
        weights: Of each token, ``[B, T]``; no gradient flows to them.
        mask: Eligible tokens, ``[B, T]``.

    Returns:
        ``[B, T]``; 0 outside the mask.

    Raises:
        ValueError: Shapes differ.
    """
    check_tokens("logprobs", logprobs)
    check_shape("gap", gap, "logprobs", logprobs)
    check_shape("weights", weights, "logprobs", logprobs)
    check_shape("mask", mask, "logprobs", logprobs)
    current, chosen = floating(logprobs), mask.bool()
    current = torch.where(chosen, current, torch.zeros_like(current))
    value = (weights.detach() * gap.detach()).to(current.dtype) * current
    return torch.where(chosen, value, torch.zeros_like(value))


class BoundedTerm(NamedTuple):
    """A clamped scalar.

    Attributes:
        value: What is added to the loss.
        saturated: Whether the clamp cut it, and with it its gradient; a boolean scalar.
    """

    value: torch.Tensor
    saturated: torch.Tensor


def bounded_term(
    term: torch.Tensor, coefficient: float, outcome_loss: torch.Tensor, *, alpha: float = 1.0
) -> BoundedTerm:
    """Bound a dense loss by the size of the outcome loss.

    Equation (TRIAL eq. 8, its second summand)::

        clip(lambda L_dense, -b, b),   b = alpha sg(|L_GRPO|)

    Beyond the bound the gradient is exactly 0; at the very bound it passes, as ``torch.clamp`` has
    it (the source leaves that point open). The bound has no gradient. Take both losses over one
    micro-batch. If both were divided by one denominator from outside, the clamped shares add up to
    a mean weighted by tokens: ``clip(c x, c b) = c clip(x, b)``. The text at hand gives no value
    for lambda and alpha: 0.1 and 1 are our choices.

    Args:
        term: L_dense, a scalar.
        coefficient: lambda; 0 during warm-up.
        outcome_loss: L_GRPO, a scalar.
        alpha: Bound, as a multiple of ``|outcome_loss|``.

    Returns:
        The bounded term.

    Raises:
        ValueError: ``alpha`` is negative, or a loss is not a scalar.
    """
    check_vector("term", term.reshape(-1), 1)
    check_vector("outcome_loss", outcome_loss.reshape(-1), 1)
    if alpha < 0:
        raise ValueError(f"alpha is {alpha}, expected 0 or more")
    scaled = coefficient * term
    bound = alpha * outcome_loss.detach().abs()
    return BoundedTerm(scaled.clamp(-bound, bound), scaled.detach().abs() > bound)
