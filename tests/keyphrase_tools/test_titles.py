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

TITLE, TEXT = "Graph cuts", "the network is learning, in 802.11 of graph xyz"
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def spans_of(text):
    return [(start, end) for _, start, end in split_words(text)]


def windows_of(tokenizer, texts, titles, **options):
    return encode_windows(texts, [spans_of(text) for text in texts], tokenizer, titles=titles, **options)


def count(tokenizer, text):
    return len(tokenizer(text, add_special_tokens=False, truncation=False)["input_ids"])


def random_text(words, seed=0):
    rng = np.random.default_rng(seed)
    return " ".join("".join(rng.choice(list(LETTERS), rng.integers(1, 4))) for _ in range(words))


@pytest.fixture(scope="module")
def tokenizers(tiny_tokenizer):
    """BERT: one separator between title and text. RoBERTa: two. DeBERTa-v2: sub-tokens that hold the space. And no specials."""
    letters = [*LETTERS, *LETTERS.upper(), *"0123456789.,-"]
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    merges = [("\u0120", "g"), ("c", "u"), ("cu", "t"), ("\u0120", "cut")]
    pieces = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in merges)]
    roberta = RobertaTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges)
    unigram = [("[PAD]", 0.0), ("[CLS]", 0.0), ("[SEP]", 0.0), ("[UNK]", 0.0), ("\u2581", -3.0)]
    unigram += [(letter, -4.0) for letter in letters] + [("\u2581graph", -5.0), ("\u2581cut", -5.0)]
    bare = copy.deepcopy(tiny_tokenizer)
    bare.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A", pair="$A $B:1", special_tokens=[]
    )
    made = {
        "bert": tiny_tokenizer,
        "roberta": roberta,
        "deberta-v2": DebertaV2Tokenizer(unigram, unk_id=3),
        "bare": bare,
    }
    roberta.model_max_length = made["deberta-v2"].model_max_length = tiny_tokenizer.model_max_length
    return made


KINDS = {"bert": (1, 1), "roberta": (1, 2), "deberta-v2": (1, 1), "bare": (0, 0)}  # special tokens before and between
each_kind = pytest.mark.parametrize("kind", KINDS)


# ---- pairs and masks


@each_kind
def test_the_first_token_and_the_title_are_meta_and_the_text_is_main(tokenizers, kind):
    tokenizer, (before, between) = tokenizers[kind], KINDS[kind]
    t, n, n_alone, end = count(tokenizer, TITLE), count(tokenizer, TEXT), count(tokenizer, "graph"), before
    pair, alone = windows_of(tokenizer, [TEXT, "graph"], [TITLE, None])
    assert pair.inputs["input_ids"] == tokenizer(TITLE, TEXT)["input_ids"]
    assert pair.inputs["meta_mask"] == [1] * (before + t) + [0] * (between + n + end)
    assert pair.inputs["main_mask"] == [0] * (before + t + between) + [1] * n + [0] * end
    assert alone.inputs["input_ids"] == tokenizer("graph")["input_ids"]
    assert alone.inputs["meta_mask"] == [1] * before + [0] * (n_alone + end)
    assert alone.inputs["main_mask"] == [0] * before + [1] * n_alone + [0] * end
    # words begin in the text where they begin without a title, and nowhere else
    (untitled,) = windows_of(tokenizer, [TEXT], None)
    shift = before + t + between
    assert pair.word_starts.tolist() == [-1] * shift + untitled.word_starts[before:].tolist()
    assert pair.edge_distance.tolist()[:shift] == [-1] * shift and (pair.edge_distance[shift : shift + n] > 10**9).all()
    assert "meta_mask" not in untitled.inputs and "main_mask" not in untitled.inputs


def test_the_masks_of_a_pair_letter_by_letter(tiny_tokenizer):
    (window,) = windows_of(tiny_tokenizer, ["x-graph ab"], ["cut"])
    tokens = tiny_tokenizer.convert_ids_to_tokens(window.inputs["input_ids"])
    assert tokens == ["[CLS]", "cut", "[SEP]", "x", "-", "graph", "a", "##b", "[SEP]"]
    assert window.inputs["meta_mask"] == [1, 1, 0, 0, 0, 0, 0, 0, 0]
    assert window.inputs["main_mask"] == [0, 0, 0, 1, 1, 1, 1, 1, 0]
    assert window.word_starts.tolist() == [-1, -1, -1, 0, -1, 1, 2, -1, -1]


def test_a_separator_that_stands_in_the_text_is_text(tiny_tokenizer):
    (window,) = windows_of(tiny_tokenizer, ["graph [SEP] cut"], ["a [CLS]"])
    assert window.inputs["meta_mask"] == [1, 1, 1, 0, 0, 0, 0, 0]
    assert window.inputs["main_mask"] == [0, 0, 0, 0, 1, 1, 1, 0]


@pytest.mark.parametrize("blank", [None, "", " \n", "\u0000"])
def test_a_blank_title_is_none_and_an_empty_text_has_its_title(tokenizers, blank):
    (window,) = windows_of(tokenizers["bert"], ["graph"], [blank])
    assert window.inputs["main_mask"] == [0, 1, 0] and window.inputs["meta_mask"] == [1, 0, 0]
    (window,) = windows_of(tokenizers["bert"], [""], ["graph"])
    assert window.inputs["meta_mask"] == [1, 1, 0, 0] and sum(window.inputs["main_mask"]) == 0
    assert windows_of(tokenizers["bert"], [], []) == []


# ---- windows


@each_kind
def test_each_window_of_a_long_text_has_the_title_and_a_piece_of_the_text(tokenizers, kind):
    tokenizer, (before, between) = tokenizers[kind], KINDS[kind]
    text = random_text(150)
    t = count(tokenizer, TITLE)
    ids = tokenizer(text, add_special_tokens=False, truncation=False)["input_ids"]
    room = 40 - t - before - between - before
    for overlap in (0, 5, 40 - 10 - 2 * before - between - 1):
        windows = windows_of(tokenizer, [text], [TITLE], max_length=40, overlap=overlap)
        for number, window in enumerate(windows):
            meta, main = (np.array(window.inputs[name], dtype=bool) for name in ("meta_mask", "main_mask"))
            row, begin = np.array(window.inputs["input_ids"]), number * (room - overlap)
            assert row[meta].tolist() == tokenizer(TITLE)["input_ids"][: before + t]
            assert row[main].tolist() == ids[begin : begin + room]
            real = np.flatnonzero(main)
            assert window.edge_distance[real[0]] == (0 if number else room - 1)
        assert begin + room >= len(ids)
        begun = [word for window in windows for word in window.word_starts if word >= 0]
        assert sorted(set(begun)) == list(range(150)) and (overlap or len(begun) == 150)
        assert [window.document for window in windows] == [0] * len(windows)


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
    assert title.strip().startswith(read)
    assert length <= limit
    if count(tokenizers[kind], title.strip()) <= limit:
        assert read == (title.strip() if length else "")


def test_titles_beyond_the_limit_are_cut_and_counted_in_one_warning(tiny_tokenizer, caplog):
    titles = ["a b c d e f", None, "abcdef gh", "a b c", " "]
    with caplog.at_level(logging.WARNING):
        windows = windows_of(tiny_tokenizer, ["graph"] * 5, titles, max_title_length=4)
    assert caplog.messages == ["2 of 3 titles are longer than 4 sub-tokens and were truncated."]
    read = [window.inputs["input_ids"][: sum(window.inputs["meta_mask"])] for window in windows]
    beginnings = ["a b c d", "", "abcd", "a b c", ""]
    assert read == [tiny_tokenizer(beginning)["input_ids"][:-1] for beginning in beginnings]
    caplog.clear()
    windows_of(tiny_tokenizer, ["graph"] * 5, titles)
    assert caplog.messages == []


def test_a_title_takes_at_most_a_quarter_of_a_window(tiny_tokenizer):
    title = "a b c d e f g h i j"
    for max_length, kept in ((64, 10), (20, 5), (12, 3)):
        window = windows_of(tiny_tokenizer, ["cuts " * 30], [title], max_length=max_length)[0]
        assert sum(window.inputs["meta_mask"]) == 1 + kept
    with pytest.raises(ValueError, match="max_title_length=0"):
        windows_of(tiny_tokenizer, ["graph"], [title], max_title_length=0)


# ---- rows for training


def test_a_title_is_text_or_meta_text_or_both(tiny_tokenizer):
    batch = {"title": ["Graph cuts", None], "text": ["They work.", "They work."], "keyphrases": [["graph cut"]] * 2}
    rows = {
        title_as: tokenize_documents(batch, tiny_tokenizer, title_as=title_as) for title_as in ("text", "meta", "both")
    }
    assert rows["text"] == tokenize_documents(batch, tiny_tokenizer)
    masks = {"meta_mask", "main_mask", "word_start_mask"}
    assert masks == set(rows["meta"]) - set(rows["text"]) == set(rows["both"]) - set(rows["text"])
    for starts, labels in zip(rows["meta"]["word_start_mask"], rows["meta"]["labels"], strict=True):
        assert starts == [int(label != -100) for label in labels] and any(starts)
    joined = tiny_tokenizer("Graph cuts", "Graph cuts. They work.")["input_ids"]
    alone = tiny_tokenizer("They work.")["input_ids"]
    assert rows["meta"]["input_ids"] == [tiny_tokenizer("Graph cuts", "They work.")["input_ids"], alone]
    assert rows["both"]["input_ids"] == [joined, alone]
    assert [rows[title_as]["num_present"] for title_as in rows] == [[1, 0], [0, 0], [1, 0]]
    assert 1 not in rows["meta"]["labels"][0] and rows["both"]["labels"][0][:6] == [-100, -100, -100, -100, 1, 2]
    for row, mask in zip(rows["both"]["labels"], rows["both"]["main_mask"], strict=True):
        assert all(inside or label == -100 for label, inside in zip(row, mask, strict=True))


def test_without_a_column_of_titles_there_are_masks_all_the_same(tiny_tokenizer):
    batch = {"text": ["graph cuts"], "keyphrases": [["graph"]]}
    assert tokenize_documents(batch, tiny_tokenizer, title_as="meta")["meta_mask"] == [[1, 0, 0, 0]]
    titled = {**batch, "title": ["cuts"]}
    assert tokenize_documents(titled, tiny_tokenizer, title_as="both", title_column=None)["main_mask"] == [[0, 1, 1, 0]]
    assert tokenize_documents(titled, tiny_tokenizer, title_as="meta", max_title_length=1)["meta_mask"][0][:2] == [1, 1]


def test_an_unknown_way_with_titles_is_named_with_those_there_are(tiny_tokenizer):
    with pytest.raises(ValueError, match="title_as='pair'.*Use.*'text', 'meta', 'both'"):
        tokenize_documents({"text": ["x"], "keyphrases": [[]]}, tiny_tokenizer, title_as="pair")


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
