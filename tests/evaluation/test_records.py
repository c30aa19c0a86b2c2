"""Episode records survive the file, whatever was said."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentbench_prefix.dialogue import Message
from agentbench_prefix.errors import ConfigurationError
from agentbench_prefix.evaluation.records import EpisodeRecord, TurnRecord, read_episodes

# Two neighbouring surrogates that make a pair become one character in JSON, so only low ones.
ANY_TEXT = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]), st.sampled_from(["\udc00", "\udfff", "\\", '"'])
    )
)


def turn(**changes):
    return TurnRecord(
        **{
            "reply": "look",
            "action": "look",
            "problem": None,
            "notes": (),
            "observation": "A vault.",
            "valid": True,
            "reward": 0.0,
            "finish": "stop",
            "prompt_tokens": 7,
            "token_ids": (5, 2),
            "logprobs": (-0.1, -1e-300),
            **changes,
        }
    )


def episode(turns=(), **changes):
    return EpisodeRecord(
        **{
            "env_id": "Toy-v0",
            "data_hash": "0",
            "arguments": {"max_turns": 8, "loud": False},
            "task_id": "toy_1",
            "family": "f",
            "options": {"polite": True},
            "sample": 0,
            "seed": 2**48 - 1,
            "dialogue": "bare@1",
            "success": False,
            "reward": 0.0,
            "n_turns": len(turns),
            "truncated": True,
            "error": None,
            "failure_category": "shut",
            "opening": (Message("user", "A vault."),),
            "turns": tuple(turns),
            **changes,
        }
    )


@given(ANY_TEXT, ANY_TEXT)
def test_any_text_makes_one_line_of_utf8_and_comes_back(reply, observation):
    record = episode([turn(reply=reply, action=None, problem=reply, observation=observation)])
    line = record.to_line()
    assert "\n" not in line
    assert EpisodeRecord.from_line(line.encode("utf-8")) == record


@given(
    st.lists(
        st.tuples(st.integers(0, 2**31), st.floats(max_value=0, allow_infinity=False)), max_size=9
    )
)
def test_tokens_and_logprobs_come_back_bit_by_bit(pairs):
    ids, logprobs = tuple(i for i, _ in pairs), tuple(x for _, x in pairs)
    record = episode([turn(token_ids=ids, logprobs=logprobs)])
    [back] = EpisodeRecord.from_line(record.to_line()).turns
    assert back.token_ids == ids
    assert [x.hex() for x in back.logprobs] == [x.hex() for x in logprobs]


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": (-0.1,)},
        {"token_ids": None},
        {"logprobs": (-0.1, float("nan"))},
        {"logprobs": (-0.1, float("-inf"))},
        {"unknown": 1},
    ],
)
def test_turns_that_do_not_add_up_are_refused(changes):
    with pytest.raises(ValueError, match="TurnRecord"):
        turn(**changes)


@pytest.mark.parametrize("changes", [{"n_turns": 2}, {"success": True, "error": "EndpointError"}])
def test_episodes_that_do_not_add_up_are_refused(changes):
    with pytest.raises(ValueError, match="EpisodeRecord"):
        episode([turn()], **changes)


def test_a_torn_last_line_is_left_out(tmp_path):
    path = tmp_path / "episodes.jsonl"
    records = [episode(sample=i) for i in range(3)]
    text = "".join(record.to_line() + "\n" for record in records)
    for cut in range(1, len(records[-1].to_line()) + 2):
        path.write_bytes(text.encode()[:-cut])
        assert list(read_episodes(path)) == records[:2]
    path.write_text(text)
    assert list(read_episodes(path)) == records


@pytest.mark.parametrize("damage", ["", "{}", "[1]", "\ufffd{", json.dumps({"format": 2})])
def test_a_damaged_line_is_named(tmp_path, damage):
    path = tmp_path / "episodes.jsonl"
    path.write_text(episode().to_line() + "\n" + damage + "\n")
    with pytest.raises(ConfigurationError, match=r"episodes\.jsonl:2 is not an episode record"):
        list(read_episodes(path))
