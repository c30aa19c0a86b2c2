"""The card of a checkpoint: what it is, what it was trained on, how it did."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from agentbench_prefix.errors import CheckpointError
from agentbench_prefix.evaluation.stats import Estimate
from agentbench_prefix.files import write_json_atomic, write_text_atomic

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
        threads: Threads torch was given.
        code_version: See :func:`code_version`.
        command: Command that makes the checkpoint.
    """

    recipe: dict[str, JsonValue]
    seed: int
    data: dict[str, JsonValue]
    steps: int
    tokens: int
    minutes: float
    threads: int
    code_version: str
    command: str


class FamilyResult(_Part):
    """Measured success on a set of tasks, eight samples each at temperature 1.

    Attributes:
        tasks: Tasks.
        episodes: Episodes.
        solved: Episodes that solved their task.
        tasks_solved: Tasks that at least one sample solved.
        avg_at_8: Avg@8.
        pass_at_8: Pass@8.
    """

    tasks: int
    episodes: int
    solved: int
    tasks_solved: int
    avg_at_8: Estimate
    pass_at_8: Estimate


class SharedFacts(_Part):
    """What a set of test tasks shares with the training data.

    Attributes:
        tasks: Tasks.
        task_drawn: Those that were trained on themselves.
        goal_trained: Those whose goal was solved the same way as a training task's goal.
        goal_on_the_way: Those whose goal's solution solves or leads to a training task's goal.
        goal_shown: Those whose goal's solution a training task showed, be it as a distractor.
        subgoal_facts: Facts on the way to the goals.
        subgoal_facts_on_the_way: Those that solve or lead to a training task's goal.
        subgoal_facts_shown: Those that a training task showed.
    """

    tasks: int
    task_drawn: int
    goal_trained: int
    goal_on_the_way: int
    goal_shown: int
    subgoal_facts: int
    subgoal_facts_on_the_way: int
    subgoal_facts_shown: int


class Contamination(_Part):
    """What the tasks of a split share with the training data.

    Attributes:
        split: The split.
        rows: By family, and for all of it under ``"all"``.
    """

    split: str
    rows: dict[str, SharedFacts]


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
        results: Measured results by split and family; ``"all"`` is the whole split.
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
    results: dict[str, dict[str, FamilyResult]] = {}
    contamination: Contamination | None = None
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
        """Write the card and its README.md into a checkpoint folder; return the card's path."""
        write_json_atomic(folder / CARD, self.model_dump())
        write_text_atomic(folder / "README.md", render(self))
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


def render(card: CheckpointCard) -> str:
    """Write a card as a page for people, in Markdown with the Hub's YAML header."""
    training = card.training
    lines = [
        "---",
        f"license: {card.licence.lower()}",
        "library_name: transformers",
        f"tags: [agentbench-prefix, {card.env_id}, {card.method}]",
        "---",
        f"# {card.method} for {card.env_id}",
        "",
        f"{card.model.architecture}, {card.model.parameters:,} parameters; plays in the dialogue "
        f"`{card.dialogue}`, at most {card.max_tokens} tokens a reply. Written by a program from "
        f"`{CARD}`.",
        "",
        "## Training",
        "",
        "```sh",
        training.command,
        "```",
        "",
        f"Seed {training.seed}, {training.steps:,} steps, {training.tokens:,} learned tokens, "
        f"{training.minutes:.0f} minutes on {training.threads} CPU thread(s), "
        f"code `{training.code_version}`.",
        "",
        "```json",
        json.dumps({"data": training.data, "recipe": training.recipe}, indent=2, sort_keys=True),
        "```",
    ]
    for split, results in card.results.items():
        lines += ["", f"## Results on `{split}`", ""]
        lines += table(
            ("family", "solved", "Avg@8 %", "tasks solved", "Pass@8 %"),
            [
                (
                    name,
                    f"{row.solved}/{row.episodes}",
                    _percent(row.avg_at_8),
                    f"{row.tasks_solved}/{row.tasks}",
                    _percent(row.pass_at_8),
                )
                for name, row in sorted(results.items(), key=_all_last)
            ],
        )
        lines += ["", "Temperature 1, 95 % intervals over tasks."]
    if card.contamination is not None:
        lines += [
            "",
            f"## What the `{card.contamination.split}` tasks share with the training data",
            "",
            "A fact is what solves a goal or a step on the way to it, such as a recipe. It was "
            "shown if a training prompt held it, be it as a distractor.",
            "",
        ]
        lines += table(
            (
                "family",
                "tasks",
                "trained on",
                "goal trained for",
                "goal on the way to a trained one",
                "goal's solution shown",
                "sub-goal facts on the way",
                "sub-goal facts shown",
            ),
            [
                (
                    name,
                    str(shared.tasks),
                    str(shared.task_drawn),
                    str(shared.goal_trained),
                    str(shared.goal_on_the_way),
                    str(shared.goal_shown),
                    f"{shared.subgoal_facts_on_the_way}/{shared.subgoal_facts}",
                    f"{shared.subgoal_facts_shown}/{shared.subgoal_facts}",
                )
                for name, shared in sorted(card.contamination.rows.items(), key=_all_last)
            ],
        )
    return "\n".join(lines) + "\n"


def _all_last(row: tuple[str, object]) -> tuple[bool, str]:
    return row[0] == "all", row[0]


def _percent(estimate: Estimate) -> str:
    return f"{100 * estimate.value:.1f} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in Markdown, line by line."""
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
