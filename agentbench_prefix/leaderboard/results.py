"""Results: what one run cost and how it was measured, one JSON file a run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from agentbench_prefix import registry
from agentbench_prefix.cards import CheckpointCard, code_version
from agentbench_prefix.errors import AgentBenchError, CheckpointError, ConfigurationError
from agentbench_prefix.evaluation.compare import load_evaluation
from agentbench_prefix.evaluation.metrics import Metrics, Rates
from agentbench_prefix.evaluation.stats import ks, pass_at_k
from agentbench_prefix.files import write_json_atomic
from agentbench_prefix.policies.tokens import check_checkpoint
from agentbench_prefix.training.summary import (
    CHECKPOINT,
    SUMMARY,
    Cost,
    Init,
    Preprocessing,
    RunSummary,
    Sha256,
    Spent,
    corpus_cost,
    describe,
    read_model,
    recipe_sha256,
)

RESULTS = "results"
KEPT_CURVES = "curves"
TOLERANCE = 1e-9
"""Largest difference between a stored rate and the one its counts give."""


class Settings(BaseModel):
    """How a run was evaluated; rows of one table must agree in it.

    Attributes:
        samples: Episodes a task.
        temperature: Sampling temperature.
        top_p: Nucleus.
        max_tokens: Bound on one reply, in tokens.
        max_turns: Turn limit.
        dialogue: Label of the dialogue.
        env_arguments: Arguments of the environment that change its rules.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    samples: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(ge=0)]
    top_p: Annotated[float, Field(gt=0, le=1)]
    max_tokens: int
    max_turns: int | None
    dialogue: str
    env_arguments: dict[str, JsonValue]


class Result(BaseModel):
    """One run, trained and evaluated.

    A value of this class is consistent: rates follow from the counts of the single tasks, no
    episode errored, and the recipe's hash is that of the recipe.

    Attributes:
        format: Version of this layout.
        run: What the training cost.
        recipe_sha256: :func:`~agentbench_prefix.training.summary.recipe_sha256` of the run's
            recipe: seed and init are left out of it.
        settings: How it was evaluated.
        evaluation_seed: Seed of the evaluation.
        policy: What played, as evaluation describes it.
        evaluation_code: Code version that evaluated.
        splits: Metrics by split, whole splits only. Counts of solved samples by task are in them,
            so that paired differences need no episode.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    run: RunSummary
    recipe_sha256: Sha256
    settings: Settings
    evaluation_seed: int
    policy: dict[str, JsonValue]
    evaluation_code: str
    splits: Annotated[dict[str, Metrics], Field(min_length=1)]

    @property
    def name(self) -> str:
        """Name of the result and its file, without the ending."""
        row = row_name(self.run.method, self.run.variant, self.run.init.name)
        return f"{self.run.env_id}-{self.run.tier}-{row}-seed{self.run.seed}"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.recipe_sha256 != recipe_sha256(self.run.recipe):
            raise ValueError("recipe_sha256 is not the hash of run.recipe")
        for split, metrics in self.splits.items():
            expected = split, self.run.env_id, self.settings.samples
            if (metrics.split, metrics.env, metrics.samples) != expected:
                raise ValueError(
                    f"splits.{split} must be metrics of split {split}, {self.run.env_id} and "
                    f"{self.settings.samples} samples, as the result is"
                )
            if metrics.n_errors:
                raise ValueError(
                    f"splits.{split} has {metrics.n_errors} errored episodes: a leaderboard takes "
                    "none; run the evaluation again, which retries them"
                )
            _check_rates(f"splits.{split}", metrics)
        return self

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a result.

        Raises:
            ConfigurationError: The file is malformed, inconsistent or misnamed; the message names
                file and field.
        """
        result = read_model(cls, path, "a result of a run")
        if path.name != f"{result.name}.json":
            raise ConfigurationError(
                f"{path} holds the result that is named {result.name}.json: rename it, or remove it"
            )
        return result

    def save(self, folder: Path) -> Path:
        """Write ``<name>.json`` into a folder, atomically; return its path."""
        path = folder / f"{self.name}.json"
        write_json_atomic(path, self.model_dump(mode="json"))
        return path


def row_name(method: str, variant: str, init: str) -> str:
    """How a row is named in files: ``<method>[-<variant>][-from-<init>]``."""
    name = f"{method}-{variant}" if variant else method
    return name if init == "scratch" else f"{name}-from-{init}"


def _check_rates(where: str, metrics: Metrics) -> None:
    """Check that rates follow from the counts of the tasks.

    Raises:
        ValueError: One does not; it is named.
    """
    groups: dict[str, list[int]] = {}
    for task, row in metrics.tasks.items():
        if not 0 <= row.successes <= metrics.samples:
            raise ValueError(
                f"{where}.tasks.{task}.successes must be within 0 and {metrics.samples}, got "
                f"{row.successes}"
            )
        groups.setdefault(row.family, []).append(row.successes)
    if set(groups) != set(metrics.families):
        raise ValueError(f"{where}.families are not the families of its tasks")
    _check_group(where, metrics, [c for group in groups.values() for c in group], metrics.samples)
    for family, rates in metrics.families.items():
        _check_group(f"{where}.families.{family}", rates, groups[family], metrics.samples)


def _check_group(where: str, rates: Rates, solved: list[int], samples: int) -> None:
    n = len(solved)
    expected: dict[str, float] = {
        "n_tasks": n,
        "n_episodes": n * samples,
        "n_solved": sum(solved),
        "n_tasks_solved": sum(c > 0 for c in solved),
        "n_errors": 0,
    }
    stored: dict[str, float] = {name: getattr(rates, name) for name in expected}
    sizes = {str(k) for k in ks(samples)}
    for kind in ("avg_at_k", "pass_at_k"):
        estimates = getattr(rates, kind)
        if set(estimates) != sizes:
            raise ValueError(f"{where}.{kind} must have the entries {', '.join(sorted(sizes))}")
        for k, estimate in estimates.items():
            if kind == "avg_at_k":
                value = sum(solved) / (n * samples)
            else:
                value = math.fsum(pass_at_k(samples, c, int(k)) for c in solved) / n
            expected[f"{kind}.{k}.value"], stored[f"{kind}.{k}.value"] = value, estimate.value
            if not estimate.low - TOLERANCE <= value <= estimate.high + TOLERANCE:
                raise ValueError(f"{where}.{kind}.{k} has an interval that the rate is not in")
    for name, value in expected.items():
        if not abs(stored[name] - value) <= TOLERANCE:
            raise ValueError(
                f"{where}.{name} is {stored[name]:g}, the counts of its tasks give {value:g}"
            )


def read_results(folder: Path) -> list[Result]:
    """Read every ``*.json`` of a folder, in order of their names.

    Raises:
        ConfigurationError: One is malformed; the message names file and field.
    """
    return [Result.load(path) for path in sorted(folder.glob("*.json"))]


def make_result(summary: RunSummary, checkpoint: Path, evaluations: Iterable[Path]) -> Result:
    """Join a training run and its evaluations.

    Args:
        summary: What the training cost.
        checkpoint: Folder of the final checkpoint.
        evaluations: Run folders of finished evaluations of it, one a split, over whole splits.

    Raises:
        ConfigurationError: They do not belong together, or an episode errored.
        CheckpointError: The checkpoint is broken.
    """
    hashes = check_checkpoint(checkpoint)
    if hashes.model != summary.model_sha256:
        raise ConfigurationError(
            f"{checkpoint} has weights {hashes.model[:12]}, its run's summary names "
            f"{summary.model_sha256[:12]}: train again"
        )
    splits: dict[str, Metrics] = {}
    common: dict[str, Any] = {}
    for folder in evaluations:
        key, metrics = load_evaluation(folder)
        found = {
            "weights": key["policy"].get("sha256"),
            "environment": key["env"],
            "data": key["data_hash"],
            "tasks": key["tasks"],
        }
        expected = {
            "weights": hashes.checkpoint,
            "environment": summary.env_id,
            "data": summary.data_hash,
            "tasks": None,
        }
        for name, value in expected.items():
            if found[name] != value:
                raise ConfigurationError(
                    f"{folder} is no evaluation of {checkpoint} over a whole split: its {name} "
                    f"is {found[name]!r}, expected {value!r}; evaluate the checkpoint again"
                )
        shared = {name: key[name] for name in Settings.model_fields}
        shared |= {"seed": key["seed"], "policy": key["policy"]}
        if common and common != shared:
            raise ConfigurationError(
                f"{folder} was evaluated under other settings than the run's other splits"
            )
        common = shared
        splits[metrics.split] = metrics
    if not splits:
        raise ConfigurationError(f"there is no evaluation of {checkpoint}")
    try:
        return Result(
            run=summary,
            recipe_sha256=recipe_sha256(summary.recipe),
            settings=Settings(**{name: common[name] for name in Settings.model_fields}),
            evaluation_seed=common["seed"],
            policy=common["policy"],
            evaluation_code=code_version(),
            splits=splits,
        )
    except ValidationError as error:
        raise ConfigurationError(
            f"the evaluations of {checkpoint} make no result: {describe(error)}"
        ) from error


def load_summary(run: Path, tier: str) -> tuple[RunSummary, Path]:
    """Read what a training run cost, and where its final checkpoint is.

    Args:
        run: A run folder (``summary.json`` beside ``checkpoint/``), or one whose checkpoint has a
            card of supervised training, or such a checkpoint's own folder.
        tier: Tier of a run that states none.

    Raises:
        ConfigurationError: ``summary.json`` is malformed.
        CheckpointError: There is no finished run.
    """
    checkpoint = run / CHECKPOINT if (run / CHECKPOINT).is_dir() else run
    if (run / SUMMARY).is_file():
        return RunSummary.load(run), checkpoint
    card = CheckpointCard.load(checkpoint)
    if card is None:
        raise CheckpointError(
            f"{run} is no finished training run: it has neither {SUMMARY} nor a checkpoint with a "
            "card"
        )
    return summarize_card(card, tier), checkpoint


def summarize_card(card: CheckpointCard, tier: str) -> RunSummary:
    """What a supervised run cost, from the card of its checkpoint."""
    training = card.training
    data: Mapping[str, Any] = training.data
    origin = data.get("init", {})
    corpora: dict[str, str] = data.get("corpora", {})
    started = str(origin.get("from", "scratch"))
    teacher = _recorded(corpora) if corpora else int(data.get("distinct_draws", 0))
    return RunSummary(
        method=card.method,
        env_id=card.env_id,
        data_hash=card.data_hash,
        dialogue=card.dialogue,
        tier=tier,
        init=_init_of(started, card.env_id, origin),
        seed=training.seed,
        recipe=training.recipe,
        corpora=corpora,
        spent=Spent(
            steps=training.steps, rollouts=0, generated_tokens=0, learned_tokens=training.tokens
        ),
        preprocessing=Preprocessing(teacher=Cost(rollouts=teacher)),
        wall_seconds=60 * training.minutes,
        threads=training.threads,
        model_sha256=card.model_sha256,
        code_version=training.code_version,
        command=training.command,
    )


def _init_of(start: str, env_id: str, origin: Mapping[str, Any]) -> Init:
    """The init that a card describes: a method's shipped checkpoint, a folder, or new weights."""
    if start == "scratch":
        return Init(name=start)
    known = start in registry.method_names()
    folder = registry.method(start).checkpoint(env_id) if known else Path(start).expanduser()
    sha256 = origin.get("model_sha256")
    name = start if known else Path(start).name
    # The folder may hold another checkpoint by now.
    with contextlib.suppress(CheckpointError):
        if folder is not None and check_checkpoint(folder).checkpoint == origin.get("sha256"):
            sha256 = sha256 or check_checkpoint(folder).model
            card = CheckpointCard.load(folder)
            name = name if known or card is None else card.method
    return Init(name=name, model_sha256=sha256)


def _recorded(corpora: Mapping[str, str]) -> int:
    """The teacher's episodes behind what a run learned from, of corpora that are at hand."""
    from agentbench_prefix.corpora.find import find_corpus

    total = 0
    for label, sha256 in corpora.items():
        name, _, file = label.split(" ", 2)
        with contextlib.suppress(AgentBenchError):
            corpus = find_corpus(name)
            entry = corpus.manifest.files.get(file)
            if entry is not None and entry.sha256 == sha256:
                split = file.rpartition("/")[2].removesuffix(".parquet")
                total += corpus_cost(corpus, split).teacher.rollouts
    return total
