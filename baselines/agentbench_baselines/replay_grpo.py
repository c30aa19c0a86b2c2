"""``replay_grpo``: GRPO whose queries also start from states a teacher passed through.

Objective: that of :mod:`agentbench_baselines.grpo`, over the student's continuation of a replayed
teacher prefix. The prefix is context only::

    L = L_cont = - (1 / |M_cont|) sum_{(i, t) in M_cont} g(r_it, A_i)

Each query, raw or cut, is a group of its own. It is ``prefix_grpo`` at ``lambda_pre = 0``.

Source: the Replay-GRPO ablation of Prefix-GRPO (section 4). The cuts are the released queries of a
corpus, see the recipe's ``queries``. Chosen by us: prefix turns count toward the turn limit
(``fresh_budget``); raw and cut queries of a family are drawn alike.
"""

from __future__ import annotations

from agentbench_baselines.grpo import GRPO, GRPOSettings


class ReplayGRPO(GRPO[GRPOSettings]):
    """GRPO; what differs are the queries."""
