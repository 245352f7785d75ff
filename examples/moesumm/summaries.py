"""Summaries of a test split in a file, written so that an interruption loses no more than the last few."""

import hashlib
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import torch
from datasets import Dataset
from run_folder import OtherSettings, differences, package_version, replace_file
from tqdm import tqdm
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from keyphrase_tools.opening import opening
from modeling_moesumm.summarizing_moesumm import Summarizer

CHUNK = 8  # batches that are sorted by length together, and written at once


@dataclass
class Writing:
    num_beams: int = field(default=4, metadata={"help": "of the beam search"})
    summary_length: int | None = field(
        default=None, metadata={"help": "tokens of a summary, at most; otherwise what the model was saved with, or 256"}
    )
    repetition_penalty: float | None = field(default=None, metadata={"help": "above 1: against repeated tokens"})
    no_repeat_ngram_size: int | None = field(default=None, metadata={"help": "n-grams of this size occur once"})
    length_penalty: float | None = field(default=None, metadata={"help": "of the beam search"})
    on_long: str = field(default="truncate", metadata={"help": "documents longer than the encoder: truncate, window"})
    generation_batch_size: int = field(default=8, metadata={"help": "documents that are read at once"})
    max_test_rows: int | None = field(default=None, metadata={"help": "documents of each test split, the first ones"})

    def generation(self) -> dict:
        """Options of `generate`, without those that are left to the model."""
        names = ("num_beams", "repetition_penalty", "no_repeat_ngram_size", "length_penalty")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


class SummaryFile:
    """A JSONL file of `summary` (the reference) and `prediction`, with a note of what it was made with beside it.

    Args:
        path: ends in .jsonl.
        rows: with `document` and `summary`.
        model: the fingerprint of the model, or all the settings that it is trained with for this file alone.
        dataset: the model's name for the rows' data set; `None` for the main expert alone, and for a stock model.
        options: more for `Summarizer`, such as `force_deputy`.
    """

    def __init__(self, path: Path, rows: Dataset, writing: Writing, model: dict, dataset: str | None = None, **options):
        self.path, self.writing, self.dataset, self.options = path, writing, dataset, options
        self.rows = rows.select(range(min(writing.max_test_rows or len(rows), len(rows))))
        texts = {"rows": len(self.rows), "texts": {"name": path.stem, "sha256": hash_of_rows(self.rows)}}
        self.settings = {**asdict(writing), **texts, "dataset": dataset, "model": model, **options}
        self.settings["lexperts"] = package_version()
        del self.settings["generation_batch_size"]  # summaries are the same in any batch
        self.begun, self.note = path.with_suffix(".part"), path.with_suffix(".settings.json")

    def is_complete(self, overwrite: bool = False) -> bool:
        """Whether all is written already; what was made with other settings may be overwritten.

        Raises:
            OtherSettings: where it was written, or begun, by another model, of other texts or with other settings.
        """
        if found := self.other_settings():
            if not overwrite:
                raise OtherSettings(f"{self.path} {found}. Remove it, or write to another --output_dir.")
            for path in (self.path, self.begun, self.note):
                path.unlink(missing_ok=True)
        return self.path.exists()

    def other_settings(self) -> str:
        """How what is there was made otherwise, or ""."""
        if self.note.exists():
            before = json.loads(self.note.read_text(encoding="utf-8"))
            found = differences(before, json.loads(json.dumps(self.settings)))
            return f"was made with other settings: {found}" if found else ""
        there = self.path.exists() or self.begun.exists()
        return f"has no record of its settings ({self.note.name})" if there else ""

    def write(self, model, tokenizer):
        """Writes what is missing."""
        if self.is_complete():
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.note, json.dumps(self.settings, indent=1))
        lines = self.begun.read_text(encoding="utf-8").split("\n")[:-1] if self.begun.exists() else []
        self.begun.write_text(
            "".join(f"{line}\n" for line in lines), encoding="utf-8"
        )  # without one that was cut short
        summarize = Summarizer(
            model,
            tokenizer,
            max_length=self.writing.summary_length,
            on_long=self.writing.on_long,
            batch_size=self.writing.generation_batch_size,
            **self.writing.generation(),
            **self.options,
        )
        size = CHUNK * self.writing.generation_batch_size
        with (
            tqdm(total=len(self.rows), initial=len(lines), desc=self.path.stem, unit="text") as bar,
            self.begun.open("a", encoding="utf-8") as file,
        ):
            for start in range(len(lines), len(self.rows), size):
                chunk = self.rows[start : start + size]
                predictions = summarize(chunk["document"], self.dataset, first=start)
                for summary, prediction in zip(chunk["summary"], predictions, strict=True):
                    line = {"summary": summary, "prediction": prediction}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
                file.flush()
                bar.update(len(predictions))
        self.begun.rename(self.path)


def hash_of_rows(rows: Dataset) -> str:
    """Of their documents and summaries."""
    found = hashlib.sha256()
    for row in rows:
        found.update(json.dumps([row["document"], row["summary"]]).encode())
    return found.hexdigest()


def open_summariser(place: str):
    """A model, on a GPU if there is one, and its tokenizer."""
    with opening("The model", place):
        model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(place), AutoTokenizer.from_pretrained(place)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def read_summaries(path: Path) -> tuple[list[str], list[str]]:
    """The predictions, and the references."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    return [row["prediction"] for row in rows], [row["summary"] for row in rows]
