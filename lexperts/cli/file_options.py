"""The options of commands that write a row for each row of a file, and what they print at the end."""

import codecs
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from run_tools.errors import UserError
from run_tools.loading import check_model, parse_device
from run_tools.packaged import is_packaged

from .common import print_error

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="File, folder or pattern of .jsonl, .json, .csv, .tsv, .parquet or .txt files, also s3://, gs:// or hf://.",
    ),
]
Output = Annotated[
    Path, typer.Argument(metavar="OUT", help="The .jsonl, .parquet, .csv or .tsv file to write. Repeat to resume.")
]
TextColumn = Annotated[str, typer.Option(help="The column of texts, or of lists of words.")]
TitleColumn = Annotated[str, typer.Option(help="The column of titles, if any.")]
IdColumn = Annotated[str, typer.Option(help="The column of ids; without ids documents are numbered.")]
Keep = Annotated[list[str] | None, typer.Option(help="A column to copy to OUT; can be repeated.")]
Delimiter = Annotated[
    str | None, typer.Option(help="Between the fields of CSV files, such as ';' or tab; by default a comma.")
]
Encoding = Annotated[str | None, typer.Option(help="Of text files, such as cp1252; by default UTF-8.")]
Workers = Annotated[
    int,
    typer.Option(min=0, help="Workers of Ray, on this machine or the cluster of RAY_ADDRESS; default: this process."),
]


def open_source(source: str, output: Path, columns: Iterable[str], **options):
    """The rows of files. Raises a `UserError` for a column that they do not have, before anything large is imported.

    Args:
        columns: those that are needed.
        options: of `run_tools.rows.Source`.
    """
    from run_tools.rows import Source

    delimiter, encoding, place = options.get("delimiter"), options.get("encoding"), output.absolute()
    if delimiter is not None and len(delimiter) != 1 and delimiter != "tab":
        raise UserError(f"--delimiter {delimiter!r:.60} must be one character, or tab.")
    try:
        codecs.lookup(encoding or "utf-8")
    except LookupError as error:
        raise UserError(f"--encoding {encoding!r:.60} is not known. Use a name such as cp1252.") from error
    if place.is_dir() or any(parent.is_file() for parent in place.parents):
        raise UserError(f"OUT {str(output)!r} is a folder, or in a file. Give a .jsonl, .csv, .tsv or .parquet file.")
    rows = Source(source, output=output, **options)
    rows.check_columns(columns)
    return rows


def open_documents(source: str, output: Path, text_column: str, title_column: str, id_column: str, keep, **options):
    """The rows of documents. `title` and `id` are columns that need not exist, if they have these names."""
    optional = {("title", title_column), ("id", id_column)}
    needed = [column for name, column in sorted(optional) if column != name]
    rows = open_source(source, output, [text_column, *needed, *(keep or ())], text_column=text_column, **options)
    if id_column not in rows.columns:
        missing = f"{source} has no column {id_column!r}, so documents are numbered."
        print_error(f"{missing} --id-column names the column of ids.", "note")
    return rows


def check_local(device: str | None, **models: str | None) -> None:
    """Raises an error for a device or models that this machine lacks; `models` by their options."""
    parse_device(device)
    for option, model in models.items():
        if model is not None and not is_packaged(model):
            check_model(f"--{option.replace('_', '-')}", model)


def print_summary(summary, output: Path) -> None:
    """Prints the numbers of a `run_over.Summary`. Exits with status 1 if no document could be processed."""
    count = f"{summary.rows:,} document{'s' * (summary.rows != 1)}"
    errors = f'; {summary.errors:,} could not be processed (see their "error")' if summary.errors else ""
    if summary.new:
        new = f", {summary.new:,} of them new" if summary.new < summary.rows else ""
        print(f"{count} in {output}{new}{errors}")
    else:
        print(f"{output} is complete, nothing to do: {count}{errors}")
    if summary.errors == summary.rows:
        print_error(f"no document could be processed: all rows of {output} have an error.")
        raise typer.Exit(1)
