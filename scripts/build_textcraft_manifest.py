"""Write TextCraft's manifest: splits, and each task's goal, prompt hash and shortest plan."""

from __future__ import annotations

import json
from pathlib import Path

from agentbench_envs.textcraft.book import official_book, spoken
from agentbench_envs.textcraft.planner import plan
from agentbench_prefix.files import sha256_text, write_text_atomic

# AgentGym's item ids (first and last of each run); the other tasks are `extra`.
RUNS = {
    "train": (
        (31, 139),
        (181, 183),
        (185, 194),
        (196, 215),
        (217, 222),
        (224, 228),
        (230, 238),
        (240, 242),
        (244, 253),
        (255, 264),
        (266, 286),
        (288, 301),
        (303, 322),
        (324, 361),
        (363, 375),
        (377, 380),
        (383, 384),
        (386, 403),
        (405, 419),
        (445, 446),
        (448, 452),
        (455, 455),
        (459, 459),
        (462, 464),
        (466, 466),
        (469, 472),
        (475, 475),
        (477, 477),
        (480, 482),
        (484, 484),
        (489, 489),
        (491, 492),
        (495, 496),
        (501, 502),
        (504, 504),
        (506, 506),
        (510, 511),
        (513, 514),
        (517, 518),
        (520, 520),
        (523, 523),
        (528, 528),
        (531, 532),
        (537, 537),
    ),
    "test": ((0, 30), (140, 180), (420, 444), (533, 535)),
}


def main() -> None:
    book = official_book()
    splits = {name: [i for a, b in runs for i in range(a, b + 1)] for name, runs in RUNS.items()}
    taken = set(splits["train"]) | set(splits["test"])
    splits["extra"] = [i for i in range(len(book.goals)) if i not in taken]
    tasks = {}
    for index, goal in enumerate(book.goals):
        task_id = f"textcraft_{index}"
        commands = "\n".join(book.commands(goal, task_id))
        prompt = f"Crafting commands:\n{commands}\n\nGoal: craft {spoken(goal)}."
        tasks[task_id] = {
            "goal": goal,
            "depth": book.depth(goal),
            "prompt_sha256": sha256_text(prompt),
            "plan": [step.text for step in plan(book, goal)],
        }
    lines = ",\n".join(f"{json.dumps(k)}:{json.dumps(v)}" for k, v in tasks.items())
    head = json.dumps(
        {"env_id": "TextCraft-v0", "book_sha256": book.content_hash, "splits": splits}
    )
    path = Path(__file__).parents[1] / "envs/agentbench_envs/textcraft/data/manifest.json"
    write_text_atomic(path, head[:-1] + ',"tasks":{\n' + lines + "\n}}\n")
    print(f"{ {k: len(v) for k, v in splits.items()} } -> {path}")


if __name__ == "__main__":
    main()
