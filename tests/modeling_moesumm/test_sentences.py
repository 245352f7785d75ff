"""Sentences by rules, and windows of a text that lose nothing."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modeling_moesumm.sentences_moesumm import (
    pack,
    replace_surrogates,
    sentence_cuts,
    sentence_spans,
    split_to_fit,
    trim_to_sentence,
    without_repeats,
)

words_of = lambda texts: [len(text.split()) for text in texts]  # noqa: E731
characters_of = lambda texts: list(map(len, texts))  # noqa: E731

# each is divided at the bars, with or without the spaces beside them
DIVIDED = [
    "One is here. |Two is there! |Is three? |Yes.",
    "Mr. Smith met Dr. J. R. Jones on Jan. 5 at 3.30 p.m. in Washington. |They talked.",
    "The U.S. President spoke. |The plane rose.",
    "It is shown in Fig. 3 and in Eq. 4, see e.g. Section 2 or cf. Miller et al. 2019. |Then it ends.",
    '"Stop!" he said. |"Why?" she asked. |Nobody knew.',
    "He said: “We won.” |They cheered (loudly). |It rained.",
    "He waited... and waited. |Then... |Nothing came. |So he left… |The end.",
    "It rose by 3.5 per cent to $1,234.56 in 2019. |In 2020 it fell. |Version 2.0.1 came out.",
    "Really?! |Yes!! |No? |As known.[3] |Another follows.[12] |End.",
    "He came (see below). |[Some said no.] |Visit www.example.com or write to a.b@example.org today. |It is free.",
    "everything is lower case. |so it was written. |was it good? |it was.",
    "Der Rat tagte am Montag. |Über ihn sprach man. |Ça va? |Ñu está.",
    "他来了。|她走了！|真的吗？|是。",
    "A heading\n\n|The text begins. |It ends",
    "a line that is\nwrapped by hand. |Another\nand its end.",
    "one\r\n|Two\r\n\r\n|three\n\n|but a new paragraph",
    "1. First thing.\n|2. Second thing.\n |3. Third.",
    "  \n |One. \n\n ",
    "...",
]


@pytest.mark.parametrize("marked", DIVIDED, ids=lambda marked: marked[:20])
def test_sentences_end_where_a_reader_ends_them(marked):
    text = marked.replace("|", "")
    expected = [part.strip() for part in marked.split("|") if part.strip()]
    assert [text[start:end] for start, end in sentence_spans(text)] == expected


TEXTS = st.text(alphabet=st.sampled_from("aB1 .!?…\"')\n\t\r,;-。 éЖ🙂\ud800\u2028Mr"), max_size=120)
each_text = given(
    text=TEXTS | st.text(max_size=60), limit=st.integers(1, 12), count=st.sampled_from([words_of, characters_of])
)


@settings(max_examples=100, deadline=None)
@each_text
def test_cuts_rise_and_windows_lose_nothing_and_keep_their_limit(text, limit, count):
    cuts = sentence_cuts(text)
    assert cuts == sorted(set(cuts)) and (not text or cuts[-1] == len(text)) and 0 not in cuts
    spans = sentence_spans(text)
    outside = "".join(text[a:b] for (_, a), (b, _) in zip([(0, 0), *spans], [*spans, (len(text), 0)], strict=True))
    assert not outside.strip() and all(text[a:b] == text[a:b].strip() != "" for a, b in spans)
    trimmed = trim_to_sentence(text)
    assert text.strip().startswith(trimmed.removesuffix("…")) and trimmed == trimmed.strip()
    assert len(replace_surrogates(text)) == len(replace_surrogates(text).encode().decode()) == len(text)
    pieces = split_to_fit(text, limit, count)
    assert "".join(pieces) == text and max(count(pieces)) <= limit
    if count is words_of and "。" not in text:  # never inside a word
        assert [word for piece in pieces for word in piece.split()] == text.split()


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(5, 12), min_size=1, max_size=30), limit=st.integers(12, 40))
def test_windows_are_as_few_as_can_be_and_then_as_even(sizes, limit):
    text = "".join("B" + "b" * (size - 3) + ". " for size in sizes)
    pieces, cuts, fewest = split_to_fit(text, limit, characters_of), sentence_cuts(text), len(pack(sizes, limit))
    assert len(pieces) == fewest and {*pieces} <= {text[a:b] for a in [0, *cuts] for b in cuts}
    best = [0] + [10**9] * len(sizes)  # least longest piece of `fewest`, by trying everything
    for _ in range(fewest):
        best = [0] + [min(max(best[a], sum(sizes[a:b])) for a in range(b)) for b in range(1, len(sizes) + 1)]
    assert max(map(len, pieces)) == best[-1]


def test_a_text_is_divided_at_sentences_then_words_then_characters():
    text = "One two three. Four five, six seven; eight nine ten. End."
    assert split_to_fit(text, 7, words_of) == ["One two three. ", "Four five, six seven; eight nine ten. ", "End."]
    one = "Seven words are all in one sentence."
    assert split_to_fit(one, 4, words_of) == ["Seven words are all", " in one sentence."]
    assert split_to_fit("abcdefghij", 4, characters_of) == ["abcd", "efgh", "ij"]
    assert words_of(split_to_fit(" ".join(f"Word{i}." for i in range(41)), 20, words_of)) == [14, 14, 13]


TRIMMED = {
    "One is whole. Two is cut in the mid": "One is whole.", "All is whole. So is this.": "All is whole. So is this.",
    'He said "yes." And the': 'He said "yes."', "One is whole. It was Mr.": "One is whole.", "word": "word…", "": "",
    "One is whole. It rose by 3.": "One is whole.", "It was led by Dr. Who and the": "It was led by Dr. Who and…",
    "not one sentence, the gover": "not one sentence, the…", "so it is, the": "so it is…", "一个。两": "一个。",
    "Line without a stop\nand another": "Line without a stop\nand…",
}  # fmt: skip
ONCE = {
    "He has a history of asthma. He has a history of gout. He smokes.": "He has a history of asthma. He has a history of gout. He smokes.",
    "It is a cat. It sat on the mat. The “cat” is it. it sat, on the mat.": "It is a cat. It sat on the mat. The “cat” is it. it sat, on the mat.",
    "It is a black cat. It sat on the mat. It is a (black) CAT! It sat.": "It is a black cat. It sat on the mat. It sat.",
    "A bridge over a bridge over a bridge over a bridge.": "A bridge over…", "One two. One two. Three.": "One two. Three.",
    "The plan is good. the plan is good. The Plan is good.": "The plan is good.", "All is well. So so so so so.": "All is well. So…",
    "Pain:\nNone.\nFever:\nNone.": "Pain:\nNone.\nFever:\nNone.", "Buy milk. Go. Buy milk. Go. Buy milk. Go.": "Buy milk. Go. Buy milk.",
    "The rain in the north and the snow in the north fell.": "The rain in the north and the snow in the north fell.",
    "He uses C on the old machine. He uses C++ on the old machine.": "He uses C on the old machine. He uses C++ on the old machine.",
}  # fmt: skip


@pytest.mark.parametrize("change, pairs", [(trim_to_sentence, TRIMMED), (without_repeats, ONCE)])
def test_a_cut_summary_ends_at_its_last_sentence_end_and_sentences_that_repeat_others_are_left_out(change, pairs):
    assert {text: change(text) for text in pairs} == pairs


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["It", "was", "a", "tooth", "met.", "So,"]), max_size=60).map(" ".join))
def test_all_that_a_text_says_is_in_its_summary_once(text):
    def runs_of(text):
        sentences = [re.findall(r"\w+", text[start:end].lower()) for start, end in sentence_spans(text)]
        return [{tuple(words[i : i + 4]) for i in range(len(words) - 3)} for words in sentences]

    once = without_repeats(text)
    before, after = runs_of(text), runs_of(once)
    assert bool(once) == bool(text) and without_repeats(once) == once
    assert all(own - set().union(*after[:i]) for i, own in enumerate(after) if own)
    assert "…" in once or set().union(*before) == set().union(*after)


@pytest.mark.parametrize("unit", [".", ".'", "a", " ", "\n", ". ", "a, "])
def test_monstrous_texts_are_divided_in_good_time(unit):
    text, start = unit * (100_000 // len(unit)), time.process_time()
    assert "".join(split_to_fit(text, 500, characters_of)) == text
    trim_to_sentence(text)
    assert time.process_time() - start < 3
