"""Episodes that start in a recorded state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentbench_prefix.dialogue import Dialogue
from agentbench_prefix.env import TextEnv
from agentbench_prefix.errors import ConfigurationError
from agentbench_prefix.evaluation.runner import find_dialogue
from agentbench_prefix.registry import make


def start_recorded(
    env_id: str,
    arguments: Mapping[str, Any],
    dialogue: str,
    *,
    name: str,
    options: Mapping[str, Any],
    seed: int,
    observation: str,
    data_hash: str | None = None,
) -> tuple[TextEnv, Dialogue]:
    """Make an environment and put it into a recorded state.

    Args:
        env_id: Environment.
        arguments: Its arguments.
        dialogue: Label of the dialogue it was recorded in.
        name: What errors call the recording.
        options: Reset options, ``prefix_actions`` among them.
        seed: Seed of the reset.
        observation: What the reset has to give. After a turn without an action it is not compared:
            there the dialogue answered.
        data_hash: Hash of the data it was recorded on; ``None`` where the corpus' was compared.

    Raises:
        ConfigurationError: The data are others here, the dialogue has another version, or the state
            is another.
    """
    env = make(env_id, **arguments)
    if data_hash not in (None, env.data_hash):
        raise ConfigurationError(
            f"{name!r} was recorded on data with the hash {data_hash}, {env_id} has "
            f"{env.data_hash} here: use a corpus of this version"
        )
    found = find_dialogue(env, dialogue.partition("@")[0])
    if found.label != dialogue:
        raise ConfigurationError(
            f"{name!r} was written in {dialogue}, this version has {found.label}: use a corpus of "
            "this version"
        )
    replayed, _ = env.reset(seed=seed, options=dict(options))
    if replayed != observation and (options.get("prefix_actions") or [""])[-1]:
        raise ConfigurationError(
            f"{name!r} replays to {replayed!r:.80}, expected {observation!r:.80}: run "
            "`agentbench-prefix corpus validate`"
        )
    return env, found
