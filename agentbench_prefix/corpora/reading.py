"""A corpus folder, read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agentbench_prefix.corpora.schema import Manifest, QueryRow, SidecarRow, TrajectoryRow
from agentbench_prefix.corpora.storage import read_rows
from agentbench_prefix.dialogue import Dialogue
from agentbench_prefix.env import TextEnv
from agentbench_prefix.errors import CorpusError, UnknownNameError
from agentbench_prefix.files import canonical_json

MANIFEST = "manifest.json"
CARD = "README.md"
RECIPE = "corpus.yaml"


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A corpus on this machine.

    Attributes:
        folder: Its folder.
        manifest: Its manifest.
    """

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: Path) -> Corpus:
        """Read a folder's manifest.

        Raises:
            CorpusError: There is none, or it is not valid.
        """
        path = folder / MANIFEST
        try:
            text = path.read_bytes()
        except OSError as error:
            raise CorpusError(
                f"{folder} is no corpus: it has no readable {MANIFEST} ({error.strerror}); "
                "build it with `agentbench-prefix corpus build`, or get it with "
                "`agentbench-prefix hub pull`"
            ) from error
        try:
            return cls(folder, Manifest.parse(text))
        except ValidationError as error:
            first = error.errors()[0]
            raise CorpusError(
                f"{first['msg']}; build or pull the corpus again",
                file=MANIFEST,
                field=".".join(map(str, first["loc"])),
            ) from error

    @property
    def splits(self) -> list[str]:
        """Names of its splits."""
        return list(self.manifest.splits)

    def check_split(self, split: str) -> None:
        """Check that there is such a split.

        Raises:
            UnknownNameError: There is not.
        """
        if split not in self.splits:
            raise UnknownNameError(f"split of {self.manifest.name}", split, self.splits)

    def check_environment(self, env: TextEnv, dialogue: Dialogue) -> None:
        """Check that it was made with this environment, its data and arguments, and this dialogue.

        Raises:
            CorpusError: It was not; the field that differs is named, with both values.
        """
        manifest = self.manifest
        for field, theirs, mine in (
            ("env_id", manifest.env_id, env.env_id),
            ("data_hash", manifest.data_hash, env.data_hash),
        ):
            if theirs != mine:
                raise CorpusError(
                    f"{manifest.name} has {theirs!r}, the environment at hand has {mine!r}: "
                    "use a corpus of this version",
                    file=MANIFEST,
                    field=field,
                )
        given = json.loads(canonical_json(env.arguments()))
        for name in sorted(manifest.arguments.keys() | given.keys()):
            theirs, mine = (_shown(side, name) for side in (manifest.arguments, given))
            if theirs != mine:
                raise CorpusError(
                    f"{manifest.name} was made with {theirs}, the environment at hand has {mine}: "
                    "use a corpus made with these arguments, or make the environment with those "
                    "of the corpus",
                    file=MANIFEST,
                    field=f"arguments.{name}",
                )
        if dialogue.label not in manifest.dialogues:
            raise CorpusError(
                f"{manifest.name} has {', '.join(manifest.dialogues)}, not {dialogue.label}: use "
                "a corpus of this version",
                file=MANIFEST,
                field="dialogues",
            )
        texts = manifest.dialogues[dialogue.label]
        if texts != dialogue.fingerprint():
            raise CorpusError(
                f"the texts of {dialogue.label} have the hash {texts} in {manifest.name}, "
                f"{dialogue.fingerprint()} in the environment at hand: a prompt or an answer was "
                "changed without a new version; use a corpus of this version, or the code that "
                "made this one",
                file=MANIFEST,
                field=f"dialogues.{dialogue.label}",
            )

    def trajectories(self, split: str) -> Iterator[TrajectoryRow]:
        """Rows of ``trajectories/<split>.parquet``."""
        return self._rows("trajectories", f"trajectories/{split}.parquet")

    def queries(self, split: str) -> Iterator[QueryRow]:
        """Rows of ``queries/<split>.parquet``."""
        return self._rows("queries", f"queries/{split}.parquet")

    def sidecars(self, split: str, dialogue: str, model: str) -> Iterator[SidecarRow]:
        """Rows of ``sidecars/<dialogue>/<model>/<split>.parquet``."""
        return self._rows("sidecars", f"sidecars/{dialogue}/{model}/{split}.parquet")

    def _rows(self, kind: str, name: str) -> Iterator[Any]:
        return read_rows(self.folder / name, kind, name)


def _shown(arguments: Mapping[str, Any], name: str) -> str:
    """An argument as JSON, which tells ``true`` from 1."""
    return json.dumps(arguments[name], sort_keys=True) if name in arguments else "none of that name"
