"""A run that is really killed ends, once resumed, like one that never was."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import toy

pytestmark = pytest.mark.long
TESTS = Path(toy.__file__).parent
COMMAND = (sys.executable, "-m", "agentbench_prefix.eval", "--no-progress")
RUNS = {
    "scripted": ("--method", "random", "--env", "Toy-v0", "--samples", "16", "--batch-size", "4"),
    "model": ("--method", "sft", "--env", "TextCraft-v0", "--tasks", "20", "--batch-size", "16"),
}


@pytest.fixture(scope="module", params=RUNS)
def launch(request, tmp_path_factory):
    """Start the evaluation in a process of its own, in a given run folder."""
    site = tmp_path_factory.mktemp("site")
    toy.write_distribution(site)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(TESTS)])}

    def start(folder):
        return subprocess.Popen(
            [*COMMAND, *RUNS[request.param], "--out", folder],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    return start


@pytest.fixture(scope="module")
def whole(launch, tmp_path_factory):
    """Folder of an unbroken run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    process = launch(folder)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    return folder


@pytest.mark.parametrize("moment", range(10))
def test_killed_at_a_random_moment_and_resumed(launch, whole, tmp_path, moment):
    rng = random.Random(moment)
    size = (whole / "episodes.jsonl").stat().st_size
    path = tmp_path / "run/episodes.jsonl"
    # The run and its resumption are both killed, the first kill of one test before anything is
    # written.
    for target in (0 if moment == 0 else rng.uniform(0, 0.6) * size, rng.uniform(0.6, 0.9) * size):
        process = launch(tmp_path / "run")
        while process.poll() is None and (path.stat().st_size if path.exists() else 0) < target:
            time.sleep(0.0005)
        time.sleep(rng.uniform(0, 0.01))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert not (tmp_path / "run/metrics.json").exists()
    process = launch(tmp_path / "run")
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    for name in ("metrics.json", "episodes.jsonl"):
        assert (tmp_path / "run" / name).read_bytes() == (whole / name).read_bytes()
