from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentbench_prefix import UnicodeText

ANY_TEXT = st.text(st.characters(exclude_categories=()))


@given(ANY_TEXT)
def test_any_text_is_inside(text):
    assert UnicodeText().contains(text)
    assert text in UnicodeText()


@given(ANY_TEXT, st.integers(0, 20))
def test_a_bound_counts_characters(text, bound):
    assert (text in UnicodeText(bound)) == (len(text) <= bound)


@pytest.mark.parametrize("other", [None, 3, b"text", ["text"], np.array("text")])
def test_only_text_is_inside(other):
    assert other not in UnicodeText()


@pytest.mark.parametrize("bound", [None, 0, 1, 5, 1000])
def test_samples_are_inside_and_follow_the_seed(bound):
    one, other = UnicodeText(bound, seed=3), UnicodeText(bound, seed=3)
    samples = [one.sample() for _ in range(200)]
    assert samples == [other.sample() for _ in range(200)]
    assert all(sample in one for sample in samples)
    if bound != 0:
        assert len(set(samples)) > 1


def test_samples_take_no_mask():
    with pytest.raises(ValueError, match="neither a mask nor probabilities"):
        UnicodeText().sample(mask="a")  # type: ignore[arg-type]


def test_a_bound_must_not_be_negative():
    with pytest.raises(ValueError, match="got -1"):
        UnicodeText(-1)


@given(st.lists(ANY_TEXT))
def test_json_round_trip(texts):
    space = UnicodeText()
    assert space.from_jsonable(space.to_jsonable(texts)) == texts


def test_equality_and_repr():
    assert UnicodeText(3) == UnicodeText(3, seed=1)
    assert hash(UnicodeText(3)) == hash(UnicodeText(3))
    assert UnicodeText(3) != UnicodeText()
    assert UnicodeText(3) != gym.spaces.Text(3)
    assert repr(UnicodeText(3)) == "UnicodeText(max_length=3)"
    assert not UnicodeText().is_np_flattenable
