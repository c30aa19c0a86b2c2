"""Tiny random models, a byte-level tokenizer and an environment that answers anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentbench_prefix.dialogue import Dialogue, parse_bare, render_bare
from agentbench_prefix.env import JSON, Outcome, TextEnv
from agentbench_prefix.errors import UnknownNameError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ANSWERS = dict.fromkeys(
    ("no_action", "empty_action", "multiple_actions", "nested_brackets", "unclosed_thinking"),
    "Say something.",
)


class EchoEnv(TextEnv):
    """Answers with the length of what was said; ends when told ``stop``."""

    env_id = "Echo-v0"
    default_max_turns = 6
    data_hash = "none"

    @classmethod
    def splits(cls) -> tuple[str, ...]:
        return ("train",)

    def tasks(self, split: str) -> tuple[str, ...]:
        return tuple(f"echo_{i}" for i in range(20))

    def family(self, task_id: str) -> str:
        return "echo"

    def _begin(self, task_id: str, options: Mapping[str, JSON]) -> str:
        if task_id not in self.tasks("train"):
            raise UnknownNameError("task_id", task_id, self.tasks("train"))
        return "Echo" + " and echo" * int(task_id.removeprefix("echo_"))

    def _act(self, action: str) -> Outcome:
        return Outcome(
            f"Said {len(action)} " + "x" * (len(action) % 7), terminated=action == "stop"
        )

    def _get_state(self) -> JSON:
        return None

    def _set_state(self, state: JSON) -> None:
        return None

    def fields(self, observation: str) -> dict[str, JSON]:
        return {}

    def dialogues(self) -> dict[str, Dialogue]:
        return {"compact": Dialogue("compact", 1, None, parse_bare, render_bare, ANSWERS, 8)}


def make_tokenizer() -> Any:
    """Byte-level tokens without merges, plus ChatML's special tokens: 259 in all."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def make_model(architecture: str = "qwen3", *, seed: int = 0, **changes: Any) -> Any:
    """A random decoder with grouped-query attention and a padded vocabulary (272 ids for 259)."""
    import torch
    import transformers

    settings: dict[str, Any] = {
        "vocab_size": 272,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **changes,
    }
    kinds = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
    }
    config, model = kinds[architecture]
    torch.manual_seed(seed)
    return model(config(**settings)).eval()
