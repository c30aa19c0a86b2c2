"""Exports for other trainers say what the corpus says, in their layouts."""

from __future__ import annotations

import json
import shutil

import pytest
from typer.testing import CliRunner

from agentbench_prefix import registry
from agentbench_prefix.cli import app
from agentbench_prefix.corpora.export import export_chat, export_verl, with_sidecars
from agentbench_prefix.corpora.find import find_corpus
from agentbench_prefix.corpora.reading import Corpus
from agentbench_prefix.corpora.storage import RowWriter
from agentbench_prefix.errors import CorpusError, UnknownNameError


@pytest.fixture(scope="module")
def corpus():
    return find_corpus("textcraft-prefix")


@pytest.fixture(scope="module")
def verl(corpus, tmp_path_factory):
    """Rows as verl reads them: with ``datasets`` from Parquet."""
    import datasets

    folder = tmp_path_factory.mktemp("verl")
    path = folder / "train.parquet"
    written = export_verl(
        corpus,
        path,
        split="train",
        dialogue="compact",
        model="sft",
        strategies=["entropy_change_top3"],
    )
    rows = datasets.load_dataset(
        "parquet", data_files=str(path), split="train", cache_dir=str(folder / "cache")
    )
    assert len(rows) == written
    return rows


def test_verl_keeps_raw_queries_and_the_cuts_of_a_strategy(corpus, verl):
    expected = [
        query.query_id
        for query in corpus.queries("train")
        if not query.prefix_turns or any(c.strategy == "entropy_change_top3" for c in query.cuts)
    ]
    assert [row["query_id"] for row in verl["extra_info"]] == expected
    assert [row["index"] for row in verl["extra_info"]] == list(range(len(expected)))


def test_verl_has_its_columns_without_nulls(verl):
    assert verl.column_names == [
        "data_source",
        "prompt",
        "ability",
        "reward_model",
        "extra_info",
        "assistant_prefix_span",
        "prefix_mask",
        "assistant_prefix_old_log_probs",
        "prefix_token_count",
    ]
    table = verl.data.table
    assert all(table.column(name).null_count == 0 for name in table.column_names)
    assert set(verl[0]["reward_model"]) == {"style", "ground_truth"}


def test_prefix_fields_fit_the_prompt_that_a_chat_template_writes(corpus, verl):
    """A trainer applies the template itself: spans must count in those tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(registry.method("sft").checkpoint("TextCraft-v0"))
    picked = [row for row in verl.select(range(0, len(verl), 61)) if row["prefix_token_count"]]
    assert len(picked) > 30
    trainable = {query.query_id: query.trainable for query in corpus.queries("train")}
    for row in picked:
        text = tokenizer.apply_chat_template(
            row["prompt"], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        begin, end = row["assistant_prefix_span"]
        assert end - begin == len(row["prefix_mask"]) == len(row["assistant_prefix_old_log_probs"])
        assert sum(row["prefix_mask"]) == row["prefix_token_count"]
        masked = tokenizer.decode(
            [t for t, m in zip(ids[begin:end], row["prefix_mask"], strict=True) if m]
        )
        said = [m["content"] for m in row["prompt"] if m["role"] == "assistant"]
        learned = trainable[row["extra_info"]["query_id"]]
        kept = [reply for reply, learn in zip(said, learned, strict=True) if learn]
        assert masked == "".join(f"{reply}<|end|>" for reply in kept)


def test_extra_info_puts_the_environment_back(verl):
    for row in verl.select(range(1, len(verl), 97)):
        info = row["extra_info"]
        env = registry.make(info["env_id"], **json.loads(info["arguments"]))
        observation, _ = env.reset(
            seed=info["seed"],
            options={
                **json.loads(info["options"]),
                "task_id": info["task_id"],
                "prefix_actions": [action or None for action in info["prefix_actions"]],
            },
        )
        assert observation == row["prompt"][-1]["content"]


def test_names_that_are_not_in_the_corpus_are_refused(corpus, tmp_path):
    given = {"split": "train", "dialogue": "compact", "model": "sft"}
    for name, value in (("split", "test"), ("dialogue", "full"), ("model", "grpo")):
        with pytest.raises(UnknownNameError, match=value):
            export_verl(corpus, tmp_path / "x", **{**given, name: value})
    with pytest.raises(UnknownNameError, match="entropy_chance"):
        export_verl(corpus, tmp_path / "x", **given, strategies=["entropy_chance"])
    with pytest.raises(UnknownNameError, match="verbose"):
        export_chat(corpus, tmp_path / "x", split="train", dialogue="verbose")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["swapped", "missing", "surplus"])
def test_sidecars_in_another_order_are_named_and_nothing_is_written(corpus, tmp_path, damage):
    folder = tmp_path / "corpus"
    shutil.copytree(corpus.folder, folder)
    rows = list(corpus.sidecars("train", "compact", "sft"))
    if damage == "swapped":
        rows[3], rows[4] = rows[4], rows[3]
    elif damage == "missing":
        del rows[-1]
    else:
        rows.append(rows[0])
    with RowWriter(folder / "sidecars/compact/sft/train.parquet", "sidecars") as writer:
        for row in rows:
            writer.write(row)
    broken = Corpus.open(folder)
    place = {"swapped": 3, "missing": len(rows), "surplus": len(rows) - 1}[damage]
    with pytest.raises(CorpusError, match=f"train.parquet, row {place}\\b"):
        export_verl(
            broken, tmp_path / "out.parquet", split="train", dialogue="compact", model="sft"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_reading_queries_with_sidecars_holds_neither(corpus):
    pairs = with_sidecars(corpus, "train", "compact", "sft")
    query, sidecar = next(pairs)
    assert query.query_id == sidecar.query_id


@pytest.mark.parametrize("dialogue", ["compact", "full"])
def test_chat_lines_are_the_trajectories_with_mistakes_marked(corpus, tmp_path, dialogue):
    path = tmp_path / "chat.jsonl"
    assert export_chat(corpus, path, split="train", dialogue=dialogue) == 1492
    lines = path.read_text(encoding="utf-8").splitlines()
    for line, row in zip(lines, corpus.trajectories("train"), strict=True):
        written = json.loads(line)
        conversation = row.conversation(dialogue)
        assert [(m["role"], m["content"]) for m in written["messages"]] == [
            (m.role, m.content) for m in conversation.messages
        ]
        said = [m for m in written["messages"] if m["role"] == "assistant"]
        assert [m["train"] for m in said] == [turn.trainable for turn in row.turns]
        assert [m["weight"] for m in said] == [int(turn.trainable) for turn in row.turns]


def test_the_command_writes_both_and_says_what_is_missing(tmp_path):
    def export(*options):
        command = ["corpus", "export", "textcraft-prefix", "--dialogue", "compact", *options]
        return CliRunner().invoke(app, command)

    chat = export("--to", "chat", "--out", str(tmp_path / "a" / "chat.jsonl"))
    assert "1,492 rows" in chat.stdout
    verl = export("--to", "verl", "--model", "sft", "--no-raw", "--out", str(tmp_path / "v"))
    assert "5,753 rows" in verl.stdout
    assert "compact/sft" in str(export("--to", "verl", "--out", str(tmp_path / "w")).exception)
    assert "is a folder" in str(export("--to", "chat", "--out", str(tmp_path)).exception)
    assert "jsonl" in str(export("--to", "jsonl", "--out", str(tmp_path / "j")).exception)
