"""BabyAI in random play: what is seen, what is listed, what is restored."""

from __future__ import annotations

import collections
import importlib.util
import itertools
import json
import random

import numpy as np
import pytest
from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT

from agentbench_envs.babyai import tasks
from agentbench_envs.babyai.env import BabyAIEnv
from agentbench_envs.babyai.levels import LEVELS, task_id
from agentbench_envs.babyai.macros import Choices
from agentbench_envs.babyai.view import SIDE, look
from agentbench_prefix.env import Snapshot

ALL_LEVELS = range(1, len(LEVELS) + 1)


def plain(value, known):
    """Everything that can be reached from a value, with numbers for objects met again."""
    if isinstance(value, np.ndarray):
        return [plain(item, known) for item in value.tolist()]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, list | tuple):
        return [plain(item, known) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item, known) for key, item in value.items()}
    if isinstance(value, type) or callable(value) or type(value).__module__.startswith("gymnasium"):
        return type(value).__name__
    if id(value) in known:
        return f"object {known[id(value)]}"
    known[id(value)] = len(known)
    return [type(value).__name__, plain(vars(value), known)]


def everything(env):
    return plain(env.board.raw, {})


def wander(env, turns, seed):
    """Random listed actions; a new start of the same task after an end."""
    chance = random.Random(seed)
    for _ in range(turns):
        if env.ended:
            env.reset(options={"task_id": env.task_id})
        env.step(chance.choice(list(env.candidate_actions())))
        yield


def check_view(raw):
    """Compare what we see with the picture that minigrid itself makes."""
    image = type(raw).gen_obs(raw)["image"]
    shown = collections.Counter()
    cells = 0
    for i, j in itertools.product(range(SIDE), repeat=2):
        kind = IDX_TO_OBJECT[int(image[i, j, 0])]
        ahead, right = SIDE - 1 - j, i - SIDE // 2
        cells += kind != "unseen"
        if kind not in ("unseen", "empty", "wall") and (ahead, right) != (0, 0):
            shown[IDX_TO_COLOR[int(image[i, j, 1])], kind, int(image[i, j, 2]), ahead, right] += 1
    view = look(raw)
    ours = collections.Counter(
        (t.item.color, t.item.type, t.item.encode()[2], t.ahead, t.right) for t in view.things
    )
    assert ours == shown
    assert len(view.cells) == cells
    distances = [t.ahead + abs(t.right) for t in view.things]
    assert distances == sorted(distances)


def fewest_steps(raw, cell):
    """Low-level steps to face a cell through what is in view, by relaxation; None if no way."""
    view, width = look(raw), raw.grid.width
    moves = (1, width, -1, -width)
    grid = raw.grid.grid
    x, y = raw.agent_pos
    here = {(int(y) * width + int(x), int(raw.agent_dir))}
    known = set(here)
    for steps in range(400):
        if any(place + moves[heading] == cell for place, heading in here):
            return steps
        after = set()
        for place, heading in here:
            front = place + moves[heading]
            free = front in view.cells and (
                grid[front] is None or (grid[front].type == "door" and grid[front].is_open)
            )
            after |= {(place, (heading + 1) % 4), (place, (heading + 3) % 4)}
            after |= {(front, heading)} if free else set()
        here = after - known
        known |= here
        if not here:
            return None
    raise AssertionError("the search does not end")


def check_choices(env):
    raw = env.board.raw
    choices = Choices(raw)
    for thing in choices.view.things:
        least = fewest_steps(raw, thing.cell)
        macro = choices.actions.get(f"go to {thing.label}")
        assert (macro is None) == (least is None)
        if macro is not None:
            assert len(choices.low_level(macro)) == least


@pytest.mark.parametrize("level", ALL_LEVELS)
def test_what_is_seen_is_what_minigrid_shows(level):
    env = BabyAIEnv(max_turns=None)
    env.reset(options={"task_id": task_id(level, 3)})
    check_view(env.board.raw)
    for _ in wander(env, 15, level):
        check_view(env.board.raw)


@pytest.mark.parametrize("level", ALL_LEVELS)
def test_listed_actions_do_what_they_say_in_the_fewest_steps(level):
    env = BabyAIEnv(max_turns=None)
    env.reset(options={"task_id": task_id(level, 4)})
    chance = random.Random(level)
    for _ in range(12):
        if env.ended:
            env.reset(options={"task_id": env.task_id})
        check_choices(env)
        action = chance.choice(list(env.candidate_actions()))
        choices = Choices(env.board.raw)
        macro = choices.actions[action]
        plan, before = choices.low_level(macro), env.board.state()
        observation, _, terminated, _, info = env.step(action)
        assert info["valid_action"]
        assert info["low_level"] == plan[: len(info["low_level"])]
        if not plan:
            continue
        assert env.board.state()["steps"] == before["steps"] + len(info["low_level"])
        assert {**env.board.state(), "steps": 0} != {**before, "steps": 0}
        if terminated:
            continue
        assert info["low_level"] == plan
        verb = action.split()[0]
        raw = env.board.raw
        if macro.target is not None and verb == "go" and not macro.tail:
            assert raw.grid.get(*raw.front_pos) is macro.target.item
        elif verb == "pickup":
            assert raw.carrying is macro.target.item
            assert f"You are carrying a {macro.target.name}." in observation
        elif macro.target is not None:
            assert raw.agent_pos[1] * raw.grid.width + raw.agent_pos[0] == macro.target.cell


@pytest.mark.parametrize("compat", [None, "agentgym"])
@pytest.mark.parametrize("level", [6, 8, 16, 20, 23, 26, 28, 34, 38, 39])
def test_a_restored_game_equals_the_one_it_was_taken_from(level, compat):
    env = BabyAIEnv(compat=compat, **({} if compat else {"max_turns": None}))
    env.reset(options={"task_id": task_id(level, 1)})
    other = BabyAIEnv(compat=compat, **({} if compat else {"max_turns": None}))
    for turn, _ in enumerate(wander(env, 24, level)):
        if turn % 6 or env.ended:
            continue
        text = env.snapshot().to_json()
        taken = everything(env)
        other.restore(Snapshot.from_json(text))
        assert everything(other) == taken
        assert other.snapshot().to_json() == text
        assert list(other.candidate_actions()) == list(env.candidate_actions())


def test_a_restored_game_remembers_half_a_mission():
    env = BabyAIEnv(max_turns=None)
    env.reset(options={"task_id": task_id(15, 0)})
    raw = env.board.raw
    x, y = next(
        (i, j)
        for i, j in itertools.product(range(raw.width), range(raw.height))
        if (cell := raw.grid.get(i, j)) and cell.type == "door" and cell.color == "red"
    )
    raw.grid.get(x, y).is_open = True
    raw.instrs.a_done = "success"
    snapshot = env.snapshot()
    env.reset(options={"task_id": env.task_id})
    assert env.board.raw.instrs.a_done is False
    env.restore(snapshot)
    assert env.board.raw.instrs.a_done == "success"
    assert env.board.raw.grid.get(x, y).is_open


def test_a_snapshot_is_small_and_json():
    env = BabyAIEnv(max_turns=None)
    env.reset(options={"task_id": task_id(39, 0)})
    for _ in wander(env, 20, 0):
        pass
    assert len(json.dumps(env.board.state())) < 3000


@pytest.mark.parametrize(
    "change",
    [
        {"agent": [0, 0, 0]},
        {"agent": [1, 1, 4]},
        {"agent": [1, True, 0]},
        {"cells": [[10**6, -1]]},
        {"cells": [[0, 0], [1, 0]]},
        {"carrying": 10**6},
        {"carrying": 0},
        {"doors": []},
        {"doors": None},
        {"steps": -1},
        {"mission": []},
        {"found": [3]},
        {"rng": {}},
    ],
)
def test_impossible_states_are_refused(change):
    env = BabyAIEnv(max_turns=None)
    env.reset(options={"task_id": task_id(39, 0)})
    env.step("turn left")
    good = env.snapshot()
    state = {**good.state, "env": {**good.state["env"], **change}}
    bad = Snapshot(**{**vars(good), "state": state})
    with pytest.raises(Exception, match="cannot restore"):
        env.restore(bad)
    assert env.snapshot() == good


# ------------------------------------------------------------------------------ many games
def check_resets(levels, seeds):
    env = BabyAIEnv()
    for level, seed in itertools.product(levels, seeds):
        task = task_id(level, seed)
        texts = {env.reset(options={"task_id": task})[0] for _ in range(2)}
        texts.add(BabyAIEnv().reset(options={"task_id": task})[0])
        assert len(texts) == 1, task


def check_random_play(levels, seeds, turns, compat):
    for level, seed in itertools.product(levels, seeds):
        env = BabyAIEnv(compat=compat, **({} if compat else {"max_turns": None}))
        env.reset(options={"task_id": task_id(level, seed)})
        for _ in wander(env, turns, seed):
            assert env.last_observation


def test_resets_repeat():
    check_resets(ALL_LEVELS, range(2))


@pytest.mark.parametrize("compat", [None, "agentgym"])
def test_random_play_does_not_raise(compat):
    check_random_play(ALL_LEVELS, [11], 25, compat)


@pytest.mark.long
def test_resets_repeat_on_every_level():
    check_resets(ALL_LEVELS, range(20))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("compat", [None, "agentgym"])
def test_random_play_of_two_hundred_steps_does_not_raise_on_any_level(compat):
    check_random_play(ALL_LEVELS, range(20), 200, compat)


@pytest.mark.long
def test_the_manifest_follows_from_its_rule(repository, tmp_path, monkeypatch):
    path = repository / "scripts/build_babyai_manifest.py"
    spec = importlib.util.spec_from_file_location("build_babyai_manifest", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    written = {}
    monkeypatch.setattr(
        script, "write_text_atomic", lambda where, text: written.setdefault(where.name, text)
    )
    script.main()
    assert json.loads(written["manifest.json"])["splits"] == tasks.manifest()["splits"]
