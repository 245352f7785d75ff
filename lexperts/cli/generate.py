"""`lexperts keyphrases generate`: present and absent keyphrases of the documents of files."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from . import file_options
from .common import Count, Device, FileOption, ModelOption


def generate(
    context: typer.Context,
    source: file_options.Source,
    output: file_options.Output,
    model: Annotated[str | None, ModelOption(help="Keyphrase generator; by default lexperts-exhird-smollm2.")] = None,
    examples: Annotated[Path | None, FileOption(help="Labelled JSON Lines: keyphrases of near ones compete.")] = None,
    num_keyphrases: Annotated[int | None, Count(help="Phrases per document; default: all.")] = None,
    num_beams: Annotated[int, Count(help="Hypotheses of each phrase.")] = 1,
    min_phrases: Annotated[int | None, Count(help="Phrases to generate at least, for more suggestions.")] = None,
    embedder: Annotated[str, typer.Option(help="What finds near examples: a sentence-transformers model.")] = "minilm",
    batch_size: file_options.BatchSize = 8,
    text_column: file_options.TextColumn = "text",
    title_column: file_options.TitleColumn = "title",
    id_column: file_options.IdColumn = "id",
    keep: file_options.Keep = None,
    delimiter: file_options.Delimiter = None,
    encoding: file_options.Encoding = None,
    device: Device = None,
    workers: file_options.Workers = 0,
):
    """Generate keyphrases, including ones the text does not contain. Repeat the command after an interruption to resume.

    \b
    Examples:
      lexperts keyphrases generate questions.jsonl tags.jsonl
      lexperts keyphrases generate questions.jsonl tags.jsonl --examples tagged.jsonl
      lexperts keyphrases generate documents.jsonl keyphrases.jsonl --model runs/keyphrases
    """
    rows = file_options.open_documents(context.params)

    from keyphrase_tools.phrase_lists import read_labelled
    from keyphrase_tools.rows import to_document
    from run_tools.packaged import locate_model

    from ..processes import GENERATION, open_generator, phrase_types

    name, labelled = locate_model(model, GENERATION), None
    if examples is not None:
        num_keyphrases = num_keyphrases or 10  # otherwise all candidates are written
        read = read_labelled(examples, text_column=text_column, hint="--examples needs texts and their keyphrases.")
        names = {"text": text_column, "title": title_column, "keyphrases": "keyphrases"}
        labelled = [{key: row.get(column) for key, column in names.items()} for row in read]
    options = {"num_keyphrases": num_keyphrases, "num_beams": num_beams, "min_phrases": min_phrases}
    options["batch_size"] = batch_size
    file_options.write_results(
        partial(open_generator, name, device, options, labelled, embedder),
        rows,
        context.params,
        {"model": name, "examples": examples, "embedder": embedder},
        16 * batch_size,  # documents that are sorted by length together
        check=partial(to_document, text_column=text_column, title_column=title_column),
        keep=keep or (),
        id_column=id_column,
        results=("keyphrases",),
        types=phrase_types,
    )
