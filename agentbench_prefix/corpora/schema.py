"""The rows of a corpus: pydantic models at the boundary, explicit features in the files.

No column is ever null: what does not apply is an empty string, an empty list or 0, as stated.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from agentbench_prefix.dialogue import Message, Role
from agentbench_prefix.errors import MissingExtraError
from agentbench_prefix.replay import Recording, Status

if TYPE_CHECKING:
    import datasets

FORMAT: Literal[1] = 1
"""Version of the layout; raised when a column changes its name or meaning."""

STATUSES: tuple[Status, ...] = ("validated", "mismatch", "unverifiable", "error")

_Count = Annotated[int, Field(ge=0)]


class Row(BaseModel):
    """A row of one of the configurations."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ChatMessage(Row):
    """One chat message.

    Attributes:
        role: ``"system"``, ``"user"`` or ``"assistant"``.
        content: Its text.
    """

    role: Role
    content: str


class Turn(Row):
    """One turn of a teacher.

    Attributes:
        action: Action sent to the environment; empty if the reply held none.
        problem: Why there was none (``ParsedReply.problem``); empty otherwise.
        trainable: ``False`` for a deliberate mistake or an empty turn: SFT and the prefix mask
            leave it out.
        observation: What the teacher was told.
        valid: Whether the environment carried the action out.
        reward: Reward of the step.
    """

    action: str
    problem: str
    trainable: bool
    observation: str
    valid: bool
    reward: float


class Conversation(Row):
    """A trajectory as one dialogue puts it.

    Attributes:
        dialogue: Label, e.g. ``"compact@1"``.
        messages: The opening, then replies and observations in turn; ends with the last reply.
    """

    dialogue: str
    messages: list[ChatMessage]


class TrajectoryRow(Row):
    """One episode of a teacher.

    Attributes:
        trajectory_id: ``<task_id>/<teacher>/<sample>``.
        task_id: Task played.
        family: Its family.
        env_id: Environment, version included.
        data_hash: Hash of the environment's data.
        arguments: JSON of :meth:`TextEnv.arguments`.
        options: JSON of the reset options that change the task.
        teacher: ``"oracle"``, or the name of the model that played.
        sample: Index among the task's trajectories, from 0.
        seed: Seed of the episode and of the teacher.
        success: Whether the task was solved.
        reward: Sum of rewards.
        n_turns: Number of turns.
        plain_turns: Turns of the environment's own teacher without detours; 0 where unknown.
        first_observation: Observation after reset.
        turns: The turns.
        conversations: The episode in each dialogue of the environment.
    """

    trajectory_id: str
    task_id: str
    family: str
    env_id: str
    data_hash: str
    arguments: str
    options: str
    teacher: str
    sample: _Count
    seed: _Count
    success: bool
    reward: float
    n_turns: Annotated[int, Field(ge=1)]
    plain_turns: _Count
    first_observation: str
    turns: list[Turn]
    conversations: list[Conversation]

    def conversation(self, dialogue: str) -> Conversation:
        """The episode in a dialogue, by name or label.

        Raises:
            KeyError: It is not there.
        """
        for found in self.conversations:
            if dialogue in (found.dialogue, found.dialogue.partition("@")[0]):
                return found
        raise KeyError(dialogue)

    def observations(self) -> list[str]:
        """The first observation, then that of every turn."""
        return [self.first_observation, *(turn.observation for turn in self.turns)]

    def recording(self) -> Recording:
        """The episode as it is replayed."""
        return Recording(
            task_id=self.task_id,
            options=json.loads(self.options),
            seed=self.seed,
            actions=[turn.action for turn in self.turns],
            observations=self.observations(),
        )


class Cut(Row):
    """How a cut was chosen.

    Attributes:
        strategy: Name of the cut strategy.
        model: Model whose entropies ranked it; empty where none did.
        rank: Rank among the strategy's cuts of the trajectory, from 0.
        score: What it was ranked by: nats for entropies, the ratio for a fixed one, else the share
            of turns before the cut.
    """

    strategy: str
    model: str
    rank: _Count
    score: float


class QueryRow(Row):
    """One training query: a raw task, or a cut that was proved replayable.

    Attributes:
        query_id: ``<trajectory_id>/<dialogue>/<prefix_turns>``.
        trajectory_id: Trajectory it was cut from.
        task_id: Its task.
        family: Its family.
        env_id: Environment, version included.
        data_hash: Hash of the environment's data.
        arguments: JSON of the environment's arguments.
        options: JSON of the reset options that change the task.
        seed: Seed to reset with.
        dialogue: Label of the dialogue of ``messages``.
        prefix_turns: Teacher turns before the cut; 0 for a raw query.
        n_turns: Turns of the whole trajectory.
        cuts: The strategies that chose this cut; empty for a raw query.
        prefix_actions: The actions up to the cut; an empty one stands for a turn without action.
        trainable: One flag per prefix turn.
        messages: The canonical prompt (Prefix-GRPO eq. 1): system prompt, prefix history, and the
            cut-state observation at its end.
        observation: Environment's observation at the cut.
        next_action: What the teacher did next; empty for a turn without action.
        next_observation: What that led to.
        status: Replay status; only ``"validated"`` rows are released.
        bytes_equal: Whether the replayed observations equal the recorded ones byte for byte.
        probe: Status of the one-step probe.
        probe_bytes_equal: Whether the probe's observation equals the recorded one.
    """

    query_id: str
    trajectory_id: str
    task_id: str
    family: str
    env_id: str
    data_hash: str
    arguments: str
    options: str
    seed: _Count
    dialogue: str
    prefix_turns: _Count
    n_turns: Annotated[int, Field(ge=1)]
    cuts: list[Cut]
    prefix_actions: list[str]
    trainable: list[bool]
    messages: list[ChatMessage]
    observation: str
    next_action: str
    next_observation: str
    status: Status
    bytes_equal: bool
    probe: Status
    probe_bytes_equal: bool

    def reset_options(self) -> dict[str, Any]:
        """Options that put ``env.reset`` at the cut; the turn counter is at ``prefix_turns``."""
        return {
            **json.loads(self.options),
            "task_id": self.task_id,
            "prefix_actions": [action or None for action in self.prefix_actions],
        }


class SidecarRow(Row):
    """What a policy objective needs to know of a query's prefix, in its own prompt tokens.

    Prefix-GRPO eq. 10: ``S = (b, e, m, l_old, n)``. Position ``u`` of the prompt is scored by the
    logits at ``u - 1``.

    Attributes:
        query_id: Query.
        model: Name of the old policy.
        model_sha256: SHA-256 of its weights' file (:attr:`ModelEntry.model_sha256`).
        tokenizer: :meth:`ChatSerializer.fingerprint`.
        backend: ``"transformers"`` or ``"vllm"``.
        dtype: Number format the model ran in.
        temperature: Temperature of the distributions scored.
        logprob_mode: ``"teacher_forcing"``: ``log softmax(logits / temperature)`` over the first
            ``vocabulary`` ids, no top-p cut.
        vocabulary: Ids that the distributions are over: those that the tokenizer has. A model may
            have more rows; whoever compares its own log-probabilities leaves these out, too.
        prompt_tokens: Length of the canonical prompt, generation header included.
        prompt_sha256: :func:`token_hash` of the prompt.
        assistant_prefix_span: ``[b, e)``: from the first token of the first reply to behind the
            end-of-turn token of the last; ``[0, 0)`` for a raw query.
        prefix_mask: Over the span, length ``e - b``: 1 on content and end-of-turn token of
            trainable replies, 0 elsewhere.
        assistant_prefix_old_log_probs: Over the span, dense, nats, length ``e - b``.
        prefix_token_count: Sum of the mask; 0 where no turn of the prefix is trainable.
    """

    query_id: str
    model: str
    model_sha256: str
    tokenizer: str
    backend: Literal["transformers", "vllm"]
    dtype: str
    temperature: Annotated[float, Field(gt=0)]
    logprob_mode: Literal["teacher_forcing"]
    vocabulary: Annotated[int, Field(ge=1)]
    prompt_tokens: Annotated[int, Field(ge=1)]
    prompt_sha256: str
    assistant_prefix_span: Annotated[list[_Count], Field(min_length=2, max_length=2)]
    prefix_mask: list[Annotated[int, Field(ge=0, le=1)]]
    assistant_prefix_old_log_probs: list[float]
    prefix_token_count: _Count


def token_hash(ids: Sequence[int]) -> str:
    """SHA-256 in hexadecimal of token ids, each as four little-endian bytes."""
    return hashlib.sha256(b"".join(i.to_bytes(4, "little") for i in ids)).hexdigest()


ROWS: dict[str, type[Row]] = {
    "trajectories": TrajectoryRow,
    "failures": TrajectoryRow,
    "queries": QueryRow,
    "sidecars": SidecarRow,
}
"""Model of a row by the first folder of its file."""


@cache
def features(kind: str) -> datasets.Features:
    """Explicit features of a kind of file.

    Args:
        kind: ``"trajectories"``, ``"failures"``, ``"queries"`` or ``"sidecars"``.

    Raises:
        MissingExtraError: The library ``datasets`` is not installed.
    """
    try:
        from datasets import Features, List, Value
    except ImportError as error:  # without it, a folder of that name may be imported instead
        raise MissingExtraError("corpora", "corpora") from error

    def value(name: str) -> Any:
        return Value(name)

    messages = List({"role": value("string"), "content": value("string")})
    text = value("string")
    if kind in ("trajectories", "failures"):
        turn = {
            "action": text,
            "problem": text,
            "trainable": value("bool"),
            "observation": text,
            "valid": value("bool"),
            "reward": value("float64"),
        }
        columns: dict[str, Any] = {
            "trajectory_id": text,
            "task_id": text,
            "family": text,
            "env_id": text,
            "data_hash": text,
            "arguments": text,
            "options": text,
            "teacher": text,
            "sample": value("int32"),
            "seed": value("int64"),
            "success": value("bool"),
            "reward": value("float64"),
            "n_turns": value("int32"),
            "plain_turns": value("int32"),
            "first_observation": text,
            "turns": List(turn),
            "conversations": List({"dialogue": text, "messages": messages}),
        }
    elif kind == "queries":
        cut = {
            "strategy": text,
            "model": text,
            "rank": value("int32"),
            "score": value("float64"),
        }
        columns = {
            "query_id": text,
            "trajectory_id": text,
            "task_id": text,
            "family": text,
            "env_id": text,
            "data_hash": text,
            "arguments": text,
            "options": text,
            "seed": value("int64"),
            "dialogue": text,
            "prefix_turns": value("int32"),
            "n_turns": value("int32"),
            "cuts": List(cut),
            "prefix_actions": List(text),
            "trainable": List(value("bool")),
            "messages": messages,
            "observation": text,
            "next_action": text,
            "next_observation": text,
            "status": text,
            "bytes_equal": value("bool"),
            "probe": text,
            "probe_bytes_equal": value("bool"),
        }
    elif kind == "sidecars":
        columns = {
            "query_id": text,
            "model": text,
            "model_sha256": text,
            "tokenizer": text,
            "backend": text,
            "dtype": text,
            "temperature": value("float64"),
            "logprob_mode": text,
            "vocabulary": value("int32"),
            "prompt_tokens": value("int32"),
            "prompt_sha256": text,
            "assistant_prefix_span": List(value("int32"), length=2),
            "prefix_mask": List(value("int8")),
            "assistant_prefix_old_log_probs": List(value("float32")),
            "prefix_token_count": value("int32"),
        }
    else:
        raise ValueError(f"kind must be one of {', '.join(ROWS)}, got {kind!r}")
    return Features(columns)


def to_messages(chat: Sequence[ChatMessage]) -> list[Message]:
    """Rows' messages as the library's."""
    return [Message(m.role, m.content) for m in chat]


def to_chat(messages: Sequence[Message]) -> list[ChatMessage]:
    """The library's messages as rows'."""
    return [ChatMessage(role=m.role, content=m.content) for m in messages]


class FileEntry(Row):
    """A file of a corpus.

    Attributes:
        sha256: Hash of its bytes.
        size: Its size in bytes.
        rows: Rows, 0 for a file without.
    """

    sha256: str
    size: _Count
    rows: _Count


class ModelEntry(Row):
    """A model that cuts and sidecars come from.

    Attributes:
        checkpoint_sha256: Hash of configuration and weights, as run configurations state it.
        model_sha256: SHA-256 of the weights' file, as a checkpoint's card states it; of weights in
            several files, the hash of their hashes.
        tokenizer: Fingerprint of tokenizer and chat template.
        vocabulary: Ids that the tokenizer has, over which distributions are taken.
        dialogue: Name of the dialogue it scored.
        source: What names it: its method, or a Hub id and commit.
    """

    checkpoint_sha256: str
    model_sha256: str
    tokenizer: str
    vocabulary: Annotated[int, Field(ge=1)]
    dialogue: str
    source: dict[str, str]


class StatusCount(Row):
    """Candidate queries by replay status.

    Attributes:
        split: Split of the corpus.
        strategy: Cut strategy, ``"all"`` for distinct cuts over all strategies.
        dialogue: Dialogue of the cuts.
        family: Family, ``"all"`` for all.
        validated, mismatch, unverifiable, error: Counts.
        ended: Candidates dropped because their replay ends the episode.
        bytes_equal: Validated ones whose observations are equal byte for byte.
        distinct: Different prompts among the validated ones of each task: trajectories may begin
            alike.
        probe_unverifiable: Validated ones whose probe shows nothing that can be compared.
        untrained: Validated ones with a prefix in which no turn is trainable.
    """

    split: str
    strategy: str
    dialogue: str
    family: str
    validated: _Count = 0
    mismatch: _Count = 0
    unverifiable: _Count = 0
    error: _Count = 0
    ended: _Count = 0
    bytes_equal: _Count = 0
    distinct: _Count = 0
    probe_unverifiable: _Count = 0
    untrained: _Count = 0


class TeachCount(Row):
    """What a teacher played in a split.

    Attributes:
        split: Split of the corpus.
        family: Family, ``"all"`` for all.
        tasks: Tasks taught.
        trajectories: Successful trajectories.
        failures: Unsolved attempts, kept apart.
        repeated: Successful attempts passed over because they repeat another's actions; ``None``
            where the trajectories were taken from another corpus' larger split.
        unsaid: Attempts left out because a dialogue cannot say one of their actions, or because
            they have no turn; ``None`` as before.
        mean_turns: Mean turns of the trajectories.
        mean_plain_turns: Mean turns of the plain plan for the same tasks; 0 where unknown.
        untrainable_share: Share of turns that are mistakes.
    """

    split: str
    family: str
    tasks: _Count
    trajectories: _Count
    failures: _Count
    repeated: _Count | None
    unsaid: _Count | None
    mean_turns: float
    mean_plain_turns: float
    untrainable_share: float


class Manifest(Row):
    """``manifest.json``.

    Attributes:
        format: Version of the layout.
        name: Name of the corpus.
        version: Version of its content.
        licence: SPDX identifier.
        env_id: Environment.
        data_hash: Hash of its data.
        arguments: Its arguments.
        recipe: The recipe, resolved.
        dialogues: Hash of each dialogue's texts by label.
        splits: Task ids of each split.
        out_of_reach: Tasks of each split that cannot be solved within the turn limit, left out.
        taught: What the teacher did.
        statuses: Candidates by strategy, family and status.
        models: Models by ``<dialogue>/<model>``.
        files: Every other file of the folder by its path.
        code_version: What built it; of a build that other code went on with, all of them.
        created: When, ISO 8601. This and ``code_version`` are all that differs when it is built
            again.
    """

    format: Literal[1]
    name: str
    version: str
    licence: Annotated[str, Field(min_length=1)]
    env_id: str
    data_hash: str
    arguments: dict[str, Any]
    recipe: dict[str, Any]
    dialogues: dict[str, str]
    splits: dict[str, list[str]]
    out_of_reach: dict[str, list[str]]
    taught: list[TeachCount]
    statuses: list[StatusCount]
    models: dict[str, ModelEntry]
    files: dict[str, FileEntry]
    code_version: str
    created: str

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """Read the file's text.

        Raises:
            pydantic.ValidationError: A field is wrong.
        """
        return cls.model_validate_json(text)
