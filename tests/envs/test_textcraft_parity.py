"""TextCraft against transcripts recorded from AgentGym's environment, where they are at hand."""

from __future__ import annotations

import importlib.util
import json

import gymnasium as gym
import pytest

from agentbench_envs.textcraft.book import official_book
from agentbench_envs.textcraft.env import TextCraftEnv, manifest

TURN_LIMIT = 30


@pytest.fixture(scope="module")
def folder(shared_data):
    return shared_data / "textcraft"


@pytest.fixture(scope="module")
def goldens(folder):
    text = (folder / "golden/agentgym_golden.jsonl").read_text(encoding="utf-8")
    records = [json.loads(line) for line in text.splitlines()]
    assert len(records) == 240
    return records


def prompt_parts(observation):
    head, goal = observation.removeprefix("Crafting commands:\n").split("\n\nGoal: ")
    return head.split("\n"), goal


def goal_tree(book, goal):
    """Lines of every recipe on the way to a goal, found by plain recursion over the raw book."""

    def spoken(name):
        return name.replace("_", " ")

    found, done = set(), set()

    def visit(name):
        if name in done:
            return
        done.add(name)
        own = [r for r in book["recipes"] if r[0] == name]
        for output, count, _, inputs in own or [r for r in book["recipes"] if r[2] == name]:
            given = ", ".join(f"{n} {spoken(item)}" for item, n, _ in inputs)
            found.add(f"craft {count} {spoken(output)} using {given}")
            for item, _, _ in inputs:
                visit(item)

    visit(goal)
    return found


@pytest.fixture(scope="module")
def raw_book(repository):
    path = repository / "envs/agentbench_envs/textcraft/data/book.json"
    return json.loads(path.read_text(encoding="utf-8"))


def test_prompts_share_the_tree_and_differ_in_distractors_only(goldens, raw_book):
    env = TextCraftEnv()
    every_line = {recipe.line for recipe in official_book().recipes}
    for record in goldens:
        ours, _ = env.reset(options={"task_id": f"textcraft_{record['data_idx']}"})
        (our_lines, our_goal), (their_lines, their_goal) = map(
            prompt_parts, (ours, record["initial_observation"])
        )
        assert our_goal == their_goal
        tree = goal_tree(raw_book, record["goal"].removeprefix("minecraft:"))
        for lines in (our_lines, their_lines):
            assert tree <= set(lines) <= every_line, record["goal"]
            assert len(lines) == len(set(lines)) <= len(tree) + 10
        # A task that has distractors at all has them on both sides.
        assert (len(our_lines) > len(tree)) == (len(their_lines) > len(tree))


def test_compat_replays_every_record_byte_for_byte(goldens):
    env = gym.make("TextCraft-v0", compat="agentgym").unwrapped
    steps = 0
    for record in goldens:
        env.reset(options={"task_id": f"textcraft_{record['data_idx']}"})
        for number, step in enumerate(record["steps"]):
            observation, reward, terminated, truncated, _ = env.step(step["action"])
            assert (observation, reward, terminated, truncated) == (
                step["observation"],
                step["reward"],
                step["terminated"],
                step["truncated"],
            ), (record["data_idx"], record["script"], number, step["action"])
            steps += 1
    assert steps > 4000


def test_the_default_equals_each_record_up_to_its_end_or_the_limit(goldens):
    env = gym.make("TextCraft-v0").unwrapped
    ends = {"terminated": 0, "truncated": 0, "record": 0}
    for record in goldens:
        env.reset(options={"task_id": f"textcraft_{record['data_idx']}"})
        end = "record"
        for turn, step in enumerate(record["steps"], 1):
            observation, reward, terminated, truncated, info = env.step(step["action"])
            assert (observation, reward, terminated) == (
                step["observation"],
                step["reward"],
                step["terminated"],
            )
            assert truncated == (turn == TURN_LIMIT and not terminated)
            assert info["success"] == terminated
            if terminated or truncated:
                end = "terminated" if terminated else "truncated"
                break
        ends[end] += 1
    assert min(ends["terminated"], ends["truncated"]) > 0


def test_the_task_index_agrees(folder):
    path = folder / "golden/agentgym_task_index_sorted_listdir.json"
    recorded = json.loads(path.read_text(encoding="utf-8"))
    book = official_book()
    assert len(recorded) == len(book.goals) == 544
    for entry in recorded:
        goal = book.goals[entry["data_idx"]]
        assert entry["goal"] == f"minecraft:{goal}"
        assert entry["depth"] == book.depth(goal)


def test_the_splits_agree(folder):
    recorded = json.loads((folder / "splits_agentgym.json").read_text(encoding="utf-8"))
    for split in ("train", "test"):
        (theirs,) = (value for key, value in recorded.items() if key.startswith(split))
        assert sorted(theirs) == sorted(manifest()["splits"][split])


def test_the_book_follows_from_the_recipe_files(folder, repository, raw_book):
    path = repository / "scripts/build_textcraft_book.py"
    spec = importlib.util.spec_from_file_location("build_textcraft_book", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    built = script.build(folder / "recipes_1.16.5")
    assert json.loads(json.dumps(built)) == raw_book
