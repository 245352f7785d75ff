"""Documents for training, validation and test, from files or from the Hub."""

from dataclasses import dataclass
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path

from keyphrase_tools.evaluation import gold_phrases
from keyphrase_tools.labels import tokenize_documents
from keyphrase_tools.phrase_lists import read_labelled
from keyphrase_tools.rows import full_text
from run_tools.fingerprints import parse_named_path

from ..common.splits import SPLITS, hold_out_validation, load_keyphrase_rows
from .arguments import DataArguments

FILE, STYLE = "__file__", "__style__"  # added to each row: the index of its file, and the file's name


def parse_test_file(argument: str) -> tuple[str, str]:
    """ "FILE", "NAME=FILE" or "NAME:STYLE=FILE" -> the name and the style, or "" each."""
    name, _, style = parse_named_path(argument)[0].partition(":")
    return name, style


@dataclass
class Documents:
    """The documents of a split.

    Attributes:
        texts: with their titles.
        gold: the keyphrases of each.
        files: the index and the style of each one's file.
    """

    texts: list[str]
    gold: list[list[str]]
    files: list[tuple[int, str]]

    @classmethod
    def from_rows(cls, rows: list[dict], args: DataArguments) -> "Documents":
        """The documents of the rows of `load_documents`."""
        texts = [full_text(row, args.text_column, args.title_column) for row in rows]
        return cls(texts, [row[args.keyphrases_column] for row in rows], [(row[FILE], row[STYLE]) for row in rows])

    def by_file(self) -> dict[tuple[int, str], list[int]]:
        """The indices of the documents of each file."""
        groups: dict[tuple[int, str], list[int]] = {file: [] for file in sorted(set(self.files))}
        for index, file in enumerate(self.files):
            groups[file].append(index)
        return groups

    def take(self, indices: list[int]) -> "Documents":
        """Some of the documents."""
        return Documents(*([column[i] for i in indices] for column in (self.texts, self.gold, self.files)))

    def gold_by(self, rules: str, language: str | None, where: str = "") -> list[list[str]]:
        """See `keyphrase_tools.evaluation.gold_phrases`."""
        return gold_phrases(self.texts, self.gold, rules, language, where)


def load_documents(args: DataArguments) -> dict[str, list[dict]]:
    """The rows of each split. Without validation documents a share of the training documents is split off. Raises a
    `FileNotFoundError` if a file does not exist, or a `ValueError` if training data or a column is missing.

    Rows from files also have FILE and STYLE: "phrases" for a row of `phrases=inspec.jsonl`, "" for one of `inspec.jsonl`.
    """
    columns = (args.text_column, args.keyphrases_column)
    if args.dataset_name or not args.train_files:
        documents = load_keyphrase_rows(args)
        documents = {split: [row | {FILE: 0, STYLE: ""} for row in rows] for split, rows in documents.items()}
    else:
        files = {split: getattr(args, f"{split}_files") for split in SPLITS}
        documents = {split: read_files(paths, columns) for split, paths in files.items() if paths}
    if args.validation_limit and "validation" in documents:
        files = groupby(documents["validation"], itemgetter(FILE))
        documents["validation"] = [row for _, rows in files for row in islice(rows, args.validation_limit)]
    hold_out_validation(documents, args.validation_share)
    return documents


def read_files(paths: list[str], columns: tuple[str, str]) -> list[dict]:
    """The rows of FILE or NAME=FILE."""
    rows = []
    for index, (style, path) in enumerate(map(parse_named_path, paths)):
        rows += [row | {FILE: index, STYLE: style} for row in read_labelled(path, *columns)]
    return rows


def describe_data(
    args: DataArguments, documents: dict[str, Documents], labelled: dict, tokenizer, language
) -> dict[str, dict]:
    """For each split its `source`, and the numbers of `documents`, `keyphrases`, and those `present` in their texts; rows
    of `tokenize_documents` are reused for the splits that are `labelled`.
    """
    summary = {}
    for split, own in documents.items():
        files = getattr(args, f"{split}_files") or ["train"]
        rows = labelled.get(split) or tokenize_documents(
            {"text": own.texts, "keyphrases": own.gold}, tokenizer, rules=args.rules, language=language
        )
        summary[split] = {
            "source": args.dataset_name or ", ".join(map(source_name, files)),
            "documents": len(own.texts),
            "keyphrases": sum(rows["num_keyphrases"]),
            "present": sum(rows["num_present"]),
        }
    return summary


def source_name(argument: str) -> str:
    """ "tags=data/questions/train.jsonl" -> "tags=questions/train.jsonl"; without a style, the file's name."""
    style, path = parse_named_path(argument)
    return f"{style}={Path(path).parent.name}/{Path(path).name}" if style else Path(path).name
