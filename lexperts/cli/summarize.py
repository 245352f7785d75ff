"""`lexperts summarize`: summaries of the documents of files."""

from functools import partial
from typing import Annotated

import typer

from run_tools.errors import UserError

from . import file_options
from .common import Count, Device, ModelOption


def summarize(
    context: typer.Context,
    source: file_options.Source,
    output: file_options.Output,
    model: Annotated[str | None, ModelOption(help="Summariser; by default lexperts-moesumm-smollm2.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Name of the dataset that the documents resemble.")] = None,
    text_column: Annotated[str, typer.Option(help="Column of the documents.")] = "document",
    dataset_column: Annotated[str | None, typer.Option(help="Column of the documents' datasets.")] = None,
    max_length: Annotated[int | None, typer.Option(min=2, help="Maximum number of tokens of a summary.")] = None,
    num_beams: Annotated[int | None, Count(help="Beams of the search; by default the model's, or 4.")] = None,
    batch_size: file_options.BatchSize = 8,
    delimiter: file_options.Delimiter = None,
    encoding: file_options.Encoding = None,
    device: Device = None,
    workers: file_options.Workers = 0,
):
    """Summarise documents. Repeat the command after an interruption to resume.

    Each row of OUT is that of SOURCE with "summary_text", or with "error" if it has no text.

    \b
    Examples:
      lexperts summarize abstracts.jsonl summaries.jsonl --dataset papers
      lexperts summarize articles.jsonl summaries.jsonl --model runs/moesumm --dataset news --max-length 60
    """
    if dataset is not None and dataset_column is not None:
        raise UserError("Both --dataset and --dataset-column were given. Pass one of them.")
    rows = file_options.open_source(context.params, filter(None, [text_column, dataset_column]))

    from run_tools.packaged import locate_model

    from ..processes import SUMMARIES, open_summarizer, read_document

    name = locate_model(model, SUMMARIES)
    options = {"max_length": max_length, "num_beams": num_beams, "batch_size": batch_size}
    process = partial(open_summarizer, name, dataset, device, options)
    more: dict = {"check": partial(read_document, text_column, dataset, dataset_column), "results": ("summary_text",)}
    file_options.write_results(process, rows, context.params, {"model": name}, 8 * batch_size, **more)
