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
    "trajectories": 1492,
    "failures": 1,
    "queries": 7245,
    "sidecars-compact-sft": 7245,
}


@pytest.fixture(scope="module")
def corpus():
    return find_corpus("textcraft-prefix")


def test_it_holds_every_task_that_can_be_taught(corpus):
    manifest = corpus.manifest
    assert len(manifest.splits["train"]) == 373
    assert manifest.out_of_reach == {"train": ["textcraft_495"]}
    counts = {
        (s.strategy, s.family): s
        for s in manifest.statuses
        if (s.split, s.family) == ("train", "all")
    }
    assert counts["raw", "all"].validated == 1492
    assert counts["entropy_change_top3", "all"].validated >= 3000
    queries = list(corpus.queries("train"))
    assert sum(not q.prefix_turns for q in queries) == 1492
    assert all(q.status == "validated" and q.bytes_equal and q.probe_bytes_equal for q in queries)
    size = sum(path.stat().st_size for path in corpus.folder.rglob("*") if path.is_file())
    assert size < 10 * 2**20


def test_a_sample_of_it_validates(corpus):
    report = validate(corpus, sample=12)
    assert report.ok, report.faults
    assert report.deviations["compact/sft"] <= 1e-4


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_it_loads_as_from_the_hub(corpus, name, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    loaded = datasets.load_dataset(str(corpus.folder), name, split="train", cache_dir=str(tmp_path))
    assert len(loaded) == CONFIGURATIONS[name]


@pytest.mark.long
@pytest.mark.timeout(1800)  # three minutes on a quiet machine
def test_all_of_it_validates(corpus):
    report = validate(corpus, every=True)
    assert report.ok, report.faults
    assert report.checked["queries restored"] == 7245


@pytest.mark.long
def test_it_is_built_again_byte_for_byte(corpus, tmp_path):
    recipe = load_corpus_recipe(corpus.folder / RECIPE)
    again = build(recipe, tmp_path / "textcraft-prefix", workers=len(os.sched_getaffinity(0)))
    for name in corpus.manifest.files:
        assert filecmp.cmp(corpus.folder / name, again.folder / name, shallow=False), name
    written = [json.loads((c.folder / "manifest.json").read_bytes()) for c in (corpus, again)]
    for manifest in written:
        del manifest["created"], manifest["code_version"]
    assert written[0] == written[1]
