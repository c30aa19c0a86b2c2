"""Small finished runs, made by the real evaluator with policies that solve what they are told."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import toy
from test_cards import make_card

from agentbench_prefix.evaluation.metrics import (
    Malformed,
    Metrics,
    Reach,
    TaskResult,
    Tokens,
    Turns,
    rates,
)
from agentbench_prefix.evaluation.runner import EvalConfig, evaluate
from agentbench_prefix.files import sha256_file
from agentbench_prefix.leaderboard.results import Result, Settings, make_result
from agentbench_prefix.policies.base import Reply
from agentbench_prefix.policies.tokens import check_checkpoint
from agentbench_prefix.training.summary import (
    Cost,
    Init,
    Preprocessing,
    RunSummary,
    Spent,
    recipe_sha256,
)

SAMPLES = 4
TASKS = toy.Toy().tasks("test")
REACHABLE = [task for task in TASKS if toy.Toy().family(task) != "digits_12"]


class Solver:
    """Solves the first samples of each task, as many as it is told."""

    def __init__(self, counts, sha256):
        self.counts = counts
        self.sha256 = sha256

    def describe(self):
        return {"kind": "solver", "sha256": self.sha256}

    def open(self, episodes):
        return self

    def reply(self, episodes):
        return [self._one(episode) for episode in episodes]

    def _one(self, episode):
        if episode.sample < self.counts.get(episode.task_id, 0):
            return Reply(episode.env.teacher().next_turn().action)
        return Reply("look")

    def close(self):
        pass


def make_checkpoint(folder, text, **card):
    """A folder that passes for a checkpoint: weights of its own, a tokenizer, a card."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), dtype=np.uint8)
    save_file({"weight": digest.astype(np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"dtype": "float32"}')
    (folder / "tokenizer.json").write_text("{}")
    fields = {"data_hash": toy.Toy.data_hash, **card}
    make_card(**fields, model_sha256=sha256_file(folder / "model.safetensors")).save(folder)
    return folder


def make_summary(checkpoint, method="grpo", init="base", seed=0, **changes):
    return RunSummary(
        **{
            "method": method,
            "env_id": "Toy-v0",
            "data_hash": toy.Toy.data_hash,
            "dialogue": "bare@1",
            "tier": "cpu",
            "init": Init(name=init, model_sha256=None if init == "scratch" else "b" * 64),
            "seed": seed,
            "recipe": {"lr": 0.001, "seed": seed, "init": init},
            "corpora": {"toys 1.0 queries/train.parquet": "c" * 64},
            "spent": Spent(steps=60, rollouts=3840, generated_tokens=50_000, learned_tokens=99_000),
            "preprocessing": Preprocessing(
                teacher=Cost(rollouts=120),
                sidecars=Cost(tokens=4_000, seconds=30.0),
                probe=Cost(rollouts=100),
                calibration=Cost(rollouts=60),
            ),
            "wall_seconds": 600.0,
            "model_sha256": check_checkpoint(checkpoint).model,
            "code_version": "d" * 40,
            "command": "python -m agentbench_prefix.train",
            **changes,
        }
    )


def counts_of(seed, strength=0.5):
    """Solved samples by task, drawn by a seed."""
    rng = np.random.default_rng(seed)
    return {task: int(rng.binomial(SAMPLES, strength)) for task in REACHABLE}


def make_run(folder, counts, splits=("test",), samples=SAMPLES, policy=None, **summary):
    """A finished run: checkpoint, summary, evaluations. Returns its folder."""
    text = json.dumps([str(folder), sorted(counts.items())])
    card = {"method": summary.get("method", "grpo")}
    checkpoint = make_checkpoint(folder / "checkpoint", text, **card)
    made = make_summary(checkpoint, **summary)
    made.save(folder)
    for split in splits:
        evaluate_run(folder, counts, split, samples, made.method, policy)
    return folder


def evaluate_run(folder, counts, split, samples=SAMPLES, method="grpo", policy=None, **config):
    sha256 = check_checkpoint(folder / "checkpoint").checkpoint
    settings = EvalConfig(method=method, env="Toy-v0", split=split, samples=samples, **config)
    return evaluate(
        settings, policy or Solver(counts, sha256), folder / "eval" / split, warn=lambda text: None
    )


def result_of(folder):
    summary = RunSummary.load(folder)
    return make_result(summary, folder / "checkpoint", sorted((folder / "eval").iterdir()))


def quick_result(folder, counts, **arguments):
    return result_of(make_run(Path(folder), counts, **arguments))


def metrics_of(counts, families, split="test", samples=SAMPLES):
    """Metrics of a split from solved samples and family by task."""
    groups = {}
    for task, family in families.items():
        groups.setdefault(family, []).append(counts[task])
    return Metrics(
        **dict(rates([counts[task] for task in families], samples, 0)),
        env="Toy-v0",
        method="grpo",
        split=split,
        samples=samples,
        families={name: rates(group, samples, 0) for name, group in sorted(groups.items())},
        turns=Turns(all=2.0, successes=None),
        tokens=Tokens(
            generated_per_episode=None,
            generated_per_turn=None,
            generated_total=None,
            opening_prompt=None,
            longest_prompt=None,
        ),
        invalid_action_rate=0.0,
        malformed=Malformed(replies=0, problems={}, notes={}, cut_at_max_tokens=0),
        failure_categories={},
        out_of_reach=Reach(max_turns=8, tasks=[], ceiling=1.0),
        tasks={
            task: TaskResult(family=families[task], successes=counts[task]) for task in families
        },
    )


def made_up(splits, samples=SAMPLES, settings=None, **run):
    """A result without a run: ``splits`` is ``(counts, families)`` by split."""
    fields = {"method": "grpo", "init": "base", "seed": 0, **run}
    init = fields.pop("init")
    summary = RunSummary(
        **{
            "env_id": "Toy-v0",
            "data_hash": "a" * 64,
            "dialogue": "bare@1",
            "tier": "cpu",
            "init": Init(name=init),
            "recipe": {"lr": 0.001, "seed": fields["seed"], "init": init},
            "spent": Spent(steps=10, rollouts=80, generated_tokens=900, learned_tokens=800),
            "wall_seconds": 60.0,
            "model_sha256": hashlib.sha256(repr(sorted(fields.items())).encode()).hexdigest(),
            "code_version": "d" * 40,
            "command": "train",
            **{name: value for name, value in fields.items() if name != "recipe"},
            **({"recipe": fields["recipe"]} if "recipe" in fields else {}),
        }
    )
    return Result(
        run=summary,
        recipe_sha256=recipe_sha256(summary.recipe),
        settings=Settings(
            **{
                "samples": samples,
                "temperature": 1.0,
                "top_p": 1.0,
                "max_tokens": 16,
                "max_turns": 8,
                "dialogue": "bare@1",
                "env_arguments": {},
                **(settings or {}),
            }
        ),
        evaluation_seed=0,
        policy={"kind": "made up"},
        evaluation_code="tested",
        splits={
            split: metrics_of(counts, families, split, samples)
            for split, (counts, families) in splits.items()
        },
    )
