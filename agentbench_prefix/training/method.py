"""Methods that learn from demonstrations alone."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from agentbench_prefix import registry
from agentbench_prefix.cards import (
    CheckpointCard,
    Contamination,
    ModelDescription,
    SharedFacts,
    TrainingDescription,
    code_version,
)
from agentbench_prefix.env import TextEnv
from agentbench_prefix.errors import CheckpointError, ConfigurationError, UnknownNameError
from agentbench_prefix.evaluation.runner import differences, find_dialogue
from agentbench_prefix.files import canonical_json, sha256_file, write_json_atomic
from agentbench_prefix.policies.tokens import (
    FoundCheckpoint,
    check_checkpoint,
    find_checkpoint,
)
from agentbench_prefix.serialization import ChatSerializer
from agentbench_prefix.training.recipe import SFTRecipe, load_recipe

RUN = "run.json"
OPTIONS = ("tier", "variant", "corpus", "init", "seed", "steps")
"""Arguments of ``train`` that are options of the command."""
TOKENIZER_SAMPLE = 4096
"""Demonstrations a new tokenizer's vocabulary is counted on."""


@dataclasses.dataclass(frozen=True)
class ShippedMethod:
    """A method whose recipes and checkpoints lie in a package's folder.

    Attributes:
        name: Name under which it is registered.
        summary: One line for listings.
        folder: Folder that holds ``recipes/<env>/<name>.yaml`` and ``checkpoints/<env>/<name>``.
    """

    name: str
    summary: str
    folder: Path

    def checkpoint(self, env_id: str) -> Path | None:
        """Folder of the checkpoint shipped for an environment, if there is one."""
        folder = self.folder / "checkpoints" / env_id / self.name
        return folder if (folder / "model.safetensors").is_file() else None

    def recipe_path(self, env_id: str) -> Path:
        """File of its own recipe for an environment.

        Raises:
            UnknownNameError: There is none.
        """
        path = self.folder / "recipes" / env_id / f"{self.name}.yaml"
        if not path.is_file():
            known = sorted(p.parent.name for p in self.folder.glob(f"recipes/*/{self.name}.yaml"))
            raise UnknownNameError(f"environment for method {self.name}", env_id, known)
        return path


@dataclasses.dataclass(frozen=True)
class SupervisedMethod(ShippedMethod):
    """A method that is trained by supervised fine-tuning."""

    def recipe(self, env_id: str, file: Path | None = None, **overrides: Any) -> SFTRecipe:
        """The recipe for an environment, with fields replaced.

        Args:
            env_id: Environment.
            file: Recipe to use; ``None`` for the method's own.
            **overrides: Fields to replace; ``None`` leaves a field as it is.

        Raises:
            UnknownNameError: There is no recipe for this environment.
            ConfigurationError: The file is of another environment, or a field is wrong.
        """
        if file is not None:
            recipe = load_recipe(file, **overrides)
            if recipe.env_id != env_id:
                raise ConfigurationError(
                    f"the recipe {file} is for env_id {recipe.env_id!r}, not {env_id!r}"
                )
            return recipe
        return load_recipe(self.recipe_path(env_id), **overrides)

    def plan(
        self,
        env_id: str,
        *,
        tier: str = "cpu",
        recipe_file: Path | None = None,
        variant: str | None = None,
        corpus: str | None = None,
        **overrides: Any,
    ) -> str:
        """What :meth:`train` would do with these arguments, as text."""
        import yaml

        recipe = self._resolve(env_id, tier, recipe_file, variant, corpus, overrides)
        tokens = recipe.steps * recipe.tokens_per_step
        return (
            f"# {self.name} on {env_id}, resolved\n"
            f"{yaml.safe_dump(recipe.model_dump(mode='json'), sort_keys=False)}\n"
            f"# Estimate\n{recipe.steps:,} optimizer steps of at most {recipe.tokens_per_step:,} "
            f"padded tokens: at most {tokens:,} tokens\n"
        )

    def _resolve(
        self,
        env_id: str,
        tier: str,
        recipe_file: Path | None,
        variant: str | None,
        corpus: str | None,
        overrides: dict[str, Any],
    ) -> SFTRecipe:
        if tier != "cpu":
            raise UnknownNameError(f"tier of {self.name}", tier, ["cpu"])
        if variant is not None:
            raise UnknownNameError(f"variant of {self.name}", variant, [])
        recipe = self.recipe(env_id, recipe_file, **overrides)
        return recipe if corpus is None else recipe.on_corpus(corpus)

    def train(
        self,
        env_id: str,
        *,
        out: Path,
        tier: str = "cpu",
        recipe_file: Path | None = None,
        variant: str | None = None,
        corpus: str | None = None,
        progress: Callable[[int, int, Mapping[str, float]], None] | None = None,
        **overrides: Any,
    ) -> Path:
        """Train and write ``out/checkpoint``; resumes what an earlier call left in ``out``.

        Args:
            env_id: Environment.
            out: Folder of the run.
            tier: Size of the run; there is one.
            recipe_file: Recipe to use instead of the method's own.
            variant: Variant of the method; there is none.
            corpus: Corpus to learn from instead of the recipe's.
            progress: Called with ``(step, steps, metrics)``.
            **overrides: Recipe fields to replace.

        Returns:
            Folder of the checkpoint: weights, tokenizer, card.
        """
        import torch

        from agentbench_prefix.training.data import corpora_of
        from agentbench_prefix.training.sft import run_sft

        recipe = self._resolve(env_id, tier, recipe_file, variant, corpus, overrides)
        if corpus is not None:
            overrides["corpus"] = corpus
        given = {name: value for name, value in overrides.items() if value is not None}
        env = registry.make(env_id)
        dialogue = find_dialogue(env, recipe.dialogue)
        torch.manual_seed(recipe.seed)
        model, tokenizer, origin = _start(recipe, env)
        serializer = ChatSerializer(tokenizer)
        corpora = corpora_of(recipe, env)
        identity = {
            "recipe": recipe.model_dump(mode="json"),
            "init": origin,
            "tokenizer": serializer.fingerprint(),
            "data_hash": env.data_hash,
            "corpora": corpora,
        }
        claim(out, identity)
        checkpoint = out / "checkpoint"
        if (checkpoint / "model.safetensors").is_file():
            return checkpoint
        if checkpoint.exists():
            raise ConfigurationError(
                f"{checkpoint} exists and is no finished checkpoint: remove it, or choose another "
                "folder with --out"
            )
        code = code_version()

        def report(step: int, loss: float) -> None:
            if progress is not None:
                progress(step, recipe.steps, {"loss": loss})

        summary = run_sft(recipe, model, serializer, env, out, progress=report)
        beside = out / "checkpoint.partial"
        shutil.rmtree(beside, ignore_errors=True)
        model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        drawn = _draws(recipe, env, summary["pool_steps"])
        CheckpointCard(
            method=self.name,
            env_id=env_id,
            data_hash=env.data_hash,
            dialogue=dialogue.label,
            max_tokens=dialogue.max_tokens,
            tokenizer_fingerprint=serializer.fingerprint(),
            model_sha256=sha256_file(beside / "model.safetensors"),
            model=ModelDescription(
                architecture=type(model).__name__,
                parameters=sum(p.numel() for p in model.parameters()),
            ),
            training=TrainingDescription(
                recipe=recipe.model_dump(mode="json"),
                seed=recipe.seed,
                data={
                    "init": origin,
                    "corpora": corpora,
                    "demonstrations": summary["demonstrations"],
                    "distinct_draws": len(drawn),
                    "final_loss": round(summary["final_loss"], 4),
                },
                steps=summary["steps"],
                tokens=summary["tokens"],
                minutes=round(summary["minutes"], 1),
                threads=torch.get_num_threads(),
                code_version=code,
                command=command_line(self.name, env_id, recipe_file, given),
            ),
            contamination=stated_contamination(env, drawn),
            licence="Apache-2.0",
        ).save(beside)
        for path in beside.iterdir():
            path.chmod(0o644)  # weights are written readable by their owner alone
        beside.rename(checkpoint)
        return checkpoint


def command_line(
    method: str, env_id: str, recipe_file: Path | None, given: Mapping[str, Any]
) -> str:
    """The command that trains a method with some arguments.

    Args:
        method: The method.
        env_id: Environment.
        recipe_file: Recipe in the place of the method's own.
        given: Further arguments of ``train``: options of the command, and fields of the recipe.
    """
    words = [f"python -m agentbench_prefix.train --method {method} --env {env_id}"]
    if recipe_file is not None:
        words.append(f"--recipe {recipe_file}")
    for name, value in given.items():
        if value is None:
            continue
        if name in OPTIONS:
            words.append(f"--{name} {value}")
        else:
            words += [f"--set {path}={shown}" for path, shown in _fields(name, value)]
    return " ".join(words)


def _fields(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _fields(f"{path}.{name}", part)
    else:
        yield path, json.dumps(value) if isinstance(value, list | bool) else str(value)


def _start(recipe: SFTRecipe, env: TextEnv) -> tuple[Any, Any, dict[str, Any]]:
    """Model, tokenizer and a description of where they come from."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from agentbench_prefix.training.data import draw, play_draw
    from agentbench_prefix.training.tokenizer import build_word_tokenizer

    if recipe.init == "scratch":
        stage = recipe.stages[-1]
        texts = (
            message.content
            for index in range(TOKENIZER_SAMPLE)
            for message in play_draw(env, recipe, draw(env, recipe, stage, index)).messages
        )
        tokenizer = build_word_tokenizer(texts, recipe.vocabulary_size)
        config = Qwen3Config(
            vocab_size=recipe.vocabulary_size,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            **recipe.model,
        )
        return Qwen3ForCausalLM(config), tokenizer, {"from": "scratch"}
    return load_start(recipe.init, recipe.env_id)


def load_start(
    init: str, env_id: str, *, revision: str | None = None, dtype: str = "float32"
) -> tuple[Any, Any, dict[str, Any]]:
    """Load what a run starts from.

    Args:
        init: A method's name (its shipped checkpoint), a folder or a Hub id.
        env_id: Environment.
        revision: Commit of a Hub id.
        dtype: Number format of the weights.

    Returns:
        Model, tokenizer, and what identifies them: ``from``, ``sha256`` (of configuration and
        weights), ``model_sha256`` (of the weights), and a Hub id's commit.

    Raises:
        CheckpointError: Nothing usable is there.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, source = find_start(init, env_id, revision)
    hashes = check_checkpoint(folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, use_safetensors=True, trust_remote_code=False
    )
    origin = {
        "from": init,
        **source,
        "sha256": hashes.checkpoint,
        "model_sha256": hashes.model,
    }
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return model, tokenizer, origin


def find_start(init: str, env_id: str, revision: str | None = None) -> FoundCheckpoint:
    """Find the checkpoint that a method's name, a folder or a Hub id stands for.

    Raises:
        CheckpointError: The method ships none, or nothing is there.
    """
    if init not in registry.method_names():
        return find_checkpoint(init, revision)
    shipped = registry.method(init).checkpoint(env_id)
    if shipped is None:
        raise CheckpointError(
            f"method {init!r} ships no checkpoint for {env_id}: train it with "
            f"python -m agentbench_prefix.train --method {init} --env {env_id} "
            "and pass its folder with --init"
        )
    return find_checkpoint(shipped, revision)


def claim(out: Path, identity: dict[str, Any]) -> None:
    """Write what identifies the run, or check that the folder's run is the same."""
    path = out / RUN
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_json_atomic(path, identity)
            return
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"the run folder {out} cannot be used ({error}): choose another with --out"
        ) from error
    changed = differences(stored, identity)
    if changed:
        raise ConfigurationError(
            f"{out} holds another training run ({'; '.join(changed)}): choose another folder with "
            "--out, or remove it"
        )


def _draws(
    recipe: SFTRecipe, env: TextEnv, pool_steps: list[int]
) -> list[tuple[str, dict[str, Any]]]:
    """Every distinct (task, options) of the pools a run consumed."""
    from agentbench_prefix.training.data import POOL, draw, stage_at

    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for pool, step in enumerate(pool_steps):
        stage = stage_at(recipe, step)
        for index in range(pool * POOL, (pool + 1) * POOL):
            drawn = draw(env, recipe, stage, index)
            found[canonical_json([drawn.task_id, drawn.options])] = (drawn.task_id, drawn.options)
    return list(found.values())


def stated_contamination(
    env: TextEnv, drawn: list[tuple[str, dict[str, Any]]]
) -> Contamination | None:
    """:func:`contamination`, ``None`` where the environment does not state facts."""
    try:
        return contamination(env, drawn)
    except NotImplementedError:  # stating facts is optional for an environment
        return None


def contamination(
    env: TextEnv, drawn: list[tuple[str, dict[str, Any]]], split: str = "test"
) -> Contamination:
    """How much of what the test tasks need was part of the training data.

    Args:
        env: The unwrapped environment; it must implement ``solution_facts``.
        drawn: ``(task_id, options)`` of the training data.
        split: Split to examine.
    """
    goals: set[str] = set()
    used: set[str] = set()
    shown: set[str] = set()
    for task_id, options in drawn:
        facts = env.solution_facts(task_id, options)
        goals |= facts["goal"]
        used |= facts["goal"] | facts["subgoals"]
        shown |= facts["shown"]
    trained = {task_id for task_id, _ in drawn}
    rows: dict[str, Counter[str]] = {}
    for task_id in env.tasks(split):
        facts = env.solution_facts(task_id)
        counts = {
            "tasks": 1,
            "task_drawn": int(task_id in trained),
            "goal_trained": int(bool(facts["goal"] & goals)),
            "goal_on_the_way": int(bool(facts["goal"] & used)),
            "goal_shown": int(bool(facts["goal"] & shown)),
            "subgoal_facts": len(facts["subgoals"]),
            "subgoal_facts_on_the_way": len(facts["subgoals"] & used),
            "subgoal_facts_shown": len(facts["subgoals"] & shown),
        }
        for row in (env.family(task_id), "all"):
            rows.setdefault(row, Counter()).update(counts)
    return Contamination(
        split=split, rows={row: SharedFacts(**counts) for row, counts in rows.items()}
    )
