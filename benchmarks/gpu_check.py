"""For whoever has a GPU: what a step of each method takes at the size of the papers' model.

    python benchmarks/gpu_check.py [--minutes 8] [--out FILE.json]

Needs one card with 80 GB and nothing from a hub. Every method takes a step of its recipe of tier
``qwen3-1.7b`` on a randomly initialised model of that size, in bfloat16 with weights in float32. A
random model never ends a turn, so a stand-in says random words in real environments, and every
second episode counts as solved; vLLM is left out, and so is all but ``--queries`` of a step's
queries, which changes neither memory nor rate, since a micro-batch is one group. Then a run of the
CPU tier is made on both devices. ``--toy --device cpu`` runs all of it in small.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from training import SETTINGS, make_trainer, measure

from agentbench_prefix import registry, rollouts
from agentbench_prefix.files import write_json_atomic
from agentbench_prefix.policies.base import Episode, Reply
from agentbench_prefix.policies.tokens import Conversation, read_due
from agentbench_prefix.policies.transformers import TransformersPolicy
from agentbench_prefix.serialization import ChatSerializer
from agentbench_prefix.training.method import load_start
from agentbench_prefix.training.plan import Shape, estimate
from agentbench_prefix.training.rl_recipe import RLRecipe
from agentbench_prefix.training.summary import LOG

ENV = "TextCraft-v0"
METHODS = ("grpo", "grpo_mis", "dapo", "replay_grpo", "prefix_grpo", "trial", "adaprefix")
# Dense bfloat16 operations a second, from the makers' data sheets; the first match counts.
PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}
TOY_MODEL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 2048,
}


class RandomWords:
    """Policy and session in one: as many random tokens a reply as it is told, at once."""

    def __init__(self, serializer: ChatSerializer, tokens: int) -> None:
        self.serializer = serializer
        self.tokens = tokens
        tokenizer = serializer.tokenizer
        special = set(tokenizer.all_special_ids)
        self.words = [i for i in range(len(tokenizer)) if i not in special]
        self.rng = random.Random(0)
        self.conversations: dict[int, Conversation] = {}

    def describe(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def open(self, episodes: Sequence[Episode]) -> RandomWords:
        """Begin conversations."""
        self.conversations = {id(episode): Conversation(episode) for episode in episodes}
        return self

    def close(self) -> None:
        """Free nothing."""

    def reply(self, episodes: Sequence[Episode]) -> list[Reply]:
        """Random tokens and the end of the turn."""
        replies = []
        logprob = -math.log(len(self.words))
        for conversation in read_due(self.conversations, episodes, self.serializer):
            ids = [*self.rng.choices(self.words, k=self.tokens - 1), self.serializer.end_id]
            text = conversation.say(ids, self.serializer)
            replies.append(Reply(text, tuple(ids), (logprob,) * len(ids)))
        return replies


def big_recipe(name: str, arguments: argparse.Namespace) -> RLRecipe:
    """The recipe of the papers' size, for one device, a corpus that is here, and two steps."""
    method: Any = registry.method(name)
    changes: dict[str, Any] = {
        "init": "sft",
        "dialogue": "compact",
        "device": arguments.device,
        "rollouts": "transformers",
        "steps": 2,
        "queries_per_step": arguments.queries,
        "objective": SETTINGS.get(name, {}),
        "evaluation": {"every": 0},
        "save_every": 10**6,
    }
    if arguments.toy:
        changes |= {"samples": 2, "microbatch": 2, "max_turns": 3, "expected": {"model": TOY_MODEL}}
    tier = "qwen3-1.7b"
    if method.recipe(ENV, tier).queries.source != "tasks":
        changes["queries"] = {"corpus": "textcraft-prefix"}
    recipe: RLRecipe = method.recipe(ENV, tier, **changes)
    return recipe


def now(device: str) -> float:
    """Seconds, with everything done that the device was asked for."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def random_model(recipe: RLRecipe) -> Any:
    config = transformers.Qwen3Config(**recipe.expected.model)
    torch.manual_seed(0)
    with torch.device(recipe.device):
        return transformers.Qwen3ForCausalLM(config)


def mixed(play: Any) -> Any:
    """Every second sample counts as solved: a group that is all alike would not be learnt from."""

    def played(*given: Any) -> Any:
        return [
            dataclasses.replace(
                group,
                rollouts=[
                    dataclasses.replace(rollout, reward=float(i % 2))
                    for i, rollout in enumerate(group.rollouts)
                ],
            )
            for group in play(*given)
        ]

    return played


def step_of(name: str, arguments: argparse.Namespace, peak: float | None) -> dict[str, Any]:
    """Measure a step of a method."""
    recipe = big_recipe(name, arguments)
    _, tokenizer, origin = load_start("sft", ENV)
    model = random_model(recipe)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(name, recipe, (model, tokenizer, origin), Path(folder))
        trainer.vocabulary = model.get_input_embeddings().num_embeddings
        turns = recipe.max_turns or 20
        words = max(2, round(recipe.expected.generated_tokens / turns))
        trainer.player.policy = RandomWords(trainer.serializer, 4 if arguments.toy else words)
        trainer.player.play = mixed(trainer.player.play)  # type: ignore[method-assign]
        if arguments.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        cost = measure(trainer, clock=lambda: now(arguments.device), bare=False)
    groups = cost.rollouts / recipe.samples
    sizes = {
        "prompt_tokens": cost.prompt / groups,
        "episode_tokens": cost.continuation / cost.rollouts,
        "generated_tokens": cost.generated / cost.rollouts,
    }
    # What activation checkpointing computes twice is not counted as work.
    counted = recipe.model_copy(
        update={
            "steps": 1,
            "trainer": {},
            "expected": recipe.expected.model_copy(update=sizes),
        }
    )
    shape = Shape.of(model.config.to_dict())

    class UpdateAlone:
        old_logprobs = "first_epoch"

    taken = estimate(counted, UpdateAlone(), shape)  # type: ignore[arg-type]
    update = cost.seconds["update"]
    found = {
        **sizes,
        "update_seconds": update,
        "before_update_seconds": cost.seconds["playing"],
        "tokens_per_second": taken.learned / update,
        "operations_per_second": taken.flops / update,
    }
    if peak is not None:
        found["share_of_peak"] = taken.flops / update / peak
    if arguments.device == "cuda":
        found["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def matmul_rate(arguments: argparse.Namespace) -> float:
    """Operations a second of a large bfloat16 product."""
    n, times = (256, 2) if arguments.toy else (8192, 20)
    a = torch.randn(n, n, device=arguments.device).bfloat16()
    a @ a
    begin = now(arguments.device)
    for _ in range(times):
        a @ a
    return 2 * n**3 * times / (now(arguments.device) - begin)


def rollout_rate(arguments: argparse.Namespace) -> float:
    """Generated tokens a second of this library's own engine with the big model."""
    recipe = big_recipe("grpo", arguments)
    _, tokenizer, _ = load_start("sft", ENV)
    model = random_model(recipe)
    if arguments.device == "cuda":
        model = model.bfloat16()
    samples, tokens = (2, 4) if arguments.toy else (32, 64)
    policy = TransformersPolicy(model, tokenizer, source={}, max_tokens=tokens)
    rate = 0.0
    for task in ("textcraft_31", "textcraft_32"):  # the first warms up
        episodes = []
        for sample in range(samples):
            env = registry.make(ENV, max_turns=2)
            style = env.dialogues()["compact"]
            episodes.append(rollouts.start(env, style, task, sample=sample))
        begin = now(arguments.device)
        records = rollouts.play(policy, episodes)
        spent = now(arguments.device) - begin
        rate = sum(len(turn.token_ids or ()) for r in records for turn in r.turns) / spent
    return rate


def small_run(device: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """A run of the CPU tier: success on the watched tasks, rewards, and seconds a step."""
    method: Any = registry.method("grpo")
    changes: dict[str, Any] = {"steps": 5}
    if arguments.toy:
        changes = {"steps": 2, "queries_per_step": 2, "samples": 2, "max_turns": 4}
        changes["evaluation"] = {"tasks": 4, "samples": 1}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        method.train(ENV, out=out, init="sft", device=device, **changes)
        rows = [json.loads(line) for line in (out / LOG).read_text("utf-8").splitlines()]
        recipe = json.loads((out / "run.json").read_text("utf-8"))["recipe"]
    steps = [row for row in rows if "reward" in row]
    tasks = recipe["evaluation"]["tasks"]
    return {
        "watched": [row["eval/success"] for row in rows if "eval/success" in row],
        "watched_tasks": sum(tasks.values()) if isinstance(tasks, dict) else tasks,
        "rewards": [row["reward"] for row in steps],
        "seconds_a_step": statistics.median(
            row["seconds/rollouts"] + row["seconds/update"] for row in steps
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--toy", action="store_true", help="a tiny model and few turns")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--queries", type=int, default=2, help="queries a step")
    parser.add_argument(
        "--minutes", type=float, default=8, help="no method is begun after three quarters of it"
    )
    parser.add_argument("--peak", type=float, help="dense bfloat16 operations a second of the card")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device is visible to torch: run this on one, or try --toy --device cpu")
    begin = time.perf_counter()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    card = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    known = next((rate for name, rate in PEAKS.items() if name in card), None)
    peak = arguments.peak or known
    matmul = matmul_rate(arguments)
    data_sheet = "unknown" if peak is None else f"{peak / 1e12:.0f}"
    print(f"{card}: {matmul / 1e12:.2f} TFLOP/s in a bfloat16 product, data sheet {data_sheet}")
    figures: dict[str, Any] = {"card": card, "torch": torch.__version__, "peak": peak}
    figures |= {"matmul": matmul, "methods": {}}
    failed, missing = [], []
    expected = big_recipe("grpo", arguments).expected
    print(
        f"the recipe expects {expected.prompt_tokens:.0f} tokens of prompt, "
        f"{expected.episode_tokens:.0f} an episode, {expected.generated_tokens:.0f} of them "
        f"generated; here {arguments.queries} queries a step"
    )
    for name in arguments.methods:
        if time.perf_counter() - begin > 45 * arguments.minutes:
            missing.append(name)
            continue
        try:
            found = step_of(name, arguments, peak)
        except Exception as error:  # noqa: BLE001 - the other methods are measured all the same
            failed.append(name)
            print(f"{name:12} FAILED: {type(error).__name__}: {error}".split("\n", 1)[0])
            found = {"error": f"{type(error).__name__}: {error}"}
        else:
            memory = found.get("peak_memory_gib")
            rate = found["operations_per_second"]
            share = f"{100 * rate / matmul:.0f} % of the product's rate"
            if peak is not None:
                share += f", {100 * rate / peak:.0f} % of the peak"
            print(
                f"{name:12} update {found['update_seconds']:6.2f} s, before it "
                f"{found['before_update_seconds']:6.2f} s; {found['tokens_per_second']:8.0f} "
                f"tokens/s, {share}; memory "
                f"{'not measured' if memory is None else f'{memory:.1f} GiB'}; "
                f"{found['prompt_tokens']:.0f} + {found['episode_tokens']:.0f} tokens, "
                f"{found['generated_tokens']:.0f} generated"
            )
        figures["methods"][name] = found
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
    figures["rollout_tokens_per_second"] = rollout_rate(arguments)
    print(f"rollouts without vLLM: {figures['rollout_tokens_per_second']:.0f} generated tokens/s")
    gc.collect()

    runs = {
        device: small_run(device, arguments) for device in dict.fromkeys(["cpu", arguments.device])
    }
    figures["cpu_tier"] = runs
    for device, run in runs.items():
        print(
            f"CPU tier on {device}: {run['seconds_a_step']:.2f} s a step; watched "
            f"{run['watched'][0]:.3f} -> {run['watched'][-1]:.3f}; rewards "
            + " ".join(f"{reward:.2f}" for reward in run["rewards"])
        )
    there, here = runs["cpu"], runs[arguments.device]
    apart = abs(there["watched"][0] - here["watched"][0])
    share = (there["watched"][0] + here["watched"][0]) / 2
    # Tasks, not episodes, are independent.
    allowed = 1.96 * math.sqrt(2 * max(share * (1 - share), 0.01) / there["watched_tasks"])
    if apart > allowed:
        failed.append("the CPU tier")
        print(f"before training the devices differ by {apart:.3f}, more than {allowed:.3f}")
    if arguments.out is not None:
        write_json_atomic(arguments.out, figures)
    minutes = (time.perf_counter() - begin) / 60
    print(f"{minutes:.1f} minutes" + (f"; not reached: {', '.join(missing)}" if missing else ""))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
