"""Conversations as tokens: one serialization for teaching, SFT, RL and evaluation.

A conversation is a linear token sequence: the opening (system prompt, first observation, generation
header), then alternately a reply as it was generated, end-of-turn token included, and the glue up
to the next reply. What a model produced is never decoded and encoded again.

Chat templates that rewrite earlier turns (Qwen3 drops the thinking of past turns) are not applied
again to the whole history: the history stays as it was generated. :attr:`ChatSerializer.history`
says so, and results record it.

Special tokens come from the template and from what was generated, never from content: where a
message spells one (an environment may quote a reply), it is encoded as ordinary text.

Added tokens that a tokenizer does not mark special (Qwen3's ``<think>`` and ``<tool_call>``) are
content: decoding keeps them and dialogues parse them. Their text becomes the token in every
message, as wherever else that tokenizer is used, so that a written reply has the tokens of a
generated one. In an observation they are no danger: they begin and end no turn, and where replies
lie is known from putting the conversation together, not read off its tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

from agentbench_prefix.dialogue import Message
from agentbench_prefix.errors import CheckpointError
from agentbench_prefix.files import canonical_json

# Stands for a reply while the template's glue is read off; plain letters, so no template trims it.
_SENTINEL = "QxZreplyZxQ"
# Stands for the n-th special token that content spells. Its first letter occurs nowhere else in it,
# so that it cannot be mistaken together with text around it.
_VEIL = re.compile("QxZ([0-9]+)Zxq")

# Cases, marks, ligatures, spaces, digits, words that merge: what tokenizers differ in.
_PROBE = (
    " Craft 12 oak_planks  using 345,678 minecraft:logs!\n\n\tDon't RE-tokenize: "
    "na\u00efve cafe\u0301 \ufb01 \u00a0 \u4f60\u597d \U0001f600 [[ inventory ]] "
    "<think>x</think>\r\n "
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A conversation in tokens.

    Attributes:
        ids: Its token ids.
        replies: ``[begin, end)`` of each assistant message in ``ids``: its content and the
            end-of-turn token, without the generation header before it.
    """

    ids: list[int]
    replies: list[tuple[int, int]]

    def mask(self, trainable: Sequence[bool]) -> list[int]:
        """1 on every token of the replies marked trainable, else 0; as long as ``ids``.

        Args:
            trainable: One flag per reply.
        """
        mask = [0] * len(self.ids)
        for (begin, end), learn in zip(self.replies, trainable, strict=True):
            mask[begin:end] = [int(learn)] * (end - begin)
        return mask


class ChatSerializer:
    """Turns messages into token ids with a tokenizer's own chat template.

    Args:
        tokenizer: A ``transformers`` tokenizer with a chat template.
        template_arguments: Extra arguments of the template, e.g. ``{"enable_thinking": True}``.

    Raises:
        CheckpointError: The tokenizer has no chat template, or its template cannot be rendered,
            leaves replies out or does not mark the end of an assistant turn with one special token,
            or it cannot tell that token's text from the token.
    """

    history = "as_generated"

    def __init__(self, tokenizer: Any, template_arguments: dict[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self._template_arguments = dict(template_arguments or {})
        if not getattr(tokenizer, "chat_template", None):
            raise CheckpointError(
                f"the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template; "
                "use an instruction-tuned model, or set tokenizer.chat_template"
            )
        tail = self._after_sentinel([])
        ids = self._encode(tail)
        special = set(tokenizer.all_special_ids)
        if not ids or ids[0] not in special:
            raise CheckpointError(
                "the chat template does not end an assistant turn with a special token "
                f"(it writes {tail[:20]!r}), so a reply's end cannot be recognised"
            )
        self.end_id: int = ids[0]
        """Token that ends an assistant turn."""
        self._end_text: str = tokenizer.decode([self.end_id], skip_special_tokens=False)
        if self.end_id in self._encode(self._end_text, plain=True):
            raise CheckpointError(
                f"the tokenizer encodes the text {self._end_text!r} as the special token even with "
                "split_special_tokens=True, so a message's content could end a turn; use a model "
                "with another tokenizer"
            )
        special_texts = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
        special_texts.sort(key=len, reverse=True)
        self._spelled = re.compile("|".join([*map(re.escape, special_texts), _VEIL.pattern]))
        # Observations repeat a lot, and rendering a template costs as much as several tokens.
        opening = partial(self._encode_written, partial(self._render, generate=True))
        self._opening = lru_cache(256)(opening)
        self._glue = lru_cache(4096)(partial(self._encode_written, self._frame))
        self._user_frame = self._find_user_frame()

    def _render(self, messages: Sequence[Message], *, generate: bool) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                [m.as_dict() for m in messages],
                tokenize=False,
                add_generation_prompt=generate,
                **self._template_arguments,
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise CheckpointError(
                f"the chat template of {getattr(self.tokenizer, 'name_or_path', '')!r} fails on "
                f"{[m.role for m in messages]} ({type(error).__name__}: {error}); repair its "
                "chat_template.jinja, or set tokenizer.chat_template"
            ) from error
        return text

    def _after_sentinel(self, messages: Sequence[Message]) -> str:
        stem = [Message("user", "u"), Message("assistant", _SENTINEL)]
        text = self._render([*stem, *messages], generate=bool(messages))
        _, found, after = text.partition(_SENTINEL)
        if not found:
            raise CheckpointError(
                f"the chat template leaves out what the assistant says (it writes {text[:40]!r}); "
                "use one for conversations"
            )
        return after

    def _find_user_frame(self) -> tuple[str, str] | None:
        """What the template writes around a user message, if it leaves the message as it is.

        Rendering a template costs far more than tokenizing its result.
        """
        probe = f" \n {_SENTINEL} \n "
        before, found, after = self._glue_text([Message("user", probe)]).partition(probe)
        return (before, after) if found else None

    def _glue_text(self, messages: Sequence[Message]) -> str:
        text = self._after_sentinel(messages)
        if not text.startswith(self._end_text):
            raise CheckpointError(
                f"the chat template ends an assistant turn with {text[:20]!r} before a user "
                f"message, but with {self._end_text!r} at the end of a conversation"
            )
        return text[len(self._end_text) :]

    def _frame(self, messages: Sequence[Message]) -> str:
        if self._user_frame is not None and len(messages) == 1 and messages[0].role == "user":
            return messages[0].content.join(self._user_frame)
        return self._glue_text(messages)

    def _encode(self, text: str, *, plain: bool = False) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, split_special_tokens=plain)[
            "input_ids"
        ]
        return ids

    def _encode_written(
        self, write: Callable[[Sequence[Message]], str], messages: Sequence[Message]
    ) -> list[int]:
        """Tokens of what ``write`` makes of messages, whose content remains plain text.

        Special tokens that content spells are encoded apart, all else together. Stand-ins keep
        their places meanwhile, since a template may trim or cut content.
        """
        spelled: list[str] = []

        def veil(found: re.Match[str]) -> str:
            spelled.append(found[0])
            return f"QxZ{len(spelled) - 1}Zxq"

        veiled = [Message(m.role, self._spelled.sub(veil, m.content)) for m in messages]
        ids: list[int] = []
        for k, part in enumerate(_VEIL.split(write(veiled))):
            ids += self._encode(spelled[int(part)], plain=True) if k % 2 else self._encode(part)
        return ids

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """Tokens up to the first reply, generation header included."""
        return self._opening(tuple(messages)).copy()

    def glue(self, messages: Sequence[Message]) -> list[int]:
        """Tokens between the end-of-turn token of one reply and the start of the next.

        Args:
            messages: The user messages in between.
        """
        return self._glue(tuple(messages)).copy()

    def reply(self, text: str) -> list[int]:
        """Tokens of a reply that was written, not generated; the end-of-turn token included."""
        return [*self._encode(text, plain=True), self.end_id]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a generated reply, without special tokens."""
        text: str = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def lay_out(self, messages: Sequence[Message]) -> Layout:
        """Tokens of a whole conversation and where its replies are.

        Args:
            messages: From the opening on; ends with a reply, or with what a reply is due to.

        Raises:
            ValueError: There is no user message before the first reply, or two replies follow each
                other.
        """
        ids: list[int] = []
        replies: list[tuple[int, int]] = []
        begin = 0
        for end, message in enumerate(messages):
            if message.role == "assistant":
                if begin == end:
                    raise ValueError(
                        f"message {end} is a reply to nothing: expected a user message"
                    )
                ids += self.glue(messages[begin:end]) if replies else self.opening(messages[:end])
                start = len(ids)
                ids += self.reply(message.content)
                replies.append((start, len(ids)))
                begin = end + 1
        if begin < len(messages):
            ids += self.glue(messages[begin:]) if replies else self.opening(messages)
        return Layout(ids, replies)

    def conversation(
        self, messages: Sequence[Message], trainable: Sequence[bool]
    ) -> tuple[list[int], list[int]]:
        """Tokens of a finished conversation and which of them SFT learns from.

        Args:
            messages: A whole conversation, from the opening on; ends with an assistant message.
            trainable: One flag per assistant message.

        Returns:
            ``(ids, mask)`` of equal length; ``mask`` is 1 on the content and end-of-turn token of
            assistant messages marked trainable, 0 on everything else.
        """
        layout = self.lay_out(messages)
        return layout.ids, layout.mask(trainable)

    def fingerprint(self) -> str:
        """SHA-256 over what decides which tokens a message becomes.

        Vocabulary, special tokens, chat template and its arguments, and what becomes of a probe
        text that normalizers, pre-tokenizers and merges treat differently. How a library stores a
        tokenizer is left out: it varies by version.
        """
        digest = hashlib.sha256()
        for token, index in sorted(self.tokenizer.get_vocab().items(), key=lambda item: item[1]):
            digest.update(f"{index}\t{token}\n".encode("utf-8", "surrogatepass"))
        digest.update(str(self.tokenizer.chat_template).encode())
        probe = [self._encode(_PROBE), self._encode(_PROBE, plain=True)]
        special = sorted(self.tokenizer.all_special_ids)
        digest.update(canonical_json([probe, special, self._template_arguments]).encode())
        return digest.hexdigest()
