"""Policies without a model: the environment's teacher, chance, and a person at the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentbench_prefix.env import JSON, Snapshot
from agentbench_prefix.errors import ConfigurationError, PolicyError
from agentbench_prefix.policies.base import Episode, Reply, reply_seed


class _ScriptedSession:
    """Replies with one function of the episode."""

    def __init__(self, choose: Callable[[Episode], Reply]) -> None:
        self._choose = choose

    def reply(self, episodes: Sequence[Episode]) -> list[Reply | PolicyError]:
        """One reply per episode, in order."""
        return [self._choose(episode) for episode in episodes]

    def close(self) -> None:
        """There is nothing to free."""


def _write(episode: Episode, action: str, thought: str = "") -> Reply:
    return Reply(episode.dialogue.render(action, thought))


def _key(episode: Episode) -> tuple[str, int]:
    return episode.task_id, episode.sample


class OraclePolicy:
    """Plays what the environment's teacher plays, without detours."""

    def describe(self) -> Mapping[str, JSON]:
        """The oracle has no settings."""
        return {"kind": "oracle"}

    def open(self, episodes: Sequence[Episode]) -> _ScriptedSession:
        """Start a session: one teacher per episode.

        Raises:
            ConfigurationError: The environment has no teacher.
        """
        try:
            teachers = {_key(episode): episode.env.teacher() for episode in episodes}
        except NotImplementedError as error:
            raise ConfigurationError(f"the oracle cannot play: {error}") from error

        def choose(episode: Episode) -> Reply:
            turn = teachers[_key(episode)].next_turn()
            return _write(episode, turn.action, turn.thought)

        return _ScriptedSession(choose)


class RandomPolicy:
    """Picks uniformly among the environment's candidate actions, seeded by the episode."""

    def describe(self) -> Mapping[str, JSON]:
        """Its only setting is the run's seed, which the configuration holds."""
        return {"kind": "random"}

    def open(self, episodes: Sequence[Episode]) -> _ScriptedSession:  # noqa: ARG002
        """Start a session; it keeps nothing between turns."""
        return _ScriptedSession(_random_reply)


def _random_reply(episode: Episode) -> Reply:
    try:
        actions = episode.env.candidate_actions()
    except NotImplementedError as error:
        raise ConfigurationError(f"the random policy cannot play: {error}") from error
    if not actions:
        return _write(episode, "")
    rng = np.random.default_rng(reply_seed(episode))
    return _write(episode, actions[int(rng.integers(len(actions)))])


class PlayerQuit(PolicyError):
    """The person at the terminal left the game."""


class HumanPolicy:
    """A person at the terminal.

    Besides replies the person may write ``:undo`` (take the last turn back; the environment is
    restored from a snapshot), ``:help`` and ``:quit``.

    Args:
        console: Where to read and print.
        verbatim: Whether a line is the whole reply, as a model would write it in the dialogue.
            By default a line is an action and the dialogue's form is added.
    """

    def __init__(self, console: Console, *, verbatim: bool = False) -> None:
        self.console = console
        self.verbatim = verbatim

    def describe(self) -> Mapping[str, JSON]:
        """People have no settings."""
        return {"kind": "human"}

    def open(self, episodes: Sequence[Episode]) -> _HumanSession:  # noqa: ARG002
        """Start a session over one or more episodes, played one turn each in rotation."""
        return _HumanSession(self.console, verbatim=self.verbatim)


class _HumanSession:
    def __init__(self, console: Console, *, verbatim: bool) -> None:
        self.console = console
        self.verbatim = verbatim
        self.history: dict[tuple[str, int], list[tuple[Snapshot, int]]] = {}

    def reply(self, episodes: Sequence[Episode]) -> list[Reply | PolicyError]:
        """Ask for one reply per episode."""
        return [self._ask(episode) for episode in episodes]

    def close(self) -> None:
        """Forget the game."""
        self.history.clear()

    def _ask(self, episode: Episode) -> Reply | PolicyError:
        env, history = episode.env, self.history.setdefault(_key(episode), [])
        if not history:
            for message in episode.messages[:-1]:
                self.console.print(Text(message.content, style="dim"))
        show_observation(self.console, episode)
        while True:
            limit = "" if env.max_turns is None else f"/{env.max_turns}"
            try:
                line = self.console.input(f"turn {env.turn + 1}{limit}> ", markup=False)
            except EOFError:
                line = ":quit"
            command = line.strip()
            if command == ":quit":
                return PlayerQuit("the player left the game")
            if command == ":undo":
                if history:
                    snapshot, length = history.pop()
                    env.restore(snapshot)
                    del episode.messages[length:]
                    show_observation(self.console, episode)
                else:
                    self.console.print("There is no turn to take back.")
            elif command == ":help" or command.startswith(":"):
                what = "a whole reply" if self.verbatim else "an action"
                self.console.print(
                    f"Write {what}, or :undo (take the last turn back), :quit, :help."
                )
            else:
                history.append((env.snapshot(), len(episode.messages)))
                return Reply(line) if self.verbatim else _write(episode, command)


def show_observation(console: Console, episode: Episode) -> None:
    """Print the newest observation and its structured fields."""
    observation = episode.messages[-1].content
    console.print(Text(observation))
    fields = episode.env.fields(observation)
    if not fields:
        return
    table = Table.grid(padding=(0, 2))
    for name, value in fields.items():
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        table.add_row(Text(f"  {name}", style="bold"), Text(shown))
    console.print(table)
