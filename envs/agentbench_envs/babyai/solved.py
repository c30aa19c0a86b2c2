"""What the teacher solves within the turn limit, as published in ``data/teacher.json``.

``scripts/measure_babyai_teacher.py`` measures it; tests measure it again.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from agentbench_envs.babyai.env import BabyAIEnv
from agentbench_envs.babyai.levels import FAMILIES, LEVELS, REPORTED, level_and_seed

ATTEMPTS = 4
"""Varied plays of a task, with the seeds 0, 1, ..."""
DETOURS = 0.2
"""Their share of detours."""


class Measured(NamedTuple):
    """Plays of one task.

    Attributes:
        plain: Turns of the plain play, 0 if it does not solve the task within the limit.
        varied: The same of each varied play.
        reason: Why the task is not solved, in the teacher's words; empty if a play solves it.
    """

    plain: int
    varied: tuple[int, ...]
    reason: str


def measure(env: BabyAIEnv, task_id: str) -> Measured:
    """Let the teacher play a task, plainly and in varied ways.

    Args:
        env: The unwrapped environment; it is reset.
        task_id: The task.
    """
    plain, reason = _play(env, task_id, None)
    plays = [_play(env, task_id, seed) for seed in range(ATTEMPTS)]
    varied = tuple(turns for turns, _ in plays)
    return Measured(plain, varied, "" if plain or any(varied) else reason)


def _play(env: BabyAIEnv, task_id: str, seed: int | None) -> tuple[int, str]:
    env.reset(options={"task_id": task_id})
    teacher = env.teacher(seed, detours=0.0 if seed is None else DETOURS)
    reason, success = "", False
    while not env.ended:
        action = teacher.next_turn().action
        reason = reason or teacher.reason
        *_, info = env.step(action)
        success = info["success"]
    return env.turn if success else 0, reason


@functools.cache
def published() -> Mapping[str, Mapping[str, Measured]]:
    """What was measured, by split and task."""
    text = files(__package__).joinpath("data/teacher.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = json.loads(text)
    return {
        split: {task: Measured(row[0], tuple(row[1]), row[2]) for task, row in rows.items()}
        for split, rows in found.items()
    }


def table(split: str) -> str:
    """What is published of a split as a Markdown table: a row per level, per reported family.

    Args:
        split: ``"train"``, ``"test"`` or ``"test_all"``.
    """
    rows = published()[split]
    by_level: dict[int, list[Measured]] = {}
    for task, row in rows.items():
        by_level.setdefault(level_and_seed(task)[0], []).append(row)
    lines = [
        "| level | tasks | solved | plain turns | varied plays solved | their turns |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for level, found in sorted(by_level.items()):
        lines.append(_row(f"{level} {LEVELS[level - 1]}", found))
    for family in REPORTED:
        found = [row for level in FAMILIES[family] for row in by_level.get(level, ())]
        lines.append(_row(f"**{family}**", found))
    lines.append(_row("**all**", list(rows.values())))
    return "\n".join(lines)


def _row(name: str, found: Sequence[Measured]) -> str:
    plain = [row.plain for row in found if row.plain]
    varied = [turns for row in found for turns in row.varied]
    won = [turns for turns in varied if turns]
    return (
        f"| {name} | {len(found)} | {len(plain)} | {_mean(plain)} | "
        f"{len(won)}/{len(varied)} | {_mean(won)} |"
    )


def _mean(turns: Sequence[int]) -> str:
    return f"{sum(turns) / len(turns):.2f}" if turns else ""


def unsolved(split: str) -> str:
    """The tasks of a split that no play solves, and why, as a Markdown list.

    Args:
        split: ``"train"``, ``"test"`` or ``"test_all"``.
    """
    reasons: dict[tuple[str, str], list[str]] = {}
    for task, row in published()[split].items():
        if row.reason:
            level = LEVELS[level_and_seed(task)[0] - 1]
            reasons.setdefault((level, row.reason), []).append(task)
    lines = [
        f"- {level}: {reason}: {', '.join(tasks)}." for (level, reason), tasks in reasons.items()
    ]
    return "\n".join(lines) or "Every task is solved."


def page() -> str:
    """The page of the documentation."""
    parts = [
        f"""\
# What BabyAI's teacher solves

`BabyAI-Text-v0`'s teacher (`env.teacher()`, the `oracle` policy) within the limit of \
{BabyAIEnv.default_max_turns} turns. The plain play is the shortest plan found with the whole grid \
known. Varied plays (seeds 0 to {ATTEMPTS - 1}, detours {DETOURS}) explore: they act on what came \
into view, and fall back on a plan that knows where to look only if that would not succeed within \
the limit. The reported families are those of Prefix-GRPO, as `agentbench_envs.babyai.levels` \
infers them. The tasks were \
chosen by a rule that does not look at play.

Every task's row is in `agentbench_envs/babyai/data/teacher.json`. \
`python scripts/measure_babyai_teacher.py` measures anew and writes this page.
"""
    ]
    parts += [
        f"## {split}\n\n{table(split)}\n\nUnsolved:\n\n{unsolved(split)}\n" for split in published()
    ]
    return "\n".join(parts)
