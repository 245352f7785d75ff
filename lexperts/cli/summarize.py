"""`lexperts summarize`: summaries of the documents of files."""

from functools import partial
from typing import Annotated, Literal

import typer

from run_tools.errors import UserError, short_repr
from run_tools.option_values import LARGEST

from .common import RESUME, Debug, Device, user_errors
from .file_options import (
    Delimiter,
    Encoding,
    Output,
    Source,
    Workers,
    check_local,
    open_source,
    print_summary,
)


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
    source: Source,
    output: Output,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Folder or Hub id of a summariser; by default lexperts-moesumm-smollm2."),
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Name of the dataset that the documents resemble.")] = None,
    text_column: Annotated[str, typer.Option(help="Column of the documents.")] = "document",
    dataset_column: Annotated[str | None, typer.Option(help="Column of the documents' datasets.")] = None,
    max_length: Annotated[
        str | None, typer.Option(help="Maximum length of a summary in tokens (60) or as a fraction (0.2).")
    ] = None,
    num_beams: Annotated[
        int | None, typer.Option(min=1, help="Beams of the beam search; default: the model's, or 4.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Documents per batch.")] = 8,
    on_long: Annotated[
        Literal["window", "truncate", "error"], typer.Option(help="For long documents: window, truncate or error.")
    ] = "window",
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    device: Device = None,
    workers: Workers = 0,
    debug: Debug = False,
):
    """Summarise documents. Repeat the command after an interruption to resume.

    Each row of OUT is that of SOURCE with "summary_text", or with "error" if it has no text.

    \b
    lexperts summarize abstracts.jsonl summaries.jsonl --dataset papers
    lexperts summarize articles.jsonl summaries.jsonl --model runs/moesumm --dataset news --max-length 60
    """
    with user_errors(debug, interrupted=RESUME, full=RESUME):
        options = {"max_length": parse_length(max_length), "on_long": on_long}
        options |= {} if num_beams is None else {"num_beams": num_beams}
        if dataset is not None and dataset_column is not None:
            raise UserError("Both --dataset and --dataset-column were given. Pass one of them.")
        columns = [text_column] if dataset_column is None else [text_column, dataset_column]
        reading = {"text_column": text_column, "delimiter": delimiter, "encoding": encoding}
        rows = open_source(source, output, columns, **reading)

        from run_tools.fingerprints import fingerprint
        from run_tools.packaged import locate_model
        from run_tools.run_over import run_over

        from ..recipes.moesumm.batch_summaries import TASK, check_row, open_summarizer

        if not workers:
            check_local(device, model=model)
        name = locate_model(model, TASK)
        settings = {**options, **reading, "model": fingerprint(name), "batch_size": batch_size}
        summary = run_over(
            partial(open_summarizer, name, dataset, batch_size, device, options),
            rows,
            output,
            settings | {"dataset": dataset, "dataset_column": dataset_column},
            check=partial(check_row, text_column, dataset, dataset_column),
            batch_size=8 * batch_size,  # documents that are sorted by length together
            results=("summary_text",),
            workers=workers,
        )
        print_summary(summary, output)
