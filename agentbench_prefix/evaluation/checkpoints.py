"""Evaluate a checkpoint as its card says, and write what was measured into the card."""

from __future__ import annotations

from pathlib import Path

from agentbench_prefix.cards import CheckpointCard, FamilyResult
from agentbench_prefix.errors import CheckpointError
from agentbench_prefix.evaluation.metrics import Metrics
from agentbench_prefix.evaluation.runner import EvalConfig, evaluate


def evaluate_checkpoint(checkpoint: Path, out: Path, split: str = "test") -> Metrics:
    """Evaluate on a whole split, 8 samples a task at temperature 1, and update the card.

    Args:
        checkpoint: A folder with a card.
        out: Run folder of the evaluation.
        split: Split of tasks.

    Raises:
        CheckpointError: The folder has no card.
    """
    from agentbench_prefix.policies.transformers import TransformersPolicy

    card = CheckpointCard.load(checkpoint)
    if card is None:
        raise CheckpointError(f"{checkpoint} has no card: only a trained checkpoint can be updated")
    config = EvalConfig(
        method=card.method,
        env=card.env_id,
        split=split,
        dialogue=card.dialogue,
        max_tokens=card.max_tokens,
    )
    policy = TransformersPolicy.load(str(checkpoint), max_tokens=card.max_tokens)
    metrics = evaluate(config, policy, out).metrics
    results = {**card.results, split: family_results(metrics)}
    card.model_copy(update={"results": results}).save(checkpoint)
    return metrics


def family_results(metrics: Metrics) -> dict[str, FamilyResult]:
    """What a card says of a split of which every task was played 8 times."""
    return {
        name: FamilyResult(
            tasks=row.n_tasks,
            episodes=row.n_episodes,
            solved=row.n_solved,
            tasks_solved=row.n_tasks_solved,
            avg_at_8=row.avg_at_k["8"],
            pass_at_8=row.pass_at_k["8"],
        )
        for name, row in {"all": metrics, **metrics.families}.items()
    }
