"""Labels: the reference's vectors, properties of our rules, and rows for training."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyphrase_tools.labels import find_keyphrases, present_keyphrases, tag_words, tokenize_documents
from lexperts_lite.words import split_words, stem

VECTORS = json.loads((Path(__file__).parents[1] / "vectors/keyphrase_eval.json").read_text())["vectors"]
LABEL_VECTORS = [vector for vector in VECTORS if vector["convention"] == "seke_label"]

# few words, two of them of one stem: keyphrases then nest, overlap and repeat
some_words = st.lists(st.sampled_from(["graph", "cut", "cuts", "x"]), max_size=12)
some_keyphrases = st.lists(st.lists(st.sampled_from(["graph", "cut", "x"]), min_size=1, max_size=3).map(" ".join))


def test_seke_rules_label_as_the_reference_and_find_its_gold():
    assert len(LABEL_VECTORS) == 8
    for vector in LABEL_VECTORS:
        expected, keywords = vector["expected"], vector["keywords"]
        for words in (expected["tokens"], split_words(vector["text"])):
            assert tag_words(words, keywords, rules="seke") == expected["label_tags"], vector["id"]
            for form in (keywords, keywords.split(";")):
                assert sorted(present_keyphrases(words, form, rules="seke")) == expected["kw_in_paper"], vector["id"]


@pytest.mark.parametrize("call", [find_keyphrases, tag_words, present_keyphrases])
def test_an_unknown_rule_is_named(call):
    with pytest.raises(ValueError, match="rules='SEKE' is not known."):
        call(["graph"], ["graph"], rules="SEKE")


@settings(max_examples=100, deadline=None)
@given(some_words, some_keyphrases)
def test_find_is_the_search_word_by_word(words, keyphrases):
    for phrase, spans in zip(keyphrases, find_keyphrases(words, keyphrases), strict=True):
        wanted = [stem(w) for w in phrase.split()]
        places = [(i, i + len(wanted)) for i in range(len(words))]
        assert spans == [(i, j) for i, j in places if [stem(w) for w in words[i:j]] == wanted]


@settings(max_examples=100, deadline=None)
@given(some_words, some_keyphrases)
def test_every_match_is_labelled_or_gives_way_to_one_as_long(words, keyphrases):
    labelled = tag_words(words, keyphrases)
    found = {span for spans in find_keyphrases(words, keyphrases) for span in spans}
    starts = [i for i, label in enumerate(labelled) if label == 1]
    ends = [next((j for j in range(i + 1, len(words)) if labelled[j] != 2), len(words)) for i in starts]
    chosen = list(zip(starts, ends, strict=True))
    assert set(chosen) <= found
    assert sum(end - start for start, end in chosen) == sum(label > 0 for label in labelled)  # no I without its B
    for start, end in found - set(chosen):
        rivals = [(s, e) for s, e in chosen if s < end and start < e]
        assert any((e - s, -s) > (end - start, -start) for s, e in rivals)


@pytest.mark.parametrize("text, keyphrases, expected", [
    ("Semi-supervised learning", ["semi supervised LEARNING"], [1, 2, 2]),
    ("semi supervised learning", ["semi-supervised/learning"], [1, 2, 2]),
    ("graph cuts, cut graphs", "graph cut; cut graph", [1, 2, 0, 1, 2]),
    ("Bayes' rule", ["Bayes' rule"], [0, 0, 0]),  # never returned
    ("the c++ language", ["C++"], [0, 1, 0]), ("SARS-CoV-2 tests", ["SARS-CoV-2"], [1, 2, 2, 0]),
    ("SARS-CoV-2 tests for SARS", ["SARS", "2 test"], [0, 0, 0, 0, 0, 1]),  # not a part of a term
    ("Alzheimer\u2019s disease", ["Alzheimer's disease"], [1, 2]), ("graph\n\ncut, graph\ncut", ["graph cut"], [0, 0, 0, 1, 2]),
    ("neural network models", ["neural network", "network models", "network"], [1, 2, 0]), ("deep graph cuts", ["", "  ", "-"], [0, 0, 0]), ("deep graph cuts", [], [0, 0, 0]), ("", ["graph"], []),
])  # fmt: skip
def test_labels_of(text, keyphrases, expected):
    assert tag_words(split_words(text), keyphrases) == expected


def test_present_keeps_each_keyphrase_once_in_the_lists_order():
    words = split_words("Out-of-print books, and graph cuts")
    keyphrases = ["graph cut", "Out of print books", "quantum", "out-of-print books", "", "graph cuts"]
    assert present_keyphrases(words, keyphrases) == ["graph cut", "out of print books", "graph cuts"]
    assert present_keyphrases(words, ";".join(keyphrases)) == present_keyphrases(words, keyphrases)
    assert present_keyphrases(words, ["quantum"]) == []


def long_document(count=300):
    """A text whose words take one to four pieces; every seventh pair of words is a keyphrase."""
    words = [("the", "bxy", "q", "graph", "abcd", "cuts", "x")[i % 7] for i in range(count)]
    return " ".join(words), ["bxy q", "cuts"]


@pytest.mark.parametrize("overlap", [None, 0, 1, 40])
def test_the_rows_of_a_long_document_label_every_word_at_its_first_piece(tiny_tokenizer, overlap):
    text, keyphrases = long_document()
    words = split_words(text)
    tags = tag_words(words, keyphrases)
    assert set(tags) == {0, 1, 2}
    rows = tokenize_documents({"text": [text], "keyphrases": [keyphrases]}, tiny_tokenizer, overlap=overlap)
    assert (
        tokenize_documents({"text": [text.split()], "keyphrases": [keyphrases]}, tiny_tokenizer, overlap=overlap)
        == rows
    )
    encoded = tiny_tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    ids, places = encoded["input_ids"], encoded["offset_mapping"]
    word_at = {start: i for i, (_, start, _) in enumerate(words)}
    expected = [tags[word_at[start]] if start in word_at else -100 for start, _ in places]  # over the whole document
    room, shared = 62, 16 if overlap is None else overlap
    assert len(rows["labels"]) > 5
    for number, (row, row_labels) in enumerate(zip(rows["input_ids"], rows["labels"], strict=True)):
        begin = number * (room - shared)
        assert row[1:-1] == ids[begin : begin + room]
        assert row_labels == [-100, *expected[begin : begin + room], -100]
    assert begin + room >= len(ids)  # the last row reaches the document's end
    assert rows["document"] == [0] * len(rows["labels"])


def test_keyphrases_are_counted_on_a_documents_first_row_only(tiny_tokenizer):
    text, _ = long_document()
    batch = {"text": [text, "graph cuts", ""], "keyphrases": [["bxy q", "quantum", "cuts"], "graph;tensor;", []]}
    rows = tokenize_documents(batch, tiny_tokenizer)
    by_row = list(zip(rows["document"], rows["num_keyphrases"], rows["num_present"], strict=True))
    assert by_row[0] == (0, 3, 2) and by_row[-2:] == [(1, 2, 1), (2, 0, 0)]
    assert set(by_row[1:-2]) == {(0, 0, 0)}
    batch = {"text": ["deep graph cuts"], "keyphrases": [["graph cuts"]]}
    rows = tokenize_documents(batch, tiny_tokenizer, rules="seke")
    assert rows["num_present"] == [0] and 1 not in rows["labels"][0]


def test_a_title_is_joined_to_the_text_unless_left_out(tiny_tokenizer):
    batch = {"title": ["Graph cuts", None], "text": ["They work.", "They work."], "keyphrases": [["graph cut"]] * 2}
    rows = tokenize_documents(batch, tiny_tokenizer)
    joined, alone = (tiny_tokenizer(text)["input_ids"] for text in ("Graph cuts. They work.", "They work."))
    assert rows["input_ids"] == [joined, alone] and rows["num_present"] == [1, 0]
    assert tokenize_documents(batch, tiny_tokenizer, title_column=None)["input_ids"] == [alone, alone]
    names = {"title_column": "heading", "text_column": "body", "keyphrases_column": "terms"}
    renamed = {names[f"{column}_column"]: values for column, values in batch.items()}
    assert tokenize_documents(renamed, tiny_tokenizer, **names) == rows


@pytest.mark.parametrize("columns, options, missing", [
    (("abstract", "keyphrases"), {}, "text"), (("text", "tags"), {}, "keyphrases"),
    (("text", "keyphrases"), {"title_column": "heading"}, "heading"),
])  # fmt: skip
def test_a_missing_column_is_named_with_the_existing_ones(tiny_tokenizer, columns, options, missing):
    with pytest.raises(ValueError, match=f"column '{missing}' is missing; .* {', '.join(map(repr, columns))}"):
        tokenize_documents({column: [["graph"]] for column in columns}, tiny_tokenizer, **options)


@pytest.mark.parametrize("title_as", ["text", "meta", "both"])
def test_texts_are_cleaned_as_the_pipeline_cleans_them(tiny_tokenizer, title_as):
    raw = {"title": ["Graph&nbsp;cuts"], "text": ["bat-\nteries &amp; net\u00adworks"], "keyphrases": [["batteries"]]}
    clean = {"title": ["Graph\u00a0cuts"], "text": ["batteries & networks"], "keyphrases": [["batteries"]]}
    rows = tokenize_documents(raw, tiny_tokenizer, title_as=title_as)
    assert rows == tokenize_documents(clean, tiny_tokenizer, title_as=title_as) and rows["num_present"] == [1]
