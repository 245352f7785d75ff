"""`lexperts keyphrases generate`: present and absent keyphrases of the documents of files."""

from typing import Annotated

import typer

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
    num_keyphrases: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of keyphrases per document; by default all.")
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
    batch_size: Annotated[int, typer.Option(min=1, help="Documents per batch.")] = 8,
):
    """Generate keyphrases, including ones the text does not contain. Repeat the command after an interruption to resume.

    \b
    Example:
      lexperts keyphrases generate questions.jsonl tags.jsonl
      lexperts keyphrases generate documents.jsonl keyphrases.jsonl --model runs/keyphrases
    """
    from ..recipes.exhird.generate_file import GenerationProcess

    run.check_models(model=model)
    corpus = run.open_corpus()
    given = {"num_keyphrases": num_keyphrases, "max_phrases": max_phrases, "exclusion_window": exclusion_window}
    given["min_phrases"] = min_phrases
    options = {"num_beams": num_beams} | {name: value for name, value in given.items() if value is not None}
    columns = (corpus.text_column, corpus.title_column)
    return corpus, GenerationProcess(model, *columns, batch_size=batch_size, device=run.device, options=options)
