"""`lexperts keyphrases generate`: present and absent keyphrases of the documents of files."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from run_tools.errors import UserError

from .common import RESUME, Debug, Device, user_errors
from .file_options import (
    Delimiter,
    Encoding,
    IdColumn,
    Keep,
    Output,
    Source,
    TextColumn,
    TitleColumn,
    Workers,
    check_local,
    open_documents,
    print_summary,
)


def generate(
    source: Source,
    output: Output,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="Folder or Hub id of a keyphrase generator; by default lexperts-exhird-smollm2."
        ),
    ] = None,
    examples: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            metavar="FILE",
            help="JSON Lines of documents with keyphrases, those of near documents compete with the generated ones.",
        ),
    ] = None,
    num_keyphrases: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of keyphrases per document; by default all, with --examples 10."),
    ] = None,
    num_beams: Annotated[int, typer.Option(min=1, help="Hypotheses of each phrase.")] = 1,
    max_phrases: Annotated[
        int | None, typer.Option(min=1, help="Phrases to generate per document; by default the model's.")
    ] = None,
    min_phrases: Annotated[
        int | None, typer.Option(min=1, help="Phrases to generate at least, for more suggestions.")
    ] = None,
    exclusion_window: Annotated[
        int | None,
        typer.Option(
            min=-1, help="Preceding phrases whose first word is not repeated; -1 for all; by default the model's."
        ),
    ] = None,
    embedder: Annotated[
        str | None,
        typer.Option(help="What finds near examples: a sentence-transformers folder or Hub id; by default minilm."),
    ] = None,
    embedding_cache: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for the examples' embeddings, for the next run.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Documents per batch.")] = 8,
    text_column: TextColumn = "text",
    title_column: TitleColumn = "title",
    id_column: IdColumn = "id",
    keep: Keep = None,
    delimiter: Delimiter = None,
    encoding: Encoding = None,
    device: Device = None,
    workers: Workers = 0,
    debug: Debug = False,
):
    """Generate keyphrases, including ones the text does not contain. Repeat the command after an interruption to resume.

    \b
    Example:
      lexperts keyphrases generate questions.jsonl tags.jsonl
      lexperts keyphrases generate questions.jsonl tags.jsonl --examples tagged.jsonl
      lexperts keyphrases generate documents.jsonl keyphrases.jsonl --model runs/keyphrases
    """
    with user_errors(debug, interrupted=RESUME, full=RESUME):
        for name, value in (("--embedder", embedder), ("--embedding-cache", embedding_cache)):
            if examples is None and value is not None:
                raise UserError(
                    f"{name} {value} has no effect without --examples. Add --examples FILE, or leave it out."
                )
        columns = {"text_column": text_column, "title_column": title_column, "id_column": id_column, "keep": keep}
        reading: dict = {**columns, "delimiter": delimiter, "encoding": encoding}
        rows = open_documents(source, output, **reading)

        from keyphrase_tools.rows import to_document
        from run_tools.fingerprints import fingerprint
        from run_tools.packaged import locate_model
        from run_tools.run_over import run_over

        from ..recipes.exhird.generate_file import SORT_WINDOW, TASK, open_generator, types

        if not workers:
            check_local(device, model=model)
        model = locate_model(model, TASK)
        near: dict = {}
        if examples is not None:
            num_keyphrases = 10 if num_keyphrases is None else num_keyphrases
            own = read_examples(examples, text_column, title_column)
            near = {"examples": own, "embedder": embedder or "minilm", "embedding_cache": embedding_cache}
        given = {"num_keyphrases": num_keyphrases, "max_phrases": max_phrases, "exclusion_window": exclusion_window}
        given["min_phrases"] = min_phrases
        options = {"num_beams": num_beams} | {name: value for name, value in given.items() if value is not None}
        settings = {**reading, **options, "model": fingerprint(model), "batch_size": batch_size}
        if examples is not None:
            settings |= {"examples": fingerprint(examples), "embedder": fingerprint(near["embedder"])}
        summary = run_over(
            partial(open_generator, model, batch_size, device, options, **near),
            rows,
            output,
            settings,
            check=partial(to_document, text_column=text_column, title_column=title_column),
            batch_size=SORT_WINDOW * batch_size,
            keep=keep or (),
            id_column=id_column,
            results=("keyphrases",),
            types=types,
            workers=workers,
        )
        print_summary(summary, output)


def read_examples(path: Path, text_column: str, title_column: str) -> list[dict]:
    """The rows of --examples, whose columns have the names of the documents'."""
    from keyphrase_tools.phrase_lists import read_labelled
    from keyphrase_tools.rows import to_document

    examples = []
    hint = "--examples needs texts and their keyphrases."
    for number, row in enumerate(read_labelled(path, text_column=text_column, hint=hint), start=1):
        try:
            examples.append({**to_document(row, text_column, title_column), "keyphrases": row["keyphrases"]})
        except ValueError as error:
            raise UserError(f"{path}, row {number}: {error}.") from error
    return examples
