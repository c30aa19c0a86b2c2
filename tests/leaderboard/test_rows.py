"""Rows: seeds averaged, differences paired by task, nothing put together that does not belong."""

from __future__ import annotations

import random

import made
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentbench_prefix.errors import ConfigurationError
from agentbench_prefix.evaluation.stats import pass_at_k
from agentbench_prefix.leaderboard.rows import (
    ALL,
    CONFIG,
    LeaderboardConfig,
    difference,
    make_pages,
    measure,
)

EMPTY = LeaderboardConfig()


def families_of(n):
    return {f"t{i:02}": f"f{i % 3}" for i in range(n)}


@st.composite
def seeds_of_counts(draw, max_tasks=14):
    """Solved samples by seed and task, of 1 to 3 seeds over the same tasks."""
    n = draw(st.integers(1, max_tasks))
    samples = draw(st.sampled_from([1, 2, 4, 8]))
    seeds = draw(st.integers(1, 3))
    counts = [[draw(st.integers(0, samples)) for _ in range(n)] for _ in range(seeds)]
    return samples, families_of(n), counts


def page_of(results, config=EMPTY):
    [page] = make_pages(results, config)
    return page


def results_of(samples, families, counts, **run):
    return [
        made.made_up(
            {"test": (dict(zip(families, row, strict=True)), families)}, samples, seed=seed, **run
        )
        for seed, row in enumerate(counts)
    ]


@settings(max_examples=30)
@given(seeds_of_counts())
def test_a_row_is_the_mean_over_seeds_of_what_each_achieved(data):
    samples, families, counts = data
    page = page_of(results_of(*data))
    [row] = page.rows
    found = page.sections[0].measured[row]
    table = np.array(counts)
    n = len(families)
    whole = found[ALL]
    assert row.seeds == tuple(range(len(counts)))
    assert (whole.n_tasks, whole.n_episodes) == (n, n * samples * len(counts))
    assert whole.n_solved == table.sum()
    assert whole.average.value == pytest.approx(table.sum() / whole.n_episodes)
    passes = [[pass_at_k(samples, c, samples) for c in of_seed] for of_seed in counts]
    assert whole.passed.value == pytest.approx(np.mean(passes))
    per_seed = table.mean(axis=1) / samples
    assert whole.average_range == pytest.approx((per_seed.min(), per_seed.max()))
    if len(counts) == 1:
        assert whole.average_sd is None
        assert whole.passed_sd is None
    else:
        assert whole.average_sd == pytest.approx(np.std(per_seed, ddof=1), abs=1e-9)
        assert whole.passed_sd == pytest.approx(np.std(np.mean(passes, axis=1), ddof=1), abs=1e-9)
    for estimate in (whole.average, whole.passed):
        assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
    assert sum(found[family].n_tasks for family in page.sections[0].families) == n
    assert sum(found[family].n_solved for family in page.sections[0].families) == whole.n_solved


@settings(max_examples=15)
@given(seeds_of_counts())
def test_one_seed_gives_exactly_what_its_evaluation_gave(data):
    samples, families, counts = data
    [result] = results_of(samples, families, counts[:1])
    page = page_of([result])
    [row] = page.rows
    metrics = result.splits["test"]
    for family, found in page.sections[0].measured[row].items():
        rates = metrics if family == ALL else metrics.families[family]
        assert found.average == rates.avg_at_k[str(samples)]
        assert found.passed == rates.pass_at_k[str(samples)]


@settings(max_examples=20)
@given(seeds_of_counts(), st.randoms(use_true_random=False))
def test_differences_are_paired_antisymmetric_and_zero_with_oneself(data, rng):
    samples, families, counts = data
    other = [[rng.randint(0, samples) for _ in families] for _ in range(rng.randint(1, 3))]
    results = results_of(samples, families, counts, method="a")
    results += results_of(samples, families, other, method="b")
    page = page_of(results)
    a, b = page.find("a", "", "base"), page.find("b", "", None)
    there, back = difference(a, b, ["test"]), difference(b, a, ["test"])
    expected = np.mean(counts) / samples - np.mean(other) / samples
    assert there.average.value == pytest.approx(expected, abs=1e-9)
    assert there.average.value == pytest.approx(-back.average.value, abs=1e-12)
    assert there.average.low == pytest.approx(-back.average.high, abs=1e-9)
    assert there.passed.value == pytest.approx(
        measure(a, ["test"]).passed.value - measure(b, ["test"]).passed.value, abs=1e-9
    )
    own = difference(a, a, ["test"])
    assert (own.average.value, own.passed.value) == (0, 0)
    for estimate in (there.average, there.passed):
        assert -1 <= estimate.low <= estimate.value <= estimate.high <= 1


def test_pairing_removes_what_tasks_have_in_common():
    families = families_of(40)
    rng = np.random.default_rng(0)
    weak = rng.integers(0, 4, size=40).tolist()
    page = page_of(
        [
            *results_of(4, families, [weak], method="weak"),
            *results_of(4, families, [[c + i % 2 for i, c in enumerate(weak)]], method="strong"),
        ]
    )
    strong, other = page.find("strong", "", None), page.find("weak", "", None)
    found = difference(strong, other, ["test"]).average
    assert found.value == 0.125
    width = measure(strong, ["test"]).average
    assert found.high - found.low < (width.high - width.low) / 2


@settings(max_examples=10)
@given(st.randoms(use_true_random=False))
def test_the_order_of_results_changes_nothing(rng):
    families = families_of(5)
    results = [
        *results_of(2, families, [[0, 1, 2, 1, 0], [1, 1, 1, 1, 1]], method="a"),
        *results_of(2, families, [[2, 2, 2, 1, 0]], method="b"),
        *results_of(2, families, [[2, 2, 2, 1, 0]], method="b", init="sft"),
    ]
    first = page_of(results)
    rng.shuffle(results)
    again = page_of(results)
    assert [row.sort_key() for row in first.rows] == [row.sort_key() for row in again.rows]
    for a, b in zip(first.sections, again.sections, strict=True):
        assert [row.sort_key() for row in a.rows] == [row.sort_key() for row in b.rows]
        assert [a.measured[r] for r in a.rows] == [b.measured[r] for r in b.rows]


def test_the_best_row_is_first_and_ties_go_by_name():
    families = families_of(4)
    results = [
        *results_of(2, families, [[1, 1, 1, 1]], method="d"),
        *results_of(2, families, [[0, 0, 0, 1]], method="a"),
        *results_of(2, families, [[2, 2, 0, 0]], method="c"),
        *results_of(2, families, [[2, 2, 2, 2]], method="z"),
    ]
    assert [row.method for row in page_of(results).sections[0].rows] == ["z", "c", "d", "a"]


def test_several_splits_stand_apart_and_together():
    test, extra = families_of(6), {f"x{i}": "f1" for i in range(3)}
    counts = {task: i % 3 for i, task in enumerate(test)}
    more = dict.fromkeys(extra, 2)
    both = made.made_up({"test": (counts, test), "extra": (more, extra)}, 2, method="a")
    part = made.made_up({"test": (counts, test)}, 2, method="b")
    config = LeaderboardConfig(splits={"Toy-v0": ("test", "extra")})
    page = page_of([both, part], config)
    assert [section.splits for section in page.sections] == [
        ("test",),
        ("extra",),
        ("test", "extra"),
    ]
    first, second, third = page.sections
    assert [row.method for row in first.rows] == ["a", "b"]
    assert [row.method for row in second.rows] == ["a"]
    assert [row.method for row in third.rows] == ["a"]
    assert third.families == {"f0": 2, "f1": 5, "f2": 2}
    [row] = third.rows
    assert third.measured[row][ALL].n_solved == 6 + 6
    assert page_of([both, part]).sections[0].splits == ("extra",)  # by name without an order


def test_overlapping_splits_are_not_added_up():
    families = families_of(4)
    counts = dict.fromkeys(families, 1)
    result = made.made_up({"test": (counts, families), "all": (counts, families)}, 2)
    assert [section.splits for section in page_of([result]).sections] == [("all",), ("test",)]


def test_pages_are_by_environment_and_tier():
    families = families_of(3)
    counts = dict.fromkeys(families, 1)
    results = [
        made.made_up({"test": (counts, families)}, 2, tier=tier) for tier in ("large", "cpu")
    ]
    assert [page.name for page in make_pages(results, EMPTY)] == ["Toy-v0-cpu", "Toy-v0-large"]
    assert make_pages([], EMPTY) == []


def test_runs_of_other_recipes_or_corpora_are_rows_of_their_own():
    families = families_of(3)
    counts = dict.fromkeys(families, 1)

    def one(seed, lr=1, corpora=None):
        recipe = {"lr": lr, "seed": seed, "init": "base"}
        return made.made_up(
            {"test": (counts, families)}, 2, seed=seed, recipe=recipe, corpora=corpora or {}
        )

    assert [row.seeds for row in page_of([one(0), one(1)]).rows] == [(0, 1)]
    page = page_of([one(0), one(1, lr=2), one(2)])
    assert sorted(row.seeds for row in page.rows) == [(0, 2), (1,)]
    assert len({row.recipe for row in page.rows} - {""}) == 2
    assert len(page_of([one(0), one(1, corpora={"c 1.0 f": "c" * 64})]).rows) == 2
    with pytest.raises(ConfigurationError, match="2 rows of grpo from base, so none can be"):
        page.find("grpo", "", "base")
    assert page.find("grpo", "other", "base") is None


def test_what_was_measured_differently_is_not_put_into_one_table():
    families = families_of(4)

    def one(method, tasks=families, **changes):
        return made.made_up({"test": (dict.fromkeys(tasks, 1), tasks)}, method=method, **changes)

    first = one("a")
    clashes = {
        "data_hash is 'a+' and 'b+'": one("b", data_hash="b" * 64),
        "settings.temperature is 1.0 and 0.5": one("b", settings={"temperature": 0.5}),
        "settings.max_turns is 8 and 9": one("b", settings={"max_turns": 9}),
        "settings.samples is 4 and 2": one("b", samples=2),
        "other tasks in split 'test'": one("b", tasks=families_of(3)),
        "is there twice": one("a", init="base"),
    }
    for message, second in clashes.items():
        with pytest.raises(ConfigurationError, match=message):
            make_pages([first, second], EMPTY)
    moved = dict.fromkeys(families, "f9")
    with pytest.raises(ConfigurationError, match="other tasks in split"):
        make_pages([first, one("b", tasks=moved)], EMPTY)


def test_seeds_that_lack_a_split_are_named():
    families = families_of(3)
    counts = dict.fromkeys(families, 1)
    extra = {"x": "f0"}
    whole = made.made_up({"test": (counts, families), "extra": ({"x": 1}, extra)}, seed=0)
    part = made.made_up({"test": (counts, families)}, seed=1)
    with pytest.raises(ConfigurationError, match="evaluated on different splits"):
        make_pages([whole, part], EMPTY)


def test_the_intervals_are_the_same_in_every_process():
    families = families_of(30)
    rng = random.Random(1)
    results = results_of(4, families, [[rng.randint(0, 4) for _ in families]])
    estimates = [measure(page_of(results).rows[0], ["test"]) for _ in range(2)]
    assert estimates[0] == estimates[1]
    assert estimates[0].average.interval == "bootstrap"


def test_a_malformed_configuration_names_the_field(tmp_path):
    path = tmp_path / CONFIG
    assert LeaderboardConfig.load(tmp_path) == EMPTY
    path.write_text("references: [{name: X, method: a}]\n")
    with pytest.raises(ConfigurationError, match=r"references\.0\.init: Field required"):
        LeaderboardConfig.load(tmp_path)
    path.write_text("colours: red\n")
    with pytest.raises(ConfigurationError, match="colours: Extra inputs"):
        LeaderboardConfig.load(tmp_path)
    path.write_text("splits: {Toy-v0: [a, b]}\n")
    assert LeaderboardConfig.load(tmp_path).splits == {"Toy-v0": ("a", "b")}
