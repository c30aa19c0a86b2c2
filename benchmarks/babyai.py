"""BabyAI's speed, beside AgentGym's environment and beside minigrid's own steps.

AgentGym's code wants older versions of minigrid and Gymnasium, so it is run by the interpreter of
its own virtual environment, in turns with ours; each counts the CPU time of its own steps::

    git clone --depth 1 https://github.com/WooooDyy/AgentGym /tmp/AgentGym
    python -m venv /tmp/agentgym
    /tmp/agentgym/bin/pip install "gymnasium<1.0.0" "minigrid<2.5.0" gym matplotlib "numpy<2"
    python benchmarks/babyai.py --agentgym /tmp/AgentGym/agentenv-babyai \
        --python /tmp/agentgym/bin/python

All play the same levels, seeds and actions: those that mean the same low-level actions under our
rules and under AgentGym's, chosen at random. Both sides must run into the same texts. The level
GoToObjS6 is left out, since it is another room in older versions.

Without ``--agentgym`` only our side is measured, and minigrid. Targets: at least 5 times AgentGym's
steps/s, and no more than 30 % over the time that minigrid takes for the same low-level actions.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import random
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

LEFT_OUT = 4


def load_agentgym(folder: Path) -> Any:
    """The class of AgentGym's server object; for the worker, in AgentGym's environment.

    Args:
        folder: Its ``agentenv-babyai`` folder.
    """
    sources = folder / "agentenv_babyai"
    # Its own __init__ starts a web server; a bare package gives access to the module behind it.
    package = types.ModuleType("agentenv_babyai")
    package.__path__ = [str(sources)]
    sys.modules["agentenv_babyai"] = package
    importlib.import_module("minigrid")
    return importlib.import_module("agentenv_babyai.environment").BabyAIEnv


def seconds(call: Callable[[], object]) -> float:
    """CPU seconds of a call: other processes on the machine do not count."""
    start = time.process_time()
    call()
    return time.process_time() - start


def work(folder: Path) -> None:
    """Answer each line of scripts on standard input with AgentGym's times and texts."""
    answers = os.fdopen(os.dup(1), "w")
    sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - theirs prints
    server = load_agentgym(folder)()
    number = server.create()["id"]
    for line in sys.stdin:
        resetting = stepping = 0.0
        digest = hashlib.sha256()
        for index, actions in json.loads(line):
            seen: list[Any] = []
            resetting += seconds(lambda i=index, s=seen: s.append(server.reset(number, i)))
            stepping += seconds(
                lambda a=actions, s=seen: s.extend(server.step(number, action) for action in a)
            )
            for answer in seen:
                digest.update(answer["observation"].encode())
            server.info[number]["done"] = False
        found = {"reset": resetting, "step": stepping, "texts": digest.hexdigest()}
        answers.write(json.dumps(found) + "\n")
        answers.flush()


@contextmanager
def worker(python: Path, folder: Path) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Start the worker; give what plays scripts in it."""
    command = [str(python), __file__, "--agentgym", str(folder), "--work"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdin is not None
        assert run.stdout is not None

        def play(scripts: str) -> dict[str, Any]:
            run.stdin.write(scripts + "\n")
            run.stdin.flush()
            line = run.stdout.readline()
            if not line:
                sys.exit("AgentGym's side failed; what it printed is above")
            found: dict[str, Any] = json.loads(line)
            return found

        yield play
        run.stdin.close()


Script = tuple[int, list[str]]


def make_scripts(seeds: int, turns: int) -> tuple[list[Script], list[list[int]]]:
    """Choose actions that mean the same to both; also the low-level actions of each script."""
    from agentbench_envs.babyai.env import BabyAIEnv
    from agentbench_envs.babyai.levels import LEVELS, task_id

    ours, theirs = BabyAIEnv(max_turns=None), BabyAIEnv(compat="agentgym")
    scripts, traces = [], []
    for seed in range(seeds):
        for level in range(1, len(LEVELS) + 1):
            if level == LEFT_OUT:
                continue
            task = task_id(level, seed)
            for env in (ours, theirs):
                env.reset(options={"task_id": task})
            chance = random.Random(task)
            actions: list[str] = []
            trace: list[int] = []
            while len(actions) < turns:
                # Not what stops a macro action before its end on their side, or ends the game.
                before = ours.snapshot(), theirs.snapshot()
                both = [a for a in ours.candidate_actions() if a in theirs.candidate_actions()]
                action = chance.choice(both)
                mine, yours = ours.step(action), theirs.step(action)
                taken = mine[4]["low_level"]
                same = taken == yours[4]["low_level"] and not mine[2] and not yours[2]
                if not same:
                    ours.restore(before[0])
                    theirs.restore(before[1])
                    action = "turn left"
                    mine, yours = ours.step(action), theirs.step(action)
                    if mine[2] or yours[2]:
                        break
                    taken = mine[4]["low_level"]
                actions.append(action)
                trace += taken
            scripts.append((int(task.removeprefix("babyai_")), actions))
            traces.append(trace)
    return scripts, traces


def play_ours(env: Any, scripts: list[Script]) -> dict[str, Any]:
    resetting = stepping = 0.0
    digest = hashlib.sha256()
    for index, actions in scripts:
        seen: list[Any] = []
        options = {"task_id": f"babyai_{index}"}
        resetting += seconds(lambda o=options, s=seen: s.append(env.reset(options=o)[0]))
        stepping += seconds(lambda a=actions, s=seen: s.extend(env.step(x)[0] for x in a))
        for text in seen:
            digest.update(text.encode())
    return {"reset": resetting, "step": stepping, "texts": digest.hexdigest()}


def play_raw(scripts: list[Script], traces: list[list[int]], *, observe: bool) -> float:
    """CPU seconds of minigrid's steps alone, with or without its own observations."""
    from agentbench_envs.babyai.board import new_game
    from agentbench_envs.babyai.levels import level_and_seed

    total = 0.0
    for (index, _), trace in zip(scripts, traces, strict=True):
        game = new_game(*level_and_seed(f"babyai_{index}"))
        if not observe:
            game.gen_obs = lambda: None

        def steps(game: Any = game, trace: list[int] = trace) -> None:
            for action in trace:
                game.step(action)

        total += seconds(steps)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agentgym", type=Path, help="its agentenv-babyai folder")
    parser.add_argument("--python", type=Path, help="interpreter of its virtual environment")
    parser.add_argument("--seeds", type=int, default=2, help="seeds of each level (default 2)")
    parser.add_argument("--turns", type=int, default=20, help="actions of a script (default 20)")
    parser.add_argument("--passes", type=int, default=3, help="passes (default 3)")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder, python = arguments.agentgym, arguments.python
    if folder is not None and not (folder / "agentenv_babyai/environment.py").is_file():
        sys.exit(f"{folder} holds no agentenv_babyai: give AgentGym's agentenv-babyai folder")
    if arguments.work:
        work(folder)
        return
    if (folder is None) != (python is None):
        sys.exit("--agentgym and --python belong together: give both or neither")

    from agentbench_envs.babyai.env import BabyAIEnv

    scripts, traces = make_scripts(arguments.seeds, arguments.turns)
    steps, low_level = sum(len(actions) for _, actions in scripts), sum(map(len, traces))
    text = json.dumps(scripts)
    times: dict[str, list[float]] = {}
    texts: dict[str, set[str]] = {}

    def note(name: str, found: dict[str, Any]) -> None:
        texts.setdefault(name, set()).add(found["texts"])
        for kind in ("reset", "step"):
            times.setdefault(f"{name} {kind}", []).append(found[kind])

    def one_pass(theirs: Callable[[str], dict[str, Any]] | None) -> None:
        note("ours", play_ours(BabyAIEnv(max_turns=None), scripts))
        note("compat", play_ours(BabyAIEnv(compat="agentgym"), scripts))
        times.setdefault("raw", []).append(play_raw(scripts, traces, observe=True))
        times.setdefault("blind", []).append(play_raw(scripts, traces, observe=False))
        if theirs is not None:
            note("theirs", theirs(text))

    if folder is None:
        for _ in range(arguments.passes):
            one_pass(None)
    else:
        with worker(python, folder) as theirs:
            for _ in range(arguments.passes):
                one_pass(theirs)
        if texts["theirs"] != texts["compat"]:
            sys.exit("AgentGym and compat='agentgym' ran into different texts: nothing to compare")

    def rate(name: str, n: int) -> float:
        return n / median(times[name])

    def line(label: str, mine: str, n: int, target: int | None = None) -> None:
        row = f"{label:<34}{rate(mine, n):>12,.0f}/s"
        if "theirs step" in times:
            other = rate("theirs " + mine.split()[1], n)
            wanted = "" if target is None else f" (target {target})"
            row += f"{other:>14,.1f}/s{rate(mine, n) / other:>12,.1f} x{wanted}"
        print(row)

    print(f"{len(scripts)} games, {steps} actions, {low_level} low-level actions a pass, ", end="")
    print(f"{arguments.passes} passes, medians; Python {sys.version.split()[0]}")
    print(f"{'':<34}{'ours':>14}" + (f"{'AgentGym':>16}{'ratio':>14}" if folder else ""))
    line("steps", "ours step", steps, 5)
    line("steps, compat='agentgym'", "compat step", steps)
    line("resets to a new task", "ours reset", len(scripts))
    for name, label in (("raw", "as they are"), ("blind", "without observations")):
        over = 100 * (median(times["ours step"]) / median(times[name]) - 1)
        wanted = " (target 30 % or less)" if name == "raw" else ""
        row = f"minigrid's steps, {label}"
        print(f"{row:<40}{rate(name, low_level):>10,.0f}/s; text adds {over:.0f} %{wanted}")


if __name__ == "__main__":
    main()
