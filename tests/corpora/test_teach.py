"""Teachers: the environment's own, a model behind an endpoint; and learning from what they did."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from toys import BARE, Vault

from agentbench_prefix import make
from agentbench_prefix.corpora import build as module
from agentbench_prefix.corpora.build import build
from agentbench_prefix.corpora.find import find_corpus
from agentbench_prefix.corpora.recipe import OpenAITeacher, OracleTeacher, make_recipe
from agentbench_prefix.corpora.schema import Turn, to_messages
from agentbench_prefix.corpora.storage import read_rows
from agentbench_prefix.corpora.teach import teach_oracle, teach_policy, write_conversations
from agentbench_prefix.errors import ConfigurationError, EndpointError
from agentbench_prefix.replay import Recording, check_cuts
from agentbench_prefix.training.data import draw, play_draw, recorded
from agentbench_prefix.training.demonstrations import replay_trajectory
from agentbench_prefix.training.recipe import SFTRecipe, Stage

sys.path.insert(0, str(Path(__file__).parents[1] / "policies"))

from fake_openai_server import FakeServer, completion, failure

TASKS = ("textcraft_0", "textcraft_150", "textcraft_300", "textcraft_450")
"""Two of depth 1, one of 2, one of 3."""


@pytest.fixture(scope="module")
def env():
    return make("TextCraft-v0")


@pytest.fixture(scope="module")
def lessons(env):
    return {task: teach_oracle(env, OracleTeacher(), task) for task in TASKS}


def actions_of(row):
    return tuple(turn.action for turn in row.turns)


def check_row(env, row):
    """Everything about a row that follows from its turns: conversations, replay, sums."""
    assert (row.env_id, row.data_hash) == (env.env_id, env.data_hash)
    assert json.loads(row.arguments) == env.arguments()
    assert row.family == env.family(row.task_id)
    assert row.n_turns == len(row.turns)
    assert row.reward == sum(turn.reward for turn in row.turns)
    dialogues = env.dialogues()
    assert [c.dialogue for c in row.conversations] == [d.label for d in dialogues.values()]
    for conversation, dialogue in zip(row.conversations, dialogues.values(), strict=True):
        messages = to_messages(conversation.messages)
        opening = dialogue.opening(row.first_observation)
        assert messages[: len(opening)] == opening
        roles = [m.role for m in messages[len(opening) :]]
        assert roles == (["assistant", "user"] * row.n_turns)[:-1]
        replies = messages[len(opening) :: 2]
        answers = messages[len(opening) + 1 :: 2]
        for turn, reply in zip(row.turns, replies, strict=True):
            parsed = dialogue.parse(reply.content)
            assert (parsed.action or "") == turn.action
            assert (parsed.action is None) == bool(turn.problem)
            assert turn.trainable or turn.problem or row.teacher == "oracle"
        for turn, answer in zip(row.turns, answers, strict=False):
            assert answer.content == turn.observation or turn.problem
            assert answer.content.strip()

    recording = Recording(
        row.task_id, json.loads(row.options), row.seed, actions_of(row), row.observations()
    )
    for check in check_cuts(env, recording, range(row.n_turns)):
        assert check.bytes_equal
        assert check.probe_bytes_equal
        assert check.status in ("validated", "unverifiable")
    # The last cut's probe was the last action: it ended the episode as recorded.
    assert env.ended
    assert env.last_observation == row.turns[-1].observation
    assert env.snapshot().state["success"] == row.success


# ------------------------------------------------------------------ the environment's own
def test_the_same_lesson_every_time(env, lessons):
    used = make("TextCraft-v0")
    used.reset(seed=99, options={"task_id": "textcraft_7"})
    used.step("inventory")
    for task in TASKS:
        assert teach_oracle(used, OracleTeacher(), task) == lessons[task]
    other = teach_oracle(env, OracleTeacher(seed=1), TASKS[-1])
    assert [actions_of(row) for row in other.trajectories] != [
        actions_of(row) for row in lessons[TASKS[-1]].trajectories
    ]


def test_rows_follow_from_their_turns(env, lessons):
    for lesson in lessons.values():
        for row in lesson.trajectories:
            assert row.success
            check_row(env, row)
        for row in lesson.failures:
            assert not row.success
            check_row(env, row)


def test_four_different_plays_a_task(lessons):
    for task, lesson in lessons.items():
        plays = [actions_of(row) for row in lesson.trajectories]
        assert len(set(plays)) == len(plays) == 4
        names = [f"{task}/oracle/{sample}" for sample in range(4)]
        assert [row.trajectory_id for row in lesson.trajectories] == names
        assert [row.sample for row in lesson.trajectories] == [0, 1, 2, 3]


def test_teachers_err_and_recover(lessons):
    """Mistakes change nothing or leave something in hand; they are marked, and not all there is."""
    turns = [
        turn for lesson in lessons.values() for row in lesson.trajectories for turn in row.turns
    ]
    assert 0 < sum(not turn.trainable for turn in turns) < len(turns) / 2
    assert all(
        row.turns[-1].trainable for lesson in lessons.values() for row in lesson.trajectories
    )
    assert any(not turn.valid for turn in turns)
    assert all(turn.valid or not turn.trainable for turn in turns)


def test_plain_turns_are_those_of_the_plan(env, lessons):
    for task, lesson in lessons.items():
        env.reset(options={"task_id": task})
        steps = len(env.shortest_plan())
        for row in lesson.trajectories:
            assert row.plain_turns == steps <= row.n_turns


def test_repeats_only_when_the_attempts_run_out(env):
    """Without detours a plan of two steps can be played in one order only."""
    task = next(
        task
        for task in env.tasks("train")
        if env.reset(options={"task_id": task}) and len(env.shortest_plan()) == 2
    )
    seeds = []

    class Counted:
        env_id = env.env_id

        def __getattr__(self, name):
            return getattr(env, name)

        def teacher(self, seed=None, **arguments):
            seeds.append(seed)
            return env.teacher(seed, **arguments)

    lesson = teach_oracle(Counted(), OracleTeacher(detours=0, attempts=6), task)
    assert len(seeds) == 1 + 6  # the plain play, and all attempts
    assert len(lesson.trajectories) == 4
    assert len({actions_of(row) for row in lesson.trajectories}) == 1
    assert len({row.trajectory_id for row in lesson.trajectories}) == 4
    assert lesson.repeated == 2
    seeds.clear()
    lesson = teach_oracle(Counted(), OracleTeacher(detours=0.3, attempts=50), TASKS[-1])
    assert len({actions_of(row) for row in lesson.trajectories}) == 4
    assert len(seeds) == 1 + 4 + lesson.repeated < 1 + 50


def test_failures_are_kept_apart_and_numbered():
    short = make("TextCraft-v0", max_turns=6)
    teacher = OracleTeacher(detours=0.6, attempts=16)
    found = [teach_oracle(short, teacher, task) for task in TASKS]
    assert any(lesson.failures for lesson in found)
    assert any(lesson.trajectories for lesson in found)
    for task, lesson in zip(TASKS, found, strict=True):
        names = [f"{task}/oracle/failure-{i}" for i in range(len(lesson.failures))]
        assert [row.trajectory_id for row in lesson.failures] == names
        assert [row.sample for row in lesson.failures] == list(range(len(lesson.failures)))
        for row in (*lesson.failures, *lesson.trajectories):
            check_row(short, row)
        assert all(row.n_turns == 6 and not row.success for row in lesson.failures)
        seeds = [row.seed for row in (*lesson.failures, *lesson.trajectories)]
        assert len(set(seeds)) == len(seeds)


def test_a_task_that_is_never_solved_has_no_trajectory():
    short = make("TextCraft-v0", max_turns=2)
    lesson = teach_oracle(short, OracleTeacher(attempts=5), "textcraft_450")
    assert (lesson.trajectories, len(lesson.failures), lesson.repeated) == ([], 5, 0)
    assert all(row.plain_turns == 0 for row in lesson.failures)


# ------------------------------------------------------------------ a model behind an endpoint
class Pupil:
    """A server's script that plays like the environment's teacher, and not always well.

    Args:
        arguments: Arguments of the environment it plays.
        lazy: Tasks that it never solves.
        refused: Tasks whose requests are refused.
    """

    def __init__(self, arguments, lazy=(), refused=()):
        self.arguments = arguments
        self.lazy = lazy
        self.refused = set(refused)
        self.asked = Counter()
        env = make("TextCraft-v0")
        self.tasks = {
            env.reset(options={"task_id": task})[0]: task for task in env.tasks("train")[:8]
        }

    def __call__(self, seen):
        messages = seen.body["messages"]
        assert messages[0]["role"] == "system"
        task = self.tasks[messages[1]["content"]]
        self.asked[task] += 1
        if task in self.refused:
            return failure(400, "the model is tired")
        if task in self.lazy:
            return completion("I look around. [[ inventory ]]")
        env = make("TextCraft-v0", **self.arguments)
        env.reset(options={"task_id": task})
        dialogue = env.dialogues()["full"]
        for message in messages[2:]:
            if message["role"] == "assistant":
                parsed = dialogue.parse(message["content"])
                if parsed.action is None:
                    env.skip_turn("")
                else:
                    env.step(parsed.action)
        match seen.body["seed"] % 7:
            case 0:
                return completion("I would rather not.")
            case 1:
                return completion("[[ inventory ]] or [[ get 1 stick ]]?")
            case 2:
                return completion("", reasoning_content="Let me see.")
        turn = env.teacher(seen.body["seed"]).next_turn()
        return completion(f"{turn.thought} [[ {turn.action} ]]", reasoning_content="Hm.")


def openai_recipe(server, **changes):
    return make_recipe(
        {
            "name": "taught",
            "licence": "Apache-2.0",
            "env_id": "TextCraft-v0",
            "arguments": {"max_turns": 8},
            "tasks": 3,
            "teacher": {
                "kind": "openai",
                "base_url": server.base_url,
                "model": "toy",
                "per_task": 2,
                "attempts": 4,
            },
            "dialogues": ["compact", "full"],
            "strategies": {"every": {"kind": "every_turn"}},
            **changes,
        }
    )


@pytest.fixture
def settled(monkeypatch):
    for name in ("OPENAI_API_KEY", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "PART", 1)
    monkeypatch.setattr(module, "code_version", lambda: "tested")


def test_a_model_teaches(settled, tmp_path, env):
    short = make("TextCraft-v0", max_turns=8)
    lazy = env.tasks("train")[1]
    with FakeServer(Pupil({"max_turns": 8}, lazy=[lazy])).running() as server:
        corpus = build(openai_recipe(server), tmp_path / "c")
        again = build(openai_recipe(server), tmp_path / "again")
    rows = list(corpus.trajectories("train"))
    assert rows == list(again.trajectories("train"))
    failed = list(read_rows(corpus.folder / "failures/train.parquet", "failures"))
    assert {row.task_id for row in rows} == {*corpus.manifest.splits["train"]} - {lazy}
    assert Counter(row.task_id for row in failed)[lazy] == 4
    assert {row.teacher for row in (*rows, *failed)} == {"toy"}
    for row in rows:
        assert row.success
        assert row.trajectory_id == f"{row.task_id}/toy/{row.sample}"
    for row in (*rows, *failed):
        check_row(short, row)

    problems = Counter(turn.problem for row in rows for turn in row.turns)
    assert {"", "no_action", "multiple_actions"} <= set(problems)
    for row in rows:
        full, compact = row.conversation("full"), row.conversation("compact")
        spoken = [m.content for m in full.messages if m.role == "assistant"]
        bare = [m.content for m in compact.messages if m.role == "assistant"]
        for turn, said, action in zip(row.turns, spoken, bare, strict=True):
            assert turn.trainable == (not turn.problem)
            assert action == turn.action
            assert "<think>" in said or turn.problem
        told = [m.content for m in full.messages if m.role == "user"]
        assert told == row.observations()[:-1]

    # A turn without action is replayed as one; the cut behind it shows no field.
    empty = {
        (row.trajectory_id, k) for row in rows for k, turn in enumerate(row.turns) if turn.problem
    }
    queries = list(corpus.queries("train"))
    assert any("" in query.prefix_actions for query in queries)
    for query in queries:
        assert (query.trajectory_id, query.prefix_turns - 1) not in empty
        assert query.trainable == [bool(action) for action in query.prefix_actions]
        observation, _ = short.reset(seed=query.seed, options=query.reset_options())
        assert observation == query.observation
    taught = next(e for e in corpus.manifest.taught if e.family == "all")
    assert (taught.tasks, taught.failures) == (2, len(failed))
    assert taught.untrainable_share > 0


def test_a_teacher_that_fails_is_asked_again_where_it_stopped(settled, tmp_path, env):
    first, second, third = env.tasks("train")[:3]
    pupil = Pupil({"max_turns": 8}, refused=[second])
    with FakeServer(pupil).running() as server:
        recipe = openai_recipe(server)
        with pytest.raises(EndpointError, match=rf"'{second}' .*tired.*run the same command again"):
            build(recipe, tmp_path / "c")
        assert not (tmp_path / "c").exists()
        assert pupil.asked[first] > 0
        assert pupil.asked[third] == 0
        pupil.refused.clear()
        pupil.asked.clear()
        resumed = build(recipe, tmp_path / "c")
        assert set(pupil.asked) == {second, third}
        whole = build(recipe, tmp_path / "whole")
    for name in resumed.manifest.files:
        assert (resumed.folder / name).read_bytes() == (whole.folder / name).read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"c", "whole"}


def test_a_label_names_the_dialogue_of_a_teacher_too(settled, env):
    """What was said is kept, not rendered anew."""
    with FakeServer(Pupil({"max_turns": 8})).running() as server:
        from agentbench_prefix.policies.openai import OpenAIPolicy

        policy = OpenAIPolicy(server.base_url, "toy")
        rows = []
        for name in ("full", "full@1"):
            teacher = OpenAITeacher(
                base_url=server.base_url, model="toy", dialogue=name, per_task=1, attempts=2
            )
            task = env.tasks("train")[0]
            rows.append(teach_policy(policy, teacher, "TextCraft-v0", {"max_turns": 8}, [task]))
    assert rows[0] == rows[1]


def test_an_action_that_a_dialogue_cannot_say_is_not_taught(settled, env):
    """Two lines in brackets are one action; written bare, the second line would be ignored."""
    task = env.tasks("train")[0]

    def script(seen):
        return completion("[[ get 1 stick\nplease ]]")

    with FakeServer(script).running() as server:
        from agentbench_prefix.policies.openai import OpenAIPolicy

        teacher = OpenAITeacher(base_url=server.base_url, model="toy", per_task=1, attempts=2)
        [lesson] = teach_policy(
            OpenAIPolicy(server.base_url, "toy"), teacher, "TextCraft-v0", {"max_turns": 2}, [task]
        )
    assert (lesson.trajectories, lesson.failures) == ([], [])


# ------------------------------------------------------------------ learning from it
@pytest.fixture(scope="module")
def released():
    return recorded("textcraft-prefix", "train")


def test_a_trajectory_is_learned_as_it_is_stored(env, released):
    for name, dialogue in env.dialogues().items():
        for row in released[::150]:
            demonstration = replay_trajectory(env, row, dialogue)
            stored = row.conversation(name)
            assert demonstration.messages == to_messages(stored.messages)
            assert demonstration.trainable == [turn.trainable for turn in row.turns]
            assert (demonstration.task_id, demonstration.success) == (row.task_id, True)


def test_released_trajectories_solve_their_renamed_tasks(env, released):
    dialogue = env.dialogues()["compact"]
    sample = released[:: len(released) // 40]
    assert len(sample) >= 40
    for index, row in enumerate(sample):
        options = {"rename_seed": 1000 + index}
        found = replay_trajectory(env, row, dialogue, options)
        assert found.success
        assert found.trainable == [turn.trainable for turn in row.turns]
        stored = to_messages(row.conversation("compact").messages)
        assert [m.role for m in found.messages] == [m.role for m in stored]
        assert found.messages[0] != stored[0]
        assert (
            found.messages[0].content == env.reset(options={**options, "task_id": row.task_id})[0]
        )
        kinds = [m.content.split(" ")[0] for m in found.messages[1:]]
        assert kinds == [m.content.split(" ")[0] for m in stored[1:]]


def test_renaming_keeps_turns_without_an_action(env):
    env.reset(options={"task_id": "textcraft_0"})
    teacher = env.teacher()
    played = [("", "multiple_actions", "no")]
    while not env.ended:
        action = teacher.next_turn().action
        played.append((action, "", env.step(action)[0]))
    turns = [
        Turn(action=a, problem=p, trainable=not p, observation=o, valid=not p, reward=0.0)
        for a, p, o in played
    ]
    first, _ = env.reset(options={"task_id": "textcraft_0"})
    conversations = write_conversations(env.dialogues(), first, turns, [""] * len(turns))
    row = teach_oracle(env, OracleTeacher(per_task=1), "textcraft_0").trajectories[0]
    row = row.model_copy(
        update={"turns": turns, "n_turns": len(turns), "conversations": conversations}
    )
    dialogue = env.dialogues()["compact"]
    plain = replay_trajectory(env, row, dialogue)
    varied = replay_trajectory(env, row, dialogue, {"rename_seed": 5})
    assert varied.success
    assert varied.trainable == plain.trainable == [False] + [True] * (len(turns) - 1)
    assert varied.messages[1:3] == plain.messages[1:3]
    assert varied.messages[1].content == ""
    assert varied.messages[2].content == dialogue.answer("multiple_actions")


def test_an_environment_that_does_not_translate_says_so():
    vault = Vault()
    row = teach_oracle(vault, OracleTeacher(per_task=1, detours=0.3), "vault_1").trajectories[0]
    assert replay_trajectory(vault, row, BARE).success
    with pytest.raises(NotImplementedError, match="Vault-v0 does not translate actions"):
        replay_trajectory(vault, row, BARE, {"polite": True})


def test_thoughts_do_not_fit_a_varied_task(env, released):
    with pytest.raises(ConfigurationError, match=r"full@1 shows thoughts.*vary"):
        replay_trajectory(env, released[0], env.dialogues()["full"], {"rename_seed": 1})


def test_every_trajectory_once_an_epoch(env, released):
    stage = Stage(until=1, corpus="textcraft-prefix", vary={"rename_seed": 0.5})
    recipe = SFTRecipe(env_id="TextCraft-v0", seed=3, steps=1, tokens_per_step=512, stages=(stage,))
    n = len(released)
    drawn = [draw(env, recipe, stage, index) for index in range(2 * n)]
    epochs = [[d.trajectory.trajectory_id for d in drawn[k : k + n]] for k in (0, n)]
    every = sorted(row.trajectory_id for row in released)
    assert sorted(epochs[0]) == sorted(epochs[1]) == every
    assert epochs[0] != epochs[1]
    assert all(d.task_id == d.trajectory.task_id for d in drawn)
    varied = sum(bool(d.options) for d in drawn)
    assert 0.45 * len(drawn) < varied < 0.55 * len(drawn)
    for d in drawn[:6]:
        assert play_draw(env, recipe, d).success


def test_the_release_is_of_every_task_within_reach(env, released):
    manifest = find_corpus("textcraft-prefix").manifest
    beyond = env.out_of_reach("train", 30)
    assert manifest.out_of_reach == {"train": list(beyond)} == {"train": ["textcraft_495"]}
    assert manifest.splits["train"] == [t for t in env.tasks("train") if t not in beyond]
    counts = Counter(row.task_id for row in released)
    assert set(counts) == set(manifest.splits["train"])
    assert set(counts.values()) == {4}
    assert len(released) == 1492
