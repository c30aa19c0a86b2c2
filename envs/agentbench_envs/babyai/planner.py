"""Plans of macro actions: what to do about each goal, and the fewest turns to do it in.

A mission is a list of goals. Each goal is made a few searches: whatever is in the way (a locked
door, a thing on the only path, a full hand) is seen to first, then a best-first search over macro
actions finds the way. Every search counts the situations it looks at, so plans do not depend on
the machine's speed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from agentbench_envs.babyai.world import (
    CLOSED,
    EMPTY,
    FIRST,
    OPEN,
    WALL,
    Macro,
    Situation,
)
from agentbench_envs.stable import StableRandom

_STEP = 0.12
"""Turns that a cell of the way is guessed to cost: most are crossed within a macro action."""
_MOVING, _UNLOCKING = 25, 60
"""How hard it is to move a thing out of the way or to unlock a door, in steps."""
_ROUNDS = 12
"""How often in a row something may have to be seen to first."""


class NoPlan(Exception):
    """The planner found no plan; says why in a word or two."""


@dataclasses.dataclass(frozen=True)
class Goal:
    """One thing that a mission asks for.

    Attributes:
        kind: ``"face"``, ``"open"``, ``"take"`` or ``"put"``.
        things: Codes, one of which is to be faced, opened, taken or put somewhere.
        names: What the mission calls the thing, and for ``"put"`` that beside it, e.g.
            ``("red ball",)``.
        beside: For ``"put"``, codes one of which it is to lie beside.
        cells: For ``"face"``, the cells that count if none of the things lies anywhere.
        strict: Whether taking or opening another thing loses the game.
        fresh: For ``"put"``, whether dropping what is carried at once would not count.
    """

    kind: str
    things: frozenset[int]
    names: tuple[str, ...]
    beside: frozenset[int] = frozenset()
    cells: tuple[int, ...] = ()
    strict: bool = False
    fresh: bool = False


@dataclasses.dataclass(frozen=True)
class Step:
    """A macro action of a plan.

    Attributes:
        macro: The action.
        before: Where it is taken.
        goal: The mission's goal that it serves.
        aim: What the player is about: ``"face"``, ``"open"``, ``"take"``, ``"put"``, ``"rid"``,
            ``"unbox"`` or ``"look"``.
        things: Codes that the aim is about.
    """

    macro: Macro
    before: Situation
    goal: Goal
    aim: str
    things: frozenset[int]


class Planner:
    """Plays a mission ahead, in thought.

    Args:
        situation: Where to start.
        random: Varies the plan; ``None`` gives the plainest.
        budget: How many situations may be looked at.
    """

    def __init__(self, situation: Situation, random: StableRandom | None, budget: int) -> None:
        self.now = situation
        self.random = random
        self.budget = budget
        self.steps: list[Step] = []
        self.goal: Goal | None = None
        self._busy: set[int] = set()
        self._ahead: list[frozenset[int]] = []

    def achieve(self, goal: Goal, then: Goal | None = None) -> None:
        """Plan a goal.

        Args:
            goal: The goal.
            then: The one after it, which the plan had better end near.

        Raises:
            NoPlan: It cannot be achieved, or not within the budget.
        """
        self.goal = goal
        with self._bound_for(*([] if then is None else [then.things])):
            if goal.kind == "face":
                self._face(goal.things, goal.cells)
            elif goal.kind == "open":
                self._open(goal.things)
            elif goal.kind == "take":
                if self.now.carrying in goal.things:
                    self._rid()
                self._take(goal.things, alone=goal.strict)
            else:
                self._put(goal)

    @contextlib.contextmanager
    def _bound_for(self, *codes: frozenset[int]) -> Iterator[None]:
        """What is planned inside had better end near these things, and not bar the way there."""
        self._ahead += codes
        try:
            yield
        finally:
            del self._ahead[len(self._ahead) - len(codes) :]

    # ------------------------------------------------------------------ aims
    def _face(self, things: frozenset[int], cells: Sequence[int]) -> None:
        things = self._some(things)

        def targets() -> Sequence[int]:
            return self.now.layout.where(things) or cells

        if targets():
            self._clear_way(targets)
        if not targets() and self.now.carrying in things:
            return self._rid()  # it then lies ahead
        wanted = set(targets())
        return self._search("face", things, wanted, lambda there: there.front in wanted)

    def _open(self, doors: frozenset[int]) -> None:
        layout = self.now.layout
        closed = frozenset(door for door in doors if layout.door(door) != OPEN)
        if not closed:
            self._clear_way(lambda: layout.where(doors))
            self._search("open", doors, layout.where(doors), None, _toggle(doors, OPEN))
            self._search("open", doors, layout.where(doors), None, _toggle(doors, CLOSED))
            return
        closed = self._some(closed)
        self._clear_way(lambda: layout.where(closed))
        ready = frozenset(door for door in closed if self.now.opens(door))
        if not ready:
            self._unlock(min(closed))
            return

        def last(there: Situation) -> Iterator[tuple[Macro, Situation | None]]:
            if there.facing in ready:
                yield Macro("toggle"), there.after(Macro("toggle"))
            for cell in there.layout.reach(there.cell, there.heading):
                if there.layout.cells[cell] in ready:
                    yield Macro("through", cell), there.after(Macro("through", cell))

        self._search("open", ready, self.now.layout.where(ready), None, last)

    def _take(self, things: frozenset[int], *, alone: bool = False) -> None:
        things = self._some(things)
        if alone and self.now.cell not in _costs(self.now, self.now.layout.where(things)):
            raise NoPlan("another thing would have to be picked up first, which is forbidden")
        for _ in range(_ROUNDS):
            self._clear_way(lambda: self.now.layout.where(things))
            if not self.now.carrying:
                break
            with self._bound_for(things):
                self._rid()
        else:
            raise NoPlan("hands stay full")

        def last(there: Situation) -> Iterator[tuple[Macro, Situation | None]]:
            for cell in there.layout.reach(there.cell, there.heading):
                if there.layout.cells[cell] in things:
                    yield Macro("pickup", cell), there.after(Macro("pickup", cell))

        self._search("take", things, self.now.layout.where(things), None, last)

    def _put(self, goal: Goal) -> None:
        things, fixed = goal.things, self._some(goal.beside)
        steps = self.now.layout.world.steps

        def around() -> list[int]:
            return [cell + step for cell in self.now.layout.where(fixed) for step in steps]

        def beside() -> list[int]:
            return [cell for cell in around() if self.now.layout.cells[cell] == EMPTY]

        for _ in range(_ROUNDS):
            with self._bound_for(fixed):
                if not around() and self.now.carrying in fixed:
                    self._rid()
                if not beside():
                    codes = {self.now.layout.cells[cell] for cell in around()}
                    movable = codes - {WALL, *self.now.layout.world.doors} - things - fixed
                    self._take(frozenset(movable))
                    self._rid()
                self._clear_way(beside)
                if not around():
                    continue
                if self.now.carrying in things:
                    break
                self._take(things)
        else:
            raise NoPlan("the way stays blocked")
        wanted = set(beside())

        def last(there: Situation) -> Iterator[tuple[Macro, Situation | None]]:
            if there.front in wanted and not (goal.fresh and there is here):
                yield Macro("drop"), there.after(Macro("drop"))

        here = self.now
        self._search("put", things | fixed, sorted(wanted), None, last)

    def _rid(self) -> None:
        """Put down what is carried where it bars no way, and not before a door if it can be."""
        carried = frozenset([self.now.carrying])
        ways = [cells for codes in self._ahead if (cells := self.now.layout.where(codes))]
        hardness = [_obstacle(self.now, cells, ())[0] for cells in ways]

        def is_fine(there: Situation, manners: int) -> bool:
            if there.facing != EMPTY or (manners > 1 and not _is_off_doors(there)):
                return False
            if manners > 2 and not _is_out_of_the_way(there):
                return False
            then = there.after(Macro("drop"))
            assert then is not None
            return not manners or all(
                _obstacle(then, cells, ())[0] < before + _MOVING / 2
                for cells, before in zip(ways, hardness, strict=True)
            )

        # The best manners may take many turns.
        best = 3
        if self.random is not None and self.random.uniform() < 0.5:
            best = self.random.between(1, 3)
        for manners in range(best, -1, -1):

            def last(
                there: Situation, manners: int = manners
            ) -> Iterator[tuple[Macro, Situation | None]]:
                if is_fine(there, manners):
                    yield Macro("drop"), there.after(Macro("drop"))

            with contextlib.suppress(NoPlan):
                return self._search("rid", carried, None, None, last)
        raise NoPlan("nowhere to put it")

    def _clear_way(self, cells: Callable[[], Iterable[int]]) -> None:
        """See to it that one of the cells can be walked up to."""
        for round_ in range(_ROUNDS):
            targets = list(cells())
            if not targets and round_:
                return  # it was in the way itself, and is now in the player's hand
            if not targets:
                raise NoPlan("it lies nowhere")
            if self.now.cell in _costs(self.now, targets):
                return
            _, blocked = _obstacle(self.now, targets, self._busy)
            if blocked is None:
                thing = self.now.layout.world.things[self.now.layout.cells[targets[0]]]
                what = f"{thing.color} {thing.kind}".strip() or "cell"
                raise NoPlan(f"the {what} is out of reach without what lies behind it")
            code = self.now.layout.cells[blocked]
            with self._bound_for(frozenset(self.now.layout.cells[cell] for cell in targets)):
                if code in self.now.layout.world.doors:
                    self._unlock(code)
                    continue
                # What has to be done first must not need this very thing to be done.
                self._busy.add(code)
                try:
                    self._take(frozenset([code]))
                finally:
                    self._busy.discard(code)
        raise NoPlan("the way stays blocked")

    def _unlock(self, door: int) -> None:
        world = self.now.layout.world
        color = world.things[door].color
        keys = frozenset(
            code for code, t in enumerate(world.things) if t.kind == "key" and t.color == color
        )
        self._busy.add(door)
        try:
            with self._bound_for(frozenset([door])):
                if self.now.carrying not in keys:
                    if not self.now.layout.where(keys):
                        boxes = [
                            c for c, thing in enumerate(world.things) if thing.contains in keys
                        ]
                        self._unbox(frozenset(boxes))
                    self._take(keys)
            self._open(frozenset([door]))
        finally:
            self._busy.discard(door)

    def _unbox(self, boxes: frozenset[int]) -> None:
        if self.now.carrying in boxes:
            self._rid()
        self._clear_way(lambda: self.now.layout.where(boxes))
        self._search("unbox", boxes, self.now.layout.where(boxes), None, _toggle(boxes, None))

    def _some(self, things: frozenset[int]) -> frozenset[int]:
        """All of the things, or by chance a single one that lies somewhere."""
        if self.random is not None and len(things) > 1 and self.random.uniform() < 0.4:
            lying = self.now.layout.where(things)
            if lying:
                return frozenset([self.now.layout.cells[self.random.pick(lying)]])
        return things

    # ------------------------------------------------------------------ search
    def _search(
        self,
        aim: str,
        things: frozenset[int],
        cells: Iterable[int] | None,
        done: Callable[[Situation], bool] | None,
        last: Callable[[Situation], Iterable[tuple[Macro, Situation | None]]] | None = None,
    ) -> None:
        """Add the fewest macro actions that end where ``done``, or with one of ``last``.

        Args:
            aim: What the player is about.
            things: What the aim is about.
            cells: Cells to be faced in the end, which lead the search; ``None`` for anywhere.
            done: Whether a situation is the end.
            last: Macro actions that are the end, and where they lead.
        """
        start = self.now
        if done is not None and done(start):
            return
        costs = None if cells is None else _costs(start, cells)
        onward = self._onward(costs)
        count = itertools.count()
        best: dict[Situation, float] = {start: 0.0}
        # Entries of the heap: guessed turns in all, turns (fewer first among ends, more first
        # on the way), a tie-breaker, the situation (``None`` at an end) and how it was reached.
        heap: list[tuple[float, float, int, Situation | None, Any]]
        heap = [(0.0, 0.0, next(count), start, None)]
        while heap:
            _, turns, _, here, link = heapq.heappop(heap)
            if here is None:
                self._add(aim, things, link)
                return
            turns = -turns
            if turns > best[here]:
                continue
            self.budget -= 1
            if self.budget < 0:
                raise NoPlan("too long to plan")
            for macro, there in () if last is None else last(here):
                if there is not None:
                    entry = (macro, here, there, link)
                    after = turns + 1 + onward.get(there.cell, 0.0)
                    heapq.heappush(heap, (after, -after, next(count), None, entry))
            for macro, there in here.moves():
                after = turns + 1
                if self.random is not None:
                    after += 0.25 * self.random.uniform()
                entry = (macro, here, there, link)
                if done is not None and done(there):
                    after += onward.get(there.cell, 0.0)
                    heapq.heappush(heap, (after, -after, next(count), None, entry))
                    continue
                rest = 0.0 if costs is None else costs.get(there.cell)
                if rest is None or best.get(there, after + 1) <= after:
                    continue
                best[there] = after
                heapq.heappush(heap, (after + 1 + rest, -after, next(count), there, entry))
        raise NoPlan("no way")

    def _onward(self, costs: Mapping[int, float] | None) -> Mapping[int, float]:
        """Guessed turns from a cell to what comes next, less those from the best place to end."""
        ahead = self.now.layout.where(self._ahead[-1]) if self._ahead else []
        onward = _costs(self.now, ahead)
        ends = [self.now.cell] if costs is None else [cell for cell in costs if not costs[cell]]
        least = min((onward[cell] for cell in ends if cell in onward), default=0.0)
        return {cell: cost - least for cell, cost in onward.items()}

    def _add(self, aim: str, things: frozenset[int], link: Any) -> None:
        assert self.goal is not None
        steps = []
        self.now = link[2]
        while link is not None:
            macro, here, _, link = link
            steps.append(Step(macro, here, self.goal, aim, things))
        self.steps += reversed(steps)


def _toggle(
    codes: frozenset[int], state: int | None
) -> Callable[[Situation], Iterator[tuple[Macro, Situation | None]]]:
    """Toggle one of the things (doors in this state) when it lies ahead."""

    def last(there: Situation) -> Iterator[tuple[Macro, Situation | None]]:
        code = there.facing
        if code in codes and (state is None or there.layout.door(code) == state):
            yield Macro("toggle"), there.after(Macro("toggle"))

    return last


def _is_off_doors(there: Situation) -> bool:
    layout, world = there.layout, there.layout.world
    return all(layout.cells[there.front + step] not in world.doors for step in world.steps)


def _is_out_of_the_way(there: Situation) -> bool:
    """Whether a thing ahead of the player would cut off nothing around it."""
    cells, width = there.layout.cells, there.layout.world.width
    ring = (1, 1 + width, width, width - 1, -1, -1 - width, -width, 1 - width)
    free = [cells[there.front + step] == EMPTY for step in ring]
    return sum(free[place] != free[place - 1] for place in range(len(ring))) <= 2


def _costs(start: Situation, targets: Iterable[int]) -> Mapping[int, float]:
    """Guessed turns from every cell to beside one of the targets; cells without a way are left out.

    A closed door costs one turn; a cell that is crossed costs a little.
    """
    layout = start.layout
    cells, world = layout.cells, layout.world
    passing: dict[int, float | None] = {EMPTY: _STEP, WALL: None}
    for code in range(FIRST, len(world.things)):
        passing[code] = None
        if code in world.doors and start.opens(code):
            passing[code] = _STEP if layout.door(code) == OPEN else _STEP + 1
    costs: dict[int, float] = {}
    heap = []
    for target in targets:
        for step in world.steps:
            cost = passing[cells[target + step]]
            if cost is not None:
                heap.append((0.0, target + step))
    heapq.heapify(heap)
    while heap:
        cost, cell = heapq.heappop(heap)
        if cell in costs:
            continue
        costs[cell] = cost
        for step in world.steps:
            more = passing[cells[cell + step]]
            if more is not None and cell + step not in costs:
                heapq.heappush(heap, (cost + more, cell + step))
    return costs


def _obstacle(
    start: Situation, targets: Iterable[int], busy: Container[int]
) -> tuple[float, int | None]:
    """What is in the way to one of the targets where least is in the way.

    Args:
        start: Where the player is.
        targets: Cells, one of which is to be walked up to.
        busy: Codes that must not be in the way.

    Returns:
        How hard the way is, infinitely so if there is none; the cell of the first thing to be
        moved or unlocked on it, ``None`` if there is none.
    """
    layout = start.layout
    cells, world, wanted = layout.cells, layout.world, set(targets)
    came: dict[int, int] = {}
    heap = [(0, start.cell, start.cell)]
    while heap:
        cost, cell, before = heapq.heappop(heap)
        if cell in came:
            continue
        came[cell] = before
        if cell in wanted:
            break
        for step in world.steps:
            code = cells[cell + step]
            if code == WALL or cell + step in came:
                continue
            if code in busy and cell + step not in wanted:
                continue
            more = 1
            if code in world.doors:
                more = 1 if layout.is_clear(cell + step) else 3 if start.opens(code) else _UNLOCKING
            elif code != EMPTY:
                more = _MOVING
            heapq.heappush(heap, (cost + more, cell + step, cell))
    else:
        return math.inf, None
    first = None
    cell = came[cell]
    while cell != start.cell:
        code = cells[cell]
        if code != EMPTY and not (code in world.doors and start.opens(code)):
            first = cell
        cell = came[cell]
    return cost, first


def plan_mission(
    start: Situation,
    missions: Sequence[Sequence[Goal]],
    random: StableRandom | None = None,
    *,
    budget: int,
    tries: int = 1,
) -> list[Step]:
    """The shortest plan found.

    Args:
        start: Where the player is.
        missions: The mission's goals in the orders in which they may be achieved.
        random: Varies the plans; ``None`` gives the plainest, and varies further tries alone.
        budget: How many situations a plan may look at; a further try gets a tenth on average.
        tries: How often a plan is made for each order.

    Raises:
        NoPlan: None was found.
    """
    best: list[Step] | None = None
    reason = NoPlan("nothing is left to do")
    left = budget * tries // 10
    for attempt in range(tries):
        chance = random
        if attempt and random is None:
            chance = StableRandom(f"plan/{attempt}")
        for goals in missions:
            planner = Planner(start, chance, min(left, budget) if attempt else budget)
            try:
                for goal, then in zip(goals, [*goals[1:], None], strict=True):
                    planner.achieve(goal, then)
            except NoPlan as found:
                reason = found
            else:
                if best is None or len(planner.steps) < len(best):
                    best = planner.steps
            if attempt:
                left -= min(left, budget) - planner.budget
    if best is None:
        raise reason
    return best
