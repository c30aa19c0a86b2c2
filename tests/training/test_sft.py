"""Supervised fine-tuning: loss, data, resuming, the command."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import pytest
import torch

import agentbench_prefix
from agentbench_prefix.cards import CheckpointCard
from agentbench_prefix.errors import ConfigurationError, UnknownNameError
from agentbench_prefix.files import sha256_file
from agentbench_prefix.policies.tokens import check_checkpoint
from agentbench_prefix.registry import method
from agentbench_prefix.serialization import ChatSerializer
from agentbench_prefix.training.data import Batch, batches, draw, play_draw
from agentbench_prefix.training.demonstrations import demonstrate
from agentbench_prefix.training.method import contamination
from agentbench_prefix.training.recipe import SFTRecipe, Stage, load_recipe
from agentbench_prefix.training.sft import learning_rate_factor, run_sft, sft_loss
from agentbench_prefix.training.tokenizer import build_word_tokenizer


@pytest.fixture(scope="module")
def env():
    return agentbench_prefix.make("TextCraft-v0")


@pytest.fixture(scope="module")
def serializer(env):
    dialogue = env.dialogues()["compact"]
    played = [demonstrate(env, t, dialogue) for t in env.generate_tasks(3, 200)]
    return ChatSerializer(
        build_word_tokenizer((m.content for d in played for m in d.messages), 1216)
    )


def make_model(dtype=torch.float32):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1216,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).to(dtype)


RECIPE = SFTRecipe(
    env_id="TextCraft-v0",
    seed=5,
    steps=12,
    tokens_per_step=512,
    warmup=0.25,
    decay=0.5,
    stages=(
        Stage(until=0.4, split="generated", parameters={"depth": 1}, recite=3),
        Stage(
            until=1,
            split="train",
            family_weights={"depth_1": 1, "depth_2": 1},
            vary={"rename_seed": 0.5},
            detours=0.3,
        ),
    ),
)


def test_loss_is_the_mean_nll_of_the_weighted_tokens():
    model = make_model(torch.float64)
    ids = torch.randint(5, 1000, (3, 9))
    weights = torch.tensor([[0.0] * 4 + [1.0] * 5, [0.0] * 9, [0.0, 0.5, 1, 0, 0, 1, 0, 0, 0]])
    loss = sft_loss(model, Batch(ids, weights, 3, 0, 0))
    logp = model(input_ids=ids).logits.log_softmax(-1)
    total = weight = 0.0
    for row in range(3):
        for t in range(1, 9):
            total -= weights[row, t] * logp[row, t - 1, ids[row, t]]
            weight += weights[row, t]
    torch.testing.assert_close(loss, total / weight)


def test_no_gradient_through_positions_that_are_not_learned():
    model = make_model(torch.float64)
    ids = torch.randint(5, 1000, (2, 8))
    weights = torch.zeros(2, 8)
    weights[0, 3:5] = 1
    hidden = []
    hook = model.model.norm.register_forward_hook(
        lambda _module, _inputs, output: (output.retain_grad(), hidden.append(output))[1]
    )
    sft_loss(model, Batch(ids, weights, 2, 0, 0)).backward()
    hook.remove()
    moved = hidden[0].grad.abs().sum(-1) > 0
    # Token 3 is scored at position 2, token 4 at position 3; nothing else is scored.
    assert moved.tolist() == [[False, False, True, True, False, False, False, False], [False] * 8]


def test_padding_moves_nothing():
    model = make_model(torch.float64)
    ids = torch.randint(5, 1000, (1, 6))
    weights = torch.tensor([[0.0, 0, 1, 1, 0, 1]])
    padded = torch.cat([ids, torch.zeros(1, 5, dtype=torch.long)], 1)
    padded_weights = torch.cat([weights, torch.zeros(1, 5)], 1)
    torch.testing.assert_close(
        sft_loss(model, Batch(ids, weights, 1, 0, 0)),
        sft_loss(model, Batch(padded, padded_weights, 1, 0, 0)),
    )


def test_mistakes_are_masked_unless_asked_for(env, serializer):
    stage = Stage(until=1, split="train", detours=0.5)
    careful = RECIPE.model_copy(update={"stages": (stage,), "tokens_per_step": 100_000})
    careless = careful.model_copy(update={"learn_mistakes": True})
    masked = next(batches(env, careful, serializer))
    unmasked = next(batches(env, careless, serializer))
    assert torch.equal(masked.ids, unmasked.ids)
    assert masked.weights.sum() < unmasked.weights.sum()
    flags = [
        flag
        for index in range(50)
        for flag in play_draw(env, careful, draw(env, careful, stage, index)).trainable
    ]
    assert 0 < flags.count(False) < len(flags)


def test_observations_weigh_little_and_the_opening_nothing(env, serializer):
    recipe = RECIPE.model_copy(
        update={"stages": (Stage(until=1, split="train"),), "observation_weight": 0.25}
    )
    batch = next(batches(env, recipe, serializer))
    end = serializer.end_id
    for ids, weights in zip(batch.ids.tolist(), batch.weights.tolist(), strict=True):
        opening = ids.index(end) + 1
        assert not any(weights[:opening])
        assert set(weights) <= {0.0, 0.25, 1.0}
        # Replies and their end tokens weigh 1, the observations between them 0.25, padding 0.
        text = serializer.tokenizer
        reply = text.convert_tokens_to_ids("<|assistant|>")
        expected, inside = [], False
        for position, token in enumerate(ids):
            after = opening <= position and token != 0
            expected.append(1.0 if inside else 0.25 if after and position > opening else 0.0)
            inside = (inside and token != end) or token == reply
        assert weights == expected


def test_batches_fit_and_can_be_entered_at_any_step(env, serializer):
    whole = list(itertools.islice(batches(env, RECIPE, serializer), 10))
    assert all(b.ids.numel() <= 512 or b.demonstrations == 1 for b in whole)
    late = list(itertools.islice(batches(env, RECIPE, serializer, start=7), 3))
    for a, b in zip(whole[7:], late, strict=True):
        assert torch.equal(a.ids, b.ids)
        assert torch.equal(a.weights, b.weights)


def test_recitation_asks_for_lines_of_the_first_observation(env):
    played = play_draw(env, RECIPE, draw(env, RECIPE, RECIPE.stages[0], 1))
    lines = played.messages[0].content.split("\n")
    for cue, line in zip(played.messages[::2], played.messages[1::2], strict=True):
        assert line.content in lines
        assert cue.content.split("\n")[-1] in line.content
        assert [cue.content.split("\n")[-1] in other for other in lines].count(True) <= 2


def test_schedule():
    factors = [learning_rate_factor(step, RECIPE) for step in range(12)]
    assert factors[0] == pytest.approx(1 / 3)
    assert max(factors) == 1
    assert factors[2:7] == [1] * 5
    assert factors[-1] == pytest.approx(1 / 6)


def test_a_broken_run_resumes_to_the_same_weights(env, serializer, tmp_path):
    whole = make_model()
    summary = run_sft(RECIPE, whole, serializer, env, tmp_path / "whole", save_every=5)

    class Killed(Exception):
        pass

    def kill(step, loss):
        if step == 7:
            raise Killed

    with pytest.raises(Killed):
        run_sft(RECIPE, make_model(), serializer, env, tmp_path / "b", save_every=5, progress=kill)
    resumed = make_model()
    steps = []
    again = run_sft(
        RECIPE,
        resumed,
        serializer,
        env,
        tmp_path / "b",
        save_every=5,
        progress=lambda step, loss: steps.append(step),
    )
    assert steps == list(range(5, 12))
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    assert {**summary, "minutes": 0} == {**again, "minutes": 0}
    log = (tmp_path / "b/log.jsonl").read_text()
    assert log == (tmp_path / "whole/log.jsonl").read_text()
    assert [json.loads(line)["step"] for line in log.splitlines()] == list(range(12))


def test_another_recipe_in_the_same_folder_is_refused(env, serializer, tmp_path):
    short = RECIPE.model_copy(update={"steps": 2})
    run_sft(short, make_model(), serializer, env, tmp_path)
    with pytest.raises(ConfigurationError, match="another recipe"):
        run_sft(RECIPE, make_model(), serializer, env, tmp_path)


def test_what_cannot_be_trained_on_is_named(env, serializer):
    short = RECIPE.model_copy(update={"max_length": 5})
    with pytest.raises(ConfigurationError, match="max_length=5 tokens"):
        next(batches(env, short, serializer))
    stage = Stage(until=1, family_weights={"depth_9": 1})
    with pytest.raises(UnknownNameError, match="depth_9"):
        next(batches(env, RECIPE.model_copy(update={"stages": (stage,)}), serializer))
    with pytest.raises(UnknownNameError, match="odd"):
        next(batches(env, RECIPE.model_copy(update={"dialogue": "odd"}), serializer))


def test_a_broken_saved_state_is_named(env, serializer, tmp_path):
    short = RECIPE.model_copy(update={"steps": 2})
    run_sft(short, make_model(), serializer, env, tmp_path)
    for damage in ("state-2.safetensors", "state.json"):
        (tmp_path / "resume" / damage).write_bytes(b"{")
        with pytest.raises(ConfigurationError, match="remove that folder to begin again"):
            run_sft(short, make_model(), serializer, env, tmp_path)


def test_contamination_counts_what_was_trained_on(env):
    table = contamination(env, [(task, {}) for task in env.tasks("test")]).rows["all"]
    assert table.task_drawn == table.tasks == table.goal_trained == table.goal_shown == 100
    assert table.subgoal_facts_on_the_way == table.subgoal_facts
    table = contamination(env, [("generated_1_0_d3", {})]).rows["all"]
    assert table.goal_shown == table.subgoal_facts_shown == 0
    renamed = contamination(env, [(task, {"rename_seed": 1}) for task in env.tasks("train")])
    plain = contamination(env, [(task, {}) for task in env.tasks("train")])
    assert renamed.rows["all"].subgoal_facts_shown == 0
    row = plain.rows["all"]
    assert 0 == row.goal_trained < row.goal_on_the_way < row.goal_shown
    assert 0 < row.subgoal_facts_on_the_way < row.subgoal_facts_shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: 3", "env_id"),
        ("env_id: X\nsteps: 3\nstages: [{until: 1}]\nspeed: 9", "speed"),
        ("env_id: X\nsteps: -3\nstages: [{until: 1}]", "steps"),
        ("[1, 2]", "mapping"),
        ("a: [", "cannot read"),
    ],
)
def test_bad_recipes_are_named(tmp_path, text, message):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        load_recipe(path)


def test_every_shipped_recipe_is_valid():
    for name in ("base", "sft"):
        assert method(name).recipe("TextCraft-v0").env_id == "TextCraft-v0"


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "agentbench_prefix.train", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "100"},
    )


def test_the_command_trains_a_checkpoint_and_the_next_method_from_it(tmp_path):
    out = tmp_path / "base"
    arguments = ["--env", "TextCraft-v0", "--no-progress", "--no-evaluate", "--steps", "2"]
    done = run("--method", "base", "--out", str(out), *arguments)
    assert done.returncode == 0, done.stderr
    card = CheckpointCard.load(out / "checkpoint")
    assert card is not None
    assert card.model_sha256 == sha256_file(out / "checkpoint/model.safetensors")
    assert card.training.steps == 2
    assert (out / "checkpoint/model.safetensors").stat().st_size <= 4 * 2**20

    again = run("--method", "base", "--out", str(out), *arguments)
    assert again.returncode == 0
    assert str(out / "checkpoint") in again.stdout
    other = run("--method", "base", "--out", str(out), *arguments[:-1], "3")
    assert other.returncode == 2
    assert "holds another training run (recipe.steps is 2 there, 3 now)" in other.stderr

    done = run(
        "--method",
        "sft",
        "--init",
        str(out / "checkpoint"),
        "--out",
        str(tmp_path / "sft"),
        *arguments,
    )
    assert done.returncode == 0, done.stderr
    tuned = CheckpointCard.load(tmp_path / "sft/checkpoint")
    assert tuned is not None
    assert tuned.training.data["init"]["sha256"] == check_checkpoint(out / "checkpoint").checkpoint
    assert f"--init {out / 'checkpoint'} --steps 2" in tuned.training.command
    assert tuned.tokenizer_fingerprint == card.tokenizer_fingerprint


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "nope", "--env", "TextCraft-v0"), "unknown method 'nope'"),
        (("--method", "sft", "--env", "Nope-v0"), "unknown environment 'Nope-v0'"),
        (
            ("--method", "sft", "--env", "TextCraft-v0", "--tier", "huge"),
            "unknown tier of sft 'huge'",
        ),
        (
            ("--method", "sft", "--env", "TextCraft-v0", "--init", "/nowhere"),
            "no checkpoint folder '/nowhere'",
        ),
    ],
)
def test_the_command_names_what_is_wrong(arguments, message, tmp_path):
    done = run(*arguments, "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
