"""What ``TextEnv`` itself does, on a toy; the conformance suite covers what environments owe."""

from __future__ import annotations

import dataclasses
import functools
import json

import gymnasium as gym
import pytest
import toys

from agentbench_prefix import Snapshot
from agentbench_prefix.env import TextEnv
from agentbench_prefix.errors import (
    EnvironmentUsageError,
    PrefixError,
    SnapshotError,
    UnknownNameError,
)

FIT = [f"dial {digit}" for digit in toys.code_of("vault_0")]
OPEN = {"task_id": "vault_0"}
WRONG = next(f"dial {digit}" for digit in range(10) if f"dial {digit}" not in FIT)


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


def test_a_limit_left_out_is_the_default_and_none_is_none():
    class Plain(toys.Vault):
        def __init__(self, **arguments):
            super(toys.Vault, self).__init__(**arguments)
            self.loud = False

    assert Plain().max_turns == Plain.default_max_turns == 9
    assert Plain(max_turns=None).max_turns is None
    for env in (toys.Vault(), toys.Vault(max_turns=None, loud=True), toys.Vault(max_turns=2)):
        assert toys.Vault(**env.arguments()).arguments() == env.arguments()


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


def test_a_refused_draw_leaves_the_generator_alone(monkeypatch, env):
    env.reset(seed=3, options=OPEN)
    before = env.snapshot()

    def refuse(task_id, options):
        raise UnknownNameError("option", options, [])

    monkeypatch.setattr(env, "_begin", refuse)
    with pytest.raises(UnknownNameError):
        env.reset()
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


@pytest.mark.parametrize("turns", [4, 5, 50])
def test_with_a_fresh_budget_a_prefix_may_be_longer_than_the_limit(turns):
    env = toys.Vault(max_turns=4)
    options = {**OPEN, "prefix_actions": ["look"] * turns, "fresh_budget": True}
    _, info = env.reset(options=options)
    assert (info["turn"], env.turn, env.ended, env.max_turns) == (0, 0, False, 4)
    assert [env.step("look")[3] for _ in range(4)] == [False] * 3 + [True]
    with pytest.raises(PrefixError, match="It opens"):
        env.reset(options={**options, "prefix_actions": FIT})
    assert env.max_turns == 4


def test_a_prefix_may_pass_the_end_where_steps_do():
    env = toys.NeverShut()
    observation, info = env.reset(options={**OPEN, "prefix_actions": [*FIT, "dial 0", None]})
    assert info["prefix_observations"][-2:] == ["It opens.", "It is open."]
    assert (observation, info["turn"]) == ("", 5)
    assert env.step("look")[0] == "It is open."


def test_a_prefix_that_ends_the_episode_says_where(env):
    with pytest.raises(PrefixError, match=r"at turn 3 of 4 in task 'vault_0'.*It opens"):
        env.reset(options={**OPEN, "prefix_actions": [*FIT, "look"]})
    with pytest.raises(PrefixError, match=r"at turn 9 of 9.*raise max_turns \(now 9\)"):
        env.reset(options={**OPEN, "prefix_actions": ["look"] * 9})


@pytest.mark.parametrize("bad", ["look", "", [3], 0, 7, False, {}, {"look": 1}, b"look", {"look"}])
def test_a_prefix_is_a_list_or_a_tuple(env, bad):
    with pytest.raises(PrefixError, match="must be a list or tuple of strings"):
        env.reset(options={**OPEN, "prefix_actions": bad})


def test_a_prefix_may_be_a_tuple_or_nothing(env):
    assert env.reset(options={**OPEN, "prefix_actions": ("look", None)})[1]["turn"] == 2
    assert env.reset(options={**OPEN, "prefix_actions": None})[1]["turn"] == 0


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("prefix", ["look", [WRONG, 3], [WRONG] * 9, [WRONG, *FIT] * 3])
@pytest.mark.parametrize("options", [{"task_id": "vault_0"}, {"task_id": "vault_1"}, {}])
def test_a_refused_prefix_leaves_the_running_episode(env, options, prefix, seed):
    env.reset(seed=1, options={**OPEN, "polite": True})
    for action in (WRONG, FIT[0], WRONG):
        env.step(action)
    before = env.snapshot()
    with pytest.raises(PrefixError):
        env.reset(seed=seed, options={**options, "prefix_actions": prefix})
    assert env.snapshot() == before
    other = toys.Vault()
    other.restore(before)
    futures = [[e.step(action) for action in (WRONG, WRONG, *FIT[1:])] for e in (env, other)]
    assert futures[0] == futures[1]


def test_a_refused_first_prefix_starts_nothing(env):
    with pytest.raises(PrefixError):
        env.reset(seed=1, options={**OPEN, "prefix_actions": FIT})
    with pytest.raises(EnvironmentUsageError, match=r"call reset\(\)"):
        env.step("look")


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
    env.reset(seed=1, options=OPEN)
    snapshot = env.snapshot()
    future = [env.step(WRONG)[0] for _ in range(5)]
    assert len(set(future)) == 5
    other = toys.Vault()
    other.reset(seed=99)
    other.restore(snapshot)
    assert [other.step(WRONG)[0] for _ in range(5)] == future


def test_chance_is_fixed_without_a_seed_too(env):
    env.reset(options=OPEN)
    snapshot = env.snapshot()
    future = [env.step(WRONG)[0] for _ in range(5)]
    for other in (env, toys.Vault()):
        other.restore(Snapshot.from_json(snapshot.to_json()))
        assert [other.step(WRONG)[0] for _ in range(5)] == future


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


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "null", "{}", '{"env_id": "Vault-v0"}', "[" * 10**5]
)
def test_other_text_is_no_snapshot(text):
    with pytest.raises(SnapshotError, match=r"not a snapshot.*Snapshot.to_json"):
        Snapshot.from_json(text)


WRONG_FIELDS = [
    ("env_id", None, "snapshot.env_id must be str, got None"),
    ("task_id", 3, "snapshot.task_id must be str, got 3"),
    ("options", [], r"snapshot.options must be dict, got \[\]"),
    ("arguments", None, "snapshot.arguments must be dict"),
    ("turn", "1", "snapshot.turn must be int, got '1'"),
    ("turn", True, "snapshot.turn must be int, got True"),
    ("turn", -1, "snapshot.turn must be 0 or more, got -1"),
    ("ended", 0, "snapshot.ended must be bool, got 0"),
    ("state", None, "snapshot.state must be dict"),
    ("state", {"observation": "", "env": {}}, r"state\['success'\] must be bool, got None"),
    ("state", {"success": False, "observation": 3, "env": {}}, r"\['observation'\] must be str"),
    ("state", {"success": False, "observation": ""}, "snapshot.state lacks 'env'"),
    ("rng", None, "snapshot.rng must be dict, got None"),
]
NO_STATES = [
    ("task_id", "vault_99", "task_id='vault_99'.*vault_0, vault_1"),
    ("options", {"loud": True}, "snapshot.options has 'loud'.*valid: polite"),
    ("state", {"env": None}, r"state\['env'\]=None.*TypeError"),
    ("state", {"env": {"progress": 1}}, r"state\['env'\]=.*KeyError: 'tried'"),
    ("rng", {"bit_generator": "MT19937"}, "rng=.*PCG64"),
    ("rng", {"bit_generator": "PCG64"}, "rng=.*KeyError: 'state'"),
    (
        "rng",
        {"bit_generator": "PCG64", "state": {"state": -1, "inc": 1}, "has_uint32": 0},
        "rng=.*OverflowError",
    ),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG_FIELDS)
def test_text_with_a_field_of_another_type_is_no_snapshot(env, name, value, message):
    env.reset(seed=1, options=OPEN)
    text = json.dumps({**dataclasses.asdict(env.snapshot()), name: value})
    with pytest.raises(SnapshotError, match=message):
        Snapshot.from_json(text)


@pytest.mark.parametrize(("name", "value", "message"), WRONG_FIELDS + NO_STATES)
@pytest.mark.parametrize("seed", [1, None])
def test_a_refused_snapshot_leaves_the_running_episode(env, seed, name, value, message):
    env.reset(seed=seed, options={**OPEN, "polite": True})
    env.step(WRONG)
    env.step(FIT[0])
    before = env.snapshot()
    other = toys.Vault()
    other.reset(seed=2, options={"task_id": "vault_1"})
    good = other.snapshot()
    if isinstance(value, dict) and set(value) == {"env"}:
        value = {**good.state, **value}
    bad = dataclasses.replace(good, **{name: value})
    with pytest.raises(SnapshotError, match=message):
        env.restore(bad)
    assert env.snapshot() == before
    assert env.step(FIT[1])[0] == f"Click. Dial {FIT[2][-1]}."
    never_reset = toys.Vault()
    with pytest.raises(SnapshotError, match=message):
        never_reset.restore(bad)
    with pytest.raises(EnvironmentUsageError, match=r"call reset\(\)"):
        never_reset.step("look")


def test_restore_takes_a_snapshot_only(env):
    env.reset(options=OPEN)
    with pytest.raises(SnapshotError, match=r"got str: read text with Snapshot\.from_json"):
        env.restore(env.snapshot().to_json())


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
    listed = functools.partial(TextEnv.candidate_actions, env)
    for call in (env.teacher, listed, lambda: env.generate_tasks(0, 1)):
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


def test_a_task_outside_the_split_that_is_named_is_refused():
    env = toys.Vault()
    outside = next(task for task in env.tasks("test") if task not in env.tasks("train"))
    with pytest.raises(UnknownNameError, match="of split 'train'"):
        env.reset(options={"task_id": outside, "split": "train"})
    env.reset(options={"task_id": outside, "split": "test"})
