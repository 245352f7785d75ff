"""The documents of a training: files of several styles, how often each is drawn, and when a style is hidden."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.utils.data import Sampler

from keyphrase_tools.evaluation import gold_phrases
from keyphrase_tools.labels import tokenize_documents
from keyphrase_tools.rows import full_text
from run_tools.rows import read_jsonl

from ..data import SPLITS, hold_out_validation, load_documents
from .arguments import DataArguments

UNLABELLED = -101  # label of a word without one; -100 is for sub-tokens that begin no word
SORTED_BATCHES = 32  # rows of as many batches are sorted by length together


@dataclass
class Documents:
    """The documents of a file: texts with titles, and their keyphrases; `name` is NAME:STYLE of NAME:STYLE=FILE."""

    source: str
    name: str
    style: str
    texts: list[str]
    keyphrases: list[list[str]]
    labelled: bool = True

    def gold(self, rules: str, language: str | None) -> list[list[str]]:
        """Those keyphrases that occur in their texts. Raises a `ValueError` if none does."""
        return gold_phrases(self.texts, self.keyphrases, rules, language, self.source)


def load_files(args: DataArguments) -> dict[str, list[Documents]]:
    """The files of each split; without validation files, a share of each training file."""
    files: dict[str, list[Documents]] = {split: [] for split in SPLITS}
    parts = [(args.dataset_name, load_documents(args))] if args.dataset_name or not args.train_files else []
    for split in () if parts else SPLITS:
        for given in getattr(args, f"{split}_files") or ():
            file = replace(args, train_files=[given.rpartition("=")[2]], validation_files=None, test_files=None)
            parts.append((given, {split: load_documents(file)["train"]}))
    for given, rows in parts:
        if "train" in rows and not args.validation_files:
            hold_out_validation(rows)
        for split, own in rows.items():
            own = own[: args.validation_limit] if split == "validation" else own
            name = given.rpartition("=")[0]
            style = name.partition(":")[2] if split == "test" else name
            texts, keyphrases = [full_text(row) for row in own], [row["keyphrases"] for row in own]
            files[split].append(Documents(f"{split}: {given}", name, style, texts, keyphrases))
    return files


def load_unlabelled(args: DataArguments) -> list[Documents]:
    """The texts of `--unlabelled-files`."""
    columns, files = (args.text_column, args.title_column), []
    for path in args.unlabelled_files or ():
        texts = [full_text(row, *columns) for row in read_jsonl(path, columns[:1])]
        files.append(Documents(path, "", "", texts, [[]] * len(texts), labelled=False))
    return files


def make_windows(files: Sequence[Documents], tokenizer, styles: Sequence[str], language: str | None, seed: int) -> dict:
    """The rows of `tokenize_documents` with the number of the `file` and, if there are styles, `style_ids`, 0 for none.
    Texts without labels have `UNLABELLED` at words, and each window one of the styles or none at random.
    """
    windows: dict[str, list] = defaultdict(list)
    random, ids = np.random.default_rng(seed), ["", *styles]
    for number, file in enumerate(files):
        own = tokenize_documents({"text": file.texts, "keyphrases": file.keyphrases}, tokenizer, language=language)
        size = len(own["labels"])
        own |= {"file": [number] * size, "style_ids": [ids.index(file.style)] * size}
        if not file.labelled:
            own["labels"] = [[label if label == -100 else UNLABELLED for label in row] for row in own["labels"]]
            own["style_ids"] = random.integers(len(ids), size=size).tolist()
        for name, values in own.items():
            windows[name] += values
    if not styles:
        del windows["style_ids"]
    return windows


class MixtureSampler(Sampler[int]):
    """Draws rows with replacement; a file of n documents has the share n^(1/T) / sum n^(1/T)  (Arivazhagan et al. 2019)

    `files` has the file of each row, `documents` the n, `lengths` the sub-tokens of each row. Rows of similar length
    come together, in batches of random order. The draws of an epoch depend only on its number and the seed.
    """

    def __init__(self, files, documents, lengths, *, temperature: float, num_rows: int, batch_size: int, seed: int):
        self.lengths, self.num_rows, self.batch_size, self.seed, self.epoch = lengths, num_rows, batch_size, seed, 0
        shares = np.array(documents, dtype=float) ** (1 / temperature)
        rows_of_file = np.bincount(files, minlength=len(shares))
        self.probabilities = (shares / shares.sum() / rows_of_file)[np.asarray(files)]

    def set_epoch(self, epoch: int) -> None:
        """Called before each epoch by the Trainer's data loader."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> Iterator[int]:
        random = np.random.default_rng((self.seed, self.epoch))
        sampled = random.choice(len(self.probabilities), self.num_rows, p=self.probabilities / self.probabilities.sum())
        size = self.batch_size * SORTED_BATCHES
        for start in range(0, self.num_rows, size):
            part = sorted(sampled[start : start + size].tolist(), key=self.lengths.__getitem__)
            batches = [part[i : i + self.batch_size] for i in range(0, len(part), self.batch_size)]
            short = [batches.pop()] if len(batches[-1]) < self.batch_size else []
            for batch in [*(batches[i] for i in random.permutation(len(batches))), *short]:
                yield from batch


def hide_styles(rows: list[dict], collator, share: float) -> dict[str, torch.Tensor]:
    """The batch of a collator, with the style of a share of the rows set to 0 (none). A batch is always hidden in the same
    way: a run that is resumed collates batches before its random numbers are restored.
    """
    batch = collator(rows)
    if "style_ids" in batch and share:
        draw = torch.Generator().manual_seed(int(batch["input_ids"].sum()))
        batch["style_ids"] = batch["style_ids"].masked_fill(torch.rand(len(rows), generator=draw) < share, 0)
    return batch
