"""Replay validation: does a recorded trajectory lead to the same states again?

The trajectory's actions are played in a freshly reset environment, and what comes back is compared
with what was recorded, on the structured fields that both observations have
(:meth:`TextEnv.fields`). A cut is validated where its observation agrees, and where the one-step
probe, the action that followed it, leads to an observation that does not disagree (Prefix-GRPO
section 6.2).

All cuts of a trajectory are checked in one pass, in which each cut's probe is the next cut's last
action. On request a snapshot is taken at each cut and its probe played from there once the pass is
over, which proves that the snapshot restores.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from agentbench_prefix.env import JSON, Snapshot, TextEnv
from agentbench_prefix.errors import AgentBenchError

Status = Literal["validated", "mismatch", "unverifiable", "error"]

_FAILURES = (AgentBenchError, TypeError, ValueError)


@dataclasses.dataclass(frozen=True)
class Recording:
    """What is replayed.

    Attributes:
        task_id: Task.
        options: Reset options that change the task.
        seed: Seed of the episode.
        actions: One per turn; an empty one stands for a turn without an action.
        observations: The first observation, then that of every turn: one more than ``actions``.
    """

    task_id: str
    options: Mapping[str, JSON]
    seed: int
    actions: Sequence[str]
    observations: Sequence[str]

    def __post_init__(self) -> None:
        if len(self.observations) != len(self.actions) + 1:
            raise ValueError(
                f"{len(self.actions)} actions need {len(self.actions) + 1} observations, got "
                f"{len(self.observations)}"
            )


class CutCheck(NamedTuple):
    """What replaying one cut showed.

    Attributes:
        turns: Turns before the cut.
        status: ``"validated"``; ``"mismatch"`` (a shared field differs at the cut or after the
            probe); ``"unverifiable"`` (the observation at the cut shares no field with the recorded
            one); ``"error"`` (the replay could not be carried out).
        bytes_equal: Whether all observations up to the cut equal the recorded ones.
        probe: Status of the probe's observation alone.
        probe_bytes_equal: Whether the probe's observation equals the recorded one.
        ended: Whether the replay ended the episode at the cut: nothing is left to play.
        detail: What differs, for people.
    """

    turns: int
    status: Status
    bytes_equal: bool
    probe: Status
    probe_bytes_equal: bool
    ended: bool = False
    detail: str = ""

    @property
    def kept(self) -> bool:
        """Whether the cut becomes a query: it is validated, and there is something left to play."""
        return self.status == "validated" and not self.ended

    @property
    def mark(self) -> str:
        """What the cut is counted as: its status, or ``"ended"``."""
        return "ended" if self.ended else self.status


def compare(env: TextEnv, replayed: str, recorded: str) -> tuple[Status, str]:
    """Compare two observations on the fields they share.

    Returns:
        The status, and the fields that differ.
    """
    theirs = env.fields(recorded)
    mine = theirs if replayed == recorded else env.fields(replayed)
    shared = sorted(mine.keys() & theirs.keys())
    if not shared:
        return "unverifiable", "no shared field"
    differing = [name for name in shared if mine[name] != theirs[name]]
    if differing:
        return "mismatch", f"field {', '.join(differing)} differs"
    return "validated", ""


def check_cuts(
    env: TextEnv, recording: Recording, cuts: Sequence[int], *, restore: bool = False
) -> list[CutCheck]:
    """Replay a trajectory once and check its cuts.

    Args:
        env: An unwrapped environment of the recording's; it is reset.
        recording: The trajectory.
        cuts: Turns before each cut: 0 (the raw task) to the number of actions less one.
        restore: Prove snapshots, too: take one at each cut, restore it after the replay, and play
            the probe from there. Otherwise a cut's probe is the replay's own next turn.

    Returns:
        One check per cut, in the order given.
    """
    for turns in cuts:
        if not 0 <= turns < len(recording.actions):
            raise ValueError(
                f"a cut must leave at least one of {len(recording.actions)} turns, got {turns}"
            )
    last = max(cuts, default=0)
    wanted = frozenset(cuts)
    snapshots: dict[int, Snapshot] = {}
    seen: list[str] = []
    ended: int | None = None
    try:
        observation, _ = env.reset(
            seed=recording.seed, options={**recording.options, "task_id": recording.task_id}
        )
        seen.append(observation)
        for turn in range(last + 1 if cuts else 0):
            if restore and turn in wanted:
                snapshots[turn] = env.snapshot()
            if env.ended:
                ended = turn
                break
            if turn < last or not restore:
                seen.append(_play(env, recording, turn))
        detail = f"the episode ended after {len(seen) - 1} turns"
    except _FAILURES as error:
        detail = f"{type(error).__name__}: {error}"
    recorded = recording.observations
    equal = list(itertools.accumulate(map(operator.eq, seen, recorded), operator.and_))

    @functools.cache  # what one cut's probe shows, the next cut most often shows, too
    def compared(turns: int, replayed: str) -> tuple[Status, str]:
        return compare(env, replayed, recorded[turns])

    def check(turns: int) -> CutCheck:
        # What failed on the way concerns the cuts behind it alone.
        if turns >= len(seen):
            return _failed(turns, detail)
        status, difference = compared(turns, seen[turns])
        if turns == ended:
            return CutCheck(
                turns, status, equal[turns], "error", False, ended=True, detail="episode ended"
            )
        if not restore:
            if turns + 1 >= len(seen):
                return _failed(turns, detail)
            after = seen[turns + 1]
        elif turns not in snapshots:
            return _failed(turns, detail)
        else:
            try:
                env.restore(snapshots[turns])
                after = _play(env, recording, turns)
            except _FAILURES as error:
                return _failed(turns, f"{type(error).__name__}: {error}")
        probe, behind = compared(turns + 1, after)
        if probe == "mismatch" and status != "mismatch":
            status, difference = "mismatch", f"after the probe: {behind}"
        return CutCheck(
            turns, status, equal[turns], probe, after == recorded[turns + 1], detail=difference
        )

    return [check(turns) for turns in cuts]


def _failed(turns: int, detail: str) -> CutCheck:
    return CutCheck(turns, "error", False, "error", False, detail=detail)


def _play(env: TextEnv, recording: Recording, turn: int) -> str:
    """Play one recorded turn; a turn without an action is answered as it was."""
    action = recording.actions[turn]
    if action:
        return env.step(action)[0]
    return env.skip_turn(recording.observations[turn + 1])[0]
