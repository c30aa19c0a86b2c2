"""``adaprefix``: how much of a teacher's trajectory is replayed is steered, then annealed to zero.

Objective: that of :mod:`agentbench_baselines.grpo` over the student's continuation; prefix tokens
carry no loss, the reward is the whole episode's. The query of a drawn trajectory with n turns
starts after ``round(rho_i n)`` of them::

    rho_i = clip(min(base + delta_i, envelope(t)), 0, maximum)

- ``base``: a controller keeps the batches' mean success at ``target``: every ``every`` steps a
  secant or bisection step on the moving average, see
  :class:`agentbench_prefix.training.prefix_ratio.Controller`.
- ``delta_i``: linear in the quantile of the task's difficulty, from ``-span`` (easiest) to
  ``+span``; difficulty is the pass rate of the initial policy, measured by a probe before training.
- The first base is calibrated: success is measured at the ratios of ``grid`` before training, and
  interpolated to the target.
- ``envelope``: 1 until ``anneal_from`` of training, then linearly to 0; the controller is frozen
  then. The last step has no prefix.

``schedule``: ``controlled`` (above), ``fixed`` (base stays at ``start``: PrefixRL; with
``anneal_from`` 0.8 PrefixRL+anneal), ``cosine`` (0.95 to 0.05: Prefix-RFT). Variants of
``controlled``: ``span: 0`` (base-only), ``calibrate: false`` (conservative-constant).

Source: AdaPrefix-GRPO, known here through a review, which gives target, moving average, secant with
bisection, +-0.15, 0.8 and the loss mask; all other numbers are chosen by us and fields here. What
probe and calibration cost is reported beside every result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from agentbench_baselines.grpo import GRPO, GRPOSettings
from agentbench_prefix.env import JSON
from agentbench_prefix.training.objective import Engine, Moment, Outcome, Settings
from agentbench_prefix.training.prefix_ratio import (
    Controller,
    ControllerState,
    annealing_envelope,
    calibrated_ratio,
    cosine_ratio,
    difficulty_offsets,
    prefix_ratio,
    replayed_turns,
)
from agentbench_prefix.training.queries import Query, QueryPool


class AdaPrefixSettings(GRPOSettings):
    """Fields of the recipe's ``objective``.

    Attributes:
        schedule: What moves the base ratio.
        start: First base ratio where it is not calibrated.
        target: Success wanted.
        every: Steps between two updates of the base ratio.
        beta: Decay of success' moving average, per step.
        dead_band: Distance from the target within which nothing is done.
        greatest_move: Greatest change in one update.
        maximum: Greatest ratio.
        span: Greatest offset of a task; 0 for no offsets, and then no probe.
        probe_samples: Samples of each task in the probe.
        calibrate: Whether the first base ratio is measured.
        grid: Ratios at which success is measured.
        calibration_queries: Trajectories played at each of them.
        calibration_samples: Samples of each.
        anneal_from: Share of training after which every ratio is annealed; 1 for never.
    """

    schedule: Literal["controlled", "fixed", "cosine"] = "controlled"
    start: float = Field(default=0.5, ge=0, le=1)
    target: float = Field(default=0.5, gt=0, lt=1)
    every: int = Field(default=20, gt=0)
    beta: float = Field(default=0.95, ge=0, lt=1)
    dead_band: float = Field(default=0.02, ge=0)
    greatest_move: float = Field(default=0.1, gt=0)
    maximum: float = Field(default=0.95, gt=0, le=1)
    span: float = Field(default=0.15, ge=0)
    probe_samples: int = Field(default=4, gt=0)
    calibrate: bool = True
    grid: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 0.9)
    calibration_queries: int = Field(default=64, gt=0)
    calibration_samples: int = Field(default=4, gt=0)
    anneal_from: float = Field(default=0.8, ge=0, le=1)


class AdaPrefix(GRPO[AdaPrefixSettings]):
    """GRPO from a state of a trajectory that a controller chooses."""

    settings_type: ClassVar[type[Settings]] = AdaPrefixSettings

    def __init__(self, settings: AdaPrefixSettings) -> None:
        super().__init__(settings)
        self.offsets: dict[str, float] = {}
        self.controller = self._controller(settings.start)
        self.state = self.controller.begin()
        self.progress = 0.0

    def _controller(self, start: float) -> Controller:
        settings = self.settings
        return Controller(
            start=min(start, settings.maximum),
            target=settings.target,
            every=settings.every,
            beta=settings.beta,
            dead_band=settings.dead_band,
            greatest_move=settings.greatest_move,
            maximum=settings.maximum,
        )

    # -------------------------------------------------------------- before training
    def begin(self, pool: QueryPool, engine: Engine) -> None:
        """Probe the difficulty of each task, and calibrate the first ratio."""
        settings = self.settings
        if settings.span:
            tasks = {query.task_id: query for query in pool.queries}
            played = engine.play("probe", list(tasks.values()), settings.probe_samples)
            offsets = difficulty_offsets([_success([o]) for o in played], span=settings.span)
            self.offsets = dict(zip(tasks, offsets, strict=True))
        if settings.calibrate and settings.schedule == "controlled":
            chosen = pool.draw(
                np.random.Generator(np.random.Philox(0)), settings.calibration_queries
            )
            success = []
            for ratio in settings.grid:
                cuts = [self._cut(pool, query, min(ratio, settings.maximum)) for query in chosen]
                success.append(
                    _success(engine.play("calibration", cuts, settings.calibration_samples))
                )
            self.controller = self._controller(
                calibrated_ratio(settings.grid, success, target=settings.target)
            )
            self.state = self.controller.begin()

    # -------------------------------------------------------------- each step
    def draw(self, pool: QueryPool, rng: np.random.Generator, n: int) -> list[Query]:
        """Trajectories, each cut where its ratio says."""
        return [self._cut(pool, query, self.ratio(query.task_id)) for query in pool.draw(rng, n)]

    def ratio(self, task_id: str) -> float:
        """Ratio of a task's query now."""
        settings = self.settings
        base = self.state.base
        if settings.schedule == "cosine":
            base = cosine_ratio(self.progress)
        envelope = annealing_envelope(self.progress, start=settings.anneal_from)
        return prefix_ratio(
            base, self.offsets.get(task_id, 0.0), envelope, maximum=settings.maximum
        )

    def _cut(self, pool: QueryPool, query: Query, ratio: float) -> Query:
        return pool.cut(query, replayed_turns(ratio, query.n_turns))

    def observe(self, outcomes: Sequence[Outcome], moment: Moment) -> dict[str, float]:
        """Steer the base ratio by the step's success."""
        settings = self.settings
        success = _success(outcomes)
        measured = {
            "adaprefix/base": self.state.base,
            "adaprefix/envelope": annealing_envelope(self.progress, start=settings.anneal_from),
            "adaprefix/success": success,
            "adaprefix/replayed": sum(o.prefix_turns for o in outcomes)
            / max(sum(o.n_turns for o in outcomes), 1),
        }
        kappa = self.controller.success(self.state)
        if kappa is not None:
            measured["adaprefix/kappa"] = kappa
        if settings.schedule == "controlled" and self.progress <= settings.anneal_from:
            self.state = self.controller.observe(self.state, success)
        self.progress = min((moment.step + 1) / max(moment.steps - 1, 1), 1.0)
        return measured

    # -------------------------------------------------------------- checkpoints
    def state_dict(self) -> dict[str, JSON]:
        """Offsets, the controller's start and state, and how far training is."""
        return {
            "offsets": dict(self.offsets),
            "start": self.controller.start,
            "controller": dataclasses.asdict(self.state),
            "progress": self.progress,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        self.offsets = dict(state["offsets"])
        self.controller = self._controller(state["start"])
        self.state = ControllerState(**state["controller"])
        self.progress = state["progress"]


def _success(outcomes: Sequence[Outcome]) -> float:
    flags = [solved for outcome in outcomes for solved in outcome.successes]
    return sum(flags) / len(flags)
