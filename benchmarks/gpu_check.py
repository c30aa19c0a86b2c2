"""For whoever has a GPU: what a step of each method takes at the size of the papers' model.

    python benchmarks/gpu_check.py [--minutes 8] [--out FILE.json]

Needs one card with 80 GB and nothing from a hub. Every method takes a step of its recipe of tier
``qwen3-1.7b`` on a randomly initialised model of that size, in bfloat16 with weights in float32. A
random model never ends a turn, so a stand-in plays: an action and random words, as many as the
recipe expects; every second episode counts as solved. Methods with released queries cut released
trajectories halfway instead. vLLM is left out, and so is all but ``--queries`` of a step's queries,
which changes neither memory nor rate, since a micro-batch is one group. Then a run of the CPU tier
is made on both devices. ``--toy --device cpu`` runs all of it in small.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from training import SETTINGS, make_trainer, measure

from agentbench_prefix import registry, rollouts
from agentbench_prefix.corpora.schema import token_hash
from agentbench_prefix.files import write_json_atomic
from agentbench_prefix.policies.base import Episode, Reply
from agentbench_prefix.policies.tokens import Conversation, read_due
from agentbench_prefix.policies.transformers import TransformersPolicy
from agentbench_prefix.serialization import ChatSerializer
from agentbench_prefix.training.method import load_start
from agentbench_prefix.training.plan import Shape, estimate
from agentbench_prefix.training.queries import Prefix, Query, QueryPool
from agentbench_prefix.training.rl_recipe import RLRecipe
from agentbench_prefix.training.rl_trainer import Player
from agentbench_prefix.training.summary import LOG

ENV = "TextCraft-v0"
TIER = "qwen3-1.7b"
METHODS = ("grpo", "grpo_mis", "dapo", "replay_grpo", "prefix_grpo", "trial", "adaprefix")
# They start from released queries, which there are in the small models' dialogue alone.
CUT = ("replay_grpo", "prefix_grpo")
ACTION = "inventory"
# Dense bfloat16 operations a second, from the makers' data sheets; the first match counts.
PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
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
    """Policy and session in one: an action and random words, as many tokens as it is told."""

    def __init__(self, serializer: ChatSerializer, tokens: int) -> None:
        self.serializer = serializer
        self.tokens = tokens
        tokenizer = serializer.tokenizer
        # Nothing that a parser could take for more than words.
        self.words = [i for i in range(len(tokenizer)) if tokenizer.decode([i]).strip().isalpha()]
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
        """The action, and on the next line the words."""
        replies = []
        logprob = -math.log(len(self.words))
        for conversation in read_due(self.conversations, episodes, self.serializer):
            action = conversation.episode.dialogue.render(ACTION, "") + "\n"
            ids = self.serializer.tokenizer.encode(action, add_special_tokens=False)
            ids += self.rng.choices(self.words, k=max(1, self.tokens - len(ids) - 1))
            ids.append(self.serializer.end_id)
            text = conversation.say(ids, self.serializer)
            replies.append(Reply(text, tuple(ids), (logprob,) * len(ids)))
        return replies


def settings(name: str) -> dict[str, Any]:
    """Fields of a method's objective that differ here."""
    method: Any = registry.method(name)
    if name == "grpo_mis":  # a random model and a stand-in never agree
        return {"weight_low": 1e-12, "weight_high": 1e12}
    if name == "trial":  # the view that is short in the tokens that are here
        small = method.recipe(ENV, "cpu").objective
        view = ("view", "last_view", "true_word", "false_word")
        return SETTINGS[name] | {field: small[field] for field in view}
    return SETTINGS.get(name, {})


def big_recipe(name: str, arguments: argparse.Namespace) -> RLRecipe:
    """The recipe of the papers' size, for one device, a corpus that is here, and two steps."""
    method: Any = registry.method(name)
    changes: dict[str, Any] = {
        "init": "sft",
        "device": arguments.device,
        "rollouts": "transformers",
        "steps": 2,
        "queries_per_step": arguments.queries,
        "objective": settings(name),
        "evaluation": {"every": 0},
    }
    if arguments.toy:
        changes |= {"samples": 2, "microbatch": 2, "max_turns": 3, "expected": {"model": TOY_MODEL}}
    if method.recipe(ENV, TIER).queries.source != "tasks":
        changes["queries"] = {"source": "trajectories", "corpus": "textcraft-prefix"}
        changes["queries"]["sidecar"] = None
    recipe: RLRecipe = method.recipe(ENV, TIER, **changes)
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


def halfway(pool: QueryPool, query: Query, serializer: ChatSerializer) -> Query:
    """The query's trajectory after half of its turns, as if another model had scored them."""
    cut = pool.cut(query, query.n_turns // 2)
    if not cut.prefix_turns:
        return cut
    layout = serializer.lay_out(cut.messages)
    begin, end = layout.replies[0][0], layout.replies[-1][1]
    mask = layout.mask([True] * cut.prefix_turns)[begin:end]
    scores = (-1.0,) * (end - begin)
    prefix = Prefix(begin, end, tuple(mask), scores, token_hash(layout.ids))
    return dataclasses.replace(cut, prefix=prefix)


def step_of(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Measure a step of a method."""
    recipe = big_recipe(name, arguments)
    _, tokenizer, origin = load_start("sft", ENV)
    model = random_model(recipe)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(name, recipe, (model, tokenizer, origin), Path(folder))
        trainer.vocabulary = model.get_input_embeddings().num_embeddings
        trainer._scorer.vocabulary = trainer.vocabulary
        words = round(recipe.expected.generated_tokens / (recipe.max_turns or 20))
        trainer.player.policy = RandomWords(trainer.serializer, 4 if arguments.toy else words)
        trainer.player.play = mixed(trainer.player.play)  # type: ignore[method-assign]
        if name in CUT:
            draw, serializer = trainer.objective.draw, trainer.serializer
            trainer.objective.draw = lambda pool, *given: [  # type: ignore[method-assign]
                halfway(pool, query, serializer) for query in draw(pool, *given)
            ]
        if arguments.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        cost = measure(trainer, clock=lambda: now(arguments.device), bare=False)
    if cost.learned < cost.generated * recipe.epochs:
        raise RuntimeError(f"of {cost.generated} tokens {cost.learned} were learnt in all epochs")
    groups = cost.rollouts / recipe.samples
    sizes = {
        "prompt_tokens": cost.prompt / groups,
        "episode_tokens": cost.continuation / cost.rollouts,
        "generated_tokens": cost.generated / cost.rollouts,
    }
    expected = recipe.expected.model_copy(update=sizes)
    planned = recipe.model_copy(update={"steps": 1, "expected": expected})
    # What activation checkpointing computes twice is not counted as work.
    counted = planned.model_copy(update={"trainer": {}})
    shape = Shape.of(model.config.to_dict())

    class UpdateAlone:
        old_logprobs = "first_epoch"

    taken = estimate(counted, UpdateAlone(), shape)  # type: ignore[arg-type]
    memory = estimate(planned, UpdateAlone(), shape).memory  # type: ignore[arg-type]
    update = cost.seconds["update"]
    # A method that scores anew before each further epoch passes the model forward once more.
    again = (recipe.epochs - 1) / 3 if trainer.objective.old_logprobs == "each_epoch" else 0.0
    work = 1 + again / recipe.epochs
    found = {
        **sizes,
        "update_seconds": update,
        "scoring_seconds": cost.seconds["playing"] - trainer._row["seconds/rollouts"],
        "tokens_per_second": work * taken.learned / update,
        "operations_per_second": work * taken.flops / update,
        "planned_memory_gib": sum(v for k, v in memory.items() if k != "activations, longest"),
    }
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
    """A run of the CPU tier: how its evaluations went, rewards, and seconds a step."""
    method: Any = registry.method("grpo")
    changes: dict[str, Any] = {"steps": 5}
    if arguments.toy:
        changes = {"steps": 2, "queries_per_step": 2, "samples": 2, "max_turns": 4}
        changes["evaluation"] = {"tasks": 4, "samples": 1}
    watched: list[Any] = []
    watch = Player.watch

    def watching(*given: Any) -> Any:
        watched.append(watch(*given))
        return watched[-1]

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(Player, "watch", watching):
        out = Path(folder) / "run"
        method.train(ENV, out=out, init="sft", device=device, **changes)
        rows = [json.loads(line) for line in (out / LOG).read_text("utf-8").splitlines()]
    steps = [row for row in rows if "reward" in row]
    return {
        "watched": [row["eval/success"] for row in rows if "eval/success" in row],
        "watched_tasks": len(watched[0]),
        "first_episodes": [
            episode
            for o in watched[0]
            for episode in zip(o.successes, o.turns, o.generated_tokens, strict=True)
        ],
        "rewards": [row["reward"] for row in steps],
        "seconds_a_step": statistics.median(
            row["seconds/rollouts"] + row["seconds/update"] for row in steps
        ),
    }


def show_step(name: str, found: dict[str, float], matmul: float, peak: float | None) -> None:
    rate = found["operations_per_second"]
    share = f"{100 * rate / matmul:.0f} % of the product's rate"
    if peak is not None:
        share += f", {100 * rate / peak:.0f} % of the peak"
    memory = found.get("peak_memory_gib")
    print(
        f"{name:12} update {found['update_seconds']:6.2f} s, scoring before it "
        f"{found['scoring_seconds']:6.2f} s; {found['tokens_per_second']:8.0f} tokens/s, {share}; "
        f"memory {'not measured' if memory is None else f'{memory:.1f} GiB'} (planned "
        f"{found['planned_memory_gib']:.1f}); {found['prompt_tokens']:.0f} + "
        f"{found['episode_tokens']:.0f} tokens, {found['generated_tokens']:.0f} generated",
        flush=True,
    )


def compare(runs: dict[str, dict[str, Any]], device: str) -> bool:
    """Show the runs of the CPU tier; whether they agree before training."""
    for name, run in runs.items():
        print(
            f"CPU tier on {name}: {run['seconds_a_step']:.2f} s a step; watched "
            f"{run['watched'][0]:.3f} -> {run['watched'][-1]:.3f}; rewards "
            + " ".join(f"{reward:.2f}" for reward in run["rewards"])
        )
    there, here = runs["cpu"], runs[device]
    pairs = list(zip(there["first_episodes"], here["first_episodes"], strict=True))
    print(
        f"a step takes {here['seconds_a_step'] / there['seconds_a_step']:.2f} times as long as on "
        f"the CPU; before training {sum(a == b for a, b in pairs)} of {len(pairs)} episodes agree "
        "in success, turns and tokens"
    )
    apart = abs(there["watched"][0] - here["watched"][0])
    share = (there["watched"][0] + here["watched"][0]) / 2
    # Tasks, not episodes, are independent.
    allowed = 1.96 * math.sqrt(2 * max(share * (1 - share), 0.01) / there["watched_tasks"])
    if apart > allowed:
        print(f"before training the devices differ by {apart:.3f}, more than {allowed:.3f}")
    return apart <= allowed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--toy", action="store_true", help="a tiny model and few turns")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--queries", type=int, default=4, help="queries a step")
    parser.add_argument(
        "--minutes", type=float, default=8, help="no method is begun after two thirds of it"
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
    peak = arguments.peak or next((rate for name, rate in PEAKS.items() if name in card), None)
    matmul = matmul_rate(arguments)
    data_sheet = "unknown" if peak is None else f"{peak / 1e12:.0f}"
    print(f"{card}: {matmul / 1e12:.2f} TFLOP/s in a bfloat16 product, data sheet {data_sheet}")
    figures: dict[str, Any] = {"card": card, "torch": torch.__version__, "peak": peak}
    figures |= {"matmul": matmul, "queries": arguments.queries, "methods": {}, "cpu_tier": {}}
    recipe = big_recipe("grpo", arguments)
    expected = recipe.expected
    print(
        f"the recipe expects {expected.prompt_tokens:.0f} tokens of prompt, "
        f"{expected.episode_tokens:.0f} an episode, {expected.generated_tokens:.0f} of them "
        f"generated; here {arguments.queries} queries a step instead of "
        f"{registry.method('grpo').recipe(ENV, TIER).queries_per_step}"  # type: ignore[attr-defined]
    )
    missing: list[str] = []
    failed: dict[str, str] = {}

    def attempt(name: str, what: Callable[[], Any], share: float = 1.0) -> Any:
        """What a part gives; the other parts are measured all the same if it fails."""
        if time.perf_counter() - begin > 60 * share * arguments.minutes:
            missing.append(name)
            return None
        found = None
        try:
            found = what()
        except Exception as error:  # noqa: BLE001
            failed[name] = f"{type(error).__name__}: {error}"
            print(f"{name:12} FAILED: {failed[name]}".split("\n", 1)[0], flush=True)
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
        return found

    for name in arguments.methods:
        found = attempt(name, functools.partial(step_of, name, arguments), 2 / 3)
        if found is not None:
            show_step(name, found, matmul, peak)
            figures["methods"][name] = found
    rate = attempt("rollouts", functools.partial(rollout_rate, arguments))
    if rate is not None:
        figures["rollout_tokens_per_second"] = rate
        print(f"rollouts without vLLM: {rate:.0f} generated tokens/s", flush=True)
    for device in dict.fromkeys(["cpu", arguments.device]):
        run = attempt(f"CPU tier on {device}", functools.partial(small_run, device, arguments))
        if run is not None:
            figures["cpu_tier"][device] = run
    runs = figures["cpu_tier"]
    if runs.keys() == {"cpu", arguments.device} and not compare(runs, arguments.device):
        failed["CPU tier"] = "the devices differ before training"
    if arguments.out is not None:
        write_json_atomic(arguments.out, figures | {"failed": failed, "missing": missing})
    minutes = (time.perf_counter() - begin) / 60
    print(f"{minutes:.1f} minutes" + (f"; not reached: {', '.join(missing)}" if missing else ""))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
