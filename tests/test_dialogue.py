from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentbench_prefix import Dialogue, Message, ParsedReply
from agentbench_prefix.dialogue import parse_bare, parse_bracketed, render_bare

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=200)
PROBLEMS = {
    "no_action",
    "empty_action",
    "multiple_actions",
    "nested_brackets",
    "unclosed_thinking",
}
NOTES = {"thinking_tags", "trailing_text"}

BRACKETED = [
    # one action, with whatever is allowed around it
    ("[[ get 2 oak logs ]]", "get 2 oak logs", None, ()),
    ("[[get 2 oak logs]]", "get 2 oak logs", None, ()),
    ("Think: I need logs.\nAction: [[ get 2 oak logs ]]", "get 2 oak logs", None, ()),
    ("[[ inventory ]]\n\n  \t", "inventory", None, ()),
    ("[[ craft 1 stick\nusing 2 bamboo ]]", "craft 1 stick\nusing 2 bamboo", None, ()),
    ("[[ look [at] this ]]", "look [at] this", None, ()),
    ("[single] [[ inventory ]]", "inventory", None, ()),
    ("[[ inventory ]] and then I wait.", "inventory", None, ("trailing_text",)),
    ("[[ inventory ]] ]", "inventory", None, ("trailing_text",)),
    ("[ [[ inventory ]]", "inventory", None, ()),
    ("[[ look [up] ]]", "look [up]", None, ()),
    ("[[ [up] look ]]", "[up] look", None, ()),
    # none
    ("", None, "no_action", ()),
    ("   \n", None, "no_action", ()),
    ("inventory", None, "no_action", ()),
    ("[ inventory ]", None, "no_action", ()),
    ("Action: [[ inventory", None, "no_action", ()),
    ("inventory ]]", None, "no_action", ()),
    ("]] inventory [[", None, "no_action", ()),
    # empty
    ("[[]]", None, "empty_action", ()),
    ("[[   \n ]]", None, "empty_action", ()),
    # more than one
    ("[[ inventory ]] [[ get 1 bone ]]", None, "multiple_actions", ()),
    ("[[ inventory ]][[ inventory ]]", None, "multiple_actions", ()),
    ("[[ inventory ]] then [[]]", None, "multiple_actions", ()),
    # nested
    ("[[ [[ inventory ]] ]]", None, "nested_brackets", ()),
    ("[[ get [[ 1 ]] bone ]]", None, "nested_brackets", ()),
    ("[[ one ]] [[ two [[ three ]] ]]", None, "nested_brackets", ()),
    ("[[[x]]]", None, "nested_brackets", ()),
    ("[[[ x ]]]", None, "nested_brackets", ()),
    ("[[[x]]", None, "nested_brackets", ()),
    ("[[x]]]", None, "nested_brackets", ()),
    ("[[look [up]]]", None, "nested_brackets", ()),
    ("[[[[x]]]]", None, "nested_brackets", ()),
    ("[[[]]]", None, "nested_brackets", ()),
    ("[[ one ]] [[[ two ]]", None, "nested_brackets", ()),
    # thinking tags
    ("<think>[[ get 1 bone ]]</think>[[ inventory ]]", "inventory", None, ("thinking_tags",)),
    ("<think>a</think><think>b</think> [[ x ]] c", "x", None, ("thinking_tags", "trailing_text")),
    ("I see [[ a ]]</think>\n[[ inventory ]]", "inventory", None, ("thinking_tags",)),
    ("<think>[[ get 1 bone ]]</think>", None, "no_action", ("thinking_tags",)),
    ("<think>[[ get 1 bone ]]", None, "unclosed_thinking", ()),
    ("[[ inventory ]] <think> but", None, "unclosed_thinking", ()),
    ("<think>a</think> [[ x ]] <think>b", None, "unclosed_thinking", ("thinking_tags",)),
]

BARE = [
    ("get 2 oak logs", "get 2 oak logs", None, ()),
    ("  inventory \n", "inventory", None, ()),
    ("\n\ninventory", "inventory", None, ()),
    ("[[ inventory ]]", "[[ inventory ]]", None, ()),
    ("inventory\nget 1 bone", "inventory", None, ("trailing_text",)),
    ("", None, "empty_action", ()),
    (" \n\t", None, "empty_action", ()),
    ("<think>hm</think>inventory", "inventory", None, ("thinking_tags",)),
    ("hm</think>inventory", "inventory", None, ("thinking_tags",)),
    ("<think>hm</think>", None, "empty_action", ("thinking_tags",)),
    ("<think>hm", None, "unclosed_thinking", ()),
]


@pytest.mark.parametrize(("reply", "action", "problem", "notes"), BRACKETED)
def test_bracketed_replies(reply, action, problem, notes):
    assert parse_bracketed(reply) == ParsedReply(action, problem, notes)


@pytest.mark.parametrize(("reply", "action", "problem", "notes"), BARE)
def test_bare_replies(reply, action, problem, notes):
    assert parse_bare(reply) == ParsedReply(action, problem, notes)


@pytest.mark.parametrize("parse", [parse_bracketed, parse_bare])
def test_every_reply_has_a_defined_answer(parse):
    pieces = st.sampled_from(
        ["[[", "]]", "[", "]", "<think>", "</think>", "\n", " ", "get 1 bone", "inventory"]
    )

    @given(st.one_of(ANY_TEXT, st.lists(pieces, max_size=12).map("".join)))
    def check(reply):
        parsed = parse(reply)
        assert (parsed.action is None) == (parsed.problem is not None)
        assert parsed.problem is None or parsed.problem in PROBLEMS
        assert parsed.action is None or (parsed.action and parsed.action == parsed.action.strip())
        assert set(parsed.notes) <= NOTES

    check()


@given(ANY_TEXT, ANY_TEXT)
def test_text_before_the_brackets_never_changes_the_action(before, action):
    plain = parse_bracketed(f"[[{action}]]")
    free = not any(mark in before + action for mark in ("[", "]", "<think>", "</think>"))
    if free and plain.action is not None:
        assert parse_bracketed(f"{before}[[{action}]]").action == plain.action == action.strip()


def test_an_endless_reply_is_read_in_linear_time():
    # Quadratic readers would need minutes for this, which the timeout would end.
    brackets = ("[[", "]]", "[[ a ]]", "[", "]", "[[[ a ]]]", "[[ a ]")
    for piece in (*brackets, "<think>", "</think>", "<think></think>", "a"):
        reply = piece * 100_000
        parse_bracketed(reply)
        parse_bare(reply)


def test_a_bare_turn_drops_the_thought():
    assert render_bare("inventory", "What do I have?") == "inventory"


def dialogue(system):
    answers = {"no_action": "Name one."}
    return Dialogue("bare", 3, system, parse_bare, render_bare, answers, 16)


def test_opening_and_answers():
    assert dialogue(None).opening("Go.") == [Message("user", "Go.")]
    assert dialogue("Play.").opening("Go.") == [Message("system", "Play."), Message("user", "Go.")]
    assert dialogue(None).label == "bare@3"
    assert dialogue(None).answer("no_action") == "Name one."
    assert Message("user", "Go.").as_dict() == {"role": "user", "content": "Go."}
