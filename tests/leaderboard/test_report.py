"""``report``: pages that a person reads; checked as a browser would parse them."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
from pathlib import Path

import made
import pytest

from agentbench_prefix.errors import ConfigurationError, PolicyError, UnknownNameError
from agentbench_prefix.policies.base import Reply
from agentbench_prefix.report.pages import episodes_page, queries_page

pytest.importorskip("jinja2")
VOID = {"meta", "input", "br", "link"}


class Page(html.parser.HTMLParser):
    """Elements of a page with their attributes and text; complains about bad nesting."""

    def __init__(self, text):
        super().__init__()
        self.stack, self.items, self.tags, self.options, self.spans = [], [], [], {}, []
        self.select = None
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag not in VOID:
            self.stack.append(tag)
        if "item" in (found.get("class") or "").split():
            self.items.append({**found, "text": ""})
        if tag == "select":
            self.select = found["data-filter"]
            self.options[self.select] = []
        if tag == "span":
            self.spans.append([found.get("class"), ""])

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack and self.stack[-1] == "option":
            self.options[self.select].append(data)
        if self.items and "details" in self.stack:
            self.items[-1]["text"] += data
        if self.stack and self.stack[-1] == "span":
            self.spans[-1][1] += data


class Speaker(made.Solver):
    """Says odd things, fails here and there."""

    def _one(self, episode):
        if episode.task_id == made.TASKS[1]:
            return PolicyError("lost <connection>")
        if episode.task_id == made.TASKS[2]:
            return Reply("<script>alert('x')</script> & \x07 \ud800", (1, 2), (-0.5, -2.0))
        return super()._one(episode)


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first")
    counts = dict.fromkeys(made.REACHABLE, 1)
    with pytest.MonkeyPatch.context() as patch, made.toy.registered(folder / "site", patch):
        run = made.make_run(folder / "run", counts, splits=())
        made.evaluate_run(run, counts, "test", 2, policy=Speaker(counts, "0"))
    return run


@pytest.fixture
def run(first_run, tmp_path, monkeypatch):
    shutil.copytree(first_run, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return Path("run/eval/test")


def test_a_run_becomes_a_page_with_every_turn(run, call):
    status, out, _ = call("report", run, "--out", "pages/page.html")
    assert status == 0
    assert out.startswith("wrote pages/page.html (")
    page = Page(Path("pages/page.html").read_text("utf-8"))
    episodes = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
    assert len(page.items) == len(episodes) == 96
    for item, episode in zip(page.items, episodes, strict=True):
        assert item["data-family"] == episode["family"]
        text = item["text"]
        assert episode["task_id"] in text
        assert f"{episode['n_turns']} turns" in text
        for number, turn in enumerate(episode["turns"], start=1):
            assert f"turn {number}" in text
            if episode["task_id"] != made.TASKS[2]:  # whose odd characters are shown otherwise
                assert turn["observation"] in text
    outcomes = [item["data-outcome"] for item in page.items]
    assert {kind: outcomes.count(kind) for kind in set(outcomes)} == {
        "solved": sum(e["success"] for e in episodes),
        "errored": 2,
        "unsolved": sum(not e["success"] and e["error"] is None for e in episodes),
    }
    assert page.options["family"] == ["all", *sorted({e["family"] for e in episodes})]
    assert page.options["outcome"] == ["all", "errored", "solved", "unsolved"]
    failures = {e["failure_category"] for e in episodes} - {None}
    assert page.options["failure"] == ["all", *sorted(failures)]
    assert failures


def test_a_page_needs_nothing_from_elsewhere_and_runs_nothing_a_model_wrote(run):
    text = episodes_page(run)
    page = Page(text)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert not re.search(r"https?://|@import|url\(", text)
    assert not [a for _, a in page.tags if {"src", "href"} & set(a)]
    assert not [name for _, a in page.tags for name in a if name.startswith("on")]
    [odd] = [i for i in page.items if made.TASKS[2] in i["text"] and "#0" in i["text"]]
    assert "<script>alert('x')</script> & \u2407 \\ud800" in odd["text"]
    assert "2 tokens, log-probability -2.50, least likely token 0.14" in odd["text"]
    text.encode("utf-8")
    lost = [i for i in page.items if made.TASKS[1] in i["text"]]
    assert "The episode broke off: PolicyError: lost <connection>" in lost[0]["text"]


def test_the_table_of_rates_is_the_evaluations(run):
    metrics = json.loads((run / "metrics.json").read_text())
    text = episodes_page(run)
    assert f"<td>{metrics['n_solved']}/96</td>" in text
    assert "grpo on Toy-v0, split test" in text


def test_an_unfinished_run_and_a_limit_are_stated(run):
    (run / "metrics.json").unlink()
    text = episodes_page(run, limit=10)
    assert "unfinished, 96 episodes so far; 10 of 96 episodes are shown" in text
    page = Page(text)
    assert len(page.items) == 10
    assert len({item["data-family"] for item in page.items}) > 1  # spread, not the first ten


def test_the_same_episodes_give_the_same_page(run):
    assert episodes_page(run) == episodes_page(run)


def test_folders_without_episodes_are_named(run, call):
    with pytest.raises(
        ConfigurationError, match=r"holds no episodes\.jsonl; there are .*eval/test"
    ):
        episodes_page(Path("run"))
    Path("empty").mkdir()
    (Path("empty") / "episodes.jsonl").write_text('{"torn')
    with pytest.raises(ConfigurationError, match="no whole episode yet"):
        episodes_page(Path("empty"))
    (Path("empty") / "episodes.jsonl").write_text('{"format": 2}\n')
    with pytest.raises(ConfigurationError, match="is not an episode record"):
        episodes_page(Path("empty"))
    status, out, err = call("report", "nothing-there", "--out", "x.html")
    assert (status, out, err.count("\n")) == (2, "", 1)


# ------------------------------------------------------------------ corpora
@pytest.fixture(scope="module")
def corpus(repository):
    pytest.importorskip("torch")
    find = pytest.importorskip("agentbench_prefix.corpora.find")
    return find.find_corpus(repository / "datasets/textcraft-prefix")


def test_queries_show_prefix_and_mask_in_colour(corpus, tmp_path, call):
    parquet = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / "page.html"
    assert call("report", corpus.folder, "--out", out, "--limit", 6)[0] == 0
    page = Page(out.read_text("utf-8"))
    assert len(page.items) == 6
    columns = ["query_id", "prefix_turns", "messages"]
    queries = parquet.read_table(corpus.folder / "queries/train.parquet", columns=columns)
    rows = {row["query_id"]: row for row in queries.to_pylist()}
    label = next(iter(corpus.manifest.models))
    columns = ["query_id", "prefix_token_count"]
    scored = parquet.read_table(corpus.folder / f"sidecars/{label}/train.parquet", columns=columns)
    counts = {row["query_id"]: row["prefix_token_count"] for row in scored.to_pylist()}
    names = [name for name in rows if any(f"{name} " in i["text"] for i in page.items)]
    assert len(names) == 6
    turns = {str(rows[name]["prefix_turns"]) for name in names}
    assert {i["data-turns"] for i in page.items} == turns
    shades = ("green", "yellow", "dark_orange", "red")
    legend = len(shades)
    masked = [c for c, _ in page.spans if c and c.startswith("bold ") and c[5:] in shades]
    assert len(masked) - legend == sum(counts[name] for name in names)
    for name in names:
        [item] = [i for i in page.items if f"{name} " in i["text"]]
        for message in rows[name]["messages"]:
            assert message["content"] in item["text"]


def test_unknown_splits_and_models_are_named(corpus):
    with pytest.raises(UnknownNameError, match="unknown model 'x'; valid: sft"):
        queries_page(corpus, "train", model="x")
    with pytest.raises(UnknownNameError, match="'dev'"):
        queries_page(corpus, "dev")
