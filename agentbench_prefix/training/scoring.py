"""Log-probabilities of given tokens under the model that is trained, with their gradients.

The samples of a query share its prompt, so a group travels through the model as one packed piece:
the prompt once, then every continuation. Attention is causal within the prompt, and from each
continuation to the prompt and to itself; positions go on from the prompt's. The result equals that
of separate sequences, at a fraction of the work where prompts are long. Nothing is padded, and only
positions that predict a wanted token reach the output layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from agentbench_prefix.errors import CheckpointError
from agentbench_prefix.policies.transformers import refuse_unknown_attention

ATTENTION = "agentbench_prefix_shared_prompt"
"""Name under which the attention is registered with transformers."""
LOGIT_ELEMENTS = 2**27
"""Most logits in double-width form at once; longer lists are taken in parts, and computed anew in
the backward pass."""


class Sequences(NamedTuple):
    """Continuations of one prompt.

    Attributes:
        prompt: Its token ids, at least one.
        continuations: Token ids of each.
        wanted: For each continuation, the positions in it that are to be scored.
        prompt_wanted: Positions of the prompt that are to be scored, none of them 0.
    """

    prompt: Sequence[int]
    continuations: Sequence[Sequence[int]]
    wanted: Sequence[Sequence[int]]
    prompt_wanted: Sequence[int]


class Scored(NamedTuple):
    """Log-probabilities and entropies, nats, in the order of the sequences.

    Attributes:
        logprobs: Of wanted continuation tokens, group by group, continuation by continuation.
        entropies: Of the distributions they were scored under, detached.
        prompt_logprobs: Of wanted prompt tokens, group by group.
    """

    logprobs: torch.Tensor
    entropies: torch.Tensor
    prompt_logprobs: torch.Tensor


class _Group(NamedTuple):
    """A group's place in the packed sequence: its prompt, then its continuations.

    Attributes:
        prompt: Tokens of the prompt.
        biases: For each continuation 0 where a query sees a key, else -inf:
            ``[query heads of a key-value head * tokens, prompt + tokens]``.
    """

    prompt: int
    biases: list[torch.Tensor]


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    shared: Sequence[_Group] | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function in the form transformers calls."""
    del module, attention_mask
    refuse_unknown_attention(extra)
    if shared is None or dropout:
        raise NotImplementedError("attention with dropout, or that is not handed the layout")
    heads, kv_heads = query.shape[1], key.shape[1]
    queries_per_key = heads // kv_heads
    lengths = [
        n
        for group in shared
        for n in (group.prompt, *(len(bias) // queries_per_key for bias in group.biases))
    ]
    # Split, not sliced: the gradient of a slice is as long as the whole.
    parts = zip(*(torch.split(packed, lengths, 2) for packed in (query, key, value)), strict=True)
    pieces = []
    for group in shared:
        own_query, prompt_key, prompt_value = next(parts)
        result = functional.scaled_dot_product_attention(
            own_query,
            prompt_key,
            prompt_value,
            is_causal=True,
            scale=scaling,
            enable_gqa=queries_per_key > 1,
        )
        pieces.append(result)
        for bias in group.biases:
            own_query, own_key, own_value = next(parts)
            # The query heads of a key-value head become further queries of it, which spares
            # repeating keys and values.
            result = functional.scaled_dot_product_attention(
                own_query.reshape(1, kv_heads, len(bias), -1),
                torch.cat([prompt_key, own_key], 2),
                torch.cat([prompt_value, own_value], 2),
                attn_mask=bias,
                scale=scaling,
            )
            pieces.append(result.view(1, heads, own_query.shape[2], -1))
    return torch.cat(pieces, 2).transpose(1, 2), None


transformers.AttentionInterface.register(ATTENTION, _attention)


def prepare(model: Any) -> None:
    """Put the attention into a model.

    Raises:
        CheckpointError: Its architecture cannot be run this way.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise CheckpointError(
            f"{type(model).__name__} has layers of type {', '.join(sorted(kinds))}: use a decoder "
            "with full causal attention (e.g. Qwen3, Llama, SmolLM2)"
        )
    model.set_attn_implementation(ATTENTION)


def score(
    model: Any,
    sequences: Sequence[Sequences],
    *,
    vocabulary: int,
    temperature: float = 1.0,
) -> Scored:
    """Score tokens under a model that :func:`prepare` has set up.

    Args:
        model: A causal language model with full attention, wrapped or not.
        sequences: At least one.
        vocabulary: Ids that the distributions are over, the first so many.
        temperature: Logits are divided by it.
    """
    parameter = next(model.parameters())
    device, dtype = parameter.device, parameter.dtype
    config = getattr(model, "module", model).config.get_text_config()
    heads = config.num_attention_heads
    queries_per_key = heads // (getattr(config, "num_key_value_heads", None) or heads)
    ids: list[int] = []
    positions: list[int] = []
    shared: list[_Group] = []
    sources: list[int] = []
    targets: list[int] = []
    prompt_sources: list[int] = []
    prompt_targets: list[int] = []
    for group in sequences:
        begin, length = len(ids), len(group.prompt)
        ids += group.prompt
        positions += range(length)
        prompt_sources += [begin + u - 1 for u in group.prompt_wanted]
        prompt_targets += [group.prompt[u] for u in group.prompt_wanted]
        middle = len(ids)
        biases = []
        for tokens, wanted in zip(group.continuations, group.wanted, strict=True):
            first = len(ids)
            sources += [first + t - 1 if t else middle - 1 for t in wanted]
            targets += [tokens[t] for t in wanted]
            # The last wanted token is not read by the model, nor is anything behind it.
            count = max(wanted, default=0)
            if count:
                ids += tokens[:count]
                positions += range(length, length + count)
                own = torch.full((count, count), -math.inf, dtype=dtype, device=device).triu_(1)
                biases.append(functional.pad(own, (length, 0)).repeat(queries_per_key, 1))
        shared.append(_Group(length, biases))
    kept = torch.tensor(sources + prompt_sources, dtype=torch.long, device=device)
    # A model that is asked for nothing would be asked for everything.
    asked = kept if len(kept) else torch.zeros(1, dtype=torch.long, device=device)
    logits = model(
        input_ids=torch.tensor([ids], device=device),
        position_ids=torch.tensor([positions], device=device),
        use_cache=False,
        logits_to_keep=asked,
        shared=shared,
    ).logits[0, :, :vocabulary]
    following = torch.tensor(targets + prompt_targets, dtype=torch.long, device=device)
    if not len(kept):
        nothing = logits.sum() * 0 + logits.new_zeros(0)
        return Scored(nothing, nothing.detach(), nothing)
    chosen, entropies = _choose(logits, following, temperature)
    n = len(sources)
    return Scored(chosen[:n], entropies[:n].detach(), chosen[n:])


def _choose(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    step = max(1, LOGIT_ELEMENTS // logits.shape[-1])
    if len(logits) <= step:
        return _choose_all(logits, targets, temperature)
    parts = [
        checkpoint(_choose_all, some, chosen, temperature, use_reentrant=False)
        for some, chosen in zip(torch.split(logits, step), torch.split(targets, step), strict=True)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _choose_all(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    logprobs = logits.log_softmax(-1)
    with torch.no_grad():
        entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], entropies
