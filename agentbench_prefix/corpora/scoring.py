"""Models that score trajectories by teacher forcing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentbench_prefix import registry
from agentbench_prefix.corpora.recipe import Scoring
from agentbench_prefix.corpora.schema import Conversation, ModelEntry, SidecarRow, to_messages
from agentbench_prefix.corpora.sidecars import sidecar
from agentbench_prefix.errors import CheckpointError, ConfigurationError, UnknownNameError
from agentbench_prefix.policies.tokens import check_checkpoint, find_checkpoint
from agentbench_prefix.serialization import Layout


class ScoredConversation(NamedTuple):
    """A conversation as a model sees it.

    Attributes:
        layout: Its tokens.
        logprobs: ``[tokens]``, nats; entry ``u`` scores token ``u`` by the logits at ``u - 1``;
            the first is NaN.
        entropies: ``[tokens]``, nats, of the distribution that scores each token; ``None`` where
            the back end does not give them.
    """

    layout: Layout
    logprobs: NDArray[np.float64]
    entropies: NDArray[np.float64] | None


@dataclasses.dataclass
class Scorer:
    """A model, loaded.

    Attributes:
        scoring: What the recipe says of it.
        entry: What the manifest says of it.
        policy: A transformers or vLLM policy.
        tokens: Tokens sent through the model so far.
    """

    scoring: Scoring
    entry: ModelEntry
    policy: Any
    tokens: int = 0

    @property
    def label(self) -> str:
        """``<dialogue>/<model>``, the place of its sidecars."""
        return f"{self.scoring.dialogue}/{self.scoring.label}"

    def score(self, conversations: Sequence[Conversation]) -> list[ScoredConversation]:
        """Score whole conversations, one forward pass each, batched.

        Raises:
            PolicyError: A conversation is longer than the model's context.
        """
        serializer = self.policy.serializer
        layouts = [serializer.lay_out(to_messages(c.messages)) for c in conversations]
        self.tokens += sum(len(layout.ids) for layout in layouts)
        found: list[ScoredConversation] = []
        for begin in range(0, len(layouts), self.scoring.batch):
            batch = layouts[begin : begin + self.scoring.batch]
            for layout, scores in zip(batch, self._forward(batch), strict=True):
                found.append(ScoredConversation(layout, *scores))
        return found

    def sidecar(
        self, query_id: str, scored: ScoredConversation, trainable: Sequence[bool], turns: int
    ) -> SidecarRow:
        """The sidecar of one cut of a conversation that this model scored.

        Args:
            query_id: The query.
            scored: The whole conversation.
            trainable: One flag per turn.
            turns: Turns before the cut.
        """
        return sidecar(
            query_id,
            scored.layout,
            trainable,
            turns,
            scored.logprobs,
            name=self.scoring.label,
            model=self.entry,
            backend=self.scoring.backend,
            dtype=self.scoring.dtype,
            temperature=self.scoring.temperature,
        )

    def _forward(
        self, layouts: Sequence[Layout]
    ) -> list[tuple[NDArray[np.float64], NDArray[np.float64] | None]]:
        ids = [layout.ids for layout in layouts]
        if self.scoring.backend == "vllm":
            return [(np.asarray(one, dtype=np.float64), None) for one in self.policy.score(ids)]
        return [(s.logprobs, s.entropies) for s in self.policy.score(ids, self.scoring.temperature)]


def load_scorer(scoring: Scoring, env_id: str) -> Scorer:
    """Load a recipe's model.

    Args:
        scoring: What to load.
        env_id: Environment, for a method's shipped checkpoint.

    Raises:
        UnknownNameError: It is neither a method, nor a folder, nor a Hub id.
        CheckpointError: It is not there, or not the one the recipe names by its hash.
        ConfigurationError: The back end cannot do what is asked.
    """
    given: Any = scoring.model
    source = {"model": scoring.model}
    if scoring.model in registry.method_names():
        given = registry.method(scoring.model).checkpoint(env_id)
        source = {"method": scoring.model}
        if given is None:
            raise CheckpointError(
                f"method {scoring.model!r} ships no checkpoint for {env_id}: train one and give "
                "its folder"
            )
    elif "/" not in scoring.model and not Path(scoring.model).is_dir():
        raise UnknownNameError(
            "model", scoring.model, registry.method_names(), "Or give a folder or a Hub id."
        )
    found = find_checkpoint(given, scoring.revision)
    if found.source:
        source = {key: str(value) for key, value in found.source.items()}
    policy: Any
    if scoring.backend == "vllm":
        if scoring.temperature != 1:
            raise ConfigurationError(
                f"vLLM scores prompts at temperature 1 only, got {scoring.temperature}: use the "
                "transformers back end"
            )
        from agentbench_prefix.policies.vllm import VLLMPolicy

        policy = VLLMPolicy.load(found, dtype=scoring.dtype)
    else:
        from agentbench_prefix.policies.transformers import TransformersPolicy

        # One thread: sums are split among threads, and results are to repeat to the last digit.
        policy = TransformersPolicy.load(found, dtype=scoring.dtype, threads=1)
    hashes = check_checkpoint(found.folder)
    if scoring.model_sha256 not in (None, hashes.model):
        raise CheckpointError(
            f"the weights of {scoring.model!r} have the hash {hashes.model}, the recipe wants "
            f"{scoring.model_sha256}: give the model that was meant, or change the recipe"
        )
    entry = ModelEntry(
        checkpoint_sha256=hashes.checkpoint,
        model_sha256=hashes.model,
        vocabulary=policy.vocabulary,
        tokenizer=policy.serializer.fingerprint(),
        dialogue=scoring.dialogue,
        source=source,
    )
    return Scorer(scoring, entry, policy)
