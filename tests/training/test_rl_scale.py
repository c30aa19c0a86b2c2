"""Several processes, other engines, other people's methods, and runs that are only planned."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from rl_runs import ENV, SMALL, pool, random_model, tokenizer, trainer, weights_of
from typer.testing import CliRunner

from agentbench_prefix import registry
from agentbench_prefix.cli import app
from agentbench_prefix.errors import AgentBenchError, ConfigurationError
from agentbench_prefix.train import set_fields
from agentbench_prefix.training.method import command_line
from agentbench_prefix.training.rl_method import ReinforcementMethod
from agentbench_prefix.training.rl_recipe import load_rl_recipe

RECIPES = Path(registry.method("grpo").folder) / "recipes"
METHODS = ("grpo", "grpo_mis", "dapo", "replay_grpo", "prefix_grpo", "trial", "adaprefix")

HINDSIGHT = {"warmup": 0, "dense_weight": 0.02}


def updates(folder):
    """A step of two methods on all processes there are; micro-batches are the same four."""
    for method, objective in (("prefix_grpo", {}), ("trial", HINDSIGHT)):
        model = random_model()
        made = trainer(
            method, folder / method, model=model, steps=1, microbatch=4, objective=objective
        )
        made.run()
        if made.accelerator.is_main_process:
            torch.save(weights_of(model), folder / method / "weights.pt")


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.long
def test_two_processes_make_the_same_update(tmp_path):
    """What ``accelerate launch --cpu --num_processes 2`` starts, against this process alone."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); "
        f"from pathlib import Path; from test_rl_scale import updates; "
        f"updates(Path({str(tmp_path / '2')!r}))"
    )
    shared = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**shared, "RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    updates(tmp_path / "1")
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors[-2000:]
    start = dict(random_model().named_parameters())
    for method in ("prefix_grpo", "trial"):
        one, two = (
            torch.load(tmp_path / n / method / "weights.pt", weights_only=True) for n in "12"
        )
        assert any(not torch.equal(start[name], p) for name, p in one.items())
        for name, p in one.items():
            torch.testing.assert_close(p, two[name], atol=1e-9, rtol=1e-9)
        logs = [(tmp_path / n / method / "log.jsonl").read_text().splitlines() for n in "12"]
        for left, right in zip(*(map(json.loads, log) for log in logs), strict=True):
            assert left.keys() == right.keys()
            for name, value in left.items():
                if not name.startswith("seconds/") and name not in ("prefix/ratio", "loss"):
                    assert value == pytest.approx(right[name], rel=1e-6, abs=1e-9), name


def test_computing_in_half_precision_is_close(tmp_path):
    """Autocast reaches every part of the forward pass, attention with its bias included."""
    found = []
    for autocast in (None, "bfloat16"):
        model = random_model(dtype=torch.float32)
        made = trainer(
            "prefix_grpo",
            tmp_path / str(autocast),
            model=model,
            known=pool(random_model()),
            dtype="float32",
            autocast=autocast,
            objective={"signal": "constant"},
        )
        made._step = 0
        batch = made._prepare_inputs(None)
        with made.compute_loss_context_manager():
            loss = made._compute_loss(model, batch)
        loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert not torch.equal(*found)
    assert float(torch.nn.functional.cosine_similarity(*found, dim=0)) > 0.99


# ------------------------------------------------------------------ vLLM, as TRL holds it
class FakeVLLM:
    """Answers prompts as vLLM does for TRL, with a model of ours."""

    def __init__(self, model, seed=0):
        self.model, self.calls, self.synced = model, [], 0
        self.generator = torch.Generator().manual_seed(seed)

    def sync_weights(self):
        self.synced += 1

    def generate(self, prompts, images, num_generations):
        assert images is None
        assert num_generations == 1
        self.calls.append(len(prompts))
        tokens, logprobs = [], []
        for prompt in prompts:
            ids, row, scores = list(prompt), [], []
            for _ in range(SMALL["max_tokens"]):
                with torch.no_grad():
                    logits = self.model(torch.tensor([ids])).logits[0, -1, : len(tokenizer())]
                p = logits.softmax(-1)
                token = int(torch.multinomial(p, 1, generator=self.generator))
                row.append(token)
                scores.append([float(p[token].log())])
                ids.append(token)
                if token == tokenizer().eos_token_id:
                    break
            tokens.append(row)
            logprobs.append(scores)
        return prompts, tokens, logprobs, None


def test_episodes_are_played_by_the_copy_in_vllm(tmp_path, monkeypatch):
    from agentbench_prefix.training.rl_trainer import VLLMRollouts

    made = trainer("grpo_mis", tmp_path, objective={"form": "ppo"}, rewards=False)
    made.args.vllm_mode = "colocate"
    made._last_loaded_step = -1
    plain = random_model()
    made.vllm_generation = FakeVLLM(plain)
    made.player.policy = VLLMRollouts(made)
    made._step = 0
    made._prepare_inputs(None)
    assert made.vllm_generation.synced == 1
    assert made.vllm_generation.calls[0] == 16
    assert sorted(made.vllm_generation.calls, reverse=True) == made.vllm_generation.calls
    batch = made._whole
    assert bool(batch.mask.any())
    # The same weights: what vLLM reports is what the trainer computes, and W is 1.
    torch.testing.assert_close(batch.old_logprobs, batch.rollout_logprobs)
    weights = batch.tensors["weights"]
    torch.testing.assert_close(weights, torch.ones_like(weights))


def test_a_conversation_that_outgrows_the_context_ends_unsolved(tmp_path):
    from agentbench_prefix.training.rl_trainer import VLLMRollouts

    for kind in ("transformers", "vllm"):
        made = trainer("grpo", tmp_path / kind, context=150, rewards=False)
        if kind == "vllm":
            made.args.vllm_mode = "colocate"
            made._last_loaded_step = -1
            made.vllm_generation = FakeVLLM(random_model())
            made.player.policy = VLLMRollouts(made)
        made._step = 0
        made._prepare_inputs(None)
        ends = {record.failure_category for record in made._whole.records}
        assert "context_limit" in ends
        for group in made._whole.groups:
            for rollout in group.rollouts:
                assert (
                    len(group.prompt) + len(rollout.completion)
                    <= max(150, len(group.prompt)) + SMALL["max_tokens"] + 1
                )


# ------------------------------------------------------------------ other people's methods
PLUGIN = '''
    """Rewards above the mean are learnt, plainly."""
    from pathlib import Path
    from agentbench_prefix.training.losses import (
        group_advantages, policy_gradient_surrogate, token_mean,
    )
    from agentbench_prefix.training.objective import Loss, Objective
    from agentbench_prefix.training.rl_method import ReinforcementMethod

    class Centred(Objective):
        def prepare(self, batch, played):
            batch.tensors["advantages"] = group_advantages(
                batch.rewards, batch.group_index, normalize=False
            )

        def loss(self, batch, scores, moment):
            value = policy_gradient_surrogate(
                scores.logprobs, batch.tensors["advantages"], batch.mask
            )
            count = moment.denominator("continuation", batch.mask, self.settings.reduction)
            return Loss(-token_mean(value, batch.mask, count), {"centred/rows": (len(batch), 1)})

    METHOD = ReinforcementMethod(
        name="centred", summary="a method of another package",
        folder=Path(__file__).parent, objective="centred_method:Centred",
    )
'''


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A small package with a method, installed as pip would."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "centred_method.py").write_text(textwrap.dedent(PLUGIN))
    info = site / "centred_method-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: centred-method\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[agentbench_prefix.methods]\ncentred = centred_method:METHOD\n"
    )
    fields = {
        "env_id": ENV,
        "dialogue": "compact",
        "init": "sft",
        "steps": 1,
        "queries_per_step": 2,
        "samples": 4,
        "lr": 0.001,
        "max_turns": 6,
        "queries": {"family_weights": {"depth_2": 1}},
        "evaluation": {"every": 1, "tasks": 2, "samples": 1},
    }
    recipes = site / "recipes" / ENV
    recipes.mkdir(parents=True)
    (recipes / "centred.yaml").write_text(yaml.safe_dump(fields))
    monkeypatch.syspath_prepend(str(site))
    yield site
    sys.modules.pop("centred_method", None)


def test_a_method_of_another_package_trains_and_evaluates(plugin, tmp_path):
    assert "centred" in registry.method_names()
    out = tmp_path / "run"
    command = ["train", "--method", "centred", "--env", ENV, "--out", str(out), "--no-progress"]
    done = CliRunner().invoke(app, [*command, "--no-evaluate"])
    assert done.exit_code == 0, done.output
    assert '"centred/rows": 8.0' in (out / "log.jsonl").read_text()
    # The package ships what it trained, and is then played by name.
    shutil.copytree(out / "checkpoint", plugin / "checkpoints" / ENV / "centred")
    command = ["eval", "--method", "centred", "--tasks", "2"]
    command += ["--samples", "1", "--out", str(tmp_path / "eval"), "--no-progress"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "eval" / "metrics.json").is_file()


# ------------------------------------------------------------------ plans
@pytest.mark.parametrize("env_id", [ENV, "BabyAI-Text-v0"])
@pytest.mark.parametrize("method", METHODS)
def test_every_recipe_resolves_in_every_tier_and_variant(method, env_id):
    found = registry.method(method)
    path = found.folder / "recipes/shared/methods" / f"{method}.yaml"
    variants = yaml.safe_load(path.read_text()).get("variants", {})
    for tier in ("cpu", "qwen3-1.7b", "qwen3-1.7b-server"):
        for variant in (None, *variants):
            recipe = found.recipe(env_id, tier, variant=variant)
            assert (recipe.env_id, recipe.variant) == (env_id, variant or "")
            found.make_objective(recipe)
    assert found.recipe(env_id, "qwen3-1.7b").queries_per_step == 16
    assert found.recipe(env_id, "qwen3-1.7b").lr == 5e-6


def test_a_dry_run_states_what_the_run_would_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["train", "--method", "prefix_grpo", "--env", ENV, "--dry-run"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    for text in ("prefix_epsilon_high: 0.2", "cut; drawn 40 %", "sha256", "6,400 rollouts", "GiB"):
        assert text in done.output
    done = CliRunner().invoke(app, [*command, "--tier", "qwen3-1.7b"])
    assert done.exit_code == 0, done.output
    for text in ("1,720.5 M parameters", "not on this machine", "device hours", "41,472 rollouts"):
        assert text in done.output
    assert not list(tmp_path.iterdir())


def test_fields_are_set_on_the_command_line():
    assert set_fields(
        ["lr=3e-4", "objective.form=joint", "betas=[0.9, 0.95]", "a.b=", "c=x=y"]
    ) == {
        "lr": "3e-4",  # YAML's; a recipe takes it for the number
        "objective": {"form": "joint"},
        "betas": [0.9, 0.95],
        "a": {"b": None},
        "c": "x=y",
    }
    for wrong in ("lr", "=1", "a..b=1", "a=[", "."):
        with pytest.raises(AgentBenchError, match="--set"):
            set_fields([wrong])
    with pytest.raises(AgentBenchError, match="set to a value already"):
        set_fields(["a=1", "a.b=2"])
    recipe = registry.method("prefix_grpo").recipe(
        ENV, **set_fields(["lr=3e-4", "objective.form=joint"])
    )
    assert (recipe.lr, recipe.objective["form"], recipe.objective["signal"]) == (
        3e-4,
        "joint",
        "magnitude",
    )
    command = command_line(
        "m", "E", None, {"tier": "cpu", "seed": None, "objective": {"form": "joint"}}
    )
    assert command.endswith("--method m --env E --tier cpu --set objective.form=joint")


@pytest.mark.parametrize("tier", ["cpu", "qwen3-1.7b", "qwen3-1.7b-server"])
def test_recipes_are_configurations_of_trl(tier, tmp_path):
    from agentbench_prefix.training.rl_trainer import arguments

    recipe = registry.method("prefix_grpo").recipe(ENV, tier)
    config = arguments(recipe.model_copy(update={"device": "cpu"}), tmp_path, 512)
    assert config.steps_per_generation * config.per_device_train_batch_size == (
        recipe.queries_per_step * 8
    )
    assert config.use_vllm == (tier != "cpu")
    assert config.max_steps == 2 * recipe.steps
    assert config.bf16 == (tier != "cpu")


def test_a_process_takes_one_of_several_devices(tmp_path, monkeypatch):
    from agentbench_prefix.training import rl_trainer

    made = rl_trainer.GRPOConfig

    def in_sight_of_four(**fields):
        config = made(**fields)
        config._n_gpu = 4
        return config

    monkeypatch.setattr(rl_trainer, "GRPOConfig", in_sight_of_four)
    config = rl_trainer.arguments(registry.method("grpo").recipe(ENV), tmp_path, 8)
    assert config.n_gpu == 1
    assert config.train_batch_size == config.per_device_train_batch_size


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match="device is 'cuda', but torch sees none here"):
        registry.method("grpo").train(ENV, out=tmp_path / "run", device="cuda")


def test_the_check_of_a_policy_allows_for_autocast():
    """A policy may be made while training, when the model's forward computes in bfloat16 already;
    on a GPU other kernels round otherwise, here it is another attention."""
    from accelerate.utils import convert_outputs_to_fp32
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from agentbench_prefix.policies import transformers as policies

    def otherwise(*given, **named):
        with sdpa_kernel(SDPBackend.MATH):
            return policies._attention(*given, **named)

    model = random_model(dtype=torch.float32)
    model.forward = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(model.forward))
    register = transformers.AttentionInterface.register
    register(policies.ATTENTION, otherwise)
    try:
        policies.TransformersPolicy(model, tokenizer(), source={})
    finally:
        register(policies.ATTENTION, policies._attention)


def test_tiers_and_files_extend_each_other(tmp_path):
    (tmp_path / "below.yaml").write_text(
        "{env_id: E, init: base, dialogue: d, "
        "tiers: {a: {steps: 1, lr: 0.5}, b: {extends: a, lr: 2}}}"
    )
    (tmp_path / "above.yaml").write_text(
        "extends: below.yaml\ntiers: {a: {lr: 0.25}}\nvariants: {v: {samples: 2}}"
    )
    recipe = load_rl_recipe(tmp_path / "above.yaml", tier="a")
    assert (recipe.steps, recipe.lr, recipe.samples, recipe.variant) == (1, 0.25, 8, "")
    recipe = load_rl_recipe(tmp_path / "above.yaml", tier="b", variant="v")
    assert (recipe.steps, recipe.lr, recipe.samples, recipe.variant) == (1, 2, 2, "v")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/more.yaml").write_text("{samples: 4, tiers: {a: {epochs: 1, lr: 0.125}}}")
    (tmp_path / "both.yaml").write_text("extends: [above.yaml, parts/more.yaml]\nepochs: 3")
    recipe = load_rl_recipe(tmp_path / "both.yaml", tier="a")
    assert (recipe.steps, recipe.lr, recipe.samples, recipe.epochs) == (1, 0.125, 4, 1)
    (tmp_path / "loop.yaml").write_text("extends: loop.yaml")
    with pytest.raises(AgentBenchError, match="extends itself"):
        load_rl_recipe(tmp_path / "loop.yaml")


def test_launch_files_are_what_accelerate_reads():
    from accelerate.commands.config.config_args import load_config_from_file

    kinds = {}
    for path in sorted((RECIPES / "launch").glob("*.yaml")):
        config = load_config_from_file(str(path))
        kinds[path.stem] = config.distributed_type.value
        assert config.mixed_precision == "bf16"
    assert kinds == {"ddp": "MULTI_GPU", "deepspeed_zero2": "DEEPSPEED", "fsdp": "FSDP"}


def test_methods_are_listed_without_torch():
    code = (
        "import sys; from agentbench_prefix import registry; "
        "[registry.method(m).summary for m in registry.method_names()]; "
        "assert not {'torch', 'transformers', 'trl'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_method_names_its_class():
    for name in METHODS:
        method = registry.method(name)
        assert isinstance(method, ReinforcementMethod)
        assert method.objective_type().__module__ == f"agentbench_baselines.{name}"
