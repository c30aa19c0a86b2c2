"""What a finished training run cost: ``summary.json`` in its folder.

Whoever trains writes it when the run is finished, beside ``checkpoint/``; leaderboards read it. It
needs neither torch nor transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, JsonValue, ValidationError

from agentbench_prefix.errors import ConfigurationError
from agentbench_prefix.files import canonical_json, sha256_text, write_json_atomic

if TYPE_CHECKING:
    from agentbench_prefix.corpora.reading import Corpus

SUMMARY = "summary.json"
CHECKPOINT = "checkpoint"
LOG = "log.jsonl"
CURVES = "curves.png"

M = TypeVar("M", bound=BaseModel)
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[FiniteFloat, Field(ge=0)]
Label = Annotated[str, Field(pattern=r"^[\w.+-]+$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

_OWN_TO_A_RUN = ("seed", "init")
"""Fields in which runs of one recipe differ."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Init(_Part):
    """What a run started from.

    Attributes:
        name: The method whose checkpoint it was, e.g. ``"sft"``; ``"scratch"`` for new weights.
            For a checkpoint given by its folder, the method that its card names.
        model_sha256: SHA-256 of its weights' file; ``None`` for new weights.
    """

    name: Label
    model_sha256: Sha256 | None = None


class Cost(_Part):
    """What one kind of preparation took.

    Attributes:
        rollouts: Episodes played.
        tokens: Tokens that a model generated or scored; 0 where no model took part.
        seconds: Wall time; ``None`` where it was not measured.
    """

    rollouts: Count = 0
    tokens: Count = 0
    seconds: Seconds | None = None


class Preprocessing(_Part):
    """What had to be done before, or beside, the training that a budget counts.

    Work that several runs share counts in full in each of them.

    Attributes:
        teacher: The teacher's episodes that the run learns from or starts in.
        sidecars: Scoring of prefixes under an old policy.
        probe: Episodes that measure how hard each task is.
        calibration: Episodes that calibrate a controller.
    """

    teacher: Cost = Cost()
    sidecars: Cost = Cost()
    probe: Cost = Cost()
    calibration: Cost = Cost()


class Spent(_Part):
    """What the training itself consumed.

    Attributes:
        steps: Optimizer steps.
        rollouts: Episodes the trained policy played, those that no update used included;
            evaluation during training is not counted.
        generated_tokens: Tokens it generated in them.
        learned_tokens: Tokens that carried loss, each time they did, summed over steps.
    """

    steps: Count
    rollouts: Count
    generated_tokens: Count
    learned_tokens: Count


class RunSummary(_Part):
    """Facts of a finished training run, stored in its folder as ``summary.json``.

    Attributes:
        format: Version of this layout.
        method: Registered method.
        variant: Which variant of it; empty for its main form. Part of a leaderboard row's name.
        env_id: Environment trained on, version included.
        data_hash: Hash of its data.
        dialogue: Label of the dialogue, e.g. ``"compact@1"``.
        tier: Size of the run, e.g. ``"cpu"``.
        init: What it started from.
        seed: Seed of the run.
        recipe: The recipe, resolved.
        corpora: SHA-256 of what was read of corpora, by ``"<name> <version> <file>"``.
        spent: What training consumed.
        preprocessing: What preparation consumed.
        wall_seconds: Wall time of training over all its parts, preparation and evaluation not
            included.
        device: What it ran on, e.g. ``"cpu"``.
        threads: CPU threads of torch.
        model_sha256: SHA-256 of the weights' file of the final checkpoint.
        code_version: See :func:`~agentbench_prefix.cards.code_version`.
        command: Command that trains it.
        diagnostics: Closing values of what the method logs, e.g. a mean over the last steps.
        notes: What a reader of the row must be told, e.g. that a term was saturated.
    """

    format: Literal[1] = 1
    method: Label
    variant: Annotated[str, Field(pattern=r"^[\w.+-]*$")] = ""
    env_id: str
    data_hash: str
    dialogue: str
    tier: Label
    init: Init
    seed: int
    recipe: dict[str, JsonValue]
    corpora: dict[str, Sha256] = {}
    spent: Spent
    preprocessing: Preprocessing = Preprocessing()
    wall_seconds: Seconds
    device: str = "cpu"
    threads: Annotated[int, Field(ge=1)] = 1
    model_sha256: Sha256
    code_version: str
    command: str
    diagnostics: dict[str, FiniteFloat] = {}
    notes: tuple[str, ...] = ()

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the summary of a run folder.

        Raises:
            ConfigurationError: There is none, or it is malformed; the message names the field.
        """
        return read_model(cls, folder / SUMMARY, "the summary of a finished training run")

    def save(self, folder: Path) -> Path:
        """Write ``folder/summary.json`` atomically and return its path."""
        write_json_atomic(folder / SUMMARY, self.model_dump(mode="json"))
        return folder / SUMMARY


def recipe_sha256(recipe: dict[str, Any]) -> str:
    """Hash of a resolved recipe without seed and init: equal for runs that may be averaged."""
    kept = {name: value for name, value in recipe.items() if name not in _OWN_TO_A_RUN}
    return sha256_text(canonical_json(kept))


def corpus_cost(
    corpus: Corpus, split: str, dialogue: str | None = None, model: str | None = None
) -> Preprocessing:
    """What a corpus cost whoever made it, as far as its files tell.

    Args:
        corpus: The corpus.
        split: The split that a run learns from.
        dialogue: Dialogue of the sidecars that the run uses; ``None`` if it uses none.
        model: Model of those sidecars.

    Returns:
        ``teacher``: the teacher's recorded episodes, unsolved ones included. ``sidecars``: tokens
        of the prompts that were scored; what choosing the cuts took is not recorded in a corpus.
    """
    files = corpus.manifest.files
    played = [files.get(f"{kind}/{split}.parquet") for kind in ("trajectories", "failures")]
    scored = 0
    if dialogue is not None and model is not None:
        scored = sum(row.prompt_tokens for row in corpus.sidecars(split, dialogue, model))
    return Preprocessing(
        teacher=Cost(rollouts=sum(entry.rows for entry in played if entry is not None)),
        sidecars=Cost(tokens=scored),
    )


def read_model(model: type[M], path: Path, what: str) -> M:
    """Read a JSON file into a model.

    Args:
        model: The model.
        path: The file.
        what: What the file should be, for errors.

    Raises:
        ConfigurationError: The file is missing or malformed; the message names file and fields.
    """
    try:
        return model.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"cannot read {path} ({error.strerror}), {what}") from error
    except ValidationError as error:
        raise ConfigurationError(f"{path} is not {what}: {describe(error)}") from error


def describe(error: ValidationError) -> str:
    """The first few faults of a value, each with the way to its field."""
    faults = [
        f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg']}" for e in error.errors()[:3]
    ]
    more = error.error_count() - len(faults)
    return "; ".join(faults) + (f"; and {more} more" if more > 0 else "")
