"""A teacher that plays by plan, and explores, errs and recovers as a player would."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agentbench_envs.babyai import thoughts
from agentbench_envs.babyai.explorer import Explorer
from agentbench_envs.babyai.macros import (
    CHECK,
    DROP,
    FORWARD,
    LEFT,
    PICKUP,
    RIGHT,
    TOGGLE,
    Choices,
)
from agentbench_envs.babyai.mission import Game
from agentbench_envs.babyai.planner import Goal, NoPlan, Step, plan_mission
from agentbench_envs.babyai.world import EMPTY, FIRST, Macro, Situation
from agentbench_envs.stable import StableRandom
from agentbench_prefix.env import TeacherTurn

if TYPE_CHECKING:
    from agentbench_envs.babyai.env import BabyAIEnv

_BUDGET = 6000
"""Situations that a plan, and a plan within an exploration, may look at."""
_LONGEST_EXPLORATION = 60
"""Macro actions of an exploration where there is no turn limit."""
_TRIES, _MORE_TRIES = 8, 40
"""Plans of which the shortest is taken, and where that one is too long for the turns left."""
_KINDS = {
    (LEFT,): "left",
    (RIGHT,): "right",
    (FORWARD,): "forward",
    (DROP,): "drop",
    (TOGGLE,): "toggle",
    (PICKUP,): "pickup",
    (): "go",
    (TOGGLE, FORWARD): "through",
}


class PlannerTeacher:
    """Plays a plan from wherever the environment is.

    Without a seed it plays the shortest plan found, with the whole grid known. With a seed it
    explores: it acts on what came into view alone, and only where that would not succeed within
    the turn limit does it play a plan that knows better where to look. Thoughts speak of nothing
    that was not in view.

    Args:
        env: The environment to play.
        seed: Varies the play; ``None`` plays the plainest plan.
        detours: Probability in [0, 1) that a turn is a detour instead of the next action of the
            play: a look at the available actions, or a mistake, which is marked
            ``trainable=False``. Where the turn limit leaves no room for one, there is none.

    Raises:
        NotImplementedError: The environment plays AgentGym's rules.

    Attributes:
        reason: Why there is no plan that fits the turn limit; empty if there is one.
    """

    def __init__(self, env: BabyAIEnv, seed: int | None, detours: float) -> None:
        if not 0 <= detours < 1:
            raise ValueError(f"detours must be in [0, 1), got {detours}")
        if detours and seed is None:
            raise ValueError("detours need a seed")
        if env.compat is not None:
            raise NotImplementedError(
                f"{env.env_id} has no teacher under compat={env.compat!r}: make it without compat"
            )
        self.env = env
        self.detours = detours
        self.random = None if seed is None else StableRandom(f"teacher/{seed}/{env.task_id}")
        self.steps: list[Step] = []
        self.reason = ""
        self._game: Game | None = None
        self._missions: list[list[Goal]] = []
        self._expected: Situation | None = None
        self._seen: set[int] = set()
        self._spoken = ""

    def next_turn(self) -> TeacherTurn:
        """The next action of the play, or a detour."""
        now = self._look()
        self._seen.update(now.layout.view(now.cell, now.heading))
        if not self.steps or now != self._expected:
            self._plan(now)
        if self.random is not None and self.random.uniform() < self.detours:
            turn = self._detour(now, self.random)
            if turn is not None:
                self._expected = None if turn.trainable is False else now
                return turn
        if not self.steps:
            return TeacherTurn("turn right", "I know no way to do this, so I look around.")
        step = self.steps.pop(0)
        self._expected = now.after(step.macro)
        return TeacherTurn(written(self._raw)[step.macro], self._thought(step, now))

    @property
    def _raw(self) -> Any:
        return self.env.board.raw

    def _look(self) -> Situation:
        game = self._game
        now = game.look() if game is not None and game.raw is self._raw else None
        if now is None:
            game = self._game = Game(self._raw)
            now = game.look()
            assert now is not None
        return now

    # ------------------------------------------------------------------ what to do
    def _room(self) -> int:
        """Turns that are left."""
        limit = self.env.max_turns
        return _LONGEST_EXPLORATION if limit is None else limit - self.env.turn

    def _plan(self, now: Situation) -> None:
        self.steps, self.reason = [], ""
        assert self._game is not None
        try:
            self._missions = self._game.missions()
            if self.random is None:
                self.steps = _shortest(now, self._missions, _TRIES)
            elif not self._explore(now, self.random):
                self.steps = plan_mission(now, self._missions, self.random, budget=_BUDGET)
            if len(self.steps) > self._room():
                self.steps = _shortest(now, self._missions, _MORE_TRIES)
        except NoPlan as reason:
            self.reason = str(reason)
        if len(self.steps) > self._room():
            self.reason = f"the shortest plan found takes {len(self.steps)} turns"

    def _explore(self, now: Situation, random: StableRandom) -> bool:
        explorer = Explorer(now, frozenset(self._seen), random, _BUDGET)
        try:
            self.steps = explorer.play(random.pick(self._missions), self._room())
        except NoPlan:
            return False
        return True

    def _thought(self, step: Step, now: Situation) -> str:
        said, task = thoughts.reason(step, now, self._seen), thoughts.task(step.goal)
        if task == self._spoken:
            return said
        self._spoken = task
        return f"I have to {task}. {said}"

    # ------------------------------------------------------------------ detours
    def _detour(self, now: Situation, random: StableRandom) -> TeacherTurn | None:
        """A look around or a mistake; ``None`` if the turns left do not allow it."""
        room = self._room() - len(self.steps)
        if not self.steps or room < 1:
            return None
        layout, things = now.layout, now.layout.world.things
        goals = [goal for mission in self._missions for goal in mission]
        strict = any(goal.strict for goal in goals)
        wanted = frozenset().union(*(goal.things | goal.beside for goal in goals))
        others = [
            (cell, layout.cells[cell])
            for cell in layout.reach(now.cell, now.heading)
            if layout.cells[cell] >= FIRST and layout.cells[cell] not in wanted
        ]
        lying = [pair for pair in others if things[pair[1]].kind != "door"]
        doors = [(cell, code) for cell, code in others if things[code].kind == "door"]
        next_macro = self.steps[0].macro
        kind = random.weighted(
            ("look", "turn", "absent", "go", "pickup", "door", "drop", "bump"),
            (0.05, 0.2, 0.1, 0.2, 0.15, 0.1, 0.1, 0.1),
        )

        def name(code: int) -> str:
            return thoughts.name(now, code)

        def mistake(macro: Macro, thought: str) -> TeacherTurn:
            return TeacherTurn(written(self._raw)[macro], thought, False)

        if kind == "turn" and room >= 2:
            side = random.pick(["left", "right"])
            if side != next_macro.kind:
                return mistake(Macro(side), f"Perhaps there is something on my {side}.")
        if kind == "absent":
            sought = self.steps[0].goal.names[0]
            in_view = {layout.cells[cell] for cell in layout.view(now.cell, now.heading)}
            if len(sought.split()) == 2 and not self.steps[0].goal.things & in_view:
                return TeacherTurn(
                    f"go to {sought} 1", f"Perhaps I can walk straight to the {sought}.", False
                )
        if kind == "go" and room >= 4 and lying:
            cell, code = random.pick(lying)
            if Macro("go", cell) != next_macro and cell != now.front:
                return mistake(Macro("go", cell), f"I have a look at the {name(code)}.")
        if kind == "pickup" and room >= 5 and lying and not now.carrying and not strict:
            cell, code = random.pick(lying)
            if Macro("pickup", cell) != next_macro:
                return mistake(Macro("pickup", cell), f"The {name(code)} might come in handy.")
        if kind == "door" and room >= 6 and doors and not strict:
            cell, code = random.pick(doors)
            if Macro("through", cell) != next_macro and now.opens(code):
                return mistake(Macro("through", cell), f"I try the {name(code)}.")
        can_drop = now.carrying and now.facing == EMPTY and next_macro.kind != "drop"
        if kind == "drop" and room >= 3 and can_drop:
            return mistake(Macro("drop"), f"I put the {name(now.carrying)} down for now.")
        if kind == "bump" and not layout.is_clear(now.front):
            return TeacherTurn("move forward", "I walk on.", False)
        if kind == "look":
            return TeacherTurn(CHECK, "Let me see what I can do here.")
        return None


def written(raw: Any) -> dict[Macro, str]:
    """How the environment writes what can be done from where the player is.

    Args:
        raw: The minigrid game.
    """
    texts = {}
    for text, macro in Choices(raw).actions.items():
        if macro.target is not None:
            kind = "through" if macro.tail == (FORWARD,) else _KINDS[macro.tail]
            texts[Macro(kind, macro.target.cell)] = text
        elif macro.tail:
            texts[Macro(_KINDS[macro.tail])] = text
    return texts


def _shortest(now: Situation, missions: Sequence[Sequence[Goal]], tries: int) -> list[Step]:
    return [*_remembered(now, tuple(tuple(goals) for goals in missions), tries)]


@functools.lru_cache(maxsize=16)
def _remembered(
    now: Situation, missions: tuple[tuple[Goal, ...], ...], tries: int
) -> tuple[Step, ...]:
    return tuple(plan_mission(now, missions, budget=_BUDGET, tries=tries))
