"""Estimators and intervals against enumeration, scipy and known distributions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from agentbench_prefix.evaluation.stats import (
    FEW_DIFFERING,
    FEW_TASKS,
    bootstrap_means,
    ks,
    mean_estimates,
    pass_at_k,
    wilson,
)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_groups_with_a_success(outcomes, data):
    k = data.draw(st.integers(1, len(outcomes)))
    groups = list(itertools.combinations(outcomes, k))
    expected = sum(any(group) for group in groups) / len(groups)
    assert pass_at_k(len(outcomes), sum(outcomes), k) == pytest.approx(expected, abs=1e-15)


@given(st.integers(1, 300), st.data())
def test_pass_at_1_is_the_success_rate(n, data):
    c = data.draw(st.integers(0, n))
    assert pass_at_k(n, c, 1) == c / n


def test_pass_at_k_stays_exact_for_many_samples():
    assert pass_at_k(2000, 0, 1000) == 0
    assert pass_at_k(2000, 1, 1000) == 0.5
    assert pass_at_k(2000, 2000, 1) == 1


@pytest.mark.parametrize(("n", "c", "k"), [(8, 3, 0), (8, 3, 9), (8, 9, 1), (8, -1, 1), (0, 0, 0)])
def test_pass_at_k_refuses_impossible_counts(n, c, k):
    with pytest.raises(ValueError, match="1 <= k <= n"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(
    ("samples", "sizes"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8])]
)
def test_group_sizes(samples, sizes):
    assert ks(samples) == sizes


@given(st.integers(1, 500), st.data())
def test_wilson_agrees_with_scipy(n, data):
    c = data.draw(st.integers(0, n))
    expected = scipy.stats.binomtest(c, n).proportion_ci(0.95, method="wilson")
    assert wilson(c / n, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_bootstrap_has_the_binomial_distribution_on_binary_tasks():
    # Resampling n tasks of which np are solved draws Binomial(n, p) successes.
    n, solved = 200, 60
    values = np.repeat([1.0, 0.0], [solved, n - solved])[:, None]
    means = bootstrap_means(values, resamples=20_000)[:, 0]
    exact = scipy.stats.binom(n, solved / n)
    assert means.mean() == pytest.approx(solved / n, abs=0.001)
    assert means.std() == pytest.approx(exact.std() / n, rel=0.02)
    for q in (2.5, 50, 97.5):
        assert np.percentile(means, q) == pytest.approx(exact.ppf(q / 100) / n, abs=0.0051)


def test_columns_share_resamples_and_do_not_disturb_each_other():
    rng = np.random.default_rng(1)
    a, b = rng.random((2, 50))
    both = bootstrap_means(np.stack([a, a + b], axis=1), resamples=300)
    assert np.array_equal(both[:, 0], bootstrap_means(a[:, None], resamples=300)[:, 0])
    alone = bootstrap_means(b[:, None], resamples=300)[:, 0]
    assert both[:, 1] - both[:, 0] == pytest.approx(alone)


def test_large_tables_are_resampled_in_blocks_of_the_same_stream():
    values = np.arange(1500.0)[:, None]
    whole = bootstrap_means(values, resamples=3000)  # three blocks
    assert whole.shape == (3000, 1)
    assert len(np.unique(whole)) > 2500
    assert np.array_equal(whole[:1000], bootstrap_means(values, resamples=1000))


def test_intervals_cover_the_truth_where_samples_of_a_task_hang_together():
    rng = np.random.default_rng(0)
    truth, covered, covered_as_if_independent, runs, tasks = 0.5, 0, 0, 300, 60
    for _ in range(runs):
        p = rng.beta(0.5, 0.5, size=tasks)
        rates = rng.binomial(8, p) / 8
        [estimate] = mean_estimates(rates[:, None])
        covered += estimate.low <= truth <= estimate.high
        low, high = wilson(rates.mean(), tasks * 8)
        covered_as_if_independent += low <= truth <= high
    assert 0.91 <= covered / runs <= 0.98
    assert covered_as_if_independent / runs < 0.75


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("n", [1, FEW_TASKS - 1, FEW_TASKS, 100])
def test_all_or_nothing_gets_wilsons_interval(n, value):
    [estimate] = mean_estimates(np.full((n, 1), value))
    assert estimate.interval == "wilson"
    assert estimate.value == value
    assert (estimate.low, estimate.high) == pytest.approx(wilson(value, n), abs=1e-11)
    assert 0 < estimate.high - estimate.low < 1


def test_a_few_tasks_get_wilsons_interval_on_the_number_of_tasks():
    [estimate] = mean_estimates(np.array([[0.25], [0.5], [0.0]]))
    assert estimate.interval == "wilson"
    assert (estimate.low, estimate.high) == pytest.approx(wilson(0.25, 3), abs=1e-11)


def test_tasks_that_are_all_alike_never_give_an_empty_interval():
    [estimate] = mean_estimates(np.full((100, 1), 0.0), low=-1, high=1)
    assert estimate.value == 0
    assert estimate.low == -estimate.high
    assert estimate.high == pytest.approx(wilson(0.0, 100)[1], abs=1e-11)


def nearly_alike(n, others, common=0.0, value=1.0, **limits):
    values = np.full(n, common)
    values[:others] = value
    [estimate] = mean_estimates(values[:, None], **limits)
    return estimate


@pytest.mark.parametrize("n", [10, 25, 41, 200])
def test_more_solved_tasks_do_not_lower_a_limit(n):
    found = [nearly_alike(n, solved) for solved in range(n + 1)]
    bootstrapped = ["bootstrap"] * (n + 1 - 2 * FEW_DIFFERING)
    alike = ["wilson"] * FEW_DIFFERING
    assert [e.interval for e in found] == [*alike, *bootstrapped, *alike]
    steps = np.diff([(e.low, e.high) for e in found], axis=0)
    switches = [FEW_DIFFERING - 1, n - FEW_DIFFERING]
    assert (steps[switches] > -1 / n).all()
    assert (np.delete(steps, switches, axis=0) >= 0).all()


@pytest.mark.parametrize("others", range(1, FEW_DIFFERING))
@pytest.mark.parametrize("share", [1 / 8, 1.0])
def test_a_few_tasks_apart_from_the_rest_get_the_outer_limits(others, share):
    mean = others * share / 25
    estimate = nearly_alike(25, others, value=share)
    values = np.repeat([share, 0.0], [others, 25 - others])[:, None]
    resampled = np.percentile(bootstrap_means(values), 2.5)
    assert estimate.high == pytest.approx(wilson(mean, 25)[1], abs=1e-11)
    assert estimate.low == pytest.approx(min(wilson(mean, 25)[0], resampled), abs=1e-11)
    mirrored = nearly_alike(25, others, 1.0, 1 - share)
    assert mirrored.low == pytest.approx(1 - estimate.high, abs=1e-11)
    assert mirrored.high == pytest.approx(1 - estimate.low, abs=1e-2)  # other resamples


def test_a_task_that_was_solved_once_tells_no_more_than_none():
    assert nearly_alike(25, 1, value=1 / 8).high > nearly_alike(25, 0).high


def test_differences_of_which_a_few_are_not_zero_have_an_interval_on_both_sides():
    up = nearly_alike(40, 3, low=-1.0, high=1.0)
    down = nearly_alike(40, 3, value=-1.0, low=-1.0, high=1.0)
    none = nearly_alike(40, 0, low=-1.0, high=1.0)
    assert (up.low, up.high) == pytest.approx((-down.high, -down.low), abs=0.03)
    assert none.low < up.low <= 0 < up.value < none.high < up.high
    # With one up and one down, squares are added: 1 / 40 +- sqrt(2) times what one leaves open.
    values = np.zeros((40, 1))
    values[:2, 0] = 1, -1
    [both] = mean_estimates(values, low=-1.0, high=1.0)
    low, high = (abs(limit - 1 / 40) for limit in wilson(1 / 40, 40))
    assert both.high == -both.low == pytest.approx(np.hypot(low, high), abs=1e-11)


@pytest.mark.parametrize(("n", "p"), [(25, 0.03), (41, 0.01), (41, 0.99), (100, 0.003)])
@pytest.mark.parametrize("unit", ["episodes", "tasks"])
def test_intervals_cover_the_truth_where_hardly_a_task_is_solved_or_lost(n, p, unit):
    rng = np.random.default_rng(0)
    k = {"episodes": 8, "tasks": 1}[unit]  # 1: all samples of a task end alike
    rates = rng.binomial(k, p, size=(200, n)) / k
    estimates = [mean_estimates(row[:, None])[0] for row in rates]
    assert sum(e.low <= p <= e.high for e in estimates) >= 0.95 * 200


@given(st.lists(st.integers(0, 8), min_size=1, max_size=40))
def test_every_interval_lies_in_range_around_its_value(counts):
    values = np.array(counts)[:, None] / 8
    [estimate] = mean_estimates(values)
    assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
    assert estimate.low < estimate.high
    assert mean_estimates(values) == [estimate]


def test_no_task_has_no_mean():
    with pytest.raises(ValueError, match="at least one task"):
        mean_estimates(np.empty((0, 1)))
