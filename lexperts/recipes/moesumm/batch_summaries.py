"""Summaries of the documents of files: the model behind `lexperts summarize`."""

from run_tools.errors import UserError, did_you_mean
from run_tools.jsonl import missing_columns
from run_tools.loading import open_with_tokenizer, parse_device
from run_tools.processes import prepare_process

TASK = "moe-summarization"


def open_summarizer(name: str, dataset: str | None, batch_size: int, device: str | None, options: dict):
    """Loads a model -> a function from pairs of a text and a data set to summaries, for `run_over`.

    Args:
        dataset: of all texts; the model must have it.
        options: of `Summarizer`, such as `max_length` and `num_beams`.
    """
    from modeling_moesumm.generation_moesumm import Summarizer

    from .models import auto_class

    prepare_process()
    model, tokenizer = open_with_tokenizer("--model", auto_class("--model", name), name)
    summarize = Summarizer(model.to(parse_device(device)), tokenizer, batch_size=batch_size, **options)
    known = getattr(model.config, "datasets", [])
    if dataset is not None and dataset not in known:
        hint = f"{did_you_mean(dataset, known)} Without the option its main expert writes."
        raise UserError(
            f"--dataset {dataset!r} is not one of the model's data sets.{hint if known else ' It has none: leave the option out.'}"
        )

    def process(items: list[tuple]) -> list[dict]:
        summaries = summarize([text for text, _ in items], [name for _, name in items])
        return [{"summary_text": summary} for summary in summaries]

    return process


def check_row(text_column: str, dataset: str | None, dataset_column: str | None, row: dict) -> tuple[str, str | None]:
    """The text of a row and its data set. Raises a `ValueError` if it has no text."""
    if problem := missing_columns(row, [text_column]):
        raise ValueError(problem)
    text = row[text_column]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"its {text_column} is {text!r:.60}, not a text")
    return text, (row.get(dataset_column) or None) if dataset_column else dataset  # CSV has ""
