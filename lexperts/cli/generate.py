"""`lexperts keyphrases generate`: present and absent keyphrases of the documents of files."""

from pathlib import Path
from typing import Annotated

import typer

from .common import RESUME, Debug, Device, user_errors
from .many import (
    OUTPUT_HELP,
    SOURCE_HELP,
    Address,
    Append,
    BlockSize,
    Delimiter,
    Encoding,
    EngineName,
    GpusPerWorker,
    IdColumn,
    Keep,
    TextColumn,
    TitleColumn,
    Workers,
    check_local,
    open_engine,
    print_summary,
)


def generate(
    source: Annotated[str, typer.Argument(help=SOURCE_HELP)],
    output: Annotated[Path, typer.Argument(metavar="OUT", help=OUTPUT_HELP)],
    model: Annotated[str, typer.Option("--model", "-m", help="Folder or Hub id of a keyphrase generator.")],
    num_keyphrases: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of keyphrases per document; by default all.")
    ] = None,
    num_beams: Annotated[int, typer.Option(min=1, help="Hypotheses of each phrase.")] = 1,
    max_phrases: Annotated[
        int | None, typer.Option(min=1, help="Phrases to generate per document; by default the model's.")
    ] = None,
    exclusion_window: Annotated[
        int | None,
        typer.Option(
            min=-1, help="Preceding phrases whose first word is not repeated; -1 for all; by default the model's."
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Documents per batch.")] = 8,
    text_column: TextColumn = "text",
    title_column: TitleColumn = "title",
    id_column: IdColumn = "id",
    keep: Keep = None,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    device: Device = None,
    engine: EngineName = "local",
    address: Address = None,
    workers: Workers = None,
    gpus_per_worker: GpusPerWorker = 0.0,
    block_size: BlockSize = 512,
    append: Append = False,
    debug: Debug = False,
):
    """Generate keyphrases, also such that do not occur in the text. Repeat the command after an interruption to resume.

    \b
    Example:
      lexperts keyphrases generate documents.jsonl keyphrases.jsonl --model runs/keyphrases
    """
    with user_errors(debug, interrupted=RESUME, full=RESUME):
        from run_tools.corpus.block_runs import check_output, run_blocks
        from run_tools.corpus.documents import Corpus

        from ..recipes.exhird.generate_file import GenerationProcess

        check_output(output)
        check_local(engine, device, model=model)
        runner = open_engine(engine, address, workers, gpus_per_worker)
        corpus = Corpus(
            source, text_column, title_column, id_column, keep or (),
            delimiter=delimiter, encoding=encoding, output=output,
        )  # fmt: skip
        given = {"num_keyphrases": num_keyphrases, "max_phrases": max_phrases, "exclusion_window": exclusion_window}
        options = {"num_beams": num_beams} | {name: value for name, value in given.items() if value is not None}
        process = GenerationProcess(
            model, corpus.text_column, corpus.title_column, batch_size=batch_size, device=device, options=options
        )
        summary = run_blocks(process, corpus, output, engine=runner, block_size=block_size, append=append)
    print_summary(summary, output)
