"""What the environments' dialogues share: the two forms, and the answers to malformed replies."""

from __future__ import annotations

from collections.abc import Callable

from agentbench_prefix.dialogue import Dialogue, parse_bare, parse_bracketed, render_bare


def full_and_compact(
    system: str,
    render_full: Callable[[str, str], str],
    *,
    bare: str,
    bracketed: str,
    nested: str,
) -> dict[str, Dialogue]:
    """The dialogues ``full`` (thoughts, one bracketed action) and ``compact`` (bare actions).

    Args:
        system: System prompt of ``full``.
        render_full: Writes a turn of ``full`` from action and thought.
        bare: An action, as an example to whoever sent an empty one.
        bracketed: An action in brackets, as an example to whoever sent none.
        nested: The same to whoever nested the brackets.

    Returns:
        The dialogues by name.
    """
    answers = {
        "no_action": "Your reply held no action. Write exactly one action in double brackets, e.g. "
        f"{bracketed}",
        "empty_action": f"The action was empty. Write exactly one action, e.g. {bare}",
        "multiple_actions": "Your reply held more than one action, so none was carried out. Write "
        "exactly one action in double brackets.",
        "nested_brackets": "The brackets were nested, so no action could be read. Write exactly "
        f"one action in double brackets, e.g. {nested}",
        "unclosed_thinking": "Your reply ended inside its thinking, before an action. Think more "
        "briefly, then write exactly one action.",
    }
    full = Dialogue(
        name="full",
        version=1,
        system=system,
        parse=parse_bracketed,
        render=render_full,
        answers=answers,
        max_tokens=512,
    )
    compact = Dialogue(
        name="compact",
        version=1,
        system=None,
        parse=parse_bare,
        render=render_bare,
        answers=answers,
        max_tokens=48,
    )
    return {dialogue.name: dialogue for dialogue in (full, compact)}
