"""The released corpora hold what their cards say, and are what the program builds."""

from __future__ import annotations

import filecmp
import json
import os

import pytest

from agentbench_prefix.corpora.build import build
from agentbench_prefix.corpora.find import find_corpus
from agentbench_prefix.corpora.reading import RECIPE
from agentbench_prefix.corpora.recipe import load_corpus_recipe
from agentbench_prefix.corpora.validate import validate

CONFIGURATIONS = {
    "textcraft-prefix": {
        "trajectories": 1492,
        "failures": 1,
        "queries": 7245,
        "sidecars-compact-sft": 7245,
    },
    "babyai-prefix": {
        "trajectories": 3156,
        "failures": 336,
        "queries": 16833,
        "sidecars-compact-sft": 16833,
    },
}
# Tasks that the teacher solved, and those that nobody can within the turn limit.
TAUGHT = {"textcraft-prefix": (373, ["textcraft_495"]), "babyai-prefix": (789, [])}


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def corpus(request):
    return find_corpus(request.param)


def test_it_holds_every_task_that_can_be_taught(corpus):
    manifest = corpus.manifest
    rows = CONFIGURATIONS[manifest.name]
    taught = {row.task_id for row in corpus.trajectories("train")}
    assert (len(taught), manifest.out_of_reach["train"]) == TAUGHT[manifest.name]
    counts = {
        (s.strategy, s.family): s
        for s in manifest.statuses
        if (s.split, s.family) == ("train", "all")
    }
    assert counts["raw", "all"].validated == rows["trajectories"]
    assert counts["entropy_change_top3", "all"].validated >= 2 * rows["trajectories"]
    queries = list(corpus.queries("train"))
    assert sum(not q.prefix_turns for q in queries) == rows["trajectories"]
    assert all(q.status == "validated" and q.bytes_equal and q.probe_bytes_equal for q in queries)
    size = sum(path.stat().st_size for path in corpus.folder.rglob("*") if path.is_file())
    assert size < 16 * 2**20


def test_a_sample_of_it_validates(corpus):
    report = validate(corpus, sample=12)
    assert report.ok, report.faults
    assert report.deviations["compact/sft"] <= 1e-4


@pytest.mark.parametrize("rows", ["trajectories", "failures", "queries", "sidecars-compact-sft"])
def test_it_loads_as_from_the_hub(corpus, rows, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    loaded = datasets.load_dataset(str(corpus.folder), rows, split="train", cache_dir=str(tmp_path))
    assert len(loaded) == CONFIGURATIONS[corpus.manifest.name][rows]


@pytest.mark.long
@pytest.mark.timeout(1800)  # three minutes on a quiet machine
def test_all_of_it_validates(corpus):
    report = validate(corpus, every=True)
    assert report.ok, report.faults
    assert report.checked["queries restored"] == CONFIGURATIONS[corpus.manifest.name]["queries"]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_it_is_built_again_byte_for_byte(corpus, tmp_path):
    recipe = load_corpus_recipe(corpus.folder / RECIPE)
    again = build(recipe, tmp_path / recipe.name, workers=len(os.sched_getaffinity(0)))
    for name in corpus.manifest.files:
        assert filecmp.cmp(corpus.folder / name, again.folder / name, shallow=False), name
    written = [json.loads((c.folder / "manifest.json").read_bytes()) for c in (corpus, again)]
    for manifest in written:
        del manifest["created"], manifest["code_version"]
    assert written[0] == written[1]
