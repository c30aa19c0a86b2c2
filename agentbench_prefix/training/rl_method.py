"""Methods that learn by reinforcement."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from agentbench_prefix import registry
from agentbench_prefix.cards import (
    CheckpointCard,
    ModelDescription,
    TrainingDescription,
    code_version,
)
from agentbench_prefix.dialogue import Dialogue
from agentbench_prefix.env import TextEnv
from agentbench_prefix.errors import (
    AgentBenchError,
    CheckpointError,
    ConfigurationError,
    MissingExtraError,
)
from agentbench_prefix.evaluation.runner import choose_tasks, find_dialogue
from agentbench_prefix.files import read_whole_lines
from agentbench_prefix.policies.tokens import FoundCheckpoint, check_checkpoint
from agentbench_prefix.serialization import ChatSerializer
from agentbench_prefix.training.curves import draw_curves
from agentbench_prefix.training.method import (
    ShippedMethod,
    claim,
    command_line,
    find_start,
    load_start,
    stated_contamination,
)
from agentbench_prefix.training.rl_recipe import EvaluationSpec, RLRecipe, load_rl_recipe
from agentbench_prefix.training.summary import (
    CHECKPOINT,
    CURVES,
    LOG,
    Cost,
    Init,
    Preprocessing,
    RunSummary,
    Spent,
    corpus_cost,
    describe,
)

if TYPE_CHECKING:
    from agentbench_prefix.corpora.reading import Corpus
    from agentbench_prefix.corpora.schema import TrajectoryRow
    from agentbench_prefix.training.objective import Objective
    from agentbench_prefix.training.queries import Query, QueryPool
    from agentbench_prefix.training.rl_trainer import Progress

_WATCH_SEED = 10**17
"""Seed of the generated tasks that training is watched on; recipes' own seeds stay below."""


@dataclasses.dataclass(frozen=True)
class ReinforcementMethod(ShippedMethod):
    """A method that is trained by :class:`~agentbench_prefix.training.rl_trainer.RLTrainer`.

    Attributes:
        objective: What is its own, as ``module:class``; imported when it is trained.
    """

    objective: str

    def objective_type(self) -> type[Objective[Any]]:
        """The class of its objective."""
        import importlib

        module, _, name = self.objective.partition(":")
        found: type[Objective[Any]] = getattr(importlib.import_module(module), name)
        return found

    def recipe(
        self,
        env_id: str,
        tier: str | None = "cpu",
        *,
        file: Path | None = None,
        variant: str | None = None,
        corpus: str | None = None,
        **overrides: Any,
    ) -> RLRecipe:
        """The recipe for an environment and size, with fields replaced.

        Args:
            env_id: Environment.
            tier: Size of the run.
            file: Recipe to use; ``None`` for the method's own.
            variant: Variant of the method; ``None`` for its main form.
            corpus: Corpus to use instead of the recipe's.
            **overrides: Fields to replace; ``None`` leaves a field as it is.

        Raises:
            UnknownNameError: There is no recipe for this environment, tier or variant.
            ConfigurationError: The file is of another environment, or a field is wrong.
        """
        path = file or self.recipe_path(env_id)
        given = {name: value for name, value in overrides.items() if value is not None}
        if corpus is not None:
            given["queries"] = {"corpus": corpus}
        recipe = load_rl_recipe(path, tier=tier, variant=variant, overrides=given)
        if recipe.env_id != env_id:
            raise ConfigurationError(
                f"the recipe {path} is for env_id {recipe.env_id!r}, not {env_id!r}"
            )
        if corpus is not None and recipe.queries.source == "tasks":
            raise ConfigurationError(
                f"{self.name} trains on tasks, not on a corpus: leave out --corpus"
            )
        return recipe

    def make_objective(self, recipe: RLRecipe) -> Objective[Any]:
        """Its objective, as a recipe sets it.

        Raises:
            ConfigurationError: A field of the recipe's ``objective`` is wrong.
        """
        kind = self.objective_type()
        try:
            settings = kind.settings_type.model_validate(recipe.objective)
        except ValidationError as error:
            raise ConfigurationError(
                f"the objective of the recipe of {self.name} is not valid: {describe(error)}"
            ) from error
        return kind(settings)

    def plan(
        self,
        env_id: str,
        *,
        tier: str | None = "cpu",
        recipe_file: Path | None = None,
        variant: str | None = None,
        corpus: str | None = None,
        **overrides: Any,
    ) -> str:
        """What :meth:`train` would do with these arguments, and what it would take, as text.

        Nothing is downloaded and no weight is loaded.
        """
        from agentbench_prefix.training.plan import describe_plan, find_shape

        recipe = self.recipe(
            env_id, tier, file=recipe_file, variant=variant, corpus=corpus, **overrides
        )
        objective = self.make_objective(recipe)
        start = local_start(recipe)
        corpora: dict[str, str] = {}
        watched: list[str] = []
        pool: QueryPool | AgentBenchError
        try:
            if start is None:
                raise CheckpointError(f"{recipe.init} is not on this machine")
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(start.folder, trust_remote_code=False)
            origin = {"from": recipe.init, "model_sha256": check_checkpoint(start.folder).model}
            data = prepare_data(recipe, ChatSerializer(tokenizer), origin)
            pool, corpora, watched = data.pool, data.corpora, data.watched
        except AgentBenchError as error:
            pool = error
        shape = find_shape(recipe, start)
        return describe_plan(self.name, recipe, objective, shape, pool, corpora, watched)

    def train(
        self,
        env_id: str,
        *,
        out: Path,
        tier: str | None = "cpu",
        recipe_file: Path | None = None,
        variant: str | None = None,
        corpus: str | None = None,
        progress: Progress | None = None,
        **overrides: Any,
    ) -> Path:
        """Train and write ``out/checkpoint``; resumes what an earlier call left in ``out``.

        Args:
            env_id: Environment.
            out: Folder of the run.
            tier: Size of the run.
            recipe_file: Recipe to use instead of the method's own.
            variant: Variant of the method.
            corpus: Corpus to use instead of the recipe's.
            progress: Called with ``(step, steps, metrics)``.
            **overrides: Recipe fields to replace.

        Returns:
            Folder of the checkpoint: weights, tokenizer, card.
        """
        try:
            from agentbench_prefix.training.rl_trainer import RLTrainer
        except ImportError as error:
            raise MissingExtraError("reinforcement learning", "train") from error
        import torch

        recipe = self.recipe(
            env_id, tier, file=recipe_file, variant=variant, corpus=corpus, **overrides
        )
        objective = self.make_objective(recipe)
        torch.manual_seed(recipe.seed)
        model, tokenizer, origin = load_start(
            recipe.init, env_id, revision=recipe.revision, dtype=recipe.dtype
        )
        serializer = ChatSerializer(tokenizer)
        data = prepare_data(recipe, serializer, origin)
        identity = {
            "method": self.name,
            "recipe": recipe.model_dump(mode="json"),
            "init": origin,
            "tokenizer": serializer.fingerprint(),
            "data_hash": data.env.data_hash,
            "corpora": data.corpora,
        }
        claim(out, identity)
        checkpoint = out / CHECKPOINT
        if (checkpoint / "model.safetensors").is_file():
            return checkpoint
        code = code_version()
        parameters = sum(p.numel() for p in model.parameters())
        max_tokens = recipe.max_tokens or data.dialogue.max_tokens
        trainer = RLTrainer(
            recipe,
            objective,
            data.pool,
            model,
            tokenizer,
            env_arguments=data.env.arguments(),
            dialogue=data.dialogue,
            max_tokens=max_tokens,
            watched=data.watched,
            out=out,
            progress=progress,
        )
        trainer.run()
        beside = out / f"{CHECKPOINT}.partial"
        trainer.save(beside)
        given = {"tier": tier, "variant": variant, "corpus": corpus, **overrides}
        command = command_line(self.name, env_id, recipe_file, given)
        if not trainer.accelerator.is_main_process:
            return checkpoint
        rows = read_log(out / LOG)
        spent = spent_in(rows, recipe)
        named = " ".join(filter(None, [self.name, recipe.variant]))
        draw_curves(
            rows, out / CURVES, f"{named} on {env_id} from {data.start}, seed {recipe.seed}"
        )
        tokenizer.save_pretrained(beside)
        sha256 = check_checkpoint(beside).model
        CheckpointCard(
            method=self.name,
            env_id=env_id,
            data_hash=data.env.data_hash,
            dialogue=data.dialogue.label,
            max_tokens=max_tokens,
            tokenizer_fingerprint=serializer.fingerprint(),
            model_sha256=sha256,
            model=ModelDescription(architecture=type(model).__name__, parameters=parameters),
            training=TrainingDescription(
                recipe=recipe.model_dump(mode="json"),
                seed=recipe.seed,
                data={"init": origin, "corpora": dict(data.corpora), "rollouts": spent.rollouts},
                steps=spent.steps,
                tokens=spent.learned_tokens,
                minutes=round(trainer.seconds / 60, 1),
                threads=torch.get_num_threads(),
                code_version=code,
                command=command,
            ),
            contamination=stated_contamination(
                data.env,
                [(q.task_id, dict(q.options)) for q in data.pool.queries],
            ),
            licence="Apache-2.0",
        ).save(beside)
        RunSummary(
            method=self.name,
            variant=recipe.variant,
            env_id=env_id,
            data_hash=data.env.data_hash,
            dialogue=data.dialogue.label,
            tier=tier or "cpu",
            init=Init(name=data.start, model_sha256=origin["model_sha256"]),
            seed=recipe.seed,
            recipe=recipe.model_dump(mode="json"),
            corpora=data.corpora,
            spent=spent,
            preprocessing=data.cost.model_copy(
                update={what: Cost.model_validate(cost) for what, cost in trainer.costs.items()}
            ),
            wall_seconds=trainer.seconds,
            device=recipe.device,
            threads=torch.get_num_threads(),
            model_sha256=sha256,
            code_version=code,
            command=command,
            diagnostics=closing(rows),
            notes=tuple(objective.notes(rows, recipe.rollouts)),
        ).save(out)
        for path in beside.iterdir():
            path.chmod(0o644)  # weights are written readable by their owner alone
        beside.rename(checkpoint)
        return checkpoint


# ------------------------------------------------------------------ data
@dataclasses.dataclass(frozen=True)
class Data:
    """What a run trains on.

    Attributes:
        env: The environment, with the arguments of training.
        dialogue: How it is put to the model.
        pool: Queries.
        watched: Tasks of the evaluation during training, none of them in the pool.
        corpora: SHA-256 of what was read of corpora.
        cost: What the corpus cost whoever made it.
        start: Name of what training starts from.
    """

    env: TextEnv
    dialogue: Dialogue
    pool: QueryPool
    watched: list[str]
    corpora: dict[str, str]
    cost: Preprocessing
    start: str


def prepare_data(recipe: RLRecipe, serializer: ChatSerializer, origin: Mapping[str, Any]) -> Data:
    """Read and check what a recipe trains on.

    Raises:
        CorpusError: The corpus is missing, or its environment, dialogue, tokenizer or old policy
            is not what is at hand; the field is named.
        UnknownNameError: A split, strategy, family or old policy does not exist.
    """
    from agentbench_prefix.corpora.find import find_corpus
    from agentbench_prefix.training.queries import (
        QueryPool,
        check_model,
        corpus_queries,
        cut_query,
        task_queries,
    )

    spec = recipe.queries
    limit = {} if recipe.max_turns is None else {"max_turns": recipe.max_turns}
    corpora: dict[str, str] = {}
    cost = Preprocessing()
    queries: list[Query]
    rows: list[TrajectoryRow] = []
    if spec.source == "tasks":
        env = registry.make(recipe.env_id, **limit)
        dialogue = find_dialogue(env, recipe.dialogue)
        queries = task_queries(
            env, dialogue, spec.split, spec.parameters, spec.n, recipe.seed * 10**6
        )
    else:
        assert spec.corpus is not None
        corpus = find_corpus(spec.corpus)
        made = registry.make(recipe.env_id, **corpus.manifest.arguments)
        dialogue = find_dialogue(made, recipe.dialogue)
        corpus.check_environment(made, dialogue)
        corpus.check_split(spec.split)
        env = registry.make(recipe.env_id, **{**corpus.manifest.arguments, **limit})
        files = []
        if spec.source == "corpus":
            files.append(f"queries/{spec.split}.parquet")
        if spec.source == "trajectories" or spec.demonstrations:
            files.append(f"trajectories/{spec.split}.parquet")
        if spec.sidecar is not None:
            weights = _weights_of(spec.sidecar, recipe.env_id, origin)
            check_model(corpus, spec.sidecar, dialogue, serializer, weights)
            files.append(f"sidecars/{dialogue.name}/{spec.sidecar}/{spec.split}.parquet")
        corpora = _verified(corpus, files)
        cost = corpus_cost(corpus, spec.split, dialogue.name, spec.sidecar)
        if spec.source == "trajectories" or spec.demonstrations:
            rows = list(corpus.trajectories(spec.split))
        if spec.source == "trajectories":
            queries = [cut_query(row, dialogue.label, 0) for row in rows]
        else:
            queries = corpus_queries(
                corpus,
                spec.split,
                dialogue,
                strategy=spec.strategy,
                raw=spec.raw,
                sidecar=spec.sidecar,
            )
    watched = watched_tasks(env, recipe.evaluation)
    held_out = set(watched)
    pool = QueryPool(
        (query for query in queries if query.task_id not in held_out),
        spec.family_weights,
        longest_prefix=(
            None if recipe.fresh_budget or env.max_turns is None else env.max_turns - 1
        ),
        trajectories=rows,
        dialogue=dialogue.label,
    )
    return Data(env, dialogue, pool, watched, corpora, cost, _name_of(recipe.init))


def local_start(recipe: RLRecipe) -> FoundCheckpoint | None:
    """The checkpoint a recipe starts from, if it is on this machine."""
    init = recipe.init
    if init in registry.method_names():
        if registry.method(init).checkpoint(recipe.env_id) is None:
            return None
    elif not Path(init).expanduser().is_dir():
        return None
    return find_start(init, recipe.env_id)


def _weights_of(name: str, env_id: str, origin: Mapping[str, Any]) -> str | None:
    """Hash of the old policy's weights, if they are at hand."""
    if origin["from"] == name:
        return str(origin["model_sha256"])
    if name not in registry.method_names() or registry.method(name).checkpoint(env_id) is None:
        return None
    return check_checkpoint(find_start(name, env_id).folder).model


def _verified(corpus: Corpus, files: Iterable[str]) -> dict[str, str]:
    from agentbench_prefix.corpora.hub import check_file

    manifest = corpus.manifest
    found = {}
    for file in files:
        entry = manifest.files.get(file)
        if entry is not None:
            check_file(corpus.folder, file, entry)
            found[f"{manifest.name} {manifest.version} {file}"] = entry.sha256
    return found


def _name_of(init: str) -> str:
    """The method a start was trained by, or what its folder or Hub id is called."""
    if init in registry.method_names():
        return init
    try:
        card = CheckpointCard.load(Path(init).expanduser())
    except (CheckpointError, RuntimeError):
        card = None
    name = Path(init).name if card is None else card.method
    return re.sub(r"[^\w.+-]+", "_", name) or "start"


def watched_tasks(env: TextEnv, spec: EvaluationSpec) -> list[str]:
    """Tasks that training is watched on: fixed, whatever the seed.

    Raises:
        ConfigurationError: There are too few.
    """
    if not spec.every:
        return []
    if isinstance(spec.tasks, int):
        if spec.split == "generated":
            return list(env.generate_tasks(_WATCH_SEED, spec.tasks, **spec.parameters))
        return choose_tasks(env, spec.split, spec.tasks)
    if spec.split == "generated":
        raise ConfigurationError(
            "evaluation.tasks by family needs a split whose families are known: give one number "
            "of generated tasks"
        )
    beyond = set(env.out_of_reach(spec.split, env.max_turns))
    chosen: list[str] = []
    for family, n in spec.tasks.items():
        members = [t for t in env.tasks(spec.split) if env.family(t) == family and t not in beyond]
        if len(members) < n:
            raise ConfigurationError(
                f"evaluation.tasks asks for {n} of family {family!r}, split {spec.split!r} has "
                f"{len(members)}"
            )
        chosen += [members[(2 * i + 1) * len(members) // (2 * n)] for i in range(n)]
    return chosen


# ------------------------------------------------------------------ the log
def read_log(log: Path) -> list[dict[str, float]]:
    """Lines of a run's log."""
    return [json.loads(line) for line in read_whole_lines(log)]


def spent_in(rows: Sequence[Mapping[str, float]], recipe: RLRecipe) -> Spent:
    """What the steps of a log consumed."""
    steps = [row for row in rows if "rollouts" in row]
    return Spent(
        steps=len(steps) * recipe.epochs,
        rollouts=int(sum(row["rollouts"] for row in steps)),
        generated_tokens=int(sum(row["generated_tokens"] for row in steps)),
        learned_tokens=int(sum(row["learned_tokens"] for row in steps)),
    )


def closing(rows: Sequence[Mapping[str, float]], last: int = 10) -> dict[str, float]:
    """Mean of each logged value over the last steps, and the last evaluation."""
    steps = [row for row in rows if "rollouts" in row][-last:]
    found = {}
    for name in sorted({name for row in steps for name in row} - {"step"}):
        values = [row[name] for row in steps if name in row]
        found[name] = sum(values) / len(values)
    watched = [row for row in rows if "eval/success" in row][-1:]
    return found | {k: v for row in watched for k, v in row.items() if k.startswith("eval/")}
