"""What a step of each method takes beside the one it builds on, and the trainer beside bare work.

    python benchmarks/training.py [--env TextCraft-v0] [--init sft] [--steps 4] [--methods ...]

Every method trains a few steps from the same start, with its own recipe of the CPU tier, and pays
in CPU seconds of this process, so that a busy machine does not decide. What a method plays before
its first step is left out; TRIAL has no warm-up. Targets: Prefix-GRPO at most 1.10 times
Replay-GRPO, TRIAL at most 1.6 times GRPO, the trainer's update at most 1.10 times forward and
backward alone on the same batch. Generation beside TRL's: ``eval_throughput.py``.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from agentbench_prefix import registry
from agentbench_prefix.serialization import ChatSerializer
from agentbench_prefix.training.method import load_start
from agentbench_prefix.training.rl_method import prepare_data
from agentbench_prefix.training.rl_recipe import RLRecipe
from agentbench_prefix.training.rl_trainer import RLTrainer, score_batch

PAIRS = (("prefix_grpo", "replay_grpo", 1.10), ("trial", "grpo", 1.6))
SETTINGS: dict[str, dict[str, Any]] = {
    "trial": {"warmup": 0},
    "adaprefix": {"span": 0.0, "calibrate": False},
}


@dataclasses.dataclass
class Cost:
    """What some steps took.

    Attributes:
        seconds: Of each part: ``playing`` (episodes, and what is scored before the update),
            ``update`` (all optimizer epochs), ``bare`` (forward and backward of the same rollouts,
            as often, with nothing else).
        rollouts: Rollouts that were played.
        prompt: Tokens of their groups' prompts, each group's once.
        continuation: Tokens of their continuations, what the environment says included.
        generated: Generated tokens.
        learned: Generated tokens that reached the loss, summed over optimizer epochs.
    """

    seconds: dict[str, float] = dataclasses.field(
        default_factory=lambda: {"playing": 0.0, "update": 0.0, "bare": 0.0}
    )
    rollouts: int = 0
    prompt: int = 0
    continuation: int = 0
    generated: int = 0
    learned: int = 0

    @property
    def step(self) -> float:
        """Seconds of the trainer's work."""
        return self.seconds["playing"] + self.seconds["update"]


def bare_pass(trainer: RLTrainer, batch: Any) -> None:
    scores = score_batch(
        trainer.model,
        batch,
        vocabulary=trainer.vocabulary,
        temperature=1.0,
        prefix=trainer.objective.uses_prefix,
    )
    (scores.logprobs.sum() + scores.prefix_logprobs.sum()).backward()
    trainer.model.zero_grad()


def make_trainer(
    name: str, recipe: RLRecipe, start: tuple[Any, Any, dict[str, Any]], out: Path
) -> RLTrainer:
    """A trainer that watches and saves nothing, of a model with its tokenizer and origin."""
    model, tokenizer, origin = start
    data = prepare_data(recipe, ChatSerializer(tokenizer), origin)
    trainer = RLTrainer(
        recipe,
        registry.method(name).make_objective(recipe),  # type: ignore[attr-defined]
        data.pool,
        model,
        tokenizer,
        env_arguments=data.env.arguments(),
        dialogue=data.dialogue,
        max_tokens=recipe.max_tokens or data.dialogue.max_tokens,
        watched=[],
        out=out,
    )
    # Whatever save_every is, transformers saves at the end: of a large model gigabytes.
    trainer._save_checkpoint = lambda *_: None  # type: ignore[method-assign]
    return trainer


def measure(
    trainer: RLTrainer, *, clock: Callable[[], float] = time.process_time, bare: bool = True
) -> Cost:
    """Train to the end; what is measured begins after the first step, which warms up."""
    cost = Cost()
    play, log = trainer._play, trainer.log
    epochs = trainer.recipe.epochs
    began = 0.0

    def playing() -> Any:
        nonlocal began
        begin = clock()
        batches = play()
        if trainer.step:
            cost.seconds["playing"] += clock() - begin
            begin = clock()
            for batch in batches * epochs if bare else []:
                bare_pass(trainer, batch)
            cost.seconds["bare"] += clock() - begin
            cost.learned += sum(int(b.mask[b.active].sum()) for b in batches) * epochs
            for group in trainer._whole.groups:
                cost.prompt += len(group.prompt)
                cost.rollouts += len(group.rollouts)
                cost.continuation += sum(len(r.completion) for r in group.rollouts)
                cost.generated += sum(sum(r.mask) for r in group.rollouts)
        began = clock()
        return batches

    def logging(row: dict[str, float], *arguments: Any) -> None:
        if trainer.step > 1 and "loss" in row:
            cost.seconds["update"] += clock() - began
        log(row, *arguments)

    trainer._play = playing  # type: ignore[method-assign]
    trainer.log = logging  # type: ignore[method-assign]
    trainer.run()
    return cost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--env", default="TextCraft-v0")
    parser.add_argument("--init", default="sft")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--methods", nargs="*", default=sorted({m for p in PAIRS for m in p[:2]}))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    costs: dict[str, Cost] = {}
    for name in arguments.methods:
        recipe = registry.method(name).recipe(  # type: ignore[attr-defined]
            arguments.env,
            init=arguments.init,
            steps=arguments.steps + 1,
            objective=SETTINGS.get(name, {}),
            evaluation={"every": 0},
            save_every=10**6,
        )
        start = load_start(arguments.init, arguments.env)
        with tempfile.TemporaryDirectory() as folder:
            cost = measure(make_trainer(name, recipe, start, Path(folder)))
        costs[name] = cost
        update = cost.seconds["update"]
        print(
            f"{name:12} {cost.step / arguments.steps:6.2f} s a step: playing "
            f"{cost.seconds['playing'] / arguments.steps:5.2f}, update "
            f"{update / arguments.steps:5.2f} ({cost.learned / update:6.0f} learnt tokens/s, "
            f"{update / cost.seconds['bare']:4.2f} times forward and backward alone)"
        )
    for method, below, target in PAIRS:
        if method in costs and below in costs:
            ratio = costs[method].step / costs[below].step
            print(f"{method} / {below}: {ratio:4.2f} (target at most {target})")


if __name__ == "__main__":
    main()
