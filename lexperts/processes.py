"""The models behind commands over files: each `open_` function loads one, and returns a function from items to results, for
`run_tools.run_over`. `options` are those of its pipeline.
"""

import json
from zlib import crc32

from run_tools.loading import open_pipeline
from run_tools.processes import prepare_process
from run_tools.rows import missing_columns

DEFINITIONS, SUMMARIES, GENERATION = "definition-modeling", "moe-summarization", "keyphrase-generation"


def open_task(task: str, name: str, device: str | None):
    """The pipeline of a task. Raises an `OSError` if it cannot be opened."""
    import torch

    prepare_process()
    return open_pipeline(task, name, device=device and torch.device(device))


def read_text(row: dict, column: str) -> str:
    """The text of a column of a row. Raises a `ValueError` if there is none."""
    if problem := missing_columns(row, [column]):
        raise ValueError(problem)
    text = row[column]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"its {column} is {text!r:.60}, not a text")
    return text


def open_definer(name: str, reward_model: str | None, device: str | None, seed: int, options: dict):
    """Definitions of rows with a term and a context.

    Args:
        reward_model: folder or Hub id of a sequence classifier that ranks samples.
        seed: of sampling. Each batch of rows has its own seed, so that samples do not depend on interruptions.
    """
    import torch

    define = open_task(DEFINITIONS, name, device)
    if reward_model:
        from transformers import AutoModelForSequenceClassification

        from run_tools.loading import open_model

        options = {**options, "reward_model": open_model(AutoModelForSequenceClassification, reward_model)}

    def process(rows: list[dict]) -> list[dict]:
        torch.manual_seed(seed + crc32(json.dumps(rows, default=str).encode()))
        return define(rows, **options)

    return process


def check_term(row: dict) -> dict:
    """A row with a term and a context. Raises a `ValueError` if it lacks one."""
    for name in ("term", "context"):
        read_text(row, name)
    return row


def open_summarizer(name: str, dataset: str | None, device: str | None, options: dict):
    """Summaries of pairs of a text and its data set. Raises a `ValueError` if the model does not have `dataset`."""
    from modeling_moesumm.generation_moesumm import Summarizer

    opened = open_task(SUMMARIES, name, device)
    given = {name: value for name, value in options.items() if value is not None}
    summarize = Summarizer(opened.model, opened.tokenizer, **given)
    summarize.dataset_names(dataset, 1)

    def process(items: list[tuple]) -> list[dict]:
        summaries = summarize([text for text, _ in items], [name for _, name in items])
        return [{"summary_text": summary} for summary in summaries]

    return process


def read_document(text_column: str, dataset: str | None, dataset_column: str | None, row: dict) -> tuple:
    """The text of a row and its data set. Raises a `ValueError` if it has no text."""
    return read_text(row, text_column), (row.get(dataset_column) or None) if dataset_column else dataset  # CSV has ""


def open_generator(name: str, device: str | None, options: dict, examples: list[dict] | None, embedder: str):
    """Keyphrases of documents, absent ones too. Those of near `examples` are candidates, see `NearExamples`.

    Raises:
        OSError: if the model or the embedder cannot be opened.
        ValueError: for invalid options, and with examples a model that scores none.
    """
    generate, near = open_task(GENERATION, name, device), None
    options = {name: value for name, value in options.items() if value is not None}
    if examples is not None:
        from .near_examples import NearExamples

        near = NearExamples(examples, embedder)

    def process(documents: list[dict]) -> list[dict]:
        found = generate(near.add_candidates(documents) if near else documents, **options)
        for phrase in (phrase for phrases in found for phrase in phrases):
            # without a title there is none
            phrase["field"] = phrase.get("field", "text") if phrase["present"] else None
        return [{"keyphrases": phrases} for phrases in found]

    process([{"text": "Keyphrases of a document."}])  # raises errors of options
    return process


def phrase_types() -> dict:
    """The Arrow types of the results of `open_generator`."""
    import pyarrow

    text, place = pyarrow.string(), pyarrow.int64()
    phrase = {"keyphrase": text, "present": pyarrow.bool_(), "score": pyarrow.float64()}
    return {"keyphrases": pyarrow.list_(pyarrow.struct({**phrase, "start": place, "end": place, "field": text}))}
