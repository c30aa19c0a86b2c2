"""The loss of every method as plain loops over rollouts and tokens: slow, and easy to check by eye.

Nothing is shared with the library. Hand :func:`batch_loss` all rollouts of an optimizer step, with
log-probabilities that require gradients, and a :class:`Method`; its gradients are what a trainer's
must equal. Observation tokens may stand among the generated ones, their mask is false.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass
class Rollout:
    """One sampled continuation; n tokens after the prompt, s tokens of prefix span inside it.

    A demonstration is a teacher's whole trajectory: no continuation, all its tokens in the prefix.
    """

    logprobs: torch.Tensor  # [n], of the policy that is trained
    old_logprobs: Sequence[float]  # n, of the policy before the update
    mask: Sequence[bool]  # n, generated tokens
    reward: float
    group: int  # rollouts of one query
    turns: Sequence[int] = ()  # n, turn of each token; read only where the mask is true
    rollout_logprobs: Sequence[float] = ()  # n, of the rollout engine
    hindsight_logprobs: Sequence[float] = ()  # n, of the policy before the update, outcome in view
    turn_order: Sequence[int] = ()  # which active turn's weight each active turn gets (permuted)
    prefix_logprobs: torch.Tensor | None = None  # [s]
    prefix_old_logprobs: Sequence[float] = ()  # s
    prefix_mask: Sequence[bool] = ()  # s
    family: int = 0  # teacher trajectory
    raw: bool = False  # no prefix
    demonstration: bool = False


@dataclass
class Method:
    """Coefficients; the defaults are plain GRPO. Terms that are ``None`` or false are absent."""

    objective: Literal["likelihood", "clipped", "policy_gradient"] = "clipped"
    normalize: bool = True  # divide advantages by the standard deviation
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    dual_clip: float | None = 3.0
    reduction: Literal["token", "micro", "sum"] = "token"
    importance: tuple[float, float] | None = None  # bounds of the weights that are kept
    dynamic_sampling: bool = False  # groups of one reward are left out
    overlong: tuple[int, int, float] | None = None  # limit, buffer, factor
    prefix_weight: float | None = None
    prefix_epsilon_low: float = 0.2
    prefix_epsilon_high: float = 0.2
    prefix_signal: Literal["constant", "positive", "success", "lift", "magnitude"] = "magnitude"
    prefix_joint: bool = False
    dense_weight: float | None = None
    dense_profile: Literal["relative", "uniform", "permuted"] = "relative"
    gap_bound: float = 1.0
    alpha: float = 1.0


def number(value) -> float:
    return float(value.detach()) if isinstance(value, torch.Tensor) else float(value)


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def surrogate(logprob, old, advantage, low, high, dual):
    ratio = torch.exp(torch.clamp(logprob - number(old), -20.0, 20.0))
    if advantage > 0:
        return advantage * ratio if ratio <= 1 + high else advantage * (1 + high) + 0 * logprob
    if ratio < 1 - low:
        return advantage * (1 - low) + 0 * logprob
    if dual is not None and ratio > dual:
        return advantage * dual + 0 * logprob
    return advantage * ratio


def advantages(rollouts: list[Rollout], method: Method) -> list[float]:
    rewards = []
    for r in rollouts:
        penalty = 0.0
        if method.overlong is not None:
            limit, buffer, factor = method.overlong
            excess = sum(map(bool, r.mask)) - (limit - buffer)
            penalty = factor * min(max(excess / buffer, 0.0), 1.0)
        rewards.append(r.reward - penalty)
    result = []
    for r, reward in zip(rollouts, rewards, strict=True):
        members = [
            x
            for x, other in zip(rewards, rollouts, strict=True)
            if other.group == r.group and not other.demonstration
        ]
        if r.demonstration or max(members) == min(members):
            result.append(0.0)
            continue
        centred = reward - mean(members)
        deviation = math.sqrt(sum((x - mean(members)) ** 2 for x in members) / (len(members) - 1))
        result.append(centred / (deviation + 1e-6) if method.normalize else centred)
    return result


def prefix_strength(r: Rollout, advantage: float, rollouts: list[Rollout], method: Method):
    raw = [o for o in rollouts if o.raw and o.family == r.family and not o.demonstration]
    if r.demonstration:  # None: left out
        return min(max(r.reward - mean([o.reward for o in raw]), 0.0), 1.0) if raw else None
    a = advantage if any(r.mask) else 0.0
    if method.prefix_signal == "constant":
        return 1.0
    if method.prefix_signal == "positive":
        return max(a, 0.0)
    if method.prefix_signal == "success":
        return 1.0 if r.reward > 0 else 0.0
    if method.prefix_signal == "magnitude" or not raw or r.raw:
        return abs(a)
    own = [float(o.reward > 0) for o in rollouts if o.group == r.group and not o.demonstration]
    return abs(a) + max(mean(own) - mean([float(o.reward > 0) for o in raw]), 0.0)


def turn_weights(r: Rollout, method: Method) -> dict[int, float]:
    gaps: dict[int, list[float]] = {}
    for t in range(len(r.mask)):
        if r.mask[t]:
            gap = number(r.hindsight_logprobs[t]) - number(r.old_logprobs[t])
            gap = min(max(gap, -method.gap_bound), method.gap_bound)
            gaps.setdefault(int(r.turns[t]), []).append(abs(gap))
    overall = mean([gap for turn in gaps.values() for gap in turn])
    if overall <= 1e-5 or method.dense_profile == "uniform":
        return dict.fromkeys(gaps, 1.0)
    weights = {turn: mean(values) / overall for turn, values in gaps.items()}
    if method.dense_profile == "permuted":
        active = sorted(gaps)
        moved = {turn: weights[active[r.turn_order[i]]] for i, turn in enumerate(active)}
        scale = sum(len(gaps[turn]) * moved[turn] for turn in active)
        tokens = sum(len(gaps[turn]) for turn in active)
        return {turn: weight * tokens / scale for turn, weight in moved.items()}
    return weights


def importance(r: Rollout, method: Method) -> float:
    """W, or 0 for a rollout that is dropped."""
    if method.importance is None:
        return 1.0
    low, high = method.importance
    trainer = r.logprobs if method.objective == "policy_gradient" else r.old_logprobs
    total = sum(
        number(trainer[t]) - number(r.rollout_logprobs[t]) for t in range(len(r.mask)) if r.mask[t]
    )
    weight = math.exp(min(max(total, -20.0), 20.0))
    return min(weight, 2.0) if low <= weight <= high else 0.0


def batch_loss(
    rollouts: Sequence[Rollout],
    method: Method,
    microbatches: Sequence[Sequence[int]] | None = None,
) -> torch.Tensor:
    """The loss of an optimizer step.

    Args:
        rollouts: All of the step, those of every process included.
        method: What is computed.
        microbatches: Indices of the rollouts of each micro-batch, over all processes; ``None`` for
            one. It matters to ``reduction="micro"`` and to the clamp of the dense term.
    """
    rollouts, parts = list(rollouts), microbatches or [range(len(rollouts))]
    score = advantages(rollouts, method)
    zero = sum((r.logprobs.sum() * 0.0 for r in rollouts), torch.zeros((), dtype=torch.float64))
    # What each branch learns from: (rollout, its factor or strength), and its tokens.
    cont: dict[int, float] = {}
    pre: dict[int, float] = {}
    for i, r in enumerate(rollouts):
        same = [o.reward for o in rollouts if o.group == r.group and not o.demonstration]
        if method.dynamic_sampling and not r.demonstration and max(same) == min(same):
            continue
        weight = importance(r, method)
        if not r.demonstration and weight > 0:
            cont[i] = weight
        strength = prefix_strength(r, score[i], rollouts, method)
        if None not in (method.prefix_weight, r.prefix_logprobs, strength):
            pre[i] = strength

    def tokens(chosen, part, mask) -> int:
        return sum(sum(map(bool, getattr(rollouts[i], mask))) for i in part if i in chosen)

    def denominator(chosen, part, mask) -> float:
        if method.reduction == "sum":
            return len(cont)
        if method.reduction == "micro":
            return tokens(chosen, part, mask) * len(parts)
        return sum(tokens(chosen, p, mask) for p in parts)

    total = zero
    for part in parts:
        n = denominator(cont, part, "mask")
        m = denominator(pre, part, "prefix_mask")
        if method.prefix_joint:
            n = m = n + m
        outcome, prefix, dense = zero, zero, zero
        for i in part:
            r = rollouts[i]
            weights = {} if method.dense_weight is None else turn_weights(r, method)
            for t in range(len(r.mask) if i in cont else 0):
                if not r.mask[t]:
                    continue
                p = r.logprobs[t]
                if method.objective == "likelihood":
                    value = p
                elif method.objective == "policy_gradient":
                    value = cont[i] * score[i] * p
                else:
                    value = cont[i] * surrogate(
                        p,
                        r.old_logprobs[t],
                        score[i],
                        method.epsilon_low,
                        method.epsilon_high,
                        method.dual_clip,
                    )
                outcome = outcome - value / n
                if method.dense_weight is not None:
                    gap = number(r.hindsight_logprobs[t]) - number(p)
                    gap = min(max(gap, -method.gap_bound), method.gap_bound)
                    dense = dense - weights[int(r.turns[t])] * gap * p / n
            for u in range(len(r.prefix_mask) if i in pre else 0):
                if r.prefix_mask[u]:
                    low, high = method.prefix_epsilon_low, method.prefix_epsilon_high
                    if method.prefix_joint:
                        low, high = method.epsilon_low, method.epsilon_high
                    prefix = (
                        prefix
                        - surrogate(
                            r.prefix_logprobs[u], r.prefix_old_logprobs[u], pre[i], low, high, None
                        )
                        / m
                    )
        total = total + outcome
        if method.prefix_weight is not None:
            total = total + (prefix if method.prefix_joint else method.prefix_weight * prefix)
        if method.dense_weight is not None:
            bound = method.alpha * abs(number(outcome))
            scaled = method.dense_weight * dense
            total = total + (
                scaled if abs(number(scaled)) <= bound else math.copysign(bound, number(scaled))
            )
    return total
