"""The vLLM back end against transformers; see ``scripts/test_vllm.sh``."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from agentbench_prefix.dialogue import Message
from agentbench_prefix.errors import ConfigurationError, MissingExtraError
from agentbench_prefix.rollouts import play, start

MODULE = "agentbench_prefix.policies.vllm"
CONTEXT = 256
MAX_TOKENS = 8
TASKS = ("echo_0", "echo_3", "echo_7", "echo_19")
"""Conversations of the last one outgrow the context."""


def test_without_vllm_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)  # what import finds where it is not installed
    with pytest.raises(MissingExtraError, match=r"agentbench-prefix\[vllm\]"):
        importlib.import_module(MODULE)


# ------------------------------------------------------------------ an engine's stand-in
class Worker:
    """Holds a model whose logits are a table: those behind token ``t`` are its row ``t``."""

    def __init__(self, table: Any) -> None:
        self.model = SimpleNamespace(compute_logits=lambda ids: table[ids].clone())

    def get_model(self) -> Any:
        return self.model


class Engine:
    """As much of ``vllm.LLM`` as scoring prompts takes."""

    def __init__(self, worker: Worker, rows: int) -> None:
        self.worker = worker
        model = SimpleNamespace(
            get_vocab_size=lambda: rows, max_model_len=CONTEXT, dtype="torch.float32"
        )
        config = SimpleNamespace(model_config=model, use_v2_model_runner=False)
        self.llm_engine = SimpleNamespace(vllm_config=config)

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return [getattr(self.worker, method)(*args)]

    def generate(self, prompts: list[Any], parameters: Any, use_tqdm: bool) -> list[Any]:
        import torch

        outputs = []
        for prompt in prompts:
            ids = prompt["prompt_token_ids"]
            rows = self.worker.get_model().compute_logits(torch.tensor(ids[:-1])).log_softmax(-1)
            pairs = zip(ids[1:], rows, strict=True)
            found = [{token: SimpleNamespace(logprob=float(row[token]))} for token, row in pairs]
            outputs.append(SimpleNamespace(prompt_logprobs=[None, *found]))
        return outputs


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, imported with a vLLM that has names and nothing else."""
    names = {
        "vllm": {"SamplingParams": lambda **given: given, "LLM": Engine, "__version__": "0"},
        "vllm.inputs": {"TokensPrompt": dict},
        "vllm.platforms": {"current_platform": SimpleNamespace(device_type="cpu")},
        "vllm.v1.sample.logits_processor": {"LogitsProcessor": type("One", (), {})},
        "vllm.v1.worker.gpu.sample.logits_processor": {"LogitsProcessor": type("Two", (), {})},
    }
    for name, members in names.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE)


def load_stand_in(module: Any, engine: Engine, tokenizer: Any) -> Any:
    settings = {"temperature": 1.0, "top_p": 1.0, "max_tokens": MAX_TOKENS}
    return module.VLLMPolicy(engine, tokenizer, stop_ids=[], source={}, **settings)


@pytest.mark.parametrize("padded", [0, 13])
def test_prompts_are_scored_over_the_ids_of_the_tokenizer(
    stand_in: Any, tokenizer: Any, padded: int
) -> None:
    import torch

    known = len(tokenizer)
    table = torch.randn(known, known + padded, generator=torch.Generator().manual_seed(0))
    table[:, known:] += 5  # most of the mass, if it were counted
    worker = type("Extended", (Worker, stand_in.KnownTokens), {})(table)
    policy = load_stand_in(stand_in, Engine(worker, known + padded), tokenizer)
    sequences = [tokenizer(text)["input_ids"] for text in ("one two", "", "x", "three")]
    scores = policy.score(sequences)
    expected = table[:, :known].log_softmax(-1)
    compared = 0
    for ids, score in zip(sequences, scores, strict=True):
        assert len(score) == len(ids)
        for before, token, found in zip(ids, ids[1:], score[1:], strict=False):
            assert found == pytest.approx(float(expected[before, token]), abs=1e-5)
            compared += 1
    assert compared == 6 + 0 + 0 + 4
    assert worker.model.compute_logits(torch.tensor([0])).shape == (1, known + padded)
    assert torch.isfinite(table).all()


def test_workers_without_logits_have_nothing_to_leave_out(stand_in: Any) -> None:
    worker = type("Extended", (Worker, stand_in.KnownTokens), {})(None)
    worker.model.compute_logits = lambda ids: None
    worker.agentbench_prefix_leave_out(3)
    assert worker.model.compute_logits([0]) is None


def test_an_engine_that_cannot_leave_ids_out_is_refused(stand_in: Any, tokenizer: Any) -> None:
    import torch

    known = len(tokenizer)
    plain = Worker(torch.zeros(known, known + 5))
    with pytest.raises(ConfigurationError, match=f"has {known + 5} ids .* only {known}.*load"):
        load_stand_in(stand_in, Engine(plain, known + 5), tokenizer)
    assert load_stand_in(stand_in, Engine(plain, known), tokenizer).score([[3, 4]])


# ------------------------------------------------------------------ the engine itself
def needs_vllm(test: Any) -> Any:
    absent = importlib.util.find_spec("vllm") is None
    for mark in (
        pytest.mark.vllm,
        pytest.mark.skipif(absent, reason="vllm is not installed: scripts/test_vllm.sh"),
        pytest.mark.filterwarnings("default"),
        pytest.mark.timeout(600),
    ):
        test = mark(test)
    return test


@dataclasses.dataclass(frozen=True)
class Case:
    """How an engine is loaded."""

    temperature: float
    top_p: float

    def __str__(self) -> str:
        return f"temperature {self.temperature} top_p {self.top_p}"


CASES = [Case(0.0, 1.0), Case(1.0, 1.0), Case(0.7, 1.0), Case(1.3, 0.6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A random Qwen3 that likes to end its turn, and likes ids that its tokenizer lacks."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=272,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            max_position_embeddings=1024,
            initializer_range=0.3,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=2,
            pad_token_id=0,
        )
    )
    with torch.no_grad():
        model.lm_head.weight[len(tokenizer) :] *= 3
        model.lm_head.weight[2] *= 2.5
    folder = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def policy(case: Case, folder: Path) -> Iterator[Any]:
    from agentbench_prefix.policies.vllm import VLLMPolicy

    loaded = VLLMPolicy.load(
        folder,
        temperature=case.temperature,
        top_p=case.top_p,
        max_tokens=MAX_TOKENS,
        max_model_len=CONTEXT,
        enforce_eager=True,
    )
    with contextlib.closing(loaded):
        yield loaded


def opened(echo_env: Any, samples: int = 2) -> list[Any]:
    return [
        start(env, env.dialogues()["compact"], task, sample=sample)
        for task in TASKS
        for sample in range(samples)
        for env in [echo_env(max_turns=5)]
    ]


def conversation(serializer: Any, record: Any) -> tuple[list[int], list[range]]:
    """A record's conversation in tokens, and where the replies are in it."""
    ids = serializer.opening(record.opening)
    replies = []
    for turn in record.turns:
        assert turn.prompt_tokens == len(ids)
        replies.append(range(len(ids), len(ids) + len(turn.token_ids)))
        ids = [*ids, *turn.token_ids]
        if ids[-1] != serializer.end_id:
            ids.append(serializer.end_id)
        ids += serializer.glue([Message("user", turn.observation)])
    return ids, replies


def logits(reference: Any, ids: list[int]) -> Any:
    """Logits that predict each token of a sequence but the first: ``[tokens, vocabulary]``."""
    import torch

    with torch.inference_mode():
        predicted = reference(torch.tensor([ids])).logits[0, :-1]
    return torch.cat([predicted.new_full((1, predicted.shape[1]), math.nan), predicted])


@needs_vllm
def test_tokens_and_logprobs_are_those_of_transformers(
    case: Case, policy: Any, reference: Any, echo_env: Any, tokenizer: Any, record_property: Any
) -> None:
    records = play(policy, opened(echo_env))
    known = len(tokenizer)
    worst, drawn, tempting = 0.0, 0, 0
    for record in records:
        ids, replies = conversation(policy.serializer, record)
        predicted = logits(reference, ids)
        for turn, span in zip(record.turns, replies, strict=True):
            rows = predicted[list(span)]
            tempting += int((rows.argmax(-1) >= known).sum())
            rows = rows[:, :known] / (case.temperature or 1.0)
            expected = rows.log_softmax(-1)
            for token, found, row in zip(turn.token_ids, turn.logprobs, expected, strict=True):
                worst = max(worst, abs(found - float(row[token])))
                drawn += 1
                if case.temperature == 0:
                    assert token == int(row.argmax())
                likelier = row[row > row[token]].exp().sum()
                assert case.top_p == 1 or float(likelier) < case.top_p
            assert turn.reply == tokenizer.decode(turn.token_ids, skip_special_tokens=True)
            stopped = turn.token_ids[-1] == policy.serializer.end_id
            assert turn.finish == ("stop" if stopped else "length")
            assert stopped or len(turn.token_ids) == MAX_TOKENS
    record_property("figures", f"{drawn} tokens, log-probabilities within {worst:.1e}")
    assert drawn > 100
    assert tempting > 10  # else nothing shows that padded ids are left out
    assert worst < 1e-4
    finishes = {turn.finish for record in records for turn in record.turns}
    assert finishes == {"stop", "length"}


@needs_vllm
def test_greedy_play_is_that_of_the_transformers_policy(
    case: Case, policy: Any, folder: Path, echo_env: Any
) -> None:
    from agentbench_prefix.policies.transformers import TransformersPolicy

    other = TransformersPolicy.load(folder, temperature=0.0, max_tokens=MAX_TOKENS)
    assert policy.describe()["sha256"] == other.describe()["sha256"]
    assert policy.stop_ids == other.stop_ids
    if case.temperature != 0:
        pytest.skip("sampled: the back ends draw with generators of their own")
    records = play(policy, opened(echo_env, samples=1)[:3])
    for mine, theirs in zip(records, play(other, opened(echo_env, samples=1)[:3]), strict=True):
        assert mine.error is theirs.error is None
        for one, two in zip(mine.turns, theirs.turns, strict=True):
            assert one.model_copy(update={"logprobs": None}) == two.model_copy(
                update={"logprobs": None}
            )
            assert one.logprobs == pytest.approx(two.logprobs, abs=1e-4)


@needs_vllm
def test_samples_differ_and_repeat(case: Case, policy: Any, echo_env: Any) -> None:
    def said() -> list[list[str]]:
        records = play(policy, opened(echo_env)[:4])
        return [[turn.reply for turn in record.turns] for record in records]

    first, second = said()[:2]
    assert (first == second) == (case.temperature == 0)
    assert said() == said()


@needs_vllm
def test_a_conversation_that_outgrows_the_context_fails_alone(policy: Any, echo_env: Any) -> None:
    records = play(policy, opened(echo_env))
    for record in records:
        assert record.error is None
        outgrown = record.failure_category == "context_limit"
        assert outgrown == (record.task_id == TASKS[-1])


@needs_vllm
def test_a_conversation_longer_than_the_context_is_not_sent(policy: Any, echo_env: Any) -> None:
    first, second = opened(echo_env)[:2]
    first.messages[-1] = Message("user", "long " * CONTEXT)
    with contextlib.closing(policy.open([first, second])) as session:
        too_long, fine = session.reply([first, second])
        [alone] = session.reply([first])
    assert f"context of {CONTEXT} tokens" in str(too_long) == str(alone)
    assert fine.token_ids


@needs_vllm
def test_score_is_teacher_forcing(
    case: Case, policy: Any, reference: Any, tokenizer: Any, record_property: Any
) -> None:
    sequences = [tokenizer(text)["input_ids"] for text in ("a", "", "one two three", "x" * 200)]
    if case.top_p < 1:
        with pytest.raises(ConfigurationError, match="top_p=1"):
            policy.score(sequences)
        return
    scores = policy.score(sequences)
    assert [len(score) for score in scores] == [len(ids) for ids in sequences]
    worst = 0.0
    for ids, score in zip(sequences, scores, strict=True):
        assert all(math.isnan(entry) for entry in score[:1])
        if len(ids) > 1:
            expected = logits(reference, ids)[:, : len(tokenizer)].log_softmax(-1)
            gaps = [abs(score[t] - float(expected[t, ids[t]])) for t in range(1, len(ids))]
            worst = max(worst, *gaps)
    record_property("figures", f"scores within {worst:.1e}")
    assert 0 < worst < 1e-4
    with pytest.raises(Exception, match="vocabulary"):
        policy.score([[0, len(tokenizer)]])
    with pytest.raises(Exception, match=f"context of {CONTEXT}"):
        policy.score([[5] * CONTEXT])


@needs_vllm
def test_an_episode_may_start_in_the_middle_of_a_conversation(policy: Any, echo_env: Any) -> None:
    [episode] = opened(echo_env)[:1]
    taught = [Message("assistant", "hello"), Message("user", "Said 5")]
    expected = policy.serializer.conversation([*episode.messages, taught[0]], [True])[0]
    expected = [*expected, *policy.serializer.glue([taught[1]])]
    episode.messages += taught
    with contextlib.closing(policy.open([episode])) as session:
        [reply] = session.reply([episode])
        assert reply.prompt_tokens == len(expected)
        episode.messages += [Message("assistant", reply.text + "?"), Message("user", "Said 9")]
        with pytest.raises(ValueError, match="does not go on from the reply"):
            session.reply([episode])


@needs_vllm
def test_description_is_json_and_names_what_changes_replies(case: Case, policy: Any) -> None:
    described = json.loads(json.dumps(policy.describe()))
    assert described["engine_arguments"] == {"max_model_len": CONTEXT, "enforce_eager": True}
    assert set(described["versions"]) == {"torch", "transformers", "vllm"}
    assert (described["temperature"], described["top_p"]) == (case.temperature, case.top_p)
    assert (described["dtype"], described["context"]) == ("float32", CONTEXT)


@needs_vllm
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"temperature": 3.0}, "temperature"),
        ({"temperature": 0.001}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"device": "abacus"}, "abacus"),
        ({"hf_token": "secret"}, "hf_token"),
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"worker_extension_cls": "a.B"}, "worker_extension_cls"),
        ({"max_model_len": {1}}, "JSON"),
        ({"no_such_argument": 1}, "no_such_argument"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_by_name(
    folder: Path, arguments: dict[str, Any], named: str
) -> None:
    from agentbench_prefix.policies.vllm import VLLMPolicy

    with pytest.raises(ConfigurationError, match=named) as caught:
        VLLMPolicy.load(folder, **arguments)
    assert "secret" not in str(caught.value)


@needs_vllm
def test_both_model_runners_take_the_logits_processor() -> None:
    """The second runner needs Triton, so that on a CPU only its own loader can be asked."""
    import torch
    from vllm.v1.sample.logits_processor import build_logitsprocs
    from vllm.v1.worker.gpu.sample.logits_processor import build_custom_logits_processors

    name = f"{MODULE}:TemperedLogSoftmax"
    config: Any = SimpleNamespace(
        additional_config={"agentbench_prefix_temperature": 0.5},
        speculative_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=2, async_scheduling=False),
    )
    sizes = dict.fromkeys(("device", "max_num_reqs", "vocab_size"))
    lengths = dict.fromkeys(("all_token_ids", "prompt_len", "prefill_len", "total_len"))
    buffers: Any = SimpleNamespace(**sizes, **lengths)
    logits = torch.randn(2, 5)
    expected = (logits / 0.5).log_softmax(-1)
    first = build_logitsprocs(config, torch.device("cpu"), False, False, [name])
    [one] = [p for p in first.non_argmax_invariant if type(p).__name__ == "TemperedLogSoftmax"]
    [two] = build_custom_logits_processors(config, buffers, False, [name])
    torch.testing.assert_close(one.apply(logits.clone()), expected)
    assert two.add_request(0, None)  # "this one changes logits"
    torch.testing.assert_close(two.apply(logits.clone(), None), expected)
