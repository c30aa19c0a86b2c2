"""The commands ``agentbench-prefix leaderboard ...``.

What they do is imported when they run, so that the command line starts without it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from agentbench_prefix.evaluation.tables import make_console

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Make leaderboards from results, and fill in what they lack.",
)

_Folder = Annotated[
    Path, typer.Option("--dir", help="Folder of leaderboards: results/ and the pages.")
]
_FOLDER = Path("leaderboards")


@app.command(name="build")
def build_command(
    folder: _Folder = _FOLDER,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit with 1 if a page is not current.")
    ] = False,
) -> None:
    """Make the pages of every environment and tier from results/*.json: Markdown and CSV."""
    from agentbench_prefix.leaderboard.pages import build, stale_pages, write_pages

    console = make_console()
    made = build(folder)
    if check:
        stale = stale_pages(folder, made)
        for name in stale:
            console.print(
                f"{folder / name} is not what the results give", markup=False, soft_wrap=True
            )
        if stale:
            console.print(
                f"run agentbench-prefix leaderboard build --dir {folder}",
                markup=False,
                soft_wrap=True,
            )
            raise typer.Exit(1)
        console.print(f"{len(made)} pages are what the results give")
        return
    changed = write_pages(folder, made)
    for name in changed:
        verb = "wrote" if name in made else "removed"
        console.print(f"{verb} {folder / name}", markup=False, soft_wrap=True)
    console.print(f"{len(made)} pages, {len(changed)} changed")


@app.command(name="fill")
def fill_command(
    plan: Annotated[Path, typer.Option(help="YAML file that says which runs there should be.")],
    folder: _Folder = _FOLDER,
    runs: Annotated[
        Path, typer.Option(help="Folder of the run folders; a broken run goes on there.")
    ] = Path("runs/leaderboard"),
    jobs: Annotated[int, typer.Option(min=1, help="Runs at the same time.")] = 2,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be run, and run nothing.")
    ] = False,
    progress: Annotated[bool, typer.Option(help="Show a table of running jobs on stderr.")] = True,
) -> None:
    """Train and evaluate what a plan lacks; the same command goes on after any end.

    A failed run is reported and does not stop the others. Exit status: 0, 1 if a run failed, 2 if
    the plan cannot be used.
    """
    from agentbench_prefix.leaderboard.fill import (
        Filler,
        Job,
        Plan,
        elapsed,
        plan_jobs,
        progress_of,
        train_command,
    )
    from agentbench_prefix.leaderboard.results import RESULTS

    console = make_console()
    planned = plan_jobs(Plan.load(plan))
    stages: dict[str, tuple[str, float]] = {}

    def report(job: Job, stage: str) -> None:
        console.print(
            f"{time.strftime('%H:%M:%S')} {job.name}: {stage}", markup=False, soft_wrap=True
        )
        stages[job.name] = stage, time.monotonic()
        if stage == "done" or stage.startswith(("done ", "FAILED")):
            stages.pop(job.name)

    filler = Filler(folder / RESULTS, runs, report)
    if dry_run:
        for job in planned:
            state = "done" if filler.is_done(job) else "missing"
            if job.shipped is None:
                what = " ".join(train_command(job, runs / job.name)[1:])
            else:
                what = f"evaluate {job.shipped}"
            console.print(f"{job.name}  {state}: {what}", markup=False, soft_wrap=True)
        return

    class Running:
        def __rich__(self) -> Group:
            table = Table(box=box.SIMPLE, padding=(0, 1))
            for name in ("run", "stage", "so far", "time"):
                table.add_column(name, overflow="fold")
            for name, (stage, since) in list(stages.items()):
                what = stage.partition(" (")[0]
                table.add_row(name, what, progress_of(runs / name), elapsed(since))
            return Group(table)

    stderr = make_console(stderr=True)
    if progress and stderr.is_terminal:
        with Live(Running(), console=stderr, refresh_per_second=1, transient=True):
            outcomes = filler.fill(planned, jobs)
    else:
        outcomes = filler.fill(planned, jobs)
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    ran = sum(outcome.ran and outcome.error is None for outcome in outcomes)
    before = sum(not outcome.ran for outcome in outcomes)
    console.print(
        f"{len(outcomes)} runs: {ran} filled in, {before} done before, {len(failed)} failed"
    )
    for outcome in failed:
        console.print(f"  {outcome.job.name}: {outcome.error}", markup=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


@app.command(name="ship")
def ship_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Finished training runs.")],
    name: Annotated[
        str | None, typer.Option(help="Name of the folder. Default: METHOD[-VARIANT]-from-INIT.")
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            help="Folder to ship to. Default: the method's checkpoints of that environment."
        ),
    ] = None,
    max_mb: Annotated[float, typer.Option(help="Most megabytes (10^6 bytes) a checkpoint.")] = 2.0,
) -> None:
    """Copy final checkpoints as bfloat16 safetensors, with card and tokenizer."""
    from agentbench_prefix.errors import ConfigurationError
    from agentbench_prefix.leaderboard.ship import ship, shipping_folder

    if name is not None and len(runs) > 1:
        raise ConfigurationError("--name is for one run: leave it out, or ship one at a time")
    console = make_console()
    for run in runs:
        made = ship(run, shipping_folder(run, name=name, to=to), max_megabytes=max_mb)
        size = sum(path.stat().st_size for path in made.iterdir()) / 10**6
        console.print(f"{run} -> {made} ({size:.2f} MB)", markup=False, soft_wrap=True)


@app.command(name="verify")
def verify_command(
    checkpoints: Annotated[
        list[Path], typer.Argument(metavar="CHECKPOINT...", help="Shipped checkpoint folders.")
    ],
    folder: _Folder = _FOLDER,
    splits: Annotated[
        list[str] | None, typer.Option("--split", help="Only this split; may be repeated.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder of the evaluations; a broken one goes on there.")
    ] = Path("runs/verify"),
) -> None:
    """Evaluate shipped checkpoints again: is each rate within the interval of its row?

    Exit status: 0, 1 if a rate lies outside, 2 if a checkpoint has no row.
    """
    from agentbench_prefix.errors import UnknownNameError
    from agentbench_prefix.leaderboard.results import RESULTS, read_results
    from agentbench_prefix.leaderboard.ship import find_result, reevaluate

    results = read_results(folder / RESULTS)
    found = [(checkpoint, find_result(checkpoint, results)) for checkpoint in checkpoints]
    for _, result in found:
        for split in splits or ():
            if split not in result.splits:
                raise UnknownNameError(f"split of {result.name}", split, result.splits)
    console = make_console()
    outside = 0
    for checkpoint, result in found:
        console.print(Text(f"{checkpoint}: {result.name}", style="bold"), soft_wrap=True)
        place = out / f"{result.name}-{checkpoint.resolve().name}"
        for agreement in reevaluate(checkpoint, result, place, splits=splits):
            outside += not agreement.within
            row = agreement.row
            console.print(
                f"  {agreement.split} {agreement.metric}: {100 * agreement.again.value:.1f}, "
                f"{'within' if agreement.within else 'OUTSIDE'} the row's "
                f"{100 * row.value:.1f} [{100 * row.low:.1f}, {100 * row.high:.1f}]",
                markup=False,
            )
    if outside:
        raise typer.Exit(1)
