"""How much of a trajectory is replayed: ratios, offsets, envelope, and the controller on plants."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentbench_prefix.training.prefix_ratio import (
    Controller,
    ControllerState,
    annealing_envelope,
    calibrated_ratio,
    cosine_ratio,
    difficulty_offsets,
    prefix_ratio,
    replayed_turns,
)

share = st.floats(0, 1)


# ------------------------------------------------------------------ ratios and turns
def test_turns_that_are_replayed():
    turns = [replayed_turns(r, 8) for r in (0, 0.06, 0.0625, 0.25, 0.5, 0.9, 1)]
    assert turns == [0, 0, 1, 2, 4, 7, 7]
    assert [replayed_turns(r, 1) for r in (0, 0.5, 1)] == [0, 0, 0]


@given(share, share, st.integers(1, 60))
def test_more_ratio_is_more_turns_and_one_is_always_left(one, other, n):
    low, high = sorted((one, other))
    assert 0 <= replayed_turns(low, n) <= replayed_turns(high, n) <= n - 1
    assert abs(replayed_turns(low, n) - low * n) <= (0.5 if low * n <= n - 0.5 else 1)


def test_ratio_of_a_query():
    assert prefix_ratio(0.5) == 0.5
    assert prefix_ratio(0.5, 0.15) == 0.65
    assert prefix_ratio(0.5, 0.15, 0.6) == 0.6
    assert prefix_ratio(0.1, -0.15) == 0
    assert prefix_ratio(0.9, 0.15) == 0.95
    assert prefix_ratio(0.9, 0.15, maximum=0.8) == 0.8


@given(st.floats(0, 0.95), st.floats(-0.15, 0.15), share, st.integers(1, 60))
def test_at_the_end_nothing_is_replayed(base, offset, start, n):
    if start == 1:
        return
    assert prefix_ratio(base, offset, annealing_envelope(1.0, start=start)) == 0
    assert replayed_turns(0, n) == 0


def test_envelope():
    shares = (0, 0.5, 0.8, 0.85, 0.9, 0.95, 1)
    values = [annealing_envelope(p) for p in shares]
    assert values == pytest.approx([1, 1, 1, 0.75, 0.5, 0.25, 0])
    assert values[-1] == 0
    assert annealing_envelope(1, start=1) == 1
    assert annealing_envelope(0.5, start=0) == 0.5


def test_cosine_decay():
    values = [cosine_ratio(p) for p in (0, 0.25, 0.5, 0.75, 1)]
    edge = 0.45 / math.sqrt(2)
    assert values == pytest.approx([0.95, 0.5 + edge, 0.5, 0.5 - edge, 0.05])
    assert [prefix_ratio(v) for v in values] == values


# ------------------------------------------------------------------ probe and calibration
def test_offsets_are_linear_in_the_quantile_of_difficulty():
    offsets = difficulty_offsets([0.9, 0.0, 0.5, 0.7, 0.2])
    assert offsets == pytest.approx([-0.15, 0.15, 0, -0.075, 0.075])
    assert difficulty_offsets([0.3, 0.1], span=0.05) == pytest.approx([-0.05, 0.05])
    assert difficulty_offsets([0.3]) == [0]
    assert difficulty_offsets([]) == []
    assert difficulty_offsets([0.0, 0.0, 1.0]) == pytest.approx([0.075, 0.075, -0.15])


@given(st.lists(st.sampled_from([0, 0.25, 0.5, 0.75, 1]), min_size=1, max_size=40))
def test_offsets_have_mean_zero_and_fall_with_the_pass_rate(rates):
    offsets = difficulty_offsets(rates)
    assert sum(offsets) == pytest.approx(0, abs=1e-12)
    assert all(abs(o) <= 0.15 + 1e-12 for o in offsets)
    for a, x in zip(rates, offsets, strict=True):
        for b, y in zip(rates, offsets, strict=True):
            assert (a < b and x > y) or (a > b and x < y) or (a == b and x == y)


def test_calibration_interpolates():
    grid = [0, 0.25, 0.5, 0.75, 0.9]
    assert calibrated_ratio(grid, [0.1, 0.2, 0.4, 0.8, 0.9]) == pytest.approx(0.5625)
    assert calibrated_ratio(grid, [0.1, 0.2, 0.4, 0.45, 0.5]) == pytest.approx(0.9)
    assert calibrated_ratio(grid, [0.6, 0.7, 0.8, 0.9, 1.0]) == 0
    assert calibrated_ratio(grid, [0.0, 0.0, 0.1, 0.2, 0.3]) == 0.9
    # The first crossing counts where noise makes several.
    assert calibrated_ratio(grid, [0.25, 0.75, 0.25, 0.75, 0.9]) == pytest.approx(0.125)


# ------------------------------------------------------------------ controller
def logistic(ratio, root, steepness):
    return 1 / (1 + math.exp(-steepness * (ratio - root)))


def run(controller, state, batches, success):
    """The state after so many batches, and the ratio each was played at."""
    ratios = []
    for _ in range(batches):
        ratios.append(state.base)
        state = controller.observe(state, success(state.base))
    return state, ratios


@pytest.mark.parametrize("steepness", [2, 4, 8, 12, 20])
@pytest.mark.parametrize("root", [0.05, 0.2, 0.5, 0.8, 0.9])
@pytest.mark.parametrize("start", [0.0, 0.1, 0.5, 0.95])
def test_a_plant_without_noise_is_found_in_20_updates_and_again_after_a_shift(
    root, steepness, start
):
    controller = Controller(start=start)
    state, _ = run(controller, controller.begin(), 400, lambda r: logistic(r, root, steepness))
    assert abs(logistic(state.base, root, steepness) - 0.5) < 0.03
    for shift in (-0.3, 0.3):
        moved = min(max(root + shift, 0.02), 0.93)
        again, _ = run(controller, state, 400, lambda r, m=moved: logistic(r, m, steepness))
        assert abs(logistic(again.base, moved, steepness) - 0.5) < 0.03


@pytest.mark.parametrize(("root", "steepness"), [(0.3, 4), (0.6, 8), (0.8, 12)])
def test_with_noise_of_16_queries_by_8_samples_it_stays_there(root, steepness):
    """Mean true success of the last 200 batches within .03 in 95 % of 60 seeds."""
    controller, near = Controller(), 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        _, ratios = run(
            controller,
            controller.begin(),
            600,
            lambda r, g=rng: g.binomial(128, logistic(r, root, steepness)) / 128,
        )
        true = np.mean([logistic(r, root, steepness) for r in ratios[-200:]])
        near += bool(abs(true - 0.5) < 0.03)
    assert near >= 57


def test_it_holds_inside_the_dead_band_and_moves_outside():
    controller = Controller(every=1, beta=0.0)
    for success, moves in ((0.5, 0), (0.519, 0), (0.481, 0), (0.521, -1), (0.479, 1)):
        moved = controller.observe(controller.begin(), success).base - 0.5
        assert (moved > 0) - (moved < 0) == moves


def test_without_a_dead_band_noise_drives_it_further():
    def mean_move(controller):
        total = 0.0
        for seed in range(10):
            rng = np.random.default_rng(seed)
            _, ratios = run(
                controller,
                controller.begin(),
                600,
                lambda r, g=rng: g.binomial(128, logistic(r, 0.5, 8)) / 128,
            )
            total += float(np.abs(np.diff(ratios)).sum())
        return total

    assert mean_move(Controller()) < 0.7 * mean_move(Controller(dead_band=1e-9))


@given(st.lists(share, min_size=1, max_size=200), st.floats(0, 0.95), st.integers(1, 9))
def test_whatever_it_sees_it_moves_by_little_and_stays_inside(seen, start, every):
    controller = Controller(start=start, every=every)
    state = controller.begin()
    for index, success in enumerate(seen, 1):
        before, state = state, controller.observe(state, success)
        assert abs(state.base - before.base) <= 0.1 + 1e-12
        assert 0 <= state.low <= state.high <= 0.95
        assert 0 <= state.base <= 0.95
        assert state.base == before.base or index % every == 0
        assert state.updates == index // every


def test_a_secant_step_is_exact_on_a_line():
    controller = Controller(start=0.5, every=1, beta=0.0)
    state, ratios = run(controller, controller.begin(), 5, lambda r: 0.5 + 1.0 * (r - 0.37))
    assert ratios[:2] == [0.5, 0.4]
    assert ratios[2:] == pytest.approx([0.37, 0.37, 0.37])
    assert state.slope == pytest.approx(1)


def test_the_moving_average_is_corrected_and_reset():
    controller = Controller(every=3, beta=0.5)
    state = controller.begin()
    assert controller.success(state) is None
    state = controller.observe(state, 0.2)
    assert controller.success(state) == pytest.approx(0.2)
    state = controller.observe(state, 0.8)
    # (0.5 * 0.8 + 0.25 * 0.2) / 0.75
    assert controller.success(state) == pytest.approx(0.6)
    state = controller.observe(state, 0.4)
    assert state.last_success == pytest.approx((0.5 * 0.4 + 0.25 * 0.8 + 0.125 * 0.2) / 0.875)
    assert controller.success(state) is None
    assert controller.success(controller.observe(state, 0.9)) == pytest.approx(0.9)


@given(st.lists(share, max_size=60), st.lists(share, max_size=60))
def test_a_state_goes_through_json(before, after):
    controller = Controller(every=7)
    state = controller.begin()
    for success in before:
        state = controller.observe(state, success)
    read = ControllerState(**json.loads(json.dumps(dataclasses.asdict(state))))
    assert read == state
    for success in after:
        state, read = controller.observe(state, success), controller.observe(read, success)
    assert read == state


# ------------------------------------------------------------------ errors
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: replayed_turns(1.1, 3), "ratio is 1.1, expected 0 to 1"),
        (lambda: replayed_turns(0.5, 0), "n_turns is 0, expected 1 or more"),
        (lambda: difficulty_offsets([0.5, 8]), r"pass_rates\[1\] is 8, expected 0 to 1"),
        (lambda: calibrated_ratio([0.1], [0.5, 0.6]), "1 ratios and 2 success rates"),
        (lambda: calibrated_ratio([0.5, 0.1], [0.1, 0.2]), "ratios do not ascend"),
        (lambda: annealing_envelope(1.5), "progress is 1.5"),
        (lambda: annealing_envelope(0.5, start=-1), "start is -1"),
        (lambda: cosine_ratio(-0.1), "progress is -0.1"),
        (lambda: Controller(start=0.99), "start is 0.99 and maximum 0.95"),
        (lambda: Controller(every=0), "every is 0"),
        (lambda: Controller(beta=1.0), "beta is 1.0"),
        (lambda: Controller().observe(Controller().begin(), 8), "success is 8, expected 0 to 1"),
    ],
)
def test_errors_name_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()
