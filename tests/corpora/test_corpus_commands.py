"""The commands ``teach`` and ``corpus build|stats|show``, end to end."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from killed_builds import tree
from rich.text import Text

from agentbench_prefix.cli import main
from agentbench_prefix.corpora import build as module
from agentbench_prefix.corpora.reading import Corpus
from agentbench_prefix.corpora.schema import to_messages
from agentbench_prefix.corpora.show import load_serializer

sys.path.insert(0, str(Path(__file__).parents[1] / "policies"))

from fake_openai_server import FakeServer, completion


@pytest.fixture(autouse=True)
def settled(monkeypatch, tmp_path):
    """An empty folder, no colours unless asked for, no trace of the checkout's state."""
    monkeypatch.setattr(module, "code_version", lambda: "tested")
    monkeypatch.chdir(tmp_path)
    for name in ("FORCE_COLOR", "NO_COLOR", "OPENAI_API_KEY", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def call(capsys):
    """Run a command line; give exit status, standard output and standard error."""

    def run(*argv):
        with pytest.raises(SystemExit) as caught:
            main([str(word) for word in argv])
        out, err = capsys.readouterr()
        return caught.value.code, out, err

    return run


def assert_error(result, *needles):
    status, out, err = result
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for needle in needles:
        assert needle in err


RECIPE = {
    "name": "small",
    "licence": "Apache-2.0",
    "env_id": "TextCraft-v0",
    "splits": {"train": "train"},
    "tasks": 4,
    "teacher": {"kind": "oracle", "per_task": 2, "detours": 0.3},
    "dialogues": ["compact"],
    "strategies": {"every": {"kind": "every_turn"}, "random": {"kind": "random", "k": 1}},
}


def write_recipe(path, **changes):
    path.write_text(yaml.safe_dump({**RECIPE, **changes}, sort_keys=False))
    return path


# ------------------------------------------------------------------ teach
def test_teach_writes_and_prints(call):
    status, out, err = call(
        "teach", "--env", "TextCraft-v0", "--out", "taught", "--tasks", 3, "--per-task", 2
    )
    assert status == 0
    assert "taught 1.0: TextCraft-v0, licence Apache-2.0" in out
    assert "The teacher's play, split train" in out
    assert "trajectories/train.parquet" in out
    assert "written to taught" in out
    assert "\x1b" not in out + err
    corpus = Corpus.open(Path("taught"))
    assert len(list(corpus.trajectories("train"))) == 6
    assert corpus.manifest.recipe["teacher"]["detours"] == 0.2
    assert not any(name.startswith("queries") for name in corpus.manifest.files)
    # The same again leaves it alone; another is refused.
    before = tree(Path("taught"))
    again = ("teach", "--env", "TextCraft-v0", "--out", "taught", "--tasks", 3, "--per-task", 2)
    assert call(*again, "--no-progress")[:2] == (0, out)
    assert tree(Path("taught")) == before
    assert_error(call(*again, "--seed", 1), "another recipe", "--out")


def test_teach_by_an_endpoint(call, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with FakeServer(
        lambda seen: completion("[[ inventory ]]"), key="sk-secret"
    ).running() as server:
        asked = ("teach", "--env", "TextCraft-v0", "--out", "asked", "--tasks", 1)
        asked += ("--teacher", "openai", "--per-task", 1, "--attempts", 2, "--max-tokens", 33)
        assert_error(call(*asked, "--licence", "MIT"), "--base-url and --model")
        endpoint = ("--base-url", server.base_url, "--model", "toy")
        assert_error(call(*asked, *endpoint), "needs --licence")
        status, out, err = call(*asked, *endpoint, "--licence", "MIT", "--temperature", 0.5)
    assert status == 0
    assert len(server.seen) == 2 * 30
    bodies = [seen.body for seen in server.seen]
    assert {body["temperature"] for body in bodies} == {0.5}
    assert {body["max_tokens"] for body in bodies} == {33}
    manifest = Corpus.open(Path("asked")).manifest
    assert manifest.licence == "MIT"
    assert manifest.files["trajectories/train.parquet"].rows == 0
    assert manifest.files["failures/train.parquet"].rows == 2
    assert "sk-secret" not in out + err
    for path in Path("asked").rglob("*"):
        assert path.is_dir() or b"sk-secret" not in path.read_bytes()


@pytest.mark.parametrize(
    ("flags", "needles"),
    [
        (("--env", "Chess-v0", "--out", "o"), ["Chess-v0"]),
        (("--env", "TextCraft-v0", "--out", "o", "--split", "noon"), ["noon", "train"]),
        (("--env", "TextCraft-v0", "--out", "o", "--teacher", "me"), ["me", "oracle, openai"]),
    ],
)
def test_teach_refuses_what_does_not_exist(call, flags, needles):
    assert_error(call("teach", *flags), *needles)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("folder", "name"), [("tau ght ü", "tau-ght"), (".1", "1"), ("ü", "trajectories")]
)
def test_teach_names_a_corpus_after_its_folder(call, folder, name):
    status, _, err = call("teach", "--env", "TextCraft-v0", "--tasks", 1, "--out", folder)
    assert status == 0, err
    assert Corpus.open(Path(folder)).manifest.name == name


# ------------------------------------------------------------------ build
def test_build_and_build_again_from_the_corpus(call):
    write_recipe(Path("r.yaml"))
    status, out, err = call("corpus", "build", "r.yaml", "--out", "one", "--workers", 1)
    assert status == 0
    assert "Candidate queries" in out
    assert "written to one" in out
    assert "4/4" in err
    assert "\x1b" not in out + err
    # What a corpus says of its recipe is enough, wherever it lies.
    assert call("corpus", "build", "one", "--out", "two", "--workers", 2)[0] == 0
    assert tree(Path("two")) == tree(Path("one"))
    # And what it says of its trajectories.
    status, out, err = call(
        "corpus", "build", "one", "--out", "three", "--trajectories", "two", "--no-progress"
    )
    assert (status, err) == (0, "")
    assert tree(Path("three")) == tree(Path("one"))
    # A part of it, out of the whole.
    fewer = ("corpus", "build", "one", "--tasks", 2, "--workers", 1)
    assert call(*fewer, "--out", "four", "--trajectories", "one")[0] == 0
    assert call(*fewer, "--out", "five")[0] == 0
    assert (
        Corpus.open(Path("four")).manifest.statuses == Corpus.open(Path("five")).manifest.statuses
    )
    assert sorted(p.name for p in Path().iterdir()) == sorted(
        ["r.yaml", "one", "two", "three", "four", "five"]
    )


def test_build_refuses_in_one_line(call):
    write_recipe(Path("bad.yaml"), strategies={"mine": {"kind": "entropy_change", "w": 4}})
    assert_error(
        call("corpus", "build", "bad.yaml", "--out", "o"), "bad.yaml", "w: ", "odd", "got 4"
    )
    write_recipe(Path("blind.yaml"), strategies={"mine": {"kind": "raw_entropy"}})
    assert_error(call("corpus", "build", "blind.yaml", "--out", "o"), "'mine' needs entropies")
    assert_error(call("corpus", "build", "none.yaml", "--out", "o"), "none.yaml")
    write_recipe(Path("r.yaml"))
    assert_error(
        call("corpus", "build", "r.yaml", "--out", "o", "--trajectories", "none"),
        "no corpus 'none'",
    )
    Path("taken").mkdir()
    assert_error(call("corpus", "build", "r.yaml", "--out", "taken"), "taken", "--out")
    write_recipe(Path("lost.yaml"), models=[{"dialogue": "compact", "model": "./nowhere"}])
    assert_error(call("corpus", "build", "lost.yaml", "--out", "o"), "nowhere")
    assert not Path("o").exists()


# ------------------------------------------------------------------ stats
def test_stats(call, tiny_corpus):
    status, out, err = call("corpus", "stats", tiny_corpus)
    assert (status, err) == (0, "")
    manifest = Corpus.open(tiny_corpus).manifest
    for name, entry in manifest.files.items():
        line = next(line for line in out.splitlines() if line.split()[:1] == [name])
        assert f"{entry.rows:,}" in line.split()
        assert f"{entry.size:,}" in line.split()
    for strategy in manifest.recipe["strategies"]:
        assert strategy in out
    whole = next(
        s for s in manifest.statuses if (s.split, s.strategy, s.family) == ("train", "all", "all")
    )
    total = whole.validated + whole.mismatch + whole.unverifiable + whole.error + whole.ended
    table = out[out.index("Candidate queries, split train") :]
    row = next(line.split() for line in table.splitlines() if line.split()[:2] == ["all", "all"])
    assert row[2:4] == [str(total), str(whole.validated)]
    assert all(len(line.rstrip()) <= 100 for line in out.splitlines())
    assert_error(call("corpus", "stats", "nowhere"), "no corpus 'nowhere'")


# ------------------------------------------------------------------ show
def a_query(corpus):
    """A query with a mistake and a lesson in its prefix."""
    return next(q for q in corpus.queries("train") if False in q.trainable and True in q.trainable)


def test_show_in_plain_text(call, tiny_corpus):
    corpus = Corpus.open(tiny_corpus)
    first = next(q for q in corpus.queries("train") if q.prefix_turns)
    status, out, err = call("corpus", "show", tiny_corpus)
    assert (status, err) == (0, "")
    assert out.startswith(first.query_id + "\n")
    query = a_query(corpus)
    status, out, err = call("corpus", "show", tiny_corpus, query.query_id)
    assert (status, err) == (0, "")
    assert "\x1b" not in out
    assert f"task {query.task_id} ({query.family}), compact@1; {query.prefix_turns} of" in out
    assert "replay validated, byte for byte" in " ".join(out.split())
    for message in query.messages:
        assert message.content in out
    assert f"the teacher went on: {query.next_action}" in out
    assert f"and was told: {query.next_observation}" in out
    for cut in query.cuts:
        assert f"{cut.strategy}{' of ' + cut.model if cut.model else ''}: rank {cut.rank}" in out
    scored = next(
        s for s in corpus.sidecars("train", "compact", "tiny") if s.query_id == query.query_id
    )
    begin, end = scored.assistant_prefix_span
    counts = f"span [{begin}, {end}) of {scored.prompt_tokens} prompt tokens, "
    assert counts + f"{scored.prefix_token_count} in the mask" in " ".join(out.split())


def spans_of(text, *, struck=False):
    """What is written in bold colour, or struck out, without colour codes."""
    found = []
    for span in text.spans:
        style = span.style
        marked = style.strike if struck else style.bold and style.color is not None
        if marked:
            found.append(text.plain[span.start : span.end])
    return "".join(found)


def test_show_colours_the_mask_and_strikes_mistakes_out(call, tiny_corpus, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    corpus = Corpus.open(tiny_corpus)
    query = a_query(corpus)
    status, out, _ = call("corpus", "show", tiny_corpus, query.query_id)
    assert status == 0
    assert "\x1b[" in out
    prompt = "\n".join(out.split("\n")[2 + len(query.cuts) :])
    prompt = prompt[: prompt.index("the teacher went on")]
    text = Text.from_ansi(prompt)
    entry = corpus.manifest.models["compact/tiny"]
    serializer = load_serializer(entry, query.env_id)
    layout = serializer.lay_out(to_messages(query.messages))

    def written(learned):
        return "".join(
            serializer.tokenizer.decode(layout.ids[begin:end])
            for (begin, end), learn in zip(layout.replies, query.trainable, strict=True)
            if learn is learned
        )

    assert spans_of(text) == written(True)
    assert spans_of(text, struck=True) == written(False)
    assert written(True)
    assert written(False)


def test_show_colours_tokens_by_their_probability(call, tmp_path, tiny_corpus, monkeypatch):
    """The shade follows the sidecar: likely tokens are green, unlikely ones red."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    corpus = Corpus.open(tiny_corpus)
    query = a_query(corpus)
    from agentbench_prefix.corpora.storage import RowWriter

    shades = set()
    for logprob in (0.0, -0.5, -1.0, -9.0):
        folder = tmp_path / f"copy{logprob}"
        shutil.copytree(tiny_corpus, folder)
        with RowWriter(folder / "sidecars/compact/tiny/train.parquet", "sidecars") as writer:
            for row in corpus.sidecars("train", "compact", "tiny"):
                values = [logprob] * len(row.assistant_prefix_old_log_probs)
                writer.write(row.model_copy(update={"assistant_prefix_old_log_probs": values}))
        _, out, _ = call("corpus", "show", folder, query.query_id)
        prompt = Text.from_ansi(out[: out.index("the teacher went on")])
        colours = {s.style.color.name for s in prompt.spans if s.style.bold and s.style.color}
        assert len(colours) == 1
        shades |= colours
    assert len(shades) == 4


def test_show_without_a_model(call):
    write_recipe(Path("r.yaml"), dialogues=["full", "compact"], tasks=1)
    assert call("corpus", "build", "r.yaml", "--out", "one", "--workers", 1)[0] == 0
    query = next(q for q in Corpus.open(Path("one")).queries("train") if q.prefix_turns)
    status, out, _ = call("corpus", "show", "one", query.query_id)
    assert status == 0
    assert "[system] " in out
    assert "[assistant] " in out
    assert "span [" not in out
    assert "Think: " in out


def test_show_refuses_in_one_line(call, tiny_corpus, tmp_path):
    first = next(Corpus.open(tiny_corpus).queries("train")).query_id
    assert_error(call("corpus", "show", tiny_corpus, "q"), "unknown query 'q'", first)
    assert_error(call("corpus", "show", tiny_corpus, "--split", "noon"), "noon", "held_out, train")
    assert_error(call("corpus", "show", tiny_corpus, first, "--model", "huge"), "huge", "tiny")
    # The checkpoint that the sidecars name has another tokenizer now.
    folder = tmp_path / "copy"
    shutil.copytree(tiny_corpus, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["models"]["compact/tiny"]["tokenizer"] = "0" * 64
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert_error(call("corpus", "show", folder), "tokenizer", "expected 000000000000")
    # A sidecar whose mask does not fit.
    from agentbench_prefix.corpora.storage import RowWriter

    spoilt = tmp_path / "spoilt"
    shutil.copytree(tiny_corpus, spoilt)
    with RowWriter(spoilt / "sidecars/compact/tiny/train.parquet", "sidecars") as writer:
        for row in Corpus.open(tiny_corpus).sidecars("train", "compact", "tiny"):
            mask = [1 - bit for bit in row.prefix_mask]
            writer.write(row.model_copy(update={"prefix_mask": mask}))
    status, _, err = call("corpus", "show", spoilt)
    assert status == 2
    assert "does not fit its prompt" in err
