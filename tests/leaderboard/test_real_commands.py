"""The commands that a plan runs are the real ones: a short training, evaluated and shipped."""

from __future__ import annotations

import pytest

from agentbench_prefix.leaderboard.results import read_results

pytestmark = pytest.mark.long


def test_a_plan_is_filled_by_the_real_commands(tmp_path, monkeypatch, call):
    pytest.importorskip("torch")
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.yaml").write_text(
        "env: TextCraft-v0\n"
        "evaluation: {splits: [test], samples: 1}\n"
        "entries:\n"
        "  - {method: sft, init: base, label: short, options: {steps: 2}}\n"
    )
    status, out, _ = call("leaderboard", "fill", "--plan", "plan.yaml")
    assert status == 0, out
    [result] = read_results(tmp_path / "leaderboards/results")
    assert result.name == "TextCraft-v0-cpu-sft-short-from-base-seed0"
    assert result.run.spent.steps == 2
    assert result.run.preprocessing.teacher.rollouts > 1000
    assert result.run.init.model_sha256 is not None
    assert (result.splits["test"].n_tasks, result.splits["test"].n_errors) == (100, 0)
    run = f"runs/leaderboard/{result.name}"
    assert call("leaderboard", "ship", run, "--to", "shipped")[0] == 0
    status, out, _ = call("leaderboard", "verify", "shipped/sft")
    assert "Avg@1" in out
    assert call("leaderboard", "build")[0] == 0
    assert call("leaderboard", "build", "--check")[0] == 0
    assert call("report", f"{run}/eval/test", "--out", "page.html")[0] == 0
