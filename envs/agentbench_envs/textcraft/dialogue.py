"""The dialogues of TextCraft: ``full`` (thoughts, one bracketed action) and ``compact``."""

from __future__ import annotations

from agentbench_envs.dialogues import full_and_compact

EXAMPLE_RECIPES = (
    "craft 6 powered rail using 1 redstone, 1 stick, 6 gold ingot",
    "craft 1 gold ingot using 9 gold nugget",
    "craft 1 stick using 2 bamboo",
)
EXAMPLE_TURNS = (
    ("I may be carrying something useful already.", "inventory"),
    (
        "Powered rail takes 6 gold ingot, 1 stick and 1 redstone. A gold ingot takes 9 gold "
        "nugget, which no command crafts, so I fetch 6 x 9 = 54 of them.",
        "get 54 gold nugget",
    ),
    (
        "One command makes one ingot, and the amounts must be those of one batch.",
        "craft 1 gold ingot using 9 gold nugget",
    ),
    ("Five more ingots to go.", "craft 1 gold ingot using 9 gold nugget"),
)
EXAMPLE_ANSWERS = (
    "Inventory: You are not carrying anything.",
    "Got 54 gold nugget",
    "Crafted 1 minecraft:gold_ingot",
    "Crafted 1 minecraft:gold_ingot",
)


def render_full(action: str, thought: str) -> str:
    """Write a turn of the full form: the thought, then the one bracketed action."""
    return f"Think: {thought}\nAction: [[ {action} ]]" if thought else f"Action: [[ {action} ]]"


def _system_prompt() -> str:
    turns = "\n\n".join(
        f"[You]\n{render_full(action, thought)}\n\n[Environment]\n{answer}"
        for (thought, action), answer in zip(EXAMPLE_TURNS, EXAMPLE_ANSWERS, strict=True)
    )
    recipes = "\n".join(EXAMPLE_RECIPES)
    return f"""\
You play TextCraft, a crafting game in text. You are given a list of crafting commands and a goal; \
reach the goal by fetching base items and crafting step by step.

How to reply
1. Think first: say in a line or two where you stand and what is missing.
2. Act once: every reply holds exactly one action.
3. Put the action in double brackets, like this: Action: [[ inventory ]]
4. Stop there. The environment answers; never write its answer yourself.

How to reason about an item you need
1. If you carry enough of it, use it.
2. If a crafting command makes it, secure that command's ingredients first.
3. If no command makes it, fetch it with get.
4. If an action fails, compare item names and amounts with the commands and your inventory.

Actions
- craft [amount] [item] using [amount] [ingredient], [amount] [ingredient]: crafts one batch; the \
amounts must be exactly those of one command. Repeat the action for more batches. Where a command \
names a kind of item, such as planks, give an item of that kind, such as oak planks.
- get [amount] [item]: fetches an item that no command makes.
- inventory: lists what you carry.

Example (its first turns)
[Environment]
Crafting commands:
{recipes}

Goal: craft powered rail.

{turns}

The game ends by itself once the goal is crafted."""


DIALOGUES = full_and_compact(
    _system_prompt(),
    render_full,
    bare="inventory",
    bracketed="Action: [[ inventory ]]",
    nested="Action: [[ inventory ]]",
)
