"""Texts that no one trains on: one character, very long, capitals, code, HTML, emoji, mixed scripts."""

import time

import pytest
from transformers import pipeline

from lexperts_lite.clean import clean
from lexperts_lite.layout import continued_words, unit_numbers
from lexperts_lite.words import split_words
from tests.keyphrase_tools.known_answers import names

ODD = {
    "empty": "",
    "one letter": "b",
    "one digit": "7",
    "one mark": "!",
    "one emoji": "🙂",
    "one ideograph": "水",
    "one combining mark": "\u0301",
    "one null": "\u0000",
    "capitals": "GRAPH CUTS SOLVE ENERGY PROBLEMS IN COMPUTER VISION",
    "one long word": "b" * 5000,
    "no letters": "1234 +-*/ 5.678 (90) %",
    "code": "def f(x: int) -> dict[str, int]:\n\treturn {'graph_cut': x ** 2}  # bx\n",
    "HTML": '<p class="b">Graph&nbsp;cuts &lt;i&gt; <b>networks</b></p><!-- b --><br/>',
    "JSON": '{"graph": ["cut", null, 1.5e-3], "b": {}}',
    "LaTeX": r"\begin{equation} E = \sum_{b \in N} \frac{1}{2} \end{equation}",
    "a URL": "see https://example.org/graph_cut?b=1&c=2#p and me@example.org",
    "emoji": "graph 👩‍🔬 cut 🇸🇮 b👍🏽 networks ❤️",
    "mixed scripts": "graph שלום γράφος график 図グラフ ไทย グラフ理論 b العربية हिन्दी 한국어",
    "right to left": "\u202bשלום\u202c b \u200fgraph",
    "blanks only": " \n\t\u00a0\u3000\u2028",
    "lines": "graph\r\ncut\rb\u2028networks",
    "surrogates": "graph \ud800 b\udfff",
    "decomposed": "cafe\u0301 b\u0308u",
}
each = pytest.mark.parametrize("text", ODD.values(), ids=ODD)


@pytest.fixture(scope="module")
def extract(sharp_seke, tiny_tokenizer):
    return pipeline("keyphrase-extraction", model=sharp_seke(), tokenizer=tiny_tokenizer, top_k=None)


def assert_spans(text, phrases):
    """Every mention is a part of the text with the words of the keyphrase."""
    for phrase in phrases:
        for mention in phrase["mentions"]:
            assert 0 <= mention["start"] < mention["end"] <= len(text) and 0 <= mention["score"] <= 1
        piece = clean(text[phrase["start"] : phrase["end"]].replace("\u00ad", ""))
        assert " ".join(piece.split()) == phrase["keyphrase"] != ""


@each
def test_any_text_has_phrases_at_its_own_places(extract, everything, text):
    for pipe in (extract, everything):
        for options in ({}, {"language": None}, {"language": "german"}):
            assert_spans(text, pipe(text, **options))
    assert_spans(text, extract(text, diversity=0.8))
    assert len(extract(text, diversity=0.8)) == len(extract(text))


@each
def test_every_word_of_any_text_is_a_candidate_that_is_found(extract, text):
    words = split_words(clean(text))
    ends_of_terms = {word for (word, _, _), continued in zip(words, continued_words(words), strict=True) if continued}
    words = [word.lower() for (word, _, _), unit in zip(words, unit_numbers(words), strict=True) if unit >= 0]
    words = [word for word in dict.fromkeys(words) if len(word) < 60]
    if not words:
        return
    found = extract(text, candidates=words, language=None)
    assert {c["keyphrase"] for c in found} == set(words)
    unread = {c["keyphrase"] for c in found if not c["mentions"]}
    assert unread <= {"\ufffd", *ends_of_terms}
    for candidate in found:
        for mention in candidate["mentions"]:
            assert text[mention["start"] : mention["end"]]


@each
def test_any_text_is_a_candidate_or_refused_by_name(extract, text):
    try:
        (candidate,) = extract("b " + text, candidates=[text], language=None)
    except ValueError as error:
        assert "candidates=" in str(error)
    else:
        assert candidate["keyphrase"] == text


def test_one_character(everything):
    assert names(everything("b")) == ["b"] and names(everything("水")) == ["水"]
    assert everything("!") == everything("") == everything("\u0301") == []
    assert everything("b")[0]["mentions"] == [{"start": 0, "end": 1, "score": everything("b")[0]["score"]}]


def test_capitals_are_the_same_phrases(everything):
    lower, upper = everything(ODD["capitals"].lower()), everything(ODD["capitals"])
    assert [p["keyphrase"] for p in upper] == [p["keyphrase"].upper() for p in lower]
    assert names(everything("GRAPH graph Graph")) == ["GRAPH"]


def test_code_and_html_give_words_not_marks(everything):
    code = names(everything(ODD["code"]))
    assert {"def", "return", "int", "bx"} <= set(code) and not {"(", "**", "#", "{", "->"} & set(code)
    html = names(everything(ODD["HTML"]))
    assert sorted(html) == ["Graph", "cuts", "networks"]


def test_emoji_are_no_keyphrases_and_do_not_shift_offsets(everything):
    answer = everything(ODD["emoji"])
    assert {"graph", "cut", "networks"} <= set(names(answer)) and not any("👩" in name for name in names(answer))
    assert all(ODD["emoji"][p["start"] : p["end"]] == p["keyphrase"] for p in answer)


def test_every_script_has_words(everything):
    found = set(names(everything(ODD["mixed scripts"], language=None)))
    assert {
        "graph",
        "שלום",
        "γράφος",
        "график",
        "図",
        "グラフ",
        "ไทย",
        "理",
        "b",
        "العربية",
        "हिन्दी",
        "한국어",
    } <= found


def test_a_long_text_is_read_to_its_end_in_linear_time(lookup):
    """A megabyte here; the time grows with the length, as the comparison shows."""
    extract, seconds = lookup(), []
    for blocks in (12_500, 100_000):
        text = "x c, x c. " * blocks + "bx"
        begin = time.perf_counter()
        (phrase,) = extract(text, batch_size=256)
        seconds.append(time.perf_counter() - begin)
        assert (phrase["keyphrase"], phrase["start"]) == ("bx", 10 * blocks)
    assert len(text) > 1_000_000 and seconds[1] < 16 * seconds[0]


def test_candidates_are_found_to_the_end_of_a_long_text(lookup):
    text = "x c, x c. " * 10_000 + "bx"
    absent, found = lookup()(text, candidates=["x x", "bx"], batch_size=256)[::-1]
    assert found["start"] == 100_000 and found["score"] > 0.99 and absent["mentions"] == []


def test_a_long_text_without_blanks(extract):
    text = "graph" * 20_000
    assert_spans(text, extract(text, batch_size=64))
    assert extract("b", candidates=[text])[0]["mentions"] == []
