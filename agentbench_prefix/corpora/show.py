"""Queries and statistics of a corpus, for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentbench_prefix import registry
from agentbench_prefix.corpora.card import status_table, teaching_table
from agentbench_prefix.corpora.reading import Corpus
from agentbench_prefix.corpora.schema import ModelEntry, QueryRow, SidecarRow, to_messages
from agentbench_prefix.corpora.sidecars import prefix_of
from agentbench_prefix.errors import CorpusError, UnknownNameError
from agentbench_prefix.policies.tokens import find_checkpoint
from agentbench_prefix.serialization import ChatSerializer

SHADES = ((0.9, "green"), (0.5, "yellow"), (0.1, "dark_orange"), (0.0, "red"))
"""From likely to unlikely: probability at least this, and the colour of the token."""


def find_query(corpus: Corpus, split: str, query: str | None, model: str | None) -> QueryRow:
    """A query by its id, or the first one with a prefix.

    Args:
        corpus: The corpus.
        split: Its split.
        query: Id; ``None`` for the first with a prefix.
        model: Only dialogues that this model scored, if given.

    Raises:
        UnknownNameError: There is none; some ids are named.
    """
    models = sorted({label.partition("/")[2] for label in corpus.manifest.models})
    if model is not None and model not in models:
        raise UnknownNameError("model", model, models)
    known: list[str] = []
    for row in corpus.queries(split):
        if query is None and row.prefix_turns and (model is None or _label(corpus, row, model)):
            return row
        if row.query_id == query:
            return row
        if len(known) < 5:
            known.append(row.query_id)
    asked = "with a prefix" if query is None else query
    raise UnknownNameError("query", asked, known, f"Split {split!r}; these are its first ids.")


def _label(corpus: Corpus, query: QueryRow, model: str | None) -> str | None:
    """``<dialogue>/<model>`` of a sidecar, the first model's if none is named."""
    for label, entry in corpus.manifest.models.items():
        if entry.dialogue == query.dialogue.partition("@")[0] and (
            model is None or label.partition("/")[2] == model
        ):
            return label
    return None


def find_sidecar(
    corpus: Corpus, split: str, query: QueryRow, model: str | None
) -> tuple[ModelEntry, SidecarRow] | None:
    """The sidecar of a query, ``None`` if no model scored its dialogue.

    Raises:
        UnknownNameError: A model is named that did not.
        CorpusError: The sidecar is missing.
    """
    label = _label(corpus, query, model)
    if label is None:
        if model is not None:
            raise UnknownNameError("model of this dialogue", model, corpus.manifest.models)
        return None
    dialogue, _, name = label.partition("/")
    for row in corpus.sidecars(split, dialogue, name):
        if row.query_id == query.query_id:
            return corpus.manifest.models[label], row
    raise CorpusError(
        f"no sidecar of {query.query_id!r}; build or pull the corpus again",
        file=f"sidecars/{label}/{split}.parquet",
        field="query_id",
    )


def load_serializer(entry: ModelEntry, env_id: str) -> ChatSerializer:
    """The serializer of a corpus' model.

    Raises:
        CorpusError: Its tokenizer at hand is another one.
    """
    import transformers

    method = entry.source.get("method")
    given: Any = entry.source.get("model")
    if method is not None:
        given = registry.method(method).checkpoint(env_id)
    folder = find_checkpoint(given, entry.source.get("revision")).folder
    serializer = ChatSerializer(
        transformers.AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    )
    if serializer.fingerprint() != entry.tokenizer:
        raise CorpusError(
            f"the tokenizer in {folder} is not the one the sidecars were computed with "
            f"({serializer.fingerprint()[:12]}, expected {entry.tokenizer[:12]}): use the corpus "
            "with the checkpoint it names"
        )
    return serializer


def print_query(
    console: Console,
    query: QueryRow,
    sidecar: SidecarRow | None,
    serializer: ChatSerializer | None,
) -> None:
    """Print a query: prefix, cut, observation, and the masked tokens in colour."""
    console.print(Text(query.query_id, style="bold"))
    console.print(
        f"task {query.task_id} ({query.family}), {query.dialogue}; {query.prefix_turns} of "
        f"{query.n_turns} teacher turns in the prefix; replay {query.status}"
        + (", byte for byte" if query.bytes_equal else ""),
        markup=False,
    )
    for cut in query.cuts:
        console.print(
            f"  chosen by {cut.strategy}{f' of {cut.model}' if cut.model else ''}: rank "
            f"{cut.rank}, score {cut.score:.4f}",
            markup=False,
        )
    console.rule("prompt", style="dim")
    if sidecar is None or serializer is None:
        for message in query.messages:
            console.print(Text(f"[{message.role}] ", style="bold").append(message.content))
    else:
        console.print(coloured(query, sidecar, serializer), soft_wrap=True)
    console.rule("cut", style="dim")
    console.print(Text(f"the teacher went on: {query.next_action}"))
    console.print(Text(f"and was told: {query.next_observation}"))
    if sidecar is not None:
        begin, end = sidecar.assistant_prefix_span
        legend = Text(
            f"span [{begin}, {end}) of {sidecar.prompt_tokens} prompt tokens, "
            f"{sidecar.prefix_token_count} in the mask; probability under {sidecar.model}: "
        )
        for least, style in SHADES:
            legend.append(f">={least} ", style=style)
        console.print(legend.append("(struck out: mistakes, not in the mask)"))


def coloured(query: QueryRow, sidecar: SidecarRow, serializer: ChatSerializer) -> Text:
    """The prompt of a query, token by token: prefix, mask and probabilities by style.

    Raises:
        CorpusError: Span or mask of the sidecar does not fit the prompt.
    """
    layout = serializer.lay_out(to_messages(query.messages))
    begin, end, mask = prefix_of(layout, query.trainable, query.prefix_turns)
    if (begin, end) != tuple(sidecar.assistant_prefix_span) or mask != sidecar.prefix_mask:
        raise CorpusError(
            f"span or mask of {query.query_id!r} does not fit its prompt; run `agentbench-prefix "
            "corpus validate`"
        )
    mistakes = {
        position
        for (first, last), learn in zip(layout.replies, query.trainable, strict=True)
        if not learn
        for position in range(first, last)
    }
    text = Text()
    for position, token in enumerate(layout.ids):
        written = serializer.tokenizer.decode([token], clean_up_tokenization_spaces=False)
        style = "dim"
        if begin <= position < end:
            logprob = sidecar.assistant_prefix_old_log_probs[position - begin]
            if mask[position - begin]:
                shade = next(style for least, style in SHADES if math.exp(logprob) >= least)
                style = f"bold {shade}"
            elif position in mistakes:
                style = "strike"
        text.append(written, style=style)
    return text


def print_stats(console: Console, corpus: Corpus) -> None:
    """Print the tables of a corpus: what the teacher did, candidates by status, files."""
    manifest = corpus.manifest
    console.print(
        f"{manifest.name} {manifest.version}: {manifest.env_id}, licence {manifest.licence}",
        markup=False,
    )
    for title, (header, rows), grouped in (
        ("The teacher's play", teaching_table(manifest), 1),
        ("Candidate queries", status_table(manifest), 2),
    ):
        groups: dict[Sequence[str], list[Sequence[str]]] = {}
        for row in rows:
            groups.setdefault(tuple(row[:grouped]), []).append(row[grouped:])
        for group, members in groups.items():
            named = ", ".join(f"{k} {v}" for k, v in zip(header, group, strict=False))
            console.print(_table(f"{title}, {named}", header[grouped:], members))
    for split, tasks in manifest.splits.items():
        taught = sum(t.tasks for t in manifest.taught if (t.split, t.family) == (split, "all"))
        if taught < len(tasks):
            console.print(
                f"{len(tasks) - taught} of {len(tasks)} tasks of {split} were never solved and "
                "have no trajectory",
                style="bold",
            )
    console.print(
        _table(
            "Files",
            ("file", "rows", "bytes"),
            [(name, f"{e.rows:,}", f"{e.size:,}") for name, e in manifest.files.items()],
        )
    )


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE,
        padding=0,
        pad_edge=False,
    )
    for index, name in enumerate(header):
        text = index == 0 or name == "family"
        table.add_column(name, justify="left" if text else "right", no_wrap=text)
    for row in rows:
        table.add_row(*row)
    return table
