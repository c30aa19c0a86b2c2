"""Conversations as tokens."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agentbench_prefix.dialogue import Message
from agentbench_prefix.errors import CheckpointError
from agentbench_prefix.serialization import ChatSerializer
from agentbench_prefix.training.tokenizer import (
    CHAT_TEMPLATE,
    SPECIAL_TOKENS,
    build_word_tokenizer,
)

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


def byte_level_tokenizer():
    """BPE with merges, e.g. of ``|>``, trained on text that holds special tokens too."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([*TEXTS, "<|end |> <|user |>"] * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        extra_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
    )


MAKERS = {"words": lambda: build_word_tokenizer(TEXTS, 500), "bytes": byte_level_tokenizer}
TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "trimming": CHAT_TEMPLATE.replace("message.content", "message.content | trim"),
}


@pytest.fixture(scope="module", params=[(m, t) for m in MAKERS for t in TEMPLATES], ids="-".join)
def any_serializer(request):
    maker, template = request.param
    tokenizer = MAKERS[maker]()
    tokenizer.chat_template = TEMPLATES[template]
    return ChatSerializer(tokenizer)


def specials(serializer, ids):
    return [i for i in ids if i in serializer.tokenizer.all_special_ids]


# What stands in for a special token while a template is applied may be spelled as well.
PIECES = st.one_of(
    st.sampled_from([*SPECIAL_TOKENS, "QxZ0Zxq", "QxZ0Zx", "<|", "|>", " "]), st.text()
)
SPELLING = st.lists(PIECES, max_size=6).map("".join)


@given(contents=st.lists(SPELLING, min_size=4, max_size=4))
def test_content_never_becomes_special_tokens(any_serializer, contents):
    serializer = any_serializer
    roles = ("system", "user", "assistant", "user")
    messages = [Message(*pair) for pair in zip(roles, contents, strict=True)]
    messages.append(Message("assistant", contents[0]))
    blank = [Message(m.role, "x") for m in messages]
    ids, mask = serializer.conversation(messages, [True, True])
    expected, _ = serializer.conversation(blank, [True, True])
    assert specials(serializer, ids) == specials(serializer, expected)
    pieces = [
        serializer.opening(messages[:2]),
        serializer.reply(contents[2]),
        serializer.glue(messages[3:4]),
        serializer.reply(contents[0]),
    ]
    assert ids == [*itertools.chain(*pieces)]
    assert mask == [int(k % 2) for k, piece in enumerate(pieces) for _ in piece]
    # No text is lost, nor added.
    rendered = serializer.tokenizer.apply_chat_template(
        [m.as_dict() for m in messages[:2]], tokenize=False, add_generation_prompt=True
    )
    assert serializer.tokenizer.decode(pieces[0], skip_special_tokens=False) == rendered
    assert serializer.decode(pieces[1]) == contents[2]
    trims = "trim" in serializer.tokenizer.chat_template
    assert serializer.decode(pieces[2]) == (contents[3].strip() if trims else contents[3])


@given(content=st.text())
def test_content_without_special_tokens_is_encoded_with_its_template(any_serializer, content):
    assume(not any(token in content for token in SPECIAL_TOKENS))
    tokenizer = any_serializer.tokenizer
    messages = [Message("user", content)]
    rendered = tokenizer.apply_chat_template(
        [m.as_dict() for m in messages], tokenize=False, add_generation_prompt=True
    )
    expected = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert any_serializer.opening(messages) == any_serializer.glue(messages) == expected


def test_what_is_handed_out_may_be_changed(serializer):
    for encode in (serializer.opening, serializer.glue):
        first = encode(CONVERSATION[1:2])
        kept = list(first)
        first.append(-1)
        assert encode(CONVERSATION[1:2]) == kept


def test_a_tokenizer_that_cannot_split_its_end_token_is_refused():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({"<|end|>": 0, "?": 1}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", unk_token="?")
    words.chat_template = CHAT_TEMPLATE
    with pytest.raises(CheckpointError, match="split_special_tokens"):
        ChatSerializer(words)


def test_templates_that_cannot_serve_are_refused():
    bare = build_word_tokenizer(TEXTS, 500)
    bare.chat_template = None
    with pytest.raises(CheckpointError, match="no chat template"):
        ChatSerializer(bare)
    bare.chat_template = "{% for m in messages %}{{ m.content }}. {% endfor %}"
    with pytest.raises(CheckpointError, match="special token"):
        ChatSerializer(bare)
    for broken in ("{% for m in messages %}", "{{ 1 / 0 }}", "{{ raise_exception('no') }}"):
        bare.chat_template = broken
        with pytest.raises(CheckpointError, match=r"chat template of .* fails on \['user', "):
            ChatSerializer(bare)
    bare.chat_template = "nothing of what was said"
    with pytest.raises(CheckpointError, match="leaves out what the assistant says"):
        ChatSerializer(bare)


def test_fingerprints_tell_vocabularies_and_templates_apart(serializer):
    other = build_word_tokenizer([*TEXTS, "another word"], 500)
    assert ChatSerializer(other).fingerprint() != serializer.fingerprint()
    same = build_word_tokenizer(TEXTS, 500)
    assert ChatSerializer(same).fingerprint() == serializer.fingerprint()
    same.chat_template = TRIMMING
    assert ChatSerializer(same).fingerprint() != serializer.fingerprint()
