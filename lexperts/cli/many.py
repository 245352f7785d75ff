"""Options of commands that process many documents, and what they print at the end."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from .common import print_error

SOURCE_HELP = "Folder, file or pattern of .txt, .jsonl, .json, .csv or .parquet files, also s3://, gs:// or hf://."
OUTPUT_HELP = "The .jsonl, .parquet or .csv file to write."
Delimiter = Annotated[
    str | None, typer.Option(help="Between the fields of CSV files, such as ';' or tab; by default a comma.")
]
Encoding = Annotated[
    str | None, typer.Option(help="Of text files, such as cp1252; by default UTF-8, or that of a byte order mark.")
]
Append = Annotated[
    bool, typer.Option("--append", help="If OUT exists and the source has grown, add the documents with new ids.")
]
TextColumn = Annotated[str, typer.Option(help="The column of texts, or of lists of words.")]
TitleColumn = Annotated[str, typer.Option(help="The column of titles, if any.")]
IdColumn = Annotated[str, typer.Option(help="The column of ids; without ids documents are numbered.")]
Keep = Annotated[list[str] | None, typer.Option(help="A column to copy to OUT; can be repeated.")]
EngineName = Annotated[Literal["local", "ray"], typer.Option(help="local: this process; ray: workers of Ray.")]
Address = Annotated[
    str | None, typer.Option(help="With --engine ray: address of a cluster, such as auto or ray://HOST:10001.")
]
Workers = Annotated[int | None, typer.Option(min=1, help="With --engine ray: by default one per GPU, or per core.")]
GpusPerWorker = Annotated[float, typer.Option(min=0, help="With --engine ray: GPUs of each worker.")]
BlockSize = Annotated[int, typer.Option(min=1, help="Documents per block; an interruption loses unfinished blocks.")]


def check_local(engine: str, device: str | None, **models: str | None) -> None:
    """Raises an error for a device or models that this machine lacks, unless workers load them; `models` by their options."""
    from keyphrase_tools.loading import check_model, parse_device

    if engine == "local":
        parse_device(device)
        for option, model in models.items():
            if model is not None:
                check_model(f"--{option.replace('_', '-')}", model)


def open_engine(name: str, address: str | None, workers: int | None, gpus_per_worker: float):
    """The engine of that name.

    Raises:
        ValueError: if it is not known, or an option needs another one.
        ImportError: without Ray.
    """
    from run_tools.corpus.engines import LocalEngine, RayEngine

    if name == "ray":
        return RayEngine(address, workers, gpus_per_worker)
    if name != "local":
        raise ValueError(f"--engine {name!r} is not known. Use local or ray.")
    for option, value in (("address", address), ("workers", workers), ("gpus-per-worker", gpus_per_worker)):
        if value:
            raise ValueError(f"--{option} {value} has no effect on --engine local. Add --engine ray.")
    return LocalEngine()


def print_summary(summary, output: Path) -> None:
    """Prints the numbers of a `RunSummary`. Exits with status 1 if a file could not be read, or no document could be processed."""
    errors = f'; {summary.errors:,} could not be processed (see their "error")' if summary.errors else ""
    if summary.documents and not summary.new:
        print(f"{output} is complete, nothing to do: {summary.documents:,} documents{errors}")
    else:
        new = f", {summary.new:,} of them new" if summary.new < summary.documents else ""
        print(f"{summary.documents:,} documents in {output}{new}{errors}")
    for message in summary.files:
        print_error(message)
    if summary.documents and summary.errors == summary.documents:
        print_error(
            f"no document could be processed: all rows of {output} have an error. Correct the source or the options."
        )
    if summary.files or (summary.documents and summary.errors == summary.documents):
        raise typer.Exit(1)
