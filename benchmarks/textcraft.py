"""TextCraft's speed, beside AgentGym's environment in the same process where it is at hand.

Both play the same shortest plans in the same run, pass by pass in turns, and CPU time is counted.
AgentGym's recipe files are listed in sorted order, as its published results had them.

    git clone --depth 1 https://github.com/WooooDyy/AgentGym /tmp/AgentGym
    python benchmarks/textcraft.py --agentgym /tmp/AgentGym/agentenv-textcraft

Without ``--agentgym`` only our side is measured. Targets: at least 10 times its steps/s and 50
times its resets/s. The first time is the first of a task in the process; AgentGym caches nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import os
import sys
import time
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import gymnasium as gym

import agentbench_prefix  # noqa: F401 - registers the environments
from agentbench_envs.textcraft.env import manifest


def load_agentgym(folder: Path) -> Any:
    """Make AgentGym's TextCraft environment from its sources.

    Args:
        folder: Its ``agentenv-textcraft`` folder.
    """
    sources = folder / "agentenv_textcraft"
    if not (sources / "crafting_tree.py").is_file():
        sys.exit(f"{sources} holds no crafting_tree.py: give AgentGym's agentenv-textcraft folder")
    # Its own __init__ starts a web server; a bare package gives access to the modules behind it.
    package = types.ModuleType("agentenv_textcraft")
    package.__path__ = [str(sources)]
    sys.modules["agentenv_textcraft"] = package
    environment = importlib.import_module("agentenv_textcraft.environment")
    tree = importlib.import_module("agentenv_textcraft.crafting_tree")
    listdir = os.listdir
    with mock.patch("os.listdir", lambda path: sorted(listdir(path))):
        return environment.TextCraftEnv(tree.CraftingTree(f"{sources}/"), None, None)


def seconds(call: Callable[[], object]) -> float:
    """CPU seconds of a call: other processes on the machine do not count."""
    start = time.process_time()
    call()
    return time.process_time() - start


def play(env: Any, actions: Iterable[str]) -> None:
    for action in actions:
        result = env.step(action)
    assert result[2], "the plan did not solve its task"


def thousand(call: Callable[[], object]) -> float:
    """Calls a second, from a thousand calls."""

    def loop() -> None:
        for _ in range(1000):
            call()

    return 1000 / seconds(loop)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agentgym", type=Path, help="its agentenv-textcraft folder")
    parser.add_argument(
        "--passes", type=int, default=3, help="passes over the tasks after a first one (default 3)"
    )
    parser.add_argument("--split", default="all", help="tasks to play (default all)")
    arguments = parser.parse_args()

    wrapped = gym.make("TextCraft-v0", max_turns=None)
    ours: Any = wrapped.unwrapped
    theirs = load_agentgym(arguments.agentgym) if arguments.agentgym else None
    tasks = ours.tasks(arguments.split)
    plans = {task: manifest()["tasks"][task]["plan"] for task in tasks}

    rates: dict[str, list[float]] = {}
    steps = sum(map(len, plans.values()))

    def one_pass(name: str, env: Any, reset: Callable[[str], object]) -> None:
        resetting = stepping = 0.0
        for task in tasks:
            resetting += seconds(lambda t=task: reset(t))
            stepping += seconds(lambda t=task: play(env, plans[t]))
        rates.setdefault(f"{name} reset", []).append(len(tasks) / resetting)
        rates.setdefault(f"{name} step", []).append(steps / stepping)

    with contextlib.redirect_stdout(open(os.devnull, "w")):  # noqa: PTH123 - theirs prints
        for number in range(arguments.passes + 1):
            name = "our cold" if number == 0 else "our"
            one_pass(name, ours, lambda task: ours.reset(options={"task_id": task}))
            one_pass("wrapped", wrapped, lambda task: wrapped.reset(options={"task_id": task}))
            if theirs is not None:
                one_pass("their", theirs, lambda task: theirs.reset(data_idx=int(task[10:])))

        ours.reset(options={"task_id": tasks[-1]})
        for action in plans[tasks[-1]][:10]:
            ours.step(action)
        snapshot = ours.snapshot()
        rates["snapshot"] = [thousand(ours.snapshot)]
        rates["restore"] = [thousand(lambda: ours.restore(snapshot))]
        rates["snapshot as JSON"] = [thousand(lambda: ours.snapshot().to_json())]
        if theirs is not None:
            rates["their deepcopy"] = [1 / seconds(lambda: copy.deepcopy(theirs))]

    def line(name: str, kind: str, peer: str, target: int | None = None) -> None:
        if kind not in rates:
            return
        mine = median(rates[kind])
        text = f"{name:<34}{mine:>12,.0f}/s"
        if peer in rates:
            other = median(rates[peer])
            wanted = "" if target is None else f" (target {target})"
            text += f"{other:>14,.1f}/s{mine / other:>12,.1f} x{wanted}"
        print(text)

    print(f"{len(tasks)} tasks of split {arguments.split}, {steps} steps a pass, ", end="")
    print(f"{arguments.passes} passes, medians; Python {sys.version.split()[0]}")
    print(f"{'':<34}{'ours':>14}" + (f"{'AgentGym':>16}{'ratio':>14}" if theirs else ""))
    line("steps", "our step", "their step", 10)
    line("steps, first time", "our cold step", "their step")
    line("steps through gym.make's wrappers", "wrapped step", "their step")
    line("resets", "our reset", "their reset", 50)
    line("resets, first time", "our cold reset", "their reset")
    line("snapshots (AgentGym: deepcopy)", "snapshot", "their deepcopy")
    line("snapshots as JSON", "snapshot as JSON", "their deepcopy")
    line("restores", "restore", "their deepcopy")


if __name__ == "__main__":
    main()
