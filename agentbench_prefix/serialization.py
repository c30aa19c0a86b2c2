"""Conversations as tokens: one serialization for teaching, SFT, RL and evaluation.

A conversation is a linear token sequence: the opening (system prompt, first observation, generation
header), then alternately a reply as it was generated, end-of-turn token included, and the glue up
to the next reply. What a model produced is never decoded and encoded again.

Chat templates that rewrite earlier turns (Qwen3 drops the thinking of past turns) are not applied
again to the whole history: the history stays as it was generated. :attr:`ChatSerializer.history`
says so, and results record it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from agentbench_prefix.dialogue import Message
from agentbench_prefix.errors import CheckpointError

# Stands for a reply while the template's glue is read off; plain letters, so no template trims it.
_SENTINEL = "QxZreplyZxQ"


class ChatSerializer:
    """Turns messages into token ids with a tokenizer's own chat template.

    Args:
        tokenizer: A ``transformers`` tokenizer with a chat template.
        template_arguments: Extra arguments of the template, e.g. ``{"enable_thinking": True}``.

    Raises:
        CheckpointError: The tokenizer has no chat template, or its template does not mark the end
            of an assistant turn with one special token.
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
        self._user_frame = self._find_user_frame()

    def _render(self, messages: Sequence[Message], *, generate: bool) -> str:
        text: str = self.tokenizer.apply_chat_template(
            [m.as_dict() for m in messages],
            tokenize=False,
            add_generation_prompt=generate,
            **self._template_arguments,
        )
        return text

    def _after_sentinel(self, messages: Sequence[Message]) -> str:
        stem = [Message("user", "u"), Message("assistant", _SENTINEL)]
        text = self._render([*stem, *messages], generate=bool(messages))
        return text.split(_SENTINEL, 1)[1]

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

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """Tokens up to the first reply, generation header included."""
        return self._encode(self._render(messages, generate=True))

    def glue(self, messages: Sequence[Message]) -> list[int]:
        """Tokens between the end-of-turn token of one reply and the start of the next.

        Args:
            messages: The user messages in between.
        """
        return self._encode(self._frame(messages))

    def reply(self, text: str) -> list[int]:
        """Tokens of a reply that was written, not generated; the end-of-turn token included."""
        return [*self._encode(text), self.end_id]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a generated reply, without special tokens."""
        text: str = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

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
        first = next(i for i, m in enumerate(messages) if m.role == "assistant")
        pieces = [self._render(messages[:first], generate=True)]
        flags: list[int | None] = [None]
        replies = iter(trainable)
        between: list[Message] = []
        for message in messages[first:]:
            if message.role != "assistant":
                between.append(message)
                continue
            if between:
                pieces.append(self._frame(between))
                flags.append(None)
                between = []
            pieces.append(message.content)
            flags.append(int(next(replies)))
        ids: list[int] = []
        mask: list[int] = []
        encoded = self.tokenizer(pieces, add_special_tokens=False)["input_ids"]
        for piece, flag in zip(encoded, flags, strict=True):
            ids += piece
            mask += [flag or 0] * len(piece)
            if flag is not None:
                ids.append(self.end_id)
                mask.append(flag)
        return ids, mask

    def fingerprint(self) -> str:
        """SHA-256 over the vocabulary and the chat template: equal means interchangeable."""
        digest = hashlib.sha256()
        for token, index in sorted(self.tokenizer.get_vocab().items(), key=lambda item: item[1]):
            digest.update(f"{index}\t{token}\n".encode("utf-8", "surrogatepass"))
        digest.update(str(self.tokenizer.chat_template).encode())
        return digest.hexdigest()
