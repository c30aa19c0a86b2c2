"""What ``TextEnv`` itself does, on a toy; the conformance suite covers what environments owe."""

from __future__ import annotations

import dataclasses
import json

import gymnasium as gym
import pytest
import toys

from agentbench_prefix import Snapshot
from agentbench_prefix.errors import (
    EnvironmentUsageError,
    PrefixError,
    SnapshotError,
    UnknownNameError,
)

FIT = [f"dial {digit}" for digit in toys.code_of("vault_0")]
OPEN = {"task_id": "vault_0"}


@pytest.fixture
def env():
    return toys.Vault()


def test_an_episode(env):
    observation, info = env.reset(options=OPEN)
    assert observation == f"A vault. Dial {FIT[0][-1]}."
    assert info == {
        "task_id": "vault_0",
        "family": "written",
        "success": False,
        "turn": 0,
        "valid_action": True,
    }
    assert env.step("sing")[4]["valid_action"] is False
    assert env.step(FIT[0])[0] == f"Click. Dial {FIT[1][-1]}."
    env.step(FIT[1])
    assert env.step(FIT[2]) == (
        "It opens.",
        1.0,
        True,
        False,
        {**info, "success": True, "turn": 4},
    )
    assert env.ended
    with pytest.raises(EnvironmentUsageError, match=r"'vault_0' ended at turn 4; call reset\(\)"):
        env.step("look")


def test_the_last_turn_allowed_may_solve():
    env = toys.Vault(max_turns=3)
    env.reset(options=OPEN)
    env.step(FIT[0])
    env.step(FIT[1])
    assert env.step(FIT[2])[2:4] == (True, False)
    env.reset(options=OPEN)
    assert [env.step("look")[2:4] for _ in range(3)] == [(False, False)] * 2 + [(False, True)]


def test_no_limit():
    env = toys.Vault(max_turns=None)
    env.reset(options=OPEN)
    assert not any(env.step("look")[3] for _ in range(500))


@pytest.mark.parametrize("limit", [0, -1, 2.5, "9", True])
def test_a_bad_limit_is_refused(limit):
    with pytest.raises(ValueError, match="max_turns must be None or an integer >= 1"):
        toys.Vault(max_turns=limit)


def test_bad_constructor_names_are_refused():
    with pytest.raises(UnknownNameError, match=r"unknown split 'dev'; valid: train, test, all"):
        toys.Vault(split="dev")
    with pytest.raises(UnknownNameError, match=r"unknown render_mode 'human'; valid: ansi"):
        toys.Vault(render_mode="human")


def test_bad_reset_names_are_refused(env):
    for options, message in (
        ({"task_id": "vault_99"}, "unknown task_id 'vault_99'; valid: vault_0, vault_1"),
        ({"task_id": 7}, "Task ids are text"),
        ({"split": "dev"}, "unknown split 'dev'; valid: train, test, all"),
        (
            {"taks_id": "vault_0"},
            "unknown reset option 'taks_id'; valid: fresh_budget, polite, prefix_actions, "
            "split, task_id",
        ),
    ):
        with pytest.raises(UnknownNameError, match=message):
            env.reset(options=options)


def test_a_refused_reset_leaves_the_generator_alone(env):
    env.reset(seed=3, options=OPEN)
    before = env.snapshot()
    with pytest.raises(UnknownNameError):
        env.reset(seed=4, options={"task_id": "vault_99"})
    assert env.snapshot() == before


def test_the_split_decides_what_is_drawn():
    env = toys.Vault(split="test")
    drawn = {env.reset(seed=seed)[1]["task_id"] for seed in range(50)}
    assert drawn == {"vault_6", "vault_7", "vault_8"}
    drawn = {env.reset(seed=s, options={"split": "train"})[1]["task_id"] for s in range(100)}
    assert drawn == {f"vault_{i}" for i in range(6)}


def test_the_environments_own_options_reach_it_and_its_snapshots(env):
    observation, _ = env.reset(options={**OPEN, "polite": True})
    assert observation.startswith("A vault. Please dial")
    assert env.snapshot().options == {"polite": True}
    assert env.reset(options=OPEN)[0].startswith("A vault. Dial")


def test_skipping_a_turn_spends_it_and_touches_nothing_else(env):
    env.reset(options=OPEN)
    observation, reward, terminated, truncated, info = env.skip_turn("Say something.")
    assert (observation, reward, terminated, truncated) == ("Say something.", 0.0, False, False)
    assert (info["turn"], info["valid_action"]) == (1, False)
    assert env.step("look")[0] == "You tried 0 digits, 0 fit."


def test_prefix_observations_are_all_but_the_last(env):
    observation, info = env.reset(options={**OPEN, "prefix_actions": ["look", None, FIT[0]]})
    assert observation == f"Click. Dial {FIT[1][-1]}."
    assert info["prefix_observations"] == [
        f"A vault. Dial {FIT[0][-1]}.",
        "You tried 0 digits, 0 fit.",
        "",
    ]
    assert info["turn"] == env.turn == 3


def test_an_empty_prefix_is_no_prefix(env):
    assert "prefix_observations" not in env.reset(options={**OPEN, "prefix_actions": []})[1]


def test_prefix_turns_count_unless_asked_otherwise():
    env = toys.Vault(max_turns=4)
    prefix = {**OPEN, "prefix_actions": ["look"] * 3}
    env.reset(options=prefix)
    assert env.step("look")[3]
    env.reset(options={**prefix, "fresh_budget": True})
    assert [env.step("look")[3] for _ in range(4)] == [False] * 3 + [True]


def test_a_prefix_that_ends_the_episode_says_where(env):
    with pytest.raises(PrefixError, match=r"at turn 3 of 4 in task 'vault_0'.*It opens"):
        env.reset(options={**OPEN, "prefix_actions": [*FIT, "look"]})
    with pytest.raises(PrefixError, match=r"at turn 9 of 9.*raise max_turns \(now 9\)"):
        env.reset(options={**OPEN, "prefix_actions": ["look"] * 9})
    for bad in ("look", [3]):
        with pytest.raises(PrefixError, match="must be a list of strings"):
            env.reset(options={**OPEN, "prefix_actions": bad})


def test_a_snapshot_is_one_line_of_json_that_names_its_origin(env):
    env.reset(seed=1, options=OPEN)
    env.step(FIT[0])
    text = env.snapshot().to_json()
    assert "\n" not in text
    value = json.loads(text)
    assert value["env_id"] == "Vault-v0"
    assert value["task_id"] == "vault_0"
    assert value["arguments"] == {"max_turns": 9, "loud": False}
    assert (value["turn"], value["ended"]) == (1, False)
    assert value["data_hash"] == env.data_hash


def test_chance_goes_on_where_the_snapshot_was_taken(env):
    wrong = next(f"dial {digit}" for digit in range(10) if f"dial {digit}" != FIT[0])
    env.reset(seed=1, options=OPEN)
    snapshot = env.snapshot()
    future = [env.step(wrong)[0] for _ in range(5)]
    assert len(set(future)) == 5
    other = toys.Vault()
    other.reset(seed=99)
    other.restore(snapshot)
    assert [other.step(wrong)[0] for _ in range(5)] == future


def test_a_snapshot_may_be_restored_under_another_limit_only(env):
    env.reset(options=OPEN)
    env.step("look")
    snapshot = env.snapshot()
    short = toys.Vault(max_turns=2)
    short.restore(snapshot)
    assert short.step("look")[3]
    with pytest.raises(SnapshotError, match=r"loud=False, this environment has True"):
        toys.Vault(loud=True).restore(snapshot)
    with pytest.raises(SnapshotError, match=r"env_id='Vault-v0'.*'Bench-v0'"):
        toys.Bench().restore(snapshot)
    with pytest.raises(SnapshotError, match="data_hash="):
        env.restore(dataclasses.replace(snapshot, data_hash="0" * 64))
    with pytest.raises(SnapshotError, match="PCG64"):
        env.restore(dataclasses.replace(snapshot, rng={"bit_generator": "MT19937"}))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "{}", '{"env_id": "Vault-v0"}'])
def test_other_text_is_no_snapshot(text):
    with pytest.raises(SnapshotError, match=r"not a snapshot.*Snapshot.to_json"):
        Snapshot.from_json(text)


def test_use_out_of_order(env):
    for call in (env.snapshot, lambda: env.task_id, lambda: env.step("look")):
        with pytest.raises(EnvironmentUsageError, match=r"call reset\(\)"):
            call()
    env.reset(options=OPEN)
    with pytest.raises(TypeError, match="takes text actions, got int"):
        env.step(3)


def test_rendering():
    env = toys.Vault(render_mode="ansi")
    env.reset(options=OPEN)
    env.step("look")
    assert env.render() == env.last_observation == "You tried 0 digits, 0 fit."
    silent = toys.Vault()
    silent.reset()
    assert silent.render() is None


def test_hooks_that_an_environment_lacks_say_so():
    env = toys.Bench()
    for call in (env.teacher, env.candidate_actions, lambda: env.generate_tasks(0, 1)):
        with pytest.raises(NotImplementedError, match="Bench-v0"):
            call()
    assert env.out_of_reach("test", 1) == ()
    assert env.failure_category([]) == "no_turn"


def test_gymnasiums_wrappers_leave_the_extras_on_the_unwrapped_environment():
    env = gym.make("toys:Vault-v0")
    env.reset(options=OPEN)
    env.step(FIT[0])
    snapshot = env.unwrapped.snapshot()
    env.reset(seed=5)
    assert env.unwrapped.restore(snapshot) == f"Click. Dial {FIT[1][-1]}."
    assert env.step("look")[0] == "You tried 1 digits, 1 fit."
