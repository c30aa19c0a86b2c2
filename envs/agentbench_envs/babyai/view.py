"""What the player sees: the things in view with their numbers, and the text that says so."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

SIDE = 7
"""Side of the square in view: the player stands in the middle of its nearest row."""
HEADINGS = ((1, 0), (0, 1), (-1, 0), (0, -1))
"""Columns and rows of a step in each of minigrid's directions: right, down, left, up."""


class Seen(NamedTuple):
    """A thing in view.

    Attributes:
        name: What the text calls it, e.g. ``"grey key"`` or ``"red closed door"``.
        number: Counts the things of that name in view, from 1, nearest first.
        cell: Where it lies, ``row * width + column``.
        ahead: How many steps in front of the player.
        right: How many steps to the right, negative to the left.
        item: The minigrid object.
    """

    name: str
    number: int
    cell: int
    ahead: int
    right: int
    item: Any

    @property
    def label(self) -> str:
        """Name and number, as actions say it: ``"grey key 1"``."""
        return f"{self.name} {self.number}"


class View(NamedTuple):
    """What is in view from where the player is.

    Attributes:
        things: All but walls, in the order of the text: nearest first.
        cells: The cells in view, the player's own included.
        anything: Whether a thing or a wall is in view.
        barrier: The nearest wall or box straight ahead and its distance; ``None`` if there is none.
    """

    things: tuple[Seen, ...]
    cells: frozenset[int]
    anything: bool
    barrier: tuple[str, int] | None


@functools.lru_cache(maxsize=8192)
def _square(width: int, height: int, x: int, y: int, heading: int) -> tuple[tuple[int, ...], ...]:
    """Cells of the square in view, -1 outside the grid: rows from the nearest, left to right."""
    ahead_x, ahead_y = HEADINGS[heading]
    rows = []
    for ahead in range(SIDE):
        row = []
        for right in range(-(SIDE // 2), SIDE // 2 + 1):
            i = x + ahead * ahead_x - right * ahead_y
            j = y + ahead * ahead_y + right * ahead_x
            row.append(j * width + i if 0 <= i < width and 0 <= j < height else -1)
        rows.append(tuple(row))
    return tuple(rows)


@functools.cache
def spread(clear: int, lit: int) -> tuple[int, int]:
    """How sight spreads within a row, to the right and then to the left, and into the next row.

    Args:
        clear: Bit set of the cells of the row that can be seen past.
        lit: Bit set of the cells that are in view from the row before.

    Returns:
        Cells of this row in view, and cells of the next row in view from it.
    """
    beyond = 0
    for place in range(SIDE - 1):
        if lit & clear & 1 << place:
            lit |= 2 << place
            beyond |= 3 << place
    for place in range(SIDE - 1, 0, -1):
        if lit & clear & 1 << place:
            lit |= 1 << place - 1
            beyond |= 3 << place - 1
    return lit, beyond


# Nearest first; among equals, the farther row first, then from the left.
_ORDER = {
    (ahead, place): (ahead + abs(place - SIDE // 2), -ahead, place)
    for ahead in range(SIDE)
    for place in range(SIDE)
}


def look(raw: Any) -> View:
    """Look at a minigrid game from where its player is.

    Args:
        raw: The game; it is only read.

    Returns:
        The same cells as minigrid's own observation shows.
    """
    grid = raw.grid
    cells = grid.grid
    x, y = raw.agent_pos
    found: list[tuple[tuple[int, int, int], int, Any]] = []
    visible: list[int] = []
    walls = False
    barrier: tuple[str, int] | None = None
    lit = 1 << SIDE // 2
    for ahead, row in enumerate(_square(grid.width, grid.height, int(x), int(y), raw.agent_dir)):
        clear = 0
        for place, cell in enumerate(row):
            if cell >= 0 and ((item := cells[cell]) is None or item.see_behind()):
                clear |= 1 << place
        here, lit = spread(clear, lit)
        for place, cell in enumerate(row):
            if cell < 0 or not here >> place & 1:
                continue
            visible.append(cell)
            item = cells[cell]
            if item is None or (ahead == 0 and place == SIDE // 2):
                continue
            kind = item.type
            if kind == "wall":
                walls = True
            else:
                found.append((_ORDER[ahead, place], cell, item))
            if barrier is None and place == SIDE // 2 and kind in ("wall", "box"):
                barrier = kind, ahead
        if not lit:
            break
    found.sort(key=lambda entry: entry[0])
    counts: dict[str, int] = {}
    things = []
    for (_, minus_ahead, place), cell, item in found:
        name = name_of(item)
        counts[name] = number = counts.get(name, 0) + 1
        things.append(Seen(name, number, cell, -minus_ahead, place - SIDE // 2, item))
    return View(tuple(things), frozenset(visible), walls or bool(things), barrier)


def name_of(item: Any) -> str:
    """What the text calls a minigrid object: its colour, for a door its state, and its kind."""
    if item.type == "door":
        state = "open" if item.is_open else "locked" if item.is_locked else "closed"
        return f"{item.color} {state} door"
    return f"{item.color} {item.type}"


def describe(view: View, carrying: Any) -> str:
    """Say what is in view and what is carried.

    Args:
        view: What is in view.
        carrying: The minigrid object that is carried, or ``None``.
    """
    if view.anything:
        text = "In front of you in this room, you can see several objects: "
        text += "".join(f"There is a {thing.label} {_where(thing)}  " for thing in view.things)
    else:
        text = "You cannot see any objects within sight."
    text += "The room has walls around you. "
    if view.barrier is not None:
        kind, distance = view.barrier
        text += f"You are facing a {kind} {distance} steps away. "
    if carrying is None:
        return text + "You are not carrying anything."
    return text + f"You are carrying a {carrying.color} {carrying.type}."


def _where(thing: Seen) -> str:
    ahead, right = thing.ahead, thing.right
    if right == 0:
        return f"right in front of you {ahead} steps away."
    side = f"{right} steps to your right." if right > 0 else f"{-right} steps to your left."
    return f"{ahead} steps in front of you and {side}"


def list_actions(actions: Sequence[str]) -> str:
    """The line that lists what can be done, as it ends every observation."""
    return "\nAvailable actions: [" + ", ".join(f'"{action}"' for action in actions) + "]"
