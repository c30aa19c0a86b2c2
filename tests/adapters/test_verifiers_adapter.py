"""verifiers plays tasks and queries against a model server; see ``scripts/test_verifiers.sh``.

The server knows the environments and answers what their teacher would do in the conversation that
it is sent, so that whatever verifiers changes in one shows.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

import agentbench_envs
from agentbench_prefix import registry
from agentbench_prefix.corpora.schema import QueryRow
from agentbench_prefix.dialogue import Message
from agentbench_prefix.errors import MissingExtraError, UnknownNameError
from agentbench_prefix.policies.base import Episode
from agentbench_prefix.policies.scripted import OraclePolicy
from agentbench_prefix.rollouts import play, start

sys.path.insert(0, str(Path(__file__).parents[1] / "policies"))

from fake_openai_server import FakeServer, completion, failure

MODULE = "agentbench_prefix.adapters.verifiers"
ENV = "TextCraft-v0"
CORPUS = "textcraft-prefix"


# ------------------------------------------------------------------ without verifiers
def test_without_verifiers_the_error_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    monkeypatch.setitem(sys.modules, "verifiers", None)  # as where it is not installed
    with pytest.raises(MissingExtraError, match=r"agentbench-prefix\[verifiers\]"):
        importlib.import_module(MODULE)
    with pytest.raises(MissingExtraError, match=r"agentbench-prefix\[verifiers\]"):
        _ = agentbench_envs.PrefixTaskset
    with pytest.raises(AttributeError, match="no attribute 'PrefixTask'"):
        _ = agentbench_envs.PrefixTask


# ------------------------------------------------------------------ with it
def needs_verifiers(test):
    absent = importlib.util.find_spec("verifiers") is None
    for mark in (
        pytest.mark.verifiers,
        pytest.mark.skipif(absent, reason="not installed: scripts/test_verifiers.sh"),
        pytest.mark.filterwarnings("default"),
    ):
        test = mark(test)
    return test


class Oracle:
    """Answers as the teacher would, in conversations that begin as one of some tasks does."""

    def __init__(self, tasks):
        self.starts = [(self.messages_of(task.data), task.data) for task in tasks]

    @staticmethod
    def messages_of(data):
        system = [] if data.system_prompt is None else [("system", data.system_prompt)]
        return [*system, *((m.role, m.content) for m in data.prompt)]

    def __call__(self, seen):
        asked = [(m["role"], m["content"]) for m in seen.body["messages"]]
        for opening, data in self.starts:
            if asked[: len(opening)] == opening:
                return completion(self.reply(data, asked[len(opening) :]))
        return failure(418, f"a conversation that nobody began: {asked[-1]}")

    def reply(self, data, talk):
        env = registry.make(data.env_id, **data.arguments)
        env.reset(seed=data.seed, options=data.options)
        dialogue = env.dialogues()[data.dialogue.partition("@")[0]]
        for (speaker, said), (listener, answer) in zip(talk[::2], talk[1::2], strict=True):
            assert (speaker, listener) == ("assistant", "user")
            assert env.step(dialogue.parse(said).action)[0] == answer
        turn = env.teacher().next_turn()
        return dialogue.render(turn.action, turn.thought)


def run(env, script, tasks, **client):
    """Episodes of tasks, and the server that was asked."""
    import verifiers.v1 as vf

    async def all_of_them():
        context = vf.ModelContext("toy", vf.EvalClientConfig(base_url=server.base_url, **client))
        async with env.serving():
            return [await env.run_episode(task, context) for task in tasks]

    with FakeServer(script).running() as server:
        return asyncio.run(all_of_them()), server


def conversation(trace):
    return [Message(m.role, m.content) for m in trace.messages]


@pytest.fixture
def adapter():
    return importlib.import_module(MODULE)


def within_reach(env, count):
    """The first tasks that a teacher can solve."""
    game = registry.make(ENV)
    beyond = set(game.out_of_reach("train", game.max_turns))
    return list(itertools.islice((t for t in env.taskset if t.data.id not in beyond), count))


@needs_verifiers
@pytest.mark.parametrize("dialogue", ["full", "compact"])
def test_an_episode_is_what_our_own_rollout_is(adapter, dialogue):
    env = adapter.load_environment(ENV, split="train", dialogue=dialogue)
    tasks = within_reach(env, 3)
    episodes, server = run(env, Oracle(tasks), tasks)
    assert {seen.path for seen in server.seen} == {"/v1/chat/completions"}
    for task, episode in zip(tasks, episodes, strict=True):
        assert episode.ok, episode.errors
        [trace] = episode.traces
        ours = registry.make(ENV)
        [record] = play(
            OraclePolicy(), [start(ours, ours.dialogues()[dialogue], task.data.id, seed=0)]
        )
        spoken = [Message("assistant", t.reply) for t in record.turns]
        heard = [Message("user", t.observation) for t in record.turns]
        told = [m for pair in zip(spoken, heard, strict=True) for m in pair]
        # The last observation ends the episode; nobody is told.
        assert conversation(trace) == [*record.opening, *told][:-1]
        assert trace.reward == record.reward == 1
        assert trace.metrics["success"] == 1
        assert trace.metrics["turns"] == trace.num_turns == record.n_turns
        assert trace.metrics["malformed"] == 0


def cuts_of(env, count):
    """The first tasks of a corpus that start at a cut and those that do not."""
    found = {True: [], False: []}
    for task in env.taskset:
        found[bool(task.data.options["prefix_actions"])].append(task)
        if all(len(tasks) >= count for tasks in found.values()):
            break
    return found[False][:count], found[True][:count]


@needs_verifiers
def test_queries_of_a_corpus_start_at_their_cuts(adapter):
    from agentbench_prefix.corpora.find import find_corpus

    env = adapter.load_environment(corpus=CORPUS, split="train", dialogue="compact")
    tasks = [*itertools.chain(*cuts_of(env, 3))]
    queries = {q.query_id: q for q in find_corpus(CORPUS).queries("train")}
    episodes, _ = run(env, Oracle(tasks), tasks)
    for task, episode in zip(tasks, episodes, strict=True):
        query: QueryRow = queries[task.data.id]
        assert episode.ok, episode.errors
        [trace] = episode.traces
        prompt = [Message(m.role, m.content) for m in query.messages]
        assert conversation(trace)[: len(prompt)] == prompt
        ours = registry.make(ENV, **json.loads(query.arguments))
        ours.reset(seed=query.seed, options=query.reset_options())
        dialogue = ours.dialogues()["compact"]
        [record] = play(
            OraclePolicy(), [Episode(query.task_id, 0, query.seed, ours, dialogue, list(prompt))]
        )
        spoken = [m.content for m in trace.assistant_messages]
        assert spoken == [turn.reply for turn in record.turns]
        assert trace.reward == record.reward == 1
        assert query.prefix_turns + trace.num_turns == ours.turn


@needs_verifiers
def test_strategies_and_raw_choose_the_queries(adapter):
    from agentbench_prefix.corpora.find import find_corpus

    corpus = find_corpus(CORPUS)
    strategy = next(iter(corpus.manifest.recipe["strategies"]))
    rows = [q for q in corpus.queries("train") if q.dialogue.startswith("compact@")]
    chosen = [q for q in rows if any(cut.strategy == strategy for cut in q.cuts)]
    env = adapter.load_environment(
        corpus=CORPUS, dialogue="compact", strategies=[strategy], raw=False
    )
    assert [task.data.id for task in env.taskset] == [q.query_id for q in chosen]
    assert 0 < len(chosen) < sum(q.prefix_turns > 0 for q in rows)
    env = adapter.load_environment(corpus=CORPUS, dialogue="compact", strategies=["best"])
    with pytest.raises(UnknownNameError, match="unknown strategy 'best'"):
        next(iter(env.taskset))
    env = adapter.load_environment(corpus=CORPUS, dialogue="compact", split="test")
    with pytest.raises(UnknownNameError, match="unknown split 'test'"):
        next(iter(env.taskset))


@needs_verifiers
def test_malformed_replies_are_answered_and_the_turn_limit_holds(adapter):
    env = adapter.load_environment(ENV, dialogue="full", arguments={"max_turns": 3})
    [task] = env.taskset.take(1)
    [episode], server = run(env, lambda seen: completion("I would rather not."), [task])
    [trace] = episode.traces
    assert episode.ok
    assert not trace.reward
    assert trace.metrics == {"success": 0, "turns": 3, "malformed": 3}
    answer = registry.make(ENV).dialogues()["full"].answer("no_action")
    assert [seen.opening for seen in server.seen[1:]] == [answer, answer]


@needs_verifiers
def test_a_conversation_that_outgrows_the_context_is_a_failure_and_no_error(adapter):
    env = adapter.load_environment(ENV, dialogue="full")
    [task] = env.taskset.take(1)

    def script(seen):
        if len(seen.body["messages"]) > 4:
            return failure(400, "This model's maximum context length is 512 tokens.")
        return completion("Let me look. [[ inventory ]]")

    [episode], server = run(env, script, [task])
    [trace] = episode.traces
    assert episode.ok, episode.errors
    assert not trace.reward
    assert trace.metrics["turns"] == 2
    assert len(server.seen) == 3


@needs_verifiers
def test_a_model_that_fails_makes_an_error(adapter):
    env = adapter.load_environment(ENV, dialogue="full")
    [task] = env.taskset.take(1)
    [episode], _ = run(env, lambda seen: failure(403, "no entry"), [task])
    assert not episode.ok
    assert "no entry" in episode.traces[0].last_error.message


@needs_verifiers
def test_a_task_that_starts_otherwise_is_refused(adapter):
    env = adapter.load_environment(corpus=CORPUS, dialogue="compact")
    _, [task] = cuts_of(env, 1)
    changed = task.with_data(observation="Got 3 stick")
    older = task.with_data(dialogue="compact@0")
    episodes, server = run(env, Oracle([task]), [changed, older])
    assert [episode.ok for episode in episodes] == [False, False]
    assert "expected 'Got 3 stick'" in episodes[0].errors[0].message
    assert "was written in compact@0" in episodes[1].errors[0].message
    assert not server.seen


@needs_verifiers
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "either env_id or corpus"),
        ({"env_id": ENV, "corpus": CORPUS}, "either env_id or corpus"),
        ({"corpus": CORPUS, "arguments": {"max_turns": 3}}, "leave them out"),
        ({"env_id": ENV, "strategies": ["random"]}, "strategies are a corpus'"),
        ({"env_id": ENV, "dialog": "full"}, "dialog"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(adapter, settings, message):
    with pytest.raises(ValueError, match=message):
        adapter.load_environment(**settings)


@needs_verifiers
def test_the_command_line_of_verifiers_runs_it(adapter, tmp_path):
    tasks = within_reach(adapter.load_environment(ENV, dialogue="compact"), 2)
    with FakeServer(Oracle(tasks)).running() as server:
        command = Path(sys.executable).with_name("vf-eval")
        options = f"--env.taskset.env-id {ENV} --env.taskset.dialogue compact --no-rich --no-push"
        options += f" --client.base-url {server.base_url} --client.api-key-var NO_KEY -m toy"
        options += f" --select.include.ids {tasks[0].data.id} {tasks[1].data.id}"
        options += f" --num-rollouts 2 --output-dir {tmp_path}"
        done = subprocess.run(
            [command, "agentbench-envs", *options.split()],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )
    assert done.returncode == 0, done.stderr
    [traces] = tmp_path.rglob("traces.jsonl")
    rows = [json.loads(line) for line in traces.read_text().splitlines()]
    assert len(rows) == 4
    for row in rows:
        assert row["ok"]
        assert row["traces"][0]["metrics"]["success"] == 1
