"""Paired comparisons and the printed tables."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import toy
from rich.console import Console

from agentbench_prefix.errors import ConfigurationError, PolicyError
from agentbench_prefix.evaluation.compare import compare
from agentbench_prefix.evaluation.runner import EvalConfig, evaluate
from agentbench_prefix.evaluation.tables import WIDTH, print_comparison, print_metrics
from agentbench_prefix.policies.base import Reply

pytestmark = pytest.mark.usefixtures("toy_env")


class Solver:
    """Solves the first samples of each task, as many as it is told."""

    def __init__(self, counts, name="solver", broken=()):
        self.counts = counts
        self.name = name
        self.broken = broken

    def describe(self):
        return {"kind": self.name}

    def open(self, episodes):
        return self

    def reply(self, episodes):
        return [self._one(episode) for episode in episodes]

    def _one(self, episode):
        if episode.task_id in self.broken:
            return PolicyError("lost")
        if episode.sample < self.counts.get(episode.task_id, 0):
            return Reply(episode.env.teacher().next_turn().action)
        return Reply("look")

    def close(self):
        pass


def run(name, counts, broken=(), **changes):
    config = EvalConfig(method=name, env="Toy-v0", **{"samples": 4, **changes})
    return evaluate(config, Solver(counts, name, broken), Path(name), warn=pytest.fail)


def printed(show, *arguments, width=WIDTH, **settings):
    file = io.StringIO()
    show(Console(file=file, width=width, highlight=False, **settings), *arguments)
    return file.getvalue()


def reachable(n):
    tasks = toy.Toy().tasks("test")
    return [task for task in tasks if toy.Toy().family(task) != "digits_12"][:n]


def test_differences_are_paired_by_task():
    tasks = reachable(36)
    weak = {task: i % 4 for i, task in enumerate(tasks)}
    strong = {task: i % 4 + 1 for i, task in enumerate(tasks)}
    a, b = run("weak", weak), run("strong", strong)
    found = compare(a.folder, b.folder)
    whole = found.average["all"]
    assert list(found.average) == [*sorted(a.metrics.families), "all"]
    assert whole.n_tasks == 48
    assert (whole.a, whole.b) == pytest.approx((a.metrics.n_solved / 192, b.metrics.n_solved / 192))
    assert whole.difference.value == pytest.approx(36 * 0.25 / 48)
    # Every task of this family gains exactly one sample: pairing leaves no spread, though each
    # run's own interval is wide.
    two = found.average["digits_02"].difference
    assert two.value == pytest.approx(0.25)
    own = a.metrics.families["digits_02"].avg_at_k["4"]
    assert two.interval == "wilson"
    assert own.high - own.low > 0.1
    never_before = sum(count == 0 for count in weak.values())
    assert found.passed["all"].difference.value == pytest.approx(never_before / 48)
    assert found.changed == [
        "method is 'weak' in A, 'strong' in B",
        "policy.kind is 'weak' in A, 'strong' in B",
    ]


def test_the_interval_of_a_difference_is_that_of_its_tasks_mean():
    rng = np.random.default_rng(0)
    tasks = toy.Toy().tasks("test")
    counts = [dict(zip(tasks, rng.integers(0, 5, 48).tolist(), strict=True)) for _ in range(2)]
    a, b = (run(name, count) for name, count in zip("ab", counts, strict=True))
    per_task = [
        (b.metrics.tasks[task].successes - a.metrics.tasks[task].successes) / 4 for task in tasks
    ]
    difference = compare(a.folder, b.folder).average["all"].difference
    half = 1.96 * np.std(per_task) / np.sqrt(48)
    assert difference.value == pytest.approx(np.mean(per_task))
    assert difference.interval == "bootstrap"
    assert difference.low == pytest.approx(np.mean(per_task) - half, abs=0.02)
    assert difference.high == pytest.approx(np.mean(per_task) + half, abs=0.02)
    mirrored = compare(b.folder, a.folder).average["all"].difference
    assert (mirrored.low, mirrored.high) == pytest.approx(
        (-difference.high, -difference.low), abs=0.01
    )


def test_a_run_does_not_differ_from_itself():
    a = run("a", {task: i % 5 for i, task in enumerate(reachable(36))})
    found = compare(a.folder, a.folder)
    assert found.changed == []
    for paired in (*found.average.values(), *found.passed.values()):
        assert paired.difference.value == 0
        assert paired.difference.low < 0 < paired.difference.high


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"samples": 2}, "samples is 4 in A, 2 in B"),
        ({"split": "train"}, "split is 'test' in A, 'train' in B"),
        ({"tasks": 5}, "task_ids is 48 entries"),
    ],
)
def test_runs_over_other_tasks_are_refused_by_name(change, named):
    a, b = run("a", {}), run("b", {}, **change)
    with pytest.raises(ConfigurationError, match="cannot be compared task by task") as caught:
        compare(a.folder, b.folder)
    assert named in str(caught.value)
    assert "method" not in str(caught.value)


def test_other_data_are_refused(monkeypatch):
    a = run("a", {})
    monkeypatch.setattr(toy.Toy, "data_hash", "other")
    with pytest.raises(ConfigurationError, match="data_hash is "):
        compare(a.folder, run("b", {}).folder)


def test_folders_without_a_finished_run_are_named():
    a = run("a", {}, tasks=2)
    with pytest.raises(ConfigurationError, match=r"nowhere is not a finished .*no config\.json"):
        compare(a.folder, Path("nowhere"))
    text = (a.folder / "metrics.json").read_text()
    (a.folder / "metrics.json").unlink()
    with pytest.raises(ConfigurationError, match=r"a is not a finished .*no metrics\.json"):
        compare(a.folder, a.folder)
    for damage in ("", "{}", text[:-5]):
        (a.folder / "metrics.json").write_text(damage)
        with pytest.raises(ConfigurationError, match="a is not a finished evaluation"):
            compare(a.folder, a.folder)


# ------------------------------------------------------------------ what is printed
def test_the_table_shows_rates_with_denominators_and_what_is_out_of_reach():
    result = run("tested", dict.fromkeys(reachable(20), 3))
    text = printed(print_metrics, result.metrics)
    assert "tested on Toy-v0, split test: 48 tasks x 4 samples = 192 episodes" in text
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "\x1b" not in text
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "60/192" in rows["all"]
    assert "31.2 [" in rows["all"]
    assert "20/48" in rows["all"]
    assert "41.7 [" in rows["all"]
    assert "0/48" in rows["digits_12"]
    assert "0.0 [0.0, 24.2]*" in rows["digits_12"]
    assert "* Wilson over tasks" in text
    flat = " ".join(text.split())
    assert "12 of 48 tasks cannot be solved in 8 turns by any policy: toy_15, toy_19" in flat
    assert "ceiling 36/48" in flat
    assert "failed: 132 (shut 132)" in flat
    assert "ERRORS" not in text


def test_errors_are_shown_apart():
    result = run("tested", {}, broken=reachable(1))
    text = " ".join(printed(print_metrics, result.metrics, result.first_error).split())
    assert "ERRORS: 4 of 192 episodes errored and count as unsolved" in text
    assert "run the same command again" in text
    assert "The first: PolicyError: lost" in text


def test_a_comparison_is_printed_with_what_changed():
    a, b = run("a", {}), run("b", dict.fromkeys(reachable(30), 4), broken=reachable(1))
    text = printed(print_comparison, compare(a.folder, b.folder))
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "\x1b" not in text
    row = next(line for line in text.splitlines() if line.split()[:1] == ["all"])
    assert "0.0, 60.4" in row
    assert "+60.4 [+" in row
    flat = " ".join(text.split())
    assert "method is 'a' in A, 'b' in B" in flat
    assert "B has 4 errored episodes of 192" in flat


def test_metrics_read_back_print_the_same_table():
    result = run("tested", dict.fromkeys(reachable(9), 2))
    stored = type(result.metrics).model_validate(
        json.loads((result.folder / "metrics.json").read_text())
    )
    assert printed(print_metrics, stored) == printed(print_metrics, result.metrics)
