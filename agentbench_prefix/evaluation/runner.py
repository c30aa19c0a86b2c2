"""A run folder: configuration, episodes, metrics; the same call resumes it.

Work is cut into fixed chunks of ``batch_size`` episodes (tasks in the split's order, samples
inner), so which episodes are played together follows from the configuration alone. A finished
chunk is appended in one write. Nothing else is written to the episodes, but that a resume first
removes the chunks that are unfinished, damaged or hold an errored episode; these are played again
whole. That is what makes a resumed run equal to an unbroken one. A kill leaves an unfinished chunk
and a torn last line behind; of other lines that a resume removes it warns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import platform
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from agentbench_prefix import registry
from agentbench_prefix.cards import code_version
from agentbench_prefix.dialogue import Dialogue
from agentbench_prefix.env import TextEnv
from agentbench_prefix.errors import ConfigurationError, PolicyError, UnknownNameError
from agentbench_prefix.evaluation.metrics import Metrics, compute
from agentbench_prefix.evaluation.records import EpisodeRecord, read_episodes
from agentbench_prefix.evaluation.stats import ks
from agentbench_prefix.files import (
    append_lines,
    canonical_json,
    sha256_text,
    write_json_atomic,
    write_text_atomic,
)
from agentbench_prefix.policies.base import Policy
from agentbench_prefix.rollouts import episode_seed, play, start

if sys.platform != "win32":
    import fcntl

CONFIG = "config.json"
EPISODES = "episodes.jsonl"
METRICS = "metrics.json"

_PACKAGES = (
    "agentbench-prefix",
    "gymnasium",
    "numpy",
    "pydantic",
    "tokenizers",
    "torch",
    "transformers",
    "vllm",
)

Job = tuple[str, int]
"""A task and the index of a sample."""


class EvalConfig(BaseModel):
    """What is evaluated; together with the policy's description it is the resume key.

    Attributes:
        method: Label of the policy.
        env: Environment id.
        env_arguments: Further arguments for ``gym.make``.
        split: Split of tasks.
        tasks: How many of them, spread evenly (:func:`choose_tasks`); ``None`` for all.
        samples: Episodes a task.
        seed: Seed from which every episode's seed is derived.
        max_turns: Turn limit; ``None`` for the environment's.
        temperature: Sampling temperature.
        top_p: Nucleus kept when sampling.
        max_tokens: Bound on one reply, in tokens; ``None`` for the dialogue's.
        dialogue: Name or label of the dialogue; ``None`` for the environment's first.
        batch_size: Episodes a chunk.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str
    env: str
    env_arguments: dict[str, JsonValue] = {}
    split: str = "test"
    tasks: int | None = Field(default=None, ge=1)
    samples: int = Field(default=8, ge=1)
    seed: int = 0
    max_turns: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1)
    dialogue: str | None = None
    batch_size: int = Field(default=64, ge=1)

    def make_env(self) -> TextEnv:
        """Make an environment of this configuration."""
        arguments: dict[str, Any] = dict(self.env_arguments)
        if self.max_turns is not None:
            arguments["max_turns"] = self.max_turns
        return registry.make(self.env, **arguments)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A finished run.

    Attributes:
        folder: Where it is.
        metrics: Its metrics.
        first_error: Error of the first errored episode, if there is one.
    """

    folder: Path
    metrics: Metrics
    first_error: str | None


def find_dialogue(env: TextEnv, name: str | None) -> Dialogue:
    """Dialogue of an environment by name or label; the environment's first for ``None``.

    Raises:
        UnknownNameError: No such dialogue.
    """
    dialogues = list(env.dialogues().values())
    if name is None:
        return dialogues[0]
    for dialogue in dialogues:
        if name in (dialogue.name, dialogue.label):
            return dialogue
    raise UnknownNameError("dialogue", name, [dialogue.label for dialogue in dialogues])


def choose_tasks(env: TextEnv, split: str, n: int | None) -> list[str]:
    """Tasks of a split, or ``n`` of them spread evenly over its families.

    The rule: put the split's T tasks in order of their families (families in order of first
    appearance, tasks in the split's order within one), take positions floor((i + 1/2) T / n) for
    i = 0 .. n - 1, and give them in the split's order.

    Raises:
        UnknownNameError: No such split.
        ConfigurationError: The split has no task, or fewer than ``n``.
    """
    tasks = list(env.tasks(split))
    if not tasks:
        raise ConfigurationError(f"split {split!r} of {env.env_id} has no tasks: choose another")
    if n is None:
        return tasks
    if n > len(tasks):
        raise ConfigurationError(
            f"split {split!r} of {env.env_id} has {len(tasks)} tasks, {n} were asked for: "
            "leave --tasks out to take all"
        )
    families: dict[str, list[str]] = {}
    for task in tasks:
        families.setdefault(env.family(task), []).append(task)
    ordered = [task for members in families.values() for task in members]
    chosen = {ordered[(2 * i + 1) * len(ordered) // (2 * n)] for i in range(n)}
    return [task for task in tasks if task in chosen]


def run_key(
    config: EvalConfig,
    env: TextEnv,
    dialogue: Dialogue,
    task_ids: Sequence[str],
    policy: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything that identifies a run, as plain JSON."""
    key = {
        **config.model_dump(),
        "env_arguments": env.arguments(),
        "data_hash": env.data_hash,
        "task_ids": list(task_ids),
        "max_turns": env.max_turns,
        "max_tokens": config.max_tokens or dialogue.max_tokens,
        "dialogue": dialogue.label,
        "k": ks(config.samples),
        "policy": dict(policy),
    }
    plain: dict[str, Any] = json.loads(canonical_json(key))
    return plain


def default_folder(key: Mapping[str, Any]) -> Path:
    """Folder of a run that names none: the same configuration gives the same folder."""
    name = f"{key['method']}-{key['split']}-{sha256_text(canonical_json(key))[:12]}"
    return Path("runs") / "eval" / str(key["env"]) / name


def versions() -> dict[str, Any]:
    """Python, platform, packages and code of this process; recorded, but no part of the key."""
    packages = {}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            packages[name] = version(name)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "code": code_version(),
    }


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], where: tuple[str, str] = ("there", "now")
) -> list[str]:
    """Name every entry in which two nested mappings differ, with both values and where each is."""
    before, after = _flat(old), _flat(new)
    return [
        f"{name} is {_short(before.get(name))} {where[0]}, {_short(after.get(name))} {where[1]}"
        for name in sorted(set(before) | set(after))
        if before.get(name) != after.get(name)
    ]


def evaluate(
    config: EvalConfig,
    policy: Policy,
    out: Path | None = None,
    *,
    max_consecutive_errors: int = 16,
    progress: Callable[[int, int, int], None] | None = None,
    warn: Callable[[str], None] = warnings.warn,
) -> Evaluation:
    """Evaluate a policy, or finish an evaluation that was broken off.

    Args:
        config: What to evaluate.
        policy: Who plays.
        out: Run folder; by default derived from the configuration (:func:`default_folder`).
        max_consecutive_errors: Stop the run after so many errored episodes in a row, in order of
            completion.
        progress: Called with the numbers of finished, of solved and of all episodes.
        warn: Receives one-line warnings.

    Raises:
        UnknownNameError: Unknown environment, split or dialogue.
        ConfigurationError: The folder cannot be written, is in use, or holds a run of another
            configuration.
        PolicyError: Too many errors in a row; finished chunks are kept.
    """
    env = config.make_env()
    dialogue = find_dialogue(env, config.dialogue)
    task_ids = choose_tasks(env, config.split, config.tasks)
    key = run_key(config, env, dialogue, task_ids, policy.describe())
    folder = default_folder(key) if out is None else out
    jobs = [(task, sample) for task in task_ids for sample in range(config.samples)]
    size = config.batch_size
    chunks = [jobs[begin : begin + size] for begin in range(0, len(jobs), size)]

    with _locked(folder):
        _claim(folder, key, warn)
        finished = _keep_finished(folder / EPISODES, chunks, key, env.env_id, warn)
        waiting = [chunk for chunk in chunks if not finished.keys() >= set(chunk)]
        watch = _Watch(
            total=len(jobs),
            done=len(finished),
            solved=sum(finished.values()),
            limit=max_consecutive_errors,
            progress=progress,
            who=str(key["policy"].get("url", "the policy")),
            folder=folder,
        )
        if waiting:
            # It would describe another set of episodes until the run is finished.
            (folder / METRICS).unlink(missing_ok=True)
            envs = [env, *(config.make_env() for _ in range(len(max(waiting, key=len)) - 1))]
        for chunk in waiting:
            episodes = [
                start(own, dialogue, task, sample=sample, seed=config.seed)
                for own, (task, sample) in zip(envs, chunk, strict=False)
            ]
            records = play(policy, episodes, watch)
            append_lines(folder / EPISODES, [record.to_line() for record in records])
        metrics = compute(
            read_episodes(folder / EPISODES),
            env=config.env,
            method=config.method,
            split=config.split,
            samples=config.samples,
            families={task: env.family(task) for task in task_ids},
            max_turns=env.max_turns,
            out_of_reach=env.out_of_reach(config.split, env.max_turns),
        )
        write_json_atomic(folder / METRICS, metrics.model_dump())
    return Evaluation(folder, metrics, watch.first_error)


@dataclasses.dataclass
class _Watch:
    """Counts episodes as they end, and stops a run whose policy is dead."""

    total: int
    done: int
    solved: int
    limit: int
    progress: Callable[[int, int, int], None] | None
    who: str
    folder: Path
    errors_in_a_row: int = 0
    first_error: str | None = None

    def __post_init__(self) -> None:
        self._show()

    def _show(self) -> None:
        if self.progress is not None:
            self.progress(self.done, self.solved, self.total)

    def __call__(self, record: EpisodeRecord) -> None:
        self.done += 1
        self.solved += record.success
        self._show()
        if record.error is None:
            self.errors_in_a_row = 0
            return
        self.first_error = self.first_error or record.error
        self.errors_in_a_row += 1
        if self.errors_in_a_row >= self.limit:
            raise PolicyError(
                f"stopped after {self.errors_in_a_row} errored episodes in a row "
                f"(--max-consecutive-errors), the last with {record.error!r}; finished chunks are "
                f"kept in {self.folder}: see to {self.who}, then run the same command to resume"
            )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder; the lock goes with the process, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise ConfigurationError(
            f"cannot write to the run folder {folder} ({error.strerror}): choose another with --out"
        ) from error
    with file:
        if sys.platform != "win32":
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigurationError(
                    f"another process is writing the run folder {folder}: wait for it to end, or "
                    "choose another with --out"
                ) from error
        yield


def _claim(folder: Path, key: Mapping[str, Any], warn: Callable[[str], None]) -> None:
    """Write the configuration, or check that the folder's is the same."""
    path = folder / CONFIG
    now = versions()
    if not path.exists():
        if (folder / EPISODES).exists():
            raise ConfigurationError(
                f"{folder} holds {EPISODES} but no {CONFIG}: choose another folder with --out"
            )
        write_json_atomic(path, {"key": key, "versions": now})
        return
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        changed = differences(stored["key"], key)
        then = [stored["versions"], *stored.get("resumed_under", [])]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"{path} is not the configuration of a run: choose another folder with --out"
        ) from error
    if changed:
        raise ConfigurationError(
            f"{folder} holds a run of another configuration ({'; '.join(changed)}): choose another "
            "folder with --out, or leave --out out to have one named after the configuration"
        )
    if now not in then:
        warn(f"{folder} was begun under other versions ({'; '.join(differences(then[0], now))})")
        stored["resumed_under"] = [*then[1:], now]
        write_json_atomic(path, stored)


def _keep_finished(
    path: Path,
    chunks: Sequence[Sequence[Job]],
    key: Mapping[str, Any],
    env_id: str,
    warn: Callable[[str], None],
) -> dict[Job, bool]:
    """Drop all but this run's whole chunks without an error; return what is kept, with success."""
    if not path.exists():
        return {}
    old = path.read_bytes()
    planned = {job for chunk in chunks for job in chunk}
    lines: dict[Job, str] = {}
    success: dict[Job, bool] = {}
    spoilt: set[Job] = set()
    faults = []
    # What is behind the last newline was torn by a kill.
    for number, line in enumerate(old.split(b"\n")[:-1], start=1):
        try:
            record = EpisodeRecord.from_line(line)
        except ValueError as error:
            faults.append(f"line {number} is no episode record ({error})")
            continue
        job = (record.task_id, record.sample)
        if fault := _foreign(record, planned, key, env_id):
            faults.append(f"line {number} is not of this run ({fault})")
            continue
        if job in lines:
            faults.append(f"line {number} repeats task {job[0]!r}, sample {job[1]}")
            spoilt.add(job)
        if record.error is not None:
            spoilt.add(job)
        lines[job] = line.decode()
        success[job] = record.success
    if faults:
        shown = "; ".join(
            fault if len(fault) <= 200 else f"{fault[:197]}..." for fault in faults[:3]
        )
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        warn(f"{path} was changed or damaged: {shown}{more}; what is missing is played again")
    kept = [
        job
        for chunk in chunks
        if all(j in lines and j not in spoilt for j in chunk)
        for job in chunk
    ]
    new = "".join(lines[job] + "\n" for job in kept)
    if new.encode() != old:
        write_text_atomic(path, new)
    return {job: success[job] for job in kept}


def _foreign(
    record: EpisodeRecord, planned: Set[Job], key: Mapping[str, Any], env_id: str
) -> str | None:
    """Why an episode cannot be of this run; ``None`` if it can."""
    job = (record.task_id, record.sample)
    if job not in planned:
        return f"task {job[0]!r}, sample {job[1]} is not planned"
    for name, mine in (
        ("env_id", env_id),
        ("data_hash", key["data_hash"]),
        ("arguments", key["env_arguments"]),
        ("dialogue", key["dialogue"]),
        ("seed", episode_seed(key["seed"], *job)),
    ):
        if getattr(record, name) != mine:
            return f"{name} is {_short(getattr(record, name))}, expected {_short(mine)}"
    return None


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, entry in value.items():
        if isinstance(entry, Mapping):
            found.update(_flat(entry, f"{prefix}{name}."))
        else:
            found[f"{prefix}{name}"] = entry
    return found


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value)} entries, sha256 {sha256_text(canonical_json(value))[:12]}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
