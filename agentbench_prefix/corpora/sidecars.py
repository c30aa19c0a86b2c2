"""Spans, masks and old log-probabilities of prefixes, in the tokens of their own prompts.

The canonical prompts of one trajectory's cuts are nested: each is the beginning of the serialized
trajectory. One forward pass over the trajectory therefore scores the prefixes of all its cuts, and
gives the entropies that cuts are ranked by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentbench_prefix.corpora.cuts import Trace
from agentbench_prefix.corpora.schema import ModelEntry, SidecarRow, token_hash
from agentbench_prefix.serialization import Layout


class Prefix(NamedTuple):
    """The prefix of a cut in the tokens of its canonical prompt.

    Attributes:
        begin: First token of the first reply; 0 for a raw query.
        end: Behind the end-of-turn token of the last reply; 0 for a raw query.
        mask: 1 on content and end-of-turn token of trainable replies, else 0; length
            ``end - begin``.
    """

    begin: int
    end: int
    mask: list[int]


def prefix_of(layout: Layout, trainable: Sequence[bool], turns: int) -> Prefix:
    """Span and mask of a cut's prefix (Prefix-GRPO eq. 2 and 10).

    Args:
        layout: The serialized trajectory, or the canonical prompt alone.
        trainable: One flag per turn of the prefix, or of the trajectory.
        turns: Turns before the cut.
    """
    if turns == 0:
        return Prefix(0, 0, [])
    replies = layout.replies[:turns]
    begin, end = replies[0][0], replies[-1][1]
    mask = Layout(layout.ids[:end], replies).mask(trainable[:turns])
    return Prefix(begin, end, mask[begin:])


def trace(trajectory_id: str, layout: Layout, entropies: NDArray[np.float64]) -> Trace:
    """What cut strategies see: the entropies at assistant tokens alone, in order.

    Args:
        trajectory_id: Id of the trajectory.
        layout: The whole conversation.
        entropies: ``[tokens]`` of the whole conversation, nats.
    """
    spans = [np.arange(begin, end) for begin, end in layout.replies]
    turn_of = np.repeat(np.arange(len(spans)), [len(span) for span in spans])
    return Trace(trajectory_id, len(spans), entropies[np.concatenate(spans)], turn_of)


def sidecar(
    query_id: str,
    layout: Layout,
    trainable: Sequence[bool],
    turns: int,
    logprobs: NDArray[np.float64],
    *,
    name: str,
    model: ModelEntry,
    backend: str,
    dtype: str,
    temperature: float,
) -> SidecarRow:
    """The sidecar of one cut.

    Args:
        query_id: The query.
        layout: The serialized trajectory; it must have a turn behind the cut.
        trainable: One flag per turn.
        turns: Turns before the cut.
        logprobs: ``[tokens]`` of the trajectory, or of its beginning up to the prefix's end; nats.
        name: Name of the model.
        model: The model.
        backend: What scored it.
        dtype: Number format it ran in.
        temperature: Temperature of the distributions.
    """
    prompt = layout.ids[: layout.replies[turns][0]]
    begin, end, mask = prefix_of(layout, trainable, turns)
    return SidecarRow.model_validate(
        {
            "query_id": query_id,
            "model": name,
            "model_sha256": model.model_sha256,
            "tokenizer": model.tokenizer,
            "backend": backend,
            "dtype": dtype,
            "temperature": temperature,
            "logprob_mode": "teacher_forcing",
            "vocabulary": model.vocabulary,
            "prompt_tokens": len(prompt),
            "prompt_sha256": token_hash(prompt),
            "assistant_prefix_span": [begin, end],
            "prefix_mask": mask,
            # Stored in single precision: what is read back is what was written.
            "assistant_prefix_old_log_probs": logprobs[begin:end].astype(np.float32).tolist(),
            "prefix_token_count": sum(mask),
        }
    )
