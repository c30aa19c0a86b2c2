"""Write BabyAI's manifest: the splits, and the hash of every task's world.

The rule is in :mod:`agentbench_envs.babyai.tasks`. It looks at worlds, never at how anybody plays
them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path

from agentbench_envs.babyai.board import Board
from agentbench_envs.babyai.levels import FAMILIES, LEVELS, REPORTED, task_id
from agentbench_envs.babyai.tasks import HASH_DIGITS
from agentbench_prefix.files import write_text_atomic

TEST_A_FAMILY, TEST_A_LEVEL, TRAIN = 18, 5, 810


def worlds(level: int) -> Iterator[tuple[str, str]]:
    """Tasks of a level that are unlike all before them, with the hash of their world."""
    met = set()
    for seed in itertools.count():
        world = Board(level, seed).world_hash()[:HASH_DIGITS]
        if world not in met:
            met.add(world)
            yield task_id(level, seed), world


def main() -> None:
    supply = {level: worlds(level) for level in range(1, len(LEVELS) + 1)}

    def take(levels: Iterable[int], n: int) -> dict[str, str]:
        turns = itertools.islice(itertools.cycle(levels), n)
        return dict(next(supply[level]) for level in turns)

    test = {}
    for family in REPORTED:
        test.update(take(FAMILIES[family], TEST_A_FAMILY))
    splits = {"test": test, "test_all": take(supply, TEST_A_LEVEL * len(LEVELS))}
    splits["train"] = take(supply, TRAIN)
    parts = []
    for name, found in splits.items():
        ordered = sorted(found.items(), key=lambda entry: int(entry[0].removeprefix("babyai_")))
        lines = ",\n".join(f"{json.dumps(task)}:{json.dumps(world)}" for task, world in ordered)
        parts.append(f"{json.dumps(name)}:{{\n{lines}\n}}")
    made_with = f"minigrid {version('minigrid')} with numpy {version('numpy')}"
    text = f'{{"made_with":{json.dumps(made_with)},\n"splits":{{\n' + ",\n".join(parts) + "}}\n"
    path = Path(__file__).parents[1] / "envs/agentbench_envs/babyai/data/manifest.json"
    write_text_atomic(path, text)


if __name__ == "__main__":
    main()
