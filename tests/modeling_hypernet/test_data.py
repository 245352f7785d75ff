"""Tokenised pairs and questions, and the collator."""

import copy

import pytest
from datasets import Dataset

from modeling_hypernet import DataCollatorForTextPairs, tokenize_pairs, tokenize_questions
from modeling_hypernet.data_hypernet import answer_tokens, question_windows, truncate_titles

from .conftest import TEXTS, TITLES

QUESTION = "is the graph cut"
CONTEXT = "the network of graph cuts is learning in the network and the graph " * 6
LONG = {"max_seq_len": 32, "doc_stride": 8}


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
    batch = DataCollatorForTextPairs(tokenizer)(features)
    assert "id" not in batch
    assert batch["start_positions"].tolist() == batch["main_mask"].argmax(1).tolist()  # they move with the tokens
    for name, fill in (("input_ids", 0), ("labels", -100), ("main_mask", 0), ("attention_mask", 0)):
        for i, feature in enumerate(features):
            n, column = len(feature["input_ids"]), batch[name][i].tolist()
            padding = [fill] * (len(column) - n)
            assert column == (feature[name] + padding if side == "right" else padding + feature[name])
    for labels in ([0, 1, 2, 3], [[0.0, 1.0], [1.0, 1.0]] * 2):  # those of whole texts
        features = [{**row, "labels": label} for row, label in zip(rows, labels, strict=True)]
        assert DataCollatorForTextPairs(tokenizer)(features)["labels"].tolist() == labels


def test_windows_cover_the_text_and_each_has_the_question(tiny_tokenizer):
    windows = question_windows([QUESTION, "of"], [CONTEXT, "the graph"], tiny_tokenizer, **LONG)
    assert [w.example for w in windows][-1] == 1 and len(windows) > 4
    question = tiny_tokenizer(QUESTION, add_special_tokens=False)["input_ids"]
    seen = set()
    for window in windows[:-1]:
        assert len(window.offsets) <= 32 and window.inputs["input_ids"][1 : 1 + len(question)] == question
        seen.update(map(tuple, window.offsets[window.in_text].tolist()))
    words = tiny_tokenizer(CONTEXT, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    assert seen == set(words)


def test_answers_are_at_their_tokens_or_at_the_first(tiny_tokenizer, log):
    answers = {"learning in": CONTEXT.index("learning"), None: 0, CONTEXT.strip(): 0}
    batch = {"id": ["a", "b", "c"], "question": [QUESTION] * 3, "context": [CONTEXT] * 3}
    batch["answers"] = [
        {"text": [text], "answer_start": [start]} if text else {"text": [], "answer_start": []}
        for text, start in answers.items()
    ]
    rows = tokenize_questions(batch, tiny_tokenizer, **LONG)
    assert "1 of 3 answers" in log.text
    windows = question_windows(batch["question"], batch["context"], tiny_tokenizer, **LONG)
    found = set()
    for window, first, last in zip(windows, rows["start_positions"], rows["end_positions"], strict=True):
        if last:
            found.add((window.example, CONTEXT[window.offsets[first, 0] : window.offsets[last, 1]]))
        else:
            assert first == 0
    assert found == {(0, "learning in")}
    assert answer_tokens(windows[0], (10_000, 10_004)) == (0, 0)
