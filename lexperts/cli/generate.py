"""`lexperts keyphrases generate`: present and absent keyphrases of the documents of files."""

from pathlib import Path
from typing import Annotated

import typer

from run_tools.errors import UserError

from .corpus_options import CorpusRun, corpus_command


@corpus_command(columns=True)
def generate(
    run: CorpusRun,
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
):
    """Generate keyphrases, including ones the text does not contain. Repeat the command after an interruption to resume.

    \b
    Example:
      lexperts keyphrases generate questions.jsonl tags.jsonl
      lexperts keyphrases generate questions.jsonl tags.jsonl --examples tagged.jsonl
      lexperts keyphrases generate documents.jsonl keyphrases.jsonl --model runs/keyphrases
    """
    from ..recipes.exhird.generate_file import GenerationProcess

    run.check_models(model=model)
    corpus = run.open_corpus()
    near: dict = {}
    if examples is not None:
        num_keyphrases = 10 if num_keyphrases is None else num_keyphrases
        rows = read_examples(examples, corpus.text_column, corpus.title_column)
        near = {"examples": rows, "embedder": embedder or "minilm", "embedding_cache": embedding_cache}
    for name, value in (("--embedder", embedder), ("--embedding-cache", embedding_cache)):
        if examples is None and value is not None:
            raise UserError(f"{name} {value} has no effect without --examples. Add --examples FILE, or leave it out.")
    given = {"num_keyphrases": num_keyphrases, "max_phrases": max_phrases, "exclusion_window": exclusion_window}
    given["min_phrases"] = min_phrases
    options = {"num_beams": num_beams} | {name: value for name, value in given.items() if value is not None}
    columns = (corpus.text_column, corpus.title_column)
    return corpus, GenerationProcess(model, *columns, batch_size=batch_size, device=run.device, options=options, **near)


def read_examples(path: Path, text_column: str, title_column: str | None) -> list[dict]:
    """The rows of --examples, whose columns have the names of the documents'."""
    from keyphrase_tools.phrase_lists import read_labelled
    from run_tools.corpus.documents import check_document

    examples = []
    hint = "--examples needs texts and their keyphrases."
    for number, row in enumerate(read_labelled(path, text_column=text_column, hint=hint), start=1):
        given = {"text": row[text_column], "title": row.get(title_column) if title_column else None}
        document, error = check_document(given, text_column, title_column)
        if document is None:
            raise UserError(f"{path}, row {number}: {error}.")
        examples.append({**document, "keyphrases": row["keyphrases"]})
    return examples
