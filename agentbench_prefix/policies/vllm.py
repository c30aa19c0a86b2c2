"""Policy that runs a causal language model with vLLM's offline engine: tokens in, tokens out.

vLLM reports log-probabilities either before temperature (``raw_logprobs``) or after the top-p cut
(``processed_logprobs``). What :class:`~agentbench_prefix.policies.base.Reply` asks for lies in
between. Without a top-p cut the latter is just that. With one, :class:`TemperedLogSoftmax` turns
the logits into log-probabilities at the sampling temperature before vLLM makes its cut: the cut and
the draw see the same distribution, and the processed *logit* of a drawn token, which no cut
changes, is its log-probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentbench_prefix.env import JSON
from agentbench_prefix.errors import (
    CheckpointError,
    ConfigurationError,
    MissingExtraError,
    PolicyError,
)
from agentbench_prefix.files import canonical_json
from agentbench_prefix.policies.base import Episode, Reply, reply_seed
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
    import vllm
    from vllm.inputs import TokensPrompt
    from vllm.platforms import current_platform
    from vllm.v1.sample.logits_processor import LogitsProcessor as LogitsProcessorV1
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2
except ImportError as error:
    raise MissingExtraError("the vLLM back end", "vllm") from error

_TEMPERATURE = "agentbench_prefix_temperature"
_OWN_ARGUMENTS = frozenset(
    {
        "additional_config",
        "generation_config",
        "hf_token",
        "logits_processors",
        "logprobs_mode",
        "runner",
        "skip_tokenizer_init",
        "tokenizer",
        "tokenizer_revision",
        "trust_remote_code",
        "worker_extension_cls",
    }
)
"""Engine arguments that the policy sets itself, or that may not be set."""
_NEUTRAL_ARGUMENTS = frozenset(
    {
        "cpu_offload_gb",
        "disable_log_stats",
        "download_dir",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
    }
)
"""Engine arguments that change no reply."""


class TemperedLogSoftmax(LogitsProcessorV1, LogitsProcessorV2):  # type: ignore[misc]
    """Replaces logits by log-probabilities at the policy's temperature.

    Serves both of vLLM's model runners; the requests themselves then ask for temperature 1.

    Args:
        config: The engine's configuration; carries the temperature.
        state: What the runner hands over besides; unused.
    """

    def __init__(self, config: Any, *state: Any) -> None:  # noqa: ARG002
        self._temperature: float = config.additional_config[_TEMPERATURE]

    def is_argmax_invariant(self) -> bool:
        """No: runs before the engine's own temperature."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Nothing is kept between steps."""

    def apply(self, logits: torch.Tensor, context: Any = None) -> torch.Tensor:  # noqa: ARG002
        """``log_softmax(logits / temperature)`` of ``[rows, vocabulary]``."""
        return (logits / self._temperature).log_softmax(-1, dtype=torch.float32)


class KnownTokens:
    """What is added to the engine's workers, so that distributions are over the tokenizer's ids.

    No logits processor sees the logits of prompts.
    """

    get_model: Callable[[], Any]
    """The worker's own."""

    def agentbench_prefix_leave_out(self, vocabulary: int) -> None:
        """Let the model's logits of shape ``[rows, ids]`` be ``-inf`` from id ``vocabulary`` on."""
        model = self.get_model()
        compute = model.compute_logits

        def compute_logits(*arguments: Any, **named: Any) -> torch.Tensor | None:
            logits: torch.Tensor | None = compute(*arguments, **named)
            if logits is not None:  # else another worker has them
                logits[..., vocabulary:] = -math.inf
            return logits

        model.compute_logits = compute_logits


class VLLMPolicy:
    """Plays with vLLM's offline engine; make one with :meth:`load`.

    The conversation is sent as token ids, replies as they were generated, so that vLLM's prefix
    cache serves all of it but the newest observation. Every request has a seed of its own
    (:func:`~agentbench_prefix.policies.base.reply_seed`); what shares its batch may still shift
    logits by rounding.

    Ids that the tokenizer does not know (a vocabulary padded beyond ``len(tokenizer)``) are never
    drawn, and log-probabilities, of replies and of prompts, are those of the distribution over the
    ids that exist.

    Args:
        engine: The engine, set up as :meth:`load` does it.
        tokenizer: The model's ``transformers`` tokenizer, with a chat template.
        stop_ids: Tokens that end a reply besides the template's own.
        source: What identifies weights and engine; goes into :meth:`describe`.
        temperature: Sampling temperature.
        top_p: Mass of most probable tokens to sample from.
        max_tokens: Most tokens in one reply.

    Raises:
        CheckpointError: Model and tokenizer do not fit each other.
        ConfigurationError: The engine cannot leave out ids that the tokenizer lacks.
    """

    def __init__(
        self,
        engine: vllm.LLM,
        tokenizer: Any,
        *,
        stop_ids: Sequence[int],
        source: Mapping[str, JSON],
        temperature: float,
        top_p: float,
        max_tokens: int,
    ) -> None:
        config = engine.llm_engine.vllm_config
        self.engine = engine
        self.serializer = ChatSerializer(tokenizer)
        self.vocabulary = len(tokenizer)
        rows: int = config.model_config.get_vocab_size()
        if self.vocabulary > rows:
            raise CheckpointError(
                f"the tokenizer has {self.vocabulary} tokens but the model only {rows}: they do "
                "not belong together; use the tokenizer the model was trained with"
            )
        self.stop_ids = frozenset([self.serializer.end_id, *stop_ids])
        self.temperature = temperature
        self.top_p = top_p
        self.max_tokens = max_tokens
        self.context: int = config.model_config.max_model_len
        self._source = {
            **source,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "device": current_platform.device_type,
            "context": self.context,
            "v2_model_runner": config.use_v2_model_runner,
        }
        if rows > self.vocabulary:
            try:
                engine.collective_rpc(
                    KnownTokens.agentbench_prefix_leave_out.__name__, args=(self.vocabulary,)
                )
            except Exception as error:
                raise ConfigurationError(
                    f"the model has {rows} ids but the tokenizer only {self.vocabulary}, and this "
                    f"engine cannot leave out the rest ({error}): load the policy with "
                    "VLLMPolicy.load"
                ) from error
        # Workers that share out the rows of the logits of replies compute them by another method.
        self._padding = dict.fromkeys(range(self.vocabulary, rows), -math.inf) or None

    @classmethod
    def load(
        cls,
        model: str | Path | FoundCheckpoint,
        revision: str | None = None,
        device: str | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_tokens: int = 64,
        dtype: str = "float32",
        **engine_arguments: Any,
    ) -> VLLMPolicy:
        """Load a checkpoint into an engine: a local folder, or a Hub id at a pinned revision.

        Args:
            model: Folder with ``config.json``, ``*.safetensors`` and a tokenizer, or a Hub id, or
                what :func:`find_checkpoint` found.
            revision: Branch, tag or commit of a Hub id; :meth:`describe` records the commit.
            device: ``None``, or the kind of device this build of vLLM is for (``"cuda"``,
                ``"cpu"``).
            temperature: 0 (greedy) or in [0.01, 2], the range in which vLLM samples as told.
            top_p: In (0, 1].
            max_tokens: Most tokens in one reply.
            dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
            **engine_arguments: Further arguments of ``vllm.LLM``, e.g. ``max_model_len``.

        Raises:
            CheckpointError: Nothing usable is there, or vLLM cannot run it.
            ConfigurationError: A setting is out of range, or not one of the engine's.
        """
        if not (temperature == 0 or 0.01 <= temperature <= 2):
            raise ConfigurationError(
                f"vLLM samples at temperature 0 or in [0.01, 2], got {temperature}"
            )
        if not 0 < top_p <= 1:
            raise ConfigurationError(f"top_p must be in (0, 1], got {top_p}")
        if max_tokens < 1:
            raise ConfigurationError(f"max_tokens must be >= 1, got {max_tokens}")
        kind: str = current_platform.device_type
        if device is not None and device != kind:
            raise ConfigurationError(
                f"this build of vLLM runs on {kind!r}, but device {device!r} was asked for: say "
                f"{kind!r} (CUDA_VISIBLE_DEVICES chooses among several), or install another build"
            )
        if clash := sorted(_OWN_ARGUMENTS & engine_arguments.keys()):
            raise ConfigurationError(f"engine arguments {clash} may not be set")
        told = {k: v for k, v in engine_arguments.items() if k not in _NEUTRAL_ARGUMENTS}
        try:
            canonical_json(told)
        except TypeError as error:
            raise ConfigurationError(
                f"engine arguments must be JSON values, so that results can record them: {error}"
            ) from error
        folder, source = find_checkpoint(model, revision)
        digest = check_checkpoint(folder).checkpoint
        cut: dict[str, Any] = {"logprobs_mode": "processed_logprobs"}
        if _rewrites_logits(temperature, top_p):
            cut = {
                "logprobs_mode": "processed_logits",
                "logits_processors": [f"{__name__}:{TemperedLogSoftmax.__qualname__}"],
                "additional_config": {_TEMPERATURE: temperature},
            }
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
            engine = vllm.LLM(
                str(folder),
                dtype=dtype,
                generation_config="vllm",
                trust_remote_code=False,
                worker_extension_cls=f"{__name__}.{KnownTokens.__qualname__}",
                **{"enable_prefix_caching": True, **engine_arguments},
                **cut,
            )
        except TypeError as error:
            raise ConfigurationError(f"vLLM does not take these arguments: {error}") from error
        except Exception as error:
            raise CheckpointError(
                f"vLLM cannot run the checkpoint {str(model)!r}: {error}"
            ) from error
        return cls(
            engine,
            tokenizer,
            stop_ids=_stop_ids(folder),
            source={
                **source,
                "sha256": digest,
                "engine_arguments": told,
                "versions": {
                    "torch": torch.__version__,
                    "transformers": transformers.__version__,
                    "vllm": vllm.__version__,
                },
            },
            temperature=float(temperature),
            top_p=float(top_p),
            max_tokens=max_tokens,
        )

    def describe(self) -> dict[str, JSON]:
        """Weights, tokenizer, sampling settings, engine arguments and versions."""
        return {
            "backend": "vllm",
            **self._source,
            "tokenizer": self.serializer.fingerprint(),
            "history": self.serializer.history,
            "stop_ids": [*sorted(self.stop_ids)],
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
        }

    def open(self, episodes: Sequence[Episode]) -> VLLMSession:
        """Start a session over the episodes of a chunk."""
        return VLLMSession(self, episodes)

    def close(self) -> None:
        """Shut the engine down and free its memory."""
        self.engine.llm_engine.engine_core.shutdown()

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Teacher-force token sequences at temperature 1, over the ids that the tokenizer has.

        Args:
            token_ids: Sequences, each shorter than the engine's context.

        Returns:
            Per sequence as many log-probabilities in nats as it has tokens: entry ``t`` is that of
            token ``t`` given those before it, entry 0 is NaN.

        Raises:
            ConfigurationError: The policy was loaded with a top-p cut, in which case the engine
                reports logits.
            PolicyError: A sequence is too long or holds an unknown id.
        """
        if _rewrites_logits(self.temperature, self.top_p):
            raise ConfigurationError("score needs a policy loaded with top_p=1")
        for index, ids in enumerate(token_ids):
            if len(ids) >= self.context:
                raise PolicyError(
                    f"sequence {index} has {len(ids)} tokens; they and one more must fit the "
                    f"engine's context of {self.context}"
                )
            if len(ids) and not 0 <= min(ids) <= max(ids) < self.vocabulary:
                raise PolicyError(
                    f"sequence {index} holds an id outside the vocabulary [0, {self.vocabulary})"
                )
        scores = [[math.nan] * len(ids) for ids in token_ids]
        scored = [index for index, ids in enumerate(token_ids) if len(ids) > 1]
        outputs = self.engine.generate(
            [TokensPrompt(prompt_token_ids=list(token_ids[index])) for index in scored],
            vllm.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False),
            use_tqdm=False,
        )
        for index, output in zip(scored, outputs, strict=True):
            entries = zip(token_ids[index][1:], output.prompt_logprobs[1:], strict=True)
            scores[index][1:] = [found[token].logprob for token, found in entries]
        return scores

    def _parameters(self, episode: Episode, room: int) -> vllm.SamplingParams:
        rewrites = _rewrites_logits(self.temperature, self.top_p)
        return vllm.SamplingParams(
            temperature=1.0 if rewrites else self.temperature,
            top_p=self.top_p,
            max_tokens=min(self.max_tokens, room),
            seed=reply_seed(episode),
            logprobs=0,
            logit_bias=self._padding,
            stop_token_ids=sorted(self.stop_ids),
            ignore_eos=True,  # the stop tokens are all there is
            detokenize=False,
        )


def _rewrites_logits(temperature: float, top_p: float) -> bool:
    return temperature > 0 and top_p < 1


def _stop_ids(folder: Path) -> list[int]:
    """Tokens at which the checkpoint's own generation settings stop."""
    try:
        settings = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:
        model = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
        settings = transformers.GenerationConfig.from_model_config(model)
    stop = settings.eos_token_id
    return stop if isinstance(stop, list) else [] if stop is None else [stop]


class VLLMSession:
    """Replies for the episodes of one chunk; see :meth:`VLLMPolicy.open`."""

    def __init__(self, policy: VLLMPolicy, episodes: Sequence[Episode]) -> None:
        self._policy = policy
        self._conversations = {id(episode): Conversation(episode) for episode in episodes}

    def close(self) -> None:
        """Forget the conversations; the engine lives on."""
        self._conversations = {}

    def reply(self, episodes: Sequence[Episode]) -> list[Reply | PolicyError]:
        """One reply per episode, in order.

        Args:
            episodes: Some of the session's episodes, each ending in a user message.

        Returns:
            Replies, or a :class:`PolicyError` where the engine's context does not hold the
            conversation and a whole reply.

        Raises:
            ValueError: An episode does not belong to this session, no reply is due in it, or its
                conversation is not the one so far.
        """
        policy = self._policy
        due = read_due(self._conversations, episodes, policy.serializer)
        fitting = [one for one in due if len(one.ids) < policy.context]
        outputs = policy.engine.generate(
            [TokensPrompt(prompt_token_ids=one.ids) for one in fitting],
            [policy._parameters(one.episode, policy.context - len(one.ids)) for one in fitting],
            use_tqdm=False,
        )
        answers = {
            id(one): self._finish(one, output.outputs[0])
            for one, output in zip(fitting, outputs, strict=True)
        }
        return [answers.get(id(one)) or overflow(policy.context, len(one.ids)) for one in due]

    def _finish(self, conversation: Conversation, output: Any) -> Reply | PolicyError:
        policy = self._policy
        tokens = list(output.token_ids)
        prompt = len(conversation.ids)
        stopped = output.finish_reason == "stop"
        if not stopped and len(tokens) < policy.max_tokens:
            return overflow(policy.context, prompt + len(tokens))
        return Reply(
            text=conversation.say(tokens, policy.serializer),
            token_ids=tuple(tokens),
            logprobs=tuple(
                found[token].logprob for token, found in zip(tokens, output.logprobs, strict=True)
            ),
            finish="stop" if stopped else "length",
            prompt_tokens=prompt,
        )
