"""How much of a teacher's trajectory to replay: a ratio that is steered, offset and annealed.

Pure functions of plain numbers. A ratio of 0 is the raw task, 1 the whole trajectory. Everything
that depends on a run's history is in :class:`ControllerState`, which goes into a checkpoint as a
mapping of plain values.

The source (AdaPrefix-GRPO, known here through a review) gives the target of one half, the moving
average, secant steps with bisection to fall back on, offsets of +-0.15, and the envelope's 0.8;
every other number is a choice of ours and an argument here.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

MAXIMUM = 0.95
"""Greatest ratio: ours, the least that leaves room for cosine decay from 0.95."""


def replayed_turns(ratio: float, n_turns: int) -> int:
    """Teacher turns to replay, the nearest whole number to ``ratio * n_turns``; halves round up.

    At least one turn is left to play.

    Args:
        ratio: 0 to 1.
        n_turns: Turns of the trajectory.

    Returns:
        0 to ``n_turns - 1``.

    Raises:
        ValueError: ``ratio`` is outside 0 to 1, or ``n_turns`` below 1.
    """
    if not 0 <= ratio <= 1:
        raise ValueError(f"ratio is {ratio}, expected 0 to 1")
    if n_turns < 1:
        raise ValueError(f"n_turns is {n_turns}, expected 1 or more")
    return min(math.floor(ratio * n_turns + 0.5), n_turns - 1)


def prefix_ratio(
    base: float, offset: float = 0.0, envelope: float = 1.0, *, maximum: float = MAXIMUM
) -> float:
    """Ratio of one query.

    Equation::

        rho_i = clip(min(base + offset_i, envelope), 0, maximum)

    Args:
        base: Ratio that is steered.
        offset: Static offset of the query's task, see :func:`difficulty_offsets`.
        envelope: Upper bound at this time, see :func:`annealing_envelope`.
        maximum: Upper bound at any time.

    Returns:
        0 to ``maximum``.
    """
    return min(max(min(base + offset, envelope), 0.0), maximum)


def difficulty_offsets(pass_rates: Sequence[float], *, span: float = 0.15) -> list[float]:
    """Offset of each task, linear in the quantile of its difficulty; their mean is 0.

    The easiest task gets ``-span``, the hardest ``+span``. Tasks of one pass rate share the mean of
    their ranks, so they are treated alike, and ties at the ends do not reach the span.

    Args:
        pass_rates: Success rate of the initial policy on each task, without prefix.
        span: Greatest offset.

    Returns:
        One offset for each task.

    Raises:
        ValueError: A rate is not within 0 to 1.
    """
    for index, rate in enumerate(pass_rates):
        if not 0 <= rate <= 1:
            raise ValueError(f"pass_rates[{index}] is {rate}, expected 0 to 1")
    places: dict[float, list[int]] = {}
    for place, rate in enumerate(sorted(pass_rates, reverse=True)):
        places.setdefault(rate, []).append(place)
    last = max(len(pass_rates) - 1, 1)
    middle = {rate: sum(found) / len(found) for rate, found in places.items()}
    if len(pass_rates) < 2:
        return [0.0] * len(pass_rates)
    return [span * (2 * middle[rate] / last - 1) for rate in pass_rates]


def calibrated_ratio(
    ratios: Sequence[float], success: Sequence[float], *, target: float = 0.5
) -> float:
    """Ratio at which success reaches the target, by linear interpolation between measured points.

    The first interval, from short prefixes to long ones, that crosses the target counts; if none
    does, the ratio whose success comes nearest to it, the shorter prefix of two.

    Args:
        ratios: Where success was measured, ascending.
        success: Mean success at each.
        target: Success wanted.

    Returns:
        A ratio within those measured.

    Raises:
        ValueError: Lengths differ, nothing was measured, or ``ratios`` do not ascend.
    """
    if len(ratios) != len(success) or not ratios:
        raise ValueError(
            f"{len(ratios)} ratios and {len(success)} success rates: give one rate for each ratio"
        )
    points = list(zip(ratios, success, strict=True))
    for (left, low), (right, high) in itertools.pairwise(points):
        if right <= left:
            raise ValueError(f"ratios do not ascend: {right} comes after {left}")
        if low < target <= high:
            return left + (right - left) * (target - low) / (high - low)
    return min(points, key=lambda point: abs(point[1] - target))[0]


def annealing_envelope(progress: float, *, start: float = 0.8) -> float:
    """Upper bound on every ratio: 1 until ``start``, then linear to exactly 0 at the end.

    Args:
        progress: Share of the training that is over, 0 to 1. A run of n batches whose last one is
            to have no prefix passes ``batch / (n - 1)``.
        start: Where it begins to fall; 1 for never.

    Returns:
        0 to 1.

    Raises:
        ValueError: An argument is outside 0 to 1.
    """
    _check_share("progress", progress)
    _check_share("start", start)
    if progress <= start:
        return 1.0
    return (1 - progress) / (1 - start)


def cosine_ratio(progress: float, *, first: float = 0.95, last: float = 0.05) -> float:
    """Ratio that falls along half a cosine (Prefix-RFT, Huang et al. 2025).

    Equation::

        last + (first - last) (1 + cos(pi progress)) / 2

    Args:
        progress: Share of the training that is over, 0 to 1.
        first: Ratio at the beginning.
        last: Ratio at the end.

    Returns:
        The ratio.

    Raises:
        ValueError: ``progress`` is outside 0 to 1.
    """
    _check_share("progress", progress)
    return last + (first - last) * (1 + math.cos(math.pi * progress)) / 2


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}, expected 0 to 1")


# ------------------------------------------------------------------ the controller
@dataclasses.dataclass(frozen=True)
class Controller:
    """Steers one ratio so that the mean success of a batch stays at a target.

    Success is taken to grow with the ratio. Every ``every`` batches, with kappa the moving average
    of the batches' success since the last update, corrected for its start at 0:

    1. ``|kappa - target| < dead_band``: hold. Without this, noise would drive bisection away from
       the root it has found.
    2. Else the ratio becomes an end of the bracket, the upper one if success was too high. If the
       bracket then is narrower than ``narrowest``, the root has left it, because the policy has
       changed: its other end is put back to 0 or ``maximum``.
    3. The next ratio is where a line through this point meets the target, if that is inside the
       bracket; else the bracket's middle. The line's slope is the last usable one between two
       updates: one whose success differs by ``least_change``, so that noise cannot swamp it, and
       that lies between ``least_slope`` and ``greatest_slope``.
    4. It moves by at most ``greatest_move``.

    Attributes:
        start: First ratio: calibrated, or a constant.
        target: Success wanted.
        every: Batches between two updates.
        beta: Decay of the moving average, per batch.
        dead_band: Distance from the target within which nothing is done.
        greatest_move: Greatest change of the ratio in one update.
        least_change: Least difference in success from which a slope is taken.
        least_slope: Least slope, success per ratio, that is trusted.
        greatest_slope: Greatest slope that is trusted; a steeper one is a policy that has changed.
        narrowest: Width of a bracket that has lost its root.
        maximum: Greatest ratio.
    """

    start: float = 0.5
    target: float = 0.5
    every: int = 20
    beta: float = 0.95
    dead_band: float = 0.02
    greatest_move: float = 0.1
    least_change: float = 0.05
    least_slope: float = 0.25
    greatest_slope: float = 10.0
    narrowest: float = 0.02
    maximum: float = MAXIMUM

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.maximum <= 1:
            raise ValueError(
                f"start is {self.start} and maximum {self.maximum}, expected "
                "0 <= start <= maximum <= 1"
            )
        if self.every < 1:
            raise ValueError(f"every is {self.every}, expected 1 or more")
        if not 0 <= self.beta < 1:
            raise ValueError(f"beta is {self.beta}, expected 0 or more, and below 1")

    def begin(self) -> ControllerState:
        """The state before the first batch."""
        return ControllerState(base=self.start, low=0.0, high=self.maximum)

    def observe(self, state: ControllerState, success: float) -> ControllerState:
        """The state after one more batch.

        Args:
            state: State before it.
            success: Mean success of its rollouts, 0 to 1.

        Returns:
            The next state; its ``base`` is that of the next batch.

        Raises:
            ValueError: ``success`` is outside 0 to 1.
        """
        _check_share("success", success)
        average = self.beta * state.average + (1 - self.beta) * success
        seen = dataclasses.replace(state, average=average, batches=state.batches + 1)
        return self._update(seen) if seen.batches >= self.every else seen

    def success(self, state: ControllerState) -> float | None:
        """kappa, the corrected moving average since the last update; ``None`` right after one."""
        if not state.batches:
            return None
        return state.average / (1 - self.beta**state.batches)

    def _update(self, state: ControllerState) -> ControllerState:
        kappa = self.success(state)
        assert kappa is not None
        base, low, high = state.base, state.low, state.high
        slope = self._slope(state, kappa)
        error = kappa - self.target
        proposal = base
        if abs(error) >= self.dead_band:
            if error > 0:
                high = base
                low = low if high - low >= self.narrowest else 0.0
            else:
                low = base
                high = high if high - low >= self.narrowest else self.maximum
            proposal = (low + high) / 2
            if slope is not None and low < base - error / slope < high:
                proposal = base - error / slope
            move = min(max(proposal - base, -self.greatest_move), self.greatest_move)
            proposal = min(max(base + move, 0.0), self.maximum)
        return ControllerState(
            base=proposal,
            low=low,
            high=high,
            last_base=base,
            last_success=kappa,
            slope=slope,
            updates=state.updates + 1,
        )

    def _slope(self, state: ControllerState, kappa: float) -> float | None:
        """Slope between this update and the last one if it is usable, else the last usable one."""
        if state.last_base is None or state.last_success is None or state.base == state.last_base:
            return state.slope
        change = kappa - state.last_success
        slope = change / (state.base - state.last_base)
        usable = self.least_slope <= slope <= self.greatest_slope
        return slope if usable and abs(change) >= self.least_change else state.slope


@dataclasses.dataclass(frozen=True)
class ControllerState:
    """What a :class:`Controller` remembers; ``dataclasses.asdict`` of it is plain JSON.

    Attributes:
        base: The ratio now.
        low: Lower end of the bracket.
        high: Upper end of the bracket.
        average: Moving average of success since the last update, not corrected.
        batches: Batches since the last update.
        last_base: Ratio before the last update.
        last_success: kappa at the last update.
        slope: Last usable slope.
        updates: Updates so far.
    """

    base: float
    low: float
    high: float
    average: float = 0.0
    batches: int = 0
    last_base: float | None = None
    last_success: float | None = None
    slope: float | None = None
    updates: int = 0
