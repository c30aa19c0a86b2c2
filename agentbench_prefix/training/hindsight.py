"""Replies scored with what their turn led to in view."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentbench_prefix.dialogue import Message
from agentbench_prefix.policies.transformers import Branch, TransformersPolicy
from agentbench_prefix.serialization import ChatSerializer
from agentbench_prefix.training.objective import Batch, Group, Rollout


def hindsight_branches(
    group: Group, rollout: Rollout, views: Sequence[str], serializer: ChatSerializer
) -> list[Branch]:
    """Each turn's reply behind its user message with a text appended, as branches of the episode.

    Args:
        group: The group.
        rollout: One of its rollouts.
        views: A text for each turn.
        serializer: Of the model.
    """
    assert rollout.record is not None
    trunk = [*group.prompt, *rollout.completion]
    messages = list(group.query.messages)
    said = [i for i, message in enumerate(messages) if message.role == "assistant"]
    last = messages[-1]
    branches = []
    at = len(group.prompt)
    for index, (turn, view) in enumerate(zip(rollout.record.turns, views, strict=True)):
        reply = list(turn.token_ids or ())
        if index == 0:
            due = messages[said[-1] + 1 :] if said else messages
            shown = [*due[:-1], Message(last.role, last.content + view)]
            if said:
                begin = at - len(serializer.glue(due))
                ids = serializer.glue(shown)
            else:
                begin, ids = 0, serializer.opening(shown)
        else:
            before = rollout.record.turns[index - 1].observation
            begin = at
            ids = serializer.glue([Message("user", before + view)])
            at += len(serializer.glue([Message("user", before)]))
        # What the view does not change is in the trunk already; a token has to predict the reply.
        end = min(len(ids) - 1, len(trunk) - begin)
        same = next((i for i in range(end) if ids[i] != trunk[begin + i]), end)
        branches.append(Branch(begin + same, [*ids[same:], *reply], len(reply)))
        at += len(reply) + int(reply[-1] != serializer.end_id)
    return branches


def hindsight_logprobs(
    policy: TransformersPolicy, batch: Batch, views: Sequence[Sequence[str]]
) -> torch.Tensor:
    """Log-probabilities of replies with a text appended to the user message before them.

    Args:
        policy: Who scores.
        batch: Rollouts; those that are not active are left out.
        views: For each rollout a text for each of its turns.

    Returns:
        Nats, ``[B, T]``; 0 where nothing was scored.
    """
    rows = [(group, rollout) for group in batch.groups for rollout in group.rollouts]
    chosen = [row for row, active in enumerate(batch.active.tolist()) if active]
    trunks, branches, shared = [], [], []
    before = None
    for row in chosen:
        group, rollout = rows[row]
        shared.append(len(group.prompt) if group is before else 0)
        before = group
        trunks.append([*group.prompt, *rollout.completion])
        branches.append(hindsight_branches(group, rollout, views[row], policy.serializer))
    found = torch.zeros_like(batch.rollout_logprobs)
    for row, scored in zip(chosen, policy.score_branches(trunks, branches, shared), strict=True):
        for turn, values in enumerate(scored):
            place = batch.turns[row] == turn
            found[row, place] = torch.as_tensor(values, dtype=found.dtype, device=found.device)
    return found
