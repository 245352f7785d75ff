"""Cleaning: what is joined, what is left unchanged, and the mapping of spans back to the source."""

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lexperts_lite.clean import SEPARATOR, CleanText, clean
from lexperts_lite.layout import unit_numbers
from lexperts_lite.words import join_title, split_words

MARK = f" {SEPARATOR} "  # of a symbol


@pytest.mark.parametrize(
    "text, cleaned",
    [
        ("lithium-ion bat-\nteries", "lithium-ion batteries"),
        ("bat- \r\n   teries", "batteries"),
        ("bat\u2010\nteries, bat\u00ad\nteries, bat\u00adteries", "batteries, batteries, batteries"),
        ("bat-\n\x0cteries", "batteries"),  # over the end of a page
        ("ko\u0308p-\nfen", "ko\u0308pfen"),
        # a hyphen of its own
        ("LSTM-\nbased k-\nmeans CO2-\nfree x-\nquuxes", "LSTM-based k-means CO2-free x-quuxes"),
        ("Navier-\nStokes, COVID-\n19", "Navier-Stokes, COVID-19"),
        ("semi-\nsupervised, Semi-Supervised", "semi-supervised, Semi-Supervised"),
        ("blood-\nfeeding insects", "blood-feeding insects"),
        ("wave-\nlet, a wavelet", "wavelet, a wavelet"),  # both halves are words, but the text has the whole
        ("zorb-\nquux; a zorb, a quux", "zorb-quux; a zorb, a quux"),  # words of the text
        ("Navier--Stokes, Karush--Kuhn--Tucker", "Navier-Stokes, Karush-Kuhn-Tucker"),  # LaTeX's dash
        ("over-\nfitting, hash-\ning, gluten-\nfree, fine-\ngrained", "overfitting, hashing, gluten-free, fine-grained"),
        ("micro-\nstructure, photo-\nsynthesis, bio-\nreactor", "microstructure, photosynthesis, bioreactor"),
        ("end-\nto-end, pre-\nto post-war", "end-to-end, pre-\nto post-war"),
        # PDFs' minus, ions, footnotes, Markdown
        ("lithium\u2212ion, Ca\u00b2\u207a, m\u00b2, storage\u00b9", "lithium-ion, Ca2+, m\u00b2, storage"),
        ("_graph cuts_ and __min flow__ in __init__ of a_b_", "graph cuts and min flow in __init__ of a_b_"),
        # no hyphenation
        ("pre-\nand post-processing", "pre-\nand post-processing"),
        ("a dash -\nhere, semi- supervised, x-", "a dash -\nhere, semi- supervised, x-"),
        ("-\nab, 1 -\nab, good--if new, A -- B", "-\nab, 1 -\nab, good--if new, A -- B"),
        ("soft \u00ad\n- end\u00ad\n", "soft \n- end\n"),
        # entities
        ("a&nbsp;b &amp; c", "a\u00a0b & c"),
        ("caf&eacute; &#233; &#xE9; &#XE9;", "café é é é"),
        ("&amp;nbsp;&amp;amp;&#38;lt;&amp;#38;gt;", "\u00a0&<>"),  # escaped twice
        ("a&nbsp b&amp", "a\u00a0 b&"),
        ("soft&shy;ware bat&#173;\nteries", "software batteries"),
        ("R&D AT&T; &foo; & ; &; &#; ?a=1&lt=2&notit; &amplifier", "R&D AT&T; &foo; & ; &; &#; ?a=1&lt=2&notit; &amplifier"),
        ("&#1;&#xD800;", MARK),
        # characters that look alike, and symbols
        ("\ufb01nance H\u2082O \uff21\uff22 world war \u2161 Bayes\u00b4s a\u200bb\0", "finance H2O AB world war II Bayes's ab"),
        ("storage\U0001f680 \u2714done \uf0b7 20 \u2103 \u2211x \U0001f469\u200d\U0001f52c", f"storage{MARK} {MARK}done {MARK} 20 {MARK} {MARK}x {MARK}"),
        ("5 \u20ac, C++, a^b, x\u00d7y, \U0001d400", f"5 \u20ac, C++, a^b, x{MARK}y, A"),
        # runs of punctuation
        ("1 Tides . . . . . . . . . . . . . . 3", "1 Tides . . . 3"),
        ("a -------------- b\nand....", "a --- b\nand...."),
    ],
)  # fmt: skip
def test_texts_are_cleaned(text, cleaned):
    assert clean(text) == cleaned


def test_the_lines_of_a_title_are_one():
    title, text = "Deep Residual Learning for Image\n  Recogni-\ntion", "We present a method\nand compare it."
    found = CleanText(join_title(title, text), title=len(title) + 2)
    assert found.text == f"Deep Residual Learning for Image Recognition. {text}"
    assert found.source_span(33, 44) == (35, 48)


WHOLE = ["&amp;", "&nbsp;", "&shy;", "&fjlig;", "&#173;", "-\n", "\u0308", "bat-\nteries", "--A"]
pieces = st.sampled_from([*"abX1 \n\r-\u2010\u00ad&;.\u2714", *WHOLE])


@settings(max_examples=100, deadline=None)
@example(["a", "\u00ad", "-\n", "b"], 0)
@given(st.lists(pieces, max_size=25), st.integers(0, 9))
def test_every_span_maps_back_in_order(parts, title):
    source = "".join(parts)
    text = CleanText(source, title)
    spans = [text.source_span(i, i + 1) for i in range(len(text.text))]
    for place, (start, end) in enumerate(spans):
        assert 0 <= start < end <= len(source)
        assert text.source_span(0, place + 1) == (spans[0][0], end)
        if source[start:end] != text.text[place]:
            assert any(sign in source[start:end] for sign in "&\u2714-\n\r")
    for (start, end), (later, _) in zip(spans, spans[1:], strict=False):
        assert end <= later or (start, end) == (later, _)  # two characters of one edit


symbol = st.characters(categories=("So", "Sk"), min_codepoint=0x80)
# not an apostrophe between letters, nor a letter of Chinese
symbol = symbol.filter(lambda sign: clean(f"a{sign}a") == f"a{MARK}a")


@settings(max_examples=200, deadline=None)
@given(symbol, st.integers(0, 5), st.sampled_from(["{}{}", "{}{} ", "{} {}", "{} {} "]))
def test_a_symbol_beside_a_word_hides_nothing_and_divides(sign, place, form):
    """A tokenizer that drops controls reads the same text; only no phrase goes over the symbol."""
    parts = ["new", "blog", "post", "on", "cloud", "storage"]
    before, after = " ".join(parts[: place + 1]), " ".join(parts[place + 1 :])
    words = split_words(clean(f"{form.format(before, sign)}{after}"))
    assert words.text.replace(SEPARATOR, "").split() == [word for word, _, _ in words] == parts
    units = unit_numbers(words)
    assert (units - units[0]).tolist() == [int(i > place) for i in range(6)]


LONG = [
    ".",
    ". ",
    "a",
    "a-\n",
    "a-\nto ",
    "_a_ ",
    "_ab ",
    "abc\u00b9\u207a",
    "A--",
    "&amp;",
    "&#38;",
    "\u00ad\n",
    "\U0001f680",
]


@pytest.mark.parametrize(
    "text", [*(part * 40_000 for part in LONG), "a-" + "\n" * 100_000], ids=lambda text: repr(text[:8])
)
def test_cleaning_takes_time_in_proportion_to_the_text(text):
    clean(text[:1000])
    start = time.process_time()
    clean(text)
    assert time.process_time() - start < 2
