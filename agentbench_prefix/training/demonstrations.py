"""A teacher's play as conversations to learn from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from agentbench_prefix.corpora.schema import TrajectoryRow, to_messages
from agentbench_prefix.corpora.teach import told
from agentbench_prefix.dialogue import Dialogue, Message
from agentbench_prefix.env import JSON, TextEnv
from agentbench_prefix.errors import ConfigurationError


@dataclasses.dataclass(frozen=True)
class Demonstration:
    """One episode of a teacher.

    Attributes:
        task_id: Task played.
        messages: The conversation: opening, then replies and observations in turn; ends with the
            last reply.
        trainable: One flag per assistant message, ``False`` for a deliberate mistake.
        success: Whether the teacher solved the task within the turn limit.
    """

    task_id: str
    messages: list[Message]
    trainable: list[bool]
    success: bool


def demonstrate(
    env: TextEnv,
    task_id: str,
    dialogue: Dialogue,
    *,
    options: Mapping[str, JSON] | None = None,
    seed: int | None = None,
    detours: float = 0.0,
) -> Demonstration:
    """Let the environment's teacher play a task and write the conversation down.

    Args:
        env: The unwrapped environment; it is reset.
        task_id: Task to play.
        dialogue: Form of the conversation.
        options: Further reset options.
        seed: Seed of the teacher.
        detours: Probability of a detour per turn, see :meth:`TextEnv.teacher`.
    """
    observation, info = env.reset(options={**(options or {}), "task_id": task_id})
    teacher = env.teacher(seed, detours=detours)
    messages = dialogue.opening(observation)
    trainable: list[bool] = []
    while True:
        turn = teacher.next_turn()
        messages.append(Message("assistant", dialogue.render(turn.action, turn.thought)))
        trainable.append(turn.trainable)
        observation, _, terminated, truncated, info = env.step(turn.action)
        if terminated or truncated:
            return Demonstration(task_id, messages, trainable, bool(info["success"]))
        messages.append(Message("user", observation))


def replay_trajectory(
    env: TextEnv,
    row: TrajectoryRow,
    dialogue: Dialogue,
    options: Mapping[str, JSON] | None = None,
) -> Demonstration:
    """A recorded trajectory as a conversation, in a variation of its task if options are given.

    Args:
        env: The unwrapped environment; it is reset if there are options.
        row: The trajectory.
        dialogue: Form of the conversation.
        options: Task options; the actions are translated and played under them.

    Raises:
        ConfigurationError: There are options and replies hold more than the action: what was
            thought of a task does not fit its variation.
    """
    trainable = [turn.trainable for turn in row.turns]
    if not options:
        messages = to_messages(row.conversation(dialogue.label).messages)
        return Demonstration(row.task_id, messages, trainable, row.success)
    probe = row.turns[0].action
    if dialogue.render(probe, "thought") != dialogue.render(probe, ""):
        raise ConfigurationError(
            f"the dialogue {dialogue.label} shows thoughts, which do not fit a varied task: leave "
            "out vary, or choose a dialogue of actions alone"
        )
    observation, info = env.reset(seed=row.seed, options={**options, "task_id": row.task_id})
    messages = dialogue.opening(observation)
    for index, turn in enumerate(row.turns):
        if env.ended:  # chance may end a varied task earlier
            del trainable[index:]
            break
        if index:
            messages.append(Message("user", observation))
        if turn.problem:
            messages.append(Message("assistant", ""))
            observation, *_, info = env.skip_turn(told(dialogue, turn))
            continue
        action = env.translate_action(turn.action, options)
        messages.append(Message("assistant", dialogue.render(action, "")))
        observation, *_, info = env.step(action)
    return Demonstration(row.task_id, messages, trainable, bool(info["success"]))


def recite(
    env: TextEnv,
    task_id: str,
    dialogue: Dialogue,
    rng: np.random.Generator,
    lines: int,
    options: Mapping[str, JSON] | None = None,
) -> Demonstration:
    """A drill instead of play: give lines of the first observation back from a few of their words.

    Args:
        env: The unwrapped environment; it is reset.
        task_id: Task whose first observation is used.
        dialogue: Form of the conversation; replies are bare lines.
        rng: Picks lines and words.
        lines: How many lines are asked for.
        options: Further reset options.
    """
    observation, _ = env.reset(options={**(options or {}), "task_id": task_id})
    known = [line for line in observation.split("\n") if len(line.split()) > 1]
    cues: list[str] = []
    asked: list[str] = []
    for _ in range(lines):
        line = known[int(rng.integers(len(known)))]
        words = line.split(" ")
        begin = int(rng.integers(len(words) - 1))
        end = int(rng.integers(begin + 2, min(len(words), begin + 4) + 1))
        cue = " ".join(words[begin:end])
        if sum(cue in other for other in known) == 1:
            cues.append(cue)
            asked.append(line)
    if not asked:
        return Demonstration(task_id, dialogue.opening(observation), [], False)
    messages = dialogue.opening(f"{observation}\n\n{cues[0]}")
    for index, line in enumerate(asked):
        if index:
            messages.append(Message("user", cues[index]))
        messages.append(Message("assistant", line))
    return Demonstration(task_id, messages, [True] * len(asked), True)
