"""Run folders: what is written, and that a broken run resumes to the same result."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
import toy

from agentbench_prefix.errors import (
    ConfigurationError,
    EndpointError,
    PolicyError,
    UnknownNameError,
)
from agentbench_prefix.evaluation.records import EpisodeRecord, read_episodes
from agentbench_prefix.evaluation.runner import (
    EvalConfig,
    choose_tasks,
    default_folder,
    evaluate,
)
from agentbench_prefix.evaluation.stats import wilson
from agentbench_prefix.policies.base import Reply
from agentbench_prefix.policies.scripted import OraclePolicy, RandomPolicy
from agentbench_prefix.rollouts import episode_seed

pytestmark = pytest.mark.usefixtures("toy_env")
CONFIG = EvalConfig(method="random", env="Toy-v0", tasks=10, samples=4, batch_size=7)


def no_warning(text):
    raise AssertionError(f"unexpected warning: {text}")


def run(config=CONFIG, policy=None, out=None, **settings):
    settings.setdefault("warn", no_warning)
    return evaluate(config, policy or RandomPolicy(), out, **settings)


class Player:
    """Solves the samples it is told to, and errs where it is told to."""

    def __init__(self, solves=lambda task, sample: False, errs=lambda task, sample: False):
        self.solves, self.errs = solves, errs
        self.played = Counter()
        self.description = {"kind": "player", "url": "http://dead.example/v1"}

    def describe(self):
        return self.description

    def open(self, episodes):
        self.played.update((e.task_id, e.sample) for e in episodes)
        return self

    def reply(self, episodes):
        return [self._one(episode) for episode in episodes]

    def _one(self, episode):
        if self.errs(episode.task_id, episode.sample):
            return EndpointError("503 from http://dead.example/v1")
        if self.solves(episode.task_id, episode.sample):
            return Reply(episode.env.teacher().next_turn().action)
        return Reply("look", token_ids=(1, 2, 3), prompt_tokens=10)

    def close(self):
        pass


# ------------------------------------------------------------------ what is written
def test_the_folder_holds_the_configuration_episodes_and_metrics():
    result = run()
    assert result.folder.parent == Path("runs/eval/Toy-v0")
    assert result.folder.name.startswith("random-test-")
    config = json.loads((result.folder / "config.json").read_text())
    key = config["key"]
    assert key["env_arguments"] == {"loud": False, "max_turns": 8}
    assert (key["max_turns"], key["max_tokens"], key["dialogue"]) == (8, 16, "bare@1")
    assert (key["data_hash"], key["k"]) == (toy.Toy.data_hash, [1, 2, 4])
    assert (key["policy"], len(key["task_ids"])) == ({"kind": "random"}, 10)
    assert config["versions"]["packages"]["numpy"]
    assert default_folder(key) == result.folder
    episodes = list(read_episodes(result.folder / "episodes.jsonl"))
    assert [(e.task_id, e.sample) for e in episodes] == [
        (task, sample) for task in key["task_ids"] for sample in range(4)
    ]
    metrics = json.loads((result.folder / "metrics.json").read_text())
    assert metrics == json.loads(result.metrics.model_dump_json())
    assert list(metrics) == sorted(metrics)
    assert {p.name for p in result.folder.iterdir()} == {
        ".lock",
        "config.json",
        "episodes.jsonl",
        "metrics.json",
    }


def test_metrics_by_hand():
    # toy_12 (2 digits) is solved by 1 of 4 samples, toy_13 (3 digits) by all, toy_14 by none.
    def solves(task, sample):
        return task == "toy_13" or (task, sample) == ("toy_12", 2)

    metrics = run(EvalConfig(method="m", env="Toy-v0", samples=4), Player(solves)).metrics
    assert (metrics.n_tasks, metrics.n_episodes, metrics.n_solved) == (48, 192, 5)
    assert metrics.n_tasks_solved == 2
    assert metrics.avg_at_k["4"].value == pytest.approx(5 / 192, abs=1e-12)
    assert {e.value for e in metrics.avg_at_k.values()} == {metrics.avg_at_k["1"].value}
    expected = {"1": 1.25 / 48, "2": 1.5 / 48, "4": 2 / 48}
    assert {k: e.value for k, e in metrics.pass_at_k.items()} == pytest.approx(expected, abs=1e-12)
    assert metrics.pass_at_k["4"].interval == "wilson"  # 2 of 48 tasks differ from the rest
    two = metrics.families["digits_02"]
    assert (two.n_tasks, two.n_episodes, two.n_solved) == (12, 48, 1)
    assert two.pass_at_k["2"].value == pytest.approx(0.5 / 12, abs=1e-12)
    none = metrics.families["digits_04"].avg_at_k["1"]
    assert (none.value, none.interval) == (0, "wilson")
    assert none.high == pytest.approx(wilson(0, 12)[1])
    assert metrics.turns.successes == pytest.approx((2 + 3 * 4) / 5)
    assert metrics.turns.all == pytest.approx((187 * 8 + 14) / 192)
    assert metrics.tokens.generated_total == 187 * 8 * 3
    assert metrics.tokens.generated_per_episode == 24
    assert metrics.tokens.generated_per_turn == 3
    assert (metrics.tokens.opening_prompt, metrics.tokens.longest_prompt) == (10, 10)
    assert metrics.invalid_action_rate == 0
    assert metrics.failure_categories == {"shut": 187}
    assert metrics.out_of_reach.max_turns == 8
    assert len(metrics.out_of_reach.tasks) == 12
    assert metrics.out_of_reach.ceiling == 0.75
    assert metrics.tasks["toy_12"].successes == 1
    assert metrics.tasks["toy_12"].family == "digits_02"


def test_malformed_replies_are_counted_by_problem():
    class Babbler(Player):
        def _one(self, episode):
            lines = ["none", "[[ a ]] [[ b ]]", "[[ ]]", "[[ fly ]] now", "<think>hm</think> x"]
            return Reply(lines[episode.sample], finish="length")

    config = EvalConfig(
        method="m", env="Toy-v0", tasks=1, samples=5, dialogue="bracketed", max_turns=2
    )
    metrics = run(config, Babbler()).metrics
    assert metrics.malformed.problems == {
        "no_action": 4,
        "multiple_actions": 2,
        "empty_action": 2,
    }
    assert metrics.malformed.notes == {"trailing_text": 2, "thinking_tags": 2}
    assert (metrics.malformed.replies, metrics.malformed.cut_at_max_tokens) == (10, 10)
    assert metrics.invalid_action_rate == 1
    assert metrics.tokens.generated_total is None


def test_the_oracle_reaches_the_ceiling():
    metrics = run(
        CONFIG.model_copy(update={"tasks": None, "method": "oracle"}), OraclePolicy()
    ).metrics
    assert metrics.avg_at_k["4"].value == metrics.out_of_reach.ceiling == 0.75
    assert metrics.failure_categories == {"half_open": 48}


def test_metrics_do_not_depend_on_batching_for_a_policy_that_does_not():
    texts = set()
    for batch_size in (1, 7, 1000):
        config = CONFIG.model_copy(update={"batch_size": batch_size})
        texts.add((run(config).folder / "metrics.json").read_bytes())
    assert len(texts) == 1


# ------------------------------------------------------------------ choice of tasks
def test_chosen_tasks_are_spread_over_families_in_the_splits_order():
    env = toy.Toy()
    tasks = env.tasks("test")
    for n in (1, 4, 10, 47, 48):
        chosen = choose_tasks(env, "test", n)
        assert len(set(chosen)) == n
        assert chosen == [task for task in tasks if task in set(chosen)]
        counts = Counter(map(env.family, chosen)) | Counter()
        assert max(counts.values()) - min(counts[f] for f in map(env.family, tasks)) <= 1
    # 48 tasks by family, positions floor((i + 1/2) 48 / 4) = 6, 18, 30, 42: the 7th of each.
    assert choose_tasks(env, "test", 4) == ["toy_36", "toy_37", "toy_38", "toy_39"]
    assert choose_tasks(env, "test", None) == list(tasks)


def test_an_empty_split_is_refused(monkeypatch):
    monkeypatch.setattr(toy.Toy, "tasks", lambda self, split: ())
    with pytest.raises(ConfigurationError, match="split 'test' of Toy-v0 has no tasks"):
        run()


def test_too_many_tasks_and_unknown_names_are_refused():
    with pytest.raises(ConfigurationError, match="has 48 tasks, 49 were asked for"):
        choose_tasks(toy.Toy(), "test", 49)
    for change, what in (
        ({"split": "dev"}, "unknown split 'dev'; valid: train, test, all"),
        ({"dialogue": "chat"}, "unknown dialogue 'chat'; valid: bare@1, bracketed@2"),
        ({"env": "Toy-v9"}, "unknown environment 'Toy-v9'"),
    ):
        with pytest.raises(UnknownNameError, match=what):
            run(CONFIG.model_copy(update=change))


# ------------------------------------------------------------------ resuming
def test_a_finished_run_is_not_played_again():
    player = Player()
    first = run(policy=player)
    before = {p.name: p.read_bytes() for p in first.folder.iterdir()}
    again = run(policy=player)
    assert again == first
    assert set(player.played.values()) == {1}
    assert {p.name: p.read_bytes() for p in first.folder.iterdir()} == before


def test_a_run_torn_at_any_byte_resumes_to_the_same_files():
    config = CONFIG.model_copy(update={"tasks": 4, "samples": 3, "batch_size": 5})
    whole = run(config)
    metrics = (whole.folder / "metrics.json").read_bytes()
    path = whole.folder / "episodes.jsonl"
    episodes = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(episodes) if byte == ord("\n")]
    cuts = {0, 1, *ends, *(end - 1 for end in ends), *(end + 1 for end in ends[:-1])}
    cuts |= set(random.Random(0).sample(range(len(episodes)), 10))
    for cut in sorted(cuts):
        path.write_bytes(episodes[:cut])
        (whole.folder / "metrics.json").unlink()
        run(config)
        assert path.read_bytes() == episodes, cut
        assert (whole.folder / "metrics.json").read_bytes() == metrics, cut


def test_an_unfinished_chunk_is_played_again_whole():
    player = Player()
    folder = run(policy=player).folder
    lines = (folder / "episodes.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "episodes.jsonl").write_bytes(b"".join(lines[:9]))  # 7 + 2 episodes
    run(policy=player)
    assert list(player.played.values()) == [1] * 7 + [2] * 33


def other_job(line):
    record = EpisodeRecord.from_line(line)
    seed = episode_seed(CONFIG.seed, record.task_id, 4)
    return record.model_copy(update={"sample": 4, "seed": seed}).to_line().encode()


NO_RECORD = "line 9 is no episode record"
FOREIGN = "line 9 is not of this run"


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (b"\0\xff\0", NO_RECORD),
        (b'{"format": 1}', f"{NO_RECORD} (env_id: Field required)"),
        (b"", NO_RECORD),
        (b"[" * 100_000, f"{NO_RECORD} (it is nested too deeply)"),
        (lambda line: line[: len(line) // 2], NO_RECORD),
        (lambda line: line.replace(b'"look"', b'"l\xffok"'), NO_RECORD),
        (lambda line: line.replace(b'"look"', b'"l\xed\xa0\x80ok"'), NO_RECORD),
        (
            lambda line: line.replace(b'"n_turns":8', b'"n_turns":7'),
            f"{NO_RECORD} (Value error, n_turns is 7, but there are 8 turns)",
        ),
        (
            lambda line: line.replace(b'"env_id":"Toy-v0"', b'"env_id":"Toy-v1"'),
            f"{FOREIGN} (env_id is 'Toy-v1', expected 'Toy-v0')",
        ),
        (
            lambda line: line.replace(toy.Toy.data_hash.encode(), b"f" * 64),
            f"{FOREIGN} (data_hash is 'ffff",
        ),
        (
            lambda line: line.replace(b'"dialogue":"bare@1"', b'"dialogue":"bare@0"'),
            f"{FOREIGN} (dialogue is 'bare@0', expected 'bare@1')",
        ),
        (lambda line: line.replace(b'"max_turns":8', b'"max_turns":9'), f"{FOREIGN} (arguments"),
        (lambda line: line.replace(b'"seed":', b'"seed":1'), f"{FOREIGN} (seed is 1"),
        (other_job, "sample 4 is not planned"),
    ],
)
def test_a_damaged_line_is_named_and_costs_its_chunk_only(damage, named):
    player = Player()
    folder = run(policy=player).folder
    path = folder / "episodes.jsonl"
    whole, metrics = path.read_bytes(), (folder / "metrics.json").read_bytes()
    lines = whole.split(b"\n")
    damaged = damage(lines[8]) if callable(damage) else damage
    assert damaged != lines[8]
    lines[8] = damaged
    path.write_bytes(b"\n".join(lines))
    told = []
    run(policy=player, warn=told.append)
    assert len(told) == 1
    assert told[0].startswith(f"{path} was changed or damaged: line 9 ")
    assert named in told[0]
    assert told[0].endswith("; what is missing is played again")
    assert "\n" not in told[0]
    assert [job for job, times in player.played.items() if times == 2] == list(player.played)[7:14]
    assert (folder / "metrics.json").read_bytes() == metrics
    assert sorted(path.read_bytes().split(b"\n")) == sorted(whole.split(b"\n"))
    run(policy=player)  # mended: nothing is left to warn of


def test_a_chunk_that_is_there_twice_is_named_and_played_again():
    player = Player()
    folder = run(policy=player).folder
    path = folder / "episodes.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(whole + b"".join(lines[:7]))
    told = []
    run(policy=player, warn=told.append)
    first, fourth = (EpisodeRecord.from_line(lines[i]) for i in (0, 3))
    assert f"line 41 repeats task {first.task_id!r}, sample {first.sample};" in told[0]
    assert f"task {fourth.task_id!r}, sample {fourth.sample};" not in told[0]
    assert "; and 4 more; what" in told[0]
    assert list(player.played.values()) == [2] * 7 + [1] * 33
    assert sorted(path.read_bytes().splitlines()) == sorted(whole.splitlines())


def test_an_episode_that_was_never_planned_is_named_and_left_out():
    player = Player()
    folder = run(policy=player).folder
    path = folder / "episodes.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + other_job(whole.split(b"\n")[8]) + b"\n")
    told = []
    run(policy=player, warn=told.append)
    assert "line 41 is not of this run (task " in told[0]
    assert set(player.played.values()) == {1}
    assert path.read_bytes() == whole


def test_leftovers_of_a_write_that_never_ended_do_no_harm():
    folder = run().folder
    (folder / ".config.json.1.tmp").write_text("{")
    before = (folder / "metrics.json").read_bytes()
    run()
    assert (folder / "metrics.json").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "seed is 0 there, 1 now"),
        ({"samples": 8}, "k is 3 entries"),
        ({"samples": 8}, "samples is 4 there, 8 now"),
        ({"tasks": 11}, "tasks is 10 there, 11 now"),
        ({"tasks": 11}, "task_ids is 10 entries"),
        ({"split": "all"}, "split is 'test' there, 'all' now"),
        ({"max_turns": 9}, "max_turns is 8 there, 9 now"),
        ({"temperature": 0.5}, "temperature is 1.0 there, 0.5 now"),
        ({"top_p": 0.9}, "top_p is 1.0 there, 0.9 now"),
        ({"max_tokens": 5}, "max_tokens is 16 there, 5 now"),
        ({"dialogue": "bracketed"}, "dialogue is 'bare@1' there, 'bracketed@2' now"),
        ({"batch_size": 8}, "batch_size is 7 there, 8 now"),
        ({"method": "sft"}, "method is 'random' there, 'sft' now"),
        ({"env_arguments": {"loud": True}}, "env_arguments.loud is False there, True now"),
    ],
)
def test_another_configuration_is_refused_by_name(change, named):
    folder = run(out=Path("here")).folder
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(ConfigurationError, match="holds a run of another configuration") as caught:
        run(CONFIG.model_copy(update=change), out=Path("here"))
    assert named in str(caught.value)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert run(CONFIG.model_copy(update=change)).folder != run().folder


def test_another_policy_or_other_data_are_refused_by_name(monkeypatch):
    player = Player()
    run(policy=player, out=Path("here"))
    other = Player()
    other.description = {**player.description, "sha256": "abc"}
    with pytest.raises(ConfigurationError, match=r"policy\.sha256 is None there, 'abc' now"):
        run(policy=other, out=Path("here"))
    monkeypatch.setattr(toy.Toy, "data_hash", "other")
    with pytest.raises(ConfigurationError, match=r"data_hash is '[0-9a-f]{64}' there, 'other' now"):
        run(policy=player, out=Path("here"))


def test_other_versions_only_warn_and_are_recorded(monkeypatch):
    folder = run().folder
    metrics = (folder / "metrics.json").read_bytes()
    monkeypatch.setattr("platform.python_version", lambda: "9.9.9")
    said = []
    run(warn=said.append)
    assert len(said) == 1
    assert "python is '3." in said[0]
    assert "'9.9.9' now" in said[0]
    config = json.loads((folder / "config.json").read_text())
    assert config["versions"]["python"] != "9.9.9"
    assert [entry["python"] for entry in config["resumed_under"]] == ["9.9.9"]
    assert (folder / "metrics.json").read_bytes() == metrics
    run()  # known by now: no second warning


def test_a_folder_with_something_else_in_it_is_refused():
    Path("here").mkdir()
    Path("here/episodes.jsonl").write_text("")
    with pytest.raises(ConfigurationError, match=r"episodes\.jsonl but no config\.json"):
        run(out=Path("here"))
    for text in ("", "[]", "{}", '{"key": 1, "versions": {}}'):
        Path("here/config.json").write_text(text)
        with pytest.raises(ConfigurationError, match="is not the configuration of a run"):
            run(out=Path("here"))


def test_a_folder_that_cannot_be_written_is_named():
    Path("file").write_text("")
    with pytest.raises(ConfigurationError, match=r"cannot write to the run folder file/x .*--out"):
        run(out=Path("file/x"))


def test_a_folder_in_use_is_refused():
    class Second(Player):
        def reply(self, episodes):
            with pytest.raises(ConfigurationError, match="another process is writing"):
                run(policy=self, out=Path("here"))
            return super().reply(episodes)

    assert run(policy=Second(), out=Path("here")).metrics.n_episodes == 40


# ------------------------------------------------------------------ errors
def test_errored_episodes_count_as_unsolved_and_are_retried():
    config = EvalConfig(method="m", env="Toy-v0", tasks=8, samples=2, batch_size=4)
    tasks = choose_tasks(toy.Toy(), "test", 8)
    broken_task = tasks[2]
    flaky = Player(lambda t, s: True, lambda t, s: (t, s) == (broken_task, 1))
    first = run(config, flaky)
    unbroken = run(config, Player(lambda t, s: True), Path("unbroken"))
    reachable = unbroken.metrics.n_solved
    assert first.first_error == "EndpointError: 503 from http://dead.example/v1"
    assert (first.metrics.n_errors, first.metrics.n_episodes) == (1, 16)
    assert first.metrics.n_solved == reachable - 1
    assert first.metrics.avg_at_k["2"].value == pytest.approx((reachable - 1) / 16)
    assert first.metrics.families[toy.Toy().family(broken_task)].n_errors == 1
    assert sum(first.metrics.failure_categories.values()) == 16 - reachable

    flaky.errs = lambda t, s: False
    second = run(config, flaky)
    assert second.folder == first.folder
    assert (second.metrics.n_errors, second.first_error) == (0, None)
    assert [job for job, n in flaky.played.items() if n == 2] == [
        (task, sample) for task in tasks[2:4] for sample in range(2)
    ]
    metrics = [result.folder / "metrics.json" for result in (second, unbroken)]
    assert metrics[0].read_bytes() == metrics[1].read_bytes()


def test_a_dead_policy_stops_the_run_and_keeps_what_is_finished():
    config = EvalConfig(method="m", env="Toy-v0", samples=2, batch_size=8)
    tasks = choose_tasks(toy.Toy(), "test", None)
    player = Player(errs=lambda task, sample: tasks.index(task) >= 8)
    seen = []
    with pytest.raises(PolicyError) as caught:
        run(
            config,
            player,
            Path("here"),
            max_consecutive_errors=10,
            progress=lambda *n: seen.append(n),
        )
    text = str(caught.value)
    assert "stopped after 10 errored episodes in a row" in text
    assert "503 from http://dead.example/v1" in text
    assert "kept in here: see to http://dead.example/v1, then run the same command" in text
    assert seen[0] == (0, 0, 96)
    assert seen[-1] == (26, 0, 96)
    assert not Path("here/metrics.json").exists()
    player.errs = lambda task, sample: False
    result = run(config, player, Path("here"))
    assert result.metrics.n_errors == 0
    assert [player.played[task, 0] for task in tasks[:8]] == [1] * 8


def test_errors_that_are_not_in_a_row_do_not_stop_the_run():
    config = EvalConfig(method="m", env="Toy-v0", samples=4, batch_size=4)
    player = Player(errs=lambda task, sample: sample < 3)
    metrics = run(config, player, max_consecutive_errors=4).metrics
    assert (metrics.n_errors, metrics.n_episodes) == (144, 192)
    assert metrics.avg_at_k["4"].value == 0
    with pytest.raises(PolicyError, match="after 3 errored"):
        run(config, player, max_consecutive_errors=3)


def test_old_metrics_do_not_outlive_the_episodes_they_describe():
    config = EvalConfig(method="m", env="Toy-v0", tasks=2, samples=1)
    player = Player(errs=lambda task, sample: True)
    folder = run(config, player).folder
    assert (folder / "metrics.json").exists()
    with pytest.raises(PolicyError):
        run(config, player, max_consecutive_errors=1)
    assert not (folder / "metrics.json").exists()


def test_progress_counts_what_was_there_already():
    folder = run(policy=Player()).folder
    lines = (folder / "episodes.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "episodes.jsonl").write_bytes(b"".join(lines[:14]))
    seen = []
    run(policy=Player(), progress=lambda *numbers: seen.append(numbers))
    assert seen == [(done, 0, 40) for done in range(14, 41)]
