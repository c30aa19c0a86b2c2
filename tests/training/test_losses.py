"""Losses: the numbers of the sources, properties, and gradients against plain loops."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Method, Rollout, batch_loss

from agentbench_prefix.training import losses
from agentbench_prefix.training.losses import (
    Branch,
    ClipRange,
    bounded_term,
    clipped_surrogate,
    demonstration_advantages,
    dense_surrogate,
    derangement,
    family_lift,
    group_advantages,
    hindsight_gap,
    importance_ratio,
    is_clipped,
    kl_estimate,
    log_ratio,
    mean_advantages,
    mixed_groups,
    overlong_penalty,
    permuted_profile,
    policy_gradient_surrogate,
    prefix_advantages,
    prefix_continuation_loss,
    sequence_weights,
    token_mean,
    token_weights,
    turn_profile,
    uniform_profile,
)

F64 = torch.float64
SYMMETRIC = ClipRange()
seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=8)  # each example is a whole batch


def f64(values, grad=False):
    return torch.tensor(values, dtype=F64, requires_grad=grad)


def gradient(value, *leaves):
    return torch.autograd.grad(value, leaves, materialize_grads=True)


# ------------------------------------------------------------------ a batch, and its loss
def sample_batch(seed, queries=4, samples=4):
    """Rollouts of raw and prefix queries of two trajectories, with everything any method reads."""
    rng = np.random.default_rng(seed)
    rollouts = []
    for query in range(queries):
        raw = query % 2 == 0
        span = 0 if raw else int(rng.integers(3, 9))
        prefix_old = rng.uniform(-3, -0.1, span)
        prefix_mask = [bool(x) for x in rng.random(span) < 0.7]
        for sample in range(samples):
            mask, turns = [], []
            for turn in range(int(rng.integers(1, 5))):
                if turn:
                    width = int(rng.integers(1, 3))
                    mask, turns = mask + [False] * width, turns + [-1] * width
                width = int(rng.integers(1, 4))
                mask, turns = mask + [True] * width, turns + [turn] * width
            n = len(mask)
            old = rng.uniform(-3, -0.1, n)
            # The last query is solved by every sample: its group teaches nothing. Others are mixed.
            reward = float(rng.random() < 0.4)
            if query == queries - 1 or sample == query:
                reward = 1.0
            elif sample == query + 1:
                reward = 0.0
            rollouts.append(
                Rollout(
                    logprobs=f64(old + rng.normal(0, 0.7, n), grad=True),
                    old_logprobs=list(old),
                    mask=mask,
                    reward=reward,
                    group=10 - query,
                    turns=turns,
                    rollout_logprobs=list(old + rng.normal(0, 0.3, n)),
                    hindsight_logprobs=list(old + rng.normal(0, 0.6, n)),
                    turn_order=derangement(len({t for t in turns if t >= 0}), len(rollouts)),
                    prefix_logprobs=f64(prefix_old + rng.normal(0, 0.4, span), grad=True),
                    prefix_old_logprobs=list(prefix_old),
                    prefix_mask=prefix_mask,
                    family=query // 2,
                    raw=raw,
                )
            )
    return rollouts


def demonstration(seed, family, reward=1.0):
    rng = np.random.default_rng(seed)
    old = rng.uniform(-2, -0.1, 12)
    return Rollout(
        logprobs=f64([], grad=True),
        old_logprobs=[],
        mask=[],
        reward=reward,
        group=-1,
        prefix_logprobs=f64(old + rng.normal(0, 0.2, 12), grad=True),
        prefix_old_logprobs=list(old),
        prefix_mask=[True, False] * 6,
        family=family,
        demonstration=True,
    )


class Padded:
    """The rollouts as the tensors that the library takes; padding is NaN, on the side asked for."""

    def __init__(self, rollouts, left=0, right=0, fill=math.nan):
        self.left, self.right, self.fill = left, right, fill
        self.logprobs = self.pad([r.logprobs for r in rollouts])
        self.old = self.pad([r.old_logprobs for r in rollouts])
        self.mask = self.pad([r.mask for r in rollouts], fill=0).bool()
        self.turns = self.pad([[*r.turns] or [-1] * len(r.mask) for r in rollouts], fill=-1).long()
        self.rollout = self.pad([r.rollout_logprobs or r.old_logprobs for r in rollouts])
        self.hindsight = self.pad([r.hindsight_logprobs or r.old_logprobs for r in rollouts])
        self.prefix = self.pad([r.prefix_logprobs for r in rollouts])
        self.prefix_old = self.pad([r.prefix_old_logprobs for r in rollouts])
        self.prefix_mask = self.pad([r.prefix_mask for r in rollouts], fill=0).bool()
        self.rewards = f64([r.reward for r in rollouts])
        self.groups = torch.tensor([r.group for r in rollouts])

    def pad(self, rows, fill=None):
        rows = [r if isinstance(r, torch.Tensor) else f64([float(x) for x in r]) for r in rows]
        width = max(len(r) for r in rows)
        fill = self.fill if fill is None else fill
        return torch.stack(
            [
                torch.cat(
                    [
                        torch.full((self.left,), fill, dtype=F64),
                        r,
                        torch.full((width - len(r) + self.right,), fill, dtype=F64),
                    ]
                )
                for r in rows
            ]
        )


def library_loss(rollouts, method, microbatches=None, **padding):
    """The same losses from the library's functions, put together as a trainer would."""
    whole = Padded(rollouts, **padding)
    played = torch.tensor([not r.demonstration for r in rollouts])
    groups = torch.where(played, whole.groups, whole.groups.min() - 1 - torch.arange(len(rollouts)))
    rewards = whole.rewards
    if method.overlong is not None:
        limit, buffer, factor = method.overlong
        lengths = whole.mask.sum(1)
        rewards = rewards + overlong_penalty(lengths, limit=limit, buffer=buffer, factor=factor)
    advantages = group_advantages(rewards, groups, normalize=method.normalize)
    used = torch.ones_like(played)
    if method.dynamic_sampling:
        used = mixed_groups(whole.rewards, groups) | ~played
    mask, weights = whole.mask & used[:, None], None
    if method.importance is not None:
        low, high = method.importance
        trainer = whole.logprobs if method.objective == "policy_gradient" else whole.old
        weights, kept = sequence_weights(trainer, whole.rollout, mask, low=low, high=high)
        mask = mask & kept[:, None]
    prefix_mask = whole.prefix_mask & used[:, None]
    strength = prefix_strength(rollouts, whole, advantages, method)
    prefix_mask = prefix_mask & strength.isfinite()[:, None]
    strength = strength.nan_to_num()
    token_weight = None
    if method.dense_weight is not None:
        gap = hindsight_gap(whole.hindsight, whole.old, whole.mask, bound=method.gap_bound)
        profile = turn_profile(gap, whole.turns, whole.mask)
        if method.dense_profile == "uniform":
            profile = uniform_profile(profile)
        if method.dense_profile == "permuted":
            profile = permuted_profile(profile, range(len(rollouts)))
        token_weight = token_weights(profile.weights, whole.turns, whole.mask)
    clip = ClipRange(method.epsilon_low, method.epsilon_high, method.dual_clip)
    prefix_clip = ClipRange(method.prefix_epsilon_low, method.prefix_epsilon_high)
    parts = microbatches or [range(len(rollouts))]
    total = whole.logprobs.new_zeros(())
    for part in map(list, parts):

        def count(chosen, rows=part):
            if method.reduction == "sum":
                return float((used & played).sum())
            if method.reduction == "micro":
                return chosen[rows].sum() * len(parts)
            return chosen.sum()

        pick = (whole.logprobs[part], whole.old[part], advantages[part], mask[part])
        branch = Branch(*pick)
        factor = None if weights is None else weights[part]
        if method.prefix_weight is not None:
            total = (
                total
                + prefix_continuation_loss(
                    branch,
                    Branch(
                        whole.prefix[part],
                        whole.prefix_old[part],
                        strength[part],
                        prefix_mask[part],
                    ),
                    objective="joint" if method.prefix_joint else "split",
                    prefix_weight=method.prefix_weight,
                    clip=clip,
                    prefix_clip=prefix_clip,
                    denominator=count(mask),
                    prefix_denominator=count(prefix_mask),
                ).total
            )
            continue
        if method.objective == "clipped":
            values = clipped_surrogate(*branch, clip=clip, weights=factor)
        elif method.objective == "policy_gradient":
            values = policy_gradient_surrogate(pick[0], pick[2], pick[3], weights=factor)
        else:
            values = policy_gradient_surrogate(pick[0], torch.ones_like(pick[2]), pick[3])
        outcome = -token_mean(values, mask[part], count(mask))
        total = total + outcome
        if method.dense_weight is not None:
            gap = hindsight_gap(whole.hindsight[part], pick[0], pick[3], bound=method.gap_bound)
            values = dense_surrogate(pick[0], gap, token_weight[part], pick[3])
            dense = -token_mean(values, mask[part], count(mask))
            total = (
                total + bounded_term(dense, method.dense_weight, outcome, alpha=method.alpha).value
            )
    return total


def prefix_strength(rollouts, whole, advantages, method):
    """Advantage of each rollout's prefix; NaN for a demonstration that is left out."""
    names = list(dict.fromkeys(r.group for r in rollouts if not r.demonstration))
    of_query = [[r for r in rollouts if r.group == g and not r.demonstration] for g in names]
    success = f64([np.mean([r.reward > 0 for r in members]) for members in of_query])
    reward = f64([np.mean([r.reward for r in members]) for members in of_query])
    families = torch.tensor([members[0].family for members in of_query])
    raw = torch.tensor([members[0].raw for members in of_query])
    lift = family_lift(success, families, raw)
    strength = prefix_advantages(
        method.prefix_signal,
        mean_advantages(advantages, whole.mask),
        rewards=whole.rewards,
        lift=f64([0.0 if r.demonstration else lift[names.index(r.group)] for r in rollouts]),
    )
    rows = [i for i, r in enumerate(rollouts) if r.demonstration]
    if rows:
        values, known = demonstration_advantages(
            whole.rewards[rows],
            torch.tensor([rollouts[i].family for i in rows]),
            reward,
            families,
            raw,
        )
        strength[rows] = torch.where(known, values, torch.full_like(values, math.nan))
    return strength


METHODS = {
    "sft": Method(objective="likelihood"),
    "grpo": Method(),
    "grpo without std": Method(normalize=False),
    "grpo without dual clip": Method(dual_clip=None),
    "grpo, sum": Method(reduction="sum"),
    "grpo, micro": Method(reduction="micro"),
    "grpo_mis pg": Method(objective="policy_gradient", importance=(0.2, 2.0)),
    "grpo_mis ppo": Method(importance=(0.2, 2.0)),
    "dapo clip-higher": Method(epsilon_high=0.28),
    "dapo dynamic sampling": Method(epsilon_high=0.28, dynamic_sampling=True),
    "dapo overlong": Method(epsilon_high=0.28, dynamic_sampling=True, overlong=(9, 4, 0.5)),
    "replay_grpo": Method(prefix_weight=0.0),
    **{
        f"prefix_grpo {signal} {'joint' if joint else 'split'}": Method(
            prefix_weight=0.7,
            prefix_signal=signal,
            prefix_joint=joint,
            prefix_epsilon_low=0.1,
            prefix_epsilon_high=0.3,
        )
        for signal in ("constant", "positive", "success", "lift", "magnitude")
        for joint in (False, True)
    },
    "prefix_grpo, sum": Method(prefix_weight=1.0, reduction="sum"),
    "prefix_grpo, micro": Method(prefix_weight=1.0, reduction="micro"),
    "trial": Method(dense_weight=0.1),
    "trial, loose bound": Method(dense_weight=0.1, alpha=100.0),
    "trial, tight gap": Method(dense_weight=0.1, alpha=100.0, gap_bound=0.3),
    "trial uniform": Method(dense_weight=0.1, alpha=100.0, dense_profile="uniform"),
    "trial permuted": Method(dense_weight=0.1, alpha=100.0, dense_profile="permuted"),
}
SPLITS = {"one": None, "four": [[0, 1, 2], [3, 4, 5, 6, 7], [8], list(range(9, 16))]}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradients_equal_the_plain_loops(name, split, seed):
    method, parts = METHODS[name], SPLITS[split]
    rollouts = sample_batch(seed)
    leaves = [r.logprobs for r in rollouts] + [r.prefix_logprobs for r in rollouts]
    expected = batch_loss(rollouts, method, parts)
    loss = library_loss(rollouts, method, parts)
    assert abs(float(loss.detach() - expected.detach())) < 1e-10
    for ours, theirs in zip(gradient(loss, *leaves), gradient(expected, *leaves), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_demonstrations_equal_the_plain_loops(joint, seed):
    """Two whole teacher trajectories; only the first has a raw query in the batch."""
    rollouts = [*sample_batch(seed), demonstration(seed, family=0), demonstration(seed, family=7)]
    method = Method(prefix_weight=1.0, prefix_joint=joint)
    leaves = [r.prefix_logprobs for r in rollouts] + [r.logprobs for r in rollouts]
    ours = gradient(library_loss(rollouts, method), *leaves)
    theirs = gradient(batch_loss(rollouts, method), *leaves)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-10)
    assert ours[16].abs().sum() > 0
    assert ours[17].abs().sum() == 0


def test_the_batches_reach_every_case():
    """Else the comparison above could pass without having compared anything."""
    seen = set()
    for seed in range(3):
        rollouts = sample_batch(seed)
        b = Padded(rollouts)
        advantages = group_advantages(b.rewards, b.groups)
        ratio = importance_ratio(b.logprobs.detach(), b.old, b.mask)
        sign = advantages[:, None].sign().expand_as(ratio)
        seen |= {"upper"} if bool(((ratio > 1.28) & (sign > 0)).any()) else set()
        seen |= {"between"} if bool(((ratio > 1.2) & (ratio < 1.28) & (sign > 0)).any()) else set()
        seen |= {"lower"} if bool(((ratio < 0.8) & (sign < 0) & b.mask).any()) else set()
        seen |= {"dual"} if bool(((ratio > 3) & (sign < 0)).any()) else set()
        kept = sequence_weights(b.old, b.rollout, b.mask).kept
        seen |= {"kept"} if bool(kept.any()) else set()
        seen |= {"dropped"} if not bool(kept.all()) else set()
        seen |= {"unmixed"} if not bool(mixed_groups(b.rewards, b.groups).all()) else set()
        seen |= {"overlong"} if int(b.mask.sum(1).max()) > 9 else set()
        for method, word in ((METHODS["trial"], "tight"), (METHODS["trial, loose bound"], "loose")):
            outcome = batch_loss(rollouts, Method()).detach()
            added = batch_loss(rollouts, method).detach() - outcome
            seen |= {word} if abs(added) < method.alpha * abs(outcome) - 1e-12 else {f"not {word}"}
    assert seen >= {"upper", "between", "lower", "dual", "kept", "dropped", "unmixed", "overlong"}
    assert "not tight" in seen
    assert "loose" in seen


# ------------------------------------------------------------------ identities between methods
@pytest.mark.parametrize(
    ("method", "other"),
    [
        (Method(prefix_weight=0.0), Method()),
        (Method(dense_weight=0.0), Method()),
        (Method(dense_weight=0.5, alpha=0.0), Method()),
        (Method(importance=(1e-6, 1e6)), Method()),
    ],
    ids=["prefix weight 0", "dense weight 0", "bound 0", "weights of 1"],
)
@few
@given(seed=seeds)
def test_a_term_of_weight_zero_changes_no_bit(method, other, seed):
    rollouts = sample_batch(seed, queries=2, samples=3)
    for r in rollouts:
        r.rollout_logprobs = r.old_logprobs
    leaves = [r.logprobs for r in rollouts]
    ours, theirs = library_loss(rollouts, method), library_loss(rollouts, other)
    assert torch.equal(ours, theirs)
    for a, b in zip(gradient(ours, *leaves), gradient(theirs, *leaves), strict=True):
        assert torch.equal(a, b)


# ------------------------------------------------------------------ padding, masks, order
@pytest.mark.parametrize("name", METHODS)
@few
@given(seed=seeds, left=st.integers(0, 5), right=st.integers(0, 5))
def test_padding_changes_nothing(name, seed, left, right):
    """Whatever stands there and on whichever side it is: NaN, infinities, numbers."""
    rollouts = sample_batch(seed, queries=2, samples=3)
    leaves = [r.logprobs for r in rollouts] + [r.prefix_logprobs for r in rollouts]
    loss = library_loss(rollouts, METHODS[name], fill=-1.0)
    expected, grads = loss.detach(), gradient(loss, *leaves)
    for fill in (math.nan, -math.inf, 7.0):
        loss = library_loss(rollouts, METHODS[name], left=left, right=right, fill=fill)
        assert torch.allclose(loss, expected, rtol=0, atol=1e-14)
        for a, b in zip(gradient(loss, *leaves), grads, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", METHODS)
@few
@given(seed=seeds)
def test_gradients_only_where_the_mask_is_true(name, seed):
    rollouts = sample_batch(seed, queries=2, samples=3)
    leaves = [r.logprobs for r in rollouts] + [r.prefix_logprobs for r in rollouts]
    masks = [r.mask for r in rollouts] + [r.prefix_mask for r in rollouts]
    for leaf, mask in zip(
        gradient(library_loss(rollouts, METHODS[name]), *leaves), masks, strict=True
    ):
        assert bool((leaf[~torch.tensor(mask, dtype=torch.bool)] == 0).all())


@pytest.mark.parametrize("name", [n for n in METHODS if n != "trial permuted"])
@few
@given(seed=seeds, order=st.permutations(range(6)))
def test_the_order_of_rollouts_changes_nothing(name, seed, order):
    rollouts = sample_batch(seed, queries=2, samples=3)
    leaves = [r.logprobs for r in rollouts]
    ours = library_loss([rollouts[i] for i in order], METHODS[name])
    theirs = library_loss(rollouts, METHODS[name])
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-13)
    for a, b in zip(gradient(ours, *leaves), gradient(theirs, *leaves), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-13)


@few
@given(seed=seeds, cut=st.integers(1, 5))
def test_shares_of_micro_batches_add_up(seed, cut):
    """With denominators of the whole step; the clamp of the dense term is per micro-batch."""
    rollouts = sample_batch(seed, queries=2, samples=3)
    parts = [list(range(cut)), list(range(cut, 6))]
    for name in ("grpo", "grpo, sum", "grpo_mis pg", "prefix_grpo magnitude joint"):
        whole, split = (library_loss(rollouts, METHODS[name], p) for p in (None, parts))
        assert torch.allclose(whole, split, rtol=0, atol=1e-13)


@given(seed=seeds)
def test_half_precision_is_computed_with_in_single(seed):
    generator = torch.Generator().manual_seed(seed)
    logprobs, old = -torch.rand(2, 3, 5, generator=generator).bfloat16() * 3
    mask = torch.ones(3, 5)
    advantages = torch.tensor([1.0, -1.0, 0.5])
    low = clipped_surrogate(logprobs, old, advantages, mask)
    assert low.dtype == torch.float32
    assert torch.equal(low, clipped_surrogate(logprobs.float(), old.float(), advantages, mask))
    assert log_ratio(logprobs, old, mask).dtype == torch.float32
    assert hindsight_gap(logprobs, old, mask).dtype == torch.float32
    assert policy_gradient_surrogate(logprobs, advantages, mask).dtype == torch.float32


# ------------------------------------------------------------------ advantages
def advantages_of(successes, **options):
    rewards = f64([1.0] * successes + [0.0] * (8 - successes))
    return group_advantages(rewards, torch.zeros(8, dtype=torch.long), **options)


def test_advantages_of_binary_rewards():
    one, four = advantages_of(1), advantages_of(4)
    assert one.numpy() == pytest.approx([2.4749] + [-0.3536] * 7, abs=5e-5)
    assert four.numpy() == pytest.approx([0.9354] * 4 + [-0.9354] * 4, abs=5e-5)
    assert advantages_of(1, normalize=False).tolist() == [0.875] + [-0.125] * 7
    assert advantages_of(4, normalize=False).tolist() == [0.5] * 4 + [-0.5] * 4


@pytest.mark.parametrize("successes", [0, 8])
def test_a_homogeneous_group_has_exactly_no_gradient(successes):
    logprobs = f64(-np.random.default_rng(0).random((8, 5)), grad=True)
    values = clipped_surrogate(logprobs, logprobs - 0.1, advantages_of(successes), torch.ones(8, 5))
    (grad,) = gradient(token_mean(values, torch.ones(8, 5)), logprobs)
    assert torch.equal(grad, torch.zeros_like(grad))


@given(st.floats(-1e3, 1e3), st.integers(1, 9))
def test_equal_rewards_have_no_advantage_whatever_their_rounding(reward, size):
    rewards = torch.full((size,), reward)
    groups = torch.zeros(size, dtype=torch.long)
    assert torch.equal(group_advantages(rewards, groups), torch.zeros(size))
    assert not mixed_groups(rewards, groups).any()


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=20),
    st.randoms(use_true_random=False),
)
def test_advantages_depend_on_the_group_alone(rows, random):
    """Whatever the order of rollouts, the names of groups, and what else is in the batch."""
    order = list(range(len(rows)))
    random.shuffle(order)
    rewards, groups = f64([r / 4 for _, r in rows]), torch.tensor([g for g, _ in rows])
    for normalize in (True, False):
        whole = group_advantages(rewards, groups, normalize=normalize)
        moved = group_advantages(rewards[order], groups[order] * -7 + 3, normalize=normalize)
        assert torch.allclose(moved, whole[order], rtol=0, atol=1e-9)
        for group in groups.unique():
            own = groups == group
            alone = group_advantages(rewards[own], groups[own], normalize=normalize)
            assert torch.allclose(whole[own], alone, rtol=0, atol=1e-9)
            assert abs(float(whole[own].sum())) < 1e-9


def test_raw_and_prefix_queries_share_no_baseline():
    advantages = group_advantages(f64([0, 1, 1, 1]), torch.tensor([5, 5, 9, 9]))
    half = math.sqrt(0.5)
    assert advantages.numpy() == pytest.approx([-half, half, 0, 0], abs=1e-5)


def test_groups_that_dynamic_sampling_keeps():
    rewards = f64([0, 1, 1, 1, 0, 0, 0.5, 0.5])
    groups = torch.tensor([3, 3, 1, 1, 7, 7, 2, 2])
    assert mixed_groups(rewards, groups).tolist() == [True, True] + [False] * 6


def test_overlong_penalty():
    lengths = torch.tensor([0, 80, 85, 90, 100, 101, 500])
    penalty = overlong_penalty(lengths, limit=100, buffer=20)
    assert penalty.numpy() == pytest.approx([0, 0, -0.25, -0.5, -1, -1, -1])
    half = overlong_penalty(lengths, limit=100, buffer=20, factor=0.5)
    assert torch.equal(half, penalty / 2)


# ------------------------------------------------------------------ surrogate
def one_token(ratio, advantage, clip=SYMMETRIC):
    """Surrogate of one token, and its gradient on the token's log-probability."""
    logprobs = f64([[math.log(ratio)]], grad=True)
    values = clipped_surrogate(
        logprobs, f64([[0.0]]), f64([advantage]), torch.ones(1, 1), clip=clip
    )
    (grad,) = gradient(values.sum(), logprobs)
    assert bool(
        is_clipped(logprobs, f64([[0.0]]), f64([advantage]), torch.ones(1, 1), clip=clip)
    ) == (advantage != 0 and float(grad) == 0)
    return float(values.detach()), float(grad)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "grad"),
    [
        (1.0, 2.0, 2.0, 2.0),
        (1.3, 1.0, 1.2, 0.0),
        (1.3, -1.0, -1.3, -1.3),
        (0.5, 1.0, 0.5, 0.5),
        (0.5, -1.0, -0.8, 0.0),
        (2.9, -1.0, -2.9, -2.9),
        (3.1, -1.0, -3.0, 0.0),
        (50.0, -2.0, -6.0, 0.0),
        (1.3, 0.0, 0.0, 0.0),
    ],
)
def test_clipped_surrogate(ratio, advantage, value, grad):
    assert one_token(ratio, advantage) == (pytest.approx(value), pytest.approx(grad))


def test_clip_higher():
    assert one_token(1.25, 1.0, ClipRange(0.2, 0.28))[1] == pytest.approx(1.25)
    assert one_token(1.25, 1.0, ClipRange(0.2, 0.2))[1] == 0
    assert one_token(1.3, 1.0, ClipRange(0.2, 0.28))[1] == 0


def test_without_dual_clip_a_bad_token_has_no_bound():
    assert one_token(50.0, -2.0, ClipRange(dual=None)) == (
        pytest.approx(-100),
        pytest.approx(-100),
    )


def test_log_ratios_are_clamped():
    logprobs = f64([[0.0, -50.0, -1.0]], grad=True)
    difference = log_ratio(logprobs, f64([[-50.0, 0.0, -1.5]]), torch.ones(1, 3))
    assert difference.tolist() == [[20, -20, 0.5]]
    assert gradient(difference.sum(), logprobs)[0].tolist() == [[0, 0, 1]]


@given(st.floats(-4, 4), st.floats(-3, 3), st.floats(0, 0.9), st.floats(0, 0.9), st.booleans())
def test_the_surrogate_bounds_the_plain_one_from_below(log, advantage, low, high, dual):
    value, grad = one_token(math.exp(log), advantage, ClipRange(low, high, 3.0 if dual else None))
    plain = math.exp(log) * advantage
    assert value <= max(plain, 3 * advantage if dual and advantage < 0 else plain) + 1e-9
    assert grad == 0 or grad == pytest.approx(plain)


def test_advantages_and_weights_may_be_given_by_rollout_or_by_token():
    logprobs, old = f64([[-1.0, -2.0], [-1.0, -1.0]]), f64([[-1.1, -2.0], [-1.3, -0.7]])
    mask = torch.ones(2, 2)
    for weights in (None, f64([0.5, 2.0])):
        by_row = clipped_surrogate(logprobs, old, f64([1, -1]), mask, weights=weights)
        by_token = clipped_surrogate(
            logprobs,
            old,
            f64([[1, 1], [-1, -1]]),
            mask,
            weights=None if weights is None else weights[:, None].expand(2, 2),
        )
        assert torch.equal(by_row, by_token)


def test_nothing_but_the_log_probabilities_has_a_gradient():
    logprobs, old = f64([[-1.0, -2.0]], grad=True), f64([[-1.1, -2.0]], grad=True)
    advantages, weights = f64([1.0], grad=True), f64([0.5], grad=True)
    mask = torch.ones(1, 2)
    total = (
        clipped_surrogate(logprobs, old, advantages, mask, weights=weights)
        + policy_gradient_surrogate(logprobs, advantages, mask, weights=weights)
        + dense_surrogate(logprobs, hindsight_gap(old, logprobs, mask), old, mask)
    ).sum()
    grads = gradient(total, logprobs, old, advantages, weights)
    assert [bool(g.any()) for g in grads] == [True, False, False, False]
    assert not hindsight_gap(old, logprobs, mask).requires_grad
    assert not sequence_weights(logprobs, old, mask).weight.requires_grad
    assert not is_clipped(logprobs, old, advantages, mask).requires_grad


def test_token_mean():
    values, mask = f64([[1, 2, 4], [8, 16, 32]]), torch.tensor([[1, 1, 0], [0, 0, 1]])
    assert float(token_mean(values, mask)) == pytest.approx(35 / 3)
    assert float(token_mean(values, mask, 1)) == 35
    assert float(token_mean(values, mask, 70.0)) == 0.5
    assert float(token_mean(values, mask.bool(), torch.tensor(70))) == 0.5


@pytest.mark.parametrize("denominator", [None, 0, 0.0, torch.tensor(0), 5])
def test_an_empty_mask_gives_zero_with_its_graph(denominator):
    values = f64([[math.nan, 1.0]], grad=True)
    mean = token_mean(values * 2, torch.zeros(1, 2), denominator)
    assert float(mean.detach()) == 0
    assert gradient(mean, values)[0].tolist() == [[0, 0]]
    empty = f64(np.zeros((3, 0)), grad=True)
    assert token_mean(empty, torch.zeros(3, 0), denominator).requires_grad


@given(st.floats(-3, 3))
def test_kl_estimates(difference):
    arguments = (f64([[difference, 9.0]]), f64([[0.0, 0.0]]), torch.tensor([[1, 0]]))
    k1, k2, k3 = (
        kl_estimate(*arguments, estimator=name)[0].tolist() for name in ("k1", "k2", "k3")
    )
    assert k1 == [-difference, 0]
    assert k2 == [pytest.approx(difference**2 / 2), 0]
    assert k3 == [pytest.approx(math.exp(difference) - 1 - difference, abs=1e-12), 0]
    assert k3[0] >= 0


def test_kl_estimates_are_unbiased_on_the_old_policys_own_tokens():
    p, q = f64([0.5, 0.3, 0.2]), f64([0.2, 0.2, 0.6])
    truth = float((p * (p / q).log()).sum())
    for estimator in ("k1", "k3"):
        each = kl_estimate(q.log()[None], p.log()[None], torch.ones(1, 3), estimator=estimator)
        assert float((p * each[0]).sum()) == pytest.approx(truth)


# ------------------------------------------------------------------ masked importance sampling
def weights_of(*ratios, low=0.2, high=2.0):
    logs = f64([[math.log(r)] for r in ratios])
    return sequence_weights(logs, torch.zeros_like(logs), torch.ones(len(ratios), 1))


def test_the_bounds_are_kept_and_what_is_beyond_is_dropped():
    weight, kept = weights_of(0.1, 0.2, 1.0, 2.0, 2.5)
    assert kept.tolist() == [False, True, True, True, False]
    assert weight.numpy() == pytest.approx([0, 0.2, 1, 2, 0])
    assert float(weight.max()) <= 2
    single = sequence_weights(
        torch.tensor([0.2, 2.0])[:, None].log(), torch.zeros(2, 1), torch.ones(2, 1)
    )
    assert single.kept.all()


def test_a_weight_is_of_the_sequence():
    logs = f64([[0.3, 0.4, 9.0], [-30.0, 2.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    weight, kept = sequence_weights(logs, torch.zeros_like(logs), mask, high=10.0)
    assert weight.numpy() == pytest.approx([math.exp(0.7), 0])
    assert kept.tolist() == [True, False]
    extreme = sequence_weights(logs * 100, torch.zeros_like(logs), mask, low=1e-9, high=1e9)
    assert extreme.weight.numpy() == pytest.approx([math.exp(20), math.exp(-20)])


def test_weights_of_one_give_the_plain_gradient():
    rollouts = sample_batch(0)
    leaves = [r.logprobs for r in rollouts]
    equal = [replace(r, rollout_logprobs=r.logprobs.detach().tolist()) for r in rollouts]
    plain = Method(objective="policy_gradient")
    weighted = replace(plain, importance=(0.2, 2.0))
    for a, b in zip(
        gradient(library_loss(equal, weighted), *leaves),
        gradient(library_loss(rollouts, plain), *leaves),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["grpo_mis pg", "grpo_mis ppo"])
def test_all_dropped_gives_zero(name):
    rollouts = sample_batch(0)
    for r in rollouts:
        r.rollout_logprobs = [x - 10 for x in r.old_logprobs]
    leaves = [r.logprobs for r in rollouts]
    loss = library_loss(rollouts, METHODS[name])
    assert float(loss.detach()) == 0
    assert all(not g.any() for g in gradient(loss, *leaves))


def test_a_dropped_sequence_leaves_the_denominator():
    """Two rollouts of two tokens; one is dropped, so the other's two tokens divide."""
    logprobs = f64([[-1.0, -1.0], [-1.0, -1.0]], grad=True)
    mask = torch.ones(2, 2, dtype=torch.bool)
    weight, kept = sequence_weights(logprobs, f64([[-1.0, -1.0], [-9.0, -9.0]]), mask)
    mask &= kept[:, None]
    values = policy_gradient_surrogate(logprobs, f64([1.0, -1.0]), mask, weights=weight)
    (grad,) = gradient(-token_mean(values, mask), logprobs)
    assert grad.tolist() == [[-0.5, -0.5], [0, 0]]


# ------------------------------------------------------------------ prefix
def test_prefix_ratios_are_clipped_above_alone():
    def grad(ratio):
        logprobs = f64([[math.log(ratio)]], grad=True)
        prefix = Branch(logprobs, f64([[0.0]]), f64([1.0]), torch.ones(1, 1))
        nothing = Branch(*(torch.zeros(1, 0, dtype=F64),) * 2, f64([0.0]), torch.zeros(1, 0))
        return float(gradient(prefix_continuation_loss(nothing, prefix).total, logprobs)[0])

    assert grad(1.3) == 0
    assert grad(0.5) == pytest.approx(-0.5)
    assert grad(0.01) == pytest.approx(-0.01)


def test_signals():
    advantages = f64([[2.0, 9.0, 0.0], [-1.0, -2.0, 9.0], [1.0, 1.0, 1.0]])
    mask = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 0, 0]])
    means = mean_advantages(advantages, mask)
    assert means.tolist() == [1.0, -1.5, 0.0]
    assert mean_advantages(f64([2.0, -1.0, 3.0]), mask).tolist() == [2.0, -1.0, 0.0]
    rewards, lift = f64([0.5, 0.0, 1.0]), f64([0.25, 0.5, 0.0])
    values = {
        signal: prefix_advantages(signal, means, rewards=rewards, lift=lift).tolist()
        for signal in ("constant", "positive", "success", "lift", "magnitude")
    }
    assert values == {
        "constant": [1, 1, 1],
        "positive": [1, 0, 0],
        "success": [1, 0, 1],
        "lift": [1.25, 2.0, 0],
        "magnitude": [1, 1.5, 0],
    }


@few
@given(seed=seeds, signal=st.sampled_from(["positive", "magnitude"]))
def test_a_homogeneous_group_does_not_learn_its_prefix(seed, signal):
    rollouts = sample_batch(seed, queries=2, samples=3)  # the second query is always solved
    leaves = [r.prefix_logprobs for r in rollouts]
    loss = library_loss(rollouts, Method(prefix_weight=1.0, prefix_signal=signal))
    assert all(not g.any() for g in gradient(loss, *leaves))


def test_a_raw_query_has_no_prefix_loss_but_its_graph():
    rollouts = [r for r in sample_batch(0) if r.raw]
    b = Padded(rollouts, right=2, fill=0.0)
    logprobs = b.prefix.clone().requires_grad_()
    assert logprobs.shape == (8, 2)
    loss = prefix_continuation_loss(
        Branch(b.logprobs, b.old, b.rewards, b.mask),
        Branch(logprobs, b.prefix_old, b.rewards, b.prefix_mask),
    )
    assert float(loss.prefix.detach()) == 0
    assert loss.prefix.requires_grad
    assert gradient(loss.prefix, logprobs)[0].tolist() == [[0.0, 0.0]] * 8


def test_lift_is_measured_within_a_trajectory_and_batch():
    success = f64([0.25, 0.75, 0.125, 1.0, 0.5, 0.0])
    families = torch.tensor([4, 4, 4, 9, 2, 2])
    raw = torch.tensor([True, False, False, False, True, True])
    assert family_lift(success, families, raw).tolist() == [0, 0.5, 0, 0, 0, 0]


def test_demonstrations_are_measured_against_their_raw_rollouts():
    advantages, known = demonstration_advantages(
        f64([1.0, 1.0, 0.25, 3.0]),
        torch.tensor([4, 9, 2, 4]),
        rewards=f64([0.25, 0.75, 1.0, 0.5]),
        families=torch.tensor([4, 4, 9, 2]),
        raw=torch.tensor([True, False, False, True]),
    )
    assert advantages.tolist() == [0.75, 0, 0, 1]
    assert known.tolist() == [True, False, True, True]


def test_split_and_joint_differ_in_denominator_range_and_weight():
    """One continuation token of ratio 1.1 and three prefix tokens of ratio 1.25, advantages 1."""
    cont = f64([[math.log(1.1)]], grad=True)
    pre = f64([[math.log(1.25)] * 3], grad=True)
    branches = (
        Branch(cont, f64([[0.0]]), f64([1.0]), torch.ones(1, 1)),
        Branch(pre, f64([[0.0] * 3]), f64([1.0]), torch.ones(1, 3)),
    )
    wide = {"prefix_clip": ClipRange(0.2, 0.3), "prefix_weight": 2.0}
    split = prefix_continuation_loss(*branches, **wide)
    assert float(split.total.detach()) == pytest.approx(-1.1 - 2 * 1.25)
    assert [float(x.detach()) for x in split[1:]] == pytest.approx([-1.1, -2.5])
    joint = prefix_continuation_loss(*branches, objective="joint", **wide)
    assert float(joint.total.detach()) == pytest.approx(-(1.1 + 3 * 1.2) / 4)
    assert not gradient(joint.total, pre)[0].any()
    given = prefix_continuation_loss(*branches, denominator=10, prefix_denominator=30, **wide)
    assert float(given.total.detach()) == pytest.approx(-1.1 / 10 - 2 * 3.75 / 30)


# ------------------------------------------------------------------ hindsight
def profile_of(lengths, scores):
    """Profile of one trajectory whose turns have these tokens and gaps."""
    gap = [s * (-1) ** t for n, s in zip(lengths, scores, strict=True) for t in range(n)]
    turns = [k for k, n in enumerate(lengths) for _ in range(n)]
    return turn_profile(f64([gap]), torch.tensor([turns]), torch.ones(1, len(gap)))


def test_turn_weights():
    for n in (1, 7):
        equal = profile_of([n, n, n], [0.1, 0.2, 0.3])
        assert equal.weights[0].numpy() == pytest.approx([0.5, 1, 1.5])
    unequal = profile_of([10, 30, 60], [0.1, 0.2, 0.3])
    assert unequal.scores[0].numpy() == pytest.approx([0.1, 0.2, 0.3])
    assert unequal.tokens[0].tolist() == [10, 30, 60]
    mean = float((unequal.tokens * unequal.scores).sum() / unequal.tokens.sum())
    assert mean == pytest.approx(0.25)
    assert unequal.weights[0].numpy() == pytest.approx([0.4, 0.8, 1.2])
    assert float((unequal.tokens * unequal.weights).sum()) == pytest.approx(100)


def test_turns_without_tokens_are_left_out():
    gap, turns = f64([[0.1, 0.3, 5.0, 0.0]]), torch.tensor([[0, 2, -1, 1]])
    mask = torch.tensor([[1, 1, 0, 0]])
    profile = turn_profile(gap, turns, mask)
    assert profile.weights[0].numpy() == pytest.approx([0.5, 0, 1.5])
    assert uniform_profile(profile).weights.tolist() == [[1, 0, 1]]
    assert token_weights(profile.weights, turns, mask)[0].numpy() == pytest.approx([0.5, 1.5, 0, 0])
    nothing = turn_profile(gap, turns, torch.zeros(1, 4))
    assert nothing.weights.tolist() == [[0]]
    assert not token_weights(nothing.weights, turns, torch.zeros(1, 4)).any()


@given(seed=seeds, scale=st.floats(0.01, 1.0), length=st.integers(1, 20))
def test_weights_have_mean_one_and_know_no_scale(seed, scale, length):
    rng = np.random.default_rng(seed)
    gap = f64(rng.uniform(-1, 1, (3, length)))
    turns = torch.tensor(rng.integers(0, 5, (3, length)))
    mask = torch.tensor(rng.random((3, length)) < 0.7)
    profile = turn_profile(gap, turns, mask)
    scaled = turn_profile(gap * scale, turns, mask)
    assert torch.allclose(profile.weights, scaled.weights, rtol=0, atol=1e-9)
    for weights in (
        profile.weights,
        uniform_profile(profile).weights,
        permuted_profile(profile, [seed, seed + 1, seed + 2]).weights,
    ):
        assert torch.allclose((weights * profile.tokens).sum(1), mask.sum(1).to(F64))
        assert torch.equal(weights > 0, (profile.tokens > 0) & (weights > 0))
        spread = token_weights(weights, turns, mask)
        assert torch.allclose(spread.sum(1), mask.sum(1).to(F64))


def test_gaps_beyond_the_bound_do_change_weights():
    logprobs, hindsight = f64([[-3.0, -3.0]]), f64([[-2.7, -2.4]])
    turns, mask = torch.tensor([[0, 1]]), torch.ones(1, 2)

    def weights(scale):
        gap = hindsight_gap(logprobs + (hindsight - logprobs) * scale, logprobs, mask)
        return turn_profile(gap, turns, mask).weights[0].tolist()

    assert weights(1) == pytest.approx([2 / 3, 4 / 3])
    assert weights(1.5) == pytest.approx([2 / 3, 4 / 3])
    assert weights(4) == pytest.approx([1, 1])


def test_gap_is_clipped_and_signed():
    gap = hindsight_gap(f64([[-1.0, -5.0, -1.0]]), f64([[-3.0, -1.0, -1.5]]), torch.ones(1, 3))
    assert gap.tolist() == [[1, -1, 0.5]]


@pytest.mark.parametrize("noise", [0.0, 1e-6])
def test_a_view_that_shows_nothing_gives_weight_one_and_no_loss(noise):
    rollouts = sample_batch(0)
    for r in rollouts:
        r.logprobs = f64(r.old_logprobs, grad=True)
        r.hindsight_logprobs = [x + noise * (-1) ** i for i, x in enumerate(r.old_logprobs)]
    b = Padded(rollouts)
    gap = hindsight_gap(b.hindsight, b.old, b.mask)
    profile = turn_profile(gap, b.turns, b.mask)
    assert torch.equal(profile.weights, (profile.tokens > 0).to(F64))
    if not noise:
        weights = token_weights(profile.weights, b.turns, b.mask)
        dense = dense_surrogate(b.logprobs, gap, weights, b.mask)
        loss = -token_mean(dense, b.mask)
        assert float(loss.detach()) == 0
        assert all(not g.any() for g in gradient(loss, *(r.logprobs for r in rollouts)))


@given(size=st.integers(2, 12), seed=seeds)
def test_derangements_leave_nothing_in_place(size, seed):
    order = derangement(size, seed)
    assert sorted(order) == list(range(size))
    assert all(place != element for place, element in enumerate(order))
    assert order == derangement(size, seed)


def test_derangements_of_none_and_one_and_all_of_four():
    assert [derangement(n, 0) for n in (0, 1, 2)] == [[], [0], [1, 0]]
    assert len({tuple(derangement(4, seed)) for seed in range(200)}) == 9


def test_permuted_weights_are_moved_and_scaled():
    profile = profile_of([10, 30], [0.1, 0.3])
    assert profile.weights[0].numpy() == pytest.approx([0.4, 1.2])
    moved = permuted_profile(profile, [0]).weights[0]
    # (1.2, 0.4) times 40 / (10 * 1.2 + 30 * 0.4)
    assert moved.numpy() == pytest.approx([2, 2 / 3])
    single = profile_of([5], [0.2])
    assert permuted_profile(single, [3]).weights.tolist() == [[1]]


def test_a_trajectorys_permutation_does_not_depend_on_its_batch():
    rng = np.random.default_rng(0)
    gap, turns = f64(rng.random((3, 12))), torch.arange(12).repeat(3, 1) // 2
    whole = permuted_profile(turn_profile(gap, turns, torch.ones(3, 12)), [5, 6, 7]).weights
    alone = permuted_profile(turn_profile(gap[1:2], turns[1:2], torch.ones(1, 12)), [6]).weights
    assert torch.equal(whole[1:2], alone)


def dense_and_outcome():
    x = f64(0.7, grad=True)
    return x, x * 3, (x - 0.5) * 2  # dense 2.1, outcome 0.4


@pytest.mark.parametrize("sign", [1, -1])
def test_a_saturated_clamp_has_exactly_no_dense_gradient(sign):
    x, dense, outcome = dense_and_outcome()
    value, saturated = bounded_term(sign * dense, 0.5, outcome)
    assert float(value.detach()) == pytest.approx(sign * 0.4)
    assert bool(saturated)
    assert float(gradient(outcome + value, x)[0]) == 2


def test_a_saturated_clamp_alone_has_exactly_no_gradient():
    x, dense, outcome = dense_and_outcome()
    assert float(gradient(bounded_term(dense, 0.5, outcome).value, x)[0]) == 0


def test_within_the_bound_the_dense_gradient_passes_whole():
    x, dense, outcome = dense_and_outcome()
    value, saturated = bounded_term(dense, 0.1, outcome)
    assert float(value.detach()) == pytest.approx(0.21)
    assert not saturated
    assert float(gradient(value, x)[0]) == pytest.approx(0.3)


@pytest.mark.parametrize("sign", [1, -1])
def test_at_the_very_bound_the_gradient_passes(sign):
    """Only what is strictly beyond it is cut."""
    x = f64(0.5, grad=True)
    at = bounded_term(sign * x, 1.0, f64(-0.5))
    beyond = bounded_term(sign * x, math.nextafter(1, 2), f64(-0.5))
    assert not at.saturated
    assert float(gradient(at.value, x)[0]) == sign
    assert beyond.saturated
    assert float(gradient(beyond.value, x)[0]) == 0


def test_no_gradient_leaks_through_the_bound():
    outcome, dense = f64(0.4, grad=True), f64(9.0, grad=True)
    value, _ = bounded_term(dense, 1.0, outcome)
    assert float(value.detach()) == pytest.approx(0.4)
    assert not value.requires_grad or float(gradient(value, outcome)[0]) == 0


def test_no_outcome_loss_means_no_dense_update():
    """At ratio 1, whole groups of equal length have an outcome loss of 0, and so a bound of 0."""
    advantages = advantages_of(4)
    logprobs = f64(np.full((8, 3), -1.0), grad=True)
    outcome = -token_mean(
        clipped_surrogate(logprobs, logprobs, advantages, torch.ones(8, 3)), torch.ones(8, 3)
    )
    assert float(outcome.detach()) == 0
    value, saturated = bounded_term(logprobs.mean(), 0.1, outcome)
    assert float(value.detach()) == 0
    assert saturated
    assert not gradient(value, logprobs)[0].any()


@given(st.floats(-5, 5), st.floats(-5, 5), st.floats(0.01, 100), st.floats(0, 3))
def test_a_common_denominator_may_stand_outside_the_clamp(dense, outcome, factor, alpha):
    """So shares of micro-batches are weighted by their tokens."""
    inside = bounded_term(f64(dense * factor), 0.3, f64(outcome * factor), alpha=alpha).value
    outside = factor * bounded_term(f64(dense), 0.3, f64(outcome), alpha=alpha).value
    assert torch.allclose(inside, outside)


# ------------------------------------------------------------------ errors
ROW, TOKENS = torch.zeros(2), torch.zeros(2, 3)
ERRORS = [
    (lambda: group_advantages(TOKENS, ROW), "rewards has shape (2, 3)"),
    (lambda: group_advantages(ROW, torch.zeros(3)), "groups has shape (3,), expected shape (2,)"),
    (lambda: group_advantages(ROW, ROW), "groups has dtype torch.float32, expected integers"),
    (lambda: overlong_penalty(ROW, limit=3, buffer=4), "buffer is 4"),
    (lambda: overlong_penalty(ROW, limit=3, buffer=1, factor=-1), "factor is -1"),
    (lambda: token_mean(TOKENS, ROW), "mask has shape (2,), values has (2, 3)"),
    (lambda: token_mean(TOKENS, TOKENS, -1.0), "denominator is -1.0"),
    (lambda: log_ratio(ROW, ROW, ROW), "logprobs has shape (2,), expected two dimensions"),
    (lambda: log_ratio(TOKENS, ROW, TOKENS), "old_logprobs has shape (2,)"),
    (
        lambda: clipped_surrogate(TOKENS, TOKENS, torch.zeros(3), TOKENS),
        "advantages has shape (3,), expected (2,) for one value a rollout or (2, 3)",
    ),
    (
        lambda: clipped_surrogate(TOKENS, TOKENS, ROW, TOKENS, weights=torch.zeros(2, 1)),
        "weights has shape (2, 1)",
    ),
    (lambda: clipped_surrogate(*[TOKENS] * 4, clip=ClipRange(low=2)), "low is 2"),
    (lambda: clipped_surrogate(*[TOKENS] * 4, clip=ClipRange(high=-1)), "high is -1"),
    (lambda: is_clipped(*[TOKENS] * 4, clip=ClipRange(dual=1)), "dual is 1"),
    (lambda: kl_estimate(*[TOKENS] * 3, estimator="k4"), "unknown estimator 'k4'; valid: k1"),
    (lambda: sequence_weights(*[TOKENS] * 3, low=3), "low is 3 and high is 2.0"),
    (lambda: prefix_advantages("most", ROW), "unknown signal 'most'; valid: constant"),
    (lambda: prefix_advantages("success", ROW), "signal 'success' needs rewards"),
    (lambda: prefix_advantages("lift", ROW), "signal 'lift' needs lift"),
    (lambda: family_lift(ROW, torch.zeros(3), ROW), "families has shape (3,)"),
    (
        lambda: prefix_continuation_loss(
            Branch(*[TOKENS] * 4), Branch(*[TOKENS] * 4), objective="both"
        ),
        "unknown objective 'both'; valid: split, joint",
    ),
    (lambda: hindsight_gap(*[TOKENS] * 3, bound=0), "bound is 0"),
    (
        lambda: turn_profile(TOKENS, torch.full((2, 3), -1), torch.ones(2, 3)),
        "turns is negative at an eligible token",
    ),
    (
        lambda: token_weights(TOKENS, torch.full((2, 3), 3), torch.ones(2, 3)),
        "turns is outside 0 to 2 at an eligible token",
    ),
    (
        lambda: permuted_profile(turn_profile(TOKENS, TOKENS.long(), TOKENS), [1]),
        "1 seeds for 2 trajectories",
    ),
    (lambda: bounded_term(ROW, 1.0, ROW.sum()), "term has shape (2,)"),
    (lambda: bounded_term(ROW.sum(), 1.0, ROW.sum(), alpha=-1), "alpha is -1"),
]


@pytest.mark.parametrize(("call", "message"), ERRORS, ids=[m for _, m in ERRORS])
def test_errors_name_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_everything_public_is_exported():
    assert all(hasattr(losses, name) for name in losses.__all__)
    assert list(losses.__all__) == sorted(losses.__all__)
