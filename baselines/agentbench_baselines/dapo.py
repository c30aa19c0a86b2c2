"""``dapo``: three changes to GRPO, each a flag.

Objective: that of :mod:`agentbench_baselines.grpo`, with

- ``clip_higher``: ratios are clipped above at ``1 + 0.28`` (``epsilon_high``) instead of 1.2;
- ``dynamic_sampling``: a group whose rewards are all equal never reaches the update; another query
  is drawn in its place, at most ``resampling`` times (a field of the recipe), then the batch stays
  smaller, which is logged as ``queries_refused`` beside ``rollouts``;
- ``overlong``: a reward is reduced by the soft penalty of length, before advantages are taken::

      0 up to limit - buffer tokens, falling linearly to -factor at limit

The token mean over the whole batch, DAPO's fourth change, is what all methods here have.

Source: DAPO (Yu et al. 2025), eq. 8-13, as the baseline of Prefix-GRPO, whose authors switch on
``clip_higher`` alone; so does the main form here, and ``full`` is a variant. Chosen by us: limit,
buffer and factor, in generated tokens of a whole episode; a group is judged by the environment's
rewards, without the penalty.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from pydantic import Field, model_validator

from agentbench_baselines.grpo import GRPO, GRPOSettings
from agentbench_prefix.training.losses import ClipRange, overlong_penalty
from agentbench_prefix.training.objective import Batch, Group, Played, Settings


class DAPOSettings(GRPOSettings):
    """Fields of the recipe's ``objective``.

    Attributes:
        clip_higher: Whether ``epsilon_high`` is used; else ``epsilon_low`` on both sides.
        epsilon_high: Ratios are clipped above at ``1 + epsilon_high``.
        dynamic_sampling: Whether groups without an advantage are replaced.
        overlong: Whether long episodes are punished.
        overlong_limit: Generated tokens from which the penalty is whole.
        overlong_buffer: Tokens before the limit over which it grows.
        overlong_factor: The whole penalty.
    """

    clip_higher: bool = True
    epsilon_high: float = 0.28
    dynamic_sampling: bool = False
    overlong: bool = False
    overlong_limit: int = Field(default=256, gt=0)
    overlong_buffer: int = Field(default=64, gt=0)
    overlong_factor: float = Field(default=1.0, ge=0)

    @model_validator(mode="after")
    def _buffer_fits(self) -> DAPOSettings:
        if self.overlong_buffer > self.overlong_limit:
            raise ValueError("overlong_buffer must be at most overlong_limit")
        return self

    @property
    def clip(self) -> ClipRange:
        """Where ratios are clipped."""
        high = self.epsilon_high if self.clip_higher else self.epsilon_low
        return ClipRange(self.epsilon_low, high, self.dual_clip)


class DAPO(GRPO[DAPOSettings]):
    """GRPO with three flags."""

    settings_type: ClassVar[type[Settings]] = DAPOSettings

    def accepts(self, group: Group) -> bool:
        """Whether rewards differ, with dynamic sampling."""
        return group.mixed or not self.settings.dynamic_sampling

    def prepare(self, batch: Batch, played: Played) -> None:
        """Advantages of rewards less the penalty."""
        settings = self.settings
        if settings.overlong:
            penalty = overlong_penalty(
                batch.mask.sum(1),
                limit=settings.overlong_limit,
                buffer=settings.overlong_buffer,
                factor=settings.overlong_factor,
            )
            punished = dataclasses.replace(batch, rewards=batch.rewards + penalty)
            super().prepare(punished, played)
        else:
            super().prepare(batch, played)
