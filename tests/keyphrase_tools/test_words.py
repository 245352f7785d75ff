"""Words and their offsets: what is a word, and that no visible character is lost between them."""

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nltk.stem.porter import PorterStemmer

from lexperts_lite import words
from lexperts_lite.porter import porter_stem
from lexperts_lite.words import JOINERS, is_phrase, is_term, join_title, normalise, split_phrase, split_words, stem

ROOT = Path(__file__).resolve().parents[2]
TRICKY = [*"aB9_ -/.,'’;(\"\n\t\u2013\u2217", *"éßİΣ\u0301\u200d\u00ad\u0000\ud800\ufffd", *"日本ไทย๒שלום١٢🙂👩🇸🇮½"]
texts = st.text(st.one_of(st.sampled_from(TRICKY), st.characters(exclude_categories=())), max_size=40)


def strings(text):
    return [word for word, _, _ in split_words(text)]


# ---- what holds for any text


@settings(max_examples=200, deadline=None)
@given(texts)
def test_words_are_in_order_where_they_say_and_nothing_visible_is_between_them(text):
    place, gaps = 0, ""
    for word, start, end in split_words(text):
        assert place <= start < end <= len(text) and text[start:end] == word
        assert not any(c.isspace() or c in JOINERS for c in word)
        if len(word) > 1 and any(
            c.isalnum() for c in word
        ):  # apostrophes and points are inside a word or one by themselves
            assert word[0] not in "'’.," or word.lower() == ".net"
            assert word[-1] not in "'’.," or is_term(word)  # "U.S."
        gaps, place = gaps + text[place:start], end
    for c in gaps + text[place:]:
        assert c.isspace() or c in JOINERS or unicodedata.category(c)[0] in "CM", repr(c)


@settings(max_examples=100, deadline=None)
@given(texts, texts)
def test_a_space_keeps_two_texts_apart_and_normalising_twice_changes_nothing(first, second):
    shift = len(first) + 1
    moved = [(word, start + shift, end + shift) for word, start, end in split_words(second)]
    assert split_words(f"{first} {second}") == split_words(first) + moved
    once = normalise(first)
    assert normalise(once) == once == normalise(f"  {first}\n")


@given(st.text(st.characters(max_codepoint=127), max_size=30) | st.text("a1_'.,-/ \n", max_size=12))
@settings(max_examples=300, deadline=None)
def test_the_faster_rule_of_ascii_texts_is_the_general_rule(text):
    assert split_words(text) == [(match[0], *match.span()) for match in words._WORD.finditer(text)]


ENDINGS = ["s", "es", "ies", "ied", "eed", "ed", "ing", "y", "er", "or", "able", "ible", "ation", "ational", "tional", "izer", "ization", "alism", "ness", "fulness", "ousness", "fully", "ally", "logi", "logical", "aliti", "iviti", "biliti", "icate", "ative", "alize", "ical", "ement", "ment", "ent", "ion", "ou", "ism", "ate", "iti", "ous", "ive", "ize", "e", "ll", "al", "bli"]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.text("aeiouybcdlrstwxz", max_size=5), st.lists(st.sampled_from(ENDINGS), max_size=3).map("".join))
def test_english_stems_are_those_of_nltk(beginning, ending):
    assert porter_stem(beginning + ending) == PorterStemmer().stem(beginning + ending)


def test_stems_of_real_and_irregular_words_are_those_of_nltk():
    files = [path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks" / "forty_texts").glob("*.txt")]
    vocabulary = {word for text in files for word in split_phrase(text)} | PorterStemmer().pool.keys()
    assert len(vocabulary) > 2000
    assert {word: porter_stem(word) for word in vocabulary} == {word: PorterStemmer().stem(word) for word in vocabulary}


@pytest.mark.parametrize("one, other", [("Alzheimer\u2019s", "alzheimer"), ("'s", "'s"), ("\ufb01lms", "film")])
def test_forms_of_an_english_word_have_equal_stems(one, other):
    assert stem(one) == stem(other) != ""


# ---- what a word is


@pytest.mark.parametrize("text, expected", [
    ("semi-supervised learning", ["semi", "supervised", "learning"]), ("pages 3\u20137", ["pages", "3", "7"]),
    ("Bayes's rule, don\u2019t", ["Bayes's", "rule", ",", "don\u2019t"]), ("the boys' 'quoted'", ["the", "boys", "'", "'", "quoted", "'"]),
    ("802.11 and 1,000.5.", ["802.11", "and", "1,000.5", "."]), ("e.g. v2.x", ["e", ".", "g", ".", "v2", ".", "x"]),
    ("snake_case", ["snake_case"]), ("c++ (x)", ["c++", "(", "x", ")"]), ("C#, C++17; F#.", ["C#", ",", "C++17", ";", "F#", "."]),
    ("R&D at AT&T &amp; a&b;", ["R&D", "at", "AT&T", "&", "amp", ";", "a", "&", "b", ";"]),
    ("Node.js, ASP.NET (.NET) end.Next", ["Node.js", ",", "ASP.NET", "(", ".NET", ")", "end", ".", "Next"]),
    ("TCP/IP 3D-printed", ["TCP", "IP", "3D", "printed"]),
    ("Ca2+, CD4+ (Na+/K+) HER2+.", ["Ca2+", ",", "CD4+", "(", "Na+", "K+", ")", "HER2+", "."]),
    ("x2+y2, N+ 10+ ab+", ["x2", "+", "y2", ",", "N", "+", "10", "+", "ab", "+"]),
    ("the U.S., U.S.A. and J.R.R. Ray", ["the", "U.S.", ",", "U.S.A.", "and", "J.R.R.", "Ray"]),
    ("e.g. A. Ray in U.S.Senate, A.Bc, U.S.de", [*"e.g.", "A", ".", "Ray", "in", "U.S.", "Senate", ",", "A", ".", "Bc", ",", "U.S", ".", "de"]),
    ("1+1 x++y #C a#b ABC# www.a.com.x", [*"1+1", "x", "+", "+", "y", "#", "C", "a", "#", "b", "ABC", "#", "www", ".", "a", ".", "com", ".", "x"]),
    ("深層学習", ["深", "層", "学", "習"]), ("ไทย", ["ไ", "ท", "ย"]), ("CNN模型", ["CNN", "模", "型"]), ("שלום עולם", ["שלום", "עולם"]),
    ("한국어 처리", ["한국어", "처리"]), ("cafe\u0301 na\u00adive", ["cafe\u0301", "na\u00adive"]), ("👩\u200d🔬🇸🇮!", ["👩\u200d🔬", "🇸🇮", "!"]),
    ("a\u0000b\u200bc", ["a", "b", "c"]), ("\ud800x\udfff", ["x"]), ("- / \u2013 \n", []), ("x'日 1.๒", ["x", "'", "日", "1", ".", "๒"]), ("", []),
])  # fmt: skip
def test_words_of(text, expected):
    assert strings(text) == expected


# a word of a keyphrase
PHRASES = "graph Bayes's don\u2019t 802.11 1,000 22 cafe\u0301 深 c++ .NET R&D Node.js U.S. Ca2+"
NONE = "' 'tis boys' + e.g 1. .5 1,a $5 🙂 \u20ac \u201cx\u201d snake_case - x-"


def test_a_phrase_has_neither_marks_nor_words_of_great_length():
    assert is_phrase([*PHRASES.split(), "methionyl" * 11]) and not is_phrase([])
    assert not any(is_phrase(["graph", word]) for word in [*NONE.split(), "", "aGVs" * 26])


@pytest.mark.parametrize("joiner", JOINERS)
def test_every_joiner_reads_as_a_space(joiner):
    assert strings(f"out{joiner}of{joiner}print") == strings("out of print")
    # negative control: another sign between words is a word itself
    assert strings("out;of;print") != strings("out of print")


@pytest.mark.parametrize("one, other, same", [
    ("Semi-Supervised  learning", "semi supervised Learning", True), ("client/server", "CLIENT server", True),
    ("graph cut", "graph cuts", False), ("semisupervised", "semi-supervised", False),
])  # fmt: skip
def test_normalised_forms_agree_up_to_case_spaces_and_joiners(one, other, same):
    assert (normalise(one) == normalise(other)) is same


@pytest.mark.parametrize("title, text, expected", [
    ("Graph cuts", "They work.", "Graph cuts. They work."), ("Do graph cuts work?", "Yes.", "Do graph cuts work? Yes."),
    ("They do!", "Yes.", "They do! Yes."), ("An end.", "Yes.", "An end. Yes."), (" Graph cuts \n", "  They work. ", "Graph cuts. They work."),
    ("", "They work.", "They work."), (None, "They work.", "They work."), ("Graph cuts", None, "Graph cuts"), (None, None, ""),
])  # fmt: skip
def test_a_title_is_joined_by_one_full_stop(title, text, expected):
    assert join_title(title, text) == expected
