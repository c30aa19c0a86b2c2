"""Spans, masks and old log-probabilities: one pass a trajectory against one pass a prompt."""

from __future__ import annotations

import importlib.util
import math

import numpy as np
import pytest

from agentbench_prefix import make
from agentbench_prefix.corpora.cuts import EntropyChange, RawEntropy
from agentbench_prefix.corpora.recipe import OracleTeacher, Scoring
from agentbench_prefix.corpora.schema import ModelEntry, to_messages, token_hash
from agentbench_prefix.corpora.scoring import Scorer, load_scorer
from agentbench_prefix.corpora.sidecars import prefix_of, sidecar, trace
from agentbench_prefix.corpora.teach import teach_oracle
from agentbench_prefix.errors import CheckpointError, ConfigurationError, PolicyError

TASKS = ("textcraft_40", "textcraft_300", "textcraft_400")
DIALOGUES = {"base": "compact", "tiny": "full"}
"""The shipped model plays the compact dialogue; one that reads bytes can be asked of any."""


@pytest.fixture(scope="module")
def rows():
    env = make("TextCraft-v0")
    teacher = OracleTeacher(per_task=2, detours=0.4)
    found = [row for task in TASKS for row in teach_oracle(env, teacher, task).trajectories]
    assert any(not turn.trainable for row in found for turn in row.turns)
    return found


@pytest.fixture(scope="module", params=["base", "tiny"])
def scorer(request, tiny_checkpoint):
    model = "base" if request.param == "base" else str(tiny_checkpoint)
    scoring = Scoring(dialogue=DIALOGUES[request.param], model=model, batch=4)
    return load_scorer(scoring, "TextCraft-v0")


@pytest.fixture(scope="module")
def plain(scorer):
    """The same weights in a model of the library transformers, asked one sequence at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    from agentbench_prefix.policies.tokens import find_checkpoint
    from agentbench_prefix.registry import method

    name = scorer.scoring.model
    folder = method("base").checkpoint("TextCraft-v0") if name == "base" else name
    model = AutoModelForCausalLM.from_pretrained(find_checkpoint(folder).folder).float().eval()
    known = scorer.policy.vocabulary

    def ask(ids, temperature=1.0):
        """Log-probabilities of every token but the first, and entropies, in nats."""
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, :-1, :known].double() / temperature
        logp = logits.log_softmax(-1)
        chosen = logp.gather(-1, torch.tensor(ids)[1:, None])[:, 0]
        entropies = -(logp.exp() * logp).nan_to_num().sum(-1)
        return np.append(np.nan, chosen.numpy()), np.append(np.nan, entropies.numpy())

    return ask


@pytest.fixture(scope="module")
def scored(scorer, rows):
    return scorer.score([row.conversation(scorer.scoring.dialogue) for row in rows])


def make_sidecar(scorer, row, one, turns):
    return sidecar(
        f"{row.trajectory_id}/{scorer.scoring.dialogue}/{turns}",
        one.layout,
        [turn.trainable for turn in row.turns],
        turns,
        one.logprobs,
        name=scorer.scoring.label,
        model=scorer.entry,
        backend=scorer.scoring.backend,
        dtype=scorer.scoring.dtype,
        temperature=scorer.scoring.temperature,
    )


def canonical_prompt(row, dialogue, turns):
    """Messages of a cut's prompt, by the definition: up to the observation at the cut."""
    messages = to_messages(row.conversation(dialogue).messages)
    replies = [i for i, m in enumerate(messages) if m.role == "assistant"]
    return messages[: replies[turns]]


def test_one_pass_a_trajectory_equals_one_pass_a_prompt(scorer, rows, scored):
    """The prompts of a trajectory's cuts are nested; the second pass sees one prompt alone."""
    compared = 0
    for row, one in zip(rows, scored, strict=True):
        cuts = range(row.n_turns)
        prompts = [canonical_prompt(row, scorer.scoring.dialogue, k) for k in cuts]
        layouts = [scorer.policy.serializer.lay_out(prompt) for prompt in prompts]
        for k, layout in zip(cuts, layouts, strict=True):
            found = make_sidecar(scorer, row, one, k)
            assert found.prompt_tokens == len(layout.ids)
            assert found.prompt_sha256 == token_hash(layout.ids)
            assert one.layout.ids[: len(layout.ids)] == layout.ids
            [alone] = scorer.policy.score([layout.ids], scorer.scoring.temperature)
            begin, end = found.assistant_prefix_span
            np.testing.assert_allclose(
                found.assistant_prefix_old_log_probs, alone.logprobs[begin:end], atol=1e-4, rtol=0
            )
            trainable = [turn.trainable for turn in row.turns]
            assert prefix_of(layout, trainable[:k], k) == (begin, end, found.prefix_mask)
            compared += end - begin
    assert compared > 1000


def test_one_pass_equals_many_but_for_rounding(tiny_checkpoint, rows):
    """In double precision nothing is left of the differences above."""
    for model in ("base", str(tiny_checkpoint)):
        scorer = load_scorer(
            Scoring(dialogue="compact", model=model, dtype="float64"), "TextCraft-v0"
        )
        scored = scorer.score([row.conversation("compact") for row in rows[::3]])
        for row, one in zip(rows[::3], scored, strict=True):
            ends = [one.layout.replies[k][0] for k in range(row.n_turns)]
            prompts = scorer.policy.score([one.layout.ids[:end] for end in ends], 1.0)
            for end, alone in zip(ends, prompts, strict=True):
                np.testing.assert_allclose(one.logprobs[:end], alone.logprobs, atol=1e-10, rtol=0)
                np.testing.assert_allclose(one.entropies[:end], alone.entropies, atol=1e-10, rtol=0)


def test_log_probabilities_and_entropies_are_those_of_a_plain_forward(scorer, rows, scored, plain):
    for row, one in zip(rows, scored, strict=True):
        logprobs, entropies = plain(one.layout.ids)
        np.testing.assert_allclose(one.logprobs, logprobs, atol=1e-4, rtol=0)
        np.testing.assert_allclose(one.entropies, entropies, atol=1e-4, rtol=0)
        assert math.isnan(one.logprobs[0])
        # What cuts are ranked by: the entropies at assistant tokens, turn by turn.
        seen = trace(row.trajectory_id, one.layout, one.entropies)
        positions = [
            (turn, position)
            for turn, (begin, end) in enumerate(one.layout.replies)
            for position in range(begin, end)
        ]
        assert seen.n_turns == row.n_turns
        assert seen.turn_of.tolist() == [turn for turn, _ in positions]
        expected = [entropies[position] for _, position in positions]
        np.testing.assert_allclose(seen.entropies, expected, atol=1e-4, rtol=0)
        for strategy in (EntropyChange(w=5), RawEntropy()):
            chosen = strategy.choose(seen)
            again = strategy.choose(trace(row.trajectory_id, one.layout, entropies))
            assert [c.score for c in chosen] == pytest.approx([c.score for c in again], abs=1e-4)


def test_spans_and_masks_hold_what_the_teacher_wrote(scorer, rows, scored):
    serializer = scorer.policy.serializer
    for row, one in zip(rows, scored, strict=True):
        for k in range(1, row.n_turns):
            found = make_sidecar(scorer, row, one, k)
            begin, end = found.assistant_prefix_span
            mask = found.prefix_mask
            assert 0 < begin < end < found.prompt_tokens
            assert len(mask) == len(found.assistant_prefix_old_log_probs) == end - begin
            assert found.prefix_token_count == sum(mask)
            assert set(mask) <= {0, 1}
            assert all(value <= 0 for value in found.assistant_prefix_old_log_probs)
            # The span begins with the first reply and ends behind the last one's end-of-turn token.
            ids = one.layout.ids
            assert ids[end - 1] == serializer.end_id
            assert mask[0] == int(row.turns[0].trainable)
            assert mask[-1] == int(row.turns[k - 1].trainable)
            # The masked tokens are the replies of the turns that are learned, and nothing else.
            said = [ids[begin + i] for i, learn in enumerate(mask) if learn]
            replies = [
                m.content
                for m in canonical_prompt(row, scorer.scoring.dialogue, k)
                if m.role == "assistant"
            ]
            expected = []
            for reply, turn in zip(replies, row.turns, strict=False):
                expected += serializer.reply(reply) if turn.trainable else []
            assert said == expected
            assert (serializer.end_id in said) == any(t.trainable for t in row.turns[:k])
        longest = make_sidecar(scorer, row, one, row.n_turns - 1)
        shorter = make_sidecar(scorer, row, one, 1)
        assert longest.prefix_mask[: len(shorter.prefix_mask)] == shorter.prefix_mask


def test_a_raw_query_has_no_prefix(scorer, rows, scored):
    found = make_sidecar(scorer, rows[0], scored[0], 0)
    assert found.assistant_prefix_span == [0, 0]
    assert found.prefix_mask == found.assistant_prefix_old_log_probs == []
    assert found.prefix_token_count == 0
    opening = canonical_prompt(rows[0], scorer.scoring.dialogue, 0)
    assert found.prompt_sha256 == token_hash(scorer.policy.serializer.opening(opening))


def test_a_sidecar_names_its_model(scorer, rows, scored):
    from agentbench_prefix.files import sha256_file
    from agentbench_prefix.policies.tokens import find_checkpoint

    found = make_sidecar(scorer, rows[0], scored[0], 1)
    assert (found.model, found.tokenizer) == (scorer.scoring.label, scorer.entry.tokenizer)
    assert found.tokenizer == scorer.policy.serializer.fingerprint()
    assert scorer.entry.checkpoint_sha256 == scorer.policy.describe()["sha256"]
    assert found.vocabulary == len(scorer.policy.serializer.tokenizer)
    assert (found.backend, found.dtype, found.temperature) == ("transformers", "float32", 1.0)
    assert found.logprob_mode == "teacher_forcing"
    if scorer.scoring.model != "base":
        weights = find_checkpoint(scorer.scoring.model).folder / "model.safetensors"
        assert found.model_sha256 == sha256_file(weights)
        assert scorer.entry.source == {"model": scorer.scoring.model}
    else:
        assert scorer.entry.source == {"method": "base"}


def test_every_trajectory_is_sent_through_the_model_once(tiny_checkpoint, rows, monkeypatch):
    scorer = load_scorer(Scoring(dialogue="compact", model=str(tiny_checkpoint), batch=2), "x")
    sent = []
    score = scorer.policy.score

    def counted(sequences, temperature):
        sent.extend(sequences)
        return score(sequences, temperature)

    monkeypatch.setattr(scorer.policy, "score", counted)
    scored = scorer.score([row.conversation("compact") for row in rows])
    assert sent == [one.layout.ids for one in scored]
    assert scorer.tokens == sum(map(len, sent))


def test_the_batch_changes_nothing_but_rounding(tiny_checkpoint, rows):
    conversations = [row.conversation("compact") for row in rows]
    scores = [
        load_scorer(Scoring(dialogue="compact", model=str(tiny_checkpoint), batch=n), "x").score(
            conversations
        )
        for n in (1, 3, 100)
    ]
    for others in scores[1:]:
        for one, other in zip(scores[0], others, strict=True):
            assert one.layout == other.layout
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5, rtol=0)
            np.testing.assert_allclose(one.entropies, other.entropies, atol=1e-5, rtol=0)


def test_a_temperature_heats_what_is_scored(tiny_checkpoint, rows):
    conversation = rows[0].conversation("compact")
    cool, hot = (
        load_scorer(Scoring(dialogue="compact", model=str(tiny_checkpoint), temperature=t), "x")
        for t in (1.0, 2.5)
    )
    [one], [two] = cool.score([conversation]), hot.score([conversation])
    assert two.entropies[1:].mean() > one.entropies[1:].mean()
    [direct] = cool.policy.score([one.layout.ids], 2.5)
    np.testing.assert_allclose(two.logprobs, direct.logprobs, atol=1e-6)


def test_a_conversation_that_does_not_fit_the_context_is_refused(tmp_path, rows):
    from tiny import make_model, make_tokenizer

    make_model(max_position_embeddings=100).save_pretrained(tmp_path / "short")
    make_tokenizer().save_pretrained(tmp_path / "short")
    scorer = load_scorer(Scoring(dialogue="compact", model=str(tmp_path / "short")), "x")
    with pytest.raises(PolicyError, match="context 100"):
        scorer.score([rows[0].conversation("compact")])


def test_models_that_are_not_there(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="no checkpoint folder"):
        load_scorer(Scoring(dialogue="compact", model=str(tmp_path / "none")), "TextCraft-v0")
    with pytest.raises(CheckpointError, match="'base' ships no checkpoint for Chess-v0"):
        load_scorer(Scoring(dialogue="compact", model="base"), "Chess-v0")


# ------------------------------------------------------------------ vLLM's prompt log-probabilities
def test_a_back_end_without_entropies(tiny_checkpoint, rows):
    """vLLM gives log-probabilities alone: sidecars come out, entropies do not."""
    real = load_scorer(Scoring(dialogue="compact", model=str(tiny_checkpoint)), "x")

    class Fake:
        serializer = real.policy.serializer

        def score(self, sequences):
            return [[math.nan] + [-float(i) for i in ids[1:]] for ids in sequences]

    scoring = Scoring(dialogue="compact", model="m", backend="vllm", batch=1)
    entry = ModelEntry(
        checkpoint_sha256="0",
        model_sha256="2",
        tokenizer="1",
        vocabulary=7,
        dialogue="compact",
        source={},
    )
    scorer = Scorer(scoring, entry, Fake())
    for row, one in zip(
        rows, scorer.score([row.conversation("compact") for row in rows]), strict=True
    ):
        assert one.entropies is None
        found = make_sidecar(scorer, row, one, row.n_turns - 1)
        begin, end = found.assistant_prefix_span
        assert found.assistant_prefix_old_log_probs == [
            -float(i) for i in one.layout.ids[begin:end]
        ]
        assert (found.backend, found.model) == ("vllm", "m")


def test_vllm_scores_at_temperature_1_only(tiny_checkpoint):
    scoring = Scoring(
        dialogue="compact", model=str(tiny_checkpoint), backend="vllm", temperature=0.7
    )
    with pytest.raises(
        ConfigurationError, match=r"temperature 1 only, got 0\.7: use the transform"
    ):
        load_scorer(scoring, "TextCraft-v0")


@pytest.mark.vllm
@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed: scripts/test_vllm.sh"
)
@pytest.mark.filterwarnings("default")
@pytest.mark.timeout(600)
def test_vllm_gives_the_sidecars_of_transformers(tmp_path, rows, record_property):
    from tiny import make_model, make_tokenizer

    folder, tokenizer = tmp_path / "model", make_tokenizer()
    # Its attention takes heads of 64; the other ids would have a tenth of the mass.
    model = make_model(head_dim=64, vocab_size=288, max_position_embeddings=4096)
    assert len(tokenizer) == 259
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    mine, theirs = (
        load_scorer(Scoring(dialogue="compact", model=str(folder), backend=backend), "x")
        for backend in ("transformers", "vllm")
    )
    assert mine.entry == theirs.entry
    conversations = [row.conversation("compact") for row in rows]
    worst = 0.0
    for row, one, two in zip(
        rows, mine.score(conversations), theirs.score(conversations), strict=True
    ):
        for k in range(row.n_turns):
            ours, other = make_sidecar(mine, row, one, k), make_sidecar(theirs, row, two, k)
            same = {"assistant_prefix_old_log_probs": [], "backend": "vllm"}
            assert ours.model_copy(update=same) == other.model_copy(update=same)
            gaps = np.subtract(
                ours.assistant_prefix_old_log_probs, other.assistant_prefix_old_log_probs
            )
            worst = max(worst, float(np.abs(gaps).max(initial=0)))
    record_property("figures", f"log-probabilities within {worst:.1e}")
    assert 0 < worst < 1e-4
