"""AgentGym's rules of play, faults included, so that its transcripts replay byte for byte.

What it does otherwise than :mod:`agentbench_envs.babyai.macros`:

- Its path search walks through what is not in view and through closed doors, up to one row behind
  the player. Among equally short ways it keeps the one that it found last.
- Numbers in actions leave out the things that no path leads to; numbers in the text do not.
- A macro action stops when a low-level step does not change the picture, and never when the game
  ends: only the reward and the end of its last step count.
- An end with a reward of 0.5 or less is none, though the text says so; minigrid's own step limit
  is ignored; the score goes on growing.
- Any action that contains "check" is the check action.
- In missions, "then" and "after you" become "and".
- Where the player carries something from the start, the first observation shows it lying, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from agentbench_envs.babyai.macros import (
    CHECK,
    DROP,
    FORWARD,
    LEFT,
    PICKUP,
    RIGHT,
    TOGGLE,
    UNKNOWN,
)
from agentbench_envs.babyai.view import HEADINGS, SIDE, View, describe, look

_HANDLED = ("ball", "box", "key")


class Choices:
    """What AgentGym lists as possible from where the player is.

    Args:
        raw: The minigrid game; it is only read.

    Attributes:
        view: What is in view.
        actions: Low-level actions of every listed action.
        refusals: Answers to some of the others.
    """

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._width = raw.grid.width
        x, y = raw.agent_pos
        self._start = (int(x), int(y), int(raw.agent_dir))
        with _as_pictured(raw):
            self.view: View = look(raw)
            self._came, self._order = self._search()
        self.actions: dict[str, list[int]] = {}
        self.refusals: dict[str, str] = {}
        self._list()

    def _search(
        self,
    ) -> tuple[dict[tuple[int, int, int], tuple[tuple[int, int, int], int]], dict[Any, None]]:
        """Search over (column, row, heading), layer by layer.

        The original queues a place once for every way there and remembers the last one queued, so
        the layer is walked through in two orders: of first arrivals, in which a search ends, and
        of last arrivals, which decide the ways.

        Returns:
            For each place the one before it and the action; the places in order of first arrival.
        """
        x, y, heading = self._start
        ahead_x, ahead_y = HEADINGS[heading]
        half = SIDE // 2
        left = x + (SIDE - 1) * ahead_x + half * ahead_y, y + (SIDE - 1) * ahead_y - half * ahead_x
        across = left[0] - SIDE * (ahead_x + ahead_y), left[1] - SIDE * (ahead_y - ahead_x)
        columns, rows = (
            range(there, here + 1) if there < here else range(here, there)
            for here, there in zip(left, across, strict=True)
        )
        grid, width = self._raw.grid.grid, self._width
        blocked = {
            (cell % width, cell // width)
            for cell in self.view.cells
            if grid[cell] is not None and grid[cell].type != "door" and cell != y * width + x
        }
        came: dict[Any, Any] = {}
        order: dict[Any, None] = {}
        firsts = lasts = [self._start]
        while firsts:
            order.update(dict.fromkeys(firsts))
            found: dict[Any, None] = {}
            for place in firsts:
                for then, _ in _moves(place):
                    if then not in order and self._free(then, columns, rows, blocked):
                        found.setdefault(then)
            latest: dict[Any, None] = {}
            for place in lasts:
                for then, action in _moves(place):
                    if then in found:
                        came[then] = (place, action)
                        latest.pop(then, None)
                        latest[then] = None
            firsts, lasts = list(found), list(latest)
        return came, order

    @staticmethod
    def _free(then: tuple[int, int, int], columns: range, rows: range, blocked: set[Any]) -> bool:
        return then[0] in columns and then[1] in rows and then[:2] not in blocked

    def _path(self, cell: int, *, arrive: bool = False) -> list[int] | None:
        goal_y, goal_x = divmod(cell, self._width)
        for place in self._order:
            x, y, heading = place
            if not arrive:
                x, y = x + HEADINGS[heading][0], y + HEADINGS[heading][1]
            if (x, y) == (goal_x, goal_y):
                path = []
                while place != self._start:
                    place, action = self._came[place]
                    path.append(action)
                return path[::-1]
        return None

    def _list(self) -> None:
        view, actions, refusals = self.view, self.actions, self.refusals
        carrying = self._raw.carrying
        things = [(thing, self._path(thing.cell)) for thing in view.things]
        actions.update({"turn left": [LEFT], "turn right": [RIGHT]})
        if view.barrier is None or view.barrier[1] > 1:
            actions["move forward"] = [FORWARD]
        else:
            refusals["move forward"] = "There is a barrier in front of you, you can't move forward."
        if carrying is None:
            movable = [(thing.name, path) for thing, path in things if thing.item.type != "door"]
            self._number("pickup", "pickup", movable, [PICKUP])
            refusals["drop"] = "You cannot drop the object, as you are not carrying anything."
        elif any(
            (thing.ahead, thing.right) == (1, 0) and thing.item.type in _HANDLED
            for thing in view.things
        ) or view.barrier == ("wall", 1):
            refusals["drop"] = (
                "You cannot drop the object, as there is already an object in front of you."
            )
        else:
            actions["drop"] = [DROP]
        self._list_doors(things)
        self._number("go to", "go to", [(thing.name, path) for thing, path in things], [])
        actions[CHECK] = []

    def _number(
        self, verb: str, said: str, things: list[tuple[str, list[int] | None]], tail: list[int]
    ) -> None:
        counts: dict[str, int] = {}
        for name, path in things:
            label = f"{name} {counts.get(name, 0) + 1}"
            if path is None:
                why = f"You cannot {said} {label}, as there is no path leading to it."
                self.refusals[f"{verb} {label}"] = why
            else:
                counts[name] = counts.get(name, 0) + 1
                self.actions[f"{verb} {label}"] = path + tail

    def _list_doors(self, things: list[Any]) -> None:
        carrying, actions, refusals = self._raw.carrying, self.actions, self.refusals
        counts: dict[str, int] = {}
        for thing, path in things:
            door = thing.item
            if door.type != "door":
                continue
            counts[thing.name] = counts.get(thing.name, 0) + 1
            through, toggle = f"go through {thing.label}", f"toggle and go through {thing.label}"
            if door.is_open:
                arriving = self._path(thing.cell, arrive=True)
                if arriving is None:
                    refusals[through] = f"You cannot {through}, as there is no path leading to it."
                else:
                    actions[through] = arriving
                continue
            if door.is_locked:
                if carrying is None or carrying.type != "key":
                    refusals[toggle] = f"You cannot {toggle}, as you are not carrying a key."
                    continue
                if carrying.color != door.color:
                    refusals[toggle] = (
                        f"You cannot {toggle}, as the color of the key you are carrying does not "
                        "match the color of door."
                    )
                    continue
            else:
                refusals[through] = (
                    f"You cannot {through}, as it is closed. You should toggle it first."
                )
            if path is None:
                refusals[toggle] = (
                    f"You cannot toggle and go through {thing.name} {counts}, as there is no path "
                    "leading to it."
                )
            else:
                actions[toggle] = [*path, TOGGLE, FORWARD]
                if not path:
                    actions["toggle"] = [TOGGLE]

    def describe(self) -> str:
        """Say what is in view and what is carried."""
        return describe(self.view, self._raw.carrying)


def _moves(place: tuple[int, int, int]) -> tuple[tuple[tuple[int, int, int], int], ...]:
    x, y, heading = place
    ahead = HEADINGS[heading]
    return (
        ((x + ahead[0], y + ahead[1], heading), FORWARD),
        ((x, y, (heading - 1) % 4), LEFT),
        ((x, y, (heading + 1) % 4), RIGHT),
    )


def picture(raw: Any) -> tuple[Any, ...]:
    """What minigrid's image shows, as a value: two are equal if the images are."""
    with _as_pictured(raw) as carried:
        view = look(raw)
        shown = tuple((thing.name, thing.ahead, thing.right) for thing in view.things)
        return shown, _shape(raw, view), carried and (carried.type, carried.color)


@contextlib.contextmanager
def _as_pictured(raw: Any) -> Iterator[Any]:
    """Put a game as its last picture shows it; give what is carried in the picture.

    minigrid draws its first picture before it takes up what the player carries from the start.
    """
    carrying = raw.carrying
    if carrying is None or raw.step_count:
        yield carrying
        return
    raw.grid.set(*carrying.init_pos, carrying)
    try:
        yield None
    finally:
        raw.grid.set(*carrying.init_pos, None)


def _shape(raw: Any, view: View) -> frozenset[tuple[int, int, bool]]:
    """Cells in view as the player sees them, and which are walls."""
    x, y = (int(place) for place in raw.agent_pos)
    ahead_x, ahead_y = HEADINGS[raw.agent_dir]
    width, cells = raw.grid.width, raw.grid.grid
    shape = set()
    for cell in view.cells:
        j, i = divmod(cell, width)
        i, j = i - x, j - y
        is_wall = cells[cell] is not None and cells[cell].type == "wall"
        shape.add((i * ahead_x + j * ahead_y, j * ahead_x - i * ahead_y, is_wall))
    return frozenset(shape)


def mission(raw: Any) -> str:
    """The mission with its word order lost."""
    return str(raw.mission).replace("then", "and").replace("after you", "and")


def play(raw: Any, low_level: list[int]) -> tuple[list[int], float, bool]:
    """Take low-level actions as AgentGym does.

    Returns:
        Those taken, and the reward and end of the last one.
    """
    trace: list[int] = []
    before = picture(raw)
    for action in low_level:
        _, reward, terminated, _, _ = raw.step(action)
        trace.append(action)
        now = picture(raw)
        if now == before:
            break
        before = now
    return trace, float(reward), bool(terminated)


__all__ = ["UNKNOWN", "Choices", "mission", "picture", "play"]
