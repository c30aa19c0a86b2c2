"""The toy environment, registered, a folder to run in, and a way to call the command line."""

from __future__ import annotations

import pytest
import toy


@pytest.fixture
def toy_env(tmp_path, monkeypatch):
    """Run in an empty folder with ``Toy-v0`` registered."""
    with toy.registered(tmp_path / "site", monkeypatch):
        folder = tmp_path / "here"
        folder.mkdir()
        monkeypatch.chdir(folder)
        # A commit made while tests run is no concern of theirs.
        monkeypatch.setattr("agentbench_prefix.evaluation.runner.code_version", lambda: "tested")
        yield folder


@pytest.fixture
def call(capsys):
    """Run a command line; give exit status, standard output and standard error."""
    from agentbench_prefix.cli import main

    def run(*argv):
        with pytest.raises(SystemExit) as caught:
            main([str(word) for word in argv])
        out, err = capsys.readouterr()
        return caught.value.code or 0, out, err

    return run
