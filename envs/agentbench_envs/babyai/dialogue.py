"""The dialogues of BabyAI: ``full`` (thoughts, one bracketed action) and ``compact``."""

from __future__ import annotations

from agentbench_envs.dialogues import full_and_compact

EXAMPLE_TASK = "babyai_0"
EXAMPLE_TURNS = (
    (
        "The mission names the red ball, and it is in view as red ball 1. Its go to action is "
        "listed, so one action leads there.",
        "go to red ball 1",
    ),
)


def render_full(action: str, thought: str) -> str:
    """Write a turn of the full form: the thought, then the one bracketed action."""
    return f"Thought:\n{thought}\n\nAction:\n[[ {action} ]]"


def _system_prompt() -> str:
    thought, action = EXAMPLE_TURNS[0]
    return f"""\
You explore BabyAI, a grid world told in text: rooms, doors, keys, balls and boxes. You are given \
a goal; reach it by moving around and handling things. After every action you are told what is in \
front of you and which actions are available.

Actions
- turn left, turn right, move forward
- go to <object> <id>: walk up to something in view, until it is right in front of you
- pickup <object> <id>: walk up to it and pick it up; you carry one thing at a time
- drop: put down what you carry in front of you
- toggle: open or close the door, or open the box, right in front of you
- go through <door> <id>: walk through an open door
- toggle and go through <door> <id>: open a door and walk through it; a locked one takes a key of \
its color in your hand
- check available actions

An id counts the things of one name in view, nearest first, and changes as you move. What is not \
in view may be behind you or behind a door.

How to reply, in exactly this form:
{render_full("your next action", "your thoughts.")}

Write exactly one available action and put it in [[ ]]. Do not write the environment's answer.

Example of a reply to the goal "go to the red ball":
{render_full(action, thought)}"""


DIALOGUES = full_and_compact(
    _system_prompt(),
    render_full,
    bare="check available actions",
    bracketed="[[ check available actions ]]",
    nested="[[ turn left ]]",
)
