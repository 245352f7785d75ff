"""The options of commands that write a row for each row of a file, and how these run."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from run_tools.errors import print_error

FORMATS = ".jsonl, .json, .csv, .tsv, .parquet or .txt files"
Source = Annotated[str, typer.Argument(metavar="SOURCE", help=f"File, folder or pattern of {FORMATS}; or s3://...")]
Output = Annotated[Path, typer.Argument(metavar="OUT", help="The .jsonl, .parquet, .csv or .tsv file to write.")]
TextColumn = Annotated[str, typer.Option(help="The column of texts, or of lists of words.")]
TitleColumn = Annotated[str, typer.Option(help="The column of titles, if any.")]
IdColumn = Annotated[str, typer.Option(help="The column of ids; without ids documents are numbered.")]
Keep = Annotated[list[str] | None, typer.Option(help="A column to copy to OUT; can be repeated.")]
Delimiter = Annotated[str | None, typer.Option(help="Between the fields of CSV files, such as ';' or tab; default: ,")]
Encoding = Annotated[str | None, typer.Option(help="Of text files, such as cp1252; by default UTF-8.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Texts per batch of the model.")]
Workers = Annotated[int, typer.Option(min=0, help="Of Ray, here or on RAY_ADDRESS; by default this process works.")]
NO_SETTINGS = ("source", "output", "device", "workers")  # on which no result depends


def open_source(options: Mapping[str, Any], columns: Iterable[str]):
    """The rows of SOURCE. Raises a `UserError` for a column that they do not have, before anything large is imported."""
    from run_tools.rows import Source

    reading = {name: options[name] for name in ("text_column", "delimiter", "encoding") if name in options}
    rows = Source(options["source"], output=options["output"], **reading)
    rows.check_columns(columns)
    return rows


def open_documents(options: Mapping[str, Any]):
    """The rows of documents. `title` and `id` are columns that need not exist, if they have these names."""
    named = [options[f"{name}_column"] for name in ("id", "title") if options[f"{name}_column"] != name]
    rows = open_source(options, [options["text_column"], *named, *(options["keep"] or ())])
    if options["id_column"] not in rows.columns:
        missing = f"{rows.name} has no column {options['id_column']!r}, so documents are numbered."
        print_error(f"{missing} --id-column names the column of ids.", "note")
    return rows


def write_results(
    open_process: Callable, rows, options: Mapping[str, Any], files: Mapping[str, Any], batch_size: int, **more
) -> None:
    """Runs a model over the rows, and prints how many there are. Exits with status 1 if no row could be processed.

    Args:
        open_process, more: as for `run_over`.
        options: of the command.
        files: the models and files among them, which are the same if their content is.
        batch_size: rows that are processed together: enough batches of the model to sort them by length.
    """
    from run_tools.files import fingerprint
    from run_tools.run_over import run_over

    settings = {name: value for name, value in options.items() if name not in NO_SETTINGS}
    settings |= {name: fingerprint(place) for name, place in files.items() if place is not None}
    output, more = options["output"], {**more, "batch_size": batch_size, "workers": options["workers"]}
    try:
        summary = run_over(open_process, rows, output, settings, **more)
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt("Repeat the command to resume.") from error
    new = "" if summary.new == summary.rows else f", {summary.new:,} of them new"
    count = f"{summary.rows:,} document{'s' * (summary.rows != 1)}"
    errors = f'; {summary.errors:,} could not be processed (see their "error")' if summary.errors else ""
    print(f"{count} in {output}{new}{errors}" if summary.new else f"{output} is complete: {count}{errors}")
    if summary.errors == summary.rows:
        print_error(f"no document could be processed: all rows of {output} have an error.")
        raise typer.Exit(1)
