"""Windows of long documents, the alignment of sub-tokens with words, and the collection of word probabilities."""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModel, AutoModelForTokenClassification, PreTrainedTokenizer

from keyphrase_tools.pipeline_keyphrase_extraction import KeyphraseExtractionPipeline
from keyphrase_tools.token_classifiers import known_limit
from lexperts_lite.windows import WordProbabilities, encode_windows, find_word_starts
from lexperts_lite.words import split_words

FAR = np.iinfo(np.int64).max


def windows_of(tokenizer, *texts, **options):
    spans = [[(start, end) for _, start, end in split_words(text)] for text in texts]
    return encode_windows(texts, spans, tokenizer, **options)


def without_limit(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.model_max_length = int(1e30)
    return tokenizer


# ---- cutting


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 150), st.integers(3, 30), st.data())
def test_windows_are_the_documents_pieces_with_the_overlap_and_the_distance_to_the_nearer_cut(
    tiny_tokenizer, pieces, max_length, data
):
    room = max_length - 2
    overlap = data.draw(st.none() | st.integers(0, room - 1))
    text = " ".join("abcdefgh"[i % 8] for i in range(pieces))
    ids = tiny_tokenizer(text, add_special_tokens=False, truncation=False)["input_ids"]
    windows = windows_of(tiny_tokenizer, text, max_length=max_length, overlap=overlap)
    overlap = min(max_length // 4, room - 1) if overlap is None else overlap
    for number, window in enumerate(windows):
        begin = number * (room - overlap)
        cls, *inside, sep = window.inputs["input_ids"]
        assert (cls, sep) == (tiny_tokenizer.cls_token_id, tiny_tokenizer.sep_token_id)
        assert inside == ids[begin : begin + room] and window.number == number
        assert window.word_starts.tolist() == [-1, *range(begin, begin + len(inside)), -1]
        to_start = [i if number else FAR for i in range(len(inside))]
        to_end = [FAR if number == len(windows) - 1 else len(inside) - 1 - i for i in range(len(inside))]
        assert window.edge_distance[1:-1].tolist() == list(map(min, to_start, to_end))
    assert begin + room >= pieces > begin - overlap or pieces == 0  # the end is reached, and no window is needless


def test_no_tokens_of_one_document_are_in_anothers_windows(tiny_tokenizer):
    texts = ["graph cuts " * 60, "x", "", "graph cuts " * 60]
    alone = [windows_of(tiny_tokenizer, text) for text in texts]
    left = copy.deepcopy(tiny_tokenizer)
    left.truncation_side = "left"  # changes nothing
    for tokenizer in (tiny_tokenizer, left):
        together = windows_of(tokenizer, *texts)
        assert [window.document for window in together] == [n for n, part in enumerate(alone) for _ in part]
        for one, other in zip(together, [window for part in alone for window in part], strict=True):
            assert one.inputs == other.inputs
            assert (one.edge_distance == other.edge_distance).all() and (one.word_starts == other.word_starts).all()
    assert encode_windows([], [], tiny_tokenizer) == []


class SlowTokenizer(PreTrainedTokenizer):
    vocab_size = 1

    def get_vocab(self):
        return {"a": 0}


@pytest.mark.parametrize("options, shown", [
    ({"max_length": 2}, "max_length=2"), ({"overlap": 62}, "overlap=62 .*max_length=64"), ({"overlap": -1}, "overlap=-1"),
    ({"titles": ["graph"], "overlap": 60}, "overlap=60"), ({"tokenizer": SlowTokenizer, "max_length": 10}, "SlowTokenizer"),
    ({"tokenizer": without_limit}, "model_max_length"),
])  # fmt: skip
def test_arguments_that_cannot_work_are_named(tiny_tokenizer, options, shown):
    make = options.pop("tokenizer", None)
    tokenizer = SlowTokenizer() if make is SlowTokenizer else make(tiny_tokenizer) if make else tiny_tokenizer
    with pytest.raises(ValueError, match=shown):
        windows_of(tokenizer, "graph", **options)


# ---- which sub-token begins which word


@pytest.mark.parametrize("offsets, spans, is_first, expected", [
    ([(0, 1), (1, 3), (3, 4), (4, 5), (5, 6), (7, 8)], [(0, 3), (4, 6), (7, 8)], True, [0, -1, -1, 1, -1, 2]),  # "xyz-ab c"
    ([(0, 7), (7, 9)], [(0, 3), (4, 7), (8, 9)], True, [0, 2]),  # a piece of two words begins the first
    ([(0, 3), (3, 7), (7, 9)], [(0, 3), (4, 9)], True, [0, 1, -1]),  # a piece begins with the space before its word
    ([(3, 7), (7, 9)], [(0, 3), (4, 9)], False, [1, -1]),
    ([(2, 4), (4, 6), (7, 9)], [(0, 6), (7, 9)], False, [-1, -1, 1]),  # a later window begins inside a word
    ([(0, 2), (2, 4), (7, 9)], [(0, 6), (7, 9)], False, [0, -1, 1]),  # and here at its first character
    ([(0, 0), (0, 2), (2, 2)], [(0, 2)], True, [-1, 0, -1]),  # pieces of no width
    ([(0, 2)], [], True, [-1]),
])  # fmt: skip
def test_the_first_piece_of_a_word_begins_it(offsets, spans, is_first, expected):
    offsets, spans = np.array(offsets), np.array(spans).reshape(-1, 2)
    found = find_word_starts(offsets, np.arange(len(offsets)), spans, is_first=is_first)
    assert found.tolist() == expected


# ---- whose probabilities count


@pytest.mark.parametrize("overlap", [0, 3, 6])
def test_a_word_is_read_where_it_is_furthest_from_a_cut_or_else_first_in_any_order(tiny_tokenizer, overlap):
    windows = windows_of(tiny_tokenizer, "a " * 60, max_length=14, overlap=overlap)
    places = [[(w.edge_distance[w.word_starts == i].max(initial=-1), -w.number) for w in windows] for i in range(60)]
    for order in (windows, windows[::-1]):
        probabilities = WordProbabilities([60])
        for window in order:
            probabilities.add(window, np.full((len(window.word_starts), 3), window.number))
        assert probabilities.document(0)[:, 0].tolist() == [-max(place)[1] for place in places]


@pytest.mark.parametrize("first_word, labels", [
    ([0.1, 0.8, 0.1], [1, 2, 2]), ([0.1, 0.2, 0.7], [2, 2, 2]), ([0.8, 0.1, 0.1], [0, 0, 0]),
    ([0.4, 0.3, 0.3], [0, 0, 0]),  # B and I together are more likely than O, but the first word is labelled O
])  # fmt: skip
@pytest.mark.parametrize("with_tags", [False, True])
def test_words_that_share_a_piece_continue_as_the_first_of_them(tiny_tokenizer, first_word, labels, with_tags):
    (window,) = windows_of(tiny_tokenizer, "\u0e44\u0e17\u0e22")  # three words, one unknown piece to the tokenizer
    probabilities, rows = WordProbabilities([3]), np.array([[0.0, 1.0, 0.0], first_word, [0.0, 1.0, 0.0]])
    assert probabilities.tags(0) is None
    tags = np.array([1, labels[0], 1]) if with_tags else None
    probabilities.add(window, rows, tags, rows)
    found = probabilities.tags(0) if with_tags else probabilities.document(0).argmax(-1)
    assert found.tolist() == labels
    np.testing.assert_allclose(probabilities.classes(0), [first_word] * 3, atol=1e-6)


# ---- the longest window

SMALL = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
XLNET = {"d_model": 8, "n_layer": 1, "n_head": 1, "d_inner": 8, "vocab_size": 20}
BACKBONES = {  # (type of model, its fields, its limit)
    "xlnet": (XLNET, None),
    "led": (
        {"d_model": 8, "vocab_size": 20, "attention_window": 4, "max_decoder_position_embeddings": 24}
        | {"max_encoder_position_embeddings": 96, "encoder_layers": 1, "decoder_layers": 1}
        | {"encoder_attention_heads": 1, "decoder_attention_heads": 1},
        96,
    ),
    "deberta-v2": (
        SMALL | {"max_position_embeddings": 96, "relative_attention": True, "position_biased_input": False},
        96,
    ),
}


@pytest.mark.parametrize("kind", BACKBONES)
def test_a_window_is_as_long_as_model_and_tokenizer_allow(kind, tiny_tokenizer):
    fields, limit = BACKBONES[kind]
    model = AutoModel.from_config(AutoConfig.for_model(kind, **fields))
    tokenizer = without_limit(tiny_tokenizer)
    assert known_limit(tokenizer, model) == limit
    tokenizer.model_max_length = 48
    assert known_limit(tokenizer, model) == 48


def test_without_a_limit_a_window_is_as_long_as_asked(tiny_tokenizer):
    config = AutoConfig.for_model("xlnet", **XLNET, id2label={0: "O", 1: "B", 2: "I"})
    model = AutoModelForTokenClassification.from_config(config)
    extract = KeyphraseExtractionPipeline(model, without_limit(tiny_tokenizer))
    assert [extract.preprocess(["graph"], max_length=asked).max_length for asked in (None, 16, 2048)] == [512, 16, 2048]
