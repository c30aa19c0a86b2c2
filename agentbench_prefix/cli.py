"""The command line ``agentbench-prefix``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from agentbench_prefix import registry
from agentbench_prefix.corpora import commands, hub
from agentbench_prefix.errors import AgentBenchError
from agentbench_prefix.eval import eval_command, run, shipped_checkpoints
from agentbench_prefix.evaluation.compare import compare as compare_runs
from agentbench_prefix.evaluation.runner import find_dialogue
from agentbench_prefix.evaluation.tables import make_console, print_comparison
from agentbench_prefix.leaderboard import commands as leaderboard
from agentbench_prefix.policies.scripted import HumanPolicy
from agentbench_prefix.report.commands import report_command
from agentbench_prefix.rollouts import play as play_episodes
from agentbench_prefix.rollouts import start
from agentbench_prefix.train import train_command

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Benchmark suite for small language models that act over many turns.",
)
app.command(name="eval")(eval_command)
app.command(name="train")(train_command)
app.command(name="report")(report_command)
app.command(name="teach")(commands.teach_command)
app.add_typer(commands.app, name="corpus")
app.add_typer(hub.app, name="hub")
app.add_typer(leaderboard.app, name="leaderboard")


@app.command(name="list")
def list_command() -> None:
    """List environments, methods with their checkpoints, and corpora."""
    console = make_console()

    def line(text: str, indent: int = 2, style: str = "") -> None:
        console.print(Text(" " * indent + text, style=style), soft_wrap=True)

    line("Environments", 0, "bold")
    for env_id in registry.environment_ids():
        try:
            env = registry.make(env_id)
            splits = [f"{split} {len(env.tasks(split))}" for split in env.splits()]
        except ImportError as error:
            line(f"{env_id}  cannot be used: {error}")
            continue
        except AgentBenchError as error:
            line(f"{env_id}  data: missing ({error})")
            continue
        line(f"{env_id}  data: ok ({env.data_hash[:12]})")
        line(f"tasks: {', '.join(splits)}; turn limit {env.max_turns}", 4)
        line("dialogues: " + ", ".join(d.label for d in env.dialogues().values()), 4)

    line("Methods", 0, "bold")
    for name in registry.method_names():
        try:
            method = registry.method(name)
        except ImportError as error:
            line(f"{name}  cannot be used: {error}")
            continue
        line(f"{name}  {method.summary}")
        shipped = shipped_checkpoints(name, registry.environment_ids())
        for env_id, folder in shipped.items():
            line(f"checkpoint for {env_id}: {folder}", 4)
        if not shipped:
            line("no checkpoint is shipped", 4)

    line("Corpora", 0, "bold")
    checkout = Path(__file__).parents[1]
    # Elsewhere the folder of that name beside this package is another library's.
    in_checkout = (checkout / "pyproject.toml").is_file()
    manifests = sorted(checkout.glob("datasets/*/manifest.json")) if in_checkout else []
    for manifest in manifests:
        described = json.loads(manifest.read_text(encoding="utf-8"))
        env_id = described.get("env_id", "") if isinstance(described, dict) else ""
        line(f"{manifest.parent.name}  {env_id}".rstrip())
    if not manifests:
        line("none")


@app.command()
def play(
    env: Annotated[str, typer.Argument(metavar="ENV", help="Environment id.")],
    task: Annotated[str | None, typer.Option(help="Task id. Default: drawn from --split.")] = None,
    split: Annotated[str, typer.Option(help="Split to draw a task from.")] = "train",
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the draw and of the game.")
    ] = None,
    dialogue: Annotated[
        str | None,
        typer.Option(help="See what a model sees in this dialogue, and write whole replies."),
    ] = None,
) -> None:
    """Play a task at the terminal; in the game :undo takes a turn back, :quit leaves."""
    console = make_console()
    game = registry.make(env)
    chosen = find_dialogue(game, dialogue)
    if task is None:
        _, info = game.reset(seed=seed, options={"split": split})
        task = str(info["task_id"])
    episode = start(game, chosen, task, seed=seed or 0)
    if dialogue is None:
        episode.messages = episode.messages[-1:]  # a person needs no instructions for models
    console.print(f"{env}, task {task} ({game.family(task)}). :help lists what you can write.")
    [record] = play_episodes(HumanPolicy(console, verbatim=dialogue is not None), [episode])
    if record.error is not None:
        console.print(f"You left after {record.n_turns} turns.")
        return
    console.print(Text(record.turns[-1].observation))
    outcome = "Solved" if record.success else f"Not solved ({record.failure_category})"
    console.print(f"{outcome} in {record.n_turns} turns.")


@app.command()
def compare(
    dir_a: Annotated[Path, typer.Argument(metavar="DIR_A", help="Run folder.")],
    dir_b: Annotated[Path, typer.Argument(metavar="DIR_B", help="Run folder.")],
) -> None:
    """Compare two evaluations over the same tasks: paired differences with 95 % intervals."""
    print_comparison(make_console(), compare_runs(dir_a, dir_b))


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the command line."""
    run(app, argv, "agentbench-prefix")
