"""Tokenised pairs, the collator, and the backbone's states on disk."""

import copy
import logging

import pytest
import torch
from datasets import Dataset
from safetensors import safe_open
from torch.testing import assert_close
from transformers import Trainer, TrainingArguments

from modeling_hypernet import CachedEncoderDataset, DataCollatorForTextPairs, tokenize_pairs
from modeling_hypernet.data_hypernet import truncate_titles

from .conftest import TEXTS, TITLES


@pytest.fixture
def log(caplog):
    """Captures the package's logger, which does not propagate."""
    logger = logging.getLogger("modeling_hypernet")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture(scope="module")
def rows(tiny_tokenizer):
    encoded = tokenize_pairs([*TITLES, None], [*TEXTS, "of the graph"], tiny_tokenizer)
    return Dataset.from_dict({**encoded, "labels": [0, 1, 2, 3]})


def test_pairs_are_the_tokenizers_with_masks(rows, tiny_tokenizer):
    for row, title, text in zip(rows, [*TITLES, None], [*TEXTS, "of the graph"], strict=True):
        expected = tiny_tokenizer(title, text) if title else tiny_tokenizer(text)
        assert row["input_ids"] == expected["input_ids"]
        words = [i for i, main in zip(row["input_ids"], row["main_mask"], strict=True) if main]
        assert words == tiny_tokenizer(text, add_special_tokens=False)["input_ids"]


def test_long_titles_and_texts_are_truncated_and_counted(tiny_tokenizer, log):
    titles = ["graph " * 9, "graph", None, "the of in and"]
    assert truncate_titles(titles, tiny_tokenizer, 3) == ["graph graph graph", "graph", "", "the of in"]
    assert "2 of 4 titles exceed 3 tokens" in log.text
    encoded = tokenize_pairs(titles, ["network " * 99] * 4, tiny_tokenizer, max_length=20, max_title_length=3)
    assert [len(ids) for ids in encoded["input_ids"]] == [20] * 4
    assert [sum(mask) for mask in encoded["main_mask"]] == [14, 16, 18, 14]
    assert "4 of 4 texts exceed max_length" in log.text


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_collator_pads_each_column_with_its_value(side, rows, tiny_tokenizer):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.padding_side = side
    first = [row["main_mask"].index(1) for row in rows]
    extra = [{"start_positions": position, "id": "x"} for position in first]
    features = [{**row, "labels": [1] * len(row["input_ids"]), **more} for row, more in zip(rows, extra, strict=True)]
    batch = DataCollatorForTextPairs(tokenizer, pad_to_multiple_of=8)(features)
    assert "id" not in batch
    assert batch["start_positions"].tolist() == batch["main_mask"].argmax(1).tolist()  # they move with the tokens
    assert batch["input_ids"].shape[1] % 8 == 0
    for name, fill in (("input_ids", 0), ("labels", -100), ("main_mask", 0), ("attention_mask", 0)):
        for i, feature in enumerate(features):
            n = len(feature["input_ids"])
            inside, outside = (batch[name][i, :n], batch[name][i, n:])
            if side == "left":
                inside, outside = batch[name][i, -n:], batch[name][i, :-n]
            assert inside.tolist() == list(feature[name]) and (outside == fill).all()
    assert DataCollatorForTextPairs(tokenizer)(list(rows))["labels"].tolist() == [0, 1, 2, 3]


def test_the_collator_names_labels_that_are_invalid_bio(rows, tiny_tokenizer):
    names = {0: "O", 1: "B-KEY", 2: "I-KEY"}
    collate = DataCollatorForTextPairs(tiny_tokenizer, id2label=names)
    features = [{**row, "labels": [-100] * len(row["input_ids"])} for row in rows]
    first = features[2]["main_mask"].index(1)
    for labels, message in (
        ([1, 2, 0, 2], f"Row 2 has 'I-KEY' at token {first + 3} after 'O'"),
        ([1, 2, 3, 0], f"Row 2 has the label 3 at token {first + 2}.*0 O, 1 B-KEY, 2 I-KEY"),
        ([-1, 2, 0, 0], f"Row 2 has the label -1 at token {first}"),
    ):
        features[2]["labels"][first : first + 4] = labels
        with pytest.raises(ValueError, match=message):
            collate(features)
        DataCollatorForTextPairs(tiny_tokenizer)(features)  # without id2label labels are not validated
    features[2]["labels"][first : first + 4] = [2, 0, 1, 2]  # a window may begin within a phrase
    assert (collate(features)["labels"] != -100).sum() == 4
    assert collate(list(rows))["labels"].tolist() == [0, 1, 2, 3]  # those of whole texts


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_collator_names_answers_that_are_not_in_the_text(side, rows, tiny_tokenizer):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.padding_side = side
    features = [{**row, "start_positions": 0, "end_positions": 0} for row in rows]
    collate = DataCollatorForTextPairs(tokenizer)
    real = collate(features)["attention_mask"].bool()
    assert collate(features)["end_positions"].tolist() == real.int().argmax(1).tolist()
    for position in (1, 99, -1):  # in the question, outside the row
        features[1]["end_positions"] = position
        with pytest.raises(ValueError, match="answer of row 1 is at token"):
            collate(features)


def test_states_are_computed_once_and_train_the_same(rows, tiny_hypernet, tiny_tokenizer, tmp_path, monkeypatch):
    model = tiny_hypernet("classes", freeze_backbone=True)
    collator = DataCollatorForTextPairs(tiny_tokenizer)
    cached = CachedEncoderDataset(model, rows, collator, tmp_path / "states", batch_size=3)
    assert len(cached) == 4
    with torch.no_grad():
        whole, fast = model(**collator(list(rows))), model(**collator([cached[i] for i in range(4)]))
    assert_close(fast.logits, whole.logits, rtol=0, atol=1e-5)

    def unexpected_call(*args, **kwargs):
        raise AssertionError("the backbone was run")

    monkeypatch.setattr(model.base_model, "encode", unexpected_call)
    again = CachedEncoderDataset(model, rows, collator, tmp_path / "states")
    assert torch.equal(again[2]["encoder_hidden_states"], cached[2]["encoder_hidden_states"])
    arguments = TrainingArguments(
        str(tmp_path / "run"), max_steps=2, report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True
    )
    Trainer(model, arguments, train_dataset=again, data_collator=collator).train()


def test_states_of_another_model_or_of_other_rows_are_refused(rows, tiny_hypernet, tiny_tokenizer, tmp_path):
    model, collator = tiny_hypernet(freeze_backbone=True), DataCollatorForTextPairs(tiny_tokenizer)
    CachedEncoderDataset(model, rows, collator, tmp_path)
    with pytest.raises(ValueError, match="other rows"):
        CachedEncoderDataset(model, rows.select([1, 0]), collator, tmp_path)
    with torch.no_grad():
        model.base_model.backbone.get_input_embeddings().weight.mul_(2)
    with pytest.raises(ValueError, match="other backbone"):
        CachedEncoderDataset(model, rows, collator, tmp_path)
    with pytest.raises(ValueError, match="freeze_backbone=False"):
        CachedEncoderDataset(tiny_hypernet(), rows, collator, tmp_path)


def test_states_of_other_row_boundaries_another_configuration_or_without_a_record_are_refused(
    tiny_hypernet, tiny_tokenizer, tmp_path
):
    model, collator = tiny_hypernet(freeze_backbone=True), DataCollatorForTextPairs(tiny_tokenizer)

    def states(*rows):
        rows = [{"input_ids": list(ids), "attention_mask": [1] * len(ids)} for ids in rows]
        return CachedEncoderDataset(model, rows, collator, tmp_path)

    states((2, 5, 6), (7,))
    with pytest.raises(ValueError, match="other rows"):  # the same tokens
        states((2, 5), (6, 7))
    model.base_model.backbone.config.layer_norm_eps = 0.5
    with pytest.raises(ValueError, match="other backbone"):  # the same weights
        states((2, 5, 6), (7,))
    (tmp_path / "states.json").unlink()
    with pytest.raises(ValueError, match="no states.json"):
        states((2, 5, 6), (7,))


def test_interrupted_states_resume(rows, tiny_hypernet, tiny_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("modeling_hypernet.encoder_cache_hypernet.ROWS_PER_FILE", 2)
    model, collator = tiny_hypernet(freeze_backbone=True), DataCollatorForTextPairs(tiny_tokenizer)
    encode, calls = model.base_model.encode, []

    def broken(**inputs):
        calls.append(len(inputs["input_ids"]))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return encode(**inputs)

    monkeypatch.setattr(model.base_model, "encode", broken)
    with pytest.raises(KeyboardInterrupt):
        CachedEncoderDataset(model, rows, collator, tmp_path)
    cached = CachedEncoderDataset(model, rows, collator, tmp_path)
    assert calls == [2, 2, 2]  # the first two rows were not computed again
    assert cached[3]["encoder_hidden_states"].shape == (len(rows[3]["input_ids"]), 32)
    with safe_open(tmp_path / "states-00000002.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["2", "3"]
