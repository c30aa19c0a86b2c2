"""The promises of :class:`~agentbench_prefix.env.TextEnv`, one check each.

A check is silent or raises :class:`ConformanceError` with what the environment's author forgot.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import json
import math
import random
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, cast

import gymnasium as gym
import numpy as np
from gymnasium.utils.env_checker import check_env

from agentbench_prefix.dialogue import Dialogue
from agentbench_prefix.env import JSON, PlayedTurn, Snapshot, TeacherTurn, TextEnv
from agentbench_prefix.errors import (
    AgentBenchError,
    EnvironmentUsageError,
    MissingExtraError,
    PrefixError,
    SnapshotError,
    UnknownNameError,
)
from agentbench_prefix.testing import play
from agentbench_prefix.testing.play import Row, Script, Target, bare, endless, label

Check: TypeAlias = Callable[[Target], None]


class ConformanceError(AgentBenchError, AssertionError):
    """An environment breaks a promise; the message says which one and what was forgotten."""


_checks: list[Check] = []

_SEED = 20_260
_TURNS = 12
_NUMBER = re.compile(r"[0-9]+")
_HUGE_NUMBERS = ("9" * 4300, "1" + "0" * 4999, "0" * 5000, "00", "-7", "1e9", "\u0663", "\u00b2")
_ODD_REPLIES = (
    "",
    "   ",
    "no brackets at all",
    "[[ ]]",
    "[[ one ]] and [[ two ]]",
    "[[ outer [[ inner ]] ]]",
    "[[[ one too many ]]]",
    "[[ left open",
    "]] the wrong way round [[",
    "<think> never closed",
    "<think>[[ a thought ]]</think>",
    "closed only</think> [[ act ]]",
    "[[ act ]] and then some prose",
    "two\nlines",
)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConformanceError(message)


def _check(function: Check) -> Check:
    """Add a check to the suite; its docstring's first line is the promise it holds one to."""
    promise = (function.__doc__ or "").splitlines()[0]

    @functools.wraps(function)
    def run(target: Target) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                function(target)
        except MissingExtraError:
            raise
        except ConformanceError as error:
            raise ConformanceError(f"{label(target)} breaks {promise!r}: {error}") from error
        except Exception as error:
            raise ConformanceError(
                f"{label(target)} breaks {promise!r}: it raised {type(error).__name__}: {error}"
            ) from error

    _checks.append(run)
    return run


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:200]}... ({len(text)} characters)"


def _canonical(value: object, what: str) -> str:
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConformanceError(
            f"{what} cannot be written as JSON ({error}): use only None, bool, int, float, str, "
            f"list and dict; it is {_short(value)}"
        ) from error


def _same_rows(expected: Sequence[Row], got: Sequence[Row], when: str, remedy: str) -> None:
    """Require two recordings to be equal; name the first turn and key where they part."""
    for turn, (mine, theirs) in enumerate(zip(expected, got, strict=False)):
        for key in mine:
            one = _canonical(mine[key], f"{key} at turn {turn}")
            other = _canonical(theirs.get(key), f"{key} at turn {turn}")
            _require(
                one == other,
                f"{when}, {key} at turn {turn} (action {_short(mine['action'])}) is "
                f"{_short(theirs.get(key))} instead of {_short(mine[key])}. {remedy}",
            )
    _require(
        len(expected) == len(got),
        f"{when}, the episode has {len(got)} turns instead of {len(expected)}. {remedy}",
    )


def _spread(items: Sequence[str], n: int) -> list[str]:
    """Take up to ``n`` items evenly spaced over a sequence, its ends included."""
    if len(items) <= n:
        return list(items)
    return [items[round(i * (len(items) - 1) / (n - 1))] for i in range(n)]


def _some_tasks(env: TextEnv, n: int = 4) -> list[str]:
    """Take tasks of every split, and generated ones where there are any."""
    chosen = [task for split in env.splits() for task in _spread(env.tasks(split), n)]
    chosen += play.generated_tasks(env, 5, 2)
    return list(dict.fromkeys(chosen))


def _few_tasks(env: TextEnv, n: int = 4) -> list[str]:
    """Take few tasks, spread over those of :func:`_some_tasks`."""
    return _spread(_some_tasks(env), n)


def _actions(rows: Iterable[Row]) -> tuple[str, ...]:
    return tuple(row["action"] for row in rows if row["action"] is not None)


def _start(env: TextEnv, task: str, seed: int | None = _SEED) -> str:
    return env.reset(seed=seed, options={"task_id": task})[0]


def _unfinished_script(target: Target, task: str, turns: int) -> tuple[str, ...]:
    """Record actions on a task that leave the episode running."""
    env = endless(target)
    _start(env, task)
    rows = play.improvise(env, turns, task)
    return _actions(rows[:-1] if env.ended else rows)


# ------------------------------------------------------------------------------ what it is
@_check
def check_gymnasium(target: Target) -> None:
    """Gymnasium's own checker passes without a warning."""
    env = bare(target)
    # Without a spec there is nothing to make the other render modes from.
    check_env(env, skip_render_check=env.spec is None)


@_check
def check_registration(target: Target) -> None:
    """The id, the limit and the arguments are those the environment was registered with."""
    made = play.make_environment(target)
    env = bare(target)
    _require(
        bool(re.fullmatch(r"([\w.-]+/)?[\w.-]+-v\d+", env.env_id)),
        f"env_id must look like 'Name-v0', got {env.env_id!r}",
    )
    _require(
        env.max_turns == env.default_max_turns,
        f"it is made with max_turns={env.max_turns}, default_max_turns is "
        f"{env.default_max_turns}: give the constructor that default",
    )
    for name in ("env_id", "data_hash"):
        value = getattr(env, name)
        _require(isinstance(value, str) and value != "", f"{name} must be text, got {value!r}")
    _require(
        len(env.data_hash) >= 16 and env.data_hash == bare(target).data_hash,
        f"data_hash must be a hash of the data, the same for every instance: {env.data_hash!r}",
    )
    _canonical(env.arguments(), "arguments()")
    for name in env.rule_arguments:
        _require(hasattr(env, name), f"rule_arguments names {name!r}, which is no attribute")
    _require(
        "max_turns" not in env.rule_arguments,
        "max_turns is no rule: leave it out of rule_arguments, or a snapshot could not be "
        "restored under another limit",
    )
    wrapped = made
    while isinstance(wrapped, gym.Wrapper):
        _require(
            not isinstance(wrapped, gym.wrappers.TimeLimit),
            "it is registered with max_episode_steps: register it without, the limit is max_turns",
        )
        wrapped = wrapped.env
    if isinstance(target, str):
        _require(
            target.rpartition(":")[2] == env.env_id,
            f"it is registered as {target!r} but calls itself {env.env_id!r}",
        )
    if isinstance(target, str | type):
        make_with = functools.partial(play.make_environment, target)
        free = cast("TextEnv", make_with(max_turns=None).unwrapped)
        _require(
            free.max_turns is None,
            f"made with max_turns=None, it has a limit of {free.max_turns}: None is no limit, pass "
            "it on to TextEnv.__init__",
        )
        for other in (env, free):
            arguments = other.arguments()
            again = cast("TextEnv", make_with(**arguments).unwrapped).arguments()
            _require(again == arguments, f"made with {arguments}, its arguments() are {again}")
    if isinstance(target, str):
        short = play.make_environment(target, max_turns=3).unwrapped
        _require(
            cast("TextEnv", short).max_turns == 3,
            "max_turns=3 given to gym.make is ignored: pass it on to TextEnv.__init__",
        )
        bad: list[tuple[dict[str, Any], str]] = [
            ({"max_turns": 0}, "max_turns"),
            ({"split": "no such split"}, env.splits()[0]),
        ]
        for arguments, valid in bad:
            make = functools.partial(play.make_environment, target, **arguments)
            refusal = _refuses(make, ValueError, f"making it with {arguments}")
            _require(valid in str(refusal), f"refusing {arguments} must name {valid!r}")


@_check
def check_play(target: Target) -> None:
    """A teacher or candidate actions give the suite something sensible to play."""
    env = bare(target)
    for task in _few_tasks(env):
        _start(env, task)
        _require(
            bool(play.candidates(env)) or play.teacher_action(env) is not None,
            f"at the start of {task!r} there is neither a teacher nor a candidate action, so that "
            "the other checks would play little but nonsense and pass whatever is wrong: "
            "implement candidate_actions() or teacher()",
        )


@_check
def check_render(target: Target) -> None:
    """Rendering in the mode "ansi" shows the newest observation."""
    env = bare(target)
    env.render_mode = "ansi"
    task = _few_tasks(env)[0]
    seen = _start(env, task)
    for action in (*_unfinished_script(target, task, 3), None):
        _require(env.render() == seen, f"render() gives {_short(env.render())}, not {_short(seen)}")
        if action is not None:
            seen = env.step(action)[0]


@_check
def check_splits(target: Target) -> None:
    """Splits have tasks, ids are unique, and no task is in two splits unless declared."""
    env = bare(target)
    splits = env.splits()
    _require(bool(splits) and len(set(splits)) == len(splits), f"splits() is {splits!r}")
    tasks = {split: env.tasks(split) for split in splits}
    for split, ids in tasks.items():
        _require(bool(ids), f"split {split!r} has no task")
        _require(
            isinstance(ids, tuple) and all(isinstance(task, str) and task for task in ids),
            f"tasks({split!r}) must be a tuple of non-empty strings",
        )
        repeated = {task for task in ids if ids.count(task) > 1} if len(set(ids)) < len(ids) else ()
        _require(not repeated, f"split {split!r} lists {_short(sorted(repeated)[:3])} twice")
        _require(env.tasks(split) == ids, f"tasks({split!r}) changes from call to call")
    for name in env.union_splits:
        _require(name in splits, f"union_splits names {name!r}, which is no split")
    plain = [split for split in splits if split not in env.union_splits]
    for i, one in enumerate(plain):
        for other in plain[:i]:
            shared = sorted(set(tasks[one]) & set(tasks[other]))
            _require(
                not shared,
                f"splits {other!r} and {one!r} share {len(shared)} tasks, e.g. {shared[:3]}: "
                f"separate them, or list the wider one in union_splits if that is meant",
            )
    try:
        env.tasks("no such split")
    except UnknownNameError as error:
        _names_a_choice(error, "split", splits)
    else:
        raise ConformanceError("tasks() of an unknown split must raise UnknownNameError")


@_check
def check_families(target: Target) -> None:
    """Every task has a family, and the family of an unknown task is an error."""
    env = bare(target)
    for task in dict.fromkeys(task for split in env.splits() for task in env.tasks(split)):
        family = env.family(task)
        _require(
            isinstance(family, str) and family != "", f"family({task!r}) is {family!r}, not a name"
        )
    try:
        got = env.family("no such task")
    except UnknownNameError:
        return
    raise ConformanceError(f"family() of an unknown task returned {got!r}: raise UnknownNameError")


# ------------------------------------------------------------------------------ determinism
@_check
def check_reset_repeats(target: Target) -> None:
    """Resetting to a task gives the same bytes whatever the seed and whatever came before."""
    env = endless(target)
    remedy = "A first prompt may depend on the task id and on options asked for by name only."
    for task in _some_tasks(env):
        first = play.first_row(env, *env.reset(seed=0, options={"task_id": task}))
        _require(
            first["info"]["task_id"] == task == env.task_id,
            f"task {task!r} was asked for, {first['info']['task_id']!r} is played",
        )
        for seed in (0, 1, None):
            play.improvise(env, 3, task)
            again = play.first_row(env, *env.reset(seed=seed, options={"task_id": task}))
            _same_rows([first], [again], f"resetting to {task!r} with seed={seed}", remedy)
        fresh = endless(target)
        again = play.first_row(fresh, *fresh.reset(seed=5, options={"task_id": task}))
        _same_rows([first], [again], f"resetting a new instance to {task!r}", remedy)


@_check
def check_seed(target: Target) -> None:
    """A seed decides which task is drawn and what happens in it."""
    env = endless(target)
    for split in env.splits():
        drawn = []
        for seed in range(40):
            env.reset(seed=seed, options={"split": split})
            drawn.append(env.task_id)
            env.reset(seed=seed, options={"split": split})
            _require(
                env.task_id == drawn[-1],
                f"seed {seed} draws {drawn[-1]!r}, then {env.task_id!r}: draw with self.np_random",
            )
        outside = sorted(set(drawn) - set(env.tasks(split)))
        _require(not outside, f"split {split!r} was asked for, {_short(outside)} were drawn")
        _require(
            len(env.tasks(split)) == 1 or len(set(drawn)) > 1,
            f"40 seeds all draw {drawn[0]!r} from {len(env.tasks(split))} tasks of {split!r}: "
            "the seed is ignored, leave the draw to TextEnv.reset",
        )
        tasks = {env.reset(options={"split": split})[1]["task_id"] for _ in range(40)}
        _require(
            len(env.tasks(split)) == 1 or len(tasks) > 1,
            "resetting 40 times without a seed plays one task over and over",
        )
    for task in _few_tasks(env):
        script = Script(seed=_SEED, options={"task_id": task}, turns=_TURNS)
        rows = play.play(env, script)
        again = dataclasses.replace(script, actions=_actions(rows))
        _same_rows(
            rows,
            play.play(env, again),
            f"playing {task!r} again with the same seed and actions",
            "Keep nothing over a reset, and draw chance from self.np_random only.",
        )


@_check
def check_new_process(target: Target) -> None:
    """A new process with another PYTHONHASHSEED shows the same bytes."""
    env = bare(target)
    scripts = [
        Script(seed=seed, options={"task_id": task}, turns=_TURNS)
        for seed, task in enumerate(_some_tasks(env, 3))
    ]
    scripts += [Script(seed=7, options={"split": split}, turns=2) for split in env.splits()]
    here = play.record(target, scripts)
    remedy = (
        "Something follows the order of a set, of a directory listing, of hash() or id(), or the "
        "clock: sort it, or draw it from a generator seeded with the task id."
    )
    for hash_seed in ("0", "1", "random"):
        there = play.record_in_new_process(target, scripts, hash_seed)
        when = f"in a new process with PYTHONHASHSEED={hash_seed}"
        for name, value in here["facts"].items():
            one, other = _canonical(value, name), _canonical(there["facts"][name], name)
            _require(
                one == other,
                f"{when}, {name} is {_short(there['facts'][name])} instead of {_short(value)}. "
                f"{remedy}",
            )
        for script, mine, theirs in zip(scripts, here["episodes"], there["episodes"], strict=True):
            _same_rows(mine, theirs, f"{when}, with options {script.options}", remedy)


@_check
def check_isolation(target: Target) -> None:
    """Two instances played in turns behave as if each were alone."""
    tasks = _few_tasks(bare(target))
    alone: list[tuple[Script, list[Row]]] = []
    for seed, task in enumerate(tasks):
        script = Script(seed=seed, options={"task_id": task}, turns=_TURNS)
        rows = play.play(endless(target), script)
        alone.append((dataclasses.replace(script, actions=_actions(rows)), rows))
    remedy = "State is shared: keep it on the instance, not on the class, the module or a default."
    pairs = [(i, (i + 1) % len(alone)) for i in range(len(alone))] + [(0, 0)]
    for pair in pairs:
        envs = [endless(target) for _ in pair]
        recordings: list[list[Row]] = []
        for env, i in zip(envs, pair, strict=True):
            observation, info = env.reset(seed=alone[i][0].seed, options=alone[i][0].options)
            recordings.append([play.first_row(env, observation, info)])
        longest = max(len(alone[i][0].actions or ()) for i in pair)
        for turn in range(longest):
            for env, i, seen in zip(envs, pair, recordings, strict=True):
                actions = alone[i][0].actions or ()
                if turn < len(actions):
                    seen.append(play.step_row(env, actions[turn]))
        for i, seen in zip(pair, recordings, strict=True):
            when = f"played in turns with another instance, task {tasks[i]!r}"
            _same_rows(alone[i][1], seen, when, remedy)


@_check
def check_side_effects(target: Target) -> None:
    """Playing prints nothing and leaves the global random generators alone."""
    env = bare(target)
    tasks = _few_tasks(env)
    python_state = random.getstate()
    numpy_state = repr(np.random.get_state())  # noqa: NPY002 - the legacy global state is the point
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        for task in tasks:
            script = Script(seed=_SEED, options={"task_id": task}, turns=_TURNS)
            play.play(endless(target), script)
    _require(not printed.getvalue(), f"it prints {_short(printed.getvalue())}: use logging")
    _require(
        python_state == random.getstate() and numpy_state == repr(np.random.get_state()),  # noqa: NPY002
        "it draws from or seeds the global random generator: use self.np_random, or a generator "
        "seeded with the task id",
    )


@_check
def check_vector(target: Target) -> None:
    """SyncVectorEnv and AsyncVectorEnv(shared_memory=False) return the text of a single one."""
    task = _few_tasks(bare(target))[0]
    scripts = [_unfinished_script(target, task, 5), _unfinished_script(target, task, 4)[::-1]]
    width = min(len(script) for script in scripts)
    singles: list[list[Row]] = []
    for seed, script in enumerate(scripts):
        env = endless(target)
        first = play.first_row(env, *env.reset(seed=seed, options={"task_id": task}))
        singles.append([first, *play.go_on(env, script[:width])])
    length = min(len(rows) for rows in singles)
    makers = [functools.partial(endless, target)] * 2
    quiet = gym.vector.AutoresetMode.DISABLED
    for name in ("SyncVectorEnv", "AsyncVectorEnv"):
        vector: gym.vector.VectorEnv[Any, Any, Any]
        if name == "SyncVectorEnv":
            vector = gym.vector.SyncVectorEnv(makers, autoreset_mode=quiet)
        else:
            vector = gym.vector.AsyncVectorEnv(
                makers, shared_memory=False, context="spawn", autoreset_mode=quiet
            )
        try:
            seen = [vector.reset(seed=[0, 1], options={"task_id": task})[0]]
            for turn in range(1, length):
                answer = vector.step([rows[turn]["action"] for rows in singles])
                seen.append(answer[0])
                for index, rows in enumerate(singles):
                    _require(
                        (float(answer[1][index]), bool(answer[2][index]))
                        == (rows[turn]["reward"], rows[turn]["terminated"]),
                        f"{name} gives another reward or end at turn {turn} of {task!r}",
                    )
        finally:
            vector.close()
        for turn, texts in enumerate(seen):
            for index, rows in enumerate(singles):
                _require(
                    texts[index] == rows[turn]["observation"],
                    f"{name} returns {_short(texts[index])} at turn {turn} of {task!r}, a single "
                    f"environment {_short(rows[turn]['observation'])}",
                )


# ------------------------------------------------------------------------------ states
def _disturbances(target: Target, task: str) -> Iterator[tuple[str, TextEnv]]:
    """Instances in every condition into which a snapshot must be restorable."""
    yield "into a never-reset instance", endless(target)
    env = endless(target)
    others = [other for other in _some_tasks(env) if other != task] or [task]
    _start(env, others[-1], seed=99)
    play.improvise(env, 5, 1)
    yield f"into an instance playing {others[-1]!r}", env
    env = endless(target)
    _start(env, task, seed=98)
    play.improvise(env, 200, 2)
    yield "into an instance that played the same task on", env


@_check
def check_snapshot(target: Target) -> None:
    """Snapshot, then anything, then restore gives the same future, wherever it is restored."""
    remedy = "_get_state and _set_state must cover everything that a later turn depends on."
    scripts: list[Script] = []
    futures: list[list[Row]] = []
    probe = bare(target)
    for task in _few_tasks(probe, 3):
        for cut, seed in ((0, _SEED), (0, None), (1, _SEED), (4, None), (9, _SEED)):
            env = endless(target)
            _start(env, task, seed)
            play.improvise(env, cut, cut)
            seen, turn, ended = env.last_observation, env.turn, env.ended
            snapshot = env.snapshot()
            text = snapshot.to_json()
            _canonical(dataclasses.asdict(snapshot), "the snapshot")
            _require(
                Snapshot.from_json(text) == snapshot,
                "the snapshot changes on its way through JSON: _get_state must hold no tuples and "
                f"no keys but strings; it is {_short(snapshot.state)}",
            )
            future = play.improvise(env, _TURNS, cut + 1)
            _require(
                snapshot.to_json() == text,
                "playing on changed a snapshot taken earlier: _get_state must return copies of "
                "lists and dicts",
            )
            where = f"after turn {turn} of {task!r} (reset with seed={seed})"
            for name, other in [*_disturbances(target, task), ("into the same instance", env)]:
                for form, value in (("", snapshot), (" as JSON", Snapshot.from_json(text))):
                    when = f"restored{form} {name} {where}"
                    shown = other.restore(value)
                    _require(
                        (shown, other.last_observation, other.turn, other.ended, other.task_id)
                        == (seen, seen, turn, ended, task),
                        f"{when}, observation, turn, end or task are not those of the snapshot",
                    )
                    _require(
                        other.snapshot().to_json() == text,
                        f"{when}, a new snapshot differs from the one restored. {remedy}",
                    )
                    _same_rows(future, play.go_on(other, _actions(future)), when, remedy)
                    _require(
                        snapshot.to_json() == text,
                        f"{when}, playing on changed the snapshot: _set_state must copy",
                    )
            scripts.append(Script(snapshot=text, actions=_actions(future)))
            futures.append(future)
    there = play.record_in_new_process(target, scripts, "random")
    for script, future, rows in zip(scripts, futures, there["episodes"], strict=True):
        when = f"restored in a new process from {_short(script.snapshot)}"
        _same_rows(future, rows[1:], when, remedy)


@_check
def check_snapshot_of_the_end(target: Target) -> None:
    """A finished episode restores as finished."""
    env = bare(target)
    task = _few_tasks(env)[0]
    env.max_turns = 1
    _start(env, task)
    env.skip_turn("out of time")
    snapshot = env.snapshot()
    other = bare(target)
    other.restore(snapshot)
    _require(other.ended and other.turn == 1, "restored after the end, it is not over")
    if not other.accepts_steps_after_end:
        _refuses(lambda: other.step("anything"), EnvironmentUsageError, "a step after the end")


@_check
def check_foreign_snapshot(target: Target) -> None:
    """A snapshot of another environment, or of no possible state, is refused, changing nothing."""
    env = endless(target)
    task = _few_tasks(env)[0]
    _start(env, task)
    play.improvise(env, 3, 0)
    good = env.snapshot()
    state = cast("dict[str, Any]", good.state)
    for change in (
        {"env_id": "Other-v0"},
        {"data_hash": "0" * 64},
        {"arguments": {**good.arguments, "no such rule": 1}},
        {"task_id": "no such task"},
        {"task_id": 3},
        {"options": {"no such option": 1}},
        {"options": None},
        {"turn": "3"},
        {"ended": None},
        {"rng": None},
        {"state": None},
        {"state": {**state, "observation": 3}},
    ):
        foreign = dataclasses.replace(good, **cast("dict[str, Any]", change))
        _refuses(
            functools.partial(env.restore, foreign), SnapshotError, f"a snapshot with {change}"
        )
        _require(env.snapshot() == good, f"refusing a snapshot with {change} changed the episode")
    odd_states: tuple[JSON, ...] = (None, 3, "state", [], {}, [[]], {"": None})
    for odd in odd_states:
        # Whether one of these is a state only the environment knows.
        foreign = dataclasses.replace(good, state={**state, "env": odd})
        try:
            env.restore(foreign)
        except SnapshotError:
            _require(env.snapshot() == good, f"refusing the state {odd!r} changed the episode")
        env.restore(good)


# ------------------------------------------------------------------------------ prefixes, limits
@_check
def check_prefix(target: Target) -> None:
    """Resetting with prefix_actions equals stepping through them."""
    probe = bare(target)
    for task in _few_tasks(probe):
        actions = list[str | None](_unfinished_script(target, task, 8))
        actions.insert(1, None)
        stepped = endless(target)
        observation, info = stepped.reset(seed=_SEED, options={"task_id": task})
        rows = [play.first_row(stepped, observation, info), *play.go_on(stepped, actions)]
        for cut in sorted({1, len(rows) // 2, len(rows) - 1} - {0}):
            for fresh in (False, True):
                when = f"reset with {cut} prefix actions in {task!r} (fresh_budget={fresh})"
                env = endless(target)
                options = {"task_id": task, "prefix_actions": actions[:cut], "fresh_budget": fresh}
                observation, info = env.reset(seed=_SEED, options=options)
                before = info.pop("prefix_observations", None)
                _require(
                    before == [row["observation"] for row in rows[:cut]],
                    f"{when}, info['prefix_observations'] is {_short(before)}",
                )
                expected = copy.deepcopy(rows[cut:])
                if fresh:
                    for row in expected:
                        row["turn"] -= cut
                        row["info"]["turn"] -= cut
                now = {**play.first_row(env, observation, info), "action": rows[cut]["action"]}
                shared = {key: expected[0][key] for key in now}
                remedy = "Replay goes through step(): do not override reset, implement _begin."
                _same_rows([shared], [now], when, remedy)
                rest = play.go_on(env, actions[cut:])
                _same_rows(expected[1:], rest, f"{when}, then", remedy)


def _with_prefix(env: TextEnv, task: str, prefix: object) -> object:
    return env.reset(options={"task_id": task, "prefix_actions": prefix})


@_check
def check_prefix_refused(target: Target) -> None:
    """A prefix that ends the episode, or is no list of texts, is refused, changing nothing."""
    env = bare(target)
    task = _few_tasks(env)[0]
    cases: list[tuple[int | None, object, str]] = [
        (None, bad, f"the prefix {bad!r}") for bad in ("look", ["look", 3], {"look": 1}, 0, b"")
    ]
    if not env.accepts_steps_after_end:
        cases += [
            (2, [None] * turns, f"a prefix of {turns} turns with max_turns=2") for turns in (2, 3)
        ]
        winning = _teacher_actions(endless(target), task)
        if winning is not None:
            cases.append((None, winning, "a prefix that solves the task"))
    script = _unfinished_script(target, task, 3)
    for limit, prefix, what in cases:
        env.max_turns = None
        _start(env, task)
        play.go_on(env, script)
        env.max_turns = limit
        before = env.snapshot()
        _refuses(functools.partial(_with_prefix, env, task, prefix), PrefixError, what)
        _require(env.snapshot() == before, f"refusing {what} changed the running episode")
    _require(_start(env, task) == env.last_observation, "after a refused prefix, reset fails")


@_check
def check_turn_limit(target: Target) -> None:
    """The episode is truncated exactly at max_turns; prefix turns count unless asked otherwise."""
    env = bare(target)
    for task in _few_tasks(env):
        actions = _unfinished_script(target, task, 4)
        for limit in range(1, len(actions) + 1):
            for prefix in range(limit):
                env.max_turns = limit
                options = {"task_id": task, "prefix_actions": list(actions[:prefix])}
                env.reset(seed=_SEED, options=options)
                rows = play.go_on(env, actions[prefix:])
                when = f"with max_turns={limit} and {prefix} prefix turns in {task!r}"
                _require(
                    [row["truncated"] for row in rows] == [False] * (limit - prefix - 1) + [True],
                    f"{when}, truncated is {[row['truncated'] for row in rows]}: leave the turn "
                    "limit to TextEnv and do not override step",
                )
                _require(
                    not any(row["terminated"] for row in rows) and env.turn == limit and env.ended,
                    f"{when}, the episode must be over but not terminated at turn {limit}",
                )
        if actions:
            env.max_turns = 2
            long = [None, None, *actions]
            longer = {"task_id": task, "prefix_actions": long, "fresh_budget": True}
            info = env.reset(seed=_SEED, options=longer)[1]
            _require(
                not env.ended and info["turn"] == env.turn == 0,
                f"with fresh_budget, a prefix of {len(long)} turns counts toward the "
                f"limit: {env.turn} turns are taken",
            )
            truncated = [env.skip_turn("")[3] for _ in range(2)]
            _require(
                truncated == [False, True],
                f"with fresh_budget and max_turns=2, truncated after the prefix is {truncated}",
            )
        winning = _teacher_actions(endless(target), task)
        if winning:
            env.max_turns = len(winning)
            _start(env, task)
            last = play.go_on(env, winning)[-1]
            _require(
                last["terminated"] and not last["truncated"],
                f"solving {task!r} on the last turn allowed must be terminated, not truncated",
            )


# ------------------------------------------------------------------------------ refusals
def _refuses(call: Callable[[], object], error: type[Exception], what: str) -> Exception:
    try:
        result = call()
    except error as refusal:
        _require(len(str(refusal)) > 20, f"refusing {what} must say why: {refusal!s}")
        return refusal
    except Exception as other:
        raise ConformanceError(
            f"{what} raised {type(other).__name__} ({_short(str(other))}) instead of "
            f"{error.__name__}"
        ) from other
    raise ConformanceError(
        f"{what} is accepted (and gave {_short(result)}): raise {error.__name__}"
    )


def _names_a_choice(error: Exception, kind: str, choices: Iterable[str]) -> None:
    _require(
        any(choice in str(error) for choice in choices),
        f"refusing an unknown {kind} must name the valid ones, the message is {_short(str(error))}",
    )


@_check
def check_unknown_names(target: Target) -> None:
    """An unknown task, split or option is refused by name and the episode goes on as before."""
    env = endless(target)
    task = _few_tasks(env)[0]
    _start(env, task)
    play.improvise(env, 2, 0)
    before = env.snapshot()
    everything = [name for split in env.splits() for name in env.tasks(split)]
    cases: list[tuple[dict[str, Any], str, list[str]]] = [
        ({"task_id": "no such task"}, "task", everything),
        ({"task_id": 3}, "task", everything),
        ({"split": "no such split"}, "split", list(env.splits())),
        ({"no such option": 1}, "option", ["task_id"]),
        ({"task_id": "no such task", "prefix_actions": ["look"]}, "task", everything),
    ]
    for options, kind, choices in cases:
        for seed in (None, 5):
            reset = functools.partial(env.reset, seed=seed, options=options)
            refusal = _refuses(reset, UnknownNameError, f"reset with {options}")
            _names_a_choice(refusal, kind, choices)
            _require(
                env.snapshot() == before,
                f"refusing {options} (seed={seed}) changed the running episode: _begin must "
                "raise before it changes anything",
            )


@_check
def check_misuse(target: Target) -> None:
    """Stepping before a reset, after the end or with something that is no text is refused."""
    env = bare(target)
    for name, call in (
        ("step", lambda: env.step("look")),
        ("skip_turn", lambda: env.skip_turn("")),
        ("snapshot", env.snapshot),
    ):
        _refuses(call, EnvironmentUsageError, f"{name} before reset")
    task = _few_tasks(env)[0]
    env.max_turns = 2
    _start(env, task)
    no_text: tuple[Any, ...] = (None, 3, b"look", ["look"])
    for bad in no_text:
        _refuses(functools.partial(env.step, bad), TypeError, f"the action {bad!r}")
    _require(env.turn == 0, "an action that is no text used up a turn")
    env.skip_turn("")
    env.skip_turn("")
    if not env.accepts_steps_after_end:
        _refuses(lambda: env.step("look"), EnvironmentUsageError, "a step after the end")
        _refuses(lambda: env.skip_turn(""), EnvironmentUsageError, "a turn after the end")
        _require(env.turn == 2, "a step after the end counted as a turn")
    winning = _teacher_actions(endless(target), task)
    if winning is not None and not env.accepts_steps_after_end:
        env.max_turns = None
        _start(env, task)
        play.go_on(env, winning)
        _refuses(lambda: env.step("look"), EnvironmentUsageError, "a step after solving the task")


# ------------------------------------------------------------------------------ any text
def _sane_step(env: TextEnv, action: str) -> None:
    """Step and require what every step owes, whatever the action."""
    shown = _short(action)
    _require(env.action_space.contains(action), f"action_space refuses {shown}: use UnicodeText")
    try:
        observation, reward, terminated, truncated, info = env.step(action)
    except Exception as error:
        raise ConformanceError(
            f"step({shown}) raised {type(error).__name__}: {_short(str(error))}. _act must answer "
            "any text"
        ) from error
    _require(
        isinstance(observation, str) and env.observation_space.contains(observation),
        f"step({shown}) returned {_short(observation)}, which is outside the observation space",
    )
    _require(
        isinstance(reward, float) and math.isfinite(reward),
        f"step({shown}) gave the reward {reward!r}: a finite float is expected",
    )
    _require(
        isinstance(terminated, bool) and isinstance(truncated, bool),
        f"step({shown}) gave terminated={terminated!r}, truncated={truncated!r}: use bool",
    )
    _good_info(env, info)
    try:
        snapshot = env.snapshot()
        text = snapshot.to_json()
        back = Snapshot.from_json(text)
    except Exception as error:
        raise ConformanceError(
            f"after step({shown}) the snapshot cannot go through JSON: {type(error).__name__}: "
            f"{_short(str(error))}"
        ) from error
    _require(back == snapshot, f"after step({shown}) the snapshot changes on its way through JSON")
    _json_fields(env, observation)


@_check
def check_any_text(target: Target) -> None:
    """Any text is an action: it never raises and stays inside the observation space.

    Raises:
        MissingExtraError: hypothesis is not installed.
    """
    try:
        from hypothesis import HealthCheck, given, settings
        from hypothesis import strategies as st
    except ImportError as error:
        raise MissingExtraError("check_any_text", "dev") from error

    env = endless(target)
    start = _few_tasks(env)[-1]
    _start(env, start)
    play.go_on(env, _unfinished_script(target, start, 3))
    somewhere = env.snapshot()
    known = list(play.candidates(env) or [])
    known += [a for a in [play.teacher_action(env)] if a is not None]
    known = _spread(sorted(set(known)), 12) or ["look"]

    def sequence(actions: Iterable[str]) -> None:
        env.restore(somewhere)
        for action in actions:
            if env.ended:
                break
            _sane_step(env, action)

    for odd in (*play.ODD_TEXTS, "\ud83d\ude00 \ud83d", "a" * 100_000, "\U0001f600\n" * 50_000):
        sequence([odd])
    for action in known:
        sequence([action + " " + "x" * 100_000])
        for number in _HUGE_NUMBERS:
            # Repeated, so that sums grow past what int() and str() convert.
            sequence([*[_NUMBER.sub(number, action)] * 11, *known])

    anything = st.text(st.characters(exclude_categories=()), max_size=200)
    near_misses = st.builds(
        lambda action, place, insert: action[:place] + insert + action[place:],
        st.sampled_from(known),
        st.integers(0, 40),
        st.one_of(anything, st.sampled_from([*play.ODD_TEXTS, *_HUGE_NUMBERS, ",", " using "])),
    )

    @settings(
        max_examples=150,
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(st.one_of(anything, near_misses, st.sampled_from(known)), max_size=4))
    def any_sequence(actions: list[str]) -> None:
        sequence(actions)

    any_sequence()


# ------------------------------------------------------------------------------ info, fields
def _good_info(env: TextEnv, info: dict[str, Any]) -> None:
    for key, kind in (
        ("task_id", str),
        ("family", str),
        ("success", bool),
        ("turn", int),
        ("valid_action", bool),
    ):
        _require(
            type(info.get(key)) is kind,
            f"info[{key!r}] must be {kind.__name__}, got {info.get(key)!r}: Outcome.info and "
            "overridden methods must keep the common keys",
        )
    _require(
        info["task_id"] == env.task_id and info["turn"] == env.turn,
        "info['task_id'] or info['turn'] are not those of the episode",
    )
    _canonical(info, "info")


def _json_fields(env: TextEnv, observation: str) -> dict[str, Any]:
    found = env.fields(observation)
    _require(
        isinstance(found, dict) and all(isinstance(key, str) for key in found),
        f"fields({_short(observation)}) must be a dict with text keys, got {_short(found)}",
    )
    text = _canonical(found, f"fields({_short(observation)})")
    _require(
        _canonical(env.fields(observation), "fields") == text,
        f"fields({_short(observation)}) changes from call to call",
    )
    return found


@_check
def check_info(target: Target) -> None:
    """Info carries task_id, family, success, turn and valid_action, and can be written as JSON."""
    env = endless(target)
    for task in _some_tasks(env):
        info = env.reset(seed=_SEED, options={"task_id": task})[1]
        _good_info(env, info)
        _require(info["success"] is False, f"{task!r} starts solved")
        _require(info["turn"] == 0, f"{task!r} starts at turn {info['turn']}")
        _require(info["family"] == env.family(task), f"info['family'] of {task!r} is not family()")
        for action in _unfinished_script(target, task, 4):
            before = dict(info)
            info = env.step(action)[4]
            _good_info(env, info)
            _require(info["turn"] == before["turn"] + 1, "info['turn'] must count every step")


@_check
def check_fields(target: Target) -> None:
    """Fields of any observation can be written as JSON, and reading them changes nothing."""
    env = endless(target)
    found = 0
    for task in _few_tasks(env):
        rows = play.play(env, Script(seed=_SEED, options={"task_id": task}, turns=_TURNS))
        before = env.snapshot()
        for text in (*(row["observation"] for row in rows), *play.ODD_TEXTS):
            found += len(_json_fields(env, text))
        _require(env.snapshot() == before, "fields() changed the episode")
        _json_fields(bare(target), rows[0]["observation"])
    _require(found > 0, "fields() found nothing in any observation: nothing could ever be matched")


@_check
def check_failure_category(target: Target) -> None:
    """Every unsolved episode has a failure category."""
    env = endless(target)
    nothing = PlayedTurn(None, "", valid=False)
    for task in _few_tasks(env):
        rows = play.play(env, Script(seed=_SEED, options={"task_id": task}, turns=_TURNS))
        turns = [
            PlayedTurn(row["action"], row["observation"], valid=row["info"]["valid_action"])
            for row in rows[1:]
        ]
        for episode in ([], [nothing], turns[:-1], [*turns[:-1], nothing]):
            category = env.failure_category(episode)
            _require(
                isinstance(category, str) and bool(re.fullmatch(r"\w+", category)),
                f"failure_category gave {category!r}: a word is expected",
            )


# ------------------------------------------------------------------------------ models and teachers
def _teacher_actions(env: TextEnv, task: str) -> list[str] | None:
    """Actions with which the plainest teacher ends a task; ``None`` without a teacher."""
    _start(env, task)
    try:
        teacher = env.teacher()
    except NotImplementedError:
        return None
    actions: list[str] = []
    while not env.ended and len(actions) < 1000:
        action = teacher.next_turn().action
        env.step(action)
        actions.append(action)
    _require(env.ended, f"the teacher does not finish {task!r} within 1000 turns")
    return actions


@_check
def check_teacher(target: Target) -> None:
    """The teacher solves tasks through step, and its seed decides what it does."""
    env = endless(target)
    for task in _some_tasks(env):
        winning = _teacher_actions(env, task)
        if winning is None:
            return
        last = env.snapshot()
        _require(
            cast("dict[str, Any]", last.state)["success"] is True,
            f"the teacher does not solve {task!r}: it ends after {_short(winning[-3:])}",
        )
        _require(
            _teacher_actions(env, task) == winning,
            f"the teacher without a seed plays {task!r} differently each time",
        )
        for seed, detours in ((0, 0.0), (1, 0.4)):
            runs = []
            for _ in range(2):
                _start(env, task)
                teacher = env.teacher(seed, detours=detours)
                turns: list[TeacherTurn] = []
                while not env.ended and len(turns) < 20 * len(winning) + 50:
                    turn = teacher.next_turn()
                    _, _, _, _, info = env.step(turn.action)
                    turns.append(turn)
                _require(
                    env.ended and info["success"],
                    f"the teacher with seed={seed}, detours={detours} does not solve {task!r}",
                )
                runs.append(turns)
            _require(runs[0] == runs[1], f"the teacher with seed={seed} plays {task!r} two ways")


@_check
def check_out_of_reach(target: Target) -> None:
    """Tasks declared out of reach are tasks, fewer with more turns, and none without a limit."""
    env = bare(target)
    for split in env.splits():
        tasks = set(env.tasks(split))
        before = tasks
        for limit in (1, env.default_max_turns, 10 * env.default_max_turns, None):
            unreachable = set(env.out_of_reach(split, limit))
            _require(
                unreachable <= before,
                f"out_of_reach({split!r}, {limit}) names {_short(sorted(unreachable - before))}, "
                "which are no tasks of the split or were within reach with fewer turns",
            )
            before = unreachable
        _require(not before, f"without a turn limit, {_short(sorted(before))} are out of reach")


@_check
def check_generated_tasks(target: Target) -> None:
    """Generated tasks follow from the seed, are new, and can be played on any instance."""
    env = bare(target)
    ids = play.generated_tasks(env, 0, 5)
    if not ids:
        return
    known = {task for split in env.splits() for task in env.tasks(split)}
    _require(len(set(ids)) == len(ids) == 5, f"generate_tasks(0, 5) gave {_short(ids)}")
    _require(not known & set(ids), "generated tasks repeat tasks of a split")
    _require(
        env.generate_tasks(0, 5) == ids == bare(target).generate_tasks(0, 5),
        "generate_tasks with the same seed gave other tasks",
    )
    _require(not set(ids) & set(env.generate_tasks(1, 5)), "generate_tasks ignores its seed")
    for task in ids:
        fresh = endless(target)
        _require(_start(fresh, task) != "", f"generated task {task!r} has no prompt")
        _require(fresh.family(task) != "", f"generated task {task!r} has no family")


def _check_dialogue(dialogue: Dialogue, first: str, turns: Sequence[tuple[str, str]]) -> None:
    name = dialogue.label
    _require(dialogue.max_tokens > 0, f"dialogue {name} has max_tokens={dialogue.max_tokens}")
    _require(dialogue.version >= 1, f"dialogue {name} needs a version of 1 or more")
    opening = dialogue.opening(first)
    _require(
        opening[-1].role == "user" and first in opening[-1].content,
        f"the opening of {name} must end with the user message that holds the observation",
    )
    for action, thought in turns:
        parsed = dialogue.parse(dialogue.render(action, thought))
        _require(
            parsed.action == action,
            f"{name} reads {_short(dialogue.render(action, thought))} as {parsed}, "
            f"the teacher meant {_short(action)}",
        )
    for reply in (*_ODD_REPLIES, *play.ODD_TEXTS):
        parsed = dialogue.parse(reply)
        _require(
            (parsed.action is None) == (parsed.problem is not None),
            f"{name} reads {reply!r} as {parsed}: an action or a problem is expected",
        )
        _require(parsed.action != "", f"{name} reads an empty action from {reply!r}")
        if parsed.problem is not None:
            _require(
                bool(dialogue.answers.get(parsed.problem)),
                f"{name} has no answer for the problem {parsed.problem!r}, which {reply!r} has",
            )


@_check
def check_dialogues(target: Target) -> None:
    """Every dialogue reads back what it writes and answers every malformed reply."""
    env = endless(target)
    dialogues = env.dialogues()
    _require(bool(dialogues), "dialogues() is empty")
    for name, dialogue in dialogues.items():
        _require(name == dialogue.name, f"dialogues() lists {dialogue.name!r} as {name!r}")
        for task in _some_tasks(env):
            first = _start(env, task)
            turns = [(action, "") for action in (play.candidates(env) or [])]
            with contextlib.suppress(NotImplementedError):
                teacher = env.teacher(0)
                while not env.ended and len(turns) < 500:
                    turn = teacher.next_turn()
                    turns.append((turn.action, turn.thought))
                    env.step(turn.action)
            _check_dialogue(dialogue, first, turns)


# ------------------------------------------------------------------------------ the suite
CHECKS: tuple[Check, ...] = tuple(_checks)
"""Every check, in the order in which their failures are best mended."""


def check_environment(target: Target) -> None:
    """Run every check.

    Raises:
        ConformanceError: At least one failed; the message lists all of them.
    """
    failures: list[str] = []
    for check in CHECKS:
        try:
            check(target)
        except ConformanceError as error:
            failures.append(str(error))
    if failures:
        raise ConformanceError("\n".join(failures))


def check_told_apart(targets: Sequence[Target]) -> None:
    """No two environments share an id or a data hash.

    Raises:
        ConformanceError: Two do.
    """
    seen: dict[str, str] = {}
    for target in targets:
        env = bare(target)
        for value in (env.env_id, env.data_hash):
            if value in seen:
                raise ConformanceError(f"{label(target)} and {seen[value]} share {value!r}")
            seen[value] = label(target)
