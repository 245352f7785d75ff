"""`lexperts evaluate`: scores of files of predictions."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from run_tools.errors import UserError, short_repr

from .common import AsJson, print_result

Task = Literal["keyphrases", "summaries", "definitions", "answers"]
OPTIONS: dict[str, tuple[str, ...]] = {  # that have an effect
    "keyphrases": ("convention", "language"),
    "summaries": ("bertscore_model", "bertscore_layer"),
    "definitions": ("bertscore_model", "bertscore_layer", "mauve_model"),
    "answers": (),
}
Predictions = Annotated[
    list[str], typer.Argument(metavar="[NAME=]FILE...", help="Predictions of systems; files of one name are its runs.")
]
References = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Rows with references, joined by id or in order; default: those of predictions."),
]
Layer = Annotated[int | None, typer.Option(min=0, help="Its layer; by default bert-score's choice, or the last.")]


def evaluate(
    task: Annotated[Task, typer.Argument(metavar="TASK", help=f"What to score: {', '.join(OPTIONS)}.")],
    predictions: Predictions,
    references: References = None,
    baseline: Annotated[str | None, typer.Option(help="The system that others are compared with.")] = None,
    prediction_column: Annotated[
        str | None, typer.Option(help="Column of predictions; default: our commands'.")
    ] = None,
    reference_column: Annotated[str | None, typer.Option(help="Column of references.")] = None,
    convention: Annotated[
        Literal["seke", "exhird"] | None, typer.Option(help="How keyphrases are counted: seke (default) or exhird.")
    ] = None,
    language: Annotated[str | None, typer.Option(help="Stemmer of keyphrases: english, german, ..., none.")] = None,
    bertscore_model: Annotated[str | None, typer.Option(help="A model for BERTScore, such as roberta-large.")] = None,
    bertscore_layer: Layer = None,
    mauve_model: Annotated[str | None, typer.Option(help="A GPT-2 or BERT for MAUVE, such as gpt2-large.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.json", help="A new file for the scores.")
    ] = None,
    as_json: AsJson = False,
):
    """Score keyphrases, summaries, definitions or answers, with 95% intervals, and paired tests against a baseline.

    \b
    Examples:
      lexperts evaluate keyphrases keyphrases.jsonl --references test.jsonl --convention exhird
      lexperts evaluate summaries ours=summaries.jsonl lead3=lead3.jsonl --baseline lead3
      lexperts evaluate definitions ours=definitions.jsonl --references test.jsonl
      lexperts evaluate answers ours=answers.jsonl --references squad.jsonl
    """
    given: dict = {"convention": convention, "language": language, "bertscore_model": bertscore_model}
    given |= {"bertscore_layer": bertscore_layer, "mauve_model": mauve_model}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if name not in OPTIONS[task]:
            raise UserError(f"--{name.replace('_', '-')} {value} has no effect on {task}. Leave it out.")
    files: dict[str, list[str]] = {}
    for text in predictions:
        name, _, place = text.partition("=") if "=" in text else (Path(text).stem, "", text)
        if not name or not place:
            raise UserError(f"{short_repr(text)} must be NAME=FILE, such as ours=predictions.jsonl.")
        files.setdefault(name, []).append(place)
    if baseline is not None and baseline not in files:
        raise UserError(f"--baseline {baseline!r} is not one of {', '.join(files)}.")
    from keyphrase_tools.words import check_language
    from run_tools.files import write_file

    if output is not None and output.exists():
        raise UserError(f"--output {str(output)!r} exists. Choose another name, or delete it.")
    if language is not None:
        given["language"] = check_language(None if language == "none" else language)
    from ..evaluate import format_results
    from ..evaluate.tasks import evaluate_files

    columns = (prediction_column, reference_column)
    try:
        results = evaluate_files(task, files, references, baseline, columns, **given)
    except ModuleNotFoundError as error:
        extra = "summaries" if task == "summaries" else "definitions"
        raise ImportError(f"{error.name} is not installed. Install it with: pip install 'lexperts[{extra}]'") from error
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_file(output, json.dumps({"task": task, "files": files, **results}, ensure_ascii=False, indent=1) + "\n")
    print_result(results, as_json, format_results(results, baseline))
