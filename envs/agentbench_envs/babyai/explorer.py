"""Play with what has been seen only: look around, try doors, act when the goal is in sight."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Sequence
from typing import Any

from agentbench_envs.babyai.planner import Goal, NoPlan, Planner, Step
from agentbench_envs.babyai.world import EMPTY, WALL, Layout, Macro, Situation
from agentbench_envs.stable import StableRandom

_WORTH = (4, 1)
"""New cells that make a look worth its turns; the lower bar is for when nothing meets the first."""


class Explorer:
    """A player who knows what came into view, and nothing else of the world.

    Args:
        situation: Where to start; it tells what a macro action leads to, not what to choose.
        seen: Cells that came into view so far.
        random: Varies the play.
        budget: How many situations may be looked at in one plan.
    """

    def __init__(
        self, situation: Situation, seen: frozenset[int], random: StableRandom, budget: int
    ) -> None:
        self.now = situation
        self.seen = set(seen)
        self.random = random
        self.budget = budget
        self.steps: list[Step] = []

    def play(self, goals: Sequence[Goal], limit: int) -> list[Step]:
        """Achieve the goals.

        Args:
            goals: In this order.
            limit: How many macro actions may be taken.

        Raises:
            NoPlan: They were not enough, or there was nothing left to explore.
        """
        left = [*goals]
        while left:
            self.seen.update(self.now.layout.view(self.now.cell, self.now.heading))
            known = self._known()
            planner = Planner(known, self.random, self.budget)
            try:
                planner.achieve(self._in_sight(left[0]), *left[1:2])
            except NoPlan:
                self._follow(self._excursion(known, left[0]), limit)
                continue
            if self._follow(planner.steps, limit):
                del left[0]
        return self.steps

    def _follow(self, steps: Sequence[Step], limit: int) -> bool:
        """Take steps as long as they lead where they were thought to lead."""
        for step in steps:
            if (self.now.cell, self.now.heading) != (step.before.cell, step.before.heading):
                return False
            if len(self.steps) >= limit:
                raise NoPlan("too many turns")
            there = self.now.after(step.macro)
            if there is None:
                return False
            self.steps.append(dataclasses.replace(step, before=self.now))
            self.now = there
            self.seen.update(there.layout.view(there.cell, there.heading))
        return True

    def _known(self) -> Situation:
        return self.now._replace(layout=self._masked(WALL))

    def _masked(self, unseen: int) -> Layout:
        layout = self.now.layout
        cells = bytes(
            code if cell in self.seen else unseen for cell, code in enumerate(layout.cells)
        )
        return layout.world.layout(cells, layout.doors)

    def _in_sight(self, goal: Goal) -> Goal:
        cells = tuple(cell for cell in goal.cells if cell in self.seen)
        return dataclasses.replace(goal, cells=cells)

    # ------------------------------------------------------------------ exploring
    def _excursion(self, known: Situation, goal: Goal) -> list[Step]:
        """Macro actions to where most that is new comes into view for the turns."""
        guess = self._masked(EMPTY)
        for worth in _WORTH:
            found = self._nearest_view(known, guess, worth, doors=not goal.strict)
            if found:
                return [Step(*entry, goal, "look", goal.things) for entry in found]
        for door in sorted(known.layout.world.doors):
            if goal.strict or door not in known.layout.cells or known.opens(door):
                continue
            planner = Planner(known, self.random, self.budget)
            try:
                planner.achieve(Goal("open", frozenset([door]), ("door",)))
            except NoPlan:
                continue
            return [dataclasses.replace(step, goal=goal) for step in planner.steps]
        raise NoPlan("nothing left to explore")

    def _nearest_view(
        self, known: Situation, guess: Layout, worth: int, doors: bool
    ) -> list[tuple[Macro, Situation]]:
        count = itertools.count()
        best: Any = None
        best_score = 0.0
        queue: list[tuple[float, int, Situation, Any]] = [(0.0, 0, known, None)]
        done: set[tuple[int, int]] = set()
        deepest = float("inf")
        while queue:
            turns, _, here, link = heapq.heappop(queue)
            if turns > deepest:
                break
            if (here.cell, here.heading) in done:
                continue
            done.add((here.cell, here.heading))
            if link is not None:
                opened = self._opened(guess, here)
                new = sum(cell not in self.seen for cell in opened.view(here.cell, here.heading))
                if new >= worth:
                    deepest = min(deepest, turns + 1)
                    score = new * (0.6 + 0.8 * self.random.uniform()) / (turns + 1) ** 2
                    if score > best_score:
                        best, best_score = link, score
            for macro, there in here.moves():
                if doors or macro.kind != "through":
                    entry = (macro, here, link)
                    heapq.heappush(queue, (turns + 1, next(count), there, entry))
        path = []
        while best is not None:
            macro, here, best = best
            path.append((macro, here))
        return path[::-1]

    @staticmethod
    def _opened(guess: Layout, there: Situation) -> Layout:
        return guess.world.layout(guess.cells, there.layout.doors)
