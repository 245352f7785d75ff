"""Rows as batches."""

import pytest
import torch
from datasets import Dataset

from modeling_exhird.data_exhird import DataCollatorForKeyphraseGeneration, tokenize_documents
from modeling_exhird.tokenization_exhird import MARKS, ExhirdTokenizer

BATCH = {
    "title": ["Graph cuts", None, None],
    "text": ["The deep zeta network", "neural omega", "graph"],
    "keyphrases": [["neural model", "zeta networks", "graph cuts"], "omega;deep", "graph"],
}


@pytest.fixture(scope="module")
def tokenizer():
    return ExhirdTokenizer.from_words([*MARKS, "graph", "cuts", "neural", "network", "deep", "model", "the"])


def rows_of(tokenizer, **options):
    rows = tokenize_documents(BATCH, tokenizer, **options)
    return [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]


def test_batches_are_padded_on_the_right(tokenizer):
    V = len(tokenizer)
    batch = DataCollatorForKeyphraseGeneration(tokenizer)(
        [{**row, "id": "a", "weight": 1.0} for row in rows_of(tokenizer)]
    )
    assert list(batch) == ["input_ids", "attention_mask", "copy_ids", "labels"]
    assert all(x.dtype == torch.int64 for x in batch.values())
    assert batch["input_ids"].tolist() == [[9, 10, 8, 15, 13, 0, 12], [11, 0, 1, 1, 1, 1, 1], [9, *[1] * 6]]
    assert batch["attention_mask"].tolist() == [[1] * 7, [1, 1, 0, 0, 0, 0, 0], [1, *[0] * 6]]
    assert batch["copy_ids"].tolist() == [[9, 10, 8, 15, 13, V, 12], [11, V, 1, 1, 1, 1, 1], [9, *[1] * 6]]
    assert batch["labels"].tolist() == [
        [5, 9, 10, 4, 5, V, 0, 4, 6, 11, 14, 4, 3],
        [5, V, 4, 6, 13, 4, 3, *[-100] * 6],
        [5, 9, 4, 3, *[-100] * 9],
    ]


def test_sources_are_padded_on_the_tokenizers_side_and_labels_on_the_right(tokenizer):
    rows = rows_of(tokenizer)
    left = ExhirdTokenizer.from_words(tokenizer.convert_ids_to_tokens(range(len(tokenizer))), padding_side="left")
    batch, right = DataCollatorForKeyphraseGeneration(left)(rows), DataCollatorForKeyphraseGeneration(tokenizer)(rows)
    assert batch["input_ids"][1].tolist() == [1, 1, 1, 1, 1, 11, 0]
    assert batch["attention_mask"][2].tolist() == [0] * 6 + [1]
    assert batch["copy_ids"][1].tolist() == [1, 1, 1, 1, 1, 11, len(tokenizer)]
    assert torch.equal(batch["labels"], right["labels"])


def test_lengths_may_be_multiples(tokenizer):
    batch = DataCollatorForKeyphraseGeneration(tokenizer, pad_to_multiple_of=8)(rows_of(tokenizer))
    assert [batch[name].shape for name in ("input_ids", "attention_mask", "copy_ids")] == [(3, 8)] * 3
    assert batch["labels"].shape == (3, 13)


@pytest.mark.parametrize("side", ["right", "left"])
def test_subwords_point_at_their_words_in_the_padded_row(side, tokenizer, tiny_tokenizer):
    words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    both = ExhirdTokenizer.from_words(words, padding_side=side, subword_tokenizer=tiny_tokenizer)
    rows = rows_of(both)
    batch = DataCollatorForKeyphraseGeneration(both)(rows)
    assert batch["subword_ids"].shape == batch["subword_mask"].shape == batch["subword_word_ids"].shape
    for b, row in enumerate(rows):
        n = len(row["subword_ids"][0])
        assert batch["subword_ids"][b, 0, :n].tolist() == row["subword_ids"][0]
        assert (batch["subword_ids"][b, 0, n:] == tiny_tokenizer.pad_token_id).all()
        assert batch["subword_mask"][b].tolist() == [[1] * n + [0] * (batch["subword_mask"].shape[2] - n)]
        assert (batch["subword_word_ids"][b, 0, n:] == -1).all()
        for word, column in zip(row["subword_word_ids"][0], batch["subword_word_ids"][b, 0, :n].tolist(), strict=True):
            assert (column == -1) == (word == -1)
            if word >= 0:
                assert batch["copy_ids"][b, column] == row["copy_ids"][word]


def test_rows_to_predict_have_no_labels(tokenizer):
    rows = rows_of(tokenizer, keyphrases_column=None)
    assert list(DataCollatorForKeyphraseGeneration(tokenizer)(rows)) == ["input_ids", "attention_mask", "copy_ids"]
    assert "labels" not in DataCollatorForKeyphraseGeneration(tokenizer)([{**row, "labels": None} for row in rows])
    source = tokenizer.encode_source("graph zeta")
    batch = DataCollatorForKeyphraseGeneration(tokenizer)([source._asdict()])
    assert batch["copy_ids"].tolist() == [[9, len(tokenizer)]]


@pytest.mark.parametrize("kind", [None, "torch", "numpy"])
def test_rows_of_a_data_set_in_any_format_make_the_same_batch(kind, tokenizer):
    rows = rows_of(tokenizer)
    dataset = Dataset.from_list(rows).with_format(kind)
    batch = DataCollatorForKeyphraseGeneration(tokenizer)([dataset[i] for i in range(3)])
    for name, x in DataCollatorForKeyphraseGeneration(tokenizer)(rows).items():
        assert torch.equal(batch[name], x)


def test_invalid_rows_are_refused(tokenizer):
    with pytest.raises(ValueError, match="Row 0 .* it has 'text'"):
        DataCollatorForKeyphraseGeneration(tokenizer)([{"text": "graph"}])
    with pytest.raises(ValueError, match="Row 1 "):
        DataCollatorForKeyphraseGeneration(tokenizer)(
            [tokenizer.encode_source(text)._asdict() for text in ("graph", "")]
        )
