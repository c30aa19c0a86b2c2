"""What building a corpus saves: replay, tokens sent through a model, memory.

``replay``: queries/s of checking all cuts of a trajectory in one pass, beside replaying every cut
from the start: a reset, the actions before the cut, the probe. The last column compares both where
they also prove that a snapshot of every cut restores. Each way's fastest of ``--passes`` at each
trajectory, which a busy machine disturbs least; all must find the same. The more cuts share a
pass, the more it saves: the cuts of each strategy are replayed by themselves, too.

``tokens``: tokens sent through the model by one pass over each trajectory, which scores all its
prefixes and gives the entropies, beside one pass a query, counted from the serialized prompts.
Fails below ``--fewer``.

``memory``: peak resident memory of building a tenth of the tasks and all of them, and of reading
both corpora, each in a process of its own. Fails if it grows by more than ``--allow`` percent.

    python benchmarks/corpora.py [--only replay tokens memory]

Everything is done on the released trajectories, or on freshly taught ones where they are not at
hand. Targets: 3 times the queries/s, 2.5 times fewer tokens, the same memory within 20 %.

On the release of ``textcraft-prefix`` (1,492 trajectories of 6.3 turns in the mean): 3.9 times the
queries/s at every turn, 3.1 times at the 7,245 cuts of the ``compact`` dialogue (3.8 times on
trajectories of 12 turns and more). The 2 or 3 cuts a trajectory of one strategy alone: 1.7 to 1.9
times. With restoring 1.8 to 2.0 and 1.4 to 1.5 times: a step of TextCraft takes about 2.5 us and a
reset 20, but a snapshot and its restoring 16 together. 3.5 times fewer tokens, 4.5 times with the
entropies. 7 % more memory building, 9 % reading.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import math
import operator
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from agentbench_prefix.corpora.build import build
from agentbench_prefix.corpora.cuts import FixedRatio, RandomTurns, Trace
from agentbench_prefix.corpora.find import find_corpus
from agentbench_prefix.corpora.reading import Corpus
from agentbench_prefix.corpora.recipe import make_recipe
from agentbench_prefix.corpora.schema import TrajectoryRow, to_messages
from agentbench_prefix.corpora.storage import read_rows
from agentbench_prefix.env import TextEnv
from agentbench_prefix.errors import CorpusError
from agentbench_prefix.registry import make
from agentbench_prefix.replay import CutCheck, Recording, check_cuts, compare

PARTS = ("replay", "tokens", "memory")
WITHOUT_QUERIES = {
    "fixed_ratio_10_30_50": FixedRatio(ratios=(0.1, 0.3, 0.5)),
    "fixed_ratio_25_50_70": FixedRatio(ratios=(0.25, 0.5, 0.7)),
    "random_3": RandomTurns(k=3),
}
LONG = 12
"""Turns from which on a trajectory has a line of its own."""

Cuts = dict[int, frozenset[str]]
"""Turns before each cut, and the strategies that chose it: none for the raw task."""
Job = tuple[Recording, list[int]]


# ------------------------------------------------------------------ what is measured on
def find_trajectories(name: str, env_id: str, scratch: Path) -> Corpus:
    """The released corpus, or one of trajectories only, taught here."""
    try:
        return find_corpus(name)
    except CorpusError as error:
        print(f"teaching: {error}", file=sys.stderr)
    fields = {"name": "taught", "licence": "Apache-2.0", "env_id": env_id}
    return build(make_recipe({**fields, "teacher": {"kind": "oracle"}}), scratch / "taught")


def cuts_of(corpus: Corpus, split: str) -> dict[tuple[str, str], Cuts]:
    """Distinct cuts of the released queries, 0 included, by trajectory and dialogue."""
    found: dict[tuple[str, str], Cuts] = collections.defaultdict(dict)
    for query in corpus.queries(split):
        strategies = frozenset(cut.strategy for cut in query.cuts)
        found[query.trajectory_id, query.dialogue][query.prefix_turns] = strategies
    return found


def chosen_blindly(row: TrajectoryRow) -> Cuts:
    """Distinct cuts that need no model, and the raw task."""
    blind = Trace(row.trajectory_id, row.n_turns, np.empty(0), np.empty(0, dtype=np.int64))
    chosen = {
        name: {cut.turns for cut in strategy.choose(blind)}
        for name, strategy in WITHOUT_QUERIES.items()
    }
    return {
        turns: frozenset(name for name, cuts in chosen.items() if turns in cuts)
        for turns in sorted({0}.union(*chosen.values()))
    }


def rows_with_cuts(
    corpus: Corpus, split: str, every: int, dialogue: str
) -> Iterator[tuple[TrajectoryRow, Cuts]]:
    """Trajectories of every so many tasks and the cuts that one dialogue has of each."""
    released = None
    if f"queries/{split}.parquet" in corpus.manifest.files:
        released = cuts_of(corpus, split)
    wanted = frozenset(corpus.manifest.splits[split][::every])
    for row in corpus.trajectories(split):
        if row.task_id in wanted:
            label = row.conversation(dialogue).dialogue
            cuts = chosen_blindly(row) if released is None else released[row.trajectory_id, label]
            yield row, cuts


# ------------------------------------------------------------------ replay
def recording_of(row: TrajectoryRow) -> Recording:
    actions = [turn.action for turn in row.turns]
    return Recording(row.task_id, json.loads(row.options), row.seed, actions, row.observations())


def play(env: TextEnv, recording: Recording, turn: int) -> str:
    action = recording.actions[turn]
    if action:
        return env.step(action)[0]
    return env.skip_turn(recording.observations[turn + 1])[0]


def from_the_start(
    env: TextEnv, recording: Recording, cuts: Sequence[int], *, restoring: bool = False
) -> list[CutCheck]:
    """Check every cut by a replay of its own."""
    found = []
    options = {**recording.options, "task_id": recording.task_id}
    for turns in cuts:
        seen = [env.reset(seed=recording.seed, options=options)[0]]
        seen += [play(env, recording, turn) for turn in range(turns)]
        status, detail = compare(env, seen[-1], recording.observations[turns])
        equal = all(map(operator.eq, seen, recording.observations))
        snapshot = env.snapshot() if restoring else None
        after, expected = play(env, recording, turns), recording.observations[turns + 1]
        if snapshot is not None:
            env.restore(snapshot)
            after = play(env, recording, turns)
        probe, behind = compare(env, after, expected)
        if probe == "mismatch" and status != "mismatch":
            status, detail = "mismatch", f"after the probe: {behind}"
        found.append(CutCheck(turns, status, equal, probe, after == expected, detail=detail))
    return found


def restoring_from_the_start(
    env: TextEnv, recording: Recording, cuts: Sequence[int]
) -> list[CutCheck]:
    return from_the_start(env, recording, cuts, restoring=True)


def one_pass_restoring(env: TextEnv, recording: Recording, cuts: Sequence[int]) -> list[CutCheck]:
    return check_cuts(env, recording, cuts, restore=True)


def measure_replay(name: str, env: TextEnv, jobs: Sequence[Job], passes: int) -> None:
    """Print one line."""
    ways = (check_cuts, from_the_start, one_pass_restoring, restoring_from_the_start)
    least = [[math.inf] * len(jobs) for _ in ways]
    for _ in range(passes):
        results = []
        for way, seconds in zip(ways, least, strict=True):
            gc.collect()
            results.append([])
            for index, (recording, cuts) in enumerate(jobs):
                begin = time.perf_counter()
                found = way(env, recording, cuts)
                seconds[index] = min(seconds[index], time.perf_counter() - begin)
                results[-1].append(found)
        if any(result != results[0] for result in results):
            sys.exit("one pass and replay from the start found different things")
    queries = sum(len(cuts) for _, cuts in jobs)
    rates = [queries / sum(seconds) for seconds in least]
    turns = sum(len(recording.actions) for recording, _ in jobs) / len(jobs)
    print(
        f"{name:34}{len(jobs):>7}{turns:>7.1f}{queries:>9}{rates[0]:>11.0f}{rates[1]:>11.0f}"
        f"{rates[0] / rates[1]:>8.2f} x{rates[2] / rates[3]:>12.2f} x"
    )


def replay(corpus: Corpus, split: str, arguments: argparse.Namespace) -> None:
    env = make(corpus.manifest.env_id, **corpus.manifest.arguments)
    chosen, every = [], []
    alone: dict[str, list[Job]] = collections.defaultdict(list)
    for row, cuts in rows_with_cuts(corpus, split, arguments.every, arguments.dialogue):
        recording = recording_of(row)
        chosen.append((recording, list(cuts)))
        every.append((recording, list(range(row.n_turns))))
        for name in sorted(frozenset().union(*cuts.values())):
            alone[name].append((recording, [k for k, names in cuts.items() if name in names]))
    print(
        f"{'replay, cuts':34}{'traj.':>7}{'turns':>7}{'queries':>9}{'one pass/s':>11}"
        f"{'start/s':>11}{'ratio':>10}{'if restored':>14}   (target: 3 x)"
    )
    for name, jobs in (("every turn", every), ("chosen by the strategies", chosen)):
        measure_replay(name, env, jobs, arguments.passes)
        if long := [job for job in jobs if len(job[0].actions) >= LONG]:
            measure_replay(f"  of {LONG} turns and more", env, long, arguments.passes)
    for name, jobs in sorted(alone.items()):
        measure_replay(f"  {name} alone", env, jobs, arguments.passes)


# ------------------------------------------------------------------ tokens
def tokens(corpus: Corpus, split: str, arguments: argparse.Namespace) -> float:
    """Print what is sent through the model in each way; how many times fewer in one pass."""
    from transformers import AutoTokenizer

    from agentbench_prefix import registry
    from agentbench_prefix.policies.tokens import find_checkpoint
    from agentbench_prefix.serialization import ChatSerializer

    model: Any = arguments.model
    if model in registry.method_names():
        model = registry.method(model).checkpoint(corpus.manifest.env_id)
    serializer = ChatSerializer(AutoTokenizer.from_pretrained(find_checkpoint(model, None).folder))
    one_pass = by_query = queries = 0
    for row, cuts in rows_with_cuts(corpus, split, arguments.every, arguments.dialogue):
        layout = serializer.lay_out(to_messages(row.conversation(arguments.dialogue).messages))
        one_pass += len(layout.ids)
        prefixes = [turns for turns in cuts if turns]  # a raw query has nothing to score
        by_query += sum(layout.replies[turns][0] for turns in prefixes)
        queries += len(prefixes)
    print(
        f"tokens for {queries} prefix queries: {one_pass} in one pass a trajectory, entropies "
        f"included\n  one pass a query: {by_query}, {by_query / one_pass:.2f} x "
        f"(target: {arguments.fewer:g} x)\n  and one for the entropies: {by_query + one_pass}, "
        f"{by_query / one_pass + 1:.2f} x"
    )
    return by_query / one_pass


# ------------------------------------------------------------------ memory
def peak_mib() -> float:
    """Peak resident memory of this process in MiB."""
    # Linux hands ru_maxrss down from the parent; the high-water mark is the program's own.
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) / 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def build_in_this_process(source: Path, out: Path, every: int, dialogue: str, model: str) -> None:
    """Build one task out of so many: small and large corpora are of the same mix of tasks."""
    corpus = Corpus.open(source)
    env_class = type(make(corpus.manifest.env_id))
    recipe = make_recipe(
        {
            **corpus.manifest.recipe,
            "name": out.name,
            "tasks": None,
            "dialogues": [dialogue],
            "strategies": {
                "change": {"kind": "entropy_change"},
                "every": {"kind": "every_turn"},
            },
            "models": [{"dialogue": dialogue, "model": model}],
        }
    )
    tasks = {
        recipe.splits[split]: tuple(ids[::every]) for split, ids in corpus.manifest.splits.items()
    }
    with mock.patch.object(env_class, "tasks", lambda _, split: tasks[split]):
        build(recipe, out, trajectories=corpus)


def read_in_this_process(folder: Path) -> None:
    for name in Corpus.open(folder).manifest.files:
        if name.endswith(".parquet"):
            collections.deque(read_rows(folder / name, name.partition("/")[0]), maxlen=0)


def in_a_process(*call: str) -> float:
    done = subprocess.run(
        [sys.executable, __file__, "--alone", *call], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)
    return float(done.stdout.split()[-1])


def memory(corpus: Corpus, split: str, arguments: argparse.Namespace, scratch: Path) -> bool:
    """Print peaks; whether they stay the same."""
    print(f"{'memory, peak MiB':20}{'queries':>9}{'building':>10}{'reading':>10}")
    peaks = []
    for every in (10 * arguments.every, arguments.every):
        out = scratch / f"every-{every}"
        what = (str(corpus.folder), str(out), str(every), arguments.dialogue, arguments.model)
        peaks.append((in_a_process("build", *what), in_a_process("read", str(out))))
        rows = Corpus.open(out).manifest.files[f"queries/{split}.parquet"].rows
        print(f"{'':20}{rows:>9}{peaks[-1][0]:>10.1f}{peaks[-1][1]:>10.1f}", flush=True)
    growth = [100 * (more / less - 1) for less, more in zip(*peaks, strict=True)]
    print(
        f"growth: {growth[0]:+.1f} % building, {growth[1]:+.1f} % reading "
        f"(allowed: {arguments.allow:g} %)"
    )
    return max(growth) <= arguments.allow


def main() -> None:
    if sys.argv[1:3] == ["--alone", "build"]:
        source, out, every, dialogue, model = sys.argv[3:]
        build_in_this_process(Path(source), Path(out), int(every), dialogue, model)
        print(peak_mib())
        return
    if sys.argv[1:3] == ["--alone", "read"]:
        read_in_this_process(Path(sys.argv[3]))
        print(peak_mib())
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--corpus", default="textcraft-prefix", help="name, folder or Hub id")
    parser.add_argument("--env", default="TextCraft-v0", help="taught if there is no such corpus")
    parser.add_argument("--dialogue", default="compact")
    parser.add_argument("--model", default="base", help="method, folder or Hub id")
    parser.add_argument("--every", type=int, default=1, help="take one task out of so many")
    parser.add_argument("--passes", type=int, default=7)
    parser.add_argument("--fewer", type=float, default=2.5)
    parser.add_argument("--allow", type=float, default=20.0, metavar="PERCENT")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        corpus = find_trajectories(arguments.corpus, arguments.env, scratch)
        split = corpus.splits[0]
        if "replay" in arguments.only:
            replay(corpus, split, arguments)
        if "tokens" in arguments.only and tokens(corpus, split, arguments) < arguments.fewer:
            sys.exit(f"one pass saves less than {arguments.fewer:g} times the tokens")
        if "memory" in arguments.only and not memory(corpus, split, arguments, scratch):
            sys.exit("memory grows with the size of the corpus")


if __name__ == "__main__":
    main()
