"""Numbers that papers report, with where each is from; never mixed with measured ones."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from agentbench_prefix.errors import ConfigurationError
from agentbench_prefix.files import read_mapping
from agentbench_prefix.training.summary import describe

REPORTED = "reported.yaml"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Source(_Part):
    """Where numbers are from.

    Attributes:
        title: Title of the publication, or what it is.
        url: Where it can be read; empty where none is known.
        note: What must be known of it.
    """

    title: str
    url: str = ""
    note: str = ""


class Entry(_Part):
    """One reported number.

    Attributes:
        env: Environment or data set, as the source calls it.
        method: Method, as the source calls it.
        model: Model trained.
        tasks: Which ones: a family, a split, or all.
        metric: e.g. ``"Avg@8 %"``.
        value: The number as it is printed.
        seeds: How many runs it rests on, as far as the source says.
        source: Name of the source.
        note: What must be known of the number.
    """

    env: str
    method: str
    model: str
    tasks: str
    metric: str
    value: str
    seeds: str
    source: str
    note: str = ""


class Reported(_Part):
    """``reported.yaml``.

    Attributes:
        sources: By name.
        entries: The numbers, in the order of the page.
    """

    sources: dict[str, Source]
    entries: tuple[Entry, ...]

    @model_validator(mode="after")
    def _sourced(self) -> Self:
        for index, entry in enumerate(self.entries):
            if entry.source not in self.sources:
                raise ValueError(
                    f"entries.{index}.source {entry.source!r} is not among the sources "
                    f"({', '.join(self.sources)})"
                )
        return self


def read_reported(path: Path) -> Reported | None:
    """Read the reported numbers; ``None`` without the file.

    Raises:
        ConfigurationError: It is malformed; the message names the field.
    """
    if not path.is_file():
        return None
    try:
        return Reported.model_validate(read_mapping(path, "file of reported numbers"))
    except ValidationError as error:
        raise ConfigurationError(f"{path} is not valid: {describe(error)}") from error
