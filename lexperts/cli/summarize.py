"""`lexperts summarize`: summaries of the documents of files."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from run_tools.errors import UserError, short_repr
from run_tools.option_values import LARGEST

from .common import RESUME, Debug, Device, user_errors
from .many import (
    OUTPUT_HELP,
    SOURCE_HELP,
    Address,
    Append,
    Delimiter,
    Encoding,
    EngineName,
    GpusPerWorker,
    Workers,
    check_local,
    open_engine,
    print_summary,
)


def option(name: str, help: str, **settings):
    """An option of this name."""
    return typer.Option(f"--{name.replace('_', '-')}", help=help, **settings)


def parse_length(value: str | None) -> int | float | None:
    """A length: a number of tokens (60) or a fraction (0.2)."""
    if value is None:
        return None
    try:
        length = float(value) if "." in value else int(value)
    except ValueError:
        length = 0
    if not (0 < length < 1 if isinstance(length, float) else 1 <= length <= LARGEST):
        raise UserError(
            f"--max-length {short_repr(value)} is neither a number of tokens nor a fraction below 1. Use one such as 60, or 0.2."
        )
    return length


def summarize(
    source: Annotated[str, typer.Argument(help=SOURCE_HELP)],
    output: Annotated[Path, typer.Argument(metavar="OUT", help=OUTPUT_HELP)],
    model: Annotated[str, typer.Option("--model", "-m", help="Folder or Hub id of a summariser.")],
    dataset: Annotated[str | None, typer.Option(help="Name of the dataset that the documents resemble.")] = None,
    text_column: Annotated[str, option("text_column", "Column of the documents.")] = "document",
    dataset_column: Annotated[str | None, option("dataset_column", "Column of the documents' datasets.")] = None,
    max_length: Annotated[
        str | None, option("max_length", "Maximum length of a summary in tokens (60) or as a fraction (0.2).")
    ] = None,
    num_beams: Annotated[
        int | None, option("num_beams", "Beams of the beam search; default: the model's, or 4.", min=1)
    ] = None,
    batch_size: Annotated[int, option("batch_size", "Documents per batch.", min=1)] = 8,
    on_long: Annotated[
        Literal["window", "truncate", "error"], option("on_long", "For long documents: window, truncate or error.")
    ] = "window",
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    device: Device = None,
    engine: EngineName = "local",
    address: Address = None,
    workers: Workers = None,
    gpus_per_worker: GpusPerWorker = 0.0,
    block_size: Annotated[int, option("block_size", "Documents per block.", min=1)] = 64,
    append: Append = False,
    debug: Debug = False,
):
    """Summarise documents. Repeat the command after an interruption to resume.

    Each row of OUT is that of SOURCE with "summary_text", or with "error" if it has no text.

    \b
    lexperts summarize articles.jsonl summaries.jsonl --model runs/moesumm --dataset news --max-length 60
    """
    with user_errors(debug, interrupted=RESUME, full=RESUME):
        length = parse_length(max_length)
        check_local(engine, device, model=model)
        from ..recipes.moesumm.batch_summaries import summarize_file

        options = {"max_length": length, "on_long": on_long} | ({} if num_beams is None else {"num_beams": num_beams})
        summary = summarize_file(
            source, output, model, dataset=dataset, text_column=text_column, dataset_column=dataset_column,
            batch_size=batch_size, device=device, block_size=block_size, append=append, delimiter=delimiter, encoding=encoding,
            engine=open_engine(engine, address, workers, gpus_per_worker), **options,
        )  # fmt: skip
    print_summary(summary, output)
