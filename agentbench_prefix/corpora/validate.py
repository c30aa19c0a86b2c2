"""Check a corpus: what can be derived again is, and what differs is named by file, row and field.

Of every row: ids, order, hashes, conversations, canonical prompts, spans, masks, counts, prompt
hashes, and the cuts of strategies that need no model. Of a sample of trajectories, or of all:
their replay and that of their cuts, the cuts that a model's entropies ranked, and the old
log-probabilities, computed anew in the plainest way: one prompt at a time, in double precision.

The environment's own teacher plays the tasks of the sample again, and its rows must be the same.
What a model behind an endpoint chose cannot be derived: its actions and ``trainable`` flags are
taken as they are in the trajectories. Rows are read in streams; only ids are held.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from agentbench_prefix.errors import ConfigurationError, CorpusError
from agentbench_prefix.evaluation.tables import make_console

if TYPE_CHECKING:
    from agentbench_prefix.corpora.reading import Corpus

LIMIT = 20
"""Faults after which a check stops."""
TOLERANCE = 1e-4
"""Largest difference in nats between a number stored in single precision and one computed anew, in
double precision."""

Progress = Callable[[int, int], None]
"""Called with the trajectories that are done and all trajectories."""


class EnoughError(Exception):
    """The limit of faults is reached."""


@dataclasses.dataclass
class Report:
    """What a check found.

    Attributes:
        faults: What is wrong, what others follow from first: manifest, card, trajectories,
            queries, sidecars.
        checked: How many of what were checked.
        notes: What was left out, and why.
        deviations: Largest difference between a stored log-probability and the one computed anew,
            in nats, by ``<dialogue>/<model>``.
        limit: Faults after which the check stops.
    """

    faults: list[CorpusError] = dataclasses.field(default_factory=list)
    checked: Counter[str] = dataclasses.field(default_factory=Counter)
    notes: list[str] = dataclasses.field(default_factory=list)
    deviations: dict[str, float] = dataclasses.field(default_factory=dict)
    limit: int = LIMIT

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    def add(self, fault: CorpusError) -> None:
        """Note a fault, once."""
        if any(str(fault) == str(known) for known in self.faults):
            return
        self.faults.append(fault)
        if len(self.faults) >= self.limit:
            raise EnoughError


def validate(
    corpus: Corpus,
    *,
    every: bool = False,
    sample: int = 64,
    seed: int = 0,
    models: Mapping[str, str | Path] | None = None,
    without_models: bool = False,
    without_teacher: bool = False,
    limit: int = LIMIT,
    progress: Progress | None = None,
) -> Report:
    """Check a corpus.

    Args:
        corpus: The corpus.
        every: Replay and score all trajectories instead of a sample.
        sample: Trajectories to replay and score, drawn over all splits; and failures to replay,
            the first of each split.
        seed: Seed of the draw.
        models: Where models are, by ``<dialogue>/<model>`` or ``<model>``; by default where the
            recipe says.
        without_models: Load no model. Log-probabilities and entropies are then taken as they are,
            and masks are only checked for their lengths and sums.
        without_teacher: Do not let the environment's own teacher play again. Its choices and
            ``trainable`` flags are then taken as they are.
        limit: Most faults to collect.
        progress: Reports trajectories.

    Raises:
        ConfigurationError: ``models`` names one that the corpus does not have.
    """
    from agentbench_prefix.corpora.checks import (
        check_card,
        check_card_text,
        check_environment,
        check_files,
        check_recipe,
        check_splits,
        load_judges,
    )
    from agentbench_prefix.corpora.row_checks import RowChecks

    report = Report(limit=limit)
    try:
        check_files(corpus, report)
        recipe = check_recipe(corpus, report)
        check_card(corpus, report)
        env = None if recipe is None else check_environment(corpus, recipe, report)
        if recipe is not None and env is not None:
            check_splits(corpus, recipe, env, report)
            judges = load_judges(corpus, recipe, models or {}, report, without=without_models)
            rows = RowChecks(
                corpus,
                recipe,
                env,
                judges,
                report,
                every=every,
                sample=sample,
                without_teacher=without_teacher,
            )
            rows.check(seed, progress)
            if report.ok:
                check_card_text(corpus, report)
        else:
            report.notes.append("the rows were not checked, since there is nothing to check by")
    except EnoughError:
        report.notes.append(f"the check stopped after {limit} faults")
    report.faults.sort(key=_derived)
    return report


def _derived(fault: CorpusError) -> int:
    """Sorts faults of rows behind those of rows that they are derived from."""
    kinds = ("trajectories", "failures", "queries", "sidecars")
    root = fault.file.partition("/")[0]
    return kinds.index(root) if root in kinds else -1


def validate_command(
    corpus: Annotated[str, typer.Argument(metavar="CORPUS", help="Folder, name or Hub id.")],
    every: Annotated[
        bool, typer.Option("--all", help="Replay and score all trajectories, not a sample.")
    ] = False,
    sample: Annotated[
        int, typer.Option(min=0, help="Trajectories to replay and score, drawn by chance.")
    ] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draw.")] = 0,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FOLDER",
            help="Where a model of the corpus is; may be repeated. Default: as the recipe says.",
        ),
    ] = None,
    without_models: Annotated[
        bool,
        typer.Option(
            "--without-models", help="Load no model: tokens and log-probabilities stay unchecked."
        ),
    ] = False,
    without_teacher: Annotated[
        bool,
        typer.Option(
            "--without-teacher", help="Do not let the environment's own teacher play again."
        ),
    ] = False,
    progress: Annotated[bool, typer.Option(help="Show a progress bar on stderr.")] = True,
) -> None:
    """Derive a corpus again and name what differs by file, row and field; exit status 1 then."""
    from agentbench_prefix.corpora.find import find_corpus

    models = dict(_named_folder(text) for text in model or [])
    columns = (TextColumn("trajectories"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        found = find_corpus(corpus)
        with Bar(*columns, console=make_console(stderr=True), disable=not progress) as bar:
            task = bar.add_task("", total=None)
            report = validate(
                found,
                every=every,
                sample=sample,
                seed=seed,
                models=models,
                without_models=without_models,
                without_teacher=without_teacher,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
    except CorpusError as error:  # it cannot even be opened
        report = Report(faults=[error])
    print_report(report)
    if not report.ok:
        raise typer.Exit(1)


def _named_folder(text: str) -> tuple[str, str]:
    name, mark, folder = text.partition("=")
    if not (name and mark and folder):
        raise ConfigurationError(f"--model takes NAME=FOLDER, got {text!r}")
    return name, folder


def print_report(report: Report) -> None:
    """Print what was checked, what was left out, and each fault on a line of its own."""
    console = make_console()

    def line(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), soft_wrap=True)

    for what, count in report.checked.items():
        line(f"{count:>9,} {what}")
    for label, deviation in report.deviations.items():
        line(f"log-probabilities of {label} differ by {deviation:.1e} nats at most")
    for note in report.notes:
        line(f"note: {note}", "yellow")
    for fault in report.faults:
        line(f"fault: {fault}", "red")
    n = len(report.faults)
    line("no fault" if report.ok else f"{n} fault{'s' if n > 1 else ''}", "bold")
