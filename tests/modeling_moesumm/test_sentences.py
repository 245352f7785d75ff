"""Sentences by rules, and pieces of a text that lose nothing and keep their limit."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modeling_moesumm.sentences_moesumm import (
    join_evenly,
    last_sentence_end,
    replace_surrogates,
    sentence_cuts,
    sentence_spans,
    split_to_fit,
    trim_to_sentence,
)


def sentences(text):
    return [text[start:end] for start, end in sentence_spans(text)]


def words_of(texts):
    return [len(text.split()) for text in texts]


def characters_of(texts):
    return [len(text) for text in texts]


# Joined with spaces, each has to be divided into just these.
DIVIDED = [
    ["One is here.", "Two is there!", "Is three?", "Yes."],
    ["Mr. Smith met Dr. J. R. Jones on Jan. 5 at 3.30 p.m. in Washington.", "They talked."],
    ["The U.S. President spoke.", "He left the U.S.", "The plane rose."],
    ["It is shown in Fig. 3 and in Eq. 4, see e.g. Section 2 or cf. Miller et al. 2019.", "Then it ends."],
    ['"Stop!" he said.', '"Why?" she asked.', "Nobody knew."],
    ["He said: “We won.”", "They cheered (loudly).", "It rained."],
    ["He waited... and waited.", "Then...", "Nothing came.", "So he left…", "The end."],
    ["It rose by 3.5 per cent to $1,234.56 in 2019.", "In 2020 it fell.", "Version 2.0.1 came out."],
    ["This was No. 5 in the list.", "He said no.", "They went on."],
    ["Acme Inc. Chief Jane Roe resigned.", "Ltd. is short."],
    ["It ended in Dec.", "The rest is known.", "See p. 17 and pp. 18."],
    ["Really?!", "Yes!!", "No?"],
    ["As known.[3]", "Another follows.[12]", "End."],
    ["Plan B.", "The next was plan C, at least."],
    ["He came (see below).", "[Some said no.]", "Others did not."],
    ["Visit www.example.com or write to a.b@example.org today.", "It is free."],
    ["everything is lower case.", "so it was written.", "was it good?", "it was."],
    ["Der Rat tagte am Montag.", "Über ihn sprach man.", "Ça va?", "Ñu está."],
    ["Here they are.", "1. First comes this.", "22. Then that: 3. Last the rest.", "It was in 1999.", "Then it ended."],
    ["He said this.", '"... We went on."', "All left."],
    ["他来了。", "她走了！", "真的吗？", "是。"],
]


@pytest.mark.parametrize("expected", DIVIDED, ids=lambda expected: expected[0][:20])
def test_sentences_end_where_a_reader_ends_them(expected):
    assert sentences(("" if expected[0] == "他来了。" else " ").join(expected)) == expected


@pytest.mark.parametrize(
    "text, expected",
    [
        ("A heading\n\nThe text begins. It ends", ["A heading", "The text begins.", "It ends"]),
        ("A heading\nThe text", ["A heading", "The text"]),
        (
            "a line that is\nwrapped by hand. Another\nand its end.",
            ["a line that is\nwrapped by hand.", "Another\nand its end."],
        ),
        ("Met with Mr.\nSmith today.", ["Met with Mr.\nSmith today."]),
        ("one\r\nTwo\r\n\r\nthree", ["one", "Two", "three"]),
        ("1. First thing.\n2. Second thing.\n 3. Third.", ["1. First thing.", "2. Second thing.", "3. Third."]),
        ("wrapped\n\nbut a new paragraph", ["wrapped", "but a new paragraph"]),
        ("  \n One. \n\n ", ["One."]),
        ("", []),
        (" \n ", []),
        ("...", ["..."]),
        ("no end at all", ["no end at all"]),
    ],
)
def test_line_breaks_end_paragraphs(text, expected):
    assert sentences(text) == expected


TEXTS = st.text(alphabet=st.sampled_from("aB1 .!?…\"')\n\t\r,;-。 éЖ🙂\ud800\u2028Mr"), max_size=120)


@settings(max_examples=300, deadline=None)
@given(text=TEXTS | st.text(max_size=60))
def test_cuts_rise_and_end_with_the_text(text):
    cuts = sentence_cuts(text)
    assert cuts == sorted(set(cuts)) and (not text or cuts[-1] == len(text)) and 0 not in cuts
    spans = sentence_spans(text)
    outside = "".join(text[a:b] for (_, a), (b, _) in zip([(0, 0), *spans], [*spans, (len(text), 0)], strict=True))
    assert not outside.strip()
    assert all(text[a:b] == text[a:b].strip() != "" for a, b in spans)
    assert 0 <= last_sentence_end(text) <= len(text)


@settings(max_examples=300, deadline=None)
@given(text=TEXTS | st.text(max_size=60), limit=st.integers(1, 12), count=st.sampled_from([words_of, characters_of]))
def test_pieces_lose_nothing_and_keep_their_limit(text, limit, count):
    pieces = split_to_fit(text, limit, count)
    assert "".join(pieces) == text
    assert all(count([piece.strip()])[0] <= limit for piece in pieces)
    if count is words_of and "。" not in text:  # never inside a word
        assert [word for piece in pieces for word in piece.split()] == text.split()


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=30), limit=st.integers(9, 25))
def test_runs_are_as_few_as_can_be_and_then_as_even(sizes, limit):
    parts = ["x" * size for size in sizes]
    runs = [run for run, _ in join_evenly(list(zip(parts, sizes, strict=True)), limit, characters_of)]
    greedy, total = 1, 0
    for size in sizes:
        greedy, total = (greedy + 1, size) if total + size > limit else (greedy, total + size)
    assert "".join(runs) == "".join(parts) and len(runs) <= greedy
    best = [0] + [10**9] * len(sizes)  # least longest run with `greedy` runs, by trying everything
    for _ in range(greedy):
        best = [
            min([max(best[a], sum(sizes[a:b])) for a in range(b)], default=0) if b else 0 for b in range(len(sizes) + 1)
        ]
    assert max(map(len, runs)) == best[-1]


def test_a_text_is_divided_at_sentences_then_clauses_then_words_then_characters():
    text = "One two three. Four five, six seven; eight nine ten eleven twelve. End."
    assert split_to_fit(text, 100, words_of) == [text]
    pieces = split_to_fit(text, 5, words_of)
    assert pieces == ["One two three. ", "Four five, six seven; ", "eight nine ten eleven twelve. ", "End."]
    assert split_to_fit("abcdefghij klm", 4, characters_of) == ["abcd", "efgh", "ij ", "klm"]


def test_the_last_piece_is_no_tiny_rest():
    text = " ".join(f"Word{i}." for i in range(41))
    assert words_of(split_to_fit(text, 20, words_of)) == [14, 14, 13]
    assert words_of(split_to_fit("word " * 41, 20, words_of)) == [14, 14, 13]


def test_a_piece_that_grows_when_it_is_joined_is_parted_again():
    def count(texts):  # one token more wherever two sentences meet
        return [len(text.split()) + text.count(". ") for text in texts]

    text = "a b c. d e f. g h i. j k l. m n o."
    pieces = split_to_fit(text, 9, count)
    assert "".join(pieces) == text and max(count([piece.strip() for piece in pieces])) <= 9


def test_a_limit_into_which_no_character_fits_is_refused():
    with pytest.raises(ValueError, match="'a' has 4 tokens.*limit of 3"):
        split_to_fit("a", 3, lambda texts: [4 * len(text) for text in texts])


@pytest.mark.parametrize(
    "text, expected",
    [
        ("One is whole. Two is cut in the mid", "One is whole."),
        ("All is whole. So is this.", "All is whole. So is this."),
        ('He said "yes." And the', 'He said "yes."'),
        ("One is whole. It was Mr.", "One is whole."),
        ("One is whole. It rose by 3.", "One is whole."),
        ("It was led by Dr. Who and the", "It was led by Dr. Who and…"),
        ("not one sentence, the gover", "not one sentence, the…"),
        ("so it is, the", "so it is…"),
        ("word", "word…"),
        ("", ""),
        ("一个。两", "一个。"),
        ("Line without a stop\nand another", "Line without a stop\nand…"),
        ("Wait... what is", "Wait... what…"),
    ],
)
def test_a_cut_summary_ends_at_its_last_sentence_end(text, expected):
    assert trim_to_sentence(text) == expected


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_a_trimmed_text_is_a_beginning_and_trimmed_again_the_same(text):
    trimmed = trim_to_sentence(text)
    assert text.strip().startswith(trimmed.removesuffix("…")) and trimmed == trimmed.strip()


@pytest.mark.parametrize(
    "text",
    ["." * 200_000 + "a", ".'" * 100_000, "a" * 200_000, " " * 200_000, "\n" * 200_000, ". " * 100_000, "a, " * 60_000],
)
def test_monstrous_texts_are_divided_in_good_time(text):
    start = time.process_time()
    pieces = split_to_fit(text, 500, characters_of)
    assert "".join(pieces) == text
    trim_to_sentence(text)
    assert time.process_time() - start < 5


def test_lone_surrogates_are_replaced_one_for_one():
    assert replace_surrogates("a\ud800b🙂") == "a\ufffdb🙂" and replace_surrogates("é🙂") == "é🙂"
