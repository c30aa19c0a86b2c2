"""A running minigrid game whose whole state can be read and set as a value."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from typing import Any

from agentbench_envs.babyai.levels import LEVELS
from agentbench_prefix.errors import ConfigurationError
from agentbench_prefix.files import canonical_json, sha256_text

_NOTHING = -1
_DONE = (False, "continue", "success", "failure")
_HIDE_GREETING = "PYGAME_HIDE_SUPPORT_PROMPT"


@functools.cache
def _minigrid() -> Any:
    """Import minigrid, which registers its levels, when the first of them is played.

    Raises:
        ConfigurationError: minigrid was told that missions end by an action of their own.
    """
    unset = _HIDE_GREETING not in os.environ
    if unset:
        os.environ[_HIDE_GREETING] = "1"
    try:
        import minigrid
        from minigrid.envs.babyai.core import roomgrid_level, verifier
    finally:
        if unset:
            del os.environ[_HIDE_GREETING]
    if verifier.use_done_actions:
        raise ConfigurationError(
            "BABYAI_DONE_ACTIONS is set, so that minigrid ends missions by an action that there is "
            "not in text: unset it"
        )
    # It prints whenever it draws a level anew; diverting sys.stdout would not be safe in threads.
    vars(roomgrid_level)["print"] = lambda *parts: logging.getLogger(__name__).debug("%s", parts)
    return minigrid


def _no_observation() -> None:
    return None


def new_game(level: int, seed: int, *, old: bool = False) -> Any:
    """Make a level's minigrid game and reset it with a seed.

    Always a new one: what a game leaves behind for its next reset then cannot matter.

    Args:
        level: 1 to 40.
        seed: 0 or more.
        old: Whether ``GoToObjS6`` is the room of 4 x 4 cells that it was before minigrid 3, which
            called that version 0 and now has the room of 6 x 6 cells as version 1.

    Returns:
        The unwrapped ``RoomGridLevel``.
    """
    import gymnasium as gym

    _minigrid()
    name = f"{LEVELS[level - 1]}-v0"
    if name == "GoToObjS6-v0":
        name = "GoToObjS4-v0" if old else "GoToObjS6-v1"
    game: Any = gym.make(f"BabyAI-{name}", disable_env_checker=True).unwrapped
    game.reset(seed=seed)
    return game


class Board:
    """One level from one seed, in play.

    Things (all but walls) are numbered by their cell at the start, row by row, what a box holds
    after the box, and what is carried at the start last.

    Args:
        level: 1 to 40.
        seed: 0 or more.
        old: As in :func:`new_game`.

    Attributes:
        raw: The minigrid game. It makes no observations, so that a step costs what its rules cost:
            ``raw.step`` and ``raw.gen_obs`` return ``None`` in their place, and
            ``type(raw).gen_obs(raw)`` still gives one.
    """

    def __init__(self, level: int, seed: int, *, old: bool = False) -> None:
        self.raw = new_game(level, seed, old=old)
        self.raw.gen_obs = _no_observation
        self._things: list[Any] = []
        for item in self.raw.grid.grid:
            if item is not None and item.type != "wall":
                self._number(item)
        if self.raw.carrying is not None:
            self._number(self.raw.carrying)
        self._codes = {id(thing): code for code, thing in enumerate(self._things)}
        self._doors = [thing for thing in self._things if thing.type == "door"]
        self._cells = list(self.raw.grid.grid)
        self._positions = [_position(thing.cur_pos) for thing in self._things]
        self._instructions = list(_walk(self.raw.instrs))
        self._descriptions = [
            description
            for instruction in self._instructions
            for name in ("desc", "desc_move", "desc_fixed")
            if (description := getattr(instruction, name, None)) is not None
        ]
        self._found_at = [description.obj_poss for description in self._descriptions]
        self._rng = self.raw.np_random.bit_generator.state
        self.start = self.state()
        """The state after the reset."""

    def _number(self, thing: Any) -> None:
        self._things.append(thing)
        if thing.contains is not None:
            self._number(thing.contains)

    def world_hash(self) -> str:
        """Hash of all that the level is at the start: layout, player, mission, limit."""
        raw = self.raw
        cells = [None if cell is None else _description(cell) for cell in self._cells]
        carried = None if raw.carrying is None else _description(raw.carrying)
        # The mission's own words are the same for other things meant: it takes the layout as well.
        content = [raw.grid.width, cells, self.start["agent"], carried, raw.mission, raw.max_steps]
        return sha256_text(canonical_json(content))

    # ------------------------------------------------------------------ states
    def state(self) -> dict[str, Any]:
        """Return the whole state as a JSON-able value.

        Returns:
            ``agent`` (column, row, direction), ``steps`` taken, ``carrying`` (number of a thing or
            -1), ``cells`` that differ from the start as ``[cell, number or -1]``, ``doors`` (1 for
            open plus 2 for locked, by number), ``positions`` that things believe to be in where
            that differs from the start, ``mission`` (what the verifier of each instruction
            remembers), ``found`` (where the things meant were last found, ``null`` for as at the
            start) and ``rng``.
        """
        raw, codes = self.raw, self._codes
        x, y = raw.agent_pos
        positions = []
        for code, (thing, before) in enumerate(zip(self._things, self._positions, strict=True)):
            now = _position(thing.cur_pos)
            if now != before:
                positions.append([code, now])
        return {
            "agent": [int(x), int(y), int(raw.agent_dir)],
            "steps": raw.step_count,
            "carrying": self._code(raw.carrying),
            "cells": [
                [cell, _NOTHING if now is None else codes[id(now)]]
                for cell, (now, before) in enumerate(zip(raw.grid.grid, self._cells, strict=True))
                if now is not before
            ],
            "doors": [bool(door.is_open) + 2 * bool(door.is_locked) for door in self._doors],
            "positions": positions,
            "mission": [self._memory(instruction) for instruction in self._instructions],
            "found": [
                None
                if description.obj_poss is before
                else [[int(i), int(j)] for i, j in description.obj_poss]
                for description, before in zip(self._descriptions, self._found_at, strict=True)
            ],
            "rng": _copied(raw.np_random.bit_generator.state),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Set a state that :meth:`state` returned on the same level and seed.

        Raises:
            KeyError, TypeError, ValueError: It is none.
        """
        raw = self.raw
        cells: list[Any] = list(self._cells)
        for cell, code in state["cells"]:
            cells[_within(cell, len(cells))] = self._thing(code)
        carrying = self._thing(state["carrying"])
        placed = [id(item) for item in (*cells, carrying) if item is not None]
        if len(placed) != len(set(placed)):
            raise ValueError("something is in two places")
        x, y, direction = state["agent"]
        place = _within(y, raw.grid.height) * raw.grid.width + _within(x, raw.grid.width)
        for door, code in zip(self._doors, state["doors"], strict=True):
            door.is_open, door.is_locked = bool(_within(code, 4) & 1), bool(code & 2)
        if cells[place] is not None and not cells[place].can_overlap():
            raise ValueError(f"the player cannot stand at {[x, y]}")
        raw.grid.grid[:] = cells
        raw.carrying = carrying
        raw.agent_pos, raw.agent_dir = (x, y), _within(direction, 4)
        raw.step_count = _within(state["steps"], raw.max_steps + 10**6)
        positions = list(self._positions)
        for code, position in state["positions"]:
            positions[_within(code, len(positions))] = position
        for thing, position in zip(self._things, positions, strict=True):
            thing.cur_pos = None if position is None else _pair(position)
        for instruction, memory in zip(self._instructions, state["mission"], strict=True):
            self._remember(instruction, memory)
        for description, start, found in zip(
            self._descriptions, self._found_at, state["found"], strict=True
        ):
            description.obj_poss = start if found is None else [_pair(pair) for pair in found]
        if state["rng"] != raw.np_random.bit_generator.state:
            raw.np_random.bit_generator.state = state["rng"]

    def _code(self, thing: Any) -> int:
        return _NOTHING if thing is None else self._codes[id(thing)]

    def _thing(self, code: Any) -> Any:
        return None if code == _NOTHING else self._things[_within(code, len(self._things))]

    def _memory(self, instruction: Any) -> list[Any]:
        if hasattr(instruction, "a_done"):
            return [instruction.a_done, instruction.b_done]
        if hasattr(instruction, "preCarrying"):
            return [self._code(instruction.preCarrying)]
        return []

    def _remember(self, instruction: Any, memory: list[Any]) -> None:
        if hasattr(instruction, "a_done"):
            if any(done not in _DONE for done in memory):
                raise ValueError(f"not what an instruction remembers: {memory!r:.100}")
            instruction.a_done, instruction.b_done = memory
        elif hasattr(instruction, "preCarrying"):
            (code,) = memory
            instruction.preCarrying = self._thing(code)
        elif memory:
            raise ValueError(f"not what an instruction remembers: {memory!r:.100}")


def _walk(instruction: Any) -> Iterator[Any]:
    yield instruction
    for part in ("instr_a", "instr_b"):
        if (inner := getattr(instruction, part, None)) is not None:
            yield from _walk(inner)


def _description(item: Any) -> list[Any]:
    inner = None if item.contains is None else _description(item.contains)
    return [*(int(code) for code in item.encode()), inner]


def _position(position: Any) -> list[int] | None:
    return None if position is None else [int(position[0]), int(position[1])]


def _pair(pair: Any) -> tuple[int, int]:
    i, j = pair
    return _within(i + 1, 10**6) - 1, _within(j + 1, 10**6) - 1


def _within(value: Any, end: int) -> int:
    if type(value) is not int or not 0 <= value < end:
        raise ValueError(f"expected an integer from 0 to {end - 1}, got {value!r:.100}")
    return value


def _copied(state: Any) -> dict[str, Any]:
    return {**state, "state": dict(state["state"])}
