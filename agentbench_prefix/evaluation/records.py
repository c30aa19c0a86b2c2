"""Episode records: everything that was said and done in an episode, as one line of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, FiniteFloat, JsonValue, ValidationError, model_validator

from agentbench_prefix.dialogue import Message
from agentbench_prefix.env import PlayedTurn
from agentbench_prefix.errors import ConfigurationError
from agentbench_prefix.files import canonical_json


class TurnRecord(BaseModel):
    """One turn, verbatim.

    Attributes:
        reply: The policy's reply; for token policies the decoded ``token_ids`` without special
            tokens.
        action: The action read from it and sent, ``None`` if it held none that may be sent.
        problem: Why there is no action (:class:`~agentbench_prefix.dialogue.ParsedReply`).
        notes: Harmless departures from the form.
        observation: What came back: the environment's answer, or the dialogue's if there was no
            action.
        valid: Whether the environment carried the action out.
        reward: Reward of this turn.
        finish: ``"stop"`` or ``"length"`` (cut at the token bound).
        prompt_tokens: Tokens of the whole conversation before this reply; 0 where unknown.
        token_ids: Shape ``(n,)``: the generated tokens of this reply in order, the end-of-turn
            token last if it was generated; prompt and observation tokens are not in it. ``None``
            where the back end has no tokens.
        logprobs: Shape ``(n,)``, nats: entry ``i`` is the log-probability of ``token_ids[i]``
            given everything before it, under the sampling temperature and before any top-p cut.
            ``None`` where unknown.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    reply: str
    action: str | None
    problem: str | None
    notes: tuple[str, ...]
    observation: str
    valid: bool
    reward: FiniteFloat
    finish: str
    prompt_tokens: int
    token_ids: tuple[int, ...] | None
    logprobs: tuple[FiniteFloat, ...] | None

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids or ()):
            raise ValueError("logprobs must have one entry per token of token_ids")
        return self


class EpisodeRecord(BaseModel):
    """One finished episode: enough to replay it, to score it and to learn from it.

    The conversation is ``opening``, then per turn an assistant message (``reply``) and a user
    message (``observation``). Replaying ``reset(seed=seed, options={"task_id": task_id,
    **options})`` and the turns' actions gives the observations again.

    Attributes:
        format: Version of this layout.
        env_id: Environment with version.
        data_hash: Hash of the environment's data.
        arguments: Constructor arguments that change the rules or the turn limit.
        task_id: Task.
        family: Family the task is reported under.
        options: Reset options that change the task.
        sample: Index of the sample within the task's group, from 0.
        seed: Seed of everything drawn in this episode.
        dialogue: Label of the dialogue, e.g. ``"compact@1"``.
        success: Whether the task was solved; ``False`` for an errored episode.
        reward: Sum of the turns' rewards.
        n_turns: Number of turns.
        truncated: Whether the turn limit, or the model's context, ended the episode.
        error: ``None``, or why the policy could not go on: the episode is then unfinished.
        failure_category: Why it failed; ``None`` if it was solved or errored.
        opening: Messages before the first reply.
        turns: The turns.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    env_id: str
    data_hash: str
    arguments: dict[str, JsonValue]
    task_id: str
    family: str
    options: dict[str, JsonValue]
    sample: int
    seed: int
    dialogue: str
    success: bool
    reward: FiniteFloat
    n_turns: int
    truncated: bool
    error: str | None
    failure_category: str | None
    opening: tuple[Message, ...]
    turns: tuple[TurnRecord, ...]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.n_turns != len(self.turns):
            raise ValueError(f"n_turns is {self.n_turns}, but there are {len(self.turns)} turns")
        if self.success and self.error is not None:
            raise ValueError("an errored episode cannot be a success")
        return self

    def played_turns(self) -> list[PlayedTurn]:
        """Return the turns as :meth:`TextEnv.failure_category` takes them."""
        return [PlayedTurn(turn.action, turn.observation, turn.valid) for turn in self.turns]

    def to_line(self) -> str:
        """Serialize to one line of JSON, without the newline; always valid UTF-8."""
        # Inside JSON strings a lone surrogate's Python escape is also its JSON escape.
        text = canonical_json(self.model_dump())
        return text.encode("utf-8", "backslashreplace").decode("utf-8")

    @classmethod
    def from_line(cls, line: str | bytes) -> EpisodeRecord:
        """Inverse of :meth:`to_line`.

        Raises:
            ValueError: The line is not an episode record; the message says why in one line.
        """
        # json.loads would guess at the encoding of bytes, and let encoded surrogates pass.
        text = line.decode("utf-8") if isinstance(line, bytes) else line
        try:
            # Not model_validate_json, which refuses lone surrogates.
            return cls.model_validate(json.loads(text))
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from error


def read_episodes(path: Path) -> Iterator[EpisodeRecord]:
    """Read ``episodes.jsonl`` one episode at a time; a torn last line is left out.

    Raises:
        ConfigurationError: A line is not an episode record.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield EpisodeRecord.from_line(line)
            except ValueError as error:
                raise ConfigurationError(
                    f"{path}:{number} is not an episode record ({error}); "
                    "run the evaluation's command again to redo what is damaged"
                ) from error
