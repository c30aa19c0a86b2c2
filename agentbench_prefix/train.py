"""Train a method: ``python -m agentbench_prefix.train --method METHOD --env ENV``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from agentbench_prefix import registry
from agentbench_prefix.errors import ConfigurationError, MissingExtraError
from agentbench_prefix.eval import run
from agentbench_prefix.evaluation.tables import make_console, print_metrics

SHOWN = ("loss", "reward", "turns")
"""Metrics beside the progress bar."""
COMMON = ("seconds", "success", "eval")
"""Groups of metrics that no method has of its own."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def set_fields(given: Sequence[str]) -> dict[str, Any]:
    """Nested fields of a recipe from ``path.to.field=value``, values in YAML.

    Raises:
        ConfigurationError: One has another form.
    """
    import yaml

    found: dict[str, Any] = {}
    for text in given:
        path, mark, value = text.partition("=")
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigurationError(f"--set {text!r}: {value!r} is no YAML ({error})") from error
        *above, last = path.split(".")
        if not mark or not all([*above, last]):
            raise ConfigurationError(f"--set {text!r} must have the form field=value")
        inner = found
        for name in above:
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                raise ConfigurationError(f"--set {text!r}: {name} is set to a value already")
        inner[last] = parsed
    return found


@app.command(name="train")
def train_command(
    method: Annotated[str, typer.Option(help="Registered method, e.g. sft.")],
    env: Annotated[str, typer.Option(help="Environment id.")],
    tier: Annotated[
        str, typer.Option(help="Size of the run: cpu, or another of the recipe's, e.g. qwen3-1.7b.")
    ] = "cpu",
    recipe: Annotated[
        Path | None, typer.Option(help="YAML file to use instead of the method's own recipe.")
    ] = None,
    variant: Annotated[
        str | None, typer.Option(help="Variant of the method, one of its recipe's.")
    ] = None,
    corpus: Annotated[
        str | None, typer.Option(help="Corpus to learn from: name, folder or Hub id at a commit.")
    ] = None,
    init: Annotated[
        str | None,
        typer.Option(help="Start from this method's checkpoint, or this checkpoint folder."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=10**9 - 1, help="Seed of data and weights.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps.")] = None,
    fields: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Recipe field to replace, e.g. lr=0.0003 or objective.form=joint; repeatable.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Run folder. Default: runs/train/ENV/METHOD[-VARIANT][-INIT]-seedN."),
    ] = None,
    evaluate: Annotated[
        bool, typer.Option(help="Evaluate on the test split and write the results to the card.")
    ] = True,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the recipe in full and what it would take; no more."),
    ] = False,
    progress: Annotated[bool, typer.Option(help="Show a progress bar on stderr.")] = True,
) -> None:
    """Train a method by its recipe and write RUN/checkpoint: weights, tokenizer, card.

    The same command resumes a broken run.
    """
    registry.environment_class(env)
    try:
        import torch
        import transformers
    except ImportError as error:
        raise MissingExtraError("training", "eval") from error
    # One thread: the models of the CPU tier gain nothing from more, and results repeat.
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    trained = registry.method(method)
    arguments = {
        "tier": tier,
        "recipe_file": recipe,
        "variant": variant,
        "corpus": corpus,
        "init": init,
        "seed": seed,
        "steps": steps,
        **set_fields(fields or []),
    }
    if dry_run:
        typer.echo(trained.plan(env, **arguments), nl=False)
        return
    name = "-".join([method, *filter(None, (variant, init and Path(init).name))])
    folder = out or Path("runs") / "train" / env / f"{name}-seed{seed or 0}"
    columns = (
        TextColumn("steps"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[shown]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=make_console(stderr=True), disable=not progress) as bar:
        task = bar.add_task("", total=None, shown="")

        def report(step: int, total: int, metrics: Mapping[str, float]) -> None:
            shown = " ".join(f"{n} {metrics[n]:.3f}" for n in SHOWN if n in metrics)
            bar.update(task, completed=step + 1, total=total, shown=shown)
            own = [n for n in sorted(metrics) if "/" in n and n.partition("/")[0] not in COMMON]
            if "reward" in metrics and progress:  # a step of these takes seconds: a line for each
                values = " ".join(f"{n} {metrics[n]:.3g}" for n in own)
                line = f"{step + 1}/{total} {shown} {values}".rstrip()
                bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

        checkpoint = trained.train(env, out=folder, progress=report, **arguments)
    if os.environ.get("RANK", "0") != "0":  # of several processes the first one reports
        return
    stdout = make_console()
    if evaluate:
        from agentbench_prefix.evaluation.checkpoints import evaluate_checkpoint

        print_metrics(stdout, evaluate_checkpoint(checkpoint, folder / "eval"), None)
    stdout.print(f" written to {checkpoint}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    run(app, name="python -m agentbench_prefix.train")
