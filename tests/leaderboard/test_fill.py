"""``leaderboard fill``: runs what is missing, resumes after a kill, survives failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import made
import pytest
import stand_in

from agentbench_prefix.errors import (
    CheckpointError,
    ConfigurationError,
    UnknownNameError,
)
from agentbench_prefix.leaderboard import fill
from agentbench_prefix.leaderboard.results import Result, read_results

HEAD = "env: Toy-v0\nevaluation: {splits: [test, train], samples: 2, seed: 5}\n"
PLAN = f"""{HEAD}
entries:
  - {{method: [grpo, dapo], init: base}}
  - {{method: grpo, init: sft, seeds: [0, 1], options: {{steps: 5}}}}
"""
NAMES = [
    "Toy-v0-cpu-grpo-from-base-seed0",
    "Toy-v0-cpu-dapo-from-base-seed0",
    "Toy-v0-cpu-grpo-from-sft-seed0",
    "Toy-v0-cpu-grpo-from-sft-seed1",
]
METHODS = ("base", "sft", "grpo", "dapo", "broken")
RESULTS, RUNS = Path("leaderboards/results"), Path("runs/leaderboard")


class Method:
    def __init__(self, name, shipped=None):
        self.name = name
        self.shipped = shipped

    def checkpoint(self, env_id):
        return self.shipped


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A finished run, evaluated by the real evaluator, that the stand-ins copy from."""
    folder = tmp_path_factory.mktemp("template")
    with pytest.MonkeyPatch.context() as patch, made.toy.registered(folder / "site", patch):
        run = made.make_run(folder / "run", {}, splits=())
        for split in ("test", "train"):
            made.evaluate_run(run, made.counts_of(1), split, samples=2, seed=5)
    return run


@pytest.fixture(autouse=True)
def setting(toy_env, template, monkeypatch):
    """Methods to name, and commands that are fast."""
    shipped = {}

    def look_up(name):
        if name not in METHODS:
            raise UnknownNameError("method", name, METHODS)
        return Method(name, shipped.get(name))

    monkeypatch.setattr("agentbench_prefix.registry.method", look_up)
    monkeypatch.setattr("agentbench_prefix.registry.method_names", lambda: METHODS)
    monkeypatch.setattr(fill, "train_command", stand_in.train_command)
    monkeypatch.setattr(fill, "eval_command", stand_in.eval_command)
    monkeypatch.setattr(fill, "_POLL", 0.02)
    site = f"{toy_env.parent / 'site'}:{Path(made.toy.__file__).parent}"
    monkeypatch.setenv("PYTHONPATH", site)
    monkeypatch.setenv("TEMPLATE", str(template))
    Path("plan.yaml").write_text(PLAN)
    return shipped


def plan_of(text):
    Path("plan.yaml").write_text(text)
    return fill.plan_jobs(fill.Plan.load(Path("plan.yaml")))


def processes(name):
    return [line.split() for line in (RUNS / name / "processes").read_text().splitlines()]


def test_fill_makes_every_missing_result_and_build_shows_them(call, template):
    done = made.result_of(template)
    run = done.run.model_copy(update={"init": made.Init(name="sft"), "seed": 1})
    done.model_copy(update={"run": run}).save(RESULTS)
    status, out, err = call("leaderboard", "fill", "--plan", "plan.yaml")
    assert (status, err) == (0, "")
    assert "4 runs: 3 filled in, 1 done before, 0 failed" in out
    assert f"{NAMES[0]}: training ({RUNS / NAMES[0]}/train.log)" in out
    assert f"{NAMES[0]}: evaluating train (" in out
    assert [result.name for result in read_results(RESULTS)] == sorted(NAMES)
    assert not (RUNS / NAMES[3]).exists()
    for name in NAMES[:3]:
        result = Result.load(RESULTS / f"{name}.json")
        assert set(result.splits) == {"test", "train"}
        assert (result.settings.samples, result.evaluation_seed) == (2, 5)
        assert {line[1] for line in processes(name)} == {"1", "end"}  # OMP_NUM_THREADS
        log = (RUNS / name / "train.log").read_text()
        assert log.startswith(f"$ {sys.executable} ")
        assert f"training {result.run.method}" in log
    assert len((RUNS / NAMES[2] / "log.jsonl").read_text().split()) == 5
    status, out, _ = call("leaderboard", "fill", "--plan", "plan.yaml")
    assert "4 runs: 0 filled in, 4 done before, 0 failed" in out
    assert len(processes(NAMES[0])) == 2
    pytest.importorskip("pandas")
    assert call("leaderboard", "build")[0] == 0
    page = Path("leaderboards/Toy-v0-cpu.md").read_text()
    assert "2 (0, 1)" in page
    for name in NAMES[:3]:  # training is kept to be read; of the run done before there is none
        for kept, ending in (("curves", "png"), ("log", "jsonl")):
            assert f"[{kept}](curves/{name}.{ending})" in page
        assert Path(f"leaderboards/curves/{name}.png").read_bytes() == name.split("-")[3].encode()
        log = Path(f"leaderboards/curves/{name}.jsonl").read_bytes()
        assert log == (RUNS / name / "log.jsonl").read_bytes()
    assert f"curves/{NAMES[3]}" not in page


def test_a_failed_run_is_reported_and_does_not_stop_the_others(call):
    plan_of(PLAN.replace("[grpo, dapo]", "[broken, grpo]"))
    status, out, _ = call("leaderboard", "fill", "--plan", "plan.yaml", "--jobs", 1)
    assert status == 1
    assert "4 runs: 3 filled in, 0 done before, 1 failed" in out
    name = "Toy-v0-cpu-broken-from-base-seed0"
    assert f"{name}: training ended with status 1: " in out
    assert "training broken | it broke" in out
    assert f"(see {RUNS / name}/train.log)" in out
    assert len(read_results(RESULTS)) == 3


def test_runs_go_two_at_a_time(call):
    plan_of(f"{HEAD}entries: [{{method: grpo, init: base, seeds: [0, 1, 2, 3]}}]\n")
    assert call("leaderboard", "fill", "--plan", "plan.yaml", "--runs", "r")[0] == 0
    spans = []
    for folder in Path("r").iterdir():
        start, end = [line.split()[2] for line in (folder / "processes").read_text().splitlines()]
        spans.append((float(start), float(end)))
    assert len(spans) == 4
    for start, _ in spans:
        assert sum(a <= start < b for a, b in spans) <= 2


def start_fill(toy_env):
    """The command in a process of its own, with the stand-in commands."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(stand_in.__file__).parent)!r})\n"
        "import stand_in\n"
        "from agentbench_prefix import registry\n"
        "from agentbench_prefix.leaderboard import fill\n"
        "fill.train_command, fill.eval_command = stand_in.train_command, stand_in.eval_command\n"
        "registry.method = lambda name: None\n"
        "from agentbench_prefix.cli import main\n"
        "main(['leaderboard', 'fill', '--plan', 'plan.yaml'])"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell's background jobs ignore it, and so would theirs.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for(condition):
    for _ in range(500):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it never happened")


def test_killed_and_run_again_it_goes_on_where_it_was(toy_env):
    plan_of(f"{HEAD}entries: [{{method: grpo, init: base, options: {{steps: 4}}}}]\n")
    folder = RUNS / NAMES[0]
    RUNS.mkdir(parents=True)
    (RUNS / "hold").touch()
    first = start_fill(toy_env)
    wait_for(lambda: fill._count_lines(folder / "log.jsonl") == 3)
    first.kill()
    first.wait()
    first.stdout.close()
    # Its training process lives on and holds the folder: the next one waits for it.
    second = start_fill(toy_env)
    lines = iter(second.stdout.readline, "")
    assert any("waiting for another process that works in" in line for line in lines)
    assert len(processes(NAMES[0])) == 1
    (RUNS / "hold").unlink()
    rest = second.stdout.read()
    second.stdout.close()
    assert second.wait() == 0, rest
    assert "1 runs: 1 filled in" in rest
    assert (folder / "log.jsonl").read_text().split() == ["0", "1", "2", "3"]
    assert Result.load(RESULTS / f"{NAMES[0]}.json").name == NAMES[0]


def test_a_killed_training_is_resumed():
    jobs = plan_of(f"{HEAD}entries: [{{method: grpo, init: base, options: {{steps: 4}}}}]\n")
    folder = RUNS / NAMES[0]
    RUNS.mkdir(parents=True)
    (RUNS / "hold").touch()
    filler = fill.Filler(RESULTS, RUNS, lambda job, stage: None)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(filler.fill, jobs)
        wait_for(lambda: fill._count_lines(folder / "log.jsonl") == 3)
        os.kill(int(processes(NAMES[0])[0][0]), signal.SIGKILL)
        [outcome] = future.result()
    assert "training ended with status -9" in outcome.error
    (RUNS / "hold").unlink()
    [outcome] = filler.fill(jobs)
    assert outcome.error is None
    assert (folder / "log.jsonl").read_text().split() == ["0", "1", "2", "3"]


def test_an_interrupt_ends_the_processes(toy_env):
    plan_of(f"{HEAD}entries: [{{method: grpo, init: base, seeds: [0, 1, 2]}}]\n")
    RUNS.mkdir(parents=True)
    (RUNS / "hold").touch()
    first = start_fill(toy_env)
    wait_for(lambda: len(list(RUNS.glob("*/log.jsonl"))) == 2)
    first.send_signal(signal.SIGINT)
    first.communicate()
    assert first.returncode not in (0, 1)
    for folder in RUNS.glob("*/processes"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(folder.read_text().split()[0]), 0)
    assert len(list(RUNS.glob("*/processes"))) == 2


def test_finished_stages_are_not_run_again(call):
    plan_of(f"{HEAD}entries: [{{method: grpo, init: base}}]\n")
    assert call("leaderboard", "fill", "--plan", "plan.yaml")[0] == 0
    path = RESULTS / f"{NAMES[0]}.json"
    before, text = processes(NAMES[0]), path.read_bytes()
    path.unlink()
    _, out, _ = call("leaderboard", "fill", "--plan", "plan.yaml")
    assert "1 filled in" in out
    assert "training" not in out
    assert "evaluating" not in out
    assert processes(NAMES[0]) == before
    assert path.read_bytes() == text


def test_another_command_for_the_same_folder_is_refused(call):
    plan_of(f"{HEAD}entries: [{{method: grpo, init: base}}]\n")
    assert call("leaderboard", "fill", "--plan", "plan.yaml")[0] == 0
    (RESULTS / f"{NAMES[0]}.json").unlink()
    plan_of(f"{HEAD}entries: [{{method: grpo, init: base, options: {{steps: 9}}}}]\n")
    status, out, _ = call("leaderboard", "fill", "--plan", "plan.yaml")
    assert status == 1
    assert "the plan now says" in out
    assert "give the entry a label" in out
    plan_of(
        "env: Toy-v0\nentries: [{method: grpo, init: base, label: long, options: {steps: 9}}]\n"
    )
    assert call("leaderboard", "fill", "--plan", "plan.yaml")[0] == 0
    result = Result.load(RESULTS / "Toy-v0-cpu-grpo-long-from-base-seed0.json")
    assert result.run.variant == "long"


def test_a_result_under_other_settings_is_named(call):
    made.quick_result("old", {}).save(RESULTS)
    plan_of(f"{HEAD}entries: [{{method: grpo, init: base}}]\n")
    status, out, _ = call("leaderboard", "fill", "--plan", "plan.yaml")
    assert status == 1
    assert "was evaluated on other splits, samples or seed" in out


def test_a_run_that_is_not_the_plans_is_refused(call, monkeypatch):
    def other(job, folder):
        command = stand_in.train_command(job, folder)
        return [*command[:5], "sft", *command[6:]]

    monkeypatch.setattr(fill, "train_command", other)
    plan_of(f"{HEAD}entries: [{{method: grpo, init: base}}]\n")
    status, out, _ = call("leaderboard", "fill", "--plan", "plan.yaml")
    assert status == 1
    assert "the plan's init is 'base', the run in" in out
    assert read_results(RESULTS) == []


def test_a_shipped_checkpoint_is_only_evaluated(call, setting, template):
    setting["grpo"] = template / "checkpoint"
    plan_of(f"{HEAD}entries: [{{method: grpo, shipped: true}}]\n")
    status, out, _ = call("leaderboard", "fill", "--plan", "plan.yaml", "--dry-run")
    assert status == 0
    assert f"Toy-v0-cpu-grpo-seed3  missing: evaluate {template}/checkpoint" in out
    status, out, _ = call("leaderboard", "fill", "--plan", "plan.yaml")
    assert status == 0, out
    [result] = read_results(RESULTS)
    assert (result.name, result.run.spent.steps) == ("Toy-v0-cpu-grpo-seed3", 10)
    assert "training" not in out


def test_a_dry_run_prints_commands_and_runs_nothing(call):
    _, out, _ = call("leaderboard", "fill", "--plan", "plan.yaml", "--dry-run")
    assert [line.split("  ")[0] for line in out.splitlines()] == NAMES
    assert not Path("runs").exists()
    assert not RESULTS.exists()


def test_a_damaged_state_is_named(call):
    plan_of(f"{HEAD}entries: [{{method: grpo, init: base}}]\n")
    (RUNS / NAMES[0]).mkdir(parents=True)
    (RUNS / NAMES[0] / fill.STATE).write_text("{")
    status, out, _ = call("leaderboard", "fill", "--plan", "plan.yaml")
    assert status == 1
    assert "fill.json is damaged" in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("entries: []", r"env: Field required"),
        ("env: Toy-v0\nentries: []", r"entries: Tuple should have at least 1 item"),
        ("env: Toy-v0\nentries: [{method: grpo, seed: 1}]", r"entries\.0\.seed: Extra inputs"),
        ("env: Toy-v0\nentries: [{method: a b}]", r"entries\.0\.method\.0: String should match"),
        ("env: Toy-v0\nentries: [{method: grpo}]", "grpo must name its init"),
        ("env: Toy-v0\nentries: [{method: x, init: base}]", "unknown method 'x'"),
        ("env: Toy-v0\nentries: [{method: sft, shipped: true}]", "ships no checkpoint for Toy-v0"),
        ("env: Toy-v0\nentries: [{method: sft, shipped: true, init: base}]", "takes no init"),
        (
            "env: Toy-v0\nentries: [{method: grpo, init: base}, {method: grpo, init: base}]",
            "holds Toy-v0-cpu-grpo-from-base-seed0 twice: give one of them a label",
        ),
        ("[]", "must be a mapping"),
    ],
)
def test_a_plan_that_cannot_be_used_is_named(text, message):
    with pytest.raises((ConfigurationError, CheckpointError, UnknownNameError), match=message):
        plan_of(text)


def test_the_real_commands_say_what_the_plan_says(monkeypatch):
    monkeypatch.undo()
    plan = fill.Plan(
        env="Toy-v0",
        options={"corpus": "toys", "steps": 40},
        entries=[
            {
                "method": "grpo",
                "init": "sft",
                "init_from": "runs/sft-{seed}/checkpoint",
                "variant": "wide",
                "label": "x",
                "seeds": [3],
                "options": {"steps": 7, "fresh_budget": True, "watch": False},
            }
        ],
    )
    monkeypatch.setattr("agentbench_prefix.registry.method", lambda name: None)
    [job] = fill.plan_jobs(plan)
    assert job.name == "Toy-v0-cpu-grpo-wide-x-from-sft-seed3"
    expected = (
        "-m agentbench_prefix.train --method grpo --env Toy-v0 --tier cpu --init "
        "runs/sft-3/checkpoint --seed 3 --out out --no-evaluate --no-progress --variant wide "
        "--corpus toys --steps 7 --fresh-budget --no-watch"
    )
    assert " ".join(fill.train_command(job, Path("out"))[1:]) == expected
    expected = (
        "-m agentbench_prefix.eval --method grpo --model ck --env Toy-v0 --split test --samples 8 "
        "--seed 0 --out out --no-progress"
    )
    assert " ".join(fill.eval_command(job, Path("ck"), "test", Path("out"))[1:]) == expected


def test_progress_is_read_from_the_run_folder(tmp_path):
    assert fill.progress_of(tmp_path) == ""
    (tmp_path / "log.jsonl").write_text("{}\n{}\n")
    assert fill.progress_of(tmp_path) == "2 steps"
    (tmp_path / "eval/test").mkdir(parents=True)
    (tmp_path / "eval/test/episodes.jsonl").write_text(json.dumps({}) + "\n")
    assert fill.progress_of(tmp_path) == "test 1 episodes"
