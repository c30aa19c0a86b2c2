"""Two runs over the same tasks, compared task by task."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from agentbench_prefix.errors import ConfigurationError
from agentbench_prefix.evaluation.metrics import Metrics
from agentbench_prefix.evaluation.runner import CONFIG, METRICS, differences
from agentbench_prefix.evaluation.stats import Estimate, mean_estimates, pass_at_k

_SAME = ("env", "data_hash", "split", "task_ids", "samples")


@dataclasses.dataclass(frozen=True)
class PairedDifference:
    """Difference B - A over a set of tasks.

    Attributes:
        n_tasks: Tasks.
        a: Mean of A.
        b: Mean of B.
        difference: Mean over tasks of B - A with its interval, in [-1, 1].
    """

    n_tasks: int
    a: float
    b: float
    difference: Estimate


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two runs side by side.

    Attributes:
        a: Metrics of the first run.
        b: Metrics of the second run.
        changed: Entries of the configuration in which they differ.
        average: Differences in success rate, by family, and ``"all"`` last.
        passed: Differences in Pass@k with k = the number of samples, likewise.
    """

    a: Metrics
    b: Metrics
    changed: list[str]
    average: dict[str, PairedDifference]
    passed: dict[str, PairedDifference]


def compare(folder_a: Path, folder_b: Path) -> Comparison:
    """Compare two finished runs.

    Raises:
        ConfigurationError: A folder holds no finished run, or the runs are not over the same
            tasks, environment, data, split and number of samples.
    """
    (key_a, a), (key_b, b) = load_evaluation(folder_a), load_evaluation(folder_b)
    changed = differences(key_a, key_b, ("in A", "in B"))
    clashes = [entry for entry in changed if entry.split(" ", 1)[0] in _SAME]
    if clashes:
        raise ConfigurationError(
            f"A ({folder_a}) and B ({folder_b}) cannot be compared task by task: "
            f"{'; '.join(clashes)}"
        )
    groups: dict[str, list[str]] = {}
    for task, result in a.tasks.items():
        groups.setdefault(result.family, []).append(task)
    groups = dict(sorted(groups.items())) | {"all": list(a.tasks)}
    n = a.samples
    average, passed = {}, {}
    for name, tasks in groups.items():
        solved = np.array([[run.tasks[task].successes for task in tasks] for run in (a, b)])
        at_least_once = np.array([[pass_at_k(n, int(c), n) for c in row] for row in solved])
        average[name] = _paired(solved / n)
        passed[name] = _paired(at_least_once)
    return Comparison(a, b, changed, average, passed)


def _paired(values: Any) -> PairedDifference:
    """Compare two rows of per-task values, shape ``(2, n_tasks)``."""
    difference = mean_estimates((values[1] - values[0])[:, None], low=-1.0, high=1.0)[0]
    return PairedDifference(
        values.shape[1], float(values[0].mean()), float(values[1].mean()), difference
    )


def load_evaluation(folder: Path) -> tuple[dict[str, Any], Metrics]:
    """Read what identifies a finished evaluation, and its metrics.

    Raises:
        ConfigurationError: The folder holds no finished evaluation.
    """
    try:
        key: dict[str, Any] = json.loads((folder / CONFIG).read_text("utf-8"))["key"]
        return key, Metrics.model_validate_json((folder / METRICS).read_text("utf-8"))
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"{folder} is not a finished evaluation (no {Path(error.filename).name}): run its "
            "evaluation to the end first"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise ConfigurationError(
            f"{folder} is not a finished evaluation ({str(error).splitlines()[0]})"
        ) from error
