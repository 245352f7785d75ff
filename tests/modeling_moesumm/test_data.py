"""The collator and the sampler."""

import copy
from collections import Counter

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, Trainer, TrainingArguments

from modeling_moesumm import DataCollatorForMoeSumm, TemperatureSampler, format_prompt
from tests.modeling_moesumm.summaries import story, writing_moesumm

ROWS = [
    {"document": "The river rose fast.", "summary": "River rose.", "dataset": "news"},
    {"document": "A bridge fell on foot and People left.", "summary": "Bridge fell fast.", "dataset": "papers"},
    {"document": "The council met.", "summary": "Council met.", "dataset": None},
]


@pytest.fixture(params=["bart", "llama"])
def model(request, tokenizer):
    return writing_moesumm(tokenizer, request.param)


def collate(tokenizer, model, rows, **options):
    most = {} if model.config.is_encoder_decoder else {"max_target_length": 16}
    return DataCollatorForMoeSumm(tokenizer, model, **{**most, **options})(rows)


def test_rows_become_a_batch_that_the_model_takes(tokenizer, model):
    batch, decoder = collate(tokenizer, model, ROWS), not model.config.is_encoder_decoder
    expected = {"input_ids", "attention_mask", "labels", "dataset_ids"} | ({"logits_to_keep"} if decoder else set())
    assert set(batch) == expected and batch["dataset_ids"].tolist() == [0, 2, -1]
    for row, ids, mask, labels in zip(ROWS, batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
        summary = tokenizer(row["summary"])["input_ids"]
        wanted = tokenizer(row["document"])["input_ids"]
        if decoder:  # BOS, document and prompt; the summary with EOS; padded on the left
            prompt, summary = tokenizer(format_prompt(row["document"], model.config))["input_ids"][:-1], summary[1:]
            wanted = [*prompt, *summary]
        assert mask.tolist() == sorted(mask.tolist(), reverse=not decoder)
        assert labels[labels != -100].tolist() == summary
        assert ids[mask.bool()].tolist() == wanted and set(ids[mask == 0].tolist()) <= {1}
    loss = model(**batch).loss
    assert not torch.equal(model(**{**batch, "dataset_ids": torch.tensor([1, 2, -1])}).loss, loss)  # the names matter


def test_rows_without_summaries_are_prompts_and_a_stock_model_gets_no_dataset_ids(tokenizer, model):
    rows = [{name: row[name] for name in ("document", "dataset") if row[name]} for row in ROWS]
    batch = collate(tokenizer, model, rows)
    assert set(batch) == {"input_ids", "attention_mask", "dataset_ids"}
    assert len(model.generate(**batch, max_new_tokens=3)) == 3
    kind = AutoModelForSeq2SeqLM if model.config.is_encoder_decoder else AutoModelForCausalLM
    batch = collate(tokenizer, kind.from_config(model.config.text_config), ROWS)
    assert "dataset_ids" not in batch and "labels" in batch
    collator = DataCollatorForMoeSumm(tokenizer, model, max_target_length=16)
    model.add_dataset("radio")
    assert collator([{**ROWS[0], "dataset": "radio"}])["dataset_ids"].tolist() == [3]


@pytest.mark.parametrize("column, kind", [("document", "documents"), ("summary", "summaries")])
def test_rows_that_are_too_long_are_refused_or_cut_and_counted(tokenizer, model, caplog, column, kind):
    rows, decoder = [ROWS[0], {**ROWS[1], column: story(60)}], not model.config.is_encoder_decoder
    with pytest.raises(ValueError, match=rf"Row 1 .* \d\d tokens in its {kind}, more than"):
        collate(tokenizer, model, rows)
    collator = DataCollatorForMoeSumm(tokenizer, model, 36, 12, on_long="truncate")
    for _ in range(5):
        batch = collator(rows)
    assert collator.limits == {"documents": 36, "summaries": 12} and collator.truncated_rows == {"rows": 10, kind: 5}
    messages, limit = [record.getMessage() for record in caplog.records], collator.limits[kind]
    assert messages == [f"{n} of the {kind} of {2 * n} rows were truncated to {limit} tokens." for n in (1, 2, 4)]
    labels, ids = batch["labels"][1][batch["labels"][1] != -100], batch["input_ids"][1]
    assert len(labels) == (12 if column == "summary" else len(tokenizer(ROWS[1]["summary"])["input_ids"]) - decoder)
    if column == "document":  # its end is cut: what follows stays
        assert len(ids) == 36 and ids[-1] == 2
    if decoder:
        prompt = collator.format.suffix
        assert ids[-len(labels) - len(prompt) : -len(labels)].tolist() == prompt and ids[-1] == 2
    assert model(**batch).loss.isfinite()


def shares(names, *options, **more):
    return dict(Counter(names[index] for index in TemperatureSampler(names, *options, **more)))


def test_shares_are_those_of_the_strategy():
    names = ["a"] * 10 + ["b"] * 90 + [None] * 200
    assert shares(names) == shares(names, "temperature", temperature=1) == {"a": 10, "b": 90, None: 200}
    assert shares(names, "even") == shares(names, "temperature", temperature=1e6) == {"a": 100, "b": 100, None: 100}
    roots = {"a": 10**0.5, "b": 90**0.5, None: 200**0.5}
    for name, found in shares(Dataset.from_dict({"x": names})["x"], "temperature").items():
        assert abs(found - 300 * roots[name] / sum(roots.values())) < 1


@settings(max_examples=40, deadline=None)
@given(
    names=st.lists(st.sampled_from("abcd"), min_size=1, max_size=60),
    strategy=st.sampled_from(["size", "even", "temperature"]), seed=st.integers(0, 5),
)  # fmt: skip
def test_no_row_is_seen_twice_more_often_than_another_of_its_dataset(names, strategy, seed):
    sampler, seen, orders = TemperatureSampler(names, strategy, seed=seed), Counter(), []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
        assert orders[-1] == list(sampler) and len(orders[-1]) == len(sampler) == len(names)
        seen.update(orders[-1])
    for name in set(names):
        counts = [seen[index] for index, other in enumerate(names) if other == name]
        assert max(counts) - min(counts) <= 1
    if len(names) > 20:  # each epoch and each seed have an order of their own
        assert len({*map(tuple, orders), tuple(TemperatureSampler(names, strategy, seed=seed + 1))}) == 5


class Mixed(Trainer):
    """As in docs/summarization.md."""

    def _get_train_sampler(self, train_dataset=None):
        return TemperatureSampler(self.train_dataset["dataset"], "even", seed=3)


def test_a_resumed_training_goes_on_with_the_rows_that_it_had_not_seen(tokenizer, tmp_path):
    rows = Dataset.from_list([{**ROWS[i == 0], "document": f"The river {i}."} for i in range(8)])
    model, noted = writing_moesumm(tokenizer), []
    collator = DataCollatorForMoeSumm(tokenizer, model)
    note = lambda rows: noted.extend(row["document"] for row in rows) or collator(rows)  # noqa: E731
    options = {"per_device_train_batch_size": 2, "num_train_epochs": 3, "report_to": "none", "use_cpu": True}
    options |= {"save_steps": 6, "remove_unused_columns": False, "disable_tqdm": True}
    for resume in (None, str(tmp_path / "checkpoint-6")):  # in the middle of the second epoch
        trainer = Mixed(copy.deepcopy(model), TrainingArguments(str(tmp_path), **options), note, rows)
        trainer.train(resume_from_checkpoint=resume)
    whole, rest = noted[:24], noted[24:]
    assert len(noted) == 36 and rest == whole[12:] and rest != whole[:12]
    assert Counter(whole)["The river 0."] == 12  # the one row of its dataset, half of all
