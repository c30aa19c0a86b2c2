"""Rollout throughput: the transformers policy beside ``model.generate``, plain and TRL's own.

All play the same tasks with the same model and sampling settings through the same rollout loop.
The plain one encodes each conversation whole in every turn, pads the batch on the left and calls
``model.generate`` with its cache on; TRL's is what its ``GRPOTrainer`` generates with when it is
not given vLLM. Replies differ (each draws differently), so rates are compared, not times.

    python benchmarks/eval_throughput.py [--model FOLDER_OR_HUB_ID]

Without ``--model`` it takes a random model of the size of the shipped ones, with a tokenizer made
from the tasks' own words. It hardly ever ends a turn by itself, so every reply has ``--max-tokens``
tokens and every episode ``--max-turns`` turns. Target: at least 3 times the others' tokens/s.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from agentbench_prefix import rollouts
from agentbench_prefix.policies.base import Episode, Policy, Reply
from agentbench_prefix.policies.transformers import TransformersPolicy
from agentbench_prefix.registry import make
from agentbench_prefix.serialization import ChatSerializer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class GeneratePolicy:
    """Policy and session in one: ``model.generate`` on the whole history of each turn."""

    def __init__(self, folder: str, temperature: float, top_p: float, max_tokens: int) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.tokenizer.padding_side = "left"
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.serializer = ChatSerializer(self.tokenizer)
        sampling = {"temperature": temperature, "top_p": top_p} if temperature > 0 else {}
        self.settings: dict[str, Any] = {
            "do_sample": temperature > 0,
            "top_k": 0 if temperature > 0 else None,
            "max_new_tokens": max_tokens,
            "use_cache": True,
            "eos_token_id": self.serializer.end_id,
            "pad_token_id": self.tokenizer.pad_token_id,
            **sampling,
        }

    def describe(self) -> dict[str, Any]:
        """Return the sampling settings."""
        return dict(self.settings)

    def open(self, _: Sequence[Episode]) -> GeneratePolicy:
        """Keep nothing between turns."""
        return self

    def close(self) -> None:
        """Free nothing."""

    @torch.inference_mode()
    def reply(self, episodes: Sequence[Episode]) -> list[Reply]:
        """Encode every conversation anew and generate."""
        texts = [
            self.tokenizer.apply_chat_template(
                [message.as_dict() for message in episode.messages],
                tokenize=False,
                add_generation_prompt=True,
            )
            for episode in episodes
        ]
        inputs = self.tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt")
        inputs.pop("token_type_ids", None)
        output = self.model.generate(**inputs, **self.settings)
        replies = []
        for row in output[:, inputs["input_ids"].shape[1] :].tolist():
            end = self.serializer.end_id
            ids = row[: row.index(end) + 1] if end in row else row
            finish = "stop" if end in row else "length"
            replies.append(Reply(self.serializer.decode(ids), tuple(ids), None, finish))
        return replies


class TRLPolicy:
    """What TRL's ``GRPOTrainer`` generates with, a turn at a time."""

    def __init__(self, folder: str, temperature: float, top_p: float, max_tokens: int) -> None:
        from trl import GRPOConfig, GRPOTrainer

        import datasets

        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.serializer = ChatSerializer(tokenizer)
        self.settings: dict[str, Any] = {"temperature": temperature, "top_p": top_p}
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with tempfile.TemporaryDirectory() as out:
            self.trainer = GRPOTrainer(
                model=model,
                args=GRPOConfig(
                    output_dir=out,
                    use_cpu=True,
                    bf16=False,
                    activation_checkpointing=False,
                    report_to="none",
                    per_device_train_batch_size=8,
                    num_generations=8,
                    max_completion_length=max_tokens,
                    **self.settings,
                ),
                train_dataset=datasets.Dataset.from_list([{"prompt": ""}]),
                reward_funcs=lambda completions, **_: [0.0] * len(completions),
                processing_class=tokenizer,
            )
        self.trainer.generation_config.eos_token_id = self.serializer.end_id

    def describe(self) -> dict[str, Any]:
        """Return the sampling settings."""
        return dict(self.settings)

    def open(self, _: Sequence[Episode]) -> TRLPolicy:
        """Keep nothing between turns."""
        return self

    def close(self) -> None:
        """Free nothing."""

    def reply(self, episodes: Sequence[Episode]) -> list[Reply]:
        """Let TRL generate from the tokens of each conversation."""
        prompts = [self.serializer.lay_out(episode.messages).ids for episode in episodes]
        rows, _ = self.trainer._generate_single_turn(prompts, None, {}, 1)
        end = self.serializer.end_id
        return [
            Reply(self.serializer.decode(ids), tuple(ids), None, "stop" if end in ids else "length")
            for ids in rows
        ]


def random_checkpoint(folder: Path, env_id: str, dialogue: str) -> None:
    """Save a random model of the shipped size (0.8M parameters) and a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    env = make(env_id)
    style = env.dialogues()[dialogue]
    openings = []
    for task in env.tasks("train"):
        observation, _ = env.reset(options={"task_id": task})
        openings += [message.content for message in style.opening(observation)]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner.train_from_iterator(
        openings,
        trainers.BpeTrainer(
            vocab_size=1200, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)


@dataclasses.dataclass
class Rate:
    """What a policy did in how many seconds."""

    seconds: float = 0.0
    episodes: int = 0
    turns: int = 0
    tokens: int = 0

    def line(self, name: str) -> str:
        """One line for people."""
        return (
            f"{name:14} {self.episodes:5d} episodes {self.turns:6d} turns {self.tokens:7d} tokens "
            f"{self.seconds:7.2f} s {self.tokens / self.seconds:9.1f} tokens/s "
            f"{self.episodes / self.seconds:7.2f} episodes/s"
        )


def chunks(arguments: argparse.Namespace) -> Iterator[list[Episode]]:
    """Freshly started episodes, a batch at a time."""
    tasks = make(arguments.env).tasks(arguments.split)[: arguments.tasks]
    wanted = [(task, sample) for task in tasks for sample in range(arguments.samples)]
    for begin in range(0, len(wanted), arguments.batch_size):
        episodes = []
        for task, sample in wanted[begin : begin + arguments.batch_size]:
            env = make(arguments.env, max_turns=arguments.max_turns)
            style = env.dialogues()[arguments.dialogue]
            episodes.append(rollouts.start(env, style, task, sample=sample))
        yield episodes


def measure(policy: Policy, arguments: argparse.Namespace) -> Rate:
    rate = Rate()
    for episodes in chunks(arguments):
        begin = time.perf_counter()
        records = rollouts.play(policy, episodes)
        rate.seconds += time.perf_counter() - begin
        errors = [record.error for record in records if record.error is not None]
        if errors:
            raise SystemExit(f"{len(errors)} episodes failed; the first: {errors[0]}")
        rate.episodes += len(records)
        rate.turns += sum(len(record.turns) for record in records)
        rate.tokens += sum(len(turn.token_ids or ()) for r in records for turn in r.turns)
    return rate


def ours(folder: str, temperature: float, top_p: float, max_tokens: int) -> Policy:
    return TransformersPolicy.load(folder, None, "cpu", temperature, top_p, max_tokens)


ENGINES: dict[str, Callable[[str, float, float, int], Policy]] = {
    "policy": ours,
    "generate": GeneratePolicy,
    "trl": TRLPolicy,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="local folder; default: a random model of the shipped size")
    parser.add_argument("--env", default="TextCraft-v0")
    parser.add_argument("--split", default="test")
    parser.add_argument("--dialogue", default="compact")
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-turns", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.disable_progress_bar()

    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.model or scratch
        if arguments.model is None:
            random_checkpoint(Path(scratch), arguments.env, arguments.dialogue)
        settings = (arguments.temperature, arguments.top_p, arguments.max_tokens)
        rates = {}
        for name in arguments.only:
            rates[name] = measure(ENGINES[name](folder, *settings), arguments)
    print(
        f"{arguments.env} {arguments.split}, {torch.get_num_threads()} thread(s), "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )
    for name, rate in rates.items():
        print(rate.line(name))
    for name, other in rates.items():
        if name != "policy" and "policy" in rates:
            ours = rates["policy"]
            by_token = (ours.tokens / ours.seconds) / (other.tokens / other.seconds)
            by_episode = (ours.episodes / ours.seconds) / (other.episodes / other.seconds)
            print(
                f"policy / {name}: {by_token:.1f} x tokens/s, {by_episode:.1f} x episodes/s "
                "(target: 3 x)"
            )


if __name__ == "__main__":
    main()
