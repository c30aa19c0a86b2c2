"""The environment contract: text in, text out, exact states.

``TextEnv`` is a plain :class:`gymnasium.Env` whose observations and actions are strings.
It owns what every environment shares -- task selection, prefix replay, the turn limit, the end
of the episode, snapshots -- so that an environment supplies only its rules, through the
methods marked *to implement*.
"""

from __future__ import annotations

import dataclasses
import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, cast

import gymnasium as gym

from agentbench_prefix.errors import (
    EnvironmentUsageError,
    PrefixError,
    SnapshotError,
    UnknownNameError,
)
from agentbench_prefix.spaces import UnicodeText

if TYPE_CHECKING:
    from agentbench_prefix.dialogue import Dialogue

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"


@dataclasses.dataclass(slots=True)
class Outcome:
    """What one action did.

    Attributes:
        observation: Text shown to the player.
        reward: Reward of this step.
        terminated: Whether the task ended (solved or lost) through this action.
        success: Whether the task is solved.
        valid: Whether the environment could carry the action out.
        info: Anything else worth reporting, merged into ``info``; ``None`` for nothing.
    """

    observation: str
    reward: float = 0.0
    terminated: bool = False
    success: bool = False
    valid: bool = True
    info: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The whole state of a running episode, as a value.

    ``state`` is JSON-able, so a snapshot may cross processes and be stored as text. It is never
    pickled to disk.

    Attributes:
        env_id: Name and version of the environment, e.g. ``"TextCraft-v0"``.
        data_hash: Hash of the data the environment runs on.
        task_id: Task being played.
        options: Reset options that change the task (not ``prefix_actions``).
        arguments: Constructor arguments that change the rules.
        turn: Turns taken so far.
        ended: Whether the episode is over.
        state: The environment's own state.
        rng: State of the environment's random generator.
    """

    env_id: str
    data_hash: str
    task_id: str
    options: dict[str, JSON]
    arguments: dict[str, JSON]
    turn: int
    ended: bool
    state: JSON
    rng: JSON

    def to_json(self) -> str:
        """Serialize to one line of JSON."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Snapshot:
        """Inverse of :meth:`to_json`.

        Raises:
            SnapshotError: The text is not a snapshot.
        """
        try:
            snapshot = cls(**json.loads(text))
            snapshot.check_types()
        except (TypeError, ValueError, RecursionError) as error:
            raise SnapshotError(
                f"not a snapshot: {error}; expected the text that Snapshot.to_json() returned"
            ) from error
        return snapshot

    def check_types(self) -> None:
        """Check that every field has its type; what they say is for the environment to judge.

        Raises:
            SnapshotError: One has not; the message names it.
        """
        state = self.state if isinstance(self.state, dict) else {}
        for name, value, kind in (
            ("env_id", self.env_id, str),
            ("data_hash", self.data_hash, str),
            ("task_id", self.task_id, str),
            ("options", self.options, dict),
            ("arguments", self.arguments, dict),
            ("turn", self.turn, int),
            ("ended", self.ended, bool),
            ("state", self.state, dict),
            ("state['success']", state.get("success"), bool),
            ("state['observation']", state.get("observation"), str),
            ("rng", self.rng, dict),
        ):
            if type(value) is not kind:
                raise SnapshotError(f"snapshot.{name} must be {kind.__name__}, got {value!r:.100}")
        if self.turn < 0:
            raise SnapshotError(f"snapshot.turn must be 0 or more, got {self.turn}")
        if "env" not in state:
            raise SnapshotError("snapshot.state lacks 'env', the environment's own state")


@dataclasses.dataclass(frozen=True)
class TeacherTurn:
    """One turn of a teacher.

    Attributes:
        action: The action to send.
        thought: A line of reasoning, for dialogues that show thoughts.
        trainable: ``False`` for a deliberate mistake: SFT and the prefix mask leave it out.
    """

    action: str
    thought: str = ""
    trainable: bool = True


class Teacher(Protocol):
    """Plays the environment it was made from, one turn at a time."""

    def next_turn(self) -> TeacherTurn:
        """Choose the next action in the environment's current state."""


@dataclasses.dataclass(frozen=True)
class PlayedTurn:
    """One finished turn, as :meth:`TextEnv.failure_category` sees it.

    Attributes:
        action: The action sent, ``None`` if the reply held none.
        observation: What came back.
        valid: Whether the environment carried the action out.
    """

    action: str | None
    observation: str
    valid: bool


_EPISODE = (
    "_task_id",
    "_family",
    "_options",
    "_turn",
    "_ended",
    "_success",
    "_last_observation",
)


class TextEnv(gym.Env[str, str]):
    """A multi-turn text environment that can be put back exactly into any state.

    Everything beyond ``reset`` and ``step`` is reached through ``env.unwrapped`` when the
    environment was made with ``gym.make``, since Gymnasium's wrappers do not forward it.
    :meth:`restore` also works on an instance that was never reset, but then the wrapper
    around it does not know: step the unwrapped environment.

    Args:
        max_turns: Turn limit. The step that reaches it without ending the task is truncated.
            ``None`` means no limit; leaving it out gives :attr:`default_max_turns`. Prefix turns
            count toward it unless ``reset`` is asked for a fresh budget.
        split: Split from which ``reset`` draws when no task is named.
        render_mode: ``"ansi"`` or ``None``.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012
    env_id: ClassVar[str]
    """Registered id with version; results, corpora and checkpoints carry it."""
    default_max_turns: ClassVar[int]
    """Turn limit where ``max_turns`` is left out, as by ``gym.make(env_id)``."""
    task_options: ClassVar[frozenset[str]] = frozenset()
    """Reset options of this environment that change the task."""
    rule_arguments: ClassVar[tuple[str, ...]] = ()
    """Names of constructor arguments that change the rules."""
    union_splits: ClassVar[tuple[str, ...]] = ()
    """Splits made of others, such as ``"all"``; no other two splits share a task."""
    accepts_steps_after_end: bool = False
    """Whether the game goes on after its end, in prefixes too."""

    def __init__(
        self,
        *,
        max_turns: int | EllipsisType | None = ...,
        split: str = "train",
        render_mode: str | None = None,
    ) -> None:
        if max_turns is ...:
            max_turns = self.default_max_turns
        if max_turns is not None and (
            isinstance(max_turns, bool) or not isinstance(max_turns, int) or max_turns < 1
        ):
            raise ValueError(f"max_turns must be None or an integer >= 1, got {max_turns!r}")
        if render_mode not in (None, "ansi"):
            raise UnknownNameError("render_mode", render_mode, ["ansi"])
        if split not in self.splits():
            raise UnknownNameError("split", split, self.splits())
        self.max_turns = max_turns
        self.split = split
        self.render_mode = render_mode
        self.observation_space = UnicodeText()
        self.action_space = UnicodeText()
        self._task_id: str | None = None
        self._family = ""
        self._options: dict[str, JSON] = {}
        self._turn = 0
        self._ended = False
        self._success = False
        self._last_observation = ""

    # ------------------------------------------------------------------ to implement
    @classmethod
    @abstractmethod
    def splits(cls) -> tuple[str, ...]:
        """Names of the splits."""

    @abstractmethod
    def tasks(self, split: str) -> tuple[str, ...]:
        """Task ids of a split, in their fixed order.

        Raises:
            UnknownNameError: No such split.
        """

    @abstractmethod
    def family(self, task_id: str) -> str:
        """Family under which a task is reported.

        Raises:
            UnknownNameError: No such task.
        """

    @property
    @abstractmethod
    def data_hash(self) -> str:
        """Hash of the data this environment runs on."""

    @abstractmethod
    def _begin(self, task_id: str, options: Mapping[str, JSON]) -> str:
        """Set up a task and return its first observation.

        Must depend on ``task_id`` and ``options`` only, and raise :class:`UnknownNameError`
        *before* changing anything when either is bad.
        """

    @abstractmethod
    def _act(self, action: str) -> Outcome:
        """Carry out one action. Must never raise, whatever the text."""

    @abstractmethod
    def _get_state(self) -> JSON:
        """Return the environment's own state as a JSON-able value that shares nothing mutable."""

    @abstractmethod
    def _set_state(self, state: JSON) -> None:
        """Set the state that :meth:`_get_state` returned, after :meth:`_begin` on the task."""

    @abstractmethod
    def fields(self, observation: str) -> dict[str, JSON]:
        """Canonical structured fields of an observation, for state matching.

        Two observations match when they agree on every field that both have; with no shared
        field nothing can be said.
        """

    @abstractmethod
    def dialogues(self) -> Mapping[str, Dialogue]:
        """Dialogues in which a model may play this environment, the default one first."""

    # ------------------------------------------------------------------ optional hooks
    def teacher(self, seed: int | None = None, *, detours: float = 0.0) -> Teacher:
        """Return a teacher that plays this instance.

        Args:
            seed: Seed of the teacher's own choices; ``None`` plays the plainest plan.
            detours: Probability in [0, 1) of a deliberate mistake or look-around before a turn.
        """
        raise NotImplementedError(f"{self.env_id} has no teacher")

    def candidate_actions(self) -> Sequence[str]:
        """Return actions that are syntactically sensible now; the random policy picks from them."""
        raise NotImplementedError(f"{self.env_id} does not list candidate actions")

    def generate_tasks(self, seed: int, n: int, **parameters: Any) -> tuple[str, ...]:
        """Ids of ``n`` generated tasks, playable by ``reset(options={"task_id": ...})``."""
        raise NotImplementedError(f"{self.env_id} does not generate tasks")

    def translate_action(self, action: str, options: Mapping[str, JSON]) -> str:
        """Return the action that does under task options what ``action`` does without them.

        A recorded trajectory can so be played in variations of its task.

        Args:
            action: An action in the task without options.
            options: Task options.
        """
        raise NotImplementedError(f"{self.env_id} does not translate actions")

    def solution_facts(
        self, task_id: str, options: Mapping[str, JSON] | None = None
    ) -> Mapping[str, frozenset[str]]:
        """What a solution of a task has to know, as text, for contamination tables.

        Args:
            task_id: The task.
            options: Its reset options.

        Returns:
            ``"goal"`` (what solves the task itself), ``"subgoals"`` (what leads there) and
            ``"shown"`` (all that the player is shown). Facts of two tasks are the same knowledge
            exactly if they are equal.
        """
        raise NotImplementedError(f"{self.env_id} does not state what its solutions know")

    def failure_category(self, turns: Sequence[PlayedTurn]) -> str:
        """Name why an unsolved episode failed, from its turns."""
        return "no_turn" if not turns else "turn_limit"

    def out_of_reach(
        self,
        split: str,  # noqa: ARG002 - for those that override it
        max_turns: int | None,  # noqa: ARG002
    ) -> tuple[str, ...]:
        """Tasks of a split that no policy can solve within ``max_turns``."""
        return ()

    # ------------------------------------------------------------------ the Gymnasium interface
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start a task.

        Args:
            seed: Seeds the randomness inside the episode, and picks the task when none is named.
            options: ``task_id`` (str), ``split`` (str, draw from this split),
                ``prefix_actions`` (list or tuple of actions to replay; ``None`` stands for a turn
                without an action), ``fresh_budget`` (bool, the prefix does not count toward the
                turn limit, however long it is), and the environment's own ``task_options``.

        Returns:
            The observation after the prefix (or the first one) and ``info``. With a prefix,
            ``info["prefix_observations"]`` lists the first observation and that of every prefix
            turn but the last.

        Raises:
            UnknownNameError: Unknown task, split or option.
            PrefixError: ``prefix_actions`` is of another type, or the episode ends inside the
                prefix and the environment does not accept steps after the end.

        Whatever is raised, the running episode stays as it was.
        """
        given = dict(options or {})
        common = {"task_id", "split", "prefix_actions", "fresh_budget"}
        for name in given:
            if name not in common and name not in self.task_options:
                raise UnknownNameError("reset option", name, sorted(common | self.task_options))
        split = given.get("split", self.split)
        if split not in self.splits():
            raise UnknownNameError("split", split, self.splits())
        prefix = given.get("prefix_actions")
        if prefix is None:
            prefix = ()
        if not isinstance(prefix, list | tuple) or not all(
            action is None or isinstance(action, str) for action in prefix
        ):
            raise PrefixError(
                "prefix_actions must be a list or tuple of strings (None for an empty turn), got "
                f"{prefix!r:.100}"
            )
        task_id = given.get("task_id")
        if task_id is not None and not isinstance(task_id, str):
            raise UnknownNameError("task_id", task_id, self.tasks(split)[:3], "Task ids are text.")
        if task_id is not None and "split" in given and task_id not in self.tasks(split):
            raise UnknownNameError(
                f"task_id of split {split!r}",
                task_id,
                self.tasks(split)[:3],
                "Name one or neither.",
            )
        task_options = {name: given[name] for name in sorted(given) if name in self.task_options}
        # Without a prefix only _begin can refuse, which it does before it changes anything.
        with _PutBackOnError(self, episode=bool(prefix)):
            super().reset(seed=seed)
            if task_id is None:
                tasks = self.tasks(split)
                task_id = tasks[int(self.np_random.integers(len(tasks)))]
            observation = self._begin(task_id, task_options)
            self._task_id, self._family = task_id, self.family(task_id)
            self._options = task_options
            self._turn, self._ended, self._success = 0, False, False
            self._last_observation = observation
            if not prefix:
                return observation, self._info(valid=True)
            limit = self.max_turns
            if given.get("fresh_budget"):
                self.max_turns = None
            try:
                observation, info = self._replay(prefix)
            finally:
                self.max_turns = limit
            if given.get("fresh_budget"):
                self._turn = info["turn"] = 0
            return observation, info

    def _replay(self, prefix: Sequence[str | None]) -> tuple[str, dict[str, Any]]:
        """Play a prefix that is not empty; what :meth:`reset` returns after it."""
        seen = [self._last_observation]
        info: dict[str, Any] = {}
        for index, action in enumerate(prefix):
            if action is None:
                observation, _, terminated, truncated, info = self.skip_turn("")
            else:
                observation, _, terminated, truncated, info = self.step(action)
            if (terminated or truncated) and not self.accepts_steps_after_end:
                raise PrefixError(
                    f"prefix_actions end the episode at turn {index + 1} of {len(prefix)} in task "
                    f"{self._task_id!r} ({action!r} -> {observation!r}); shorten the prefix or "
                    f"raise max_turns (now {self.max_turns})"
                )
            seen.append(observation)
        return seen.pop(), {**info, "prefix_observations": seen}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play one turn.

        Any string is an acceptable action; what the game cannot read it answers with text.

        Raises:
            EnvironmentUsageError: Called before a reset, or after the episode ended.
            TypeError: The action is not a string.
        """
        self._check_running()
        if not isinstance(action, str):
            raise TypeError(f"{self.env_id} takes text actions, got {type(action).__name__}")
        return self._finish_turn(self._act(action))

    def skip_turn(self, observation: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Spend a turn without an action, e.g. because the reply held none.

        Args:
            observation: What the player is told instead of the environment's answer.
        """
        self._check_running()
        return self._finish_turn(Outcome(observation, valid=False))

    def render(self) -> str | None:
        """Return the last observation (``render_mode="ansi"``), else ``None``."""
        return self._last_observation if self.render_mode == "ansi" else None

    # ------------------------------------------------------------------ states
    @property
    def task_id(self) -> str:
        """Task being played.

        Raises:
            EnvironmentUsageError: No task yet.
        """
        if self._task_id is None:
            raise EnvironmentUsageError(f"{self.env_id} has no task yet: call reset() first")
        return self._task_id

    @property
    def turn(self) -> int:
        """Turns taken so far, prefix turns included unless ``fresh_budget`` was asked for."""
        return self._turn

    @property
    def ended(self) -> bool:
        """Whether the episode is over."""
        return self._ended

    @property
    def last_observation(self) -> str:
        """The newest observation."""
        return self._last_observation

    def arguments(self) -> dict[str, JSON]:
        """Return the constructor arguments that change the rules or the limit, for manifests.

        Given to the constructor again, they make the same environment.
        """
        return {
            "max_turns": self.max_turns,
            **{name: getattr(self, name) for name in self.rule_arguments},
        }

    def snapshot(self) -> Snapshot:
        """Return the whole state as a value; see :class:`Snapshot`.

        Raises:
            EnvironmentUsageError: Called before a reset.
        """
        task_id = self.task_id
        return Snapshot(
            env_id=self.env_id,
            data_hash=self.data_hash,
            task_id=task_id,
            options=dict(self._options),
            arguments=self.arguments(),
            turn=self._turn,
            ended=self._ended,
            state={
                "success": self._success,
                "observation": self._last_observation,
                "env": self._get_state(),
            },
            # Without a seed Gymnasium makes the generator here, so that chance is fixed, too.
            rng=cast("JSON", self.np_random.bit_generator.state),
        )

    def restore(self, snapshot: Snapshot) -> str:
        """Put this instance into a snapshot's state, whatever it was doing before.

        Returns:
            The last observation of that state.

        Raises:
            SnapshotError: The snapshot is of another environment, version, data or rules, or
                something in it is not what :meth:`snapshot` returns. The running episode stays
                as it was.
        """
        if not isinstance(snapshot, Snapshot):
            raise SnapshotError(
                f"restore takes a Snapshot, got {type(snapshot).__name__}: "
                "read text with Snapshot.from_json"
            )
        snapshot.check_types()
        mine, theirs = self.arguments(), dict(snapshot.arguments)
        mine["env_id"], theirs["env_id"] = self.env_id, snapshot.env_id
        mine["data_hash"], theirs["data_hash"] = self.data_hash, snapshot.data_hash
        # The turn limit is no rule.
        theirs["max_turns"] = mine["max_turns"]
        if mine != theirs:
            for name in ("env_id", "data_hash", *mine, *theirs):
                if mine.get(name) != theirs.get(name):
                    raise SnapshotError(
                        f"snapshot has {name}={theirs.get(name)!r}, this environment has "
                        f"{mine.get(name)!r}: make the environment as the snapshot's was made"
                    )
        for name in snapshot.options:
            if name not in self.task_options:
                raise SnapshotError(
                    f"snapshot.options has {name!r}, which is no task option of {self.env_id}; "
                    f"valid: {', '.join(sorted(self.task_options)) or 'none'}"
                )
        state = cast("dict[str, Any]", snapshot.state)
        with _PutBackOnError(self, episode=True):
            where = ""
            try:
                self._begin(snapshot.task_id, snapshot.options)
                # A family is its task's.
                same = snapshot.task_id == self._task_id
                family = self._family if same else self.family(snapshot.task_id)
                where = "state"
                self._set_state(state["env"])
                where = "rng"
                self.np_random.bit_generator.state = cast("Any", snapshot.rng)
            except Exception as error:
                what = {
                    "state": f"state['env']={state['env']!r:.100}",
                    "rng": f"rng={snapshot.rng!r:.100}",
                }.get(where, f"task_id={snapshot.task_id!r} or options={snapshot.options!r}")
                raise SnapshotError(
                    f"snapshot has {what}, which {self.env_id} cannot restore "
                    f"({type(error).__name__}: {error}): restore what snapshot() returned"
                ) from error
            self._task_id, self._family = snapshot.task_id, family
            self._options = dict(snapshot.options)
            self._turn, self._ended = snapshot.turn, snapshot.ended
            self._success, self._last_observation = state["success"], state["observation"]
            self._np_random_seed = -1
        return self._last_observation

    # ------------------------------------------------------------------ inside
    def _check_running(self) -> None:
        if self._task_id is None:
            raise EnvironmentUsageError(f"{self.env_id}: step() before reset(); call reset() first")
        if self._ended and not self.accepts_steps_after_end:
            raise EnvironmentUsageError(
                f"{self.env_id}: task {self._task_id!r} ended at turn {self._turn}; call reset()"
            )

    def _finish_turn(self, outcome: Outcome) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._turn += 1
        self._success = outcome.success
        truncated = (
            self.max_turns is not None and self._turn >= self.max_turns and not outcome.terminated
        )
        self._ended = outcome.terminated or truncated
        self._last_observation = outcome.observation
        info = self._info(valid=outcome.valid)
        if outcome.info:
            info.update(outcome.info)
        return outcome.observation, float(outcome.reward), outcome.terminated, truncated, info

    def _info(self, *, valid: bool) -> dict[str, Any]:
        assert self._task_id is not None
        return {
            "task_id": self._task_id,
            "family": self._family,
            "success": self._success,
            "turn": self._turn,
            "valid_action": valid,
        }


class _PutBackOnError:
    """Puts the generator, and the running episode if asked, back if the block raises."""

    __slots__ = ("before", "chance", "env", "generator", "seed", "state")

    def __init__(self, env: TextEnv, *, episode: bool) -> None:
        self.env = env
        self.generator, self.seed = env._np_random, env._np_random_seed
        self.chance = None if self.generator is None else self.generator.bit_generator.state
        attributes = env.__dict__
        self.before = {name: attributes[name] for name in _EPISODE} if episode else {}
        self.state = env._get_state() if episode and env._task_id is not None else None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            return
        env, before = self.env, self.before
        if before.get("_task_id") is not None:
            env._begin(before["_task_id"], before["_options"])
            env._set_state(self.state)
        env.__dict__.update(before)
        env._np_random, env._np_random_seed = self.generator, self.seed
        if self.generator is not None:
            self.generator.bit_generator.state = cast("Any", self.chance)
