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
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from agentbench_prefix.env import JSON, Snapshot, TextEnv

Status = Literal["validated", "mismatch", "unverifiable", "error"]

_VALIDATED: tuple[Status, str] = ("validated", "")
_NOTHING: tuple[Status, str] = ("unverifiable", "no shared field")


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
    if replayed == recorded:
        return _VALIDATED if theirs else _NOTHING
    mine = env.fields(replayed)
    shared = sorted(mine.keys() & theirs.keys())
    if not shared:
        return _NOTHING
    differing = [name for name in shared if mine[name] != theirs[name]]
    if differing:
        return "mismatch", f"field {', '.join(differing)} differs"
    return _VALIDATED


def check_cuts(
    env: TextEnv, recording: Recording, cuts: Sequence[int], *, restore: bool = False
) -> list[CutCheck]:
    """Replay a trajectory once and check its cuts.

    Whatever the environment raises is a cut's status ``"error"``, with the exception in its detail.

    Args:
        env: An unwrapped environment of the recording's; it is reset.
        recording: The trajectory.
        cuts: Turns before each cut: 0 (the raw task) to the number of actions less one.
        restore: Prove snapshots, too: take one at each cut, restore it after the replay, and play
            the probe from there. Otherwise a cut's probe is the replay's own next turn.

    Returns:
        One check per cut, in the order given.

    Raises:
        ValueError: A cut leaves no turn to play.
    """
    first, last = min(cuts, default=0), max(cuts, default=-1)
    if first < 0 or last >= len(recording.actions):
        raise ValueError(
            f"a cut must leave at least one of {len(recording.actions)} turns, got "
            f"{first if first < 0 else last}"
        )
    snapped = frozenset(cuts) if restore else frozenset()
    seen, ended, snapshots, broken = _replay(env, recording, last, snapped)
    recorded = recording.observations
    came = equal = len(seen)
    if seen != list(recorded[:came]):
        equal = next(turn for turn in range(came) if seen[turn] != recorded[turn])
    # What compare says of each turn: a cut's probe is often the next cut. Most texts are equal, and
    # then only whether they show anything is asked, here: a call for each would cost as much.
    known: list[tuple[Status, str] | None] = [None] * came
    probed: tuple[Status, str] | None
    checks = []
    for turns in cuts:
        behind = turns + 1
        # What failed on the way concerns the cuts behind it alone.
        if turns >= came or (behind >= came and turns != ended and turns not in snapshots):
            checks.append(_failed(turns, broken))
            continue
        try:
            at = known[turns]
            if at is None:
                if turns < equal:
                    at = _VALIDATED if env.fields(recorded[turns]) else _NOTHING
                else:
                    at = compare(env, seen[turns], recorded[turns])
                known[turns] = at
            if turns == ended:
                checks.append(
                    CutCheck(turns, at[0], turns < equal, "error", False, True, "episode ended")
                )
                continue
            if turns in snapshots:
                env.restore(snapshots[turns])
                after = _play(env, recording, turns)[0]
                same = after == recorded[behind]
                probed = compare(env, after, recorded[behind])
            else:
                same = behind < equal or seen[behind] == recorded[behind]
                probed = known[behind]
                if probed is None:
                    if behind < equal:
                        probed = _VALIDATED if env.fields(recorded[behind]) else _NOTHING
                    else:
                        probed = compare(env, seen[behind], recorded[behind])
                    known[behind] = probed
        except Exception as error:  # noqa: BLE001 - an environment may raise anything
            checks.append(_failed(turns, _told(error)))
            continue
        status, detail = at
        probe, differs = probed
        if probe == "mismatch" and status != "mismatch":
            status, detail = "mismatch", f"after the probe: {differs}"
        checks.append(CutCheck(turns, status, turns < equal, probe, same, False, detail))
    return checks


def _replay(
    env: TextEnv, recording: Recording, last: int, snapped: frozenset[int]
) -> tuple[list[str], int | None, dict[int, Snapshot], str]:
    """Reset and play up to the last cut, and its probe if there are no snapshots to play it from.

    Args:
        env: The environment.
        recording: What to play.
        last: Turns before the last cut, -1 if there is none.
        snapped: Turns before which to take a snapshot.

    Returns:
        The first observation and that of every turn, as far as the replay came; the turn at which
        the episode had ended, if it had; the snapshots; and why there is no more.
    """
    seen: list[str] = []
    snapshots: dict[int, Snapshot] = {}
    try:
        options = {**recording.options, "task_id": recording.task_id}
        seen.append(env.reset(seed=recording.seed, options=options)[0])
        ended = False
        for turn in range(last + 1):
            if snapped and turn in snapped:
                snapshots[turn] = env.snapshot()
            if ended:
                return seen, turn, snapshots, f"the episode ended after {turn} turns"
            if not snapped or turn < last:
                observation, _, terminated, truncated, _ = _play(env, recording, turn)
                seen.append(observation)
                ended = terminated or truncated
    except Exception as error:  # noqa: BLE001 - an environment may raise anything
        return seen, None, snapshots, _told(error)
    return seen, None, snapshots, ""


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _failed(turns: int, detail: str) -> CutCheck:
    return CutCheck(turns, "error", False, "error", False, detail=detail)


def _play(
    env: TextEnv, recording: Recording, turn: int
) -> tuple[str, float, bool, bool, dict[str, Any]]:
    """Play one recorded turn; a turn without an action is answered as it was."""
    action = recording.actions[turn]
    return env.step(action) if action else env.skip_turn(recording.observations[turn + 1])
