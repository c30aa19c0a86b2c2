"""The methods of reinforcement learning, as they are registered.

Each names the class that is its own; listing them imports none, nor torch.
"""

from __future__ import annotations

from pathlib import Path

from agentbench_prefix.training.rl_method import ReinforcementMethod


def _method(name: str, objective: str, summary: str) -> ReinforcementMethod:
    return ReinforcementMethod(
        name=name,
        summary=summary,
        folder=Path(__file__).parent,
        objective=f"{__package__}.{name}:{objective}",
    )


GRPO = _method("grpo", "GRPO", "group-relative policy optimization on raw tasks")
GRPO_MIS = _method(
    "grpo_mis", "MIS", "GRPO with masked importance sampling between trainer and rollout engine"
)
DAPO = _method("dapo", "DAPO", "GRPO that clips higher; dynamic sampling, overlong penalty")
REPLAY_GRPO = _method(
    "replay_grpo", "ReplayGRPO", "GRPO that also starts from states a teacher passed through"
)
PREFIX_GRPO = _method(
    "prefix_grpo", "PrefixGRPO", "Replay-GRPO that also learns the teacher's turns before the cut"
)
TRIAL = _method("trial", "Trial", "GRPO and a dense term from each turn's outcome in hindsight")
ADAPREFIX = _method(
    "adaprefix", "AdaPrefix", "GRPO from replayed prefixes whose length a controller steers"
)
