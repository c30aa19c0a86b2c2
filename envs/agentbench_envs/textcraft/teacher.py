"""A teacher that plays by plan, and errs and recovers as a player would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentbench_envs.stable import StableRandom
from agentbench_envs.textcraft.book import Ingredient, spoken
from agentbench_envs.textcraft.planner import Craft, Get, Step, plan
from agentbench_prefix.env import TeacherTurn

if TYPE_CHECKING:
    from agentbench_envs.textcraft.env import TextCraftEnv


class PlannerTeacher:
    """Plays the shortest known plan from wherever the environment is.

    Args:
        env: The environment to play.
        seed: Varies the order of the plan, and its detours; ``None`` plays the plain plan.
        detours: Probability in [0, 1) that a turn is a detour instead of the plan's next action:
            a look at the inventory, or a mistake, which is marked ``trainable=False``.
    """

    def __init__(self, env: TextCraftEnv, seed: int | None, detours: float) -> None:
        if not 0 <= detours < 1:
            raise ValueError(f"detours must be in [0, 1), got {detours}")
        if detours and seed is None:
            raise ValueError("detours need a seed")
        self.env = env
        self.detours = detours
        self.random = None if seed is None else StableRandom(f"teacher/{seed}/{env.task_id}")
        self.steps: list[Step] = []
        self.expected: dict[str, int] | None = None

    def next_turn(self) -> TeacherTurn:
        """The plan's next action, or a detour."""
        if not self.steps or self.expected != self.env.inventory:
            self._replan()
        if self.random is not None and self.random.uniform() < self.detours:
            return self._detour(self.random)
        step = self.steps.pop(0)
        self._expect(step)
        return TeacherTurn(step.text, self._thought(step))

    def _replan(self) -> None:
        random = self.random

        def order(inputs: Sequence[Ingredient]) -> Sequence[Ingredient]:
            return inputs if random is None else random.shuffled(inputs)

        env = self.env
        self.steps = plan(env.book, env.goal, env.inventory, order=order)
        if random is not None and random.uniform() < 0.3:
            # Some players fetch everything first.
            self.steps.sort(key=lambda step: isinstance(step, Craft))
        self.expected = dict(env.inventory)

    def _expect(self, step: Step) -> None:
        assert self.expected is not None
        if isinstance(step, Get):
            self.expected[step.item] = self.expected.get(step.item, 0) + step.count
            return
        for item, count in step.given:
            self.expected[item] -= count
            if self.expected[item] == 0:
                del self.expected[item]
        output = step.recipe.output
        self.expected[output] = self.expected.get(output, 0) + step.recipe.amount

    def _thought(self, step: Step) -> str:
        goal = spoken(self.env.goal)
        if isinstance(step, Get):
            return (
                f"No command crafts {spoken(step.item)}, so I fetch it; on the way to {goal} "
                f"I need {step.count}."
            )
        output = spoken(step.recipe.output)
        made_of = " and ".join(f"{count} {spoken(item)}" for item, count in step.given)
        aim = "That is the goal." if step.recipe.output == self.env.goal else f"{goal} needs it."
        return f"I hold {made_of}, enough for one batch of {output}. {aim}"

    def _detour(self, random: StableRandom) -> TeacherTurn:
        env = self.env
        crafts = [step for step in self.steps if isinstance(step, Craft)]
        later = random.pick(crafts)
        kind = random.weighted(
            ("inventory", "too early", "get crafted", "wrong count", "distractor", "stray"),
            (0.1, 0.25, 0.2, 0.15, 0.15, 0.15),
        )
        if kind == "inventory":
            return TeacherTurn("inventory", "Let me see what I am carrying.")
        if kind == "too early" and later is not self.steps[0]:
            return TeacherTurn(
                later.text, f"I may be able to craft {spoken(later.recipe.output)} by now.", False
            )
        if kind == "get crafted":
            item = random.pick([i.name for i in later.recipe.inputs])
            if not env.book.is_gettable(item):
                return TeacherTurn(
                    f"get {random.between(1, 4)} {spoken(item)}",
                    f"Perhaps {spoken(item)} can simply be fetched.",
                    False,
                )
        if kind == "wrong count":
            item, count = later.given[0]
            wrong = Craft(later.recipe, ((item, count + random.between(1, 3)), *later.given[1:]))
            return TeacherTurn(
                wrong.text, f"I try a larger batch of {spoken(later.recipe.output)}.", False
            )
        if kind == "distractor":
            line = random.pick(env.commands)
            if all(line != step.text for step in crafts):
                return TeacherTurn(
                    line, "This command uses something I need; maybe it helps.", False
                )
        strays = sorted(
            {i.name for r in env.listed_recipes() for i in r.inputs if env.book.is_gettable(i.name)}
            - {step.item for step in self.steps if isinstance(step, Get)}
        )
        if kind == "stray" and strays:
            item = random.pick(strays)
            return TeacherTurn(
                f"get {random.between(1, 3)} {spoken(item)}",
                f"{spoken(item).capitalize()} might come in handy.",
                False,
            )
        return TeacherTurn("inventory", "Let me see what I am carrying.")
