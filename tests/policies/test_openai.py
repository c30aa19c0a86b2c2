"""The endpoint policy against a real local HTTP server with failures injected."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import email.utils
import itertools
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_openai_server import Answer, FakeServer, Seen, completion, failure

from agentbench_prefix import Message, make
from agentbench_prefix.dialogue import Dialogue, parse_bracketed
from agentbench_prefix.errors import ConfigurationError, ContextLimitError, EndpointError
from agentbench_prefix.policies import openai as module
from agentbench_prefix.policies.base import Episode, Reply, reply_seed
from agentbench_prefix.policies.openai import OpenAIPolicy
from agentbench_prefix.rollouts import play, start

KEY = "sk-secret-0123456789"
DIALOGUE = Dialogue(
    name="toy",
    version=1,
    system="Play.",
    parse=parse_bracketed,
    render=lambda action, thought: f"[[ {action} ]]",
    answers={},
    max_tokens=77,
)


@pytest.fixture(autouse=True)
def no_outside_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Waits between attempts, in seconds; none of them is waited for."""
    waits: list[float] = []

    async def record(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(module, "_sleep", record)
    return waits


def episode(name: str = "a", sample: int = 0, seed: int = 5) -> Episode:
    # The policy reads neither the environment nor the task.
    return Episode(name, sample, seed, None, DIALOGUE, DIALOGUE.opening(name))  # type: ignore[arg-type]


def policy(server: FakeServer, **arguments: Any) -> OpenAIPolicy:
    return OpenAIPolicy(
        arguments.pop("base_url", server.base_url),
        arguments.pop("model", "toy"),
        **{"backoff": 0.001, "max_wait": 5.0, **arguments},
    )


def ask(who: OpenAIPolicy, *episodes: Episode) -> list[Reply | EndpointError]:
    with contextlib.closing(who.open(episodes)) as session:
        return list(session.reply(episodes))


def echo(seen: Seen) -> Answer:
    return completion(f"[[ {seen.opening} ]]")


def first_then(*answers: Answer) -> Callable[[Seen], Answer]:
    """The given answers in order, whoever asks; after them a good one."""
    queue = iter(answers)
    lock = threading.Lock()

    def script(seen: Seen) -> Answer:
        with lock:
            return next(queue, None) or echo(seen)

    return script


def serve(script: Callable[[Seen], Answer] = echo, **arguments: Any) -> Any:
    return FakeServer(script, **arguments).running()


def text(reply: Reply | EndpointError) -> str:
    assert isinstance(reply, Reply), reply
    return reply.text


def error(reply: Reply | EndpointError) -> str:
    assert isinstance(reply, EndpointError), reply
    return str(reply)


# --------------------------------------------------------------------------- requests and replies
def test_request_holds_the_conversation_and_the_settings() -> None:
    one = episode()
    one.messages += [Message("assistant", "[[ look ]]"), Message("user", "dark \ud800 é \x00")]
    with serve(lambda _: completion("[[ wait ]]")) as server:
        who = policy(server, temperature=0.7, top_p=0.9, extra_body={"top_k": 20})
        assert isinstance(ask(who, one)[0], Reply)
    [seen] = server.seen
    assert seen.body["messages"] == [message.as_dict() for message in one.messages]
    assert {k: v for k, v in seen.body.items() if k != "messages"} == {
        "model": "toy",
        "temperature": 0.7,
        "top_p": 0.9,
        "max_tokens": DIALOGUE.max_tokens,
        "seed": reply_seed(one),
        "top_k": 20,
    }
    assert "Authorization" not in seen.headers


def test_reply_carries_text_finish_and_usage() -> None:
    answers = first_then(completion("[[ a ]]"), completion("[[ b", "length"))
    with serve(answers) as server:
        replies = ask(policy(server, max_concurrency=1), episode("x"), episode("y"))
    assert replies == [
        Reply("[[ a ]]", finish="stop", prompt_tokens=17),
        Reply("[[ b", finish="length", prompt_tokens=17),
    ]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_becomes_a_thinking_block_that_parsers_take_out(field: str) -> None:
    with serve(lambda _: completion("[[ go ]]", **{field: "[[ not this ]]"})) as server:
        [reply] = ask(policy(server), episode())
    assert text(reply) == "<think>\n[[ not this ]]\n</think>\n\n[[ go ]]"
    parsed = parse_bracketed(text(reply))
    assert (parsed.action, parsed.notes) == ("go", ("thinking_tags",))


def test_reply_cut_inside_the_reasoning_has_no_action() -> None:
    with serve(lambda _: completion(None, "length", reasoning_content="[[ hm ]]")) as server:
        [reply] = ask(policy(server), episode())
    assert parse_bracketed(text(reply)).problem == "unclosed_thinking"


def test_max_tokens_and_the_name_of_its_field() -> None:
    with serve() as server:
        ask(policy(server, max_tokens=9, max_tokens_field="max_completion_tokens"), episode())
    assert server.seen[0].body["max_completion_tokens"] == 9
    assert "max_tokens" not in server.seen[0].body


def test_seeds_differ_between_samples_and_turns_and_repeat_between_runs() -> None:
    def run() -> list[int]:
        with serve() as server:
            episodes = [episode(seed=seed) for seed in (1, 2, 3)]
            with contextlib.closing(policy(server, max_concurrency=1).open(episodes)) as session:
                for _ in range(3):
                    for one, reply in zip(episodes, session.reply(episodes), strict=True):
                        one.messages += [Message("assistant", text(reply)), Message("user", "a")]
        return [seen.body["seed"] for seen in server.seen]

    seeds = run()
    assert len(set(seeds)) == 9
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert run() == seeds


def test_logprobs_are_asked_for_only_when_told() -> None:
    def script(seen: Seen) -> Answer:
        whole = json.loads(completion("ab").body)
        if seen.body.get("return_token_ids") and seen.body.get("logprobs"):
            entries = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.5}]
            whole["choices"][0] |= {"logprobs": {"content": entries}, "token_ids": [4, 2]}
        return Answer(json.dumps(whole).encode())

    with serve(script) as server:
        [without] = ask(policy(server), episode())
        [with_them] = ask(policy(server, logprobs=True), episode())
    assert without == Reply("ab", prompt_tokens=17)
    assert with_them == Reply("ab", (4, 2), (-0.5, -1.5), prompt_tokens=17)
    assert "logprobs" not in server.seen[0].body


def test_logprobs_without_token_ids_are_an_error_that_says_what_is_needed() -> None:
    with serve() as server:
        [reply] = ask(policy(server, logprobs=True), episode())
    assert "return_token_ids" in error(reply)
    assert len(server.seen) == 1


# ------------------------------------------------------------------------- order and concurrency
def test_one_at_a_time_in_order() -> None:
    names = [f"room {i}" for i in range(6)]
    with serve() as server:
        replies = ask(policy(server, max_concurrency=1), *map(episode, names))
    assert [seen.opening for seen in server.seen] == names
    assert [text(reply) for reply in replies] == [f"[[ {name} ]]" for name in names]
    assert server.max_in_flight == 1


def test_concurrency_reaches_its_bound_and_never_passes_it() -> None:
    together = threading.Barrier(4)

    def script(seen: Seen) -> Answer:
        together.wait(30)  # breaks, and the test fails, unless four requests are under way at once
        return echo(seen)

    names = [f"room {i}" for i in range(12)]
    with serve(script) as server:
        replies = ask(policy(server, max_concurrency=4), *map(episode, names))
    assert [text(reply) for reply in replies] == [f"[[ {name} ]]" for name in names]
    assert server.max_in_flight == 4


def test_a_running_loop_in_the_callers_thread_is_no_obstacle() -> None:
    async def notebook_cell(server: FakeServer) -> list[Reply | EndpointError]:
        return ask(policy(server), episode("x"), episode("y"))

    with serve() as server:
        replies = asyncio.run(notebook_cell(server))
    assert [text(reply) for reply in replies] == ["[[ x ]]", "[[ y ]]"]


def test_every_attempt_goes_through_the_rate_limiter(
    monkeypatch: pytest.MonkeyPatch, sleeps: list[float]
) -> None:
    granted: list[float] = []

    class Recording(module.AsyncLimiter):
        async def acquire(self, amount: float = 1) -> None:
            await super().acquire(amount)
            granted.append(asyncio.get_running_loop().time())

    monkeypatch.setattr(module, "AsyncLimiter", Recording)
    with serve(first_then(failure(500), failure(500))) as server:
        replies = ask(policy(server, requests_per_minute=3000), *map(episode, "abcd"))
    assert all(isinstance(reply, Reply) for reply in replies)
    assert len(server.seen) == len(granted) == 6
    clock_tick = 1e-3
    assert all(b - a >= 60 / 3000 - clock_tick for a, b in itertools.pairwise(granted))


def test_an_empty_chunk_asks_nothing() -> None:
    with serve() as server:
        assert ask(policy(server)) == []
    assert server.seen == []


def test_close_ends_the_thread_and_may_be_called_twice() -> None:
    with serve() as server:
        before = set(threading.enumerate())
        session = policy(server).open([])
        own = set(threading.enumerate()) - before
        session.reply([episode()])
        session.close()
        session.close()
    assert own
    assert not any(thread.is_alive() for thread in own)


# ---------------------------------------------------------------------------- failures that pass
TRANSIENT = {
    "408": failure(408),
    "409": failure(409),
    "429": failure(429),
    "500": failure(500),
    "503": failure(503),
    "connection dropped in the body": Answer(b'{"choices": [', declared=500),
    "truncated JSON": Answer(completion("[[ a ]]").body[:-9]),
    "no JSON": Answer(b"<html>gateway</html>"),
    "not UTF-8": Answer(b'{"choices": "\xff\xfe"}'),
    "empty body": Answer(b""),
    "empty choices": Answer(b'{"choices": []}'),
    "no finish_reason": Answer(b'{"choices": [{"message": {"content": "x"}}]}'),
    "error with status 200": Answer(b'{"error": {"message": "overloaded", "code": 502}}'),
}


@pytest.mark.parametrize("name", TRANSIENT)
def test_transient_failures_are_tried_again_with_the_same_request(name: str) -> None:
    with serve(first_then(TRANSIENT[name], TRANSIENT[name])) as server:
        [reply] = ask(policy(server), episode("a"))
    assert text(reply) == "[[ a ]]"
    assert len(server.seen) == 3
    assert server.seen[0].body == server.seen[1].body == server.seen[2].body


def test_a_slow_answer_is_given_up_and_asked_for_again() -> None:
    server = FakeServer(lambda seen: hang_first(seen))

    def hang_first(seen: Seen) -> Answer:
        if seen.index == 0:
            server.closing.wait()
        return echo(seen)

    with server.running():
        [reply] = ask(policy(server, timeout=0.5), episode("a"))
    assert text(reply) == "[[ a ]]"
    assert len(server.seen) >= 2


def test_an_answer_that_never_comes_is_an_error_that_names_the_timeout() -> None:
    server = FakeServer(lambda _: completion("late") if server.closing.wait() else echo(_))
    with server.running():
        [reply] = ask(policy(server, timeout=0.05, max_retries=2), episode())
    assert "after 3 attempts: no answer within 0.05 s; raise timeout" in error(reply)


def test_retry_after_in_seconds_is_honoured(sleeps: list[float]) -> None:
    with serve(first_then(failure(429, retry_after="4"), failure(503, retry_after="2"))) as server:
        [reply] = ask(policy(server), episode("a"))
    assert text(reply) == "[[ a ]]"
    assert 4 <= sleeps[0] < 4.1
    assert 2 <= sleeps[1] < 2.1


def test_retry_after_as_a_date_is_honoured(sleeps: list[float]) -> None:
    until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    answer = failure(429, retry_after=email.utils.format_datetime(until, usegmt=True))
    with serve(first_then(answer)) as server:
        [reply] = ask(policy(server, max_wait=4000), episode("a"))
    assert text(reply) == "[[ a ]]"
    assert 3000 < sleeps[0] <= 3601


def test_a_retry_after_beyond_max_wait_is_not_waited_for(sleeps: list[float]) -> None:
    with serve(first_then(failure(429, "quota used up", retry_after="86400"))) as server:
        [reply] = ask(policy(server), episode())
    assert "after 1 attempt: answered 429 Too Many Requests (asks to wait 86400 s)" in error(reply)
    assert "quota used up" in error(reply)
    assert sleeps == []


def test_waits_grow_exponentially_are_jittered_and_bounded(sleeps: list[float]) -> None:
    with serve(lambda _: failure(500)) as server:
        ask(policy(server, backoff=1.0, max_wait=10.0, max_retries=6), episode())
    assert len(sleeps) == 6
    for wait, base in zip(sleeps, [1, 2, 4, 8, 10, 10], strict=True):
        assert base <= wait <= base + 1
    assert any(wait != int(wait) for wait in sleeps)


# ------------------------------------------------------------------------------ failures that stay
@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_lasting_failures_are_not_tried_again(status: int) -> None:
    with serve(lambda _: failure(status, "the reason")) as server:
        [reply] = ask(policy(server), episode())
    assert len(server.seen) == 1
    message = error(reply)
    assert f"POST {server.base_url}/chat/completions" in message
    assert f"after 1 attempt: answered {status} " in message
    assert "the reason" in message


def test_a_conversation_too_long_for_the_model_is_the_models_failure() -> None:
    complaint = "This model's maximum context length is 4096 tokens, however you requested 5000"
    with serve(lambda _: failure(400, complaint)) as server:
        [reply] = ask(policy(server), episode())
    assert isinstance(reply, ContextLimitError)
    assert complaint in str(reply)
    assert len(server.seen) == 1


def test_a_failing_episode_leaves_the_others_alone() -> None:
    def script(seen: Seen) -> Answer:
        return failure(503, "overloaded") if seen.opening == "bad" else echo(seen)

    with serve(script) as server:
        who = policy(server, max_retries=2)
        good, bad, fine = ask(who, episode("good"), episode("bad"), episode("fine"))
    assert (text(good), text(fine)) == ("[[ good ]]", "[[ fine ]]")
    assert "after 3 attempts: answered 503 Service Unavailable: overloaded" in error(bad)
    assert [seen.opening for seen in server.seen].count("bad") == 3
    assert len(server.seen) == 5


def test_wrong_model_names_it_and_the_remedy() -> None:
    with serve() as server:
        [reply] = ask(policy(server, model="toi"), episode())
    assert "The model `toi` does not exist" in error(reply)
    assert "check the model's name" in error(reply)


def test_wrong_path_names_the_remedy() -> None:
    with serve() as server:
        [reply] = ask(policy(server, base_url=server.base_url.removesuffix("/v1")), episode())
    assert "base_url ends at the API's root" in error(reply)


def test_a_filtered_reply_is_no_reply() -> None:
    with serve(lambda _: completion("", "content_filter")) as server:
        [reply] = ask(policy(server), episode())
    assert "content_filter" in error(reply)
    assert len(server.seen) == 1


@pytest.fixture
def dead_url() -> Iterator[str]:
    with socket.socket() as bound_but_not_listening:
        bound_but_not_listening.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound_but_not_listening.getsockname()[1]}/v1"


def test_a_refused_connection_is_given_up_after_a_few_quick_attempts(
    dead_url: str, sleeps: list[float]
) -> None:
    who = OpenAIPolicy(dead_url, "toy", max_retries=100)
    replies = ask(who, *map(episode, "abc"))
    for reply in replies:
        assert f"POST {dead_url}/chat/completions" in error(reply)
        assert "after 4 attempts: no connection" in error(reply)
        assert "check that the server is running and that base_url is right" in error(reply)
    assert len(sleeps) == 9
    assert max(sleeps) <= 3


# ------------------------------------------------------------------------------------- the API key
def test_the_key_comes_from_the_environment_or_the_argument(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serve(key=KEY) as server:
        [given] = ask(policy(server, api_key=KEY + "\n"), episode("a"))
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        [found] = ask(policy(server), episode("a"))
    assert text(given) == text(found) == "[[ a ]]"


def test_the_key_is_nowhere_to_be_read(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    def script(seen: Seen) -> Answer:  # servers do quote what they refuse
        quoted = f"Incorrect API key provided: {seen.headers['Authorization']}"
        return {
            "retried": failure(500, quoted),
            "refused": failure(401, quoted),
            "malformed": Answer(quoted.encode()),
            "filtered": completion("", f"filter {KEY}"),
        }[seen.opening]

    with serve(script) as server:
        who = policy(server, api_key=KEY, max_retries=1)
        replies = ask(who, *map(episode, ["retried", "refused", "malformed", "filtered"]))
        with contextlib.closing(who.open([])) as session:
            said = [repr(session), str(session)]
    assert all(seen.headers["Authorization"] == f"Bearer {KEY}" for seen in server.seen)
    said += [repr(who), str(who), json.dumps(who.describe()), repr(vars(who)), caplog.text]
    said += [error(reply) + repr(reply) + repr(reply.__cause__) for reply in replies]
    assert "Incorrect API key provided: Bearer [API key]" in error(replies[1])
    assert not [line for line in said if KEY in line]
    assert "next attempt in" in caplog.text


def test_a_key_that_no_header_can_carry_is_refused_without_being_shown() -> None:
    with pytest.raises(ConfigurationError) as caught:
        OpenAIPolicy("http://127.0.0.1/v1", "toy", api_key="sk-geheim\nX-Admin: 1")
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["http://me:hush@127.0.0.1/v1", "http://127.0.0.1/v1?key=hush", "127.0.0.1/v1#hush"]
)
def test_a_url_with_credentials_is_refused_without_being_shown(url: str) -> None:
    with pytest.raises(ConfigurationError, match="OPENAI_API_KEY") as caught:
        OpenAIPolicy(url, "toy")
    assert "hush" not in str(caught.value)


# ------------------------------------------------------------------------------------ configuration
@pytest.mark.parametrize(
    "arguments",
    [
        {"base_url": "127.0.0.1:8000/v1"},
        {"base_url": "ftp://127.0.0.1"},
        {"base_url": ""},
        {"model": ""},
        {"temperature": -0.1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"max_tokens": 0},
        {"max_concurrency": 0},
        {"max_retries": -1},
        {"requests_per_minute": 0},
        {"timeout": 0},
        {"logprobs": True, "temperature": 0.5},
        {"extra_body": {"seed": 1}},
        {"extra_body": {"messages": []}},
    ],
    ids=str,
)
def test_bad_arguments_are_refused_by_name(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(arguments))):
        OpenAIPolicy(**{"base_url": "http://127.0.0.1/v1", "model": "toy", **arguments})


def test_description_holds_what_changes_replies_and_nothing_else() -> None:
    def described(**arguments: Any) -> str:
        return json.dumps(OpenAIPolicy("http://h/v1", "toy", **arguments).describe())

    plain = described()
    for changing in (
        {"temperature": 0.5},
        {"top_p": 0.5},
        {"max_tokens": 5},
        {"extra_body": {"top_k": 1}},
    ):
        assert described(**changing) != plain
    neutral = {"max_concurrency": 1, "max_retries": 0, "timeout": 1, "requests_per_minute": 1}
    assert described(**neutral, api_key=KEY, backoff=9, max_wait=1) == plain
    assert json.dumps(OpenAIPolicy("http://h/v1/chat/completions", "toy").describe()) == plain


# --------------------------------------------------------------------------------- a whole episode
def test_played_episodes_send_their_whole_conversation_each_turn() -> None:
    replies = ["no action here", "[[ inventory ]]", "I look.\n[[ get 1 nonsense ]]"]

    def script(seen: Seen) -> Answer:
        turn = sum(message["role"] == "assistant" for message in seen.body["messages"])
        return completion(replies[turn])

    with serve(script) as server:
        episodes = []
        for sample in range(3):
            env = make("TextCraft-v0", max_turns=3)
            dialogue = env.dialogues()["full"]
            episodes.append(start(env, dialogue, env.tasks("test")[0], sample=sample))
        records = play(policy(server, max_concurrency=2), episodes)

    assert [record.error for record in records] == [None] * 3
    assert [record.n_turns for record in records] == [3] * 3
    assert len(server.seen) == 9
    for one, record in zip(episodes, records, strict=True):
        assert [turn.reply for turn in record.turns] == replies
        whole = [message.as_dict() for message in one.messages]
        opening = len(record.opening)
        for turn in range(3):
            assert whole[: opening + 2 * turn] in [seen.body["messages"] for seen in server.seen]
    assert len({seen.body["seed"] for seen in server.seen}) == 9
