"""Estimators and their 95 % intervals.

The task is the unit: samples of one task are not independent.

Every interval here is of a mean over tasks. It is the percentile interval of a bootstrap that
resamples tasks (Efron and Tibshirani 1993, section 13.3), except where that one collapses:

- fewer than :data:`FEW_TASKS` tasks: Wilson's score interval (Wilson 1927) with n = the number of
  tasks. The variance of a mean of values in [0, 1] is at most that of a proportion, so the
  interval errs on the wide side.
- every task has the same value v (0 and 1 are the usual cases): how far the mean may be from v is
  bounded by how many tasks may differ from v when none of n did, which is Wilson's upper limit for
  0 of n. At v = 0 and v = 1 this is Wilson's interval itself.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

FEW_TASKS = 10
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
        interval: ``"bootstrap"`` or ``"wilson"``: which of the two made the limits.
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
            limits = wilson((mean - low) / (high - low), n)
            limits = (low + limits[0] * (high - low), low + limits[1] * (high - low))
        elif (of_tasks == of_tasks[0]).all():
            mean = float(of_tasks[0])
            differing = wilson(0.0, n)[1]
            limits = (mean - differing * (mean - low), mean + differing * (high - mean))
        else:
            kind = "bootstrap"
            lower, upper = np.percentile(resampled[:, column], [2.5, 97.5])
            limits = (float(lower), float(upper))
        found.append(
            Estimate(
                value=round(mean, 12),
                low=round(limits[0], 12),
                high=round(limits[1], 12),
                interval=kind,
            )
        )
    return found
