"""``grpo``: group-relative policy optimization on raw tasks; from ``sft`` it is SFT -> GRPO.

Objective, over the generated tokens of G samples of each query (``init: sft`` starts from SFT)::

    A_i   = (R_i - mean R) / (std_{n-1} R + 1e-6)            for every token of sample i
    r_it  = exp(clip(log pi_theta(y_it) - log pi_old(y_it), +-20))
    g     = min(r A, clip(r, 1 - eps_low, 1 + eps_high) A);  A < 0: max(g, c A)
    L     = - (1 / |M|) sum_{(i, t) in M} g(r_it, A_i)

``M`` holds the generated tokens of the whole optimizer step, over all processes and micro-batches,
those of groups without any advantage included; observations carry no loss. ``pi_old`` is the
trainer's own policy before the update, computed anew, not what the rollout engine reported.

Source: GRPO (Shao et al. 2024), as the baseline of Prefix-GRPO (section 4.1). Its authors' settings
are eps = 0.2, c = 3 (dual clip), two optimizer steps on 16 queries, no KL and no entropy term.
Chosen by us: the token mean's denominator (``reduction``: ``micro`` is the authors', ``sum`` that
of the paper's equations); the weights of families, the learning rate and the number of queries in
the CPU tier.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

from agentbench_prefix.training.losses import (
    ClipRange,
    clipped_surrogate,
    group_advantages,
    is_clipped,
    kl_estimate,
    token_mean,
)
from agentbench_prefix.training.objective import (
    Batch,
    Loss,
    Moment,
    Objective,
    Played,
    Scores,
    Settings,
)

S = TypeVar("S", bound="GRPOSettings")


class GRPOSettings(Settings):
    """Fields of the recipe's ``objective``.

    Attributes:
        epsilon_low: Ratios are clipped below at ``1 - epsilon_low``.
        epsilon_high: Ratios are clipped above at ``1 + epsilon_high``.
        dual_clip: ``c``; ``None`` for no such bound.
    """

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    dual_clip: float | None = 3.0

    @property
    def clip(self) -> ClipRange:
        """Where ratios are clipped."""
        return ClipRange(self.epsilon_low, self.epsilon_high, self.dual_clip)


class GRPO(Objective[S]):
    """Group-relative advantages and the clipped surrogate."""

    settings_type: ClassVar[type[Settings]] = GRPOSettings

    def prepare(self, batch: Batch, played: Played) -> None:
        """Advantages; rollouts without one have no gradient and are not scored."""
        del played
        advantages = group_advantages(batch.rewards, batch.group_index)
        batch.tensors["advantages"] = advantages
        batch.active &= advantages != 0

    def loss(self, batch: Batch, scores: Scores, moment: Moment) -> Loss:
        """The clipped surrogate's token mean."""
        assert batch.old_logprobs is not None
        advantages, clip = batch.tensors["advantages"], self.settings.clip
        surrogate = clipped_surrogate(
            scores.logprobs, batch.old_logprobs, advantages, batch.mask, clip=clip
        )
        count = moment.denominator("continuation", batch.mask, self.settings.reduction)
        loss = -token_mean(surrogate, batch.mask, count)
        return Loss(loss, update_metrics(batch, scores, clip))


def update_metrics(batch: Batch, scores: Scores, clip: ClipRange) -> dict[str, Any]:
    """How far the policy is from the old one: clip fraction and KL over scored tokens."""
    assert batch.old_logprobs is not None
    scored = batch.mask.bool() & batch.active[:, None]
    clipped = is_clipped(
        scores.logprobs, batch.old_logprobs, batch.tensors["advantages"], scored, clip=clip
    )
    kl = kl_estimate(scores.logprobs.detach(), batch.old_logprobs, scored)
    return {
        "clip_fraction": (clipped.sum(), scored.sum()),
        "kl": (kl.sum(), scored.sum()),
    }
