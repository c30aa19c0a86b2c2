"""The policy protocol: many episodes advance in lockstep, one reply each per turn.

A policy opens a session over the episodes of a chunk. Each turn, the rollout loop asks the session
for one reply per still-running episode. Sessions may keep state between turns (a key-value cache),
and read whatever is new at the end of ``episode.messages``.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Protocol

from agentbench_prefix.dialogue import Dialogue, Message
from agentbench_prefix.env import JSON, TextEnv
from agentbench_prefix.errors import PolicyError


@dataclasses.dataclass(frozen=True)
class Reply:
    """What a policy said in one turn.

    Attributes:
        text: The reply; for token policies the decoded tokens, special tokens left out.
        token_ids: Generated token ids, the end-of-turn token included if it was generated;
            ``None`` where the back end has no tokens.
        logprobs: Log-probability in nats of each of ``token_ids`` under the sampling
            temperature and before any top-p cut; ``None`` where unknown.
        finish: ``"stop"`` (the model ended its turn) or ``"length"`` (cut at the token bound).
        prompt_tokens: Length of the conversation in tokens before this reply, 0 where unknown.
    """

    text: str
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    finish: str = "stop"
    prompt_tokens: int = 0


@dataclasses.dataclass
class Episode:
    """One running episode.

    Attributes:
        task_id: Its task.
        sample: Index of the sample within the task's group, from 0.
        seed: Seed of everything drawn in this episode; differs between samples.
        env: The unwrapped environment, already reset.
        dialogue: How the environment is put to the model.
        messages: The conversation so far; ends with a user message whenever a reply is due.
    """

    task_id: str
    sample: int
    seed: int
    env: TextEnv
    dialogue: Dialogue
    messages: list[Message]


def reply_seed(episode: Episode) -> int:
    """Seed of the reply that is due: 31 bits of SHA-256 over the episode's seed and its turn.

    It depends on nothing else, so a reply does not change with the batch it is drawn in.
    31 bits fit every back end's seed.
    """
    turn = sum(message.role == "assistant" for message in episode.messages)
    digest = hashlib.sha256(f"{episode.seed}\n{turn}".encode()).digest()
    return int.from_bytes(digest[:4]) >> 1


class Session(Protocol):
    """Replies for the episodes of one chunk, turn by turn."""

    def reply(self, episodes: Sequence[Episode]) -> Sequence[Reply | PolicyError]:
        """One reply per episode, in order; a :class:`PolicyError` marks an episode that failed."""

    def close(self) -> None:
        """Free what the session holds."""


class Policy(Protocol):
    """Something that plays."""

    def describe(self) -> Mapping[str, JSON]:
        """What identifies this policy in ``config.json``; part of the resume key.

        Must hold every setting that can change a reply (model hash, temperature, ...) and nothing
        that cannot (no key, no timeout).
        """

    def open(self, episodes: Sequence[Episode]) -> Session:
        """Start a session over the episodes of a chunk."""
