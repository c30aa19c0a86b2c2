"""Shortest plans: which recipes to use, and the actions in order.

A plan takes one ``get`` per base item (all that is needed of it) and crafts one batch per action.
Its length is therefore the number of distinct base items fetched plus the number of batches, and
both follow from one choice per item (which recipe) and per tag (which member). The planner
searches these choices depth-first with the best length so far as its bound.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from agentbench_envs.textcraft.book import Ingredient, Recipe, RecipeBook, spoken


@dataclasses.dataclass(frozen=True)
class Get:
    """Fetch ``count`` of a base item."""

    item: str
    count: int

    @property
    def text(self) -> str:
        """The action as the environment reads it."""
        return f"get {self.count} {spoken(self.item)}"


@dataclasses.dataclass(frozen=True)
class Craft:
    """Craft one batch of a recipe.

    Attributes:
        recipe: The recipe.
        given: ``(item, count)`` pairs: the inputs, with a member in place of each tag.
    """

    recipe: Recipe
    given: tuple[tuple[str, int], ...]

    @property
    def text(self) -> str:
        """The action as the environment reads it."""
        inputs = ", ".join(f"{count} {spoken(item)}" for item, count in self.given)
        return f"craft {self.recipe.amount} {spoken(self.recipe.output)} using {inputs}"


Step = Get | Craft


class _Undecided(Exception):
    """The simulation met an item or tag with several ways and no choice yet."""

    def __init__(self, name: str) -> None:
        self.name = name


class _TooLong(Exception):
    pass


class _Build:
    """Plays choices out on a stock and counts, or lists, the actions.

    Args:
        book: Recipes.
        stock: Items at hand; changed in place.
        choices: Recipe index per item, member per tag.
        order: Order in which the inputs of a recipe are made.
    """

    def __init__(
        self,
        book: RecipeBook,
        stock: dict[str, int],
        choices: Mapping[str, int | str],
        bound: int,
        order: Callable[[Sequence[Ingredient]], Sequence[Ingredient]],
    ) -> None:
        self.book, self.stock, self.choices, self.bound = book, stock, choices, bound
        self.order = order
        self.fetched: dict[str, int] = {}
        self.steps: list[Step] = []

    def member(self, ingredient: Ingredient) -> str:
        """The item that stands for an ingredient."""
        if not ingredient.is_tag:
            return ingredient.name
        choice = self.choices.get(f"#{ingredient.name}")
        if choice is None:
            raise _Undecided(f"#{ingredient.name}")
        return str(choice)

    def recipe(self, item: str) -> Recipe:
        recipes = self.book.by_output[item]
        if len(recipes) == 1:
            return recipes[0]
        choice = self.choices.get(item)
        if choice is None:
            raise _Undecided(item)
        return recipes[int(choice)]

    def secure(self, item: str, count: int) -> None:
        """Have ``count`` of an item at hand and set them aside."""
        missing = count - self.stock.get(item, 0)
        if missing > 0:
            if item in self.book.by_output:
                recipe = self.recipe(item)
                for _ in range(-(-missing // recipe.amount)):
                    self.craft(recipe)
            else:
                if item not in self.fetched:
                    self._count(Get(item, missing))
                self.fetched[item] = self.fetched.get(item, 0) + missing
                self.stock[item] = count
        self.stock[item] -= count

    def craft(self, recipe: Recipe) -> None:
        """Secure one batch's inputs and craft it."""
        for ingredient in self.order(recipe.inputs):
            self.secure(self.member(ingredient), ingredient.amount)
        given = tuple((self.member(i), i.amount) for i in recipe.inputs)
        self._count(Craft(recipe, given))
        self.stock[recipe.output] = self.stock.get(recipe.output, 0) + recipe.amount

    def _count(self, step: Step) -> None:
        self.steps.append(step)
        if len(self.steps) >= self.bound:
            raise _TooLong

    def result(self) -> list[Step]:
        """The steps, each base item fetched once in full where it is first needed."""
        return [Get(s.item, self.fetched[s.item]) if isinstance(s, Get) else s for s in self.steps]


def _in_order(inputs: Sequence[Ingredient]) -> Sequence[Ingredient]:
    return inputs


def plan(
    book: RecipeBook,
    goal: str,
    inventory: Mapping[str, int] | None = None,
    *,
    order: Callable[[Sequence[Ingredient]], Sequence[Ingredient]] = _in_order,
    search: bool = True,
) -> list[Step]:
    """Shortest known plan that crafts ``goal`` once more, whatever is at hand.

    Args:
        book: Recipes.
        goal: A craftable item.
        inventory: Items at hand.
        order: Permutes the inputs of a recipe, to vary the order of the actions.
        search: Look for the shortest plan; otherwise take the first that works.

    Returns:
        The actions in order; the last one crafts ``goal``.
    """
    stock = {item: count for item, count in (inventory or {}).items() if count > 0}
    best: list[Step] | None = None
    stack: list[dict[str, int | str]] = [{}]
    while stack:
        choices = stack.pop()
        build = _Build(book, dict(stock), choices, len(best) if best else 1_000_000, order)
        try:
            build.craft(build.recipe(goal))
        except _TooLong:
            continue
        except _Undecided as undecided:
            options = _options(book, undecided.name, build)
            # Pushed in reverse: the most promising option is looked at first.
            stack.extend({**choices, undecided.name: option} for option in reversed(options))
            continue
        best = build.result()
        if not search:
            break
    if best is None:
        raise ValueError(f"{goal!r} cannot be crafted from this book")
    return best


def _options(book: RecipeBook, name: str, build: _Build) -> list[int | str]:
    """Options for an undecided name, the most promising first."""
    if not name.startswith("#"):
        recipes = book.by_output[name]
        return [
            index
            for _, index in sorted(
                ((max(book.depth(i.name) for i in recipe.inputs), len(recipe.inputs)), index)
                for index, recipe in enumerate(recipes)
            )
        ]
    tag = name[1:]
    members = {r.output for r in book.by_tag[tag] if book.tag_of.get(r.output) == tag}
    in_use = {step.recipe.output for step in build.steps if isinstance(step, Craft)}
    return [
        item
        for *_, item in sorted(
            (build.stock.get(item, 0) == 0, item not in in_use, book.depth(item), item)
            for item in members
        )
    ]
