"""Summaries of the documents of files: the library function behind `lexperts summarize`."""

from pathlib import Path

from keyphrase_tools.loading import describe_load_errors, parse_device
from run_tools.corpus.block_runs import RunSummary, check_output, run_blocks
from run_tools.corpus.documents import Corpus
from run_tools.corpus.engines import Engine
from run_tools.corpus.failures import process_each
from run_tools.fingerprints import fingerprint
from run_tools.processes import prepare_process


class SummaryProcess:
    """Summarises rows; see `run_tools.corpus.block_runs.Process`. The arguments are those of `summarize_file`."""

    def __init__(self, model, text_column, dataset, dataset_column, batch_size, device, options: dict):
        self.model, self.text_column, self.batch_size, self.device = model, text_column, batch_size, device
        self.dataset, self.dataset_column, self.options = dataset, dataset_column, options

    def describe(self) -> dict:
        """The settings. Loads the model."""
        from transformers import AutoModelForSeq2SeqLM

        from modeling_moesumm.generation_moesumm import Summarizer
        from run_tools.model_loading import open_model, open_tokenizer

        device = parse_device(self.device)
        prepare_process()
        with describe_load_errors("--model", self.model):
            tokenizer = open_tokenizer(self.model)
            model = open_model(AutoModelForSeq2SeqLM, self.model).to(device)
        self.summarize = Summarizer(model, tokenizer, batch_size=self.batch_size, **self.options)
        self.summarize.dataset_names([self.dataset], 1)
        return {
            **self.options,
            "model": fingerprint(self.model),
            "dataset": self.dataset,
            "dataset_column": self.dataset_column,
            "batch_size": self.batch_size,
        }

    def process_rows(self, rows: list[dict], progress=lambda documents: None) -> list[dict]:
        """`summary_text`, or `error`, of each row."""
        results: list = [{"error": f"{self.text_column!r} has no text"}] * len(rows)
        valid = [i for i, row in enumerate(rows) if has_text(row.get(self.text_column))]

        def summarize(indices: list[int]) -> list[str]:
            names = [rows[i].get(self.dataset_column) if self.dataset_column else self.dataset for i in indices]
            return self.summarize([rows[i][self.text_column] for i in indices], names)

        for i, (summary, error) in zip(valid, process_each(summarize, valid), strict=True):
            results[i] = {"summary_text": summary} if error is None else {"error": error}
        progress(len(rows))
        return results

    def types(self) -> dict:
        """The Arrow types of the values to add."""
        import pyarrow

        return {"summary_text": pyarrow.string(), "error": pyarrow.string()}


def has_text(text) -> bool:
    """Whether a value is a text that is not blank."""
    return isinstance(text, str) and bool(text.strip())


def summarize_file(
    source: str,
    output: Path,
    model: str,
    *,
    dataset: str | None = None,
    text_column: str = "document",
    dataset_column: str | None = None,
    batch_size: int = 8,
    device: str | None = None,
    engine: Engine | None = None,
    block_size: int = 64,
    append: bool = False,
    delimiter: str | None = None,
    encoding: str | None = None,
    **options,
) -> RunSummary:
    """Writes each row of a source with its `summary_text`, or with `error`. An interrupted call resumes when it is repeated.

    Args:
        source, output, engine, block_size, append: as in `run_tools.corpus.block_runs.run_blocks`.
        dataset: of all documents, `None` for none; or `dataset_column`, that of each.
        delimiter, encoding: of the source; see `run_tools.corpus.documents.Corpus`.
        device: by default an accelerator if there is one.
        options: of `Summarizer`, such as `max_length` and `num_beams`.

    Returns:
        The numbers of rows and of errors.
    """
    if dataset is not None and dataset_column is not None:
        raise ValueError("Both --dataset and --dataset-column were given. Pass one of them.")
    check_output(output)
    required = () if dataset_column is None else (dataset_column,)
    reading = {"delimiter": delimiter, "encoding": encoding, "output": output}
    corpus = Corpus(source, text_column, None, keep=None, required=required, **reading)
    process = SummaryProcess(model, corpus.text_column, dataset, dataset_column, batch_size, device, options)
    return run_blocks(process, corpus, output, engine=engine, block_size=block_size, append=append)
