"""The collator and the sampler."""

import copy
from collections import Counter

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, DataLoader
from transformers import AutoModelForSeq2SeqLM, Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback

from modeling_moesumm import DataCollatorForMoeSumm, TemperatureSampler
from tests.modeling_moesumm.summaries import POSITIONS, story

ROWS = [
    {"document": "The river rose fast.", "summary": "River rose.", "dataset": "news"},
    {"document": "A bridge fell on foot and People left.", "summary": "Bridge fell fast on foot.", "dataset": "papers"},
    {"document": "The council met.", "summary": "Council met.", "dataset": None},
]


# ---- the collator


def test_rows_become_a_batch_that_the_model_takes(tokenizer, model):
    batch = DataCollatorForMoeSumm(tokenizer, model)(ROWS)
    assert set(batch) == {"input_ids", "attention_mask", "labels", "dataset_ids"}
    assert batch["dataset_ids"].tolist() == [0, 2, -1]
    for row, ids, mask, labels in zip(ROWS, batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
        assert ids[mask.bool()].tolist() == tokenizer(row["document"])["input_ids"]
        assert mask.tolist() == sorted(mask.tolist(), reverse=True) and set(ids[mask == 0].tolist()) <= {1}
        assert labels[labels != -100].tolist() == tokenizer(row["summary"])["input_ids"]
    loss = model(**batch).loss
    assert loss.isfinite()
    other = {**batch, "dataset_ids": torch.tensor([1, 2, -1])}
    assert not torch.equal(model(**other).loss, loss)  # the names matter


def test_tokenised_rows_give_the_same_batch(tokenizer, model):
    collator = DataCollatorForMoeSumm(tokenizer, model)
    expected = collator(ROWS)
    tokenised = [
        {"input_ids": tokenizer(row["document"])["input_ids"], "labels": tokenizer(row["summary"])["input_ids"]}
        for row in ROWS
    ]
    by_name = [{**row, "dataset": given["dataset"]} for row, given in zip(tokenised, ROWS, strict=True)]
    by_id = [{**row, "dataset_ids": i} for row, i in zip(tokenised, (0, 2, -1), strict=True)]
    tensors = [{name: torch.tensor(value) for name, value in row.items()} for row in by_id]
    for rows in (by_name, by_id, tensors):
        batch = collator(rows)
        assert set(batch) == set(expected) and all(torch.equal(batch[name], expected[name]) for name in expected)


def test_rows_without_summaries_or_datasets(tokenizer, model):
    batch = DataCollatorForMoeSumm(tokenizer, model)(
        [{"document": "The river."}, {"document": "Bridge.", "dataset": "news"}]
    )
    assert set(batch) == {"input_ids", "attention_mask", "dataset_ids"} and batch["dataset_ids"].tolist() == [-1, 0]


def test_other_columns_and_padding(tokenizer, model):
    rows = [{"article": row["document"], "highlights": row["summary"], "source": row["dataset"]} for row in ROWS]
    names = {"document_column": "article", "summary_column": "highlights", "dataset_column": "source"}
    batch = DataCollatorForMoeSumm(tokenizer, model, pad_to_multiple_of=16, **names)(rows)
    assert batch["input_ids"].shape == (3, 16) and batch["labels"].shape == (3, 16)
    assert batch["dataset_ids"].tolist() == [0, 2, -1]


def test_a_dataset_that_is_added_later_is_known(tokenizer, model):
    model = copy.deepcopy(model)
    collator = DataCollatorForMoeSumm(tokenizer, model)
    rows = [{**ROWS[0], "dataset": "radio"}]
    with pytest.raises(ValueError, match="dataset='radio'.*'news', 'letters', 'papers'"):
        collator(rows)
    model.add_dataset("radio")
    assert collator(rows)["dataset_ids"].tolist() == [3]


def test_without_a_model_the_names_are_given(tokenizer):
    assert DataCollatorForMoeSumm(tokenizer, datasets=["a", "news", "papers"])(ROWS)["dataset_ids"].tolist() == [
        1,
        2,
        -1,
    ]
    with pytest.raises(ValueError, match=r"'news', .*Pass model="):
        DataCollatorForMoeSumm(tokenizer)(ROWS)
    assert "dataset_ids" not in DataCollatorForMoeSumm(tokenizer)([{"document": "The river."}])


def test_a_stock_model_gets_no_dataset_ids(tokenizer, model):
    stock = AutoModelForSeq2SeqLM.from_config(model.config.text_config)
    batch = DataCollatorForMoeSumm(tokenizer, stock)(ROWS)
    assert "dataset_ids" not in batch and stock(**batch).loss.isfinite()


@pytest.mark.parametrize("column, what", [("document", "documents"), ("summary", "summaries")])
def test_rows_that_are_too_long_are_refused_or_cut_and_counted(tokenizer, model, caplog, column, what):
    rows = [ROWS[0], {**ROWS[1], column: story(60)}]
    size = len(tokenizer(story(60), verbose=False)["input_ids"])
    with pytest.raises(ValueError, match=f"Row 1 .* {size} tokens in its {what}, more than 40"):
        DataCollatorForMoeSumm(tokenizer, model)(rows)
    collator = DataCollatorForMoeSumm(tokenizer, model, on_long="truncate")
    for _ in range(5):
        batch = collator(rows)
    name = "input_ids" if column == "document" else "labels"
    assert batch[name].shape[1] == POSITIONS and batch[name][1, -1] == tokenizer.eos_token_id
    assert collator.truncated_rows == {"rows": 10, what: 5}
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [f"{n} of the {what} of {2 * n} rows were truncated to 40 tokens." for n in (1, 2, 4)]
    assert model(**batch).loss.isfinite()


def test_limits_below_the_models_can_be_set(tokenizer, model):
    batch = DataCollatorForMoeSumm(tokenizer, model, 5, 4, on_long="truncate")(ROWS)
    assert batch["input_ids"].shape == (3, 5) and batch["labels"].shape == (3, 4)
    with pytest.raises(ValueError, match="max_target_length=41.*40 positions"):
        DataCollatorForMoeSumm(tokenizer, model, max_target_length=41)
    with pytest.raises(ValueError, match="on_long='window'.*'error', 'truncate'"):
        DataCollatorForMoeSumm(tokenizer, model, on_long="window")


@pytest.mark.parametrize("row", [{"document": ""}, {"document": None}, {"summary": "x"}, {"labels": [1]}])
def test_an_empty_row_is_refused(tokenizer, model, row):
    with pytest.raises(ValueError, match="Row 1 .*'document'.*'input_ids'.*remove_unused"):
        DataCollatorForMoeSumm(tokenizer, model)([ROWS[0], row])


def test_an_empty_summary_among_others_is_refused(tokenizer, model):
    with pytest.raises(ValueError, match="Row 1 .*'summary'.*'labels'"):
        DataCollatorForMoeSumm(tokenizer, model)([ROWS[0], {**ROWS[1], "summary": " "}])
    with pytest.raises(ValueError, match="Row 0 .* no tokens in its documents"):
        DataCollatorForMoeSumm(tokenizer, model)([{"input_ids": []}])


# ---- the sampler


def shares(sampler, sizes):
    owners = [i for i, size in enumerate(sizes) for _ in range(size)]
    counted = Counter(owners[index] for index in sampler)
    return [counted[i] for i in range(len(sizes))]


def test_shares_are_those_of_the_strategy():
    sizes = [10, 90, 400]
    assert shares(TemperatureSampler(sizes), sizes) == sizes
    assert shares(TemperatureSampler(sizes, "even", num_samples=300), sizes) == [100, 100, 100]
    assert shares(TemperatureSampler(sizes, "temperature", temperature=1), sizes) == sizes
    roots = [size**0.5 for size in sizes]
    for found, root in zip(shares(TemperatureSampler(sizes, "temperature"), sizes), roots, strict=True):
        assert abs(found - 500 * root / sum(roots)) < 1
    assert shares(TemperatureSampler(sizes, "temperature", temperature=1e6, num_samples=300), sizes) == [100] * 3


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    strategy=st.sampled_from(["size", "even", "temperature"]),
    m=st.integers(1, 60),
    seed=st.integers(0, 5),
)
def test_no_row_is_seen_twice_more_often_than_another_of_its_dataset(sizes, strategy, m, seed):
    sampler = TemperatureSampler(sizes, strategy, num_samples=m, seed=seed)
    seen = Counter()
    for epoch in range(4):
        sampler.set_epoch(epoch)
        indices = list(sampler)
        assert len(indices) == len(sampler) == m and all(0 <= index < sum(sizes) for index in indices)
        seen.update(indices)
    start = 0
    for size in sizes:
        counts = [seen[index] for index in range(start, start + size)]
        assert max(counts) - min(counts) <= 1
        start += size


def test_seed_and_epoch_decide_the_order():
    def indices_of(seed, epoch):
        sampler = TemperatureSampler([20, 30], seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert indices_of(0, 0) == indices_of(0, 0)
    orders = [indices_of(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 9 and all(sorted(order) == list(range(50)) for order in orders)
    assert indices_of(0, 0) != sorted(indices_of(0, 0))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 1000), min_size=1, max_size=300),
    batch_size=st.integers(1, 8),
    epoch=st.integers(0, 2),
)
def test_with_lengths_the_same_rows_come_in_batches_of_similar_lengths(lengths, batch_size, epoch):
    sizes = [1] * len(lengths)
    plain, grouped = TemperatureSampler(sizes), TemperatureSampler(sizes, lengths=lengths, batch_size=batch_size)
    for sampler in (plain, grouped):
        sampler.set_epoch(epoch)
    assert sorted(plain) == sorted(grouped) and list(grouped) == list(grouped)

    def padded(indices):
        batches = [indices[i : i + batch_size] for i in range(0, len(indices), batch_size)]
        return sum(len(batch) * max(lengths[index] for index in batch) for batch in batches)

    window = 50 * batch_size
    sampled = list(plain)
    if not len(sampled) % batch_size:
        assert padded(list(grouped)) <= padded(sampled)
    for i in range(0, len(sampled), window):  # of 50 batches at a time
        assert sorted(sampled[i : i + window]) == sorted(list(grouped)[i : i + window])


def test_a_column_of_names_is_as_good_as_sizes():
    names = ["a", "b", "b", "a", None, "b", "b", "b"]
    column = Dataset.from_dict({"dataset": names})["dataset"]
    indices = list(TemperatureSampler(column, "even", num_samples=9))
    assert Counter(names[index] for index in indices) == {"a": 3, "b": 3, None: 3}
    assert list(TemperatureSampler(names, "even", num_samples=9)) == indices


def test_it_works_in_a_data_loader_over_concatenated_datasets():
    parts = [list(range(100, 104)), list(range(200, 240))]
    sampler = TemperatureSampler([4, 40], "even", num_samples=40)
    batches = list(DataLoader(ConcatDataset(parts), batch_size=8, sampler=sampler))
    found = Counter(int(value) // 100 for batch in batches for value in batch)
    assert len(batches) == 5 and found == {1: 20, 2: 20}


@pytest.mark.parametrize(
    "sizes, options, message",
    [
        ([], {}, "sizes is empty"),
        ([3, 0], {}, r"sizes=\[3, 0\]: dataset 1"),
        ([3], {"strategy": "random"}, "strategy='random'.*'size', 'even', 'temperature'"),
        ([3], {"strategy": "temperature", "temperature": 0}, "temperature=0"),
        ([3], {"num_samples": 0}, "num_samples=0"),
        ([3], {"lengths": [1, 2]}, "lengths has 2 entries for 3 rows"),
        ([3], {"lengths": [1, 2, 3], "batch_size": 0}, "batch_size=0"),
    ],
)
def test_samplers_that_cannot_be_are_refused(sizes, options, message):
    with pytest.raises(ValueError, match=message):
        TemperatureSampler(sizes, **options)


# ---- in the Trainer


class Noting(DataCollatorForMoeSumm):
    """Notes which documents it was given."""

    def __call__(self, rows):
        self.noted = [*getattr(self, "noted", []), *(row["document"] for row in rows)]
        return super().__call__(rows)


class MixedTrainer(Seq2SeqTrainer):
    """As in docs/summarization.md."""

    def _get_train_sampler(self, train_dataset=None):
        return TemperatureSampler(self.train_dataset["dataset"], "even", num_samples=8, seed=3)


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def train(model, tokenizer, rows, folder, stop=None, resume=None, **options):
    model, collator = copy.deepcopy(model), Noting(tokenizer, model)
    settings = {"per_device_train_batch_size": 2, "num_train_epochs": 3, "report_to": "none", "save_strategy": "no"}
    args = Seq2SeqTrainingArguments(
        str(folder), remove_unused_columns=False, disable_tqdm=True, use_cpu=True, learning_rate=1e-3, **settings
    )
    trainer = MixedTrainer(
        model, args, train_dataset=rows, data_collator=collator, callbacks=[StopAt(stop)] if stop else [], **options
    )
    trainer.train(resume_from_checkpoint=resume)
    return model, collator.noted


def test_a_resumed_training_goes_on_with_the_rows_that_it_had_not_seen(tokenizer, model, tmp_path):
    many = [{**ROWS[i == 0], "document": f"The river {i}."} for i in range(9)]
    rows = Dataset.from_list(many)
    whole, expected = train(model, tokenizer, rows, tmp_path / "whole")
    sampler = TemperatureSampler(rows["dataset"], "even", num_samples=8, seed=3)
    by_hand = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        by_hand += [many[index]["document"] for index in sampler]
    assert expected == by_hand and Counter(expected)["The river 0."] == 12  # the one row of its dataset, half of all
    _, before = train(model, tokenizer, rows, tmp_path / "cut", stop=6)  # in the middle of the second epoch
    resumed, after = train(model, tokenizer, rows, tmp_path / "cut", resume=str(tmp_path / "cut" / "checkpoint-6"))
    assert before[:12] == expected[:12] and after == expected[12:]
    for (name, p), q in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=name)
