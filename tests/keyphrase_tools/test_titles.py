"""Titles as meta-text: pairs and their masks, windows that contain the title, rows for training."""

import copy
import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers, processors
from transformers import DebertaV2Tokenizer, RobertaTokenizer

from keyphrase_tools.labels import tokenize_documents
from lexperts_lite.input_documents import read_document
from lexperts_lite.titles import truncate_titles
from lexperts_lite.windows import encode_windows
from lexperts_lite.words import split_words

from .known_answers import random_text

TITLE, TEXT = "Graph cuts", "the network is learning, in 802.11 of graph xyz"
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def windows_of(tokenizer, texts, titles, **options):
    spans = [[(start, end) for _, start, end in split_words(text)] for text in texts]
    return encode_windows(texts, spans, tokenizer, titles=titles, **options)


def count(tokenizer, text):
    return len(tokenizer(text, add_special_tokens=False, truncation=False)["input_ids"])


@pytest.fixture(scope="module")
def tokenizers(tiny_tokenizer):
    """BERT: one separator between title and text. RoBERTa: two. DeBERTa-v2: sub-tokens that hold the space. And no specials."""
    letters = [*LETTERS, *LETTERS.upper(), *"0123456789.,-"]
    merges = [("\u0120", "g"), ("c", "u"), ("cu", "t"), ("\u0120", "cut")]
    specials = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    pieces = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    roberta = RobertaTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges)
    unigram = [("[PAD]", 0.0), ("[CLS]", 0.0), ("[SEP]", 0.0), ("[UNK]", 0.0), ("\u2581", -3.0)]
    unigram += [(letter, -4.0) for letter in letters] + [("\u2581graph", -5.0), ("\u2581cut", -5.0)]
    deberta = DebertaV2Tokenizer(unigram, unk_id=3)
    bare = copy.deepcopy(tiny_tokenizer)
    bare.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A", pair="$A $B:1", special_tokens=[]
    )
    roberta.model_max_length = deberta.model_max_length = tiny_tokenizer.model_max_length
    return {"bert": tiny_tokenizer, "roberta": roberta, "deberta-v2": deberta, "bare": bare}


KINDS = {"bert": (1, 1), "roberta": (1, 2), "deberta-v2": (1, 1), "bare": (0, 0)}  # special tokens before and between
each_kind = pytest.mark.parametrize("kind", KINDS)


# ---- pairs and masks


@pytest.mark.parametrize("title, text, tokens, meta, main, starts", [
    ("cut", "x-graph ab", "[CLS] cut [SEP] x - graph a ##b [SEP]", "110000000", "000111110", [-1, -1, -1, 0, -1, 1, 2, -1, -1]),
    ("a [CLS]", "graph [SEP] cut", "[CLS] a [CLS] [SEP] graph [SEP] cut [SEP]", "11100000", "00001110", [-1, -1, -1, -1, 0, 1, 4, -1]),
    (" \n", "graph", "[CLS] graph [SEP]", "100", "010", [-1, 0, -1]), ("\u0000", "graph", "[CLS] graph [SEP]", "100", "010", [-1, 0, -1]),
    ("graph", "", "[CLS] graph [SEP] [SEP]", "1100", "0000", [-1] * 4), (None, "graph", "[CLS] graph [SEP]", "100", "010", [-1, 0, -1]),
])  # fmt: skip
def test_the_masks_of_a_pair_letter_by_letter(tiny_tokenizer, title, text, tokens, meta, main, starts):
    (window,) = windows_of(tiny_tokenizer, [text], [title])
    assert tiny_tokenizer.convert_ids_to_tokens(window.inputs["input_ids"]) == tokens.split()
    masks = ("".join(map(str, window.inputs[name])) for name in ("meta_mask", "main_mask"))
    assert tuple(masks) == (meta, main) and window.word_starts.tolist() == starts


# ---- windows


@each_kind
def test_each_window_of_a_long_text_has_the_title_and_a_piece_of_the_text(tokenizers, kind):
    tokenizer, (before, between) = tokenizers[kind], KINDS[kind]
    text, t = random_text(150), count(tokenizer, TITLE)
    ids = tokenizer(text, add_special_tokens=False, truncation=False)["input_ids"]
    room = 40 - t - before - between - before
    for overlap in (0, 5, 40 - 10 - 2 * before - between - 1):
        windows = windows_of(tokenizer, [text], [TITLE], max_length=40, overlap=overlap)
        for number, window in enumerate(windows):
            meta, main = (np.array(window.inputs[name], dtype=bool) for name in ("meta_mask", "main_mask"))
            row, begin = np.array(window.inputs["input_ids"]), number * (room - overlap)
            assert row[meta].tolist() == tokenizer(TITLE)["input_ids"][: before + t]
            assert row[main].tolist() == ids[begin : begin + room] and not main[: before + t + between].any()
            assert window.edge_distance[np.flatnonzero(main)[0]] == (0 if number else room - 1)
            assert (window.edge_distance[~main] == -1).all() and (window.word_starts[~main] == -1).all()
        assert begin + room >= len(ids)
        begun = [word for window in windows for word in window.word_starts if word >= 0]
        assert sorted(set(begun)) == list(range(150)) and (overlap or len(begun) == 150)


DOCUMENTS = [
    (TITLE, TEXT),
    (None, random_text(100, 1)),
    ("a b c " * 9, random_text(90, 2)),  # a title of more than a quarter of a window
    ("", ""),
    (TITLE, random_text(120, 3)),
    (None, "graph"),
]


@each_kind
def test_documents_with_and_without_titles_are_cut_as_each_alone(tokenizers, kind):
    titles, texts = zip(*DOCUMENTS, strict=True)
    together = windows_of(tokenizers[kind], texts, titles)
    alone = [windows_of(tokenizers[kind], [text], [title]) for title, text in DOCUMENTS]
    assert [window.document for window in together] == [n for n, part in enumerate(alone) for _ in part]
    for one, other in zip(together, [window for part in alone for window in part], strict=True):
        assert one.inputs == other.inputs and one.joined == other.joined
        assert (one.word_starts == other.word_starts).all() and (one.edge_distance == other.edge_distance).all()


# ---- long titles


@each_kind
@settings(max_examples=25, deadline=None)
@given(st.text("ab cutgr-\U0001f642é ", min_size=1, max_size=40), st.integers(1, 12))
def test_a_truncated_title_is_the_titles_beginning_and_no_longer_than_the_limit(tokenizers, kind, title, limit):
    (read,) = truncate_titles([title], tokenizers[kind], limit)
    length = count(tokenizers[kind], read)
    assert title.strip().startswith(read) and length <= limit
    if count(tokenizers[kind], title.strip()) <= limit:
        assert read == (title.strip() if length else "")


def test_titles_beyond_the_limit_are_cut_and_counted_in_one_warning(tiny_tokenizer, caplog):
    titles = ["a b c d e f", None, "abcdef gh", "a b c", " "]
    with caplog.at_level(logging.WARNING):
        windows = windows_of(tiny_tokenizer, ["graph"] * 5, titles, max_title_length=4)
        assert caplog.messages == ["2 of 3 titles are longer than 4 sub-tokens and were truncated."]
        read = [window.inputs["input_ids"][: sum(window.inputs["meta_mask"])] for window in windows]
        assert read == [
            tiny_tokenizer(beginning)["input_ids"][:-1] for beginning in ("a b c d", "", "abcd", "a b c", "")
        ]
        windows_of(tiny_tokenizer, ["graph"] * 5, titles)
    assert len(caplog.messages) == 1
    for max_length, kept in ((64, 10), (20, 5), (12, 3)):  # at most a quarter of a window
        window = windows_of(tiny_tokenizer, ["cuts " * 30], ["a b c d e f g h i j"], max_length=max_length)[0]
        assert sum(window.inputs["meta_mask"]) == 1 + kept
    with pytest.raises(ValueError, match="max_title_length=0"):
        windows_of(tiny_tokenizer, ["graph"], ["a"], max_title_length=0)


# ---- rows for training


def test_a_title_is_text_or_meta_text_or_both(tiny_tokenizer):
    batch = {"title": ["Graph cuts", None], "text": ["They work.", "They work."], "keyphrases": [["graph cut"]] * 2}
    rows = {way: tokenize_documents(batch, tiny_tokenizer, title_as=way) for way in ("text", "meta", "both")}
    assert rows["text"] == tokenize_documents(batch, tiny_tokenizer)
    masks = {"meta_mask", "main_mask", "word_start_mask"}
    assert masks == set(rows["meta"]) - set(rows["text"]) == set(rows["both"]) - set(rows["text"])
    for starts, labels in zip(rows["meta"]["word_start_mask"], rows["meta"]["labels"], strict=True):
        assert starts == [int(label != -100) for label in labels] and any(starts)
    joined = tiny_tokenizer("Graph cuts", "Graph cuts. They work.")["input_ids"]
    alone = tiny_tokenizer("They work.")["input_ids"]
    assert rows["meta"]["input_ids"] == [tiny_tokenizer("Graph cuts", "They work.")["input_ids"], alone]
    assert rows["both"]["input_ids"] == [joined, alone]
    assert [rows[way]["num_present"] for way in rows] == [[1, 0], [0, 0], [1, 0]]
    assert 1 not in rows["meta"]["labels"][0] and rows["both"]["labels"][0][:6] == [-100, -100, -100, -100, 1, 2]
    for row, mask in zip(rows["both"]["labels"], rows["both"]["main_mask"], strict=True):
        assert all(inside or label == -100 for label, inside in zip(row, mask, strict=True))
    with pytest.raises(ValueError, match="title_as='pair'"):
        tokenize_documents(batch, tiny_tokenizer, title_as="pair")


def test_without_a_column_of_titles_there_are_masks_all_the_same(tiny_tokenizer):
    batch = {"text": ["graph cuts"], "keyphrases": [["graph"]]}
    assert tokenize_documents(batch, tiny_tokenizer, title_as="meta")["meta_mask"] == [[1, 0, 0, 0]]
    titled = {**batch, "title": ["cuts"]}
    assert tokenize_documents(titled, tiny_tokenizer, title_as="both", title_column=None)["main_mask"] == [[0, 1, 1, 0]]
    assert tokenize_documents(titled, tiny_tokenizer, title_as="meta", max_title_length=1)["meta_mask"][0][:2] == [1, 1]


@pytest.mark.parametrize(
    "title", ["Trade policy of the U.S", " Policy of the U.K ", "Trade of the U.S.", "A trade &amp; the E.U"]
)
def test_a_word_of_the_title_ends_where_the_title_ends(title):
    document = read_document({"title": title, "text": "The tariffs rose."}, 0, join=True)
    words = [(word, document.to_source(start, end)) for word, start, end in document.words]
    in_title = [(word, place) for word, place in words if place["field"] == "title" and len(word) > 1]
    assert all(place["end"] <= len(title.rstrip()) for _, place in in_title)
    word, place = in_title[-1]
    assert title[place["start"] : place["end"]] == word and word in title.split()[-1]
