"""Learning curves of a run as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from agentbench_prefix.errors import MissingExtraError

PANELS = (
    ("solved", ("success", "success/raw", "success/prefix")),
    ("solved in the evaluation on fixed tasks", ("eval/success", "eval/success/family/")),
    ("turns", ("turns", "turns_of_successes", "eval/turns")),
    ("tokens an episode", ("tokens_per_episode",)),
    ("update", ("kl", "clip_fraction", "entropy", "mixed_groups")),
)
"""Title of each panel, and what is drawn in it; a name that ends in ``/`` stands for all below."""
KNOWN = {
    "step", "reward", "loss", "grad_norm", "learning_rate", "rollouts", "generated_tokens",
    "learned_tokens", "queries_refused",
}  # fmt: skip


def draw_curves(rows: Sequence[Mapping[str, float]], path: Path, title: str) -> None:
    """Draw what a run logged over its steps.

    A panel each for success, evaluation, turns, tokens and the update, and one for each group of
    values that the method logs itself.

    Args:
        rows: Lines of the log.
        path: PNG file to write.
        title: Above all.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("learning curves", "train") from error

    names = sorted({name for row in rows for name in row})
    panels = [(head, [n for n in names if _among(n, chosen)]) for head, chosen in PANELS]
    drawn = {name for _, chosen in panels for name in chosen} | KNOWN
    own: dict[str, list[str]] = {}
    for name in names:
        group = name.partition("/")[0]
        if name not in drawn and group not in ("eval", "seconds", "success"):
            own.setdefault(group, []).append(name)
    panels += sorted(own.items())
    panels = [(head, chosen) for head, chosen in panels if chosen]
    columns = 3
    height = -(-len(panels) // columns)
    figure = Figure(figsize=(5 * columns, 3.2 * max(height, 1)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for index, (head, chosen) in enumerate(panels):
        axes = figure.add_subplot(max(height, 1), columns, index + 1)
        alone = all(name.startswith("eval/") for name in chosen)
        for name in chosen:
            points = [(row["step"], row[name]) for row in rows if name in row]
            marker = "o" if name.startswith("eval/") else ""
            label = name.removeprefix("eval/") if alone else name
            label = label.removeprefix("success/").removeprefix("family/")
            axes.plot(
                [x for x, _ in points],
                [y for _, y in points],
                label=label,
                marker=marker,
                markersize=3,
            )
        axes.set_title(head, fontsize=10)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if len(chosen) > 1:
            axes.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Software": None})


def _among(name: str, chosen: Sequence[str]) -> bool:
    return any(name.startswith(c) if c.endswith("/") else name == c for c in chosen)
