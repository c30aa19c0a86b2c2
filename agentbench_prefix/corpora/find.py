"""Where corpora are looked up: the argument as a folder, this repository, the Hub."""

from __future__ import annotations

import re
from pathlib import Path

from agentbench_prefix.corpora.hub import cache_folder, check_files, is_hub_id, pull
from agentbench_prefix.corpora.reading import MANIFEST, Corpus
from agentbench_prefix.errors import ConfigurationError, CorpusError


def find_corpus(name_or_path: str | Path, *, revision: str | None = None) -> Corpus:
    """Find a corpus; the first of these places that holds one wins.

    1. The argument as a folder.
    2. In a checkout of this repository, the folder of that name in ``datasets/``.
    3. The Hub, for an id ``owner/name`` with a commit. It is downloaded once to
       :func:`~agentbench_prefix.corpora.hub.cache_folder`, and verified against its manifest
       whenever it is taken from there, then without network.

    Args:
        name_or_path: A folder, a name, or a Hub id; ``owner/name@commit`` pins a Hub id, too.
        revision: Commit of a Hub id, 40 hexadecimal digits.

    Raises:
        CorpusError: It is in none of these places (they are listed), or it is damaged.
        ConfigurationError: A revision was given of a folder, or it is no commit.
        HubError: The Hub cannot be reached or refuses.
    """
    name = str(name_or_path)
    looked = []
    for folder in _folders(name):
        if (folder / MANIFEST).is_file():
            if revision is not None:
                raise ConfigurationError(
                    f"a revision ({revision!r}) belongs to a Hub id, but {name!r} was found as the "
                    f"folder {folder}: leave the revision out, or name the Hub id"
                )
            return Corpus.open(folder)
        why = f"no {MANIFEST} in it" if folder.is_dir() else "no such folder"
        looked.append(f"{folder} ({why})")
    repo_id, at, pinned = name.partition("@")
    if not is_hub_id(repo_id):
        looked.append("the Hub (not asked: it is no id owner/name)")
    elif at and revision not in (None, pinned):
        raise ConfigurationError(f"{name!r} and the revision {revision!r} are two: give one")
    elif not (commit := pinned or revision):
        looked.append("the Hub (not asked: pin a commit, owner/name@commit)")
    else:
        out = cache_folder(repo_id, commit)
        if not out.is_dir():
            return pull(repo_id, revision=commit, out=out)
        corpus = Corpus.open(out)
        check_files(corpus)
        return corpus
    raise CorpusError(
        f"no corpus {name!r}; looked in: {'; '.join(looked)}. Build it with `agentbench-prefix "
        "corpus build`, or give its folder or Hub id"
    )


def _folders(name: str) -> list[Path]:
    try:
        places = [Path(name).expanduser()]
    except RuntimeError:  # the home folder of a user who does not exist
        places = [Path(name)]
    checkout = Path(__file__).parents[2]
    # Elsewhere the folder of that name beside this package is another library's.
    if re.fullmatch(r"\w[\w.-]*", name) and (checkout / "pyproject.toml").is_file():
        places.append(checkout / "datasets" / name)
    return places
