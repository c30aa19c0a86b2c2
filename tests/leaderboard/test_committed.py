"""The committed leaderboards are what the committed results give."""

from __future__ import annotations

import pytest

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
