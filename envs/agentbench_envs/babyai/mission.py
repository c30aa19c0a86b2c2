"""Reads a running minigrid game: the world, where the player is, what the mission still asks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from minigrid.envs.babyai.core.verifier import (
    AfterInstr,
    AndInstr,
    BeforeInstr,
    GoToInstr,
    ObjDesc,
    OpenInstr,
    PutNextInstr,
)

from agentbench_envs.babyai.planner import Goal, NoPlan
from agentbench_envs.babyai.world import EMPTY, WALL, Situation, Thing, World

_LOCATIONS = {
    "left": "on my left at the start",
    "right": "on my right at the start",
    "front": "in front of me at the start",
    "behind": "behind me at the start",
}


class Game:
    """A minigrid game as the planner sees it.

    Args:
        raw: The game; it is only read.
    """

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self._codes: dict[int, int] = {}
        # They are kept, so that no other thing can be taken for one of them.
        self._items: list[Any] = []
        things = [Thing("", ""), Thing("wall", "")]

        def add(item: Any) -> None:
            inner = getattr(item, "contains", None)
            if inner is not None:
                add(inner)
            self._codes[id(item)] = len(things)
            self._items.append(item)
            contains = EMPTY if inner is None else self._codes[id(inner)]
            things.append(Thing(item.type, item.color, contains))

        for item in raw.grid.grid:
            if item is not None and item.type != "wall":
                add(item)
        if raw.carrying is not None:
            add(raw.carrying)
        self._world = _world(raw.grid.width, raw.grid.height, tuple(things))

    def look(self) -> Situation | None:
        """Where the player is now; ``None`` if there are things that were not there before."""
        raw, codes = self.raw, self._codes
        cells, doors = bytearray(), {}
        for item in raw.grid.grid:
            if item is None:
                cells.append(EMPTY)
            elif item.type == "wall":
                cells.append(WALL)
            elif id(item) in codes:
                cells.append(codes[id(item)])
                if item.type == "door":
                    doors[codes[id(item)]] = item.encode()[2]
            else:
                return None
        carrying = EMPTY if raw.carrying is None else codes.get(id(raw.carrying))
        if carrying is None or doors.keys() != self._world.doors.keys():
            return None
        layout = self._world.layout(bytes(cells), bytes(doors[code] for code in self._world.doors))
        x, y = (int(place) for place in raw.agent_pos)
        return Situation(layout, y * raw.grid.width + x, int(raw.agent_dir), carrying)

    def missions(self) -> list[list[Goal]]:
        """Goals that are left, in each order in which they may be achieved.

        Raises:
            NoPlan: The game's own rules cannot be met.
        """
        return [[self._goal(part) for part in order] for order in _orders(self.raw.instrs)]

    def _goal(self, instr: Any) -> Goal:
        if isinstance(instr, PutNextInstr):
            # The game compares with what was carried when it last looked.
            fresh = self.raw.carrying is not None and instr.preCarrying is None
            return Goal(
                "put",
                self._matching(instr.desc_move),
                (_name(instr.desc_move), _name(instr.desc_fixed)),
                self._matching(instr.desc_fixed),
                fresh=fresh,
            )
        things, names = self._matching(instr.desc), (_name(instr.desc),)
        if isinstance(instr, GoToInstr):
            width = self.raw.grid.width
            cells = tuple(int(y) * width + int(x) for x, y in instr.desc.obj_poss)
            return Goal("face", things, names, cells=cells)
        kind = "open" if isinstance(instr, OpenInstr) else "take"
        return Goal(kind, things, names, strict=instr.strict)

    def _matching(self, desc: ObjDesc) -> frozenset[int]:
        known = (self._codes.get(id(item)) for item in desc.obj_set)
        return frozenset(code for code in known if code is not None)


def _name(desc: ObjDesc) -> str:
    words = (desc.color, desc.type or "object", _LOCATIONS.get(desc.loc))
    return " ".join(word for word in words if word)


@functools.lru_cache(maxsize=4)
def _world(width: int, height: int, things: Sequence[Thing]) -> World:
    # Plays of the same task share what was found out about it.
    return World(width, height, things)


def _orders(instr: Any) -> list[list[Any]]:
    done: Any
    parts: list[tuple[Any, Any]]
    if isinstance(instr, BeforeInstr | AfterInstr):
        one, two, done = instr.instr_a, instr.instr_b, instr.a_done
        if isinstance(instr, AfterInstr):
            one, two, done = instr.instr_b, instr.instr_a, instr.b_done
        if done == "success":
            return _orders(two)
        if all(isinstance(part, OpenInstr) and part.strict for part in (one, two)):
            raise NoPlan("opening the first door already fails the instruction about the second")
        return [[*early, *late] for early, late in itertools.product(_orders(one), _orders(two))]
    if isinstance(instr, AndInstr):
        parts = [(instr.instr_a, instr.a_done), (instr.instr_b, instr.b_done)]
        left = [part for part, done in parts if done != "success"]
        return [left, left[::-1]] if len(left) > 1 else [left]
    return [[instr]]
