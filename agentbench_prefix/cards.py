"""The card of a checkpoint: what it is, what it was trained on, how it did."""

from __future__ import annotations

import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from agentbench_prefix.errors import CheckpointError
from agentbench_prefix.files import write_json_atomic

CARD = "agentbench_card.json"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelDescription(_Part):
    """The network.

    Attributes:
        architecture: e.g. ``"Qwen3ForCausalLM"``.
        parameters: Number of parameters; tied ones count once.
    """

    architecture: str
    parameters: int


class TrainingDescription(_Part):
    """How it was trained.

    Attributes:
        recipe: The recipe, resolved.
        seed: Seed of the run.
        data: What it learned from: sources, counts, hashes.
        steps: Optimizer steps.
        tokens: Training tokens.
        minutes: Wall-clock minutes.
        code_version: See :func:`code_version`.
        command: Command that makes the checkpoint.
    """

    recipe: dict[str, JsonValue]
    seed: int
    data: dict[str, JsonValue]
    steps: int
    tokens: int
    minutes: float
    code_version: str
    command: str


class CheckpointCard(_Part):
    """Card of a checkpoint folder, stored in it as ``agentbench_card.json``.

    Attributes:
        method: Method that trained it.
        env_id: Environment it plays.
        data_hash: Hash of that environment's data at training time.
        dialogue: Label of the dialogue it was taught in, e.g. ``"compact@1"``.
        max_tokens: Bound on one reply, in tokens.
        tokenizer_fingerprint: :meth:`ChatSerializer.fingerprint` of its tokenizer.
        model_sha256: SHA-256 of ``model.safetensors``.
        model: The network.
        training: How it was trained.
        results: Measured results, each with its configuration.
        contamination: Test goals and their parts against the training data.
        licence: Licence of the weights.
    """

    method: str
    env_id: str
    data_hash: str
    dialogue: str
    max_tokens: int
    tokenizer_fingerprint: str
    model_sha256: str
    model: ModelDescription
    training: TrainingDescription
    results: dict[str, JsonValue] = {}
    contamination: dict[str, JsonValue] = {}
    licence: str

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """Read a checkpoint folder's card, ``None`` if it has none (a model made elsewhere).

        Raises:
            CheckpointError: There is a card that cannot be read.
        """
        path = folder / CARD
        if not path.is_file():
            return None
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            where = "; ".join(
                f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors()[:3]
            )
            raise CheckpointError(
                f"{path} is not a checkpoint card ({where}): mend it, or remove it to use the "
                "model without its defaults"
            ) from error

    def save(self, folder: Path) -> Path:
        """Write the card into a checkpoint folder, whole or not at all; return its path."""
        write_json_atomic(folder / CARD, self.model_dump())
        return folder / CARD


def code_version() -> str:
    """Return what identifies this library's code.

    In a git checkout, the commit, with ``-dirty`` if tracked files differ from it; else the
    version of the installed distribution.
    """
    root = Path(__file__).parents[1]
    git = shutil.which("git")
    if git is not None and (root / ".git").exists():
        found = subprocess.run(  # noqa: S603
            [git, "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            check=False,
        )
        if found.returncode == 0:
            return found.stdout.strip()
    try:
        return version("agentbench-prefix")
    except PackageNotFoundError:
        return "unknown"
