"""How an environment is put to a model: prompts, the action parser, answers to malformed replies.

A dialogue has a name and a version that travel with corpora, checkpoints and results. Teaching,
SFT, RL and evaluation all build their messages here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Literal

from agentbench_prefix.files import canonical_json, sha256_text

Role = Literal["system", "user", "assistant"]


@dataclasses.dataclass(frozen=True)
class Message:
    """One chat message.

    Attributes:
        role: ``"system"``, ``"user"`` or ``"assistant"``.
        content: Its text.
    """

    role: Role
    content: str

    def as_dict(self) -> dict[str, str]:
        """Return the form chat templates and endpoints take."""
        return {"role": self.role, "content": self.content}


@dataclasses.dataclass(frozen=True)
class ParsedReply:
    """What a reply means.

    Attributes:
        action: The action to send, ``None`` if the reply holds none that may be sent.
        problem: ``None``, or why there is no action: ``"no_action"``, ``"empty_action"``,
            ``"multiple_actions"``, ``"nested_brackets"``, ``"unclosed_thinking"``.
        notes: Harmless departures, counted in results: ``"thinking_tags"``, ``"trailing_text"``.
    """

    action: str | None
    problem: str | None = None
    notes: tuple[str, ...] = ()


_THINKING = re.compile(r"<think>.*?</think>", re.DOTALL)
_BRACKETED = re.compile(r"\[\[(.*?)\]\]", re.DOTALL)


def _strip_thinking(reply: str) -> tuple[str, tuple[str, ...], bool]:
    """Remove closed thinking blocks; also say whether one was left open."""
    # Nothing can match behind the last closing mark; looking there would take quadratic time.
    before, mark, rest = reply.rpartition("</think>")
    text = _THINKING.sub("", before + mark) + rest
    # A generation prompt may already have opened the block: only the closing tag is in the reply.
    if "<think>" not in text and "</think>" in text:
        text = text.rsplit("</think>", 1)[1]
    notes = ("thinking_tags",) if text != reply else ()
    return text, notes, "<think>" in text


def parse_bracketed(reply: str) -> ParsedReply:
    """Parse a reply that must hold exactly one ``[[ action ]]``.

    Thinking blocks are removed first, so brackets in a thought are no action. Text around the
    brackets is allowed; text after them is noted. No action is executed when there are two:
    guessing which one was meant would reward ignoring the format. Nor is one when a third bracket
    touches the two (``[[[x]]``, ``[[x]]]``), which is reported as nested: it may be a stray one or
    belong to the action. Single brackets inside need a space there, ``[[ look [up] ]]``.
    """
    text, notes, unclosed = _strip_thinking(reply)
    if unclosed:
        return ParsedReply(None, "unclosed_thinking", notes)
    before, mark, _ = text.rpartition("]]")
    found = list(_BRACKETED.finditer(before + mark))
    # From the second bracket on, so that a third one touching it counts.
    if any("[[" in text[m.start() + 1 : m.end()] or text.startswith("]", m.end()) for m in found):
        return ParsedReply(None, "nested_brackets", notes)
    if not found:
        return ParsedReply(None, "no_action", notes)
    if len(found) > 1:
        return ParsedReply(None, "multiple_actions", notes)
    action = found[0].group(1).strip()
    if not action:
        return ParsedReply(None, "empty_action", notes)
    if text[found[0].end() :].strip():
        notes = (*notes, "trailing_text")
    return ParsedReply(action, None, notes)


def parse_bare(reply: str) -> ParsedReply:
    """Parse a reply whose first line is the action and nothing else.

    Thinking blocks are removed first; further lines are ignored and noted.
    """
    text, notes, unclosed = _strip_thinking(reply)
    if unclosed:
        return ParsedReply(None, "unclosed_thinking", notes)
    action, _, rest = text.strip().partition("\n")
    action = action.strip()
    if not action:
        return ParsedReply(None, "empty_action", notes)
    return ParsedReply(action, None, (*notes, "trailing_text") if rest.strip() else notes)


def render_bare(action: str, thought: str) -> str:  # noqa: ARG001 - the form of Dialogue.render
    """Write a turn of the action-only form; the thought is dropped."""
    return action


@dataclasses.dataclass(frozen=True)
class Dialogue:
    """The form in which a model plays an environment.

    Attributes:
        name: e.g. ``"full"`` or ``"compact"``.
        version: Raised whenever any text below, the parser or the answers change.
        system: System prompt, or ``None`` for none.
        parse: Reads a model's reply.
        render: Writes a teacher's turn from ``(action, thought)``; ``parse`` must read the action
            back unchanged.
        answers: What the player is told for each ``ParsedReply.problem``.
        max_tokens: Default bound on one reply, in tokens.
    """

    name: str
    version: int
    system: str | None
    parse: Callable[[str], ParsedReply]
    render: Callable[[str, str], str]
    answers: dict[str, str]
    max_tokens: int

    @property
    def label(self) -> str:
        """Name and version, e.g. ``"compact@1"``."""
        return f"{self.name}@{self.version}"

    def fingerprint(self) -> str:
        """SHA-256 in hexadecimal of its texts."""
        texts = [self.label, self.system, self.answers, self.max_tokens]
        return sha256_text(canonical_json(texts))

    def opening(self, observation: str) -> list[Message]:
        """Messages before the first reply: the system prompt, if any, and the first observation."""
        first = [Message("system", self.system)] if self.system is not None else []
        return [*first, Message("user", observation)]

    def answer(self, problem: str) -> str:
        """What the player is told when a reply held no action that may be sent."""
        return self.answers[problem]
