"""``python -m agentbench_prefix.train``: train a method on an environment."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from agentbench_prefix import registry
from agentbench_prefix.errors import AgentBenchError, MissingExtraError

TIERS = ("cpu",)


def train(
    method: Annotated[str, typer.Option(help="Registered method, e.g. sft.")],
    env: Annotated[str, typer.Option(help="Environment id, e.g. TextCraft-v0.")],
    tier: Annotated[str, typer.Option(help="Size of the run: cpu.")] = "cpu",
    init: Annotated[
        str | None, typer.Option(help="Start from: a method's name or a checkpoint folder.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of data and weights.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; the same command resumes it.")
    ] = None,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
) -> None:
    """Train a method from its recipe and write a checkpoint with its card."""
    try:
        _train(method, env, tier, init, seed, steps, out, progress)
    except AgentBenchError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(2) from error


def _train(
    name: str,
    env_id: str,
    tier: str,
    init: str | None,
    seed: int | None,
    steps: int | None,
    out: Path | None,
    show: bool,
) -> None:
    from agentbench_prefix.errors import UnknownNameError

    if tier not in TIERS:
        raise UnknownNameError("tier", tier, TIERS)
    registry.environment_class(env_id)
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError("training", "eval") from error
    # One thread: the models of the CPU tier are too small to gain from more, and results repeat.
    torch.set_num_threads(1)
    method = registry.method(name)
    out = out or Path("runs") / "train" / env_id / f"{name}-seed{seed or 0}"

    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    from rich.console import Console

    with Progress(*columns, console=Console(stderr=True), disable=not show) as bar:
        task = bar.add_task(f"{name} on {env_id}", total=None, loss=float("nan"))

        def report(step: int, total: int, loss: float) -> None:
            bar.update(task, completed=step + 1, total=total, loss=loss)

        checkpoint = method.train(
            env_id, out=out, init=init, seed=seed, steps=steps, progress=report
        )
    print(checkpoint)  # noqa: T201


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(train)

if __name__ == "__main__":
    app()
