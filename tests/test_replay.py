"""Replay validation: recorded trajectories of another version of an environment, and one pass."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys import BARE, Vault

import agentbench_prefix
from agentbench_prefix.env import Outcome, TextEnv
from agentbench_prefix.errors import EnvironmentUsageError, UnknownNameError
from agentbench_prefix.replay import CutCheck, Recording, check_cuts, compare


class Pantry(TextEnv):
    """Take things off a shelf, put them back, wait, leave; ``v0`` of the environment."""

    env_id = "Pantry-v0"
    default_max_turns = 8
    data_hash = "pantry"
    known = ("pantry_0", "pantry_1")

    def __init__(self, *, max_turns=8, split="train", render_mode=None):
        super().__init__(max_turns=max_turns, split=split, render_mode=render_mode)
        self.held = []
        self.resets = self.steps = self.skips = 0

    @classmethod
    def splits(cls):
        return ("train",)

    def tasks(self, split):
        return self.known

    def family(self, task_id):
        return "shelf"

    def dialogues(self):
        return {"bare": BARE}

    def _begin(self, task_id, options):
        if task_id not in self.known:
            raise UnknownNameError("task_id", task_id, self.known)
        self.held = []
        return f"A shelf with rice, oil and salt in {task_id}."

    def list_held(self):
        return self.held

    def _act(self, action):
        verb, _, thing = action.partition(" ")
        if verb == "leave":
            return Outcome("You leave.", 1.0, terminated=True, success=True)
        if verb == "take":
            self.held.append(thing)
        elif verb == "drop":
            self.held = [held for held in self.held if held != thing]
        else:
            return Outcome("Time passes.", valid=False)
        return Outcome("You hold:\n" + "\n".join(self.list_held()))

    def _get_state(self):
        return list(self.held)

    def _set_state(self, state):
        self.held = list(state)

    def fields(self, observation):
        if observation.startswith("A shelf"):
            return {"shelf": observation.rpartition(" ")[2]}
        head, _, rest = observation.partition("\n")
        return {"held": sorted(rest.split("\n"))} if head == "You hold:" else {}

    def reset(self, **arguments):
        self.resets += 1
        return super().reset(**arguments)

    def step(self, action):
        self.steps += 1
        return super().step(action)

    def skip_turn(self, observation):
        self.skips += 1
        return super().skip_turn(observation)


class Sorted(Pantry):
    """Lists what is held in another order."""

    def list_held(self):
        return sorted(self.held)


class Heavy(Pantry):
    """Cannot hold salt: another rule."""

    def list_held(self):
        self.held = [thing for thing in self.held if thing != "salt"]
        return self.held


class Wordy(Pantry):
    """Tells the first observation and what is held in words without a structure."""

    def _begin(self, task_id, options):
        super()._begin(task_id, options)
        return "You see things."

    def _act(self, action):
        outcome = super()._act(action)
        outcome.observation = outcome.observation.replace("You hold:\n", "In your arms: ")
        return outcome


class Renamed(Pantry):
    """Calls its tasks otherwise."""

    known = ("room_0", "room_1")


class Short(Pantry):
    """The door falls shut behind the third thing."""

    def _act(self, action):
        outcome = super()._act(action)
        outcome.terminated |= len(self.held) == 3
        return outcome


class Picky(Pantry):
    """Breaks off at an action that the older version knew."""

    def _act(self, action):
        if action == "drop oil":
            raise ValueError("no such verb: drop")
        return super()._act(action)


ACTIONS = ("take rice", "take oil", "take salt", "drop oil", "leave")


def record(actions=ACTIONS, env=None, told="Say something.", seed=3):
    """What ``v0`` answers; an empty action stands for a turn without one."""
    env = env or Pantry()
    first, _ = env.reset(seed=seed, options={"task_id": "pantry_1"})
    answers = (env.step(action)[0] if action else env.skip_turn(told)[0] for action in actions)
    observations = [first, *answers]
    return Recording("pantry_1", {}, seed, actions, observations)


def brief(checks):
    return [(check.status, check.bytes_equal, check.probe, check.ended) for check in checks]


EVERY = range(len(ACTIONS))


def test_the_same_version_is_validated_byte_for_byte():
    checks = check_cuts(Pantry(), record(), EVERY)
    assert brief(checks[:-1]) == [("validated", True, "validated", False)] * 4
    # What follows the last cut ends the episode and shows no field: that refutes nothing.
    assert brief(checks[-1:]) == [("validated", True, "unverifiable", False)]
    assert [check.turns for check in checks] == list(EVERY)
    assert all(check.probe_bytes_equal and not check.detail for check in checks)


def test_another_order_of_lines_is_validated_but_not_byte_for_byte():
    checks = check_cuts(Sorted(), record(), EVERY)
    assert {check.status for check in checks} == {"validated"}
    # "oil, rice" for "rice, oil" is told at turn 2: from there on the texts differ, though the
    # single text at cut 4 ("rice, salt") is the same again.
    assert [check.bytes_equal for check in checks] == [True, True, False, False, False]
    assert [check.probe_bytes_equal for check in checks] == [True, False, False, True, True]


def test_another_rule_is_a_mismatch_at_the_cut_or_after_the_probe():
    checks = check_cuts(Heavy(), record(), EVERY)
    assert [check.status for check in checks] == [
        "validated",
        "validated",
        "mismatch",
        "mismatch",
        "mismatch",
    ]
    assert brief(checks)[2] == ("mismatch", True, "mismatch", False)
    assert checks[2].detail == "after the probe: field held differs"
    assert brief(checks)[3] == ("mismatch", False, "mismatch", False)
    assert checks[3].detail == "field held differs"
    assert checks[4].detail == "field held differs"


def test_without_a_shared_field_nothing_can_be_said():
    checks = check_cuts(Wordy(), record(), EVERY)
    assert {check.status for check in checks} == {"unverifiable"}
    assert {check.detail for check in checks} == {"no shared field"}
    waited = record(("take rice", "dance", "take oil", "leave"))
    assert [check.status for check in check_cuts(Pantry(), waited, range(4))] == [
        "validated",
        "validated",
        "unverifiable",
        "validated",
    ]


def test_a_mismatch_after_the_probe_outweighs_that_nothing_is_seen_at_the_cut():
    waited = record(("take rice", "dance", "take salt", "leave"))
    checks = check_cuts(Heavy(), waited, [2])
    assert brief(checks) == [("mismatch", True, "mismatch", False)]


def test_a_task_that_the_version_lacks_is_an_error():
    checks = check_cuts(Renamed(), record(), EVERY)
    assert brief(checks) == [("error", False, "error", False)] * 5
    assert {check.turns for check in checks} == set(EVERY)
    assert all("unknown task_id 'pantry_1'" in check.detail for check in checks)


def test_an_episode_that_ends_inside_the_prefix():
    checks = check_cuts(Short(), record(), EVERY)
    assert [check.status for check in checks] == ["validated"] * 4 + ["error"]
    assert [check.ended for check in checks] == [False, False, False, True, False]
    assert checks[3].probe == "error"
    assert checks[4].detail == "the episode ended after 3 turns"
    limited = check_cuts(Pantry(max_turns=2), record(), EVERY)
    assert [(check.status, check.ended) for check in limited] == [
        ("validated", False),
        ("validated", False),
        ("validated", True),
        ("error", False),
        ("error", False),
    ]


def test_what_breaks_off_spoils_only_the_cuts_behind_it():
    checks = check_cuts(Picky(), record(), EVERY)
    assert [check.status for check in checks] == ["validated"] * 3 + ["error"] * 2
    assert checks[3] == CutCheck(
        3, "error", False, "error", False, detail="ValueError: no such verb: drop"
    )
    alone = [check_cuts(Picky(), record(), [k])[0] for k in EVERY]
    assert checks == alone


class Flawed(Pantry):
    """Raises, as code that its author never tried does."""

    def __init__(self, where, error):
        super().__init__()
        self.where, self.error = where, error

    def stumble(self, where):
        if where == self.where:
            raise self.error

    def _begin(self, task_id, options):
        self.stumble("reset")
        return super()._begin(task_id, options)

    def _act(self, action):
        self.stumble(action)
        return super()._act(action)

    def snapshot(self):
        if len(self.held) == 2:
            self.stumble("snapshot")
        return super().snapshot()

    def restore(self, snapshot):
        if len(snapshot.state["env"]) == 2:
            self.stumble("restore")
        return super().restore(snapshot)

    def fields(self, observation):
        if "oil\nsalt" in observation:
            self.stumble("fields")
        return super().fields(observation)


ERRORS = [
    KeyError("oil"),
    IndexError("list index out of range"),
    AttributeError("no such attribute"),
    RuntimeError("engine lost"),
    OSError("no such file"),
    AssertionError("cannot be"),
    NotImplementedError("later"),
    ZeroDivisionError("division by zero"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    ("where", "at_fault", "proving_at_fault"),
    [
        ("reset", [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
        ("drop oil", [3, 4], [3, 4]),
        ("snapshot", [], [2, 3, 4]),
        ("restore", [], [2, 4]),  # two things are held after two turns, and after four
        ("fields", [2, 3], [2, 3]),
    ],
)
def test_whatever_an_environment_raises_is_an_error_of_the_cut(
    where, at_fault, proving_at_fault, error
):
    for restore, expected in ((False, at_fault), (True, proving_at_fault)):
        checks = check_cuts(Flawed(where, error), record(), EVERY, restore=restore)
        assert [check.turns for check in checks if check.status == "error"] == expected
        for turns in expected:
            assert type(error).__name__ in checks[turns].detail
            assert str(error) in checks[turns].detail
            assert (checks[turns].probe, checks[turns].ended) == ("error", False)


class Forgetful(Pantry):
    """A snapshot of it forgets the order in which things were taken, or the newest of them."""

    def __init__(self, forgets):
        super().__init__()
        self.forgets = forgets

    def _set_state(self, state):
        super()._set_state(state[:-1] if self.forgets == "newest" else sorted(state))


def test_a_snapshot_that_forgets_shows_in_the_probe_alone():
    """The replay itself goes well, at every cut: only the probe from the snapshot does not."""
    assert all(check.bytes_equal for check in check_cuts(Forgetful("newest"), record(), EVERY))
    newest = check_cuts(Forgetful("newest"), record(), EVERY, restore=True)
    assert [check.status for check in newest] == ["validated", *["mismatch"] * 3, "validated"]
    assert newest[1].detail == "after the probe: field held differs"
    assert [check.bytes_equal for check in newest] == [True] * 5
    assert [check.probe_bytes_equal for check in newest] == [True, False, False, False, True]
    order = check_cuts(Forgetful("order"), record(), EVERY, restore=True)
    assert [check.status for check in order] == ["validated"] * 5
    assert [check.bytes_equal for check in order] == [True] * 5
    # "drop oil" leaves rice and salt in either order.
    assert [check.probe_bytes_equal for check in order] == [True, True, False, True, True]


def test_an_interruption_is_no_error_of_the_environment():
    with pytest.raises(KeyboardInterrupt):
        check_cuts(Flawed("drop oil", KeyboardInterrupt()), record(), EVERY)


def test_a_recording_may_hold_tuples():
    plain = record()
    kept = Recording(**{**vars(plain), "observations": tuple(plain.observations)})
    assert check_cuts(Pantry(), kept, EVERY) == check_cuts(Pantry(), plain, EVERY)


def test_turns_without_an_action_are_answered_as_they_were():
    spoken = record(("take rice", "", "take oil", "", "leave"), told="One action, please.")
    env = Pantry()
    checks = check_cuts(env, spoken, EVERY)
    assert [check.status for check in checks] == [
        "validated",
        "validated",
        "unverifiable",
        "validated",
        "unverifiable",
    ]
    assert all(check.bytes_equal and check.probe_bytes_equal for check in checks)
    assert (env.resets, env.steps, env.skips) == (1, 3, 2)
    proving = Pantry()
    assert check_cuts(proving, spoken, EVERY, restore=True) == checks
    # Four turns on the way and one probe each.
    assert (proving.resets, proving.steps, proving.skips) == (1, 2 + 3, 2 + 2)


@pytest.mark.parametrize("cuts", [[0, 1, 2, 3, 4], [4], [1, 3], [3, 1], [0], []])
def test_one_reset_and_one_pass(cuts):
    env = Pantry()
    checks = check_cuts(env, record(), cuts)
    assert [check.turns for check in checks] == cuts
    assert (env.resets, env.steps) == (1, max(cuts, default=-1) + 1)
    proving = Pantry()
    assert check_cuts(proving, record(), cuts, restore=True) == checks
    assert (proving.resets, proving.steps) == (1, max(cuts, default=0) + len(cuts))


@pytest.mark.parametrize("cut", [5, -1])
def test_cuts_leave_a_turn_to_play(cut):
    with pytest.raises(ValueError, match=f"at least one of 5 turns, got {cut}"):
        check_cuts(Pantry(), record(), [0, cut])


def test_a_recording_has_one_observation_more_than_actions():
    with pytest.raises(ValueError, match="2 actions need 3 observations, got 2"):
        Recording("t", {}, 0, ["a", "b"], ["x", "y"])


def test_chance_is_replayed_from_the_seed():
    """A wrong digit rattles as often as chance says; fields do not see it, bytes do."""
    env = Vault()
    observations = [env.reset(seed=11, options={"task_id": "vault_2"})[0]]
    wrong = (env.code[0] + 1) % 10
    actions = [f"dial {wrong}"] * 3 + [f"dial {digit}" for digit in env.code]
    observations += [env.step(action)[0] for action in actions]
    same = check_cuts(Vault(), Recording("vault_2", {}, 11, actions, observations), range(6))
    assert all(check.bytes_equal and check.probe_bytes_equal for check in same)
    other = check_cuts(Vault(), Recording("vault_2", {}, 12, actions, observations), range(6))
    assert [check.bytes_equal for check in other] == [True] + [False] * 5
    assert [check.status for check in other] == [check.status for check in same]


def test_options_of_the_task_are_replayed():
    env = Vault()
    first = env.reset(seed=0, options={"task_id": "vault_2", "polite": True})[0]
    actions = [f"dial {digit}" for digit in env.code]
    observations = [first, *(env.step(action)[0] for action in actions)]
    polite = Recording("vault_2", {"polite": True}, 0, actions, observations)
    plain = Recording("vault_2", {}, 0, actions, observations)
    assert check_cuts(Vault(), polite, [0])[0].bytes_equal
    assert not check_cuts(Vault(), plain, [0])[0].bytes_equal


def plainly(env, recording, turns):
    """One cut checked without snapshots: everything is played from a reset, the probe, too."""
    try:
        seen = [env.reset(seed=recording.seed, options={"task_id": recording.task_id})[0]]
        for turn, action in enumerate(recording.actions[: turns + 1]):
            if env.ended and turn == turns:
                return compare(env, seen[-1], recording.observations[turns])[0], True
            told = recording.observations[turn + 1]
            seen.append(env.step(action)[0] if action else env.skip_turn(told)[0])
    except EnvironmentUsageError:
        return "error", False
    at = compare(env, seen[turns], recording.observations[turns])[0]
    probe = compare(env, seen[turns + 1], recording.observations[turns + 1])[0]
    equal = seen[: turns + 1] == recording.observations[: turns + 1]
    return "mismatch" if "mismatch" in (at, probe) else at, equal, probe


TEXTCRAFT = {turns: agentbench_prefix.make("TextCraft-v0", max_turns=turns) for turns in (4, 30)}


@given(st.integers(0, 2**32), st.integers(1, 12), st.booleans())
def test_one_pass_equals_checking_every_cut_alone(seed, length, shortened):
    """Random play on TextCraft, its record spoilt here and there, or its turn limit lowered."""
    draw = random.Random(seed)
    env = TEXTCRAFT[30]
    task = draw.choice(env.tasks("train"))
    actions, observations = [], [env.reset(seed=seed, options={"task_id": task})[0]]
    while len(actions) < length and not env.ended:
        likely = [*env.candidate_actions(), "inventory", "dance", ""]
        actions.append(draw.choice(likely))
        answer = env.step(actions[-1])[0] if actions[-1] else env.skip_turn("An action!")[0]
        observations.append(answer)
    spoilt = [
        draw.choice(["Got 1 diamond", "Inventory: [diamond] (1) ", "?"])
        if draw.random() < 0.1
        else observation
        for observation in observations
    ]
    recording = Recording(task, {}, seed, actions, spoilt)
    cuts = list(range(len(actions)))
    draw.shuffle(cuts)
    replaying = TEXTCRAFT[4 if shortened else 30]
    together = check_cuts(replaying, recording, cuts)
    assert together == [check_cuts(replaying, recording, [k])[0] for k in cuts]
    assert together == check_cuts(replaying, recording, cuts, restore=True)
    for check in together:
        expected = plainly(replaying, recording, check.turns)
        if len(expected) == 3:
            assert (check.status, check.bytes_equal, check.probe) == expected
            assert not check.ended
        else:
            assert (check.status, check.ended) == expected
