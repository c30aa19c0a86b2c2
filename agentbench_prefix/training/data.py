"""The stream of training batches: a function of recipe and seed, so that a run can be resumed."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator

import numpy as np
import torch

from agentbench_prefix.corpora.schema import TrajectoryRow
from agentbench_prefix.env import JSON, TextEnv
from agentbench_prefix.errors import ConfigurationError, CorpusError, UnknownNameError
from agentbench_prefix.evaluation.runner import find_dialogue
from agentbench_prefix.files import canonical_json
from agentbench_prefix.serialization import ChatSerializer
from agentbench_prefix.training.demonstrations import (
    Demonstration,
    demonstrate,
    recite,
    replay_trajectory,
)
from agentbench_prefix.training.recipe import SFTRecipe, Stage

POOL = 256
"""Demonstrations that are sorted by length and cut into batches together."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """One optimizer step's data.

    Attributes:
        ids: Token ids, right-padded, shape (rows, length).
        weights: Loss weight of each token as a *target*, shape (rows, length).
        demonstrations: Number of rows.
        pool: Index of the pool it was cut from.
        pool_step: Step at which that pool begins, which decides its stage.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    demonstrations: int
    pool: int
    pool_step: int


@dataclasses.dataclass(frozen=True)
class Draw:
    """What one demonstration plays: a function of recipe and index alone.

    Attributes:
        task_id: Task.
        options: Reset options.
        seed: Seed of the teacher.
        detours: Probability of a detour per turn.
        recite: Lines to recite instead of playing, 0 to play.
        trajectory: The recorded trajectory it replays, if any.
    """

    task_id: str
    options: dict[str, JSON]
    seed: int
    detours: float
    recite: int
    trajectory: TrajectoryRow | None = None


def draw(env: TextEnv, recipe: SFTRecipe, stage: Stage, index: int) -> Draw:
    """The ``index``-th draw of a recipe."""
    rng = np.random.Generator(np.random.Philox(key=[recipe.seed, index]))
    row = None
    if stage.corpus is not None:
        row = _draw_trajectory(stage.corpus, stage.split, recipe.seed, index)
        task_id = row.task_id
    elif stage.split == "generated":
        block, offset = divmod(index, POOL)
        task_id = _generated(env, recipe.seed, block, canonical_json(stage.parameters))[offset]
    else:
        task_id = _draw_task(env, stage, rng)
    options: dict[str, JSON] = {}
    for name, probability in stage.vary.items():
        # Draws of a pool share a value, since some options are costly to set up anew.
        if rng.random() < probability:
            options[name] = recipe.seed * 10**6 + index // POOL
    detours = stage.detours if rng.random() < stage.detour_share else 0.0
    return Draw(task_id, options, recipe.seed * 10**9 + index, detours, stage.recite, row)


@functools.lru_cache(maxsize=4)
def recorded(corpus: str, split: str) -> tuple[TrajectoryRow, ...]:
    """The trajectories of a corpus, by name or folder.

    Raises:
        CorpusError: There is no such corpus, its file is not the manifest's, or it holds no
            trajectory.
        UnknownNameError: It has no such split.
    """
    from agentbench_prefix.corpora.find import find_corpus
    from agentbench_prefix.corpora.hub import check_file
    from agentbench_prefix.corpora.reading import MANIFEST

    found = find_corpus(corpus)
    found.check_split(split)
    file = _file_of(split)
    entry = found.manifest.files.get(file)
    if entry is None:
        raise CorpusError(
            f"does not list {file}, which there is to learn from: build or pull the corpus again",
            file=MANIFEST,
            field="files",
        )
    check_file(found.folder, file, entry)
    rows = tuple(found.trajectories(split))
    if not rows:
        raise CorpusError(
            f"{found.manifest.name} has no trajectory of split {split!r}, so there is nothing to "
            "learn from: teach more tasks of it, or choose another split or corpus",
            file=file,
        )
    return rows


def _file_of(split: str) -> str:
    return f"trajectories/{split}.parquet"


def corpora_of(recipe: SFTRecipe, env: TextEnv) -> dict[str, JSON]:
    """What identifies the recorded trajectories a recipe learns from, by corpus.

    Returns:
        The SHA-256 of each file of trajectories, verified, by corpus, version and file.

    Raises:
        CorpusError: A corpus is missing, not of this environment or this version of it, or its
            file of trajectories differs from its manifest or is empty.
        UnknownNameError: It has no such split.
    """
    from agentbench_prefix.corpora.find import find_corpus

    recorded.cache_clear()  # what a name stands for may have changed since the last run
    found: dict[str, JSON] = {}
    for stage in recipe.stages:
        if stage.corpus is not None:
            corpus = find_corpus(stage.corpus)
            corpus.check_environment(env, find_dialogue(env, recipe.dialogue))
            recorded(stage.corpus, stage.split)
            manifest, file = corpus.manifest, _file_of(stage.split)
            found[f"{manifest.name} {manifest.version} {file}"] = manifest.files[file].sha256
    return found


def _draw_trajectory(corpus: str, split: str, seed: int, index: int) -> TrajectoryRow:
    """Every trajectory once an epoch, in an order of its own each time."""
    rows = recorded(corpus, split)
    epoch, place = divmod(index, len(rows))
    return rows[_order(seed, epoch, len(rows))[place]]


@functools.lru_cache(maxsize=4)
def _order(seed: int, epoch: int, n: int) -> tuple[int, ...]:
    rng = np.random.Generator(np.random.Philox(key=[seed, 2**62 + epoch]))
    return tuple(int(i) for i in rng.permutation(n))


@functools.lru_cache(maxsize=4)
def _generated(env: TextEnv, seed: int, block: int, parameters: str) -> tuple[str, ...]:
    """A block of generated tasks; blocks of different recipe seeds never meet."""
    return env.generate_tasks(seed * 10**9 + block, POOL, **json.loads(parameters))


def play_draw(env: TextEnv, recipe: SFTRecipe, drawn: Draw) -> Demonstration:
    """Let the teacher play a draw, or recite from it."""
    dialogue = find_dialogue(env, recipe.dialogue)
    if drawn.trajectory is not None:
        return replay_trajectory(env, drawn.trajectory, dialogue, drawn.options)
    if drawn.recite:
        rng = np.random.Generator(np.random.Philox(key=[drawn.seed, 1]))
        return recite(env, drawn.task_id, dialogue, rng, drawn.recite, drawn.options)
    return demonstrate(
        env,
        drawn.task_id,
        dialogue,
        options=drawn.options,
        seed=drawn.seed,
        detours=drawn.detours,
    )


def stage_at(recipe: SFTRecipe, step: int) -> Stage:
    """The stage in force at a step."""
    return next((s for s in recipe.stages if recipe.progress(step) < s.until), recipe.stages[-1])


def _draw_task(env: TextEnv, stage: Stage, rng: np.random.Generator) -> str:
    tasks = env.tasks(stage.split)
    if stage.family_weights is None:
        return tasks[int(rng.integers(len(tasks)))]
    names = sorted(stage.family_weights)
    shares = np.array([stage.family_weights[name] for name in names])
    family = names[int(rng.choice(len(names), p=shares / shares.sum()))]
    members = [task for task in tasks if env.family(task) == family]
    if not members:
        known = sorted({env.family(task) for task in tasks})
        raise UnknownNameError(f"family of split {stage.split}", family, known)
    return members[int(rng.integers(len(members)))]


def batches(
    env: TextEnv,
    recipe: SFTRecipe,
    serializer: ChatSerializer,
    start: int = 0,
) -> Iterator[Batch]:
    """Batches from step ``start`` on, without end.

    The stage of a pool is that of the step at which the pool begins. Unsuccessful demonstrations
    and those longer than ``max_length`` are left out.
    """
    step = pool = 0
    while True:
        pool_step = step
        stage = stage_at(recipe, pool_step)
        examples = []
        for index in range(pool * POOL, (pool + 1) * POOL):
            demonstration = play_draw(env, recipe, draw(env, recipe, stage, index))
            if demonstration.success:
                ids, weights = _weigh(demonstration, recipe, serializer)
                if len(ids) <= recipe.max_length:
                    examples.append((ids, weights))
        if not examples:
            raise ConfigurationError(
                f"no demonstration of {POOL} from {stage.split!r} tasks succeeds and fits "
                f"max_length={recipe.max_length} tokens: raise max_length, or choose another "
                "dialogue"
            )
        examples.sort(key=lambda example: len(example[0]))
        groups: list[list[tuple[list[int], list[float]]]] = []
        for example in examples:
            fits = groups and (len(groups[-1]) + 1) * len(example[0]) <= recipe.tokens_per_step
            if not fits:
                groups.append([])
            groups[-1].append(example)
        rng = np.random.Generator(np.random.Philox(key=[recipe.seed, 2**63 + pool]))
        for k in rng.permutation(len(groups)):
            if step >= start:
                yield _pad(groups[int(k)], pool, pool_step)
            step += 1
        pool += 1


def _weigh(
    demonstration: Demonstration, recipe: SFTRecipe, serializer: ChatSerializer
) -> tuple[list[int], list[float]]:
    flags = (
        [True] * len(demonstration.trainable) if recipe.learn_mistakes else demonstration.trainable
    )
    layout = serializer.lay_out(demonstration.messages)
    weights = [float(learn) for learn in layout.mask(flags)]
    if recipe.observation_weight:
        replies = layout.mask([True] * len(flags))
        for i in range(replies.index(1), len(replies)):
            weights[i] = weights[i] if replies[i] else recipe.observation_weight
    return layout.ids, weights


def _pad(examples: list[tuple[list[int], list[float]]], pool: int, pool_step: int) -> Batch:
    longest = max(len(ids) for ids, _ in examples)
    ids = torch.zeros(len(examples), longest, dtype=torch.long)
    weights = torch.zeros(len(examples), longest)
    for row, (tokens, w) in enumerate(examples):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        weights[row, : len(w)] = torch.tensor(w)
    return Batch(ids, weights, len(examples), pool, pool_step)
