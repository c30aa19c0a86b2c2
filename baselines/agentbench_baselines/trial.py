"""``trial``: hindsight on each turn's outcome says where a trajectory's tokens are reinforced.

For turn k an outcome view ``z_k`` of what that decision led to is appended to the ordinary prompt,
and the same reply is scored by the policy before the update with it (``h+``) and without (``h``).
Objective (TRIAL eq. 4-8)::

    Delta(pi) = sg[clip(log pi_old(y | h+) - log pi(y | h), +-c)]
    s_k       = mean |Delta(pi_old)| over the turn's n_k tokens
    w_k       = s_k / s,   s = sum_k n_k s_k / N            per trajectory; 1 if s is numerically 0
    L_dense   = - (1 / M) sum w_k Delta(pi_theta) log pi_theta(y | h)
    L         = L_GRPO + clip(lambda L_dense, +- alpha sg|L_GRPO|)

``lambda`` is 0 during the first ``warmup`` steps. The clamp is taken over each micro-batch; both
losses have the whole optimizer step's token count as denominator, which scales them alike. Where it
cuts, the dense gradient is exactly 0: ``trial/saturated`` logs how often. Where the view is strange
to the policy the gap is mostly negative and the term pushes replies down: ``trial/signed_gap``.

``profile``: ``relative`` (above); controls: ``uniform`` (w = 1), ``permuted`` (the weights on other
turns, by a derangement, scaled so that ``sum n_k w_k = N``).

Source: TRIAL, eq. 2-8; the text at hand names the view, c, lambda, alpha and Permuted without
values. Chosen by us: the view, which says what the environment answered, whether the action was
valid, whether the state changed, whether the episode ended, and at the last turn whether the task
is solved; c = 1, lambda = 0.1, alpha = 1; all generated tokens are eligible; the micro-batch is the
recipe's ``microbatch``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field

from agentbench_baselines.grpo import GRPO, GRPOSettings, update_metrics
from agentbench_prefix.evaluation.records import EpisodeRecord
from agentbench_prefix.training.losses import (
    bounded_term,
    clipped_surrogate,
    dense_surrogate,
    hindsight_gap,
    permuted_profile,
    token_mean,
    token_weights,
    turn_profile,
    uniform_profile,
)
from agentbench_prefix.training.objective import Batch, Loss, Moment, Played, Scores, Settings

VIEW = (
    "\n\nOutcome of your next action: {observation}\n"
    "valid: {valid}, state changed: {changed}, done: {done}"
)


class TrialSettings(GRPOSettings):
    """Fields of the recipe's ``objective``.

    Attributes:
        dense_weight: ``lambda`` after the warm-up.
        warmup: Steps with ``lambda = 0``.
        gap_bound: ``c``, nats.
        alpha: Bound of the dense term, as a multiple of ``|L_GRPO|``.
        profile: How dense supervision is spread over turns.
        view: The outcome view of every turn but the last; ``{observation}``, ``{valid}``,
            ``{changed}`` and ``{done}`` are filled in.
        last_view: That of the last turn, which has ``{success}`` besides.
        true_word: What a fact that holds is written as.
        false_word: What one that does not is written as.
    """

    dense_weight: float = Field(default=0.1, ge=0)
    warmup: int = Field(default=20, ge=0)
    gap_bound: float = Field(default=1.0, gt=0)
    alpha: float = Field(default=1.0, ge=0)
    profile: Literal["relative", "uniform", "permuted"] = "relative"
    view: str = VIEW
    last_view: str = VIEW + ", success: {success}"
    true_word: str = "yes"
    false_word: str = "no"


class Trial(GRPO[TrialSettings]):
    """GRPO and a bounded dense term."""

    settings_type: ClassVar[type[Settings]] = TrialSettings

    def prepare(self, batch: Batch, played: Played) -> None:
        """Advantages, and hindsight log-probabilities once the dense term counts."""
        used = batch.active.clone()
        super().prepare(batch, played)
        if not self._weight(played.moment):
            return
        batch.active |= used & batch.mask.bool().any(1)
        views = []
        for group in batch.groups:
            changes = played.engine.state_changes(group)
            for rollout, changed in zip(group.rollouts, changes, strict=True):
                assert rollout.record is not None
                views.append(outcome_views(rollout.record, changed, self.settings))
        batch.tensors["hindsight"] = played.engine.hindsight(batch, views)

    def loss(self, batch: Batch, scores: Scores, moment: Moment) -> Loss:
        """The clipped surrogate and the dense term."""
        assert batch.old_logprobs is not None
        settings, mask = self.settings, batch.mask
        surrogate = clipped_surrogate(
            scores.logprobs,
            batch.old_logprobs,
            batch.tensors["advantages"],
            mask,
            clip=settings.clip,
        )
        count = moment.denominator("continuation", mask, settings.reduction)
        outcome = -token_mean(surrogate, mask, count)
        metrics = update_metrics(batch, scores, settings.clip)
        weight = self._weight(moment)
        if not weight:
            return Loss(outcome, metrics)
        if "weights" not in batch.tensors:  # rows are whole trajectories, and theta is still old
            self._profile(batch)
        hindsight = batch.tensors["hindsight"]
        gap = hindsight_gap(hindsight, scores.logprobs, mask, bound=settings.gap_bound)
        dense = dense_surrogate(scores.logprobs, gap, batch.tensors["weights"], mask)
        term = bounded_term(-token_mean(dense, mask, count), weight, outcome, alpha=settings.alpha)
        scored = mask.bool() & batch.active[:, None]
        rows, n = batch.tensors["profile"], len(batch)
        metrics |= {
            "trial/saturated": (term.saturated, 1),
            "trial/gap": (gap.abs().sum(), scored.sum()),
            "trial/signed_gap": (gap.sum(), scored.sum()),
            "trial/turn_score": (rows[:, 0].sum(), n),
            "trial/profile_std": (rows[:, 1].sum(), n),
        }
        return Loss(outcome + term.value, metrics)

    def notes(self, log: Sequence[Mapping[str, float]], rollouts: str) -> list[str]:
        """Whether the clamp cut the dense term in most updates."""
        del rollouts
        values = [row["trial/saturated"] for row in log if "trial/saturated" in row]
        share = sum(values) / max(len(values), 1)
        if share <= 0.5:
            return []
        return [f"the dense term was cut by its clamp in {100 * share:.0f} % of micro-batches"]

    def _weight(self, moment: Moment) -> float:
        return self.settings.dense_weight if moment.step >= self.settings.warmup else 0.0

    def _profile(self, batch: Batch) -> None:
        """Weights of tokens, and of each trajectory its mean turn score and its weights' spread."""
        assert batch.old_logprobs is not None
        settings, mask = self.settings, batch.mask
        gap = hindsight_gap(
            batch.tensors["hindsight"], batch.old_logprobs, mask, bound=settings.gap_bound
        )
        profile = turn_profile(gap, batch.turns, mask)
        if settings.profile == "uniform":
            profile = uniform_profile(profile)
        elif settings.profile == "permuted":
            seeds = [0 if record is None else record.seed for record in batch.records]
            profile = permuted_profile(profile, seeds)
        batch.tensors["weights"] = token_weights(profile.weights, batch.turns, mask)
        tokens = profile.tokens
        total = tokens.sum(1).clamp(min=1)
        turns = (tokens > 0).sum(1).clamp(min=1)
        spread = (tokens * (profile.weights - 1) ** 2).sum(1) / total
        batch.tensors["profile"] = torch.stack(
            [profile.scores.sum(1) / turns, spread.sqrt()], dim=1
        )


def outcome_views(
    record: EpisodeRecord, changed: Sequence[bool], settings: TrialSettings
) -> list[str]:
    """The outcome view of each turn of an episode; nothing in it is of a later turn.

    Args:
        record: The episode.
        changed: Whether each turn changed the environment's state.
        settings: How it is written.
    """
    views = []
    last = len(record.turns) - 1
    for index, (turn, moved) in enumerate(zip(record.turns, changed, strict=True)):
        facts = {"valid": turn.valid, "changed": moved, "done": index == last}
        text = settings.view
        if index == last:
            text = settings.last_view
            facts["success"] = record.success
        for name, holds in facts.items():
            text = text.replace(f"{{{name}}}", settings.true_word if holds else settings.false_word)
        views.append(text.replace("{observation}", turn.observation))
    return views
