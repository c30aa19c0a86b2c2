"""``leaderboard ship`` and ``verify``, on a real tiny network."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import made
import pytest
from test_cards import RESULT

from agentbench_prefix.cards import CheckpointCard
from agentbench_prefix.errors import CheckpointError, ConfigurationError
from agentbench_prefix.files import sha256_file
from agentbench_prefix.leaderboard.results import make_result
from agentbench_prefix.leaderboard.ship import CAST_FROM, find_result, ship, shipping_folder
from agentbench_prefix.training.summary import RunSummary

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("toy_env")

sys.path.insert(0, str(Path(__file__).parents[1] / "policies"))

SHIPPED = Path("methods/checkpoints/Toy-v0")


class Recipe:
    init = "base"


class Method:
    def __init__(self, name, folder):
        self.name, self.folder = name, folder

    def recipe(self, env_id):
        return Recipe()


@pytest.fixture(autouse=True)
def method(monkeypatch):
    monkeypatch.setattr(
        "agentbench_prefix.registry.method", lambda name: Method(name, Path("methods"))
    )


def train(folder=Path("run"), dtype="float32", **summary):
    """What training would leave: a random network with its tokenizer, card and summary."""
    from tiny import make_model, make_tokenizer

    checkpoint = folder / "checkpoint"
    make_model().to(getattr(torch, dtype)).save_pretrained(checkpoint)
    make_tokenizer().save_pretrained(checkpoint)
    card = made.make_card(
        method="grpo",
        data_hash=made.toy.Toy.data_hash,
        max_tokens=3,
        model_sha256=sha256_file(checkpoint / "model.safetensors"),
        results={"test": {"all": RESULT}},
    )
    card.save(checkpoint)
    made.make_summary(checkpoint, **summary).save(folder)
    return folder


def evaluate(run, call, samples=2):
    status, _, _ = call(
        *("eval", "--method", "grpo", "--model", run / "checkpoint", "--env", "Toy-v0"),
        *("--split", "train", "--samples", samples, "--out", run / "eval/train", "--no-progress"),
    )
    assert status == 0
    return make_result(RunSummary.load(run), run / "checkpoint", [run / "eval/train"])


def test_a_shipped_checkpoint_is_small_described_and_loads(call):
    from agentbench_prefix.policies.transformers import TransformersPolicy

    run = train()
    status, out, _ = call("leaderboard", "ship", run)
    assert status == 0
    shipped = SHIPPED / "grpo"
    assert re.search(rf"run -> {shipped} \(\d\.\d\d MB\)", out)
    names = {path.name for path in shipped.iterdir()}
    assert names >= {"model.safetensors", "config.json", "tokenizer.json", "README.md"}
    before, after = CheckpointCard.load(run / "checkpoint"), CheckpointCard.load(shipped)
    assert after.model_sha256 == sha256_file(shipped / "model.safetensors")
    assert after.training.data[CAST_FROM] == before.model_sha256
    assert (before.results != {}, after.results) == (True, {})
    assert json.loads((shipped / "config.json").read_text())["dtype"] == "bfloat16"
    size = (shipped / "model.safetensors").stat().st_size
    assert size < 0.6 * (run / "checkpoint/model.safetensors").stat().st_size
    kept = TransformersPolicy.load(run / "checkpoint", dtype="bfloat16").runner.model
    found = TransformersPolicy.load(shipped).runner.model
    for a, b in zip(kept.parameters(), found.parameters(), strict=True):
        assert torch.equal(a.float(), b)
    assert not [path for path in SHIPPED.iterdir() if path.name.startswith(".")]


def test_weights_that_are_bfloat16_are_copied_with_their_results():
    run = train(dtype="bfloat16")
    shipped = ship(run, Path("there"))
    before, after = CheckpointCard.load(run / "checkpoint"), CheckpointCard.load(shipped)
    assert before == after
    assert sha256_file(shipped / "model.safetensors") == before.model_sha256


@pytest.mark.parametrize(("samples", "stated"), [(8, True), (2, False)])
def test_what_the_run_has_measured_is_stated_in_the_card(call, samples, stated):
    run = train(dtype="bfloat16")
    measured = evaluate(run, call, samples).splits["train"]
    before = CheckpointCard.load(run / "checkpoint").results
    results = CheckpointCard.load(ship(run, Path("there"))).results
    assert results["test"] == before["test"]
    assert ("train" in results) == stated
    if stated:
        assert results["train"]["all"].solved == measured.n_solved
        assert set(results["train"]) == {"all", *measured.families}


@pytest.mark.parametrize(
    ("summary", "name"),
    [
        ({}, "grpo"),
        ({"init": "sft"}, "grpo-from-sft"),
        ({"variant": "wide"}, "grpo-wide"),
        ({"variant": "wide", "init": "sft"}, "grpo-wide-from-sft"),
    ],
)
def test_the_folder_names_what_is_not_usual(summary, name):
    run = train(**summary)
    assert shipping_folder(run) == SHIPPED / name
    assert shipping_folder(run, to=Path("x")) == Path("x") / name
    assert shipping_folder(run, name="mine", to=Path("x")) == Path("x/mine")


def test_a_method_without_a_folder_needs_to(monkeypatch):
    monkeypatch.setattr("agentbench_prefix.registry.method", lambda name: object())
    run = train()
    with pytest.raises(ConfigurationError, match="name the folder with --to"):
        shipping_folder(run)
    assert shipping_folder(run, to=Path("x")) == Path("x/grpo-from-base")


def test_shipping_again_replaces_and_a_failure_leaves_what_was_there(call):
    run = train()
    shipped = ship(run, Path("there"))
    before = {path.name: path.read_bytes() for path in shipped.iterdir()}
    assert ship(run, shipped) == shipped
    assert {path.name: path.read_bytes() for path in shipped.iterdir()} == before
    status, _, err = call("leaderboard", "ship", run, "--to", "x", "--max-mb", 0.01)
    assert status == 2
    assert "MB in bfloat16, 0.01 MB are allowed" in err
    with pytest.raises(CheckpointError, match="allowed"):
        ship(run, shipped, max_megabytes=0.01)
    assert {path.name: path.read_bytes() for path in shipped.iterdir()} == before
    assert {path.name for path in Path().iterdir()} >= {"run", "there"}
    assert not [path for path in Path().iterdir() if path.name.startswith(".there")]


def test_what_is_no_finished_run_does_not_ship():
    with pytest.raises(CheckpointError, match="no finished training run"):
        ship(Path("nowhere"), Path("there"))
    run = train()
    (run / "checkpoint/agentbench_card.json").unlink()
    with pytest.raises(CheckpointError, match="only a checkpoint with a card ships"):
        ship(run, Path("there"))
    assert not Path("there").exists()


def test_verify_plays_again_and_holds_rates_against_the_row(call):
    run = train()
    result = evaluate(run, call)
    result.save(Path("leaderboards/results"))
    shipped = ship(run, Path("there"))
    assert find_result(shipped, [result]) is result
    assert find_result(run / "checkpoint", [result]) is result
    status, out, _ = call("leaderboard", "verify", shipped, "--split", "train")
    assert status == 0, out
    assert f"{shipped}: {result.name}" in out
    for metric in ("Avg@2", "Pass@2"):
        assert re.search(rf"train {metric}: \d+\.\d, within the row's \d+\.\d \[", out)
    # The same weights, but a row that solves nearly everything.
    metrics = made.metrics_of(
        dict.fromkeys(result.splits["train"].tasks, 2),
        {task: row.family for task, row in result.splits["train"].tasks.items()},
        "train",
        2,
    )
    result.model_copy(update={"splits": {"train": metrics}}).save(Path("leaderboards/results"))
    status, out, _ = call("leaderboard", "verify", shipped)
    assert status == 1
    assert "OUTSIDE the row's 100.0" in out


def test_verify_names_what_has_no_row(call):
    run = train()
    shipped = ship(run, Path("there"))
    status, _, err = call("leaderboard", "verify", shipped)
    assert status == 2
    assert "no result is of the weights in there" in err
    (shipped / "model.safetensors").write_bytes(b"other")
    with pytest.raises(CheckpointError, match="are not those its"):
        find_result(shipped, [])
    (shipped / "agentbench_card.json").unlink()
    with pytest.raises(CheckpointError, match="cannot be matched with a result"):
        find_result(shipped, [])
    result = evaluate(run, call)
    result.save(Path("leaderboards/results"))
    again = ship(run, Path("again"))
    status, _, err = call("leaderboard", "verify", again, "--split", "dev")
    assert status == 2
    assert "'dev'; valid: train" in err
