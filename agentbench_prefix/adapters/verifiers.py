"""Environments and prefix queries as a taskset of verifiers (0.4, its interface ``verifiers.v1``).

verifiers looks plug-ins up by the name of a module. Here that is ``agentbench_envs``, so the
taskset's id is ``agentbench-envs``: it lists tasks, :class:`TextGameEnv` plays the user, and
:class:`ChatHarness` asks the model for one reply a turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic import Field

from agentbench_prefix.corpora.schema import QueryRow, to_messages
from agentbench_prefix.corpora.starting import start_recorded
from agentbench_prefix.dialogue import Dialogue, Message
from agentbench_prefix.env import TextEnv
from agentbench_prefix.errors import ConfigurationError, MissingExtraError, UnknownNameError
from agentbench_prefix.evaluation.runner import find_dialogue
from agentbench_prefix.registry import make
from agentbench_prefix.rollouts import take_turn

try:
    import verifiers.v1 as vf
    from openai import APIStatusError, AsyncOpenAI
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harnesses.utils.compaction import is_context_overflow
except ImportError as error:
    raise MissingExtraError("the verifiers adapter", "verifiers") from error

TASKSET = "agentbench-envs"
"""Id under which verifiers finds the taskset, its environment and its harness."""


class PrefixTasksetConfig(vf.TasksetConfig):  # type: ignore[misc]
    """Which tasks there are.

    Attributes:
        env_id: Environment whose tasks are played from their start; empty for a corpus.
        arguments: Its arguments, e.g. ``{"max_turns": 20}``.
        corpus: Corpus whose queries are played from their cuts: folder, name or Hub id.
        split: Split of the environment or of the corpus.
        dialogue: Name of the dialogue; empty for the environment's first.
        strategies: Cuts of these strategies only; empty for all.
        raw: Whether a corpus' raw queries are played, too.
    """

    env_id: str = ""
    arguments: dict[str, Any] = Field(default_factory=dict)
    corpus: str = ""
    split: str = "train"
    dialogue: str = ""
    strategies: list[str] = Field(default_factory=list)
    raw: bool = True


class StartData(vf.TaskData):  # type: ignore[misc]
    """Where an episode starts. ``id`` is the query's id, or the task's without a corpus.

    Attributes:
        env_id: Environment.
        arguments: Its arguments.
        options: Options of its reset, ``prefix_actions`` among them.
        seed: Seed of its reset.
        dialogue: Label of the dialogue.
        observation: Text that the reset must give.
    """

    env_id: str
    arguments: dict[str, Any]
    options: dict[str, Any]
    seed: int
    dialogue: str
    observation: str


class StartTask(vf.Task[StartData]):  # type: ignore[misc]
    """An episode to play; the environment rewards it while it is played."""


class PrefixTaskset(vf.Taskset[StartTask, PrefixTasksetConfig]):  # type: ignore[misc]
    """The tasks of an environment's split, or the queries of a corpus.

    Raises:
        ConfigurationError: The settings contradict each other.
    """

    def __init__(self, config: PrefixTasksetConfig) -> None:
        super().__init__(config)
        # Not a validator of the settings: verifiers' command line first validates their id alone.
        if bool(config.env_id) == bool(config.corpus):
            raise ConfigurationError("give either env_id or corpus")
        if config.corpus and config.arguments:
            raise ConfigurationError("a corpus says its environment's arguments: leave them out")
        if config.env_id and config.strategies:
            raise ConfigurationError("strategies are a corpus': give corpus instead of env_id")

    def load(self) -> Iterable[StartTask]:
        """Yield the tasks, in the order of the split or the corpus.

        Raises:
            UnknownNameError: A name does not exist.
            CorpusError: The corpus is missing, damaged, or of another version of the environment.
        """
        config = self.config
        return self._queries() if config.corpus else self._tasks()

    def _tasks(self) -> Iterator[StartTask]:
        config = self.config
        env = make(config.env_id, **config.arguments)
        dialogue = find_dialogue(env, config.dialogue or None)
        for task_id in env.tasks(config.split):
            options = {"task_id": task_id}
            observation, _ = env.reset(seed=0, options=options)
            yield self._task(
                dialogue.opening(observation),
                id=task_id,
                name=task_id,
                env_id=config.env_id,
                arguments=config.arguments,
                options=options,
                seed=0,
                dialogue=dialogue.label,
                observation=observation,
            )

    def _queries(self) -> Iterator[StartTask]:
        from agentbench_prefix.corpora.find import find_corpus

        config = self.config
        corpus = find_corpus(config.corpus)
        corpus.check_split(config.split)
        known = corpus.manifest.recipe["strategies"]
        for name in config.strategies:
            if name not in known:
                raise UnknownNameError("strategy", name, known)
        env = make(corpus.manifest.env_id, **corpus.manifest.arguments)
        dialogue = find_dialogue(env, config.dialogue or None)
        label = dialogue.label
        if label not in corpus.manifest.dialogues:
            raise UnknownNameError("dialogue", label, corpus.manifest.dialogues)
        corpus.check_environment(env, dialogue)
        for query in corpus.queries(config.split):
            if query.dialogue == label and self._wanted(query):
                yield self._task(
                    to_messages(query.messages),
                    id=query.query_id,
                    name=query.query_id,
                    env_id=query.env_id,
                    arguments=json.loads(query.arguments),
                    options=query.reset_options(),
                    seed=query.seed,
                    dialogue=label,
                    observation=query.observation,
                )

    def _wanted(self, query: QueryRow) -> bool:
        if not query.prefix_turns:
            return bool(self.config.raw)
        chosen = {cut.strategy for cut in query.cuts}
        return not self.config.strategies or not chosen.isdisjoint(self.config.strategies)

    def _task(self, messages: Sequence[Message], **data: Any) -> StartTask:
        system = messages[0].content if messages[0].role == "system" else None
        prompt = [m.as_dict() for m in messages if m.role != "system"]
        return StartTask(StartData(prompt=prompt, system_prompt=system, **data), self.config.task)


class TextGameEnvConfig(vf.EnvConfig):  # type: ignore[misc]
    """Who plays.

    Attributes:
        agent: The model's seat. Nothing is executed, so it needs no sandbox.
    """

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class TextGameEnv(vf.Env[TextGameEnvConfig]):  # type: ignore[misc]
    """The environment as the model's user: it answers every reply until the episode ends.

    The reward ``environment`` is the sum of what the environment paid; ``success``, ``turns`` and
    ``malformed`` (replies without an action) are metrics. The turn limit is the environment's, and
    counts a query's prefix.
    """

    async def run(self, task: StartTask, agents: Any) -> None:
        """Play one episode.

        Raises:
            ConfigurationError: The task starts otherwise in this version of the environment.
        """
        env, dialogue = _start(task.data)
        reward, turns, malformed, success = 0.0, 0, 0, False
        async with agents.agent.interaction(task) as chat:
            segment = await chat.turn()
            while not segment.terminated:
                parsed, step = take_turn(env, dialogue, segment.messages[-1].content or "")
                observation, paid, terminated, truncated, info = step
                malformed += parsed.action is None
                reward, turns, success = reward + paid, turns + 1, info["success"]
                if terminated or truncated:
                    break
                segment = await chat.turn(observation)
        trace = chat.trace
        trace.record_reward("environment", reward)
        metrics = {"success": success, "turns": turns, "malformed": malformed}
        trace.record_metrics({name: float(value) for name, value in metrics.items()})


def _start(data: StartData) -> tuple[TextEnv, Dialogue]:
    return start_recorded(
        data.env_id,
        data.arguments,
        data.dialogue,
        name=str(data.id),
        options=data.options,
        seed=data.seed,
        observation=data.observation,
    )


class ChatHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]
    """It has no settings of its own."""


class ChatHarness(vf.Harness[ChatHarnessConfig]):  # type: ignore[misc]
    """One chat completion a turn, in this process: no tools, no program, no sandbox."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,  # noqa: ARG002 - the form verifiers calls
        runtime: Any,  # noqa: ARG002
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],  # noqa: ARG002
        data: Any,
    ) -> Any:
        """Ask for the next reply; a conversation that outgrew the context ends the episode."""
        system, prompt = self.resolve_prompt(data)
        messages = [] if system is None else [{"role": "system", "content": system}]
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None) as client:
            try:
                await client.chat.completions.create(model=ctx.model, messages=messages)
            except APIStatusError as error:
                return vf.ProgramResult(int(not is_context_overflow(error)), "", str(error))
        return vf.ProgramResult(0, "", "")


def load_environment(
    env_id: str = "", *, corpus: str = "", agent: dict[str, Any] | None = None, **taskset: Any
) -> TextGameEnv:
    """Make the environment that ``vf-eval agentbench-envs`` makes.

    Args:
        env_id: Environment whose tasks are played, or
        corpus: the corpus whose queries are.
        agent: Settings of the model's seat, see ``verifiers.v1.AgentConfig``.
        taskset: Further fields of :class:`PrefixTasksetConfig`.

    Raises:
        ConfigurationError: Settings contradict each other.
        pydantic.ValidationError: A setting does not exist or is of another type.
    """
    settings = {"id": TASKSET, "env_id": env_id, "corpus": corpus, **taskset}
    config = vf.resolve_env_config({"taskset": settings, "agent": agent or {}})
    env = vf.load_environment(config)
    assert isinstance(env, TextGameEnv)
    return env
