"""The dialogues of BabyAI: ``full`` (thoughts, one bracketed action) and ``compact``."""

from __future__ import annotations

from agentbench_prefix.dialogue import Dialogue, parse_bare, parse_bracketed, render_bare

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


ANSWERS = {
    "no_action": "Your reply held no action. Write exactly one action in double brackets, e.g. "
    "[[ check available actions ]]",
    "empty_action": "The action was empty. Write exactly one action, e.g. check available actions",
    "multiple_actions": "Your reply held more than one action, so none was carried out. Write "
    "exactly one action in double brackets.",
    "nested_brackets": "The brackets were nested, so no action could be read. Write exactly one "
    "action in double brackets, e.g. [[ turn left ]]",
    "unclosed_thinking": "Your reply ended inside its thinking, before an action. Think more "
    "briefly, then write exactly one action.",
}

FULL = Dialogue(
    name="full",
    version=1,
    system=_system_prompt(),
    parse=parse_bracketed,
    render=render_full,
    answers=ANSWERS,
    max_tokens=512,
)

COMPACT = Dialogue(
    name="compact",
    version=1,
    system=None,
    parse=parse_bare,
    render=render_bare,
    answers=ANSWERS,
    max_tokens=48,
)

DIALOGUES = {dialogue.name: dialogue for dialogue in (FULL, COMPACT)}
