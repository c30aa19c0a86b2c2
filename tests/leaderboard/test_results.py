"""Results: made of runs, consistent, and named when they are not."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import made
import pytest

from agentbench_prefix.errors import CheckpointError, ConfigurationError, PolicyError
from agentbench_prefix.evaluation.compare import load_evaluation
from agentbench_prefix.leaderboard.results import (
    Result,
    load_summary,
    make_result,
    read_results,
    row_name,
)
from agentbench_prefix.training.summary import RunSummary, recipe_sha256

pytestmark = pytest.mark.usefixtures("toy_env")


@pytest.fixture
def run():
    return made.make_run(Path("run"), made.counts_of(1), splits=("test", "train"), method="grpo")


def test_a_result_joins_training_and_evaluation_and_survives_its_file(run):
    result = made.result_of(run)
    assert result.name == "Toy-v0-cpu-grpo-from-base-seed0"
    path = result.save(Path("results"))
    assert path == Path("results/Toy-v0-cpu-grpo-from-base-seed0.json")
    assert Result.load(path) == result
    assert read_results(Path("results")) == [result]
    assert result.run == RunSummary.load(run)
    assert result.splits["test"] == load_evaluation(run / "eval/test")[1]
    solved = sum(made.counts_of(1).values())
    assert result.splits["test"].n_solved == solved
    assert (result.settings.samples, result.settings.dialogue) == (made.SAMPLES, "bare@1")
    assert result.settings.max_turns == 8
    assert not list(Path("results").glob(".*"))


def test_an_unreadable_folder_of_results_is_empty():
    assert read_results(Path("nowhere")) == []


@pytest.mark.parametrize(
    ("method", "variant", "init", "name"),
    [
        ("grpo", "", "sft", "grpo-from-sft"),
        ("grpo", "wide", "sft", "grpo-wide-from-sft"),
        ("base", "", "scratch", "base"),
    ],
)
def test_rows_are_named_by_what_tells_them_apart(method, variant, init, name):
    assert row_name(method, variant, init) == name


def test_runs_of_one_recipe_have_one_hash_whatever_seed_and_init():
    hashes = {
        recipe_sha256({"lr": 1, "seed": seed, "init": init}) for seed in (0, 1) for init in "ab"
    }
    assert len(hashes) == 1
    assert recipe_sha256({"lr": 2, "seed": 0, "init": "a"}) not in hashes


def test_errored_episodes_are_refused():
    class Broken(made.Solver):
        def _one(self, episode):
            if episode.task_id == made.TASKS[3]:
                return PolicyError("lost")
            return super()._one(episode)

    run = made.make_run(Path("run"), {}, splits=())
    sha256 = made.check_checkpoint(run / "checkpoint").checkpoint
    made.evaluate_run(run, {}, "test", policy=Broken({}, sha256))
    with pytest.raises(ConfigurationError, match=r"splits\.test has 4 errored episodes"):
        made.result_of(run)


def test_evaluations_of_other_weights_tasks_or_settings_are_refused(run):
    other = made.make_run(Path("other"), {})
    summary, checkpoint = RunSummary.load(run), run / "checkpoint"
    with pytest.raises(ConfigurationError, match="its weights is"):
        make_result(summary, checkpoint, [other / "eval/test"])
    with pytest.raises(ConfigurationError, match=r"has weights .* summary names"):
        make_result(summary, other / "checkpoint", [other / "eval/test"])
    with pytest.raises(ConfigurationError, match="there is no evaluation"):
        make_result(summary, checkpoint, [])
    with pytest.raises(ConfigurationError, match="is not a finished evaluation"):
        make_result(summary, checkpoint, [run / "eval/dev"])
    part = made.make_run(Path("part"), {}, splits=())
    made.evaluate_run(part, {}, "test", tasks=5)
    with pytest.raises(ConfigurationError, match="over a whole split: its tasks is 5"):
        made.result_of(part)
    mixed = made.make_run(Path("mixed"), {})
    made.evaluate_run(mixed, {}, "train", samples=2)
    with pytest.raises(ConfigurationError, match="other settings than the run's other splits"):
        made.result_of(mixed)


@functools.cache
def sound_text():
    return made.quick_result("sound", made.counts_of(1)).save(Path("sound")).read_text()


@pytest.fixture
def saved():
    """Text of a sound result; made once."""
    return sound_text()


def change(value, way, new):
    *path, last = way
    for step in path:
        value = value[step]
    if new is None:
        del value[last]
    else:
        value[last] = new


@pytest.mark.parametrize(
    ("way", "new", "message"),
    [
        (("run", "seed"), "x", r"run\.seed: Input should be a valid integer"),
        (("run", "spent", "rollouts"), None, r"run\.spent\.rollouts: Field required"),
        (("run", "spent", "rollouts"), -1, r"run\.spent\.rollouts: .*greater than or equal to 0"),
        (("run", "model_sha256"), "abc", r"run\.model_sha256: String should match"),
        (("run", "colour"), "red", r"run\.colour: Extra inputs are not permitted"),
        (("run", "recipe", "lr"), 0.5, r"recipe_sha256 is not the hash of run\.recipe"),
        (("splits",), {}, r"splits: Dictionary should have at least 1 item"),
        (("splits", "test", "n_solved"), 1, r"splits\.test\.n_solved is 1, the counts .* give"),
        (
            ("splits", "test", "avg_at_k", "4", "value"),
            0.6,
            r"splits\.test\.avg_at_k\.4\.value is 0\.6, the counts",
        ),
        (
            ("splits", "test", "families", "digits_02", "pass_at_k", "2", "value"),
            0.5,
            r"splits\.test\.families\.digits_02\.pass_at_k\.2\.value is 0\.5, the counts",
        ),
        (
            ("splits", "test", "pass_at_k", "1", "low"),
            1.0,
            r"splits\.test\.pass_at_k\.1 has an interval that the rate is not in",
        ),
        (
            ("splits", "test", "tasks", made.REACHABLE[0], "successes"),
            5,
            rf"splits\.test\.tasks\.{made.REACHABLE[0]}\.successes must be within 0 and 4, got 5",
        ),
        (
            ("splits", "test", "tasks", made.REACHABLE[0], "family"),
            "new",
            r"splits\.test\.families are not the families of its tasks",
        ),
        (("splits", "test", "n_errors"), 2, r"splits\.test has 2 errored episodes"),
        (("splits", "test", "split"), "dev", r"splits\.test must be metrics of split test"),
        (("settings", "samples"), 8, r"splits\.test must be metrics of .* 8 samples"),
        (
            ("splits", "test", "avg_at_k", "8"),
            {"value": 0.5, "low": 0.4, "high": 0.6, "interval": "bootstrap"},
            r"splits\.test\.avg_at_k must have the entries 1, 2, 4",
        ),
    ],
)
def test_a_malformed_result_is_named_with_its_field(way, new, message, saved):
    path = Path("results/Toy-v0-cpu-grpo-from-base-seed0.json")
    value = json.loads(saved)
    change(value, way, new)
    path.parent.mkdir()
    path.write_text(json.dumps(value))
    with pytest.raises(ConfigurationError, match=message) as caught:
        read_results(Path("results"))
    assert str(path) in str(caught.value)


def test_a_torn_or_misnamed_file_is_named():
    result = made.quick_result("run", {})
    path = result.save(Path("results"))
    moved = path.rename("results/mine.json")
    with pytest.raises(ConfigurationError, match=r"mine\.json holds .* named Toy-v0-cpu-grpo"):
        read_results(Path("results"))
    moved.write_text(moved.read_text()[:100])
    with pytest.raises(ConfigurationError, match=r"mine\.json is not a result of a run"):
        read_results(Path("results"))


def test_a_checkpoint_with_a_card_alone_is_a_supervised_run():
    base = made.make_checkpoint(Path("start"), "base", method="base")
    hashes = made.check_checkpoint(base)
    checkpoint = made.make_checkpoint(Path("run/checkpoint"), "sft")
    card = made.make_card()
    data = {"distinct_draws": 77, "init": {"from": str(base), "sha256": hashes.checkpoint}}
    card = card.model_copy(
        update={
            "data_hash": made.toy.Toy.data_hash,
            "training": card.training.model_copy(update={"data": data}),
            "model_sha256": made.check_checkpoint(checkpoint).model,
        }
    )
    card.save(checkpoint)
    for folder in (Path("run"), checkpoint):
        summary, found = load_summary(folder, "cpu")
        assert found == checkpoint
    assert (summary.method, summary.seed, summary.tier) == ("sft", 3, "cpu")
    assert (summary.init.name, summary.init.model_sha256) == ("base", hashes.model)
    assert summary.spent.learned_tokens == 20_000
    assert summary.spent.rollouts == 0
    assert summary.preprocessing.teacher.rollouts == 77
    assert summary.wall_seconds == 30


def test_an_unfinished_run_is_no_run(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(
        CheckpointError, match=r"neither summary\.json nor a checkpoint with a card"
    ):
        load_summary(tmp_path, "cpu")
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(
        ConfigurationError, match=r"summary\.json is not .*: method: Field required"
    ):
        load_summary(tmp_path, "cpu")
