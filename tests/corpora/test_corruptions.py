"""A corpus that is damaged in any of many ways is refused, and the place is named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
import yaml
from typer.testing import CliRunner

from agentbench_prefix.corpora.build import build
from agentbench_prefix.corpora.card import render
from agentbench_prefix.corpora.reading import Corpus
from agentbench_prefix.corpora.recipe import make_recipe
from agentbench_prefix.corpora.schema import TrajectoryRow
from agentbench_prefix.corpora.teach import write_conversations
from agentbench_prefix.corpora.validate import Report, validate, validate_command
from agentbench_prefix.env import TextEnv
from agentbench_prefix.errors import ConfigurationError, CorpusError
from agentbench_prefix.files import sha256_file
from agentbench_prefix.policies import openai
from agentbench_prefix.policies.base import Reply
from agentbench_prefix.policies.scripted import OraclePolicy
from agentbench_prefix.registry import make
from agentbench_prefix.serialization import ChatSerializer

TRAJECTORIES = "trajectories/train.parquet"
QUERIES = "queries/train.parquet"
SIDECARS = "sidecars/compact/tiny/train.parquet"
MANIFEST = "manifest.json"
CARD = "README.md"

Place = tuple[str, int | None, str]
Rows = list[dict[str, Any]]


class Damaged:
    """A copy of a corpus to be damaged; changed files get new hashes in the manifest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rows(self, file: str) -> Rows:
        return pq.read_table(self.folder / file).to_pylist()

    def write(self, file: str, rows: Rows) -> None:
        schema = pq.read_schema(self.folder / file)
        self.write_table(file, pa.Table.from_pylist(rows, schema=schema))

    def write_table(self, file: str, table: pa.Table) -> None:
        pq.write_table(table, self.folder / file)
        self.refresh(file)

    def refresh(self, file: str) -> None:
        path = self.folder / file
        entry = {"sha256": sha256_file(path), "size": path.stat().st_size}
        if path.suffix == ".parquet":
            try:
                entry["rows"] = pq.read_metadata(path).num_rows
            except pa.ArrowInvalid:
                entry["rows"] = self.manifest["files"][file]["rows"]
        manifest = self.manifest
        manifest["files"][file] = {"rows": 0, **entry}
        self.write_manifest(manifest)

    def edit(self, file: str, row: int, **changes: Any) -> None:
        rows = self.rows(file)
        rows[row].update(changes)
        self.write(file, rows)

    @property
    def manifest(self) -> dict[str, Any]:
        return json.loads((self.folder / MANIFEST).read_text(encoding="utf-8"))

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        (self.folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")

    def edit_card(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Change the YAML header of the card."""
        _, header, rest = (self.folder / CARD).read_text(encoding="utf-8").split("---\n", 2)
        fields = yaml.safe_load(header)
        change(fields)
        text = f"---\n{yaml.safe_dump(fields)}---\n{rest}"
        (self.folder / CARD).write_text(text, encoding="utf-8")
        self.refresh(CARD)

    def render_card(self) -> None:
        """Write the card anew from the manifest."""
        card = render(Corpus.open(self.folder).manifest)
        (self.folder / CARD).write_text(card, encoding="utf-8")
        self.refresh(CARD)

    def query(self, *, turns: int = 2, behind: int = 0) -> int:
        """Row of a query with at least so many turns before and behind its cut."""
        return next(
            i
            for i, q in enumerate(self.rows(QUERIES))
            if q["prefix_turns"] >= turns and q["n_turns"] - q["prefix_turns"] > behind
        )

    def check(self, **arguments: Any) -> Report:
        return validate(Corpus.open(self.folder), **arguments)


@pytest.fixture
def damaged(tiny_corpus: Path, tmp_path: Path) -> Damaged:
    shutil.copytree(tiny_corpus, tmp_path / "copy")
    return Damaged(tmp_path / "copy")


CORRUPTIONS: dict[str, Callable[[Damaged], Place]] = {}


def corruption(function: Callable[[Damaged], Place]) -> Callable[[Damaged], Place]:
    """Register a way to damage a corpus; it returns the place that must be named."""
    CORRUPTIONS[function.__name__] = function
    return function


def named(file: str, row: int | None = None, field: str = "") -> Place:
    return file, row, field


# ------------------------------------------------------------------ files
@corruption
def tampered_file(c: Damaged) -> Place:
    path = c.folder / CARD
    text = path.read_text()
    path.write_text(text.replace("Licence", "Lizenze"))
    assert path.stat().st_size == len(text.encode())
    return named(CARD, field="sha256")


@corruption
def grown_file(c: Damaged) -> Place:
    with (c.folder / CARD).open("a") as file:
        file.write("more\n")
    return named(CARD, field="size")


@corruption
def truncated_parquet(c: Damaged) -> Place:
    path = c.folder / SIDECARS
    path.write_bytes(path.read_bytes()[:-200])
    c.refresh(SIDECARS)
    return named(SIDECARS)


@corruption
def parquet_overwritten_inside(c: Damaged) -> Place:
    path = c.folder / QUERIES
    content = bytearray(path.read_bytes())
    content[200:2000] = bytes(1800)
    path.write_bytes(content)
    c.refresh(QUERIES)
    return named(QUERIES, 0)


@corruption
def missing_file(c: Damaged) -> Place:
    (c.folder / SIDECARS).unlink()
    return named(SIDECARS)


@corruption
def file_that_is_not_listed(c: Damaged) -> Place:
    shutil.copy(c.folder / QUERIES, c.folder / "queries/more.parquet")
    return named("queries/more.parquet")


@corruption
def card_missing(c: Damaged) -> Place:
    (c.folder / CARD).unlink()
    return named(CARD)


@corruption
def file_of_unknown_kind(c: Damaged) -> Place:
    (c.folder / "extras").mkdir()
    shutil.copy(c.folder / QUERIES, c.folder / "extras/train.parquet")
    c.refresh("extras/train.parquet")
    return named(MANIFEST, None, "files")


@corruption
def sidecars_of_a_split_gone(c: Damaged) -> Place:
    (c.folder / SIDECARS).unlink()
    return manifest_with(c, lambda m: m["files"].pop(SIDECARS), "files")


@corruption
def sidecars_of_a_model_that_the_recipe_lacks(c: Damaged) -> Place:
    file = "sidecars/compact/other/train.parquet"
    (c.folder / file).parent.mkdir()
    shutil.copy(c.folder / SIDECARS, c.folder / file)
    c.refresh(file)
    return named(MANIFEST, None, "files")


@corruption
def file_outside_the_corpus(c: Damaged) -> Place:
    manifest = c.manifest
    manifest["files"]["../secret"] = manifest["files"][CARD]
    c.write_manifest(manifest)
    return named(MANIFEST, field="files")


@corruption
def file_dropped_from_the_manifest(c: Damaged) -> Place:
    manifest = c.manifest
    del manifest["files"]["corpus.yaml"]
    c.write_manifest(manifest)
    return named(MANIFEST, field="files")


@corruption
def wrong_row_count(c: Damaged) -> Place:
    manifest = c.manifest
    manifest["files"][QUERIES]["rows"] += 1
    c.write_manifest(manifest)
    return named(QUERIES, field="rows")


@corruption
def missing_column(c: Damaged) -> Place:
    c.write_table(SIDECARS, pq.read_table(c.folder / SIDECARS).drop_columns("prompt_sha256"))
    return named(SIDECARS, field="prompt_sha256")


@corruption
def extra_column(c: Damaged) -> Place:
    table = pq.read_table(c.folder / QUERIES)
    c.write_table(QUERIES, table.append_column("hint", pa.array(["x"] * len(table))))
    return named(QUERIES, field="hint")


def retyped(c: Damaged, file: str, column: str, values: Callable[[Rows], pa.Array]) -> None:
    table = pq.read_table(c.folder / file)
    index = table.schema.get_field_index(column)
    c.write_table(file, table.set_column(index, column, values(table.to_pylist())))


@corruption
def wrong_column_type(c: Damaged) -> Place:
    retyped(c, QUERIES, "seed", lambda rows: pa.array([str(row["seed"]) for row in rows]))
    return named(QUERIES, field="seed")


@corruption
def null_column(c: Damaged) -> Place:
    retyped(c, QUERIES, "observation", lambda rows: pa.nulls(len(rows)))
    return named(QUERIES, field="observation")


@corruption
def null_value(c: Damaged) -> Place:
    c.edit(QUERIES, 3, family=None)
    return named(QUERIES, 3, "family")


@corruption
def null_in_a_list(c: Damaged) -> Place:
    rows = c.rows(TRAJECTORIES)
    rows[1]["turns"][1]["observation"] = None
    c.write(TRAJECTORIES, rows)
    return named(TRAJECTORIES, 1, "turns.1.observation")


# ------------------------------------------------------------------ card, recipe, manifest
@corruption
def missing_licence(c: Damaged) -> Place:
    manifest = c.manifest
    del manifest["licence"]
    c.write_manifest(manifest)
    return named(MANIFEST, field="licence")


@corruption
def empty_licence(c: Damaged) -> Place:
    c.write_manifest(c.manifest | {"licence": ""})
    return named(MANIFEST, field="licence")


@corruption
def missing_licence_in_the_card(c: Damaged) -> Place:
    c.edit_card(lambda header: header.pop("license"))
    return named(CARD, field="license")


@corruption
def other_licence_in_the_card(c: Damaged) -> Place:
    c.edit_card(lambda header: header.update(license="mit"))
    return named(CARD, field="license")


@corruption
def card_without_header(c: Damaged) -> Place:
    (c.folder / CARD).write_text("# A corpus\n")
    c.refresh(CARD)
    return named(CARD)


@corruption
def card_with_a_broken_header(c: Damaged) -> Place:
    (c.folder / CARD).write_text("---\nlicense: [\n---\n")
    c.refresh(CARD)
    return named(CARD)


@corruption
def card_that_is_no_text(c: Damaged) -> Place:
    (c.folder / CARD).write_bytes(b"\xff\xfe\xff")
    c.refresh(CARD)
    return named(CARD)


@corruption
def card_with_broken_configurations(c: Damaged) -> Place:
    c.edit_card(lambda header: header["configs"][0].pop("data_files"))
    return named(CARD, None, "configs")


@corruption
def card_without_configurations(c: Damaged) -> Place:
    c.edit_card(lambda header: header.pop("configs"))
    return named(CARD, field="configs.queries")


@corruption
def card_names_another_file(c: Damaged) -> Place:
    def change(header: dict[str, Any]) -> None:
        config = next(x for x in header["configs"] if x["config_name"] == "trajectories")
        config["data_files"][0]["path"] = QUERIES

    c.edit_card(change)
    return named(CARD, field="configs.trajectories")


@corruption
def other_figure_in_the_card(c: Damaged) -> Place:
    path = c.folder / CARD
    text = path.read_text(encoding="utf-8")
    head, row, rest = text.partition("| train | all |")
    assert row
    path.write_text(f"{head}{row} 9{rest.lstrip()}", encoding="utf-8")
    c.refresh(CARD)
    return named(CARD)


@corruption
def other_recipe_in_its_file(c: Damaged) -> Place:
    path = c.folder / "corpus.yaml"
    recipe = yaml.safe_load(path.read_text())
    recipe["strategies"]["change"]["w"] = 7
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    c.refresh("corpus.yaml")
    return named("corpus.yaml", field="strategies.change.w")


def manifest_with(c: Damaged, change: Callable[[dict[str, Any]], Any], field: str) -> Place:
    manifest = c.manifest
    change(manifest)
    c.write_manifest(manifest)
    return named(MANIFEST, field=field)


@corruption
def broken_recipe_file(c: Damaged) -> Place:
    (c.folder / "corpus.yaml").write_text("name: [\n")
    c.refresh("corpus.yaml")
    return named("corpus.yaml")


@corruption
def name_of_another_recipe(c: Damaged) -> Place:
    return manifest_with(c, lambda m: m.update(name="huge"), "name")


@corruption
def dialogue_that_the_environment_lacks(c: Damaged) -> Place:
    def change(manifest: dict[str, Any]) -> None:
        manifest["recipe"]["dialogues"].append("formal")
        del manifest["recipe"]["strategies"]["change"]
        del manifest["recipe"]["strategies"]["raw_entropy"]

    place = manifest_with(c, change, "recipe.dialogues")
    (c.folder / "corpus.yaml").write_text(yaml.safe_dump(c.manifest["recipe"]))
    c.refresh("corpus.yaml")
    return place


@corruption
def dialogue_that_is_not_the_environments(c: Damaged) -> Place:
    field = "dialogues.formal@1"
    return manifest_with(c, lambda m: m["dialogues"].update({"formal@1": "0" * 64}), field)


@corruption
def unknown_layout(c: Damaged) -> Place:
    return manifest_with(c, lambda m: m.update(format=2), "format")


@corruption
def broken_recipe(c: Damaged) -> Place:
    def change(manifest: dict[str, Any]) -> None:
        manifest["recipe"]["strategies"]["change"]["w"] = 4

    return manifest_with(c, change, "recipe.strategies.change.entropy_change.w")


@corruption
def other_environment_version(c: Damaged) -> Place:
    def change(manifest: dict[str, Any]) -> None:
        manifest["env_id"] = manifest["recipe"]["env_id"] = "TextCraft-v9"

    manifest_with(c, change, "")
    path = c.folder / "corpus.yaml"
    path.write_text(path.read_text().replace("TextCraft-v0", "TextCraft-v9"))
    c.refresh("corpus.yaml")
    return named(MANIFEST, field="env_id")


@corruption
def other_data_of_the_environment(c: Damaged) -> Place:
    return manifest_with(c, lambda m: m.update(data_hash="0" * 64), "data_hash")


@corruption
def other_arguments_of_the_environment(c: Damaged) -> Place:
    return manifest_with(c, lambda m: m["arguments"].update(max_turns=50), "arguments.max_turns")


@corruption
def other_dialogue_version(c: Damaged) -> Place:
    def change(manifest: dict[str, Any]) -> None:
        manifest["dialogues"]["compact@0"] = manifest["dialogues"].pop("compact@1")

    return manifest_with(c, change, "dialogues.compact@1")


@corruption
def other_dialogue_texts(c: Damaged) -> Place:
    field = "dialogues.compact@1"
    return manifest_with(c, lambda m: m["dialogues"].update({"compact@1": "0" * 64}), field)


@corruption
def task_in_two_splits(c: Damaged) -> Place:
    def change(manifest: dict[str, Any]) -> None:
        manifest["splits"]["train"].append(manifest["splits"]["held_out"][0])

    _, second = c.manifest["splits"]  # the one read second has it already
    return manifest_with(c, change, f"splits.{second}.{2 if second == 'train' else 0}")


@corruption
def task_missing_from_its_split(c: Damaged) -> Place:
    return manifest_with(c, lambda m: m["splits"]["train"].pop(), "splits.train")


@corruption
def task_called_out_of_reach(c: Damaged) -> Place:
    def change(manifest: dict[str, Any]) -> None:
        manifest["out_of_reach"]["train"].append("textcraft_3")

    return manifest_with(c, change, "out_of_reach.train")


def index_of(manifest: dict[str, Any], table: str, **wanted: str) -> int:
    return next(
        i for i, x in enumerate(manifest[table]) if all(x[k] == v for k, v in wanted.items())
    )


@corruption
def wrong_status_count(c: Damaged) -> Place:
    i = index_of(c.manifest, "statuses", split="train", strategy="ratios", family="all")
    return manifest_with(
        c, lambda m: m["statuses"][i].update(validated=1), f"statuses.{i}.validated"
    )


@corruption
def status_counts_of_a_strategy_missing(c: Damaged) -> Place:
    i = index_of(c.manifest, "statuses", split="train", strategy="ratios", family="all")
    return manifest_with(c, lambda m: m["statuses"].pop(i), "statuses")


@corruption
def wrong_mean_turns(c: Damaged) -> Place:
    i = index_of(c.manifest, "taught", split="train", family="all")
    return manifest_with(
        c, lambda m: m["taught"][i].update(mean_turns=9.0), f"taught.{i}.mean_turns"
    )


@corruption
def wrong_count_of_distinct_prompts(c: Damaged) -> Place:
    i = index_of(c.manifest, "statuses", split="train", strategy="all", family="all")
    change = {"distinct": c.manifest["statuses"][i]["validated"] + 1}
    return manifest_with(c, lambda m: m["statuses"][i].update(change), f"statuses.{i}.distinct")


@corruption
def wrong_count_of_probes_that_show_nothing(c: Damaged) -> Place:
    i = index_of(c.manifest, "statuses", split="train", strategy="all", family="all")
    return manifest_with(
        c,
        lambda m: m["statuses"][i].update(probe_unverifiable=999),
        f"statuses.{i}.probe_unverifiable",
    )


@corruption
def wrong_count_of_empty_masks(c: Damaged) -> Place:
    i = index_of(c.manifest, "statuses", split="train", strategy="all", family="all")
    return manifest_with(
        c, lambda m: m["statuses"][i].update(untrained=999), f"statuses.{i}.untrained"
    )


@corruption
def other_tokenizer(c: Damaged) -> Place:
    field = "models.compact/tiny.tokenizer"
    return manifest_with(c, lambda m: m["models"]["compact/tiny"].update(tokenizer="0" * 64), field)


@corruption
def other_model_file(c: Damaged) -> Place:
    field = "models.compact/tiny.model_sha256"
    change = {"model_sha256": "0" * 64}
    return manifest_with(c, lambda m: m["models"]["compact/tiny"].update(change), field)


@corruption
def other_model_configuration(c: Damaged) -> Place:
    field = "models.compact/tiny.checkpoint_sha256"
    change = {"checkpoint_sha256": "0" * 64}
    return manifest_with(c, lambda m: m["models"]["compact/tiny"].update(change), field)


@corruption
def distributions_over_more_ids(c: Damaged) -> Place:
    field = "models.compact/tiny.vocabulary"
    return manifest_with(c, lambda m: m["models"]["compact/tiny"].update(vocabulary=9999), field)


@corruption
def model_that_the_recipe_lacks(c: Damaged) -> Place:
    def change(manifest: dict[str, Any]) -> None:
        manifest["models"]["compact/other"] = manifest["models"]["compact/tiny"]

    return manifest_with(c, change, "models.compact/other")


@corruption
def model_of_another_dialogue(c: Damaged) -> Place:
    field = "models.compact/tiny.dialogue"
    return manifest_with(c, lambda m: m["models"]["compact/tiny"].update(dialogue="full"), field)


@corruption
def family_that_was_not_counted(c: Damaged) -> Place:
    i = index_of(c.manifest, "taught", split="train", family="depth_1")
    return manifest_with(c, lambda m: m["taught"].pop(i), "taught")


@corruption
def model_missing(c: Damaged) -> Place:
    return manifest_with(c, lambda m: m["models"].clear(), "models.compact/tiny")


# ------------------------------------------------------------------ trajectories
@corruption
def repeated_trajectory(c: Damaged) -> Place:
    rows = c.rows(TRAJECTORIES)
    c.write(TRAJECTORIES, [rows[0], rows[0], *rows[1:]])
    return named(TRAJECTORIES, 1, "trajectory_id")


@corruption
def swapped_trajectories(c: Damaged) -> Place:
    rows = c.rows(TRAJECTORIES)
    c.write(TRAJECTORIES, [rows[1], rows[0], *rows[2:]])
    return named(TRAJECTORIES, 0, "sample")


@corruption
def tasks_out_of_order(c: Damaged) -> Place:
    rows = c.rows(TRAJECTORIES)
    c.write(TRAJECTORIES, [*rows[2:], *rows[:2]])
    return named(TRAJECTORIES, 2, "task_id")


@corruption
def trajectory_of_the_other_split(c: Damaged) -> Place:
    stray = c.rows("trajectories/held_out.parquet")[0]
    c.write(TRAJECTORIES, [*c.rows(TRAJECTORIES), stray])
    return named(TRAJECTORIES, len(c.rows(TRAJECTORIES)) - 1, "task_id")


def drop(c: Damaged, keep: Callable[[str], bool]) -> None:
    """Leave out trajectories with all that belongs to them."""
    for file in (TRAJECTORIES, QUERIES, SIDECARS):
        key = "trajectory_id" if file == TRAJECTORIES else "query_id"
        c.write(file, [row for row in c.rows(file) if keep(row[key])])


@corruption
def task_without_trajectories(c: Damaged) -> Place:
    task = c.manifest["splits"]["train"][1]
    drop(c, lambda name: not name.startswith(f"{task}/"))
    return named(MANIFEST, None, "splits.train.1")


@corruption
def trajectory_left_out(c: Damaged) -> Place:
    last = c.rows(TRAJECTORIES)[-1]["trajectory_id"]
    drop(c, lambda name: not name.startswith(last))
    i = index_of(c.manifest, "taught", split="train", family="all")
    return named(MANIFEST, None, f"taught.{i}.trajectories")


@corruption
def trajectories_overwritten_inside(c: Damaged) -> Place:
    path = c.folder / TRAJECTORIES
    content = bytearray(path.read_bytes())
    content[4:400] = bytes(396)
    path.write_bytes(content)
    c.refresh(TRAJECTORIES)
    return named(TRAJECTORIES, 0)


@corruption
def unknown_family(c: Damaged) -> Place:
    c.edit(TRAJECTORIES, 1, family="depth_9")
    return named(TRAJECTORIES, 1, "family")


@corruption
def trajectory_of_other_data(c: Damaged) -> Place:
    c.edit(TRAJECTORIES, 1, data_hash="0" * 64)
    return named(TRAJECTORIES, 1, "data_hash")


@corruption
def trajectory_of_another_teacher(c: Damaged) -> Place:
    c.edit(TRAJECTORIES, 1, teacher="crowd")
    return named(TRAJECTORIES, 1, "teacher")


@corruption
def seed_of_no_attempt(c: Damaged) -> Place:
    c.edit(TRAJECTORIES, 1, seed=7)
    return named(TRAJECTORIES, 1, "seed")


@corruption
def unknown_reset_option(c: Damaged) -> Place:
    c.edit(TRAJECTORIES, 1, options='{"speed":2}')
    return named(TRAJECTORIES, 1, "options")


@corruption
def options_that_are_no_json(c: Damaged) -> Place:
    c.edit(TRAJECTORIES, 1, options="{")
    return named(TRAJECTORIES, 1, "options")


@corruption
def options_in_another_form(c: Damaged) -> Place:
    c.edit(TRAJECTORIES, 1, options="{ }")
    return named(TRAJECTORIES, 1, "options")


@corruption
def options_that_the_environment_refuses(c: Damaged) -> Place:
    """Its form is right: only replay can tell."""
    for file in (TRAJECTORIES, QUERIES):
        c.write(file, [{**row, "options": '{"distractor_seed":"x"}'} for row in c.rows(file)])
    return named(TRAJECTORIES, 0, "turns")


@corruption
def more_trajectories_than_wanted(c: Damaged) -> Place:
    rows = c.rows(TRAJECTORIES)
    third = {**rows[3], "sample": 2, "trajectory_id": rows[3]["trajectory_id"][:-1] + "2"}
    c.write(TRAJECTORIES, [*rows, third])
    return named(TRAJECTORIES, 4, "sample")


def edit_length(c: Damaged, change: Callable[[list[Any]], Any]) -> None:
    """Make the last trajectory longer or shorter, in every dialogue, and nothing else."""
    rows = c.rows(TRAJECTORIES)
    row = rows[-1]
    change(row["turns"])
    row["n_turns"] = len(row["turns"])
    row["reward"] = sum(turn["reward"] for turn in row["turns"])
    told = [TrajectoryRow.model_validate(row).turns]
    for conversation in row["conversations"]:
        name = conversation["dialogue"].partition("@")[0]
        said = [m["content"] for m in conversation["messages"] if m["role"] == "assistant"]
        said = [*said, said[-1]][: len(row["turns"])]
        written = write_conversations(
            {name: make("TextCraft-v0").dialogues()[name]},
            row["first_observation"],
            told[0],
            [""] * len(row["turns"]),
            {name: said},
        )
        conversation["messages"] = written[0].model_dump()["messages"]
    c.write(TRAJECTORIES, rows)
    queries = c.rows(QUERIES)
    for query in queries:
        if query["trajectory_id"] == row["trajectory_id"]:
            query["n_turns"] = row["n_turns"]
    keep = [
        q["trajectory_id"] != row["trajectory_id"] or q["prefix_turns"] < row["n_turns"]
        for q in queries
    ]
    for file, all_rows in ((QUERIES, queries), (SIDECARS, c.rows(SIDECARS))):
        c.write(file, [r for r, wanted in zip(all_rows, keep, strict=True) if wanted])


@corruption
def trajectory_cut_short(c: Damaged) -> Place:
    """It says that it is solved: only replay can tell."""
    edit_length(c, lambda turns: turns.pop())
    return named(TRAJECTORIES, 3, "success")


@corruption
def turns_after_the_end(c: Damaged) -> Place:
    """Only replay can tell."""
    edit_length(c, lambda turns: turns.append(turns[-1]))
    return named(TRAJECTORIES, 3, f"turns.{len(c.rows(TRAJECTORIES)[3]['turns']) - 1}")


@corruption
def turns_beyond_the_limit(c: Damaged) -> Place:
    rows = c.rows(TRAJECTORIES)
    rows[0]["turns"] = [*[rows[0]["turns"][0]] * 30, rows[0]["turns"][-1]]
    rows[0]["n_turns"] = 31
    c.write(TRAJECTORIES, rows)
    return named(TRAJECTORIES, 0, "turns")


@corruption
def unsolved_trajectory(c: Damaged) -> Place:
    c.edit(TRAJECTORIES, 2, success=False)
    return named(TRAJECTORIES, 2, "success")


@corruption
def wrong_reward(c: Damaged) -> Place:
    c.edit(TRAJECTORIES, 2, reward=0.5)
    return named(TRAJECTORIES, 2, "reward")


@corruption
def wrong_number_of_turns(c: Damaged) -> Place:
    c.edit(TRAJECTORIES, 2, n_turns=30)
    return named(TRAJECTORIES, 2, "n_turns")


def edit_turn(c: Damaged, turn: int, **changes: Any) -> None:
    rows = c.rows(TRAJECTORIES)
    rows[0]["turns"][turn].update(changes)
    c.write(TRAJECTORIES, rows)


@corruption
def changed_action(c: Damaged) -> Place:
    """The dialogues still tell the old one."""
    edit_turn(c, 1, action="get 1 moon")
    conversations = c.rows(TRAJECTORIES)[0]["conversations"]
    said = [i for i, m in enumerate(conversations[0]["messages"]) if m["role"] == "assistant"]
    return named(TRAJECTORIES, 0, f"conversations.0.messages.{said[1]}.content")


@corruption
def changed_observation(c: Damaged) -> Place:
    """The dialogues still tell the old one."""
    edit_turn(c, 0, observation="Got 1 moon")
    conversations = c.rows(TRAJECTORIES)[0]["conversations"]
    said = [i for i, m in enumerate(conversations[0]["messages"]) if m["role"] == "assistant"]
    return named(TRAJECTORIES, 0, f"conversations.0.messages.{said[1] - 1}.content")


@corruption
def turn_with_action_and_problem(c: Damaged) -> Place:
    edit_turn(c, 1, problem="no_action")
    return named(TRAJECTORIES, 0, "turns.1.action")


@corruption
def turn_called_invalid(c: Damaged) -> Place:
    rows = c.rows(TRAJECTORIES)
    edit_turn(c, 1, valid=not rows[0]["turns"][1]["valid"])
    return named(TRAJECTORIES, 0, "turns.1.valid")


@corruption
def changed_first_observation_everywhere(c: Damaged) -> Place:
    """Only replay can tell."""
    old = c.rows(TRAJECTORIES)[0]["first_observation"]
    for file in (TRAJECTORIES, QUERIES):
        text = json.dumps(c.rows(file)).replace(json.dumps(old)[1:-1], "A farm.")
        c.write(file, json.loads(text))
    return named(SIDECARS, 0, "prompt_tokens")


@corruption
def changed_last_observation(c: Damaged) -> Place:
    """Nothing else repeats it: only replay can tell."""
    edit_turn(c, -1, observation="Crafted 7 moons")
    last = len(c.rows(TRAJECTORIES)[0]["turns"]) - 1
    rows = c.rows(QUERIES)
    for row in rows:
        if row["prefix_turns"] == last and row["trajectory_id"] == rows[0]["trajectory_id"]:
            row["next_observation"] = "Crafted 7 moons"
    c.write(QUERIES, rows)
    return named(TRAJECTORIES, 0, f"turns.{last}.observation")


@corruption
def dialogue_missing_from_a_trajectory(c: Damaged) -> Place:
    rows = c.rows(TRAJECTORIES)
    rows[1]["conversations"].pop()
    c.write(TRAJECTORIES, rows)
    return named(TRAJECTORIES, 1, "conversations")


@corruption
def changed_system_prompt(c: Damaged) -> Place:
    rows = c.rows(TRAJECTORIES)
    rows[1]["conversations"][0]["messages"][0]["content"] += " Be quick."
    c.write(TRAJECTORIES, rows)
    return named(TRAJECTORIES, 1, "conversations.0.messages.0.content")


@corruption
def reply_missing(c: Damaged) -> Place:
    rows = c.rows(TRAJECTORIES)
    rows[1]["conversations"][0]["messages"].pop()
    c.write(TRAJECTORIES, rows)
    return named(TRAJECTORIES, 1, "conversations.0.messages")


@corruption
def trajectory_flag_flipped(c: Damaged) -> Place:
    """The first query that has the turn in its prefix contradicts it."""
    edit_turn(c, 0, trainable=not c.rows(TRAJECTORIES)[0]["turns"][0]["trainable"])
    return named(QUERIES, c.query(turns=1), "trainable.0")


@corruption
def last_turn_called_a_mistake(c: Damaged) -> Place:
    """No prefix holds the last turn: only the teacher's own play can tell."""
    last = c.rows(TRAJECTORIES)[0]["n_turns"] - 1
    edit_turn(c, last, trainable=not c.rows(TRAJECTORIES)[0]["turns"][last]["trainable"])
    return named(TRAJECTORIES, 0, f"turns.{last}.trainable")


@corruption
def wrong_plain_turns(c: Damaged) -> Place:
    c.edit(TRAJECTORIES, 0, plain_turns=c.rows(TRAJECTORIES)[0]["plain_turns"] + 1)
    return named(TRAJECTORIES, 0, "plain_turns")


# ------------------------------------------------------------------ queries
@corruption
def repeated_query(c: Damaged) -> Place:
    rows = c.rows(QUERIES)
    c.write(QUERIES, [*rows[:2], *rows[1:]])
    return named(QUERIES, 2, "query_id")


@corruption
def swapped_queries(c: Damaged) -> Place:
    rows = c.rows(QUERIES)
    c.write(QUERIES, [rows[1], rows[0], *rows[2:]])
    return named(QUERIES, 1, "prefix_turns")


@corruption
def query_of_an_unknown_trajectory(c: Damaged) -> Place:
    c.edit(QUERIES, 1, trajectory_id="textcraft_0/oracle/17")
    return named(QUERIES, 1, "trajectory_id")


@corruption
def query_of_an_earlier_trajectory(c: Damaged) -> Place:
    rows = c.rows(QUERIES)
    c.write(QUERIES, [*rows[1:], rows[0]])
    return named(QUERIES, len(rows) - 1, "trajectory_id")


@corruption
def changed_query_id(c: Damaged) -> Place:
    row = c.query()
    c.edit(QUERIES, row, query_id="textcraft_0/oracle/0/compact/first")
    return named(QUERIES, row, "query_id")


@corruption
def query_of_another_dialogue_version(c: Damaged) -> Place:
    row = c.query()
    c.edit(QUERIES, row, dialogue="compact@2")
    return named(QUERIES, row, "dialogue")


@corruption
def query_of_another_family(c: Damaged) -> Place:
    row = c.query()
    c.edit(QUERIES, row, family="depth_3")
    return named(QUERIES, row, "family")


@corruption
def query_with_another_seed(c: Damaged) -> Place:
    row = c.query()
    c.edit(QUERIES, row, seed=3)
    return named(QUERIES, row, "seed")


@corruption
def prefix_turns_off_by_one(c: Damaged) -> Place:
    row = c.query(behind=1)
    c.edit(QUERIES, row, prefix_turns=c.rows(QUERIES)[row]["prefix_turns"] + 1)
    return named(QUERIES, row, "prefix_turns")


@corruption
def cut_behind_the_final_turn(c: Damaged) -> Place:
    row = c.query()
    c.edit(QUERIES, row, prefix_turns=c.rows(QUERIES)[row]["n_turns"])
    return named(QUERIES, row, "prefix_turns")


@corruption
def changed_prefix_action(c: Damaged) -> Place:
    row = c.query()
    actions = c.rows(QUERIES)[row]["prefix_actions"]
    c.edit(QUERIES, row, prefix_actions=[*actions[:-1], "get 1 moon"])
    return named(QUERIES, row, f"prefix_actions.{len(actions) - 1}")


@corruption
def flipped_trainable_flag(c: Damaged) -> Place:
    row = c.query()
    flags = c.rows(QUERIES)[row]["trainable"]
    c.edit(QUERIES, row, trainable=[flags[0], not flags[1], *flags[2:]])
    return named(QUERIES, row, "trainable.1")


@corruption
def changed_prompt_message(c: Damaged) -> Place:
    rows = c.rows(QUERIES)
    row = c.query()
    rows[row]["messages"][2]["content"] += "s"
    c.write(QUERIES, rows)
    return named(QUERIES, row, "messages.2.content")


@corruption
def prompt_that_ends_too_early(c: Damaged) -> Place:
    rows = c.rows(QUERIES)
    row = c.query()
    del rows[row]["messages"][-1]
    c.write(QUERIES, rows)
    return named(QUERIES, row, "messages")


@corruption
def changed_cut_observation(c: Damaged) -> Place:
    row = c.query()
    c.edit(QUERIES, row, observation="Got 1 moon")
    return named(QUERIES, row, "observation")


@corruption
def changed_next_action(c: Damaged) -> Place:
    row = c.query()
    c.edit(QUERIES, row, next_action="inventory")
    return named(QUERIES, row, "next_action")


@corruption
def changed_next_observation(c: Damaged) -> Place:
    row = c.query()
    c.edit(QUERIES, row, next_observation="Got 1 moon")
    return named(QUERIES, row, "next_observation")


@corruption
def query_that_was_not_validated(c: Damaged) -> Place:
    row = c.query()
    c.edit(QUERIES, row, status="mismatch")
    return named(QUERIES, row, "status")


@corruption
def unknown_status(c: Damaged) -> Place:
    row = c.query()
    c.edit(QUERIES, row, status="fine")
    return named(QUERIES, row, "status")


@corruption
def bytes_called_different(c: Damaged) -> Place:
    row = c.query()
    c.edit(QUERIES, row, bytes_equal=False)
    return named(QUERIES, row, "bytes_equal")


@corruption
def probe_called_unverifiable(c: Damaged) -> Place:
    row = next(i for i, q in enumerate(c.rows(QUERIES)) if q["probe"] == "validated")
    c.edit(QUERIES, row, probe="unverifiable")
    return named(QUERIES, row, "probe")


@corruption
def failed_probe(c: Damaged) -> Place:
    row = c.query()
    c.edit(QUERIES, row, probe="error")
    return named(QUERIES, row, "probe")


def edit_cut(c: Damaged, named: str, /, **changes: Any) -> tuple[int, int]:
    """Change the first cut of a strategy; returns its row and its place there."""
    rows = c.rows(QUERIES)
    for i, row in enumerate(rows):
        for j, cut in enumerate(row["cuts"]):
            if cut["strategy"] == named:
                cut.update(changes)
                c.write(QUERIES, rows)
                return i, j
    raise AssertionError(f"no cut of {named}")


@corruption
def repeated_rank(c: Damaged) -> Place:
    rows = c.rows(QUERIES)
    seen: dict[tuple[str, str], int] = {}
    for i, row in enumerate(rows):
        for j, cut in enumerate(row["cuts"]):
            key = row["trajectory_id"], cut["strategy"]
            if key in seen:
                cut["rank"] = seen[key]
                c.write(QUERIES, rows)
                return named(QUERIES, i, f"cuts.{j}.rank")
            seen[key] = cut["rank"]
    raise AssertionError("no strategy cuts a trajectory twice")


@corruption
def unknown_strategy(c: Damaged) -> Place:
    i, j = edit_cut(c, "ratios", strategy="gut_feeling")
    return named(QUERIES, i, f"cuts.{j}.strategy")


@corruption
def cut_by_an_unknown_model(c: Damaged) -> Place:
    i, j = edit_cut(c, "change", model="huge")
    return named(QUERIES, i, f"cuts.{j}.model")


@corruption
def wrong_score_of_a_cut(c: Damaged) -> Place:
    i, j = edit_cut(c, "change", score=0.5)
    return named(QUERIES, i, f"cuts.{j}.score")


@corruption
def score_that_is_no_number(c: Damaged) -> Place:
    i, j = edit_cut(c, "change", score=float("nan"))
    return named(QUERIES, i, f"cuts.{j}.score")


@corruption
def rank_beyond_those_chosen(c: Damaged) -> Place:
    i, j = edit_cut(c, "raw_entropy", rank=7)
    return named(QUERIES, i, f"cuts.{j}.rank")


@corruption
def cut_that_entropies_do_not_choose(c: Damaged) -> Place:
    """The third best turn is passed off as the second best."""
    rows = c.rows(QUERIES)
    for i, row in enumerate(rows):
        names = [cut["strategy"] for cut in row["cuts"]]
        if row["cuts"] and "change" not in names and row["n_turns"] > 3:
            row["cuts"].insert(0, {"strategy": "change", "model": "tiny", "rank": 1, "score": 0.0})
            siblings = [x for x in rows if x["trajectory_id"] == row["trajectory_id"]]
            for other in siblings:
                if other is not row:
                    other["cuts"] = [
                        x for x in other["cuts"] if (x["strategy"], x["rank"]) != ("change", 1)
                    ]
            if all(x["cuts"] or not x["prefix_turns"] for x in siblings):
                c.write(QUERIES, rows)
                return named(QUERIES, i, "cuts.0.rank")
            rows = c.rows(QUERIES)
    raise AssertionError("no trajectory has a turn that entropies pass over")


@corruption
def cut_that_chance_does_not_choose(c: Damaged) -> Place:
    rows = c.rows(QUERIES)
    i = next(
        i
        for i, row in enumerate(rows)
        if row["cuts"] and all(cut["strategy"] != "random" for cut in row["cuts"])
    )
    for row in rows:
        if row["trajectory_id"] == rows[i]["trajectory_id"]:
            row["cuts"] = [cut for cut in row["cuts"] if cut["strategy"] != "random"]
    share = rows[i]["prefix_turns"] / rows[i]["n_turns"]
    rows[i]["cuts"].append({"strategy": "random", "model": "", "rank": 0, "score": share})
    c.write(QUERIES, rows)
    return named(QUERIES, i, f"cuts.{len(rows[i]['cuts']) - 1}.rank")


@corruption
def raw_query_with_a_cut(c: Damaged) -> Place:
    cut = {"strategy": "random", "model": "", "rank": 0, "score": 0.0}
    c.edit(QUERIES, 0, cuts=[cut])
    return named(QUERIES, 0, "cuts")


@corruption
def cut_of_no_strategy(c: Damaged) -> Place:
    row = c.query()
    c.edit(QUERIES, row, cuts=[])
    return named(QUERIES, row, "cuts")


@corruption
def query_left_out(c: Damaged) -> Place:
    """With its sidecar, so that only replay can tell that it was a valid candidate."""
    row = c.query()
    first = next(
        i
        for i, q in enumerate(c.rows(QUERIES))
        if q["trajectory_id"] == c.rows(QUERIES)[row]["trajectory_id"]
    )
    for file in (QUERIES, SIDECARS):
        rows = c.rows(file)
        del rows[row]
        c.write(file, rows)
    return named(QUERIES, first, "query_id")


# ------------------------------------------------------------------ sidecars
@corruption
def missing_sidecar(c: Damaged) -> Place:
    rows = c.rows(SIDECARS)
    c.write(SIDECARS, [*rows[:3], *rows[4:]])
    return named(SIDECARS, 3, "query_id")


@corruption
def last_sidecar_missing(c: Damaged) -> Place:
    c.write(SIDECARS, c.rows(SIDECARS)[:-1])
    return named(SIDECARS, None, "query_id")


@corruption
def sidecar_of_no_query(c: Damaged) -> Place:
    rows = c.rows(SIDECARS)
    c.write(SIDECARS, [*rows, rows[-1]])
    return named(SIDECARS, len(rows), "query_id")


@corruption
def swapped_sidecars(c: Damaged) -> Place:
    rows = c.rows(SIDECARS)
    c.write(SIDECARS, [*rows[:1], rows[2], rows[1], *rows[3:]])
    return named(SIDECARS, 1, "query_id")


@corruption
def sidecars_swapped_but_for_their_ids(c: Damaged) -> Place:
    rows = c.rows(SIDECARS)
    rows[1], rows[2] = (
        {**rows[2], "query_id": rows[1]["query_id"]},
        {**rows[1], "query_id": rows[2]["query_id"]},
    )
    c.write(SIDECARS, rows)
    return named(SIDECARS, 1, "prompt_tokens")


@corruption
def wrong_mask_length(c: Damaged) -> Place:
    row = c.query()
    c.edit(SIDECARS, row, prefix_mask=c.rows(SIDECARS)[row]["prefix_mask"] + [0])
    return named(SIDECARS, row, "prefix_mask")


@corruption
def mask_shifted_by_one(c: Damaged) -> Place:
    row = next(
        i
        for i, s in enumerate(c.rows(SIDECARS))
        if 0 in s["prefix_mask"][1:] and s["prefix_token_count"]
    )
    mask = c.rows(SIDECARS)[row]["prefix_mask"]
    shifted = [*mask[1:], mask[0]]
    assert shifted != mask
    c.edit(SIDECARS, row, prefix_mask=shifted)
    place = next(i for i, (a, b) in enumerate(zip(mask, shifted, strict=True)) if a != b)
    return named(SIDECARS, row, f"prefix_mask.{place}")


@corruption
def mask_value_of_two(c: Damaged) -> Place:
    row = c.query()
    mask = c.rows(SIDECARS)[row]["prefix_mask"]
    c.edit(SIDECARS, row, prefix_mask=[2, *mask[1:]])
    return named(SIDECARS, row, "prefix_mask.0")


@corruption
def shifted_span(c: Damaged) -> Place:
    row = c.query()
    begin, end = c.rows(SIDECARS)[row]["assistant_prefix_span"]
    c.edit(SIDECARS, row, assistant_prefix_span=[begin + 1, end + 1])
    return named(SIDECARS, row, "assistant_prefix_span.0")


@corruption
def reversed_span(c: Damaged) -> Place:
    row = c.query()
    begin, end = c.rows(SIDECARS)[row]["assistant_prefix_span"]
    c.edit(SIDECARS, row, assistant_prefix_span=[end, begin])
    return named(SIDECARS, row, "assistant_prefix_span")


@corruption
def wrong_count(c: Damaged) -> Place:
    row = c.query()
    c.edit(SIDECARS, row, prefix_token_count=c.rows(SIDECARS)[row]["prefix_token_count"] + 1)
    return named(SIDECARS, row, "prefix_token_count")


def edit_logprob(c: Damaged, value: Callable[[float], float]) -> Place:
    row = c.query()
    values = c.rows(SIDECARS)[row]["assistant_prefix_old_log_probs"]
    values[4] = value(values[4])
    c.edit(SIDECARS, row, assistant_prefix_old_log_probs=values)
    return named(SIDECARS, row, "assistant_prefix_old_log_probs.4")


@corruption
def logprob_off_by_a_hundredth(c: Damaged) -> Place:
    return edit_logprob(c, lambda value: value - 0.01)


@corruption
def logprob_that_is_no_number(c: Damaged) -> Place:
    return edit_logprob(c, lambda _: float("nan"))


@corruption
def infinite_logprob(c: Damaged) -> Place:
    return edit_logprob(c, lambda _: float("-inf"))


@corruption
def positive_logprob(c: Damaged) -> Place:
    return edit_logprob(c, lambda _: 0.001)


@corruption
def logprob_missing(c: Damaged) -> Place:
    row = c.query()
    values = c.rows(SIDECARS)[row]["assistant_prefix_old_log_probs"]
    c.edit(SIDECARS, row, assistant_prefix_old_log_probs=values[:-1])
    return named(SIDECARS, row, "assistant_prefix_old_log_probs")


@corruption
def wrong_prompt_hash(c: Damaged) -> Place:
    row = c.query()
    c.edit(SIDECARS, row, prompt_sha256="0" * 64)
    return named(SIDECARS, row, "prompt_sha256")


@corruption
def wrong_prompt_length(c: Damaged) -> Place:
    row = c.query()
    c.edit(SIDECARS, row, prompt_tokens=c.rows(SIDECARS)[row]["prompt_tokens"] + 1)
    return named(SIDECARS, row, "prompt_tokens")


@corruption
def sidecar_of_another_tokenizer(c: Damaged) -> Place:
    c.edit(SIDECARS, 2, tokenizer="0" * 64)
    return named(SIDECARS, 2, "tokenizer")


@corruption
def sidecar_of_another_model_file(c: Damaged) -> Place:
    c.edit(SIDECARS, 2, model_sha256="0" * 64)
    return named(SIDECARS, 2, "model_sha256")


@corruption
def sidecar_at_another_temperature(c: Damaged) -> Place:
    c.edit(SIDECARS, 2, temperature=0.7)
    return named(SIDECARS, 2, "temperature")


@corruption
def sidecar_of_another_number_format(c: Damaged) -> Place:
    c.edit(SIDECARS, 2, dtype="bfloat16")
    return named(SIDECARS, 2, "dtype")


# ------------------------------------------------------------------ the tests
def found_by(check: Callable[[], Report]) -> list[CorpusError]:
    try:
        return check().faults
    except CorpusError as error:  # a manifest that cannot be read
        return [error]


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_damaged_corpus_is_refused_and_the_place_is_named(name: str, damaged: Damaged) -> None:
    place = CORRUPTIONS[name](damaged)
    faults = found_by(damaged.check)
    assert faults
    assert (faults[0].file, faults[0].row, faults[0].field) == place, str(faults[0])
    for part in (place[0], place[2], "" if place[1] is None else f"row {place[1]}"):
        assert part in str(faults[0])


@pytest.mark.parametrize("every", [False, True])
def test_a_valid_corpus_passes(tiny_corpus: Path, every: bool) -> None:
    seen: list[tuple[int, int]] = []
    corpus = Corpus.open(tiny_corpus)
    report = validate(corpus, every=every, progress=lambda done, total: seen.append((done, total)))
    assert report.ok, report.faults
    assert not report.notes
    rows = {
        kind: sum(e.rows for name, e in corpus.manifest.files.items() if name.startswith(kind))
        for kind in ("trajectories", "queries", "sidecars")
    }
    assert {kind: report.checked[kind] for kind in rows} == rows
    assert report.checked["trajectories replayed"] == rows["trajectories"]
    assert report.checked["queries restored"] == rows["queries"]
    assert 0 < report.deviations["compact/tiny"] < 1e-5
    assert seen == [(i + 1, rows["trajectories"]) for i in range(rows["trajectories"])]


def test_only_a_sample_is_replayed_and_scored(damaged: Damaged) -> None:
    edit_logprob(damaged, lambda value: value - 0.01)
    report = damaged.check(sample=0)
    assert report.ok
    assert not report.checked["trajectories replayed"] + report.checked["cuts replayed"]
    assert [damaged.check(sample=1, seed=seed).ok for seed in range(12)].count(False) in range(1, 8)
    assert not damaged.check(every=True, sample=0).ok


def test_without_models_tokens_are_taken_as_they_are(damaged: Damaged) -> None:
    edit_logprob(damaged, lambda value: value - 0.01)
    report = damaged.check(without_models=True)
    assert report.ok
    assert "models were left out" in report.notes[0]
    mask_value_of_two(damaged)
    assert not damaged.check(without_models=True).ok


def test_candidates_that_were_dropped_are_counted_if_all_are_replayed(damaged: Damaged) -> None:
    manifest = damaged.manifest
    i = index_of(manifest, "statuses", split="train", strategy="all", family="all")
    manifest["statuses"][i]["unverifiable"] += 1
    damaged.write_manifest(manifest)
    damaged.render_card()
    assert damaged.check().ok
    [fault] = damaged.check(every=True).faults
    assert (fault.file, fault.field) == (MANIFEST, f"statuses.{i}.unverifiable")


def test_repeats_are_counted_if_all_are_taught_again(damaged: Damaged) -> None:
    manifest = damaged.manifest
    i = index_of(manifest, "taught", split="train", family="all")
    manifest["taught"][i]["repeated"] += 1
    damaged.write_manifest(manifest)
    damaged.render_card()
    assert damaged.check().ok
    [fault] = damaged.check(every=True).faults
    assert (fault.file, fault.field) == (MANIFEST, f"taught.{i}.repeated")
    assert damaged.check(every=True, without_teacher=True).ok


def save_model(folder: Path, *, template: str | None = None, **changes: Any) -> Path:
    from tiny import make_model, make_tokenizer

    settings = {"num_hidden_layers": 1, "max_position_embeddings": 8192, **changes}
    make_model(**settings).save_pretrained(folder)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    return folder


def test_the_model_at_hand_must_be_the_one_of_the_corpus(
    tiny_corpus: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    corpus = Corpus.open(tiny_corpus)
    moved = shutil.copytree(tiny_checkpoint, tmp_path / "moved")
    assert validate(corpus, models={"compact/tiny": moved}).ok
    other = save_model(tmp_path / "other", seed=1)
    [fault] = validate(corpus, models={"tiny": other}).faults
    assert (fault.file, fault.field) == (MANIFEST, "models.compact/tiny.model_sha256")
    assert "--model compact/tiny=FOLDER" in fault.what


def test_the_tokenizer_at_hand_must_be_the_one_of_the_corpus(
    tiny_corpus: Path, tmp_path: Path
) -> None:
    from tiny import CHATML

    other = save_model(tmp_path / "other", template=CHATML.replace("assistant\n", "assistant\n\n"))
    [fault] = validate(Corpus.open(tiny_corpus), models={"tiny": other}).faults
    assert (fault.file, fault.field) == (MANIFEST, "models.compact/tiny.tokenizer")


def test_a_model_that_is_not_there_is_a_fault_with_a_remedy(
    tiny_corpus: Path, tmp_path: Path
) -> None:
    corpus = Corpus.open(tiny_corpus)
    [fault] = validate(corpus, models={"tiny": tmp_path / "nowhere"}).faults
    assert (fault.file, fault.field) == (MANIFEST, "models.compact/tiny")
    assert "--model compact/tiny=FOLDER" in fault.what
    with pytest.raises(ConfigurationError, match="no model 'large'"):
        validate(corpus, models={"large": tmp_path})


def test_faults_are_collected_up_to_a_limit(damaged: Damaged) -> None:
    rows = damaged.rows(QUERIES)
    for row in rows:
        row["seed"] += 1
    damaged.write(QUERIES, rows)
    report = damaged.check(limit=3)
    assert [(f.row, f.field) for f in report.faults] == [(0, "seed"), (1, "seed"), (2, "seed")]
    assert report.notes[-1] == "the check stopped after 3 faults"
    assert len(damaged.check(limit=100).faults) == len(rows)


# ------------------------------------------------------------------ faults of what checks
@pytest.mark.parametrize(
    ("after", "field"),
    [
        (lambda _, found: ("Got lost", found[1]), "observation"),
        (lambda env, found: (env._begin(env.task_id, {}), found)[1], "next_observation"),
        (lambda env, found: env.reset(options={"speed": 2}), "prefix_actions"),
    ],
)
def test_an_environment_that_does_not_restore_a_cut_is_noticed(
    tiny_corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    after: Callable[[Any, Any], Any],
    field: str,
) -> None:
    replay = TextEnv._replay
    monkeypatch.setattr(TextEnv, "_replay", lambda env, prefix: after(env, replay(env, prefix)))
    fault = validate(Corpus.open(tiny_corpus)).faults[0]
    assert fault.file.startswith("queries/")
    assert fault.field == field


def test_a_tokenizer_that_cannot_read_its_own_text_is_noticed(
    tiny_corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = ChatSerializer.decode
    monkeypatch.setattr(ChatSerializer, "decode", lambda own, ids: decode(own, ids).upper())
    fault = validate(Corpus.open(tiny_corpus)).faults[0]
    assert fault.file.startswith("sidecars/")
    assert fault.field == "prefix_mask"


# ------------------------------------------------------------------ another teacher
class Stumbler:
    """Solves tasks, but its first replies hold no action, and some samples only look around."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.inner = OraclePolicy()

    def describe(self) -> dict[str, Any]:
        return {}

    def open(self, episodes: Any) -> Any:
        inner = self.inner.open(episodes)
        said: Counter[tuple[str, int]] = Counter()

        class Session:
            def reply(self, episodes: Any) -> list[Any]:
                return [self.one(episode) for episode in episodes]

            def one(self, episode: Any) -> Any:
                key = episode.task_id, episode.sample
                said[key] += 1
                if episode.sample == 1:
                    return Reply("[[ inventory ]]")
                if said[key] <= 2 - episode.sample:
                    return Reply("[[ get 1 moon ]] or [[ inventory ]]?" if said[key] > 1 else "Hm.")
                return inner.reply([episode])[0]

            def close(self) -> None:
                pass

        return Session()


@pytest.fixture(scope="module")
def stumbling_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of a teacher behind an endpoint: turns without an action, and failures."""
    fields = {
        "name": "stumbling",
        "licence": "MIT",
        "env_id": "TextCraft-v0",
        "tasks": 2,
        "teacher": {
            "kind": "openai",
            "base_url": "http://127.0.0.1:9",
            "model": "someone/stumbler",
            "per_task": 2,
            "attempts": 4,
        },
        "dialogues": ["full", "compact"],
        "strategies": {"every": {"kind": "every_turn"}},
    }
    folder = tmp_path_factory.mktemp("corpora") / "stumbling"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openai, "OpenAIPolicy", Stumbler)
        build(make_recipe(fields), folder)
    return folder


@pytest.fixture
def stumbling(stumbling_corpus: Path, tmp_path: Path) -> Damaged:
    shutil.copytree(stumbling_corpus, tmp_path / "copy")
    return Damaged(tmp_path / "copy")


FAILURES = "failures/train.parquet"


def test_turns_without_an_action_two_dialogues_and_failures_pass(stumbling: Damaged) -> None:
    rows = stumbling.rows(TRAJECTORIES)
    assert [turn["problem"] for turn in rows[0]["turns"][:2]] == ["no_action", "multiple_actions"]
    queries = stumbling.rows(QUERIES)
    assert {q["dialogue"] for q in queries} == {"full@1", "compact@1"}
    assert any(action == "" for q in queries for action in q["prefix_actions"])
    report = stumbling.check(every=True)
    assert report.ok, report.faults
    assert report.checked["failures"] == len(stumbling.rows(FAILURES)) == 2
    assert report.checked["queries"] == len(queries)


def test_an_empty_turn_cannot_be_trainable(stumbling: Damaged) -> None:
    rows = stumbling.rows(TRAJECTORIES)
    rows[0]["turns"][0]["trainable"] = True
    stumbling.write(TRAJECTORIES, rows)
    fault = stumbling.check().faults[0]
    assert (fault.file, fault.row, fault.field) == (TRAJECTORIES, 0, "turns.0.trainable")


def test_a_failure_called_solved_is_refused(stumbling: Damaged) -> None:
    stumbling.edit(FAILURES, 1, success=True)
    fault = stumbling.check().faults[0]
    assert (fault.file, fault.row, fault.field) == (FAILURES, 1, "success")


def test_a_failure_that_replays_otherwise_is_refused(stumbling: Damaged) -> None:
    rows = stumbling.rows(FAILURES)
    rows[1]["turns"][-1]["observation"] = "Inventory: [moon] (1)"
    stumbling.write(FAILURES, rows)
    fault = stumbling.check().faults[0]
    field = f"turns.{len(rows[1]['turns']) - 1}.observation"
    assert (fault.file, fault.row, fault.field) == (FAILURES, 1, field)


def test_queries_of_two_dialogues_may_not_be_mixed_up(stumbling: Damaged) -> None:
    queries = stumbling.rows(QUERIES)
    row = next(i for i, q in enumerate(queries) if q["dialogue"] == "compact@1")
    stumbling.edit(QUERIES, row, dialogue="full@1")
    assert (QUERIES, row) in [(f.file, f.row) for f in stumbling.check().faults]


# ------------------------------------------------------------------ the command
def invoke(*arguments: object) -> Any:
    app = typer.Typer()
    app.command()(validate_command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_prints_what_was_checked(tiny_corpus: Path) -> None:
    result = invoke(tiny_corpus, "--all", "--no-progress")
    assert result.exit_code == 0, result.output
    n = len(pq.read_table(tiny_corpus / QUERIES)) + len(
        pq.read_table(tiny_corpus / QUERIES.replace("train", "held_out"))
    )
    assert f"{n} queries\n" in result.output
    assert result.output.endswith("no fault\n")


def test_the_command_prints_a_line_a_fault_and_fails(damaged: Damaged) -> None:
    damaged.edit(QUERIES, 2, seed=1)
    damaged.edit(SIDECARS, 0, temperature=2.0)
    result = invoke(damaged.folder, "--no-progress", "--sample", 0)
    assert result.exit_code == 1
    lines = [line for line in result.output.splitlines() if line.startswith("fault:")]
    assert lines[0].startswith(f"fault: {QUERIES}, row 2, field seed: ")
    assert lines[1].startswith(f"fault: {SIDECARS}, row 0, field temperature: ")
    assert result.output.endswith("2 faults\n")


def test_the_command_names_a_field_of_a_broken_manifest(damaged: Damaged) -> None:
    missing_licence(damaged)
    result = invoke(damaged.folder, "--no-progress")
    assert result.exit_code == 1
    assert "fault: manifest.json, field licence: " in result.output


def test_the_command_takes_models(damaged: Damaged, tiny_checkpoint: Path) -> None:
    named = f"tiny={tiny_checkpoint}"
    assert invoke(damaged.folder, "--no-progress", "--model", named).exit_code == 0
    refused = invoke(damaged.folder, "--no-progress", "--model", tiny_checkpoint)
    assert isinstance(refused.exception, ConfigurationError)
    assert "NAME=FOLDER" in str(refused.exception)


def test_the_command_is_light_to_import() -> None:
    heavy = ("torch", "transformers", "pyarrow", "datasets")
    code = (
        "import sys, agentbench_prefix.corpora.validate\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
