"""Which tasks there are: the splits, their rule, and what their worlds must be.

The rule, applied once by ``scripts/build_babyai_manifest.py`` and fixed in ``data/manifest.json``:
each level's seeds are taken in order from 0, leaving out a seed whose world was met before.

1. ``test``: from each of the five reported families 18 tasks, its levels in turn.
2. ``test_all``: from each level the next 5.
3. ``train``: the next tasks, all 40 levels in turn, until there are 810.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from agentbench_envs.babyai import levels
from agentbench_prefix.errors import ConfigurationError, UnknownNameError
from agentbench_prefix.files import canonical_json, sha256_text

SPLITS: tuple[str, ...] = ("train", "test", "test_all")
HASH_DIGITS = 16
"""Hexadecimal digits of a world's hash that the manifest keeps."""
_FIRST_GENERATED_SEED = 10**6
_MOST_GENERATED = 10**6


@functools.cache
def manifest() -> dict[str, Any]:
    """The manifest: for each split, the tasks in order with the hash of their world."""
    text = files(__package__).joinpath("data/manifest.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


@functools.cache
def tasks(split: str) -> tuple[str, ...]:
    """Task ids of a split.

    Raises:
        UnknownNameError: No such split.
    """
    if split not in SPLITS:
        raise UnknownNameError("split", split, SPLITS)
    return tuple(manifest()["splits"][split])


@functools.cache
def data_hash() -> str:
    """Hash of the levels, the splits and their worlds."""
    return sha256_text(canonical_json([levels.LEVELS, levels.FAMILIES, manifest()["splits"]]))


def check_world(task: str, world_hash: Callable[[], str]) -> None:
    """Check that the installed minigrid and NumPy make a task's world as it was fixed.

    Args:
        task: Task id; one that is in no split passes.
        world_hash: Gives the hash of the world at hand.

    Raises:
        ConfigurationError: They make another one.
    """
    expected = _worlds().get(task)
    if expected is not None and world_hash()[:HASH_DIGITS] != expected:
        from importlib.metadata import version

        raise ConfigurationError(
            f"{task} is another world here (hash {world_hash()[:HASH_DIGITS]}, expected {expected}"
            f"): minigrid {version('minigrid')} with numpy {version('numpy')} does not draw levels "
            f"as {manifest()['made_with']} did; install those versions"
        )


@functools.cache
def _worlds() -> dict[str, str]:
    return {task: world for split in manifest()["splits"].values() for task, world in split.items()}


def generated(seed: int, n: int, level: int | None) -> tuple[str, ...]:
    """Ids of tasks beyond every split.

    Args:
        seed: 0 to 10^18.
        n: How many, up to 10^6.
        level: 1 to 40, ``None`` for the levels in turn.

    Raises:
        ValueError: One of them is out of range.
    """
    for name, value, low, high in (
        ("seed", seed, 0, 10**18),
        ("n", n, 0, _MOST_GENERATED),
        ("level", level, 1, len(levels.LEVELS)),
    ):
        if name == "level" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"{name} must be an integer from {low} to {high}, got {value!r}")
    first = _FIRST_GENERATED_SEED + seed * _MOST_GENERATED
    return tuple(levels.task_id(level or i % len(levels.LEVELS) + 1, first + i) for i in range(n))
