"""Where corpora are looked up: the argument as a folder, then this repository."""

from __future__ import annotations

from pathlib import Path

from agentbench_prefix.corpora.reading import MANIFEST, Corpus
from agentbench_prefix.errors import CorpusError


def find_corpus(name_or_path: str | Path) -> Corpus:
    """Find a corpus.

    Args:
        name_or_path: A folder, or the name of a folder in this repository's ``datasets/``.

    Raises:
        CorpusError: It is in none of these places, or its manifest is not valid.
    """
    checkout = Path(__file__).parents[2]
    places = [Path(name_or_path)]
    if (checkout / "pyproject.toml").is_file():
        places.append(checkout / "datasets" / name_or_path)
    for folder in places:
        if (folder / MANIFEST).is_file():
            return Corpus.open(folder)
    looked = ", ".join(map(str, places))
    raise CorpusError(f"no corpus {str(name_or_path)!r}: looked for a {MANIFEST} in {looked}")
