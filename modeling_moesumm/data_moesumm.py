# SPDX-License-Identifier: Apache-2.0
"""Batches of rows of several datasets: a collator that passes on the datasets' names, and a sampler that mixes datasets.

Letters: B rows, S source tokens, T target tokens, n_i rows of dataset i, m rows per epoch, p_i the share of dataset i.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

from .answers_moesumm import score_answers_only
from .generation_moesumm import check_on_long, max_positions, source_limit
from .prompts_moesumm import PLAIN, PromptFormat, pad_left, pad_prompts
from .routing_moesumm import dataset_names_to_ids
from .sentences_moesumm import replace_surrogates

logger = logging.getLogger(__name__)

IGNORED = -100
STRATEGIES = ("size", "even", "temperature")
GROUPED_BATCHES = 50  # as in transformers


class SummaryCollator:
    """What the collators share: the columns, the datasets, and counts of what was truncated; arguments as for these."""

    def __init__(self, tokenizer, model, on_long: str, datasets, columns: tuple[str, str, str], pad_to_multiple_of):
        check_on_long(on_long, ("error", "truncate"))
        self.tokenizer, self.on_long, self.pad_to_multiple_of = tokenizer, on_long, pad_to_multiple_of
        self.config = None if model is None else model.config  # where datasets are added later
        self.datasets, self.columns = datasets, columns
        self.truncated_rows: Counter[str] = Counter()

    def text(self, rows: list[dict], index: int, column: str, ids_column: str) -> str:
        """The text of a row that is not tokenised; raises a `ValueError` if there is none."""
        text = rows[index].get(column)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(
                f"Row {index} of the batch has neither a text in {column!r} ({text!r:.60}) nor {ids_column!r}; its "
                f"columns are {', '.join(map(repr, rows[index]))}. Leave out empty rows, and pass "
                "remove_unused_columns=False to the Trainer."
            )
        return replace_surrogates(text)

    def count_truncated(self, index: int, kind: str, length: int, limit: int):
        """Counts a row whose `kind`, "documents" or "summaries", has more tokens than `limit`; raises a `ValueError` instead with
        `on_long="error"`.
        """
        if self.on_long == "error":
            raise ValueError(
                f"Row {index} of the batch has {length} tokens in its {kind}, more than {limit}. Leave it out, split it, "
                "or pass on_long='truncate'."
            )
        self.truncated_rows[kind] += 1
        count = self.truncated_rows[kind]
        if count & (count - 1) == 0:  # at the first, the second, the fourth, ...
            logger.warning(
                "%d of the %s of %d rows were truncated to %d tokens.", count, kind, self.truncated_rows["rows"], limit
            )

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


class DataCollatorForMoeSumm(SummaryCollator):
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
        limits: the most tokens of `"documents"` and of `"summaries"`.

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
        columns = (document_column, summary_column, dataset_column)
        super().__init__(tokenizer, model, on_long, datasets, columns, pad_to_multiple_of)
        source = tokenizer.model_max_length if model is None else source_limit(model, tokenizer)
        target = tokenizer.model_max_length if model is None else max_positions(model.config, "decoder")
        self.max_source_length = check_limit("max_source_length", max_source_length, source)
        self.max_target_length = check_limit("max_target_length", max_target_length, target)
        self.limits = {"documents": self.max_source_length, "summaries": self.max_target_length}

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
        texts = [self.text(rows, index, column, ids_column) for index in missing]
        if missing:
            argument = "text" if ids_column == "input_ids" else "text_target"
            ids_of_texts = self.tokenizer(**{argument: texts}, verbose=False)["input_ids"]
            for index, ids in zip(missing, ids_of_texts, strict=True):
                tokens[index] = ids
        tokens = [ids.tolist() if hasattr(ids, "tolist") else list(ids) for ids in tokens]
        return [self.truncate(ids, index, kind, limit) for index, ids in enumerate(tokens)]

    def truncate(self, ids: list[int], index: int, kind: str, limit: int) -> list[int]:
        """A row's tokens, truncated as `on_long` says; `kind` is "documents" or "summaries"."""
        if not ids:
            raise ValueError(f"Row {index} of the batch has no tokens in its {kind}. Leave out empty rows.")
        if len(ids) <= limit:
            return ids
        self.count_truncated(index, kind, len(ids), limit)
        # a final special token is kept
        ends = ids[-1] == self.tokenizer.eos_token_id or ids[-1] == self.tokenizer.sep_token_id
        return [*ids[: limit - 1], ids[-1]] if ends else ids[:limit]


class DataCollatorForCausalMoeSumm(SummaryCollator):
    """Makes batches for a decoder: `input_ids`, `attention_mask`, `labels` `(B, T)`, -100 for all but the summaries, and
    `dataset_ids` `(B,)`. Rows are padded on the left, so that the summaries end together, and `generate` can continue prompts.

    A row is `{"document": text, "summary": text, "dataset": name}`, or one of `tokenize_summaries`. If no row has a summary or
    labels, the batch has prompts only. Datasets are as in `DataCollatorForMoeSumm`.

    Args:
        tokenizer, model: of the model; its configuration has the `summary_prompt` and the datasets.
        max_length: tokens of a document, its prompt and its summary, at most (and by default) the model's positions.
        max_target_length: tokens of a summary with EOS, by default a quarter of `max_length`.
        on_long: longer documents or summaries raise an error (`"error"`, the default) or are truncated (`"truncate"`) at their
            end, the prompt never; warnings report how many.
        answers_only: see `score_answers_only`.
        datasets, document_column, summary_column, dataset_column, pad_to_multiple_of: as in `DataCollatorForMoeSumm`.

    Attributes:
        truncated_rows (`Counter`), limits: as in `DataCollatorForMoeSumm`; the limit of documents is `max_length`.

    Raises:
        ValueError: for an unknown dataset, a row that is too long or empty, and lengths beyond the model's.
    """

    def __init__(
        self,
        tokenizer,
        model=None,
        max_length: int | None = None,
        max_target_length: int | None = None,
        on_long: str = "error",
        answers_only: bool = False,
        datasets: list[str] | None = None,
        document_column: str = "document",
        summary_column: str = "summary",
        dataset_column: str = "dataset",
        pad_to_multiple_of: int | None = None,
    ):
        columns = (document_column, summary_column, dataset_column)
        super().__init__(tokenizer, model, on_long, datasets, columns, pad_to_multiple_of)
        positions = tokenizer.model_max_length if model is None else source_limit(model, tokenizer)
        self.max_length = check_limit("max_length", max_length, positions)
        self.max_target_length = check_target_length(max_target_length, self.max_length)
        self.limits = {"documents": self.max_length, "summaries": self.max_target_length}
        self.answers_only = answers_only

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor | int]:
        """Makes a batch of rows."""
        self.truncated_rows["rows"] += len(rows)
        pairs = [self.encode(rows, index) for index in range(len(rows))]
        multiple = self.pad_to_multiple_of
        batch: dict = pad_prompts([ids for ids, _ in pairs], self.tokenizer, multiple)
        if any(label != IGNORED for _, labels in pairs for label in labels):
            batch["labels"] = pad_left([labels for _, labels in pairs], IGNORED, multiple)
            if self.answers_only:
                batch = score_answers_only(batch)
        ids = self.dataset_ids(rows)
        if ids is not None:
            batch["dataset_ids"] = torch.tensor(ids)
        return batch

    def encode(self, rows: list[dict], index: int) -> tuple[list[int], list[int]]:
        """The token ids of a row, and its labels."""
        row, (document, summary, _) = rows[index], self.columns
        if row.get("input_ids") is not None:
            ids, labels = (row[name] if row.get(name) is not None else [] for name in ("input_ids", "labels"))
            if not len(ids) or len(labels) not in (0, len(ids)) or len(ids) > self.max_length:
                raise ValueError(
                    f"Row {index} of the batch has {len(ids)} input_ids and {len(labels)} labels. Pass as many labels as ids, "
                    f"or none, and at least 1 and at most max_length={self.max_length} ids; `tokenize_summaries` makes such rows."
                )
            return list(map(int, ids)), list(map(int, labels)) or [IGNORED] * len(ids)
        texts: dict[str, list] = {
            "document": [self.text(rows, index, document, "input_ids")],
            "summary": [row.get(summary)],
        }
        if texts["summary"] != [None]:
            texts["summary"] = [self.text(rows, index, summary, "labels")]
        columns = tokenize_summaries(texts, self.tokenizer, self.max_length, self.max_target_length, self.config)
        for kind in ("documents", "summaries"):
            if left_out := columns[f"{kind}_left_out"][0]:
                self.count_truncated(index, kind, self.limits[kind] + left_out, self.limits[kind])
        return columns["input_ids"][0], columns["labels"][0]


def tokenize_summaries(
    batch: dict[str, list], tokenizer, max_length: int, max_target_length: int | None = None, config=None
) -> dict[str, list]:
    """Tokenises documents and summaries for a decoder; also for `datasets.Dataset.map(batched=True)`.

    The ids of a row are those of the document with the special tokens that the tokenizer puts before a text (BOS), the prompt,
    the summary, and EOS. The labels are those of the summary and its EOS, else -100. The parts are tokenised separately: no
    token crosses a boundary, and the name of a special token in a text is plain text. A summary that is too long, and then
    a document that does not fit beside it, lose their ends; the prompt and EOS are always there.

    Args:
        batch: columns `document` and `summary`; a summary of `None` gives a prompt alone, with all labels -100.
        max_length: maximum number of tokens per row.
        max_target_length: maximum number of tokens of a summary with EOS, by default a quarter of `max_length`.
        config: of the model, for its `summary_prompt`.

    Returns:
        Columns `input_ids` and `labels`; `documents_left_out` and `summaries_left_out`, the numbers of tokens that were left out.

    Raises:
        ValueError: for a tokenizer without EOS, and lengths that leave no room for a document.
    """
    prompt = PromptFormat.of(tokenizer, config)
    longest = check_target_length(max_target_length, max_length)
    if len(prompt) + longest >= max_length:
        raise ValueError(
            f"max_length={max_length} leaves no room for documents beside {len(prompt)} tokens of the prompt and "
            f"{longest} of the summary. Use a larger max_length, or a smaller max_target_length."
        )
    names = ("input_ids", "labels", "documents_left_out", "summaries_left_out")
    columns: dict[str, list] = {name: [] for name in names}
    for document, summary in zip(batch["document"], batch["summary"], strict=True):
        source = tokenizer(replace_surrogates(document).strip(), **PLAIN, verbose=False)["input_ids"]
        target: list[int] = []
        if summary is not None:
            target = tokenizer(replace_surrogates(summary).strip(), **PLAIN, verbose=False)["input_ids"]
        kept = [*target[: longest - 1], prompt.eos] if summary is not None else []
        room = max_length - len(prompt) - (len(kept) or longest)
        start = prompt.join(source[:room])
        columns["input_ids"].append(start + kept)
        columns["labels"].append([IGNORED] * len(start) + kept)
        columns["documents_left_out"].append(max(len(source) - room, 0))
        columns["summaries_left_out"].append(max(len(target) - (longest - 1), 0))
    return columns


def check_target_length(value: int | None, max_length: int) -> int:
    """A limit of summaries in tokens; raises a `ValueError` if it is not between 2 and `max_length`."""
    if value is not None and not 2 <= value <= max_length:
        raise ValueError(f"max_target_length={value} must be between 2 and max_length={max_length}.")
    return max(max_length // 4, 2) if value is None else value


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
        lengths: of all rows, such as their characters. If they are given, rows of similar lengths follow each other: of 50 batches
            at a time, in the order without lengths, the rows are sorted, cut into batches, and the batches shuffled.
        batch_size: rows of a batch, for `lengths`.

    Raises:
        ValueError: for an unknown strategy, an empty dataset, a temperature, m or a batch size that is not positive, and a wrong
            number of lengths.
    """

    def __init__(
        self,
        sizes: Sequence[int] | Sequence[str | None],
        strategy: str = "size",
        temperature: float = 2.0,
        num_samples: int | None = None,
        seed: int = 0,
        lengths: Sequence[int] | None = None,
        batch_size: int = 1,
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
        if lengths is not None and len(lengths) != self.rows:
            raise ValueError(f"lengths has {len(lengths)} entries for {self.rows} rows. Pass one for each row.")
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1.")
        self.lengths, self.batch_size = None if lengths is None else torch.as_tensor(lengths), batch_size
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
        generator = self.generator(len(self.members), self.epoch)
        sampled = indices[torch.randperm(len(indices), generator=generator)]
        if self.lengths is None:
            return iter(sampled.tolist())
        windows, lengths = sampled.split(GROUPED_BATCHES * self.batch_size), self.lengths
        return (row for window in windows for row in self.group(window, lengths[window], generator).tolist())

    def group(self, rows: torch.Tensor, lengths: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """The rows in batches of similar lengths, in random order; an incomplete batch comes last."""
        batches = rows[lengths.argsort(descending=True, stable=True)].split(self.batch_size)
        full = len(rows) // self.batch_size
        order = torch.randperm(full, generator=generator).tolist()
        return torch.cat([*(batches[i] for i in order), *batches[full:]])

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
