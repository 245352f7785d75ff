"""Keyphrases as rows of labels, which documents become rows, and rows as batches."""

import time
from collections import Counter

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils import logging

from modeling_exhird.data_exhird import (
    DataCollatorForKeyphraseGeneration,
    clean_keyphrases,
    drop_unlearnable,
    find_phrase,
    logger,
    make_labels,
    split_present_absent,
    stem,
    tokenize_documents,
)
from modeling_exhird.tokenization_exhird import MARKS, ExhirdTokenizer

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


@pytest.mark.parametrize(
    "keyphrases, expected",
    [
        ("Graph cuts;Deep Models", [["graph", "cuts"], ["deep", "models"]]),
        (
            ["Graph cuts (GC)", "why?", "min-cut; max-flow"],
            [["graph", "cuts"], ["why"], ["min", "cut"], ["max", "flow"]],
        ),
        ("f(g(x)) trees (a;b);", [["f", "trees"]]),
        (
            ["3D models", "10 - 20 nets", "Bayes's rule"],
            [["<digit>", "models"], ["<digit>", "nets"], ["bayes", "'", "s", "rule"]],
        ),
        (["", " ; ", "...", "--", None], []),
        (["<p_start> deep <eot> model"], [["deep", "model"]]),
        (["a b c d e f", "a b c d e f g"], [list("abcdef")]),
        ([" ".join(["graph"] * 40)], []),
        ([], []),
        (None, []),
        ("", []),
    ],
)
def test_keyphrases_become_words(keyphrases, expected, tokenizer):
    assert clean_keyphrases(keyphrases) == expected


def test_phrases_are_found_by_their_stems():
    stems = [stem(word) for word in ["graph", "of", "graphs", "and", "graph", "cutting", "ideas", "<eot>", "cuts"]]
    assert find_phrase(stems, ["graphs", "cut"]) == 4
    assert find_phrase(stems, ["graph"]) == 0 and find_phrase(stems, ["cuts"]) == 5
    assert find_phrase(stems, ["graph", "idea"]) is None  # not side by side
    assert find_phrase(stems, ["ideas", "<eot>", "cuts"]) is None and find_phrase(stems, ["<eot>"]) is None
    assert find_phrase(stems, ["ideas", "cuts"]) is None  # not across a title's end
    assert find_phrase(stems, ["cut", "idea", "of"]) is None and find_phrase(stems, []) is None
    assert find_phrase([], ["graph"]) is None


def test_present_phrases_come_in_the_texts_order_and_absent_ones_in_their_own():
    source = ["deep", "graph", "cuts", "of", "trees", "graph"]
    phrases = [["zeta"], ["trees"], ["graph", "cut"], ["graph"], ["deep", "trees"], ["graphs"], ["Zetas"], ["deep"]]
    present, absent = split_present_absent(source, phrases)
    assert present == [["deep"], ["graph"], ["graph", "cut"], ["trees"]]  # one start: the shorter first
    assert absent == [["zeta"], ["deep", "trees"]]  # "graphs" and "Zetas" repeat what came before
    # by stems and not by words, and whole words
    assert split_present_absent(["networks"], [["network"], ["net"]]) == ([["network"]], [["net"]])


LETTERS = st.sampled_from("abc")


@settings(max_examples=200, deadline=None)
@given(st.lists(LETTERS, max_size=10), st.lists(st.lists(LETTERS, min_size=1, max_size=3), max_size=6))
def test_every_phrase_is_present_or_absent_once(source, phrases):
    present, absent = split_present_absent(source, phrases)
    joined = f" {' '.join(source)} "
    assert Counter(map(tuple, present + absent)) == Counter(dict.fromkeys(map(tuple, phrases), 1))
    assert all(f" {' '.join(phrase)} " in joined for phrase in present)
    assert not any(f" {' '.join(phrase)} " in joined for phrase in absent)
    keys = [(joined.index(f" {' '.join(phrase)} "), len(phrase)) for phrase in present]
    assert keys == sorted(keys)
    firsts = [phrases.index(phrase) for phrase in absent]
    assert firsts == sorted(firsts)


def test_phrases_of_unknown_words_alone_are_dropped(tokenizer):
    absent = [["kappa"], ["kappa", "rho"], ["kappa", "graph"], ["zeta", "kappa"]]
    assert drop_unlearnable(absent, ["zeta"], tokenizer) == [["kappa", "graph"], ["zeta", "kappa"]]
    assert drop_unlearnable(absent, [], tokenizer) == [["kappa", "graph"]]
    assert drop_unlearnable([["zetas"]], ["zeta"], tokenizer) == []  # the word itself, not its stem


REFERENCE = {
    "vocab": "<unk> <blank> <s> </s> ; <p_start> <a_start> graph cuts neural network deep model the of .",
    "sources": ["the deep zeta network of graph cuts .", "neural zeta omega model ."],
    "present": [["deep zeta network", "graph cuts", "deep model"], ["omega", "zeta omega"]],
    "absent": [["deep cuts", "zeta model", "neural network"], ["kappa graph"]],
    "rows": [
        [
            [2, 5, 11, 0, 10, 4, 1],
            [2, 5, 7, 8, 4, 1, 1],
            [2, 5, 11, 12, 4, 1, 1],
            [2, 6, 11, 8, 4, 1, 1],
            [2, 6, 0, 12, 4, 1, 1],
            [2, 6, 9, 10, 4, 1, 1],
            [2, 3, 1, 1, 1, 1, 1],
        ],
        [[2, 5, 0, 4, 1, 1, 1], [2, 5, 0, 0, 4, 1, 1], [2, 6, 0, 7, 4, 1, 1], [2, 3, 1, 1, 1, 1, 1]],
    ],
    # its words of a source, and the words at which the reference says <unk> and copies: (row, step) -> place among them
    "own": [
        ["<unk>", "<blank>", ".", "cuts", "deep", "graph", "network", "of", "the", "zeta"],
        ["<unk>", "<blank>", ".", "model", "neural", "omega", "zeta"],
    ],
    "copied": [{(0, 3): 9, (4, 2): 9}, {(0, 2): 5, (1, 2): 6, (1, 3): 5, (2, 2): 0}],
}


@pytest.mark.parametrize("document", [0, 1])
def test_rows_are_the_references(document):
    tokenizer = ExhirdTokenizer.from_words([*REFERENCE["vocab"].split(" "), "<digit>", "<eot>"])
    source = tokenizer.encode_source(REFERENCE["sources"][document])
    phrases = ([phrase.split(" ") for phrase in REFERENCE[kind][document]] for kind in ("present", "absent"))
    rows = make_labels(*phrases, source, tokenizer)
    expected, V = REFERENCE["rows"][document], len(tokenizer)
    for number, (row, reference) in enumerate(zip(rows, expected, strict=True)):
        ours = [2, *(i if i < V else 0 for i in row), 1]
        assert (ours + [1] * len(reference))[: len(reference)] == reference
        for step, i in enumerate(row, 1):
            if reference[step] == 0:
                place = REFERENCE["copied"][document][number, step]
                assert tokenizer.convert_ids_to_words([i], source.oov_words) == [REFERENCE["own"][document][place]]


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
    assert tokenize_documents(BATCH, tokenizer, title_column=None) == untitled
    renamed = {"body": BATCH["text"], "tags": BATCH["keyphrases"]}
    assert tokenize_documents(renamed, tokenizer, text_column="body", keyphrases_column="tags") == untitled
    predicted = tokenize_documents(BATCH, tokenizer, keyphrases_column=None)
    assert predicted == {name: rows[name] for name in ("input_ids", "copy_ids")}


def test_what_is_left_out_is_counted(tokenizer, warnings):
    batch = {
        "text": ["graph", "", "?! ...", "graph", "graph", "graph", None, "12"],
        "keyphrases": [["graph"], ["graph"], ["graph"], [], "kappa;...", ["a b c d e f g"], ["graph"], ["3"]],
    }
    assert tokenize_documents(batch, tokenizer)["labels"] == [[[5, 9, 4], [3]], [[5, 7, 4], [3]]]
    assert warnings == [
        "3 of 8 documents have no words in their text and were dropped.",
        "1 of 4 phrases have more than 6 words and were dropped.",
        "3 of 8 documents have no keyphrase that could be learnt and were dropped.",
    ]
    long = {"text": ["graph"], "keyphrases": [["graph " * 40]]}
    assert tokenize_documents(long, tokenizer, max_words=None)["labels"] == [[[6, *[9] * 40, 4], [3]]]


LONG = {
    "text": ["deep graph", "deep deep graph cuts", "graph"],
    "keyphrases": ["deep;graph", "cuts;deep", "graph;deep;cuts of;model"],
}


def test_long_documents_are_left_out(tokenizer, warnings):
    kept = tokenize_documents(LONG, tokenizer, max_source_length=3, max_target_length=9)
    assert kept["input_ids"] == [[13, 9]]
    # the last has 3 + 3 + 4 + 3 target words: starts and `;` count, the document's end does not
    assert warnings == ["2 of 3 documents are longer than 3 words or 9 target words and were dropped."]
    assert len(tokenize_documents(LONG, tokenizer, max_source_length=4, max_target_length=13)["labels"]) == 3
    assert len(tokenize_documents(LONG, tokenizer, max_source_length=4, max_target_length=12)["labels"]) == 2
    assert len(tokenize_documents(LONG, tokenizer, max_source_length=None, max_target_length=None)["labels"]) == 3


def test_long_documents_may_be_cut(tokenizer, warnings):
    cut = tokenize_documents(LONG, tokenizer, max_source_length=3, max_target_length=9, on_long="truncate")
    assert cut["input_ids"] == [[13, 9], [13, 13, 9], [9]]
    # "cuts" is cut from the text, and so absent; of the last document whole phrases, while they fit
    assert cut["labels"][1] == [[5, 13, 4], [6, 10, 4], [3]]
    assert cut["labels"][2] == [[5, 9, 4], [6, 13, 4], [3]]
    assert warnings == ["2 of 3 documents are longer than 3 words or 9 target words and were truncated."]


def test_a_cut_source_knows_only_its_own_words(tokenizer):
    V = len(tokenizer)
    batch = {"text": ["zeta graph omega rho"], "keyphrases": ["omega graph;zeta rho"]}
    cut = tokenize_documents(batch, tokenizer, max_source_length=2, on_long="truncate")
    assert cut == {"input_ids": [[0, 9]], "copy_ids": [[V, 9]], "labels": [[[6, 0, 9, 4], [6, V, 0, 4], [3]]]}


def test_a_hundred_thousand_words_are_read_in_seconds(tokenizer):
    text = " ".join(f"word{i % 5000} graph" for i in range(50_000))
    batch = {
        "text": [text],
        "keyphrases": [[f"graph word{i}" for i in range(30)] + [f"deep x{i}" for i in "abcdefghij"]],
    }
    before = time.perf_counter()
    rows = tokenize_documents(batch, tokenizer, max_source_length=None, max_target_length=None)
    assert time.perf_counter() - before < 6  # under one on a free core
    assert len(rows["input_ids"][0]) == 100_000 and len(rows["labels"][0]) == 41
    assert max(rows["copy_ids"][0]) == len(tokenizer) + 4999


def test_data_sets_are_mapped_also_where_a_batch_is_left_out_whole(tokenizer, warnings):
    dataset = Dataset.from_dict(
        {"text": ["", "graph", "...", "deep zeta"], "keyphrases": [["a"], ["graph"], ["a"], ["zeta"]]}
    )
    logging.disable_progress_bar()
    options = {
        "fn_kwargs": {"tokenizer": tokenizer},
        "remove_columns": dataset.column_names,
        "load_from_cache_file": False,
    }
    rows = dataset.map(tokenize_documents, batched=True, batch_size=1, **options)
    assert rows["labels"][:] == [[[5, 9, 4], [3]], [[5, len(tokenizer), 4], [3]]]
    assert rows.column_names == ["input_ids", "copy_ids", "labels"]
    assert warnings == ["1 of 1 documents have no words in their text and were dropped."] * 2


# ---- rows as batches

COLLATED = {
    "title": ["Graph cuts", None, None],
    "text": ["The deep zeta network", "neural omega", "graph"],
    "keyphrases": [["neural model", "zeta networks", "graph cuts"], "omega;deep", "graph"],
}


def rows_of(tokenizer, **options):
    rows = tokenize_documents(COLLATED, tokenizer, **options)
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
    left = ExhirdTokenizer.from_words([*MARKS, *WORDS], padding_side="left")
    batch, right = DataCollatorForKeyphraseGeneration(left)(rows), DataCollatorForKeyphraseGeneration(tokenizer)(rows)
    assert batch["input_ids"][1].tolist() == [1, 1, 1, 1, 1, 11, 0]
    assert batch["attention_mask"][2].tolist() == [0] * 6 + [1]
    assert batch["copy_ids"][1].tolist() == [1, 1, 1, 1, 1, 11, len(tokenizer)]
    assert torch.equal(batch["labels"], right["labels"])
    wide = DataCollatorForKeyphraseGeneration(tokenizer, pad_to_multiple_of=8)(rows)
    assert wide["copy_ids"].shape == (3, 8) and torch.equal(wide["labels"], right["labels"])


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
