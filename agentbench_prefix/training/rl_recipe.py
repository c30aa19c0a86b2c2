"""Recipes of reinforcement learning, as one validated value.

A recipe file holds the fields of :class:`RLRecipe`, and besides: ``extends``, one or several files
by their path from its folder, whose fields it replaces, and each those of the ones before it;
``tiers``, fields of each size of run, where ``extends`` names another tier; ``variants``, fields of
each variant of the method. Mappings are merged field by field.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from agentbench_prefix.errors import ConfigurationError, UnknownNameError
from agentbench_prefix.files import read_mapping
from agentbench_prefix.training.summary import describe


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class QuerySpec(_Strict):
    """Which queries there are to draw from.

    Attributes:
        source: ``"tasks"``: raw tasks of the environment; ``"corpus"``: released queries;
            ``"trajectories"``: raw queries of a corpus' trajectories, which the method cuts itself.
        split: Split of the environment or corpus; with ``tasks`` also ``"generated"``.
        parameters: Arguments of ``generate_tasks``.
        n: Number of generated tasks.
        corpus: Name, folder or Hub id of the corpus.
        strategy: Cut strategy whose queries are taken; ``None`` for raw ones alone.
        raw: Whether raw queries are taken, too.
        sidecar: Name of the old policy of the prefixes.
        demonstrations: Whether whole trajectories are read, too, for methods that show them.
        family_weights: How often each family is drawn; ``None``: as often as it occurs.
    """

    source: Literal["tasks", "corpus", "trajectories"] = "tasks"
    split: str = "train"
    parameters: dict[str, JsonValue] = Field(default_factory=dict)
    n: int = Field(default=1024, gt=0)
    corpus: str | None = None
    strategy: str | None = None
    raw: bool = True
    sidecar: str | None = None
    demonstrations: bool = False
    family_weights: dict[str, float] | None = None

    @model_validator(mode="after")
    def _complete(self) -> QuerySpec:
        if self.source != "tasks" and self.corpus is None:
            raise ValueError(f"source {self.source!r} needs a corpus")
        if self.source == "corpus" and self.strategy is None and not self.raw:
            raise ValueError("neither a strategy nor raw queries: nothing is left to train on")
        return self


class EvaluationSpec(_Strict):
    """Evaluation on fixed tasks during training; they are left out of the training queries.

    Attributes:
        every: Steps between two evaluations; 0 for none. One is made at the start and at the end.
        split: Split of the tasks, never ``"test"``; ``"generated"`` for generated ones.
        parameters: Arguments of ``generate_tasks``.
        tasks: Number of tasks, spread evenly over families; or a number for each family.
        samples: Samples of each task.
    """

    every: int = Field(default=10, ge=0)
    split: str = "train"
    parameters: dict[str, JsonValue] = Field(default_factory=dict)
    tasks: int | dict[str, int] = 32
    samples: int = Field(default=4, gt=0)

    @model_validator(mode="after")
    def _not_test(self) -> EvaluationSpec:
        if self.split not in ("train", "generated"):
            raise ValueError(
                f"training is not watched on split {self.split!r}: use 'train', of which these "
                "tasks are held out, or 'generated'"
            )
        return self


class Expected(_Strict):
    """What the estimates of a dry run assume.

    Attributes:
        model: Configuration of the model, arguments of ``Qwen3Config``, where its own is not at
            hand.
        prompt_tokens: Mean tokens of a query's prompt.
        episode_tokens: Mean tokens of a continuation, what the environment says included.
        generated_tokens: Mean generated tokens of one.
        generated_per_second: Tokens that one device generates.
        flops_per_second: Floating point operations that one device does in training.
        devices: Devices, one process each.
    """

    model: dict[str, JsonValue] | None = None
    prompt_tokens: float = Field(default=220, gt=0)
    episode_tokens: float = Field(default=300, gt=0)
    generated_tokens: float = Field(default=110, gt=0)
    generated_per_second: float = Field(default=2000, gt=0)
    flops_per_second: float = Field(default=4e10, gt=0)
    devices: int = Field(default=1, gt=0)


class RLRecipe(_Strict):
    """A run of reinforcement learning.

    Attributes:
        env_id: Environment.
        dialogue: Name of the dialogue.
        init: A method's name (its shipped checkpoint), a folder or a Hub id.
        revision: Commit of a Hub id.
        variant: Which variant of the method; empty for its main form.
        queries: What there is to train on.
        seed: Seed of the run.
        steps: Batches of rollouts.
        queries_per_step: Queries in each.
        samples: Samples of each query (G).
        resampling: Most rounds of drawing until every query has a group that the method accepts.
        epochs: Optimizer steps on each batch of rollouts.
        microbatch: Rollouts sent through the model at once, on each process; ``None`` for all.
        lr: Learning rate of AdamW, constant after the warm-up.
        warmup_steps: Optimizer steps over which it rises from 0.
        weight_decay: Decoupled weight decay.
        betas: AdamW's.
        grad_clip: Largest gradient norm.
        temperature: Of sampling, and of the log-probabilities that are learnt.
        top_p: Nucleus of sampling.
        max_tokens: Bound on one reply; ``None`` for the dialogue's.
        context: Most tokens of a prompt and its continuation together; an episode that outgrows it
            ends unsolved. ``None`` for the model's.
        max_turns: Turn limit in training; ``None`` for the environment's.
        fresh_budget: Whether prefix turns do not count toward it.
        objective: Fields of the method, see its ``Settings``.
        evaluation: What training is watched on.
        save_every: Steps between two states that a broken run resumes from.
        dtype: Number format of the weights in training.
        autocast: Number format that training computes in; ``None`` for that of the weights.
        save_dtype: Number format of the final checkpoint.
        device: ``"cpu"`` or ``"cuda"``.
        rollouts: What plays: ``"transformers"``, or ``"vllm"`` as ``trainer`` sets it up.
        report_to: Where ``transformers`` reports metrics besides ``log.jsonl``.
        expected: What the estimates of a dry run assume.
        trainer: Further arguments of ``trl.GRPOConfig``, e.g. ``deepspeed`` or ``vllm_mode``.
    """

    env_id: str
    dialogue: str
    init: str
    revision: str | None = None
    variant: str = ""
    queries: QuerySpec = QuerySpec()
    seed: int = Field(default=0, ge=0, lt=10**9)
    steps: int = Field(gt=0)
    queries_per_step: int = Field(default=16, gt=0)
    samples: int = Field(default=8, gt=1)
    resampling: int = Field(default=1, gt=0)
    epochs: int = Field(default=2, gt=0)
    microbatch: int | None = Field(default=None, gt=0)
    lr: float = Field(default=5e-6, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.01, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    grad_clip: float = Field(default=1.0, gt=0)
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_tokens: int | None = Field(default=None, gt=0)
    context: int | None = Field(default=None, gt=0)
    max_turns: int | None = Field(default=None, gt=0)
    fresh_budget: bool = False
    objective: dict[str, JsonValue] = Field(default_factory=dict)
    evaluation: EvaluationSpec = EvaluationSpec()
    save_every: int = Field(default=10, gt=0)
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    autocast: Literal["bfloat16"] | None = None
    save_dtype: Literal["float32", "float64", "bfloat16"] = "bfloat16"
    device: Literal["cpu", "cuda"] = "cpu"
    rollouts: Literal["transformers", "vllm"] = "transformers"
    report_to: tuple[str, ...] = ()
    expected: Expected = Expected()
    trainer: dict[str, JsonValue] = Field(default_factory=dict)


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``above`` over those of ``below``, mappings merged field by field."""
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = merge(old, value)
        merged[name] = value
    return merged


def _read(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    fields = read_mapping(path, "recipe")
    extends = fields.pop("extends", None)
    if path.resolve() in seen:
        raise ConfigurationError(f"the recipe {path} extends itself: mend its field extends")
    below: dict[str, Any] = {}
    for name in extends if isinstance(extends, list) else [] if extends is None else [extends]:
        below = merge(below, _read(path.parent / str(name), (*seen, path.resolve())))
    return merge(below, fields)


def _tier(tiers: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    fields = dict(tiers[name])
    below = fields.pop("extends", None)
    return fields if below is None else merge(_tier(tiers, below), fields)


def load_rl_recipe(
    path: Path,
    *,
    tier: str | None = None,
    variant: str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> RLRecipe:
    """Read a recipe from YAML, for a size of run and a variant of the method.

    Args:
        path: The file.
        tier: One of its ``tiers``; not looked at in a file without any.
        variant: One of its ``variants``; ``None`` for the main form.
        overrides: Fields to replace.

    Raises:
        ConfigurationError: The file is missing or a field is wrong; the message names the field.
        UnknownNameError: There is no such tier or variant.
    """
    fields: dict[str, Any] = _read(path)
    tiers: dict[str, dict[str, Any]] = fields.pop("tiers", {})
    variants: dict[str, dict[str, Any]] = fields.pop("variants", {})
    if tiers:
        if tier is None or tier not in tiers:
            raise UnknownNameError(f"tier of {path}", tier, tiers)
        fields = merge(fields, _tier(tiers, tier))
    if variant:
        if variant not in variants:
            raise UnknownNameError(f"variant of {path}", variant, variants)
        fields = merge(fields, {**variants[variant], "variant": variant})
    fields = merge(fields, overrides or {})
    try:
        return RLRecipe.model_validate(fields)
    except ValidationError as error:
        raise ConfigurationError(f"the recipe {path} is not valid: {describe(error)}") from error
