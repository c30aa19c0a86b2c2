"""Evaluate a policy: ``python -m agentbench_prefix.eval --method METHOD``."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from agentbench_prefix import registry
from agentbench_prefix.cards import CheckpointCard
from agentbench_prefix.env import TextEnv
from agentbench_prefix.errors import (
    AgentBenchError,
    CheckpointError,
    ConfigurationError,
    UnknownNameError,
)
from agentbench_prefix.evaluation.runner import EvalConfig, choose_tasks, evaluate, find_dialogue
from agentbench_prefix.evaluation.tables import make_console, print_metrics
from agentbench_prefix.files import sha256_file
from agentbench_prefix.policies.base import Policy
from agentbench_prefix.policies.scripted import OraclePolicy, RandomPolicy
from agentbench_prefix.policies.tokens import FoundCheckpoint, find_checkpoint

SCRIPTED: dict[str, Callable[[], Policy]] = {"oracle": OraclePolicy, "random": RandomPolicy}
"""Methods that need no checkpoint."""
DEVICE = "cpu"
THREADS = 1
"""One thread is fastest for the shipped models, and repeats on every machine of a kind."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


class Backend(StrEnum):
    """What runs the model."""

    TRANSFORMERS = "transformers"
    VLLM = "vllm"


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a policy comes from.

    Attributes:
        model: Checkpoint, or name at the endpoint; ``None`` for a scripted policy.
        card: Card of the checkpoint, if it has one.
        env_id: Environment to play.
    """

    model: FoundCheckpoint | str | None
    card: CheckpointCard | None
    env_id: str


def resolve(
    method: str,
    env_id: str | None,
    model: str | None,
    *,
    revision: str | None = None,
    endpoint: bool = False,
) -> Source:
    """Find the checkpoint of a method, on the Hub if need be, and the environment it is to play.

    Args:
        method: Method, or the name of a scripted policy.
        env_id: Environment, if it was named.
        model: Checkpoint, if it was named: folder, Hub id, or name at an endpoint.
        revision: Branch, tag or commit of a Hub id.
        endpoint: Whether the model is behind an endpoint.

    Raises:
        UnknownNameError: Unknown environment, or unknown method without a model.
        CheckpointError: The method ships no checkpoint, or there is none where it was said to be.
        ConfigurationError: The environment must be named, or a revision belongs to no Hub id.
    """
    known = [*SCRIPTED, *registry.method_names()]
    if method not in known and model is None:
        raise UnknownNameError("method", method, known, "With --model it may be any label.")
    if not re.fullmatch(r"[\w.+-]+", method):  # it names tables and folders
        raise ConfigurationError(
            f"--method {method!r} is no label: use letters, digits, '.', '_', '+' and '-'"
        )
    if env_id is not None:
        registry.environment_class(env_id)  # an unknown one is named before anything is loaded
    if method in SCRIPTED:
        return Source(None, None, env_id or _only_environment())
    if endpoint:
        return Source(model, None, env_id or _only_environment())
    if model is not None:
        checkpoint = find_checkpoint(model, revision)
        card = CheckpointCard.load(checkpoint.folder)
        return Source(checkpoint, card, env_id or (card.env_id if card else _only_environment()))
    found = shipped_checkpoints(method, [env_id] if env_id else registry.environment_ids())
    if len(found) > 1:
        raise ConfigurationError(
            f"method {method!r} ships checkpoints for {', '.join(found)}: choose one with --env"
        )
    if not found:
        where = f" for {env_id}" if env_id else ""
        elsewhere = ", ".join(shipped_checkpoints(method, registry.environment_ids()))
        others = f" (it ships them for {elsewhere})" if elsewhere else " yet"
        raise CheckpointError(
            f"method {method!r} ships no checkpoint{where}{others}: give "
            f"--model PATH|HUB_ID, or train one with python -m agentbench_prefix.train --method "
            f"{method} --env {env_id or 'ENV'}"
        )
    [(env_id, folder)] = found.items()
    return Source(find_checkpoint(folder, revision), CheckpointCard.load(folder), env_id)


def shipped_checkpoints(method: str, env_ids: Sequence[str]) -> dict[str, Path]:
    """Folders of the checkpoints that a method ships, by environment."""
    shipped = {env_id: registry.method(method).checkpoint(env_id) for env_id in env_ids}
    return {env_id: folder for env_id, folder in shipped.items() if folder and folder.is_dir()}


def _refuse_idle_options(method: str, base_url: str | None, given: dict[str, bool]) -> None:
    """Refuse options that would change nothing.

    Args:
        method: Method, or the name of a scripted policy.
        base_url: Endpoint.
        given: Options about what runs the model, and whether they differ from their defaults.

    Raises:
        ConfigurationError: There are some.
    """
    if method in SCRIPTED:
        why = f"--method {method} plays without a model"
    elif base_url is not None:
        why = "what is behind --base-url is not loaded here"
        given = given | {"--model": False, "--base-url": False}
    else:
        return
    if idle := [option for option, is_given in given.items() if is_given]:
        raise ConfigurationError(f"{why}: leave {', '.join(idle)} out")


def _only_environment() -> str:
    known = registry.environment_ids()
    if len(known) != 1:
        raise ConfigurationError(
            f"name the environment with --env; registered: {', '.join(known) or 'none'}"
        )
    return known[0]


@app.command(name="eval")
def eval_command(
    method: Annotated[
        str,
        typer.Option(
            help="A registered method (its shipped checkpoint unless --model is given), or "
            "'oracle', 'random'. With --model it is the label."
        ),
    ],
    env: Annotated[
        str | None, typer.Option(help="Environment id. Default: the checkpoint's card names it.")
    ] = None,
    split: Annotated[str, typer.Option(help="Split of tasks.")] = "test",
    samples: Annotated[int, typer.Option(min=1, help="Episodes a task (the k of Avg@k).")] = 8,
    tasks: Annotated[
        int | None,
        typer.Option(min=1, help="Take so many tasks, spread evenly over the split's families."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the run.")] = 0,
    max_turns: Annotated[
        int | None, typer.Option(min=1, help="Turn limit. Default: the environment's.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature, >= 0.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus kept when sampling, in (0, 1].")] = 1.0,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Bound on one reply, in tokens. Default: the card's or the dialogue's."
        ),
    ] = None,
    dialogue: Annotated[
        str | None,
        typer.Option(help="Name of the dialogue. Default: the card's or the environment's first."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|HUB_ID", help="Checkpoint to play; with --base-url the model's name."
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of a Hub model.")] = None,
    base_url: Annotated[
        str | None, typer.Option(help="Root of an OpenAI-compatible API, e.g. http://host/v1.")
    ] = None,
    backend: Annotated[Backend, typer.Option(help="What runs the model.")] = Backend.TRANSFORMERS,
    device: Annotated[str, typer.Option(help="Torch device.")] = DEVICE,
    threads: Annotated[
        int,
        typer.Option(
            min=1, help="CPU threads of the transformers back end; their number moves last digits."
        ),
    ] = THREADS,
    batch_size: Annotated[int, typer.Option(min=1, help="Episodes played together.")] = 64,
    out: Annotated[
        Path | None,
        typer.Option(help="Run folder. Default: runs/eval/..., named after the configuration."),
    ] = None,
    max_consecutive_errors: Annotated[
        int, typer.Option(min=1, help="Stop after so many errored episodes in a row.")
    ] = 16,
    progress: Annotated[bool, typer.Option(help="Show a progress bar on stderr.")] = True,
) -> None:
    """Evaluate a policy: k samples a task, resumable, Avg@k and Pass@k with 95 % intervals.

    Writes config.json, episodes.jsonl and metrics.json to the run folder. The same command
    resumes a broken run and retries errored episodes. Exit status: 0, 1 if episodes errored,
    2 if the run could not be made.
    """
    if not 0 <= temperature < math.inf:
        raise ConfigurationError(f"--temperature must be finite and >= 0, got {temperature}")
    if not 0 < top_p <= 1:
        raise ConfigurationError(f"--top-p must be in (0, 1], got {top_p}")
    given = {
        "--model": model is not None,
        "--revision": revision is not None,
        "--base-url": base_url is not None,
        "--backend": backend is not Backend.TRANSFORMERS,
        "--device": device != DEVICE,
        "--threads": threads != THREADS,
    }
    _refuse_idle_options(method, base_url, given)
    if base_url is not None and model is None:
        raise ConfigurationError("--base-url needs --model, the model's name at the endpoint")
    stderr = make_console(stderr=True)

    def warn(text: str) -> None:
        stderr.print(f"warning: {text}", style="yellow", markup=False, soft_wrap=True)

    source = resolve(method, env, model, revision=revision, endpoint=base_url is not None)
    card = source.card
    config = EvalConfig(
        method=method,
        env=source.env_id,
        split=split,
        tasks=tasks,
        samples=samples,
        seed=seed,
        max_turns=max_turns,
        temperature=temperature,
        top_p=top_p,
        batch_size=batch_size,
    )
    game = config.make_env()
    choose_tasks(game, split, tasks)  # a bad split is named before a model is loaded
    if card is not None and isinstance(source.model, FoundCheckpoint):
        _check_card(card, source.model.folder, game, warn)
    taught = card is not None and card.env_id == game.env_id
    if dialogue is None and card is not None and taught:
        dialogue = card.dialogue.partition("@")[0]
    spoken = find_dialogue(game, dialogue)
    if card is not None and taught and spoken.label != card.dialogue:
        warn(f"the checkpoint was taught in {card.dialogue}, it is evaluated in {spoken.label}")
    if max_tokens is None:
        same = card is not None and spoken.label == card.dialogue
        max_tokens = card.max_tokens if card is not None and same else spoken.max_tokens
    config = config.model_copy(update={"dialogue": spoken.name, "max_tokens": max_tokens})
    policy = _policy(method, source.model, config, base_url, backend, device, threads)
    with _bar(stderr, shown=progress) as show:
        run = evaluate(
            config,
            policy,
            out,
            max_consecutive_errors=max_consecutive_errors,
            progress=show,
            warn=warn,
        )
    stdout = make_console()
    print_metrics(stdout, run.metrics, run.first_error)
    stdout.print(f" written to {run.folder}", markup=False, soft_wrap=True)
    if run.metrics.n_errors:
        raise typer.Exit(1)


def _check_card(
    card: CheckpointCard, folder: Path, env: TextEnv, warn: Callable[[str], None]
) -> None:
    weights = folder / "model.safetensors"
    if weights.is_file() and sha256_file(weights) != card.model_sha256:
        warn(
            f"{weights} is not the file its card describes: the card's results are not this file's"
        )
    if card.env_id != env.env_id:
        warn(f"the checkpoint was trained for {card.env_id}, it is evaluated on {env.env_id}")
    elif card.data_hash != env.data_hash:
        warn(
            f"the checkpoint was trained on other data of {env.env_id} "
            f"({card.data_hash[:12]}, here {env.data_hash[:12]}): results may not be comparable"
        )


def _policy(
    method: str,
    model: FoundCheckpoint | str | None,
    config: EvalConfig,
    base_url: str | None,
    backend: Backend,
    device: str,
    threads: int,
) -> Policy:
    """Load a policy; its back end is imported only now."""
    if method in SCRIPTED:
        return SCRIPTED[method]()
    assert model is not None
    assert config.max_tokens is not None
    if base_url is not None:
        assert isinstance(model, str)
        from agentbench_prefix.policies.openai import OpenAIPolicy

        return OpenAIPolicy(
            base_url,
            model,
            temperature=config.temperature,
            top_p=config.top_p,
            max_tokens=config.max_tokens,
        )
    settings: dict[str, Any] = {
        "device": device,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "max_tokens": config.max_tokens,
    }
    if backend is Backend.VLLM:
        from agentbench_prefix.policies.vllm import VLLMPolicy

        return VLLMPolicy.load(model, **settings)
    from agentbench_prefix.policies.transformers import TransformersPolicy

    return TransformersPolicy.load(model, threads=threads, **settings)


@contextlib.contextmanager
def _bar(console: Console, *, shown: bool) -> Iterator[Callable[[int, int, int], None] | None]:
    """Progress bar: episodes done and the running success rate."""
    if not shown:
        yield None
        return
    columns = (
        TextColumn("episodes"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console)
    task = bar.add_task("", total=None, rate="")

    def show(done: int, solved: int, total: int) -> None:
        bar.start()  # only now: a run that is refused shows no bar
        rate = f"solved {solved}/{done} ({solved / done:.1%})" if done else ""
        bar.update(task, completed=done, total=total, rate=rate)

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()


def run(program: typer.Typer, argv: Sequence[str] | None = None, name: str | None = None) -> None:
    """Run a command line; an error of this library becomes one line and exit status 2."""
    try:
        program(args=argv, prog_name=name)
    except AgentBenchError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        raise SystemExit(2) from None


if __name__ == "__main__":
    run(app, name="python -m agentbench_prefix.eval")
