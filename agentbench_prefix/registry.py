"""Finds environments and methods through entry points, so that third parties add their own.

Groups: ``agentbench_prefix.environments`` (name = Gymnasium id, value = the ``TextEnv`` class) and
``agentbench_prefix.methods`` (name = method, value = a :class:`Method`).
"""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Protocol, cast

import gymnasium as gym

from agentbench_prefix.env import TextEnv
from agentbench_prefix.errors import (
    AgentBenchError,
    ConfigurationError,
    EntryPointError,
    UnknownNameError,
)

ENVIRONMENTS_GROUP = "agentbench_prefix.environments"
METHODS_GROUP = "agentbench_prefix.methods"


class Method(Protocol):
    """A baseline: how it is trained, and the checkpoints it ships."""

    name: str
    summary: str
    """One line for ``agentbench-prefix list``."""

    def checkpoint(self, env_id: str) -> Path | None:
        """Folder of the checkpoint shipped for an environment, if there is one."""

    def plan(self, env_id: str, **arguments: Any) -> str:
        """What :meth:`train` would do with these arguments, as text."""

    def train(self, env_id: str, **arguments: Any) -> Path:
        """Train on an environment and return the checkpoint's folder."""


def _load(kind: str, group: str, name: str) -> Any:
    points = _entry_points(group)
    if name not in points:
        raise UnknownNameError(kind, name, points)
    try:
        return points[name].load()
    except (ImportError, AttributeError) as error:
        raise EntryPointError(kind, points[name], error) from error


def _entry_points(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in sorted(entry_points(group=group), key=lambda p: p.name)}


@functools.cache
def environment_ids() -> tuple[str, ...]:
    """Ids of every registered environment."""
    return tuple(_entry_points(ENVIRONMENTS_GROUP))


def environment_class(env_id: str) -> type[TextEnv]:
    """Import the class behind an environment id.

    Raises:
        UnknownNameError: No such environment.
        EntryPointError: It cannot be imported.
    """
    return cast("type[TextEnv]", _load("environment", ENVIRONMENTS_GROUP, env_id))


def make(env_id: str, **arguments: Any) -> TextEnv:
    """``gym.make(env_id, ...).unwrapped``, typed.

    Raises:
        UnknownNameError: No such environment.
        EntryPointError: It cannot be imported.
        ConfigurationError: It does not take these arguments.
    """
    environment_class(env_id)
    try:
        return cast("TextEnv", gym.make(env_id, **arguments).unwrapped)
    except AgentBenchError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{env_id} cannot be made with the arguments {arguments}: {error}"
        ) from error


def register_environments() -> None:
    """Register every environment with Gymnasium, without importing its module."""
    for name, point in _entry_points(ENVIRONMENTS_GROUP).items():
        if name not in gym.registry:
            # The turn limit lives in the environment: prefix turns must count toward it.
            gym.register(id=name, entry_point=point.value, max_episode_steps=None)


def method_names() -> tuple[str, ...]:
    """Names of every registered method, without importing any."""
    return tuple(_entry_points(METHODS_GROUP))


def method(name: str) -> Method:
    """Look a method up.

    Raises:
        UnknownNameError: No such method.
        EntryPointError: It cannot be imported.
    """
    return cast("Method", _load("method", METHODS_GROUP, name))
