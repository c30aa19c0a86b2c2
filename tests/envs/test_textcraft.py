"""TextCraft's tasks, strings and hooks, from facts written down here."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from importlib.resources import files
from statistics import mean

import gymnasium as gym
import pytest

from agentbench_envs.textcraft import dialogue as prompts
from agentbench_envs.textcraft.book import official_book
from agentbench_envs.textcraft.env import TextCraftEnv, manifest
from agentbench_prefix.env import PlayedTurn
from agentbench_prefix.errors import PrefixError, SnapshotError, UnknownNameError
from agentbench_prefix.files import sha256_text

BOAT = {"task_id": "textcraft_125"}
BOAT_RECIPES = {
    "craft 1 acacia boat using 5 acacia planks",
    "craft 4 acacia planks using 1 acacia logs",
}
NO_RECIPE = (
    "Could not find a valid recipe for ItemTagWithCount("
    "item_tag=ItemTag(tag={}, item_id={}), count={})"
)


def prompt_parts(observation):
    """Recipe lines and goal of a first observation."""
    head, goal = observation.removeprefix("Crafting commands:\n").split("\n\nGoal: craft ")
    return head.split("\n"), goal.removesuffix(".")


def play(env, actions):
    return [env.step(action)[0] for action in actions]


@pytest.fixture
def env():
    return TextCraftEnv()


@pytest.fixture
def boat(env):
    env.reset(options=BOAT)
    return env


# ------------------------------------------------------------------ tasks
def test_the_book_and_its_goals(env):
    book = official_book()
    assert len(book.recipes) == 613
    assert len(book.tags) == 23
    goals = env.tasks("all")
    assert goals == tuple(f"textcraft_{i}" for i in range(544))
    families = Counter(env.family(task) for task in goals)
    assert families == {"depth_1": 125, "depth_2": 291, "depth_3": 117, "depth_4": 11}
    # Ordered by depth, so a family is a run of indices.
    assert sorted(goals, key=lambda task: env.family(task)) == list(goals)


@pytest.mark.parametrize(
    ("index", "goal"),
    [
        (0, "acacia planks"),
        (1, "acacia wood"),
        (2, "beacon"),
        (125, "acacia boat"),
        (420, "anvil"),
        (495, "netherite block"),
    ],
)
def test_task_numbers(env, index, goal):
    observation, _ = env.reset(options={"task_id": f"textcraft_{index}"})
    assert prompt_parts(observation)[1] == goal


def test_splits(env):
    sizes = {split: len(env.tasks(split)) for split in env.splits()}
    assert sizes == {"train": 374, "test": 100, "extra": 70, "all": 544}
    parts = [set(env.tasks(split)) for split in ("train", "test", "extra")]
    assert set.union(*parts) == set(env.tasks("all"))
    assert sum(map(len, parts)) == 544
    depths = Counter(env.family(task) for task in env.tasks("test"))
    assert depths == {"depth_1": 31, "depth_2": 41, "depth_3": 25, "depth_4": 3}
    assert Counter(env.family(t) for t in env.tasks("train"))["depth_4"] == 1


def test_the_manifest_names_the_book_and_every_prompt(env):
    recorded = manifest()
    assert recorded["env_id"] == "TextCraft-v0"
    assert recorded["book_sha256"] == official_book().content_hash
    assert set(recorded["tasks"]) == set(env.tasks("all"))
    for task, entry in recorded["tasks"].items():
        observation, info = env.reset(options={"task_id": task})
        assert sha256_text(observation) == entry["prompt_sha256"], task
        assert prompt_parts(observation)[1] == entry["goal"].replace("_", " ")
        assert info["family"] == f"depth_{entry['depth']}"


@pytest.mark.parametrize("hash_seed", ["0", "4711"])
def test_prompts_are_the_same_in_every_process(hash_seed):
    script = (
        "import agentbench_prefix, hashlib\n"
        "env = agentbench_prefix.make('TextCraft-v0')\n"
        "tasks = [*env.tasks('all'), *env.generate_tasks(1, 50)]\n"
        "options = [{'task_id': t, **more} for t in tasks for more in "
        "({}, {'distractor_seed': 3}, {'rename_seed': 4})]\n"
        "print(hashlib.sha256(''.join(env.reset(options=o)[0] for o in options[::3] + "
        "options[1:300:3] + options[2:300:3]).encode()).hexdigest())\n"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (hash_seed, "1")
    }
    assert len(found) == 1
    assert len(found.pop().strip()) == 64


def test_prompts_hold_the_tree_and_at_most_ten_distractors(env):
    book = official_book()
    for task in env.tasks("all"):
        observation, _ = env.reset(options={"task_id": task})
        lines, goal = prompt_parts(observation)
        assert len(lines) == len(set(lines))
        tree = set(book.tree(goal.replace(" ", "_")))
        assert tree <= set(lines), task
        assert len(lines) - len(tree) <= 10, task
        assert set(lines) <= {recipe.line for recipe in book.recipes}, task


def test_distractors_vary_by_name_only(env):
    plain, _ = env.reset(options=BOAT)
    assert set(prompt_parts(plain)[0]) >= BOAT_RECIPES
    varied = [env.reset(options={**BOAT, "distractor_seed": seed})[0] for seed in (0, 1, 2, 3, 0)]
    assert varied[0] == varied[4]
    assert len({plain, *varied}) == 5
    for observation in varied:
        lines, goal = prompt_parts(observation)
        assert goal == "acacia boat"
        assert set(lines) >= BOAT_RECIPES
        assert len(lines) <= len(BOAT_RECIPES) + 10
    with pytest.raises(ValueError, match="distractor_seed must be an integer, got 'x'"):
        env.reset(options={**BOAT, "distractor_seed": "x"})


def test_renaming_permutes_words_and_leaves_the_game_as_it_was(env):
    env.reset(options=BOAT)
    plan = [step.text for step in env.shortest_plan()]
    seen = set()
    for seed in range(5):
        observation, _ = env.reset(options={**BOAT, "rename_seed": seed})
        lines, goal = prompt_parts(observation)
        seen.add(goal)
        assert goal != "acacia boat"
        renamed = [step.text for step in env.shortest_plan()]
        assert len(renamed) == len(plan)
        assert set(renamed) - set(lines) == {a for a in renamed if a.startswith("get")}
        for action in renamed:
            _, reward, terminated, _, _ = env.step(action)
        assert (reward, terminated) == (1.0, True)
    assert len(seen) == 5


def test_bad_names(env):
    with pytest.raises(UnknownNameError, match=r"'textcraft_544'.*textcraft_0 to textcraft_543"):
        env.reset(options={"task_id": "textcraft_544"})
    for task in ("textcraft_007", "textcraft_-1", "generated_1_2_d5", "generated_01_2_d1", ""):
        with pytest.raises(UnknownNameError):
            env.reset(options={"task_id": task})
    with pytest.raises(UnknownNameError, match="agentgym"):
        TextCraftEnv(compat="adapt")
    with pytest.raises(ValueError, match="contradict"):
        TextCraftEnv(compat="agentgym", strict=True)
    with pytest.raises(ValueError, match="no turn limit"):
        TextCraftEnv(compat="agentgym", max_turns=5)


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [
        ({}, 30),
        ({"max_turns": None}, None),
        ({"max_turns": 36}, 36),
        ({"compat": "agentgym"}, None),
        ({"compat": "agentgym", "max_turns": None}, None),
        ({"strict": True}, 30),
    ],
)
def test_the_turn_limit_and_arguments_that_can_be_given_back(arguments, limit):
    env = gym.make("TextCraft-v0", **arguments).unwrapped
    assert env.max_turns == limit
    assert TextCraftEnv(**env.arguments()).arguments() == env.arguments()
    env.reset(options={"task_id": "textcraft_420"})
    turns = [env.step("inventory")[3] for _ in range(limit or 100)]
    assert turns == [False] * (len(turns) - 1) + [limit is not None]


def test_a_prefix_longer_than_the_limit_with_a_fresh_budget(env):
    prefix = {"task_id": "textcraft_420", "prefix_actions": ["inventory"] * 30}
    assert env.reset(options={**prefix, "fresh_budget": True})[1]["turn"] == 0
    for action in manifest()["tasks"]["textcraft_420"]["plan"][:30]:
        truncated = env.step(action)[3]
    assert truncated
    with pytest.raises(PrefixError, match=r"at turn 30 of 30.*raise max_turns \(now 30\)"):
        env.reset(options=prefix)


def test_compat_replays_a_prefix_past_the_end():
    craft = "craft 4 acacia planks using 1 acacia logs"
    prefix = ["get 9 acacia logs", craft, craft, "inventory"]
    stepped, replayed = (TextCraftEnv(compat="agentgym") for _ in range(2))
    stepped.reset(options={"task_id": "textcraft_0"})
    texts = play(stepped, prefix)
    observation, info = replayed.reset(options={"task_id": "textcraft_0", "prefix_actions": prefix})
    assert [*info["prefix_observations"][1:], observation] == texts
    assert replayed.step(craft) == stepped.step(craft)


# ------------------------------------------------------------------ what the game prints
def test_solving(boat):
    logs, planks = "get 2 acacia logs", "craft 4 acacia planks using 1 acacia logs"
    assert play(boat, [logs, planks, planks]) == [
        "Got 2 acacia logs",
        "Crafted 4 minecraft:acacia_planks",
        "Crafted 4 minecraft:acacia_planks",
    ]
    observation, reward, terminated, truncated, info = boat.step(
        "craft 1 acacia boat using 5 acacia planks"
    )
    assert observation == "Crafted 1 minecraft:acacia_boat"
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)


@pytest.mark.parametrize(
    ("before", "action", "answer", "valid"),
    [
        ([], "inventory", "Inventory: You are not carrying anything.", True),
        (
            ["get 5 coal", "get 1 oak log", "get 2 coal"],
            "inventory",
            "Inventory: [coal] (7) [oak log] (1) ",
            True,
        ),
        ([], "get 2 diamond", "Got 2 diamond", True),
        ([], "get 007 diamond", "Got 7 diamond", True),
        (["get 0 diamond"], "inventory", "Inventory: [diamond] (0) ", True),
        ([], "get 1 acacia boat", "Could not find acacia boat", False),
        ([], "get 1 planks", "Could not find planks", False),
        ([], "get 1 not an item", "Could not find not an item", False),
        ([], "get 2 Diamond", "Could not find Diamond", False),
        ([], "get 2 diamond ", "Could not find diamond ", False),
        ([], "get 3 minecraft:diamond", "Could not find minecraft:diamond", False),
        ([], "get diamond", "Could not execute get diamond", False),
        ([], "get -1 diamond", "Could not execute get -1 diamond", False),
        ([], "Get 1 diamond", "Could not execute Get 1 diamond", False),
        ([], " inventory", "Could not execute  inventory", False),
        ([], "", "Could not execute ", False),
        ([], "craft acacia boat", "Could not execute craft acacia boat", False),
        ([], "craft 1 acacia boat using diamond", "Wrong item format: diamond", False),
        ([], "craft 1 acacia boat using ", "Wrong item format: ", False),
        (
            [],
            "craft 1 acacia boat using 5 acacia planks",
            "Could not find enough items to craft minecraft:acacia_boat",
            False,
        ),
        (
            ["get 2 bamboo"],
            "craft 1 planks using 3 bamboo",
            "Could not find enough items to craft None",
            False,
        ),
        (
            ["get 8 diamond"],
            "craft 1 acacia boat using 1 diamond",
            NO_RECIPE.format("None", "'minecraft:acacia_boat'", 1),
            False,
        ),
        (
            ["get 8 diamond"],
            "craft 3 not an item using 1 diamond",
            NO_RECIPE.format("None", "'minecraft:not_an_item'", 3),
            False,
        ),
        (
            ["get 8 diamond"],
            "craft planks using 1 diamond",
            NO_RECIPE.format("'minecraft:planks'", "None", 1),
            False,
        ),
        (["get 2 bamboo"], "craft 9 stick using 2 bamboo", "Crafted 1 minecraft:stick", True),
        (["get 2 bamboo"], "craft stick using 2 bamboo", "Crafted 1 minecraft:stick", True),
        (
            ["get 4 bamboo"],
            "craft 2 stick using 4 bamboo",
            NO_RECIPE.format("None", "'minecraft:stick'", 2),
            False,
        ),
        (
            ["get 2 bamboo", "craft 1 stick using 2 bamboo", "get 1 feather", "get 1 flint"],
            "craft 4 arrow using 1 feather, 1 stick ,1 flint",
            "Crafted 4 minecraft:arrow",
            True,
        ),
        (
            ["get 1 acacia logs", "craft 4 acacia planks using 1 acacia logs"],
            "craft 4 stick using 2 acacia planks",
            "Crafted 4 minecraft:stick",
            True,
        ),
        (
            ["get 1 acacia logs", "craft 4 acacia planks using 1 acacia logs"],
            "craft 4 stick using 2 planks",
            "Could not find enough items to craft minecraft:stick",
            False,
        ),
    ],
)
def test_answers(boat, before, action, answer, valid):
    play(boat, before)
    inventory = dict(boat.inventory)
    observation, reward, terminated, _, info = boat.step(action)
    assert observation == answer
    assert info["valid_action"] is valid
    assert (reward, terminated) == (0.0, False)
    if not valid:
        assert boat.inventory == inventory


def test_crafting_uses_up_one_batch(boat):
    play(boat, ["get 5 bamboo", "craft 1 stick using 2 bamboo"])
    assert boat.step("inventory")[0] == "Inventory: [bamboo] (3) [stick] (1) "
    play(boat, ["get 1 bamboo", *["craft 1 stick using 2 bamboo"] * 2])
    assert boat.step("inventory")[0] == "Inventory: [stick] (3) "


def test_text_after_the_command_is_ignored(boat):
    assert boat.step("inventory please")[0] == "Inventory: You are not carrying anything."
    assert boat.step("get 1 diamond\ninventory")[0] == "Got 1 diamond"


@pytest.mark.parametrize("digits", [19, 4300, 5000, 100_000])
def test_an_absurd_number_is_answered(boat, digits):
    number = "7" * digits
    for action in (
        f"get {number} diamond",
        f"craft {number} stick using 2 bamboo",
        f"craft 1 stick using {number} bamboo",
    ):
        observation, _, _, _, info = boat.step(action)
        assert observation == f"Could not execute {action}"
        assert info["valid_action"] is False
    assert boat.step(f"get {'0' * digits}2 diamond")[0] == "Got 2 diamond"


STRICT = [
    ("a wrong output count", ["get 2 bamboo"], "craft 9 stick using 2 bamboo"),
    ("no output count", ["get 2 bamboo"], "craft stick using 2 bamboo"),
    ("nothing fetched", [], "get 0 diamond"),
    ("text after the command", [], "inventory please"),
    ("a line after the command", [], "get 1 diamond\ninventory"),
    ("a line after crafting", ["get 2 bamboo"], "craft 1 stick using 2 bamboo\ninventory"),
    ("underscores", [], "get 1 nether_star"),
]


@pytest.mark.parametrize(("loophole", "before", "action"), STRICT, ids=[s[0] for s in STRICT])
def test_strict_closes_the_loophole_and_says_so(loophole, before, action):
    lenient, strict = TextCraftEnv(), TextCraftEnv(strict=True)
    for env in (lenient, strict):
        env.reset(options=BOAT)
        play(env, before)
    assert lenient.step(action)[4]["valid_action"]
    inventory = dict(strict.inventory)
    observation, _, _, _, info = strict.step(action)
    assert observation.startswith("Strict: ")
    assert not info["valid_action"]
    assert strict.inventory == inventory


def test_strict_plays_every_plan():
    env = TextCraftEnv(strict=True, max_turns=None)
    for task in env.tasks("test"):
        env.reset(options={"task_id": task})
        for action in manifest()["tasks"][task]["plan"]:
            _, reward, _, _, info = env.step(action)
            assert info["valid_action"]
        assert reward == 1.0


def test_compat_goes_on_after_the_end():
    env = gym.make("TextCraft-v0", compat="agentgym").unwrapped
    env.reset(options={"task_id": "textcraft_0"})
    craft = "craft 4 acacia planks using 1 acacia logs"
    play(env, ["get 9 acacia logs"])
    assert [env.step(craft)[1:4] for _ in range(3)] == [(1.0, True, False)] * 3
    assert not any(env.step("inventory")[3] for _ in range(100))
    assert env.snapshot().arguments == {"max_turns": None, "compat": "agentgym", "strict": False}


# ------------------------------------------------------------------ plans and teachers
def test_recorded_plans_solve_every_task_and_are_short():
    env = TextCraftEnv(max_turns=None)
    lengths = {}
    for task in env.tasks("all"):
        plan = manifest()["tasks"][task]["plan"]
        env.reset(options={"task_id": task})
        steps = [env.step(action) for action in plan]
        assert [step[2] for step in steps] == [False] * (len(plan) - 1) + [True], task
        lengths[task] = len(plan)
    for depth, bound in ((1, 2.20), (2, 5.12), (3, 10.24), (4, 18.55)):
        family = [n for task, n in lengths.items() if env.family(task) == f"depth_{depth}"]
        assert round(mean(family), 2) <= bound
    assert max(lengths.values()) == lengths["textcraft_495"] == 48
    assert lengths["textcraft_420"] == 36


def test_the_planner_finds_the_recorded_plans(env):
    for task in env.tasks("test"):
        env.reset(options={"task_id": task})
        assert [step.text for step in env.shortest_plan()] == manifest()["tasks"][task]["plan"]


def test_what_thirty_turns_cannot_reach(env):
    assert env.out_of_reach("test", 30) == ("textcraft_420",)
    assert env.out_of_reach("train", 30) == ("textcraft_495",)
    assert env.out_of_reach("all", 30) == ("textcraft_420", "textcraft_495")
    assert env.out_of_reach("all", 36) == ("textcraft_495",)
    assert env.out_of_reach("all", 48) == env.out_of_reach("all", None) == ()


def test_the_teacher_solves_the_test_within_the_limit_but_for_one(env):
    unsolved = []
    for task in env.tasks("test"):
        _, info = env.reset(options={"task_id": task})
        teacher = env.teacher()
        while not env.ended:
            info = env.step(teacher.next_turn().action)[4]
            assert info["valid_action"]
        if not info["success"]:
            unsolved.append(task)
    assert unsolved == ["textcraft_420"]


@pytest.mark.parametrize("seed", range(3))
def test_a_teacher_that_errs_marks_it_and_recovers(seed):
    env = TextCraftEnv(max_turns=None)
    marked = 0
    for task in env.tasks("test")[::7]:
        env.reset(options={"task_id": task})
        teacher = env.teacher(seed, detours=0.5)
        while not env.ended:
            turn = teacher.next_turn()
            valid = env.step(turn.action)[4]["valid_action"]
            assert valid or not turn.trainable
            assert turn.thought
            marked += not turn.trainable
        assert env.snapshot().state["success"] is True
    assert marked > 10
    with pytest.raises(ValueError, match="detours need a seed"):
        env.teacher(detours=0.5)
    with pytest.raises(ValueError, match=r"\[0, 1\)"):
        env.teacher(0, detours=1.0)


def test_generated_worlds(env):
    tasks = env.generate_tasks(11, 400)
    found = Counter(int(task[-1]) for task in tasks)
    for depth, share in ((1, 0.2), (2, 0.4), (3, 0.3), (4, 0.1)):
        assert abs(found[depth] / 400 - share) < 0.08
    goals = set()
    for task in tasks[:60]:
        observation, info = env.reset(options={"task_id": task})
        lines, goal = prompt_parts(observation)
        goals.add(goal)
        assert info["family"] == f"depth_{task[-1]}"
        tree = set(env.book.tree(env.goal))
        assert tree <= set(lines)
        assert len(lines) - len(tree) <= 10
    assert len(goals) > 50
    assert {env.family(t) for t in env.generate_tasks(0, 5, depth=3)} == {"depth_3"}
    with pytest.raises(UnknownNameError, match="unknown parameter 'size'; valid: depth"):
        env.generate_tasks(0, 5, size=3)
    for bad in ({"seed": -1, "n": 1}, {"seed": 0, "n": -1}, {"seed": 0, "n": 1, "depth": 5}):
        with pytest.raises(ValueError, match=r"must be|seed"):
            env.generate_tasks(**bad)


# ------------------------------------------------------------------ hooks
def test_fields(env):
    observation, _ = env.reset(options={"task_id": "textcraft_0"})
    assert env.fields(observation)["goal"] == "acacia planks"
    assert "craft 4 acacia planks using 1 acacia logs" in env.fields(observation)["commands"]
    empty = "Inventory: You are not carrying anything."
    held = env.fields("Inventory: [oak log] (5) [coal] (1) ")
    assert env.fields(empty) == {"inventory": {}}
    assert held == {"inventory": {"coal": 1, "oak log": 5}}
    assert list(held["inventory"]) == ["coal", "oak log"]
    assert env.fields("Got 2 diamond") == {"got": {"item": "diamond", "count": 2}}
    assert env.fields("Crafted 4 minecraft:oak_planks") == {
        "crafted": {"item": "oak planks", "count": 4}
    }
    for refusal in ("Could not find x", "Could not execute ", "Wrong item format: x", ""):
        assert env.fields(refusal) == {}


def test_the_order_of_recipes_is_no_field(env):
    one, _ = env.reset(options={**BOAT, "distractor_seed": 1})
    lines, goal = prompt_parts(one)
    other = "Crafting commands:\n" + "\n".join(lines[::-1]) + f"\n\nGoal: craft {goal}."
    assert other != one
    assert env.fields(other) == env.fields(one)


@pytest.mark.parametrize(
    ("action", "category"),
    [
        ("get 1 acacia boat", "unavailable_item"),
        ("craft 1 acacia boat using 5 acacia planks", "insufficient_items"),
        ("craft 1 acacia boat using 1 bamboo", "no_valid_recipe"),
        ("craft 1 stick using 2 bamboo", "crafted_other_item"),
        ("get 1 diamond", "item_acquired"),
        ("inventory", "inventory_check"),
        ("dance", "invalid_action"),
        ("craft 1 acacia boat using diamond", "invalid_action"),
        (None, "malformed_reply"),
    ],
)
def test_failure_categories(boat, action, category):
    boat.step("get 9 bamboo")
    step = boat.skip_turn("Write one action.") if action is None else boat.step(action)
    turn = PlayedTurn(action, step[0], valid=step[4]["valid_action"])
    assert boat.failure_category([PlayedTurn("inventory", "", valid=True), turn]) == category
    assert boat.failure_category([]) == "no_turn"


def test_candidates_are_what_the_prompt_offers(boat):
    offered = boat.candidate_actions()
    assert offered[0] == "inventory"
    assert set(boat.commands) <= set(offered)
    assert "get 1 acacia logs" in offered
    assert len(offered) == len(set(offered))


def test_the_worked_example_is_what_the_game_does(env):
    goal = prompts.EXAMPLE_RECIPES[0].split(" using ")[0].removeprefix("craft 6 ")
    (task,) = (t for t, e in manifest()["tasks"].items() if e["goal"] == goal.replace(" ", "_"))
    assert task not in env.tasks("test"), "the example would give a test task away"
    observation, _ = env.reset(options={"task_id": task})
    assert set(prompts.EXAMPLE_RECIPES) <= set(prompt_parts(observation)[0])
    answers = [env.step(action) for _, action in prompts.EXAMPLE_TURNS]
    assert [answer[0] for answer in answers] == list(prompts.EXAMPLE_ANSWERS)
    assert all(answer[4]["valid_action"] for answer in answers)
    full = env.dialogues()["full"]
    for thought, action in prompts.EXAMPLE_TURNS:
        assert full.render(action, thought) in full.system
        assert full.parse(full.render(action, thought)).action == action


def test_dialogues(env):
    assert [d.label for d in env.dialogues().values()] == ["full@1", "compact@1"]
    full, compact = env.dialogues().values()
    assert compact.system is None
    assert compact.render("inventory", "Hm.") == "inventory"
    assert full.parse("Think: hm.\nAction: [[ inventory ]]").action == "inventory"


def test_the_data_is_sorted_json():
    raw = json.loads(files("agentbench_envs.textcraft").joinpath("data/book.json").read_text())
    for key in ("items", "tags"):
        assert raw[key] == sorted(set(raw[key]))


@pytest.mark.parametrize("entries", [["a1"], [["oak_logs", -3]], [["no_such_item", 1]], [[3, "4"]]])
def test_a_state_that_is_no_inventory_is_refused(entries):
    env = TextCraftEnv()
    env.reset(options={"task_id": "textcraft_31"})
    env.step("get 2 oak logs")
    here = env.snapshot()
    with pytest.raises(SnapshotError, match="inventory entry"):
        env.restore(dataclasses.replace(here, state={**here.state, "env": entries}))
    assert env.snapshot() == here
