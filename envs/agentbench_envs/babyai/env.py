"""The BabyAI text environment.

From a running environment, ``env.board.raw`` is its minigrid game (to be read, not stepped),
:meth:`BabyAIEnv.visible` lists the things in view with the numbers that actions name them by, and
:meth:`BabyAIEnv.candidate_actions` lists every action that can be carried out now.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any, ClassVar

from agentbench_envs.babyai import agentgym, levels, macros, tasks
from agentbench_envs.babyai.board import Board
from agentbench_envs.babyai.dialogue import DIALOGUES
from agentbench_envs.babyai.view import Seen, describe, list_actions
from agentbench_envs.compat import turn_limit
from agentbench_prefix.dialogue import Dialogue
from agentbench_prefix.env import JSON, Outcome, PlayedTurn, TextEnv
from agentbench_prefix.errors import UnknownNameError

if TYPE_CHECKING:
    from agentbench_envs.babyai.teacher import PlannerTeacher

_BOARDS_KEPT = 4
_GOAL = "Your goal: "
_NO_CHANGE = "No change in state."
_COMPLETED = "\n The task is completed."
_FAILED = "\n The task has failed."
_OUT_OF_STEPS = "\n The task has failed: its steps are used up."

_SPACES = re.compile(r"\s+")
_THING_FIELD = re.compile(
    r"There is a (\w+) (?:(open|closed|locked) )?(\w+) [0-9]+ "
    r"(?:right in front of you ([0-9]+) steps away\.|"
    r"([0-9]+) steps in front of you and ([0-9]+) steps to your (right|left)\.)"
)
_FACING_FIELD = re.compile(r"You are facing a (\w+) ([0-9]+) steps away\.")
_CARRYING_FIELD = re.compile(r"You are (?:not carrying anything|carrying a (\w+ \w+))\.")
_ACTION_FIELD = re.compile(r'"([^"]*)"')


class BabyAIEnv(TextEnv):
    """Carry out a mission in a grid world that is told in text.

    **Task.** ``babyai_<index>`` plays level ``index % 40 + 1`` of
    :data:`agentbench_envs.babyai.levels.LEVELS` from minigrid's seed ``index // 40``. The first
    observation states the mission. Every observation says what is in view (things are numbered by
    name, nearest first), what is carried, and which actions there are.

    **Actions.** ``turn left``, ``turn right``, ``move forward``, ``drop``, ``toggle``,
    ``check available actions``, and the macro actions ``go to <thing> <number>``,
    ``pickup <thing> <number>`` (also ``pick up``), ``go through <open door> <number>`` and
    ``toggle and go through <door> <number>``. Case and spacing do not matter. An action that is not
    listed is answered with the reason, and changes nothing.

    **Reward.** 1 and the end of the episode when the mission is done, inside a macro action as
    well. The episode also ends, with 0, when the mission has failed and when minigrid's own step
    limit is reached. Every ``info`` of a step holds ``low_level`` (minigrid's actions taken) and
    ``minigrid_reward`` (minigrid's graded reward, ``1 - 0.9 * steps / step limit`` on success).

    **Splits.** ``train`` (810 tasks over the 40 levels), ``test`` (18 of each of the five families
    that Prefix-GRPO reports) and ``test_all`` (5 of each level); see
    :mod:`agentbench_envs.babyai.tasks`. Any other index is a task as well
    (:meth:`generate_tasks`).

    **Fields** for state matching: ``goal`` (first observation), ``objects``, ``doors``, ``facing``
    and ``carrying`` (when something is described) and ``actions``.

    Args:
        max_turns: Turn limit; 20 by default, ``None`` for no limit.
        split: Split from which ``reset`` draws when no task is named.
        compat: ``"agentgym"`` for the rules of AgentGym's server with its faults
            (:mod:`agentbench_envs.babyai.agentgym`): old transcripts then replay byte for byte.
            The reward is its reward, ``info["score"]`` its score. ``max_turns`` is ``None`` with
            it, and a number is refused.
        render_mode: ``"ansi"`` or ``None``.
    """

    env_id = "BabyAI-Text-v0"
    default_max_turns = 20
    rule_arguments: ClassVar[tuple[str, ...]] = ("compat",)

    def __init__(
        self,
        *,
        max_turns: int | EllipsisType | None = ...,
        split: str = "train",
        compat: str | None = None,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(
            max_turns=turn_limit(compat, max_turns), split=split, render_mode=render_mode
        )
        self.compat = compat
        self._boards: OrderedDict[str, Board] = OrderedDict()
        self._board: Board | None = None
        self._found: macros.Choices | agentgym.Choices | None = None
        self._reward = self._score = 0.0

    # ------------------------------------------------------------------ tasks
    @classmethod
    def splits(cls) -> tuple[str, ...]:
        """``train``, ``test`` and ``test_all``."""
        return tasks.SPLITS

    def tasks(self, split: str) -> tuple[str, ...]:
        """Task ids of a split, in their fixed order."""
        return tasks.tasks(split)

    def family(self, task_id: str) -> str:
        """Family of the task's level; see :data:`agentbench_envs.babyai.levels.FAMILIES`."""
        return levels.family_of(levels.level_and_seed(task_id)[0])

    @property
    def data_hash(self) -> str:
        """Hash of the splits and of the world of every task in them."""
        return tasks.data_hash()

    def generate_tasks(
        self, seed: int, n: int, *, level: int | None = None, **parameters: Any
    ) -> tuple[str, ...]:
        """Ids of ``n`` tasks that are in no split; unlimited and seeded.

        Args:
            seed: Any integer from 0 to 10^18.
            n: How many, up to 10^6.
            level: 1 to 40, or ``None`` to take the levels in turn.
            **parameters: None are known.
        """
        if parameters:
            raise UnknownNameError("parameter", sorted(parameters)[0], ["level"])
        return tasks.generated(seed, n, level)

    # ------------------------------------------------------------------ the game inside
    @property
    def board(self) -> Board:
        """The game in play; its minigrid game is to be read only.

        The same object as long as the task stays the same, whatever is restored or reset.

        Raises:
            EnvironmentUsageError: No task yet.
        """
        if self._board is None:
            _ = self.task_id  # says that there is none yet
        assert self._board is not None
        return self._board

    def visible(self) -> tuple[Seen, ...]:
        """The things in view, nearest first; their ``label`` is what actions name them by."""
        return self._choices().view.things

    def _choices(self) -> macros.Choices | agentgym.Choices:
        if self._found is None:
            raw = self.board.raw
            self._found = macros.Choices(raw) if self.compat is None else agentgym.Choices(raw)
        return self._found

    # ------------------------------------------------------------------ play
    def _begin(self, task_id: str, options: Mapping[str, JSON]) -> str:  # noqa: ARG002 - none known
        board = self._boards.pop(task_id, None)
        if board is None:
            level, seed = levels.level_and_seed(task_id)
            board = Board(level, seed, old=self.compat is not None)
            if self.compat is None:
                tasks.check_world(task_id, board.world_hash)
        board.set_state(board.start)
        self._boards[task_id] = self._board = board
        if len(self._boards) > _BOARDS_KEPT:
            self._boards.popitem(last=False)
        self._found = None
        self._reward = self._score = 0.0
        goal = board.raw.mission if self.compat is None else agentgym.mission(board.raw)
        return f"{_GOAL}{goal}\n{self._describe()}{self._available()}"

    def _describe(self) -> str:
        return describe(self._choices().view, self.board.raw.carrying)

    def _available(self) -> str:
        return list_actions(list(self._choices().actions))

    def _act(self, action: str) -> Outcome:
        return self._act_mended(action) if self.compat is None else self._act_agentgym(action)

    def _act_mended(self, action: str) -> Outcome:
        choices = self._choices()
        assert isinstance(choices, macros.Choices)
        text = _SPACES.sub(" ", action.strip().lower())
        if text.startswith("pick up "):
            text = f"pickup {text[8:]}"
        macro = choices.actions.get(text)
        if macro is None:
            return self._unchanged(choices.refusal(text), valid=False)
        if text == macros.CHECK:
            listed = ", ".join(choices.actions)
            return self._unchanged(f"You can take the following actions: {listed}", valid=True)
        low_level = choices.low_level(macro)
        if not low_level:
            return self._unchanged(_NO_CHANGE, valid=True)
        ran = macros.run(self.board.raw, low_level)
        self._found = None
        success = ran.terminated and ran.reward > 0
        seen = self._describe()
        if success:
            seen += _COMPLETED
        elif ran.terminated:
            seen += _FAILED
        elif ran.truncated:
            seen += _OUT_OF_STEPS
        return Outcome(
            seen + self._available(),
            1.0 if success else 0.0,
            ran.terminated or ran.truncated,
            success,
            info={"low_level": ran.trace, "minigrid_reward": ran.reward},
        )

    def _unchanged(self, answer: str, *, valid: bool) -> Outcome:
        info = {"low_level": [], "minigrid_reward": 0.0}
        return Outcome(answer + self._available(), valid=valid, info=info)

    def _act_agentgym(self, action: str) -> Outcome:
        choices = self._choices()
        assert isinstance(choices, agentgym.Choices)
        text = action.lower().strip()
        done, valid = False, True
        trace: list[int] = []
        if "check" in text:
            answer = "You can take the following actions: " + ", ".join(choices.actions)
        elif not text:
            answer, valid = _NO_CHANGE, False
        elif text not in choices.actions:
            answer, valid = choices.refusals.get(text, macros.UNKNOWN), False
        elif not choices.actions[text]:
            answer = _NO_CHANGE
        else:
            trace, self._reward, done = agentgym.play(self.board.raw, choices.actions[text])
            self._found = None
            answer = self._describe() + (_COMPLETED if done else "")
            done = done and self._reward > 0.5
        self._score += self._reward
        info = {"low_level": trace, "minigrid_reward": self._reward, "score": self._score}
        return Outcome(answer + self._available(), self._reward, done, done, valid, info)

    # ------------------------------------------------------------------ states
    def _get_state(self) -> JSON:
        state: dict[str, JSON] = self.board.state()
        if self.compat is not None:
            state["agentgym"] = [self._reward, self._score]
        return state

    def _set_state(self, state: Any) -> None:
        self.board.set_state(state)
        if self.compat is not None:
            self._reward, self._score = (float(value) for value in state["agentgym"])
        self._found = None

    def fields(self, observation: str) -> dict[str, JSON]:
        """``goal``, ``objects``, ``doors``, ``facing``, ``carrying``, ``actions``.

        ``objects`` and ``doors`` list ``[colour and kind, steps ahead, steps to the right]``, doors
        with their state at the end; ``facing`` is ``[what, steps]`` or ``None``; ``carrying`` is a
        name or ``None``.
        """
        found: dict[str, JSON] = {}
        head, separator, listed = observation.rpartition("\nAvailable actions: [")
        if not separator:
            return found
        found["actions"] = [*_ACTION_FIELD.findall(listed)]
        if head.startswith(_GOAL):
            goal, _, head = head.removeprefix(_GOAL).partition("\n")
            found["goal"] = goal
        carrying = _CARRYING_FIELD.search(head)
        if carrying is None:
            return found
        found["carrying"] = carrying[1]
        facing = _FACING_FIELD.search(head)
        found["facing"] = None if facing is None else [facing[1], int(facing[2])]
        objects: list[JSON] = []
        doors: list[JSON] = []
        for color, state, kind, straight, ahead, aside, side in _THING_FIELD.findall(head):
            right = int(aside or 0) * (-1 if side == "left" else 1)
            place: list[JSON] = [f"{color} {kind}", int(straight or ahead), right]
            if state:
                doors.append([*place, state])
            else:
                objects.append(place)
        found["objects"], found["doors"] = objects, doors
        return found

    # ------------------------------------------------------------------ for players
    def dialogues(self) -> Mapping[str, Dialogue]:
        """``full`` and ``compact``."""
        return DIALOGUES

    def teacher(self, seed: int | None = None, *, detours: float = 0.0) -> PlannerTeacher:
        """Return a teacher that plays by plan; see :class:`PlannerTeacher`."""
        from agentbench_envs.babyai.teacher import PlannerTeacher

        return PlannerTeacher(self, seed, detours)

    def candidate_actions(self) -> Sequence[str]:
        """Every action that the observation lists, in its order."""
        return list(self._choices().actions)

    def failure_category(self, turns: Sequence[PlayedTurn]) -> str:
        """Category of the last turn.

        ``malformed_reply`` (no action), ``mission_failed``, ``out_of_steps`` (minigrid's limit),
        ``unknown_action``, ``refused_action`` (known, but not possible), ``looking`` (the check
        action, or no change) and ``turn_limit`` (still acting).
        """
        if not turns:
            return "no_turn"
        last = turns[-1]
        if last.action is None:
            return "malformed_reply"
        answer = last.observation
        if _OUT_OF_STEPS in answer:
            return "out_of_steps"
        if _FAILED in answer:
            return "mission_failed"
        if answer.startswith(macros.UNKNOWN):
            return "unknown_action"
        if not last.valid:
            return "refused_action"
        if answer.startswith(("You can take the following", _NO_CHANGE)):
            return "looking"
        return "turn_limit"
