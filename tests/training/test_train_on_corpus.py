"""A method learns from a user's own corpus by a user's own recipe."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil

import pytest
import yaml
from typer.testing import CliRunner

from agentbench_prefix import make
from agentbench_prefix.cards import CheckpointCard
from agentbench_prefix.cli import app
from agentbench_prefix.corpora.reading import Corpus
from agentbench_prefix.corpora.storage import RowWriter
from agentbench_prefix.errors import AgentBenchError, ConfigurationError, CorpusError
from agentbench_prefix.files import sha256_file
from agentbench_prefix.training.data import corpora_of, recorded
from agentbench_prefix.training.recipe import SFTRecipe

FILE = "trajectories/train.parquet"

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


def test_what_is_in_the_place_of_the_checkpoint_is_refused_before_training(tmp_path, taught):
    place = tmp_path / "run" / "checkpoint"
    place.parent.mkdir()
    os.mkfifo(place)
    error = train(tmp_path, RECIPE.format(corpus=taught, more="")).exception
    assert isinstance(error, ConfigurationError)
    assert f"{place} exists and is no finished checkpoint" in str(error)
    assert not (place.parent / "resume").exists()
    place.unlink()
    done = train(tmp_path, RECIPE.format(corpus=taught, more=""))
    assert done.exit_code == 0, done.output


def changed(taught, folder, **fields):
    """A copy whose manifest has other fields."""
    shutil.copytree(taught, folder)
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **fields}), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("field", "value"),
    [("data_hash", "0" * 64), ("env_id", "TextCraft-v9"), ("dialogues", {"compact@0": "0" * 64})],
)
def test_a_corpus_of_another_version_is_refused(tmp_path, taught, field, value):
    other = changed(taught, tmp_path / "other", **{field: value})
    error = train(tmp_path, RECIPE.format(corpus=other, more="")).exception
    assert isinstance(error, AgentBenchError)
    assert str(error).startswith(f"manifest.json, field {field}: ")
    assert "use a corpus of this version" in str(error)


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"max_turns": 20}, "max_turns: tau-ght was made with 20, the environment at hand has 30"),
        ({"strict": True}, "strict: tau-ght was made with true, the environment at hand has false"),
        ({"strict": 0}, "strict: tau-ght was made with 0, the environment at hand has false"),
        ({"new": None}, "new: tau-ght was made with null, the environment at hand has none of"),
    ],
)
def test_a_corpus_made_with_other_arguments_is_refused(tmp_path, taught, change, differs):
    arguments = Corpus.open(taught).manifest.arguments | change
    other = changed(taught, tmp_path / "other", arguments=arguments)
    with pytest.raises(CorpusError) as caught:
        corpora_of(recipe_of(other), make("TextCraft-v0"))
    assert str(caught.value).startswith(f"manifest.json, field arguments.{differs}")
    assert "or make the environment with those of the corpus" in str(caught.value)


def test_a_corpus_of_a_dialogue_with_other_texts_is_refused(tmp_path, taught):
    env = make("TextCraft-v0")
    mine = env.dialogues()["compact"]
    theirs = dataclasses.replace(mine, system="Play well.").fingerprint()
    manifest = Corpus.open(taught).manifest
    assert manifest.dialogues["compact@1"] == mine.fingerprint() != theirs
    other = changed(
        taught, tmp_path / "other", dialogues={**manifest.dialogues, "compact@1": theirs}
    )
    with pytest.raises(CorpusError, match="the texts of compact@1") as caught:
        corpora_of(recipe_of(other), env)
    assert caught.value.field == "dialogues.compact@1"
    assert theirs in caught.value.what
    assert mine.fingerprint() in caught.value.what
    assert "use a corpus of this version" in caught.value.what


def test_trajectories_that_are_not_the_manifests_are_refused(tmp_path, taught):
    other = tmp_path / "other"
    shutil.copytree(taught, other)
    rows = list(Corpus.open(other).trajectories("train"))
    with RowWriter(other / FILE, "trajectories") as writer:
        for row in rows:
            writer.write(row.model_copy(update={"reward": 0.5}))
    error = train(tmp_path, RECIPE.format(corpus=other, more="")).exception
    assert isinstance(error, CorpusError)
    assert error.file == FILE
    shutil.copyfile(taught / FILE, other / FILE)
    assert corpora_of(recipe_of(other), make("TextCraft-v0"))

    manifest = json.loads((other / "manifest.json").read_bytes())
    del manifest["files"][FILE]
    (other / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(CorpusError, match=f"does not list {FILE}"):
        corpora_of(recipe_of(other), make("TextCraft-v0"))


def test_what_is_learnt_is_what_is_there_now(tmp_path, taught):
    """In one process, too, where an earlier corpus of the same path was read."""
    folder = tmp_path / "mine"
    shutil.copytree(taught, folder)
    env, recipe = make("TextCraft-v0"), recipe_of(folder)
    before = corpora_of(recipe, env)
    with RowWriter(folder / FILE, "trajectories") as writer:
        writer.write(next(Corpus.open(taught).trajectories("train")))
    state_file(folder, rows=1)
    assert corpora_of(recipe, env) != before
    assert len(recorded(str(folder), "train")) == 1


def test_a_corpus_without_trajectories_is_refused(tmp_path, taught):
    other = tmp_path / "other"
    shutil.copytree(taught, other)
    with RowWriter(other / FILE, "trajectories"):
        pass
    state_file(other, rows=0)
    error = train(tmp_path, RECIPE.format(corpus=other, more="")).exception
    assert isinstance(error, CorpusError)
    assert error.file == FILE
    assert "no trajectory of split 'train'" in str(error)


def state_file(folder, rows):
    """Let the manifest state the trajectories as they are."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    path = folder / FILE
    entry = {"sha256": sha256_file(path), "size": path.stat().st_size, "rows": rows}
    manifest["files"][FILE] = entry
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def recipe_of(corpus):
    return SFTRecipe.model_validate(yaml.safe_load(RECIPE.format(corpus=corpus, more="")))
