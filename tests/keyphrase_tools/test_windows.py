"""Windows of long documents, the alignment of sub-tokens with words, and the collection of word probabilities."""

import copy
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModel, AutoModelForTokenClassification, PreTrainedTokenizer

from keyphrase_tools.pipeline_keyphrase_extraction import KeyphraseExtractionPipeline
from keyphrase_tools.token_classifiers import known_limit
from lexperts_lite.windows import (
    Window,
    WordProbabilities,
    check_window,
    encode_windows,
    find_word_starts,
    replace_surrogates,
)
from lexperts_lite.words import split_words


class SlowTokenizer(PreTrainedTokenizer):
    """A letter a piece, in Python."""

    def __init__(self, **kwargs):
        super().__init__(unk_token="?", pad_token="0", **kwargs)

    vocab_size = 26

    def get_vocab(self):
        return {chr(97 + i): i for i in range(26)}

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return ord(token) - 97

    def _convert_id_to_token(self, index):
        return chr(97 + index)


def spans_of(text):
    return [(start, end) for _, start, end in split_words(text)]


def windows_of(tokenizer, *texts, **options):
    return encode_windows(texts, [spans_of(text) for text in texts], tokenizer, **options)


def starts_of(offsets, spans, **options):
    """`find_word_starts` of sub-tokens that are all real."""
    offsets = np.array(offsets)
    return find_word_starts(offsets, np.arange(len(offsets)), np.array(spans), **{"is_first": True, **options}).tolist()


# ---- cutting


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 150), st.integers(4, 30), st.data())
def test_windows_are_the_documents_pieces_with_the_overlap_asked_for(tiny_tokenizer, pieces, max_length, data):
    room = max_length - 2
    overlap = data.draw(st.integers(0, room - 1))
    text = " ".join("abcdefgh"[i % 8] for i in range(pieces))
    ids = tiny_tokenizer(text, add_special_tokens=False, truncation=False)["input_ids"]
    windows = windows_of(tiny_tokenizer, text, max_length=max_length, overlap=overlap)
    for number, window in enumerate(windows):
        begin = number * (room - overlap)
        cls, *inside, sep = window.inputs["input_ids"]
        assert (cls, sep) == (tiny_tokenizer.cls_token_id, tiny_tokenizer.sep_token_id)
        assert inside == ids[begin : begin + room]
        assert window.word_starts.tolist() == [-1, *range(begin, begin + len(inside)), -1]
    assert begin + room >= pieces > begin - overlap or pieces == 0  # the end is reached, and no window is needless


def test_no_tokens_of_one_document_are_in_anothers_windows(tiny_tokenizer):
    long = "graph cuts " * 60
    alone = [windows_of(tiny_tokenizer, text) for text in (long, "x", long)]
    together = windows_of(tiny_tokenizer, long, "x", long)
    assert [window.inputs for window in together] == [window.inputs for part in alone for window in part]
    assert Counter(window.document for window in together) == {0: len(alone[0]), 1: 1, 2: len(alone[2])}
    for one, other in zip(together, [window for part in alone for window in part], strict=True):
        assert (one.edge_distance == other.edge_distance).all() and (one.word_starts == other.word_starts).all()


def test_no_documents_make_no_windows_and_an_empty_one_makes_one(tiny_tokenizer):
    assert encode_windows([], [], tiny_tokenizer) == []
    for text in ("", " \n", "\u0000"):
        (window,) = windows_of(tiny_tokenizer, text)
        assert window.word_starts.tolist() == [-1, -1]


def test_the_side_on_which_a_tokenizer_truncates_changes_nothing(tiny_tokenizer):
    left = copy.deepcopy(tiny_tokenizer)
    left.truncation_side = "left"
    text = " ".join("abcdefgh"[i % 8] for i in range(150))
    for one, other in zip(windows_of(tiny_tokenizer, text), windows_of(left, text), strict=True):
        assert one.inputs == other.inputs
        assert one.word_starts.tolist() == other.word_starts.tolist()
        assert one.edge_distance.tolist() == other.edge_distance.tolist()


def test_hyphens_stay_visible_to_the_model_though_they_begin_no_word(tiny_tokenizer):
    (window,) = windows_of(tiny_tokenizer, "graph-cuts")
    assert tiny_tokenizer.convert_ids_to_tokens(window.inputs["input_ids"]) == ["[CLS]", "graph", "-", "cuts", "[SEP]"]
    assert window.word_starts.tolist() == [-1, 0, -1, 1, -1]


# ---- arguments


@pytest.mark.parametrize("options, shown", [
    ({"max_length": 2}, "max_length=2"), ({"overlap": 62}, "overlap=62 .*max_length=64"), ({"overlap": -1}, "overlap=-1"),
    ({"max_length": 10, "overlap": 8}, "overlap=8 .*max_length=10"), ({"titles": ["graph"], "overlap": 60}, "overlap=60"),
])  # fmt: skip
def test_arguments_that_leave_no_room_are_named(tiny_tokenizer, options, shown):
    with pytest.raises(ValueError, match=shown):
        windows_of(tiny_tokenizer, "graph", **options)


def test_a_slow_tokenizer_and_one_without_a_limit_are_refused(tiny_tokenizer):
    with pytest.raises(ValueError, match="SlowTokenizer"):
        windows_of(SlowTokenizer(), "graph", max_length=10)
    boundless = copy.deepcopy(tiny_tokenizer)
    boundless.model_max_length = int(1e30)
    with pytest.raises(ValueError, match="model_max_length"):
        windows_of(boundless, "graph")
    assert len(windows_of(boundless, "graph " * 30, max_length=10)) > 1


@pytest.mark.parametrize("max_length", [3, 4, 5, 64])
def test_the_default_overlap_is_a_quarter_and_always_fits(tiny_tokenizer, max_length):
    _, overlap = check_window(tiny_tokenizer, max_length, None, 0)
    assert overlap == min(max_length // 4, max_length - 3)
    check_window(tiny_tokenizer, max_length, overlap, 0)


# ---- which sub-token begins which word


def test_a_words_later_pieces_and_the_pieces_between_words_begin_none():
    # "xyz-ab c" as x yz - a b c
    offsets = [(0, 1), (1, 3), (3, 4), (4, 5), (5, 6), (7, 8)]
    assert starts_of(offsets, [(0, 3), (4, 6), (7, 8)]) == [0, -1, -1, 1, -1, 2]


def test_a_piece_that_covers_two_words_begins_the_first():
    assert starts_of([(0, 7), (7, 9)], [(0, 3), (4, 7), (8, 9)]) == [0, 2]


def test_a_piece_that_takes_the_space_before_its_word_begins_it():
    assert starts_of([(0, 3), (3, 7), (7, 9)], [(0, 3), (4, 9)]) == [0, 1, -1]
    assert starts_of([(3, 7), (7, 9)], [(0, 3), (4, 9)], is_first=False) == [1, -1]


def test_a_later_window_that_starts_inside_a_word_does_not_begin_it():
    offsets, spans = [(2, 4), (4, 6), (7, 9)], [(0, 6), (7, 9)]
    assert starts_of(offsets, spans, is_first=False) == [-1, -1, 1]
    # negative control: at a word's first character it does
    assert starts_of([(0, 2), *offsets], spans, is_first=False) == [0, -1, -1, 1]


def test_pieces_of_no_width_begin_nothing():
    assert starts_of([(0, 0), (0, 2), (2, 2)], [(0, 2)]) == [-1, 0, -1]


def test_special_tokens_begin_nothing_though_their_offsets_touch_the_first_word():
    offsets = np.array([(0, 1), (0, 1), (0, 1)])
    assert find_word_starts(offsets, np.array([1]), np.array([(0, 1)]), is_first=True).tolist() == [-1, 0, -1]


def test_the_distance_counts_to_the_nearer_cut_and_a_documents_end_is_no_cut(tiny_tokenizer):
    far = np.iinfo(np.int64).max
    windows = windows_of(tiny_tokenizer, "graph " * 15, max_length=7, overlap=0)
    distances = [window.edge_distance[1:-1].tolist() for window in windows]
    assert distances == [[4, 3, 2, 1, 0], [0, 1, 2, 1, 0], [0, 1, 2, 3, 4]]
    assert windows_of(tiny_tokenizer, "graph cut")[0].edge_distance[1:-1].tolist() == [far] * 2


# ---- whose say counts


def hand_made_windows(words, room, overlap):
    """Windows over a document whose words are one sub-token each, without special tokens."""
    windows, begin = [], 0
    while True:
        end = min(begin + room, words)
        place = np.arange(begin, end)
        left = place - begin if begin else np.full(len(place), 10**9)
        right = end - 1 - place if end < words else np.full(len(place), 10**9)
        windows.append(Window(0, {}, place, np.minimum(left, right)))
        if end == words:
            return windows
        begin += room - overlap


def marked(window, number):
    """Probabilities that tell which window they are of."""
    return np.tile([1 - number / 100, number / 100, 0.0], (len(window.word_starts), 1))


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("overlap", [0, 3, 6, 17])
def test_over_twenty_windows_each_word_is_read_where_it_stands_furthest_from_a_cut(overlap, order):
    room, step = 20, 20 - overlap
    words = 19 * step + room
    windows = hand_made_windows(words, room, overlap)
    assert len(windows) == 20
    word_probabilities = WordProbabilities([words])
    for number, window in list(enumerate(windows))[::order]:
        window.number = number
        word_probabilities.add(window, marked(window, number))
    chosen = (word_probabilities.document(0)[:, 1] * 100).round().astype(int)
    for word in range(words):
        to_cut = {}
        for number in range(20):
            begin, end = number * step, number * step + room
            if begin <= word < end:
                edges = [word - begin] * (begin > 0) + [end - 1 - word] * (end < words)
                to_cut[number] = min(edges)
        furthest = max(to_cut.values())
        assert chosen[word] == min(number for number, distance in to_cut.items() if distance == furthest)
    # negative control: neither the first nor the last window that holds a word is always the chosen one
    if overlap > 1:
        assert len(set(chosen)) == 20
        assert any(chosen[word] != word // step for word in range(words))


def test_probabilities_of_one_document_do_not_affect_another():
    word_probabilities = WordProbabilities([2, 2])
    word_probabilities.add(
        Window(1, {}, np.array([0, 1]), np.array([5, 5])), np.array([[0.1, 0.9, 0.0], [0.2, 0.0, 0.8]])
    )
    assert word_probabilities.document(1).tolist() == [[0.1, 0.9, 0.0], [0.2, 0.0, 0.8]]
    assert word_probabilities.document(0).argmax(-1).tolist() == [0, 0]


def labels_of(tokenizer, text, *piece_probabilities):
    """Labels of a text's words from the probabilities of its sub-tokens."""
    (window,) = windows_of(tokenizer, text)
    word_probabilities = WordProbabilities([len(split_words(text))])
    word_probabilities.add(window, np.array([[0.0, 1.0, 0.0], *piece_probabilities, [0.0, 1.0, 0.0]]))
    return word_probabilities.document(0).argmax(-1).tolist()


@pytest.mark.parametrize(
    "first_word, labels",
    [
        ([0.1, 0.8, 0.1], [1, 2, 2]),
        ([0.1, 0.2, 0.7], [2, 2, 2]),
        ([0.8, 0.1, 0.1], [0, 0, 0]),
        ([0.4, 0.3, 0.3], [0, 0, 0]),  # B and I together are likelier than O, but the first word is labelled O
        ([0.36, 0.34, 0.3], [0, 0, 0]),
    ],
)
def test_words_that_share_a_piece_go_on_as_the_first_of_them(tiny_tokenizer, first_word, labels):
    three_words = "\u0e44\u0e17\u0e22"  # a word a letter to us, one unknown piece to the tokenizer
    assert labels_of(tiny_tokenizer, three_words, first_word) == labels


def test_a_word_that_the_tokenizer_drops_is_part_of_no_phrase(tiny_tokenizer):
    begins, goes_on = [0.1, 0.8, 0.1], [0.1, 0.1, 0.8]
    assert labels_of(tiny_tokenizer, "graph cuts", begins, goes_on) == [1, 2]
    assert labels_of(tiny_tokenizer, "graph cuts \ufffd", begins, goes_on) == [1, 2, 0]


def test_a_document_whose_first_word_has_no_piece_begins_with_no_phrase():
    assert WordProbabilities([2]).document(0).argmax(-1).tolist() == [0, 0]


# ---- texts no tokenizer would read


@settings(max_examples=200, deadline=None)
@given(st.text(st.one_of(st.characters(exclude_categories=()), st.sampled_from("\ud800\udfffab🙂\u0000")), max_size=20))
def test_lone_surrogates_are_replaced_one_for_one_and_nothing_else_is(text):
    read = replace_surrogates(text)
    read.encode("utf-8")
    assert len(read) == len(text)
    assert all(a == b or (b == "\ufffd" and "\ud800" <= a <= "\udfff") for a, b in zip(text, read, strict=True))


SMALL = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
BACKBONES = {  # (type of model, its fields, its limit)
    "t5": ({"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 1, "vocab_size": 20}, None),
    "xlnet": ({"d_model": 8, "n_layer": 1, "n_head": 1, "d_inner": 8, "vocab_size": 20}, None),
    "led": (
        {"d_model": 8, "vocab_size": 20, "attention_window": 4, "max_decoder_position_embeddings": 24}
        | {"max_encoder_position_embeddings": 96, "encoder_layers": 1, "decoder_layers": 1}
        | {"encoder_attention_heads": 1, "decoder_attention_heads": 1},
        96,
    ),
    "longformer": (SMALL | {"max_position_embeddings": 98, "pad_token_id": 1, "attention_window": 4}, 96),
    "deberta-v2": (
        SMALL | {"max_position_embeddings": 96, "relative_attention": True, "position_biased_input": False},
        96,
    ),
    "modernbert": (SMALL | {"max_position_embeddings": 96, "pad_token_id": 1}, 96),
}


@pytest.mark.parametrize("kind", BACKBONES)
def test_a_window_is_as_long_as_model_and_tokenizer_allow(kind, tiny_tokenizer):
    fields, limit = BACKBONES[kind]
    model = AutoModel.from_config(AutoConfig.for_model(kind, **fields))
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.model_max_length = int(1e30)
    assert known_limit(tokenizer, model) == limit
    tokenizer.model_max_length = 48
    assert known_limit(tokenizer, model) == 48


def test_without_a_limit_a_window_is_as_long_as_asked(tiny_tokenizer):
    fields, _ = BACKBONES["xlnet"]
    config = AutoConfig.for_model("xlnet", **fields, id2label={0: "O", 1: "B", 2: "I"})
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.model_max_length = int(1e30)
    extract = KeyphraseExtractionPipeline(AutoModelForTokenClassification.from_config(config), tokenizer)
    assert [extract.preprocess(["graph"], max_length=asked).max_length for asked in (None, 16, 2048)] == [512, 16, 2048]
