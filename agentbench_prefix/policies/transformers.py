"""A policy that runs a causal language model with ``transformers``: tokens in, tokens out.

The new tokens of all rows travel through the model as one packed sequence, so nothing is spent on
padding; only attention knows about rows. It is plugged in through transformers' own attention
interface, so that any decoder with full causal attention works, and does three things: writes the
new keys and values into a cache ``[rows, slots, kv_heads, head_dim]`` in which token ``t`` of a
row sits in slot ``t``, attends from each row to its own slots, and hands the result back packed.
Slots past a row's length may hold leftovers; they are masked until they are overwritten.

The cache lives as long as the session, so a turn costs its new tokens only. Rows that start from
the same tokens (the samples of a task) are computed once and copied.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from agentbench_prefix.env import JSON
from agentbench_prefix.errors import (
    CheckpointError,
    ConfigurationError,
    MissingExtraError,
    PolicyError,
)
from agentbench_prefix.policies.base import Episode, Reply
from agentbench_prefix.policies.tokens import (
    Conversation,
    FoundCheckpoint,
    check_checkpoint,
    find_checkpoint,
    overflow,
    read_due,
)
from agentbench_prefix.serialization import ChatSerializer

try:
    import torch
    import transformers
    from torch.nn import functional
except ModuleNotFoundError as error:
    raise MissingExtraError("the transformers policy", "eval") from error

ATTENTION = "agentbench_prefix_packed"
"""Name under which the packed attention is registered with transformers."""
PACKED_TOKENS = 8192
"""Most tokens sent through the model at once, unless a single row has more."""
LOGIT_ELEMENTS = 2**27
"""Most logits held at once by :meth:`TransformersPolicy.score`, unless a single row has more."""
BLOCK_ROWS_CPU = 16
"""Most cache rows in one attention call on the CPU: ragged rows waste less in small blocks."""
BLOCK_GAP = 4
"""A block of rows ends where this many cache rows on end have nothing to do."""
DEAD_SHARE = 0.2
"""Share of cache rows without a running episode from which the cache is compacted."""
SLOT_STEP = 64
"""Cache slots are allocated in multiples of this."""

_DTYPES = ("float32", "float64", "bfloat16", "float16")


# ------------------------------------------------------------------ packed attention over a cache
class _Cache:
    """Keys and values of many rows, ``[rows, slots, kv_heads, head_dim]`` per layer.

    New memory is zeroed: masked slots get weight 0, and 0 times a leftover NaN would be NaN.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.slots = 0
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def dtype(self) -> torch.dtype | None:
        """Number format of the values it holds; ``None`` as long as it holds none."""
        return next((values.dtype for _, values in self._layers.values()), None)

    def reserve(self, rows: int, slots: int) -> None:
        """Grow to at least this many rows and slots; what is held stays in place."""
        if slots > self.slots:
            slots = max(slots, self.slots * 5 // 4)
            slots = -(-slots // SLOT_STEP) * SLOT_STEP
        rows, slots = max(rows, self.rows), max(slots, self.slots)
        if (rows, slots) == (self.rows, self.slots):
            return
        for layer, held in self._layers.items():
            grown = []
            for old in held:
                new = old.new_zeros(rows, slots, *old.shape[2:])
                new[: self.rows, : self.slots] = old
                grown.append(new)
            self._layers[layer] = (grown[0], grown[1])
        self.rows, self.slots = rows, slots

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        for layer, (keys, values) in self._layers.items():
            index = torch.tensor(rows, dtype=torch.long, device=keys.device)
            self._layers[layer] = (keys.index_select(0, index), values.index_select(0, index))
        self.rows = len(rows)

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first ``length`` slots of each source row to its target row."""
        for held in self._layers.values():
            for tensor in held:
                tensor[targets, :length] = tensor[sources, :length]

    def write(
        self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write packed tokens to flat slots and return the layer's whole tensors.

        Args:
            layer: Index of the layer.
            slots: ``row * slots + position`` of each token, ``[tokens]``.
            keys: ``[tokens, kv_heads, head_dim]``.
            values: Likewise.
        """
        if layer not in self._layers:
            shape = (self.rows, self.slots)
            self._layers[layer] = (
                keys.new_zeros(*shape, *keys.shape[1:]),
                values.new_zeros(*shape, *values.shape[1:]),
            )
        held = self._layers[layer]
        for tensor, new in zip(held, (keys, values), strict=True):
            tensor.view(-1, *tensor.shape[2:]).index_copy_(0, slots, new)
        return held


class _Alone(NamedTuple):
    """A row without a past: it attends to its own packed tokens ``begin:end`` only."""

    begin: int
    end: int


class _Block(NamedTuple):
    """Neighbouring rows with a past: they attend to the cache, padded to one query length.

    Attributes:
        begin, end: Their packed tokens.
        first, last: Their rows, ``last`` excluded; some in between may be idle.
        width: Query length they are padded to.
        where: Place of each token in the padded block ``[rows * width]``, ``None`` if the block
            has no padding.
        bias: 0 where a query sees a slot, else -inf: ``[rows, 1, width, slots]``.
    """

    begin: int
    end: int
    first: int
    last: int
    width: int
    where: torch.Tensor | None
    bias: torch.Tensor


@dataclasses.dataclass
class _Packed:
    """How the packed tokens of one forward pass fall into rows."""

    parts: list[_Alone | _Block]
    cache: _Cache | None
    slots: torch.Tensor | None

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
    ) -> torch.Tensor:
        """Attend for one layer.

        Args:
            layer: Index of the layer.
            query: ``[1, heads, tokens, head_dim]``.
            key: ``[1, kv_heads, tokens, head_dim]``.
            value: Likewise.
            scale: Factor of the scores, ``None`` for ``head_dim ** -0.5``.

        Returns:
            ``[1, tokens, heads, head_dim]``.
        """
        _, heads, tokens, _ = query.shape
        kv_heads = key.shape[1]
        groups = heads // kv_heads
        if self.cache is not None and self.slots is not None:
            keys, values = self.cache.write(
                layer, self.slots, key[0].transpose(0, 1), value[0].transpose(0, 1)
            )
        out = query.new_empty(tokens, heads, value.shape[-1])
        by_token = query[0].transpose(0, 1)
        for part in self.parts:
            if isinstance(part, _Alone):
                span = slice(part.begin, part.end)
                result = functional.scaled_dot_product_attention(
                    query[:, :, span],
                    key[:, :, span],
                    value[:, :, span],
                    is_causal=True,
                    scale=scale,
                    enable_gqa=groups > 1,
                )
                out[span] = result[0].transpose(0, 1)
                continue
            rows, width = part.last - part.first, part.width
            queries = by_token[part.begin : part.end]
            if part.where is not None:
                padded = queries.new_zeros(rows * width, *queries.shape[1:])
                queries = padded.index_copy_(0, part.where, queries)
            # The query heads of a group become further queries of their key-value head, which
            # spares repeating keys and values.
            queries = (
                queries.reshape(rows, width, kv_heads, groups, -1)
                .permute(0, 2, 3, 1, 4)
                .reshape(rows, kv_heads, groups * width, -1)
            )
            bias = part.bias
            slots = bias.shape[-1]
            if width > 1:
                bias = (
                    bias.unsqueeze(2)
                    .expand(-1, -1, groups, -1, -1)
                    .reshape(rows, 1, groups * width, slots)
                )
            result = functional.scaled_dot_product_attention(
                queries,
                keys[part.first : part.last, :slots].transpose(1, 2),
                values[part.first : part.last, :slots].transpose(1, 2),
                attn_mask=bias,
                scale=scale,
            )
            result = (
                result.reshape(rows, kv_heads, groups, width, -1)
                .permute(0, 3, 1, 2, 4)
                .reshape(rows * width, heads, -1)
            )
            out[part.begin : part.end] = (
                result if part.where is None else result.index_select(0, part.where)
            )
        return out.unsqueeze(0)


def refuse_unknown_attention(extra: Mapping[str, Any]) -> None:
    """Refuse what an attention function of this library would leave out.

    Args:
        extra: Further arguments that transformers calls it with.

    Raises:
        NotImplementedError: The model's attention does more than weigh values by products.
    """
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if extra.get(name) is not None:
            raise NotImplementedError(f"attention with {name}={extra[name]!r}")


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    packed: _Packed | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function in the form transformers calls."""
    del attention_mask
    refuse_unknown_attention(extra)
    if packed is None:
        raise NotImplementedError("attention that is not handed the packed layout")
    return packed.attend(module.layer_idx, query, key, value, scaling), None


transformers.AttentionInterface.register(ATTENTION, _attention)


class _Piece(NamedTuple):
    """New tokens of one row, which already holds ``start`` tokens."""

    row: int
    start: int
    ids: Sequence[int]


class _Runner:
    """Runs a model on packed rows.

    Args:
        model: A causal language model.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._look()

    def _look(self) -> None:
        """See where the model is: a trainer may have moved it, or cast it."""
        self.device: torch.device = self.model.device
        self.dtype: torch.dtype = self.model.dtype
        self.block_rows = BLOCK_ROWS_CPU if self.device.type == "cpu" else 2**30

    @contextlib.contextmanager
    def borrowed(self, attention: str = ATTENTION) -> Iterator[None]:
        """Put an attention function into the model, and leave the model as it was found."""
        self._look()
        before, training = self.model.config._attn_implementation, self.model.training
        self.model.set_attn_implementation(attention)
        self.model.eval()
        try:
            with torch.inference_mode():
                yield
        finally:
            self.model.set_attn_implementation(before)
            self.model.train(training)

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def run(
        self, pieces: Sequence[_Piece], cache: _Cache | None, *, every: bool = False
    ) -> torch.Tensor:
        """Run new tokens through the model.

        Args:
            pieces: At least one; those with a past come first, by row, without repetition.
            cache: Where keys and values go; ``None`` keeps nothing (no piece has a past then).
            every: Return logits of all tokens instead of each piece's last.

        Returns:
            Logits ``[pieces, vocabulary]``, or ``[tokens, vocabulary]`` with ``every``.
        """
        counts = np.array([len(piece.ids) for piece in pieces])
        starts = np.array([piece.start for piece in pieces])
        rows = np.array([piece.row for piece in pieces])
        ends = np.cumsum(counts)
        offsets = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        positions = np.repeat(starts, counts) + offsets
        slots = None
        if cache is not None:
            cache.reserve(int(rows.max()) + 1, int((starts + counts).max()))
            slots = self._tensor(np.repeat(rows, counts) * cache.slots + positions)
        packed = _Packed(self._parts(rows, starts, counts, ends, offsets, positions), cache, slots)
        ids = np.fromiter((i for piece in pieces for i in piece.ids), np.int64, int(ends[-1]))
        logits: torch.Tensor = self.model(
            input_ids=self._tensor(ids[None]),
            position_ids=self._tensor(positions[None]),
            use_cache=False,
            logits_to_keep=0 if every else self._tensor(ends - 1),
            packed=packed,
        ).logits[0]
        return logits

    def _parts(
        self,
        rows: NDArray[np.int64],
        starts: NDArray[np.int64],
        counts: NDArray[np.int64],
        ends: NDArray[np.int64],
        offsets: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> list[_Alone | _Block]:
        parts: list[_Alone | _Block] = []
        past = int((starts > 0).sum())
        i = 0
        while i < past:
            j = i + 1
            while (
                j < past
                and rows[j] - rows[i] < self.block_rows
                and rows[j] - rows[j - 1] <= BLOCK_GAP
            ):
                j += 1
            first, last = int(rows[i]), int(rows[j - 1]) + 1
            begin, end = int(ends[i] - counts[i]), int(ends[j - 1])
            width = int(counts[i:j].max())
            place = np.repeat((rows[i:j] - first) * width, counts[i:j]) + offsets[begin:end]
            seen = np.zeros((last - first) * width, np.int64)
            seen[place] = positions[begin:end]
            hidden = np.arange((starts + counts)[i:j].max()) > seen[:, None]
            bias = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
            bias.masked_fill_(self._tensor(hidden), -math.inf)
            where = None if end - begin == len(seen) else self._tensor(place)
            bias = bias.view(last - first, 1, width, -1)
            parts.append(_Block(begin, end, first, last, width, where, bias))
            i = j
        parts += [_Alone(int(ends[k] - counts[k]), int(ends[k])) for k in range(past, len(rows))]
        return parts

    def check(self) -> None:
        """Compare packed logits with the model's own on two short rows of two turns.

        Raises:
            CheckpointError: They differ, or the architecture cannot be run this way.
        """
        name = type(self.model).__name__
        remedy = "use a decoder with full causal attention (e.g. Qwen3, Llama, SmolLM2)"
        text_config = self.model.config.get_text_config()
        kinds = set(getattr(text_config, "layer_types", None) or ()) - {"full_attention"}
        if kinds:
            raise CheckpointError(f"{name} has layers of type {', '.join(sorted(kinds))}: {remedy}")
        size = self.model.get_input_embeddings().num_embeddings
        histories = [[(7 * i + 3) % size for i in range(9)], [(5 * i + 1) % size for i in range(6)]]
        turns = [
            [_Piece(0, 0, histories[0][:6]), _Piece(1, 0, histories[1][:4])],
            [_Piece(0, 6, histories[0][6:]), _Piece(1, 4, histories[1][4:])],
        ]
        with self.borrowed("sdpa"):
            own = torch.stack(
                [self.model(self._tensor(np.array([ids]))).logits[0, -1] for ids in histories]
            )
        try:
            with self.borrowed():
                cache = _Cache()
                logits = [self.run(turn, cache) for turn in turns][-1]
        except (NotImplementedError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{name} cannot be run packed ({error}): {remedy}") from error
        # A trainer's autocast computes in less than the weights' precision; values tell.
        computed = cache.dtype or self.dtype
        tolerance = 1e-3 if computed in (torch.float32, torch.float64) else 5e-2
        gap = float((logits - own).abs().max())
        if not gap <= tolerance * max(1e-6, float(own.abs().max())):
            raise CheckpointError(
                f"{name} gives other logits packed than by itself (off by {gap:.2g}): {remedy}"
            )


# ------------------------------------------------------------------ sampling
def draw(
    logits: torch.Tensor, temperature: float, top_p: float, uniforms: NDArray[np.float64]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row by inverting the cumulative distribution.

    With p = softmax(logits / temperature), the token is the first whose cumulative probability
    exceeds u. A top-p cut keeps the smallest set of most probable tokens whose mass reaches
    ``top_p``, and u is scaled to what is left.

    Args:
        logits: ``[rows, vocabulary]``.
        temperature: 0 takes the most probable token.
        top_p: In (0, 1].
        uniforms: One number in [0, 1) a row, ``[rows]``; unused at temperature 0.

    Returns:
        Token ids and their log-probabilities in nats, ``[rows]`` each. Log-probabilities are taken
        at the sampling temperature (at 1 where that is 0), before the top-p cut.
    """
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    if temperature == 0:
        tokens = logits.argmax(-1, keepdim=True)
        return tokens[:, 0], logits.log_softmax(-1).gather(-1, tokens)[:, 0]
    probabilities = (logits / temperature).softmax(-1)
    kept = probabilities
    if top_p < 1:
        ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
        mass = ranked.cumsum(-1, dtype=torch.float64)
        ranked = ranked.masked_fill(mass - ranked >= top_p, 0.0)
        kept = torch.zeros_like(ranked).scatter_(-1, order, ranked)
    cumulative = kept.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = torch.from_numpy(uniforms).to(logits.device)[:, None] * total
    # Rounding may lift u * total to the total itself, which no token exceeds.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target, right=True)
    return tokens[:, 0], probabilities.gather(-1, tokens).log()[:, 0]


# ------------------------------------------------------------------ the policy
class Branch(NamedTuple):
    """Another continuation of a token sequence.

    Attributes:
        at: Tokens of the sequence that come before it.
        ids: Its tokens.
        scored: How many of its last tokens are scored, fewer than all.
    """

    at: int
    ids: Sequence[int]
    scored: int


class Scores(NamedTuple):
    """Teacher forcing of one sequence.

    Attributes:
        logprobs: ``[tokens]``, nats; entry ``t`` scores token ``t`` given the tokens before it.
            Entry 0 is NaN: nothing predicts the first token.
        entropies: ``[tokens]``, nats; entry ``t`` is the entropy of the distribution that token
            ``t`` was scored under. Entry 0 is NaN.
    """

    logprobs: NDArray[np.float64]
    entropies: NDArray[np.float64]


class TransformersPolicy:
    """Plays with a causal language model, batched over the episodes of a chunk.

    Ids that the tokenizer does not know (a vocabulary padded beyond ``len(tokenizer)``) are left
    out of every distribution: they are never drawn, and log-probabilities and entropies are those
    of the distribution over the ids that exist.

    What is drawn depends on an episode's seed, its conversation and the number of turns before,
    not on what shares its batch; the batch shifts logits by rounding only (about 1e-6 in float32).

    Args:
        model: A ``transformers`` causal language model with full attention. It is used as it is
            at each reply, and left as it was found.
        tokenizer: Its tokenizer, with a chat template.
        source: What identifies the weights; goes into :meth:`describe`.
        temperature: Sampling temperature; 0 is greedy.
        top_p: Mass of most probable tokens to sample from, in (0, 1].
        max_tokens: Most tokens in one reply.

    Raises:
        CheckpointError: Model and tokenizer do not fit each other or this policy.
        ConfigurationError: A sampling setting is out of range.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        source: Mapping[str, JSON],
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_tokens: int = 64,
    ) -> None:
        if not (math.isfinite(temperature) and temperature >= 0):
            raise ConfigurationError(f"temperature must be a number >= 0, got {temperature}")
        if not 0 < top_p <= 1:
            raise ConfigurationError(f"top_p must be in (0, 1], got {top_p}")
        if max_tokens < 1:
            raise ConfigurationError(f"max_tokens must be >= 1, got {max_tokens}")
        self.vocabulary = len(tokenizer)
        rows = model.get_input_embeddings().num_embeddings
        if self.vocabulary > rows:
            raise CheckpointError(
                f"the tokenizer has {self.vocabulary} tokens but the model only {rows}: they do "
                "not belong together; use the tokenizer the model was trained with"
            )
        self.temperature = float(temperature)
        self.top_p = float(top_p)
        self.max_tokens = max_tokens
        self.serializer = ChatSerializer(tokenizer)
        stop = getattr(model.generation_config, "eos_token_id", None)
        listed = stop if isinstance(stop, list) else [] if stop is None else [stop]
        self.stop_ids = frozenset([self.serializer.end_id, *listed])
        config = model.config.get_text_config()
        self.context: int = getattr(config, "max_position_embeddings", None) or 2**31
        self.runner = _Runner(model)
        self._source = dict(source)
        self.runner.check()

    @classmethod
    def load(
        cls,
        model: str | Path | FoundCheckpoint,
        revision: str | None = None,
        device: str = "cpu",
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_tokens: int = 64,
        dtype: str = "float32",
        threads: int | None = None,
    ) -> TransformersPolicy:
        """Load a checkpoint: a local folder, or a Hub id at a pinned revision.

        Args:
            model: Folder with ``config.json``, ``*.safetensors`` and a tokenizer, or a Hub id, or
                what :func:`find_checkpoint` found.
            revision: Branch, tag or commit of a Hub id. Whatever is given, the commit it stands
                for is what :meth:`describe` records.
            device: A torch device, e.g. ``"cpu"`` or ``"cuda"``.
            temperature: See the class.
            top_p: See the class.
            max_tokens: See the class.
            dtype: ``"float32"``, ``"float64"``, ``"bfloat16"`` or ``"float16"``.
            threads: CPU threads to give torch in this process; ``None`` leaves them as they are.

        Raises:
            CheckpointError: Nothing usable is there, or the Hub cannot be reached.
            ConfigurationError: A setting is out of range or names no device.
        """
        if dtype not in _DTYPES:
            raise ConfigurationError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
        try:
            place = torch.zeros(1, device=device).device
        except (RuntimeError, AssertionError) as error:
            raise ConfigurationError(
                f"device {device!r} cannot be used ({str(error).splitlines()[0]}); try 'cpu'"
            ) from error
        if threads is not None:
            torch.set_num_threads(threads)
        folder, source = find_checkpoint(model, revision)
        digest = check_checkpoint(folder).checkpoint
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
            with _no_progress_bar():
                loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                    folder,
                    dtype=getattr(torch, dtype),
                    use_safetensors=True,
                    trust_remote_code=False,
                    local_files_only=True,
                    output_loading_info=True,
                )
        except Exception as error:
            raise CheckpointError(
                f"the checkpoint {str(model)!r} cannot be loaded: {error}"
            ) from error
        network, report = loaded
        lacking = sorted(report["missing_keys"]) + sorted(map(str, report["mismatched_keys"]))
        if lacking:
            raise CheckpointError(
                f"the checkpoint {str(model)!r} lacks weights of its architecture: "
                f"{', '.join(lacking[:5])}{', ...' if len(lacking) > 5 else ''}"
            )
        return cls(
            network.to(place).eval(),
            tokenizer,
            source={**source, "sha256": digest},
            temperature=temperature,
            top_p=top_p,
            max_tokens=max_tokens,
        )

    def describe(self) -> dict[str, JSON]:
        """Return what identifies this policy in ``config.json``; part of the resume key."""
        return {
            "backend": "transformers",
            **self._source,
            "tokenizer": self.serializer.fingerprint(),
            "history": self.serializer.history,
            "stop_ids": cast("JSON", sorted(self.stop_ids)),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
            "dtype": str(self.runner.dtype).removeprefix("torch."),
            "device": self.runner.device.type,
            # Sums are split among threads, so their number moves the last digits of logits.
            "threads": torch.get_num_threads() if self.runner.device.type == "cpu" else None,
        }

    def open(self, episodes: Sequence[Episode]) -> TransformersSession:
        """Start a session over the episodes of a chunk."""
        return TransformersSession(self, episodes)

    def score(
        self, sequences: Sequence[Sequence[int]], temperature: float | None = None
    ) -> list[Scores]:
        """Teacher-force token sequences: log-probability and entropy at every token.

        Args:
            sequences: Token ids; each sequence stands alone and may be of any length.
            temperature: Temperature of the distributions; ``None`` is the policy's own (1 if that
                is 0).

        Returns:
            One :class:`Scores` per sequence.

        Raises:
            PolicyError: A sequence is longer than the model's context or holds an unknown id.
        """
        heat = (self.temperature or 1.0) if temperature is None else temperature
        if heat <= 0:
            raise ConfigurationError(f"a score's temperature must be > 0, got {heat}")
        for index, ids in enumerate(sequences):
            if len(ids) > self.context:
                raise PolicyError(
                    f"sequence {index} has {len(ids)} tokens, the model's context {self.context}"
                )
            if len(ids) and not 0 <= min(ids) <= max(ids) < self.vocabulary:
                raise PolicyError(
                    f"sequence {index} holds an id outside the vocabulary [0, {self.vocabulary})"
                )
        scores = [Scores(np.full(len(s), np.nan), np.full(len(s), np.nan)) for s in sequences]
        pieces = [_Piece(i, 0, s) for i, s in enumerate(sequences) if len(s) > 1]
        limit = min(PACKED_TOKENS, LOGIT_ELEMENTS // self.vocabulary)
        with self.runner.borrowed():
            for batch in _batches(pieces, limit):
                logits = self.runner.run(batch, None, every=True)[:, : self.vocabulary]
                begin = 0
                # One at a time: distributions take several times the memory of their logits.
                for piece in batch:
                    end = begin + len(piece.ids)
                    own = logits[begin : end - 1]
                    if own.dtype not in (torch.float32, torch.float64):
                        own = own.float()
                    logprobs = (own / heat).log_softmax(-1)
                    entropies = torch.special.entr(logprobs.exp()).sum(-1)
                    following = torch.tensor(piece.ids[1:], device=own.device)
                    chosen = logprobs.gather(-1, following[:, None])[:, 0]
                    scores[piece.row].logprobs[1:] = chosen.cpu().numpy()
                    scores[piece.row].entropies[1:] = entropies.cpu().numpy()
                    begin = end
        return scores

    def score_branches(
        self,
        trunks: Sequence[Sequence[int]],
        branches: Sequence[Sequence[Branch]],
        shared: Sequence[int] | None = None,
    ) -> list[list[NDArray[np.float64]]]:
        """Teacher-force other continuations of what token sequences begin with.

        Each sequence is computed once. Its branches are then taken from its end to its beginning:
        each overwrites in the cache what lies behind its beginning, which those before it do not
        need.

        Args:
            trunks: Token ids, one sequence a row.
            branches: Of each sequence, by ascending position.
            shared: How many of each sequence's first tokens are those of the nearest sequence
                before it that shares none; they are copied, not computed. ``None`` for no sharing.

        Returns:
            For each branch the log-probabilities of its scored tokens, nats, at the policy's
            temperature (1 if that is 0).

        Raises:
            PolicyError: A branch does not fit the model's context.
            ValueError: A branch is not within its sequence, or asks for its first token.
        """
        heat = self.temperature or 1.0
        found = [[np.zeros(0) for _ in row] for row in branches]
        for row, own in zip(trunks, branches, strict=True):
            for k, branch in enumerate(own):
                if branch.at + len(branch.ids) > self.context:
                    raise PolicyError(
                        f"a branch ends after {branch.at + len(branch.ids)} tokens, the model's "
                        f"context is {self.context}"
                    )
                before = own[k - 1].at if k else 0
                if not before <= branch.at <= len(row) or branch.scored >= len(branch.ids):
                    raise ValueError(
                        "branches must lie within their sequence, in ascending order, and not ask "
                        f"for their first token, got {branch.at} after {before} of {len(row)}"
                    )
        cache = _Cache()
        ends = [max((branch.at for branch in row), default=0) for row in branches]
        limit = min(PACKED_TOKENS, LOGIT_ELEMENTS // self.vocabulary)
        longest = max((b.at + len(b.ids) for row in branches for b in row), default=0)
        leaders: list[_Piece] = []
        followers: list[_Piece] = []
        copies: list[tuple[int, int]] = []
        for i, end in enumerate(ends):
            known = min(shared[i], end, ends[leaders[-1].row]) if shared and leaders else 0
            if known:
                copies.append((leaders[-1].row, i))
                if known < end:
                    followers.append(_Piece(i, known, trunks[i][known:end]))
            else:
                leaders.append(_Piece(i, 0, trunks[i][:end]))
        with self.runner.borrowed():
            cache.reserve(len(trunks), longest)
            for batch in _batches([piece for piece in leaders if piece.ids], limit):
                self.runner.run(batch, cache)
            if copies:
                cache.copy([i for i, _ in copies], [j for _, j in copies], max(ends))
            for batch in _batches(followers, limit):
                self.runner.run(batch, cache)
            for k in reversed(range(max(map(len, branches), default=0))):
                due = [i for i, row in enumerate(branches) if k < len(row)]
                due.sort(key=lambda i: (branches[i][k].at == 0, i))
                pieces = [_Piece(i, branches[i][k].at, branches[i][k].ids) for i in due]
                for batch in _batches(pieces, limit):
                    logits = self.runner.run(batch, cache, every=True)[:, : self.vocabulary]
                    end = 0
                    for piece in batch:
                        end += len(piece.ids)
                        n = branches[piece.row][k].scored
                        own_logits = logits[end - n - 1 : end - 1]
                        if own_logits.dtype not in (torch.float32, torch.float64):
                            own_logits = own_logits.float()
                        following = torch.tensor(
                            piece.ids[len(piece.ids) - n :], dtype=torch.long, device=logits.device
                        )
                        logprobs = (own_logits / heat).log_softmax(-1)
                        chosen = logprobs.gather(-1, following[:, None])[:, 0]
                        found[piece.row][k] = chosen.double().cpu().numpy()
        return found


def _batches(pieces: Sequence[_Piece], limit: int) -> Iterator[list[_Piece]]:
    """Cut pieces into runs of at most ``limit`` tokens, or of one piece."""
    batch: list[_Piece] = []
    tokens = 0
    for piece in pieces:
        if batch and tokens + len(piece.ids) > limit:
            yield batch
            batch, tokens = [], 0
        batch.append(piece)
        tokens += len(piece.ids)
    if batch:
        yield batch


# ------------------------------------------------------------------ sessions
@dataclasses.dataclass
class _Track(Conversation):
    """A conversation and its place in the cache.

    Attributes:
        cached: How many of its tokens are in the cache.
        row: Its cache row, -1 if it has none.
    """

    cached: int = 0
    row: int = -1


class TransformersSession:
    """Replies for the episodes of one chunk; see :meth:`TransformersPolicy.open`."""

    def __init__(self, policy: TransformersPolicy, episodes: Sequence[Episode]) -> None:
        self._policy = policy
        self._tracks = {id(episode): _Track(episode) for episode in episodes}
        self._cache = _Cache()

    def close(self) -> None:
        """Free the cache."""
        self._cache = _Cache()
        self._tracks = {}

    def reply(self, episodes: Sequence[Episode]) -> list[Reply | PolicyError]:
        """One reply per episode, in order.

        An episode that is left out is taken to be over: its cache row may be given up. Should it
        come back, its conversation is computed anew.

        Args:
            episodes: Some of the session's episodes, each ending in a user message.

        Returns:
            Replies, or a :class:`PolicyError` where the model's context does not hold the
            conversation and a whole reply.

        Raises:
            ValueError: An episode does not belong to this session, no reply is due in it, or its
                conversation is not the one so far.
        """
        policy = self._policy
        due = read_due(self._tracks, episodes, policy.serializer)
        tracks = [track for track in due if len(track.ids) < policy.context]
        answers: dict[int, Reply | PolicyError] = {}
        if tracks:
            with policy.runner.borrowed():
                self._seat(tracks)
                tracks.sort(key=lambda track: track.row)
                for track, answer in zip(tracks, self._generate(tracks), strict=True):
                    answers[id(track)] = answer
        return [answers.get(id(track)) or overflow(policy.context, len(track.ids)) for track in due]

    def _seat(self, tracks: Sequence[_Track]) -> None:
        """Give every track a cache row; compact when enough rows are idle."""
        seated = sorted((track for track in tracks if track.row >= 0), key=lambda t: t.row)
        idle = self._cache.rows - len(seated)
        if idle and idle >= DEAD_SHARE * self._cache.rows:
            self._cache.keep([track.row for track in seated])
            for track in self._tracks.values():
                track.row = -1
            for row, track in enumerate(seated):
                track.row = row
        # Rows of like length next to each other waste the least attention.
        waiting = sorted((t for t in tracks if t.row < 0), key=lambda track: len(track.ids))
        for row, track in enumerate(waiting, start=self._cache.rows):
            track.row, track.cached = row, 0
        self._cache.reserve(self._cache.rows + len(waiting), max(len(t.ids) for t in tracks))

    def _prefill(self, tracks: Sequence[_Track]) -> torch.Tensor:
        """Bring the cache up to the conversations' ends; return the last logits of each track."""
        leaders: dict[tuple[int, ...], int] = {}
        source = list(range(len(tracks)))
        for index, track in enumerate(tracks):
            if track.cached == 0:
                source[index] = leaders.setdefault(tuple(track.ids), index)
        order = [i for i, j in enumerate(source) if i == j]
        order.sort(key=lambda i: tracks[i].cached == 0)
        pieces = [_Piece(t.row, t.cached, t.ids[t.cached :]) for t in (tracks[i] for i in order)]
        logits = torch.cat(
            [
                self._policy.runner.run(batch, self._cache)[:, : self._policy.vocabulary]
                for batch in _batches(pieces, PACKED_TOKENS)
            ]
        )
        copied = [(source[i], i) for i in range(len(tracks)) if source[i] != i]
        if copied:
            self._cache.copy(
                [tracks[i].row for i, _ in copied],
                [tracks[j].row for _, j in copied],
                max(len(tracks[j].ids) for _, j in copied),
            )
        for track in tracks:
            track.cached = len(track.ids)
        place = {index: k for k, index in enumerate(order)}
        return logits[[place[i] for i in source]]

    def _generate(self, tracks: Sequence[_Track]) -> list[Reply | PolicyError]:
        """One reply per track; tracks are in row order."""
        policy = self._policy
        prompt = [len(track.ids) for track in tracks]
        uniforms = np.stack([_uniforms(track.episode, policy.max_tokens) for track in tracks])
        tokens: list[list[int]] = [[] for _ in tracks]
        logprobs: list[list[float]] = [[] for _ in tracks]
        live = list(range(len(tracks)))
        logits = self._prefill(tracks)
        for step in range(policy.max_tokens):
            chosen, scores = draw(logits, policy.temperature, policy.top_p, uniforms[live, step])
            going = []
            for index, token, score in zip(live, chosen.tolist(), scores.tolist(), strict=True):
                tokens[index].append(token)
                logprobs[index].append(score)
                if token not in policy.stop_ids and prompt[index] + step + 1 < policy.context:
                    going.append(index)
            live = going
            if not live or step + 1 == policy.max_tokens:
                break
            pieces = []
            for index in live:
                track = tracks[index]
                pieces.append(_Piece(track.row, track.cached, tokens[index][-1:]))
                track.cached += 1
            logits = policy.runner.run(pieces, self._cache)[:, : policy.vocabulary]
        return [
            self._finish(track, tokens[i], logprobs[i], prompt[i]) for i, track in enumerate(tracks)
        ]

    def _finish(
        self, track: _Track, tokens: list[int], logprobs: list[float], prompt: int
    ) -> Reply | PolicyError:
        policy = self._policy
        stopped = tokens[-1] in policy.stop_ids
        if not stopped and len(tokens) < policy.max_tokens:
            return overflow(policy.context, prompt + len(tokens))
        return Reply(
            text=track.say(tokens, policy.serializer),
            token_ids=tuple(tokens),
            logprobs=tuple(logprobs),
            finish="stop" if stopped else "length",
            prompt_tokens=prompt,
        )


def _uniforms(episode: Episode, n: int) -> NDArray[np.float64]:
    """Numbers in [0, 1) for the next reply: Philox keyed by the episode's seed and its turn."""
    turn = sum(message.role == "assistant" for message in episode.messages)
    key = np.array([episode.seed % 2**64, turn], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).random(n)


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    logging: Any = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
