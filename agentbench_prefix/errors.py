"""Exceptions of the library. Every message names the thing, what was expected, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint


class AgentBenchError(Exception):
    """Base class of every error this library raises on purpose."""


class UnknownNameError(AgentBenchError, ValueError):
    """A name (task, split, option, method, dialogue ...) that does not exist.

    Args:
        kind: What was looked up, e.g. ``"split"``.
        name: What was asked for.
        choices: The valid names; at most 20 are printed.
        hint: What to do about it.
    """

    def __init__(self, kind: str, name: object, choices: Iterable[str], hint: str = "") -> None:
        valid = list(choices)
        shown = ", ".join(valid[:20]) + (f", ... ({len(valid)} in all)" if len(valid) > 20 else "")
        message = f"unknown {kind} {name!r}; valid: {shown or 'none'}"
        super().__init__(f"{message}. {hint}" if hint else message)


class EnvironmentUsageError(AgentBenchError, RuntimeError):
    """An environment was used out of order, e.g. stepped before a reset or after the end."""


class SnapshotError(AgentBenchError, ValueError):
    """A snapshot does not belong to the environment it is restored into."""


class PrefixError(AgentBenchError, ValueError):
    """A list of prefix actions cannot be replayed, e.g. the episode ends inside it."""


class ConfigurationError(AgentBenchError, ValueError):
    """A configuration contradicts itself or what is on disk."""


class CheckpointError(AgentBenchError):
    """A checkpoint is missing, incomplete or does not fit."""


class CorpusError(AgentBenchError, ValueError):
    """A corpus is damaged, incomplete or contradicts itself.

    Args:
        what: What is wrong, what was expected, and what to do.
        file: Path of the file within the corpus.
        row: Index of the row in that file, from 0.
        field: Column, with the way into it, e.g. ``"messages.3.content"``.
    """

    def __init__(
        self, what: str, *, file: str = "", row: int | None = None, field: str = ""
    ) -> None:
        place = [file] if file else []
        place += [f"row {row}"] if row is not None else []
        place += [f"field {field}"] if field else []
        super().__init__(f"{', '.join(place)}: {what}" if place else what)
        self.what = what
        self.file = file
        self.row = row
        self.field = field


class MissingExtraError(AgentBenchError, ImportError):
    """An optional dependency is not installed.

    Args:
        feature: What was asked for.
        extra: The extra of this distribution that provides it.
    """

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs the extra [{extra}], which is not installed: "
            f"run pip install 'agentbench-prefix[{extra}]'"
        )


class EntryPointError(AgentBenchError, ImportError):
    """An environment or a method is registered, but cannot be imported.

    Args:
        kind: ``"environment"`` or ``"method"``.
        point: Its entry point.
        cause: What importing it raised.
    """

    def __init__(self, kind: str, point: EntryPoint, cause: Exception) -> None:
        owner = "an unknown distribution" if point.dist is None else point.dist.name
        super().__init__(
            f"{kind} {point.name!r} of {owner} cannot be imported from {point.value} ({cause}): "
            f"install what is missing, or uninstall {owner}"
        )


class PolicyError(AgentBenchError):
    """A policy could not produce a reply; the episode is recorded as an error."""


class ContextLimitError(PolicyError):
    """The conversation outgrew the model's context: the episode ends unsolved, not in error."""


class EndpointError(PolicyError):
    """A model endpoint could not be reached or kept refusing."""
