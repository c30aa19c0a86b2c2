"""The TextCraft environment."""

from __future__ import annotations

import functools
import json
import re
import weakref
from collections.abc import Mapping, Sequence
from importlib.resources import files
from types import EllipsisType
from typing import Any, ClassVar, NamedTuple

from agentbench_envs.compat import turn_limit
from agentbench_envs.textcraft import worlds
from agentbench_envs.textcraft.book import Recipe, RecipeBook, official_book, spoken
from agentbench_envs.textcraft.dialogue import DIALOGUES
from agentbench_envs.textcraft.planner import Get, Step, plan
from agentbench_envs.textcraft.teacher import PlannerTeacher
from agentbench_prefix.dialogue import Dialogue
from agentbench_prefix.env import JSON, Outcome, PlayedTurn, TextEnv
from agentbench_prefix.errors import UnknownNameError
from agentbench_prefix.files import canonical_json, sha256_text

# What the game reads, as the original does: anchored at the start only.
_CRAFT = re.compile(r"craft (.*) using (.*)")
_GET = re.compile(r"get ([0-9]+) (.*)")
_COUNTED = re.compile(r"([0-9]+) (.*)")
_LARGEST_COUNT_DIGITS = 18

_WORDS = re.compile("[a-z]+")
_INVENTORY_FIELD = re.compile(r"\[([^\]]*)\] \(([0-9]+)\)")
_GOT_FIELD = re.compile(r"Got ([0-9]+) (.+)")
_CRAFTED_FIELD = re.compile(r"Crafted ([0-9]+) minecraft:(\S+)")


class _Command(NamedTuple):
    """An action as one book reads it.

    Attributes:
        takes: ``(item, count)`` pairs that must be at hand and are used up.
        gives: Item obtained, ``None`` if nothing is.
        amount: How many of it.
        answer: What the player is told.
        lacking: What the player is told when something is not at hand.
    """

    takes: tuple[tuple[str, int], ...] = ()
    gives: str | None = None
    amount: int = 0
    answer: str = ""
    lacking: str = ""


_INVENTORY = _Command()
# What an action means follows from the book and the text alone, and players repeat themselves.
_LONGEST_REMEMBERED = 200
_MOST_REMEMBERED = 8192


class _Refused(Exception):
    """The game answers with this text instead of acting."""


@functools.cache
def manifest() -> dict[str, Any]:
    """The manifest: splits, prompt hashes, shortest known plans, book hash."""
    text = files(__package__).joinpath("data/manifest.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


class TextCraftEnv(TextEnv):
    """Craft a goal item from a printed list of crafting commands.

    **Task.** 544 craftable goals of Minecraft 1.16.5 (613 recipes), depth 1 to 4. The first
    observation lists the goal's whole recipe tree and up to ten distractors, and names the goal.

    **Actions.** ``craft [N] <item> using <n> <item>, ...`` crafts one batch (input counts must be
    those of one batch), ``get N <item>`` fetches an item that nothing crafts, ``inventory``.

    **Reward.** 1 and the end of the episode when the goal is crafted, else 0.

    **Tasks.** ``textcraft_<i>``, goals ordered by (depth, load order): splits ``train`` (374) and
    ``test`` (100) are AgentGym's, ``extra`` (70) is the rest, ``all`` is their union. Besides them
    ``generated_<seed>_<index>_d<depth>`` names a generated world (:meth:`generate_tasks`).

    **Reset options.** ``distractor_seed`` (int) picks other distractor lines and another order;
    ``rename_seed`` (int) permutes the words of all item names. Without them the prompt of a task
    is always the same.

    **Fields** for state matching: ``goal`` and ``commands`` (first observation), ``inventory``,
    ``got``, ``crafted``; a refusal has none.

    Args:
        max_turns: Turn limit; 30 by default, ``None`` for no limit. Two goals cannot be crafted in
            30 turns by anybody: ``textcraft_420`` (36 actions, in ``test``) and ``textcraft_495``
            (48, in ``train``).
        split: Split from which ``reset`` draws when no task is named.
        compat: ``"agentgym"`` for no turn limit and steps accepted after the end, as AgentGym's
            server plays; old transcripts then replay byte for byte. ``max_turns`` is ``None`` with
            it, and a number is refused.
        strict: Refuse, with a clear message, what the original lets pass: a wrong or missing output
            count, ``get 0``, text after the command, underscores for spaces.
        render_mode: ``"ansi"`` or ``None``.
    """

    env_id = "TextCraft-v0"
    default_max_turns = 30
    task_options: ClassVar[frozenset[str]] = frozenset({"distractor_seed", "rename_seed"})
    rule_arguments: ClassVar[tuple[str, ...]] = ("compat", "strict")
    union_splits: ClassVar[tuple[str, ...]] = ("all",)

    def __init__(
        self,
        *,
        max_turns: int | EllipsisType | None = ...,
        split: str = "train",
        compat: str | None = None,
        strict: bool = False,
        render_mode: str | None = None,
    ) -> None:
        if compat == "agentgym" and strict:
            raise ValueError("compat='agentgym' and strict=True contradict each other: choose one")
        super().__init__(
            max_turns=turn_limit(compat, max_turns), split=split, render_mode=render_mode
        )
        self.compat = compat
        if not isinstance(strict, bool):
            raise TypeError(f"strict must be True or False, got {strict!r}")
        self.strict = strict
        self.accepts_steps_after_end = compat is not None
        self.book: RecipeBook = official_book()
        self.goal = ""
        self.inventory: dict[str, int] = {}
        """Items carried, by name with underscores, in the order they were first obtained."""
        self._readings: dict[str, _Command] = {}
        self.commands: tuple[str, ...] = ()
        """The crafting commands of the prompt."""

    # ------------------------------------------------------------------ tasks
    @classmethod
    def splits(cls) -> tuple[str, ...]:
        """``train``, ``test``, ``extra`` and ``all``."""
        return ("train", "test", "extra", "all")

    def tasks(self, split: str) -> tuple[str, ...]:
        """Task ids of a split, by index."""
        return _tasks(split)

    def family(self, task_id: str) -> str:
        """``depth_1`` to ``depth_4``."""
        return f"depth_{self._book_and_goal(task_id)[2]}"

    @property
    def data_hash(self) -> str:
        """Hash of the recipe book, the splits and the hash of every prompt."""
        return _data_hash()

    def generate_tasks(
        self, seed: int, n: int, *, depth: int | None = None, **parameters: Any
    ) -> tuple[str, ...]:
        """Ids of ``n`` generated worlds; unlimited and seeded.

        Args:
            seed: Any integer from 0 to 10^18.
            n: How many.
            depth: 1 to 4, or ``None`` to mix them 20/40/30/10.
            **parameters: None are known.
        """
        if parameters:
            raise UnknownNameError("parameter", sorted(parameters)[0], ["depth"])
        return worlds.task_ids(seed, n, depth)

    def out_of_reach(self, split: str, max_turns: int | None) -> tuple[str, ...]:
        """Tasks of a split whose shortest known plan is longer than ``max_turns``."""
        if max_turns is None:
            return ()
        plans = manifest()["tasks"]
        return tuple(task for task in self.tasks(split) if len(plans[task]["plan"]) > max_turns)

    @staticmethod
    def _book_and_goal(task_id: str) -> tuple[RecipeBook, str, int]:
        if worlds.is_generated(task_id):
            world = worlds.world(task_id)
            return world.book, world.goal, world.depth
        index = _index().get(task_id)
        if index is None:
            raise UnknownNameError(
                "task_id",
                task_id,
                _tasks("all")[:3],
                "Tasks are textcraft_0 to textcraft_543, and generated_<seed>_<index>_d<depth>.",
            )
        book = official_book()
        goal = book.goals[index]
        return book, goal, book.depth(goal)

    # ------------------------------------------------------------------ play
    def _begin(self, task_id: str, options: Mapping[str, JSON]) -> str:
        self.book, self.goal, self.commands = _setting_of(task_id, options)
        self._readings = _readings(self.book, self.strict)
        self.inventory = {}
        return (
            "Crafting commands:\n"
            + "\n".join(self.commands)
            + f"\n\nGoal: craft {spoken(self.goal)}."
        )

    def _act(self, action: str) -> Outcome:
        command = self._readings.get(action)
        if command is None:
            command = _read(self.book, self.strict, action)
            if len(action) <= _LONGEST_REMEMBERED:
                if len(self._readings) >= _MOST_REMEMBERED:
                    self._readings.clear()
                self._readings[action] = command
        inventory = self.inventory
        for taken, n in command.takes:
            if inventory.get(taken, -1) < n:
                return Outcome(command.lacking, valid=False)
        item = command.gives
        if item is None:
            if command is _INVENTORY:
                return Outcome(self._list_inventory())
            return Outcome(command.answer, valid=False)
        for taken, n in command.takes:
            left = inventory[taken] - n
            if left:
                inventory[taken] = left
            else:
                del inventory[taken]
        inventory[item] = inventory.get(item, 0) + command.amount
        won = item == self.goal
        return Outcome(command.answer, 1.0 if won else 0.0, won, won)

    def _list_inventory(self) -> str:
        if not self.inventory:
            return "Inventory: You are not carrying anything."
        return "Inventory: " + "".join(f"[{spoken(i)}] ({n}) " for i, n in self.inventory.items())

    # ------------------------------------------------------------------ states
    def _get_state(self) -> JSON:
        return [[item, count] for item, count in self.inventory.items()]

    def _set_state(self, state: Any) -> None:
        for item, count in state:
            if item not in self.book.items or isinstance(count, bool) or not count >= 0:
                raise ValueError(f"not an inventory entry: {[item, count]!r}")
        self.inventory = {item: int(count) for item, count in state}

    def fields(self, observation: str) -> dict[str, JSON]:
        """``goal``/``commands``, ``inventory``, ``got`` or ``crafted``; empty for a refusal."""
        if observation.startswith("Crafting commands:\n"):
            commands, _, goal = observation.partition("\n\nGoal: craft ")
            lines: list[JSON] = [*sorted(commands.split("\n")[1:])]
            return {"goal": goal.removesuffix("."), "commands": lines}
        if observation.startswith("Inventory: "):
            pairs = _INVENTORY_FIELD.findall(observation)
            return {"inventory": {item: int(count) for item, count in sorted(pairs)}}
        if found := _GOT_FIELD.fullmatch(observation):
            return {"got": {"item": found.group(2), "count": int(found.group(1))}}
        if found := _CRAFTED_FIELD.fullmatch(observation):
            return {"crafted": {"item": spoken(found.group(2)), "count": int(found.group(1))}}
        return {}

    # ------------------------------------------------------------------ for players
    def dialogues(self) -> Mapping[str, Dialogue]:
        """``full`` and ``compact``."""
        return DIALOGUES

    def teacher(self, seed: int | None = None, *, detours: float = 0.0) -> PlannerTeacher:
        """Return a teacher that plays the shortest known plan; see :class:`PlannerTeacher`."""
        return PlannerTeacher(self, seed, detours)

    def shortest_plan(self) -> list[Step]:
        """Shortest known plan for the task from an empty inventory."""
        return plan(self.book, self.goal)

    def listed_recipes(self) -> list[Recipe]:
        """Recipes behind :attr:`commands`, in that order."""
        by_line = _by_line(self.book)
        return [by_line[line] for line in self.commands]

    def candidate_actions(self) -> Sequence[str]:
        """``inventory``, every listed command, and ``get`` of every listed ingredient."""
        listed = self.listed_recipes()
        gets = {Get(i.name, i.amount).text: None for r in listed for i in r.inputs}
        return ["inventory", *self.commands, *gets]

    def translate_action(self, action: str, options: Mapping[str, JSON]) -> str:
        """Rename the items in an action as ``rename_seed`` does."""
        rename_seed = _integer_option(options, "rename_seed")
        if rename_seed is None:
            return action
        rename = worlds.word_permutation(rename_seed)
        # No word of a command is part of an item's name.
        return _WORDS.sub(lambda found: rename(found[0]), action)

    def solution_facts(
        self, task_id: str, options: Mapping[str, JSON] | None = None
    ) -> Mapping[str, frozenset[str]]:
        """Recipe lines: of the goal, of every other item in its recipe tree, all in the prompt."""
        book, goal, commands = _setting_of(task_id, options or {})
        tree = book.tree(goal)
        goal_lines = frozenset(line for line, recipe in tree.items() if recipe.output == goal)
        return {
            "goal": goal_lines,
            "subgoals": frozenset(tree) - goal_lines,
            "shown": frozenset(commands),
        }

    def failure_category(self, turns: Sequence[PlayedTurn]) -> str:
        """Category of the final observation, after Prefix-GRPO section 9.3.

        ``unavailable_item`` (could not find), ``insufficient_items`` (not enough to craft),
        ``crafted_other_item``, ``item_acquired`` (unfinished acquisition), ``no_valid_recipe``,
        ``inventory_check``, ``invalid_action`` (unreadable), ``malformed_reply`` (no action).
        """
        if not turns:
            return "no_turn"
        last = turns[-1]
        if last.action is None:
            return "malformed_reply"
        for start, category in (
            ("Could not find enough items", "insufficient_items"),
            ("Could not find a valid recipe", "no_valid_recipe"),
            ("Could not find ", "unavailable_item"),
            ("Crafted ", "crafted_other_item"),
            ("Got ", "item_acquired"),
            ("Inventory: ", "inventory_check"),
        ):
            if last.observation.startswith(start):
                return category
        return "invalid_action"


_remembered: weakref.WeakKeyDictionary[RecipeBook, tuple[dict[str, _Command], ...]] = (
    weakref.WeakKeyDictionary()
)


def _readings(book: RecipeBook, strict: bool) -> dict[str, _Command]:
    """What texts were found to mean to a book; forgotten with the book."""
    found = _remembered.get(book)
    if found is None:
        found = _remembered[book] = ({}, {})
    return found[strict]


def _read(book: RecipeBook, strict: bool, action: str) -> _Command:
    """What an action means to a book."""
    try:
        if found := _CRAFT.match(action):
            if strict:
                _forbid_tail(action, found)
            return _read_craft(book, strict, action, found.group(1), found.group(2))
        if found := _GET.match(action):
            if strict:
                _forbid_tail(action, found)
            return _read_get(book, strict, action, found.group(1), found.group(2))
        if action.startswith("inventory"):
            if strict and action != "inventory":
                raise _Refused("Strict: nothing may follow the command; write inventory")
            return _INVENTORY
    except _Refused as refusal:
        return _Command(answer=str(refusal))
    return _Command(answer=f"Could not execute {action}")


def _forbid_tail(action: str, found: re.Match[str]) -> None:
    if found.end() != len(action):
        raise _Refused("Strict: nothing may follow the command; write one line")
    if "_" in action:
        raise _Refused("Strict: write item names with spaces, not underscores")


def _read_get(book: RecipeBook, strict: bool, action: str, digits: str, said: str) -> _Command:
    count = _count(digits, action)
    item = said.replace(" ", "_")
    if not book.is_gettable(item):
        raise _Refused(f"Could not find {said}")
    if strict and count == 0:
        raise _Refused("Strict: the amount to get must be at least 1")
    return _Command(gives=item, amount=count, answer=f"Got {count} {said}")


def _read_craft(
    book: RecipeBook, strict: bool, action: str, said_output: str, said_inputs: str
) -> _Command:
    counted = _COUNTED.match(said_output)
    count = _count(counted.group(1), action) if counted else 1
    output = (counted.group(2) if counted else said_output).replace(" ", "_")
    given: list[tuple[str, int]] = []
    for part in said_inputs.split(","):
        found = _COUNTED.match(part.strip())
        if found is None:
            raise _Refused(f"Wrong item format: {part.strip()}")
        given.append((found.group(2).replace(" ", "_"), _count(found.group(1), action)))
    is_tag = output in book.tags
    named = f"minecraft:{output}"
    # Nobody carries a tag, so a tag among the inputs is always lacking.
    lacking = f"Could not find enough items to craft {None if is_tag else named}"
    recipe = None if is_tag else book.match(output, given)
    gives, amount = None, 0
    if recipe is None:
        tag, item_id = (named, None) if is_tag else (None, named)
        answer = (
            "Could not find a valid recipe for ItemTagWithCount("
            f"item_tag=ItemTag(tag={tag!r}, item_id={item_id!r}), count={count})"
        )
    elif strict and (counted is None or count != recipe.amount):
        answer = (
            f"Strict: one batch makes {recipe.amount} {spoken(output)}; "
            f"write craft {recipe.amount} {spoken(output)} using ..."
        )
    else:
        gives, amount = output, recipe.amount
        answer = f"Crafted {amount} {named}"
    return _Command(tuple(given), gives, amount, answer, lacking)


def _count(digits: str, action: str) -> int:
    # Longer numbers would pass the digits Python is willing to print; nobody needs them.
    if len(digits.lstrip("0")) > _LARGEST_COUNT_DIGITS:
        raise _Refused(f"Could not execute {action}")
    return int(digits.lstrip("0") or "0")


def _integer_option(options: Mapping[str, JSON], name: str) -> int | None:
    value = options.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ValueError(f"reset option {name} must be an integer, got {value!r}")


def _setting_of(
    task_id: str, options: Mapping[str, JSON]
) -> tuple[RecipeBook, str, tuple[str, ...]]:
    """Book, goal and prompt commands of a task under its options."""
    distractor_seed = _integer_option(options, "distractor_seed")
    rename_seed = _integer_option(options, "rename_seed")
    if rename_seed is None:
        return _setting(task_id, distractor_seed)
    return _renamed_setting(task_id, distractor_seed, rename_seed)


@functools.cache
def _tasks(split: str) -> tuple[str, ...]:
    if split not in TextCraftEnv.splits():
        raise UnknownNameError("split", split, TextCraftEnv.splits())
    if split == "all":
        return tuple(f"textcraft_{i}" for i in range(len(official_book().goals)))
    return tuple(f"textcraft_{i}" for i in manifest()["splits"][split])


@functools.cache
def _index() -> dict[str, int]:
    return {task_id: index for index, task_id in enumerate(_tasks("all"))}


@functools.cache
def _data_hash() -> str:
    prompts = {task: entry["prompt_sha256"] for task, entry in manifest()["tasks"].items()}
    content = [TextCraftEnv.env_id, official_book().content_hash, manifest()["splits"], prompts]
    return sha256_text(canonical_json(content))


@functools.lru_cache(maxsize=1024)
def _setting(task_id: str, distractor_seed: int | None) -> tuple[RecipeBook, str, tuple[str, ...]]:
    """Book, goal and prompt commands of a task."""
    book, goal, _ = TextCraftEnv._book_and_goal(task_id)
    return book, goal, tuple(book.commands(goal, _salt(task_id, distractor_seed)))


@functools.lru_cache(maxsize=32)
def _renamed_setting(
    task_id: str, distractor_seed: int | None, rename_seed: int
) -> tuple[RecipeBook, str, tuple[str, ...]]:
    """The same under permuted names."""
    plain, goal, _ = TextCraftEnv._book_and_goal(task_id)
    book, goal = _renamed_book(plain, rename_seed), worlds.word_permutation(rename_seed)(goal)
    return book, goal, tuple(book.commands(goal, _salt(task_id, distractor_seed)))


@functools.lru_cache(maxsize=16)
def _renamed_book(book: RecipeBook, rename_seed: int) -> RecipeBook:
    return book.renamed(worlds.word_permutation(rename_seed))


def _salt(task_id: str, distractor_seed: int | None) -> str:
    return task_id if distractor_seed is None else f"{task_id}/{distractor_seed}"


@functools.lru_cache(maxsize=64)
def _by_line(book: RecipeBook) -> dict[str, Recipe]:
    return {recipe.line: recipe for recipe in book.recipes}
