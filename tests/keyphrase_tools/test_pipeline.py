"""pipeline("keyphrase-extraction"): every kind of input, deterministic results, choosing among phrases."""

import copy
import itertools

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import pipeline

from keyphrase_tools import KeyphraseExtractionPipeline

from .known_answers import LETTERS, TEXT, assert_same, names, random_text

TEXTS = [TEXT, "", random_text(30), "bx"]

# ---- what goes in and comes out


def test_a_text_gives_a_list_of_phrases_with_places_and_mentions(lookup):
    answer = lookup()("x bx in b ix; bx p \ufffd")
    assert names(answer) == ["bx", "b ix", "p"]
    score = answer[0]["score"]
    assert answer[0]["mentions"] == [{"start": start, "end": start + 2, "score": score} for start in (2, 14)]
    assert score == pytest.approx(np.exp(9) / (np.exp(9) + np.exp(3) + 1), abs=1e-6)
    assert [set(phrase) for phrase in answer] == [{"keyphrase", "score", "start", "end", "mentions"}] * 3


def test_lists_give_lists_and_other_iterables_iterators_in_order(extract):
    expected = [extract(text) for text in TEXTS]
    assert any(expected) and expected[1] == []
    for inputs in (TEXTS, tuple(TEXTS)):
        answers = extract(inputs)
        assert isinstance(answers, list)
        assert_same(answers, expected)
    assert extract([]) == [] and extract(()) == []
    columns = (text for text in TEXTS), Dataset.from_dict({"text": TEXTS})["text"], dict(enumerate(TEXTS)).values()
    for inputs in columns:
        answers = extract(inputs)
        assert iter(answers) is answers
        assert_same(list(answers), expected)


@pytest.mark.parametrize("letters, batch_size, most", [("", 2, 100), ("x " * 8_000, 1, 60)], ids=["short", "long"])
def test_a_generator_is_read_lazily_and_the_less_the_longer_its_texts(lookup, letters, batch_size, most):
    read, number = [], 2 if letters else 40

    def documents():
        for n in range(500):
            read.append(n)
            yield f"{letters}b{LETTERS[n % 20]} x"

    answers = lookup()(documents(), batch_size=batch_size)
    assert read == []
    first = [names(answer) for answer in itertools.islice(answers, number)]
    assert first == [[f"b{LETTERS[i % 20]}"] for i in range(number)]
    assert number <= len(read) < (number + 3 if letters else most)


@pytest.mark.parametrize("document, shown", [
    (["graph", "cuts"], "'graph', 'cuts'"), (b"graph", "b'graph'"), ({"title": "x"}, "text of document {}"), ({"text": "x", "body": "y"}, "'body'"),
    ({"title": 5, "text": "x"}, "title of document {} is 5"), ({"text": 0.5}, "0.5"),
])  # fmt: skip
def test_what_is_no_document_is_named_with_its_number(lookup, document, shown):
    for number in (0, 200):
        documents = ["graph"] * number + [document]
        for inputs in (documents, iter(documents)):
            with pytest.raises(TypeError, match=f"ocument {number} .*|{shown}") as error:
                list(lookup()(inputs))
            assert shown.format(number) in str(error.value)
    if not isinstance(document, list):  # by itself
        with pytest.raises(TypeError, match=shown.format(0)):
            lookup()(document)


def test_a_table_is_named_and_its_columns_and_rows_are_read(lookup):
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"title": ["b", None], "text": ["x", "p"]}).astype(object).where(lambda t: t.notna(), None)
    with pytest.raises(TypeError, match="to_dict"):
        lookup()(table)
    assert [names(answer) for answer in lookup()(table["text"])] == [[], ["p"]]
    assert [names(answer) for answer in lookup()(table.to_dict("records"))] == [["b"], ["p"]]


# ---- texts from PDFs and web pages


@pytest.mark.parametrize("text, expected", [
    ("x bx\n\t ix, c", [("bx ix", "bx\n\t ix")]), ("x bx i-\nix, c", [("bx i-ix", "bx i-\nix")]),
    ("x bx ijz-\nxx, c", [("bx ijzxx", "bx ijz-\nxx")]), ("x ba\u00adb\u00ad\n  cc x", [("babcc", "ba\u00adb\u00ad\n  cc")]),
    ("x b&nbsp;i b&ouml;i x", [("b i", "b&nbsp;i"), ("böi", "b&ouml;i")]), ("x b &amp; i &lt; p &gt; c", [("b", "b"), ("i", "i"), ("p", "p")]),
])  # fmt: skip
def test_keyphrases_are_clean_and_their_places_are_those_in_the_text(lookup, text, expected):
    places = sorted((phrase["start"], phrase["end"], phrase["keyphrase"]) for phrase in lookup()(text))
    assert [(keyphrase, text[start:end]) for start, end, keyphrase in places] == expected


def test_without_nested_keyphrases_the_better_of_two_is_returned(lookup):
    text = "bx jx, bx, px"
    everything = names(lookup()(text))
    assert everything == ["bx", "bx jx", "px"]
    assert names(lookup()(text, nested=False)) == ["bx", "px"] == names(lookup(nested=False)(text, top_k=2))
    assert names(lookup(nested=False)(text, nested=True)) == everything


# ---- the same answer


@pytest.mark.parametrize("name", ["bert", "deberta-v2", "modernbert"])
def test_a_document_has_the_same_answer_alone_in_a_batch_and_padded_on_the_left(sharp_seke, tiny_tokenizer, name):
    left, model = copy.deepcopy(tiny_tokenizer), sharp_seke(name)
    left.padding_side = "left"
    extract, padded = (
        KeyphraseExtractionPipeline(model, tokenizer, top_k=None) for tokenizer in (tiny_tokenizer, left)
    )
    documents = [TEXT, random_text(3), random_text(200, 1), "", random_text(40, 2), "graph"]
    alone = [extract(document) for document in documents]
    for batch_size in (1, 3, 64):
        assert_same(extract(documents, batch_size=batch_size), alone)
    assert_same(padded(documents, batch_size=6), alone)
    assert sum(map(bool, alone)) >= 4 and alone[2] != alone[4]


def test_short_documents_are_read_together_in_the_room_of_long_ones(extract, monkeypatch):
    shapes, forward = [], extract._forward

    def seen(batch, **kwargs):
        shapes.append(tuple(batch["input_ids"].shape))
        return forward(batch, **kwargs)

    monkeypatch.setattr(extract, "_forward", seen)
    documents = [random_text(40, i) for i in range(2)] + [random_text(n, n) for n in (15, 14, 13, 12)]
    documents += [random_text(2, i) for i in range(24)]
    extract(documents, batch_size=2)
    (first, longest), *rest = shapes
    assert first == 2 and all(n * length <= 2 * longest and 2 <= n <= 8 for n, length in rest[:-1])
    assert sum(n for n, _ in shapes) >= len(documents)  # some are read in two windows
    assert max(n for n, _ in rest) == 8  # four times as many, though more would fit


def test_a_model_left_in_train_mode_answers_as_in_eval_mode_and_as_from_its_folder(
    sharp_seke, tiny_tokenizer, tmp_path
):
    model = sharp_seke()
    extract = KeyphraseExtractionPipeline(model, tiny_tokenizer)
    expected = extract(TEXT)
    inputs = tiny_tokenizer(TEXT, return_tensors="pt")
    model.train()
    assert not torch.equal(model(**inputs).logits, model(**inputs).logits)  # dropout and the router's noise are at work
    assert extract(TEXT) == expected
    model.train()
    assert list(extract(iter([TEXT]))) == [expected]
    extract.save_pretrained(tmp_path)
    assert pipeline("keyphrase-extraction", model=str(tmp_path))(TEXT) == expected


# ---- choosing


def test_min_score_leaves_out_what_is_below_it_before_top_k_cuts(extract):
    text = random_text(100)
    everything = extract(text, top_k=None)
    assert len(everything) > 10 and extract(text) == everything[:10]
    assert extract(text, top_k=3) == everything[:3] and extract(text, top_k=10**6) == everything
    middle = everything[len(everything) // 2]["score"]
    sure = [phrase for phrase in everything if phrase["score"] >= middle]
    assert 1 < len(sure) < len(everything)
    assert extract(text, top_k=None, min_score=middle) == sure
    assert extract(text, top_k=1, min_score=middle) == everything[:1] and extract(text, min_score=1.0) == []
