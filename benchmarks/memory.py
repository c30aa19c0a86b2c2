"""Memory over a long life of one environment: it must stay flat.

Plays candidate actions on tasks of every split, on generated tasks and under the environment's own
options, each new to the process, takes and restores snapshots on the way, and prints the resident
memory at intervals. The first fifth is warm-up, in which bounded caches fill. Fails if more than
``--allow`` MiB come on top of it afterwards.

    python benchmarks/memory.py --env TextCraft-v0
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentbench_prefix import TextEnv, make
from agentbench_prefix.testing.play import generated_tasks


def resident_mib() -> float:
    """Resident memory of this process in MiB; its peak where the system tells no more."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def starts(env: TextEnv) -> Iterator[dict[str, Any]]:
    """Reset options without end, most of them never seen before."""
    known = [task for split in env.splits() for task in env.tasks(split)]
    for number in itertools.count():
        yield {"task_id": known[number % len(known)]}
        for task in generated_tasks(env, number, 1):
            yield {"task_id": task}
        for option in sorted(env.task_options):
            if option.endswith("_seed"):
                yield {"task_id": known[number % len(known)], option: number}


def soak(env: TextEnv, steps: int, resets: int) -> Iterator[tuple[int, int]]:
    """Play; yields ``(steps, resets)`` done so far after every episode."""
    rng = random.Random(0)
    done = 0
    for episodes, options in enumerate(starts(env), 1):
        env.reset(seed=episodes, options=options)
        snapshot = env.snapshot()
        # So many turns an episode that steps and resets run out together.
        for turn in range(max(1, round((steps - done) / max(1, resets - episodes + 1)))):
            if turn % 25 == 0:
                candidates = env.candidate_actions()
            if env.ended:
                env.restore(snapshot)
            env.step(rng.choice(candidates))
            done += 1
            if turn % 10 == 5:
                snapshot = env.snapshot()
                if snapshot.ended:
                    break
        yield done, episodes
        if episodes >= resets and done >= steps:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="TextCraft-v0")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--resets", type=int, default=20_000)
    parser.add_argument("--allow", type=float, default=8.0, metavar="MIB", help="growth allowed")
    arguments = parser.parse_args()

    env = make(arguments.env)
    shown, base, warm = 0, 0.0, arguments.resets // 5
    print(f"{'steps':>10}{'resets':>10}{'resident MiB':>14}")
    for done, episodes in soak(env, arguments.steps, arguments.resets):
        if episodes == warm:
            base = resident_mib()
        if episodes * 20 >= arguments.resets * (shown + 1):
            shown += 1
            print(f"{done:>10}{episodes:>10}{resident_mib():>14.1f}", flush=True)
    growth = resident_mib() - base
    print(f"growth after the first fifth: {growth:.1f} MiB (allowed: {arguments.allow:g})")
    if growth > arguments.allow:
        sys.exit(f"{arguments.env} keeps memory: something grows with steps or resets")


if __name__ == "__main__":
    main()
