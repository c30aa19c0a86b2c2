"""BabyAI's teacher: plans, explorations, mistakes, thoughts, and what is published of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from drawn import DOWN, RIGHT, UP, draw
from minigrid.envs.babyai.core.verifier import (
    AfterInstr,
    AndInstr,
    BeforeInstr,
    GoToInstr,
    ObjDesc,
    OpenInstr,
    PickupInstr,
    PutNextInstr,
)

from agentbench_envs.babyai import solved
from agentbench_envs.babyai.board import new_game
from agentbench_envs.babyai.explorer import Explorer
from agentbench_envs.babyai.levels import FAMILIES, LEVELS, REPORTED, level_and_seed, task_id
from agentbench_envs.babyai.macros import Choices, run
from agentbench_envs.babyai.mission import Game
from agentbench_envs.babyai.planner import NoPlan, plan_mission
from agentbench_envs.babyai.teacher import written
from agentbench_envs.stable import StableRandom
from agentbench_prefix.registry import make

THING = re.compile(r"\b(?:red|green|blue|purple|yellow|grey) (?:(?:open|closed|locked) )?\w+")
STATE = re.compile(r" (?:open|closed|locked) ")


@pytest.fixture
def env():
    return make("BabyAI-Text-v0")


def perform(game, steps):
    """Play a plan in a minigrid game; what it says, and whether the mission was done."""
    said, done = [], False
    for step in steps:
        text = written(game)[step.macro]
        choices = Choices(game)
        ran = run(game, choices.low_level(choices.actions[text]))
        said.append(text)
        done = ran.terminated and ran.reward > 0
    return said, done


def plan(game, **arguments):
    seen = Game(game)
    return plan_mission(seen.look(), seen.missions(), budget=2000, **arguments)


def play(env, task, seed=None, detours=0.0):
    """Play a task to its end: turns, observations, the last info."""
    first, info = env.reset(options={"task_id": task})
    teacher, turns, seen = env.teacher(seed, detours=detours), [], [first]
    while not env.ended:
        turns.append(teacher.next_turn())
        observation, *_, info = env.step(turns[-1].action)
        seen.append(observation)
    return turns, seen, info


# ------------------------------------------------------------------ plans
PLANS = {
    "face": (
        "# # # # #\n# @ . ob #\n# # # # #",
        RIGHT,
        GoToInstr(ObjDesc("ball")),
        ["go to blue ball 1"],
    ),
    "behind": (
        "# # # # #\n# ob . @ #\n# # # # #",
        RIGHT,
        PickupInstr(ObjDesc("ball")),
        ["turn left", "pickup blue ball 1"],
    ),
    "in the way": (
        "# # # # # #\n# @ kr ob #\n# . # # # #\n# . # # # #\n# # # # # #".replace(
            "kr ob #", "kr ob # #"
        ),
        RIGHT,
        GoToInstr(ObjDesc("ball")),
        ["pickup red key 1", "go to blue ball 1"],
    ),
    "locked": (
        "# # # # # # #\n# ke @ le . ob #\n# # # # # # #",
        RIGHT,
        GoToInstr(ObjDesc("ball")),
        None,
    ),
    "key in hand is put down": (
        "# # # # # # #\n# . # # # # #\n# ke @ le . ob #\n# . # # # # #\n# # # # # # #",
        RIGHT,
        PickupInstr(ObjDesc("ball")),
        None,
    ),
    "open again": (
        "# # # # # #\n# @ pr . . #\n# # # # # #",
        RIGHT,
        OpenInstr(ObjDesc("door")),
        ["toggle", "toggle"],
    ),
    "beside": (
        "# # # # # #\n# @ . . kr #\n# . . . . #\n# ob . . . #\n# # # # # #",
        DOWN,
        PutNextInstr(ObjDesc("ball"), ObjDesc("key")),
        None,
    ),
    "then": (
        "# # # # # #\n# or . @ ob #\n# # # # # #",
        UP,
        BeforeInstr(GoToInstr(ObjDesc("ball", "red")), GoToInstr(ObjDesc("ball", "blue"))),
        ["go to red ball 1", "turn left", "go to blue ball 1"],
    ),
    "after": (
        "# # # # # #\n# or . @ ob #\n# # # # # #",
        UP,
        AfterInstr(GoToInstr(ObjDesc("ball", "red")), GoToInstr(ObjDesc("ball", "blue"))),
        None,
    ),
    "and, the nearer first": (
        "# # # # # # #\n# or . . @ ob #\n# # # # # # #",
        RIGHT,
        AndInstr(GoToInstr(ObjDesc("ball", "red")), PickupInstr(ObjDesc("ball", "blue"))),
        None,
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_does_what_the_mission_says(name):
    picture, heading, instruction, expected = PLANS[name]
    rows = [line.split() for line in picture.splitlines()]
    width = max(map(len, rows))
    picture = "\n".join(" ".join([*row, *"#" * (width - len(row))]) for row in rows)
    game = draw(picture, heading, instruction)
    said, done = perform(game, plan(game))
    assert done, said
    assert expected is None or said == expected


def test_a_plan_does_not_drop_at_once_what_the_game_has_not_seen_in_the_hand():
    task = next(
        task
        for task in (task_id(23, seed) for seed in range(200))
        if _drops_at_once(new_game(23, level_and_seed(task)[1]))
    )
    game = new_game(23, level_and_seed(task)[1])
    said, done = perform(game, plan(game))
    assert done
    assert len(said) > 1


def _drops_at_once(game):
    (goals,) = Game(game).missions()
    layout = Game(game).look().layout
    steps, front = layout.world.steps, Game(game).look().front
    return layout.cells[front] == 0 and any(
        layout.cells[front + step] in goals[0].beside for step in steps
    )


def test_more_tries_never_give_a_longer_plan():
    for seed in range(3):
        game = new_game(34, seed)
        assert len(plan(game, tries=6)) <= len(plan(game))


def test_a_key_behind_its_own_door_is_out_of_reach():
    game = draw("# # # # # #\n# @ . le ke #\n# # # # # #", RIGHT, OpenInstr(ObjDesc("door")))
    with pytest.raises(NoPlan, match="the grey key is out of reach"):
        plan(game)


def test_where_a_wrong_pickup_loses_nothing_else_is_picked_up():
    picture = "# # # # # #\n# @ kr ob . #\n# # # # # #"
    strict = draw(picture, RIGHT, PickupInstr(ObjDesc("ball"), strict=True))
    with pytest.raises(NoPlan, match="forbidden"):
        plan(strict)


def test_a_budget_bounds_the_search():
    game = draw("# # # # # #\n# ob . . @ #\n# # # # # #", RIGHT, GoToInstr(ObjDesc("ball")))
    seen = Game(game)
    with pytest.raises(NoPlan, match="too long to plan"):
        plan_mission(seen.look(), seen.missions(), budget=0)


# ------------------------------------------------------------------ explorations
def test_exploring_knows_nothing_that_was_not_in_view():
    """Whatever lies out of view, and wherever the goal does, the first action is the same."""
    wall, rooms = "# # # # # # # # #", "# {} . . # . . {} #"
    picture = f"{wall}\n{rooms}\n# . @ . de . . . #\n{rooms}\n{wall}"
    for seed in range(6):
        first = set()
        for place in range(4):
            words = ["."] * 4
            words[place] = "ob"
            game = draw(picture.format(*words), RIGHT, PickupInstr(ObjDesc("ball")))
            seen = Game(game)
            now = seen.look()
            visible = now.layout.where(seen.missions()[0][0].things)[0] in now.layout.view(
                now.cell, now.heading
            )
            explorer = Explorer(now, frozenset(), StableRandom(str(seed)), 1000)
            steps = explorer.play(seen.missions()[0], 30)
            assert perform(game, steps)[1]
            if not visible:
                first.add(steps[0].macro)
        assert len(first) == 1


def test_exploring_gives_up_where_it_must():
    game = draw("# # # # #\n# @ # ob #\n# # # # #", RIGHT, PickupInstr(ObjDesc("ball")))
    seen = Game(game)
    explorer = Explorer(seen.look(), frozenset(), StableRandom("0"), 1000)
    with pytest.raises(NoPlan):
        explorer.play(seen.missions()[0], 30)


# ------------------------------------------------------------------ the teacher
SAMPLE = [task_id(level, 21) for level in range(1, len(LEVELS) + 1) if level != 16]


def test_arguments_are_checked(env):
    env.reset(options={"task_id": "babyai_0"})
    with pytest.raises(ValueError, match="detours need a seed"):
        env.teacher(detours=0.5)
    with pytest.raises(ValueError, match=r"\[0, 1\)"):
        env.teacher(0, detours=1.0)
    old = make("BabyAI-Text-v0", compat="agentgym")
    old.reset(options={"task_id": "babyai_0"})
    with pytest.raises(NotImplementedError, match="compat"):
        old.teacher()


@pytest.mark.parametrize("task", SAMPLE)
def test_mistakes_are_marked_and_thoughts_speak_of_what_was_seen(env, task):
    turns, seen, _ = play(env, task, 3, 0.3)
    mission = seen[0].partition("\n")[0]
    for index, turn in enumerate(turns):
        # Names of what is carried and its like are in the observations, too.
        known = {STATE.sub(" ", thing) for thing in THING.findall(" ".join(seen[: index + 1]))}
        for thing in THING.findall(turn.thought):
            assert STATE.sub(" ", thing) in known or thing in mission, (thing, turn)
        assert turn.thought
        if turn.trainable:
            listed = seen[index].rpartition("Available actions: ")[2]
            assert f'"{turn.action}"' in listed


def test_detours_differ_by_seed_and_never_cost_a_solved_task(env):
    mistakes, plays = 0, set()
    for level in (6, 17, 20, 22, 24, 34):
        for seed in range(4):
            turns, _, info = play(env, task_id(level, 22), seed, 0.5)
            assert info["success"], (level, seed)
            mistakes += sum(not turn.trainable for turn in turns)
            plays.add(tuple(turn.action for turn in turns))
            assert turns[-1].trainable
    assert mistakes > 10
    assert len(plays) > 12


def test_a_teacher_goes_on_from_any_state(env):
    task = task_id(27, 22)
    turns, _, info = play(env, task)
    assert info["success"]
    for cut in range(len(turns)):
        env.reset(options={"task_id": task, "prefix_actions": [t.action for t in turns[:cut]]})
        other = make("BabyAI-Text-v0")
        other.restore(env.snapshot())
        for some in (env, other):
            teacher = some.teacher()
            while not some.ended:
                *_, info = some.step(teacher.next_turn().action)
            assert info["success"], cut


def test_a_teacher_copes_with_what_others_do_in_between(env):
    env.reset(options={"task_id": task_id(18, 22)})
    teacher = env.teacher(5)
    for action in ("turn right", "turn right", "move forward"):
        teacher.next_turn()
        env.step(action)
    info = {}
    while not env.ended:
        *_, info = env.step(teacher.next_turn().action)
    assert info["success"]


def test_plays_are_the_same_in_every_process():
    program = """
from agentbench_prefix.registry import make
env = make("BabyAI-Text-v0")
for task in ("babyai_877", "babyai_903", "babyai_912"):
    env.reset(options={"task_id": task})
    teacher = env.teacher(2, detours=0.4)
    while not env.ended:
        turn = teacher.next_turn()
        print(turn)
        env.step(turn.action)
"""
    printed = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert printed[0] == printed[1]
    assert "trainable=False" in printed[0]


def test_a_task_without_a_plan_is_played_to_its_end(env):
    turns, _, info = play(env, "babyai_215")
    assert not info["success"]
    assert {turn.action for turn in turns} == {"turn right"}


# ------------------------------------------------------------------ what is published
def test_every_task_is_published(env):
    assert list(solved.published()) == list(env.splits())
    for split, rows in solved.published().items():
        assert list(rows) == list(env.tasks(split))
        for row in rows.values():
            assert bool(row.reason) != bool(row.plain or any(row.varied))
            assert max(row.plain, *row.varied) <= env.max_turns


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_reported_families_are_solved(split):
    found = defaultdict(list)
    for task, row in solved.published()[split].items():
        found[level_and_seed(task)[0]].append(row)
    for family in REPORTED:
        rows = [row for level in FAMILIES[family] for row in found[level]]
        assert sum(row.plain > 0 for row in rows) >= 0.95 * len(rows), family
        varied = [turns > 0 for row in rows for turns in row.varied]
        assert sum(varied) >= 0.95 * len(varied), family


def _rows(every):
    return [
        (split, task) for split, rows in solved.published().items() for task in [*rows][3::every]
    ]


@pytest.mark.parametrize(("split", "task"), _rows(47))
def test_a_sample_is_measured_again(env, split, task):
    assert solved.measure(env, task) == solved.published()[split][task]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_everything_is_measured_again(env):
    for rows in solved.published().values():
        for task, row in rows.items():
            assert solved.measure(env, task) == row, task


def test_the_page_says_what_was_measured():
    page = Path(__file__).parents[2] / "docs/babyai_teacher.md"
    assert page.read_text(encoding="utf-8") == solved.page()


def _unsolved(level):
    return [
        task
        for rows in solved.published().values()
        for task, row in rows.items()
        if row.reason and level_and_seed(task)[0] == level
    ]


@pytest.mark.parametrize("task", _unsolved(16))
def test_opening_either_door_first_loses(task):
    """What is unsolved of this level cannot be solved, by minigrid's own rules."""
    seed = level_and_seed(task)[1]
    instr = new_game(16, seed).instrs
    for part in (instr.instr_a, instr.instr_b):
        game = new_game(16, seed)
        (place,) = [
            (x, y)
            for x in range(game.width)
            for y in range(game.height)
            if (item := game.grid.get(x, y)) is not None
            and item.type == "door"
            and item.color == part.desc.color
        ]
        for heading, (dx, dy) in enumerate(((1, 0), (0, 1), (-1, 0), (0, -1))):
            before = (place[0] - dx, place[1] - dy)
            if game.grid.get(*before) is None:
                game.agent_pos, game.agent_dir = before, heading
        _, reward, terminated, _, _ = game.step(game.actions.toggle)
        assert terminated
        assert reward == 0


@pytest.mark.parametrize("task", _unsolved(7))
def test_the_key_of_the_locked_door_lies_behind_it(task):
    game = new_game(7, level_and_seed(task)[1])
    stack, reached = [tuple(map(int, game.agent_pos))], set()
    while stack:
        x, y = stack.pop()
        item = game.grid.get(x, y)
        locked = item is not None and item.type == "door" and item.is_locked
        if (x, y) in reached or locked or (item is not None and item.type == "wall"):
            continue
        reached.add((x, y))
        stack += [(x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)]
    (door,) = [
        item
        for item in game.grid.grid
        if item is not None and item.type == "door" and item.is_locked
    ]
    things = {game.grid.get(*cell) for cell in reached} - {None}
    assert all((item.type, item.color) != ("key", door.color) for item in things)
    assert not things & set(game.instrs.desc.obj_set)
