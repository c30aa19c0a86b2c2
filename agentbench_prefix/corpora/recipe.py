"""The recipe of a corpus, as one validated value."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agentbench_prefix.corpora.cuts import Strategy
from agentbench_prefix.errors import ConfigurationError
from agentbench_prefix.files import read_mapping

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
_Name = Annotated[str, Field(pattern=_NAME)]
# What the library datasets allows.
_Split = Annotated[str, Field(pattern=r"^\w+(\.\w+)*$")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class _Teacher(_Part):
    """What every teacher's section has.

    Attributes:
        per_task: Successful trajectories wanted of each task.
        attempts: Most episodes played of a task; what repeats another's actions is used only when
            these run out.
        seed: Seed of the attempts.
    """

    per_task: Annotated[int, Field(ge=1)] = 4
    attempts: Annotated[int, Field(ge=1)] = 16
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _enough_attempts(self) -> _Teacher:
        if self.attempts < self.per_task:
            raise ValueError(
                f"attempts ({self.attempts}) must be at least per_task ({self.per_task})"
            )
        return self


class OracleTeacher(_Teacher):
    """The environment's own teacher.

    Attributes:
        kind: ``"oracle"``.
        detours: Probability per turn of a look-around or a mistake, see :meth:`TextEnv.teacher`.
    """

    kind: Literal["oracle"] = "oracle"
    detours: Annotated[float, Field(ge=0, lt=1)] = 0.2

    @property
    def name(self) -> str:
        """Name in trajectory ids."""
        return self.kind


class OpenAITeacher(_Teacher):
    """A model behind an OpenAI-compatible endpoint; its key comes from OPENAI_API_KEY.

    Attributes:
        kind: ``"openai"``.
        base_url: Root of the API.
        model: Name of the model there.
        dialogue: Dialogue it plays in.
        temperature, top_p: Sampling.
        max_tokens: Bound on one reply in tokens; ``None`` takes the dialogue's.
        extra_body: Further fields of each request.
    """

    kind: Literal["openai"] = "openai"
    base_url: str
    model: str
    dialogue: str = "full"
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int | None = None
    extra_body: dict[str, Any] = Field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name in trajectory ids: the model's, without its owner."""
        return self.model.rpartition("/")[2]


class Scoring(_Part):
    """A model that scores trajectories: entropies for cuts, log-probabilities for sidecars.

    Attributes:
        dialogue: Name of the dialogue.
        model: A method (its shipped checkpoint), a folder, or a Hub id.
        name: Name in the corpus; by default the method, or the last part of folder or id.
        revision: Commit of a Hub id.
        model_sha256: SHA-256 of the weights' file that is meant; ``None`` takes what is there.
        backend: ``"transformers"`` or ``"vllm"``; the latter gives no entropies.
        dtype: Number format.
        temperature: Temperature of the distributions.
        batch: Trajectories scored together.
    """

    dialogue: str
    model: str
    name: str = ""
    revision: str | None = None
    model_sha256: str | None = None
    backend: Literal["transformers", "vllm"] = "transformers"
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32"
    temperature: Annotated[float, Field(gt=0)] = 1.0
    batch: Annotated[int, Field(ge=1)] = 16

    @property
    def label(self) -> str:
        """Name in the corpus."""
        return self.name or Path(self.model).name


class CorpusRecipe(_Part):
    """How a corpus is built.

    Attributes:
        name: Its name.
        version: Version of its content.
        licence: SPDX identifier of the licence it is released under.
        provenance: Further lines on where its content comes from, for the card.
        env_id: Environment.
        arguments: Arguments of the environment.
        splits: Split of the environment behind each split of the corpus.
        tasks: Only the first so many tasks of each split; ``None`` for all.
        teacher: Who plays.
        dialogues: Names of the dialogues that queries are written in.
        strategies: Cut strategies by name.
        models: Models that score.
    """

    name: _Name
    version: str = "1.0"
    licence: Annotated[str, Field(min_length=1)]
    provenance: tuple[str, ...] = ()
    env_id: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    splits: dict[_Split, str] = Field(default_factory=lambda: {"train": "train"}, min_length=1)
    tasks: Annotated[int, Field(ge=1)] | None = None
    teacher: Annotated[OracleTeacher | OpenAITeacher, Field(discriminator="kind")]
    dialogues: tuple[str, ...] = ()
    strategies: dict[_Name, Strategy] = Field(default_factory=dict)
    models: tuple[Scoring, ...] = ()

    @model_validator(mode="after")
    def _fits(self) -> CorpusRecipe:
        if len(set(self.dialogues)) < len(self.dialogues):
            raise ValueError(f"a dialogue is named twice: {list(self.dialogues)}")
        for scoring in self.models:
            if not re.fullmatch(_NAME, scoring.label):
                raise ValueError(
                    f"model {scoring.model!r} would be called {scoring.label!r}, which is no name "
                    "of a folder: give it a name of letters, digits, '.', '_' and '-'"
                )
            if scoring.dialogue not in self.dialogues:
                raise ValueError(
                    f"model {scoring.label!r} scores dialogue {scoring.dialogue!r}, which is not "
                    f"among dialogues {list(self.dialogues)}"
                )
        labels = [(scoring.dialogue, scoring.label) for scoring in self.models]
        if len(set(labels)) < len(labels):
            raise ValueError(f"two models have the same dialogue and name: {labels}")
        scored = {s.dialogue for s in self.models if s.backend == "transformers"}
        if clash := sorted({"raw", "all"} & self.strategies.keys()):
            raise ValueError(f"a strategy may not be called {clash[0]!r}: tables use that name")
        for name, strategy in self.strategies.items():
            lacking = set(self.dialogues) - scored
            if strategy.needs_entropies and lacking:
                raise ValueError(
                    f"strategy {name!r} needs entropies, but no model with the transformers "
                    f"backend scores dialogue {sorted(lacking)[0]!r}"
                )
        return self


def load_corpus_recipe(path: Path, **overrides: Any) -> CorpusRecipe:
    """Read a recipe from YAML.

    Args:
        path: The file.
        **overrides: Fields to replace; ``None`` leaves a field as it is.

    Raises:
        ConfigurationError: The file is missing or a field is wrong; the message names the field.
    """
    return make_recipe(read_mapping(path, "corpus recipe", **overrides), str(path))


def make_recipe(fields: dict[str, Any], where: str = "") -> CorpusRecipe:
    """A recipe from its fields.

    Raises:
        ConfigurationError: A field is wrong; the message names it.
    """
    try:
        return CorpusRecipe.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the recipe"
        raise ConfigurationError(
            f"corpus recipe{f' {where}' if where else ''}: {field}: {first['msg']}, got "
            f"{first['input']!r:.80}"
        ) from error
