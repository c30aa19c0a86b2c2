"""Checkpoint cards."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from pydantic import ValidationError

from agentbench_prefix.cards import (
    CARD,
    CheckpointCard,
    ModelDescription,
    TrainingDescription,
    code_version,
)
from agentbench_prefix.errors import CheckpointError

RESULT = {
    "tasks": 2,
    "episodes": 16,
    "solved": 4,
    "tasks_solved": 1,
    "avg_at_8": {"value": 0.25, "low": 0.1, "high": 0.5, "interval": "bootstrap"},
    "pass_at_8": {"value": 0.5, "low": 0.0, "high": 1.0, "interval": "wilson"},
}
SHARED = {
    "tasks": 2,
    "task_drawn": 0,
    "goal_trained": 0,
    "goal_on_the_way": 1,
    "goal_shown": 2,
    "subgoal_facts": 7,
    "subgoal_facts_on_the_way": 3,
    "subgoal_facts_shown": 5,
}


def make_card(**changes) -> CheckpointCard:
    return CheckpointCard(
        **{
            "method": "sft",
            "env_id": "Toy-v0",
            "data_hash": "0" * 64,
            "dialogue": "bare@1",
            "max_tokens": 5,
            "tokenizer_fingerprint": "1" * 64,
            "model_sha256": "2" * 64,
            "model": ModelDescription(architecture="Qwen3ForCausalLM", parameters=800_000),
            "training": TrainingDescription(
                recipe={"lr": 0.004, "layers": [1, 2]},
                seed=3,
                data={"episodes": 100},
                steps=10,
                tokens=20_000,
                minutes=0.5,
                threads=1,
                code_version="abc",
                command="python -m agentbench_prefix.train --method sft",
            ),
            "results": {"test": {"all": RESULT}},
            "licence": "Apache-2.0",
            **changes,
        }
    )


def test_a_card_comes_back_from_its_folder(tmp_path):
    card = make_card()
    assert card.save(tmp_path) == tmp_path / CARD
    assert CheckpointCard.load(tmp_path) == card


def test_a_folder_without_a_card_is_a_foreign_model(tmp_path):
    assert CheckpointCard.load(tmp_path) is None


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda text: text[:-9], "file"),
        (lambda text: text.replace('"max_tokens": 5', '"max_tokens": "many"'), "max_tokens"),
        (lambda text: text.replace('"steps"', '"stops"'), "training.steps: Field required"),
    ],
)
def test_a_bad_card_is_named_with_its_field(tmp_path, damage, named):
    path = make_card().save(tmp_path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(CheckpointError) as caught:
        CheckpointCard.load(tmp_path)
    assert str(path) in str(caught.value)
    assert named in str(caught.value)


def test_a_card_with_an_unknown_entry_is_refused():
    with pytest.raises(ValidationError, match="colour"):
        make_card(colour="blue")


def test_saving_keeps_the_old_card_when_it_fails(tmp_path, monkeypatch):
    path = make_card().save(tmp_path)
    before = path.read_text()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        make_card(method="other").save(tmp_path)
    assert path.read_text() == before
    assert json.loads(before)["method"] == "sft"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["README.md", CARD]


def test_the_code_version_is_the_commit_of_a_checkout(repository: Path):
    if not (repository / ".git").exists():
        pytest.skip("not a git checkout")
    head = subprocess.run(
        ["git", "-C", repository, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert code_version().removesuffix("-dirty") == head


def test_without_git_the_code_version_is_the_distributions(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert code_version()[0].isdigit()


def test_the_page_shows_results_and_contamination(tmp_path):
    make_card(
        results={"test": {"all": RESULT, "easy": RESULT}},
        contamination={"split": "test", "rows": {"all": SHARED, "easy": SHARED}},
    ).save(tmp_path)
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "| easy | 4/16 | 25.0 [10.0, 50.0] | 1/2 | 50.0 [0.0, 100.0] |" in page
    assert "| all | 2 | 0 | 0 | 1 | 2 | 3/7 | 5/7 |" in page
    assert page.index("| easy |") < page.index("| all |")
