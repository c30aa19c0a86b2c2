"""``sft``: supervised fine-tuning on a teacher's trajectories (policy distillation).

Objective, over the assistant tokens of successful teacher trajectories::

    L(theta) = - (1 / |M|) sum_{t in M} log pi_theta(z_t | z_{<t})

``M`` holds the content and the end-of-turn token of every assistant turn marked ``trainable``; a
deliberate mistake of the teacher is context only. The serialization is the one evaluation uses.
Computed by :func:`agentbench_prefix.training.sft.sft_loss`.

Source: the SFT baseline of Prefix-GRPO (section 4.1), which is also its old policy for prefixes.
Chosen by us: the optimizer and schedule of the CPU tier, and that the trajectories are also seen in
variations of their tasks (``vary``), without which a model this small learns names by heart.
"""

from __future__ import annotations

from pathlib import Path

from agentbench_prefix.training.method import SupervisedMethod

METHOD = SupervisedMethod(
    name="sft",
    summary="base, then fine-tuned on the teacher's trajectories of the train tasks",
    folder=Path(__file__).parent,
)
