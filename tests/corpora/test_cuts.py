"""Cut strategies: numbers worked out by hand, and a plain reference."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from agentbench_prefix.corpora.cuts import (
    EntropyChange,
    EveryTurn,
    FixedRatio,
    RandomTurns,
    RawEntropy,
    Strategy,
    Trace,
    entropy_change,
    smooth,
)
from agentbench_prefix.corpora.recipe import load_corpus_recipe, make_recipe
from agentbench_prefix.errors import ConfigurationError


def trace(entropies=(), turns=(), n_turns=None, name="t/oracle/0"):
    return Trace(
        name,
        max(turns, default=-1) + 1 if n_turns is None else n_turns,
        np.array(entropies, dtype=np.float64),
        np.array(turns, dtype=np.int64),
    )


def turns_of(cuts):
    return [cut.turns for cut in cuts]


# ------------------------------------------------------------------ by hand
def test_the_example_of_the_method():
    entropies = np.array([0.0, 0, 3, 0, 0])
    assert smooth(entropies, 3).tolist() == [0, 1, 1, 1, 0]
    assert entropy_change(entropies, 3).tolist() == [0, 1, 0, 0, 1]


def test_the_average_is_truncated_at_the_edges():
    assert smooth(np.array([6.0, 0, 0, 12]), 3).tolist() == [3, 2, 4, 6]
    assert smooth(np.array([6.0, 0, 0, 12]), 99).tolist() == [4.5] * 4
    assert smooth(np.array([6.0, 0, 0, 12]), 1).tolist() == [6, 0, 0, 12]


def test_the_first_token_has_no_change():
    assert entropy_change(np.array([9.0, 1, 1]), 1).tolist() == [0, 8, 0]


def test_one_token_a_turn_and_ties_to_the_earlier_token():
    # w = 1: s = [0, 2, 2, 0, 4, 4, 0, 1, 0]; tokens 1 and 2 share turn 0, 4 and 5 turn 2.
    seen = trace([0, 2, 0, 0, 4, 0, 0, 1, 1], [0, 0, 0, 1, 2, 2, 3, 3, 4])
    assert EntropyChange(w=1, k=3).choose(seen) == [(3, 4.0), (1, 2.0), (4, 1.0)]
    tied = trace([0, 1, 1, 0, 0, 1, 9], [0, 1, 1, 2, 2, 3, 4])
    # s = [0, 1, 0, 1, 0, 1, 8]: turns 1, 2, 3 tie.
    assert EntropyChange(w=1, k=2).choose(tied) == [(2, 1.0), (3, 1.0)]


def test_the_final_turn_is_removed_before_ranking():
    seen = trace([1, 1, 2, 50, 0, 90], [0, 1, 2, 3, 3, 3])
    # w = 1: the jumps of 48, 50 and 90 are all in turn 3, the last.
    assert EntropyChange(w=1, k=3).choose(seen) == [(3, 1.0), (1, 0.0), (2, 0.0)]
    assert RawEntropy(k=1).choose(seen) == [(3, 2.0)]


def test_the_change_is_taken_before_the_final_turn_is_removed():
    """The final turn's tokens are still there for the average of those before them."""
    seen = trace([0, 0, 0, 9], [0, 0, 1, 2])
    # w = 3: smoothed [0, 0, 3, 4.5], s = [0, 0, 3, 1.5].
    assert EntropyChange(w=3, k=1).choose(seen) == [(2, 3.0)]


def test_raw_entropy_takes_each_turns_best_token():
    seen = trace([1, 5, 5, 2, 7, 3, 8], [0, 0, 1, 2, 2, 3, 4])
    assert RawEntropy(k=3).choose(seen) == [(3, 7.0), (1, 5.0), (2, 5.0)]


@pytest.mark.parametrize("n_turns", [1, 2])
def test_fewer_than_three_turns(n_turns):
    seen = trace([1.0, 2.0, 1.0], [min(i, n_turns - 1) for i in range(3)], n_turns)
    expected = list(range(1, n_turns))
    for strategy in (EntropyChange(), RawEntropy(), EveryTurn(), RandomTurns(seed=4)):
        assert turns_of(strategy.choose(seen)) == expected
    # 0 / 1 is below every ratio and 1 / 1 is the final turn.
    assert FixedRatio(ratios=(0.1, 0.3, 0.5)).choose(seen) == []


@pytest.mark.parametrize(
    ("n_turns", "ratios", "expected"),
    [
        # i / 10 >= 0.1, 0.3, 0.5 at i = 1, 3, 5.
        (11, (0.1, 0.3, 0.5), [(2, 0.1), (4, 0.3), (6, 0.5)]),
        # i / 10 >= 0.25, 0.5, 0.7 at i = 3, 5, 7.
        (11, (0.25, 0.5, 0.7), [(4, 0.25), (6, 0.5), (8, 0.7)]),
        # i / 4: 1, 2, 2 -> the third falls on a turn already chosen.
        (5, (0.1, 0.3, 0.5), [(2, 0.1), (3, 0.3)]),
        # i / 4: 1, 2, 3.
        (5, (0.25, 0.5, 0.7), [(2, 0.25), (3, 0.5), (4, 0.7)]),
        # i / 2: 1, 1, 1.
        (3, (0.1, 0.3, 0.5), [(2, 0.1)]),
        # i / 2: 1, 1, then the final turn.
        (3, (0.25, 0.5, 0.7), [(2, 0.25)]),
        (2, (0.25, 0.5, 0.7), []),
        (1, (0.25, 0.5, 0.7), []),
    ],
)
def test_fixed_ratios(n_turns, ratios, expected):
    assert FixedRatio(ratios=ratios).choose(trace(n_turns=n_turns)) == expected


def test_every_turn():
    assert EveryTurn().choose(trace(n_turns=4)) == [(1, 0.25), (2, 0.5), (3, 0.75)]


def test_random_turns_depend_on_seed_and_trajectory_alone():
    one = trace([1.0, 2, 3], [0, 1, 2], 20, "a/oracle/0")
    blind = trace(n_turns=20, name="a/oracle/0")
    other = trace(n_turns=20, name="a/oracle/1")
    drawn = RandomTurns(k=5, seed=7).choose(one)
    assert drawn == RandomTurns(k=5, seed=7).choose(blind)
    assert drawn != RandomTurns(k=5, seed=7).choose(other)
    assert drawn != RandomTurns(k=5, seed=8).choose(one)
    assert RandomTurns(k=2, seed=7).choose(one) == drawn[:2]
    # As drawn once: another draw would change corpora that were built before.
    assert turns_of(drawn) == [3, 1, 16, 7, 12]
    assert all(cut.score == cut.turns / 20 for cut in drawn)


def test_random_turns_are_uniform():
    counts = np.zeros(6, dtype=int)
    for index in range(3000):
        for cut in RandomTurns(k=2).choose(trace(n_turns=6, name=f"t/{index}")):
            counts[cut.turns] += 1
    assert counts[0] == 0
    # 1200 expected each, standard deviation sqrt(3000 * 0.4 * 0.6) = 27.
    assert np.abs(counts[1:] - 1200).max() < 5 * 27


# ------------------------------------------------------------------ against a reference
def reference(entropies, turns, n_turns, k, window=None):
    """The definition, token by token, in exact fractions."""
    exact = [Fraction(value) for value in entropies]
    if window is not None:
        half = (window - 1) // 2
        means = []
        for j in range(len(exact)):
            near = [exact[i] for i in range(len(exact)) if abs(i - j) <= half]
            means.append(sum(near) / len(near))
        exact = [abs(means[j] - means[j - 1]) if j else Fraction(0) for j in range(len(means))]
    best = {}
    for token in sorted(range(len(exact)), key=lambda token: (-exact[token], token)):
        if turns[token] != n_turns - 1:
            best.setdefault(turns[token], exact[token])
    return [(turn + 1, float(score)) for turn, score in list(best.items())[:k]]


@st.composite
def traces(draw, values):
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=9))
    turns = [turn for turn, length in enumerate(lengths) for _ in range(length)]
    entropies = draw(st.lists(values, min_size=len(turns), max_size=len(turns)))
    return trace(entropies, turns, len(lengths))


# Multiples of 27720 divide by every window up to 11: averages are exact, and ties are ties.
WHOLE = st.integers(0, 6).map(lambda n: 27720.0 * n)


@given(traces(WHOLE), st.integers(1, 5), st.sampled_from([1, 3, 5, 7, 9, 11]))
def test_entropy_strategies_equal_the_definition(seen, k, window):
    args = (seen.entropies.tolist(), seen.turn_of.tolist(), seen.n_turns, k)
    assert EntropyChange(w=window, k=k).choose(seen) == reference(*args, window)
    assert RawEntropy(k=k).choose(seen) == reference(*args)


@given(traces(st.floats(0, 8)), st.sampled_from([1, 3, 11]))
def test_scores_equal_the_definition_on_any_entropies(seen, window):
    args = (seen.entropies.tolist(), seen.turn_of.tolist(), seen.n_turns, 100)
    found = dict(EntropyChange(w=window, k=100).choose(seen))
    expected = dict(reference(*args, window))
    assert found == pytest.approx(expected, abs=1e-9)
    assert found.keys() == set(range(1, seen.n_turns))


def test_equal_scores_stay_equal_through_the_rounding_of_sums():
    """A jump as high behind as before: the earlier turn is first, whatever the sums round to."""
    for level in (0.1, 0.7, 1 / 3):
        heights = [level, level + 0.1, level + 0.2, level + 0.3, level + 0.4, level + 0.5]
        values = np.repeat(heights, 20)
        seen = Trace("t", 7, np.append(values, values[-1]), np.append(np.repeat(range(6), 20), 6))
        cuts = EntropyChange(w=1, k=5).choose(seen)
        assert turns_of(cuts) == [2, 3, 4, 5, 6]
        cuts = EntropyChange(w=11, k=5).choose(seen)
        assert turns_of(cuts) == [1, 2, 3, 4, 5]


def plain_ratios(n_turns, ratios):
    chosen = []
    for ratio in ratios:
        for index in range(n_turns):
            if n_turns > 1 and index / (n_turns - 1) >= ratio:
                if index != n_turns - 1 and index + 1 not in chosen:
                    chosen.append(index + 1)
                break
    return chosen


@given(
    st.integers(1, 60),
    st.lists(st.integers(1, 99).map(lambda n: n / 100), min_size=1, max_size=5),
)
def test_fixed_ratios_equal_the_definition(n_turns, ratios):
    cuts = FixedRatio(ratios=tuple(ratios)).choose(trace(n_turns=n_turns))
    assert turns_of(cuts) == plain_ratios(n_turns, ratios)


STRATEGIES = [
    EntropyChange(w=3),
    RawEntropy(k=2),
    FixedRatio(ratios=(0.1, 0.9)),
    EveryTurn(),
    RandomTurns(k=4, seed=1),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.kind)
@given(seen=traces(st.floats(0, 8)))
def test_what_holds_of_every_strategy(strategy, seen):
    cuts = strategy.choose(seen)
    turns = turns_of(cuts)
    assert len(set(turns)) == len(turns) <= getattr(strategy, "k", seen.n_turns)
    assert all(1 <= turn < seen.n_turns for turn in turns)
    assert all(math.isfinite(cut.score) for cut in cuts)
    assert strategy.choose(seen) == cuts
    if hasattr(strategy, "k"):
        assert len(turns) == min(strategy.k, seen.n_turns - 1)
    if strategy.needs_entropies:
        scores = [cut.score for cut in cuts]
        assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.kind)
def test_strategies_are_data(strategy):
    adapter = TypeAdapter(Strategy)
    assert adapter.validate_python(strategy.model_dump(mode="json")) == strategy


# ------------------------------------------------------------------ in recipes
def fields(**changes):
    return {
        "name": "small",
        "licence": "Apache-2.0",
        "env_id": "TextCraft-v0",
        "teacher": {"kind": "oracle"},
        **changes,
    }


@pytest.mark.parametrize(
    ("strategy", "named"),
    [
        ({"kind": "entropy_change", "w": 10}, r"entropy_change\.w: .*odd, got 10"),
        ({"kind": "entropy_change", "w": 0}, r"entropy_change\.w: .*got 0"),
        ({"kind": "entropy_change", "w": -3}, r"entropy_change\.w: .*got -3"),
        ({"kind": "entropy_change", "k": 0}, r"entropy_change\.k: .*got 0"),
        ({"kind": "raw_entropy", "k": 0}, r"raw_entropy\.k: .*got 0"),
        ({"kind": "raw_entropy", "w": 3}, r"raw_entropy\.w: .*got 3"),
        ({"kind": "random", "k": 0}, r"random\.k: .*got 0"),
        ({"kind": "random", "seed": -1}, r"random\.seed: .*got -1"),
        ({"kind": "fixed_ratio", "ratios": [0.5, 1.0]}, r"ratios\.1: .*less than 1, got 1\.0"),
        ({"kind": "fixed_ratio", "ratios": [0]}, r"ratios\.0: .*greater than 0, got 0"),
        ({"kind": "fixed_ratio", "ratios": []}, r"fixed_ratio\.ratios: "),
        ({"kind": "fixed_ratio"}, r"fixed_ratio\.ratios: Field required"),
        ({"kind": "by_mood"}, r"strategies\.mine: .*'by_mood'"),
        ({"k": 3}, r"strategies\.mine: .*'kind'"),
    ],
)
def test_bad_parameters_are_refused_by_name(tmp_path, strategy, named):
    scored = {"dialogues": ["compact"], "models": [{"dialogue": "compact", "model": "base"}]}
    whole = fields(strategies={"mine": strategy}, **scored)
    path = tmp_path / "corpus.yaml"
    path.write_text(yaml.safe_dump(whole))
    with pytest.raises(ConfigurationError, match=named) as caught:
        load_corpus_recipe(path)
    assert "strategies.mine" in str(caught.value)
    assert str(path) in str(caught.value)
    with pytest.raises(ConfigurationError, match=named):
        make_recipe(whole)


MODEL = {"dialogue": "compact", "model": "base"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"strategies": {"raw": {"kind": "every_turn"}}}, "may not be called 'raw'"),
        ({"strategies": {"all": {"kind": "every_turn"}}}, "may not be called 'all'"),
        ({"strategies": {"a b": {"kind": "every_turn"}}}, r"strategies\.a b"),
        ({"models": [MODEL]}, "scores dialogue 'compact', which is not among dialogues"),
        ({"dialogues": ["compact"], "models": [MODEL, MODEL]}, "same dialogue and name"),
        ({"teacher": {"kind": "oracle", "per_task": 5, "attempts": 4}}, "attempts"),
        ({"teacher": {"kind": "oracle", "detours": 1.0}}, r"teacher\.oracle\.detours"),
        ({"teacher": {"kind": "openai"}}, r"teacher\.openai\.base_url"),
        ({"splits": {}}, "splits"),
        ({"splits": {"held-out": "test"}}, r"splits\.held-out"),
        ({"dialogues": ["compact", "compact"]}, "named twice"),
        ({"dialogues": ["compact"], "models": [{**MODEL, "name": "a/b"}]}, "'a/b'"),
        ({"dialogues": ["compact"], "models": [{**MODEL, "model": ".."}]}, "give it a name"),
        ({"tasks": 0}, "tasks"),
        ({"name": "a/b"}, "name"),
        ({"licence": ""}, "licence"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_recipes_that_do_not_fit_are_refused(changes, named):
    with pytest.raises(ConfigurationError, match=named):
        make_recipe(fields(**changes))


@pytest.mark.parametrize("kind", ["entropy_change", "raw_entropy"])
def test_entropies_need_a_model_that_gives_them(kind):
    strategies = {"mine": {"kind": kind}}
    with pytest.raises(ConfigurationError, match=r"'mine' needs entropies.*'compact'"):
        make_recipe(fields(dialogues=["compact"], strategies=strategies))
    blind = [{**MODEL, "backend": "vllm"}]
    with pytest.raises(ConfigurationError, match=r"'mine' needs entropies.*transformers"):
        make_recipe(fields(dialogues=["compact"], strategies=strategies, models=blind))
    with pytest.raises(ConfigurationError, match=r"'mine' needs entropies.*'full'"):
        make_recipe(fields(dialogues=["compact", "full"], strategies=strategies, models=[MODEL]))
    both = [MODEL, {**blind[0], "name": "v"}]
    make_recipe(fields(dialogues=["compact"], strategies=strategies, models=both))


def test_unreadable_recipes(tmp_path):
    for text, named in (("[1, 2]", "must be a mapping"), ("a: [", "cannot read")):
        path = tmp_path / "r.yaml"
        path.write_text(text)
        with pytest.raises(ConfigurationError, match=named):
            load_corpus_recipe(path)
    with pytest.raises(ConfigurationError, match="cannot read"):
        load_corpus_recipe(tmp_path / "absent.yaml")


def test_recipes_take_overrides(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(fields(tasks=5)))
    assert load_corpus_recipe(path).tasks == 5
    assert load_corpus_recipe(path, tasks=2, name=None) == make_recipe(fields(tasks=2))
