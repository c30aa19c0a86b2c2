"""An environment as a ``rollout_func`` of TRL's ``GRPOTrainer`` (TRL 1.16).

TRL hands a rollout function prompts alone, so a prompt is recognised by its messages: it is the
canonical prompt of a query, and the episode starts in that query's state. Tokens go in and out:
what the model generated is never decoded and encoded again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from agentbench_prefix.corpora.schema import QueryRow, to_messages
from agentbench_prefix.corpora.starting import start_recorded
from agentbench_prefix.dialogue import Message
from agentbench_prefix.errors import (
    ConfigurationError,
    MissingExtraError,
    PolicyError,
    UnknownNameError,
)
from agentbench_prefix.evaluation.records import EpisodeRecord
from agentbench_prefix.policies.base import Episode
from agentbench_prefix.rollouts import episode_seed, play
from agentbench_prefix.serialization import ChatSerializer

RolloutFunc = Callable[[list[Any], Any], dict[str, Any]]
_Key = tuple[tuple[str, str], ...]


def prompt_dataset(queries: Iterable[QueryRow]) -> Any:
    """A ``datasets.Dataset`` with the column ``prompt``, one conversational prompt a query.

    Queries with equal prompts (the raw ones of a task) are kept once.
    """
    try:
        from datasets import Dataset
    except ImportError as error:
        raise MissingExtraError("the TRL adapter", "train") from error
    prompts = {_key(q): [m.model_dump() for m in q.messages] for q in queries}
    return Dataset.from_dict({"prompt": list(prompts.values())})


def environment_reward(
    completions: Sequence[Any],  # noqa: ARG001 - the form TRL calls
    environment_reward: Sequence[float],
    **_: Any,
) -> list[float]:
    """Reward function for ``GRPOTrainer``: what the environment paid in each episode."""
    return list(environment_reward)


def make_rollout_func(
    queries: Iterable[QueryRow],
    *,
    max_tokens: int | None = None,
    max_turns: int | None = None,
) -> RolloutFunc:
    """Make a ``rollout_func`` that plays queries with the trainer's own model.

    The function takes ``(prompts, trainer)`` and returns, one entry a prompt: ``prompt_ids`` (the
    canonical prompt), ``completion_ids`` (replies, each with its end-of-turn token, and what the
    environment said between them), ``logprobs`` (nats under the sampling temperature, 0 where the
    model did not write), ``env_mask`` (1 on generated tokens, 0 elsewhere), ``environment_reward``,
    ``success`` and ``query_id``. Use it with :func:`environment_reward` and :func:`prompt_dataset`.

    The model generates where the trainer holds it: one process, or data parallelism without
    sharded weights. ``max_completion_length`` of the trainer is not enforced, as TRL does not do it
    for rollout functions; the environment's turn limit and ``max_tokens`` bound an episode.

    Args:
        queries: Queries that may be asked for, all of one dialogue.
        max_tokens: Most tokens of one reply; ``None`` for the dialogue's.
        max_turns: Turn limit in place of the corpus'; prefix turns count toward it.
    """
    table = {_key(query): query for query in queries}
    calls = 0

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        nonlocal calls
        from agentbench_prefix.policies.transformers import TransformersPolicy

        episodes, asked = [], []
        # The samples of a query may lie on several processes, which count their calls alike.
        first = trainer.accelerator.process_index * len(prompts)
        moment = f"{trainer.state.global_step}/{calls}"
        for index, prompt in enumerate(prompts, start=first):
            query = _find(table, prompt)
            seed = episode_seed(trainer.args.seed, f"{query.query_id}/{moment}", index)
            episodes.append(_start(query, index, seed, max_turns))
            asked.append(query)
        calls += 1
        policy = TransformersPolicy(
            trainer.accelerator.unwrap_model(trainer.model),
            trainer.processing_class,
            source={},
            temperature=trainer.temperature,
            top_p=trainer.top_p,
            max_tokens=max_tokens or episodes[0].dialogue.max_tokens,
        )
        found: dict[str, Any] = {}
        for query, record in zip(asked, play(policy, episodes), strict=True):
            if record.error is not None:
                raise PolicyError(f"query {query.query_id!r} broke off: {record.error}")
            row = linearize(record, policy.serializer) | {
                "environment_reward": record.reward,
                "success": record.success,
                "query_id": query.query_id,
            }
            for name, value in row.items():
                found.setdefault(name, []).append(value)
        return found

    return rollout


def linearize(record: EpisodeRecord, serializer: ChatSerializer) -> dict[str, list[Any]]:
    """An episode as one sequence: ``prompt_ids``, ``completion_ids``, ``logprobs``, ``env_mask``.

    Args:
        record: An episode of a token policy.
        serializer: The policy's serializer.

    Raises:
        ValueError: The policy gave no tokens.
    """
    ids: list[int] = []
    logprobs: list[float] = []
    mask: list[int] = []

    def outside(tokens: Sequence[int]) -> None:
        ids.extend(tokens)
        logprobs.extend([0.0] * len(tokens))
        mask.extend([0] * len(tokens))

    last = len(record.turns) - 1
    for index, turn in enumerate(record.turns):
        if turn.token_ids is None or turn.logprobs is None:
            raise ValueError("the policy gave no tokens or no log-probabilities")
        ids += turn.token_ids
        logprobs += turn.logprobs
        mask += [1] * len(turn.token_ids)
        if ids[-1] != serializer.end_id:
            outside([serializer.end_id])
        if index < last:
            outside(serializer.glue([Message("user", turn.observation)]))
    if not ids:  # the prompt alone fills the context; TRL cannot hold an empty completion
        outside([serializer.end_id])
    return {
        "prompt_ids": serializer.lay_out(record.opening).ids,
        "completion_ids": ids,
        "logprobs": logprobs,
        "env_mask": mask,
    }


def _key(query: QueryRow) -> _Key:
    return tuple((m.role, m.content) for m in query.messages)


def _find(table: dict[_Key, QueryRow], prompt: Any) -> QueryRow:
    if not isinstance(prompt, list):
        raise ConfigurationError(
            f"the prompt must be a list of messages, got {prompt!r:.80}: use prompt_dataset"
        )
    query = table.get(tuple((m["role"], m["content"]) for m in prompt))
    if query is None:
        known = [query.query_id for query in table.values()]
        raise UnknownNameError(
            "prompt", str(prompt[-1])[:80], known, "A prompt must be that of a query given."
        )
    return query


def _start(query: QueryRow, index: int, seed: int, max_turns: int | None) -> Episode:
    arguments = json.loads(query.arguments)
    if max_turns is not None:
        arguments["max_turns"] = max_turns
    env, dialogue = start_recorded(
        query.env_id,
        arguments,
        query.dialogue,
        name=query.query_id,
        options=query.reset_options(),
        seed=query.seed,
        observation=query.observation,
        data_hash=query.data_hash,
    )
    return Episode(query.task_id, index, seed, env, dialogue, to_messages(query.messages))
