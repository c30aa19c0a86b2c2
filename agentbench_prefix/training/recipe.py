"""Recipes of supervised training, as one validated value.

What a recipe does not name is fixed in the code: gradients are clipped to norm 1, Muon's momentum
is 0.95, AdamW's betas are 0.9 and 0.95.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agentbench_prefix.errors import ConfigurationError
from agentbench_prefix.files import read_mapping


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Stage(_Strict):
    """Part of the training data, up to a share of the steps.

    Attributes:
        until: Share of the schedule at which this stage ends; the last stage has 1.
        split: Split the tasks come from, or ``"generated"`` for generated worlds.
        parameters: Arguments of ``generate_tasks``.
        family_weights: How often each family is drawn; left out: as often as it occurs.
        vary: Reset options that take a fresh integer now and then, with the probability of that.
        detours: Probability per turn that the teacher takes a detour.
        detour_share: Share of the demonstrations that take detours at all.
        corpus: Learn from the trajectories of this corpus (name or folder) instead of a teacher
            that plays anew; ``split`` is then the corpus' split. Under ``vary`` their actions are
            played again in the varied task.
        recite: If positive, no play: the player is shown a first observation and must give this
            many of its lines back, each from a few of its words. Teaches a new model to look up
            and copy, which everything else rests on.
    """

    until: float = Field(gt=0, le=1)
    split: str = "train"
    parameters: dict[str, Any] = Field(default_factory=dict)
    family_weights: dict[str, float] | None = None
    vary: dict[str, float] = Field(default_factory=dict)
    detours: float = Field(default=0.0, ge=0, lt=1)
    detour_share: float = Field(default=1.0, ge=0, le=1)
    corpus: str | None = None
    recite: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _one_source(self) -> Stage:
        unused = [
            name
            for name in ("recite", "detours", "parameters", "family_weights")
            if self.corpus and getattr(self, name)
        ]
        if unused:
            raise ValueError(f"a stage on a corpus takes no {', '.join(unused)}")
        return self


class SFTRecipe(_Strict):
    """A supervised run.

    Attributes:
        env_id: Environment.
        dialogue: Name of the dialogue.
        init: ``"scratch"``, a method's name (its shipped checkpoint), a folder or a Hub id.
        model: Configuration of a new model (``init: scratch``), arguments of ``Qwen3Config``.
        vocabulary_size: Size of a new tokenizer.
        seed: Seed of data and weights.
        steps: Optimizer steps.
        schedule_steps: Steps that stages, warm-up and decay are shares of; ``None`` for ``steps``.
            A run with fewer steps stops early in its schedule.
        tokens_per_step: Padded tokens a batch holds at most.
        max_length: Longest conversation in tokens; longer ones are left out.
        muon_lr: Learning rate of the matrices inside the model.
        adamw_lr: Learning rate of embeddings and norms.
        weight_decay: Of both.
        warmup: Share of the schedule over which the rate rises.
        decay: Share of the schedule, at its end, over which the rate falls to zero.
        observation_weight: Loss weight of observation tokens after the opening; SFT proper has 0.
        learn_mistakes: Learn turns that are marked as mistakes too.
        stages: The data.
    """

    env_id: str
    dialogue: str = "compact"
    init: str = "scratch"
    model: dict[str, Any] = Field(default_factory=dict)
    vocabulary_size: int = 1216
    seed: int = Field(default=0, ge=0, lt=10**9)
    steps: int = Field(gt=0)
    schedule_steps: int | None = Field(default=None, gt=0)
    tokens_per_step: int = Field(default=2048, gt=0)
    max_length: int = Field(default=1024, gt=0)
    muon_lr: float = 4e-3
    adamw_lr: float = 4e-3
    weight_decay: float = 0.0
    warmup: float = 0.02
    decay: float = 0.4
    observation_weight: float = Field(default=0.0, ge=0)
    learn_mistakes: bool = False
    stages: tuple[Stage, ...] = Field(min_length=1)

    def on_corpus(self, corpus: str) -> SFTRecipe:
        """The recipe with another corpus in the place of its own.

        Raises:
            ConfigurationError: It learns from none.
        """
        if not any(stage.corpus for stage in self.stages):
            raise ConfigurationError(
                "the recipe learns from a teacher that plays anew, not from a corpus: leave out "
                "--corpus, or give a recipe with a stage on a corpus"
            )
        stages = tuple(
            stage.model_copy(update={"corpus": corpus}) if stage.corpus else stage
            for stage in self.stages
        )
        return self.model_copy(update={"stages": stages})

    def progress(self, step: int) -> float:
        """Share of the schedule that lies before a step."""
        return step / (self.schedule_steps or self.steps)


def load_recipe(path: Path, **overrides: Any) -> SFTRecipe:
    """Read a recipe from YAML.

    Args:
        path: The file.
        **overrides: Fields to replace; ``None`` leaves a field as it is.

    Raises:
        ConfigurationError: The file is missing or a field is wrong; the message names the field.
    """
    try:
        return SFTRecipe.model_validate(read_mapping(path, "recipe", **overrides))
    except ValidationError as error:
        raise ConfigurationError(f"the recipe {path} is not valid: {error}") from error
