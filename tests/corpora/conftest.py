"""A small valid corpus, built once by the real program with a tiny random model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "policies"))

SPLITS = {"train": "train", "held_out": "test"}


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random model of one layer that reads bytes."""
    from tiny import make_model, make_tokenizer

    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    make_model(num_hidden_layers=1, max_position_embeddings=8192).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_corpus(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a corpus: two splits of two tasks, two dialogues of which one was scored.

    Tests must not change it: copy it first.
    """
    from agentbench_prefix.corpora.build import build
    from agentbench_prefix.corpora.recipe import make_recipe

    recipe = make_recipe(
        {
            "name": "tiny",
            "licence": "Apache-2.0",
            "env_id": "TextCraft-v0",
            "splits": SPLITS,
            "tasks": 2,
            "teacher": {"kind": "oracle", "per_task": 2, "detours": 0.6},
            "dialogues": ["compact"],
            "strategies": {
                "change": {"kind": "entropy_change", "w": 5, "k": 2},
                "raw_entropy": {"kind": "raw_entropy", "k": 2},
                "ratios": {"kind": "fixed_ratio", "ratios": [0.3, 0.6]},
                "random": {"kind": "random", "k": 1},
            },
            "models": [{"dialogue": "compact", "model": str(tiny_checkpoint)}],
        }
    )
    folder = tmp_path_factory.mktemp("corpora") / "tiny"
    build(recipe, folder)
    return folder
