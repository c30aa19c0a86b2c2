"""Episodes in lockstep: what is asked of a policy and what is recorded of it."""

from __future__ import annotations

import pytest
import toy
from toys import BARE, BRACKETED

from agentbench_prefix.dialogue import Message
from agentbench_prefix.errors import (
    ConfigurationError,
    ContextLimitError,
    EndpointError,
    PolicyError,
)
from agentbench_prefix.policies.base import Reply
from agentbench_prefix.policies.scripted import OraclePolicy, RandomPolicy
from agentbench_prefix.rollouts import episode_seed, play, start


class Scripted:
    """Says the next line of each episode's script; an exception in it is returned."""

    def __init__(self, *scripts):
        self.scripts = [iter(script) for script in scripts]
        self.asked = []
        self.closed = 0

    def describe(self):
        return {}

    def open(self, episodes):
        self.places = {id(episode): i for i, episode in enumerate(episodes)}
        return self

    def reply(self, episodes):
        places = [self.places[id(episode)] for episode in episodes]
        self.asked.append(places)
        lines = [next(self.scripts[place]) for place in places]
        return [Reply(line) if isinstance(line, str) else line for line in lines]

    def close(self):
        self.closed += 1


def episodes(*tasks, dialogue=BARE, **arguments):
    return [start(toy.Toy(**arguments), dialogue, task, sample=i) for i, task in enumerate(tasks)]


def solution(task):
    env = toy.Toy()
    env.reset(options={"task_id": task})
    return [f"dial {digit}" for digit in env.code]


def test_episodes_leave_as_they_end_and_progress_follows_completion():
    two, three, twelve = solution("toy_0"), solution("toy_1"), ["look"] * 8
    policy = Scripted(twelve, three, two, two)
    seen = []
    records = play(
        policy,
        episodes("toy_3", "toy_1", "toy_0", "toy_0"),
        lambda record: seen.append((record.task_id, record.sample)),
    )
    assert policy.asked == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1], *[[0]] * 5]
    assert seen == [("toy_0", 2), ("toy_0", 3), ("toy_1", 1), ("toy_3", 0)]
    assert [r.task_id for r in records] == ["toy_3", "toy_1", "toy_0", "toy_0"]
    assert [r.success for r in records] == [False, True, True, True]
    assert [r.truncated for r in records] == [True, False, False, False]
    assert [r.failure_category for r in records] == ["shut", None, None, None]
    assert [r.reward for r in records] == [0, 1, 1, 1]
    assert policy.closed == 1


def test_a_record_holds_the_conversation_and_replays():
    dials = solution("toy_1")
    script = ["no action", *(f"so [[ {action} ]] there" for action in dials)]
    [episode] = episodes("toy_1", dialogue=BRACKETED)
    [record] = play(Scripted(script), [episode])
    assert record.success
    first, second, *_ = record.turns
    assert (first.action, first.problem, first.valid) == (None, "no_action", False)
    assert first.observation == BRACKETED.answers["no_action"]
    assert (second.action, second.problem, second.notes) == (dials[0], None, ("trailing_text",))
    said = [*record.opening]
    for turn in record.turns:
        said += [Message("assistant", turn.reply), Message("user", turn.observation)]
    assert said == episode.messages
    assert record.opening == (Message("system", BRACKETED.system), record.opening[1])

    env = toy.Toy(**record.arguments)
    observation, _ = env.reset(
        seed=record.seed, options={"task_id": record.task_id, **record.options}
    )
    assert observation == record.opening[-1].content
    for turn in record.turns:
        if turn.action is None:
            env.skip_turn(turn.observation)
        else:
            assert env.step(turn.action)[0] == turn.observation
    assert env.ended


def test_reset_options_are_recorded():
    [record] = play(OraclePolicy(), [start(toy.Toy(), BARE, "toy_0", options={"polite": True})])
    assert record.options == {"polite": True}


def test_what_a_model_generated_is_recorded_verbatim():
    reply = Reply("look", (11, 12, 2), (-0.5, -0.25, -1e-9), "length", 40)
    [record] = play(Scripted([reply] * 8), episodes("toy_0"))
    assert record.n_turns == 8
    for turn in record.turns:
        assert (turn.token_ids, turn.logprobs) == (reply.token_ids, reply.logprobs)
        assert (turn.finish, turn.prompt_tokens, turn.reply) == ("length", 40, "look")


def test_a_policy_error_ends_its_own_episode_only():
    gone = EndpointError("no answer")
    policy = Scripted(["look", gone], solution("toy_0"), [gone])
    lost, fine, never = play(policy, episodes("toy_0", "toy_0", "toy_0"))
    assert (lost.error, lost.n_turns, lost.success) == ("EndpointError: no answer", 1, False)
    assert (never.error, never.n_turns) == ("EndpointError: no answer", 0)
    assert lost.failure_category is None
    assert (fine.error, fine.success) == (None, True)


def test_a_policy_that_raises_loses_every_running_episode():
    class Breaks(Scripted):
        def reply(self, episodes):
            if len(self.asked) == 2:
                raise PolicyError("out of memory")
            return super().reply(episodes)

    policy = Breaks(solution("toy_0"), solution("toy_1"))
    done, lost = play(policy, episodes("toy_0", "toy_1"))
    assert done.success
    assert (lost.error, lost.n_turns) == ("PolicyError: out of memory", 2)
    assert policy.closed == 1


@pytest.mark.parametrize("fault", [KeyError("x"), ConfigurationError("y")])
def test_other_faults_are_not_hidden(fault):
    class Faulty(Scripted):
        def reply(self, episodes):
            raise fault

    policy = Faulty([])
    with pytest.raises(type(fault)):
        play(policy, episodes("toy_0"))
    assert policy.closed == 1


def test_a_policy_that_answers_for_too_few_is_a_fault():
    class Short(Scripted):
        def reply(self, episodes):
            return super().reply(episodes)[:-1]

    with pytest.raises(ValueError, match="zip"):
        play(Short(["look"], ["look"]), episodes("toy_0", "toy_0"))


def test_seeds_differ_by_run_task_and_sample_and_stay_what_they_are():
    seeds = {episode_seed(s, t, i) for s in range(3) for t in ("a", "b") for i in range(3)}
    assert len(seeds) == 18
    assert all(0 <= seed < 2**48 for seed in seeds)
    assert episode_seed(0, "toy_0", 0) == 0xFB3221DCE66A


@pytest.mark.parametrize("dialogue", [BARE, BRACKETED], ids=lambda d: d.name)
def test_the_oracle_solves_what_fits_the_limit(dialogue):
    tasks = toy.Toy().tasks("test")
    records = play(OraclePolicy(), episodes(*tasks, dialogue=dialogue))
    out = set(toy.Toy().out_of_reach("test", 8))
    assert out
    assert {r.task_id for r in records if not r.success} == out
    assert all(turn.problem is None for r in records for turn in r.turns)


def test_the_random_policy_draws_from_the_candidates_and_not_from_its_neighbours():
    tasks = ["toy_3"] * 20
    together = play(RandomPolicy(), episodes(*tasks))
    alone = [
        play(RandomPolicy(), [start(toy.Toy(), BARE, task, sample=i)])[0]
        for i, task in enumerate(tasks)
    ]
    assert together == alone
    said = [turn.action for record in together for turn in record.turns]
    assert set(said) == set(toy.Toy().candidate_actions())
    assert len({tuple(t.action for t in record.turns) for record in together}) == 20


def test_policies_say_which_hook_an_environment_lacks():
    class Bare(toy.Toy):
        def teacher(self, seed=None, *, detours=0.0):
            return super(toy.Vault, self).teacher(seed)

        def candidate_actions(self):
            return super(toy.Vault, self).candidate_actions()

    for policy, what in ((OraclePolicy(), "has no teacher"), (RandomPolicy(), "candidate")):
        with pytest.raises(ConfigurationError, match=what):
            play(policy, [start(Bare(), BARE, "toy_0")])


def test_no_candidates_leave_the_random_policy_speechless():
    class Mute(toy.Toy):
        def candidate_actions(self):
            return []

    [record] = play(RandomPolicy(), [start(Mute(), BARE, "toy_0")])
    assert {turn.problem for turn in record.turns} == {"empty_action"}


def test_a_conversation_that_outgrows_the_context_is_a_failure_and_no_error():
    policy = Scripted(["look", ContextLimitError("2049 of 2048")], solution("toy_0"))
    lost, solved = play(policy, episodes("toy_0", "toy_0"))
    assert (lost.success, lost.error, lost.truncated) == (False, None, True)
    assert (lost.n_turns, lost.failure_category) == (1, "context_limit")
    assert solved.success
