# SPDX-License-Identifier: Apache-2.0
"""Batches of rows of several datasets: a collator that passes on the datasets' names, and a sampler that mixes datasets.

Letters: B rows, S source tokens, T target tokens, n_i rows of dataset i, m rows per epoch, p_i the share of dataset i.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

from .generation_moesumm import check_on_long, max_positions, source_limit
from .routing_moesumm import dataset_names_to_ids
from .sentences_moesumm import replace_surrogates

logger = logging.getLogger(__name__)

STRATEGIES = ("size", "even", "temperature")


class DataCollatorForMoeSumm:
    """Makes batches of `input_ids`, `attention_mask` `(B, S)`, `labels` `(B, T)`, -100 for padding, `dataset_ids` `(B,)`.

    A row is `{"document": text, "summary": text, "dataset": name}`, or tokenised: `input_ids` and `labels` as lists,
    `dataset` or `dataset_ids`. Rows without summaries have no labels. A row without a dataset, or with `None`, has the id -1
    and uses only the main expert. A stock model, which has no datasets, gets no `dataset_ids`.

    The Trainer removes columns that are not arguments of the model: with texts pass `remove_unused_columns=False` to it.

    Args:
        tokenizer: the model's.
        model: for its datasets, including those that are added later, and its limits.
        max_source_length, max_target_length: tokens, at most (and by default) the model's positions.
        on_long: longer rows raise an error (`"error"`, the default) or are truncated (`"truncate"`); warnings report how
            many.
        datasets: the names in the order of their ids, if there is no `model`.
        document_column, summary_column, dataset_column: the columns' names.
        pad_to_multiple_of: as in the tokenizer's `pad`.

    Attributes:
        truncated_rows (`Counter`): the number of `"rows"`, and of truncated `"documents"` and `"summaries"`, in this
            process; workers of a data loader have their own.

    Raises:
        ValueError: for an unknown dataset, a row that is too long or empty, and lengths beyond the model's.
    """

    def __init__(
        self,
        tokenizer,
        model=None,
        max_source_length: int | None = None,
        max_target_length: int | None = None,
        on_long: str = "error",
        datasets: list[str] | None = None,
        document_column: str = "document",
        summary_column: str = "summary",
        dataset_column: str = "dataset",
        pad_to_multiple_of: int | None = None,
    ):
        check_on_long(on_long, ("error", "truncate"))
        self.tokenizer, self.on_long, self.pad_to_multiple_of = tokenizer, on_long, pad_to_multiple_of
        self.config = None if model is None else model.config  # where datasets are added later
        self.datasets = datasets
        self.columns = (document_column, summary_column, dataset_column)
        source = tokenizer.model_max_length if model is None else source_limit(model, tokenizer)
        target = tokenizer.model_max_length if model is None else max_positions(model.config, "decoder")
        self.max_source_length = check_limit("max_source_length", max_source_length, source)
        self.max_target_length = check_limit("max_target_length", max_target_length, target)
        self.truncated_rows: Counter[str] = Counter()

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        """Makes a batch of rows."""
        self.truncated_rows["rows"] += len(rows)
        document, summary, _ = self.columns
        sources = self.tokenize(rows, document, "input_ids", "documents", self.max_source_length)
        batch = self.tokenizer.pad(
            {"input_ids": sources},
            padding_side="right",  # positions are counted from the beginning of the row
            pad_to_multiple_of=self.pad_to_multiple_of,
            return_tensors="pt",
        )
        batch = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        if any(row.get(summary) is not None or row.get("labels") is not None for row in rows):
            targets = self.tokenize(rows, summary, "labels", "summaries", self.max_target_length)
            length = max(map(len, targets))
            length += -length % (self.pad_to_multiple_of or 1)
            batch["labels"] = torch.tensor([ids + [-100] * (length - len(ids)) for ids in targets])
        ids = self.dataset_ids(rows)
        if ids is not None:
            batch["dataset_ids"] = torch.tensor(ids)
        return batch

    def tokenize(self, rows: list[dict], column: str, ids_column: str, kind: str, limit: int) -> list[list[int]]:
        """Each row's tokens, at most `limit`; rows that have `ids_column` are tokenised already."""
        tokens: list = [row.get(ids_column) for row in rows]
        missing = [index for index, ids in enumerate(tokens) if ids is None]
        for index in missing:
            text = rows[index].get(column)
            if not isinstance(text, str) or not text.strip():
                raise ValueError(
                    f"Row {index} of the batch has neither a text in {column!r} ({text!r:.60}) nor {ids_column!r}; its "
                    f"columns are {', '.join(map(repr, rows[index]))}. Leave out empty rows, and pass "
                    "remove_unused_columns=False to the Trainer."
                )
        if missing:
            argument = "text" if ids_column == "input_ids" else "text_target"
            texts = {argument: [replace_surrogates(rows[index][column]) for index in missing]}
            for index, ids in zip(missing, self.tokenizer(**texts, verbose=False)["input_ids"], strict=True):
                tokens[index] = ids
        tokens = [ids.tolist() if hasattr(ids, "tolist") else list(ids) for ids in tokens]
        return [self.truncate(ids, index, kind, limit) for index, ids in enumerate(tokens)]

    def truncate(self, ids: list[int], index: int, kind: str, limit: int) -> list[int]:
        """A row's tokens, truncated as `on_long` says; `kind` is "documents" or "summaries"."""
        if not ids:
            raise ValueError(f"Row {index} of the batch has no tokens in its {kind}. Leave out empty rows.")
        if len(ids) <= limit:
            return ids
        if self.on_long == "error":
            raise ValueError(
                f"Row {index} of the batch has {len(ids)} tokens in its {kind}, more than {limit}. Leave it out, split it, "
                "or pass on_long='truncate'."
            )
        self.truncated_rows[kind] += 1
        count = self.truncated_rows[kind]
        if count & (count - 1) == 0:  # at the first, the second, the fourth, ...
            logger.warning(
                "%d of the %s of %d rows were truncated to %d tokens.", count, kind, self.truncated_rows["rows"], limit
            )
        # a final special token is kept
        ends = ids[-1] == self.tokenizer.eos_token_id or ids[-1] == self.tokenizer.sep_token_id
        return [*ids[: limit - 1], ids[-1]] if ends else ids[:limit]

    def dataset_ids(self, rows: list[dict]) -> list[int] | None:
        """Each row's dataset, `None` for a model without datasets."""
        datasets = self.datasets if self.config is None else getattr(self.config, "datasets", None)
        names = [row.get(self.columns[2]) for row in rows]
        has_ids = all(row.get("dataset_ids") is not None for row in rows)
        if datasets is None:
            if self.config is None and any(name is not None for name in names):
                raise ValueError(
                    f"The rows have datasets ({names[0]!r}, ...), but the collator has none. Pass model=, or datasets= with "
                    "the names in the order of their ids."
                )
            return [int(row["dataset_ids"]) for row in rows] if self.config is None and has_ids else None
        if has_ids and all(name is None for name in names):
            return [int(row["dataset_ids"]) for row in rows]
        return dataset_names_to_ids(datasets, names, len(rows))


def check_limit(name: str, value: int | None, limit: int) -> int:
    """A limit in tokens; raises a `ValueError` if it is not between 1 and the model's positions."""
    if value is not None and not 0 < value <= limit:
        raise ValueError(f"{name}={value} must be between 1 and the model's {limit} positions.")
    return limit if value is None else value


class TemperatureSampler(Sampler[int]):
    """Indices of rows of several datasets, mixed in the shares p_i.

    - `"size"`: p_i ~ n_i. With m equal to the number of all rows, every row occurs once per epoch.
    - `"even"`: p_i is the same for all.
    - `"temperature"`: p_i ~ n_i^(1/temperature). 1 equals `"size"`; higher values are more even.

    An epoch has m p_i rows of dataset i, rounded so that they add up to m, in an order that changes every epoch. Each dataset
    is read in random order, and again when all its rows have been read: over epochs, the counts of two rows of a dataset
    differ by at most one. The same seed and epoch give the same indices, so resumed training continues with unseen rows.
    The Trainer and Accelerate call `set_epoch`; call it yourself in your own training loop.

    Args:
        sizes: n_i, for concatenated datasets (`torch.utils.data.ConcatDataset`, `datasets.concatenate_datasets`); or the
            dataset's name for each row, in any order (a column).
        strategy: one of the above.
        temperature: above 0.
        num_samples: m, by default the number of all rows.
        seed: random seed.

    Raises:
        ValueError: for an unknown strategy, an empty dataset, a temperature or m that is not positive.
    """

    def __init__(
        self,
        sizes: Sequence[int] | Sequence[str | None],
        strategy: str = "size",
        temperature: float = 2.0,
        num_samples: int | None = None,
        seed: int = 0,
    ):
        self.members = rows_by_dataset(sizes)
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy={strategy!r} is not known. Use one of {', '.join(map(repr, STRATEGIES))}.")
        if not temperature > 0:
            raise ValueError(
                f"temperature={temperature} must be above 0. Use 1 for shares by size, more for even shares."
            )
        self.rows = sum(map(len, self.members))
        self.num_samples = self.rows if num_samples is None else num_samples
        if self.num_samples < 1:
            raise ValueError(f"num_samples={num_samples} must be at least 1.")
        self.seed, self.epoch = seed, 0
        power = {"size": 1.0, "even": 0.0, "temperature": 1 / temperature}[strategy]
        largest = max(map(len, self.members))  # so that no power overflows
        weights = [(len(rows) / largest) ** power for rows in self.members]
        self.quotas = largest_remainders(weights, self.num_samples)

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int):
        """Sets the epoch of the next pass, counted from 0."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        indices = torch.cat([self.sample_rows(i) for i in range(len(self.members))])
        order = torch.randperm(len(indices), generator=self.generator(len(self.members), self.epoch))
        return iter(indices[order].tolist())

    def sample_rows(self, i: int) -> torch.Tensor:
        """This epoch's rows of dataset i: its quota, after those of the previous epochs."""
        rows, quota = self.members[i], self.quotas[i]
        start = self.epoch * quota
        first, last = start // len(rows), (start + quota) // len(rows)
        orders = [torch.randperm(len(rows), generator=self.generator(i, number)) for number in range(first, last + 1)]
        skipped = start - first * len(rows)
        return rows[torch.cat(orders)[skipped : skipped + quota]]

    def generator(self, *keys: int) -> torch.Generator:
        """A random generator for this seed and these keys."""
        seed = self.seed
        for key in keys:
            seed = (seed * 6364136223846793005 + key + 1442695040888963407) % 2**63
        return torch.Generator().manual_seed(seed)


def rows_by_dataset(sizes: Sequence) -> list[torch.Tensor]:
    """The indices of each dataset's rows; `sizes` as in `TemperatureSampler`."""
    sizes = list(sizes)
    if not sizes:
        raise ValueError("sizes is empty. Pass the number of rows of each dataset, or each row's dataset.")
    if all(isinstance(size, int) for size in sizes):
        if min(sizes) < 1:
            raise ValueError(f"sizes={sizes}: dataset {sizes.index(min(sizes))} has no rows. Leave it out.")
        return list(torch.arange(sum(sizes)).split(sizes))
    indices: dict = {}
    for index, name in enumerate(sizes):
        indices.setdefault(name, []).append(index)
    return [torch.tensor(rows) for rows in indices.values()]


def largest_remainders(weights: list[float], total: int) -> list[int]:
    """Integers in proportion to the weights that add up to the total."""
    exact = [total * weight / sum(weights) for weight in weights]
    whole = [int(number) for number in exact]
    order = sorted(range(len(exact)), key=lambda i: exact[i] - whole[i], reverse=True)
    for i in order[: total - sum(whole)]:
        whole[i] += 1
    return whole
