"""Checks of a corpus' rows, which are read in streams; only ids are held.

Faults that follow from another one are passed over: the queries of a faulty trajectory are not
judged by it, and a faulty row is neither replayed nor scored.
"""

from __future__ import annotations

import dataclasses
import json
import math
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from agentbench_prefix.corpora.checks import (
    Finding,
    Judge,
    blame_manifest,
    difference,
    expectation,
    gives_entropies,
    label_of,
)
from agentbench_prefix.corpora.cuts import ScoredCut, Trace
from agentbench_prefix.corpora.reading import MANIFEST, Corpus
from agentbench_prefix.corpora.recipe import CorpusRecipe, OracleTeacher
from agentbench_prefix.corpora.schema import (
    QueryRow,
    SidecarRow,
    StatusCount,
    TrajectoryRow,
    to_messages,
    token_hash,
)
from agentbench_prefix.corpora.sidecars import prefix_of, trace
from agentbench_prefix.corpora.storage import open_parquet, read_rows
from agentbench_prefix.corpora.tally import StatusTally, TeachTally
from agentbench_prefix.corpora.teach import Lesson, teach_oracle, write_conversations
from agentbench_prefix.corpora.validate import TOLERANCE, Progress, Report
from agentbench_prefix.dialogue import Dialogue
from agentbench_prefix.env import TextEnv
from agentbench_prefix.errors import AgentBenchError, CorpusError
from agentbench_prefix.files import canonical_json
from agentbench_prefix.replay import CutCheck, check_cuts, compare
from agentbench_prefix.rollouts import episode_seed

_REFUSALS = (AgentBenchError, TypeError, ValueError)  # of an environment


class _Stream:
    """Rows of a file with their numbers; a row that cannot be read is a fault and the end."""

    def __init__(
        self,
        file: str,
        rows: Iterator[Any],
        report: Report,
        keep: Callable[[Any], bool] | None = None,
    ) -> None:
        self.file = file
        self.broken = False
        self.head: tuple[int, Any] | None = None
        self._rows = enumerate(rows)
        self._report = report
        self._keep = keep
        self.take()

    def take(self) -> tuple[int, Any] | None:
        """The next row, which is the ``head``."""
        taken, self.head = self.head, None
        try:
            for index, row in self._rows:
                if self._keep is None or self._keep(row):
                    self.head = index, row
                    break
        except CorpusError as error:
            self.broken = True
            self._report.add(error)
        return taken


@dataclasses.dataclass
class _Asked:
    """A query and what lies at its place in each sidecar file.

    Attributes:
        index: Its row.
        query: The query.
        sidecars: Row number and row, by label of the model.
    """

    index: int
    query: QueryRow
    sidecars: dict[str, tuple[int, SidecarRow] | None]


@dataclasses.dataclass
class _Side:
    """The queries of one dialogue in one split, read in step with the trajectories.

    Attributes:
        name: Name of the dialogue.
        dialogue: The dialogue.
        queries: Its queries.
        sidecars: Sidecar files that belong to them, by label of the model; a file whose order is
            wrong is not read on.
    """

    name: str
    dialogue: Dialogue
    queries: _Stream
    sidecars: dict[str, _Stream]

    def take(self) -> _Asked:
        """The next query, with what lies beside it."""
        head = self.queries.take()
        assert head is not None
        return _Asked(*head, {label: stream.take() for label, stream in self.sidecars.items()})


class RowChecks:
    """Checks the rows of a corpus."""

    def __init__(
        self,
        corpus: Corpus,
        recipe: CorpusRecipe,
        env: TextEnv,
        judges: Mapping[str, Judge],
        report: Report,
        *,
        every: bool,
        sample: int,
        without_teacher: bool,
    ) -> None:
        self.corpus = corpus
        self.recipe = recipe
        self.env = env
        self.dialogues = env.dialogues()
        self.judges = judges
        self.report = report
        self.every = every
        self.sample = sample
        self.without_teacher = without_teacher
        self.arguments = canonical_json(env.arguments())
        self.max_turns = env.max_turns or 2**31
        # All candidates are known only if entropies can be had for strategies that rank by them.
        self.counts_candidates = every and (
            all(judge.same_weights for judge in judges.values() if gives_entropies(judge.scoring))
            or not any(s.needs_entropies for s in recipe.strategies.values())
        )
        self.counts_attempts = every and not without_teacher and recipe.teacher.kind == "oracle"
        self.taught = TeachTally()
        self.statuses = StatusTally()
        self.lessons: dict[str, Lesson] = {}
        self.counted: set[str] = set()
        self.tasks: set[str] = set()
        self.trajectory_ids: set[str] = set()
        self.query_ids: set[str] = set()

    def fault(self, what: str, file: str, row: int | None, field: str) -> None:
        """Note a fault of a row."""
        self.report.add(CorpusError(what, file=file, row=row, field=field))

    def check(self, seed: int, progress: Progress | None) -> None:
        """Check all rows of all splits, those of a sample of trajectories thoroughly."""
        files = self.corpus.manifest.files
        sizes = [
            files[name].rows if name in files else 0
            for name in (f"trajectories/{split}.parquet" for split in self.recipe.splits)
        ]
        total = sum(sizes)
        draw = np.random.default_rng(seed).permutation(total)
        chosen = {int(i) for i in (draw if self.every else draw[: self.sample])}
        begin = 0
        for split, size in zip(self.recipe.splits, sizes, strict=True):
            mine = {i - begin for i in chosen if begin <= i < begin + size}
            report = None if progress is None else partial(_shifted, progress, begin, total)
            self.split(split, mine, report)
            begin += size

    # -------------------------------------------------------------- one split
    def split(self, split: str, chosen: set[int], progress: Callable[[int], None] | None) -> None:
        """Check the rows of a split."""
        before = len(self.report.faults)
        self.taught, self.statuses = TeachTally(), StatusTally()
        known = self.positions(split)
        sides = [] if known is None else self.open_sides(split)
        order = _Order(self.corpus.manifest.splits.get(split, []))
        rows = _Stream(
            f"trajectories/{split}.parquet", self.corpus.trajectories(split), self.report
        )
        position = -1
        while (head := rows.take()) is not None:
            position, row = head
            self.report.checked["trajectories"] += 1
            sound = self.trajectory(rows.file, position, row, order, failure=False)
            groups = [(side, self.take_group(side, known or {}, position)) for side in sides]
            if sound:
                self.queries_of(row, position, rows.file, groups, thorough=position in chosen)
            if progress is not None:
                progress(position + 1)
        if not rows.broken:
            for side in sides:
                self.take_group(side, known or {}, position + 1)
                self.leftovers(side)
        self.failures(split)
        broken = rows.broken or any(side.queries.broken for side in sides)
        if broken or len(self.report.faults) > before:
            self.report.notes.append(
                f"the manifest's statistics of split {split!r} were not checked, since rows that "
                "they count are at fault"
            )
            return
        self.missing_tasks(split)
        self.compare_taught(split)
        self.compare_statuses(split)

    def positions(self, split: str) -> dict[str, int] | None:
        """Rows of the trajectories by id, the first of equal ones; ``None`` if it has none."""
        name = f"trajectories/{split}.parquet"
        found: dict[str, int] = {}
        try:
            file = open_parquet(self.corpus.folder / name, "trajectories", name)
            index = 0
            for batch in file.iter_batches(columns=["trajectory_id"]):
                for trajectory_id in batch.column(0).to_pylist():
                    found.setdefault(trajectory_id, index)
                    index += 1
        except (CorpusError, pa.ArrowException, OSError):  # reading the rows will name it
            return None
        return found

    def open_sides(self, split: str) -> list[_Side]:
        """Streams of queries and sidecars, by dialogue."""
        labels = {self.dialogues[name].label for name in self.recipe.dialogues}
        sides: list[_Side] = []
        for name in self.recipe.dialogues:
            dialogue = self.dialogues[name]
            # Queries of unknown dialogues go to the first one, to be refused there.
            strays = not sides

            def mine(row: QueryRow, label: str = dialogue.label, strays: bool = strays) -> bool:
                return row.dialogue == label or (strays and row.dialogue not in labels)

            file = f"queries/{split}.parquet"
            queries = _Stream(file, self.corpus.queries(split), self.report, mine)
            sidecars = {}
            for label, judge in self.judges.items():
                if judge.scoring.dialogue == name:
                    rows = self.corpus.sidecars(split, name, judge.scoring.label)
                    place = f"sidecars/{label}/{split}.parquet"
                    sidecars[label] = _Stream(place, rows, self.report)
            sides.append(_Side(name, dialogue, queries, sidecars))
        return sides

    def take_group(self, side: _Side, known: Mapping[str, int], position: int) -> list[_Asked]:
        """The queries of the trajectory at ``position``, which must lie next."""
        group: list[_Asked] = []
        while side.queries.head is not None:
            at = known.get(side.queries.head[1].trajectory_id)
            if at is not None and at > position:
                break
            asked = side.take()
            self.report.checked["queries"] += 1
            if at == position:
                group.append(asked)
                continue
            what = (
                f"there is no trajectory {asked.query.trajectory_id!r} in this split"
                if at is None
                else f"is out of order: trajectory {asked.query.trajectory_id!r} comes earlier"
            )
            self.fault(what, side.queries.file, asked.index, "trajectory_id")
        return group

    def leftovers(self, side: _Side) -> None:
        """No sidecar lies behind the last query's."""
        for stream in side.sidecars.values():
            if stream.head is not None and not side.queries.broken:
                index, row = stream.head
                self.fault(
                    f"there is no query {row.query_id!r} for it: expected one sidecar a query, in "
                    "the order of the queries",
                    stream.file,
                    index,
                    "query_id",
                )

    def failures(self, split: str) -> None:
        """Check the unsolved attempts of a split."""
        file = f"failures/{split}.parquet"
        if file not in self.corpus.manifest.files:
            return
        order = _Order(self.corpus.manifest.splits.get(split, []))
        stream = _Stream(file, read_rows(self.corpus.folder / file, "failures", file), self.report)
        while (head := stream.take()) is not None:
            index, row = head
            self.report.checked["failures"] += 1
            sound = self.trajectory(file, index, row, order, failure=True)
            if sound and (self.every or index < self.sample):
                finding = next(self.play_through(row, exact=True), None)
                if finding is not None:
                    self.fault(finding[1], file, index, finding[0])
                else:
                    self.teach_again(row, index, file, failure=True)

    def missing_tasks(self, split: str) -> None:
        """The environment's own teacher leaves no task of a split without a row."""
        if self.recipe.teacher.kind != "oracle":
            return
        for index, task in enumerate(self.corpus.manifest.splits.get(split, [])):
            if task not in self.tasks:
                what = f"task {task!r} has neither a trajectory nor a failure"
                blame_manifest(self.report, what, f"splits.{split}.{index}")

    # -------------------------------------------------------------- trajectories
    def trajectory(
        self, file: str, index: int, row: TrajectoryRow, order: _Order, *, failure: bool
    ) -> bool:
        """Check a trajectory by itself; whether it is sound."""
        for field, what in self.findings_of(row, order, failure=failure):
            self.fault(what, file, index, field)
            return False
        self.trajectory_ids.add(row.trajectory_id)
        self.tasks.add(row.task_id)
        self.taught.row(row, failure=failure)
        return True

    def findings_of(self, row: TrajectoryRow, order: _Order, *, failure: bool) -> Iterator[Finding]:
        """What is wrong with a trajectory."""
        what = order.next(row.task_id)
        if what is not None:
            yield "task_id", what
            return
        teacher = self.recipe.teacher
        number = f"failure-{order.sample}" if failure else str(order.sample)
        if row.trajectory_id in self.trajectory_ids:
            yield "trajectory_id", f"{row.trajectory_id!r} is there already"
        expected = {
            "sample": order.sample,
            "teacher": teacher.name,
            "trajectory_id": f"{row.task_id}/{teacher.name}/{number}",
            "family": self.env.family(row.task_id),
            "env_id": self.env.env_id,
            "data_hash": self.env.data_hash,
            "arguments": self.arguments,
            "success": not failure,
            "n_turns": len(row.turns),
            "reward": sum(turn.reward for turn in row.turns),
        }
        differs = difference(expected, {name: getattr(row, name) for name in expected})
        if differs is not None:
            yield differs
        if not failure and order.sample >= teacher.per_task:
            yield "sample", f"the recipe wants {teacher.per_task} trajectories a task"
        if len(row.turns) > self.max_turns:
            yield "turns", f"the turn limit is {self.max_turns}, got {len(row.turns)} turns"
        yield from _options_findings(row.options, self.env)
        seeds = (episode_seed(teacher.seed, row.task_id, i) for i in range(teacher.attempts))
        if row.seed not in seeds:
            yield "seed", f"{row.seed} is not the seed of any of {teacher.attempts} attempts"
        for index, turn in enumerate(row.turns):
            if bool(turn.action) == bool(turn.problem):
                yield f"turns.{index}.action", "expected an action or a problem, and not both"
            if turn.trainable and not turn.action:
                yield f"turns.{index}.trainable", "a turn without an action cannot be trainable"
        yield from self.conversation_findings(row)

    def conversation_findings(self, row: TrajectoryRow) -> Iterator[Finding]:
        """Each dialogue tells the episode: its opening, the observations, the actions."""
        expected = [dialogue.label for dialogue in self.dialogues.values()]
        labels = [conversation.dialogue for conversation in row.conversations]
        differs = difference(expected, labels, "conversations")
        if differs is not None:
            yield (
                f"{differs[0]}.dialogue" if differs[0] != "conversations" else differs[0],
                differs[1],
            )
            return
        said = {
            name: [m.content for m in conversation.messages if m.role == "assistant"]
            for name, conversation in zip(self.dialogues, row.conversations, strict=True)
        }
        for index, (name, dialogue) in enumerate(self.dialogues.items()):
            field = f"conversations.{index}.messages"
            if len(said[name]) != row.n_turns:
                yield field, f"expected {row.n_turns} replies, got {len(said[name])}"
                return
            messages = row.conversations[index].messages
            places = [i for i, message in enumerate(messages) if message.role == "assistant"]
            for turn, reply, place in zip(row.turns, said[name], places, strict=True):
                action = dialogue.parse(reply).action
                if action != (turn.action or None):
                    yield (
                        f"{field}.{place}.content",
                        f"{reply!r:.60} means {action!r:.60}, expected {turn.action!r:.60}",
                    )
        told = write_conversations(
            self.dialogues, row.first_observation, row.turns, [""] * row.n_turns, said
        )
        differs = difference(
            [c.model_dump() for c in told],
            [c.model_dump() for c in row.conversations],
            "conversations",
        )
        if differs is not None:
            yield differs

    def play_through(self, row: TrajectoryRow, *, exact: bool) -> Iterator[Finding]:
        """Play a trajectory from its start to its end; what comes back otherwise than recorded.

        Args:
            row: The trajectory.
            exact: Compare observations byte by byte, not only on the fields they share.
        """
        env = self.env

        def told(mine: str, theirs: str, field: str) -> Iterator[Finding]:
            if mine != theirs and (exact or compare(env, mine, theirs)[0] == "mismatch"):
                yield field, f"replayed: {expectation(mine, theirs)}"

        self.report.checked["trajectories replayed"] += 1
        try:
            first, _ = env.reset(
                seed=row.seed, options={**json.loads(row.options), "task_id": row.task_id}
            )
            yield from told(first, row.first_observation, "first_observation")
            success = False
            for index, turn in enumerate(row.turns):
                if env.ended:
                    yield f"turns.{index}", f"replayed: the episode ends after {index} turns"
                    return
                if turn.action:
                    mine, reward, _, _, info = env.step(turn.action)
                else:
                    mine, reward, _, _, info = env.skip_turn(turn.observation)
                yield from told(mine, turn.observation, f"turns.{index}.observation")
                for name, value in (("reward", reward), ("valid", bool(info["valid_action"]))):
                    if getattr(turn, name) != value:
                        what = expectation(value, getattr(turn, name))
                        yield f"turns.{index}.{name}", f"replayed: {what}"
                success = bool(info["success"])
            if success != row.success:
                yield "success", f"replayed: {expectation(success, row.success)}"
        except _REFUSALS as error:
            yield "turns", f"cannot be replayed: {error}"

    # -------------------------------------------------------------- queries
    def queries_of(
        self,
        row: TrajectoryRow,
        position: int,
        file: str,
        groups: Sequence[tuple[_Side, list[_Asked]]],
        *,
        thorough: bool,
    ) -> None:
        """Check the queries of a sound trajectory, and its replay if ``thorough``."""
        sound = [self.group_is_sound(row, side, group, thorough) for side, group in groups]
        if thorough and all(sound):
            exact = all(
                asked.query.bytes_equal and asked.query.probe_bytes_equal
                for _, group in groups
                for asked in group
            )
            finding = next(self.play_through(row, exact=exact), None)
            if finding is not None:
                self.fault(finding[1], file, position, finding[0])
                return
        for (side, group), good in zip(groups, sound, strict=True):
            if good:
                _Cuts(self, row, side, group).check(thorough=thorough)
        if thorough and all(sound):
            self.teach_again(row, position, file, failure=False)

    def teach_again(self, row: TrajectoryRow, index: int, file: str, *, failure: bool) -> None:
        """The environment's own teacher plays a row's task as the row says."""
        teacher = self.recipe.teacher
        if self.without_teacher or not isinstance(teacher, OracleTeacher):
            return
        try:
            lesson = self.lesson(teacher, row.task_id)
        except (NotImplementedError, *_REFUSALS) as error:
            self.fault(f"the teacher cannot play it again: {error}", file, index, "teacher")
            return
        mine = lesson.failures if failure else lesson.trajectories
        self.report.checked["plays of the teacher repeated"] += 1
        if row.sample >= len(mine):
            kind = "unsolved" if failure else "solved"
            self.fault(
                f"the teacher has {len(mine)} {kind} attempts at this task, this is number "
                f"{row.sample + 1}",
                file,
                index,
                "sample",
            )
            return
        differs = difference(mine[row.sample].model_dump(), row.model_dump())
        if differs is not None:
            self.fault(f"the teacher played again: {differs[1]}", file, index, differs[0])

    def lesson(self, teacher: OracleTeacher, task_id: str) -> Lesson:
        """What the teacher makes of a task; the last one is held, since rows come by task."""
        if task_id not in self.lessons:
            self.lessons = {task_id: teach_oracle(self.env, teacher, task_id)}
            if self.counts_attempts and task_id not in self.counted:
                found = self.lessons[task_id]
                self.taught.passed_over(self.env.family(task_id), found.repeated, found.unsaid)
                self.counted.add(task_id)
        return self.lessons[task_id]

    def group_is_sound(
        self, row: TrajectoryRow, side: _Side, group: Sequence[_Asked], thorough: bool
    ) -> bool:
        """Check the queries of a trajectory in one dialogue, and what lies beside them."""
        sound = True
        previous = -1
        ranks: set[tuple[str, str, int]] = set()
        for asked in group:
            finding = next(self.query_findings(row, side, asked.query, previous, ranks), None)
            if finding is not None:
                self.fault(finding[1], side.queries.file, asked.index, finding[0])
                sound = False
                continue
            self.query_ids.add(asked.query.query_id)
            previous = asked.query.prefix_turns
        sound = sound and not side.queries.broken
        return sound and self.sidecars_of(side, group, thorough=thorough)

    def query_findings(
        self,
        row: TrajectoryRow,
        side: _Side,
        query: QueryRow,
        previous: int,
        ranks: set[tuple[str, str, int]],
    ) -> Iterator[Finding]:
        """What is wrong with a query, by its trajectory."""
        turns = query.prefix_turns
        if query.query_id in self.query_ids:
            yield "query_id", f"{query.query_id!r} is there already"
        if query.dialogue != side.dialogue.label:
            yield "dialogue", expectation(side.dialogue.label, query.dialogue)
        if not turns < row.n_turns:
            yield (
                "prefix_turns",
                f"a cut must leave at least one of {row.n_turns} turns, got {turns}",
            )
            return
        if turns != len(query.prefix_actions):
            yield "prefix_turns", f"is {turns}, but there are {len(query.prefix_actions)} actions"
        conversation = row.conversation(side.name)
        places = [i for i, m in enumerate(conversation.messages) if m.role == "assistant"]
        expected = {
            "query_id": f"{row.trajectory_id}/{side.name}/{turns}",
            **{
                name: getattr(row, name)
                for name in (
                    "trajectory_id",
                    "task_id",
                    "family",
                    "env_id",
                    "data_hash",
                    "arguments",
                    "options",
                    "seed",
                    "n_turns",
                )
            },
            "prefix_actions": [turn.action for turn in row.turns[:turns]],
            "trainable": [turn.trainable for turn in row.turns[:turns]],
            "messages": [m.model_dump() for m in conversation.messages[: places[turns]]],
            "observation": row.observations()[turns],
            "next_action": row.turns[turns].action,
            "next_observation": row.turns[turns].observation,
            "status": "validated",
        }
        values = query.model_dump()
        differs = difference(expected, {name: values[name] for name in expected})
        if differs is not None:
            yield differs
        if query.probe not in ("validated", "unverifiable"):
            yield "probe", f"expected validated or unverifiable, got {query.probe!r}"
        if turns <= previous:
            yield "prefix_turns", f"is out of order: the row before it has {previous}"
        yield from self.cut_findings(side, query, ranks)

    def cut_findings(
        self, side: _Side, query: QueryRow, ranks: set[tuple[str, str, int]]
    ) -> Iterator[Finding]:
        """What is wrong with what a query says of its cuts, by the recipe alone."""
        if bool(query.cuts) != bool(query.prefix_turns):
            yield "cuts", "expected the strategies that chose the cut, and none for a raw query"
        places = self.sights(side)
        seen: list[int] = []
        for index, cut in enumerate(query.cuts):
            key = cut.strategy, cut.model
            if cut.strategy not in self.recipe.strategies:
                known = ", ".join(self.recipe.strategies)
                yield f"cuts.{index}.strategy", f"the recipe has {known}, got {cut.strategy!r}"
            elif key not in places:
                models = ", ".join(repr(m) for s, m in places if s == cut.strategy)
                yield f"cuts.{index}.model", f"expected {models}, got {cut.model!r}"
            else:
                seen.append(places.index(key))
            if (*key, cut.rank) in ranks:
                yield (
                    f"cuts.{index}.rank",
                    f"{cut.strategy} has rank {cut.rank} twice in this trajectory",
                )
            if not math.isfinite(cut.score):
                yield f"cuts.{index}.score", f"expected a finite number, got {cut.score}"
        if seen != sorted(set(seen)):
            yield "cuts", "expected each strategy once, in the recipe's order"
        ranks.update((cut.strategy, cut.model, cut.rank) for cut in query.cuts)

    def sights(self, side: _Side) -> list[tuple[str, str]]:
        """Pairs of strategy and model that cut a dialogue's trajectories, in their order."""
        rankers = [
            scoring.label
            for scoring in self.recipe.models
            if scoring.dialogue == side.name and gives_entropies(scoring)
        ]
        return [
            (name, model)
            for name, strategy in self.recipe.strategies.items()
            for model in (rankers if strategy.needs_entropies else [""])
        ]

    # -------------------------------------------------------------- sidecars
    def sidecars_of(self, side: _Side, group: Sequence[_Asked], *, thorough: bool) -> bool:
        """Check the sidecars of sound queries; whether they are sound."""
        sound = True
        for label, stream in list(side.sidecars.items()):
            judge = self.judges[label]
            for asked in group:
                found = asked.sidecars[label]
                query_id = asked.query.query_id
                if found is None and stream.broken:
                    del side.sidecars[label]
                    break
                if found is None or found[1].query_id != query_id:
                    self.fault(
                        f"the sidecar of {query_id!r} is missing here: expected one a query, "
                        "in the order of the queries; the file was not read on",
                        stream.file,
                        None if found is None else found[0],
                        "query_id",
                    )
                    del side.sidecars[label]
                    sound = False
                    break
                index, row = found
                self.report.checked["sidecars"] += 1
                findings = self.sidecar_findings(judge, asked.query, row, thorough=thorough)
                finding = next(findings, None)
                if finding is not None:
                    self.fault(finding[1], stream.file, index, finding[0])
                    sound = False
        return sound

    def sidecar_findings(
        self, judge: Judge, query: QueryRow, row: SidecarRow, *, thorough: bool
    ) -> Iterator[Finding]:
        """What is wrong with a sidecar."""
        expected: dict[str, Any] = {
            "model": judge.scoring.label,
            "model_sha256": judge.entry.model_sha256,
            "vocabulary": judge.entry.vocabulary,
            "tokenizer": judge.entry.tokenizer,
            "backend": judge.scoring.backend,
            "dtype": judge.scoring.dtype,
            "temperature": judge.scoring.temperature,
        }
        values = row.model_dump()
        differs = difference(expected, {name: values[name] for name in expected})
        if differs is not None:
            yield differs
        begin, end = row.assistant_prefix_span
        if not begin <= end <= row.prompt_tokens:
            yield (
                "assistant_prefix_span",
                f"expected b <= e <= {row.prompt_tokens}, got [{begin}, {end})",
            )
        for name in ("prefix_mask", "assistant_prefix_old_log_probs"):
            if len(values[name]) != end - begin:
                yield name, f"expected e - b = {end - begin} entries, got {len(values[name])}"
        if row.prefix_token_count != sum(row.prefix_mask):
            what = expectation(sum(row.prefix_mask), row.prefix_token_count)
            yield "prefix_token_count", f"{what}: the sum of the mask"
        for index, value in enumerate(row.assistant_prefix_old_log_probs):
            if not (math.isfinite(value) and value <= 0):
                field = f"assistant_prefix_old_log_probs.{index}"
                yield field, f"expected a finite log-probability <= 0, got {value}"
        if judge.scorer is not None:
            yield from self.token_findings(judge, query, row, thorough=thorough)

    def token_findings(
        self, judge: Judge, query: QueryRow, row: SidecarRow, *, thorough: bool
    ) -> Iterator[Finding]:
        """What is wrong with a sidecar, by the tokens of its own prompt."""
        assert judge.scorer is not None
        serializer = judge.scorer.policy.serializer
        layout = serializer.lay_out(to_messages(query.messages))
        begin, end, mask = prefix_of(layout, query.trainable, query.prefix_turns)
        expected = {
            "prompt_tokens": len(layout.ids),
            "prompt_sha256": token_hash(layout.ids),
            "assistant_prefix_span": [begin, end],
            "prefix_mask": mask,
        }
        values = row.model_dump()
        differs = difference(expected, {name: values[name] for name in expected})
        if differs is not None:
            yield differs
            return
        said = [m.content for m in query.messages if m.role == "assistant"]
        for text, (first, behind), learn in zip(said, layout.replies, query.trainable, strict=True):
            read = serializer.decode(layout.ids[first:behind])
            # A tokenizer may put text into its normal form.
            if learn and unicodedata.normalize("NFC", text) != unicodedata.normalize("NFC", read):
                yield "prefix_mask", f"the masked tokens read {read!r:.60}, expected {text!r:.60}"
        if not thorough or not judge.same_weights or begin == end:
            return
        logprobs, _ = judge.scores(layout.ids)
        off = np.abs(logprobs[begin - 1 : end - 1] - row.assistant_prefix_old_log_probs)
        worst = int(off.argmax())
        label = label_of(judge.scoring)
        self.report.checked["log-probabilities computed anew"] += len(off)
        self.report.deviations[label] = max(
            self.report.deviations.get(label, 0.0), float(off[worst])
        )
        if not off[worst] <= judge.tolerance:
            first = int(np.flatnonzero(~(off <= judge.tolerance))[0])
            stored = row.assistant_prefix_old_log_probs[first]
            yield (
                f"assistant_prefix_old_log_probs.{first}",
                f"expected {logprobs[begin - 1 + first]:.6f} within {judge.tolerance}, got "
                f"{stored:.6f}",
            )

    # -------------------------------------------------------------- the manifest's statistics
    def compare_taught(self, split: str) -> None:
        """The manifest counts the trajectories as they are."""
        entries = {
            t.family: (i, t) for i, t in enumerate(self.corpus.manifest.taught) if t.split == split
        }
        counted = {entry.family: entry for entry in self.taught.entries(split)}
        for family in counted | entries:
            if family not in entries or family not in counted:
                said = "nothing of" if family not in entries else "a"
                blame_manifest(
                    self.report, f"has {said} family {family!r} in split {split!r}", "taught"
                )
                continue
            index, entry = entries[family]
            expected = counted[family].model_dump()
            for name in ("repeated", "unsaid"):
                if not self.counts_attempts or getattr(entry, name) is None:
                    expected[name] = getattr(entry, name)
            differs = difference(expected, entry.model_dump(), f"taught.{index}")
            if differs is not None:
                blame_manifest(self.report, differs[1], differs[0])

    def compare_statuses(self, split: str) -> None:
        """The manifest counts the queries as they are; all candidates if all were replayed."""
        names = ["validated", "bytes_equal", "distinct", "probe_unverifiable", "untrained"]
        if self.counts_candidates:
            names += ["mismatch", "unverifiable", "error", "ended"]
        entries = {
            (s.strategy, s.dialogue, s.family): (i, s)
            for i, s in enumerate(self.corpus.manifest.statuses)
            if s.split == split
        }
        counted = {(s.strategy, s.dialogue, s.family): s for s in self.statuses.entries(split)}
        nothing = StatusCount(split=split, strategy="", dialogue="", family="")
        for key in counted | entries:
            counts = counted.get(key, nothing)
            if key not in entries:
                blame_manifest(
                    self.report, f"has no entry for {key} in split {split!r}", "statuses"
                )
                continue
            index, entry = entries[key]
            expected = {name: getattr(counts, name) for name in names}
            got = {name: getattr(entry, name) for name in names}
            differs = difference(expected, got, f"statuses.{index}")
            if differs is not None:
                blame_manifest(self.report, f"{differs[1]} for {key}", differs[0])


@dataclasses.dataclass
class _Order:
    """Follows the tasks of a file, which come in the order of their split.

    Attributes:
        tasks: Tasks of the split.
        task: The task read last.
        sample: Rows of that task before the last one.
    """

    tasks: Sequence[str]
    task: str = ""
    sample: int = 0

    def __post_init__(self) -> None:
        self.places = {task: index for index, task in enumerate(self.tasks)}

    def next(self, task: str) -> str | None:
        """Read a row's task; what is wrong with it, if anything."""
        if task not in self.places:
            return f"{task!r} is no task of this split"
        if task == self.task:
            self.sample += 1
            return None
        if self.task and self.places[task] < self.places[self.task]:
            return f"{task!r} is out of order: expected the tasks as {MANIFEST} lists them"
        self.task, self.sample = task, 0
        return None


def _shifted(progress: Progress, begin: int, total: int, done: int) -> None:
    progress(begin + done, total)


def _options_findings(options: str, env: TextEnv) -> Iterator[Finding]:
    try:
        values = json.loads(options)
    except ValueError as error:
        yield "options", f"expected JSON ({error})"
        return
    if not isinstance(values, dict) or canonical_json(values) != options:
        yield "options", f"expected a JSON object in its canonical form, got {options!r:.80}"
    elif not values.keys() <= env.task_options:
        unknown = sorted(values.keys() - env.task_options)
        yield "options", f"{unknown[0]!r} is no task option of {env.env_id}"


class _Cuts:
    """The cuts of one trajectory in one dialogue."""

    def __init__(
        self, rows: RowChecks, row: TrajectoryRow, side: _Side, group: Sequence[_Asked]
    ) -> None:
        self.rows = rows
        self.row = row
        self.side = side
        self.group = group
        self.chosen_by: dict[int, set[str]] = {0: set()}
        """Candidates and the strategies that chose them, by turns before the cut."""
        for asked in group:
            strategies = {cut.strategy for cut in asked.query.cuts}
            self.chosen_by.setdefault(asked.query.prefix_turns, set()).update(strategies)

    def fault(self, asked: _Asked | None, field: str, what: str) -> None:
        """Note a fault of a query, or of one that should be there."""
        self.rows.fault(what, self.side.queries.file, None if asked is None else asked.index, field)

    def check(self, *, thorough: bool) -> None:
        """Check how cuts were chosen, and their replay if ``thorough``; count them."""
        before = len(self.rows.report.faults)
        traces: dict[str, Trace] = {}
        for name, model in self.rows.sights(self.side):
            strategy = self.rows.recipe.strategies[name]
            if not strategy.needs_entropies:
                blind = np.empty(0), np.empty(0, dtype=np.int64)
                seen = Trace(self.row.trajectory_id, self.row.n_turns, *blind)
                order = strategy.choose(seen)
                self.compare_cuts(name, model, order, len(order), TOLERANCE)
            elif thorough:
                judge = self.rows.judges.get(f"{self.side.name}/{model}")
                if judge is None or not judge.same_weights:
                    continue
                if model not in traces:
                    traces[model] = self.trace(judge)
                seen = traces[model]
                # All turns in their order: turns whose scores are equal up to rounding may swap.
                order = strategy.model_copy(update={"k": self.row.n_turns}).choose(seen)
                self.compare_cuts(name, model, order, len(strategy.choose(seen)), judge.tolerance)
        if thorough and len(self.rows.report.faults) == before:
            self.replay()
        if not self.rows.counts_candidates:
            self.count_rows()

    def trace(self, judge: Judge) -> Trace:
        """What a strategy sees, by a plain forward pass."""
        assert judge.scorer is not None
        messages = to_messages(self.row.conversation(self.side.name).messages)
        layout = judge.scorer.policy.serializer.lay_out(messages)
        _, entropies = judge.scores(layout.ids)
        self.rows.report.checked["trajectories ranked anew"] += 1
        return trace(self.row.trajectory_id, layout, np.concatenate([[np.nan], entropies]))

    def compare_cuts(
        self, name: str, model: str, order: Sequence[ScoredCut], wanted: int, tolerance: float
    ) -> None:
        """Compare a strategy's cuts with those the rows name.

        Args:
            name: The strategy.
            model: The model that ranked, if any.
            order: Cuts by rank; may be more than are wanted.
            wanted: How many the strategy chooses.
            tolerance: Largest difference between equal scores.
        """
        own = {cut.turns: cut.score for cut in order}
        found: set[int] = set()
        for asked in self.group:
            for index, cut in enumerate(asked.query.cuts):
                if (cut.strategy, cut.model) != (name, model):
                    continue
                turns = asked.query.prefix_turns
                if (
                    turns not in own
                    or cut.rank >= wanted
                    or not self.near(own[turns], order[cut.rank].score, tolerance)
                ):
                    at = next((r for r, c in enumerate(order[:wanted]) if c.turns == turns), None)
                    expected = "no cut here" if at is None else f"rank {at}"
                    self.fault(
                        asked,
                        f"cuts.{index}.rank",
                        f"{name} gives {expected}, got rank {cut.rank}",
                    )
                    return
                if not self.near(cut.score, own[turns], tolerance):
                    self.fault(asked, f"cuts.{index}.score", expectation(own[turns], cut.score))
                    return
                found.add(cut.rank)
        for rank in range(wanted):
            if rank not in found:
                self.chosen_by.setdefault(order[rank].turns, set()).add(name)

    @staticmethod
    def near(one: float, other: float, tolerance: float) -> bool:
        """Whether two scores are equal up to rounding."""
        return abs(one - other) <= tolerance

    def replay(self) -> None:
        """Replay all candidates; those that are kept must be rows, and no others."""
        row, report = self.row, self.rows.report
        present = {asked.query.prefix_turns: asked for asked in self.group}
        for check in check_cuts(
            self.rows.env, row.recording(), sorted(self.chosen_by), restore=True
        ):
            report.checked["cuts replayed"] += 1
            asked = present.get(check.turns)
            if asked is None:
                if check.kept:
                    self.fault(
                        self.group[0] if self.group else None,
                        "query_id",
                        f"{row.trajectory_id}/{self.side.name}/{check.turns} is missing, though "
                        "it was chosen and is validated by replay",
                    )
                    return
            elif not self.compare_check(asked, check):
                return
            if self.rows.counts_candidates:
                query = asked.query if asked is not None and check.kept else None
                self.count(check.turns, self.chosen_by[check.turns], check.mark, query)

    def compare_check(self, asked: _Asked, check: CutCheck) -> bool:
        """Compare a query with its replay, then put an environment at the cut and go on."""
        query, env = asked.query, self.rows.env
        for name in ("status", "bytes_equal", "probe", "probe_bytes_equal"):
            if getattr(query, name) != getattr(check, name):
                what = expectation(getattr(check, name), getattr(query, name))
                detail = f" ({check.detail})" if check.detail else ""
                self.fault(asked, name, f"replayed: {what}{detail}")
                return False
        try:
            mine, _ = env.reset(seed=query.seed, options=query.reset_options())
            spoken = not query.prefix_actions or query.prefix_actions[-1]
            if spoken and query.bytes_equal and mine != query.observation:
                self.fault(
                    asked, "observation", f"restored: {expectation(mine, query.observation)}"
                )
                return False
            if query.next_action:
                after = env.step(query.next_action)[0]
            else:
                after = env.skip_turn(query.next_observation)[0]
        except _REFUSALS as error:
            self.fault(asked, "prefix_actions", f"cannot be restored: {error}")
            return False
        if query.probe_bytes_equal and after != query.next_observation:
            what = expectation(after, query.next_observation)
            self.fault(asked, "next_observation", f"restored: {what}")
            return False
        self.rows.report.checked["queries restored"] += 1
        return True

    def count_rows(self) -> None:
        """Count the rows for the manifest's statistics."""
        for asked in self.group:
            chosen_by = {cut.strategy for cut in asked.query.cuts}
            self.count(asked.query.prefix_turns, chosen_by, asked.query.status, asked.query)

    def count(self, turns: int, chosen_by: set[str], mark: str, query: QueryRow | None) -> None:
        """Count one candidate for the manifest's statistics."""
        self.rows.statuses.add(self.row, self.side.name, turns, chosen_by, mark, query)
