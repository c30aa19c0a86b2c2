"""Teachers play: successful trajectories, and the attempts that failed."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from agentbench_prefix.corpora.recipe import OpenAITeacher, OracleTeacher
from agentbench_prefix.corpora.schema import Conversation, TrajectoryRow, Turn, to_chat
from agentbench_prefix.dialogue import Dialogue, Message
from agentbench_prefix.env import TextEnv
from agentbench_prefix.errors import EndpointError
from agentbench_prefix.evaluation.records import EpisodeRecord
from agentbench_prefix.evaluation.runner import find_dialogue
from agentbench_prefix.files import canonical_json
from agentbench_prefix.policies.base import Policy
from agentbench_prefix.registry import make
from agentbench_prefix.rollouts import episode_seed, play, start


@dataclasses.dataclass
class Lesson:
    """What a teacher made of one task.

    Attributes:
        trajectories: Solved episodes, at most as many as wanted.
        failures: Unsolved ones.
        repeated: Solved episodes passed over because they repeat another's actions; ``None`` where
            that is not known.
        unsaid: Episodes left out because a dialogue cannot say one of their actions, or because
            they have no turn; ``None`` where that is not known.
    """

    trajectories: list[TrajectoryRow] = dataclasses.field(default_factory=list)
    failures: list[TrajectoryRow] = dataclasses.field(default_factory=list)
    repeated: int | None = 0
    unsaid: int | None = 0


def write_conversations(
    dialogues: Mapping[str, Dialogue],
    first_observation: str,
    turns: Sequence[Turn],
    thoughts: Sequence[str],
    said: Mapping[str, Sequence[str]] | None = None,
) -> list[Conversation]:
    """Put an episode into every dialogue.

    Args:
        dialogues: The environment's dialogues.
        first_observation: Observation after reset.
        turns: The turns.
        thoughts: One per turn, empty where unknown.
        said: Replies as they were given, by dialogue name; other dialogues render the action.
    """
    written = []
    for name, dialogue in dialogues.items():
        messages = dialogue.opening(first_observation)
        for index, turn in enumerate(turns):
            if index:
                messages.append(Message("user", told(dialogue, turns[index - 1])))
            if said is not None and name in said:
                reply = said[name][index]
            elif turn.problem:
                reply = ""
            else:
                reply = dialogue.render(turn.action, thoughts[index])
            messages.append(Message("assistant", reply))
        written.append(Conversation(dialogue=dialogue.label, messages=to_chat(messages)))
    return written


def told(dialogue: Dialogue, turn: Turn) -> str:
    """What a player is told after a turn: without an action, it is the dialogue that answers."""
    if not turn.problem:
        return turn.observation
    known = turn.problem in dialogue.answers
    problem = turn.problem if known else dialogue.parse("").problem
    return dialogue.answer(str(problem))


def teach_oracle(env: TextEnv, teacher: OracleTeacher, task_id: str) -> Lesson:
    """Let the environment's own teacher play a task until enough different plays solve it.

    Args:
        env: The unwrapped environment; it is reset.
        teacher: How it plays.
        task_id: Task.
    """
    lesson, spare = Lesson(), []
    plain = _plain_turns(env, task_id)
    known: set[tuple[str, ...]] = set()
    for attempt in range(teacher.attempts):
        seed = episode_seed(teacher.seed, task_id, attempt)
        row = _play_oracle(env, teacher, task_id, seed, plain)
        if not row.success:
            lesson.failures.append(row)
            continue
        actions = tuple(turn.action for turn in row.turns)
        if actions in known:
            spare.append(row)
            continue
        known.add(actions)
        lesson.trajectories.append(row)
        if len(lesson.trajectories) == teacher.per_task:
            break
    return _number(lesson, spare, teacher.per_task)


def _number(lesson: Lesson, spare: list[TrajectoryRow], wanted: int) -> Lesson:
    """Fill up with repeated plays if need be, and give every row its id."""
    short = wanted - len(lesson.trajectories)
    lesson.trajectories += spare[:short]
    lesson.repeated = len(spare) - len(spare[:short])
    for rows in (lesson.trajectories, lesson.failures):
        for sample, row in enumerate(rows):
            name = f"{row.task_id}/{row.teacher}/{sample}"
            if rows is lesson.failures:
                name = f"{row.task_id}/{row.teacher}/failure-{sample}"
            rows[sample] = row.model_copy(update={"sample": sample, "trajectory_id": name})
    return lesson


def _plain_turns(env: TextEnv, task_id: str) -> int:
    """Turns of the teacher's plain play; 0 if it has none or does not solve the task."""
    env.reset(seed=0, options={"task_id": task_id})
    try:
        teacher = env.teacher()
    except NotImplementedError:
        return 0
    success = False
    while not env.ended:
        *_, info = env.step(teacher.next_turn().action)
        success = info["success"]
    return env.turn if success else 0


def _play_oracle(
    env: TextEnv, settings: OracleTeacher, task_id: str, seed: int, plain: int
) -> TrajectoryRow:
    first, _ = env.reset(seed=seed, options={"task_id": task_id})
    teacher = env.teacher(seed, detours=settings.detours)
    turns: list[Turn] = []
    thoughts: list[str] = []
    success = False
    while not env.ended:
        chosen = teacher.next_turn()
        observation, reward, _, _, info = env.step(chosen.action)
        success = bool(info["success"])
        thoughts.append(chosen.thought)
        turns.append(
            Turn(
                action=chosen.action,
                problem="",
                trainable=chosen.trainable,
                observation=observation,
                valid=bool(info["valid_action"]),
                reward=reward,
            )
        )
    conversations = write_conversations(env.dialogues(), first, turns, thoughts)
    return _row(env, settings.name, task_id, seed, success, plain, first, turns, conversations)


def _row(
    env: TextEnv,
    teacher: str,
    task_id: str,
    seed: int,
    success: bool,
    plain: int,
    first: str,
    turns: list[Turn],
    conversations: list[Conversation],
) -> TrajectoryRow:
    return TrajectoryRow(
        trajectory_id="",
        task_id=task_id,
        family=env.family(task_id),
        env_id=env.env_id,
        data_hash=env.data_hash,
        arguments=canonical_json(env.arguments()),
        options=canonical_json(env.snapshot().options),
        teacher=teacher,
        sample=0,
        seed=seed,
        success=success,
        reward=sum(turn.reward for turn in turns),
        n_turns=len(turns),
        plain_turns=plain,
        first_observation=first,
        turns=turns,
        conversations=conversations,
    )


def teach_policy(
    policy: Policy,
    teacher: OpenAITeacher,
    env_id: str,
    arguments: Mapping[str, object],
    task_ids: Sequence[str],
) -> list[Lesson]:
    """Let a policy play tasks until enough different plays solve each.

    An attempt with an action that not every dialogue can say, such as one of two lines, is spent,
    left out and counted.

    Args:
        policy: Who plays.
        teacher: How.
        env_id: Environment.
        arguments: Its arguments.
        task_ids: Tasks.

    Raises:
        EndpointError: An episode ended in an error of the policy.
    """
    probe = make(env_id, **arguments)
    plain = {task_id: _plain_turns(probe, task_id) for task_id in task_ids}
    lessons = {task_id: Lesson() for task_id in task_ids}
    spare: dict[str, list[TrajectoryRow]] = {task_id: [] for task_id in task_ids}
    known: dict[str, set[tuple[str, ...]]] = {task_id: set() for task_id in task_ids}
    tried, unsaid = dict.fromkeys(task_ids, 0), Counter[str]()
    while True:
        episodes = []
        for task_id in task_ids:
            short = teacher.per_task - len(lessons[task_id].trajectories)
            for _ in range(min(short, teacher.attempts - tried[task_id])):
                env = make(env_id, **arguments)
                dialogue = find_dialogue(env, teacher.dialogue)
                episodes.append(
                    start(env, dialogue, task_id, sample=tried[task_id], seed=teacher.seed)
                )
                tried[task_id] += 1
        if not episodes:
            break
        for episode, record in zip(episodes, play(policy, episodes), strict=True):
            if record.error is not None:
                raise EndpointError(
                    f"the teacher failed in task {record.task_id!r} ({record.error}); parts that "
                    "were finished are kept: run the same command again to go on"
                )
            if not record.turns:
                unsaid[record.task_id] += 1
                continue
            row = _from_record(record, episode.env, teacher, plain[record.task_id])
            if not _can_be_said(row, episode.env.dialogues()):
                unsaid[record.task_id] += 1
                continue
            lesson = lessons[row.task_id]
            actions = tuple(turn.action for turn in row.turns)
            if not row.success:
                lesson.failures.append(row)
            elif actions in known[row.task_id]:
                spare[row.task_id].append(row)
            else:
                known[row.task_id].add(actions)
                lesson.trajectories.append(row)
    for task_id in task_ids:
        lessons[task_id].unsaid = unsaid[task_id]
    return [_number(lessons[t], spare[t], teacher.per_task) for t in task_ids]


def _can_be_said(row: TrajectoryRow, dialogues: Mapping[str, Dialogue]) -> bool:
    """Whether every conversation means the actions that were played."""
    for name, dialogue in dialogues.items():
        replies = [m.content for m in row.conversation(name).messages if m.role == "assistant"]
        for reply, turn in zip(replies, row.turns, strict=True):
            if (dialogue.parse(reply).action or "") != turn.action:
                return False
    return True


def _from_record(
    record: EpisodeRecord, env: TextEnv, teacher: OpenAITeacher, plain: int
) -> TrajectoryRow:
    turns = [
        Turn(
            action=turn.action or "",
            problem=turn.problem or "",
            trainable=turn.action is not None,
            observation=turn.observation,
            valid=turn.valid,
            reward=turn.reward,
        )
        for turn in record.turns
    ]
    first = record.opening[-1].content
    name = find_dialogue(env, teacher.dialogue).name
    said = {name: [turn.reply for turn in record.turns]}
    thoughts = [""] * len(turns)
    conversations = write_conversations(env.dialogues(), first, turns, thoughts, said)
    return _row(
        env,
        teacher.name,
        record.task_id,
        record.seed,
        record.success,
        plain,
        first,
        turns,
        conversations,
    )
