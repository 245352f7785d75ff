# SPDX-License-Identifier: Apache-2.0
"""Batches of rows of several datasets: a collator that tokenises texts, and a sampler that mixes datasets.

Letters: B rows, S source tokens, T target tokens, n_i rows of dataset i, m rows per epoch, p_i the share of dataset i.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

from .prompts_moesumm import (
    InputFormat,
    check_on_long,
    is_decoder_only,
    max_positions,
    pad_inputs,
    pad_rows,
    source_limit,
    tokenize,
)
from .routing_moesumm import dataset_names_to_ids
from .shared_moesumm import IGNORED, score_answers_only

logger = logging.getLogger(__name__)

STRATEGIES = ("size", "even", "temperature")


class DataCollatorForMoeSumm:
    """Makes batches of rows `{"document": text, "summary": text, "dataset": name}`; pass `remove_unused_columns=False` to the
    Trainer.

    A batch has `input_ids`, `attention_mask` `(B, S)`, `labels` `(B, T)`, -100 for padding, and `dataset_ids` `(B,)`, -1 for
    `None`, which a stock model does not get. For a decoder, a row is the document, the prompt, the summary and EOS, padded on
    the left; labels are those of the last positions, as `score_answers_only` describes. Rows without summaries have no labels.

    Args:
        tokenizer: the model's.
        model: for its datasets, including those that are added later, and its limits.
        max_length: tokens of a document, of a decoder with prompt and summary, at most (and by default) the model's positions.
        max_target_length: tokens of a summary, by default the positions of an encoder's decoder, else a quarter of `max_length`.
        on_long: longer documents and summaries raise an error (`"error"`, the default) or lose their ends (`"truncate"`);
            warnings report how many.

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
        model,
        max_length: int | None = None,
        max_target_length: int | None = None,
        on_long: str = "error",
    ):
        check_on_long(on_long, ("error", "truncate"))
        self.tokenizer, self.config, self.on_long = tokenizer, model.config, on_long
        self.is_decoder, self.format = is_decoder_only(model.config), InputFormat.of(tokenizer, model.config)
        longest = check_limit("max_length", max_length, source_limit(model, tokenizer))
        if self.is_decoder:  # of which prompt and one token of a document are a part
            summary = check_limit("max_target_length", max_target_length, longest - len(self.format) - 1, longest // 4)
        else:
            summary = check_limit("max_target_length", max_target_length, max_positions(model.config, "decoder"))
        self.limits = {"documents": longest, "summaries": summary}
        self.truncated_rows: Counter[str] = Counter()

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor | int]:
        """Makes a batch of rows."""
        self.truncated_rows["rows"] += len(rows)
        limits, rooms = self.limits, [self.limits["documents"]] * len(rows)
        targets: list[list[int]] = [[] for _ in rows]
        has_labels = any(row.get("summary") is not None for row in rows)
        if has_labels:
            around = InputFormat([], [self.tokenizer.eos_token_id]) if self.is_decoder else self.format
            targets = self.encode(rows, "summary", around, [limits["summaries"]] * len(rows))
        if self.is_decoder:
            rooms = [limits["documents"] - (len(target) or limits["summaries"]) for target in targets]
        sources, labels = self.encode(rows, "document", self.format, rooms), targets
        if self.is_decoder:
            labels = [[IGNORED] * len(source) + target for source, target in zip(sources, targets, strict=True)]
            sources = [source + target for source, target in zip(sources, targets, strict=True)]
        batch: dict[str, torch.Tensor | int] = dict(pad_inputs(sources, self.tokenizer, self.config))
        if has_labels:
            batch["labels"] = pad_rows(labels, IGNORED, "left" if self.is_decoder else "right")
            batch = score_answers_only(batch) if self.is_decoder else batch
        if (datasets := getattr(self.config, "datasets", None)) is not None:
            names = [row.get("dataset") for row in rows]
            batch["dataset_ids"] = torch.tensor(dataset_names_to_ids(datasets, names, len(rows)))
        return batch

    def encode(self, rows: list[dict], column: str, around: InputFormat, rooms: list[int]) -> list[list[int]]:
        """The token ids of a column, with those around them at most as many as there is room in each row."""
        for index, row in enumerate(rows):
            if not isinstance(text := row.get(column), str) or not text.strip():
                raise ValueError(f"Row {index} of the batch has no text in {column!r} ({text!r:.60}) of {[*row]}.")
        kind, kept = {"document": "documents", "summary": "summaries"}[column], []
        tokens = tokenize(self.tokenizer, [row[column].strip() for row in rows])
        for index, (ids, room) in enumerate(zip(tokens, rooms, strict=True)):
            if (left_out := len(ids) + len(around) - room) > 0:
                self.count_truncated(index, kind, left_out)
            kept.append(around.join(ids[: room - len(around)]))
        return kept

    def count_truncated(self, index: int, kind: str, left_out: int):
        """Counts a row with too many tokens; raises a `ValueError` instead with `on_long="error"`."""
        limit = self.limits[kind]
        if self.on_long == "error":
            raise ValueError(
                f"Row {index} of the batch has {limit + left_out} tokens in its {kind}, more than {limit}. Pass on_long='truncate'."
            )
        self.truncated_rows[kind] += 1
        count, total = self.truncated_rows[kind], self.truncated_rows["rows"]
        if count & (count - 1) == 0:  # at the first, the second, the fourth, ...
            logger.warning("%d of the %s of %d rows were truncated to %d tokens.", count, kind, total, limit)


def check_limit(name: str, value: int | None, most: int, default: int | None = None) -> int:
    """A limit in tokens; raises a `ValueError` if it is not between 2 and `most`."""
    value = (most if default is None else default) if value is None else value
    if not 2 <= value <= most:
        raise ValueError(f"{name}={value} must be between 2 and {most}.")
    return value


class TemperatureSampler(Sampler[int]):
    """Indices of rows of several datasets, mixed in the shares p_i.

    - `"size"`: p_i ~ n_i. Every row occurs once per epoch.
    - `"even"`: p_i is the same for all.
    - `"temperature"`: p_i ~ n_i^(1/temperature). 1 equals `"size"`; higher values are more even.

    An epoch has m p_i rows of dataset i, rounded so that they add up to m, in an order that changes every epoch. Each dataset
    is read in random order, and again when all its rows have been read: over epochs, the counts of two rows of a dataset
    differ by at most one. The same seed and epoch give the same indices, so resumed training continues with unseen rows.
    The Trainer and Accelerate call `set_epoch`; call it yourself in your own training loop.

    Args:
        names: the dataset's name for each of m rows, such as a column.
        strategy: one of the above.
        temperature: above 0.
        seed: random seed.

    Raises:
        ValueError: for an unknown strategy, a temperature that is not positive, and no rows.
    """

    def __init__(self, names: Sequence, strategy: str = "size", temperature: float = 2.0, seed: int = 0):
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy={strategy!r} is not known. Use one of {', '.join(map(repr, STRATEGIES))}.")
        if not temperature > 0 or not len(names):
            raise ValueError(f"temperature={temperature} must be above 0, and there must be rows ({len(names)}).")
        members: dict = {}
        for index, name in enumerate(names):
            members.setdefault(name, []).append(index)
        self.members = [torch.tensor(rows) for rows in members.values()]
        self.seed, self.epoch, self.rows = seed, 0, len(names)
        power = {"size": 1.0, "even": 0.0, "temperature": 1 / temperature}[strategy]
        largest = max(map(len, self.members))  # so that no power overflows
        weights = [(len(rows) / largest) ** power for rows in self.members]
        self.quotas = largest_remainders(weights, self.rows)

    def __len__(self) -> int:
        return self.rows

    def set_epoch(self, epoch: int):
        """Sets the epoch of the next pass, counted from 0."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        indices = torch.cat([self.sample_rows(i) for i in range(len(self.members))])
        generator = self.generator(len(self.members), self.epoch)
        return iter(indices[torch.randperm(len(indices), generator=generator)].tolist())

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


def largest_remainders(weights: list[float], total: int) -> list[int]:
    """Integers in proportion to the weights that add up to the total."""
    exact = [total * weight / sum(weights) for weight in weights]
    whole = [int(number) for number in exact]
    order = sorted(range(len(exact)), key=lambda i: exact[i] - whole[i], reverse=True)
    for i in order[: total - sum(whole)]:
        whole[i] += 1
    return whole
