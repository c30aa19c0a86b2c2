"""Generated worlds: small recipe books of a chosen depth under names that mean nothing.

A world is a function of its id, ``generated_<seed>_<index>_d<depth>``, on every machine. Names are
official item names or random sequences of their words, so a player must read the recipes instead of
remembering them. Members of a tag end in the tag's name, as ``oak_planks`` does for ``planks``.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable

from agentbench_envs.stable import StableRandom
from agentbench_envs.textcraft.book import (
    Ingredient,
    Recipe,
    RecipeBook,
    official_book,
    vocabulary,
)

MAX_DEPTH = 4
DEPTH_WEIGHTS = (0.2, 0.4, 0.3, 0.1)
_TASK_ID = re.compile(r"generated_(0|[1-9][0-9]{0,17})_(0|[1-9][0-9]{0,17})_d([1-4])")

# Counts as the official book has them, roughly.
_OUTPUT_COUNTS = ((1, 2, 3, 4, 6, 8, 9, 16), (0.5, 0.1, 0.09, 0.12, 0.08, 0.06, 0.03, 0.02))
_INPUT_COUNTS = (
    (1, 2, 3, 4, 5, 6, 7, 8, 9),
    (0.46, 0.16, 0.12, 0.08, 0.02, 0.08, 0.01, 0.05, 0.02),
)
_INPUT_KINDS = ((1, 2, 3, 4), (0.46, 0.38, 0.13, 0.03))


@dataclasses.dataclass(frozen=True)
class World:
    """A generated task.

    Attributes:
        book: Its recipes.
        goal: The item to craft.
        depth: Depth of the goal in the book.
    """

    book: RecipeBook
    goal: str
    depth: int


def task_ids(seed: int, n: int, depth: int | None = None) -> tuple[str, ...]:
    """Ids of ``n`` worlds.

    Args:
        seed: Any integer from 0 to 10^18.
        n: How many.
        depth: 1 to 4, or ``None`` to mix 20/40/30/10 percent of depth 1/2/3/4.

    Raises:
        ValueError: An argument is out of range.
    """
    if not 0 <= seed < 10**18 or n < 0:
        raise ValueError(f"seed must be in [0, 10^18) and n >= 0, got seed={seed}, n={n}")
    if depth is not None and not 1 <= depth <= MAX_DEPTH:
        raise ValueError(f"depth must be 1 to {MAX_DEPTH} or None, got {depth}")
    depths = range(1, MAX_DEPTH + 1)
    return tuple(
        f"generated_{seed}_{i}_d"
        f"{depth or StableRandom(f'depth/{seed}/{i}').weighted(depths, DEPTH_WEIGHTS)}"
        for i in range(n)
    )


def is_generated(task_id: str) -> bool:
    """Whether an id names a generated world."""
    return _TASK_ID.fullmatch(task_id) is not None


@functools.lru_cache(maxsize=256)
def world(task_id: str) -> World:
    """Build the world that an id names."""
    found = _TASK_ID.fullmatch(task_id)
    if found is None:
        raise ValueError(f"{task_id!r} does not name a generated world")
    return _Builder(StableRandom(task_id)).build(int(found.group(3)))


class _Builder:
    def __init__(self, random: StableRandom) -> None:
        self.random = random
        self.words = vocabulary()
        self.official = sorted(official_book().items)
        self.used: set[str] = set()
        self.recipes: list[Recipe] = []
        self.items: set[str] = set()
        self.tag_of: dict[str, str] = {}
        self.by_depth: dict[int, list[Ingredient]] = {}

    def name(self, suffix: str = "") -> str:
        """A name nobody has yet, ending in ``suffix``."""
        while True:
            if not suffix and self.random.uniform() < 0.4:
                name = self.random.pick(self.official)
            else:
                length = self.random.weighted((1, 2, 3), (0.35, 0.5, 0.15))
                name = "_".join(self.random.pick(self.words) for _ in range(length))
            name = f"{name}_{suffix}" if suffix else name
            if name not in self.used:
                self.used.add(name)
                return name

    def count(self, table: tuple[tuple[int, ...], tuple[float, ...]]) -> int:
        return self.random.weighted(*table)

    def ingredient(self, depth: int) -> tuple[str, bool]:
        """Something of exactly this depth: known already, or newly made."""
        known = self.by_depth.setdefault(depth, [])
        if known and self.random.uniform() < 0.35:
            found = self.random.pick(known)
            return found.name, found.is_tag
        if depth == 0:
            name, is_tag = self.name(), False
            self.items.add(name)
        elif self.random.uniform() < 0.12:
            name, is_tag = self.name(), True
            for _ in range(self.random.between(1, 4)):
                self.item(depth, self.name(name), tag=name)
        else:
            name, is_tag = self.item(depth, self.name()), False
        known.append(Ingredient(name, 1, is_tag))
        return name, is_tag

    def item(self, depth: int, name: str, tag: str | None = None) -> str:
        """Add an item of exactly this depth, with one recipe or, at times, two."""
        self.items.add(name)
        if tag is not None:
            self.tag_of[name] = tag
        for _ in range(2 if self.random.uniform() < 0.12 else 1):
            self.recipe(depth, name, tag)
        return name

    def recipe(self, depth: int, output: str, tag: str | None) -> None:
        kinds = self.count(_INPUT_KINDS)
        inputs: dict[str, Ingredient] = {}
        for k in range(kinds):
            below = depth - 1 if k == 0 else min(self.random.between(0, 2 * depth - 1), depth - 1)
            if k > 0 and self.random.uniform() < 0.5:
                below = 0
            name, is_tag = self.ingredient(below)
            inputs[name] = Ingredient(name, self.count(_INPUT_COUNTS), is_tag)
        shuffled = tuple(self.random.shuffled(list(inputs.values())))
        made = Recipe(output, self.count(_OUTPUT_COUNTS), tag, shuffled)
        # A second recipe that takes what the first takes would promise what the game never does.
        if all(r.output != output or set(r.inputs) != set(shuffled) for r in self.recipes):
            self.recipes.append(made)

    def distractors(self) -> None:
        """Recipes that share ingredients with those there are, and are of no use."""
        ingredients = sorted({(i.name, i.is_tag) for r in self.recipes for i in r.inputs})
        outputs = [recipe.output for recipe in self.recipes]
        for _ in range(self.random.between(0, 14)):
            chosen: dict[str, Ingredient] = {}
            for _ in range(self.count(_INPUT_KINDS)):
                if not chosen or self.random.uniform() < 0.4:
                    name, is_tag = self.random.pick(ingredients)
                else:
                    name, is_tag = self.name(), False
                    self.items.add(name)
                chosen[name] = Ingredient(name, self.count(_INPUT_COUNTS), is_tag)
            # Often one word apart from something useful, as official distractors are.
            near = self.random.pick(outputs).split("_")[-1]
            output = self.name(near if self.random.uniform() < 0.5 else "")
            self.items.add(output)
            self.recipes.append(
                Recipe(output, self.count(_OUTPUT_COUNTS), None, tuple(chosen.values()))
            )

    def build(self, depth: int) -> World:
        goal = self.item(depth, self.name())
        self.distractors()
        book = RecipeBook(self.recipes, self.items, set(self.tag_of.values()), self.tag_of)
        return World(book, goal, book.depth(goal))


@functools.lru_cache(maxsize=16)
def word_permutation(seed: int) -> Callable[[str], str]:
    """A one-to-one renaming that permutes the words of all names.

    Whole words move: ``oak_planks`` still ends in what ``planks`` became, so tags stay readable.
    """
    words = vocabulary()
    moved = dict(zip(words, StableRandom(f"rename/{seed}").shuffled(words), strict=True))

    def rename(name: str) -> str:
        return "_".join(moved.get(word, word) for word in name.split("_"))

    return rename
