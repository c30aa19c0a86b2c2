"""Conversations as tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentbench_prefix.dialogue import Message
from agentbench_prefix.errors import CheckpointError
from agentbench_prefix.serialization import ChatSerializer
from agentbench_prefix.training.tokenizer import build_word_tokenizer

TEXTS = ["craft 4 oak planks using 1 oak logs\ncraft 1 chest using 8 planks", "get 1 oak logs"]


@pytest.fixture(scope="module")
def tokenizer():
    return build_word_tokenizer(TEXTS, 500)


@pytest.fixture(scope="module")
def serializer(tokenizer):
    return ChatSerializer(tokenizer)


CONVERSATION = [
    Message("system", "Play."),
    Message("user", "first\nlines"),
    Message("assistant", "get 1 oak logs"),
    Message("user", "  Got 1 oak logs "),
    Message("assistant", "mistake"),
    Message("user", "no"),
    Message("assistant", "done"),
]


def test_a_domain_word_is_one_token_and_any_text_comes_back(tokenizer):
    assert len(tokenizer("get 1 oak logs")["input_ids"]) == 4


@given(st.text())
def test_round_trip(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_numbers_to_99_are_tokens(tokenizer):
    for n in range(100):
        assert len(tokenizer(f" {n}")["input_ids"]) == 1


def test_vocabulary_size_is_kept_and_checked():
    assert len(build_word_tokenizer(TEXTS, 470)) <= 470
    with pytest.raises(ValueError, match="at least"):
        build_word_tokenizer(TEXTS, 100)


def test_the_same_sample_gives_the_same_vocabulary():
    assert (
        build_word_tokenizer(TEXTS, 500).get_vocab() == build_word_tokenizer(TEXTS, 500).get_vocab()
    )


def test_conversation_equals_the_template(tokenizer, serializer):
    ids, mask = serializer.conversation(CONVERSATION, [True, False, True])
    rendered = tokenizer.apply_chat_template([m.as_dict() for m in CONVERSATION], tokenize=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == rendered
    assert ids == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert len(mask) == len(ids)


def test_the_mask_is_on_trainable_replies_and_their_end_alone(tokenizer, serializer):
    ids, mask = serializer.conversation(CONVERSATION, [True, False, True])
    marked = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert marked == "get 1 oak logs<|end|>done<|end|>"
    _, everything = serializer.conversation(CONVERSATION, [True, True, True])
    assert sum(everything) == sum(mask) + len(serializer.reply("mistake"))


def test_pieces_as_evaluation_appends_them_equal_the_whole(serializer):
    pieces = serializer.opening(CONVERSATION[:2])
    for reply, observation in zip(CONVERSATION[2::2], CONVERSATION[3::2], strict=False):
        pieces += serializer.reply(reply.content) + serializer.glue([observation])
    pieces += serializer.reply("done")
    assert pieces == serializer.conversation(CONVERSATION, [True] * 3)[0]


TRIMMING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize("content", ["plain", "  spaced \n", ""])
def test_a_template_that_trims_is_followed(tokenizer, content):
    trimming = build_word_tokenizer(TEXTS, 500)
    trimming.chat_template = TRIMMING
    serializer = ChatSerializer(trimming)
    text = trimming.decode(serializer.glue([Message("user", content)]))
    assert text == f"\n[user]{content.strip()}<|end|>\n[assistant]"


def test_templates_that_cannot_serve_are_refused():
    bare = build_word_tokenizer(TEXTS, 500)
    bare.chat_template = None
    with pytest.raises(CheckpointError, match="no chat template"):
        ChatSerializer(bare)
    bare.chat_template = "{% for m in messages %}{{ m.content }}. {% endfor %}"
    with pytest.raises(CheckpointError, match="special token"):
        ChatSerializer(bare)


def test_fingerprints_tell_vocabularies_and_templates_apart(serializer):
    other = build_word_tokenizer([*TEXTS, "another word"], 500)
    assert ChatSerializer(other).fingerprint() != serializer.fingerprint()
    same = build_word_tokenizer(TEXTS, 500)
    assert ChatSerializer(same).fingerprint() == serializer.fingerprint()
    same.chat_template = TRIMMING
    assert ChatSerializer(same).fingerprint() != serializer.fingerprint()
