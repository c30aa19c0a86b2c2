"""The transformers policy against the plainest reference: one row, no cache, whole history."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import EchoEnv, make_model, make_tokenizer

from agentbench_prefix import rollouts
from agentbench_prefix.dialogue import Message
from agentbench_prefix.errors import CheckpointError, ConfigurationError, PolicyError
from agentbench_prefix.policies import transformers as module
from agentbench_prefix.policies.base import Episode, Reply
from agentbench_prefix.policies.tokens import find_checkpoint
from agentbench_prefix.policies.transformers import TransformersPolicy, draw

VOCABULARY = 259
END = 2
PAD = 0


@functools.cache
def shared_model(architecture: str = "qwen3", dtype: torch.dtype = torch.float32) -> Any:
    return make_model(architecture).to(dtype)


@functools.cache
def shared_tokenizer() -> Any:
    return make_tokenizer()


def make_policy(model: Any = None, **settings_: Any) -> TransformersPolicy:
    settings_ = {"max_tokens": 6, **settings_}
    model = shared_model() if model is None else model
    return TransformersPolicy(model, shared_tokenizer(), source={}, **settings_)


def make_episode(*texts: str, seed: int = 0, sample: int = 0) -> Episode:
    """An episode whose conversation alternates user and assistant texts, the user first."""
    messages = [Message("assistant" if i % 2 else "user", text) for i, text in enumerate(texts)]
    env = EchoEnv(max_turns=None)
    return Episode("echo_0", sample, seed, env, env.dialogues()["compact"], messages)


def answer(episode: Episode, reply: Reply, observation: str) -> None:
    episode.messages += [Message("assistant", reply.text), Message("user", observation)]


def ask(session: Any, episodes: Sequence[Episode]) -> list[Reply]:
    replies = session.reply(episodes)
    assert all(isinstance(reply, Reply) for reply in replies), replies
    return replies


class Reference:
    """Follows one conversation in tokens and scores each reply by a whole forward pass."""

    def __init__(self, policy: TransformersPolicy, model: Any, episode: Episode) -> None:
        self.serializer = policy.serializer
        self.model = model
        self.temperature = policy.temperature or 1.0
        self.ids = self.serializer.opening(episode.messages)

    def distributions(self, ids: Sequence[int], first: int) -> torch.Tensor:
        """Log-probabilities of the tokens from ``first`` on, over the ids that exist."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([list(ids)])).logits[0, first - 1 : -1]
        return (logits[:, :VOCABULARY] / self.temperature).log_softmax(-1)

    def check(self, reply: Reply, observation: str, tolerance: float = 1e-5) -> None:
        assert reply.token_ids is not None
        assert reply.logprobs is not None
        assert reply.prompt_tokens == len(self.ids)
        whole = [*self.ids, *reply.token_ids]
        expected = self.distributions(whole, len(self.ids))
        expected = expected.gather(-1, torch.tensor(reply.token_ids)[:, None])[:, 0]
        np.testing.assert_allclose(reply.logprobs, expected, rtol=0, atol=tolerance)
        self.ids = whole if whole[-1] == END else [*whole, END]
        self.ids += self.serializer.glue([Message("user", observation)])


def with_bias(model: Any, token: int, amount: float) -> Any:
    """Make a token more likely, for the policy and the reference alike."""
    shift = torch.zeros(model.config.vocab_size, dtype=model.dtype)
    shift[token] = amount
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: output + shift)
    return model


# ------------------------------------------------------------------ against the plain reference
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@settings(max_examples=8)
@given(data=st.data())
def test_every_turn_equals_encoding_each_history_alone(architecture: str, data: Any) -> None:
    model = shared_model(architecture)
    policy = make_policy(model, temperature=0.8)
    texts = st.text(max_size=40)
    openings = data.draw(st.lists(texts, min_size=1, max_size=24), label="openings")
    episodes = [make_episode(text, seed=i) for i, text in enumerate(openings)]
    references = [Reference(policy, model, episode) for episode in episodes]
    session = policy.open(episodes)
    running = list(range(len(episodes)))
    for _ in range(5):
        for index, reply in zip(running, ask(session, [episodes[i] for i in running]), strict=True):
            observation = data.draw(texts)
            references[index].check(reply, observation)
            answer(episodes[index], reply, observation)
        running = data.draw(st.permutations(running))
        running = running[: max(1, len(running) - data.draw(st.integers(0, 8)))]


def test_an_episode_that_was_left_out_can_come_back() -> None:
    policy = make_policy()
    episodes = [make_episode("long " * i, seed=i) for i in range(10)]
    references = [Reference(policy, shared_model(), episode) for episode in episodes]
    session = policy.open(episodes)
    for present in (range(10), [0, 4, 9], [4, 9], [9, 8, 4, 0], range(10)):
        replies = ask(session, [episodes[i] for i in present])
        for index, reply in zip(present, replies, strict=True):
            references[index].check(reply, "go on")
            answer(episodes[index], reply, "go on")


def test_cache_rows_are_given_up_once_a_fifth_is_idle() -> None:
    policy = make_policy()
    episodes = [make_episode("start", seed=i) for i in range(10)]
    session = policy.open(episodes)
    rows = []
    for running in (10, 9, 8, 7, 6):
        for episode, reply in zip(
            episodes[:running], ask(session, episodes[:running]), strict=True
        ):
            answer(episode, reply, "next")
        rows.append(session._cache.rows)
    assert rows == [10, 10, 8, 8, 6]


def test_conversation_with_earlier_turns_is_taken_up_where_it_stands() -> None:
    model = shared_model(dtype=torch.float64)
    policy = make_policy(model)
    texts = ["first", "an action", "second", "another", "third"]
    late = make_episode(*texts, seed=5)
    ids, _ = policy.serializer.conversation(late.messages[:-1], [True, True])
    reference = Reference(policy, model, late)
    reference.ids = ids + policy.serializer.glue(late.messages[-1:])
    (reply,) = ask(policy.open([late]), [late])
    reference.check(reply, "on", tolerance=1e-10)


def test_greedy_equals_generate() -> None:
    policy = make_policy(temperature=0)
    episodes = [make_episode("task " * i, seed=i) for i in range(5)]
    references = [Reference(policy, shared_model(), episode) for episode in episodes]
    session = policy.open(episodes)
    for _ in range(4):
        for reference, episode, reply in zip(
            references, episodes, ask(session, episodes), strict=True
        ):
            with torch.inference_mode():
                output = shared_model().generate(
                    torch.tensor([reference.ids]),
                    attention_mask=torch.ones(1, len(reference.ids), dtype=torch.long),
                    do_sample=False,
                    max_new_tokens=policy.max_tokens,
                    suppress_tokens=list(range(VOCABULARY, 272)),
                )
            assert reply.token_ids == tuple(output[0, len(reference.ids) :].tolist())
            reference.check(reply, "and then")
            answer(episode, reply, "and then")


# ------------------------------------------------------------------ sharing, batching, determinism
def count_tokens(policy: TransformersPolicy, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every pass through the model, in order."""
    counts: list[int] = []
    run = policy.runner.run

    def spy(pieces: Any, *arguments: Any, **keywords: Any) -> torch.Tensor:
        counts.append(sum(len(piece.ids) for piece in pieces))
        return run(pieces, *arguments, **keywords)

    monkeypatch.setattr(policy.runner, "run", spy)
    return counts


def test_a_groups_opening_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy(shared_model(dtype=torch.float64), max_tokens=1)
    counts = count_tokens(policy, monkeypatch)
    texts = ["one task", "another, longer task", "one task", "one task", "another, longer task"]
    episodes = [make_episode(text, seed=i) for i, text in enumerate(texts)]
    together = ask(policy.open(episodes), episodes)
    openings = [len(policy.serializer.opening(e.messages)) for e in episodes[:2]]
    assert counts == [sum(openings)]
    for episode, reply in zip(episodes, together, strict=True):
        (alone,) = ask(policy.open([episode]), [episode])
        assert alone.token_ids == reply.token_ids
        np.testing.assert_allclose(alone.logprobs or (), reply.logprobs or (), atol=1e-12)


def test_a_turn_computes_new_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy(max_tokens=1)
    counts = count_tokens(policy, monkeypatch)
    episode = make_episode("a task that is described at length")
    session = policy.open([episode])
    for _ in range(3):
        (reply,) = ask(session, [episode])
        answer(episode, reply, "ok")
    opening = len(policy.serializer.opening(episode.messages[:1]))
    added = len(policy.serializer.glue([Message("user", "ok")]))
    # The reply's one token and the end token that was missing travel with the next turn.
    assert counts == [opening, added + 2, added + 2]


def play_texts(policy: TransformersPolicy, groups: Sequence[Sequence[int]]) -> dict[int, Any]:
    """Tokens of three turns of each of some numbered episodes, played in the given groups."""
    said: dict[int, Any] = {}
    for group in groups:
        episodes = [make_episode("task " * (i % 4), seed=i) for i in group]
        session = policy.open(episodes)
        for turn in range(3):
            for index, episode, reply in zip(group, episodes, ask(session, episodes), strict=True):
                said.setdefault(index, []).append(reply.token_ids)
                answer(episode, reply, "x" * ((index + turn) % 5))
        session.close()
    return said


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_what_is_drawn_does_not_depend_on_the_batch(top_p: float) -> None:
    policy = make_policy(shared_model(dtype=torch.float64), top_p=top_p)
    whole = play_texts(policy, [range(12)])
    assert len({str(tokens) for tokens in whole.values()}) == 12
    assert play_texts(policy, [[i] for i in range(12)]) == whole
    assert play_texts(policy, [[11, 3, 7], [0, 1, 2, 4, 5], [10, 9, 8, 6]]) == whole


def test_small_packs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy(shared_model(dtype=torch.float64))
    whole = play_texts(policy, [range(12)])
    monkeypatch.setattr(module, "PACKED_TOKENS", 40)
    assert play_texts(policy, [range(12)]) == whole


def test_sessions_repeat_themselves() -> None:
    def once() -> list[Any]:
        policy = make_policy(max_tokens=8)
        env = EchoEnv(max_turns=4)
        dialogue = env.dialogues()["compact"]
        episodes = [
            rollouts.start(EchoEnv(max_turns=4), dialogue, task, sample=sample, seed=3)
            for task in env.tasks("train")[:4]
            for sample in range(2)
        ]
        return rollouts.play(policy, episodes)

    first = once()
    assert [record.n_turns for record in first] == [4] * 8
    assert all(record.error is None for record in first)
    assert once() == first


def test_samples_of_a_task_and_turns_of_an_episode_draw_differently() -> None:
    policy = make_policy()
    episodes = [make_episode("same", seed=seed) for seed in (1, 2, 2**63 + 1)]
    replies = ask(policy.open(episodes), episodes)
    assert len({reply.token_ids for reply in replies}) == 3
    draws = [module._uniforms(make_episode(*["same"] * n, seed=1), 4).tolist() for n in (1, 3, 5)]
    assert len({tuple(numbers) for numbers in draws}) == 3


def test_no_episode_and_one_episode() -> None:
    policy = make_policy()
    assert policy.open([]).reply([]) == []
    episode = make_episode("hello")
    session = policy.open([episode])
    assert session.reply([]) == []
    reference = Reference(policy, shared_model(), episode)
    for _ in range(3):
        (reply,) = ask(session, [episode])
        reference.check(reply, "more")
        answer(episode, reply, "more")


# ------------------------------------------------------------------ sampling
LOGITS = torch.tensor([2.0, -1.0, 0.5, 0.0, 3.0, -4.0, 1.0, 1.0])


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.3, 0.8), (1.0, 0.3)])
def test_frequencies_follow_the_softmax(temperature: float, top_p: float) -> None:
    n = 20_000
    uniforms = np.random.Generator(np.random.Philox(7)).random(n)
    tokens, logprobs = draw(LOGITS.expand(n, -1), temperature, top_p, uniforms)
    scaled = np.exp(LOGITS.double().numpy() / temperature)
    full = scaled / scaled.sum()
    order = np.argsort(-full, kind="stable")
    before = np.cumsum(full[order]) - full[order]
    kept = np.zeros(len(full), bool)
    kept[order[before < top_p]] = True
    cut = np.where(kept, full, 0) / full[kept].sum()
    counts = np.bincount(tokens.numpy(), minlength=len(full))
    assert counts[~kept].sum() == 0
    if kept.sum() > 1:
        assert scipy.stats.chisquare(counts[kept], n * cut[kept]).pvalue > 1e-3
    np.testing.assert_allclose(logprobs.numpy(), np.log(full[tokens.numpy()]), atol=1e-5)


@settings(max_examples=200)
@given(
    logits=st.lists(
        st.one_of(st.floats(-30, 30, width=32), st.just(-np.inf)), min_size=1, max_size=12
    ).filter(lambda values: max(values) > -np.inf),
    uniform=st.one_of(st.floats(0, 1, exclude_max=True), st.just(np.nextafter(1.0, 0.0))),
    top_p=st.one_of(st.just(1.0), st.floats(1e-6, 1)),
    temperature=st.floats(0.05, 5),
)
def test_draw_inverts_the_distribution(
    logits: list[float], uniform: float, top_p: float, temperature: float
) -> None:
    row = torch.tensor([logits], dtype=torch.float64)
    (token,), (logprob,) = draw(row, temperature, top_p, np.array([uniform]))
    probabilities = (row[0] / temperature).softmax(0).numpy()
    assert probabilities[token] > 0
    assert float(logprob) == pytest.approx(np.log(probabilities[token]), abs=1e-9)
    likelier = probabilities[probabilities > probabilities[token]].sum()
    assert likelier < top_p + 1e-9
    if top_p == 1:
        below, upto = probabilities[:token].sum(), probabilities[: token + 1].sum()
        assert below - 1e-9 <= uniform <= upto + 1e-9


def test_greedy_draw_takes_the_first_of_the_most_probable() -> None:
    tokens, logprobs = draw(torch.tensor([[0.0, 2.0, 2.0]]), 0.0, 1.0, np.zeros(1))
    assert tokens.tolist() == [1]
    assert logprobs.item() == pytest.approx(2 - np.log(1 + 2 * np.exp(2.0)), abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_padded_ids_are_never_drawn(temperature: float) -> None:
    model = make_model(tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[VOCABULARY:] *= 20
    policy = make_policy(model, temperature=temperature, max_tokens=20)
    episodes = [make_episode("task " * i, seed=i) for i in range(8)]
    reference = Reference(policy, model, episodes[0])
    with torch.inference_mode():
        favourite = model(torch.tensor([reference.ids])).logits[0, -1].argmax()
    assert favourite >= VOCABULARY
    replies = ask(policy.open(episodes), episodes)
    assert max(token for reply in replies for token in reply.token_ids or ()) < VOCABULARY
    reference.check(replies[0], "")


def test_log_probabilities_agree_with_scoring_the_same_tokens() -> None:
    policy = make_policy(temperature=0.7, top_p=0.5, max_tokens=10)
    episode = make_episode("a task", seed=4)
    (reply,) = ask(policy.open([episode]), [episode])
    ids = policy.serializer.opening(episode.messages)
    (scores,) = policy.score([[*ids, *(reply.token_ids or ())]])
    assert sum(reply.logprobs or ()) == pytest.approx(scores.logprobs[len(ids) :].sum(), abs=1e-4)
    np.testing.assert_allclose(reply.logprobs or (), scores.logprobs[len(ids) :], atol=1e-5)


# ------------------------------------------------------------------ ends of replies
def test_replies_stop_at_the_end_token_or_are_cut_and_closed() -> None:
    model = with_bias(make_model(), END, 4.0)
    policy = make_policy(model, max_tokens=4)
    episodes = [make_episode("task", seed=i) for i in range(12)]
    references = [Reference(policy, model, episode) for episode in episodes]
    session = policy.open(episodes)
    seen = set()
    for _ in range(3):
        for reference, episode, reply in zip(
            references, episodes, ask(session, episodes), strict=True
        ):
            tokens = reply.token_ids or ()
            assert (tokens[-1] == END) == (reply.finish == "stop")
            assert END not in tokens[:-1]
            assert len(tokens) == 4 or reply.finish == "stop"
            assert "<|im_end|>" not in reply.text
            seen.add(reply.finish)
            reference.check(reply, "next")
            answer(episode, reply, "next")
    assert seen == {"stop", "length"}


def test_other_end_tokens_of_the_checkpoint_stop_too_and_are_closed() -> None:
    model = with_bias(make_model(), PAD, 40.0)
    model.generation_config.eos_token_id = [END, PAD]
    policy = make_policy(model)
    episode = make_episode("task")
    reference = Reference(policy, model, episode)
    session = policy.open([episode])
    for _ in range(2):
        (reply,) = ask(session, [episode])
        assert reply.token_ids == (PAD,)
        assert reply.finish == "stop"
        assert reply.text == ""
        reference.check(reply, "next")
        answer(episode, reply, "next")


def test_a_full_context_ends_that_episode_only() -> None:
    model = make_model(max_position_embeddings=64)
    policy = make_policy(model, max_tokens=6)
    episodes = [make_episode(text, seed=i) for i, text in enumerate(["a", "b" * 60, "c" * 42])]
    assert len(policy.serializer.opening(episodes[2].messages)) == 61
    reference = Reference(policy, model, episodes[0])
    session = policy.open(episodes)
    first, long, nearly = session.reply(episodes)
    assert isinstance(first, Reply)
    reference.check(first, "")
    for failed in (long, nearly):
        assert isinstance(failed, PolicyError)
        assert "64 tokens" in str(failed)
    answer(episodes[0], first, "")
    (second,) = ask(session, episodes[:1])
    reference.check(second, "")


# ------------------------------------------------------------------ misuse
def test_misuse_is_named() -> None:
    policy = make_policy()
    episode, stranger = make_episode("a"), make_episode("b")
    session = policy.open([episode])
    with pytest.raises(ValueError, match="not one of the session's"):
        session.reply([stranger])
    with pytest.raises(ValueError, match="given twice"):
        session.reply([episode, episode])
    (reply,) = ask(session, [episode])
    with pytest.raises(ValueError, match="does not go on from the reply given"):
        session.reply([episode])
    episode.messages.append(Message("assistant", reply.text))
    with pytest.raises(ValueError, match="must end with a user message"):
        session.reply([episode])
    episode.messages[-1:] = [Message("assistant", reply.text + "!"), Message("user", "x")]
    with pytest.raises(ValueError, match="does not go on from the reply given"):
        session.reply([episode])
    session.close()
    with pytest.raises(ValueError, match="not one of the session's"):
        session.reply([episode])


@pytest.mark.parametrize(
    "changes",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.1},
     {"max_tokens": 0}],
)  # fmt: skip
def test_settings_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(changes))):
        make_policy(**changes)


def test_the_model_is_left_as_it_was_found() -> None:
    model = make_model()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        before = model(ids).logits
    policy = make_policy(model)
    model.train()
    episode = make_episode("task")
    ask(policy.open([episode]), [episode])
    policy.score([[1, 2, 3]])
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    model.eval()
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, before)


# ------------------------------------------------------------------ scoring
@settings(max_examples=20)
@given(
    sequences=st.lists(
        st.lists(st.integers(0, VOCABULARY - 1), max_size=30), min_size=0, max_size=6
    ),
    temperature=st.sampled_from([None, 0.5, 2.0]),
)
def test_scores_equal_a_plain_forward_pass(
    sequences: list[list[int]], temperature: float | None
) -> None:
    policy = make_policy(temperature=0.9)
    scores = policy.score(sequences, temperature)
    assert len(scores) == len(sequences)
    for ids, score in zip(sequences, scores, strict=True):
        assert len(score.logprobs) == len(score.entropies) == len(ids)
        if not ids:
            continue
        assert np.isnan(score.logprobs[0])
        assert np.isnan(score.entropies[0])
        with torch.inference_mode():
            logits = shared_model()(torch.tensor([ids])).logits[0, :-1, :VOCABULARY]
        expected = (logits / (temperature or 0.9)).log_softmax(-1)
        chosen = expected[torch.arange(len(ids) - 1), ids[1:]]
        entropies = -(expected.exp() * expected).sum(-1)
        np.testing.assert_allclose(score.logprobs[1:], chosen, rtol=0, atol=1e-5)
        np.testing.assert_allclose(score.entropies[1:], entropies, rtol=0, atol=1e-5)


def test_scores_do_not_depend_on_how_sequences_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy(shared_model(dtype=torch.float64))
    sequences = [[(7 * i + j) % VOCABULARY for j in range(3 + 5 * i)] for i in range(6)]
    together = policy.score(sequences)
    monkeypatch.setattr(module, "PACKED_TOKENS", 1)
    for one, other in zip(together, policy.score(sequences), strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-12)
        np.testing.assert_allclose(one.entropies, other.entropies, atol=1e-12)


def test_what_cannot_be_scored_is_named() -> None:
    policy = make_policy()
    with pytest.raises(PolicyError, match="sequence 1 has 1025 tokens"):
        policy.score([[1], [1] * 1025])
    with pytest.raises(PolicyError, match="outside the vocabulary"):
        policy.score([[1, VOCABULARY]])
    with pytest.raises(ConfigurationError, match="must be > 0"):
        policy.score([[1, 2]], temperature=0.0)


# ------------------------------------------------------------------ loading
def test_a_loaded_checkpoint_plays(checkpoint: Path) -> None:
    policy = TransformersPolicy.load(checkpoint, max_tokens=5)
    env = EchoEnv(max_turns=3)
    episodes = [rollouts.start(env, env.dialogues()["compact"], "echo_2")]
    (record,) = rollouts.play(policy, episodes)
    assert record.error is None
    assert record.n_turns == 3
    ids = list(policy.serializer.opening(record.opening))
    (scores,) = policy.score([[*ids, *(record.turns[0].token_ids or ())]])
    np.testing.assert_allclose(
        record.turns[0].logprobs or (), scores.logprobs[len(ids) :], atol=1e-5
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_precisions_play(checkpoint: Path, dtype: str) -> None:
    policy = TransformersPolicy.load(checkpoint, dtype=dtype, max_tokens=5)
    assert policy.describe()["dtype"] == dtype
    episodes = [make_episode("task " * i, seed=i) for i in range(3)]
    session = policy.open(episodes)
    for _ in range(2):
        for episode, reply in zip(episodes, ask(session, episodes), strict=True):
            assert all(score <= 0 for score in reply.logprobs or ())
            answer(episode, reply, "ok")


def test_description_holds_what_matters_and_nothing_else(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_checkpoint()
    described = TransformersPolicy.load(folder).describe()
    assert json.loads(json.dumps(described)) == described
    assert str(tmp_path) not in json.dumps(described)
    shutil.copytree(folder, tmp_path / "elsewhere")
    assert TransformersPolicy.load(tmp_path / "elsewhere").describe() == described
    for changes in ({"temperature": 0.5}, {"top_p": 0.9}, {"max_tokens": 3}, {"dtype": "float64"}):
        assert TransformersPolicy.load(folder, **changes).describe() != described
    assert TransformersPolicy.load(make_checkpoint(name="b", seed=1)).describe() != described


def break_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def drop_a_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def announce_two_shards(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {f"tensor_{i}": f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def drop_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "no checkpoint folder"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be loaded"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer"),
        (lambda folder: (folder / "model.safetensors").unlink(), "lacks weights: model.safet"),
        (only_pickles, "pickles"),
        (announce_two_shards, "model-00002-of-00002"),
        (break_weights, "cannot be loaded"),
        (drop_a_tensor, "lacks weights of its architecture: model.layers.1.mlp.up_proj.weight"),
        (drop_template, "no chat template"),
        (lambda folder: (folder / "chat_template.jinja").write_text("{% if"), "chat template of"),
    ],
)  # fmt: skip
def test_broken_checkpoints_are_refused(
    checkpoint: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(checkpoint)
    with pytest.raises(CheckpointError, match=message):
        TransformersPolicy.load(checkpoint)


def test_a_vocabulary_larger_than_the_model_is_refused(
    make_checkpoint: Callable[..., Path],
) -> None:
    with pytest.raises(CheckpointError, match="259 tokens but the model only 200"):
        TransformersPolicy.load(make_checkpoint(vocab_size=200))


def test_attention_that_is_not_full_is_refused(make_checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match="sliding_window=16"):
        TransformersPolicy.load(make_checkpoint("mistral", sliding_window=16))
    with pytest.raises(CheckpointError, match="sliding_attention"):
        TransformersPolicy.load(
            make_checkpoint(
                name="b", use_sliding_window=True, sliding_window=8, max_window_layers=1
            )
        )


def test_a_model_that_ignores_the_packed_attention_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model()
    monkeypatch.setattr(model, "set_attn_implementation", lambda _name: None)
    with pytest.raises(CheckpointError, match="other logits packed"):
        make_policy(model)


def test_bad_load_arguments_are_named(checkpoint: Path) -> None:
    with pytest.raises(ConfigurationError, match="dtype must be one of float32"):
        TransformersPolicy.load(checkpoint, dtype="int8")
    with pytest.raises(ConfigurationError, match="device 'gpu' cannot be used"):
        TransformersPolicy.load(checkpoint, device="gpu")
    with pytest.raises(ConfigurationError, match="belongs to a Hub id"):
        TransformersPolicy.load(checkpoint, revision="main")


@pytest.fixture
def dead_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The real Hub client, pointed at a port nobody listens on and an empty cache folder."""
    import huggingface_hub

    cache = tmp_path / "hub"
    download = functools.partial(
        huggingface_hub.snapshot_download, endpoint="http://127.0.0.1:9", cache_dir=cache
    )
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return cache


def test_an_unreachable_hub_is_named(dead_hub: Path) -> None:
    with pytest.raises(CheckpointError, match="Hub cannot be reached"):
        TransformersPolicy.load("someone/something")


def test_what_is_no_hub_id_is_named(dead_hub: Path) -> None:
    with pytest.raises(CheckpointError, match="no local folder"):
        TransformersPolicy.load("not a name")


def test_a_hub_id_is_recorded_with_its_commit(dead_hub: Path, checkpoint: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = dead_hub / "models--someone--something"
    shutil.copytree(checkpoint, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    for name in ("main", "v1"):
        (repository / "refs" / name).write_text(commit)
    policy = TransformersPolicy.load("someone/something")
    assert policy.describe()["model"] == "someone/something"
    assert policy.describe()["revision"] == commit
    tagged = TransformersPolicy.load("someone/something", revision="v1")
    assert tagged.describe() == policy.describe()
    found = find_checkpoint("someone/something", "v1")
    shutil.rmtree(repository / "refs")  # what was found is not looked up again
    assert TransformersPolicy.load(found).describe() == policy.describe()


def test_without_torch_the_extra_is_named() -> None:
    code = "import sys; sys.modules['torch'] = None\nimport agentbench_prefix.policies.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'agentbench-prefix[eval]'" in done.stderr


def test_the_throughput_benchmark_runs(repository: Path) -> None:
    arguments = ["--tasks", "1", "--samples", "2", "--max-turns", "2", "--max-tokens", "3"]
    done = subprocess.run(
        [sys.executable, "benchmarks/eval_throughput.py", *arguments],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for word in ("policy ", "generate ", "trl ", "policy / generate: ", "policy / trl: "):
        assert word in done.stdout
