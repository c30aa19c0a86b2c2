"""What BabyAI promises beyond the conformance suite: its tasks, texts, rules and mended faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
from drawn import UP, draw
from minigrid.envs.babyai.core.verifier import GoToInstr, ObjDesc, PickupInstr

from agentbench_envs.babyai import agentgym, levels, macros, tasks
from agentbench_envs.babyai.dialogue import DIALOGUES, EXAMPLE_TASK, EXAMPLE_TURNS
from agentbench_envs.babyai.env import BabyAIEnv
from agentbench_envs.babyai.levels import level_and_seed, task_id
from agentbench_envs.babyai.view import describe, list_actions
from agentbench_prefix.env import PlayedTurn
from agentbench_prefix.errors import ConfigurationError, EnvironmentUsageError, UnknownNameError

RED_BALL = """Your goal: go to the red ball
In front of you in this room, you can see several objects: There is a grey key 1 1 steps in front \
of you and 1 steps to your left.  There is a grey ball 1 1 steps in front of you and 1 steps to \
your right.  There is a grey key 2 2 steps in front of you and 1 steps to your left.  There is a \
grey key 3 2 steps in front of you and 1 steps to your right.  There is a grey box 1 2 steps in \
front of you and 2 steps to your right.  There is a grey ball 2 5 steps in front of you and 1 \
steps to your right.  There is a grey key 4 4 steps in front of you and 2 steps to your right.  \
There is a red ball 1 4 steps in front of you and 3 steps to your right.  The room has walls \
around you. You are facing a wall 6 steps away. You are not carrying anything.
Available actions: ["turn left", "turn right", "move forward", "pickup grey key 1", "pickup grey \
ball 1", "pickup grey key 2", "pickup grey key 3", "pickup grey box 1", "pickup grey ball 2", \
"pickup grey key 4", "pickup red ball 1", "go to grey key 1", "go to grey ball 1", "go to grey key \
2", "go to grey key 3", "go to grey box 1", "go to grey ball 2", "go to grey key 4", "go to red \
ball 1", "check available actions"]"""


def started(task, compat=None, **arguments):
    env = BabyAIEnv(compat=compat, **({} if compat else {"max_turns": None}), **arguments)
    env.reset(options={"task_id": task})
    return env


# ------------------------------------------------------------------------------ tasks
def test_levels_follow_agentgyms_index():
    assert len(levels.LEVELS) == len(set(levels.LEVELS)) == 40
    assert level_and_seed("babyai_0") == (1, 0)
    assert level_and_seed("babyai_95") == (16, 2)
    assert all(level_and_seed(task_id(*pair)) == pair for pair in ((1, 0), (40, 0), (17, 1234)))
    assert levels.LEVELS[29] == "ActionObjDoor"


@pytest.mark.parametrize("bad", ["babyai_", "babyai_01", "babyai_-1", "babyai_1 ", "textcraft_1"])
def test_other_ids_are_refused(bad):
    with pytest.raises(UnknownNameError, match="babyai_<index>"):
        level_and_seed(bad)


def test_splits_have_their_sizes_and_families():
    env = BabyAIEnv()
    train, test, test_all = (env.tasks(split) for split in env.splits())
    assert (len(train), len(test), len(test_all)) == (810, 90, 200)
    assert not set(train) & set(test) | set(train) & set(test_all) | set(test) & set(test_all)
    assert Counter(map(env.family, test)) == dict.fromkeys(levels.REPORTED, 18)
    per_level = Counter(level_and_seed(task)[0] for task in test_all)
    assert per_level == dict.fromkeys(range(1, 41), 5)
    trained = Counter(level_and_seed(task)[0] for task in train)
    assert set(trained) == set(range(1, 41))
    assert set(trained.values()) == {20, 21}
    assert sorted(level for family in levels.FAMILIES.values() for level in family) == [
        *range(1, 41)
    ]


def test_no_world_is_in_two_tasks():
    worlds = [world for split in tasks.manifest()["splits"].values() for world in split.items()]
    same = Counter((level_and_seed(task)[0], world) for task, world in worlds)
    assert max(same.values()) == 1


def test_another_world_than_the_manifests_is_refused():
    tasks.check_world("babyai_0", lambda: tasks._worlds()["babyai_0"] + "0" * 48)
    tasks.check_world("babyai_999999999", lambda: "f" * 64)
    with pytest.raises(ConfigurationError, match="babyai_0 is another world here"):
        tasks.check_world("babyai_0", lambda: "f" * 64)


def test_generated_tasks_are_of_the_level_asked_for():
    env = BabyAIEnv()
    assert {level_and_seed(task)[0] for task in env.generate_tasks(1, 5, level=7)} == {7}
    assert [level_and_seed(task)[0] for task in env.generate_tasks(1, 41)] == [*range(1, 41), 1]
    with pytest.raises(ValueError, match="level must be an integer from 1 to 40"):
        env.generate_tasks(1, 1, level=41)


def test_the_largest_generated_task_can_be_played():
    env = BabyAIEnv()
    (task,) = env.generate_tasks(10**18, 1, level=40)
    assert env.reset(options={"task_id": task})[0].startswith("Your goal: ")


def test_minigrids_other_way_to_end_a_mission_is_refused():
    code = (
        "from agentbench_envs.babyai.env import BabyAIEnv\n"
        "BabyAIEnv().reset(options={'task_id': 'babyai_0'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "BABYAI_DONE_ACTIONS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "BABYAI_DONE_ACTIONS is set" in done.stderr


def test_minigrid_is_imported_when_a_game_is_played_and_says_nothing():
    code = (
        "import sys, agentbench_prefix, gymnasium as gym\n"
        "env = gym.make('BabyAI-Text-v0').unwrapped\n"
        "env.tasks('test'), env.family('babyai_7'), env.dialogues(), env.data_hash\n"
        "assert 'minigrid' not in sys.modules and 'pygame' not in sys.modules\n"
        "env.reset(options={'task_id': 'babyai_38'})\n"
        "assert 'minigrid' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ------------------------------------------------------------------------------ text
def test_a_first_observation():
    assert BabyAIEnv().reset(options={"task_id": "babyai_0"})[0] == RED_BALL


def test_fields_say_what_the_text_says():
    fields = BabyAIEnv().fields(RED_BALL)
    assert fields["goal"] == "go to the red ball"
    assert fields["objects"][0] == ["grey key", 1, -1]
    assert fields["objects"][-1] == ["red ball", 4, 3]
    assert len(fields["objects"]) == 8
    assert fields["doors"] == []
    assert fields["facing"] == ["wall", 6]
    assert fields["carrying"] is None
    assert fields["actions"][-1] == "check available actions"


def test_fields_of_doors_and_things_carried():
    game = draw("# # # # #\n# @ . pr #\n# # # lb #\n# # # # #", carrying="ky")
    choices = macros.Choices(game)
    text = told(choices, game)
    fields = BabyAIEnv().fields(text)
    assert fields["carrying"] == "yellow key"
    assert ["red door", 2, 0, "open"] in fields["doors"]
    assert fields["objects"] == []


def told(choices, game):
    return describe(choices.view, game.carrying) + list_actions(list(choices.actions))


def test_fields_of_a_refusal_are_the_actions_alone():
    env = started("babyai_0")
    observation = env.step("dance")[0]
    assert set(env.fields(observation)) == {"actions"}
    assert env.fields("anything else") == {}


# ------------------------------------------------------------------------------ macro actions
def test_a_walk_goes_round_what_is_in_the_way():
    game = draw(
        """
        # # # # # #
        # . . . . #
        # @ oe . kr #
        # . . . . #
        # # # # # #
        """
    )
    choices = macros.Choices(game)
    path = choices.low_level(choices.actions["go to red key 1"])
    ran = macros.run(game, path)
    assert ran.trace == path
    front = game.grid.get(*game.front_pos)
    assert (front.type, front.color) == ("key", "red")
    # Left, one on, right, three on, and a turn to face it; equally far round the other side.
    assert path == [0, 2, 1, 2, 2, 2, 1]


def test_a_closed_door_is_no_way():
    game = draw("# # # # # #\n# @ . dr kb #\n# # # # # #")
    choices = macros.Choices(game)
    assert "go to red closed door 1" in choices.actions
    assert not [action for action in choices.actions if "blue key" in action]


def test_a_walk_takes_the_open_door_beside_a_closed_one():
    game = draw(
        """
        # # # # # #
        # . . # . #
        # @ . dr ke #
        # . . pb . #
        # # # # # #
        """
    )
    choices = macros.Choices(game)
    path = choices.low_level(choices.actions["go to grey key 1"])
    macros.run(game, path)
    assert game.grid.get(*game.front_pos).type == "key"
    assert game.agent_pos == (4, 3)


def test_what_is_listed_can_be_done():
    game = draw("# # # #\n# @ oe #\n# # # #")
    choices = macros.Choices(game)
    assert "move forward" not in choices.actions
    assert "move forward" in agentgym.Choices(game).actions
    assert "barrier" in choices.refusal("move forward")


def test_a_box_ahead_can_be_opened():
    game = draw("# # # #\n# @ xe #\n# # # #")
    assert "toggle" in macros.Choices(game).actions
    assert "toggle" not in agentgym.Choices(game).actions


@pytest.mark.parametrize(
    ("carrying", "listed", "reason"),
    [
        (None, False, "you are not carrying a key"),
        ("oe", False, "you are not carrying a key"),
        ("kb", False, "the color of the key you are carrying does not match"),
        ("kr", True, None),
    ],
)
def test_a_locked_door_takes_its_key(carrying, listed, reason):
    game = draw("# # # # #\n# @ lr . #\n# # # # #", carrying=carrying)
    choices = macros.Choices(game)
    action = "toggle and go through red locked door 1"
    assert (action in choices.actions) is listed
    if not listed:
        assert reason in choices.refusal(action)
        assert reason in agentgym.Choices(game).refusals[action]
        return
    macros.run(game, choices.low_level(choices.actions[action]))
    assert game.agent_pos == (2, 1)


def test_refusals_name_the_reason():
    game = draw("# # # # #\n# @ oe pr #\n# # # # #", carrying="kb")
    choices = macros.Choices(game)
    assert "already carrying a blue key" in choices.refusal("pickup grey ball 1")
    assert "there is no path leading to it" in choices.refusal("go to red open door 1")
    assert "it is open already" in choices.refusal("toggle and go through red open door 1")
    assert choices.refusal("go to purple dragon 1") == macros.UNKNOWN
    assert choices.refusal("drop").endswith("there is already an object in front of you.")


def test_low_level_actions_and_the_graded_reward_are_in_the_info():
    env = started("babyai_0")
    info = env.step("go to red ball 1")[4]
    assert info["success"]
    assert info["minigrid_reward"] == 1 - 0.9 * len(info["low_level"]) / env.board.raw.max_steps
    assert set(info["low_level"]) <= {0, 1, 2}


def test_running_stops_at_the_end():
    game = draw("# # # # # # #\n# @ . . . . #\n# # # # # # #", max_steps=2)
    ran = macros.run(game, [2, 2, 2, 2])
    assert (ran.trace, ran.truncated, ran.terminated) == ([2, 2], True, False)


def test_walking_by_the_goal_on_the_way_elsewhere_wins():
    game = draw(
        "# # # # # # #\n# @ . . . kb #\n# # # # # or #\n# # # # # # #",
        instruction=GoToInstr(ObjDesc("key", "blue")),
    )
    ran = macros.run(game, [2, 2, 2, 1, 0])
    assert ran.trace == [2, 2, 2]
    assert ran.terminated
    assert ran.reward == pytest.approx(1 - 0.9 * 3 / 64)


def test_failing_a_strict_mission_ends_it():
    game = draw(
        "# # # #\n# @ kb #\n# # or #\n# # # #",
        instruction=PickupInstr(ObjDesc("ball", "red"), strict=True),
    )
    ran = macros.run(game, [3, 0])
    assert (ran.trace, ran.reward, ran.terminated) == ([3], 0.0, True)


def test_a_failed_mission_is_no_success():
    # Level 20 asks for one thing and is lost by taking another.
    env = started(task_id(20, 0))
    assert env.board.raw.instrs.strict
    wanted = {id(item) for item in env.board.raw.instrs.desc.obj_set}
    other = next(t for t in env.visible() if id(t.item) not in wanted and t.item.type != "door")
    observation, reward, terminated, _, info = env.step(f"pickup {other.label}")
    assert terminated
    assert (reward, info["success"]) == (0.0, False)
    assert "\n The task has failed.\n" in observation


# ------------------------------------------------------------------------------ faults of AgentGym
@pytest.mark.parametrize(
    ("index", "mission", "lost"),
    [
        (
            14,
            "open the red door, then open the blue door",
            "open the red door, and open the blue door",
        ),
        (
            15,
            "open the purple door after you open the red door",
            "open the purple door and open the red door",
        ),
    ],
)
def test_the_order_of_a_mission_is_kept(index, mission, lost):
    for compat, text in ((None, mission), ("agentgym", lost)):
        observation = BabyAIEnv(compat=compat).reset(options={"task_id": f"babyai_{index}"})[0]
        assert observation.startswith(f"Your goal: {text}\n")


def test_a_win_inside_a_macro_action_is_a_win():
    for compat in (None, "agentgym"):
        env = started("babyai_12", compat)  # open the red door
        action = next(a for a in env.candidate_actions() if a.startswith("toggle and go through"))
        observation, reward, terminated, _, info = env.step(action)
        if compat is None:
            assert terminated
            assert reward == 1.0
            assert info["success"]
            assert info["low_level"][-1] == macros.TOGGLE
            assert info["minigrid_reward"] > 0
            assert "\n The task is completed.\n" in observation
        else:
            assert not terminated
            assert (reward, info["success"]) == (0.0, False)
            assert info["low_level"][-2:] == [macros.TOGGLE, macros.FORWARD]


def test_a_late_success_is_a_success():
    for compat in (None, "agentgym"):
        env = started("babyai_0", compat)
        for _ in range(40):  # ten times round
            assert not env.step("turn left")[2]
        observation, reward, terminated, _, info = env.step("go to red ball 1")
        assert "The task is completed." in observation
        assert 0 < info["minigrid_reward"] <= 0.5
        assert terminated is (compat is None)
        assert info["success"] is (compat is None)
        assert reward == (1.0 if compat is None else info["minigrid_reward"])


def test_minigrids_step_limit_ends_the_episode():
    for compat in (None, "agentgym"):
        env = started("babyai_0", compat)
        assert env.board.raw.max_steps == 64
        ends = [env.step("turn left")[2] for _ in range(64)]
        assert ends == [False] * 63 + [compat is None]
        if compat is None:
            assert "its steps are used up" in env.last_observation
            assert not env.snapshot().state["success"]
        else:
            assert not env.step("turn left")[2]


def test_a_reward_is_given_once():
    env = started("babyai_0", "agentgym")
    for _ in range(40):
        env.step("turn left")
    first = env.step("go to red ball 1")[4]["score"]
    assert first > 0
    assert env.step("dance")[4]["score"] == 2 * first
    env = started("babyai_0")
    assert env.step("go to red ball 1")[1] == 1.0
    with pytest.raises(EnvironmentUsageError):
        env.step("dance")


def test_pick_up_in_two_words():
    for compat in (None, "agentgym"):
        env = started("babyai_0", compat)
        observation, _, _, _, info = env.step("pick up grey key 1")
        assert ("You are carrying a grey key." in observation) is (compat is None)
        assert info["valid_action"] is (compat is None)


def test_only_the_check_action_is_the_check_action():
    for compat in (None, "agentgym"):
        env = started("babyai_0", compat)
        observation = env.step("go to red ball 1 and check")[0]
        assert observation.startswith(
            macros.UNKNOWN if compat is None else "You can take the following actions: turn left"
        )
        listed = env.step("Check available actions")[0]
        assert listed.startswith("You can take the following actions: turn left, turn right")


def test_numbers_in_actions_are_those_of_the_text():
    # The nearer key is shut in by balls; there is a way to the farther one.
    game = draw(
        """
        # # # # # # #
        # . oe . . . #
        # oe ke oe . ke #
        # . oe . . . #
        # . @ . . . #
        # # # # # # #
        """,
        heading=UP,
    )
    seen = {thing.label: thing.cell for thing in macros.Choices(game).view.things}
    ours, theirs = macros.Choices(game), agentgym.Choices(game)
    assert "go to grey key 1" not in ours.actions
    assert "there is no path" in ours.refusal("go to grey key 1")
    assert ours.actions["go to grey key 2"].target.cell == seen["grey key 2"]
    assert "go to grey key 2" not in theirs.actions
    macros.run(game, theirs.actions["go to grey key 1"])
    x, y = game.front_pos
    assert y * game.width + x == seen["grey key 2"]


def test_a_closed_door_is_not_walked_through_in_thought():
    # Beside the things above: AgentGym's search takes closed doors for ways.
    game = draw("# # # # #\n# . dr . #\n# @ # . #\n# # # # #", heading=UP)
    game.agent_pos, game.agent_dir = (1, 1), 0
    assert macros.Choices(game).low_level(
        macros.Choices(game).actions["toggle and go through red closed door 1"]
    ) == [macros.TOGGLE, macros.FORWARD]
    places = agentgym.Choices(game)._order
    assert any((x, y) == (2, 1) for x, y, _ in places)


def test_what_is_carried_from_the_start_is_not_lying_about():
    for compat in (None, "agentgym"):
        observation = BabyAIEnv(compat=compat).reset(options={"task_id": "babyai_22"})[0]
        assert "You are carrying a yellow box." in observation
        assert ("There is a yellow box 1" in observation) is (compat is not None)


# ------------------------------------------------------------------------------ players
def test_the_dialogues_example_works():
    env = started(EXAMPLE_TASK)
    for _, action in EXAMPLE_TURNS:
        *_, info = env.step(action)
    assert info["success"]
    assert EXAMPLE_TURNS[0][1] in DIALOGUES["full"].system


def test_the_full_dialogue_has_the_papers_form():
    reply = DIALOGUES["full"].render("go to red ball 1", "It is there.")
    assert reply == "Thought:\nIt is there.\n\nAction:\n[[ go to red ball 1 ]]"


@pytest.mark.parametrize(
    ("action", "category"),
    [
        ("dance", "unknown_action"),
        ("drop", "refused_action"),
        ("check available actions", "looking"),
        ("turn left", "turn_limit"),
    ],
)
def test_failures_have_a_category(action, category):
    env = started("babyai_0")
    observation, *_, info = env.step(action)
    turn = PlayedTurn(action, observation, info["valid_action"])
    assert env.failure_category([turn]) == category


def test_arguments_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="no turn limit"):
        BabyAIEnv(compat="agentgym", max_turns=20)
    with pytest.raises(UnknownNameError, match="agentgym"):
        BabyAIEnv(compat="other")


def test_the_manifest_is_compact_json(repository):
    path = repository / "envs/agentbench_envs/babyai/data/manifest.json"
    assert path.stat().st_size < 60_000
    assert set(json.loads(path.read_text(encoding="utf-8"))) == {"made_with", "splits"}
