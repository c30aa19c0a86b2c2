"""Tiny random checkpoints and a toy environment, so that policies can be tested anywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import EchoEnv, make_model, make_tokenizer


@pytest.fixture
def echo_env() -> type[EchoEnv]:
    return EchoEnv


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Save a random checkpoint and return its folder."""

    def make(architecture: str = "qwen3", name: str = "model", **changes: Any) -> Path:
        folder = tmp_path / name
        make_model(architecture, **changes).save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
        return folder

    return make


@pytest.fixture
def checkpoint(make_checkpoint: Callable[..., Path]) -> Path:
    """Folder of a tiny random Qwen3 with grouped-query attention, and its tokenizer."""
    return make_checkpoint()
