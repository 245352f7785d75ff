"""Keyphrases of the documents of an uploaded file, written as CSV, JSON Lines or Parquet."""

import csv
import json
import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from keyphrase_tools.extractor import KeyphraseExtractor
from keyphrase_tools.windows import replace_surrogates
from run_tools.corpus.csv_output import flatten, write_csv
from run_tools.corpus.documents import Corpus, import_parquet
from run_tools.corpus.text_rows import csv_header, json_rows
from run_tools.errors import is_encodable, one_line

from .settings import AppSettings

TEXT_NAMES = ("text", "abstract", "document", "body", "content", "description")  # columns that are most likely the text
FORMATS = {"CSV": ".csv", "JSON Lines": ".jsonl", "Parquet": ".parquet"}
SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")
CHUNK = 16  # documents between two steps of the progress bar
PREVIEW = 10
EXPANSION = 10  # how much larger a Parquet file's content may be than the limit of files


class BatchResult(NamedTuple):
    """The file that was written, the numbers of documents and of errors, and the first rows."""

    path: Path
    documents: int
    errors: int
    preview: list[dict]


def read_columns(path: str | Path, settings: AppSettings) -> list[str]:
    """The columns of an uploaded file, the one that is most likely the text first. Raises a `ValueError` if the file is too
    large, has another format, or cannot be read.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(
            f"{path.name} has the suffix {path.suffix!r}. Upload a file that ends in {', '.join(SUFFIXES)}."
        )
    size = path.stat().st_size
    if size > settings.max_file_mb * 1e6:
        raise ValueError(
            f"{path.name} has {size / 1e6:.1f} MB; the limit is {settings.max_file_mb} MB. Upload a part of it."
        )
    try:
        columns = _first_row(path, settings)
    except (ValueError, OSError, csv.Error) as error:
        raise ValueError(f"{path.name} cannot be read: {without_folder(error, path)}") from error
    if not is_encodable("".join(map(str, columns))):
        raise ValueError(f"{path.name} is not text in UTF-8. Save it in UTF-8.")
    if not columns:
        raise ValueError(
            f"{path.name} has no columns. A CSV file needs a header, a JSON Lines file one object per line."
        )
    likely = [name for name in TEXT_NAMES if name in columns][:1]
    return likely + [name for name in columns if name not in likely]


def without_folder(error: Exception, path: Path) -> str:
    """The message of an exception, with the name of the upload in place of its path."""
    return one_line(error).replace(str(path), path.name).replace(f"{path.parent}{os.sep}", "")


def _first_row(path: Path, settings: AppSettings) -> list[str]:
    """The names of the columns."""
    if path.suffix.lower() == ".parquet":
        check_parquet(path, settings)
        return import_parquet()(path).schema_arrow.names
    with path.open("rb") as file:
        if path.suffix.lower() == ".jsonl":
            row = next(json_rows(file), dict)()
            if not isinstance(row, dict):
                raise ValueError(f"its first line is a {type(row).__name__}, not a JSON object")
            return list(row)
        return csv_header(file, "\t" if path.suffix.lower() == ".tsv" else ",")


def check_parquet(path: Path, settings: AppSettings) -> None:
    """Reads a Parquet file row by row, without keeping anything: few bytes may expand to many. Raises a `ValueError` for too
    many rows, and for a content that is larger than `EXPANSION` times the limit of files.
    """
    file, limit = import_parquet()(path), EXPANSION * settings.max_file_mb * 1e6
    content = file.metadata
    if content.num_rows > settings.max_documents:
        raise ValueError(too_many(settings))
    too_large = ValueError(f"its content is larger than {limit / 1e6:,.0f} MB. Upload a part of it")
    if sum(content.row_group(group).total_byte_size for group in range(content.num_row_groups)) > limit:
        raise too_large
    size = 0
    for batch in file.iter_batches(1):
        size += batch.nbytes
        if size > limit:
            raise too_large


def too_many(settings: AppSettings) -> str:
    """What is wrong with a file of too many rows."""
    return (
        f"it has more than {settings.max_documents:,} documents. For larger files use the command: "
        "lexperts keyphrases extract documents.jsonl keyphrases.jsonl"
    )


def writable(values: dict | None) -> dict | None:
    """A row whose lone surrogates, which no file can hold, are replaced by U+FFFD."""
    text = json.dumps(values, ensure_ascii=False, default=str)
    return values if is_encodable(text) else json.loads(replace_surrogates(text))


def extract_file(
    extract,
    path: str | Path,
    folder: Path,
    settings: AppSettings,
    *,
    text_column: str,
    title_column: str | None = None,
    format: str = "CSV",
    progress: Callable[[float, str], None] = lambda share, text: None,
    **options,
) -> BatchResult:
    """Extracts the keyphrases of a file's documents.

    Args:
        extract: the pipeline.
        path: of the upload.
        folder: where the result is written.
        text_column, title_column: columns of the file.
        format: one of FORMATS.
        progress: is called with the share that is done, and a text.
        options: of the pipeline, such as `top_k` and `style`.

    Raises:
        ValueError: if the file has too many documents, or a column that is named like a result.
        ImportError: for Parquet without pyarrow.
    """
    path = Path(path)
    try:
        if path.suffix.lower() == ".parquet":
            check_parquet(path, settings)
        corpus = Corpus(path, text_column, title_column, keep=None)
        rows = list(islice(corpus.read(), settings.max_documents + 1))
        if len(rows) > settings.max_documents:
            raise ValueError(too_many(settings))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path.name} cannot be read: {without_folder(error, path)}") from error
    rows = [row._replace(values=writable(row.values)) for row in rows]
    results_of_format = {"keyphrases", "error"} | ({"scores"} if format == "CSV" else set())
    taken = results_of_format & {name for row in rows if row.values for name in row.values}
    if taken:
        raise ValueError(f"{path.name} has a column {min(taken)!r}, which is the name of a result. Rename it.")
    errors = {row.number: row.error for row in rows if row.values is None}
    for row in rows:
        text = (row.values or {}).get(text_column)
        if isinstance(text, str) and len(text) > settings.max_characters:
            errors[row.number] = f"it has {len(text):,} characters; the limit is {settings.max_characters:,}"
    process, results = KeyphraseExtractor(extract, text_column, title_column, **options), []
    for start in range(0, len(rows), CHUNK):
        chunk = [row for row in rows[start : start + CHUNK] if row.number not in errors]
        found = iter(process.process_rows([row.values for row in chunk]))
        for row in rows[start : start + CHUNK]:
            results.append(
                (row.values or {}) | ({"error": errors[row.number]} if row.number in errors else next(found))
            )
        progress(len(results) / len(rows), f"{len(results):,} of {len(rows):,} documents")
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / f"keyphrases{FORMATS[format]}"
    _write(results, output, process)
    return BatchResult(output, len(results), sum("error" in row for row in results), results[:PREVIEW])


def _write(rows: list[dict], output: Path, process: KeyphraseExtractor) -> None:
    """Writes the rows in the format of the output's suffix."""
    lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows]
    if output.suffix == ".csv":
        write_csv(lambda: map(flatten, map(json.loads, lines)), output)
    elif output.suffix == ".parquet":
        from run_tools.corpus.parquet_output import write_parquet

        write_parquet(lambda: map(json.loads, lines), output, process.types())
    else:
        output.write_text("".join(lines), encoding="utf-8")
