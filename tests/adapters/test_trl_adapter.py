"""TRL's trainer plays queries through the rollout function."""

from __future__ import annotations

import itertools
import subprocess
import sys
from types import SimpleNamespace

import pytest

from agentbench_prefix import registry
from agentbench_prefix.adapters.trl import (
    environment_reward,
    linearize,
    make_rollout_func,
    prompt_dataset,
)
from agentbench_prefix.corpora.find import find_corpus
from agentbench_prefix.errors import ConfigurationError, UnknownNameError
from agentbench_prefix.evaluation.records import EpisodeRecord, TurnRecord

MAX_TURNS = 4


@pytest.fixture(scope="module")
def queries():
    rows = find_corpus("textcraft-prefix").queries("train")
    found = [q for q in itertools.islice(rows, 40) if q.prefix_turns < MAX_TURNS]
    raw = next(q for q in found if not q.prefix_turns)
    cut = next(q for q in found if q.prefix_turns == 2)
    return [raw, cut]


@pytest.fixture(scope="module")
def trained(queries, tmp_path_factory):
    """A trainer after one step, and what the rollout function gave it."""
    pytest.importorskip("trl")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    folder = registry.method("base").checkpoint("TextCraft-v0")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    frozen = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inner = make_rollout_func(queries, max_tokens=16, max_turns=MAX_TURNS)
    calls = []

    def rollout(prompts, trainer):
        calls.append((prompts, inner(prompts, trainer)))
        return calls[-1][1]

    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        args=GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("trl")),
            per_device_train_batch_size=4,
            num_generations=2,
            max_steps=1,
            max_completion_length=512,
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            save_strategy="no",
            logging_steps=1,
            learning_rate=1e-3,
        ),
        train_dataset=prompt_dataset(queries),
        reward_funcs=environment_reward,
        rollout_func=rollout,
    )
    trainer.train()
    return trainer, frozen, tokenizer, calls


pytestmark = pytest.mark.filterwarnings("default")  # TRL warns of what it uses itself


def test_a_step_of_trl_plays_the_queries_and_sees_their_rewards(trained, queries):
    trainer, _, _, calls = trained
    [(prompts, rows)] = calls
    assert len(prompts) == 4
    assert sorted(rows["query_id"]) == sorted(q.query_id for q in queries for _ in range(2))
    logged = trainer.state.log_history[0]
    assert logged["reward"] == pytest.approx(sum(rows["environment_reward"]) / 4)
    assert logged["completions/mean_length"] == pytest.approx(
        sum(sum(mask) for mask in rows["env_mask"]) / 4
    )


def test_its_tokens_are_those_of_the_episode_and_score_as_they_were_drawn(trained, queries):
    import torch

    _, frozen, tokenizer, calls = trained
    [(_, rows)] = calls
    by_id = {query.query_id: query for query in queries}
    for index, query_id in enumerate(rows["query_id"]):
        query = by_id[query_id]
        prompt, completion = rows["prompt_ids"][index], rows["completion_ids"][index]
        mask, logprobs = rows["env_mask"][index], rows["logprobs"][index]
        assert len(completion) == len(mask) == len(logprobs)
        # Log-probabilities: a plain forward pass of the model before the step.
        ids = torch.tensor([[*prompt, *completion]])
        with torch.no_grad():
            scores = frozen(ids).logits[0, :, : len(tokenizer)].log_softmax(-1)
        for place, (token, learn, logprob) in enumerate(
            zip(completion, mask, logprobs, strict=True)
        ):
            if learn:
                expected = float(scores[len(prompt) + place - 1, token])
                assert logprob == pytest.approx(expected, abs=1e-4)
            else:
                assert logprob == 0
        # The words: play the masked replies again from the cut, and compare the whole text.
        env = registry.make(query.env_id, max_turns=MAX_TURNS)
        observation, _ = env.reset(options=query.reset_options())
        assert observation == query.observation
        dialogue = env.dialogues()["compact"]
        text = tokenizer.decode(prompt)
        assert text.endswith("<|assistant|>")
        reward = 0.0
        pieces = itertools.groupby(zip(completion, mask, strict=True), key=lambda pair: pair[1])
        for learn, group in pieces:
            said = tokenizer.decode([t for t, _ in group], skip_special_tokens=learn == 1)
            if not learn:
                assert observation in said
                continue
            action = dialogue.parse(said).action
            step = (
                env.skip_turn(dialogue.answer("empty_action"))
                if action is None
                else env.step(action)
            )
            observation, paid, *_ = step
            reward += paid
        assert env.ended
        assert reward == rows["environment_reward"][index]
        assert rows["success"][index] == (reward > 0)


def test_the_adapter_imports_no_trl():
    code = "import sys, agentbench_prefix.adapters.trl; assert 'trl' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


_Trainer = SimpleNamespace(  # as much of a trainer as is needed before the model is
    args=SimpleNamespace(seed=0),
    state=SimpleNamespace(global_step=0),
    accelerator=SimpleNamespace(process_index=0),
)


def test_processes_and_steps_draw_different_episodes(trained, queries):
    _, frozen, tokenizer, _ = trained
    prompts = [[m.model_dump() for m in queries[0].messages]] * 2

    def drawn(process, step):
        trainer = SimpleNamespace(
            args=SimpleNamespace(seed=0),
            state=SimpleNamespace(global_step=step),
            accelerator=SimpleNamespace(process_index=process, unwrap_model=lambda model: model),
            model=frozen,
            processing_class=tokenizer,
            temperature=2.0,
            top_p=1.0,
        )
        found = make_rollout_func(queries, max_tokens=16, max_turns=MAX_TURNS)(prompts, trainer)
        return [tuple(ids) for ids in found["completion_ids"]]

    assert drawn(0, 0) == drawn(0, 0)
    assert len({*drawn(0, 0), *drawn(1, 0), *drawn(0, 1)}) == 6


def test_prompts_of_no_query_are_refused_by_name(queries):
    rollout = make_rollout_func(queries)
    with pytest.raises(UnknownNameError, match="unknown prompt"):
        rollout([[{"role": "user", "content": "craft me something"}]], _Trainer)
    with pytest.raises(ConfigurationError, match="list of messages"):
        rollout(["craft me something"], _Trainer)


def test_a_query_that_replays_to_something_else_is_refused(queries):
    changed = queries[1].model_copy(update={"observation": "Got 3 stick"})
    prompt = [m.model_dump() for m in changed.messages]
    with pytest.raises(ConfigurationError, match="replays to"):
        make_rollout_func([changed])([prompt], _Trainer)


def test_a_query_recorded_on_other_data_is_refused(queries):
    older = queries[1].model_copy(update={"data_hash": "0" * 64})
    prompt = [m.model_dump() for m in older.messages]
    with pytest.raises(ConfigurationError, match="recorded on data with the hash 0000"):
        make_rollout_func([older])([prompt], _Trainer)


def test_a_cut_reply_gets_an_end_that_is_not_learned():
    folder = registry.method("base").checkpoint("TextCraft-v0")
    from transformers import AutoTokenizer

    from agentbench_prefix.serialization import ChatSerializer

    serializer = ChatSerializer(AutoTokenizer.from_pretrained(folder))
    reply = serializer.reply("get 1 stick")[:-1]
    turn = TurnRecord(
        reply="get 1 stick",
        action="get 1 stick",
        problem=None,
        notes=(),
        observation="Got 1 stick",
        valid=True,
        reward=0.0,
        finish="length",
        prompt_tokens=0,
        token_ids=tuple(reply),
        logprobs=(-0.5,) * len(reply),
    )
    record = EpisodeRecord.model_construct(opening=(), turns=(turn, turn))
    record = record.model_copy(
        update={"opening": tuple(registry.make("TextCraft-v0").dialogues()["compact"].opening("x"))}
    )
    row = linearize(record, serializer)
    end = len(reply)
    assert row["completion_ids"][end] == serializer.end_id
    assert row["env_mask"][: end + 1] == [1] * end + [0]
    assert row["completion_ids"][-1] == serializer.end_id
    assert sum(row["env_mask"]) == 2 * end
