"""Rows of several datasets as batches: a collator that carries their names, and a sampler that mixes them.

Letters: B rows, S source tokens, T target tokens, n_i rows of dataset i, m rows an epoch, p_i the share of dataset i.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import torch
from torch.utils.data import Sampler

from .routing_moesumm import dataset_ids_of
from .summarizing_moesumm import check_on_long, decoder_positions, source_limit
from .texts_moesumm import readable

logger = logging.getLogger(__name__)

STRATEGIES = ("size", "even", "temperature")


class MoeSummCollator:
    """Rows -> a batch: `input_ids`, `attention_mask` (B, S), `labels` (B, T), -100 where padded, `dataset_ids` (B,).

    A row is `{"document": text, "summary": text, "dataset": name}`, or the same tokenised: `input_ids` and `labels` as
    lists, `dataset` or `dataset_ids`. No summary: no labels. No dataset, or `None`: -1, the main expert alone. A model
    that knows no datasets (a stock BART, as a baseline) gets no `dataset_ids`.

    The Trainer drops columns that the model does not take: with texts pass `remove_unused_columns=False` to it.

    Args:
        tokenizer: the model's.
        model: for the datasets that it knows, also those added later, and for its limits.
        max_source_length, max_target_length: tokens, at most (and by default) what the model reads and writes.
        on_long: rows that are longer are refused (`"error"`, the default) or cut (`"truncate"`), which is counted in
            `cut_rows` and reported by warnings.
        datasets: the names in the order of their ids, where there is no `model`.
        document_column, summary_column, dataset_column: the rows' names for these.
        pad_to_multiple_of: as the tokenizer's `pad` takes it.

    Attributes:
        cut_rows (`Counter`): `"rows"` seen, and those cut, by `"documents"` and `"summaries"`. In this process: workers
            of a data loader count their own.

    Raises:
        ValueError: for an unknown dataset (the known ones are listed), a row that is too long or empty, and for lengths
            beyond the model's.
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
        self.config = None if model is None else model.config  # it knows of datasets that are added later
        self.datasets = datasets
        self.columns = (document_column, summary_column, dataset_column)
        source = tokenizer.model_max_length if model is None else source_limit(model, tokenizer)
        target = tokenizer.model_max_length if model is None else decoder_positions(model.config)
        self.max_source_length = check_limit("max_source_length", max_source_length, source)
        self.max_target_length = check_limit("max_target_length", max_target_length, target)
        self.cut_rows = Counter()

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        self.cut_rows["rows"] += len(rows)
        document, summary, _ = self.columns
        sources = self.tokens(rows, document, "input_ids", "documents", self.max_source_length)
        batch = self.tokenizer.pad(
            {"input_ids": sources},
            padding_side="right",  # positions are counted from the beginning of the row
            pad_to_multiple_of=self.pad_to_multiple_of,
            return_tensors="pt",
        )
        batch = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        if any(row.get(summary) is not None or row.get("labels") is not None for row in rows):
            targets = self.tokens(rows, summary, "labels", "summaries", self.max_target_length)
            length = max(map(len, targets))
            length += -length % (self.pad_to_multiple_of or 1)
            batch["labels"] = torch.tensor([ids + [-100] * (length - len(ids)) for ids in targets])
        ids = self.dataset_ids(rows)
        if ids is not None:
            batch["dataset_ids"] = torch.tensor(ids)
        return batch

    def tokens(self, rows: list[dict], column: str, tokenised: str, what: str, limit: int) -> list[list[int]]:
        """Each row's tokens, at most `limit`."""
        found: list = [row.get(tokenised) for row in rows]
        texts = [place for place, ids in enumerate(found) if ids is None]
        for place in texts:
            text = rows[place].get(column)
            if not isinstance(text, str) or not text.strip():
                raise ValueError(
                    f"Row {place} of the batch has no text in {column!r} and no {tokenised!r}: {text!r:.60}; it has "
                    f"{', '.join(map(repr, rows[place]))}. Leave out empty rows. In the Trainer pass "
                    "remove_unused_columns=False, so that texts come here."
                )
        if texts:
            given = {"text" if tokenised == "input_ids" else "text_target": [readable(rows[i][column]) for i in texts]}
            for place, ids in zip(texts, self.tokenizer(**given, verbose=False)["input_ids"], strict=True):
                found[place] = ids
        found = [ids.tolist() if hasattr(ids, "tolist") else list(ids) for ids in found]
        return [self.cut(ids, place, what, limit) for place, ids in enumerate(found)]

    def cut(self, ids: list[int], place: int, what: str, limit: int) -> list[int]:
        if not ids:
            raise ValueError(f"Row {place} of the batch has no tokens in its {what}. Leave out empty rows.")
        if len(ids) <= limit:
            return ids
        if self.on_long == "error":
            raise ValueError(
                f"Row {place} of the batch has {len(ids)} tokens in its {what}, more than {limit}. Leave out such rows, "
                "divide them, or pass on_long='truncate' to have them cut."
            )
        self.cut_rows[what] += 1
        cut = self.cut_rows[what]
        if cut & (cut - 1) == 0:  # at the first, the second, the fourth, ...
            logger.warning(
                "%s of %d among %d rows were cut to %d tokens.", what.capitalize(), cut, self.cut_rows["rows"], limit
            )
        # what the tokenizer ends a text with ends a cut one as well
        last = ids[-1] == self.tokenizer.eos_token_id or ids[-1] == self.tokenizer.sep_token_id
        return [*ids[: limit - 1], ids[-1]] if last else ids[:limit]

    def dataset_ids(self, rows: list[dict]) -> list[int] | None:
        column = self.columns[2]
        known = self.datasets if self.config is None else getattr(self.config, "datasets", None)
        names = [row.get(column) for row in rows]
        if known is None:
            if self.config is None and any(name is not None for name in names):
                raise ValueError(
                    f"The rows have datasets ({names[0]!r}, ...), and the collator knows none. Pass model=, or datasets= "
                    "with the names in the order of their ids."
                )
            return [int(row["dataset_ids"]) for row in rows] if self.config is None and has_ids(rows) else None
        if has_ids(rows) and all(name is None for name in names):
            return [int(row["dataset_ids"]) for row in rows]
        return dataset_ids_of(SimpleNamespace(datasets=known), names, len(rows))


def has_ids(rows: list[dict]) -> bool:
    return all(row.get("dataset_ids") is not None for row in rows)


def check_limit(name: str, value: int | None, limit: int) -> int:
    if value is None:
        return limit
    if not 0 < value <= limit:
        raise ValueError(f"{name}={value}: the model has positions for {limit} tokens. Use 1 to {limit}.")
    return value


class MixedDatasetSampler(Sampler[int]):
    """Indices of rows of several datasets, mixed by the datasets' shares p_i.

    - `"size"`: p_i ~ n_i. With m the number of all rows, every row once an epoch.
    - `"even"`: p_i the same for all.
    - `"temperature"`: p_i ~ n_i^(1/temperature): 1 is as `"size"`, and the higher, the more even.

    An epoch has m p_i rows of dataset i, rounded so that they are m together, in an order that is new in every epoch. Each
    dataset goes through its rows in random order, and begins anew when all have been: over epochs, none is seen twice more
    often than another of its dataset. The same seed and epoch give the same indices, so that a resumed training goes on
    with the rows that it had not seen. The Trainer calls `set_epoch`, as does Accelerate; in a loop of your own call it.

    Args:
        sizes: n_i, for datasets that lie one behind the other (`torch.utils.data.ConcatDataset`,
            `datasets.concatenate_datasets`); or one dataset's name for each row, in any order (a column).
        strategy: one of the above.
        temperature: above 0.
        num_samples: m, by default all rows.
        seed: for another order.

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
        self.members = members_of(sizes)
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy={strategy!r} is not known. Use one of {', '.join(map(repr, STRATEGIES))}.")
        if not temperature > 0:
            raise ValueError(f"temperature={temperature}: it must be above 0. 1 is by size, more is more even.")
        self.rows = sum(map(len, self.members))
        self.num_samples = self.rows if num_samples is None else num_samples
        if self.num_samples < 1:
            raise ValueError(f"num_samples={num_samples}: an epoch has one row or more.")
        self.seed, self.epoch = seed, 0
        power = {"size": 1.0, "even": 0.0, "temperature": 1 / temperature}[strategy]
        largest = max(map(len, self.members))  # so that no power overflows
        weights = [(len(own) / largest) ** power for own in self.members]
        self.quotas = largest_remainders(weights, self.num_samples)

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int):
        """The epoch of the next pass, counted from 0."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        indices = torch.cat([self.drawn(i) for i in range(len(self.members))])
        order = torch.randperm(len(indices), generator=self.generator(len(self.members), self.epoch))
        return iter(indices[order].tolist())

    def drawn(self, i: int) -> torch.Tensor:
        """This epoch's rows of dataset i: as many as its quota, from where the epoch before has stopped."""
        own, quota = self.members[i], self.quotas[i]
        start, stop = self.epoch * quota, (self.epoch + 1) * quota
        rounds = range(start // len(own), -(-stop // len(own)))
        orders = [torch.randperm(len(own), generator=self.generator(i, number)) for number in rounds]
        if not orders:
            return own[:0]
        skipped = start - rounds[0] * len(own)
        return own[torch.cat(orders)[skipped : skipped + quota]]

    def generator(self, *numbers: int) -> torch.Generator:
        seed = self.seed
        for number in numbers:
            seed = (seed * 6364136223846793005 + number + 1442695040888963407) % 2**63
        return torch.Generator().manual_seed(seed)


def members_of(sizes: Sequence) -> list[torch.Tensor]:
    """The indices of each dataset's rows."""
    sizes = list(sizes)
    if not sizes:
        raise ValueError("sizes is empty. Pass the number of rows of each dataset, or each row's dataset.")
    if all(isinstance(size, int) for size in sizes):
        if min(sizes) < 1:
            raise ValueError(f"sizes={sizes}: dataset {sizes.index(min(sizes))} has no rows. Leave it out.")
        return list(torch.arange(sum(sizes)).split(sizes))
    places: dict = {}
    for place, name in enumerate(sizes):
        places.setdefault(name, []).append(place)
    return [torch.tensor(own) for own in places.values()]


def largest_remainders(weights: list[float], total: int) -> list[int]:
    """Whole numbers in proportion to the weights that add up to the total."""
    exact = [total * weight / sum(weights) for weight in weights]
    whole = [int(number) for number in exact]
    order = sorted(range(len(exact)), key=lambda i: exact[i] - whole[i], reverse=True)
    for i in order[: total - sum(whole)]:
        whole[i] += 1
    return whole


class MixedSampling:
    """Gives a Trainer a sampler of its own, as `train_sampling_strategy` has none for mixed datasets.

    ```python
    >>> class Trainer(MixedSampling, Seq2SeqTrainer): ...
    >>> sampler = MixedDatasetSampler(train["dataset"], strategy="temperature")
    >>> Trainer(model, args, train_dataset=train, data_collator=collator, train_sampler=sampler)
    ```

    Args:
        train_sampler: yields indices of `train_dataset`.
    """

    def __init__(self, *args, train_sampler: Sampler[int] | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.train_sampler = train_sampler

    def _get_train_sampler(self, train_dataset=None):
        if self.train_sampler is None:
            return super()._get_train_sampler(train_dataset)
        rows, there = getattr(self.train_sampler, "rows", None), len(self.train_dataset)
        if rows is not None and rows != there:
            raise ValueError(
                f"train_sampler is for {rows} rows, and train_dataset has {there}. Make it anew from this one."
            )
        return self.train_sampler
