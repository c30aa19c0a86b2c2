"""Rollouts: many episodes in lockstep over one policy."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentbench_prefix.dialogue import Dialogue, Message, ParsedReply
from agentbench_prefix.env import JSON, TextEnv
from agentbench_prefix.errors import ContextLimitError, PolicyError
from agentbench_prefix.evaluation.records import EpisodeRecord, TurnRecord
from agentbench_prefix.policies.base import Episode, Policy, Reply, Session

CONTEXT_LIMIT = "context_limit"
"""Failure category of an episode whose conversation outgrew the model's context."""


def episode_seed(seed: int, task_id: str, sample: int) -> int:
    """Seed of an episode: 48 bits of SHA-256 over run seed, task and sample.

    It depends on nothing else, so an episode is the same however a run is cut into batches.
    """
    digest = hashlib.sha256(f"{seed}\n{sample}\n{task_id}".encode("utf-8", "surrogatepass"))
    return int.from_bytes(digest.digest()[:6])


def start(
    env: TextEnv,
    dialogue: Dialogue,
    task_id: str,
    *,
    sample: int = 0,
    seed: int = 0,
    options: Mapping[str, JSON] | None = None,
) -> Episode:
    """Reset an environment and open its conversation.

    Args:
        env: An unwrapped environment; the episode takes it over.
        dialogue: How the environment is put to the model.
        task_id: Task to play.
        sample: Index of the sample within the task's group.
        seed: Seed of the run, see :func:`episode_seed`.
        options: Further reset options.

    Raises:
        UnknownNameError: Unknown task or option.
    """
    seed = episode_seed(seed, task_id, sample)
    observation, _ = env.reset(seed=seed, options={**(options or {}), "task_id": task_id})
    return Episode(task_id, sample, seed, env, dialogue, dialogue.opening(observation))


def take_turn(
    env: TextEnv, dialogue: Dialogue, reply: str
) -> tuple[ParsedReply, tuple[str, float, bool, bool, dict[str, Any]]]:
    """Play what a reply says; without an action the dialogue answers and the turn is spent.

    Returns:
        What the reply means, and what the environment returned.
    """
    parsed = dialogue.parse(reply)
    if parsed.action is None:
        assert parsed.problem is not None
        return parsed, env.skip_turn(dialogue.answer(parsed.problem))
    return parsed, env.step(parsed.action)


def play(
    policy: Policy,
    episodes: Sequence[Episode],
    progress: Callable[[EpisodeRecord], None] | None = None,
) -> list[EpisodeRecord]:
    """Play a chunk of episodes to their ends, one reply each per turn.

    An episode for which the policy raises or returns a :class:`PolicyError` ends there and is
    recorded as an error; a :class:`ContextLimitError` ends it as a failure of a category of its
    own. Any other exception is a fault and is not caught.

    Args:
        policy: Who plays.
        episodes: Freshly started episodes, each with an environment of its own.
        progress: Called with each record when its episode ends, in order of completion.

    Returns:
        One record per episode, in the order given.
    """
    takes = [_Take(episode) for episode in episodes]
    running = list(takes)
    session = policy.open(episodes)
    try:
        while running:
            replies = _ask(session, [take.episode for take in running])
            for take, reply in zip(running, replies, strict=True):
                take.advance(reply)
                if take.record is not None and progress is not None:
                    progress(take.record)
            running = [take for take in running if take.record is None]
    finally:
        session.close()
    return [take.record for take in takes if take.record is not None]


def _ask(session: Session, episodes: Sequence[Episode]) -> Sequence[Reply | PolicyError]:
    try:
        return session.reply(episodes)
    except PolicyError as error:
        return [error] * len(episodes)


@dataclasses.dataclass
class _Take:
    """An episode being played, and what was recorded of it so far."""

    episode: Episode
    turns: list[TurnRecord] = dataclasses.field(default_factory=list)
    record: EpisodeRecord | None = None

    def __post_init__(self) -> None:
        self.opening = tuple(self.episode.messages)

    def advance(self, reply: Reply | PolicyError) -> None:
        """Play one turn; sets ``record`` when the episode is over."""
        if isinstance(reply, ContextLimitError):
            # The model's own doing, and the same again if retried: a failure, not an error.
            self._finish(truncated=True, failure_category=CONTEXT_LIMIT)
            return
        if isinstance(reply, PolicyError):
            self._finish(truncated=False, error=f"{type(reply).__name__}: {reply}")
            return
        env, messages = self.episode.env, self.episode.messages
        # A session may have taken turns back (a person's undo): the conversation says which stand.
        del self.turns[(len(messages) - len(self.opening)) // 2 :]

        parsed, step = take_turn(env, self.episode.dialogue, reply.text)
        observation, reward, terminated, truncated, info = step
        messages += [Message("assistant", reply.text), Message("user", observation)]
        self.turns.append(
            TurnRecord(
                reply=reply.text,
                action=parsed.action,
                problem=parsed.problem,
                notes=parsed.notes,
                observation=observation,
                valid=info["valid_action"],
                reward=reward,
                finish=reply.finish,
                prompt_tokens=reply.prompt_tokens,
                token_ids=reply.token_ids,
                logprobs=reply.logprobs,
            )
        )
        if terminated or truncated:
            self._finish(truncated=truncated, success=info["success"])

    def _finish(
        self,
        *,
        truncated: bool,
        success: bool = False,
        error: str | None = None,
        failure_category: str | None = None,
    ) -> None:
        env = self.episode.env
        record = EpisodeRecord(
            env_id=env.env_id,
            data_hash=env.data_hash,
            arguments=env.arguments(),
            task_id=self.episode.task_id,
            family=env.family(self.episode.task_id),
            options=env.snapshot().options,
            sample=self.episode.sample,
            seed=self.episode.seed,
            dialogue=self.episode.dialogue.label,
            success=success,
            reward=sum(turn.reward for turn in self.turns),
            n_turns=len(self.turns),
            truncated=truncated,
            error=error,
            failure_category=failure_category,
            opening=self.opening,
            turns=tuple(self.turns),
        )
        if not success and error is None and failure_category is None:
            category = env.failure_category(record.played_turns())
            record = record.model_copy(update={"failure_category": category})
        self.record = record
