"""Building corpora: the same every time, resumable, refused where it cannot be right."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml
from killed_builds import tree

from agentbench_prefix import make
from agentbench_prefix.corpora import build as module
from agentbench_prefix.corpora.build import build
from agentbench_prefix.corpora.reading import Corpus
from agentbench_prefix.corpora.recipe import make_recipe
from agentbench_prefix.corpora.schema import features
from agentbench_prefix.corpora.storage import read_rows
from agentbench_prefix.errors import ConfigurationError, CorpusError, UnknownNameError
from agentbench_prefix.files import sha256_file, write_json_atomic
from agentbench_prefix.replay import Recording, check_cuts

HERE = Path(__file__).parent
PLAIN = {
    "name": "small",
    "licence": "Apache-2.0",
    "env_id": "TextCraft-v0",
    "tasks": 2,
    "splits": {"train": "train", "held_out": "test"},
    "teacher": {"kind": "oracle", "per_task": 2},
    "dialogues": ["compact"],
    "strategies": {
        "ratio": {"kind": "fixed_ratio", "ratios": [0.3, 0.6]},
        "random": {"kind": "random", "k": 2},
    },
}
"""Needs no model."""
SCORED = {
    **PLAIN,
    # Attempts of 9 turns at most, half of them detours: some fail.
    "arguments": {"max_turns": 9},
    "teacher": {"kind": "oracle", "per_task": 2, "attempts": 6, "detours": 0.5},
    "strategies": {**PLAIN["strategies"], "change": {"kind": "entropy_change", "w": 5, "k": 2}},
    "tasks": 3,
}


@pytest.fixture(autouse=True)
def settled(monkeypatch):
    """Parts of one task; no trace of what else is going on in the checkout."""
    monkeypatch.setattr(module, "PART", 1)
    monkeypatch.setattr(module, "code_version", lambda: "tested")


@pytest.fixture(scope="session")
def scored_recipe(tiny_checkpoint):
    return make_recipe(
        {**SCORED, "models": [{"dialogue": "compact", "model": str(tiny_checkpoint)}]}
    )


@pytest.fixture(scope="session")
def scored(scored_recipe, tmp_path_factory):
    """A corpus with sidecars and failures; not to be changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PART", 1)
        patch.setattr(module, "code_version", lambda: "tested")
        return build(scored_recipe, tmp_path_factory.mktemp("scored") / "corpus")


def plain(**changes):
    return make_recipe({**PLAIN, **changes})


def rows(corpus, kind, split="train"):
    name = f"{kind}/{split}.parquet"
    return list(read_rows(corpus.folder / name, kind.partition("/")[0]))


# ------------------------------------------------------------------ the same every time
def test_two_builds_are_the_same(scored, scored_recipe, tmp_path):
    again = build(scored_recipe, tmp_path / "again")
    assert tree(again.folder) == tree(scored.folder)
    assert [path.name for path in tmp_path.iterdir()] == ["again"]


def test_the_size_of_the_parts_changes_no_row(scored, scored_recipe, tmp_path, monkeypatch):
    """Which conversations are scored together moves log-probabilities by rounding alone."""
    monkeypatch.setattr(module, "PART", 16)
    other = build(scored_recipe, tmp_path / "other")
    mine, theirs = tree(scored.folder), tree(other.folder)
    for name in mine:
        if name.startswith(("trajectories/", "failures/")):
            assert mine[name] == theirs[name]
    for split in scored.splits:
        kind = f"sidecars/compact/{next(iter(scored.manifest.models)).partition('/')[2]}"
        pairs = zip(rows(scored, kind, split), rows(other, kind, split), strict=True)
        for one, two in pairs:
            assert one.model_copy(update={"assistant_prefix_old_log_probs": []}) == two.model_copy(
                update={"assistant_prefix_old_log_probs": []}
            )
            assert one.assistant_prefix_old_log_probs == pytest.approx(
                two.assistant_prefix_old_log_probs, abs=1e-4
            )


def test_workers_change_nothing(scored, scored_recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PART", 2)
    one = build(scored_recipe, tmp_path / "one", workers=1)
    two = build(scored_recipe, tmp_path / "two", workers=2)
    assert tree(two.folder) == tree(one.folder)


def test_given_trajectories_equal_teaching(scored, scored_recipe, tmp_path):
    fields = scored_recipe.model_dump(mode="json")
    bare = {**fields, "dialogues": [], "strategies": {}, "models": [], "name": "taught"}
    taught = build(make_recipe(bare), tmp_path / "taught")
    assert set(taught.manifest.files) == {
        name for name in scored.manifest.files if not name.startswith(("queries", "sidecars"))
    }
    given = build(scored_recipe, tmp_path / "given", trajectories=taught)
    assert tree(given.folder) == tree(scored.folder)


def test_some_of_the_given_trajectories(tmp_path):
    whole = build(plain(tasks=3), tmp_path / "whole")
    some = build(plain(tasks=2), tmp_path / "some", trajectories=whole)
    fresh = build(plain(tasks=2), tmp_path / "fresh")
    assert tree(some.folder).keys() == tree(fresh.folder).keys()
    for name, content in tree(some.folder).items():
        if name.endswith(".parquet"):
            assert content == tree(fresh.folder)[name]
    assert some.manifest.statuses == fresh.manifest.statuses


# ------------------------------------------------------------------ what is in it
def test_queries_are_what_they_say(scored):
    trajectories = {
        t.trajectory_id: t for split in scored.splits for t in scored.trajectories(split)
    }
    env = make("TextCraft-v0", max_turns=9)
    for split in scored.splits:
        ids = []
        for query in scored.queries(split):
            row, k = trajectories[query.trajectory_id], query.prefix_turns
            ids.append(query.query_id)
            assert query.query_id == f"{row.trajectory_id}/compact/{k}"
            assert query.dialogue == row.conversation("compact").dialogue == "compact@1"
            assert (query.status, query.n_turns) == ("validated", row.n_turns)
            assert bool(query.cuts) == bool(k)
            assert [m.role for m in query.messages] == ["user", "assistant"] * k + ["user"]
            assert query.messages == row.conversation("compact").messages[: 2 * k + 1]
            assert query.messages[-1].content == query.observation == row.observations()[k]
            assert query.prefix_actions == [turn.action for turn in row.turns[:k]]
            assert query.trainable == [turn.trainable for turn in row.turns[:k]]
            observation, info = env.reset(seed=query.seed, options=query.reset_options())
            assert (observation, info["turn"]) == (query.observation, k)
            assert env.step(query.next_action)[0] == query.next_observation
            names = {cut.strategy for cut in query.cuts}
            assert names <= {"ratio", "random", "change"}
            assert all((cut.strategy == "change") == bool(cut.model) for cut in query.cuts)
        assert len(set(ids)) == len(ids)
        raw = [query for query in scored.queries(split) if not query.prefix_turns]
        assert len(raw) == scored.manifest.files[f"trajectories/{split}.parquet"].rows


def test_counts_are_those_of_the_rows(scored):
    manifest = scored.manifest
    for split in scored.splits:
        queries = rows(scored, "queries", split)
        entries = [e for e in manifest.statuses if e.split == split and e.family == "all"]
        counted = {e.strategy: e for e in entries}
        kept = Counter()
        for query in queries:
            names = {cut.strategy for cut in query.cuts} | {"all"} if query.cuts else {"raw"}
            kept.update(names)
        assert kept == {name: e.validated for name, e in counted.items()}
        assert all(e.bytes_equal == e.validated for e in entries)
        for entry in entries:
            parts = [
                e
                for e in manifest.statuses
                if (e.split, e.strategy) == (split, entry.strategy) and e.family != "all"
            ]
            for name in ("validated", "mismatch", "unverifiable", "error", "ended", "bytes_equal"):
                assert sum(getattr(e, name) for e in parts) == getattr(entry, name)
        # A refusal shows no field, so a cut behind one is unverifiable.
        assert counted["all"].unverifiable > 0

        taught = next(e for e in manifest.taught if (e.split, e.family) == (split, "all"))
        played = rows(scored, "trajectories", split)
        turns = [turn for row in played for turn in row.turns]
        assert taught.trajectories == len(played)
        assert taught.tasks == len({row.task_id for row in played})
        assert taught.mean_turns == pytest.approx(len(turns) / len(played), abs=1e-3)
        assert taught.mean_plain_turns == pytest.approx(
            sum(row.plain_turns for row in played) / len(played), abs=1e-3
        )
        mistakes = sum(not turn.trainable for turn in turns)
        assert taught.untrainable_share == pytest.approx(mistakes / len(turns), abs=1e-4)
    failures = {
        split: rows(scored, "failures", split)
        for split in scored.splits
        if f"failures/{split}.parquet" in manifest.files
    }
    assert failures
    for split, failed in failures.items():
        entry = next(e for e in manifest.taught if (e.split, e.family) == (split, "all"))
        assert entry.failures == len(failed) > 0


def test_every_turn_is_a_query_exactly_if_it_is_validated(tmp_path):
    corpus = build(
        plain(
            teacher={"kind": "oracle", "per_task": 2, "detours": 0.4},
            strategies={"every": {"kind": "every_turn"}},
        ),
        tmp_path / "c",
    )
    env = make("TextCraft-v0")
    expected = Counter()
    for row in corpus.trajectories("train"):
        recording = Recording(
            row.task_id, {}, row.seed, [turn.action for turn in row.turns], row.observations()
        )
        for check in check_cuts(env, recording, range(row.n_turns)):
            expected[f"{row.trajectory_id}/compact/{check.turns}"] = check.status
    assert {"validated", "unverifiable"} == set(expected.values())
    queries = [query.query_id for query in corpus.queries("train")]
    assert queries == [name for name, status in expected.items() if status == "validated"]


def test_the_files_are_those_of_the_manifest(scored):
    files = {
        str(path.relative_to(scored.folder))
        for path in scored.folder.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }
    assert files == set(scored.manifest.files)
    for name, entry in scored.manifest.files.items():
        path = scored.folder / name
        assert (sha256_file(path), path.stat().st_size) == (entry.sha256, entry.size)
        if name.endswith(".parquet"):
            assert entry.rows == len(list(read_rows(path, name.partition("/")[0])))
    recipe = yaml.safe_load((scored.folder / "corpus.yaml").read_text())
    assert make_recipe(recipe) == make_recipe(scored.manifest.recipe)


def test_failures_of_one_split_survive_another_without(tmp_path):
    corpus = build(
        plain(
            arguments={"max_turns": 5},
            teacher={"kind": "oracle", "per_task": 2, "attempts": 6, "detours": 0.5, "seed": 2},
            splits={"train": "train", "last": "test"},
            tasks=1,
        ),
        tmp_path / "corpus",
    )
    failures = {e.split: e.failures for e in corpus.manifest.taught if e.family == "all"}
    assert failures == {"train": 2, "last": 0}
    assert [path.name for path in corpus.folder.glob("failures/*")] == ["train.parquet"]
    assert len(rows(corpus, "failures", "train")) == 2
    assert "failures/train.parquet" in corpus.manifest.files
    assert "failures/last.parquet" not in corpus.manifest.files


def test_splits_may_begin_alike(tmp_path):
    apart = build(plain(splits={"a": "train"}), tmp_path / "apart")
    both = build(plain(splits={"a": "train", "a.b": "test"}), tmp_path / "both")
    assert rows(both, "queries", "a") == rows(apart, "queries", "a")
    assert {row.task_id for row in both.trajectories("a.b")} <= set(both.manifest.splits["a.b"])


def test_tasks_out_of_reach_are_listed_and_not_taught(tmp_path):
    corpus = build(plain(arguments={"max_turns": 2}, dialogues=[], strategies={}), tmp_path / "c")
    env = make("TextCraft-v0", max_turns=2)
    for split, source in PLAIN["splits"].items():
        beyond = env.out_of_reach(source, 2)
        assert corpus.manifest.out_of_reach[split] == list(beyond)
        assert beyond
        assert not set(beyond) & set(corpus.manifest.splits[split])
        taught = {row.task_id for row in corpus.trajectories(split)}
        assert taught <= set(corpus.manifest.splits[split])
        assert len(corpus.manifest.splits[split]) == 2


# ------------------------------------------------------------------ where it cannot be right
def test_a_finished_corpus_is_left_alone(tmp_path):
    corpus = build(plain(), tmp_path / "c")
    before = {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in corpus.folder.rglob("*")}
    assert build(plain(), tmp_path / "c") == corpus
    assert before == {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in corpus.folder.rglob("*")}


@pytest.mark.parametrize(
    "changes",
    [{"tasks": 1}, {"version": "2.0"}, {"teacher": {"kind": "oracle", "per_task": 2, "seed": 1}}],
)
def test_another_corpus_in_the_way_is_refused(tmp_path, changes):
    corpus = build(plain(), tmp_path / "c")
    before = tree(corpus.folder)
    with pytest.raises(ConfigurationError, match=r"another recipe.*choose another folder"):
        build(plain(**changes), tmp_path / "c")
    assert tree(corpus.folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_another_model_is_refused(scored, scored_recipe, tiny_checkpoint, tmp_path):
    """The recipe names the model's folder; what lies there is compared."""
    from tiny import make_model

    shutil.copytree(scored.folder, tmp_path / "c")
    assert build(scored_recipe, tmp_path / "c").manifest == scored.manifest
    moved = tmp_path / "tiny"
    shutil.copytree(tiny_checkpoint, moved)
    recipe = make_recipe({**SCORED, "models": [{"dialogue": "compact", "model": str(moved)}]})
    manifest = json.loads((tmp_path / "c/manifest.json").read_text())
    manifest["recipe"] = recipe.model_dump(mode="json")
    write_json_atomic(tmp_path / "c/manifest.json", manifest)
    build(recipe, tmp_path / "c")
    make_model(seed=1, num_hidden_layers=2, max_position_embeddings=8192).save_pretrained(moved)
    with pytest.raises(ConfigurationError, match="another recipe, model or data"):
        build(recipe, tmp_path / "c")


def test_what_is_no_corpus_is_never_touched(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c/thesis.txt").write_text("years of work")
    with pytest.raises(ConfigurationError, match="holds no corpus"):
        build(plain(), tmp_path / "c")
    (tmp_path / ".d.partial").mkdir()
    (tmp_path / ".d.partial/thesis.txt").write_text("years of work")
    with pytest.raises(ConfigurationError, match=r"\.d\.partial is in the way, and 'thesis\.txt'"):
        build(plain(), tmp_path / "d")
    shutil.copytree(tmp_path / ".d.partial", tmp_path / ".e.partial")
    build(plain(), tmp_path / "f").folder.rename(tmp_path / "e")
    build(plain(), tmp_path / "e")
    for folder in ("c", ".d.partial", ".e.partial"):
        assert (tmp_path / folder / "thesis.txt").read_text() == "years of work"


def test_a_task_in_two_splits_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"task 'textcraft_\d+'.*'train' and 'again'"):
        build(plain(splits={"train": "train", "again": "train"}), tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"splits": {"train": "nowhere"}}, "'nowhere'"),
        ({"dialogues": ["sung"]}, "'sung'"),
        ({"dialogues": ["compact@1"]}, "'compact@1'"),
        ({"env_id": "TextCraft-v9"}, "TextCraft-v9"),
    ],
)
def test_names_that_do_not_exist(tmp_path, changes, named):
    with pytest.raises(UnknownNameError, match=named):
        build(plain(**changes), tmp_path / "c")
    assert not any(tmp_path.iterdir())


def given(tmp_path, change):
    """A corpus of trajectories, spoilt, and an attempt to build on it."""
    taught = build(plain(dialogues=[], strategies={}), tmp_path / "taught")
    manifest = json.loads((taught.folder / "manifest.json").read_text())
    change(taught.folder, manifest)
    write_json_atomic(taught.folder / "manifest.json", manifest)
    return build(plain(), tmp_path / "out", trajectories=Corpus.open(taught.folder))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("env_id", "TextCraft-v1"),
        ("data_hash", "0" * 64),
        ("arguments", {"max_turns": 5}),
    ],
)
def test_trajectories_of_another_environment_are_refused(tmp_path, name, value):
    with pytest.raises(CorpusError, match=f"field {name}: the trajectories were played with"):
        given(tmp_path, lambda _, manifest: manifest.update({name: value}))
    assert not (tmp_path / "out").exists()


def test_trajectories_of_another_teacher_are_refused(tmp_path):
    with pytest.raises(CorpusError, match="field teacher"):
        given(tmp_path, lambda _, manifest: manifest["recipe"]["teacher"].update(seed=7))


def test_trajectories_of_other_splits_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="has no split 'held_out', only train"):
        given(tmp_path, lambda _, manifest: manifest["splits"].pop("held_out"))


def test_changed_trajectories_are_refused(tmp_path):
    def change(folder, _):
        path = folder / "trajectories/held_out.parquet"
        path.write_bytes(path.read_bytes()[:-1] + b"!")

    with pytest.raises(CorpusError, match=r"trajectories/held_out\.parquet: .*not the file"):
        given(tmp_path, change)


def test_trajectories_out_of_order_are_refused(tmp_path):
    def change(folder, manifest):
        from agentbench_prefix.corpora.storage import RowWriter

        name = "trajectories/train.parquet"
        found = list(read_rows(folder / name, "trajectories"))
        with RowWriter(folder / name, "trajectories") as writer:
            for row in reversed(found):
                writer.write(row)
        manifest["files"][name]["sha256"] = sha256_file(folder / name)

    with pytest.raises(CorpusError, match=r"train\.parquet, field task_id: .*out of order"):
        given(tmp_path, change)
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------ killed and resumed
class Killed(BaseException):
    pass


def test_a_changed_recipe_uses_no_stale_part(tmp_path):
    def kill(done, total):
        if done == 3:
            raise Killed

    with pytest.raises(Killed):
        build(plain(), tmp_path / "c", progress=kill)
    assert not (tmp_path / "c").exists()
    assert len(list((tmp_path / ".c.partial/parts").glob("*.json"))) == 3
    changed = {"teacher": {"kind": "oracle", "per_task": 2, "seed": 9}}
    parts = tmp_path / ".c.partial/parts"
    before = {path: path.read_bytes() for path in parts.rglob("*") if path.is_file()}
    with pytest.raises(ConfigurationError, match=r"3 finished parts.*seed is 0 there, 9 in this"):
        build(plain(**changed), tmp_path / "c")
    assert {path: path.read_bytes() for path in parts.rglob("*") if path.is_file()} == before
    resumed = build(plain(**changed), tmp_path / "c", discard=True)
    assert tree(resumed.folder) == tree(build(plain(**changed), tmp_path / "fresh").folder)
    assert {path.name for path in tmp_path.iterdir()} == {"c", "fresh"}


def test_finished_parts_are_not_done_again(tmp_path, monkeypatch):
    seen = []

    def kill(done, total):
        seen.append((done, total))
        if done == 3:
            raise Killed

    with pytest.raises(Killed):
        build(plain(), tmp_path / "c", progress=kill)
    assert seen == [(0, 4), (1, 4), (2, 4), (3, 4)]
    taught = []
    teach = module.teach_oracle
    monkeypatch.setattr(
        module, "teach_oracle", lambda env, t, task: [taught.append(task), teach(env, t, task)][1]
    )
    corpus = build(plain(), tmp_path / "c")
    assert taught == [corpus.manifest.splits["held_out"][1]]
    assert not (tmp_path / ".c.partial").exists()


def swept(tmp_path, first, step):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({**PLAIN, "tasks": 1}, sort_keys=False))
    command = [sys.executable, HERE / "killed_builds.py", recipe, tmp_path, str(first), str(step)]
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_sweep(results):
    for result in results:
        assert result["absent until complete"], result
        assert result["goes on"], result
        assert result["same"], result
        assert result["left"] == [], result
    assert [result["killed"] for result in results] == [True] * (len(results) - 1) + [False]
    assert results[-1]["status"] == 0


def test_killed_at_some_file_operations(tmp_path):
    results = swept(tmp_path, 5, 20)
    check_sweep(results)
    assert len(results) > 3


@pytest.mark.long
@pytest.mark.timeout(900)
def test_killed_at_every_file_operation(tmp_path):
    results = swept(tmp_path, 1, 1)
    check_sweep(results)
    assert len(results) > 50


SLOWED = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from killed_builds import same_everywhere
same_everywhere()
from agentbench_prefix.cli import main
main(sys.argv[1:])
"""


def launch(recipe, out, *more):
    """The command in a process of its own."""
    command = ["corpus", "build", str(recipe), "--out", str(out), "--no-progress", *more]
    return subprocess.Popen(
        [sys.executable, "-c", SLOWED, str(HERE), *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def wait_for(process, folder, pattern, count):
    """Wait until so many files are there, or the process is through."""
    while process.poll() is None and len(list(folder.glob(pattern))) < count:
        time.sleep(0.002)


def finish(process):
    _, errors = process.communicate()
    assert process.returncode == 0, errors


def test_a_command_that_is_killed_and_given_again(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(PLAIN, sort_keys=False))
    out = tmp_path / "b" / "corpus"
    process = launch(recipe, out, "--workers", "1")
    wait_for(process, tmp_path, "b/.corpus.partial/parts/*.json", 2)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not out.exists()
    finish(launch(recipe, out, "--workers", "1"))
    assert tree(out) == tree(build(plain(), tmp_path / "whole").folder)
    assert [path.name for path in out.parent.iterdir()] == ["corpus"]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("moment", range(6))
def test_killed_at_a_random_moment_with_a_model_and_workers(
    scored_recipe, scored, tmp_path, moment
):
    rng = random.Random(moment)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(scored_recipe.model_dump(mode="json"), sort_keys=False))
    out = tmp_path / "b" / "corpus"
    for least in (rng.randrange(3), rng.randrange(3, 7)):
        process = launch(recipe, out, "--workers", "2")
        wait_for(process, tmp_path, "b/.corpus.partial/parts/*.json", least)
        time.sleep(rng.uniform(0, 0.3))
        # The whole group, as when a machine goes down: workers, too.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if process.returncode == -signal.SIGKILL:
            assert not out.exists() or tree(out) == tree(scored.folder)
    finish(launch(recipe, out, "--workers", "2"))
    assert tree(out) == tree(scored.folder)
    assert [path.name for path in out.parent.iterdir()] == ["corpus"]


# ------------------------------------------------------------------ as a dataset
def test_the_folder_is_a_dataset(scored, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    label = next(iter(scored.manifest.models)).replace("/", "-")
    kinds = {"queries": "queries", "trajectories": "trajectories", f"sidecars-{label}": "sidecars"}
    for name, kind in kinds.items():
        loaded = datasets.load_dataset(str(scored.folder), name, cache_dir=str(tmp_path / "cache"))
        assert set(loaded) == set(scored.splits)
        for split in scored.splits:
            path = name.replace("-", "/", 2) if kind == "sidecars" else name
            entry = scored.manifest.files[f"{path}/{split}.parquet"]
            assert loaded[split].num_rows == entry.rows > 0
            assert loaded[split].features == features(kind)
    first = datasets.load_dataset(
        str(scored.folder), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert first.features == features("queries")
    assert first[0]["query_id"] == next(iter(scored.queries("train"))).query_id
