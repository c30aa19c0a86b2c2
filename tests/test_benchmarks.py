"""The benchmarks run, and memory stays flat."""

from __future__ import annotations

import gc
import json
import random
import subprocess
import sys
import tracemalloc

import pytest

from agentbench_prefix import environment_ids, make


def run(repository, *arguments):
    return subprocess.run(
        [sys.executable, *arguments], cwd=repository, capture_output=True, text=True, check=False
    )


def test_textcraft_benchmark_measures_our_side_alone(repository):
    done = run(repository, "benchmarks/textcraft.py", "--split", "test", "--passes", "1")
    assert done.returncode == 0, done.stderr
    for row in ("steps ", "resets ", "snapshots ", "restores "):
        assert row in done.stdout
    assert "AgentGym  " not in done.stdout


def test_textcraft_benchmark_names_a_folder_that_is_none(repository, tmp_path):
    done = run(repository, "benchmarks/textcraft.py", "--agentgym", str(tmp_path))
    assert done.returncode != 0
    assert "give AgentGym's agentenv-textcraft folder" in done.stderr


def test_babyai_benchmark_measures_our_side_and_minigrid(repository):
    few = ("--seeds", "1", "--passes", "1", "--turns", "5")
    done = run(repository, "benchmarks/babyai.py", *few)
    assert done.returncode == 0, done.stderr
    for row in ("steps ", "resets to a new task ", "minigrid's steps, as they are "):
        assert row in done.stdout
    assert "AgentGym  " not in done.stdout


def test_babyai_benchmark_names_a_folder_that_is_none(repository, tmp_path):
    done = run(repository, "benchmarks/babyai.py", "--agentgym", str(tmp_path))
    assert done.returncode != 0
    assert "give AgentGym's agentenv-babyai folder" in done.stderr


def test_corpora_benchmark_compares_and_memory_stays(repository):
    done = run(repository, "benchmarks/corpora.py", "--every", "37", "--passes", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = ("every turn ", "chosen by the strategies ", "one pass a query: ", "growth: ")
    for row in (*rows, "  entropy_change_top3 alone ", "  fixed_ratio_10_30_50 alone "):
        assert row in done.stdout


def test_corpora_benchmark_fails_where_one_pass_saves_too_little(repository):
    few = ("--only", "tokens", "--every", "37", "--fewer", "1000")
    done = run(repository, "benchmarks/corpora.py", *few)
    assert done.returncode == 1
    assert "one pass saves less than 1000 times the tokens" in done.stderr


def test_gpu_check_runs_in_small_on_a_cpu(repository, tmp_path):
    few = ("grpo_mis", "prefix_grpo", "trial")
    out = ("--out", str(tmp_path / "figures.json"))
    done = run(
        repository, "benchmarks/gpu_check.py", "--toy", "--device", "cpu", *out, "--methods", *few
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["failed"], figures["missing"]) == ({}, [])
    for name in few:
        assert f"{name} " in done.stdout
        assert figures["methods"][name]["tokens_per_second"] > 0
        assert figures["methods"][name]["generated_tokens"] > 4
    assert "before training 4 of 4 episodes agree" in done.stdout
    assert figures["rollout_tokens_per_second"] > 0
    assert len(figures["cpu_tier"]["cpu"]["rewards"]) == 2


def test_gpu_check_goes_on_behind_a_method_that_fails(repository):
    code = (
        "import sys; sys.path.insert(0, 'benchmarks'); import gpu_check\n"
        "step = gpu_check.step_of\n"
        "def step_of(name, *given):\n"
        "    if name == 'grpo':\n"
        "        raise MemoryError('too large')\n"
        "    return step(name, *given)\n"
        "gpu_check.step_of = step_of\n"
        "def rollout_rate(*given):\n"
        "    raise MemoryError('too large')\n"
        "gpu_check.rollout_rate = rollout_rate\n"
        "sys.argv += ['--toy', '--device', 'cpu', '--methods', 'grpo', 'dapo']\n"
        "gpu_check.main()"
    )
    done = run(repository, "-c", code)
    assert done.returncode == 1
    assert "grpo         FAILED: MemoryError: too large" in done.stdout
    assert "dapo         update " in done.stdout
    assert "CPU tier on cpu: " in done.stdout
    assert "failed: grpo, rollouts" in done.stderr


def test_gpu_check_names_what_it_had_no_time_for(repository):
    few = ("--toy", "--device", "cpu", "--minutes", "0", "--methods", "grpo")
    done = run(repository, "benchmarks/gpu_check.py", *few)
    assert done.returncode == 0, done.stderr
    assert "not reached: grpo, rollouts, CPU tier on cpu" in done.stdout


def test_gpu_check_says_that_there_is_no_gpu(repository):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    done = run(repository, "benchmarks/gpu_check.py")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("no CUDA device is visible to torch: run this")


@pytest.mark.parametrize("env_id", environment_ids())
def test_memory_is_flat(env_id):
    env = make(env_id, max_turns=None)
    tasks = env.tasks("test")[:20]

    def episodes():
        rng = random.Random(0)
        for number, task in enumerate(tasks * 3):
            env.reset(seed=number, options={"task_id": task})
            snapshot = env.snapshot()
            candidates = env.candidate_actions()
            for _ in range(20):
                if env.ended:
                    env.restore(snapshot)
                env.step(rng.choice(candidates))

    episodes()
    gc.collect()
    tracemalloc.start()
    try:
        episodes()
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        episodes()
        episodes()
        gc.collect()
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    # One 100-byte string kept per step would be 240 kB.
    assert after - before < 50_000


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("env_id", environment_ids())
def test_memory_is_flat_over_a_long_life(repository, env_id):
    done = run(repository, "benchmarks/memory.py", "--env", env_id)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1000000" in done.stdout


def test_a_leak_is_noticed(repository, tmp_path):
    script = (
        "import runpy, sys\n"
        "from agentbench_envs.textcraft.env import TextCraftEnv\n"
        "kept, act = [], TextCraftEnv._act\n"
        "TextCraftEnv._act = lambda self, text: kept.append(' ' * 2000) or act(self, text)\n"
        "sys.argv = ['memory.py', '--steps', '10000', '--resets', '100', '--allow', '8']\n"
        "runpy.run_path('benchmarks/memory.py', run_name='__main__')\n"
    )
    done = run(repository, "-c", script)
    assert done.returncode == 1
    assert "TextCraft-v0 keeps memory" in done.stderr
