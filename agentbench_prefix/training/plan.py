"""What a run would do and take, without doing it."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentbench_prefix.errors import AgentBenchError
from agentbench_prefix.policies.tokens import FoundCheckpoint
from agentbench_prefix.training.rl_recipe import RLRecipe

if TYPE_CHECKING:
    from agentbench_prefix.training.objective import Objective
    from agentbench_prefix.training.queries import QueryPool

BYTES = {"float32": 4, "float64": 8, "bfloat16": 2}
_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a decoder.

    Attributes:
        parameters: Parameters, tied ones once.
        matrices: Those of matrices that every token passes, the output layer left out.
        layers, hidden, intermediate, vocabulary: Its sizes.
    """

    parameters: int
    matrices: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """From a model's configuration."""
        hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        width = int(config.get("head_dim") or hidden // heads)
        intermediate, vocabulary = int(config["intermediate_size"]), int(config["vocab_size"])
        attention = hidden * width * (2 * heads + 2 * kv_heads)
        matrices = layers * (attention + 3 * hidden * intermediate)
        tied = bool(config.get("tie_word_embeddings", False))
        embeddings = hidden * vocabulary * (1 if tied else 2)
        return cls(matrices + embeddings, matrices, layers, hidden, intermediate, vocabulary)


def find_shape(recipe: RLRecipe, start: FoundCheckpoint | None) -> Shape | None:
    """Sizes of the model a recipe trains, from its checkpoint or from the recipe."""
    if start is not None and (start.folder / "config.json").is_file():
        return Shape.of(json.loads((start.folder / "config.json").read_text("utf-8")))
    return None if recipe.expected.model is None else Shape.of(recipe.expected.model)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a run takes, by the recipe's ``expected``.

    Attributes:
        rollouts: Episodes.
        generated: Generated tokens.
        learned: Tokens that pass the model in training, summed over optimizer epochs; a prompt
            counts once for its group.
        flops: Floating point operations of training.
        hours: Device hours: of rollouts, of training.
        memory: GiB on each device, by what takes them.
    """

    rollouts: int
    generated: float
    learned: float
    flops: float
    hours: tuple[float, float]
    memory: dict[str, float]


def estimate(recipe: RLRecipe, objective: Objective[Any], shape: Shape) -> Estimate:
    """Estimate tokens, operations, device hours and memory.

    Training costs 6 operations a parameter and token (forward 2, backward 4), 8 with activation
    checkpointing, and ``2 * 2 * layers * hidden`` a token and position attended to, three times. A
    pass for old log-probabilities costs a third of one for training.

    Args:
        recipe: The recipe.
        objective: Its method's.
        shape: The model's sizes.
    """
    expected = recipe.expected
    rollouts = recipe.steps * recipe.queries_per_step * recipe.samples
    generated = rollouts * expected.generated_tokens
    passes = (
        recipe.epochs
        + {"first_epoch": 0.0, "before": 1 / 3, "each_epoch": recipe.epochs / 3}[
            objective.old_logprobs
        ]
    )
    group = expected.prompt_tokens + recipe.samples * expected.episode_tokens
    tokens = rollouts / recipe.samples * group
    checkpointing = bool(recipe.trainer.get("activation_checkpointing"))
    factor = 8 if checkpointing else 6
    length = expected.prompt_tokens + expected.episode_tokens
    attention = 2 * factor * shape.layers * shape.hidden * length / 2
    output = factor * shape.vocabulary * shape.hidden * expected.generated_tokens * rollouts
    flops = passes * (tokens * (factor * shape.matrices + attention) + output)
    weights = BYTES[recipe.dtype]
    compute = BYTES[recipe.autocast or recipe.dtype]
    own = recipe.queries_per_step * recipe.samples // expected.devices
    micro = recipe.microbatch or own
    prompts = -(-micro // recipe.samples)
    longest = recipe.context or 2 * length
    most = prompts * min(expected.prompt_tokens, longest) + micro * max(
        longest - expected.prompt_tokens, expected.episode_tokens
    )
    # Of a layer: its input, or with nothing recomputed about 16 times that and 4 times the inner.
    layer = 16 * shape.hidden + 4 * shape.intermediate
    kept = shape.layers * (shape.hidden if checkpointing else layer) + layer
    usual = prompts * expected.prompt_tokens + micro * expected.episode_tokens
    # They and their gradients; autocast hands results on in single precision.
    wide = BYTES["float32"] if recipe.autocast else compute
    logits = micro * expected.generated_tokens * shape.vocabulary * 2 * wide
    memory = {
        "weights": shape.parameters * weights / _GIB,
        "gradients": shape.parameters * weights / _GIB,
        "optimizer": 2 * shape.parameters * weights / _GIB,
        "activations, usual": usual * kept * compute / _GIB,
        "activations, longest": most * kept * compute / _GIB,
        "logits, usual": logits / _GIB,
    }
    hours = (
        generated / expected.generated_per_second / 3600,
        flops / expected.flops_per_second / 3600,
    )
    return Estimate(rollouts, generated, passes * tokens, flops, hours, memory)


def describe_plan(
    method: str,
    recipe: RLRecipe,
    objective: Objective[Any],
    shape: Shape | None,
    pool: QueryPool | AgentBenchError,
    corpora: Mapping[str, str],
    watched: Sequence[str],
) -> str:
    """A plan as text: the recipe in full, what it trains on, how it is shared out, what it takes.

    Args:
        method: The method.
        recipe: The recipe.
        objective: The method's.
        shape: The model's sizes, if they are known.
        pool: Queries, or why there are none here.
        corpora: What was read of corpora.
        watched: Tasks that training is watched on.
    """
    import yaml

    fields = recipe.model_dump(mode="json")
    fields["objective"] = objective.settings.model_dump(mode="json")
    lines = [f"# {method} on {recipe.env_id}, resolved", yaml.safe_dump(fields, sort_keys=False)]
    lines.append("# Queries")
    if isinstance(pool, AgentBenchError):
        lines.append(f"not at hand: {pool}")
    else:
        kinds = Counter((q.family, "cut" if q.prefix_turns else "raw") for q in pool.queries)
        total = sum(pool.weights.values())
        for family, weight in pool.weights.items():
            share = weight / total
            lines.append(
                f"{family}: {kinds[family, 'raw']} raw, {kinds[family, 'cut']} cut; drawn "
                f"{100 * share:.0f} % of the time"
            )
        lines += [f"{name}: sha256 {value}" for name, value in corpora.items()]
        lines.append(f"watched on {len(watched)} tasks x {recipe.evaluation.samples}, held out")
    world = recipe.expected.devices
    rollouts = recipe.queries_per_step * recipe.samples
    micro = recipe.microbatch or max(rollouts // world, 1)
    lines += [
        "",
        "# Each step",
        f"{recipe.queries_per_step} queries x {recipe.samples} samples = {rollouts} rollouts, "
        f"{recipe.epochs} optimizer steps on them",
        f"{world} process(es) x {rollouts // world // micro or 1} micro-batches x {micro} rollouts",
        f"{recipe.steps} steps, {recipe.steps * recipe.epochs} optimizer steps",
    ]
    if shape is not None:
        lines += ["", *_estimated(estimate(recipe, objective, shape), recipe, shape)]
    else:
        lines += ["", "# Estimates", "none: the model's sizes are not known; set expected.model"]
    return "\n".join(lines) + "\n"


def _estimated(found: Estimate, recipe: RLRecipe, shape: Shape) -> list[str]:
    expected = recipe.expected
    rolled, trained = found.hours
    lines = [
        "# Estimates, from the recipe's `expected`",
        f"{shape.parameters / 1e6:,.1f} M parameters, {shape.layers} layers of {shape.hidden}",
        f"{found.rollouts:,} rollouts, {found.generated:,.0f} generated tokens, "
        f"{found.learned:,.0f} tokens through training",
        f"{found.flops:.2e} operations in training",
        f"device hours: {rolled:.1f} of rollouts + {trained:.1f} of training = "
        f"{rolled + trained:.1f} ({(rolled + trained) / expected.devices:.1f} on "
        f"{expected.devices} device(s))",
        "memory of each device without sharding, GiB: "
        + ", ".join(f"{name} {size:.2f}" for name, size in found.memory.items()),
    ]
    if recipe.rollouts == "vllm":
        share = recipe.trainer.get("vllm_gpu_memory_utilization")
        if recipe.trainer.get("vllm_mode") == "colocate" and share is not None:
            lines.append(f"beside it, vLLM takes {100 * float(str(share)):.0f} % of the device")
    return lines
