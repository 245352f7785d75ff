"""Summaries of the documents of a JSON Lines file: the library function behind `lexperts summarize`."""

from pathlib import Path

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from keyphrase_tools.jsonl import read_jsonl
from keyphrase_tools.loading import describe_load_errors, parse_device
from modeling_moesumm.generation_moesumm import Summarizer

from ..common.arguments import did_you_mean
from ..common.fingerprints import fingerprint, package_version
from ..common.jsonl_resume import ResumableJsonl, digest
from .summary_file import CHUNK

EXAMPLE = '{"document": "The council met on Monday. ..."}'


def summarize_file(
    source: Path,
    output: Path,
    model: str,
    *,
    dataset: str | None = None,
    text_column: str = "document",
    dataset_column: str | None = None,
    batch_size: int = 8,
    device: str | None = None,
    overwrite: bool = False,
    **options,
) -> tuple[int, int]:
    """Writes each row of a JSON Lines file with its `summary_text`, or with `error` if it has no text. An interrupted call
    resumes when it is repeated.

    Args:
        dataset: of all documents, `None` for none; or `dataset_column`, that of each.
        device: by default an accelerator if there is one.
        overwrite: replace an output that was made with other settings, which otherwise is a `ValueError`.
        options: of `Summarizer`, such as `max_length` and `num_beams`.

    Returns: the number of rows, and the number of rows without a text.
    """
    if dataset is not None and dataset_column is not None:
        raise ValueError("Both --dataset and --dataset_column were given. Pass one of them.")
    if output.exists() and output.samefile(source):
        raise ValueError(f"The input and the output are both {source}. Write to another file.")
    rows = read_jsonl(source, example=EXAMPLE)
    for name, column in (("text_column", text_column), ("dataset_column", dataset_column)):
        if column is not None and column not in rows[0]:
            hint = did_you_mean(column, rows[0])
            raise ValueError(f"{source} has no column {column!r}; it has {', '.join(rows[0])}.{hint} Use --{name}.")
    texts = [row.get(text_column) for row in rows]
    has_text = [isinstance(text, str) and bool(text.strip()) for text in texts]
    settings = {
        **options,
        "model": fingerprint(model),
        "dataset": dataset,
        "columns": [text_column, dataset_column],
        "documents": {"name": source.name, "sha256": digest(rows)},
        "lexperts": package_version(),
    }
    file, device = ResumableJsonl(output, settings), parse_device(device)
    if file.is_complete(overwrite):
        return len(rows), has_text.count(False)
    with describe_load_errors("--model", model):
        tokenizer = AutoTokenizer.from_pretrained(model)
        summarizer_model = AutoModelForSeq2SeqLM.from_pretrained(model).to(device)
    summarizer = Summarizer(summarizer_model, tokenizer, batch_size=batch_size, **options)
    names = [row.get(dataset_column) if dataset_column else dataset for row in rows]
    summarizer.dataset_names(names, len(rows))

    def summarize_rows(chunk: list[dict], first: int) -> list[dict]:
        results = [row | {"error": f"{text_column!r} has no text"} for row in chunk]
        valid = [i for i in range(len(chunk)) if has_text[first + i]]
        chunk_names = [names[first + i] for i in valid]
        summaries = summarizer([texts[first + i] for i in valid], chunk_names, first=first)
        for i, summary in zip(valid, summaries, strict=True):
            results[i] = chunk[i] | {"summary_text": summary}
        return results

    file.write(rows, summarize_rows, batch_size=CHUNK * batch_size, desc="summaries", unit="document")
    file.finish()
    return len(rows), has_text.count(False)
