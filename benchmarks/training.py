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
from pathlib import Path
from typing import Any

import torch

from agentbench_prefix import registry
from agentbench_prefix.serialization import ChatSerializer
from agentbench_prefix.training.method import load_start
from agentbench_prefix.training.rl_method import prepare_data
from agentbench_prefix.training.rl_trainer import RLTrainer, score_batch

PAIRS = (("prefix_grpo", "replay_grpo", 1.10), ("trial", "grpo", 1.6))
SETTINGS: dict[str, dict[str, Any]] = {
    "trial": {"warmup": 0},
    "adaprefix": {"span": 0.0, "calibrate": False},
}


@dataclasses.dataclass
class Cost:
    """CPU seconds of some steps.

    Attributes:
        playing: Episodes, and what is scored before the update.
        update: Both optimizer epochs.
        bare: Forward and backward of the same rollouts, as often, with nothing else.
        tokens: Generated tokens that were learnt.
    """

    playing: float = 0.0
    update: float = 0.0
    bare: float = 0.0
    tokens: int = 0

    @property
    def step(self) -> float:
        """All of the trainer's work."""
        return self.playing + self.update


def bare_pass(trainer: RLTrainer, batch: Any) -> float:
    begin = time.process_time()
    scores = score_batch(
        trainer.model,
        batch,
        vocabulary=trainer.vocabulary,
        temperature=1.0,
        prefix=trainer.objective.uses_prefix,
    )
    (scores.logprobs.sum() + scores.prefix_logprobs.sum()).backward()
    spent = time.process_time() - begin
    trainer.model.zero_grad()
    return spent


def measure(name: str, env_id: str, init: str, steps: int, out: Path) -> Cost:
    method = registry.method(name)
    recipe = method.recipe(  # type: ignore[attr-defined]
        env_id,
        init=init,
        steps=steps + 1,
        objective=SETTINGS.get(name, {}),
        evaluation={"every": 0},
        save_every=10**6,
    )
    model, tokenizer, origin = load_start(init, env_id)
    data = prepare_data(recipe, ChatSerializer(tokenizer), origin)
    trainer = RLTrainer(
        recipe,
        method.make_objective(recipe),  # type: ignore[attr-defined]
        data.pool,
        model,
        tokenizer,
        env_arguments=data.env.arguments(),
        dialogue=data.dialogue,
        max_tokens=data.dialogue.max_tokens,
        watched=[],
        out=out,
    )
    cost = Cost()
    play, log = trainer._play, trainer.log
    began = 0.0

    def playing() -> Any:
        nonlocal began
        begin = time.process_time()
        batches = play()
        if trainer.step:  # the first step warms up
            cost.playing += time.process_time() - begin
            for _ in range(recipe.epochs):
                cost.bare += sum(bare_pass(trainer, batch) for batch in batches)
            cost.tokens += sum(int(b.mask[b.active].sum()) for b in batches) * recipe.epochs
        began = time.process_time()
        return batches

    def logging(row: dict[str, float], *arguments: Any) -> None:
        if trainer.step > 1 and "loss" in row:
            cost.update += time.process_time() - began
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
        with tempfile.TemporaryDirectory() as folder:
            cost = measure(name, arguments.env, arguments.init, arguments.steps, Path(folder))
        costs[name] = cost
        print(
            f"{name:12} {cost.step / arguments.steps:6.2f} s a step: playing "
            f"{cost.playing / arguments.steps:5.2f}, update {cost.update / arguments.steps:5.2f} "
            f"({cost.tokens / cost.update:6.0f} learnt tokens/s, {cost.update / cost.bare:4.2f} "
            "times forward and backward alone)"
        )
    for method, below, target in PAIRS:
        if method in costs and below in costs:
            ratio = costs[method].step / costs[below].step
            print(f"{method} / {below}: {ratio:4.2f} (target at most {target})")


if __name__ == "__main__":
    main()
