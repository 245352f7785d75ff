"""Summaries of a test split in a resumable JSON Lines file."""

from dataclasses import asdict
from pathlib import Path

from datasets import Dataset

from modeling_moesumm.generation_moesumm import Summarizer
from run_tools.fingerprints import digest
from run_tools.jsonl import read_lines
from run_tools.model_options import open_with_tokenizer, parse_device
from run_tools.resume import ResumableJsonl, SettingsMismatchError
from run_tools.versions import __version__

from .models import auto_class

CHUNK = 8  # batches that are sorted by length, and written, together


class SummaryFile(ResumableJsonl):
    """A resumable file of `summary` (the reference) and `prediction`, by a model with this fingerprint or these settings
    of its training; `dataset` is None for the main expert only. The options are those of `Summarizer`.
    """

    def __init__(self, path: Path, rows: Dataset, generation_args, model: dict, dataset: str | None = None, **options):
        self.generation_args, self.dataset, self.options = generation_args, dataset, options
        self.rows = rows.select(range(min(generation_args.max_test_rows or len(rows), len(rows))))
        settings = asdict(generation_args) | {"rows": len(self.rows), "dataset": dataset, "model": model, **options}
        settings["texts"] = {"name": path.stem, "sha256": hash_rows(self.rows)}
        settings["lexperts"] = __version__
        del settings["generation_batch_size"]  # summaries do not depend on it
        super().__init__(path, settings)

    def is_complete(self, overwrite: bool = False) -> bool:
        """As in `ResumableJsonl`, with the option to use in the error."""
        try:
            return super().is_complete(overwrite)
        except SettingsMismatchError as error:
            raise SettingsMismatchError(f"{error} For example, use another --output-dir.") from error

    def write_summaries(self, model, tokenizer) -> None:
        """Writes the missing summaries, and finishes the file."""
        if self.is_complete():
            return
        args = self.generation_args
        summarize = Summarizer(
            model, tokenizer, max_length=args.summary_length, on_long=args.on_long,
            batch_size=args.generation_batch_size, **args.generate_kwargs(), **self.options,
        )  # fmt: skip

        def summarize_chunk(chunk: dict[str, list], first: int) -> list[dict]:
            predictions = summarize(chunk["document"], self.dataset, first=first)
            return [{"summary": s, "prediction": p} for s, p in zip(chunk["summary"], predictions, strict=True)]

        self.write(self.rows, summarize_chunk, batch_size=CHUNK * args.generation_batch_size, unit="text")
        self.finish_output()


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
