"""Benchmark suite for small language models that act over many turns from a teacher's trajectories.

Importing this package registers every environment with Gymnasium::

    import gymnasium as gym
    import agentbench_prefix

    env = gym.make("TextCraft-v0")
"""

from importlib.metadata import PackageNotFoundError, version

from agentbench_prefix.dialogue import Dialogue, Message, ParsedReply
from agentbench_prefix.env import Outcome, PlayedTurn, Snapshot, TeacherTurn, TextEnv
from agentbench_prefix.registry import environment_ids, make, register_environments
from agentbench_prefix.spaces import UnicodeText

try:
    __version__ = version("agentbench-prefix")
except PackageNotFoundError:  # the sources were put on sys.path without being installed
    __version__ = "0+unknown"

register_environments()

__all__ = [
    "Dialogue",
    "Message",
    "Outcome",
    "ParsedReply",
    "PlayedTurn",
    "Snapshot",
    "TeacherTurn",
    "TextEnv",
    "UnicodeText",
    "__version__",
    "environment_ids",
    "make",
]
