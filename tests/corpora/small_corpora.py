"""Small corpora written by hand, for tests of files and not of what is in them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from agentbench_prefix.corpora.reading import CARD, MANIFEST, RECIPE, Corpus
from agentbench_prefix.corpora.schema import (
    ChatMessage,
    Conversation,
    FileEntry,
    Manifest,
    TrajectoryRow,
    Turn,
)
from agentbench_prefix.corpora.storage import RowWriter
from agentbench_prefix.files import sha256_file, write_json_atomic


def small_row(task_id: str, observation: str) -> TrajectoryRow:
    turn = Turn(
        action="look",
        problem="",
        trainable=True,
        observation="a room",
        valid=True,
        reward=1.0,
    )
    said = [ChatMessage(role="user", content=observation)]
    said.append(ChatMessage(role="assistant", content="look"))
    return TrajectoryRow(
        trajectory_id=f"{task_id}/oracle/0",
        task_id=task_id,
        family="looking",
        env_id="Toy-v0",
        data_hash="0" * 64,
        arguments="{}",
        options="{}",
        teacher="oracle",
        sample=0,
        seed=0,
        success=True,
        reward=1.0,
        n_turns=1,
        plain_turns=1,
        first_observation=observation,
        turns=[turn],
        conversations=[Conversation(dialogue="compact@1", messages=said)],
    )


def write_small_corpus(
    folder: Path, *, version: str = "1", extra: dict[str, bytes] | None = None, **changes: Any
) -> Corpus:
    """Two Parquet files, a card, a recipe, and the files of ``extra``.

    Args:
        folder: Where to.
        version: Other versions have other rows in ``trajectories``.
        extra: Contents of further files by path.
        changes: Entries of the manifest to change.
    """
    noise = random.Random(version)
    for kind, text in (("trajectories", noise.randbytes(20_000).hex()), ("failures", "none")):
        with RowWriter(folder / kind / "train.parquet", kind) as writer:
            writer.write(small_row("t1", text))
    (folder / CARD).write_text("---\nlicense: apache-2.0\n---\n# Toys\n", encoding="utf-8")
    (folder / RECIPE).write_text("name: toys\n", encoding="utf-8")
    for name, content in (extra or {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    files = {
        path.relative_to(folder).as_posix(): FileEntry(
            sha256=sha256_file(path), size=path.stat().st_size, rows=path.suffix == ".parquet"
        )
        for path in paths
    }
    manifest: dict[str, Any] = {
        "format": 1,
        "name": "toys",
        "version": version,
        "licence": "Apache-2.0",
        "env_id": "Toy-v0",
        "data_hash": "0" * 64,
        "arguments": {},
        "recipe": {"name": "toys"},
        "dialogues": {"compact@1": "0" * 64},
        "splits": {"train": ["t1"]},
        "out_of_reach": {},
        "taught": [],
        "statuses": [],
        "models": {},
        "files": {name: entry.model_dump() for name, entry in files.items()},
        "code_version": "test",
        "created": "2026-01-01T00:00:00+00:00",
    }
    write_json_atomic(folder / MANIFEST, manifest | changes)
    return Corpus(folder, Manifest.model_validate(manifest))
