"""Recipe books: what can be crafted from what."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from typing import NamedTuple

from agentbench_envs.stable import hash_order
from agentbench_prefix.files import canonical_json, sha256_text

MAX_DISTRACTORS = 10


class Ingredient(NamedTuple):
    """An input of a recipe.

    Attributes:
        name: Item or tag, with underscores and without namespace, e.g. ``"oak_planks"``.
        amount: How many of it one batch takes.
        is_tag: Whether any item that carries the tag will do.
    """

    name: str
    amount: int
    is_tag: bool


class Recipe(NamedTuple):
    """One way to craft an item.

    Attributes:
        output: Item crafted.
        amount: How many one batch makes.
        tag: Tag of the output (the recipe's group), or ``None``.
        inputs: Ingredients of one batch.
    """

    output: str
    amount: int
    tag: str | None
    inputs: tuple[Ingredient, ...]

    @property
    def line(self) -> str:
        """The recipe as the prompt prints it."""
        inputs = ", ".join(f"{i.amount} {spoken(i.name)}" for i in self.inputs)
        return f"craft {self.amount} {spoken(self.output)} using {inputs}"


def spoken(name: str) -> str:
    """The name as players write it: spaces for underscores."""
    return name.replace("_", " ")


class RecipeBook:
    """A set of recipes without cycles, and everything derived from it.

    Args:
        recipes: Recipes in load order.
        items: Every item that exists, craftable or not.
        tags: Every tag.
        tag_of: The tag of each item that carries one.
    """

    def __init__(
        self,
        recipes: Iterable[Recipe],
        items: Iterable[str],
        tags: Iterable[str],
        tag_of: Mapping[str, str],
    ) -> None:
        self.recipes = tuple(recipes)
        self.items = frozenset(items)
        self.tags = frozenset(tags)
        self.tag_of = dict(tag_of)
        self.by_output: dict[str, list[Recipe]] = {}
        self.by_tag: dict[str, list[Recipe]] = {}
        self.uses: dict[str, list[Recipe]] = {}
        for recipe in self.recipes:
            self.by_output.setdefault(recipe.output, []).append(recipe)
            if recipe.tag is not None:
                self.by_tag.setdefault(recipe.tag, []).append(recipe)
            for ingredient in recipe.inputs:
                self.uses.setdefault(ingredient.name, []).append(recipe)
        self._depths: dict[str, int] = {}

    @functools.cached_property
    def content_hash(self) -> str:
        """SHA-256 of the book's canonical JSON."""
        return sha256_text(
            canonical_json(
                [self.recipes, sorted(self.items), sorted(self.tags), sorted(self.tag_of.items())]
            )
        )

    def is_craftable(self, name: str) -> bool:
        """Whether some recipe makes the item, or an item with this tag."""
        return name in self.by_output or name in self.by_tag

    def is_gettable(self, name: str) -> bool:
        """Whether ``get`` hands the item out: it exists, is no tag, and nothing crafts it."""
        return name in self.items and name not in self.tags and not self.is_craftable(name)

    def recipes_of(self, name: str) -> Sequence[Recipe]:
        """Recipes of an item, or of the items that carry a tag; empty for base items."""
        return self.by_output.get(name) or self.by_tag.get(name) or ()

    def depth(self, name: str) -> int:
        """0 for base items, else min over recipes of max over inputs of ``depth + 1``."""
        if name not in self._depths:
            found = self.recipes_of(name)
            self._depths[name] = (
                min(max(self.depth(i.name) + 1 for i in r.inputs) for r in found) if found else 0
            )
        return self._depths[name]

    @functools.cached_property
    def goals(self) -> tuple[str, ...]:
        """Craftable items by (depth, load order): the task list."""
        return tuple(sorted(self.by_output, key=self.depth))

    def match(self, output: str, given: Sequence[tuple[str, int]]) -> Recipe | None:
        """The first recipe of ``output`` that takes exactly the given items.

        Counts must match one batch exactly; the order of the inputs is free.

        Args:
            output: Item to craft.
            given: ``(item, count)`` pairs as the player listed them.
        """
        for recipe in self.by_output.get(output, ()):
            left = list(given)
            for wanted in recipe.inputs:
                found = next(
                    (
                        pair
                        for pair in left
                        if (self.tag_of.get(pair[0]) if wanted.is_tag else pair[0]) == wanted.name
                    ),
                    None,
                )
                if found is None or found[1] != wanted.amount:
                    break
                left.remove(found)
            else:
                if not left:
                    return recipe
        return None

    def tree(self, goal: str) -> dict[str, Recipe]:
        """Every recipe that may serve on the way to ``goal``, by its printed line."""
        lines: dict[str, Recipe] = {}
        seen = {goal}
        queue = [goal]
        for name in queue:
            for recipe in self.recipes_of(name):
                lines[recipe.line] = recipe
                for ingredient in recipe.inputs:
                    if ingredient.name not in seen:
                        seen.add(ingredient.name)
                        queue.append(ingredient.name)
        return lines

    def commands(self, goal: str, salt: str) -> list[str]:
        """The crafting commands of a prompt: the goal's tree and up to ten distractors, shuffled.

        A distractor uses an ingredient of the tree. Choice and order follow from the book, the
        goal and ``salt`` alone.
        """
        tree = self.tree(goal)
        pool: set[str] = set()
        for line, recipe in tree.items():
            for ingredient in recipe.inputs:
                uses = [use.line for use in self.uses.get(ingredient.name, ())]
                pool.update(hash_order(uses, f"{salt}/{line}/{ingredient.name}")[:MAX_DISTRACTORS])
        distractors = hash_order(sorted(pool - tree.keys()), f"{salt}/choice")[:MAX_DISTRACTORS]
        return hash_order([*tree, *distractors], f"{salt}/order")

    def renamed(self, rename: Callable[[str], str]) -> RecipeBook:
        """The same book under other names.

        Args:
            rename: One-to-one map over item and tag names.
        """
        return RecipeBook(
            (
                Recipe(
                    rename(r.output),
                    r.amount,
                    None if r.tag is None else rename(r.tag),
                    tuple(Ingredient(rename(i.name), i.amount, i.is_tag) for i in r.inputs),
                )
                for r in self.recipes
            ),
            map(rename, self.items),
            map(rename, self.tags),
            {rename(item): rename(tag) for item, tag in self.tag_of.items()},
        )


@functools.cache
def official_book() -> RecipeBook:
    """The book of TextCraft's 544 goals (Minecraft Java 1.16.5, 613 recipes).

    Made by ``scripts/build_textcraft_book.py``, which states the rules.
    """
    raw = json.loads(files(__package__).joinpath("data/book.json").read_text(encoding="utf-8"))
    recipes = (
        Recipe(output, count, tag, tuple(Ingredient(*i) for i in inputs))
        for output, count, tag, inputs in raw["recipes"]
    )
    return RecipeBook(recipes, raw["items"], raw["tags"], raw["tag_of"])


@functools.cache
def vocabulary() -> tuple[str, ...]:
    """Every word of the official names, sorted."""
    book = official_book()
    return tuple(sorted({w for name in book.items | book.tags for w in name.split("_")}))
