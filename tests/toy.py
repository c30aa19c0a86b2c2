"""A small environment with several families, and its registration as a third party would do it."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from collections.abc import Iterator
from pathlib import Path

import gymnasium as gym
import pytest
from toys import Vault

from agentbench_prefix import registry
from agentbench_prefix.env import PlayedTurn
from agentbench_prefix.errors import UnknownNameError

LENGTHS = (2, 3, 4, 12)
"""Digits of a code, by family; twelve do not fit the turn limit of eight."""


class Toy(Vault):
    """Vaults whose codes are 2, 3, 4 or 12 digits out of 0, 1, 2; families take turns."""

    env_id = "Toy-v0"
    default_max_turns = 8
    data_hash = hashlib.sha256(b"toy").hexdigest()

    def __init__(self, *, max_turns=8, split="train", loud=False, render_mode=None):
        super().__init__(max_turns=max_turns, split=split, loud=loud, render_mode=render_mode)

    def tasks(self, split):
        if split not in self.splits():
            raise UnknownNameError("split", split, self.splits())
        numbers = {"train": range(12), "test": range(12, 60), "all": range(60)}[split]
        return tuple(f"toy_{i}" for i in numbers)

    def _length(self, task_id):
        if task_id not in self.tasks("all"):
            raise UnknownNameError("task_id", task_id, self.tasks("all"))
        return LENGTHS[int(task_id.removeprefix("toy_")) % len(LENGTHS)]

    def family(self, task_id):
        return f"digits_{self._length(task_id):02}"

    def _begin(self, task_id, options):
        length = self._length(task_id)
        digest = hashlib.sha256(task_id.encode()).digest()
        self.code = [byte % 3 for byte in digest[:length]]
        self.progress, self.tried = 0, []
        return f"A vault of {length} digits. Dial {self.code[0]}."

    def candidate_actions(self):
        return ["look", *(f"dial {digit}" for digit in range(3))]

    def failure_category(self, turns: list[PlayedTurn]) -> str:
        return "no_turn" if not turns else "half_open" if self.progress else "shut"

    def out_of_reach(self, split, max_turns):
        if max_turns is None:
            return ()
        return tuple(task for task in self.tasks(split) if self._length(task) > max_turns)


def write_distribution(folder: Path) -> None:
    """Write what an installed package leaves that registers the toy by an entry point."""
    info = folder / "toy_environment-1.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text(
        "Metadata-Version: 2.1\nName: toy-environment\nVersion: 1\n"
    )
    info.joinpath("entry_points.txt").write_text(
        f"[{registry.ENVIRONMENTS_GROUP}]\nToy-v0 = toy:Toy\n"
    )


@contextlib.contextmanager
def registered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register the toy environment in this process for a while."""
    write_distribution(folder)
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    forget = registry.environment_ids.cache_clear
    forget()
    registry.register_environments()
    try:
        yield
    finally:
        gym.registry.pop("Toy-v0", None)
        forget()
