"""Keyphrases as rows of labels, which documents become rows, and rows as batches."""

from collections import Counter

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from modeling_exhird.data_exhird import (
    DataCollatorForKeyphraseGeneration,
    clean_keyphrases,
    drop_unlearnable,
    find_phrase,
    logger,
    split_present_absent,
    stem,
    tokenize_documents,
)
from modeling_exhird.tokenization_exhird import MARKS, ExhirdTokenizer
from tests.tools import as_rows

WORDS = ["graph", "cuts", "neural", "network", "deep", "model", "the", "of", "."]


@pytest.fixture(scope="module")
def tokenizer():
    return ExhirdTokenizer.from_words([*MARKS, *WORDS])


@pytest.fixture
def warnings(monkeypatch):
    """Logged warnings; transformers' loggers do not propagate."""
    messages = []
    monkeypatch.setattr(logger, "warning", messages.append)
    return messages


def test_keyphrases_become_words():
    cases = {
        "Graph cuts (GC);why?; Min-cut": ["graph cuts", "why", "min cut"],
        "f(g(x)) trees (a;b);": ["f trees"],
        "3D models;10 - 20 nets;Bayes's rule": ["<digit> models", "<digit> nets", "bayes ' s rule"],
        " ; ...;--;<p_start> deep <eot> model": ["deep model"],
        "a b c d e f;a b c d e f g": ["a b c d e f"],
    }
    for keyphrases, expected in cases.items():
        assert clean_keyphrases(keyphrases) == [phrase.split() for phrase in expected]
    assert clean_keyphrases(["min-cut; max-flow", None, "x"]) == [["min", "cut"], ["max", "flow"], ["x"]]


def test_phrases_are_found_by_their_stems():
    stems = [stem(word) for word in ["graph", "of", "graphs", "and", "graph", "cutting", "ideas", "<eot>", "cuts"]]
    assert find_phrase(stems, ["graphs", "cut"]) == 4
    assert find_phrase(stems, ["graph"]) == 0 and find_phrase(stems, ["cuts"]) == 5
    for phrase in ("graph idea", "ideas <eot> cuts", "<eot>", "ideas cuts", "cut idea of", ""):
        assert find_phrase(stems, phrase.split()) is None


LETTERS = st.sampled_from("abc")


@settings(max_examples=100, deadline=None)
@given(st.lists(LETTERS, max_size=10), st.lists(st.lists(LETTERS, min_size=1, max_size=3), max_size=6))
def test_every_phrase_is_present_or_absent_once_and_in_order(source, phrases):
    present, absent = split_present_absent(source, phrases)
    joined = f" {' '.join(source)} "
    assert Counter(map(tuple, present + absent)) == Counter(dict.fromkeys(map(tuple, phrases), 1))
    assert all(f" {' '.join(phrase)} " in joined for phrase in present)
    assert not any(f" {' '.join(phrase)} " in joined for phrase in absent)
    keys = [(joined.index(f" {' '.join(phrase)} "), len(phrase)) for phrase in present]
    assert keys == sorted(keys)
    firsts = [phrases.index(phrase) for phrase in absent]
    assert firsts == sorted(firsts)


def test_stems_decide_what_is_present_and_words_what_can_be_learnt(tokenizer):
    phrases = [["zeta"], ["graph", "cut"], ["graphs"], ["Zetas"], ["graph"], ["net"]]
    assert split_present_absent(["networks", "graph", "cuts"], phrases) == (
        [["graphs"], ["graph", "cut"]],
        [["zeta"], ["net"]],
    )
    absent = [["kappa"], ["kappa", "rho"], ["kappa", "graph"], ["zeta", "kappa"], ["zetas"]]
    assert drop_unlearnable(absent, ["zeta"], tokenizer) == [["kappa", "graph"], ["zeta", "kappa"]]


BATCH = {
    "title": ["Graph cuts", None],
    "text": ["The deep zeta network", ["neural", "Model"]],
    "keyphrases": [["neural models", "zeta networks", "graph cut"], "model ; deep network"],
}


def test_documents_become_rows(tokenizer, warnings):
    V = len(tokenizer)
    rows = tokenize_documents(BATCH, tokenizer)
    assert rows == {
        "input_ids": [[9, 10, 8, 15, 13, 0, 12], [11, 14]],
        "copy_ids": [[9, 10, 8, 15, 13, V, 12], [11, 14]],
        "labels": [
            # "graph cut" occurs in the title; "cut" and "networks" are not in the vocabulary, nor as such in the text
            [[5, 9, 0, 4], [5, V, 0, 4], [6, 11, 0, 4], [3]],
            [[5, 14, 4], [6, 13, 12, 4], [3]],
        ],
    }
    assert warnings == []
    untitled = tokenize_documents({name: BATCH[name] for name in ("text", "keyphrases")}, tokenizer)
    assert untitled["input_ids"] == [[15, 13, 0, 12], [11, 14]]


def test_what_is_left_out_is_counted(tokenizer, warnings):
    batch = {
        "text": ["graph", "", "?! ...", "graph", "graph", "graph", None, "12"],
        "keyphrases": [["graph"], ["graph"], ["graph"], [], "kappa;...", ["a b c d e f g"], ["graph"], ["3"]],
    }
    assert tokenize_documents(batch, tokenizer)["labels"] == [[[5, 9, 4], [3]], [[5, 7, 4], [3]]]
    assert [message[:21] for message in warnings] == [
        "3 of 8 documents have",
        "1 of 4 phrases have m",
        "3 of 8 documents have",
    ]
    long = {"text": ["graph"], "keyphrases": [["graph " * 40]]}
    assert tokenize_documents(long, tokenizer, max_words=None)["labels"] == [[[6, *[9] * 40, 4], [3]]]


def test_long_documents_are_left_out(tokenizer, warnings):
    texts = ["deep graph", "deep deep graph cuts", "graph"]
    batch = {"text": texts, "keyphrases": ["deep;graph", "cuts;deep", "graph;deep;cuts of;model"]}

    def kept(source, target):
        return len(tokenize_documents(batch, tokenizer, max_source_length=source, max_target_length=target)["labels"])

    # the last has 3 + 3 + 4 + 3 target words: starts and `;` count, the document's end does not
    assert [kept(3, 9), kept(4, 13), kept(4, 12), kept(3, 13), kept(None, None)] == [1, 3, 2, 2, 3]
    assert warnings[0].startswith("2 of 3 documents are longer")


def test_a_data_set_is_mapped_also_where_a_batch_is_left_out_whole(tokenizer, warnings):
    columns = {"text": ["", "graph", "deep zeta"], "keyphrases": [["a"], ["graph"], ["zeta"]]}
    options = {"fn_kwargs": {"tokenizer": tokenizer}, "remove_columns": list(columns), "batched": True, "batch_size": 1}
    rows = Dataset.from_dict(columns).map(tokenize_documents, **options, load_from_cache_file=False)
    assert rows["labels"][:] == [[[5, 9, 4], [3]], [[5, len(tokenizer), 4], [3]]]


# ---- rows as batches


def test_batches_are_padded_on_the_tokenizers_side_and_labels_on_the_right(tokenizer):
    V, rows = len(tokenizer), as_rows(tokenize_documents(BATCH, tokenizer))
    batch = DataCollatorForKeyphraseGeneration(tokenizer)([{**row, "id": "a", "weight": 1.0} for row in rows])
    assert list(batch) == ["input_ids", "attention_mask", "copy_ids", "labels"]
    assert all(x.dtype == torch.int64 for x in batch.values())
    assert batch["input_ids"].tolist() == [[9, 10, 8, 15, 13, 0, 12], [11, 14, 1, 1, 1, 1, 1]]
    assert batch["attention_mask"].tolist() == [[1] * 7, [1, 1, 0, 0, 0, 0, 0]]
    assert batch["copy_ids"].tolist() == [[9, 10, 8, 15, 13, V, 12], [11, 14, 1, 1, 1, 1, 1]]
    labels = [[5, 9, 0, 4, 5, V, 0, 4, 6, 11, 0, 4, 3], [5, 14, 4, 6, 13, 12, 4, 3, *[-100] * 5]]
    assert batch["labels"].tolist() == labels
    left = DataCollatorForKeyphraseGeneration(ExhirdTokenizer.from_words([*MARKS, *WORDS], padding_side="left"))(rows)
    for name in ("input_ids", "attention_mask", "copy_ids"):
        assert left[name][1].tolist() == batch[name][1].roll(5).tolist()
    assert left["labels"].tolist() == labels


def test_rows_to_predict_have_no_labels(tokenizer):
    source = tokenizer.encode_source("graph zeta")._asdict()
    batch = DataCollatorForKeyphraseGeneration(tokenizer)([source, {**source, "labels": None}])
    assert list(batch) == ["input_ids", "attention_mask", "copy_ids"]
    assert batch["copy_ids"].tolist() == [[9, len(tokenizer)]] * 2


def test_rows_of_a_data_set_in_any_format_make_the_same_batch(tokenizer):
    rows = as_rows(tokenize_documents(BATCH, tokenizer))
    for kind in (None, "torch", "numpy"):
        dataset = Dataset.from_list(rows).with_format(kind)
        batch = DataCollatorForKeyphraseGeneration(tokenizer)([dataset[i] for i in range(2)])
        for name, x in DataCollatorForKeyphraseGeneration(tokenizer)(rows).items():
            assert torch.equal(batch[name], x)
