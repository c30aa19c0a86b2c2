"""The order in which corpora are looked up."""

from __future__ import annotations

from pathlib import Path

import pytest
from hub_server import HubServer
from small_corpora import write_small_corpus

from agentbench_prefix.corpora.find import find_corpus
from agentbench_prefix.errors import ConfigurationError, CorpusError

ID = "somebody/toys"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENTBENCH_PREFIX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_Test")
    return tmp_path


def test_a_folder_comes_first(here: Path, repository: Path) -> None:
    released = next((repository / "datasets").glob("*/manifest.json")).parent
    found = find_corpus(released.name)
    assert found.folder == released

    (here / released.name).mkdir()  # not a corpus yet
    assert find_corpus(released.name).folder == released
    write_small_corpus(here / released.name)
    assert find_corpus(released.name).manifest.name == "toys"
    assert find_corpus(here / released.name).manifest.name == "toys"
    assert find_corpus(f"./{released.name}").manifest.name == "toys"


def test_a_broken_folder_is_not_passed_over(here: Path, repository: Path) -> None:
    released = next((repository / "datasets").glob("*/manifest.json")).parent
    write_small_corpus(here / released.name, licence="")
    with pytest.raises(CorpusError, match="field licence"):
        find_corpus(released.name)


def test_the_error_lists_where_it_was_looked_for(here: Path, repository: Path) -> None:
    with pytest.raises(CorpusError) as caught:
        find_corpus("nothing")
    said = str(caught.value)
    places = ["nothing (no such folder)", f"{repository / 'datasets' / 'nothing'}", "the Hub"]
    assert [said.index(place) for place in places] == sorted(map(said.index, places))
    (here / "somebody" / "toys").mkdir(parents=True)
    with pytest.raises(CorpusError, match=r"no manifest\.json in it.*pin a commit"):
        find_corpus(ID)


def test_the_hub_is_asked_last_and_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = write_small_corpus(here / "made")
    with HubServer("hf_Test").running() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        commit = server.create(ID).publish(corpus.folder)
        with pytest.raises(ConfigurationError, match=commit):
            find_corpus(ID, revision="main")
        with pytest.raises(ConfigurationError, match="give one"):
            find_corpus(f"{ID}@{commit}", revision="b" * 40)
        found = find_corpus(ID, revision=commit)
        assert found.folder == here / "cache" / "corpora" / "somebody" / "toys" / commit
        assert found.manifest == corpus.manifest
        asked = len(server.seen)
        assert find_corpus(f"{ID}@{commit}") == found
        assert len(server.seen) == asked
    assert find_corpus(ID, revision=commit) == found  # without the server

    path = found.folder / "trajectories" / "train.parquet"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorpusError, match=r"trajectories/train\.parquet"):
        find_corpus(ID, revision=commit)

    write_small_corpus(here / "somebody" / "toys", version="2")
    assert find_corpus(ID).manifest.version == "2"
    with pytest.raises(ConfigurationError, match="belongs to a Hub id"):
        find_corpus(ID, revision=commit)
