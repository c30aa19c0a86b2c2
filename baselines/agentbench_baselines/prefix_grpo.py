"""``prefix_grpo``: the teacher's turns before the cut are learnt beside the student's after it.

Objective, with ``z`` the tokens of a replayed prefix and ``g`` as in
:mod:`agentbench_baselines.grpo` (Prefix-GRPO eq. 4-6)::

    r_iu   = exp(clip(log pi_theta(z_iu | z_i<u) - l_old_iu, +-20))      u in M_pre
    A_pre  = | mean_{t in M_cont(i)} A_it |                             per rollout, no gradient
    L      = - (1 / |M_cont|) sum g(r_it, A_i; eps, eps)
             - lambda_pre (1 / |M_pre|) sum g(r_iu, A_pre; eps_pre_low, eps_pre_high)

``l_old`` are teacher-forced log-probabilities of the SFT policy on the canonical prompt, read from
the corpus' sidecars; ``M_pre`` holds content and end-of-turn token of the teacher's trainable
turns, once for each rollout. The ratio of the first step is not 1 when training starts from
another policy than SFT: its median is logged as ``prefix/ratio``.

``signal`` is what ``A_pre`` is: ``magnitude`` (above), ``constant`` (1), ``positive``
(``max(mean A, 0)``), ``success`` (1 if R > 0 else 0), ``lift`` (``|mean A|`` plus how much more
often the query is solved than the raw query of its trajectory; whole trajectories are drawn).
``full_demo`` adds, for each raw query in the batch, its whole teacher trajectory as a row of the
prefix branch, with ``A_demo = clamp(R_demo - mean R_raw, 0, 1)`` over that query's rollouts.
``form: joint`` takes one token mean over both branches, with the continuation's range.

Source: Prefix-GRPO, sections 3.2, 3.3 and 8.1. Chosen by us: token means in the place of sums
(``reduction``); how lift and magnitude are combined; what a success is; that joint ignores
``lambda_pre``; the cuts of the final turn are left out of the corpus.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
import torch

from agentbench_baselines.grpo import GRPO, GRPOSettings, update_metrics
from agentbench_prefix.training.losses import (
    Branch,
    ClipRange,
    clipped_surrogate,
    demonstration_advantages,
    family_lift,
    importance_ratio,
    is_clipped,
    kl_estimate,
    mean_advantages,
    prefix_advantages,
    prefix_continuation_loss,
    token_mean,
)
from agentbench_prefix.training.objective import (
    Batch,
    Engine,
    Group,
    Loss,
    Moment,
    Outcome,
    Played,
    Scores,
    Settings,
)
from agentbench_prefix.training.queries import Query, QueryPool


class PrefixSettings(GRPOSettings):
    """Fields of the recipe's ``objective``.

    Attributes:
        prefix_weight: ``lambda_pre``.
        prefix_epsilon_low: ``eps_pre_low``; it never binds, since ``A_pre`` is not negative.
        prefix_epsilon_high: ``eps_pre_high``.
        signal: What ``A_pre`` is.
        full_demo: Whether whole trajectories are learnt from beside their raw queries.
        form: Two token means, or one over both branches.
    """

    prefix_weight: float = 1.0
    prefix_epsilon_low: float = 0.2
    prefix_epsilon_high: float = 0.2
    signal: Literal["magnitude", "constant", "positive", "success", "lift"] = "magnitude"
    form: Literal["split", "joint"] = "split"
    full_demo: bool = False

    @property
    def prefix_clip(self) -> ClipRange:
        """Where ratios of prefix tokens are clipped."""
        if self.form == "joint":
            return self.clip
        return ClipRange(self.prefix_epsilon_low, self.prefix_epsilon_high, self.dual_clip)


class PrefixGRPO(GRPO[PrefixSettings]):
    """Replay-GRPO and a clipped term over the prefix."""

    settings_type: ClassVar[type[Settings]] = PrefixSettings
    uses_prefix: ClassVar[bool] = True

    def draw(self, pool: QueryPool, rng: np.random.Generator, n: int) -> list[Query]:
        """Queries; whole trajectories where they are compared with their raw query."""
        if self.settings.signal == "lift":
            return pool.draw_trajectories(rng, n)
        return pool.draw(rng, n)

    def extend(self, groups: Sequence[Group], engine: Engine) -> list[Group]:
        """Whole trajectories of the raw queries, if they are asked for."""
        if not self.settings.full_demo:
            return list(groups)
        raw = {g.query.trajectory_id: g.query for g in groups if not g.query.prefix_turns}
        return [*groups, *(engine.demonstration(query) for query in raw.values())]

    def prepare(self, batch: Batch, played: Played) -> None:
        """Advantages of both branches."""
        used = batch.active.clone()
        super().prepare(batch, played)
        signal = self.settings.signal
        anchor = prefix_advantages(
            signal,
            mean_advantages(batch.tensors["advantages"], batch.mask),
            rewards=batch.rewards,
            lift=_lift(batch, played.outcomes) if signal == "lift" else None,
        )
        demonstrations = [i for i, row in enumerate(batch.records) if row is None]
        if demonstrations:
            anchor[demonstrations] = _demonstrated(batch, demonstrations, played.outcomes)
        batch.tensors["prefix_advantages"] = anchor
        batch.active |= used & (anchor != 0) & batch.prefix_mask.bool().any(1)

    def masks(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Those of both branches."""
        return {"continuation": batch.mask, "prefix": batch.prefix_mask}

    def loss(self, batch: Batch, scores: Scores, moment: Moment) -> Loss:
        """Both branches."""
        assert batch.old_logprobs is not None
        settings = self.settings
        continuation = Branch(
            scores.logprobs, batch.old_logprobs, batch.tensors["advantages"], batch.mask
        )
        prefix = Branch(
            scores.prefix_logprobs,
            batch.prefix_old_logprobs,
            batch.tensors["prefix_advantages"],
            batch.prefix_mask,
        )
        count = moment.denominator("continuation", batch.mask, settings.reduction)
        prefix_count = moment.denominator("prefix", batch.prefix_mask, settings.reduction)
        loss = prefix_continuation_loss(
            continuation,
            prefix,
            objective=settings.form,
            prefix_weight=settings.prefix_weight,
            clip=settings.clip,
            prefix_clip=settings.prefix_clip,
            denominator=count,
            prefix_denominator=prefix_count,
        )
        with torch.no_grad():
            scored = batch.prefix_mask.bool() & batch.active[:, None]
            clip = settings.prefix_clip
            weight = 1.0 if settings.form == "joint" else settings.prefix_weight
            own = clipped_surrogate(*prefix, clip=clip).abs()
            others = clipped_surrogate(*continuation, clip=settings.clip).abs()
            share = weight * token_mean(own, batch.prefix_mask, prefix_count)
            rest = token_mean(others, batch.mask, count)
            seen = (scores.prefix_logprobs, batch.prefix_old_logprobs)
            clipped = is_clipped(*seen, batch.tensors["prefix_advantages"], scored, clip=clip)
            kl = kl_estimate(*seen, scored)
            ratios = importance_ratio(*seen, scored)[scored]
        n, tokens = scored.sum(), batch.prefix_mask.sum()
        metrics = update_metrics(batch, scores, settings.clip) | {
            "prefix/ratio": (ratios.median() * n if len(ratios) else 0.0, n),
            "prefix/kl": (kl.sum(), n),
            "prefix/clip_fraction": (clipped.sum(), n),
            "prefix/loss_share": (share, share + rest),
            "prefix/token_fraction": (tokens, tokens + batch.mask.sum()),
        }
        return Loss(loss.total, metrics)


def _families(outcomes: Sequence[Outcome]) -> dict[str, int]:
    return {name: i for i, name in enumerate(dict.fromkeys(o.trajectory_id for o in outcomes))}


def _demonstrated(batch: Batch, rows: Sequence[int], outcomes: Sequence[Outcome]) -> torch.Tensor:
    """Advantage of each demonstration; all are in, since each comes with its raw query."""
    used = [outcome for outcome in outcomes if outcome.used]
    families = _families(used)
    shown = [batch.groups[int(batch.group_index[row])].query.trajectory_id for row in rows]
    advantages, _ = demonstration_advantages(
        batch.rewards[list(rows)].cpu(),
        torch.tensor([families[name] for name in shown]),
        torch.tensor([sum(o.rewards) / len(o.rewards) for o in used], dtype=batch.rewards.dtype),
        torch.tensor([families[o.trajectory_id] for o in used]),
        torch.tensor([o.prefix_turns == 0 for o in used]),
    )
    return advantages.to(batch.rewards.device)


def _lift(batch: Batch, outcomes: Sequence[Outcome]) -> torch.Tensor:
    """Lift of each rollout's query, over all groups of the step."""
    used = [outcome for outcome in outcomes if outcome.used]
    names = _families(used)
    lift = family_lift(
        torch.tensor([sum(r > 0 for r in o.rewards) / len(o.rewards) for o in used]),
        torch.tensor([names[o.trajectory_id] for o in used]),
        torch.tensor([o.prefix_turns == 0 for o in used]),
    )
    by_query = {o.query_id: value for o, value in zip(used, lift.tolist(), strict=True)}
    values = [
        by_query.get(group.query.query_id, 0.0) for group in batch.groups for _ in group.rollouts
    ]
    return torch.tensor(values, dtype=batch.rewards.dtype, device=batch.rewards.device)
