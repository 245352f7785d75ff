"""Words and where they stand, the vocabulary, and what is saved."""

import copy
import json
import os
import pickle
import re
import time
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from modeling_exhird import ExhirdConfig
from modeling_exhird.tokenization_exhird import MARKS, SPECIAL, ExhirdTokenizer, split_words

WORDS = ["graph", "cuts", "the", "naive", "of", ",", ".", "'", "(", ")", "d12", "a", "s", "<", ">"]
TOKENIZER = ExhirdTokenizer.from_words([*MARKS, *WORDS])


def strings(text):
    return [word for word, _, _ in split_words(text)]


TEXTS = {
    "The Graph-cuts/trees; k_means": "the graph cuts trees k_means",
    "graph\ncuts\r\nof\ttrees\x0cnow": "graph cuts of trees now",
    "Bayes\u2019s \u201cnaïve\u201d (so-called) rules\u2014or not\u2026": "bayes ' s naive ( so called ) rules or not . . .",
    "net\u00adwork\u200bs \x00a\x07b": "networks ab",
    "\u03b1-helix \u6df1\u5ea6 deep \U0001f600 nets": "helix deep nets",
    "as in [12] and {\\bf x}, ] or } here[3]now": "as in and , or here now",
    "in [0,1) and [a [b] c] end": "in <digit> ) and end",
    "12d and 2w2 but d12 and _5": "<digit> and <digit> but d12 and _5",
    "3.5, 1,000 -7 +.05 2.5e3 1.2.3": "<digit> , <digit>",
    "v1.5 a.5 5..6 p<0.05": "v1 . <digit> a . <digit> . . <digit> p < <digit>",
    "<digit> 5<digit>x <EOT> <p_start><a_start>": "<digit> x <eot> <p_start> <a_start>",
    " \n;-!?\u2014\u03b1[x]": "",
}


def test_texts_become_words():
    for text, expected in TEXTS.items():
        assert strings(text) == expected.split()
    assert split_words("graph \ud800cuts") == [("graph", 0, 5), ("cuts", 7, 11)]  # half a pair is not a character


def test_each_word_says_where_it_stands():
    for text, expected in (
        ("The naïve 10 - 20% GRAPH", ["The", "naïve", "10 - 20", "GRAPH"]),
        ("\ufb01nite [3] .5 (<digit> 7)", ["\ufb01nite", ".5", "(", "<digit> 7", ")"]),
        ("\u2026x", ["\u2026", "\u2026", "\u2026", "x"]),
    ):
        assert [text[start:end] for _, start, end in split_words(text)] == expected


def reference_words(text):
    """The rule character by character and word by word: what `split_words` must equal."""
    text = unicodedata.normalize("NFKD", text.replace("\u2122", " "))
    text = "".join(c for c in text if unicodedata.category(c) != "Mn").lower().replace("\u2019", "'")
    for _ in range(2):
        text = re.sub(r"\[[^\[\]]*\]|\{[^{}]*\}", " ", text)
    text = "".join(
        c if c in "\t\n\r\x0b\x0c" or " " <= c <= "~" else " "
        for c in text
        if c in "\t\n\r\x0b\x0c\x85" or " " <= c <= "~" or unicodedata.category(c)[0] in "PSZ"
    )
    found = [
        (m[0], m.start(), m.end()) for m in re.finditer(r"<(?:digit|eot|p_start|a_start)>|[a-z0-9_]+|[<>,().']", text)
    ]
    words, i = [], 0
    while i < len(found):
        word, start, end = found[i]
        next_is_glued = i + 1 < len(found) and found[i + 1][1] == end
        before = text[start - 1] if start else " "
        if word == "." and next_is_glued and found[i + 1][0][0].isdigit() and not re.match(r"[a-z0-9_.]", before):
            i += 1  # .5
            word, start, end = found[i]
        if word[0].isdigit():
            word = "<digit>"
            while i + 2 < len(found) and found[i + 1][1] == end and found[i + 2][1] == found[i + 1][2]:
                if found[i + 1][0] not in (".", ",") or not found[i + 2][0][0].isdigit():
                    break
                i += 2
                end = found[i][2]
        if not (word == "<digit>" and words[-1:] == ["<digit>"]):
            words.append(word)
        i += 1
    return words


MESSY = st.lists(
    st.sampled_from(
        [*"aAzZ019_<>,().'[]{}-/;%? \n\t\r", "<digit>", "<eot>", "</s>", "<s>", "\u00e9", "e\u0301", "\u00bd", "\ufb01"]
        + [*"\u2026\u2019\u2014\u03b1\u6df1\u00ad\x00\x85\u2122\u0130", "1.5", "graph"]
    ),
    max_size=25,
).map("".join)


@settings(max_examples=200, deadline=None)
@given(MESSY)
def test_words_are_those_of_the_rule_and_places_hold_them(text):
    found, known = split_words(text), TOKENIZER.get_vocab()
    assert [word for word, _, _ in found] == reference_words(text)
    ids = [known.get(word, 0) for word, _, _ in found]
    assert TOKENIZER(text)["input_ids"] == ids
    assert all(i not in (1, 2, 3, 4) for i in ids)  # no padding, end or `;` comes from a text
    for word, start, end in found:
        assert 0 <= start < end <= len(text)
        assert word in strings(text[start:end])
    ends = [end for _, _, end in found]
    assert ends == sorted(ends)


def test_long_texts_take_time_in_proportion():
    before = time.perf_counter()
    for unit in ("Graph naïve 12 [3] ", "[", "1.1", "[a{"):
        split_words(unit * 10_000)
    assert time.perf_counter() - before < 20  # a fifth of a second on a free core; a square would be minutes


def test_a_vocabulary_of_texts_has_the_most_frequent_words():
    texts = ["b b a 7 ; c", ["c", "B"], "a <p_start> d"]
    tokenizer = ExhirdTokenizer.from_texts(texts)
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == [*SPECIAL, *MARKS, "b", "a", "c", "d"]
    assert len(ExhirdTokenizer.from_texts(texts, vocab_size=7)) == 4 + 7
    assert len(ExhirdTokenizer.from_words([*SPECIAL, *MARKS])) == 9  # with the four at its head


def test_a_source_tells_unknown_words_apart():
    V = len(TOKENIZER)
    source = TOKENIZER.encode_source("Zeta graph, omega 12 zeta", title="The zeta")
    assert source.words == ["the", "zeta", "<eot>", "zeta", "graph", ",", "omega", "<digit>", "zeta"]
    assert source.input_ids == [11, 0, 8, 0, 9, 14, 0, 7, 0]
    assert source.copy_ids == [11, V, 8, V, 9, 14, V + 1, 7, V]
    assert source.oov_words == ["zeta", "omega"]
    assert source.offsets[:4] == [("title", 0, 3), ("title", 4, 8), None, ("text", 0, 4)]
    assert TOKENIZER.convert_ids_to_words(source.copy_ids, source.oov_words) == source.words
    assert TOKENIZER.convert_ids_to_words(source.input_ids, [])[1] == "<unk>"
    assert [TOKENIZER.encode_source("graph", title).words for title in (None, " ?! ")] == [["graph"]] * 2
    assert TOKENIZER.encode_source("", "").words == [] and TOKENIZER.encode_source("", "graph").words == [
        "graph",
        "<eot>",
    ]


def test_saved_and_loaded_it_is_the_same_and_checked(tmp_path):
    text = "The naïve zeta-graph </s> [3] of 10 - 20\ncuts"
    TOKENIZER.save_pretrained(tmp_path)
    assert {"tokenizer.json", "tokenizer_config.json", "tokenization_exhird.py"} <= set(os.listdir(tmp_path))
    by_name = AutoTokenizer.from_pretrained(tmp_path)
    ExhirdConfig(vocab_size=len(TOKENIZER)).save_pretrained(tmp_path)
    opened = [ExhirdTokenizer.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path), by_name]
    for other in (*opened, copy.deepcopy(TOKENIZER), pickle.loads(pickle.dumps(TOKENIZER))):
        assert type(other) is ExhirdTokenizer and other.get_vocab() == TOKENIZER.get_vocab()
        assert other(text) == TOKENIZER(text) and other.encode_source(text, "graph") == TOKENIZER.encode_source(
            text, "graph"
        )
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    saved["model"]["vocab"]["<other>"] = saved["model"]["vocab"].pop("<a_start>")
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match="<a_start>"):
        ExhirdTokenizer.from_pretrained(tmp_path)
