"""Texts that no one trains on: one character, very long, capitals, code, HTML, emoji, mixed scripts."""

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lexperts_lite.clean import CleanText, clean
from lexperts_lite.layout import continued_words, unit_numbers
from lexperts_lite.words import split_words

from .known_answers import names

ODD = {  # a text, and words that it has and does not have, by a pipeline that finds each word
    "one ideograph": ("水", ["水"], []),
    "numbers": ("1234 +-*/ 5.678 (90) %", ["1234", "5.678", "90"], ["+", "%"]),
    "code": ("def f(x: int):\n\treturn {'graph_cut': x ** 2}  # bx\n", ["def", "return", "int", "bx"], ["(", "**", "#"]),
    "HTML": ('<p class="b">Graph&nbsp;cuts &lt;i&gt; <b>networks</b></p><!-- b --><br/>', ["Graph", "cuts", "networks"], ["p", "b", "nbsp", "lt"]),
    "JSON": ('{"graph": ["cut", null, 1.5e-3], "b": {}}', ["graph", "cut"], ["{"]),
    "LaTeX": (r"\begin{equation} E = \sum_{b \in N} \frac{1}{2} \end{equation}", ["equation"], ["\\"]),
    "a URL": ("see https://example.org/graph_cut?b=1&c=2#p and me@example.org", ["see", "and"], ["example", "https"]),
    "emoji": ("graph 👩‍🔬 cut 🇸🇮 b👍🏽 networks ❤️", ["graph", "cut", "networks"], ["👩‍🔬", "🇸🇮", "👍🏽"]),
    "scripts": ("graph שלום γράφος график 図グラフ ไทย 理論 العربية हिन्दी 한국어", ["graph", "שלום", "γράφος", "график", "図", "グラフ", "ไทย", "理", "العربية", "हिन्दी", "한국어"], []),
    "right to left": ("\u202bשלום\u202c b \u200fgraph", ["שלום", "b", "graph"], []),
    "surrogates": ("graph \ud800 b\udfff", ["graph", "b"], ["\ud800"]),
    "decomposed": ("cafe\u0301 b\u0308u", ["cafe\u0301", "b\u0308u"], []),
}  # fmt: skip
CHARACTERS = [*"ab12 -/.,'’\n\u0000\ufffd", *"e\u0301\u0327\u00adשלוםאב\u202e日本ไย🙂👩\u200d🔬🇸🇮\ud800\udfffßİ"]
ANY = st.text(st.one_of(st.sampled_from(CHARACTERS), st.characters(exclude_categories=())), max_size=60)


def assert_spans(text, phrases):
    """Every keyphrase is a piece of the text, and every mention goes from the start of a word to the end of one."""
    source = CleanText(text)
    words = [source.source_span(start, end) for _, start, end in split_words(source.text)]
    starts, ends = {start for start, _ in words}, {end for _, end in words}
    for phrase in phrases:
        piece = clean(text[phrase["start"] : phrase["end"]]).replace(
            "\u00ad", ""
        )  # one at a line end joins, cleaned first
        assert " ".join(piece.split()) == phrase["keyphrase"] != "" and 0 <= phrase["score"] <= 1
        for mention in phrase["mentions"]:
            assert mention["start"] in starts and mention["end"] in ends and 0 <= mention["score"] <= 1


@settings(max_examples=60, deadline=None)
@given(ANY)
@example("0\u00ad\r0")
def test_any_text_has_phrases_at_its_own_places(extract, text):
    assert_spans(text, extract(text, top_k=None))


@pytest.mark.parametrize("text, present, absent", ODD.values(), ids=ODD)
def test_odd_texts_have_words_at_their_places_and_each_is_a_candidate_that_is_found(
    extract, everything, text, present, absent
):
    for options in ({}, {"language": None}, {"language": "german"}, {"diversity": 0.8}):
        assert_spans(text, extract(text, top_k=None, **options))
    found = everything(text, language=None)
    assert_spans(text, found)
    assert set(present) <= set(names(found)) and not set(absent) & set(names(found))
    words = split_words(clean(text))
    ends_of_terms = {word for (word, _, _), continued in zip(words, continued_words(words), strict=True) if continued}
    words = [word.lower() for (word, _, _), unit in zip(words, unit_numbers(words), strict=True) if unit >= 0]
    candidates = extract(text, candidates=sorted(set(words)), language=None)
    assert {c["keyphrase"] for c in candidates} == set(words)
    assert {c["keyphrase"] for c in candidates if not c["mentions"]} <= {"\ufffd", *ends_of_terms}


@pytest.mark.parametrize(
    "text",
    ["", " \n\t\u00a0\u3000\u2028", "\u0000", "...", "?! (;) --- / ' 🙂", "\ud800", "\u0301", "graph" * 1000],
    ids=range(8),
)
def test_a_text_without_words_has_no_keyphrases(extract, everything, text):
    assert extract(text) == everything(text) == []


def test_a_long_text_is_read_to_its_end_in_linear_time(lookup):
    extract, seconds = lookup(), []
    for blocks in (500, 4_000):
        text = "x c, x c. " * blocks + "bx"
        begin = time.process_time()
        (phrase,) = extract(text, batch_size=256)
        seconds.append(time.process_time() - begin)
        assert (phrase["keyphrase"], phrase["start"]) == ("bx", 10 * blocks)
    assert seconds[1] < 20 * seconds[0]
    absent, found = extract(text, candidates=["x x", "bx"], batch_size=256)[::-1]
    assert found["start"] == 40_000 and found["score"] > 0.99 and absent["mentions"] == []
