"""Parquet files of typed rows: written beside and renamed, read a row group at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import ValidationError

from agentbench_prefix.corpora.schema import ROWS, Row, features
from agentbench_prefix.errors import CorpusError, MissingExtraError
from agentbench_prefix.files import replacing

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise MissingExtraError("corpora", "corpora") from error

GROUP = 512
"""Rows of a row group: what is held in memory at once, in Arrow's form."""
_SLICE = 32
"""Rows that are Python objects at once, which take many times as much."""

R = TypeVar("R", bound=Row)


class TableWriter:
    """Writes a Parquet file that exists only once it is whole, a row group in memory at a time.

    Use it as a context manager: the file appears when the block ends, and nothing is left if it
    raises.

    Args:
        path: The file.
        schema: Its ``pyarrow`` schema.

    Raises:
        ConfigurationError: On entering it, or at the end: what is at the path is no regular file.
    """

    def __init__(self, path: Path, schema: Any) -> None:
        self.path = path
        self.schema = schema
        self.rows = 0
        self._rows: list[dict[str, Any]] = []
        self._tables: list[Any] = []
        self._exit = contextlib.ExitStack()
        self._writer: Any = None

    def __enter__(self) -> Self:
        beside = self._exit.enter_context(replacing(self.path))
        self._writer = pq.ParquetWriter(
            beside, self.schema, compression="zstd", compression_level=9
        )
        self._exit.push(self._close)
        return self

    def write(self, row: dict[str, Any]) -> None:
        """Append a row."""
        self._rows.append(row)
        self.rows += 1
        if len(self._rows) >= _SLICE:
            self._pack()
        if self.rows % GROUP == 0:
            self._flush()

    def _pack(self) -> None:
        if self._rows:
            self._tables.append(pa.Table.from_pylist(self._rows, schema=self.schema))
            self._rows.clear()

    def _flush(self) -> None:
        self._pack()
        if self._tables:
            self._writer.write_table(pa.concat_tables(self._tables).combine_chunks())
            self._tables.clear()
            pa.default_memory_pool().release_unused()

    def _close(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._flush()
        finally:
            self._writer.close()

    def __exit__(self, *raised: Any) -> None:
        self._exit.__exit__(*raised)


class RowWriter:
    """A :class:`TableWriter` of rows of one kind.

    Args:
        path: The file.
        kind: Key of :data:`ROWS`.
    """

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        self._table = TableWriter(path, features(kind).arrow_schema)

    @property
    def rows(self) -> int:
        """Rows written so far."""
        return self._table.rows

    def __enter__(self) -> Self:
        self._table.__enter__()
        return self

    def write(self, row: Row) -> None:
        """Append a row."""
        self._table.write(row.model_dump())

    def __exit__(self, *raised: Any) -> None:
        self._table.__exit__(*raised)


def open_parquet(path: Path, kind: str, name: str = "") -> Any:
    """Open a file and check its columns.

    Args:
        path: The file.
        kind: Key of :data:`ROWS`.
        name: What errors call the file; its name by default.

    Returns:
        A ``pyarrow.parquet.ParquetFile``.

    Raises:
        CorpusError: It is missing, no Parquet file, truncated, or has other columns.
    """
    name = name or path.name
    try:
        file = pq.ParquetFile(path)
    except FileNotFoundError as error:
        raise CorpusError(
            "the file is missing; build or pull the corpus again", file=name
        ) from error
    except (pa.ArrowException, OSError) as error:
        raise CorpusError(
            f"no readable Parquet file, it may be truncated ({error}); build or pull it again",
            file=name,
        ) from error
    expected = features(kind).arrow_schema
    for field in expected:
        index = file.schema_arrow.get_field_index(field.name)
        if index < 0:
            raise CorpusError("the column is missing", file=name, field=field.name)
        if not file.schema_arrow.field(index).type.equals(field.type):
            raise CorpusError(
                f"the column has type {file.schema_arrow.field(index).type}, expected {field.type}",
                file=name,
                field=field.name,
            )
    for column in file.schema_arrow.names:
        if expected.get_field_index(column) < 0:
            raise CorpusError("the column is unknown to this version", file=name, field=column)
    return file


def read_rows(path: Path, kind: str, name: str = "") -> Iterator[Any]:
    """Rows of a file, checked, one row group in memory at a time.

    Args:
        path: The file.
        kind: Key of :data:`ROWS`, which says what is yielded.
        name: What errors call the file; its name by default.

    Raises:
        CorpusError: As :func:`open_parquet`, or a row is not valid; file, row and field are named.
    """
    name = name or path.name
    model = ROWS[kind]
    file = open_parquet(path, kind, name)
    begin = 0
    for group in range(file.num_row_groups):
        try:
            # Each thread would keep memory of its own.
            table = file.read_row_group(group, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise CorpusError(
                f"cannot be read ({error}); build or pull it again", file=name, row=begin
            ) from error
        slices = table.to_batches(max_chunksize=_SLICE)
        for index, values in enumerate(row for part in slices for row in part.to_pylist()):
            try:
                yield model.model_validate(values)
            except ValidationError as error:
                first = error.errors()[0]
                raise CorpusError(
                    f"{first['msg']}, got {first['input']!r:.80}",
                    file=name,
                    row=begin + index,
                    field=".".join(map(str, first["loc"])),
                ) from error
        begin += table.num_rows
        del table, slices
        pa.default_memory_pool().release_unused()  # else it keeps what each group needed
