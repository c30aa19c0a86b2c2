"""Small runs of reinforcement learning: a random model in double precision on real episodes."""

from __future__ import annotations

import dataclasses
import functools
import random
from pathlib import Path
from typing import Any

import reference
import torch
import transformers

from agentbench_prefix import make, registry
from agentbench_prefix.corpora.find import find_corpus
from agentbench_prefix.dialogue import Message
from agentbench_prefix.evaluation.runner import find_dialogue
from agentbench_prefix.serialization import ChatSerializer
from agentbench_prefix.training.queries import QueryPool, corpus_queries
from agentbench_prefix.training.rl_recipe import RLRecipe, merge

ENV = "TextCraft-v0"
TRAJECTORIES = 6

SMALL: dict[str, Any] = {
    "env_id": ENV,
    "dialogue": "compact",
    "init": "sft",
    "steps": 3,
    "queries_per_step": 4,
    "samples": 4,
    "microbatch": 4,
    "lr": 0.01,
    "max_tokens": 4,
    "max_turns": 7,
    "queries": {"source": "corpus", "corpus": "textcraft-prefix", "sidecar": "sft"},
    "evaluation": {"every": 0},
    "dtype": "float64",
    "save_dtype": "float64",
}


def recipe(**changes: Any) -> RLRecipe:
    return RLRecipe.model_validate(merge(SMALL, changes))


@functools.cache
def tokenizer() -> Any:
    folder = registry.method("sft").checkpoint(ENV)
    return transformers.AutoTokenizer.from_pretrained(folder)


def random_model(seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """Two query heads a key-value head; more rows of logits than the tokenizer has ids."""
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=1216,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=4096,
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer().eos_token_id,
        pad_token_id=tokenizer().pad_token_id,
    )
    model = transformers.Qwen3ForCausalLM(config).to(dtype).eval()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(_normalize, module)
    return model


def _normalize(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """RMSNorm in the model's own precision: transformers' goes through single precision."""
    variance = hidden.pow(2).mean(-1, keepdim=True)
    return module.weight * hidden * torch.rsqrt(variance + module.variance_epsilon)


def plain_logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    """Log-probability of each token but the first, one sequence at a time, without any packing."""
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    logits = model(torch.tensor([ids])).logits[0, :-1, : len(tokenizer())]
    model.set_attn_implementation(before)
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


@functools.cache
def trajectories() -> list[Any]:
    corpus = find_corpus("textcraft-prefix")
    rows = [row for row in corpus.trajectories("train") if 3 <= row.n_turns <= 6]
    return rows[:: len(rows) // TRAJECTORIES][:TRAJECTORIES]


@functools.cache
def released() -> list[Any]:
    """Raw and cut queries of a few trajectories, with sidecars."""
    corpus = find_corpus("textcraft-prefix")
    dialogue = find_dialogue(make(ENV), "compact")
    names = {row.trajectory_id for row in trajectories()}
    found = corpus_queries(
        corpus, "train", dialogue, strategy="entropy_change_top3", raw=True, sidecar="sft"
    )
    return [query for query in found if query.trajectory_id in names]


def pool(model: Any, *, near: bool = True, cut: bool = True) -> QueryPool:
    """Queries whose old policy is close to a model, so that ratios of prefixes are near 1.

    Args:
        model: The model.
        near: Whether to put it so; else the sidecars remain as they are.
        cut: Whether there are cut queries, too.
    """
    serializer = ChatSerializer(tokenizer())
    queries = []
    for index, query in enumerate(released()):
        if query.prefix_turns and not cut:
            continue
        prefix = query.prefix
        if near and query.prefix_turns:
            with torch.no_grad():
                scores = plain_logprobs(model, serializer.lay_out(query.messages).ids)
            noise = random.Random(index)
            old = [
                float(scores[u - 1]) + noise.gauss(0, 0.3) for u in range(prefix.begin, prefix.end)
            ]
            prefix = dataclasses.replace(prefix, old_logprobs=tuple(old))
        queries.append(dataclasses.replace(query, prefix=prefix))
    return QueryPool(queries, longest_prefix=6, trajectories=trajectories(), dialogue="compact@1")


def trainer(
    method: str,
    out: Path,
    *,
    model: Any = None,
    known: QueryPool | None = None,
    rewards: bool = True,
    engine_noise: float = 0.0,
    **changes: Any,
) -> Any:
    """A trainer of a method on a random model.

    Args:
        method: A registered method.
        out: Folder of the run.
        model: The model; a random one by default.
        known: The queries; see :func:`pool`.
        rewards: Whether a coin decides on rewards, since a random model earns none.
        engine_noise: Spread of the rollout engine's log-probabilities around the true ones.
        **changes: Fields of the recipe.
    """
    from agentbench_prefix.training.rl_trainer import RLTrainer

    chosen = recipe(**changes)
    network = random_model() if model is None else model
    env = make(ENV, max_turns=chosen.max_turns)
    made = RLTrainer(
        chosen,
        registry.method(method).make_objective(chosen),
        pool(network) if known is None else known,
        network,
        tokenizer(),
        env_arguments=env.arguments(),
        dialogue=find_dialogue(env, "compact"),
        max_tokens=chosen.max_tokens,
        watched=[],
        out=out,
    )
    if rewards or engine_noise:
        play = made.player.play

        def changed(queries, samples, names):
            return [
                alter(group, name)
                for group, name in zip(play(queries, samples, names), names, strict=True)
            ]

        def alter(group, name):
            rollouts = []
            for sample, rollout in enumerate(group.rollouts):
                coin = random.Random(f"{name}/{sample}")
                # One group in three is of one reward.
                lucky = random.Random(name).random() > 0.33 and coin.random() < 0.5
                noise = [coin.gauss(0, engine_noise) if m else 0.0 for m in rollout.mask]
                record = rollout.record.model_copy(update={"success": lucky and rewards})
                rollouts.append(
                    dataclasses.replace(
                        rollout,
                        reward=float(lucky) if rewards else rollout.reward,
                        record=record,
                        logprobs=[x + n for x, n in zip(rollout.logprobs, noise, strict=True)],
                    )
                )
            return dataclasses.replace(group, rollouts=rollouts)

        made.player.play = changed
    return made


def gradients(made: Any, epoch: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and every parameter's gradient of one optimizer step, as the trainer computes them."""
    accumulation = made.args.gradient_accumulation_steps
    made.model.zero_grad()
    made.model.train()
    total = 0.0
    for index in range(accumulation):
        made._step = epoch * accumulation + index
        loss = made._compute_loss(made.model, made._prepare_inputs(None))
        loss.backward()
        total += float(loss.detach())
    return total, {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in made.model.named_parameters()
    }


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """A copy of every parameter."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def shake(model: Any, size: float) -> None:
    """Move every parameter a little, so that ratios are not 1."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p += size * torch.randn(p.shape, generator=generator, dtype=p.dtype)


# ------------------------------------------------------------------ the same by the reference
def reference_rollouts(
    made: Any, old: list[list[float]] | None, views: list[list[str]] | None = None
) -> list[reference.Rollout]:
    """The batch of a trainer for the reference loop, scored plainly, one sequence at a time.

    Args:
        made: The trainer, once it has played.
        old: Log-probabilities before the update; ``None`` for the current ones.
        views: Outcome views by rollout and turn.
    """
    model = made.model
    families: dict[str, int] = {}
    found = []
    used = made._untouched[2].tolist()
    row = 0
    for number, group in enumerate(made._whole.groups):
        query = group.query
        family = families.setdefault(query.trajectory_id, len(families))
        for rollout in group.rollouts:
            n = len(group.prompt)
            scores = plain_logprobs(model, [*group.prompt, *rollout.completion])
            own = scores[n - 1 :]
            begin, end = (0, 0) if query.prefix is None else (query.prefix.begin, query.prefix.end)
            hindsight: list[float] = []
            if views is not None:
                hindsight = plain_hindsight(model, made, group, rollout, views[row])
            turns, turn, before = [], -1, 0
            for m in rollout.mask:
                turn += int(m and not before)
                before = m
                turns.append(turn)
            found.append(
                reference.Rollout(
                    logprobs=own,
                    old_logprobs=own.detach().tolist() if old is None else old[row],
                    mask=[bool(m) for m in rollout.mask],
                    reward=rollout.reward,
                    group=number,
                    turns=turns,
                    rollout_logprobs=rollout.logprobs,
                    hindsight_logprobs=hindsight,
                    prefix_logprobs=scores[begin - 1 : end - 1] if end else None,
                    prefix_old_logprobs=query.prefix.old_logprobs if end else (),
                    prefix_mask=[bool(m) for m in query.prefix.mask] if end else (),
                    family=family,
                    raw=query.prefix_turns == 0 and rollout.record is not None,
                    demonstration=rollout.record is None,
                )
            )
            row += 1
    return [rollout for rollout, keep in zip(found, used, strict=True) if keep]


def plain_hindsight(
    model: Any, made: Any, group: Any, rollout: Any, views: list[str]
) -> list[float]:
    """Each reply scored behind its own prompt with the view appended, nothing cached or shared."""
    serializer = made.serializer
    found = [0.0] * len(rollout.completion)
    opening = list(group.query.messages)
    history: list[int] = []  # tokens up to the user message that is due
    replies = [i for i, m in enumerate(opening) if m.role == "assistant"]
    due = opening
    if replies:
        due = opening[replies[-1] + 1 :]
        history = list(group.prompt[: len(group.prompt) - len(serializer.glue(due))])
    at = 0
    for turn, view in zip(rollout.record.turns, views, strict=True):
        shown = [*due[:-1], Message("user", due[-1].content + view)]
        plain = serializer.glue(due) if history else serializer.opening(due)
        seen = serializer.glue(shown) if history else serializer.opening(shown)
        reply = list(turn.token_ids)
        while not rollout.mask[at]:
            at += 1
        with torch.no_grad():
            scores = plain_logprobs(model, [*history, *seen, *reply])
        found[at : at + len(reply)] = scores[-len(reply) :].tolist()
        at += len(reply)
        history = [*history, *plain, *reply]
        if reply[-1] != serializer.end_id:
            history.append(serializer.end_id)
        due = [Message("user", turn.observation)]
    return found
