"""Runs of reinforcement learning: what is equal, what is resumed, what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import yaml
from rl_runs import (
    ENV,
    gradients,
    plain_logprobs,
    pool,
    random_model,
    recipe,
    shake,
    tokenizer,
    trainer,
    weights_of,
)
from safetensors.torch import load_file

from agentbench_prefix import registry
from agentbench_prefix.errors import AgentBenchError, ConfigurationError, CorpusError
from agentbench_prefix.files import read_whole_lines
from agentbench_prefix.training.method import find_start
from agentbench_prefix.training.objective import Batch
from agentbench_prefix.training.rl_method import read_log
from agentbench_prefix.training.summary import RunSummary


def log(folder):
    return [json.loads(line) for line in read_whole_lines(folder / "log.jsonl")]


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def assert_close(left, right, tolerance=1e-12):
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], atol=tolerance, rtol=1e-9)


# ------------------------------------------------------------------ equal methods
def two_passes(method, out, *, cut=True, near=True, **changes):
    """Losses and gradients of both optimizer epochs on one batch."""
    model = random_model()
    made = trainer(method, out, model=model, known=pool(model, cut=cut, near=near), **changes)
    made._step = 0
    first = gradients(made, 0)
    shake(model, 0.02)
    return [first, gradients(made, 1)]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (("replay_grpo", {}), ("prefix_grpo", {"prefix_weight": 0.0})),
        (("grpo", {}), ("trial", {"dense_weight": 0.0, "warmup": 0})),
        (("grpo", {}), ("trial", {"dense_weight": 5.0, "warmup": 1})),
        (("grpo", {}), ("dapo", {"clip_higher": False})),
        (("grpo", {}), ("grpo_mis", {"form": "ppo"})),
    ],
    ids=["replay = prefix at 0", "grpo = trial at 0", "warm-up", "dapo off", "one engine"],
)
def test_methods_that_are_equal_train_alike(left, right, tmp_path):
    a = two_passes(left[0], tmp_path / "a", objective=left[1])
    b = two_passes(right[0], tmp_path / "b", objective=right[1])
    for (loss, grads), (other, others) in zip(a, b, strict=True):
        assert loss == pytest.approx(other, abs=1e-12)
        assert max(float(g.abs().max()) for g in grads.values()) > 1e-4
        assert_close(grads, others)


def test_without_prefix_adaprefix_is_grpo(tmp_path):
    none = {"schedule": "fixed", "start": 0.0, "span": 0.0, "calibrate": False}
    a = two_passes("grpo", tmp_path / "a", cut=False)
    b = two_passes("adaprefix", tmp_path / "b", cut=False, objective=none)
    for (loss, grads), (other, others) in zip(a, b, strict=True):
        assert loss == pytest.approx(other, abs=1e-12)
        assert_close(grads, others)


def test_a_prefix_that_is_not_trained_has_no_gradient(tmp_path):
    """Other old log-probabilities of the prefix move Prefix-GRPO, and Replay-GRPO not at all."""
    cases = (("replay_grpo", {}, False), ("prefix_grpo", {"signal": "constant"}, True))
    for method, objective, moved in cases:
        grads = []
        for near in (True, False):
            out = tmp_path / f"{method}{near}"
            run = two_passes(method, out, near=near, objective=objective)
            grads.append(run[0][1])
        same = all(torch.equal(grads[0][n], grads[1][n]) for n in grads[0])
        assert same != moved


# ------------------------------------------------------------------ the same update
def one_step(method, out, **changes):
    model = random_model()
    made = trainer(method, out, model=model, steps=1, **changes)
    made.run()
    return weights_of(model), log(out)


@pytest.mark.parametrize("method", ["grpo", "prefix_grpo", "grpo_mis"])
def test_accumulation_gives_the_same_update(method, tmp_path):
    whole, logged = one_step(method, tmp_path / "one", microbatch=16)
    parts, other = one_step(method, tmp_path / "four", microbatch=4)
    uneven, _ = one_step(method, tmp_path / "uneven", microbatch=2)
    assert any(not torch.equal(p, random_model().get_parameter(n)) for n, p in whole.items())
    assert_close(whole, parts, 1e-9)
    assert_close(whole, uneven, 1e-9)
    for name in logged[0]:
        if not name.startswith("seconds/") and name != "prefix/ratio":
            assert logged[0][name] == pytest.approx(other[0][name], rel=1e-6, abs=1e-9), name


def test_padding_moves_nothing(tmp_path):
    """A batch padded further gives the same loss, whatever stands in the padding."""
    model = random_model()
    made = trainer("prefix_grpo", tmp_path, model=model)
    made._step = 0
    batch = made._prepare_inputs(None)
    made._compute_loss(model, batch)
    shake(model, 0.02)
    made._moment = dataclasses.replace(made._moment, epoch=1)
    plain = made._compute_loss(model, batch)

    def pad(tensor, fill):
        return torch.nn.functional.pad(tensor, (0, 5), value=fill)

    padded = dataclasses.replace(
        batch,
        mask=pad(batch.mask, 0),
        turns=pad(batch.turns, -1),
        rollout_logprobs=pad(batch.rollout_logprobs, -3.0),
        old_logprobs=pad(batch.old_logprobs, -7.0),
        prefix_mask=pad(batch.prefix_mask, 0),
        prefix_old_logprobs=pad(batch.prefix_old_logprobs, 9.0),
    )
    moved = made._compute_loss(model, padded) - plain
    assert abs(float(moved.detach())) < 1e-15


def test_scores_are_those_of_each_sequence_alone(tmp_path):
    """Packed behind a shared prompt or alone: the same log-probabilities and entropies."""
    model = random_model()
    made = trainer("prefix_grpo", tmp_path, model=model)
    made._step = 0
    made._prepare_inputs(None)
    whole = made._whole
    whole.active[:] = True
    with torch.no_grad():
        scores = made._score(model, whole, prefix=True)
        row = 0
        for group in whole.groups:
            for rollout in group.rollouts:
                alone = plain_logprobs(model, [*group.prompt, *rollout.completion])
                own = alone[len(group.prompt) - 1 :]
                mask = torch.tensor(rollout.mask, dtype=torch.bool)
                found = scores.logprobs[row, : len(mask)]
                torch.testing.assert_close(found[mask], own[mask])
                assert not found[~mask].any()
                prefix = group.query.prefix
                if group.query.prefix_turns:
                    span = alone[prefix.begin - 1 : prefix.end - 1]
                    learnt = torch.tensor(prefix.mask, dtype=torch.bool)
                    found = scores.prefix_logprobs[row, : len(learnt)]
                    torch.testing.assert_close(found[learnt], span[learnt])
                    assert not found[~learnt].any()
                row += 1
    assert row == len(whole)


def test_the_engine_and_the_trainer_agree_on_what_was_generated(tmp_path):
    model = random_model()
    made = trainer("grpo", tmp_path, model=model)
    made._step = 0
    made._prepare_inputs(None)
    made._whole.active[:] = True
    with torch.no_grad():
        scores = made._score(model, made._whole, prefix=False)
    torch.testing.assert_close(scores.logprobs, made._whole.rollout_logprobs)


def test_samples_of_a_group_start_alike_and_differ(tmp_path):
    made = trainer("replay_grpo", tmp_path, rewards=False)
    made._step = 0
    made._prepare_inputs(None)
    for group in made._whole.groups:
        records = [rollout.record for rollout in group.rollouts]
        assert len({record.opening for record in records}) == 1
        assert len({record.seed for record in records}) == len(records)
        assert len({tuple(r.completion) for r in group.rollouts}) > 1
        # The turn limit counts the prefix.
        assert all(r.n_turns <= 7 - group.query.prefix_turns for r in records)


def test_only_generated_tokens_carry_loss(tmp_path):
    made = trainer("grpo", tmp_path)
    made._step = 0
    made._prepare_inputs(None)
    batch: Batch = made._whole
    for row, (record, rollout) in enumerate(
        zip(batch.records, [r for g in batch.groups for r in g.rollouts], strict=True)
    ):
        generated = [t for turn in record.turns for t in turn.token_ids]
        chosen = [t for t, m in zip(rollout.completion, rollout.mask, strict=True) if m]
        assert chosen == generated
        assert batch.mask[row].sum() == len(generated)


def test_a_step_draws_the_same_whatever_came_before(tmp_path):
    """Queries and chance depend on recipe and step alone."""
    names = []
    for folder in ("a", "b"):
        made = trainer("replay_grpo", tmp_path / folder)
        if folder == "b":
            made._step = 0
            made._prepare_inputs(None)
        made.state.global_step = 2 * made.recipe.epochs
        batches = made._play()
        names.append(
            [(g.query.query_id, [r.completion for r in g.rollouts]) for g in batches[0].groups]
        )
    assert names[0] == names[1]


# ------------------------------------------------------------------ resuming
class Broken(Exception):
    """The run breaks off."""


@pytest.mark.parametrize("method", ["prefix_grpo", "adaprefix"])
def test_a_broken_run_goes_on_exactly(method, tmp_path):
    objective = {}
    if method == "adaprefix":
        objective = {"calibrate": False, "probe_samples": 1, "every": 1}
    settings = {"steps": 4, "save_every": 1, "objective": objective, "max_turns": 6}

    def run(folder, break_at=None):
        model = random_model()
        known = pool(model, cut=method != "adaprefix")
        made = trainer(method, folder, model=model, known=known, **settings)
        play = made.player.play

        def maybe(queries, samples, names):
            if break_at is not None and names[0].startswith(f"{break_at}/"):
                raise Broken
            return play(queries, samples, names)

        made.player.play = maybe
        made.run()
        return weights_of(model), made

    unbroken, made = run(tmp_path / "unbroken")
    with pytest.raises(Broken):
        run(tmp_path / "broken", break_at=2)
    # A state that was not finished is not used.
    (tmp_path / "broken" / "states" / "checkpoint-99").mkdir()
    resumed, again = run(tmp_path / "broken")
    assert_same(unbroken, resumed)
    assert made.objective.state_dict() == again.objective.state_dict()
    assert made.costs.keys() == again.costs.keys()

    def facts(folder):
        return [{k: v for k, v in row.items() if "seconds" not in k} for row in log(folder)]

    assert facts(tmp_path / "unbroken") == facts(tmp_path / "broken")


def start_folder(tmp_path, seed=0):
    """A random model with the tokenizer of the CPU tier, as a checkpoint."""
    folder = tmp_path / "start"
    random_model(seed, torch.float32).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def recipe_file(tmp_path, **changes):
    path = tmp_path / "recipe.yaml"
    fields = {k: v for k, v in recipe(**changes).model_dump(mode="json").items() if v is not None}
    path.write_text(yaml.safe_dump(fields), encoding="utf-8")
    return path


def train_command(tmp_path, out, method="grpo", *more):
    return [
        *(sys.executable, "-m", "agentbench_prefix.train", "--method", method, "--env", ENV),
        *("--recipe", str(tmp_path / "recipe.yaml"), "--out", str(out)),
        *("--no-evaluate", "--no-progress", *more),
    ]


@pytest.mark.long
def test_a_killed_run_goes_on_exactly(tmp_path):
    start = start_folder(tmp_path)
    recipe_file(
        tmp_path,
        steps=12,
        save_every=1,
        init=str(start),
        dtype="float32",
        queries={"source": "corpus", "strategy": "entropy_change_top3"},
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        train_command(tmp_path, tmp_path / "unbroken", "prefix_grpo"), check=True, env=environment
    )
    broken = tmp_path / "broken"
    killed = 0
    while not (broken / "checkpoint").exists():
        process = subprocess.Popen(train_command(tmp_path, broken, "prefix_grpo"), env=environment)
        begun = len(read_whole_lines(broken / "log.jsonl"))
        while process.poll() is None and (
            killed >= 3 or len(read_whole_lines(broken / "log.jsonl")) < begun + 2
        ):
            time.sleep(0.02)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            killed += 1
        process.wait()
    assert killed == 3
    a, b = (
        load_file(tmp_path / x / "checkpoint" / "model.safetensors") for x in ("unbroken", "broken")
    )
    assert_same(a, b)


# ------------------------------------------------------------------ the command
def test_a_run_writes_what_it_promises(tmp_path):
    start = start_folder(tmp_path)
    file = recipe_file(
        tmp_path,
        steps=2,
        init=str(start),
        dtype="float32",
        save_dtype="bfloat16",
        queries={"source": "corpus", "strategy": "entropy_change_top3"},
        evaluation={"every": 1, "tasks": {"depth_1": 1}, "samples": 2},
        objective={"signal": "constant"},  # a random model earns no reward
    )
    seen = []
    method = registry.method("prefix_grpo")
    out = tmp_path / "run"
    checkpoint = method.train(
        ENV, out=out, recipe_file=file, progress=lambda *row: seen.append(row)
    )
    assert [row[:2] for row in seen] == [(0, 2), (1, 2)]
    rows = read_log(out / "log.jsonl")
    assert [row["step"] for row in rows] == [0, 0, 1, 1, 2]
    assert {"reward", "turns", "prefix/ratio", "prefix/loss_share"} <= rows[1].keys()
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    summary = RunSummary.load(out)
    assert summary.method == "prefix_grpo"
    assert summary.spent.rollouts == 2 * 4 * 4
    assert summary.spent.steps == 4
    assert summary.preprocessing.sidecars.tokens > 0
    assert len(summary.corpora) == 2
    assert load_file(checkpoint / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    # The same call finds it finished; another seed does not take the folder over.
    assert method.train(ENV, out=out, recipe_file=file) == checkpoint
    with pytest.raises(ConfigurationError, match=r"recipe\.seed is 0 there, 1 now"):
        method.train(ENV, out=out, recipe_file=file, seed=1)


def test_what_a_reader_must_be_told_is_noted():
    def objective(method, **settings):
        chosen = recipe(objective=settings)
        return registry.method(method).make_objective(chosen)

    assert objective("grpo").notes([], "transformers") == []
    (note,) = objective("grpo_mis", form="ppo").notes([], "transformers")
    assert "are one" in note
    assert objective("grpo_mis").notes([], "vllm") == []
    rows = [{"step": i, "trial/saturated": float(i > 1)} for i in range(6)] + [{"step": 6}]
    (note,) = objective("trial").notes(rows, "transformers")
    assert "67 % of micro-batches" in note
    assert objective("trial").notes(rows[:3], "transformers") == []


def test_training_is_never_watched_on_test_tasks():
    with pytest.raises(ValueError, match="not watched on split 'test'"):
        recipe(evaluation={"split": "test"})


def test_watched_tasks_are_left_out_of_the_queries(tmp_path):
    from agentbench_prefix.serialization import ChatSerializer
    from agentbench_prefix.training.rl_method import prepare_data

    chosen = recipe(
        queries={"strategy": "entropy_change_top3"},
        evaluation={"every": 1, "tasks": {"depth_2": 5, "depth_3": 3}},
    )
    origin = {"from": "a folder", "model_sha256": "0" * 64}
    data = prepare_data(chosen, ChatSerializer(tokenizer()), origin)
    assert len(data.watched) == 8
    drawn = {query.task_id for query in data.pool.queries}
    assert not drawn & set(data.watched)
    assert len(drawn) > 300
    assert all(query.prefix_turns < 7 for query in data.pool.queries)
    families = [q.family for q in data.pool.draw(np.random.default_rng(0), 64)]
    assert len(set(families)) > 1


# ------------------------------------------------------------------ refusals
def damaged(tmp_path, change):
    """The released corpus with something changed in its manifest."""
    import shutil

    from agentbench_prefix.corpora.find import find_corpus

    folder = tmp_path / "corpus"
    shutil.copytree(find_corpus("textcraft-prefix").folder, folder)
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest), "utf-8")
    return folder


def set_model(field, value):
    def change(manifest):
        manifest["models"]["compact/sft"][field] = value

    return change


def set_field(field, value):
    def change(manifest):
        manifest[field] = value

    return change


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (set_field("env_id", "Other-v0"), "env_id"),
        (set_field("data_hash", "0" * 64), "data_hash"),
        (set_field("dialogues", {"compact@2": "0" * 64}), "dialogues"),
        (set_model("tokenizer", "0" * 64), "models.compact/sft.tokenizer"),
        (set_model("model_sha256", "0" * 64), "models.compact/sft.model_sha256"),
    ],
)
def test_a_corpus_that_does_not_match_is_refused_by_name(tmp_path, change, field):
    folder = damaged(tmp_path, change)
    with pytest.raises(CorpusError) as raised:
        registry.method("prefix_grpo").train(ENV, out=tmp_path / "run", corpus=str(folder))
    assert raised.value.field == field
    assert not (tmp_path / "run").exists()


def test_a_start_that_does_not_ship_is_named():
    with pytest.raises(AgentBenchError, match="ships no checkpoint"):
        find_start("trial", "BabyAI-Text-v0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tier": "huge"}, "unknown tier of .*'huge'; valid: cpu"),
        ({"variant": "none"}, "unknown variant of .*'none'"),
        ({"corpus": "x"}, "grpo trains on tasks, not on a corpus"),
        ({"objective": {"epsilon": 1}}, "epsilon"),
        ({"trainer": {"learning_rate": 1.0}}, "learning_rate"),
        ({"microbatch": 7}, "cannot be cut into micro-batches of 7"),
        ({"queries": {"family_weights": {"depth_9": 1}}}, "depth_9"),
    ],
)
def test_the_method_names_what_is_wrong(arguments, message, tmp_path):
    with pytest.raises(AgentBenchError, match=message):
        registry.method("grpo").train(ENV, out=tmp_path / "run", **arguments)
