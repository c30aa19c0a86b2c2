"""Build a corpus: teach, score, cut, replay, write; resumable, in constant memory.

The work is done in parts of :data:`PART` tasks, each written whole to a folder beside the corpus.
A broken build goes on behind its last part; the corpus' own folder appears at the end, complete.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import multiprocessing
import operator
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from agentbench_prefix.cards import code_version
from agentbench_prefix.corpora.card import render
from agentbench_prefix.corpora.cuts import Trace
from agentbench_prefix.corpora.reading import CARD, MANIFEST, RECIPE, Corpus
from agentbench_prefix.corpora.recipe import CorpusRecipe, OpenAITeacher
from agentbench_prefix.corpora.schema import (
    FORMAT,
    Cut,
    FileEntry,
    Manifest,
    QueryRow,
    StatusCount,
    TeachCount,
    TrajectoryRow,
)
from agentbench_prefix.corpora.scoring import ScoredConversation, Scorer, load_scorer
from agentbench_prefix.corpora.sidecars import trace
from agentbench_prefix.corpora.storage import RowWriter, read_rows
from agentbench_prefix.corpora.tally import StatusTally, TeachTally
from agentbench_prefix.corpora.teach import Lesson, teach_oracle, teach_policy
from agentbench_prefix.env import TextEnv
from agentbench_prefix.errors import ConfigurationError, CorpusError, UnknownNameError
from agentbench_prefix.evaluation.runner import differences
from agentbench_prefix.files import (
    canonical_json,
    sha256_file,
    write_json_atomic,
    write_text_atomic,
)
from agentbench_prefix.registry import make
from agentbench_prefix.replay import CutCheck, Recording, check_cuts

PART = 16
"""Tasks of a part."""

Progress = Callable[[int, int], None]
"""Called with the tasks that are done and all tasks."""


class _Candidate(NamedTuple):
    """Cuts of one trajectory in one dialogue, before replay.

    Attributes:
        row: The trajectory.
        dialogue: Name of the dialogue.
        cuts: What chose each cut, by turns before it.
        scored: The trajectory as each model of the dialogue sees it.
    """

    row: TrajectoryRow
    dialogue: str
    cuts: dict[int, list[Cut]]
    scored: list[tuple[Scorer, ScoredConversation]]


def build(
    recipe: CorpusRecipe,
    out: Path,
    *,
    trajectories: Corpus | None = None,
    workers: int = 1,
    discard: bool = False,
    progress: Progress | None = None,
) -> Corpus:
    """Build a corpus; the same call resumes a broken build, and leaves a finished one alone.

    Args:
        recipe: What to build.
        out: Folder of the corpus; it appears when the corpus is complete.
        trajectories: Take the trajectories from this corpus instead of teaching.
        workers: Processes that replay; 1 replays in this one.
        discard: Remove what a broken build of another recipe left at the same place.
        progress: Reports tasks.

    Raises:
        ConfigurationError: ``out`` holds something else or a broken build of another recipe, or
            the recipe does not fit.
        CorpusError: ``trajectories`` is damaged or of another environment.
    """
    env = make(recipe.env_id, **recipe.arguments)
    for split in recipe.splits.values():
        env.tasks(split)
    for name in recipe.dialogues:
        if name not in env.dialogues():  # a label, too: names are part of ids and paths
            raise UnknownNameError("dialogue", name, env.dialogues())
    if trajectories is not None:
        _check_source(trajectories, recipe, env)
    scorers = [load_scorer(scoring, recipe.env_id) for scoring in recipe.models]
    identity = {
        "format": FORMAT,
        "recipe": recipe.model_dump(mode="json"),
        "data_hash": env.data_hash,
        "dialogues": {d.label: d.fingerprint() for d in env.dialogues().values()},
        "models": [scorer.entry.model_dump() for scorer in scorers],
        "trajectories": None
        if trajectories is None
        else {k: v.sha256 for k, v in trajectories.manifest.files.items() if "/" in k},
    }
    partial = out.with_name(f".{out.name}.partial")
    if out.exists():
        corpus = _existing(out, recipe, env, scorers)
        _clear(partial, identity)
        return corpus
    _claim(partial, identity, discard=discard)
    tasks = {
        split: _teachable(env, source, recipe.tasks) for split, source in recipe.splits.items()
    }
    owner: dict[str, str] = {}
    for split, ids in tasks.items():
        for task_id in ids:
            if owner.setdefault(task_id, split) != split:
                raise ConfigurationError(
                    f"task {task_id!r} would be in the splits {owner[task_id]!r} and {split!r}: "
                    "name splits of the environment that share no task"
                )
    total, done = sum(map(len, tasks.values())), 0
    with _pool(workers) as pool, _given(trajectories, tasks) as given:
        builder = _Builder(recipe, env, scorers, pool, workers)
        if progress is not None:
            progress(done, total)
        for split, ids in tasks.items():
            for index, begin in enumerate(range(0, len(ids), PART)):
                part = ids[begin : begin + PART]
                marker = _marker(partial, split, index)
                lessons = given(split, part) if trajectories is not None else None
                if not marker.is_file():
                    builder.part(marker, part, lessons)
                done += len(part)
                if progress is not None:
                    progress(done, total)
    _assemble(partial, recipe, env, scorers, tasks, trajectories)
    partial.joinpath("final").rename(out)
    shutil.rmtree(partial)
    return Corpus.open(out)


# ------------------------------------------------------------------ before the work
def _teachable(env: TextEnv, split: str, limit: int | None) -> list[str]:
    beyond = set(env.out_of_reach(split, env.max_turns))
    return [task for task in env.tasks(split) if task not in beyond][:limit]


def _check_source(source: Corpus, recipe: CorpusRecipe, env: TextEnv) -> None:
    for name, theirs, mine in (
        ("env_id", source.manifest.env_id, env.env_id),
        ("data_hash", source.manifest.data_hash, env.data_hash),
        ("arguments", source.manifest.arguments, env.arguments()),
        ("teacher", source.manifest.recipe.get("teacher"), recipe.teacher.model_dump(mode="json")),
    ):
        if theirs != mine:
            raise CorpusError(
                f"the trajectories were played with {name}={theirs!r}, this recipe has {mine!r}: "
                "use trajectories of the same, or say so in the recipe",
                file=MANIFEST,
                field=name,
            )
    for split in recipe.splits:
        if split not in source.splits:
            raise ConfigurationError(
                f"{source.folder} has no split {split!r}, only {', '.join(source.splits)}"
            )
        for name in _rows_of(source, split):
            path = source.folder / name
            if not path.is_file() or sha256_file(path) != source.manifest.files[name].sha256:
                raise CorpusError(
                    f"it is missing or not the file that {MANIFEST} names; build or pull the "
                    "corpus again",
                    file=name,
                )


def _existing(out: Path, recipe: CorpusRecipe, env: TextEnv, scorers: Sequence[Scorer]) -> Corpus:
    """What lies at ``out``, if it is this very corpus."""
    try:
        corpus = Corpus.open(out)
    except CorpusError as error:
        raise ConfigurationError(
            f"{out} exists and holds no corpus: choose another folder with --out, or remove it"
        ) from error
    models = {name: entry.checkpoint_sha256 for name, entry in corpus.manifest.models.items()}
    wanted = {scorer.label: scorer.entry.checkpoint_sha256 for scorer in scorers}
    same = corpus.manifest.data_hash == env.data_hash and models == wanted
    if not same or corpus.manifest.recipe != recipe.model_dump(mode="json"):
        raise ConfigurationError(
            f"{out} holds a corpus of another recipe, model or data: choose another folder with "
            "--out, or remove it"
        )
    return corpus


def _claim(partial: Path, identity: dict[str, Any], *, discard: bool) -> None:
    """Begin a build, or go on with the same one; another one's parts are not removed unasked."""
    begun = _begun(partial)
    if begun == identity:
        return
    if strange := _strange(partial):
        raise ConfigurationError(
            f"{partial} is in the way, and {strange[0]!r} in it is of no broken build: remove it"
        )
    parts = len(list((partial / "parts").glob("*.json")))
    if parts and not discard:
        differs = differences(begun or {}, identity, ("there", "in this one"))
        raise ConfigurationError(
            f"{partial} holds {parts} finished part{'s' if parts > 1 else ''} of a broken build "
            f"that is not this one ({differs[0]}): finish that one with its own "
            "recipe, choose another folder with --out, or throw it away with --discard"
        )
    shutil.rmtree(partial, ignore_errors=True)
    write_json_atomic(partial / _BEGUN, identity)


def _clear(partial: Path, identity: dict[str, Any]) -> None:
    """Remove what a finished build left if it was killed while it cleaned up."""
    if _begun(partial) in (identity, None) and not _strange(partial):
        shutil.rmtree(partial, ignore_errors=True)


_BEGUN = "build.json"


def _begun(partial: Path) -> Any:
    """What identifies the build whose parts are in a folder, ``None`` if it does not say."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((partial / _BEGUN).read_text(encoding="utf-8"))
    return None


def _strange(partial: Path) -> list[str]:
    """Names in a folder that no build writes there."""
    if not partial.is_dir():
        return []
    names = sorted(path.name for path in partial.iterdir())
    ours = (_BEGUN, "parts", "final")
    return [name for name in names if name not in ours and not name.startswith(f".{_BEGUN}.")]


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[Executor | None]:
    if workers <= 1:
        yield None
        return
    # Spawned, not forked: the parent may hold threads of torch.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        yield pool


@contextlib.contextmanager
def _given(
    source: Corpus | None, tasks: Mapping[str, list[str]]
) -> Iterator[Callable[[str, Sequence[str]], list[Lesson]]]:
    """Lessons out of another corpus, read in step with the tasks; other tasks' are passed over."""
    streams: dict[str, Iterator[tuple[str, list[TrajectoryRow]]]] = {}
    ahead: dict[str, tuple[str, list[TrajectoryRow]] | None] = {}
    if source is not None:
        for split, ids in tasks.items():
            for name in _rows_of(source, split):
                streams[name] = _by_task(source, name, frozenset(ids))
                ahead[name] = next(streams[name], None)

    def take(name: str, task_id: str) -> list[TrajectoryRow]:
        found = ahead.get(name)
        if found is None or found[0] != task_id:
            return []
        ahead[name] = next(streams[name], None)
        return found[1]

    yield lambda split, ids: [
        Lesson(
            take(f"trajectories/{split}.parquet", task_id),
            take(f"failures/{split}.parquet", task_id),
            repeated=None,
            unsaid=None,
        )
        for task_id in ids
    ]
    for name, found in ahead.items():
        if found is not None:
            raise CorpusError(
                f"trajectory {found[1][0].trajectory_id!r} is out of order; expected the tasks in "
                "the environment's order, each task's trajectories together",
                file=name,
                field="task_id",
            )


def _rows_of(source: Corpus, split: str) -> list[str]:
    """Files of a split that hold a teacher's play."""
    names = [f"{kind}/{split}.parquet" for kind in ("trajectories", "failures")]
    return [name for name in names if name in source.manifest.files]


def _by_task(
    source: Corpus, name: str, wanted: frozenset[str]
) -> Iterator[tuple[str, list[TrajectoryRow]]]:
    rows = read_rows(source.folder / name, _root(name), name)
    for task_id, found in itertools.groupby(rows, key=operator.attrgetter("task_id")):
        if task_id in wanted:
            yield task_id, list(found)


# ------------------------------------------------------------------ one part
class _Builder:
    """Makes parts."""

    def __init__(
        self,
        recipe: CorpusRecipe,
        env: TextEnv,
        scorers: Sequence[Scorer],
        pool: Executor | None,
        workers: int,
    ) -> None:
        self.recipe = recipe
        self.env = env
        self.scorers = scorers
        self.pool = pool
        self.workers = workers

    def part(self, marker: Path, task_ids: Sequence[str], given: list[Lesson] | None) -> None:
        """Write the files of a part, then its marker, which holds its counts."""
        lessons = self.teach(task_ids) if given is None else given
        rows = [row for lesson in lessons for row in lesson.trajectories]
        failures = [row for lesson in lessons for row in lesson.failures]
        stem = marker.with_suffix("")
        for kind, found in (("trajectories", rows), ("failures", failures)):
            with RowWriter(_part_file(stem, kind), kind) as writer:
                for row in found:
                    writer.write(row)
        tally = StatusTally()
        with contextlib.ExitStack() as stack:
            queries = stack.enter_context(RowWriter(_part_file(stem, "queries"), "queries"))
            sidecars = {
                s.label: stack.enter_context(
                    RowWriter(_part_file(stem, f"sidecars/{s.label}"), "sidecars")
                )
                for s in self.scorers
            }
            for candidate, checks in self.candidates(rows):
                trainable = [turn.trainable for turn in candidate.row.turns]
                for check in checks:
                    query = _query(candidate, check) if check.kept else None
                    chosen_by = {cut.strategy for cut in candidate.cuts[check.turns]}
                    tally.add(
                        candidate.row, candidate.dialogue, check.turns, chosen_by, check.mark, query
                    )
                    if query is None:
                        continue
                    queries.write(query)
                    for scorer, scores in candidate.scored:
                        sidecars[scorer.label].write(
                            scorer.sidecar(query.query_id, scores, trainable, check.turns)
                        )
        taught = TeachTally()
        for task_id, lesson in zip(task_ids, lessons, strict=True):
            for row in lesson.trajectories:
                taught.row(row, failure=False)
            for row in lesson.failures:
                taught.row(row, failure=True)
            taught.passed_over(self.env.family(task_id), lesson.repeated, lesson.unsaid)
        counts = {"code_version": code_version()}
        write_json_atomic(marker, counts | {"statuses": tally.dump(), "taught": taught.dump()})

    def teach(self, task_ids: Sequence[str]) -> list[Lesson]:
        """Let the teacher play."""
        teacher = self.recipe.teacher
        if not isinstance(teacher, OpenAITeacher):
            return [teach_oracle(self.env, teacher, task_id) for task_id in task_ids]
        from agentbench_prefix.policies.openai import OpenAIPolicy

        policy = OpenAIPolicy(
            teacher.base_url,
            teacher.model,
            temperature=teacher.temperature,
            top_p=teacher.top_p,
            max_tokens=teacher.max_tokens,
            extra_body=teacher.extra_body,
        )
        return teach_policy(policy, teacher, self.recipe.env_id, self.recipe.arguments, task_ids)

    def candidates(
        self, rows: Sequence[TrajectoryRow]
    ) -> Iterator[tuple[_Candidate, list[CutCheck]]]:
        """Cuts of every trajectory in every dialogue, with what replaying each showed."""
        for name in self.recipe.dialogues:
            mine = [scorer for scorer in self.scorers if scorer.scoring.dialogue == name]
            scores = [scorer.score([row.conversation(name) for row in rows]) for scorer in mine]
            found = []
            for index, row in enumerate(rows):
                scored = [(s, one[index]) for s, one in zip(mine, scores, strict=True)]
                found.append(_Candidate(row, name, self.choose(row, scored), scored))
            yield from zip(found, self.replay(found), strict=True)

    def choose(
        self, row: TrajectoryRow, scored: Sequence[tuple[Scorer, ScoredConversation]]
    ) -> dict[int, list[Cut]]:
        """What the strategies choose, by turns before the cut; 0 is the raw query."""
        cuts: dict[int, list[Cut]] = {0: []}
        blind = Trace(row.trajectory_id, row.n_turns, np.empty(0), np.empty(0, dtype=np.int64))
        for name, strategy in self.recipe.strategies.items():
            sights = (
                [
                    (scorer.scoring.label, trace(row.trajectory_id, one.layout, one.entropies))
                    for scorer, one in scored
                    if one.entropies is not None
                ]
                if strategy.needs_entropies
                else [("", blind)]
            )
            for model, seen in sights:
                for rank, (turns, score) in enumerate(strategy.choose(seen)):
                    cut = Cut(strategy=name, model=model, rank=rank, score=score)
                    cuts.setdefault(turns, []).append(cut)
        return dict(sorted(cuts.items()))

    def replay(self, candidates: Sequence[_Candidate]) -> Iterator[list[CutCheck]]:
        """Check cuts, in the pool if there is one."""
        jobs = [(c.row.recording(), list(c.cuts)) for c in candidates]
        if self.pool is None:
            yield from (check_cuts(self.env, *job) for job in jobs)
            return
        size = -(-len(jobs) // self.workers) or 1
        chunks = [jobs[i : i + size] for i in range(0, len(jobs), size)]
        arguments = canonical_json(self.recipe.arguments)
        done = self.pool.map(
            _replay_chunk,
            [self.recipe.env_id] * len(chunks),
            [arguments] * len(chunks),
            chunks,
        )
        for chunk in done:
            yield from chunk


def _replay_chunk(
    env_id: str, arguments: str, jobs: Sequence[tuple[Recording, list[int]]]
) -> list[list[CutCheck]]:
    env = make(env_id, **json.loads(arguments))
    return [check_cuts(env, recording, cuts) for recording, cuts in jobs]


def _query(candidate: _Candidate, check: CutCheck) -> QueryRow:
    row, turns = candidate.row, check.turns
    conversation = row.conversation(candidate.dialogue)
    replies = [i for i, m in enumerate(conversation.messages) if m.role == "assistant"]
    return QueryRow(
        query_id=f"{row.trajectory_id}/{candidate.dialogue}/{turns}",
        trajectory_id=row.trajectory_id,
        task_id=row.task_id,
        family=row.family,
        env_id=row.env_id,
        data_hash=row.data_hash,
        arguments=row.arguments,
        options=row.options,
        seed=row.seed,
        dialogue=conversation.dialogue,
        prefix_turns=turns,
        n_turns=row.n_turns,
        cuts=candidate.cuts[turns],
        prefix_actions=[turn.action for turn in row.turns[:turns]],
        trainable=[turn.trainable for turn in row.turns[:turns]],
        messages=conversation.messages[: replies[turns]],
        observation=row.observations()[turns],
        next_action=row.turns[turns].action,
        next_observation=row.turns[turns].observation,
        status=check.status,
        bytes_equal=check.bytes_equal,
        probe=check.probe,
        probe_bytes_equal=check.probe_bytes_equal,
    )


# ------------------------------------------------------------------ the whole
def _marker(partial: Path, split: str, index: int) -> Path:
    return partial / "parts" / f"{split}-{index:05d}.json"


def _part_file(stem: Path, kind: str) -> Path:
    return stem.parent / kind / f"{stem.name}.parquet"


def _assemble(
    partial: Path,
    recipe: CorpusRecipe,
    env: TextEnv,
    scorers: Sequence[Scorer],
    tasks: Mapping[str, list[str]],
    source: Corpus | None,
) -> None:
    """Put the parts together in ``final``, a folder that is complete when its manifest is there."""
    final = partial / "final"
    shutil.rmtree(final, ignore_errors=True)
    kinds = ["trajectories", "failures"]
    if recipe.dialogues:
        kinds += ["queries", *(f"sidecars/{scorer.label}" for scorer in scorers)]
    files: dict[str, FileEntry] = {}
    statuses: list[StatusCount] = []
    taught: list[TeachCount] = []
    versions = {code_version()}
    for split, ids in tasks.items():
        parts = [_marker(partial, split, i) for i in range(-(-len(ids) // PART))]
        for kind in kinds:
            name = f"{kind}/{split}.parquet"
            with RowWriter(final / name, _root(kind)) as writer:
                for part in parts:
                    for row in read_rows(_part_file(part.with_suffix(""), kind), _root(kind)):
                        writer.write(row)
            if kind == "failures" and not writer.rows:
                writer.path.unlink()
                continue
            files[name] = _entry(final / name, writer.rows)
        candidates, play = StatusTally(), TeachTally()
        for part in parts:
            counts = json.loads(part.read_text(encoding="utf-8"))
            candidates.load(counts["statuses"])
            play.load(counts["taught"])
            versions.add(counts["code_version"])
        statuses += candidates.entries(split)
        if source is not None and source.manifest.splits[split] == ids:
            # It also knows what was passed over.
            taught += [count for count in source.manifest.taught if count.split == split]
        else:
            taught += play.entries(split)
    if not any(name.startswith("failures/") for name in files):
        (final / "failures").rmdir()
    write_text_atomic(
        final / RECIPE,
        yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True),
    )
    manifest = Manifest(
        format=FORMAT,
        name=recipe.name,
        version=recipe.version,
        licence=recipe.licence,
        env_id=env.env_id,
        data_hash=env.data_hash,
        arguments=env.arguments(),
        recipe=recipe.model_dump(mode="json"),
        dialogues={d.label: d.fingerprint() for d in env.dialogues().values()},
        splits=dict(tasks),
        out_of_reach={
            split: list(env.out_of_reach(source, env.max_turns))
            for split, source in recipe.splits.items()
        },
        taught=taught,
        statuses=statuses,
        models={scorer.label: scorer.entry for scorer in scorers},
        files=files,
        code_version=", ".join(sorted(versions)),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    # The card is written from the manifest as it is read back, its keys in order.
    manifest = Manifest.parse(canonical_json(manifest.model_dump(mode="json")))
    write_text_atomic(final / CARD, render(manifest))
    files |= {name: _entry(final / name, 0) for name in (RECIPE, CARD)}
    manifest = manifest.model_copy(update={"files": dict(sorted(files.items()))})
    write_json_atomic(final / MANIFEST, manifest.model_dump(mode="json"))
    for path in [final, *final.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    descriptor = os.open(final, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _root(kind: str) -> str:
    return kind.partition("/")[0]


def _entry(path: Path, rows: int) -> FileEntry:
    return FileEntry(sha256=sha256_file(path), size=path.stat().st_size, rows=rows)
