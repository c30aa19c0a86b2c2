"""A BabyAI world as small values: what is seen from where, and what a macro action leads to.

A :class:`Layout` says what lies in every cell and which doors are open. Layouts are interned by
their :class:`World`, so that views and paths found once serve every plan that passes there again.
Cells are numbered row by row, headings as in minigrid (0 right, 1 down, 2 left, 3 up).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from agentbench_envs.babyai.view import HEADINGS, SIDE, spread

EMPTY, WALL, FIRST = 0, 1, 2
"""Codes of cells: nothing, a wall, the first of the things."""
OPEN, CLOSED, LOCKED = 0, 1, 2
"""States of doors, as minigrid encodes them."""


class Thing(NamedTuple):
    """What may lie in a cell.

    Attributes:
        kind: ``"ball"``, ``"box"``, ``"key"`` or ``"door"``.
        color: Its colour.
        contains: Code of what is inside a box, :data:`EMPTY` for nothing.
    """

    kind: str
    color: str
    contains: int = EMPTY


class Macro(NamedTuple):
    """An action of the player.

    Attributes:
        kind: ``"left"``, ``"right"``, ``"forward"``, ``"drop"``, ``"toggle"``, or, with a cell,
            ``"go"``, ``"pickup"``, ``"through"`` (which opens the door first if it is closed).
        cell: Cell of the thing that is meant, -1 where none is.
    """

    kind: str
    cell: int = -1


class Situation(NamedTuple):
    """Where the player is in which layout.

    Attributes:
        layout: What lies where.
        cell: The player's cell.
        heading: Where the player looks.
        carrying: Code of what is carried, :data:`EMPTY` for nothing.
    """

    layout: Layout
    cell: int
    heading: int
    carrying: int

    @property
    def front(self) -> int:
        """The cell ahead."""
        return self.cell + self.layout.world.steps[self.heading]

    @property
    def facing(self) -> int:
        """Code of what lies ahead."""
        return self.layout.cells[self.front]

    def opens(self, door: int) -> bool:
        """Whether the player could open or close a door, standing before it."""
        layout, things = self.layout, self.layout.world.things
        if layout.door(door) != LOCKED:
            return True
        key = things[self.carrying]
        return key.kind == "key" and key.color == things[door].color

    def after(self, macro: Macro) -> Situation | None:
        """The situation after a macro action; ``None`` if it cannot be carried out."""
        kind = macro.kind
        if kind == "left":
            return self._replace(heading=(self.heading - 1) % 4)
        if kind == "right":
            return self._replace(heading=(self.heading + 1) % 4)
        if kind == "forward":
            return self._replace(cell=self.front) if self.layout.is_clear(self.front) else None
        if kind == "drop":
            if not self.carrying or self.facing != EMPTY:
                return None
            return self._replace(layout=self.layout.put(self.front, self.carrying), carrying=EMPTY)
        if kind == "toggle":
            return self._toggled()
        reached = self.layout.reach(self.cell, self.heading).get(macro.cell)
        code = self.layout.cells[macro.cell]
        if reached is None or code < FIRST:
            return None
        there = self._replace(cell=reached[0], heading=reached[1])
        if kind == "go":
            return there
        is_door = self.layout.world.things[code].kind == "door"
        if kind == "pickup":
            if self.carrying or is_door:
                return None
            return there._replace(layout=self.layout.put(macro.cell, EMPTY), carrying=code)
        if not is_door or not self.opens(code):
            return None
        return there._replace(layout=self.layout.turn(code, OPEN), cell=macro.cell)

    def _toggled(self) -> Situation | None:
        code = self.facing
        if code < FIRST:
            return None
        thing = self.layout.world.things[code]
        if thing.kind == "box":
            return self._replace(layout=self.layout.put(self.front, thing.contains))
        if thing.kind != "door" or not self.opens(code):
            return None
        state = CLOSED if self.layout.door(code) == OPEN else OPEN
        return self._replace(layout=self.layout.turn(code, state))

    def moves(self) -> Iterator[tuple[Macro, Situation]]:
        """Macro actions that lead elsewhere, and where: ways to things in view, turns, a step."""
        layout, things = self.layout, self.layout.world.things
        for cell, (end, heading) in layout.reach(self.cell, self.heading).items():
            code = layout.cells[cell]
            if code < FIRST:
                continue
            if (end, heading) != (self.cell, self.heading):
                yield Macro("go", cell), self._replace(cell=end, heading=heading)
            if things[code].kind == "door" and self.opens(code):
                macro = Macro("through", cell)
                opened = layout.turn(code, OPEN)
                yield macro, self._replace(layout=opened, cell=cell, heading=heading)
        for macro in (Macro("left"), Macro("right"), Macro("forward")):
            if (then := self.after(macro)) is not None:
                yield macro, then


class Layout:
    """What lies in every cell and which doors are open; made by :meth:`World.layout`.

    Attributes:
        world: The world.
        cells: One code per cell.
        doors: One state per door, in the order of :attr:`World.doors`.
    """

    def __init__(self, world: World, cells: bytes, doors: bytes) -> None:
        self.world, self.cells, self.doors = world, cells, doors
        self._views: dict[int, tuple[int, ...]] = {}
        self._reach: dict[int, Mapping[int, tuple[int, int]]] = {}
        is_open = [doors[index] == OPEN for index in range(len(doors))]
        self._clear = bytearray(len(world.things))
        self._clear[EMPTY] = 1
        for code, index in world.doors.items():
            self._clear[code] = is_open[index]

    def door(self, code: int) -> int:
        """State of a door."""
        return self.doors[self.world.doors[code]]

    def is_clear(self, cell: int) -> bool:
        """Whether the player can stand in a cell: it is empty or an open door."""
        return bool(self._clear[self.cells[cell]])

    def where(self, codes: frozenset[int]) -> list[int]:
        """Cells in which one of these things lies."""
        return [cell for cell, code in enumerate(self.cells) if code in codes]

    def put(self, cell: int, code: int) -> Layout:
        """The layout with another thing in a cell."""
        cells = bytearray(self.cells)
        cells[cell] = code
        return self.world.layout(bytes(cells), self.doors)

    def turn(self, door: int, state: int) -> Layout:
        """The layout with a door in another state."""
        if self.door(door) == state:
            return self
        doors = bytearray(self.doors)
        doors[self.world.doors[door]] = state
        return self.world.layout(self.cells, bytes(doors))

    def view(self, cell: int, heading: int) -> tuple[int, ...]:
        """Cells in view; the same as minigrid's ``gen_obs_grid`` shows."""
        key = 4 * cell + heading
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = self._look(cell, heading)
        return found

    def _look(self, cell: int, heading: int) -> tuple[int, ...]:
        world, cells = self.world, self.cells
        width, height = world.width, world.height
        ahead_x, ahead_y = HEADINGS[heading]
        see_past = self._see_past
        left_x = cell % width + ahead_y * (SIDE // 2)
        left_y = cell // width - ahead_x * (SIDE // 2)
        seen, found = 1 << (SIDE // 2), []
        for away in range(SIDE):
            row, past = [], 0
            x, y = left_x + ahead_x * away, left_y + ahead_y * away
            for place in range(SIDE):
                at = -1
                if 0 <= x < width and 0 <= y < height:
                    at = y * width + x
                    if see_past[cells[at]]:
                        past |= 1 << place
                row.append(at)
                x, y = x - ahead_y, y + ahead_x
            now, seen = spread(past, seen)
            found += [at for place, at in enumerate(row) if now >> place & 1 and at >= 0]
            if not seen:
                break
        return tuple(found)

    @functools.cached_property
    def _see_past(self) -> bytes:
        things, clear = self.world.things, self._clear
        return bytes(
            clear[code] if code < FIRST or things[code].kind == "door" else 1
            for code in range(len(things))
        )

    def reach(self, cell: int, heading: int) -> Mapping[int, tuple[int, int]]:
        """Cells in view that can be walked up to.

        Returns:
            For every such cell, where the shortest walk through what is in view ends: the cell
            and heading from which it lies ahead.
        """
        key = 4 * cell + heading
        found = self._reach.get(key)
        if found is None:
            found = self._reach[key] = self._walk(cell, heading)
        return found

    def _walk(self, cell: int, heading: int) -> dict[int, tuple[int, int]]:
        visible, steps = set(self.view(cell, heading)), self.world.steps
        cells, clear = self.cells, self._clear
        queue, known = deque([(cell, heading)]), {(cell, heading)}
        found: dict[int, tuple[int, int]] = {}
        while queue:
            place = queue.popleft()
            at, facing = place
            front = at + steps[facing]
            after = [(at, (facing - 1) % 4), (at, (facing + 1) % 4)]
            if front in visible:
                if front != cell:  # a door that the player stands in is not looked at
                    found.setdefault(front, place)
                if clear[cells[front]]:
                    after.insert(0, (front, facing))
            for then in after:
                if then not in known:
                    known.add(then)
                    queue.append(then)
        return found


class World:
    """Things on a grid.

    Args:
        width: Columns.
        height: Rows.
        things: By code; the first two stand for :data:`EMPTY` and :data:`WALL`.
    """

    def __init__(self, width: int, height: int, things: Sequence[Thing]) -> None:
        self.width, self.height, self.things = width, height, tuple(things)
        self.steps = (1, width, -1, -width)
        doors = [code for code, thing in enumerate(things) if thing.kind == "door"]
        self.doors = {code: index for index, code in enumerate(doors)}
        self._layouts: dict[tuple[bytes, bytes], Layout] = {}

    def layout(self, cells: bytes, doors: bytes) -> Layout:
        """The layout with these cells and states of doors; always the same object."""
        found = self._layouts.get((cells, doors))
        if found is None:
            found = self._layouts[cells, doors] = Layout(self, cells, doors)
        return found
