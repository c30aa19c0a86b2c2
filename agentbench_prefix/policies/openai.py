"""Policy behind an OpenAI-compatible chat-completions endpoint.

The endpoint gets the conversation as messages, so it is the server's chat template, not ours, that
turns it into tokens; a template that rewrites earlier turns rewrites them here.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import email.utils
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, Field, SecretStr, ValidationError

from agentbench_prefix.env import JSON
from agentbench_prefix.errors import (
    ConfigurationError,
    ContextLimitError,
    EndpointError,
    MissingExtraError,
    PolicyError,
)
from agentbench_prefix.policies.base import Episode, Reply, reply_seed

try:
    import httpx
    from aiolimiter import AsyncLimiter
    from anyio.from_thread import start_blocking_portal
    from tenacity import (
        AsyncRetrying,
        RetryCallState,
        retry_if_exception,
        wait_exponential,
        wait_random,
    )
except ImportError as error:
    raise MissingExtraError("the policy behind an OpenAI-compatible endpoint", "eval") from error

_LOG = logging.getLogger(__name__)

_RETRIED_STATUSES = frozenset({408, 409, 429})
_CONNECT_RETRIES = 3
"""A host that cannot be reached at all is given up sooner than one that answers with errors."""
_CONNECT_TIMEOUT = 10.0
_EXCERPT = 300

_REMEDIES = {
    400: "check the model's context length, max_tokens and extra_body",
    401: "set OPENAI_API_KEY (or api_key) to a key that this endpoint accepts",
    403: "set OPENAI_API_KEY (or api_key) to a key that may use this model",
    404: "check the model's name, and that base_url ends at the API's root (often /v1)",
    422: "check the model's context length, max_tokens and extra_body",
    429: "lower requests_per_minute or max_concurrency, or raise the account's quota",
}


class OpenAIPolicy:
    """Plays through ``POST {base_url}/chat/completions``.

    Every request carries a seed of its own
    (:func:`~agentbench_prefix.policies.base.reply_seed`), so that samples of a task differ also on
    servers that would repeat themselves.

    A reasoning model's ``reasoning_content`` (or ``reasoning``) is put before the reply as a
    ``<think>`` block: parsers take it out and count it, records keep it, and the server gets it
    back with the history. If the reply was cut inside the reasoning, the block stays open.

    Connection errors, timeouts, 408, 409, 429, 5xx and bodies that are no chat completion are tried
    again after an exponential, jittered wait, and not before the time that ``Retry-After`` names.
    What still fails becomes an :class:`~agentbench_prefix.errors.EndpointError` of that episode
    alone. The API key is in no description, message or log line.

    Args:
        base_url: Root of the API, e.g. ``"http://127.0.0.1:8000/v1"``.
        model: Name of the model at that endpoint.
        temperature: Sampling temperature, >= 0.
        top_p: Nucleus mass, in (0, 1].
        max_tokens: Bound on one reply in tokens; ``None`` takes the dialogue's.
        logprobs: Ask for the tokens of each reply and their log-probabilities. Needs a server that
            honours ``return_token_ids`` (vLLM), and temperature 1: servers report log-probabilities
            before temperature.
        extra_body: Further fields of each request, e.g. ``{"top_k": 20}``.
        max_tokens_field: Name under which ``max_tokens`` is sent; some models of OpenAI take only
            ``"max_completion_tokens"``.
        max_concurrency: Largest number of requests under way at a time; a request that waits for
            its next attempt counts.
        max_retries: Largest number of further attempts per request; 3 at most where no connection
            comes about.
        requests_per_minute: Rate limit over all attempts, evenly spaced; ``None`` for none.
        timeout: Seconds for one attempt, from sending to the last byte.
        backoff: Seconds before the second attempt; doubles with each further one. A random time
            of up to as much is added.
        max_wait: Largest wait between attempts in seconds, before the random time. If the server
            asks for more, the request fails.
        api_key: Key sent as bearer token; ``None`` takes the environment variable OPENAI_API_KEY,
            and sends none if that is not set.

    Raises:
        ConfigurationError: An argument is out of its range, or the URL is not one.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_tokens: int | None = None,
        logprobs: bool = False,
        extra_body: Mapping[str, JSON] | None = None,
        max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens",
        max_concurrency: int = 16,
        max_retries: int = 6,
        requests_per_minute: float | None = None,
        timeout: float = 300.0,
        backoff: float = 0.5,
        max_wait: float = 60.0,
        api_key: str | None = None,
    ) -> None:
        self.url = _endpoint(base_url)
        self.model = model
        self.temperature = temperature
        self.top_p = top_p
        self.max_tokens = max_tokens
        self.logprobs = logprobs
        self.extra_body = dict(extra_body or {})
        self.max_tokens_field = max_tokens_field
        self.max_concurrency = max_concurrency
        self.max_retries = max_retries
        self.requests_per_minute = requests_per_minute
        self.timeout = timeout
        self.backoff = backoff
        self.max_wait = max_wait
        key = (os.environ.get("OPENAI_API_KEY", "") if api_key is None else api_key).strip()
        for fine, demand in (
            (model, "model must be named"),
            (temperature >= 0, f"temperature must be >= 0, got {temperature}"),
            (0 < top_p <= 1, f"top_p must be in (0, 1], got {top_p}"),
            (max_tokens is None or max_tokens >= 1, f"max_tokens must be >= 1, got {max_tokens}"),
            (max_concurrency >= 1, f"max_concurrency must be >= 1, got {max_concurrency}"),
            (max_retries >= 0, f"max_retries must be >= 0, got {max_retries}"),
            (
                requests_per_minute is None or requests_per_minute > 0,
                f"requests_per_minute must be > 0 or None, got {requests_per_minute}",
            ),
            (timeout > 0, f"timeout must be > 0 seconds, got {timeout}"),
            (backoff >= 0, f"backoff must be >= 0 seconds, got {backoff}"),
            (max_wait >= 0, f"max_wait must be >= 0 seconds, got {max_wait}"),
            (
                not logprobs or temperature == 1,
                "logprobs needs temperature 1 (servers report log-probabilities before "
                f"temperature), got {temperature}",
            ),
            (
                key.isascii() and key.isprintable(),
                "the API key holds characters that an HTTP header cannot carry; set it again",
            ),
        ):
            if not fine:
                raise ConfigurationError(demand)
        own = self._settings(max_tokens=1, seed=0).keys() | {"messages"}
        if clash := sorted(own & self.extra_body.keys()):
            raise ConfigurationError(f"extra_body may not set {clash}: use the arguments instead")
        self._api_key = SecretStr(key)

    def __repr__(self) -> str:
        return f"OpenAIPolicy(url={self.url!r}, model={self.model!r})"

    def describe(self) -> Mapping[str, JSON]:
        """Endpoint, model and sampling settings; neither the key nor how requests are retried."""
        return {
            "backend": "openai",
            "url": self.url,
            "model": self.model,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
            "logprobs": self.logprobs,
            "extra_body": dict(self.extra_body),
        }

    def open(self, episodes: Sequence[Episode]) -> OpenAISession:  # noqa: ARG002
        """Start a session: a client, and an event loop in a thread of its own."""
        return OpenAISession(self)

    def _settings(self, max_tokens: int, seed: int) -> dict[str, JSON]:
        settings: dict[str, JSON] = {
            "model": self.model,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": seed,
            self.max_tokens_field: max_tokens,
        }
        if self.logprobs:
            settings |= {"logprobs": True, "return_token_ids": True}
        return settings

    def _request(self, episode: Episode) -> bytes:
        max_tokens = self.max_tokens or episode.dialogue.max_tokens
        messages: list[JSON] = [dict(message.as_dict()) for message in episode.messages]
        body = {
            **self._settings(max_tokens, reply_seed(episode)),
            "messages": messages,
            **self.extra_body,
        }
        # Escaped, since an observation may hold lone surrogates, which UTF-8 cannot carry.
        return json.dumps(body, ensure_ascii=True).encode("ascii")


class OpenAISession:
    """Requests of one chunk, under one event loop in its own thread.

    That thread is why a session also works where a loop is running already (notebooks).
    """

    def __init__(self, policy: OpenAIPolicy) -> None:
        self._policy = policy
        self._slots = asyncio.Semaphore(policy.max_concurrency)
        rate = policy.requests_per_minute
        self._limiter = None if rate is None else AsyncLimiter(1, 60 / rate)
        self._key = policy._api_key.get_secret_value()
        client = httpx.AsyncClient(
            headers={
                "Content-Type": "application/json",
                **({"Authorization": f"Bearer {self._key}"} if self._key else {}),
            },
            timeout=httpx.Timeout(None, connect=min(_CONNECT_TIMEOUT, policy.timeout)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )
        with contextlib.ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal())
            self._client = stack.enter_context(self._portal.wrap_async_context_manager(client))
            self._resources = stack.pop_all()

    def reply(self, episodes: Sequence[Episode]) -> Sequence[Reply | PolicyError]:
        """One reply per episode, in order; a :class:`PolicyError` where there is none."""
        bodies = [self._policy._request(episode) for episode in episodes]
        future = self._portal.start_task_soon(self._replies, bodies)
        try:
            return future.result()
        finally:
            future.cancel()  # no effect unless the wait was interrupted

    def close(self) -> None:
        """Close the client and end the thread; may be called again."""
        self._resources.close()

    async def _replies(self, bodies: Sequence[bytes]) -> list[Reply | PolicyError]:
        return await asyncio.gather(*map(self._one, bodies))

    async def _one(self, body: bytes) -> Reply | PolicyError:
        policy = self._policy
        attempts = AsyncRetrying(
            retry=retry_if_exception(lambda e: isinstance(e, _AttemptError) and e.retry),
            stop=self._give_up,
            wait=self._wait,
            before_sleep=self._log,
            sleep=_sleep,
            reraise=True,
        )
        async with self._slots:
            try:
                return await attempts(self._attempt, body)
            except _AttemptError as failure:
                if failure.context:
                    return ContextLimitError(f"{policy.url} {failure}")
                n = attempts.statistics["attempt_number"]
                return EndpointError(
                    f"POST {policy.url} (model {policy.model!r}) failed after {n} "
                    f"attempt{'s' if n > 1 else ''}: {failure}; {failure.remedy}"
                )

    async def _attempt(self, body: bytes) -> Reply:
        if self._limiter is not None:
            await self._limiter.acquire()
        timeout = self._policy.timeout
        try:
            async with asyncio.timeout(timeout):
                response = await self._client.post(self._policy.url, content=body)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise _AttemptError(
                self._redact(f"no connection ({error or type(error).__name__})"),
                "check that the server is running and that base_url is right",
                unreachable=True,
            ) from None
        except TimeoutError:
            raise _AttemptError(
                f"no answer within {timeout:g} s",
                "raise timeout, or lower max_concurrency or max_tokens",
            ) from None
        except httpx.RequestError as error:
            raise _AttemptError(
                self._redact(f"the connection broke ({error or type(error).__name__})"),
                "check the server's log",
            ) from None
        if response.is_success:
            return self._read(response)
        status, retry_after = response.status_code, _retry_after(response)
        asks = f" (asks to wait {retry_after:g} s)" if retry_after else ""
        raise _AttemptError(
            self._redact(
                f"answered {status} {response.reason_phrase}{asks}: {_complaint(response)}"
            ),
            _REMEDIES.get(status, "check the server's log and base_url"),
            retry=status in _RETRIED_STATUSES or status >= 500,
            retry_after=retry_after,
            # OpenAI's code, and the words that OpenAI and vLLM use.
            context=status == 400
            and re.search("context_length_exceeded|maximum context length", response.text)
            is not None,
        )

    def _read(self, response: httpx.Response) -> Reply:
        try:
            completion = _Completion.model_validate_json(response.content)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "body"
            raise _AttemptError(
                self._redact(
                    f"answered {response.status_code} with something that is no chat completion "
                    f"({where}: {first['msg']}): {_complaint(response)}"
                ),
                "check that base_url is an OpenAI-compatible endpoint",
            ) from None
        choice = completion.choices[0]
        if choice.finish_reason not in ("stop", "length"):
            raise _AttemptError(
                self._redact(f"the reply ended with finish_reason {choice.finish_reason!r}"),
                "only 'stop' and 'length' are the model's own doing: check the server's filters",
                retry=False,
            )
        token_ids: tuple[int, ...] | None = None
        logprobs: tuple[float, ...] | None = None
        if self._policy.logprobs:
            entries = (choice.logprobs.content if choice.logprobs else None) or []
            if choice.token_ids is None or len(choice.token_ids) != len(entries):
                raise _AttemptError(
                    f"the reply came with {len(choice.token_ids or [])} token_ids and "
                    f"{len(entries)} log-probabilities",
                    "logprobs needs a server that honours return_token_ids: use one, or leave "
                    "logprobs out",
                    retry=False,
                )
            token_ids = tuple(choice.token_ids)
            logprobs = tuple(entry.logprob for entry in entries)
        return Reply(
            text=_text(choice),
            token_ids=token_ids,
            logprobs=logprobs,
            finish=choice.finish_reason,
            prompt_tokens=completion.usage.prompt_tokens if completion.usage else 0,
        )

    def _give_up(self, state: RetryCallState) -> bool:
        failure = _failure(state)
        retries = self._policy.max_retries
        if failure.unreachable:
            retries = min(retries, _CONNECT_RETRIES)
        return state.attempt_number > retries or failure.retry_after > self._policy.max_wait

    def _wait(self, state: RetryCallState) -> float:
        policy = self._policy
        backoff = wait_exponential(multiplier=policy.backoff, max=policy.max_wait)
        # Requests that were turned away together must not come back together.
        spread = wait_random(0, policy.backoff)
        return max(backoff(state), _failure(state).retry_after) + spread(state)

    def _log(self, state: RetryCallState) -> None:
        wait = state.next_action.sleep if state.next_action else 0.0
        _LOG.info("%s: %s; next attempt in %.1f s", self._policy.url, _failure(state), wait)

    def _redact(self, text: str) -> str:
        return text.replace(self._key, "[API key]") if self._key else text


async def _sleep(seconds: float) -> None:
    await asyncio.sleep(seconds)


class _AttemptError(Exception):
    """Why one attempt failed.

    Args:
        cause: What happened.
        remedy: What a person can do about it.
        retry: Whether another attempt may succeed.
        unreachable: Whether no connection came about.
        retry_after: Seconds that the server asks to wait, 0 if it does not say.
        context: Whether the conversation does not fit the model's context.
    """

    def __init__(
        self,
        cause: str,
        remedy: str,
        *,
        retry: bool = True,
        unreachable: bool = False,
        retry_after: float = 0.0,
        context: bool = False,
    ) -> None:
        super().__init__(cause)
        self.remedy = remedy
        self.retry = retry
        self.unreachable = unreachable
        self.retry_after = retry_after
        self.context = context


def _failure(state: RetryCallState) -> _AttemptError:
    """The failure that the retry policy is asked about; it is asked about no other exception."""
    failure = state.outcome.exception() if state.outcome else None
    assert isinstance(failure, _AttemptError)
    return failure


class _TokenLogprob(BaseModel):
    logprob: float


class _Logprobs(BaseModel):
    content: list[_TokenLogprob] | None = None


class _ReplyMessage(BaseModel):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(BaseModel):
    message: _ReplyMessage
    finish_reason: str
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None


class _Usage(BaseModel):
    prompt_tokens: int = 0


class _Completion(BaseModel):
    """The fields that are read of a chat completion."""

    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage | None = None


def _text(choice: _Choice) -> str:
    message = choice.message
    content = message.content or ""
    reasoning = message.reasoning_content or message.reasoning
    if not reasoning:
        return content
    opened = "<think>\n" + reasoning.strip("\n")
    if not content and choice.finish_reason == "length":
        return opened
    return f"{opened}\n</think>\n\n{content}"


def _endpoint(base_url: str) -> str:
    """Full URL of the chat completions below an API's root."""
    if any(mark in base_url for mark in "@?#"):
        # Not echoed: this is where people put keys.
        raise ConfigurationError(
            "base_url must hold neither user, query nor fragment; a key goes into OPENAI_API_KEY"
        )
    try:
        url = httpx.URL(base_url)
        fine = url.scheme in ("http", "https") and bool(url.host)
    except httpx.InvalidURL:
        fine = False
    if not fine:
        raise ConfigurationError(
            f"base_url must be an http(s) URL such as http://127.0.0.1:8000/v1, got {base_url!r}"
        )
    return str(url).rstrip("/").removesuffix("/chat/completions") + "/chat/completions"


def _complaint(response: httpx.Response) -> str:
    """What an error response says, as one short line."""
    text = response.text
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        error = json.loads(text)["error"]
        text = error if isinstance(error, str) else str(error["message"])
    text = " ".join(text.split()) or "empty body"
    return text if len(text) <= _EXCERPT else text[:_EXCERPT] + " ..."


def _retry_after(response: httpx.Response) -> float:
    """Seconds that a response asks to wait (RFC 9110, section 10.2.3), 0 if it does not say."""
    value = response.headers.get("Retry-After", "")
    with contextlib.suppress(ValueError):
        return max(0.0, float(value))
    with contextlib.suppress(ValueError):
        until = email.utils.parsedate_to_datetime(value)
        if until.tzinfo is None:
            until = until.replace(tzinfo=datetime.UTC)
        return max(0.0, (until - datetime.datetime.now(datetime.UTC)).total_seconds())
    return 0.0
