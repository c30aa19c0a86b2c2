"""Run what a plan lacks: training and evaluation as processes of their own, several at a time.

Every run has a folder: what training writes, ``eval/<split>``, one log a stage, and ``fill.json``,
which holds the training command and whether it has ended well. Each stage resumes by itself, so
that the same call goes on after any end. A stage's process holds the folder's lock for as long as
it lives; should it outlive a killed ``fill``, the next one waits for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, ValidationError

from agentbench_prefix import registry
from agentbench_prefix.errors import AgentBenchError, CheckpointError, ConfigurationError
from agentbench_prefix.evaluation.compare import load_evaluation
from agentbench_prefix.files import read_mapping, replacing, write_json_atomic
from agentbench_prefix.leaderboard.results import (
    KEPT_CURVES,
    Result,
    load_summary,
    make_result,
    row_name,
)
from agentbench_prefix.training.summary import (
    CHECKPOINT,
    CURVES,
    LOG,
    Label,
    RunSummary,
    describe,
)

if sys.platform != "win32":
    import fcntl

STATE = "fill.json"
_LOCK = ".fill.lock"
_POLL = 0.2
_TAIL = 3

_Labels = Annotated[
    tuple[Label, ...], BeforeValidator(lambda v: v if isinstance(v, list | tuple) else [v])
]
Options = dict[str, str | int | float | bool]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EvaluationPlan(_Part):
    """How checkpoints are evaluated.

    Attributes:
        splits: Whole splits.
        samples: Episodes a task.
        seed: Seed of the evaluation.
    """

    splits: Annotated[tuple[str, ...], Field(min_length=1)] = ("test",)
    samples: Annotated[int, Field(ge=1)] = 8
    seed: Annotated[int, Field(ge=0)] = 0


class Entry(_Part):
    """Runs of a plan: every method from every init with every seed.

    Attributes:
        method: Method, or several.
        init: What it starts from, or several: names of methods. Left out only with ``shipped``.
        init_from: Checkpoint folder to start from in place of the init's shipped one; ``{seed}``
            stands for the seed. Its card must name the init's method.
        variant: Variant of the method, for ``--variant``.
        label: What tells the row from others of the method where options do, e.g. ``half``.
        seeds: Seeds; those of the plan by default.
        env: Environment; the plan's by default.
        tier: Tier; the plan's by default.
        shipped: Train nothing; evaluate the checkpoint that the method ships.
        options: Further options of the training command, e.g. ``steps: 40`` for ``--steps 40``;
            ``true`` and ``false`` stand for ``--name`` and ``--no-name``.
    """

    method: _Labels
    init: _Labels = ()
    init_from: str | None = None
    variant: Annotated[str, Field(pattern=r"^[\w.+-]*$")] = ""
    label: Annotated[str, Field(pattern=r"^[\w.+-]*$")] = ""
    seeds: tuple[int, ...] | None = None
    env: str | None = None
    tier: Label | None = None
    shipped: bool = False
    options: Options = {}


class Plan(_Part):
    """What a leaderboard is to hold.

    Attributes:
        env: Environment of entries that name none.
        tier: Tier of entries that name none.
        seeds: Seeds of entries that name none.
        options: Options of every training command; an entry's own go before.
        evaluation: How checkpoints are evaluated.
        entries: The runs.
    """

    env: str
    tier: Label = "cpu"
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (0,)
    options: Options = {}
    evaluation: EvaluationPlan = EvaluationPlan()
    entries: Annotated[tuple[Entry, ...], Field(min_length=1)]

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read a plan from YAML.

        Raises:
            ConfigurationError: It is missing or malformed; the message names the field.
        """
        try:
            return cls.model_validate(read_mapping(path, "plan"))
        except ValidationError as error:
            raise ConfigurationError(f"the plan {path} is not valid: {describe(error)}") from error


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of a plan.

    Attributes:
        method: Method.
        variant: Variant that is trained; empty for the main form.
        label: Addition to the variant in the row's name.
        init: What it starts from; for a shipped checkpoint, what its card says.
        init_from: What the training command is told to start from.
        env_id: Environment.
        tier: Tier.
        seed: Seed.
        options: Further options of the training command.
        shipped: Folder of a shipped checkpoint that is only evaluated.
        evaluation: How the checkpoint is evaluated.
    """

    method: str
    variant: str
    label: str
    init: str
    init_from: str
    env_id: str
    tier: str
    seed: int
    options: Options
    shipped: Path | None
    evaluation: EvaluationPlan

    @property
    def row_variant(self) -> str:
        """Variant in the row's name."""
        return "-".join(part for part in (self.variant, self.label) if part)

    @property
    def name(self) -> str:
        """Name of its run folder and of its result."""
        row = row_name(self.method, self.row_variant, self.init)
        return f"{self.env_id}-{self.tier}-{row}-seed{self.seed}"


def plan_jobs(plan: Plan) -> list[Job]:
    """The runs of a plan, in its order.

    Raises:
        ConfigurationError: An entry contradicts itself, or a run is there twice.
        CheckpointError: A shipped checkpoint is missing.
        UnknownNameError: Unknown method.
    """
    jobs: list[Job] = []
    for entry in plan.entries:
        for method in entry.method:
            jobs += _entry_jobs(plan, entry, method)
    names = [job.name for job in jobs]
    if double := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigurationError(
            f"the plan holds {', '.join(double)} twice: give one of them a label, or leave it out"
        )
    return jobs


def _entry_jobs(plan: Plan, entry: Entry, method: str) -> Iterator[Job]:
    env_id, tier = entry.env or plan.env, entry.tier or plan.tier
    options = {**plan.options, **entry.options}
    if entry.shipped:
        if entry.init or entry.variant or entry.seeds or entry.options:
            raise ConfigurationError(
                f"the plan's entry of {method} is a shipped checkpoint: it takes no init, variant, "
                "seeds or options"
            )
        folder = registry.method(method).checkpoint(env_id)
        if folder is None:
            raise CheckpointError(f"method {method!r} ships no checkpoint for {env_id}: train it")
        run = load_summary(folder, tier)[0]
        yield Job(
            method=run.method,
            variant=run.variant,
            label=entry.label,
            init=run.init.name,
            init_from="",
            env_id=env_id,
            tier=tier,
            seed=run.seed,
            options={},
            shipped=folder,
            evaluation=plan.evaluation,
        )
        return
    registry.method(method)
    if not entry.init:
        raise ConfigurationError(
            f"the plan's entry of {method} must name its init, e.g. 'init: sft', or be 'shipped: "
            "true'"
        )
    for init in entry.init:
        for seed in plan.seeds if entry.seeds is None else entry.seeds:
            yield Job(
                method=method,
                variant=entry.variant,
                label=entry.label,
                init=init,
                init_from=(entry.init_from or init).replace("{seed}", str(seed)),
                env_id=env_id,
                tier=tier,
                seed=seed,
                options=options,
                shipped=None,
                evaluation=plan.evaluation,
            )


# ------------------------------------------------------------------ commands
def train_command(job: Job, folder: Path) -> list[str]:
    """The command that trains a run, or goes on with it."""
    command = [sys.executable, "-m", "agentbench_prefix.train", "--method", job.method]
    command += ["--env", job.env_id, "--tier", job.tier, "--init", job.init_from]
    command += ["--seed", str(job.seed), "--out", str(folder), "--no-evaluate", "--no-progress"]
    if job.variant:
        command += ["--variant", job.variant]
    for name, value in job.options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            command += [f"--{flag}", str(value)]
    return command


def eval_command(job: Job, checkpoint: Path, split: str, folder: Path) -> list[str]:
    """The command that evaluates a checkpoint on a split, or goes on with it."""
    return [
        *(sys.executable, "-m", "agentbench_prefix.eval", "--method", job.method),
        *("--model", str(checkpoint), "--env", job.env_id, "--split", split),
        *("--samples", str(job.evaluation.samples), "--seed", str(job.evaluation.seed)),
        *("--out", str(folder), "--no-progress"),
    ]


# ------------------------------------------------------------------ running
@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run of a plan ended.

    Attributes:
        job: The run.
        error: ``None`` if its result is there, else what went wrong.
        ran: Whether anything was run for it.
    """

    job: Job
    error: str | None
    ran: bool


Report = Callable[[Job, str], None]
"""Called with a run and what it does now."""


class _Failed(Exception):
    """A stage of a run failed."""


class Filler:
    """Runs the jobs of a plan.

    Args:
        results: Folder of ``*.json``; what is there is not run again. Logs and curves of training
            are kept in ``curves`` beside it.
        runs: Folder of the run folders.
        report: Called when a run enters a stage; from several threads.
    """

    def __init__(self, results: Path, runs: Path, report: Report) -> None:
        self.results = results
        self.runs = runs
        self.report = report
        self._stopping = threading.Event()

    def is_done(self, job: Job) -> bool:
        """Whether a run's result is there.

        Raises:
            ConfigurationError: There is a malformed file of its name, or one without the plan's
                splits.
        """
        path = self.results / f"{job.name}.json"
        if not path.is_file():
            return False
        result = Result.load(path)
        wanted = job.evaluation
        there = tuple(sorted(result.splits)), result.settings.samples, result.evaluation_seed
        if there != (tuple(sorted(wanted.splits)), wanted.samples, wanted.seed):
            raise ConfigurationError(
                f"{path} was evaluated on other splits, samples or seed than the plan asks for: "
                "remove it to make it again from its run folder"
            )
        return True

    def fill(self, jobs: list[Job], at_once: int = 2) -> list[Outcome]:
        """Run what is missing; a failed run does not stop the others.

        Args:
            jobs: Runs of a plan.
            at_once: How many run at the same time.

        Returns:
            One outcome a job, in order.
        """
        with ThreadPoolExecutor(at_once) as pool:
            futures = [pool.submit(self._outcome, job) for job in jobs]
            try:
                return [future.result() for future in futures]
            except BaseException:
                self._stopping.set()  # its processes end before the pool does
                for future in futures:
                    future.cancel()
                raise

    def _outcome(self, job: Job) -> Outcome:
        try:
            if self.is_done(job):
                self.report(job, "done before")
                return Outcome(job, None, ran=False)
            self._run(job)
        except (_Failed, AgentBenchError, OSError) as error:
            self.report(job, f"FAILED: {error}")
            return Outcome(job, str(error), ran=True)
        self.report(job, "done")
        return Outcome(job, None, ran=True)

    def _run(self, job: Job) -> None:
        folder = self.runs / job.name
        folder.mkdir(parents=True, exist_ok=True)
        with self._locked(job, folder) as lock:
            summary, checkpoint = self._trained(job, folder, lock)
            evaluations = [
                self._evaluated(job, folder, checkpoint, split, lock)
                for split in job.evaluation.splits
            ]
            make_result(summary, checkpoint, evaluations).save(self.results)
            for name, ending in ((LOG, "jsonl"), (CURVES, "png")):
                if (folder / name).is_file():
                    kept = self.results.parent / KEPT_CURVES / f"{job.name}.{ending}"
                    with replacing(kept) as beside:
                        shutil.copyfile(folder / name, beside)

    def _trained(self, job: Job, folder: Path, lock: int) -> tuple[RunSummary, Path]:
        if job.shipped is not None:
            summary, checkpoint = load_summary(job.shipped, job.tier)
        else:
            command = train_command(job, folder)
            if not _claim(folder, command):
                self._stage(job, "training", command, folder / "train.log", lock)
                _save_state(folder, command, trained=True)
            if not (folder / CHECKPOINT).is_dir():
                raise _Failed(f"training ended, but left no {folder / CHECKPOINT}")
            summary, checkpoint = load_summary(folder, job.tier)
        planned = job.method, job.variant, job.init, job.env_id, job.tier, job.seed
        found = summary.method, summary.variant, summary.init.name, summary.env_id, summary.tier
        for name, plan, run in zip(
            ("method", "variant", "init", "env", "tier", "seed"),
            planned,
            (*found, summary.seed),
            strict=True,
        ):
            if plan != run:
                raise _Failed(f"the plan's {name} is {plan!r}, the run in {folder} has {run!r}")
        return summary.model_copy(update={"variant": job.row_variant}), checkpoint

    def _evaluated(self, job: Job, folder: Path, checkpoint: Path, split: str, lock: int) -> Path:
        out = folder / "eval" / split
        if not _is_evaluated(out):
            command = eval_command(job, checkpoint, split, out)
            self._stage(job, f"evaluating {split}", command, folder / f"eval-{split}.log", lock)
        return out

    def _stage(self, job: Job, name: str, command: list[str], log: Path, lock: int) -> None:
        """Run a command to its end; its output is appended to a log.

        Raises:
            _Failed: It failed, or was stopped.
        """
        if self._stopping.is_set():
            raise _Failed("stopped")
        self.report(job, f"{name} ({log})")
        with log.open("ab") as output:
            output.write(f"$ {' '.join(command)}\n".encode())
            output.flush()
            process = subprocess.Popen(  # noqa: S603
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                pass_fds=() if sys.platform == "win32" else (lock,),
            )
        while (status := process.poll()) is None:
            if self._stopping.wait(_POLL):
                process.terminate()
                process.wait()
                raise _Failed("stopped")
        if status != 0:
            lines = log.read_text("utf-8", "replace").split("\n")
            last = " | ".join([line.strip() for line in lines if line.strip()][-_TAIL:])
            raise _Failed(f"{name} ended with status {status}: {last} (see {log})")

    @contextlib.contextmanager
    def _locked(self, job: Job, folder: Path) -> Iterator[int]:
        with (folder / _LOCK).open("w") as file:
            waiting = False
            while sys.platform != "win32":
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not waiting:
                        self.report(job, f"waiting for another process that works in {folder}")
                        waiting = True
                    if self._stopping.wait(_POLL):
                        raise _Failed("stopped") from None
            yield file.fileno()


def _claim(folder: Path, command: list[str]) -> bool:
    """Take a run folder for a training command; say whether that has ended well.

    Raises:
        ConfigurationError: The folder belongs to another command.
    """
    path = folder / STATE
    if not path.is_file():
        _save_state(folder, command, trained=False)
        return False
    try:
        state: dict[str, Any] = json.loads(path.read_text("utf-8"))
        there, trained = state["command"], bool(state["trained"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{path} is damaged ({error}): remove it; training then goes on where it was"
        ) from error
    # Where python is installed is no part of what is run.
    if there[1:] != command[1:]:
        raise ConfigurationError(
            f"{folder} was trained by `{' '.join(there[1:])}`, the plan now says "
            f"`{' '.join(command[1:])}`: give the entry a label, or remove the folder"
        )
    return trained


def _save_state(folder: Path, command: list[str], *, trained: bool) -> None:
    state: dict[str, JsonValue] = {"command": list(command), "trained": trained}
    write_json_atomic(folder / STATE, state)


def _is_evaluated(folder: Path) -> bool:
    try:
        return load_evaluation(folder)[1].n_errors == 0
    except ConfigurationError:
        return False


def progress_of(folder: Path) -> str:
    """What a run folder has come to, in a few words: logged steps, or episodes by split."""
    counts = {
        path.parent.name: _count_lines(path)
        for path in sorted(folder.glob("eval/*/episodes.jsonl"))
    }
    if counts:
        return ", ".join(f"{split} {n} episodes" for split, n in counts.items())
    steps = _count_lines(folder / "log.jsonl")
    return f"{steps} steps" if steps else ""


def _count_lines(path: Path) -> int:
    try:
        with path.open("rb") as file:
            return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
    except OSError:
        return 0


def elapsed(since: float) -> str:
    """Time since a moment of :func:`time.monotonic`, as ``h:mm:ss``."""
    seconds = int(time.monotonic() - since)
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
