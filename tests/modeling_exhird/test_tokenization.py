"""Words and where they stand, the vocabulary, sub-words, and what is saved."""

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
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from modeling_exhird import ExhirdConfig
from modeling_exhird.tokenization_exhird import MARKS, SPECIAL, ExhirdTokenizer, split_words

WORDS = ["graph", "cuts", "the", "naive", "of", ",", ".", "'", "(", ")", "d12", "a", "s", "<", ">"]


@pytest.fixture(scope="module")
def tokenizer():
    return ExhirdTokenizer.from_words([*MARKS, *WORDS])


@pytest.fixture(scope="module")
def with_subword_tokenizer(tokenizer, tiny_tokenizer):
    return tokenizer.with_subword_tokenizer(tiny_tokenizer)


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
    assert len(ExhirdTokenizer.from_texts(texts, min_count=2)) == 4 + 5 + 3
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


def test_vocabularies_that_cannot_be_are_refused(tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"has no <p_start>, <eot>"):
        ExhirdTokenizer.from_words([";", "<a_start>", "<digit>", "graph"])
    with pytest.raises(ValueError, match="'graph' would have two ids"):
        ExhirdTokenizer.from_words([*MARKS, "graph", "cut", "graph"])
    with pytest.raises(ValueError, match="'<unk>' would have two ids"):
        ExhirdTokenizer.from_words([*MARKS, "<unk>"])
    with pytest.raises(ValueError, match="does not begin with <unk>, <blank>, <s>, </s>"):
        ExhirdTokenizer({word: i for i, word in enumerate([*MARKS, *SPECIAL])})
    with pytest.raises(ValueError, match="texts .*'graph cuts'"):
        ExhirdTokenizer.from_texts("graph cuts")
    with pytest.raises(ValueError, match="vocab_size=4 .* 5 marks"):
        ExhirdTokenizer.from_texts(["graph"], vocab_size=4)
    with pytest.raises(ValueError, match="No words"):
        ExhirdTokenizer.from_texts(["", "--"])
    tokenizer.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    saved["model"]["vocab"]["<other>"] = saved["model"]["vocab"].pop("<a_start>")
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match="has no <a_start>"):
        ExhirdTokenizer.from_pretrained(tmp_path)
    complete = ExhirdTokenizer.from_words([*SPECIAL, *MARKS])  # with the four at its head
    assert len(complete) == 9


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
    with pytest.raises(ValueError, match=f"{V + 2} is not .* {V} words, .* 2 more"):
        tokenizer.convert_ids_to_words([V + 2], source.oov_words)


@pytest.mark.parametrize("title", [None, "", " ?! "])
def test_without_a_title_there_is_no_mark(title, tokenizer):
    assert tokenizer.encode_source("graph", title).words == ["graph"]
    assert tokenizer.encode_source("", title) == ([], [], [], [], [])
    assert tokenizer.encode_source("", "graph").words == ["graph", "<eot>"]


def test_subwords_have_the_indices_of_their_words(with_subword_tokenizer, tiny_tokenizer):
    title, text = "Graph cut", "The naïve graph-cuts [12] 1,000"
    words = with_subword_tokenizer.encode_source(text, title).words
    assert " ".join(words) == "graph cut <eot> the naive graph cuts <digit>"
    read = with_subword_tokenizer.encode_subwords(text, title)
    tokens = tiny_tokenizer.convert_ids_to_tokens(read["subword_ids"][0])
    expected = "[CLS] graph cut [SEP] the n ##a ##i ##v ##e graph - cuts [ 1 ##2 ] 1 , 0 ##0 ##0 [SEP]"
    assert " ".join(tokens) == expected
    assert read["subword_mask"] == [[1] * len(tokens)]
    expected = [-1, 0, 1, -1, 3, 4, 4, 4, 4, 4, 5, -1, 6, -1, -1, -1, -1, 7, 7, 7, 7, 7, -1]
    assert read["subword_word_ids"] == [expected]
    alone = with_subword_tokenizer.encode_subwords(text)
    assert alone["subword_ids"] == [[read["subword_ids"][0][0], *read["subword_ids"][0][4:]]]
    assert alone["subword_word_ids"] == [[-1, *(i if i < 0 else i - 3 for i in expected[4:])]]
    assert with_subword_tokenizer.encode_subwords("", title)["subword_word_ids"] == [[-1, 0, 1, -1]]
    assert with_subword_tokenizer.encode_subwords("", None)["subword_word_ids"] == [[-1, -1]]


def test_long_texts_are_read_in_windows(with_subword_tokenizer):
    read = with_subword_tokenizer.encode_subwords("the graph of the network", "graph cuts", max_length=8)
    assert read["subword_word_ids"] == [
        [-1, 0, 1, -1, 3, 4, 5, -1],
        [-1, 0, 1, -1, 5, 6, 7, -1],
    ]  # each after the title
    long = with_subword_tokenizer.encode_subwords("the " * 100)
    assert [len(ids) for ids in long["subword_ids"]] == [64, 48]  # the encoder's model_max_length; 8 are shared
    assert long["subword_word_ids"][1][1] == 54
    boundless = copy.deepcopy(with_subword_tokenizer)
    boundless.subword_tokenizer.model_max_length = int(1e30)  # as T5's
    assert [len(ids) for ids in boundless.encode_subwords("the " * 1000)["subword_ids"]] == [512, 512, 110]
    both = with_subword_tokenizer.encode_subwords(
        "the graph", "graph " * 20, max_length=10
    )  # too long a title for each window
    assert both["subword_word_ids"][-1] == [-1, 21, 22, -1]
    assert {word for words in both["subword_word_ids"][:-1] for word in words} == {-1, *range(20)}
    assert max(map(len, both["subword_ids"])) == 10


@pytest.fixture(scope="module")
def byte_tokenizer():
    """Sub-words of bytes as RoBERTa's, whose offsets include the preceding space."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "g"), ("r", "a"), ("Ġ", "1")]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *map("".join, merges)])}
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("kind", ["words", "bytes"])
def test_each_subword_belongs_to_the_first_word_that_it_overlaps(kind, tokenizer, tiny_tokenizer, byte_tokenizer):
    subword_tokenizer = tiny_tokenizer if kind == "words" else byte_tokenizer
    both = tokenizer.with_subword_tokenizer(subword_tokenizer)

    @settings(max_examples=100, deadline=None)
    @given(MESSY)
    def check(text):
        places = [(i, p[1], p[2]) for i, p in enumerate(both.encode_source(text).offsets)]
        read = both.encode_subwords(text, max_length=10_000)
        encoded = subword_tokenizer(text, return_offsets_mapping=True)
        assert read["subword_ids"] == [encoded["input_ids"]]
        for (start, end), index in zip(encoded["offset_mapping"], read["subword_word_ids"][0], strict=True):
            overlapping = [i for i, first, last in places if first < end and start < last and start < end]
            assert index == (overlapping or [-1])[0]

    check()


def test_second_tokenizers_that_do_not_work_are_refused(tokenizer, with_subword_tokenizer):
    assert tokenizer.subword_tokenizer is None and with_subword_tokenizer.subword_tokenizer is not None  # a copy
    with pytest.raises(ValueError, match="subword_tokenizer=None.*with_subword_tokenizer"):
        tokenizer.encode_subwords("graph")
    with pytest.raises(ValueError, match="str is not a fast tokenizer"):
        tokenizer.with_subword_tokenizer("bert")
    with pytest.raises(ValueError, match="subword_tokenizer='bert'"):
        ExhirdTokenizer.from_pretrained("somewhere", subword_tokenizer="bert")


TEXT = "The naïve zeta-graph </s> [3] of 10 - 20\ncuts"


def same(first, second):
    assert first.get_vocab() == second.get_vocab()
    assert first(TEXT) == second(TEXT) and first.split_words(TEXT) == second.split_words(TEXT)
    assert first.encode_source(TEXT, "graph") == second.encode_source(TEXT, "graph")
    assert (first.subword_tokenizer is None) == (second.subword_tokenizer is None)
    if first.subword_tokenizer is not None:
        assert first.encode_subwords(TEXT, "graph") == second.encode_subwords(TEXT, "graph")


def test_saved_and_loaded_it_is_the_same(tokenizer, with_subword_tokenizer, tiny_tokenizer, tmp_path, caplog):
    plain, both = tmp_path / "plain", tmp_path / "both"
    tokenizer.save_pretrained(plain)
    assert {"tokenizer.json", "tokenizer_config.json", "tokenization_exhird.py"} <= set(os.listdir(plain))
    assert not (plain / "subword_tokenizer").exists()
    same(ExhirdTokenizer.from_pretrained(plain), tokenizer)
    with_subword_tokenizer.save_pretrained(both)
    loaded = ExhirdTokenizer.from_pretrained(both)
    same(loaded, with_subword_tokenizer)
    loaded.save_pretrained(tmp_path / "again")
    same(ExhirdTokenizer.from_pretrained(tmp_path / "again"), with_subword_tokenizer)
    same(ExhirdTokenizer.from_pretrained(plain, subword_tokenizer=tiny_tokenizer), with_subword_tokenizer)
    for change in (copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))):
        same(change(with_subword_tokenizer), with_subword_tokenizer)
    # without its second tokenizer it is saved so, though an older one lies there
    loaded.with_subword_tokenizer(None).save_pretrained(both)
    same(ExhirdTokenizer.from_pretrained(both), tokenizer)


def test_a_missing_subword_tokenizer_is_warned_of(with_subword_tokenizer, tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr("modeling_exhird.tokenization_exhird.logger.warning", warnings.append)
    with_subword_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "subword_tokenizer").rename(tmp_path / "elsewhere")
    assert ExhirdTokenizer.from_pretrained(tmp_path).subword_tokenizer is None
    assert len(warnings) == 1 and "is missing" in warnings[0] and "with_subword_tokenizer" in warnings[0]


def test_code_of_a_subword_tokenizer_is_not_asked_for(with_subword_tokenizer, tmp_path, monkeypatch):
    with_subword_tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "subword_tokenizer" / "tokenizer_config.json"
    planted = {"tokenizer_class": "Planted", "auto_map": {"AutoTokenizer": [None, "planted.Planted"]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | planted))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    with pytest.raises(ValueError, match="trust_remote_code"):
        ExhirdTokenizer.from_pretrained(tmp_path)


def test_auto_tokenizer_finds_the_class_by_name_and_by_configuration(with_subword_tokenizer, tokenizer, tmp_path):
    AutoTokenizer.register(ExhirdConfig, fast_tokenizer_class=ExhirdTokenizer, exist_ok=True)
    with_subword_tokenizer.save_pretrained(tmp_path)
    assert type(AutoTokenizer.from_pretrained(tmp_path)) is ExhirdTokenizer
    ExhirdConfig(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert type(loaded) is ExhirdTokenizer
    same(loaded, with_subword_tokenizer)
