"""A method learns from a user's own corpus by a user's own recipe."""

from __future__ import annotations

import json
import shutil

import pytest
from typer.testing import CliRunner

from agentbench_prefix.cards import CheckpointCard
from agentbench_prefix.cli import app
from agentbench_prefix.corpora.reading import Corpus
from agentbench_prefix.errors import AgentBenchError

RECIPE = """
env_id: TextCraft-v0
init: base
steps: 2
tokens_per_step: 512
stages:
  - {{until: 1.0, corpus: "{corpus}", split: train{more}}}
"""


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own corpus") / "tau ght"
    command = ["teach", "--env", "TextCraft-v0", "--tasks", "3", "--per-task", "2", "--no-progress"]
    done = CliRunner().invoke(app, [*command, "--out", str(folder)])
    assert done.exit_code == 0, done.output
    return folder


def train(tmp_path, recipe, *options):
    path = tmp_path / "mine.yaml"
    path.write_text(recipe, encoding="utf-8")
    command = ["train", "--method", "sft", "--env", "TextCraft-v0", "--recipe", str(path)]
    command += ["--out", str(tmp_path / "run"), "--no-evaluate", "--no-progress", *options]
    return CliRunner().invoke(app, command)


def test_the_card_names_the_recipe_and_the_corpus_by_its_hash(tmp_path, taught):
    done = train(tmp_path, RECIPE.format(corpus=taught, more=""))
    assert done.exit_code == 0, done.output
    card = CheckpointCard.load(tmp_path / "run" / "checkpoint")
    assert "--recipe" in card.training.command
    corpus = Corpus.open(taught)
    assert list(card.training.data["corpora"].values()) == [
        corpus.manifest.files["trajectories/train.parquet"].sha256
    ]
    assert card.contamination.rows["all"].goal_shown < card.contamination.rows["all"].tasks


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"more": ", detours: 0.2"}, "takes no detours"),
        ({"more": ", recite: 3"}, "takes no recite"),
        ({"corpus": "nowhere"}, "no corpus 'nowhere'"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, taught, change, named):
    done = train(tmp_path, RECIPE.format(**{"corpus": taught, "more": "", **change}))
    assert isinstance(done.exception, AgentBenchError)
    assert named in str(done.exception)


def test_a_recipe_of_another_environment_is_refused(tmp_path, taught):
    recipe = RECIPE.format(corpus=taught, more="").replace("TextCraft-v0", "TextCraft-v9")
    assert "is for env_id 'TextCraft-v9'" in str(train(tmp_path, recipe).exception)


def test_a_split_that_the_corpus_lacks_is_named(tmp_path, taught):
    recipe = RECIPE.format(corpus=taught, more="").replace("split: train", "split: test")
    error = train(tmp_path, recipe).exception
    assert isinstance(error, AgentBenchError)
    assert "'test'" in str(error)


@pytest.mark.parametrize(
    ("field", "value"),
    [("data_hash", "0" * 64), ("env_id", "TextCraft-v9"), ("dialogues", {"compact@0": "0" * 64})],
)
def test_a_corpus_of_another_version_is_refused(tmp_path, taught, field, value):
    other = tmp_path / "other"
    shutil.copytree(taught, other)
    path = other / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), field: value}), encoding="utf-8")
    error = train(tmp_path, RECIPE.format(corpus=other, more="")).exception
    assert isinstance(error, AgentBenchError)
    assert str(error).startswith(f"manifest.json, field {field}: ")
    assert "use a corpus of this version" in str(error)
