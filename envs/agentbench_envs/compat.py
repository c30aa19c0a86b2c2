"""What the environments share that play AgentGym's rules on request."""

from __future__ import annotations

from types import EllipsisType

from agentbench_prefix.errors import UnknownNameError


def turn_limit(
    compat: str | None, max_turns: int | EllipsisType | None
) -> int | EllipsisType | None:
    """The turn limit under a mode of compatibility: AgentGym's rules have none.

    Args:
        compat: ``None`` or ``"agentgym"``.
        max_turns: What was asked for; ``...`` is the environment's own.

    Raises:
        UnknownNameError: There is no such mode.
        ValueError: A limit was asked for that the mode does not have.
    """
    if compat not in (None, "agentgym"):
        raise UnknownNameError("compat", compat, ["agentgym"], "None plays the mended rules.")
    if compat is None:
        return max_turns
    if max_turns is ... or max_turns is None:
        return None
    raise ValueError(f"compat='agentgym' has no turn limit: leave out max_turns={max_turns}")
