"""The forty levels of BabyAI, in AgentGym's order, and what a task id says about them."""

from __future__ import annotations

import re

from agentbench_prefix.errors import UnknownNameError

LEVELS: tuple[str, ...] = (
    "GoToRedBallGrey",
    "GoToRedBall",
    "GoToRedBallNoDists",
    "GoToObjS6",
    "GoToLocalS8N7",
    "GoToObjMazeS7",
    "GoToImpUnlock",
    "GoToSeqS5R2",
    "GoToRedBlueBall",
    "GoToDoor",
    "GoToObjDoor",
    "Open",
    "OpenRedDoor",
    "OpenDoorLoc",
    "OpenRedBlueDoorsDebug",
    "OpenDoorsOrderN4Debug",
    "Pickup",
    "UnblockPickup",
    "PickupLoc",
    "PickupDistDebug",
    "PickupAbove",
    "PutNextLocalS6N4",
    "PutNextS7N4Carrying",
    "Unlock",
    "UnlockLocalDist",
    "KeyInBox",
    "UnlockPickupDist",
    "BlockedUnlockPickup",
    "UnlockToUnlock",
    "ActionObjDoor",
    "FindObjS7",
    "KeyCorridorS6R3",
    "OneRoomS20",
    "MoveTwoAcrossS8N9",
    "SynthS5R2",
    "SynthLoc",
    "SynthSeq",
    "MiniBossLevel",
    "BossLevel",
    "BossLevelNoUnlock",
)
"""Names of the levels; level ``n`` of a task is ``LEVELS[n - 1]``."""

FAMILIES: dict[str, tuple[int, ...]] = {
    "goto": tuple(range(1, 12)),
    "open": tuple(range(12, 17)),
    "pickup": tuple(range(17, 22)),
    "put_next": (22, 23),
    "unlock": tuple(range(24, 30)),
    "aod": (30,),
    "find_room": (31,),
    "key_corridor": (32,),
    "one_room": (33,),
    "move_two_across": (34,),
    "sloc": (36,),
    "synth": (35, 37),
    "boss": (38, 39, 40),
}
"""Levels of each family.

Prefix-GRPO reports GoTo, Pickup, AOD, Find Room and SLoc without listing their levels; which
levels these are is inferred from the names. The other families are ours.
"""
REPORTED: tuple[str, ...] = ("goto", "pickup", "aod", "find_room", "sloc")
"""The families that Prefix-GRPO reports."""

_FAMILY_OF = {level: family for family, levels in FAMILIES.items() for level in levels}
# Python refuses to read longer numbers, and minigrid needs none of them.
_TASK_ID = re.compile(r"babyai_(0|[1-9][0-9]{0,29})")


def task_id(level: int, seed: int) -> str:
    """Id of the task that plays a level from a seed.

    Args:
        level: 1 to 40.
        seed: 0 or more.
    """
    return f"babyai_{len(LEVELS) * seed + level - 1}"


def level_and_seed(task: str) -> tuple[int, int]:
    """Inverse of :func:`task_id`.

    Raises:
        UnknownNameError: It is no task id.
    """
    found = _TASK_ID.fullmatch(task)
    if found is None:
        raise UnknownNameError(
            "task_id",
            task,
            ["babyai_0", "babyai_1", "babyai_2"],
            "Tasks are babyai_<index> with level = index % 40 + 1 and seed = index // 40.",
        )
    seed, place = divmod(int(found[1]), len(LEVELS))
    return place + 1, seed


def family_of(level: int) -> str:
    """Family of a level, 1 to 40."""
    return _FAMILY_OF[level]
