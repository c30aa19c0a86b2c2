"""The command ``agentbench-prefix report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentbench_prefix.evaluation.tables import make_console


def report_command(
    source: Annotated[
        str, typer.Argument(metavar="RUN|CORPUS", help="Folder of an evaluation, or a corpus.")
    ],
    out: Annotated[Path, typer.Option(help="HTML file to write.")],
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most episodes or queries, spread evenly. Default: all episodes, 200 queries.",
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="Corpus: its split.")] = "train",
    model: Annotated[
        str | None, typer.Option(help="Corpus: model whose probabilities are shown.")
    ] = None,
) -> None:
    """Write a self-contained HTML page on which to read episodes of a run, or queries of a corpus.

    Episodes can be filtered by family, outcome and failure. Of queries, prefix and mask are
    coloured by the old policy's probability, as `corpus show` does.
    """
    from agentbench_prefix.corpora.find import find_corpus
    from agentbench_prefix.corpora.reading import MANIFEST
    from agentbench_prefix.files import write_text_atomic
    from agentbench_prefix.report.pages import episodes_page, queries_page

    folder = Path(source)
    if folder.is_dir() and not (folder / MANIFEST).is_file():
        page = episodes_page(folder, limit=limit)
    else:
        page = queries_page(find_corpus(source), split, model=model, limit=limit or 200)
    write_text_atomic(out, page)
    size = out.stat().st_size / 10**6
    make_console().print(f"wrote {out} ({size:.1f} MB)", markup=False, soft_wrap=True)
