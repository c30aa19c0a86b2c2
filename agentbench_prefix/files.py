"""Files that are never half-written, and hashes that name their contents."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from agentbench_prefix.errors import ConfigurationError


def canonical_json(value: Any) -> str:
    """One line of JSON with sorted keys: equal values give equal text."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def sha256_text(text: str) -> str:
    """Hexadecimal SHA-256 of a text's UTF-8 bytes."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def sha256_file(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def check_replaceable(path: Path) -> None:
    """Check that a path is free, or a regular file: only that may be replaced by a new file.

    Raises:
        ConfigurationError: Something else is there; it is named.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        kind = next((kind for test, kind in _KINDS if test(mode)), "no regular file")
        raise ConfigurationError(
            f"cannot write {path}: it is {kind}, which a new file would replace; name another file"
        )


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Name a file beside a path; whole and on disk, it takes the path when the block ends.

    If the block raises, the file beside is removed and the path is left as it was.

    Raises:
        ConfigurationError: What is at the path is no regular file, before the block or after it.
    """
    check_replaceable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield beside
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        check_replaceable(path)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@contextlib.contextmanager
def open_text_atomic(path: Path) -> Iterator[IO[str]]:
    """Open a text file that appears, whole and on disk, when the block ends without an error.

    Raises:
        ConfigurationError: As :func:`replacing`.
    """
    with replacing(path) as beside, beside.open("w", encoding="utf-8", newline="\n") as file:
        yield file


def write_text_atomic(path: Path, text: str) -> None:
    """Write beside, flush to disk, then rename: a reader sees the old file or the new one."""
    with open_text_atomic(path) as file:
        file.write(text)


def write_json_atomic(path: Path, value: Any) -> None:
    """:func:`write_text_atomic` of indented JSON with sorted keys."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, indent=2, allow_nan=False)
    write_text_atomic(path, text + "\n")


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append whole lines in one write and flush them to disk."""
    block = "".join(line + "\n" for line in lines).encode("utf-8", "surrogatepass")
    with path.open("ab") as file:
        file.write(block)
        file.flush()
        os.fsync(file.fileno())


def read_whole_lines(path: Path) -> list[str]:
    """Lines of a file that end in a newline; a torn last line is left out."""
    if not path.exists():
        return []
    text = path.read_bytes().decode("utf-8", "surrogatepass")
    return text.split("\n")[:-1]


def read_mapping(path: Path, what: str, **overrides: Any) -> dict[str, Any]:
    """Read a YAML file of named fields.

    Args:
        path: The file.
        what: What errors call it.
        **overrides: Fields to replace; ``None`` leaves a field as it is.

    Raises:
        ConfigurationError: The file cannot be read, or is no mapping.
    """
    import yaml

    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigurationError(f"cannot read the {what} {path}: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigurationError(f"the {what} {path} must be a mapping, got {fields!r:.40}")
    return {**fields, **{k: v for k, v in overrides.items() if v is not None}}
