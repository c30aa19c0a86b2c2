"""From results to the rows of a table: seeds averaged, differences paired by task.

For a row with S seeds, task i has the value ``x_i = (1 / S) sum_s c_is / n`` for Avg@n and
``y_i = (1 / S) sum_s [c_is > 0]`` for Pass@n, where ``c_is`` of n samples solved it under seed s.
Means over tasks, differences of two rows' means over the same tasks, and their 95 % intervals are
those of :mod:`agentbench_prefix.evaluation.stats`: tasks are resampled, seeds are not. What seeds
change is stated apart, as the standard deviation between the seeds' means.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentbench_prefix.errors import ConfigurationError
from agentbench_prefix.evaluation.stats import Estimate, Floats, mean_estimates, pass_at_k
from agentbench_prefix.files import canonical_json, read_mapping
from agentbench_prefix.leaderboard.results import Result
from agentbench_prefix.training.summary import Label, describe

CONFIG = "leaderboard.yaml"
ALL = "all"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Reference(_Part):
    """A row that others are compared with.

    Attributes:
        name: How tables call it.
        method: Its method.
        variant: Its variant; empty for the main form.
        init: What it started from.
    """

    name: str
    method: Label
    variant: str = ""
    init: Label


class LeaderboardConfig(_Part):
    """``leaderboard.yaml``: what is particular to these leaderboards.

    Attributes:
        references: Rows that every other row is compared with, where they are in the table.
        names: How tables write a method; a method without an entry is written as it is registered.
        splits: Splits in their order, by environment; others follow by name.
    """

    references: tuple[Reference, ...] = ()
    names: dict[str, str] = {}
    splits: dict[str, Annotated[tuple[str, ...], Field(min_length=1)]] = {}

    @classmethod
    def load(cls, folder: Path) -> LeaderboardConfig:
        """Read it from a folder of leaderboards; without the file, the defaults.

        Raises:
            ConfigurationError: It is malformed; the message names the field.
        """
        path = folder / CONFIG
        if not path.is_file():
            return cls()
        fields = read_mapping(path, "configuration of leaderboards")
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise ConfigurationError(f"{path} is not valid: {describe(error)}") from error


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """Runs that differ in their seed alone; compared by identity.

    Attributes:
        results: One a seed, in order of seeds.
        recipe: First digits of the recipe's hash where the page has several recipes, or corpora,
            of this method; else empty.
    """

    results: tuple[Result, ...]
    recipe: str = ""

    @property
    def method(self) -> str:
        """Its method."""
        return self.results[0].run.method

    @property
    def variant(self) -> str:
        """Its variant; empty for the main form."""
        return self.results[0].run.variant

    @property
    def init(self) -> str:
        """What its runs started from."""
        return self.results[0].run.init.name

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of its runs."""
        return tuple(result.run.seed for result in self.results)

    def sort_key(self) -> tuple[str, ...]:
        """Names, to order rows that are otherwise equal."""
        return self.method, self.variant, self.init, self.recipe

    def values(self, splits: Sequence[str], families: Iterable[str] | None = None) -> Floats:
        """Values of single tasks.

        Args:
            splits: Splits whose tasks are taken, in order.
            families: Only these families; ``None`` for all.

        Returns:
            Shape ``(2, n_seeds, n_tasks)``, within [0, 1]: share of samples that solved the task,
            and whether any did.
        """
        chosen = None if families is None else set(families)
        n = self.results[0].settings.samples
        solved = np.array(
            [
                [
                    row.successes
                    for split in splits
                    for row in result.splits[split].tasks.values()
                    if chosen is None or row.family in chosen
                ]
                for result in self.results
            ]
        )
        passed = np.array([[pass_at_k(n, int(c), n) for c in counts] for counts in solved])
        return np.stack([solved / n, passed])


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a row achieved on a set of tasks.

    Attributes:
        n_tasks: Tasks.
        n_episodes: Episodes, over all seeds.
        n_solved: Episodes that solved their task.
        average: Avg@n.
        passed: Pass@n.
        average_sd: Standard deviation of the seeds' Avg@n (n - 1 in the denominator); ``None``
            for a single seed.
        passed_sd: That of their Pass@n.
        average_range: Lowest and highest of the seeds' Avg@n.
    """

    n_tasks: int
    n_episodes: int
    n_solved: int
    average: Estimate
    passed: Estimate
    average_sd: float | None
    passed_sd: float | None
    average_range: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Difference:
    """Row minus reference over the tasks of both, paired.

    Attributes:
        average: Difference in Avg@n, within [-1, 1].
        passed: Difference in Pass@n, within [-1, 1].
    """

    average: Estimate
    passed: Estimate


def measure(row: Row, splits: Sequence[str], family: str = ALL) -> Measured:
    """What a row achieved on the tasks of some splits, of one family or all."""
    average, passed = row.values(splits, None if family == ALL else [family])
    seeds = average.mean(axis=1)
    several = len(seeds) > 1
    values = np.stack([average.mean(axis=0), passed.mean(axis=0)], axis=1)
    of_average, of_passed = mean_estimates(values)
    n = row.results[0].settings.samples
    return Measured(
        n_tasks=average.shape[1],
        n_episodes=average.size * n,
        n_solved=round(float(average.sum()) * n),
        average=of_average,
        passed=of_passed,
        average_sd=round(float(seeds.std(ddof=1)), 12) if several else None,
        passed_sd=round(float(passed.mean(axis=1).std(ddof=1)), 12) if several else None,
        average_range=(round(float(seeds.min()), 12), round(float(seeds.max()), 12)),
    )


def difference(row: Row, reference: Row, splits: Sequence[str], family: str = ALL) -> Difference:
    """Row minus reference, paired by task, over the tasks of some splits."""
    families = None if family == ALL else [family]
    ours = row.values(splits, families).mean(axis=1)
    theirs = reference.values(splits, families).mean(axis=1)
    average, passed = mean_estimates((ours - theirs).T, low=-1.0, high=1.0)
    return Difference(average, passed)


@dataclasses.dataclass(frozen=True)
class Section:
    """A table of a page: some splits, and the rows that were measured on all of them.

    Attributes:
        splits: Its splits.
        families: Their families and how many tasks each has, by name.
        rows: Its rows, best Avg@n first.
        measured: What each achieved, by row and family, ``"all"`` for all of them.
    """

    splits: tuple[str, ...]
    families: dict[str, int]
    rows: tuple[Row, ...]
    measured: dict[Row, dict[str, Measured]]


@dataclasses.dataclass(frozen=True)
class Page:
    """All that was measured on an environment in a tier.

    Attributes:
        env_id: Environment.
        tier: Tier.
        data_hash: Hash of the environment's data.
        samples: Episodes a task.
        sections: One a split, then one over all splits if there are several.
        rows: Every row, by name.
    """

    env_id: str
    tier: str
    data_hash: str
    samples: int
    sections: tuple[Section, ...]
    rows: tuple[Row, ...]

    @property
    def name(self) -> str:
        """Name of its files, without the ending."""
        return f"{self.env_id}-{self.tier}"

    def find(self, method: str, variant: str, init: str | None) -> Row | None:
        """The row of a method, ``None`` if it was not measured.

        Raises:
            ConfigurationError: There are several of it.
        """
        found = [
            row
            for row in self.rows
            if (row.method, row.variant) == (method, variant) and init in (None, row.init)
        ]
        if len(found) > 1:
            raise ConfigurationError(
                f"{self.name} has {len(found)} rows of {method} from {init}, so none can be what "
                "others are compared with: remove the results of all recipes but one"
            )
        return found[0] if found else None


def make_pages(results: Iterable[Result], config: LeaderboardConfig) -> list[Page]:
    """Sort results into pages and rows.

    Raises:
        ConfigurationError: Results of a page were measured differently, or on other tasks; or a
            run is there twice.
    """
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.run.env_id, result.run.tier), []).append(result)
    return [
        _make_page(env_id, tier, members, config)
        for (env_id, tier), members in sorted(groups.items())
    ]


def _make_page(env_id: str, tier: str, members: list[Result], config: LeaderboardConfig) -> Page:
    _check_alike(members)
    rows = _make_rows(members)
    known = {split for result in members for split in result.splits}
    order = [split for split in config.splits.get(env_id, ()) if split in known]
    order += sorted(known - set(order))
    sections = [_make_section((split,), rows) for split in order]
    everywhere = [row for row in rows if all(_has(row, split) for split in order)]
    if len(order) > 1 and everywhere and _disjoint(everywhere[0], order):
        sections.append(_make_section(tuple(order), rows))
    first = members[0]
    return Page(
        env_id=env_id,
        tier=tier,
        data_hash=first.run.data_hash,
        samples=first.settings.samples,
        sections=tuple(sections),
        rows=rows,
    )


def _make_rows(members: Iterable[Result]) -> tuple[Row, ...]:
    groups: dict[tuple[str, str, str], dict[str, list[Result]]] = {}
    for result in members:
        run = result.run
        recipe = canonical_json([result.recipe_sha256, run.corpora])
        of_name = groups.setdefault((run.method, run.variant, run.init.name), {})
        of_name.setdefault(recipe, []).append(result)
    rows = []
    for recipes in groups.values():
        for of_recipe in recipes.values():
            ordered = tuple(sorted(of_recipe, key=lambda result: result.run.seed))
            seeds = [result.run.seed for result in ordered]
            if len(set(seeds)) < len(seeds):
                raise ConfigurationError(f"{ordered[0].name} is there twice: remove one of them")
            if len({tuple(sorted(result.splits)) for result in ordered}) > 1:
                raise ConfigurationError(
                    f"the seeds of {ordered[0].name} were evaluated on different splits: evaluate "
                    "all of them on all splits"
                )
            several = len(recipes) > 1
            rows.append(Row(ordered, ordered[0].recipe_sha256[:8] if several else ""))
    return tuple(sorted(rows, key=Row.sort_key))


def _check_alike(members: Sequence[Result]) -> None:
    """Check that rows of a page may stand beside each other.

    Raises:
        ConfigurationError: They may not; two files and what differs are named.
    """
    first = members[0]
    tasks: dict[str, tuple[Result, Mapping[str, Any]]] = {}
    for result in members:
        same = [
            ("data_hash", first.run.data_hash, result.run.data_hash),
            *(
                (f"settings.{name}", getattr(first.settings, name), getattr(result.settings, name))
                for name in type(first.settings).model_fields
            ),
        ]
        for split, metrics in result.splits.items():
            of_split = {task: row.family for task, row in metrics.tasks.items()}
            other, expected = tasks.setdefault(split, (result, of_split))
            # The order matters: differences are paired by position.
            if list(expected.items()) != list(of_split.items()):
                raise ConfigurationError(
                    f"{other.name} and {result.name} have other tasks in split {split!r} and "
                    "cannot be in one table: evaluate one of them again"
                )
        for name, a, b in same:
            if a != b:
                raise ConfigurationError(
                    f"{first.name} and {result.name} cannot be in one table: their {name} is {a!r} "
                    f"and {b!r}; evaluate one of them again as the other was"
                )


def _has(row: Row, split: str) -> bool:
    return all(split in result.splits for result in row.results)


def _disjoint(row: Row, splits: Sequence[str]) -> bool:
    tasks = [task for split in splits for task in row.results[0].splits[split].tasks]
    return len(set(tasks)) == len(tasks)


def _make_section(splits: tuple[str, ...], rows: Iterable[Row]) -> Section:
    chosen = [row for row in rows if all(_has(row, split) for split in splits)]
    counts: dict[str, int] = {}
    for split in splits:
        for task in chosen[0].results[0].splits[split].tasks.values():
            counts[task.family] = counts.get(task.family, 0) + 1
    families = dict(sorted(counts.items()))
    measured = {
        row: {family: measure(row, splits, family) for family in (*families, ALL)} for row in chosen
    }
    chosen.sort(key=lambda row: (-measured[row][ALL].average.value, row.sort_key()))
    return Section(splits, families, tuple(chosen), measured)
