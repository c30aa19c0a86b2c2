"""Macro actions: which there are from where the player is, and their low-level steps.

A walk is the shortest within what is in view, found breadth first over (cell, heading) with a step
tried before a turn to the left before one to the right. It crosses empty cells and open doors only,
so that every action that is listed can be carried out.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from agentbench_envs.babyai.view import HEADINGS, Seen, View, look

LEFT, RIGHT, FORWARD, PICKUP, DROP, TOGGLE = range(6)
"""minigrid's low-level actions."""
CHECK = "check available actions"
UNKNOWN = "The action is not recognized. Please check valid actions."

_TARGETED = re.compile(r"(go to|pickup|go through|toggle and go through) (.+)")


class Macro(NamedTuple):
    """What an action does.

    Attributes:
        end: Where the walk ends, ``4 * cell + heading``.
        tail: Low-level actions after the walk.
        target: The thing that is meant, ``None`` for an action that names none.
    """

    end: int
    tail: tuple[int, ...]
    target: Seen | None = None


class Ran(NamedTuple):
    """What running low-level actions did.

    Attributes:
        trace: The low-level actions taken.
        reward: Sum of their rewards.
        terminated: Whether the mission was done or failed by the last of them.
        truncated: Whether minigrid's own step limit was reached by the last of them.
    """

    trace: list[int]
    reward: float
    terminated: bool
    truncated: bool


class Choices:
    """What can be done from where the player is.

    Args:
        raw: The minigrid game; it is only read, and must not change while this is used.

    Attributes:
        view: What is in view.
        actions: Every action that can be carried out, by its text, in the order of the text.
    """

    def __init__(self, raw: Any) -> None:
        self.view: View = look(raw)
        self._carrying = raw.carrying
        x, y = raw.agent_pos
        self._start = 4 * (int(y) * raw.grid.width + int(x)) + int(raw.agent_dir)
        self._step = _steps(raw.grid.width)
        self._came: dict[int, tuple[int, int]] = {}
        self._ends: dict[int, int] = {}
        self._walk(raw.grid.grid)
        self.actions: Mapping[str, Macro] = self._list(raw.grid.grid)

    def _walk(self, cells: list[Any]) -> None:
        visible, step, came, ends = self.view.cells, self._step, self._came, self._ends
        wanted = {thing.cell for thing in self.view.things}
        start = self._start
        came[start] = (start, -1)
        queue = [start]
        for state in queue:
            if not wanted:
                break
            heading = state & 3
            front = (state >> 2) + step[heading]
            if front in visible:
                if front in wanted:
                    wanted.discard(front)
                    ends[front] = state
                item = cells[front]
                if item is None or (item.type == "door" and item.is_open):
                    then = front << 2 | heading
                    if then not in came:
                        came[then] = (state, FORWARD)
                        queue.append(then)
            base = state - heading
            then = base | (heading - 1) & 3
            if then not in came:
                came[then] = (state, LEFT)
                queue.append(then)
            then = base | (heading + 1) & 3
            if then not in came:
                came[then] = (state, RIGHT)
                queue.append(then)

    def _list(self, cells: list[Any]) -> dict[str, Macro]:
        start, ends, carrying = self._start, self._ends, self._carrying
        front = cells[(start >> 2) + self._step[start & 3]]
        actions = {"turn left": Macro(start, (LEFT,)), "turn right": Macro(start, (RIGHT,))}
        if front is None or front.can_overlap():
            actions["move forward"] = Macro(start, (FORWARD,))
        reached = [(thing, ends[thing.cell]) for thing in self.view.things if thing.cell in ends]
        if carrying is None:
            for thing, end in reached:
                if thing.item.type != "door":
                    actions[f"pickup {thing.label}"] = Macro(end, (PICKUP,), thing)
        elif front is None:
            actions["drop"] = Macro(start, (DROP,))
        for thing, end in reached:
            if thing.item.type != "door":
                continue
            if thing.item.is_open:
                actions[f"go through {thing.label}"] = Macro(end, (FORWARD,), thing)
            elif _opens(carrying, thing.item):
                text = f"toggle and go through {thing.label}"
                actions[text] = Macro(end, (TOGGLE, FORWARD), thing)
        if front is not None and (
            front.type == "box" or (front.type == "door" and _opens(carrying, front))
        ):
            actions["toggle"] = Macro(start, (TOGGLE,))
        for thing, end in reached:
            actions[f"go to {thing.label}"] = Macro(end, (), thing)
        actions[CHECK] = Macro(start, ())
        return actions

    def low_level(self, macro: Macro) -> list[int]:
        """Low-level actions of a macro action, empty if nothing is to be done."""
        path: list[int] = []
        state, came = macro.end, self._came
        while state != self._start:
            state, action = came[state]
            path.append(action)
        path.reverse()
        path += macro.tail
        return path

    def refusal(self, text: str) -> str:
        """Say why an action that is not among :attr:`actions` cannot be carried out."""
        if text == "move forward":
            return "There is a barrier in front of you, you can't move forward."
        if text == "drop":
            if self._carrying is None:
                return "You cannot drop the object, as you are not carrying anything."
            return "You cannot drop the object, as there is already an object in front of you."
        if text == "toggle":
            return "You cannot toggle, as there is nothing in front of you that you can toggle."
        found = _TARGETED.fullmatch(text)
        things = {} if found is None else {thing.label: thing for thing in self.view.things}
        if found is None or found[2] not in things:
            return UNKNOWN
        return f"You cannot {text}, as {self._why(found[1], things[found[2]].item)}."

    def _why(self, verb: str, item: Any) -> str:
        carrying = self._carrying
        if verb == "pickup":
            if item.type == "door":
                return "doors cannot be picked up"
            if carrying is not None:
                return f"you are already carrying a {carrying.color} {carrying.type}"
        elif verb != "go to":
            if item.type != "door":
                return "it is not a door"
            if verb == "go through" and not item.is_open:
                return (
                    f"it is {'locked' if item.is_locked else 'closed'}. You should toggle it first"
                )
            if verb != "go through" and item.is_open:
                return "it is open already. You can go through it"
            if not item.is_open and not _opens(carrying, item):
                if carrying is None or carrying.type != "key":
                    return "you are not carrying a key"
                return "the color of the key you are carrying does not match the color of door"
        return "there is no path leading to it"


def run(raw: Any, low_level: list[int]) -> Ran:
    """Take low-level actions one by one, and stop at once when the game ends.

    Args:
        raw: The minigrid game.
        low_level: minigrid's actions.
    """
    trace: list[int] = []
    total = 0.0
    for action in low_level:
        _, reward, terminated, truncated, _ = raw.step(action)
        trace.append(action)
        total += float(reward)
        if terminated or truncated:
            return Ran(trace, total, bool(terminated), bool(truncated))
    return Ran(trace, total, terminated=False, truncated=False)


def _opens(carrying: Any, door: Any) -> bool:
    """Whether a door can be opened or closed by who carries this."""
    if door.is_open or not door.is_locked:
        return True
    return carrying is not None and carrying.type == "key" and carrying.color == door.color


@functools.cache
def _steps(width: int) -> tuple[int, ...]:
    return tuple(y * width + x for x, y in HEADINGS)
