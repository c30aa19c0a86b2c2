"""Plays recorded scripts on an environment, here or in a new process.

``python -m agentbench_prefix.testing`` reads a request from standard input and prints what it
saw: that is how the conformance suite compares processes.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import gymnasium as gym

from agentbench_prefix.env import JSON, Snapshot, TextEnv

Target: TypeAlias = str | Callable[[], gym.Env[str, str]]
"""A registered id, an environment class or a function that returns a new environment.

Ids and classes are also made with ``max_turns`` and with what ``arguments()`` returns; a function
is called without arguments.
"""

Row: TypeAlias = dict[str, Any]
"""What one turn showed: ``action``, ``observation``, ``reward``, ``terminated``, ``truncated``,
``info``, ``ended`` and the ``candidates`` offered afterwards."""

ODD_TEXTS: tuple[str, ...] = (
    "",
    " ",
    "xyzzy",
    "inventory\x00",
    "\r\n\t",
    "[[ look ]]",
    "\u202egnirts desrever",
    "\ud800",
    "\ud83d\ude00",
    "\U0001f600",
    "-1",
    "%s {0} {x} \\1",
)


def make_environment(target: Target, **arguments: Any) -> gym.Env[str, str]:
    """Make a new environment from a target; ``arguments`` are for ids and classes."""
    if isinstance(target, str):
        return cast("gym.Env[str, str]", gym.make(target, **arguments))
    return target(**arguments)


def bare(target: Target) -> TextEnv:
    """Make a new unwrapped environment.

    Raises:
        TypeError: The target makes something that is not a ``TextEnv``.
    """
    env = make_environment(target).unwrapped
    if not isinstance(env, TextEnv):
        raise TypeError(f"expected an environment derived from TextEnv, got {type(env).__name__}")
    return env


def endless(target: Target) -> TextEnv:
    """Make a new unwrapped environment without a turn limit."""
    env = bare(target)
    env.max_turns = None
    return env


def label(target: Target) -> str:
    """Return the name under which a target is reported."""
    if isinstance(target, str):
        return target
    return f"{target.__module__}:{target.__qualname__}"


def _encode(value: Any) -> bytes:
    # Not ASCII escapes: JSON readers merge two escaped surrogates into one character.
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _decode(text: bytes) -> Any:
    return json.loads(text.decode("utf-8", "surrogatepass"))


def _to_request(target: Target) -> dict[str, str]:
    if isinstance(target, str):
        return {"id": target}
    if "<" in target.__qualname__:
        raise TypeError(
            f"{label(target)} cannot be imported in a new process: pass a registered id or a "
            "function defined at the top level of a module"
        )
    return {"module": target.__module__, "name": target.__qualname__}


def _from_request(request: dict[str, str]) -> Target:
    if "id" in request:
        return request["id"]
    found: Any = importlib.import_module(request["module"])
    for part in request["name"].split("."):
        found = getattr(found, part)
    return cast("Callable[[], gym.Env[str, str]]", found)


@dataclasses.dataclass(frozen=True)
class Script:
    """How to start an episode and what to send.

    Attributes:
        seed: Seed of ``reset``.
        options: Options of ``reset``.
        snapshot: Start by restoring this text into a never-reset instance instead.
        actions: What to send; ``None`` lets :func:`choose` decide.
        turns: Number of turns when ``actions`` is ``None``.
    """

    seed: int | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    snapshot: str | None = None
    actions: tuple[str, ...] | None = None
    turns: int = 0


def candidates(env: TextEnv) -> list[str] | None:
    """Return the environment's candidate actions, ``None`` if it does not list any."""
    try:
        return list(env.candidate_actions())
    except NotImplementedError:
        return None


def teacher_action(env: TextEnv) -> str | None:
    """Return what the environment's plainest teacher would do now, ``None`` without a teacher."""
    try:
        return env.teacher().next_turn().action
    except NotImplementedError:
        return None


def choose(env: TextEnv, rng: random.Random) -> str:
    """Pick an action: mostly candidates, sometimes the teacher's, sometimes odd text."""
    dice = rng.random()
    if dice < 0.3 and (action := teacher_action(env)) is not None:
        return action
    offered = candidates(env)
    if dice < 0.85 and offered:
        return rng.choice(offered)
    return rng.choice(ODD_TEXTS)


def first_row(env: TextEnv, observation: str, info: dict[str, Any] | None) -> Row:
    """Describe the state after a reset or a restore as a row."""
    return {
        "action": None,
        "observation": observation,
        "info": info,
        "turn": env.turn,
        "ended": env.ended,
        "candidates": None if env.ended else candidates(env),
    }


def step_row(env: TextEnv, action: str | None) -> Row:
    """Step (``None``: spend a turn without an action) and describe what came back as a row."""
    if action is None:
        observation, reward, terminated, truncated, info = env.skip_turn("")
    else:
        observation, reward, terminated, truncated, info = env.step(action)
    return {
        "action": action,
        "observation": observation,
        "reward": reward,
        "terminated": terminated,
        "truncated": truncated,
        "info": info,
        "turn": env.turn,
        "ended": env.ended,
        "candidates": None if env.ended else candidates(env),
    }


def go_on(env: TextEnv, actions: Sequence[str | None]) -> list[Row]:
    """Send actions until they are used up or the episode ends."""
    rows: list[Row] = []
    for action in actions:
        if env.ended:
            break
        rows.append(step_row(env, action))
    return rows


def improvise(env: TextEnv, turns: int, seed: int | str | None) -> list[Row]:
    """Let :func:`choose` play for a number of turns or until the episode ends."""
    rng = random.Random(seed)  # noqa: S311 - must be repeatable
    rows: list[Row] = []
    while len(rows) < turns and not env.ended:
        rows.append(step_row(env, choose(env, rng)))
    return rows


def play(env: TextEnv, script: Script) -> list[Row]:
    """Play a script from its start; the first row is the state it starts in."""
    if script.snapshot is not None:
        rows = [first_row(env, env.restore(Snapshot.from_json(script.snapshot)), None)]
    else:
        observation, info = env.reset(seed=script.seed, options=dict(script.options))
        rows = [first_row(env, observation, info)]
    if script.actions is not None:
        return rows + go_on(env, script.actions)
    return rows + improvise(env, script.turns, script.seed)


def generated_tasks(env: TextEnv, seed: int, n: int) -> tuple[str, ...]:
    """Return ids of generated tasks, none where the environment generates none."""
    try:
        return env.generate_tasks(seed, n)
    except NotImplementedError:
        return ()


def facts(env: TextEnv) -> dict[str, JSON]:
    """Return what an environment says about itself, which no process may see otherwise."""
    return {
        "env_id": env.env_id,
        "data_hash": env.data_hash,
        "arguments": env.arguments(),
        "tasks": {split: list(env.tasks(split)) for split in env.splits()},
        "families": {
            split: [env.family(task) for task in env.tasks(split)] for split in env.splits()
        },
        "generated": list(generated_tasks(env, 3, 3)),
        "dialogues": [[d.label, d.system, d.max_tokens] for d in env.dialogues().values()],
    }


def record(target: Target, scripts: Sequence[Script]) -> dict[str, Any]:
    """Play every script on a new instance; also return the :func:`facts`."""
    return {
        "facts": facts(bare(target)),
        "episodes": [play(endless(target), script) for script in scripts],
    }


def record_in_new_process(
    target: Target, scripts: Sequence[Script], hash_seed: str
) -> dict[str, Any]:
    """Do what :func:`record` does in a new process with another ``PYTHONHASHSEED``.

    Raises:
        TypeError: The target cannot be imported in another process.
        RuntimeError: The process failed; its error output is in the message.
    """
    request = {
        "path": sys.path,
        "target": _to_request(target),
        "scripts": [dataclasses.asdict(script) for script in scripts],
    }
    done = subprocess.run(
        [sys.executable, "-m", "agentbench_prefix.testing"],
        input=_encode(request),
        capture_output=True,
        check=False,
        timeout=240,
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    if done.returncode != 0:
        errors = done.stderr.decode(errors="replace")
        raise RuntimeError(f"playing in a new process failed:\n{errors[-3000:]}")
    return cast("dict[str, Any]", _decode(done.stdout.splitlines()[-1]))


def main() -> None:
    """Answer one request from standard input."""
    request = _decode(sys.stdin.buffer.read())
    sys.path[:] = request["path"]
    scripts = [
        Script(**{**s, "actions": None if s["actions"] is None else tuple(s["actions"])})
        for s in request["scripts"]
    ]
    answer = record(_from_request(request["target"]), scripts)
    sys.stdout.flush()
    sys.stdout.buffer.write(b"\n" + _encode(answer) + b"\n")
