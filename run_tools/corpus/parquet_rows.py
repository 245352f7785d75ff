"""Rows of Parquet files, read lazily."""

from collections.abc import Iterator
from functools import partial
from typing import Any

ROWS = 64  # that are in memory together: texts may be long


class RowGroup:
    """The rows of a row group of a Parquet file, which is read when the first row is needed."""

    def __init__(self, parquet, group: int, columns: list[str] | None):
        self._open = partial(parquet.iter_batches, ROWS, row_groups=[group], columns=columns)
        self._batches: Iterator | None = None
        self._batch: Any = None
        self._start = self._count = 0  # of the batch
        self._rows: list[dict] | None = None  # of the batch; None if a value of it cannot be decoded

    def read(self, i: int) -> dict:
        """Row i; rows are read in ascending order."""
        if self._batches is None:
            self._batches = self._open()
        while i >= self._start + self._count:
            self._start, self._count = self._start + self._count, 0
            try:
                self._batch = next(self._batches, None)
            except Exception:
                self._batches = iter(())
                raise
            if self._batch is None:  # after an error
                raise ValueError("the rest of its row group cannot be read")
            self._count = self._batch.num_rows
            try:
                self._rows = self._batch.to_pylist()
            except ValueError:
                self._rows = None
        if self._rows is None:
            return self._batch.slice(i - self._start, 1).to_pylist()[0]
        return self._rows[i - self._start]


def import_parquet():
    """`pyarrow.parquet.ParquetFile`. Raises an `ImportError` without pyarrow."""
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ImportError("Parquet needs pyarrow. Install it with: pip install 'lexperts[parquet]'") from error
    return ParquetFile
