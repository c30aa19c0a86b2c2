"""Training queries: raw tasks and replayed cut states, and how a step draws some of them."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from agentbench_prefix.corpora.reading import Corpus
from agentbench_prefix.corpora.schema import (
    QueryRow,
    SidecarRow,
    TrajectoryRow,
    to_messages,
    token_hash,
)
from agentbench_prefix.dialogue import Dialogue, Message
from agentbench_prefix.env import TextEnv
from agentbench_prefix.errors import ConfigurationError, CorpusError, UnknownNameError
from agentbench_prefix.serialization import ChatSerializer


@dataclasses.dataclass(frozen=True)
class Prefix:
    """What a query's sidecar says of its prompt, see :class:`SidecarRow`.

    Attributes:
        begin, end: The span ``[begin, end)`` in prompt tokens.
        mask: 1 on tokens that may be learnt, length ``end - begin``.
        old_logprobs: Log-probabilities under the old policy, nats, same length.
        prompt_sha256: Hash of the prompt's tokens.
    """

    begin: int
    end: int
    mask: tuple[int, ...]
    old_logprobs: tuple[float, ...]
    prompt_sha256: str


@dataclasses.dataclass(frozen=True)
class Query:
    """One training prompt, the state it stands for, and where it came from.

    Attributes:
        query_id: Its name.
        trajectory_id: Trajectory it was cut from; of a raw task without one, the task.
        task_id: Its task.
        family: The task's family.
        seed: Seed to reset with, ``None`` to draw one for the step.
        options: Reset options that change the task.
        prefix_actions: Actions before the cut; ``None`` for a turn without action.
        n_turns: Turns of the whole trajectory, 0 without one.
        messages: The prompt.
        observation: What the environment shows at the cut; ``None`` where that is not known.
        prefix: The sidecar, if there is one.
    """

    query_id: str
    trajectory_id: str
    task_id: str
    family: str
    seed: int | None
    options: Mapping[str, Any]
    prefix_actions: tuple[str | None, ...]
    n_turns: int
    messages: tuple[Message, ...]
    observation: str | None
    prefix: Prefix | None = None

    @property
    def prefix_turns(self) -> int:
        """Teacher turns before the cut; 0 for a raw query."""
        return len(self.prefix_actions)

    def reset_options(self) -> dict[str, Any]:
        """Options that put ``env.reset`` at the cut."""
        return {
            **self.options,
            "task_id": self.task_id,
            "prefix_actions": list(self.prefix_actions),
        }


def raw_query(env: TextEnv, dialogue: Dialogue, task_id: str) -> Query:
    """A task from its start. The environment is reset."""
    observation, _ = env.reset(options={"task_id": task_id})
    opening = tuple(dialogue.opening(observation))
    family = env.family(task_id)
    return Query(task_id, task_id, task_id, family, None, {}, (), 0, opening, None)


def cut_query(row: TrajectoryRow, dialogue: str, turns: int) -> Query:
    """A trajectory's state after some of its turns, in a dialogue.

    Args:
        row: The trajectory.
        dialogue: Name or label of the dialogue.
        turns: Turns before the cut, from 0 to one less than the trajectory has.
    """
    if not 0 <= turns < row.n_turns:
        raise ValueError(f"a cut must leave at least one of {row.n_turns} turns, got {turns}")
    found = row.conversation(dialogue)
    opening = len(found.messages) - 2 * row.n_turns + 1
    return Query(
        query_id=f"{row.trajectory_id}/{found.dialogue.partition('@')[0]}/{turns}",
        trajectory_id=row.trajectory_id,
        task_id=row.task_id,
        family=row.family,
        seed=row.seed,
        options=json.loads(row.options),
        prefix_actions=tuple(turn.action or None for turn in row.turns[:turns]),
        n_turns=row.n_turns,
        messages=tuple(to_messages(found.messages[: opening + 2 * turns])),
        observation=row.observations()[turns],
    )


def corpus_query(row: QueryRow, sidecar: SidecarRow | None) -> Query:
    """A released query with its sidecar."""
    prefix = None
    if sidecar is not None:
        begin, end = sidecar.assistant_prefix_span
        prefix = Prefix(
            begin,
            end,
            tuple(sidecar.prefix_mask),
            tuple(sidecar.assistant_prefix_old_log_probs),
            sidecar.prompt_sha256,
        )
    return Query(
        query_id=row.query_id,
        trajectory_id=row.trajectory_id,
        task_id=row.task_id,
        family=row.family,
        seed=row.seed,
        options=json.loads(row.options),
        prefix_actions=tuple(action or None for action in row.prefix_actions),
        n_turns=row.n_turns,
        messages=tuple(to_messages(row.messages)),
        observation=row.observation,
        prefix=prefix,
    )


class QueryPool:
    """Queries to draw from.

    Args:
        queries: All of them.
        family_weights: How often each family is drawn; ``None`` as often as it occurs. A family
            that is not named is not drawn.
        longest_prefix: Most turns before a cut: queries with more are left out.
        trajectories: Trajectories that queries were cut from, for methods that cut them elsewhere
            or show them whole.
        dialogue: Label of the dialogue they are read in.

    Raises:
        ConfigurationError: There is nothing to draw from.
        UnknownNameError: A weight names no family.
    """

    def __init__(
        self,
        queries: Iterable[Query],
        family_weights: Mapping[str, float] | None = None,
        *,
        longest_prefix: int | None = None,
        trajectories: Iterable[TrajectoryRow] = (),
        dialogue: str = "",
    ) -> None:
        self.trajectories = {row.trajectory_id: row for row in trajectories}
        self.dialogue = dialogue
        self.longest_prefix = 2**31 if longest_prefix is None else longest_prefix
        everything = [query for query in queries if query.prefix_turns <= self.longest_prefix]
        families = Counter(query.family for query in everything)
        weights = dict(families) if family_weights is None else dict(family_weights)
        for name in weights:
            if name not in families:
                raise UnknownNameError("family of the training queries", name, sorted(families))
        self.weights = {name: weights[name] for name in sorted(weights) if weights[name] > 0}
        self.queries = [query for query in everything if query.family in self.weights]
        if not self.queries:
            raise ConfigurationError(
                "there is no query to train on: check split, strategy and family_weights"
            )

    def draw(self, rng: np.random.Generator, n: int) -> list[Query]:
        """Draw queries: a family by weight, then one of its queries, none twice while they last."""
        return self._draw(rng, n, [(query,) for query in self.queries])

    def cut(self, query: Query, turns: int) -> Query:
        """The query's trajectory after some of its turns instead, at most as many as there may be.

        Raises:
            ConfigurationError: Its trajectory is not known.
        """
        row = self.trajectories.get(query.trajectory_id)
        if row is None:
            raise ConfigurationError(
                f"the trajectory of {query.query_id!r} is not known, so it cannot be cut: set the "
                "recipe's queries.source to 'trajectories'"
            )
        return cut_query(row, self.dialogue, min(turns, self.longest_prefix))

    def draw_trajectories(self, rng: np.random.Generator, n: int) -> list[Query]:
        """Draw whole trajectories, with the raw query and every cut of each, up to ``n`` queries.

        A trajectory that does not fit the rest any more is passed over for one that does.
        """
        together: dict[str, list[Query]] = {}
        for query in self.queries:
            together.setdefault(query.trajectory_id, []).append(query)
        return self._draw(rng, n, [tuple(queries) for queries in together.values()])

    def _draw(
        self, rng: np.random.Generator, n: int, bundles: Sequence[tuple[Query, ...]]
    ) -> list[Query]:
        names = list(self.weights)
        shares = np.array([self.weights[name] for name in names], dtype=float)
        shares /= shares.sum()
        by_family: dict[str, list[tuple[Query, ...]]] = {name: [] for name in names}
        for bundle in bundles:
            by_family[bundle[0].family].append(bundle)
        drawn: list[Query] = []
        left = {name: list(range(len(members))) for name, members in by_family.items()}
        misses = 0
        while len(drawn) < n:
            name = names[int(rng.choice(len(names), p=shares))]
            if not left[name]:
                left[name] = list(range(len(by_family[name])))
            bundle = by_family[name][left[name].pop(int(rng.integers(len(left[name]))))]
            if len(drawn) + len(bundle) > n:
                misses += 1
                if misses > 10_000:
                    raise ConfigurationError(
                        f"{n - len(drawn)} of {n} queries a step cannot be filled with whole "
                        f"trajectories, which have {len(bundle)} or so: choose another number"
                    )
                continue
            drawn += bundle
        return drawn


def task_queries(
    env: TextEnv, dialogue: Dialogue, split: str, parameters: Mapping[str, Any], n: int, seed: int
) -> list[Query]:
    """Raw queries of a split, those out of reach left out, or of ``n`` generated tasks."""
    if split == "generated":
        tasks = env.generate_tasks(seed, n, **parameters)
    else:
        beyond = set(env.out_of_reach(split, env.max_turns))
        tasks = tuple(task for task in env.tasks(split) if task not in beyond)
    return [raw_query(env, dialogue, task) for task in tasks]


def corpus_queries(
    corpus: Corpus,
    split: str,
    dialogue: Dialogue,
    *,
    strategy: str | None,
    raw: bool,
    sidecar: str | None,
) -> list[Query]:
    """Released queries of a corpus in a dialogue.

    Args:
        corpus: The corpus.
        split: Its split.
        dialogue: The dialogue.
        strategy: Cuts that this strategy chose; ``None`` for no cut at all.
        raw: Whether to take the raw queries, too.
        sidecar: Name of the old policy whose sidecars come along; ``None`` for none.

    Raises:
        UnknownNameError: There is no such split, strategy or old policy.
        CorpusError: Queries and sidecars do not go together.
    """
    corpus.check_split(split)
    manifest = corpus.manifest
    strategies = manifest.recipe["strategies"]
    if strategy is not None and strategy not in strategies:
        raise UnknownNameError(f"cut strategy of {manifest.name}", strategy, sorted(strategies))
    sidecars: Iterable[SidecarRow | None]
    rows = [row for row in corpus.queries(split) if row.dialogue == dialogue.label]
    if sidecar is None:
        sidecars = [None] * len(rows)
    else:
        known = [
            key.partition("/")[2]
            for key in manifest.models
            if key.partition("/")[0] == dialogue.name
        ]
        if sidecar not in known:
            raise UnknownNameError(
                f"old policy of {manifest.name} for {dialogue.name}", sidecar, sorted(known)
            )
        by_id = {row.query_id: row for row in corpus.sidecars(split, dialogue.name, sidecar)}
        missing = [row.query_id for row in rows if row.query_id not in by_id]
        if missing:
            raise CorpusError(
                f"{len(missing)} queries of {manifest.name} have no sidecar of {sidecar!r}, e.g. "
                f"{missing[0]!r}: build or pull the corpus again",
                file=f"sidecars/{dialogue.name}/{sidecar}/{split}.parquet",
                field="query_id",
            )
        sidecars = [by_id[row.query_id] for row in rows]
    chosen: Callable[[QueryRow], bool] = lambda row: (  # noqa: E731
        raw if row.prefix_turns == 0 else any(cut.strategy == strategy for cut in row.cuts)
    )
    return [
        corpus_query(row, side) for row, side in zip(rows, sidecars, strict=True) if chosen(row)
    ]


def check_prompt(query: Query, ids: Sequence[int]) -> None:
    """Check that a query's prompt has the tokens its sidecar was made on.

    Raises:
        CorpusError: It has not.
    """
    if query.prefix is not None and token_hash(ids) != query.prefix.prompt_sha256:
        raise CorpusError(
            f"the prompt of {query.query_id!r} has other tokens here than its sidecar was made "
            "on: use the tokenizer of the corpus, or build sidecars for this one",
            field="prompt_sha256",
        )


def check_model(
    corpus: Corpus,
    sidecar: str,
    dialogue: Dialogue,
    serializer: ChatSerializer,
    weights: str | None,
) -> None:
    """Check that a corpus' sidecars belong to the tokenizer and old policy at hand.

    Args:
        corpus: The corpus.
        sidecar: Name of the old policy.
        dialogue: The dialogue.
        serializer: Of the model to train.
        weights: SHA-256 of the old policy's weights where they are at hand.

    Raises:
        UnknownNameError: There are no such sidecars.
        CorpusError: They are of another tokenizer or other weights; the field is named.
    """
    manifest = corpus.manifest
    key = f"{dialogue.name}/{sidecar}"
    entry = manifest.models.get(key)
    if entry is None:
        raise UnknownNameError(f"old policy of {manifest.name}", key, sorted(manifest.models))
    for field, theirs, mine, what in (
        ("tokenizer", entry.tokenizer, serializer.fingerprint(), "the model to train"),
        ("model_sha256", entry.model_sha256, weights, f"the checkpoint of {sidecar!r} at hand"),
    ):
        if mine is not None and theirs != mine:
            raise CorpusError(
                f"{manifest.name} was scored with {theirs}, {what} has {mine}: use the corpus "
                "made for it, or build sidecars anew",
                file="manifest.json",
                field=f"models.{key}.{field}",
            )
