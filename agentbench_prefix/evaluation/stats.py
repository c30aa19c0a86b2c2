"""Estimators and their 95 % intervals.

The task is the unit: samples of one task are not independent.

Every interval here is of a mean over tasks. It is the percentile interval of a bootstrap that
resamples tasks (Efron and Tibshirani 1993, section 13.3), except where that one collapses:

- fewer than :data:`FEW_TASKS` tasks: Wilson's score interval (Wilson 1927) with n = the number of
  tasks. The variance of a mean of values in [0, 1] is at most that of a proportion, so the
  interval errs on the wide side.
- fewer than :data:`FEW_DIFFERING` tasks differ from a value v that all others have: either limit is
  the outer one of the bootstrap's and Wilson's. At v = 0 (hardly a task was solved at all) and at
  v = 1, Wilson's interval is again that of the mean with n = the number of tasks. For any v (0 also
  where two runs are compared) the mean is v + a - b, where a and b are the means of how far tasks
  are above and below v; each has Wilson's interval, in its own range, and the two make one by
  squaring and adding (Newcombe 1998, Statistics in Medicine 17:873, method 10).
  Either alone fails here. A policy that solves 1 % of episodes whatever the task solves one of
  41 tasks x 8 samples in every eighth run, where the bootstrap's upper limit is 0.9 %: it covers
  the truth in 88 % of runs. Wilson's lower limit for one of n is too high: with 0.3 % of tasks
  always solved and the others never, it misses in 11 % of runs. The outer ones cover the truth in
  99 % and 100 %. Where this rule gives way to the bootstrap alone, from four such tasks to five, a
  limit may draw in by less than 1 / n.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

FEW_TASKS = 10
FEW_DIFFERING = 5
RESAMPLES = 10_000
Z95 = 1.959963984540054
"""97.5 % quantile of the standard normal distribution."""

Floats = npt.NDArray[np.float64]


class Estimate(BaseModel):
    """A number with its 95 % interval.

    Attributes:
        value: The estimate.
        low: Lower limit.
        high: Upper limit.
        interval: ``"bootstrap"``, or ``"wilson"`` where Wilson's interval had a say.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: float
    low: float
    high: float
    interval: Literal["bootstrap", "wilson"]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k samples solves the task.

    ``1 - C(n - c, k) / C(n, k)`` (Chen et al. 2021, equation 1), in exact integer arithmetic.

    Args:
        n: Samples drawn.
        c: Samples that solved the task, 0 <= c <= n.
        k: Size of the group, 1 <= k <= n.

    Raises:
        ValueError: c or k is out of range.
    """
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, got n={n}, c={c}, k={k}")
    total = math.comb(n, k)
    return (total - math.comb(n - c, k)) / total


def ks(samples: int) -> list[int]:
    """Group sizes reported for a number of samples: powers of two up to it, and it itself."""
    powers = [1 << i for i in range(samples.bit_length()) if 1 << i <= samples]
    return powers if powers[-1] == samples else [*powers, samples]


def wilson(p: float, n: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a proportion, within [0, 1].

    Args:
        p: Observed proportion.
        n: Number of observations, at least 1.
        z: Quantile of the standard normal distribution.
    """
    centre = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low, high = (centre - half) / scale, (centre + half) / scale
    # The formula gives these limits exactly; rounding errors would miss them by 1e-17.
    return (0.0 if p == 0 else low), (1.0 if p == 1 else high)


def bootstrap_means(values: Floats, resamples: int = RESAMPLES, seed: int = 0) -> Floats:
    """Means over resampled tasks.

    Args:
        values: Shape ``(n_tasks, m)``: m quantities per task; all share the same resamples.
        resamples: Number of resamples B.
        seed: Seed of the resampling.

    Returns:
        Shape ``(B, m)``.
    """
    n = len(values)
    rng = np.random.default_rng(seed)
    means = np.empty((resamples, values.shape[1]))
    block = max(1, 2_000_000 // n)  # bounds the memory, whatever the number of tasks
    for begin in range(0, resamples, block):
        picks = rng.integers(0, n, size=(min(block, resamples - begin), n))
        for column in range(values.shape[1]):
            means[begin : begin + block, column] = values[picks, column].mean(axis=1)
    return means


def mean_estimates(values: Floats, *, low: float = 0.0, high: float = 1.0) -> list[Estimate]:
    """Means over tasks with their intervals, as the module's description says.

    Args:
        values: Shape ``(n_tasks, m)``: m quantities per task, each within ``[low, high]``.
        low: Smallest possible value.
        high: Largest possible value.

    Returns:
        One estimate per column, rounded to 12 decimals so that the order of a sum cannot show.

    Raises:
        ValueError: There is no task.
    """
    n = len(values)
    if n == 0:
        raise ValueError("an interval needs at least one task")
    resampled = bootstrap_means(values) if n >= FEW_TASKS else None
    found = []
    for column, of_tasks in enumerate(values.T):
        mean = float(of_tasks.mean())
        kind: Literal["bootstrap", "wilson"] = "wilson"
        if resampled is None:
            limits = _scaled_wilson(mean, n, low, high)
        else:
            lower, upper = np.percentile(resampled[:, column], [2.5, 97.5])
            limits = (float(lower), float(upper))
            common = float(np.median(of_tasks))  # what most tasks have, if there is such a value
            if np.count_nonzero(of_tasks != common) < FEW_DIFFERING:
                other = _limits_around(common, of_tasks, low, high)
                limits = (min(limits[0], other[0]), max(limits[1], other[1]))
            else:
                kind = "bootstrap"
        found.append(
            Estimate(
                value=round(mean, 12),
                low=round(limits[0], 12),
                high=round(limits[1], 12),
                interval=kind,
            )
        )
    return found


def _scaled_wilson(mean: float, n: int, low: float, high: float) -> tuple[float, float]:
    """Wilson's interval of a mean of values within ``[low, high]``."""
    if low == high:
        return low, high
    lower, upper = wilson((mean - low) / (high - low), n)
    return low + lower * (high - low), low + upper * (high - low)


def _limits_around(common: float, values: Floats, low: float, high: float) -> tuple[float, float]:
    """Limits of the mean of values most of which are the same."""
    n = len(values)
    above = float(np.maximum(values - common, 0).mean())
    below = float(np.maximum(common - values, 0).mean())
    above_low, above_high = _scaled_wilson(above, n, 0.0, high - common)
    below_low, below_high = _scaled_wilson(below, n, 0.0, common - low)
    mean = common + above - below
    return (
        mean - math.hypot(above - above_low, below_high - below),
        mean + math.hypot(above_high - above, below - below_low),
    )
