"""The commands ``agentbench-prefix teach`` and ``agentbench-prefix corpus ...``.

What they do is imported when they run, so that the command line starts without it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from agentbench_prefix.corpora.validate import validate_command
from agentbench_prefix.errors import ConfigurationError, UnknownNameError
from agentbench_prefix.evaluation.tables import make_console

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Build, check and read prefix corpora.",
)
app.command(name="validate")(validate_command)

_Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Processes that replay. Default: one a CPU, at most 8."),
]
_Discard = Annotated[
    bool, typer.Option("--discard", help="Throw away another recipe's broken build at this place.")
]
_Bar = Annotated[bool, typer.Option(help="Show a progress bar on stderr.")]


@contextmanager
def _bar(shown: bool) -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn("tasks"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=make_console(stderr=True), disable=not shown)
    task = bar.add_task("", total=None)

    def report(done: int, total: int) -> None:
        bar.start()  # not before there is something to report: an error is printed alone
        bar.update(task, completed=done, total=total)

    try:
        yield report
    finally:
        if bar.live.is_started:
            bar.stop()


def _workers(given: int | None) -> int:
    return given or min(8, len(os.sched_getaffinity(0)))


def teach_command(
    env: Annotated[str, typer.Option(help="Environment id.")],
    out: Annotated[Path, typer.Option(help="Folder of the corpus of trajectories.")],
    teacher: Annotated[str, typer.Option(help="Who plays: oracle or openai.")] = "oracle",
    per_task: Annotated[int, typer.Option(min=1, help="Solved trajectories a task.")] = 4,
    attempts: Annotated[int, typer.Option(min=1, help="Most episodes a task.")] = 16,
    split: Annotated[str, typer.Option(help="Split of the environment.")] = "train",
    tasks: Annotated[int | None, typer.Option(min=1, help="Only the first so many tasks.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the attempts.")] = 0,
    detours: Annotated[
        float, typer.Option(min=0, max=0.99, help="oracle: probability of a detour a turn.")
    ] = 0.2,
    base_url: Annotated[
        str | None, typer.Option(help="openai: root of the API; the key is OPENAI_API_KEY.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="openai: name of the model.")] = None,
    dialogue: Annotated[str, typer.Option(help="openai: dialogue it plays in.")] = "full",
    temperature: Annotated[float, typer.Option(min=0, help="openai: temperature.")] = 1.0,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="openai: bound on one reply. Default: the dialogue's.")
    ] = None,
    licence: Annotated[
        str | None,
        typer.Option(help="SPDX id of the trajectories' licence. Default for oracle: Apache-2.0."),
    ] = None,
    discard: _Discard = False,
    progress: _Bar = True,
) -> None:
    """Let a teacher play and write its trajectories; the same command resumes a broken run."""
    from agentbench_prefix.corpora.build import build
    from agentbench_prefix.corpora.recipe import make_recipe
    from agentbench_prefix.corpora.show import print_stats

    section: dict[str, Any] = {"per_task": per_task, "attempts": max(attempts, per_task)}
    section |= {"kind": teacher, "seed": seed}
    if teacher == "oracle":
        section["detours"] = detours
    elif teacher == "openai":
        if base_url is None or model is None:
            raise ConfigurationError("--teacher openai needs --base-url and --model")
        if licence is None:
            raise ConfigurationError(
                "--teacher openai needs --licence: what may be done with a model's output is for "
                "its licence to say"
            )
        section |= {"base_url": base_url, "model": model, "dialogue": dialogue}
        section |= {"temperature": temperature, "max_tokens": max_tokens}
    else:
        raise UnknownNameError("teacher", teacher, ["oracle", "openai"])
    recipe = make_recipe(
        {
            "name": re.sub(r"[^A-Za-z0-9._-]+", "-", out.name).strip("-._") or "trajectories",
            "licence": licence or "Apache-2.0",
            "env_id": env,
            "splits": {split: split},
            "tasks": tasks,
            "teacher": section,
        }
    )
    with _bar(progress) as report:
        corpus = build(recipe, out, discard=discard, progress=report)
    stdout = make_console()
    print_stats(stdout, corpus)
    stdout.print(f"written to {out}", markup=False, soft_wrap=True)


@app.command(name="build")
def build_command(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE", help="YAML file, or a corpus: what its recipe says."),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the corpus.")],
    trajectories: Annotated[
        str | None, typer.Option(help="Corpus to take the trajectories from. Default: teach.")
    ] = None,
    tasks: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many tasks of each split.")
    ] = None,
    workers: _Workers = None,
    discard: _Discard = False,
    progress: _Bar = True,
) -> None:
    """Build a corpus; the same command resumes a broken build."""
    from agentbench_prefix.corpora.build import build
    from agentbench_prefix.corpora.find import find_corpus
    from agentbench_prefix.corpora.reading import RECIPE
    from agentbench_prefix.corpora.recipe import load_corpus_recipe
    from agentbench_prefix.corpora.show import print_stats

    path = Path(recipe)
    if not path.is_file() and path.suffix not in (".yaml", ".yml"):
        path = find_corpus(recipe).folder / RECIPE
    with _bar(progress) as report:
        corpus = build(
            load_corpus_recipe(path, tasks=tasks),
            out,
            trajectories=None if trajectories is None else find_corpus(trajectories),
            workers=_workers(workers),
            discard=discard,
            progress=report,
        )
    stdout = make_console()
    print_stats(stdout, corpus)
    stdout.print(f"written to {out}", markup=False, soft_wrap=True)


@app.command(name="stats")
def stats_command(
    corpus: Annotated[str, typer.Argument(metavar="CORPUS", help="Folder, name or Hub id.")],
) -> None:
    """Print what a corpus holds: the teacher's play, candidates by replay status, files."""
    from agentbench_prefix.corpora.find import find_corpus
    from agentbench_prefix.corpora.show import print_stats

    print_stats(make_console(), find_corpus(corpus))


@app.command(name="show")
def show_command(
    corpus: Annotated[str, typer.Argument(metavar="CORPUS", help="Folder, name or Hub id.")],
    query: Annotated[
        str | None,
        typer.Argument(metavar="[QUERY]", help="Query id. Default: the first with a prefix."),
    ] = None,
    split: Annotated[str, typer.Option(help="Split of the corpus.")] = "train",
    model: Annotated[str | None, typer.Option(help="Model whose sidecar is shown.")] = None,
) -> None:
    """Print a query: prefix, cut, observation, and the masked tokens in colour."""
    from agentbench_prefix.corpora.find import find_corpus
    from agentbench_prefix.corpora.show import (
        find_query,
        find_sidecar,
        load_serializer,
        print_query,
    )

    found = find_corpus(corpus)
    found.check_split(split)
    row = find_query(found, split, query, model)
    scored = find_sidecar(found, split, row, model)
    if scored is None:
        print_query(make_console(), row, None, None)
        return
    entry, sidecar = scored
    print_query(make_console(), row, sidecar, load_serializer(entry, row.env_id))


@app.command(name="export")
def export_command(
    corpus: Annotated[str, typer.Argument(metavar="CORPUS", help="Folder, name or Hub id.")],
    to: Annotated[str, typer.Option(help="Layout: verl (queries) or chat (trajectories).")],
    out: Annotated[Path, typer.Option(help="File to write.")],
    dialogue: Annotated[str, typer.Option(help="Dialogue.")],
    split: Annotated[str, typer.Option(help="Split of the corpus.")] = "train",
    model: Annotated[
        str | None, typer.Option(help="verl: old policy whose sidecars are written.")
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(help="verl: keep cuts of this strategy; may be repeated. Default: all."),
    ] = None,
    raw: Annotated[bool, typer.Option(help="verl: keep raw queries.")] = True,
) -> None:
    """Write a corpus for another trainer."""
    from agentbench_prefix.corpora.export import export_chat, export_verl
    from agentbench_prefix.corpora.find import find_corpus

    if to not in ("verl", "chat"):
        raise UnknownNameError("layout", to, ["verl", "chat"])
    if out.is_dir():
        raise ConfigurationError(f"{out} is a folder; name a file with --out")
    found = find_corpus(corpus)
    if to == "chat":
        rows = export_chat(found, out, split=split, dialogue=dialogue)
    elif model is None:
        known = ", ".join(found.manifest.models) or "none"
        raise ConfigurationError(f"--to verl needs --model; this corpus has sidecars of: {known}")
    else:
        rows = export_verl(
            found, out, split=split, dialogue=dialogue, model=model, strategies=strategy, raw=raw
        )
    make_console().print(f"{rows:,} rows written to {out}", markup=False, soft_wrap=True)
