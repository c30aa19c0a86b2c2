"""What a player thinks at a step of a plan; it speaks of nothing that was not in view."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from agentbench_envs.babyai.planner import Goal, Step
from agentbench_envs.babyai.world import LOCKED, OPEN, Situation

_MOVES = {"left": "turn left", "right": "turn right", "forward": "step forward"}


def name(now: Situation, code: int) -> str:
    """Colour and kind of a thing."""
    thing = now.layout.world.things[code]
    return f"{thing.color} {thing.kind}"


def task(goal: Goal) -> str:
    """A goal in words, e.g. ``"go to the red ball"``."""
    verb = {"face": "go to", "open": "open", "take": "pick up", "put": "put"}[goal.kind]
    rest = f" next to the {goal.names[-1]}" if goal.kind == "put" else ""
    return f"{verb} the {goal.names[0]}{rest}"


def reason(step: Step, now: Situation, seen_cells: AbstractSet[int]) -> str:
    """Why a step is taken.

    Args:
        step: The step.
        now: Where it is taken.
        seen_cells: Cells that came into view so far.
    """
    seen = {now.layout.cells[cell] for cell in seen_cells}
    return _deed(step, now, seen) or _way(step, now, seen)


def _meant(step: Step, now: Situation) -> int:
    cell = step.macro.cell
    return now.facing if cell < 0 else now.layout.cells[cell]


def _deed(step: Step, now: Situation, seen: AbstractSet[int]) -> str:
    """Why something is done that achieves what the step is about; empty if nothing is."""
    kind, goal, layout = step.macro.kind, step.goal, now.layout
    meant, things = _meant(step, now), now.layout.world.things
    if kind == "drop":
        carried = name(now, now.carrying)
        if step.aim == "put" and goal.beside & seen:
            return f"The free cell ahead is next to the {goal.names[-1]}. I drop the {carried}."
        if step.aim == "put":
            return f"I try to drop the {carried} here."
        if goal.kind == "face" and now.carrying in goal.things:
            return f"I drop the {carried}, so that I stand before it."
        return f"I need my hands free, so I put the {carried} down here."
    if kind == "pickup":
        if meant in goal.things:
            return f"I see the {name(now, meant)}, so I pick it up."
        if things[meant].kind != "key":
            return f"The {name(now, meant)} is in my way, so I take it."
        for door in layout.world.doors:
            locked = door in seen and layout.door(door) == LOCKED
            if locked and things[door].color == things[meant].color:
                return f"The {name(now, door)} is locked, so I take the {name(now, meant)}."
        return f"The {name(now, meant)} may open a door, so I take it."
    if kind == "toggle" and step.aim == "unbox":
        return f"The {name(now, meant)} may hold what I need, so I open it."
    if meant not in step.things:
        return ""
    if step.aim == "open" and kind in ("toggle", "through"):
        if layout.door(meant) == LOCKED:
            return f"I have the {things[meant].color} key, so I unlock the {name(now, meant)}."
        verb = "close it to open it again" if layout.door(meant) == OPEN else "open it"
        return f"I see the {name(now, meant)}, so I {verb}."
    if step.aim == "face" and kind == "go":
        return f"I see the {name(now, meant)}, so I walk up to it."
    return ""


def _way(step: Step, now: Situation, seen: AbstractSet[int]) -> str:
    """Why the player turns or walks."""
    macro, goal = step.macro, step.goal
    move = _MOVES.get(macro.kind, "")
    if not move:
        verb = "walk to" if macro.kind == "go" else "go through"
        move = f"{verb} the {name(now, _meant(step, now))}"
    if step.aim == "rid":
        return f"I {move} to put the {name(now, now.carrying)} down where it is in no way."
    sought, codes = goal.names[0], step.things
    has_it = now.carrying in goal.things or (step.aim == "look" and goal.things & seen)
    if goal.kind == "put" and (step.aim == "put" or has_it):
        sought, codes = goal.names[-1], goal.beside
    elif codes & seen and not codes & (goal.things | goal.beside):
        sought = name(now, min(codes & seen))
    if not codes & seen:
        return f"I do not see the {sought} yet. I {move} to look there."
    if step.aim == "look":
        return f"I saw the {sought}, but no way there. I {move} to look there."
    in_view = {now.layout.cells[cell] for cell in now.layout.view(now.cell, now.heading)}
    if not codes & in_view:
        return f"The {sought} is out of sight now. I {move} to get back to it."
    if step.aim == "put":
        return f"I {move} to have a free cell next to the {sought} ahead of me."
    return f"I {move} to get to the {sought}."
