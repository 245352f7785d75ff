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


@pytest.fixture(scope="module")
def tokenizer():
    return ExhirdTokenizer.from_words([*MARKS, *WORDS])


def strings(text):
    return [word for word, _, _ in split_words(text)]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("The Graph-cuts/trees; k_means", "the graph cuts trees k_means"),
        ("graph\ncuts\r\nof\ttrees\x0cnow", "graph cuts of trees now"),
        ("e.g. Bayes's (so-called) rule, etc.", "e . g . bayes ' s ( so called ) rule , etc ."),
        ("Bayes\u2019s \u201cnaïve\u201d rules\u2014or not\u2026", "bayes ' s naive rules or not . . ."),
        ("Erd\u0151s, cafe\u0301, \ufb01nite, \uff27raph", "erdos , cafe , finite , graph"),
        ("Java\u2122 x\u00b2", "java x2"),
        ("net\u00adwork\u200bs \x00a\x07b", "networks ab"),
        ("\u03b1-helix \u6df1\u5ea6 deep \U0001f600 nets", "helix deep nets"),
        ("as in [12] and {\\bf x}, ] or } here[3]now", "as in and , or here now"),
        ("in [0,1) and [a [b] c] end", "in <digit> ) and end"),
        ("12d and 2w2 but d12 and _5", "<digit> and <digit> but d12 and _5"),
        ("3.5, 1,000 -7 +.05 2.5e3 1.2.3", "<digit> , <digit>"),
        ("10 - 20% of 3/4", "<digit> of <digit>"),
        ("(1), (2) 5.", "( <digit> ) , ( <digit> ) <digit> ."),
        ("v1.5 a.5 5..6", "v1 . <digit> a . <digit> . . <digit>"),
        ("p<0.05 a>b", "p < <digit> a > b"),
        ("<digit> 5<digit>x <EOT> <p_start><a_start>", "<digit> x <eot> <p_start> <a_start>"),
        ("<s> </s> <unk> <blank>", "< s > < s > < unk > < blank >"),
        ("", ""),
        (" \n;-!?\u2014\u03b1[x]", ""),
    ],
)
def test_texts_become_words(text, expected, tokenizer):
    assert strings(text) == expected.split()
    assert [word for word, _, _ in tokenizer.split_words(text)] == expected.split()


@pytest.mark.parametrize(
    "text, expected",
    [
        ("The naïve 10 - 20% GRAPH", ["The", "naïve", "10 - 20", "GRAPH"]),
        ("\ufb01nite [3] .5 (<digit> 7)", ["\ufb01nite", ".5", "(", "<digit> 7", ")"]),
        ("2 [x] 3 net\u00adwork", ["2 [x] 3", "net\u00adwork"]),
        ("\u2026x", ["\u2026", "\u2026", "\u2026", "x"]),
    ],
)
def test_each_word_says_where_it_stands(text, expected):
    assert [text[start:end] for _, start, end in split_words(text)] == expected


def test_the_backends_offsets_of_a_number_are_its_last_character_only(tokenizer):
    """What `words` is for."""
    found = tokenizer("of 10 - 20 of", return_offsets_mapping=True)["offset_mapping"]
    assert found == [(0, 2), (9, 10), (11, 13)]
    assert [place[1:] for place in tokenizer.split_words("of 10 - 20 of")] == [(0, 2), (3, 10), (11, 13)]


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


@settings(max_examples=400, deadline=None)
@given(MESSY)
def test_words_are_those_of_the_rule(text):
    assert strings(text) == reference_words(text)


@settings(max_examples=300, deadline=None)
@given(st.one_of(MESSY, st.text(max_size=30)))
def test_words_and_ids_agree_and_places_hold_their_words(text):
    tokenizer = AGREEING
    found = tokenizer.split_words(text)
    known = tokenizer.get_vocab()
    ids = [known.get(word, 0) for word, _, _ in found]
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == tokenizer(text)["input_ids"] == ids
    assert all(i not in (1, 2, 3, 4) for i in ids)  # no padding, end or `;` comes from a text
    for word, start, end in found:
        assert 0 <= start < end <= len(text)
        assert word in strings(text[start:end])
    ends = [end for _, _, end in found]
    assert ends == sorted(ends)


AGREEING = ExhirdTokenizer.from_words([*MARKS, *WORDS])


def test_halves_of_surrogate_pairs_are_no_characters():
    assert split_words("graph \ud800cuts") == [("graph", 0, 5), ("cuts", 7, 11)]


@pytest.mark.parametrize("unit", ["Graph naïve 12 [3] ", "[", "1.1", "<", "[a{", "a[b]", "1 ", "aaaaaaaaaa"])
def test_long_texts_take_time_in_proportion(unit):
    before = time.perf_counter()
    split_words(unit * 50_000)
    assert time.perf_counter() - before < 8  # half a second on a free core; a square would be minutes


def test_a_vocabulary_of_texts_has_the_most_frequent_words():
    texts = ["b b a 7 ; c", ["c", "B"], "a <p_start> d"]
    tokenizer = ExhirdTokenizer.from_texts(texts)
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == [*SPECIAL, *MARKS, "b", "a", "c", "d"]
    assert len(ExhirdTokenizer.from_texts(texts, vocab_size=7)) == 4 + 7
    assert ExhirdTokenizer.from_texts(iter(texts[::-1])).get_vocab() == tokenizer.get_vocab()


def test_special_words_and_sides(tokenizer):
    special = (tokenizer.unk_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert special == (0, 1, 2, 3)
    assert (tokenizer.end_phrase_token_id, tokenizer.present_token_id, tokenizer.absent_token_id) == (4, 5, 6)
    assert tokenizer.title_end_token_id == 8 and tokenizer.padding_side == "right"
    assert len(tokenizer) == 9 + len(WORDS)
    both = tokenizer(["graph", "the graph"], padding=True)
    assert both == {"input_ids": [[9, 1], [11, 9]], "attention_mask": [[1, 0], [1, 1]]}
    assert tokenizer.decode([11, 9, 3], skip_special_tokens=True) == "the graph"


def test_a_saved_vocabulary_is_checked_when_it_is_opened(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    saved["model"]["vocab"]["<other>"] = saved["model"]["vocab"].pop("<a_start>")
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match="has no <a_start>"):
        ExhirdTokenizer.from_pretrained(tmp_path)
    assert len(ExhirdTokenizer.from_words([*SPECIAL, *MARKS])) == 9  # with the four at its head


def test_a_source_tells_unknown_words_apart(tokenizer):
    V = len(tokenizer)
    source = tokenizer.encode_source("Zeta graph, omega 12 zeta", title="The zeta")
    assert source.words == ["the", "zeta", "<eot>", "zeta", "graph", ",", "omega", "<digit>", "zeta"]
    assert source.input_ids == [11, 0, 8, 0, 9, 14, 0, 7, 0]
    assert source.copy_ids == [11, V, 8, V, 9, 14, V + 1, 7, V]
    assert source.oov_words == ["zeta", "omega"]
    assert source.offsets[:4] == [("title", 0, 3), ("title", 4, 8), None, ("text", 0, 4)]
    assert tokenizer.convert_ids_to_words(source.copy_ids, source.oov_words) == source.words
    assert tokenizer.convert_ids_to_words(source.input_ids, [])[1] == "<unk>"


@pytest.mark.parametrize("title", [None, "", " ?! "])
def test_without_a_title_there_is_no_mark(title, tokenizer):
    assert tokenizer.encode_source("graph", title).words == ["graph"]
    assert tokenizer.encode_source("", title) == ([], [], [], [], [])
    assert tokenizer.encode_source("", "graph").words == ["graph", "<eot>"]


TEXT = "The naïve zeta-graph </s> [3] of 10 - 20\ncuts"


def same(first, second):
    assert first.get_vocab() == second.get_vocab()
    assert first(TEXT) == second(TEXT) and first.split_words(TEXT) == second.split_words(TEXT)
    assert first.encode_source(TEXT, "graph") == second.encode_source(TEXT, "graph")


def test_saved_and_loaded_it_is_the_same(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    assert {"tokenizer.json", "tokenizer_config.json", "tokenization_exhird.py"} <= set(os.listdir(tmp_path))
    same(ExhirdTokenizer.from_pretrained(tmp_path), tokenizer)
    for other in (copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        same(other, tokenizer)
    by_name = AutoTokenizer.from_pretrained(tmp_path)
    ExhirdConfig(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    for found in (by_name, AutoTokenizer.from_pretrained(tmp_path)):
        assert type(found) is ExhirdTokenizer
        same(found, tokenizer)
