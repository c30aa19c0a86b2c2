"""Losses as pure tensor functions: no trainer, no model, no state.

Shapes: B rollouts; T tokens of the longest continuation; S tokens of the longest prefix span; K
turns; Q queries. Rows may be padded anywhere: what stands where a mask is false, NaN included,
changes neither values nor gradients. Masks are boolean or 0/1. Log-probabilities are in nats;
half-precision ones are computed with in single precision. Functions that end in ``surrogate``
return the objective of each token, to be maximised and 0 outside the mask; :func:`token_mean`
reduces it with a denominator that may come from outside, so that the shares of micro-batches and
processes add up to one mean. A gradient flows to ``logprobs`` alone.

Modules: :mod:`~agentbench_prefix.training.losses.groups` (rewards to advantages),
:mod:`~agentbench_prefix.training.losses.surrogate` (ratios, clipping, importance weights, means),
:mod:`~agentbench_prefix.training.losses.prefix` (tokens of a replayed prefix),
:mod:`~agentbench_prefix.training.losses.hindsight` (weights and losses from a hindsight view).
"""

from __future__ import annotations

from agentbench_prefix.training.losses.groups import (
    group_advantages,
    mixed_groups,
    overlong_penalty,
)
from agentbench_prefix.training.losses.hindsight import (
    BoundedTerm,
    TurnProfile,
    bounded_term,
    dense_surrogate,
    derangement,
    hindsight_gap,
    permuted_profile,
    token_weights,
    turn_profile,
    uniform_profile,
)
from agentbench_prefix.training.losses.prefix import (
    Branch,
    TwoBranchLoss,
    demonstration_advantages,
    family_lift,
    prefix_advantages,
    prefix_continuation_loss,
)
from agentbench_prefix.training.losses.surrogate import (
    ClipRange,
    SequenceWeights,
    clipped_surrogate,
    importance_ratio,
    is_clipped,
    kl_estimate,
    log_ratio,
    mean_advantages,
    policy_gradient_surrogate,
    sequence_weights,
    token_mean,
)

__all__ = [
    "BoundedTerm",
    "Branch",
    "ClipRange",
    "SequenceWeights",
    "TurnProfile",
    "TwoBranchLoss",
    "bounded_term",
    "clipped_surrogate",
    "demonstration_advantages",
    "dense_surrogate",
    "derangement",
    "family_lift",
    "group_advantages",
    "hindsight_gap",
    "importance_ratio",
    "is_clipped",
    "kl_estimate",
    "log_ratio",
    "mean_advantages",
    "mixed_groups",
    "overlong_penalty",
    "permuted_profile",
    "policy_gradient_surrogate",
    "prefix_advantages",
    "prefix_continuation_loss",
    "sequence_weights",
    "token_mean",
    "token_weights",
    "turn_profile",
    "uniform_profile",
]
