"""Run folders and corpora to self-contained HTML pages: no script, style or font from elsewhere."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.text import Text

from agentbench_prefix.corpora.reading import Corpus
from agentbench_prefix.corpora.schema import QueryRow, SidecarRow
from agentbench_prefix.errors import ConfigurationError, MissingExtraError, UnknownNameError
from agentbench_prefix.evaluation.compare import load_evaluation
from agentbench_prefix.evaluation.records import EpisodeRecord, read_episodes
from agentbench_prefix.evaluation.runner import EPISODES
from agentbench_prefix.evaluation.stats import Estimate

# C0 control characters but tab and newline, as the pictures Unicode has for them.
_PICTURES = {code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)}
T = TypeVar("T")


def episodes_page(run: Path, *, limit: int | None = None) -> str:
    """A page of a run folder's episodes: turns, actions, observations, outcomes.

    Args:
        run: Folder with ``episodes.jsonl``, finished or not.
        limit: Most episodes, spread evenly; ``None`` for all.

    Raises:
        ConfigurationError: There are no episodes, or a line is none.
        MissingExtraError: jinja2 is not installed.
    """
    path = run / EPISODES
    if not path.is_file():
        inner = sorted(str(p.parent) for p in run.glob(f"**/{EPISODES}"))
        hint = f"; there are episodes in {', '.join(inner)}" if inner else ""
        raise ConfigurationError(f"{run} holds no {EPISODES}{hint}: name an evaluation's folder")
    episodes = list(read_episodes(path))
    if not episodes:
        raise ConfigurationError(f"{path} holds no whole episode yet: wait for the first chunk")
    first = episodes[0]
    rates, k, method, split = {}, "", run.resolve().name, ""
    try:
        _, metrics = load_evaluation(run)
    except ConfigurationError:
        state = f"unfinished, {len(episodes)} episodes so far"
    else:
        rates, k, method, split = dict(metrics.families), str(metrics.samples), metrics.method, ""
        rates["all"] = metrics
        split = f", split {metrics.split}"
        state = f"{metrics.n_tasks} tasks x {metrics.samples} samples"
    shown = _spread(episodes, limit)
    if len(shown) < len(episodes):
        state += f"; {len(shown)} of {len(episodes)} episodes are shown"
    return _render(
        "episodes.html",
        title=f"{method} on {first.env_id}{split}",
        about=f"{run}: {state}; data {first.data_hash[:12]}, dialogue {first.dialogue}",
        filters={
            "family": sorted({episode.family for episode in shown}),
            "outcome": sorted({_outcome(episode) for episode in shown}),
            "failure": sorted({e.failure_category for e in shown if e.failure_category}),
        },
        episodes=shown,
        rates=rates,
        k=k,
    )


@dataclasses.dataclass(frozen=True)
class _Shown:
    row: QueryRow
    sidecar: SidecarRow | None
    tokens: list[tuple[str, str]]
    strategies: str


def queries_page(
    corpus: Corpus, split: str, *, model: str | None = None, limit: int | None = 200
) -> str:
    """A page of a corpus' queries, with prefix and mask in colour where a sidecar is there.

    Args:
        corpus: The corpus.
        split: Its split.
        model: Model whose sidecars are shown; ``None`` for the first of each dialogue.
        limit: Most queries, spread evenly over those with a prefix; ``None`` for all.

    Raises:
        UnknownNameError: No such split or model.
        CorpusError: A file is damaged, or the tokenizer at hand is another one.
        MissingExtraError: jinja2 is not installed.
    """
    from agentbench_prefix.corpora.show import SHADES, coloured, load_serializer

    corpus.check_split(split)
    labels = {
        entry.dialogue: label
        for label, entry in reversed(corpus.manifest.models.items())
        if model in (None, label.partition("/")[2])
    }
    if model is not None and not labels:
        known = sorted({label.partition("/")[2] for label in corpus.manifest.models})
        raise UnknownNameError("model", model, known)
    rows = _spread([row for row in corpus.queries(split) if row.prefix_turns], limit)
    wanted = {row.query_id for row in rows}
    sidecars: dict[str, SidecarRow] = {}
    serializers = {}
    for dialogue, label in labels.items():
        name = label.partition("/")[2]
        sidecars.update(
            (found.query_id, found)
            for found in corpus.sidecars(split, dialogue, name)
            if found.query_id in wanted
        )
        entry = corpus.manifest.models[label]
        serializers[dialogue] = load_serializer(entry, corpus.manifest.env_id)
    shown = []
    for row in rows:
        sidecar = sidecars.get(row.query_id)
        tokens = []
        if sidecar is not None:
            serializer = serializers[row.dialogue.partition("@")[0]]
            tokens = _segments(coloured(row, sidecar, serializer))
        strategies = ", ".join(sorted({cut.strategy for cut in row.cuts}))
        shown.append(_Shown(row, sidecar, tokens, strategies))
    manifest = corpus.manifest
    return _render(
        "queries.html",
        title=f"{manifest.name} {manifest.version}, split {split}",
        about=f"{len(shown)} queries with a prefix for {manifest.env_id}, "
        f"licence {manifest.licence}",
        filters={
            "family": sorted({query.row.family for query in shown}),
            "strategy": sorted({query.strategies for query in shown if query.strategies}),
            "turns": [str(n) for n in sorted({query.row.prefix_turns for query in shown})],
        },
        queries=shown,
        shades=SHADES,
    )


def _segments(text: Text) -> list[tuple[str, str]]:
    """Pieces of a text with one style each; styles become names of classes."""
    return [(text.plain[span.start : span.end], str(span.style)) for span in text.spans]


def _spread(items: Sequence[T], limit: int | None) -> list[T]:
    """At most ``limit`` items, evenly spaced."""
    if limit is None or len(items) <= limit:
        return list(items)
    return [items[i * len(items) // limit] for i in range(limit)]


def _outcome(episode: EpisodeRecord) -> str:
    if episode.error is not None:
        return "errored"
    return "solved" if episode.success else "unsolved"


def _percent(estimate: Estimate) -> str:
    return f"{100 * estimate.value:.1f} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def _probability(logprob: float) -> str:
    return f"{math.exp(logprob):.2g}"


def _visible(text: str) -> str:
    return text.translate(_PICTURES)


def _render(template: str, *, filters: dict[str, Iterable[str]], **values: Any) -> str:
    try:
        import jinja2
    except ImportError as error:
        raise MissingExtraError("making a report", "leaderboard") from error
    engine = jinja2.Environment(
        loader=jinja2.PackageLoader("agentbench_prefix.report"),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    engine.filters.update(
        outcome=_outcome, percent=_percent, probability=_probability, visible=_visible
    )
    page = engine.get_template(template).render(filters=filters, **values)
    return page.encode("utf-8", "backslashreplace").decode("utf-8") + "\n"
