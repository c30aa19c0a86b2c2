"""The toy environment, registered, and a folder to run in."""

from __future__ import annotations

import pytest
import toy


@pytest.fixture
def toy_env(tmp_path, monkeypatch):
    """Run in an empty folder with ``Toy-v0`` registered."""
    with toy.registered(tmp_path / "site", monkeypatch):
        monkeypatch.chdir(tmp_path)
        # A commit made while tests run is no concern of theirs.
        monkeypatch.setattr("agentbench_prefix.evaluation.runner.code_version", lambda: "tested")
        yield
    # monkeypatch takes the entry point away later; nothing looks it up in between.
