"""Cleaning: what is joined, what is left unchanged, and the mapping of spans back to the source."""

import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lexperts_lite.clean_text import CleanText, clean, punctuation
from lexperts_lite.words import join_title, split_words


@pytest.mark.parametrize(
    "text, cleaned",
    [
        ("lithium-ion bat-\nteries", "lithium-ion batteries"),
        ("bat- \r\n   teries", "batteries"),
        ("bat\u2010\nteries, bat\u00ad\nteries, bat\u00adteries", "batteries, batteries, batteries"),
        ("bat-\n\x0cteries", "batteries"),  # over the end of a page
        ("ko\u0308p-\nfen", "ko\u0308pfen"),
        # a hyphen of its own
        ("LSTM-\nbased k-\nmeans CO2-\nfree", "LSTM-based k-means CO2-free"),
        ("Navier-\nStokes, COVID-\n19", "Navier-Stokes, COVID-19"),
        ("semi-\nsupervised, Semi-Supervised", "semi-supervised, Semi-Supervised"),
        # no hyphenation
        ("pre-\nand post-processing", "pre-\nand post-processing"),
        ("a dash -\nhere, semi- supervised, x-", "a dash -\nhere, semi- supervised, x-"),
        ("-\nab, 1 -\nab", "-\nab, 1 -\nab"),
        ("soft \u00ad\n- end\u00ad\n", "soft \n- end\n"),
    ],
)
def test_hyphens_at_line_ends(text, cleaned):
    assert clean(text) == cleaned


@pytest.mark.parametrize(
    "text, cleaned",
    [
        ("a&nbsp;b &amp; c", "a\u00a0b & c"),
        ("caf&eacute; &#233; &#xE9; &#XE9;", "café é é é"),
        ("&amp;nbsp;&amp;amp;&#38;lt;&amp;#38;gt;", "\u00a0&<>"),  # escaped twice
        ("a&nbsp b&amp", "a\u00a0 b&"),
        ("soft&shy;ware bat&#173;\nteries", "software batteries"),
        # no entities
        (
            "R&D AT&T; &foo; & ; &; &#; ?a=1&lt=2&notit; &amplifier",
            "R&D AT&T; &foo; & ; &; &#; ?a=1&lt=2&notit; &amplifier",
        ),
        ("&#0; &#1; &#xD800; &#9999999;", "\ufffd  \ufffd \ufffd"),
    ],
)
def test_entities(text, cleaned):
    assert clean(text) == cleaned


def test_a_text_with_nothing_to_clean_is_the_same_string():
    text = "Semi-supervised learning, R&D\nand 5 - 3\t&c."
    assert clean(text) is text


def test_only_the_beginning_is_cleaned_if_an_end_is_given():
    text = CleanText("a&amp;b a&amp;b", end=7)
    assert text.text == "a&b a&amp;b" and text.source_span(4, 11) == (8, 15)


pieces = st.sampled_from(
    [*"abX1 \n\r-\u2010\u00ad&;.", "&amp;", "&nbsp;", "&shy;", "&fjlig;", "&#173;", "-\n", "\u0308", "bat-\nteries"]
)


@settings(max_examples=400, deadline=None)
@example(["a", "\u00ad", "-\n", "b"])
@given(st.lists(pieces, max_size=25))
def test_every_span_maps_back_in_order(parts):
    source = "".join(parts)
    text = CleanText(source)
    spans = [text.source_span(i, i + 1) for i in range(len(text.text))]
    for place, (start, end) in enumerate(spans):
        assert 0 <= start < end <= len(source)
        assert source[start:end] == text.text[place] or "&" in source[start:end]
        assert text.source_span(0, place + 1) == (spans[0][0], end)
    for (start, end), (later, _) in zip(spans, spans[1:], strict=False):
        assert end <= later or (start, end) == (later, _)  # two characters of one entity
    for _, start, end in split_words(text.text):
        first, last = text.source_span(start, end)
        assert clean(source[first:last]).replace("\u00ad", "") == text.text[start:end] or "-" in source or "&" in source


@settings(max_examples=200, deadline=None)
@given(st.lists(pieces, max_size=12), st.lists(pieces, max_size=12))
def test_title_and_text_are_cleaned_together_as_each_alone(title, text):
    title, text = "".join(title), "".join(text)
    if "-" not in title + text and "\u2010" not in title + text:  # a compound in one of them decides in both
        one = join_title(title, text)
        begin = len(one) - len(text.strip())
        assert clean(one) == clean(one[:begin]) + clean(one[begin:])


@pytest.mark.parametrize(
    "text",
    [
        "." * 400_000,
        ". " * 200_000,
        "a" * 400_000,
        "a-\n" * 20_000,
        "&amp;" * 20_000,
        "&#38;" * 20_000,
        "\u00ad\n" * 20_000,
        "a-" + "\n" * 400_000,
    ],
    ids=lambda text: repr(text[:8]),
)
def test_cleaning_takes_time_in_proportion_to_the_text(text):
    clean(text[:1000])
    start = time.process_time()
    clean(text)
    assert time.process_time() - start < 3


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("1 Tides . . . . . . . . 3\n2.1 Barrages........ 14", "1 Tides . 3\n2.1 Barrages. 14"),
        ("Preface \u00b7 \u00b7 \u00b7 \u00b7 \u00b7 \u00b7 xi", "Preface \u00b7 xi"),
        ("well..... 14 of them\nand....\nwait... 3", "well..... 14 of them\nand....\nwait... 3"),
    ],
)
def test_dot_leaders_of_a_table_of_contents_are_one_mark(text, cleaned):
    assert clean(text) == cleaned
    found = CleanText(text)
    start = found.text.rindex(" ") + 1
    assert text[slice(*found.source_span(start, len(found.text)))] == found.text[start:]


PLAIN_LEADERS = re.compile(r"([.\u00b7\u2026])(?:[ \t]?\1){4,}(?=[ \t]*(?:[0-9]+|[ivxlc]+)[ \t]*(?:[\n\r\f]|$))")


@settings(max_examples=1000, deadline=None)
@given(
    st.lists(st.sampled_from([*".\u00b7\u2026 \t\n3a", "xi", ".....", ". . . . . ", " 14\n"]), max_size=20).map("".join)
)
def test_dot_leaders_are_those_of_the_pattern_that_backtracks(text):
    found = [edit for edit in punctuation(text) if edit[2]]  # not the runs that are shortened
    assert found == [(*match.span(), match[1]) for match in PLAIN_LEADERS.finditer(text)]
