"""``grpo_mis``: GRPO with masked importance sampling between the trainer and the rollout engine.

Objective, with ``D`` the tokens of rollouts that are kept, over the whole optimizer step::

    W_i = exp(clip(sum_t (log pi(y_it) - log pi_rollout(y_it)), +-20));  kept if 0.2 <= W_i <= 2

    pg:   pi = pi_theta at the current theta;  L = - (1 / D) sum sg(W_i) A_i log pi_theta(y_it)
    ppo:  pi = pi_old, fixed for the batch;    L = - (1 / D) sum W_i g(r_it, A_i)

``W`` has no gradient. A rollout that is not kept leaves the denominator, too; if none is kept the
loss is 0. ``pg`` has no ratio and no clipping; ``ppo`` corrects for the engine alone and leaves the
trust region to the clipped surrogate.

Source: the GRPO-MIS baseline of Prefix-GRPO, whose authors compute ``pg``. Where trainer and
rollout engine are one and the same, as with ``rollouts: transformers``, ``W`` is 1 up to rounding
and ``ppo`` is GRPO. Chosen by us: ``pg`` is the main form, as the authors have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from agentbench_baselines.grpo import GRPO, GRPOSettings, update_metrics
from agentbench_prefix.training.losses import (
    clipped_surrogate,
    policy_gradient_surrogate,
    sequence_weights,
    token_mean,
)
from agentbench_prefix.training.objective import Batch, Loss, Moment, Played, Scores, Settings


class MISSettings(GRPOSettings):
    """Fields of the recipe's ``objective``.

    Attributes:
        form: Which equation.
        weight_low: Smallest weight that is kept.
        weight_high: Greatest weight that is kept.
    """

    form: Literal["pg", "ppo"] = "pg"
    weight_low: float = Field(default=0.2, gt=0)
    weight_high: float = Field(default=2.0, gt=0)


class MIS(GRPO[MISSettings]):
    """GRPO over the rollouts that are kept, with their weights."""

    settings_type: ClassVar[type[Settings]] = MISSettings

    def __init__(self, settings: MISSettings) -> None:
        super().__init__(settings)
        self.old_logprobs = "each_epoch" if settings.form == "pg" else "before"

    def notes(self, log: Sequence[Mapping[str, float]], rollouts: str) -> list[str]:
        """Whether there was anything to correct."""
        del log
        if rollouts != "transformers":
            return []
        return ["trainer and rollout engine are one: weights are 1 before each update"]

    def prepare(self, batch: Batch, played: Played) -> None:
        """Advantages; weights; rollouts that are not kept leave the mask."""
        super().prepare(batch, played)
        assert played.logprobs is not None
        weights = sequence_weights(
            played.logprobs,
            batch.rollout_logprobs,
            batch.mask,
            low=self.settings.weight_low,
            high=self.settings.weight_high,
        )
        batch.tensors["weights"] = weights.weight
        batch.tensors["dropped"] = batch.mask.bool().any(1) & ~weights.kept
        batch.mask *= weights.kept[:, None]
        batch.active &= weights.kept

    def loss(self, batch: Batch, scores: Scores, moment: Moment) -> Loss:
        """The weighted surrogate's token mean."""
        assert batch.old_logprobs is not None
        settings, tensors = self.settings, batch.tensors
        advantages, weights = tensors["advantages"], tensors["weights"]
        if settings.form == "pg":
            surrogate = policy_gradient_surrogate(
                scores.logprobs, advantages, batch.mask, weights=weights
            )
        else:
            surrogate = clipped_surrogate(
                scores.logprobs,
                batch.old_logprobs,
                advantages,
                batch.mask,
                clip=settings.clip,
                weights=weights,
            )
        count = moment.denominator("continuation", batch.mask, settings.reduction)
        dropped = tensors["dropped"].sum()
        kept = batch.mask.bool().any(1)
        metrics = update_metrics(batch, scores, settings.clip) | {
            "mis/dropped": (dropped, dropped + kept.sum()),
            "mis/weight": (weights[kept].sum(), kept.sum()),
        }
        return Loss(-token_mean(surrogate, batch.mask, count), metrics)
