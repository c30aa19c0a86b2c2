"""Measure what BabyAI's teacher solves: ``data/teacher.json`` and ``docs/babyai_teacher.md``.

It takes a few minutes. ``--page`` writes the page alone, from what was measured before.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import cast

from agentbench_envs.babyai import solved
from agentbench_envs.babyai.env import BabyAIEnv
from agentbench_prefix.files import write_text_atomic
from agentbench_prefix.registry import make

REPOSITORY = Path(__file__).parents[1]
DATA = REPOSITORY / "envs/agentbench_envs/babyai/data/teacher.json"
PAGE = REPOSITORY / "docs/babyai_teacher.md"


def measure() -> str:
    env = cast("BabyAIEnv", make("BabyAI-Text-v0"))
    parts = []
    for split in env.splits():
        lines = []
        for task in env.tasks(split):
            lines.append(f"{json.dumps(task)}:{json.dumps(solved.measure(env, task))}")
            print(split, lines[-1], flush=True)
        parts.append(f"{json.dumps(split)}:{{\n" + ",\n".join(lines) + "\n}")
    return "{" + ",\n".join(parts) + "}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", action="store_true", help="write the page alone")
    if not parser.parse_args().page:
        write_text_atomic(DATA, measure())
    write_text_atomic(PAGE, solved.page())


if __name__ == "__main__":
    main()
