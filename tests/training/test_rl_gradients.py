"""Every method: the trainer's loss and gradients on real rollouts against a plain loop."""

from __future__ import annotations

import pytest
import reference
import torch
from rl_runs import (
    gradients,
    plain_logprobs,
    pool,
    random_model,
    reference_rollouts,
    shake,
    tokenizer,
    trainer,
    trajectories,
)

from agentbench_baselines.trial import outcome_views
from agentbench_prefix.corpora.schema import to_messages
from agentbench_prefix.serialization import ChatSerializer
from agentbench_prefix.training.data import Batch
from agentbench_prefix.training.losses import derangement
from agentbench_prefix.training.sft import sft_loss

TOLERANCE = 1e-9
"""Double precision; gradients are of size 1e-3 to 1."""

Method = reference.Method

CASES = {
    "grpo": ("grpo", {}, Method()),
    "grpo micro": ("grpo", {"reduction": "micro"}, Method(reduction="micro")),
    "grpo sum": ("grpo", {"reduction": "sum"}, Method(reduction="sum")),
    "dapo": ("dapo", {}, Method(epsilon_high=0.28)),
    "dapo off": ("dapo", {"clip_higher": False}, Method()),
    "dapo dynamic": (
        "dapo",
        {"dynamic_sampling": True},
        Method(epsilon_high=0.28, dynamic_sampling=True),
    ),
    "dapo overlong": (
        "dapo",
        {"overlong": True, "overlong_limit": 40, "overlong_buffer": 30, "overlong_factor": 0.5},
        Method(epsilon_high=0.28, overlong=(40, 30, 0.5)),
    ),
    "mis pg": (
        "grpo_mis",
        {"form": "pg"},
        Method(objective="policy_gradient", importance=(0.2, 2.0)),
    ),
    "mis ppo": ("grpo_mis", {"form": "ppo"}, Method(importance=(0.2, 2.0))),
    "mis ppo sum": (
        "grpo_mis",
        {"form": "ppo", "reduction": "sum"},
        Method(importance=(0.2, 2.0), reduction="sum"),
    ),
    "replay": ("replay_grpo", {}, Method()),
    "prefix": ("prefix_grpo", {}, Method(prefix_weight=1.0)),
    "prefix micro": (
        "prefix_grpo",
        {"reduction": "micro", "prefix_weight": 0.5},
        Method(prefix_weight=0.5, reduction="micro"),
    ),
    "prefix clip": (
        "prefix_grpo",
        {"prefix_epsilon_high": 0.05},
        Method(prefix_weight=1.0, prefix_epsilon_high=0.05),
    ),
    **{
        f"prefix {signal}": (
            "prefix_grpo",
            {"signal": signal},
            Method(prefix_weight=1.0, prefix_signal=signal),
        )
        for signal in ("constant", "positive", "success", "lift")
    },
    "prefix joint": (
        "prefix_grpo",
        {"form": "joint"},
        Method(prefix_weight=1.0, prefix_joint=True),
    ),
    "prefix demo": ("prefix_grpo", {"full_demo": True}, Method(prefix_weight=1.0)),
    "prefix demo joint": (
        "prefix_grpo",
        {"full_demo": True, "form": "joint", "signal": "lift"},
        Method(prefix_weight=1.0, prefix_joint=True, prefix_signal="lift"),
    ),
    **{
        f"trial {profile}": (
            "trial",
            {"profile": profile, "warmup": 0, "dense_weight": 0.02},
            Method(dense_weight=0.02, dense_profile=profile),
        )
        for profile in ("relative", "uniform", "permuted")
    },
    "trial saturated": (
        "trial",
        {"warmup": 0, "dense_weight": 50.0},
        Method(dense_weight=50.0),
    ),
    "adaprefix": ("adaprefix", {"calibrate": False, "span": 0.0}, Method()),
    "prefix_rft": (
        "adaprefix",
        {"schedule": "cosine", "calibrate": False, "span": 0.0, "anneal_from": 1.0},
        Method(),
    ),
}


def compare(made, epoch, method, old, views, hindsight=None):
    """Loss and gradients of a pass, by the trainer and by the loop; returns the loop's rollouts."""
    loss, grads = gradients(made, epoch)
    rollouts = reference_rollouts(made, old, views if hindsight is None else None)
    for rollout, values in zip(rollouts, hindsight or (), strict=False):
        rollout.hindsight_logprobs = values
    if method.dense_profile == "permuted":
        kept = [r for r in made._whole.records if r is not None]
        for rollout, record in zip(rollouts, kept, strict=True):
            active = len({t for t, m in zip(rollout.turns, rollout.mask, strict=True) if m})
            rollout.turn_order = derangement(active, record.seed)
    size = len(rollouts) // made.args.gradient_accumulation_steps
    parts = [range(i, i + size) for i in range(0, len(rollouts), size)]
    if any(r.demonstration for r in rollouts) or method.dynamic_sampling:
        parts = None  # rows are not cut alike; nothing here depends on it
    made.model.zero_grad()
    expected = reference.batch_loss(rollouts, method, parts)
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), abs=TOLERANCE)
    for name, p in made.model.named_parameters():
        torch.testing.assert_close(
            grads[name], p.grad, atol=TOLERANCE, rtol=1e-7, msg=lambda m, name=name: f"{name}: {m}"
        )
    return rollouts, max(float(g.abs().max()) for g in grads.values())


def own_views(made):
    views = []
    for group in made._whole.groups:
        for rollout, changed in zip(group.rollouts, made.state_changes(group), strict=True):
            views.append(outcome_views(rollout.record, changed, made.objective.settings))
    return views


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_a_plain_loop(case, tmp_path):
    name, settings, method = CASES[case]
    model = random_model()
    more = {"samples": 3, "microbatch": 6, "queries_per_step": 4}
    known = pool(model, cut=False) if name == "adaprefix" else pool(model)
    if "full_demo" in settings:
        more["queries"] = {"demonstrations": True}
    made = trainer(
        name,
        tmp_path,
        model=model,
        known=known,
        engine_noise=0.25 if name == "grpo_mis" else 0.0,
        objective=settings,
        **more,
    )
    made._step = 0
    made._prepare_inputs(None)  # plays
    views = own_views(made) if name == "trial" else None
    rollouts, size = compare_first(made, method, views)
    assert size > 1e-4
    old = [r.old_logprobs for r in rollouts]
    if not all(made._untouched[2].tolist()):
        old = spread(made, old)
    shake(model, 0.002 if settings.get("form") == "pg" else 0.02)
    hindsight = [r.hindsight_logprobs for r in rollouts]
    rollouts, size = compare(made, 1, method, old, views, hindsight)
    assert size > 1e-4
    check(case, rollouts)


def compare_first(made, method, views):
    # The batch is played already: keep it, as the trainer does between micro-batches.
    play = made._play
    batches = made._batch
    made._play = lambda: batches
    try:
        return compare(made, 0, method, None, views)
    finally:
        made._play = play


def spread(made, old):
    """Old log-probabilities by row again, with nothing for rows that were refused."""
    rest = iter(old)
    return [next(rest) if used else None for used in made._untouched[2].tolist()]


def check(case, rollouts):
    """The case has what it is there for."""
    assert {len({r.reward for r in rollouts if r.group == g}) for g in {r.group for r in rollouts}}
    ratios = [
        float((p.detach() - o).exp())
        for r in rollouts
        for p, o, m in zip(r.logprobs, r.old_logprobs, r.mask, strict=True)
        if m
    ]
    if case != "mis pg":
        assert min(ratios) < 0.8
        assert max(ratios) > 1.3
    if case.startswith("mis"):
        kept = [reference.importance(r, CASES[case][2]) for r in rollouts]
        assert 0 < sum(w > 0 for w in kept) < len(kept)
    if case.startswith("prefix "):
        assert any(r.prefix_logprobs is not None for r in rollouts)
    if "demo" in case:
        assert any(r.demonstration for r in rollouts)


def test_supervised_loss_and_gradients_are_those_of_a_plain_loop():
    model = random_model()
    serializer = ChatSerializer(tokenizer())
    examples, rollouts = [], []
    for row in trajectories()[:4]:
        messages = to_messages(row.conversation("compact").messages)
        layout = serializer.lay_out(messages)
        mask = layout.mask([turn.trainable for turn in row.turns])
        examples.append((layout.ids, [float(m) for m in mask]))
        logprobs = plain_logprobs(model, layout.ids)
        rollouts.append(
            reference.Rollout(
                logprobs, [0.0] * len(logprobs), [bool(m) for m in mask[1:]], 0.0, len(rollouts)
            )
        )
    assert not all(m for r in rollouts for m in r.mask)
    width = max(len(ids) for ids, _ in examples)
    batch = Batch(
        torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in examples]),
        torch.tensor([w + [0.0] * (width - len(w)) for _, w in examples], dtype=torch.float64),
        demonstrations=len(examples),
        pool=0,
        pool_step=0,
    )
    # Supervised training has distributions over every row of logits.
    expected = reference.batch_loss(rollouts, Method(objective="likelihood"))
    expected.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    narrow(model)
    loss = sft_loss(model, batch)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=TOLERANCE)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], atol=TOLERANCE, rtol=1e-7)


def narrow(model):
    """Cut the output layer to the tokenizer's ids, over which the loop's distributions are."""
    head = model.lm_head
    head.forward = lambda hidden: torch.nn.functional.linear(
        hidden, head.weight[: len(tokenizer())]
    )
