"""pipeline("keyphrase-extraction"): every kind of input, documents of any length, deterministic results."""

import copy
import itertools

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import pipeline

from keyphrase_tools import KeyphraseExtractionPipeline
from lexperts_lite.call_options import OPTIONS
from lexperts_lite.clean import CleanText, clean
from lexperts_lite.words import split_words
from tests.keyphrase_tools.known_answers import LETTERS, TEXT, assert_same, names, random_text

# ---- what goes in and comes out


def test_a_text_gives_a_list_of_phrases_with_places_and_mentions(lookup):
    answer = lookup()("x bx in b ix; bx p")
    assert names(answer) == ["bx", "b ix", "p"]
    assert answer[0]["mentions"] == [
        {"start": 2, "end": 4, "score": answer[0]["score"]},
        {"start": 14, "end": 16, "score": answer[0]["score"]},
    ]
    p_b = np.exp(9) / (np.exp(9) + np.exp(3) + 1)
    assert answer[0]["score"] == pytest.approx(p_b, abs=1e-6)
    assert [set(phrase) for phrase in answer] == [{"keyphrase", "score", "start", "end", "mentions"}] * 3


TEXTS = [TEXT, "", random_text(30), "bx"]


def test_lists_and_tuples_give_lists_in_order(extract):
    expected = [extract(text) for text in TEXTS]
    assert any(expected) and expected[1] == []
    assert_same(extract(TEXTS), expected)
    assert_same(extract(tuple(TEXTS)), expected)
    assert isinstance(extract(tuple(TEXTS)), list)
    assert extract([]) == [] and extract(()) == []


@pytest.mark.parametrize("kind", ["generator", "column", "iterator", "dict values"])
def test_other_iterables_give_an_iterator_in_order(extract, kind):
    documents = {
        "generator": lambda: (text for text in TEXTS),
        "column": lambda: Dataset.from_dict({"text": TEXTS})["text"],
        "iterator": lambda: map(str, TEXTS),
        "dict values": lambda: dict(enumerate(TEXTS)).values(),
    }
    answers = extract(documents[kind]())
    assert iter(answers) is answers
    assert_same(list(answers), [extract(text) for text in TEXTS])


def test_a_generator_is_read_lazily(lookup):
    read = []

    def documents():
        for number in range(500):
            read.append(number)
            yield f"b{LETTERS[number % 20]} x"

    answers = lookup()(documents(), batch_size=2)
    assert read == []
    first = [names(answer) for answer in itertools.islice(answers, 40)]
    assert first == [[f"b{LETTERS[i % 20]}"] for i in range(40)]
    assert 40 <= len(read) < 100


@pytest.mark.parametrize("document, shown", [
    (["graph", "cuts"], "'graph', 'cuts'"), (b"graph", "b'graph'"), ({"title": "x"}, "text of document {}"), ({"text": "x", "body": "y"}, "'body'"),
    ({"title": 5, "text": "x"}, "title of document {} is 5"), ({"text": 0.5}, "0.5"),
])  # fmt: skip
def test_what_is_no_document_is_named_with_its_number(lookup, document, shown):
    for number in (0, 700):
        documents = ["graph"] * number + [document]
        for inputs in (documents, iter(documents)):
            with pytest.raises(TypeError, match=f"ocument {number} .*|{shown}") as error:
                list(lookup()(inputs))
            assert shown.format(number) in str(error.value)


def test_a_table_is_named_and_its_columns_and_rows_are_read(lookup):
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"title": ["b", None], "text": ["x", "p"]}).astype(object).where(lambda t: t.notna(), None)
    with pytest.raises(TypeError, match="to_dict"):
        lookup()(table)
    assert [names(answer) for answer in lookup()(table["text"])] == [[], ["p"]]
    assert [names(answer) for answer in lookup()(table.to_dict("records"))] == [["b"], ["p"]]


@pytest.mark.parametrize("inputs", [None, 5, b"graph", {"title": "graph"}], ids=repr)
def test_inputs_that_are_no_texts_are_refused_at_once(lookup, inputs):
    with pytest.raises(TypeError, match="text"):
        lookup()(inputs)


# ---- any text


unicode_texts = st.text(
    st.one_of(
        st.sampled_from(
            [*"ab12 -/.,'’\n\u0000\ufffd", *"e\u0301\u0327\u00adשלוםאב\u202e日本ไย🙂👩\u200d🔬🇸🇮\ud800\udfffßİ"]
        ),
        st.characters(exclude_categories=()),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@example("שלום עולם, graph cuts")
@example("cafe\u0301 cre\u0300me \ud800 graph\udfff cuts \u0000x")
@example("👩\u200d🔬🇸🇮 深層学習 ไทย \ufffd graph \ufffd")
@given(unicode_texts)
def test_every_mention_is_a_piece_of_the_text_from_a_words_start_to_a_words_end(extract, text):
    source = CleanText(text)
    words = [source.source_span(start, end) for _, start, end in split_words(source.text)]
    starts, ends = {start for start, _ in words}, {end for _, end in words}
    for phrase in extract(text, top_k=None):
        piece = text[phrase["start"] : phrase["end"]].replace("\u00ad", "")
        assert phrase["keyphrase"] and clean(" ".join(piece.split())) == phrase["keyphrase"]
        assert 0 <= phrase["score"] <= 1
        for mention in phrase["mentions"]:
            assert mention["start"] in starts and mention["end"] in ends


@pytest.mark.parametrize("text", ["", " \n\t", "\u0000", "...", "?! (;) --- / ' 🙂", "\ud800"])
def test_a_text_without_words_has_no_keyphrases(extract, lookup, text):
    everything = lookup()
    everything.model.table.data[:] = torch.tensor([0.0, 5.0, 0.0])
    assert extract(text) == everything(text) == []


def test_a_sign_that_the_tokenizer_drops_takes_no_keyphrase_with_it(lookup):
    assert names(lookup()("x bx ix \ufffd x")) == ["bx ix"]


# ---- texts from PDFs and web pages


@pytest.mark.parametrize(
    "text, expected",
    [
        ("x bx\n\t ix, c", [("bx ix", "bx\n\t ix")]),
        ("x bx i-\nix, c", [("bx i-ix", "bx i-\nix")]),
        ("x bx ijz-\nxx, c", [("bx ijzxx", "bx ijz-\nxx")]),
        ("x ba\u00adb\u00ad\n  cc x", [("babcc", "ba\u00adb\u00ad\n  cc")]),
        ("x b&nbsp;i b&ouml;i x", [("b i", "b&nbsp;i"), ("böi", "b&ouml;i")]),
        ("x b &amp; i &lt; p &gt; c", [("b", "b"), ("i", "i"), ("p", "p")]),
    ],
)
def test_keyphrases_are_clean_and_their_places_are_those_in_the_text(lookup, text, expected):
    answer = lookup()(text)
    places = sorted((phrase["start"], phrase["end"], phrase["keyphrase"]) for phrase in answer)
    assert [(keyphrase, text[start:end]) for start, end, keyphrase in places] == expected


def test_the_model_reads_joined_words(lookup):
    hyphenated, whole = "the net-\nworks of learn\u00ading &amp; graph", "the networks of learning & graph"
    extract = lookup()
    (one,), (other,) = (extract.preprocess([text]).windows for text in (hyphenated, whole))
    assert one.inputs == other.inputs


@pytest.mark.parametrize("word", ["nbsp", "amp", "lt"])
def test_an_entitys_name_is_no_keyphrase(lookup, word):
    everything = lookup()
    everything.model.table.data[:] = torch.tensor([0.0, 5.0, 0.0])  # every word begins a phrase
    assert names(everything(f"graph&{word};cut")) == ["graph", "cut"]


def test_without_nested_keyphrases_the_better_of_two_is_returned(lookup):
    text = "bx jx, bx, px"
    everything = names(lookup()(text))
    assert everything == ["bx", "bx jx", "px"]
    assert names(lookup()(text, nested=False)) == ["bx", "px"] == names(lookup(nested=False)(text, top_k=2))
    assert names(lookup(nested=False)(text, nested=True)) == everything


# ---- the same answer


@pytest.mark.parametrize("name", ["bert", "deberta-v2", "modernbert"])
def test_a_document_has_the_same_answer_alone_and_in_a_mixed_batch(sharp_seke, tiny_tokenizer, name):
    extract = KeyphraseExtractionPipeline(sharp_seke(name), tiny_tokenizer, top_k=None)
    documents = [TEXT, random_text(3), random_text(200, 1), "", random_text(40, 2), "graph"]
    alone = [extract(document) for document in documents]
    assert_same(extract(documents, batch_size=6), alone)
    assert sum(map(bool, alone)) >= 4 and alone[2] != alone[4]


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_the_batch_size_does_not_change_the_answer(extract, batch_size):
    documents = [random_text(1 + 11 * (i % 9), i) for i in range(25)]
    assert_same(extract(documents, batch_size=batch_size, top_k=None), extract(documents, top_k=None))


def test_few_long_documents_are_prepared_at_once(lookup):
    read = []

    def documents():
        for number in range(20):
            read.append(number)
            yield "x " * 8_000 + "b"

    first = next(lookup()(documents(), batch_size=1))
    assert names(first) == ["b"] and len(read) <= 3


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


@pytest.mark.parametrize("name", ["bert", "deberta-v2", "modernbert"])
def test_a_tokenizer_that_pads_on_the_left_gives_the_same_answer(sharp_seke, tiny_tokenizer, name):
    left = copy.deepcopy(tiny_tokenizer)
    left.padding_side = "left"
    model, documents = sharp_seke(name), [TEXT, random_text(5), random_text(150)]
    expected = KeyphraseExtractionPipeline(model, tiny_tokenizer)(documents)
    assert all(expected)
    assert_same(KeyphraseExtractionPipeline(model, left)(documents), expected)


def test_a_model_left_in_train_mode_answers_as_in_eval_mode(sharp_seke, tiny_tokenizer):
    model = sharp_seke()
    extract = KeyphraseExtractionPipeline(model, tiny_tokenizer)
    expected = extract(TEXT)
    inputs = tiny_tokenizer(TEXT, return_tensors="pt")
    model.train()
    assert not torch.equal(model(**inputs).logits, model(**inputs).logits)  # dropout and the router's noise are at work
    assert extract(TEXT) == expected
    model.train()
    assert list(extract(iter([TEXT]))) == [expected]


def test_a_saved_model_answers_the_same_from_its_folder(sharp_seke, tiny_tokenizer, extract, tmp_path):
    sharp_seke().save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    assert pipeline("keyphrase-extraction", model=str(tmp_path))(TEXT) == extract(TEXT)


# ---- choosing


def test_the_best_come_first_and_ties_go_to_the_earlier_phrase(lookup):
    answer = lookup()("p px b x bx i")
    assert names(answer) == ["b", "bx i", "p", "px"]
    scores = [phrase["score"] for phrase in answer]
    assert scores[0] == scores[1] > scores[2] == scores[3]


def test_top_k_cuts_the_ranked_list(extract):
    text = random_text(100)
    everything = extract(text, top_k=None)
    assert len(everything) > 10
    assert extract(text) == everything[:10]
    assert extract(text, top_k=3) == everything[:3]
    assert extract(text, top_k=10**6) == everything


def test_min_score_leaves_out_what_is_below_it_before_top_k_cuts(extract):
    text = random_text(100)
    everything = extract(text, top_k=None)
    middle = everything[len(everything) // 2]["score"]
    sure = [phrase for phrase in everything if phrase["score"] >= middle]
    assert 1 < len(sure) < len(everything)
    assert extract(text, top_k=None, min_score=middle) == sure
    assert extract(text, top_k=1, min_score=middle) == everything[:1]
    assert extract(text, min_score=1.0) == []


def test_options_of_the_pipeline_are_defaults_that_a_call_overrides(lookup):
    text = "b p"
    one = lookup(top_k=1, min_score=0.5)
    assert names(one(text)) == ["b"]
    assert names(one(text, top_k=None)) == ["b", "p"]
    assert names(one(text, top_k=None, min_score=0.95)) == ["b"]
    assert names(one(text)) == ["b"]


def test_an_unknown_option_is_named_with_the_valid_ones(lookup):
    message = f"'aggregation_strategy'.*{', '.join(sorted([*OPTIONS, 'batch_size']))}"
    with pytest.raises(TypeError, match=message):
        lookup()("b", aggregation_strategy="simple")
    with pytest.raises(TypeError, match=message):
        lookup(aggregation_strategy="simple")
