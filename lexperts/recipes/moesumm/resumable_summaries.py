"""Summaries of a test split in a resumable JSON Lines file."""

from dataclasses import asdict
from pathlib import Path

from datasets import Dataset
from tqdm import tqdm

from modeling_moesumm.generation_moesumm import Summarizer
from run_tools.fingerprints import digest
from run_tools.jsonl import read_lines
from run_tools.loading import open_with_tokenizer, parse_device
from run_tools.run_over import Output
from run_tools.versions import __version__

from .models import auto_class

CHUNK = 64  # rows that are sorted by length, and written, together


class SummaryFile(Output):
    """A resumable file of `summary` (the reference) and `prediction`, by a model with this fingerprint or these settings
    of its training; `dataset` is None for the main expert only. The options are those of `Summarizer`.
    """

    def __init__(self, path: Path, rows: Dataset, generation_args, model: dict, dataset: str | None = None, **options):
        self.generation_args, self.dataset, self.options = generation_args, dataset, options
        self.texts = rows.select(range(min(generation_args.max_test_rows or len(rows), len(rows))))
        settings = asdict(generation_args) | {"rows": len(self.texts), "dataset": dataset, "model": model, **options}
        settings["texts"] = {"name": path.stem, "sha256": hash_rows(self.texts)}
        settings["lexperts"] = __version__
        del settings["generation_batch_size"]  # summaries do not depend on it
        super().__init__(path, settings)

    def write_summaries(self, model, tokenizer) -> None:
        """Writes the missing summaries; within the context."""
        args = self.generation_args
        summarize = Summarizer(
            model, tokenizer, max_length=args.summary_length, on_long=args.on_long,
            batch_size=args.generation_batch_size, **args.generate_kwargs(), **self.options,
        )  # fmt: skip
        self.cut(self.rows - self.rows % CHUNK)
        for start in tqdm(range(self.rows, len(self.texts), CHUNK), desc=self.path.stem, unit="batch"):
            chunk = self.texts[start : start + CHUNK]
            predictions = summarize(chunk["document"], self.dataset, first=start)
            pairs = zip(chunk["summary"], predictions, strict=True)
            self.write({"summary": summary, "prediction": prediction} for summary, prediction in pairs)
        self.finish()


def hash_rows(rows: Dataset) -> str:
    """The SHA-256 of the documents and summaries."""
    return digest([[row["document"], row["summary"]] for row in rows])


def load_summarizer(name_or_path: str):
    """A model, on an accelerator if there is one, and its tokenizer."""
    model, tokenizer = open_with_tokenizer("The model", auto_class("The model", name_or_path), name_or_path)
    return model.to(parse_device(None)).eval(), tokenizer


def read_summaries(path: Path) -> tuple[list[str], list[str]]:
    """The predictions, and the references."""
    rows = read_lines(path)
    return [row["prediction"] for row in rows], [row["summary"] for row in rows]
