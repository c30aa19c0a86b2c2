"""Counts for the manifest: what a teacher played, and what became of the candidate queries.

Building counts what it makes, validating counts what it finds; both count here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

from agentbench_prefix.corpora.schema import QueryRow, StatusCount, TeachCount, TrajectoryRow
from agentbench_prefix.files import canonical_json, sha256_text


class TeachTally:
    """Counts the play of one split by family."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}

    def row(self, row: TrajectoryRow, *, failure: bool) -> None:
        """Count a trajectory, or an unsolved attempt."""
        for family in (row.family, "all"):
            counts = self.counts.setdefault(family, Counter())
            counts["failures" if failure else "trajectories"] += 1
            if not failure:
                counts["tasks"] += row.sample == 0
                counts["turns"] += row.n_turns
                counts["plain_turns"] += row.plain_turns
                counts["untrainable"] += sum(not turn.trainable for turn in row.turns)

    def passed_over(self, family: str, repeated: int | None, unsaid: int | None) -> None:
        """Count a task's attempts that are no rows; ``None`` where that is not known."""
        for name in (family, "all"):
            counts = self.counts.setdefault(name, Counter())
            for what, n in (("repeated", repeated), ("unsaid", unsaid)):
                if n is not None:
                    counts[what] += n  # 0, too: it is known then

    def dump(self) -> list[list[Any]]:
        """The counts as JSON."""
        return [
            [family, what, n]
            for family, counts in sorted(self.counts.items())
            for what, n in counts.items()
        ]

    def load(self, dumped: Iterable[Iterable[Any]]) -> None:
        """Add what :meth:`dump` gave."""
        for family, what, n in dumped:
            self.counts.setdefault(family, Counter())[what] += n

    def entries(self, split: str) -> list[TeachCount]:
        """What the manifest says; families in which nothing was played are left out."""
        return [
            TeachCount(
                split=split,
                family=family,
                tasks=n["tasks"],
                trajectories=n["trajectories"],
                failures=n["failures"],
                repeated=n.get("repeated"),
                unsaid=n.get("unsaid"),
                mean_turns=round(n["turns"] / max(1, n["trajectories"]), 3),
                mean_plain_turns=round(n["plain_turns"] / max(1, n["trajectories"]), 3),
                untrainable_share=round(n["untrainable"] / max(1, n["turns"]), 4),
            )
            for family, n in sorted(self.counts.items())
            if any(n.values())
        ]


_Key = tuple[str, str, str]


class StatusTally:
    """Counts the candidates of one split by dialogue, strategy and family.

    Rows of a task come together: prompts are told apart within a task, and forgotten behind it.
    """

    def __init__(self) -> None:
        self.counts: dict[_Key, Counter[str]] = {}
        self._task = ""
        self._prompts: dict[_Key, set[str]] = {}

    def add(
        self,
        row: TrajectoryRow,
        dialogue: str,
        turns: int,
        strategies: Collection[str],
        mark: str,
        query: QueryRow | None,
    ) -> None:
        """Count a candidate.

        Args:
            row: Its trajectory.
            dialogue: Name of its dialogue.
            turns: Turns before the cut.
            strategies: What chose it.
            mark: Its status, or ``"ended"``.
            query: The query it became, if it was kept.
        """
        if row.task_id != self._task:
            self._task, self._prompts = row.task_id, {}
        marks = {mark: 1}
        if query is not None:
            prompt = sha256_text(canonical_json([[m.role, m.content] for m in query.messages]))
            marks |= {
                "bytes_equal": query.bytes_equal,
                "probe_unverifiable": query.probe == "unverifiable",
                "untrained": turns > 0 and not any(query.trainable),
            }
        for name in {"all", *strategies} if turns else {"raw"}:
            for family in (row.family, "all"):
                key = dialogue, name, family
                counts = self.counts.setdefault(key, Counter())
                counts.update(marks)
                if query is not None:
                    known = self._prompts.setdefault(key, set())
                    counts["distinct"] += prompt not in known
                    known.add(prompt)

    def dump(self) -> list[list[Any]]:
        """The counts as JSON."""
        return [
            [*key, what, n]
            for key, counts in sorted(self.counts.items())
            for what, n in counts.items()
        ]

    def load(self, dumped: Iterable[Iterable[Any]]) -> None:
        """Add what :meth:`dump` gave; no task may be in two such counts."""
        for dialogue, strategy, family, what, n in dumped:
            self.counts.setdefault((dialogue, strategy, family), Counter())[what] += n

    def entries(self, split: str) -> list[StatusCount]:
        """What the manifest says."""
        return [
            StatusCount(split=split, strategy=strategy, dialogue=dialogue, family=family, **counts)
            for (dialogue, strategy, family), counts in sorted(self.counts.items())
        ]
