"""From episode records to ``metrics.json``.

An errored episode counts as unsolved, so rates have the denominator tasks x samples; it is shown
apart in ``n_errors`` and left out of everything that describes behaviour (turns, tokens, invalid
actions, malformed replies, failure categories). There are no timings: the same episodes give the
same bytes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict

from agentbench_prefix.errors import ConfigurationError
from agentbench_prefix.evaluation.records import EpisodeRecord
from agentbench_prefix.evaluation.stats import Estimate, ks, mean_estimates, pass_at_k


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Rates(_Part):
    """How often a set of tasks was solved.

    Attributes:
        n_tasks: Tasks.
        n_episodes: Tasks x samples, errored ones included: the denominator of ``avg_at_k``.
        n_solved: Episodes that solved their task.
        n_tasks_solved: Tasks that at least one sample solved.
        n_errors: Errored episodes.
        avg_at_k: By k: expected share of successes among k samples. The expectation is the same
            for every k; what k samples change is the spread, and the interval is of all samples.
        pass_at_k: By k: chance that at least one of k samples solves the task.
    """

    n_tasks: int
    n_episodes: int
    n_solved: int
    n_tasks_solved: int
    n_errors: int
    avg_at_k: dict[str, Estimate]
    pass_at_k: dict[str, Estimate]


class Turns(_Part):
    """Mean number of turns; ``None`` where there is no such episode."""

    all: float | None
    successes: float | None


class Tokens(_Part):
    """Tokens, over episodes whose policy reported them; ``None`` where none did.

    Attributes:
        generated_per_episode: Mean generated tokens an episode.
        generated_per_turn: Mean generated tokens a turn.
        generated_total: Sum.
        opening_prompt: Mean tokens before the first reply.
        longest_prompt: Most tokens before a reply.
    """

    generated_per_episode: float | None
    generated_per_turn: float | None
    generated_total: int | None
    opening_prompt: float | None
    longest_prompt: int | None


class Malformed(_Part):
    """Replies that left the dialogue's form.

    Attributes:
        replies: All replies: the denominator.
        problems: Replies without an action that may be sent, by problem.
        notes: Harmless departures, by kind.
        cut_at_max_tokens: Replies cut at the token bound.
    """

    replies: int
    problems: dict[str, int]
    notes: dict[str, int]
    cut_at_max_tokens: int


class Reach(_Part):
    """What no policy can solve within the turn limit.

    Attributes:
        max_turns: The limit.
        tasks: Evaluated tasks out of reach.
        ceiling: Largest possible ``avg_at_k`` and ``pass_at_k``.
    """

    max_turns: int | None
    tasks: list[str]
    ceiling: float


class TaskResult(_Part):
    """One task's row.

    Attributes:
        family: Its family.
        successes: Samples that solved it.
    """

    family: str
    successes: int


class Metrics(Rates):
    """Contents of ``metrics.json``.

    Attributes:
        env: Environment id.
        method: Method.
        split: Split.
        samples: Samples a task.
        families: Rates by family, sorted by name.
        turns: Length of episodes.
        tokens: Tokens read and written.
        invalid_action_rate: Share of turns in which the environment carried nothing out, malformed
            replies included; ``None`` without a turn.
        malformed: Counts of malformed replies.
        failure_categories: Unsolved episodes by the environment's category.
        out_of_reach: What cannot be solved in the limit.
        tasks: Result by task.
    """

    env: str
    method: str
    split: str
    samples: int
    families: dict[str, Rates]
    turns: Turns
    tokens: Tokens
    invalid_action_rate: float | None
    malformed: Malformed
    failure_categories: dict[str, int]
    out_of_reach: Reach
    tasks: dict[str, TaskResult]


def rates(successes: Sequence[int], samples: int, n_errors: int) -> Rates:
    """Rates of a set of tasks from the number of solved samples of each."""
    sizes = ks(samples)
    columns = [[c / samples for c in successes]]
    columns += [[pass_at_k(samples, c, k) for c in successes] for k in sizes]
    average, *passes = mean_estimates(np.array(columns, dtype=np.float64).T)
    return Rates(
        n_tasks=len(successes),
        n_episodes=len(successes) * samples,
        n_solved=sum(successes),
        n_tasks_solved=sum(c > 0 for c in successes),
        n_errors=n_errors,
        avg_at_k={str(k): average for k in sizes},
        pass_at_k={str(k): estimate for k, estimate in zip(sizes, passes, strict=True)},
    )


@dataclasses.dataclass
class _Tally:
    """Sums over the episodes seen so far; holds no episode."""

    successes: Counter[str] = dataclasses.field(default_factory=Counter)
    errors: Counter[str] = dataclasses.field(default_factory=Counter)
    seen: set[tuple[str, int]] = dataclasses.field(default_factory=set)
    categories: Counter[str] = dataclasses.field(default_factory=Counter)
    problems: Counter[str] = dataclasses.field(default_factory=Counter)
    notes: Counter[str] = dataclasses.field(default_factory=Counter)
    played: int = 0
    turns: int = 0
    turns_of_successes: int = 0
    invalid: int = 0
    cut: int = 0
    generated: int = 0
    episodes_with_tokens: int = 0
    turns_with_tokens: int = 0
    opening_tokens: int = 0
    episodes_with_prompt: int = 0
    longest_prompt: int = 0

    def add(self, episode: EpisodeRecord) -> None:
        self.seen.add((episode.task_id, episode.sample))
        if episode.error is not None:
            self.errors[episode.task_id] += 1
            return
        self.played += 1
        self.turns += episode.n_turns
        if episode.success:
            self.successes[episode.task_id] += 1
            self.turns_of_successes += episode.n_turns
        else:
            self.categories[episode.failure_category or "uncategorised"] += 1
        for turn in episode.turns:
            self.invalid += not turn.valid
            self.cut += turn.finish == "length"
            self.notes.update(turn.notes)
            if turn.problem is not None:
                self.problems[turn.problem] += 1
            if turn.token_ids is not None:
                self.generated += len(turn.token_ids)
                self.turns_with_tokens += 1
            self.longest_prompt = max(self.longest_prompt, turn.prompt_tokens)
        if episode.turns and episode.turns[0].token_ids is not None:
            self.episodes_with_tokens += 1
        if episode.turns and episode.turns[0].prompt_tokens:
            self.episodes_with_prompt += 1
            self.opening_tokens += episode.turns[0].prompt_tokens


def compute(
    episodes: Iterable[EpisodeRecord],
    *,
    env: str,
    method: str,
    split: str,
    samples: int,
    families: Mapping[str, str],
    max_turns: int | None,
    out_of_reach: Sequence[str],
) -> Metrics:
    """Compute the metrics of a whole run; their value does not depend on the episodes' order.

    Args:
        episodes: Every episode once; read one at a time.
        env: Environment id.
        method: Method.
        split: Split.
        samples: Samples a task.
        families: Family by task id, for every evaluated task in order.
        max_turns: Turn limit.
        out_of_reach: Tasks that cannot be solved within it; others than the evaluated are ignored.

    Raises:
        ConfigurationError: An episode is missing, double, or of another task.
    """
    tally, count = _Tally(), 0
    for episode in episodes:
        tally.add(episode)
        count += 1
    expected = {(task, sample) for task in families for sample in range(samples)}
    if tally.seen != expected or count != len(expected):
        raise ConfigurationError(
            f"expected each of {len(families)} tasks x {samples} samples once, got {count} "
            f"episodes ({len(expected - tally.seen)} missing, "
            f"{len(tally.seen - expected)} foreign); "
            "run the evaluation's command again"
        )
    by_family: dict[str, list[str]] = {}
    for task, family in families.items():
        by_family.setdefault(family, []).append(task)

    def rates_of(tasks: Iterable[str]) -> Rates:
        chosen = list(tasks)
        return rates(
            [tally.successes[task] for task in chosen],
            samples,
            sum(tally.errors[task] for task in chosen),
        )

    overall = rates_of(families)
    unreachable = [task for task in families if task in set(out_of_reach)]
    tokens = tally.turns_with_tokens > 0
    return Metrics(
        **dict(overall),
        env=env,
        method=method,
        split=split,
        samples=samples,
        families={family: rates_of(tasks) for family, tasks in sorted(by_family.items())},
        turns=Turns(
            all=_ratio(tally.turns, tally.played),
            successes=_ratio(tally.turns_of_successes, overall.n_solved),
        ),
        tokens=Tokens(
            generated_per_episode=_ratio(tally.generated, tally.episodes_with_tokens),
            generated_per_turn=_ratio(tally.generated, tally.turns_with_tokens),
            generated_total=tally.generated if tokens else None,
            opening_prompt=_ratio(tally.opening_tokens, tally.episodes_with_prompt),
            longest_prompt=tally.longest_prompt or None,
        ),
        invalid_action_rate=_ratio(tally.invalid, tally.turns),
        malformed=Malformed(
            replies=tally.turns,
            problems=dict(tally.problems),
            notes=dict(tally.notes),
            cut_at_max_tokens=tally.cut,
        ),
        failure_categories=dict(tally.categories),
        out_of_reach=Reach(
            max_turns=max_turns,
            tasks=unreachable,
            ceiling=round(1 - len(unreachable) / len(families), 12),
        ),
        tasks={
            task: TaskResult(family=family, successes=tally.successes[task])
            for task, family in families.items()
        },
    )


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 12) if whole else None
