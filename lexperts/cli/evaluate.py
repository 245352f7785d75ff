"""`lexperts evaluate`: scores of files of predictions."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from run_tools.errors import UserError, short_repr

from .common import AsJson, print_result

Task = Literal["keyphrases", "summaries", "definitions", "answers"]
Text = str | None
Convention = Literal["seke", "exhird"] | None


def evaluate(
    task: Annotated[Task, typer.Argument(metavar="TASK", help="What to score.")],
    predictions: Annotated[list[str], typer.Argument(metavar="[NAME=]FILE...", help="Files of one name are its runs.")],
    references: Annotated[Text, typer.Option(metavar="FILE", help="Rows with references, by id or in order.")] = None,
    baseline: Annotated[Text, typer.Option(help="The system that others are compared with.")] = None,
    reference_column: Annotated[Text, typer.Option(help="Column of references.")] = None,
    convention: Annotated[Convention, typer.Option(help="How keyphrases are counted; by default seke.")] = None,
    language: Annotated[Text, typer.Option(help="Stemmer of keyphrases: english, german, ..., none.")] = None,
    bertscore_model: Annotated[Text, typer.Option(help="A model for BERTScore, such as roberta-large.")] = None,
    mauve_model: Annotated[Text, typer.Option(help="A GPT-2 or BERT for MAUVE, such as gpt2-large.")] = None,
    as_json: AsJson = False,
):
    """Score keyphrases, summaries, definitions or answers. With 95% intervals, and paired tests against a baseline.

    \b
    Examples:
      lexperts evaluate keyphrases keyphrases.jsonl --references test.jsonl --convention exhird
      lexperts evaluate summaries ours=summaries.jsonl lead3=lead3.jsonl --baseline lead3
    """
    files: dict[str, list[str]] = {}
    for text in predictions:
        name, _, place = text.partition("=") if "=" in text else (Path(text).stem, "", text)
        if not name or not place:
            raise UserError(f"{short_repr(text)} must be NAME=FILE, such as ours=predictions.jsonl.")
        files.setdefault(name, []).append(place)
    if baseline is not None and baseline not in files:
        raise UserError(f"--baseline {baseline!r} is not one of {', '.join(files)}.")
    given: dict = {"convention": convention, "language": language}
    given |= {"bertscore_model": bertscore_model, "mauve_model": mauve_model}
    given = {name: None if value == "none" else value for name, value in given.items() if value is not None}
    from ..evaluate.compare import format_results
    from ..evaluate.tasks import evaluate_files

    try:
        results = evaluate_files(task, files, references, baseline, reference_column, **given)
    except ModuleNotFoundError as error:
        raise ImportError(f"{error.name} is not installed. Install the extra lexperts[{task}].") from error
    print_result(results, as_json, format_results(results, baseline))
