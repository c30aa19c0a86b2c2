"""``base``: a policy that knows the language and the format but plays weakly.

It stands where the papers put a pretrained model. It is trained with the objective of
:mod:`agentbench_prefix.training.sft` on generated tasks only, never on an official one, and on
everything its teacher does, deliberate mistakes included, so that it can play but plays badly.

Chosen by us (no source fixes them): size, data, schedule; all are fields of the recipe.
"""

from __future__ import annotations

from pathlib import Path

from agentbench_prefix.training.method import SupervisedMethod

METHOD = SupervisedMethod(
    name="base",
    summary="small policy taught on generated tasks only; plays weakly",
    folder=Path(__file__).parent,
)
