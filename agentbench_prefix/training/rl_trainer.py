"""The trainer: everything that touches TRL.

A thin subclass of TRL 1.16's ``GRPOTrainer``. From TRL and transformers come processes and sharded
weights, accumulation, optimizer, reporting, checkpoints, and vLLM's copy of the weights. Replaced
are the batch (whole episodes, played by this library on the live weights, tokens in and out) and
the loss (an :class:`~agentbench_prefix.training.objective.Objective`).

What TRL calls a step is an optimizer step; here a step is a batch of rollouts, which takes
``epochs`` optimizer steps. Which queries a step plays depends on recipe, step and the objective's
state alone, so the dataset that TRL iterates over is a list of blanks.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import PrinterCallback, ProgressCallback
from trl import GRPOConfig, GRPOTrainer

from agentbench_prefix.adapters.trl import environment_reward, linearize
from agentbench_prefix.corpora.schema import to_messages, token_hash
from agentbench_prefix.dialogue import Dialogue
from agentbench_prefix.env import TextEnv
from agentbench_prefix.errors import ConfigurationError, PolicyError
from agentbench_prefix.files import (
    append_lines,
    read_whole_lines,
    write_json_atomic,
    write_text_atomic,
)
from agentbench_prefix.policies.base import Episode, Policy, Reply
from agentbench_prefix.policies.tokens import Conversation, overflow, read_due
from agentbench_prefix.policies.transformers import TransformersPolicy
from agentbench_prefix.registry import make
from agentbench_prefix.rollouts import episode_seed, play, start
from agentbench_prefix.serialization import ChatSerializer
from agentbench_prefix.training import scoring
from agentbench_prefix.training.hindsight import hindsight_logprobs
from agentbench_prefix.training.method import find_start
from agentbench_prefix.training.objective import (
    Batch,
    Group,
    Moment,
    Objective,
    Outcome,
    Played,
    Rollout,
    Scores,
)
from agentbench_prefix.training.queries import Prefix, Query, QueryPool, check_prompt
from agentbench_prefix.training.rl_recipe import RLRecipe
from agentbench_prefix.training.summary import LOG
from datasets import Dataset

STATES = "states"
OWN_STATE = "step.json"

Progress = Callable[[int, int, Mapping[str, float]], None]


# ------------------------------------------------------------------ playing
class Player:
    """Plays groups of samples from the states of queries.

    A query's state is made once; its samples are put there by snapshot.

    Args:
        env_id: Environment.
        arguments: Its constructor arguments.
        dialogue: How it is put to the model.
        policy: Who plays; its tokens and log-probabilities are recorded.
        serializer: Turns messages into the policy's tokens.
        seed: Seed of the run.
        fresh_budget: Whether prefix turns do not count toward the turn limit.
    """

    def __init__(
        self,
        env_id: str,
        arguments: Mapping[str, Any],
        dialogue: Dialogue,
        policy: Policy,
        serializer: ChatSerializer,
        *,
        seed: int = 0,
        fresh_budget: bool = False,
    ) -> None:
        self._make = functools.partial(make, env_id, **arguments)
        self._envs: list[TextEnv] = []
        self.dialogue = dialogue
        self.policy = policy
        self.serializer = serializer
        self.seed = seed
        self.fresh_budget = fresh_budget

    def _env(self, index: int) -> TextEnv:
        while len(self._envs) <= index:
            self._envs.append(self._make())
        return self._envs[index]

    def play(self, queries: Sequence[Query], samples: int, names: Sequence[str]) -> list[Group]:
        """Play each query ``samples`` times.

        Args:
            queries: The queries.
            samples: Samples of each.
            names: One for each query; chance is drawn from it and the run's seed alone.

        Raises:
            ConfigurationError: A query's state is not the recorded one.
            PolicyError: The policy failed.
        """
        episodes = []
        for index, (query, name) in enumerate(zip(queries, names, strict=True)):
            first = self._env(index * samples)
            self._put(first, query, episode_seed(self.seed, name, 0))
            snapshot = first.snapshot() if samples > 1 else None
            for sample in range(samples):
                env = self._env(index * samples + sample)
                if sample:
                    assert snapshot is not None
                    env.restore(snapshot)
                seed = episode_seed(self.seed, name, sample)
                messages = list(query.messages)
                episodes.append(Episode(query.task_id, sample, seed, env, self.dialogue, messages))
        records = play(self.policy, episodes)
        groups = []
        for index, query in enumerate(queries):
            rollouts = []
            prompt: list[int] = []
            for record in records[index * samples : (index + 1) * samples]:
                if record.error is not None:
                    raise PolicyError(f"query {query.query_id!r} broke off: {record.error}")
                row = linearize(record, self.serializer)
                prompt = row["prompt_ids"]
                rollouts.append(
                    Rollout(
                        row["completion_ids"],
                        row["env_mask"],
                        row["logprobs"],
                        record.reward,
                        record,
                    )
                )
            check_prompt(query, prompt)
            groups.append(Group(query, prompt, rollouts))
        return groups

    def _put(self, env: TextEnv, query: Query, seed: int) -> None:
        options = query.reset_options()
        if self.fresh_budget:
            options["fresh_budget"] = True
        shown, _ = env.reset(seed=seed if query.seed is None else query.seed, options=options)
        # After a turn without an action the dialogue answered, not the environment.
        told = bool(query.prefix_actions) and query.prefix_actions[-1] is None
        if query.observation is not None and shown != query.observation and not told:
            raise ConfigurationError(
                f"query {query.query_id!r} replays to {shown!r:.80}, expected "
                f"{query.observation!r:.80}: run `agentbench-prefix corpus validate`"
            )

    def state_changes(self, group: Group) -> list[list[bool]]:
        """Whether each turn of each rollout changed the environment's own state: play it again."""
        env = self._env(0)
        found = []
        first = group.rollouts[0].record
        assert first is not None
        self._put(env, group.query, first.seed)
        start = env.snapshot()
        for rollout in group.rollouts:
            assert rollout.record is not None
            env.restore(start)
            changed = []
            before = start.state
            for turn in rollout.record.turns:
                if turn.action is None:
                    env.skip_turn(turn.observation)
                else:
                    env.step(turn.action)
                after = env.snapshot().state
                assert isinstance(before, dict)
                assert isinstance(after, dict)
                changed.append(after["env"] != before["env"])
                before = after
            found.append(changed)
        return found

    def watch(self, tasks: Sequence[str], samples: int) -> list[Outcome]:
        """Play tasks from their start, with the same chance whenever it is done."""
        episodes = [
            start(self._env(i * samples + s), self.dialogue, task, sample=s, seed=self.seed)
            for i, task in enumerate(tasks)
            for s in range(samples)
        ]
        records = play(self.policy, episodes)
        outcomes = []
        for index, task in enumerate(tasks):
            own = records[index * samples : (index + 1) * samples]
            for record in own:
                if record.error is not None:
                    raise PolicyError(f"task {task!r} broke off: {record.error}")
            outcomes.append(
                Outcome(
                    query_id=task,
                    trajectory_id=task,
                    task_id=task,
                    family=own[0].family,
                    prefix_turns=0,
                    n_turns=0,
                    rewards=tuple(record.reward for record in own),
                    successes=tuple(record.success for record in own),
                    turns=tuple(record.n_turns for record in own),
                    generated_tokens=tuple(
                        sum(len(turn.token_ids or ()) for turn in record.turns) for record in own
                    ),
                )
            )
        return outcomes


def summarize(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Means over episodes, by family and by kind of query."""
    if not outcomes:
        return {}

    def mean(values: Sequence[float]) -> float:
        return statistics.fmean(values)

    found = {
        "reward": mean([r for o in outcomes for r in o.rewards]),
        "success": mean([float(s) for o in outcomes for s in o.successes]),
        "turns": mean([float(t) for o in outcomes for t in o.turns]),
        "tokens_per_episode": mean([float(t) for o in outcomes for t in o.generated_tokens]),
        "mixed_groups": mean([float(o.mixed) for o in outcomes]),
    }
    won = [float(t) for o in outcomes for t, s in zip(o.turns, o.successes, strict=True) if s]
    if won:
        found["turns_of_successes"] = mean(won)
    kinds = {"raw": [o for o in outcomes if not o.prefix_turns]}
    kinds["prefix"] = [o for o in outcomes if o.prefix_turns]
    families = sorted({o.family for o in outcomes})
    parts = {f"family/{name}": [o for o in outcomes if o.family == name] for name in families}
    if kinds["prefix"]:
        parts |= kinds
    for name, part in parts.items():
        if part:
            found[f"success/{name}"] = mean([float(s) for o in part for s in o.successes])
    return found


class VLLMRollouts:
    """Plays with the copy of the weights that TRL keeps in vLLM, in its process or on a server.

    On a server all processes ask together, each for as many replies, so a process that has no
    episode left goes on asking until none has.

    Args:
        trainer: The trainer, with ``use_vllm``.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def describe(self) -> dict[str, Any]:
        """What identifies it."""
        return {"backend": "vllm", "mode": self._trainer.args.vllm_mode}

    def open(self, episodes: Sequence[Episode]) -> _VLLMSession:
        """Bring the weights up to date and start a session."""
        trainer = self._trainer
        if trainer.state.global_step != trainer._last_loaded_step:
            trainer.vllm_generation.sync_weights()
            trainer._last_loaded_step = trainer.state.global_step
        return _VLLMSession(trainer, episodes)


class _VLLMSession:
    def __init__(self, trainer: Any, episodes: Sequence[Episode]) -> None:
        self._trainer = trainer
        self._conversations = {id(episode): Conversation(episode) for episode in episodes}

    def reply(self, episodes: Sequence[Episode]) -> list[Reply | PolicyError]:
        """One reply per episode, in order."""
        serializer: ChatSerializer = self._trainer.serializer
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31
        context = min(limit, self._trainer.recipe.context or limit)
        due = read_due(self._conversations, episodes, serializer)
        room = [context - len(conversation.ids) for conversation in due]
        asked = [conversation.ids for conversation, left in zip(due, room, strict=True) if left > 0]
        generated = iter(self._generate(asked) or [])
        answers: list[Reply | PolicyError] = []
        for conversation, left in zip(due, room, strict=True):
            prompt = len(conversation.ids)
            if left <= 0:
                answers.append(overflow(context, prompt))
                continue
            tokens, logprobs = next(generated)
            stopped = tokens[-1] == serializer.end_id
            if len(tokens) > left:
                answers.append(overflow(context, prompt + len(tokens)))
                continue
            answers.append(
                Reply(
                    text=conversation.say(tokens, serializer),
                    token_ids=tuple(tokens),
                    logprobs=tuple(logprobs),
                    finish="stop" if stopped else "length",
                    prompt_tokens=prompt,
                )
            )
        return answers

    def close(self) -> None:
        """Take part until no process has an episode left."""
        while self._generate([], ended=True) is not None:
            pass

    def _generate(
        self, prompts: list[list[int]], *, ended: bool = False
    ) -> list[tuple[list[int], list[float]]] | None:
        trainer = self._trainer
        together = trainer.args.vllm_mode == "server" or trainer.args.vllm_tensor_parallel_size > 1
        if together and trainer.accelerator.num_processes > 1:
            states = gather_object([(ended, len(prompts))])
            if all(done for done, _ in states):
                return None
            most = max(1, *(n for _, n in states))
        elif ended:
            return None
        elif prompts:
            most = len(prompts)
        else:
            return []
        filled = prompts + [[trainer.serializer.end_id]] * (most - len(prompts))
        _, tokens, logprobs, _ = trainer.vllm_generation.generate(
            prompts=filled, images=None, num_generations=1
        )
        return [
            (list(ids), [scores[0] for scores in row])
            for ids, row in zip(tokens[: len(prompts)], logprobs, strict=False)
        ]


# ------------------------------------------------------------------ scoring
def score_batch(
    model: Any, batch: Batch, *, vocabulary: int, temperature: float, prefix: bool
) -> Scores:
    """Score the active rollouts of a batch.

    Args:
        model: The model, set up by :func:`scoring.prepare`.
        batch: Rollouts.
        vocabulary: Ids that the distributions are over.
        temperature: Of the distributions.
        prefix: Whether to score prefix tokens, too.

    Returns:
        Log-probabilities where the batch's masks are not 0; attached to the model's graph even if
        nothing is scored.
    """
    active = batch.active.tolist()
    masks = batch.mask.cpu().numpy() != 0
    prefix_masks = batch.prefix_mask.cpu().numpy() != 0
    sequences: list[scoring.Sequences] = []
    rows: list[int] = []
    columns: list[int] = []
    prefix_rows: list[int] = []
    prefix_columns: list[int] = []
    prefix_sources: list[int] = []
    scored = row = 0
    for group in batch.groups:
        own = [r for r in range(row, row + len(group.rollouts)) if active[r]]
        wanted = [np.flatnonzero(masks[r]).tolist() for r in own]
        for r, positions in zip(own, wanted, strict=True):
            rows += [r] * len(positions)
            columns += positions
        prompt_wanted: list[int] = []
        if prefix and own and group.query.prefix is not None:
            places = np.flatnonzero(prefix_masks[own].any(0)).tolist()
            prompt_wanted = [group.query.prefix.begin + u for u in places]
            for r in own:
                prefix_rows += [r] * len(places)
                prefix_columns += places
                prefix_sources += range(scored, scored + len(places))
            scored += len(places)
        if any(wanted) or prompt_wanted:
            completions = [group.rollouts[r - row].completion for r in own]
            sequences.append(scoring.Sequences(group.prompt, completions, wanted, prompt_wanted))
        row += len(group.rollouts)
    if not sequences:  # every process has to take part, and the loss needs a graph
        sequences = [scoring.Sequences(batch.groups[0].prompt, [], [], [])]
    found = scoring.score(model, sequences, vocabulary=vocabulary, temperature=temperature)

    def spread(
        values: torch.Tensor, rows: list[int], columns: list[int], like: torch.Tensor
    ) -> Any:
        index = (
            torch.tensor(rows, dtype=torch.long, device=like.device),
            torch.tensor(columns, dtype=torch.long, device=like.device),
        )
        return torch.zeros_like(like, dtype=values.dtype).index_put(index, values)

    logprobs = spread(found.logprobs, rows, columns, batch.mask)
    if not rows:
        logprobs = logprobs + found.logprobs.sum()
    source = torch.tensor(prefix_sources, dtype=torch.long, device=batch.mask.device)
    return Scores(
        logprobs,
        spread(found.entropies, rows, columns, batch.mask),
        spread(
            found.prompt_logprobs.index_select(0, source),
            prefix_rows,
            prefix_columns,
            batch.prefix_mask,
        ),
    )


# ------------------------------------------------------------------ the trainer
def arguments(recipe: RLRecipe, out: Path, max_tokens: int) -> GRPOConfig:
    """A recipe as TRL's configuration, for the processes there are.

    Args:
        recipe: The recipe.
        out: Folder of the run.
        max_tokens: Bound on one reply.

    Raises:
        ConfigurationError: Queries or rollouts cannot be shared out evenly, or there is no such
            device.
    """
    if recipe.device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(
            "the recipe's device is 'cuda', but torch sees none here: set device to cpu, or train "
            "on a machine that has one"
        )
    world = PartialState(cpu=recipe.device == "cpu").num_processes
    if recipe.queries_per_step % world:
        raise ConfigurationError(
            f"{recipe.queries_per_step} queries a step cannot be shared by {world} processes: "
            "choose a multiple"
        )
    rollouts = recipe.queries_per_step * recipe.samples // world
    micro = recipe.microbatch or rollouts
    if rollouts % micro:
        raise ConfigurationError(
            f"{rollouts} rollouts a process cannot be cut into micro-batches of {micro}: choose a "
            "divisor as microbatch"
        )
    fixed: dict[str, Any] = {
        "output_dir": str(out / STATES),
        "seed": recipe.seed,
        "use_cpu": recipe.device == "cpu",
        "bf16": recipe.autocast == "bfloat16",
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": rollouts // micro,
        "num_generations": recipe.samples,
        "num_iterations": recipe.epochs,
        "max_completion_length": max_tokens,
        "max_steps": recipe.steps * recipe.epochs,
        "learning_rate": recipe.lr,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": recipe.warmup_steps,
        "weight_decay": recipe.weight_decay,
        "adam_beta1": recipe.betas[0],
        "adam_beta2": recipe.betas[1],
        "max_grad_norm": recipe.grad_clip,
        "temperature": recipe.temperature,
        "top_p": recipe.top_p,
        "beta": 0.0,
        "use_vllm": recipe.rollouts == "vllm",
        "activation_checkpointing": False,
        "logging_strategy": "steps",
        "logging_steps": recipe.epochs,
        "logging_nan_inf_filter": False,
        "save_strategy": "steps",
        "save_steps": recipe.save_every * recipe.epochs,
        "save_total_limit": 2,
        "report_to": list(recipe.report_to) or "none",
        "remove_unused_columns": False,
        "ignore_data_skip": True,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
    }
    clash = sorted(set(recipe.trainer) & (set(fixed) - {"activation_checkpointing"}))
    if clash:
        raise ConfigurationError(
            f"the recipe's trainer sets {', '.join(clash)}, which its own fields decide: set those"
        )
    config = GRPOConfig(**{**fixed, **recipe.trainer})
    # With several devices in sight transformers would cut each batch up among them; a process has
    # one, and `accelerate launch` starts several processes.
    config._n_gpu = min(config.n_gpu, 1)
    return config


class RLTrainer(GRPOTrainer):  # type: ignore[misc]
    """Trains a model by an objective.

    Args:
        recipe: What to do.
        objective: The method.
        pool: Queries to train on.
        model: A ``transformers`` causal language model; it is trained in place.
        tokenizer: Its tokenizer.
        env_arguments: Constructor arguments of the environment.
        dialogue: How it is put to the model.
        max_tokens: Bound on one reply.
        watched: Tasks of the evaluation during training.
        out: Folder of the run.
        progress: Called with ``(step, steps, metrics)`` after each step.
    """

    loss_is_scaled_for_ga = True

    def __init__(
        self,
        recipe: RLRecipe,
        objective: Objective[Any],
        pool: QueryPool,
        model: Any,
        tokenizer: Any,
        *,
        env_arguments: Mapping[str, Any],
        dialogue: Dialogue,
        max_tokens: int,
        watched: Sequence[str],
        out: Path,
        progress: Progress | None = None,
    ) -> None:
        config = arguments(recipe, out, max_tokens)
        blanks = Dataset.from_dict({"prompt": [""] * (recipe.queries_per_step * recipe.steps)})
        super().__init__(
            model=model,
            args=config,
            train_dataset=blanks,
            processing_class=tokenizer,
            reward_funcs=environment_reward,  # TRL wants one; rewards come with the rollouts
        )
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        self.recipe = recipe
        self.objective = objective
        self.pool = pool
        self.out = out
        self.watched = watched
        self.serializer = ChatSerializer(tokenizer)
        self.vocabulary = min(len(tokenizer), model.get_input_embeddings().num_embeddings)
        self._max_tokens = max_tokens
        self.player = Player(
            recipe.env_id,
            env_arguments,
            dialogue,
            VLLMRollouts(self) if recipe.rollouts == "vllm" else self._scorer,
            self.serializer,
            seed=recipe.seed,
            fresh_budget=recipe.fresh_budget,
        )
        scoring.prepare(self.accelerator.unwrap_model(self.model))
        self._progress = progress
        self._begun = False
        self._seconds = 0.0
        self._clock = time.perf_counter()
        self._batch: list[Batch] = []
        self._moment = Moment(0, recipe.steps, 0, {}, 0, 1)
        self._gathered: dict[str, list[torch.Tensor]] = {}
        self._row: dict[str, float] = {}
        self.costs: dict[str, dict[str, float]] = {}
        """What an objective played beside the training."""
        self._demonstrations: dict[str, Group] = {}
        self._old_policy: TransformersPolicy | None = None

    @functools.cached_property
    def _scorer(self) -> TransformersPolicy:
        """The live weights as a policy."""
        policy = TransformersPolicy(
            self.accelerator.unwrap_model(self.model),
            self.processing_class,
            source={},
            temperature=self.recipe.temperature,
            top_p=self.recipe.top_p,
            max_tokens=self._max_tokens,
        )
        policy.context = min(policy.context, self.recipe.context or policy.context)
        return policy

    @property
    def step(self) -> int:
        """Batches of rollouts that were learnt from."""
        return int(self.state.global_step) // self.recipe.epochs

    @property
    def seconds(self) -> float:
        """Wall time spent on training, over all parts of the run, evaluation left out."""
        return self._seconds

    # -------------------------------------------------------------- a batch
    def _prepare_inputs(self, generation_batch: Any) -> Batch:
        del generation_batch
        accumulation: int = self.args.steps_per_generation
        at: int = self._step % (accumulation * self.recipe.epochs)
        if at == 0:
            self._batch = self._play()
        epoch, index = divmod(at, accumulation)
        if index == 0 and epoch and self.objective.old_logprobs == "each_epoch":
            self._batch = self._rescore(epoch)
        self._moment = dataclasses.replace(self._moment, epoch=epoch)
        return self._batch[index]

    def _play(self) -> list[Batch]:
        recipe, objective, step = self.recipe, self.objective, self.step
        if not self._begun:
            objective.begin(self.pool, self)
            self._begun = True
        self._watch(step)
        self._clock = began = time.perf_counter()
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        share = recipe.queries_per_step // world
        accepted: list[Group] = []
        refused: list[Group] = []
        for attempt in range(recipe.resampling):
            rng = np.random.Generator(np.random.Philox(key=[recipe.seed, (step << 16) + attempt]))
            drawn = objective.draw(self.pool, rng, recipe.queries_per_step)
            places = range(rank * share, rank * share + share - len(accepted))
            names = [f"{step}/{attempt}/{place}/{drawn[place].query_id}" for place in places]
            for group in self.player.play(
                [drawn[place] for place in places], recipe.samples, names
            ):
                (accepted if objective.accepts(group) else refused).append(group)
            if all(gather_object([len(accepted) == share])):
                break
        played = time.perf_counter()
        fill = refused[len(refused) - (share - len(accepted)) :]
        rows = objective.extend([*accepted, *fill], self)
        double = self.recipe.dtype == "float64"
        batch = Batch.of(rows, self.accelerator.device, torch.float64 if double else torch.float32)
        unused = slice(len(accepted) * recipe.samples, share * recipe.samples)
        for tensor in (batch.mask, batch.prefix_mask, batch.active):
            tensor[unused] = 0
        outcomes: list[Outcome] = gather_object(
            [Outcome.of(group) for group in accepted]
            + [Outcome.of(group, used=False) for group in refused]
        )
        self._moment = Moment(
            step=step,
            steps=recipe.steps,
            epoch=0,
            counts={},
            rollouts=0,
            microbatches=self.args.gradient_accumulation_steps * world,
        )
        self._whole, self._outcomes = batch, outcomes
        self._untouched = (batch.mask.clone(), batch.prefix_mask.clone(), batch.active.clone())
        if objective.old_logprobs != "first_epoch":
            batch.old_logprobs = self._current(batch)
        batches = self._prepare(batch.old_logprobs)
        row = summarize([o for o in outcomes if o.used] or outcomes)
        row |= objective.observe(outcomes, self._moment)
        row |= {
            "queries_refused": float(sum(not o.used for o in outcomes)),
            "rollouts": float(sum(len(o.rewards) for o in outcomes)),
            "generated_tokens": float(sum(sum(o.generated_tokens) for o in outcomes)),
            "learned_tokens": sum(self._moment.counts.values()) * recipe.epochs,
            "seconds/rollouts": played - began,
        }
        self._row = row
        return batches

    def _prepare(self, logprobs: torch.Tensor | None) -> list[Batch]:
        """Let the objective prepare the batch, count the denominators, cut it into parts."""
        whole, objective = self._whole, self.objective
        objective.prepare(whole, Played(self._outcomes, logprobs, self._moment, self))
        masks = objective.masks(whole)
        sums = [mask.bool().sum() for mask in masks.values()]
        sums.append(whole.mask.bool().any(1).sum())
        total = self.accelerator.reduce(torch.stack(sums), reduction="sum").tolist()
        counts = dict(zip(masks, map(float, total[:-1]), strict=True))
        self._moment = dataclasses.replace(self._moment, counts=counts, rollouts=float(total[-1]))
        return [whole.rows(begin, end) for begin, end in self._cuts(len(whole))]

    def _cuts(self, rows: int) -> list[tuple[int, int]]:
        """Rows of each micro-batch; there are as many on every process."""
        n = self.args.gradient_accumulation_steps
        return [(i * rows // n, (i + 1) * rows // n) for i in range(n)]

    def _rescore(self, epoch: int) -> list[Batch]:
        """Micro-batches of a further pass, prepared with the current log-probabilities."""
        whole = self._whole
        whole.mask, whole.prefix_mask, whole.active = (x.clone() for x in self._untouched)
        self._moment = dataclasses.replace(self._moment, epoch=epoch)
        return self._prepare(self._current(whole))

    @torch.no_grad()
    def _current(self, batch: Batch) -> torch.Tensor:
        """Log-probabilities under the current weights, by micro-batches."""
        found = torch.zeros_like(batch.rollout_logprobs)
        for begin, end in self._cuts(len(batch)):
            scores = self._score(self.model, batch.rows(begin, end), prefix=False).logprobs
            found[begin:end, : scores.shape[1]] = scores
        return found

    def _score(self, model: Any, batch: Batch, *, prefix: bool) -> Scores:
        with self.accelerator.autocast():
            return score_batch(
                model,
                batch,
                vocabulary=self.vocabulary,
                temperature=self.recipe.temperature,
                prefix=prefix,
            )

    # -------------------------------------------------------------- what an objective may ask for
    def play(self, what: str, queries: Sequence[Query], samples: int) -> list[Outcome]:
        """See :meth:`agentbench_prefix.training.objective.Engine.play`."""
        began = time.perf_counter()
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        mine = range(rank, len(queries), world)
        found: list[tuple[int, Outcome]] = []
        size = max(1, self.recipe.queries_per_step * self.recipe.samples // samples // world)
        # As often on every process, which may have to play together.
        for begin in range(0, -(-len(queries) // world), size):
            places = mine[begin : begin + size]
            names = [f"{what}/{place}/{queries[place].query_id}" for place in places]
            groups = self.player.play([queries[place] for place in places], samples, names)
            found += zip(places, map(Outcome.of, groups), strict=True)
        everything: list[tuple[int, Outcome]] = gather_object(found)
        outcomes = [outcome for _, outcome in sorted(everything, key=lambda pair: pair[0])]
        cost = self.costs.setdefault(what, {"rollouts": 0, "tokens": 0, "seconds": 0.0})
        cost["rollouts"] += sum(len(o.rewards) for o in outcomes)
        cost["tokens"] += sum(sum(o.generated_tokens) for o in outcomes)
        cost["seconds"] += time.perf_counter() - began
        return outcomes

    def hindsight(self, batch: Batch, views: Sequence[Sequence[str]]) -> torch.Tensor:
        """See :meth:`agentbench_prefix.training.objective.Engine.hindsight`."""
        return hindsight_logprobs(self._scorer, batch, views)

    def state_changes(self, group: Group) -> list[list[bool]]:
        """See :meth:`agentbench_prefix.training.objective.Engine.state_changes`."""
        return self.player.state_changes(group)

    def demonstration(self, query: Query) -> Group:
        """See :meth:`agentbench_prefix.training.objective.Engine.demonstration`."""
        known = self._demonstrations.get(query.trajectory_id)
        if known is None:
            known = self._demonstrate(query)
            self._demonstrations[query.trajectory_id] = known
        return known

    def _demonstrate(self, query: Query) -> Group:
        row, name = self.pool.trajectories.get(query.trajectory_id), self.recipe.queries.sidecar
        if row is None or name is None:
            raise ConfigurationError(
                f"the trajectory of {query.query_id!r} or its old policy is not known: set the "
                "recipe's queries.demonstrations and queries.sidecar"
            )
        if self._old_policy is None:
            self._old_policy = TransformersPolicy.load(
                find_start(name, self.recipe.env_id),
                device=str(self.accelerator.device),
                dtype=self.recipe.dtype,
                temperature=self.recipe.temperature,
            )
        messages = to_messages(row.conversation(self.player.dialogue.label).messages)
        layout = self.serializer.lay_out(messages)
        begin, end = layout.replies[0][0], layout.replies[-1][1]
        mask = layout.mask([turn.trainable for turn in row.turns])[begin:end]
        old = self._old_policy.score([layout.ids])[0].logprobs[begin:end].tolist()
        prefix = Prefix(begin, end, tuple(mask), tuple(old), token_hash(layout.ids))
        shown = dataclasses.replace(
            query, query_id=f"{query.query_id}/demonstration", prefix=prefix
        )
        return Group(shown, layout.ids, [Rollout((), (), (), row.reward, None)])

    # -------------------------------------------------------------- the loss
    def _compute_loss(self, model: Any, inputs: Batch) -> torch.Tensor:
        scores = self._score(model, inputs, prefix=self.objective.uses_prefix)
        if inputs.old_logprobs is None:
            inputs.old_logprobs = scores.logprobs.detach()
        loss = self.objective.loss(inputs, scores, self._moment)
        entropy = (scores.entropies * inputs.mask).sum()
        metrics = {"entropy": (entropy, inputs.mask.sum()), **loss.metrics}
        for name, (total, weight) in metrics.items():
            pair = torch.stack(
                [torch.as_tensor(x, dtype=torch.float64).detach().cpu() for x in (total, weight)]
            )
            self._gathered.setdefault(name, []).append(pair)
        # Gradients are averaged over processes, while the shares of the loss add up.
        value: torch.Tensor = loss.value * self.accelerator.num_processes
        return value

    # -------------------------------------------------------------- the log
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log a step: what TRL logs, how its episodes went, and what the objective measured."""
        if "train_runtime" in logs:
            return
        row: dict[str, float] = dict(self._row)
        for name in ("loss", "grad_norm", "learning_rate"):
            if name in logs:
                row[name] = float(logs[name])
        parts = gather_object([{n: torch.stack(p).sum(0) for n, p in self._gathered.items()}])
        self._gathered = {}
        for name in sorted({name for part in parts for name in part}):
            total, weight = sum(part[name] for part in parts if name in part).tolist()
            if weight:
                row[name] = total / weight
        now = time.perf_counter()
        self._seconds += now - self._clock
        row["seconds/update"] = now - self._clock - row["seconds/rollouts"]
        self._metrics["train"].clear()
        super().log(dict(row), start_time)
        self._write({"step": self.step - 1, **row})
        if self._progress is not None and self.accelerator.is_main_process:
            self._progress(self.step - 1, self.recipe.steps, row)

    def _write(self, row: Mapping[str, float]) -> None:
        if self.accelerator.is_main_process:
            append_lines(self.out / LOG, [json.dumps(row)])

    def _watch(self, step: int) -> None:
        """Evaluate on the fixed tasks, if it is time."""
        every = self.recipe.evaluation.every
        if not every or (step % every and step < self.recipe.steps):
            return
        began = time.perf_counter()
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        mine = self.player.watch(self.watched[rank::world], self.recipe.evaluation.samples)
        row = {f"eval/{name}": value for name, value in summarize(gather_object(mine)).items()}
        row["eval/seconds"] = time.perf_counter() - began
        self._write({"step": step, **row})

    # -------------------------------------------------------------- states
    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Nothing: the run writes a card of its own."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            # Written last: a state with this file is whole.
            write_json_atomic(
                folder / OWN_STATE,
                {
                    "objective": self.objective.state_dict(),
                    "seconds": self._seconds,
                    "costs": self.costs,
                },
            )

    def run(self) -> None:
        """Train to the end, from the last whole state if there is one."""
        found = last_state(Path(self.args.output_dir))
        if found is None:
            self.out.mkdir(parents=True, exist_ok=True)
            begun = 0
        else:
            own = json.loads((found / OWN_STATE).read_text("utf-8"))
            self.objective.load_state_dict(own["objective"])
            self._seconds, self.costs = own["seconds"], own["costs"]
            begun = int(found.name.partition("-")[2]) // self.recipe.epochs
        if self.accelerator.is_main_process:
            log = self.out / LOG
            kept = [x for x in read_whole_lines(log) if json.loads(x)["step"] < begun]
            write_text_atomic(log, "".join(line + "\n" for line in kept))
        self._begun = found is not None
        self.train(resume_from_checkpoint=None if found is None else str(found))
        self._watch(self.recipe.steps)

    def save(self, folder: Path) -> None:
        """Write the weights, in the recipe's ``save_dtype``; every process takes part."""
        dtype = getattr(torch, self.recipe.save_dtype)
        model = self.accelerator.unwrap_model(self.model)
        tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        tied -= {name for name, _ in model.named_parameters()}
        state = {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in self.accelerator.get_state_dict(self.model).items()
            if name not in tied
        }
        if self.accelerator.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)
            before = model.config.dtype
            model.config.dtype = dtype
            model.save_pretrained(folder, state_dict=state)
            model.config.dtype = before
        self.accelerator.wait_for_everyone()


def last_state(folder: Path) -> Path | None:
    """The newest whole state in a folder."""
    found = [path.parent for path in folder.glob(f"checkpoint-*/{OWN_STATE}")]
    return max(found, key=lambda path: int(path.name.partition("-")[2]), default=None)
