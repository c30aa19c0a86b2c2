"""Exports of a corpus for other trainers: verl's Parquet layout, and chat JSONL for SFT tools."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agentbench_prefix.corpora.reading import Corpus
from agentbench_prefix.corpora.schema import QueryRow, SidecarRow
from agentbench_prefix.corpora.storage import TableWriter
from agentbench_prefix.errors import CorpusError, MissingExtraError, UnknownNameError
from agentbench_prefix.files import open_text_atomic


def with_sidecars(
    corpus: Corpus, split: str, dialogue: str, model: str
) -> Iterator[tuple[QueryRow, SidecarRow]]:
    """Queries of a dialogue, each with its sidecar; read in step, neither is held.

    Args:
        corpus: The corpus.
        split: Its split.
        dialogue: Name of the dialogue.
        model: Name of the model.

    Raises:
        UnknownNameError: There is no such split, or no such sidecars.
        CorpusError: The two files are not in the same order.
    """
    corpus.check_split(split)
    label = f"{dialogue}/{model}"
    if label not in corpus.manifest.models:
        raise UnknownNameError("sidecars <dialogue>/<model>", label, corpus.manifest.models)
    queries = (q for q in corpus.queries(split) if q.dialogue.partition("@")[0] == dialogue)
    sidecars = corpus.sidecars(split, dialogue, model)
    file = f"sidecars/{label}/{split}.parquet"
    row = -1
    for row, query in enumerate(queries):
        sidecar = next(sidecars, None)
        if sidecar is None or sidecar.query_id != query.query_id:
            found = "the end of the file" if sidecar is None else repr(sidecar.query_id)
            raise CorpusError(
                f"expected the sidecar of {query.query_id!r}, found {found}; build or pull the "
                "corpus again",
                file=file,
                row=row,
                field="query_id",
            )
        yield query, sidecar
    if next(sidecars, None) is not None:
        raise CorpusError("it has more rows than the dialogue has queries", file=file, row=row + 1)


def _verl_features() -> Any:
    try:
        from datasets import Features, List, Value
    except ImportError as error:
        raise MissingExtraError("exports of a corpus", "corpora") from error
    text = Value("string")
    return Features(
        {
            "data_source": text,
            "prompt": List({"role": text, "content": text}),
            "ability": text,
            "reward_model": {"style": text, "ground_truth": text},
            "extra_info": {
                "split": text,
                "index": Value("int64"),
                "query_id": text,
                "trajectory_id": text,
                "env_id": text,
                "data_hash": text,
                "arguments": text,
                "options": text,
                "task_id": text,
                "family": text,
                "seed": Value("int64"),
                "dialogue": text,
                "prefix_actions": List(text),
            },
            "assistant_prefix_span": List(Value("int32"), length=2),
            "prefix_mask": List(Value("int8")),
            "assistant_prefix_old_log_probs": List(Value("float32")),
            "prefix_token_count": Value("int32"),
        }
    )


def export_verl(
    corpus: Corpus,
    out: Path,
    *,
    split: str,
    dialogue: str,
    model: str,
    strategies: Sequence[str] | None = None,
    raw: bool = True,
) -> int:
    """Write queries with sidecars as verl's ``RLHFDataset`` reads them.

    ``extra_info`` holds what puts the environment back: ``env_id``, ``arguments`` and ``options``
    (JSON), ``task_id``, ``seed``, and ``prefix_actions``, in which an empty text is a turn without
    an action. The reward is the environment's, so ``reward_model`` names no answer.

    Args:
        corpus: The corpus.
        out: The Parquet file; it appears when it is whole.
        split: Split of the corpus.
        dialogue: Name of the dialogue.
        model: Name of the old policy.
        strategies: Keep the cuts that one of these chose; ``None`` for all.
        raw: Keep raw queries.

    Returns:
        Rows written.

    Raises:
        UnknownNameError: A split, model or strategy does not exist.
        CorpusError: The corpus is damaged.
    """
    known = corpus.manifest.recipe["strategies"]
    for name in strategies or ():
        if name not in known:
            raise UnknownNameError("strategy", name, known)
    wanted = None if strategies is None else set(strategies)
    with TableWriter(out, _verl_features().arrow_schema) as writer:
        for query, sidecar in with_sidecars(corpus, split, dialogue, model):
            chosen = {cut.strategy for cut in query.cuts}
            if not (raw if not query.prefix_turns else wanted is None or chosen & wanted):
                continue
            writer.write(_verl_row(corpus.manifest.name, split, writer.rows, query, sidecar))
    return writer.rows


def _verl_row(
    name: str, split: str, index: int, query: QueryRow, sidecar: SidecarRow
) -> dict[str, Any]:
    return {
        "data_source": name,
        "prompt": [message.model_dump() for message in query.messages],
        "ability": "agent",
        "reward_model": {"style": "environment", "ground_truth": ""},
        "extra_info": {
            "split": split,
            "index": index,
            **query.model_dump(
                include={
                    "query_id",
                    "trajectory_id",
                    "env_id",
                    "data_hash",
                    "arguments",
                    "options",
                    "task_id",
                    "family",
                    "seed",
                    "dialogue",
                    "prefix_actions",
                }
            ),
        },
        **sidecar.model_dump(
            include={
                "assistant_prefix_span",
                "prefix_mask",
                "assistant_prefix_old_log_probs",
                "prefix_token_count",
            }
        ),
    }


def export_chat(corpus: Corpus, out: Path, *, split: str, dialogue: str) -> int:
    """Write successful trajectories as chat JSONL, one ``{"messages": [...]}`` a line.

    Assistant messages carry ``"weight"``, 1 or 0, and ``"train"``, true or false: SFT tools that
    know one of them leave deliberate mistakes out of the loss; others learn them too.

    Args:
        corpus: The corpus.
        out: The file; it appears when it is whole.
        split: Split of the corpus.
        dialogue: Name of the dialogue.

    Returns:
        Lines written.

    Raises:
        UnknownNameError: There is no such split or dialogue.
    """
    corpus.check_split(split)
    lines = 0
    with open_text_atomic(out) as file:
        for row in corpus.trajectories(split):
            try:
                conversation = row.conversation(dialogue)
            except KeyError as error:
                known = [c.dialogue for c in row.conversations]
                raise UnknownNameError("dialogue", dialogue, known) from error
            flags = iter([turn.trainable for turn in row.turns])
            messages: list[dict[str, Any]] = []
            for message in conversation.messages:
                written: dict[str, Any] = message.model_dump()
                if message.role == "assistant":
                    learn = next(flags)
                    written |= {"weight": int(learn), "train": learn}
                messages.append(written)
            line = {"messages": messages, "trajectory_id": row.trajectory_id}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            lines += 1
    return lines
