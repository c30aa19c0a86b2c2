"""A corpus folder, read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agentbench_prefix.corpora.schema import Manifest, QueryRow, SidecarRow, TrajectoryRow
from agentbench_prefix.corpora.storage import read_rows
from agentbench_prefix.dialogue import Dialogue
from agentbench_prefix.env import TextEnv
from agentbench_prefix.errors import CorpusError, UnknownNameError

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
        """Check that it was made with this environment's data and this dialogue.

        Raises:
            CorpusError: It was not.
        """
        for field, theirs, mine in (
            ("env_id", self.manifest.env_id, env.env_id),
            ("data_hash", self.manifest.data_hash, env.data_hash),
        ):
            if theirs != mine:
                raise CorpusError(
                    f"{self.manifest.name} has {theirs!r}, the environment at hand has {mine!r}: "
                    "use a corpus of this version",
                    file=MANIFEST,
                    field=field,
                )
        if dialogue.label not in self.manifest.dialogues:
            raise CorpusError(
                f"{self.manifest.name} has {', '.join(self.manifest.dialogues)}, not "
                f"{dialogue.label}: use a corpus of this version",
                file=MANIFEST,
                field="dialogues",
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
