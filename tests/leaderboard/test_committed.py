"""The committed leaderboards are what the committed results give."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentbench_prefix.cards import CheckpointCard
from agentbench_prefix.leaderboard.results import RESULTS, read_results
from agentbench_prefix.leaderboard.rows import LeaderboardConfig

pages = pytest.importorskip("agentbench_prefix.leaderboard.pages")
pytest.importorskip("pandas")


def test_the_committed_pages_are_what_the_committed_results_give(repository):
    folder = repository / "leaderboards"
    assert pages.stale_pages(folder, pages.build(folder)) == []


def test_every_committed_result_is_readable(repository):
    folder = repository / "leaderboards"
    LeaderboardConfig.load(folder)
    for result in read_results(folder / RESULTS):
        assert (folder / RESULTS / f"{result.name}.json").is_file()


SHIPPED = sorted(
    path.parent
    for path in (Path(__file__).parents[2] / "baselines/agentbench_baselines/checkpoints").glob(
        "TextCraft-v0/*/agentbench_card.json"
    )
)


@pytest.mark.parametrize("checkpoint", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_checkpoint_has_its_row(repository, checkpoint):
    pytest.importorskip("torch")
    from agentbench_prefix.leaderboard.ship import find_result

    result = find_result(checkpoint, read_results(repository / "leaderboards" / RESULTS))
    stated = CheckpointCard.load(checkpoint).results["test"]["all"]
    assert stated.solved == result.splits["test"].n_solved


def test_checkpoints_of_reinforcement_learning_are_small():
    sizes = {
        folder.name: sum(path.stat().st_size for path in folder.iterdir())
        for folder in SHIPPED
        if folder.name not in ("base", "sft")
    }
    assert {name.partition("-")[0] for name in sizes} == {
        *("grpo", "grpo_mis", "dapo", "replay_grpo", "prefix_grpo", "trial", "adaprefix")
    }
    assert max(sizes.values()) <= 2 * 10**6
    assert sum(sizes.values()) <= 25 * 10**6


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("checkpoint", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_checkpoint_plays_as_its_row(repository, checkpoint, tmp_path):
    from agentbench_prefix.leaderboard.ship import find_result, reevaluate

    result = find_result(checkpoint, read_results(repository / "leaderboards" / RESULTS))
    for agreement in reevaluate(checkpoint, result, tmp_path, splits=["test"]):
        assert agreement.within, agreement
