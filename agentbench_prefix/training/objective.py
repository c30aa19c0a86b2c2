"""What a reinforcement-learning method supplies, and what the trainer hands to it.

A step of the trainer: :meth:`Objective.draw` chooses queries; each is played ``samples`` times;
:meth:`Objective.prepare` turns rewards into advantages and whatever else the loss needs; then, for
each optimizer epoch and micro-batch, :meth:`Objective.loss`. :meth:`Objective.observe` sees how the
episodes went, for methods that steer what is drawn next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict

from agentbench_prefix.env import JSON
from agentbench_prefix.evaluation.records import EpisodeRecord
from agentbench_prefix.training.queries import Query, QueryPool

Reduction = Literal["token", "micro", "sum"]


# ------------------------------------------------------------------ what was played
@dataclasses.dataclass(frozen=True)
class Rollout:
    """One sampled continuation of a query.

    Attributes:
        completion: Token ids after the prompt: replies, and what stands between them.
        mask: 1 on generated tokens, 0 elsewhere; as long as ``completion``.
        logprobs: Log-probabilities of the rollout engine, nats; 0 where ``mask`` is 0.
        reward: Sum of the environment's rewards.
        record: The whole episode; ``None`` for a demonstration, which nobody played: it has no
            continuation, and all its tokens are in its query's prefix.
    """

    completion: Sequence[int]
    mask: Sequence[int]
    logprobs: Sequence[float]
    reward: float
    record: EpisodeRecord | None


@dataclasses.dataclass(frozen=True)
class Group:
    """A query and its samples.

    Attributes:
        query: The query.
        prompt: Token ids of its prompt.
        rollouts: Its samples.
    """

    query: Query
    prompt: Sequence[int]
    rollouts: Sequence[Rollout]

    @property
    def mixed(self) -> bool:
        """Whether rewards differ; else group-relative advantages are zero."""
        return len({rollout.reward for rollout in self.rollouts}) > 1


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a group went; known of every group of a step on every process.

    Attributes:
        query_id, trajectory_id, task_id, family: The query's.
        prefix_turns: Teacher turns before its cut.
        n_turns: Turns of its whole trajectory, 0 without one.
        rewards: Reward of each sample.
        successes: Whether each sample solved the task.
        turns: Turns each sample played.
        generated_tokens: Tokens each sample generated.
        used: Whether the group reached the update.
    """

    query_id: str
    trajectory_id: str
    task_id: str
    family: str
    prefix_turns: int
    n_turns: int
    rewards: tuple[float, ...]
    successes: tuple[bool, ...]
    turns: tuple[int, ...]
    generated_tokens: tuple[int, ...]
    used: bool = True

    @classmethod
    def of(cls, group: Group, *, used: bool = True) -> Outcome:
        """Sum up a group that was played."""
        query = group.query
        records = [rollout.record for rollout in group.rollouts if rollout.record is not None]
        return cls(
            query_id=query.query_id,
            trajectory_id=query.trajectory_id,
            task_id=query.task_id,
            family=query.family,
            prefix_turns=query.prefix_turns,
            n_turns=query.n_turns,
            rewards=tuple(rollout.reward for rollout in group.rollouts),
            successes=tuple(record.success for record in records),
            turns=tuple(record.n_turns for record in records),
            generated_tokens=tuple(sum(rollout.mask) for rollout in group.rollouts),
            used=used,
        )

    @property
    def mixed(self) -> bool:
        """Whether rewards differ."""
        return len(set(self.rewards)) > 1


# ------------------------------------------------------------------ what the loss sees
@dataclasses.dataclass
class Batch:
    """Rollouts as tensors: those of a process in a step, or of one micro-batch.

    B rollouts, those of a group next to each other; T the longest continuation, S the longest
    prefix span, both padded on the right with 0.

    Attributes:
        groups: The groups; in a micro-batch the last and the first may be parts of one.
        group_index: Which group each rollout belongs to, ``[B]``.
        rewards: ``[B]``.
        mask: Generated tokens, ``[B, T]``.
        turns: Turn of each generated token, from 0; -1 elsewhere, ``[B, T]``.
        rollout_logprobs: Of the rollout engine, nats, ``[B, T]``.
        old_logprobs: Of the policy before the update, nats, ``[B, T]``; ``None`` until the trainer
            has computed them, see :attr:`Objective.old_logprobs`.
        prefix_mask: Prefix tokens that may be learnt, ``[B, S]``.
        prefix_old_logprobs: Of the sidecar's old policy, nats, ``[B, S]``.
        tensors: What :meth:`Objective.prepare` adds, each with B rows.
        active: Whether a rollout has to be scored, ``[B]``; what is not has log-probability 0 and
            must have no gradient anyway.
    """

    groups: list[Group]
    group_index: torch.Tensor
    rewards: torch.Tensor
    mask: torch.Tensor
    turns: torch.Tensor
    rollout_logprobs: torch.Tensor
    prefix_mask: torch.Tensor
    prefix_old_logprobs: torch.Tensor
    active: torch.Tensor
    old_logprobs: torch.Tensor | None = None
    tensors: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def records(self) -> list[EpisodeRecord | None]:
        """Episode of each row."""
        return [rollout.record for group in self.groups for rollout in group.rollouts]

    @classmethod
    def of(
        cls,
        groups: Sequence[Group],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Batch:
        """Put groups into tensors."""
        rows = [(group.query, rollout) for group in groups for rollout in group.rollouts]
        length = max((len(rollout.mask) for _, rollout in rows), default=0)
        span = max((len(q.prefix.mask) for q, _ in rows if q.prefix is not None), default=0)

        def padded(values: Iterable[Sequence[Any]], width: int, fill: Any = 0.0) -> torch.Tensor:
            lists = [[*row, *[fill] * (width - len(row))] for row in values]
            kind = torch.long if isinstance(fill, int) else dtype
            return torch.tensor(lists, dtype=kind, device=device).view(len(rows), width)

        prefixes = [query.prefix for query, _ in rows]
        return cls(
            groups=list(groups),
            group_index=torch.tensor(
                [index for index, group in enumerate(groups) for _ in group.rollouts],
                dtype=torch.long,
                device=device,
            ),
            rewards=torch.tensor(
                [rollout.reward for _, rollout in rows],
                dtype=dtype,
                device=device,
            ),
            mask=padded(([float(m) for m in rollout.mask] for _, rollout in rows), length),
            turns=padded((_turns(rollout.mask) for _, rollout in rows), length, -1),
            rollout_logprobs=padded((rollout.logprobs for _, rollout in rows), length),
            prefix_mask=padded(
                ([] if p is None else [float(m) for m in p.mask] for p in prefixes), span
            ),
            prefix_old_logprobs=padded(
                ([] if p is None else p.old_logprobs for p in prefixes), span
            ),
            active=torch.ones(len(rows), dtype=torch.bool, device=device),
        )

    def rows(self, begin: int, end: int) -> Batch:
        """Rollouts ``begin`` to ``end``, cut to their own lengths."""
        groups, at = [], 0
        for group in self.groups:
            first, last = max(begin - at, 0), min(end - at, len(group.rollouts))
            if first < last:
                groups.append(dataclasses.replace(group, rollouts=group.rollouts[first:last]))
            at += len(group.rollouts)
        length = max((len(r.mask) for group in groups for r in group.rollouts), default=0)
        span = max((len(g.query.prefix.mask) for g in groups if g.query.prefix), default=0)
        widths = {self.mask.shape[1]: length}

        def cut(tensor: torch.Tensor, width: int | None = None) -> torch.Tensor:
            part = tensor[begin:end]
            return part if width is None else part[:, :width]

        return Batch(
            groups=groups,
            group_index=cut(self.group_index),
            rewards=cut(self.rewards),
            mask=cut(self.mask, length),
            turns=cut(self.turns, length),
            rollout_logprobs=cut(self.rollout_logprobs, length),
            prefix_mask=cut(self.prefix_mask, span),
            prefix_old_logprobs=cut(self.prefix_old_logprobs, span),
            active=cut(self.active),
            old_logprobs=None if self.old_logprobs is None else cut(self.old_logprobs, length),
            tensors={
                name: cut(tensor, widths.get(tensor.shape[1]) if tensor.ndim > 1 else None)
                for name, tensor in self.tensors.items()
            },
        )


def _turns(mask: Sequence[int]) -> list[int]:
    turn, before, found = -1, 0, []
    for generated in mask:
        turn += int(generated and not before)
        found.append(turn if generated else -1)
        before = generated
    return found


@dataclasses.dataclass(frozen=True)
class Scores:
    """Log-probabilities of a batch under the model that is trained, with their graph.

    Attributes:
        logprobs: Of generated tokens, nats, ``[B, T]``; 0 elsewhere.
        entropies: Of the distributions they were drawn from, nats, ``[B, T]``, detached.
        prefix_logprobs: Of prefix tokens, nats, ``[B, S]``; 0 elsewhere, and everywhere if the
            objective does not use them.
    """

    logprobs: torch.Tensor
    entropies: torch.Tensor
    prefix_logprobs: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Moment:
    """Where in the run a loss is taken, and the denominators of its means.

    Attributes:
        step: Index of the batch of rollouts, from 0.
        steps: How many there are.
        epoch: Index of the pass over it.
        counts: Sum of each of :meth:`Objective.masks` over all processes and micro-batches.
        rollouts: Rollouts with a generated token in the update, over all processes.
        microbatches: Micro-batches of an optimizer step, over all processes.
    """

    step: int
    steps: int
    epoch: int
    counts: Mapping[str, float]
    rollouts: float
    microbatches: int

    def denominator(self, name: str, mask: torch.Tensor, reduction: Reduction) -> float:
        """What to divide this micro-batch's sum over a mask by, so that the shares add up.

        Args:
            name: Key of :meth:`Objective.masks`.
            mask: This micro-batch's, ``[B, T]``.
            reduction: ``token``: mean over the mask's tokens of the whole optimizer step;
                ``micro``: mean over those of the micro-batch, micro-batches weighing alike;
                ``sum``: sum over tokens, mean over rollouts.
        """
        if reduction == "micro":
            return float(mask.bool().sum()) * self.microbatches
        if reduction == "sum":
            return self.rollouts
        return self.counts[name]


@dataclasses.dataclass
class Loss:
    """A micro-batch's share of the loss.

    Attributes:
        value: Scalar.
        metrics: What to log: name to (sum, weight), both summed over micro-batches and processes,
            then divided.
    """

    value: torch.Tensor
    metrics: dict[str, tuple[torch.Tensor | float, torch.Tensor | float]] = dataclasses.field(
        default_factory=dict
    )


# ------------------------------------------------------------------ the interface
class Engine(Protocol):
    """What the trainer lends to an objective: its model, as it is before the update."""

    def play(self, what: str, queries: Sequence[Query], samples: int) -> list[Outcome]:
        """Play queries beside the training, shared out among processes.

        Args:
            what: ``"probe"`` or ``"calibration"``: where the cost is reported.
            queries: The queries.
            samples: Samples of each.

        Returns:
            Their outcomes, in order, on every process.
        """

    def hindsight(self, batch: Batch, views: Sequence[Sequence[str]]) -> torch.Tensor:
        """Log-probabilities of replies whose turn's outcome is in view.

        Args:
            batch: Rollouts.
            views: For each active rollout a text for each of its turns, which is appended to the
                user message that the turn answers; for others nothing is looked at.

        Returns:
            Nats, ``[B, T]``; 0 where nothing was scored.
        """

    def state_changes(self, group: Group) -> list[list[bool]]:
        """Whether each turn of each rollout changed the environment's own state."""

    def demonstration(self, query: Query) -> Group:
        """A query's whole trajectory as a row: all its turns are prefix, scored by the old policy.

        Needs ``queries.demonstrations`` and ``queries.sidecar`` in the recipe.
        """


@dataclasses.dataclass(frozen=True)
class Played:
    """What is known of a step once its episodes were played.

    Attributes:
        outcomes: Every group of the step, those of other processes included.
        logprobs: Current log-probabilities ``[B, T]``, if :attr:`Objective.old_logprobs` asks for
            them.
        moment: Where in the run; its counts are not known yet.
        engine: The trainer's.
    """

    outcomes: Sequence[Outcome]
    logprobs: torch.Tensor | None
    moment: Moment
    engine: Engine


class Settings(BaseModel):
    """Fields of a recipe's ``objective``; a method adds its own.

    Attributes:
        reduction: See :meth:`Moment.denominator`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    reduction: Reduction = "token"


S = TypeVar("S", bound=Settings)


class Objective(Generic[S]):
    """A method, as the trainer sees it. Subclass it and set :attr:`settings_type`.

    Args:
        settings: The recipe's ``objective``.
    """

    settings_type: ClassVar[type[Settings]] = Settings
    uses_prefix: ClassVar[bool] = False
    """Whether :attr:`Scores.prefix_logprobs` are wanted."""
    old_logprobs: Literal["first_epoch", "before", "each_epoch"] = "first_epoch"
    """When log-probabilities are known. ``first_epoch``: the first pass over a batch gives those of
    the old policy, which it is taken at; ``prepare`` does not see them. ``before``: they are
    computed before ``prepare``. ``each_epoch``: and ``prepare`` is called, with the current
    log-probabilities, before each pass."""

    def __init__(self, settings: S) -> None:
        self.settings = settings

    # -------------------------------------------------------------- queries
    def draw(self, pool: QueryPool, rng: np.random.Generator, n: int) -> list[Query]:
        """Choose ``n`` queries; the same on every process."""
        return pool.draw(rng, n)

    def accepts(self, group: Group) -> bool:  # noqa: ARG002 - for those that override it
        """Whether a group may reach the update; another query is drawn for one that may not."""
        return True

    def extend(
        self,
        groups: Sequence[Group],
        engine: Engine,  # noqa: ARG002 - for those that override it
    ) -> list[Group]:
        """Add rows to a process' batch that were not played; they come last."""
        return list(groups)

    # -------------------------------------------------------------- the update
    def prepare(self, batch: Batch, played: Played) -> None:
        """Add to ``batch.tensors`` what the loss needs; may change masks and ``active``.

        Args:
            batch: All rollouts of this process in this step.
            played: What else is known of the step.
        """

    def masks(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Masks whose sums are denominators, by name."""
        return {"continuation": batch.mask}

    def loss(self, batch: Batch, scores: Scores, moment: Moment) -> Loss:
        """A micro-batch's share of the loss."""
        raise NotImplementedError

    # -------------------------------------------------------------- control
    def begin(self, pool: QueryPool, engine: Engine) -> None:
        """Measure what has to be known before the first step; its result is part of the state."""

    def observe(
        self,
        outcomes: Sequence[Outcome],  # noqa: ARG002 - for those that override it
        moment: Moment,  # noqa: ARG002
    ) -> dict[str, float]:
        """See how the groups of a step went; the same on every process. Returns what to log."""
        return {}

    def notes(
        self,
        log: Sequence[Mapping[str, float]],  # noqa: ARG002 - for those that override it
        rollouts: str,  # noqa: ARG002
    ) -> list[str]:
        """What a reader of the finished run's result must be told.

        Args:
            log: Lines of the run's log.
            rollouts: What played, as the recipe names it.
        """
        return []

    def state_dict(self) -> dict[str, JSON]:
        """State that a checkpoint must hold."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        if state:
            raise ValueError(f"{type(self).__name__} has no state, got {sorted(state)}")
