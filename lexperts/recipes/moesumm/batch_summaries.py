"""Summaries of the documents of files: the process behind `lexperts summarize`."""

from dataclasses import dataclass

from run_tools.corpus.failures import process_valid
from run_tools.errors import UserError, did_you_mean
from run_tools.fingerprints import fingerprint
from run_tools.jsonl import missing_columns
from run_tools.model_options import open_with_tokenizer, parse_device
from run_tools.packaged import locate_model
from run_tools.processes import prepare_process


@dataclass
class SummaryProcess:
    """Summarises rows; see `run_tools.corpus.block_runs.Process`.

    Args:
        model: folder or Hub id of a summariser; by default the packaged one.
        text_column: the column of documents.
        dataset: of all documents, `None` for none; or `dataset_column`, that of each.
        device: by default an accelerator if there is one.
        options: of `Summarizer`, such as `max_length` and `num_beams`.
    """

    results = ("summary_text",)

    model: str | None
    text_column: str
    dataset: str | None
    dataset_column: str | None
    batch_size: int
    device: str | None
    options: dict

    def describe(self) -> dict:
        """The settings. Loads the model."""
        from modeling_moesumm.generation_moesumm import Summarizer

        from .models import auto_class

        device = parse_device(self.device)
        prepare_process()
        name = locate_model(self.model, "moe-summarization")
        model, tokenizer = open_with_tokenizer("--model", auto_class("--model", name), name)
        self.summarize = Summarizer(model.to(device), tokenizer, batch_size=self.batch_size, **self.options)
        known = getattr(model.config, "datasets", [])
        if self.dataset is not None and self.dataset not in known:
            hint = f"{did_you_mean(self.dataset, known)} Without the option its main expert writes."
            raise UserError(
                f"--dataset {self.dataset!r} is not one of the model's data sets.{hint if known else ' It has none: leave the option out.'}"
            )
        names = ("dataset", "dataset_column", "batch_size")
        return {**self.options, "model": fingerprint(name), **{name: getattr(self, name) for name in names}}

    def process_rows(self, rows: list[dict], progress=lambda documents: None) -> list[dict]:
        """`summary_text`, or `error`, of each row."""

        def check(row: dict) -> tuple[tuple | None, str | None]:
            if problem := missing_columns(row, [self.text_column]):
                return None, problem
            text = row[self.text_column]
            if not isinstance(text, str) or not text.strip():
                return None, f"its {self.text_column} is {text!r:.60}, not a text"
            return (
                text,
                (row.get(self.dataset_column) or None) if self.dataset_column else self.dataset,
            ), None  # CSV has ""

        def summarize(items: list[tuple]) -> list[str]:
            return self.summarize([text for text, _ in items], [name for _, name in items])

        found = process_valid(summarize, rows, check)
        progress(len(rows))
        return [{"summary_text": summary} if error is None else {"error": error} for summary, error in found]

    def types(self) -> dict:
        """The Arrow types of the values to add."""
        import pyarrow

        return {"summary_text": pyarrow.string(), "error": pyarrow.string()}
