"""Labels: the reference's vectors, properties of our rules, and rows for training."""

import json
from itertools import pairwise, permutations
from pathlib import Path

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from keyphrase_tools.labels import find_keyphrases, present_keyphrases, tag_words, tokenize_documents
from lexperts_lite.words import split_words, stem

VECTORS = json.loads((Path(__file__).parents[1] / "vectors/keyphrase_eval.json").read_text())["vectors"]
LABEL_VECTORS = [vector for vector in VECTORS if vector["convention"] == "seke_label"]
each_vector = pytest.mark.parametrize("vector", LABEL_VECTORS, ids=[v["id"].split("/")[1] for v in LABEL_VECTORS])

# few words, two of them of one stem: keyphrases then nest, overlap and repeat
some_words = st.lists(st.sampled_from(["graph", "cut", "cuts", "x"]), max_size=12)
some_keyphrases = st.lists(st.lists(st.sampled_from(["graph", "cut", "x"]), min_size=1, max_size=3).map(" ".join))


# ---- the reference's vectors


def test_the_vectors_are_all_there():
    assert len(LABEL_VECTORS) == 8


@each_vector
def test_seke_rules_label_as_the_reference(vector):
    expected = vector["expected"]
    assert tag_words(expected["tokens"], vector["keywords"], rules="seke") == expected["label_tags"]
    assert tag_words(split_words(vector["text"]), vector["keywords"], rules="seke") == expected["label_tags"]


@each_vector
def test_seke_rules_find_the_references_gold(vector):
    expected = vector["expected"]
    assert sorted(present_keyphrases(expected["tokens"], vector["keywords"], rules="seke")) == expected["kw_in_paper"]
    keyphrases = vector["keywords"].split(";")
    assert sorted(present_keyphrases(split_words(vector["text"]), keyphrases, rules="seke")) == expected["kw_in_paper"]


def test_the_two_rules_differ_where_the_docstring_says():
    last = ["we", "study", "graph", "cuts"]
    assert tag_words(last, ["graph cut"]) == [0, 0, 1, 2]
    assert tag_words(last, ["graph cut"], rules="seke") == [0, 0, 0, 0]
    nested = ["neural", "network", "models", "."]
    assert tag_words(nested, ["neural network", "network models", "network"]) == [1, 2, 0, 0]
    assert tag_words(nested, ["neural network", "network models", "network"], rules="seke") == [1, 1, 2, 0]
    assert present_keyphrases(nested, "network;") == ["network"]
    assert present_keyphrases(nested, "network;", rules="seke") == ["network", ""]


@pytest.mark.parametrize("call", [find_keyphrases, tag_words, present_keyphrases])
def test_an_unknown_rule_is_named_with_the_valid_ones(call):
    with pytest.raises(ValueError, match="rules='SEKE' is not known."):
        call(["graph"], ["graph"], rules="SEKE")


# ---- our rules


@settings(max_examples=200, deadline=None)
@given(some_words, some_keyphrases)
def test_find_is_the_search_word_by_word(words, keyphrases):
    for phrase, spans in zip(keyphrases, find_keyphrases(words, keyphrases), strict=True):
        wanted = [stem(w) for w in phrase.split()]
        places = [(i, i + len(wanted)) for i in range(len(words))]
        assert spans == [(i, j) for i, j in places if [stem(w) for w in words[i:j]] == wanted]


@settings(max_examples=200, deadline=None)
@given(some_words, st.lists(st.sampled_from(["graph", "graph cut", "cut graph", "cut graph x", "x"]), max_size=4))
def test_the_order_of_the_keyphrases_does_not_matter(words, keyphrases):
    assert len({tuple(tag_words(words, shuffled)) for shuffled in permutations(keyphrases)}) == 1


@settings(max_examples=300, deadline=None)
@given(some_words, some_keyphrases)
def test_every_match_is_labelled_or_gives_way_to_one_as_long(words, keyphrases):
    labelled, found = (
        tag_words(words, keyphrases),
        {span for spans in find_keyphrases(words, keyphrases) for span in spans},
    )
    starts = [i for i, label in enumerate(labelled) if label == 1]
    ends = [next((j for j in range(i + 1, len(words)) if labelled[j] != 2), len(words)) for i in starts]
    chosen = list(zip(starts, ends, strict=True))
    assert set(chosen) <= found
    assert sum(end - start for start, end in chosen) == sum(label > 0 for label in labelled)  # no I without its B
    for start, end in found - set(chosen):
        rivals = [(s, e) for s, e in chosen if s < end and start < e]
        assert any((e - s, -s) > (end - start, -start) for s, e in rivals)


@pytest.mark.parametrize(
    "text, keyphrases, expected",
    [
        ("Semi-supervised learning", ["semi supervised LEARNING"], [1, 2, 2]),
        ("semi supervised learning", ["semi-supervised/learning"], [1, 2, 2]),
        ("graph cuts, cut graphs", "graph cut; cut graph", [1, 2, 0, 1, 2]),
        ("Bayes' rule", ["Bayes' rule"], [0, 0, 0]),  # never returned
        ("the c++ language", ["C++"], [0, 1, 0]),
        ("SARS-CoV-2 tests", ["SARS-CoV-2"], [1, 2, 2, 0]),
        ("SARS-CoV-2 tests for SARS", ["SARS", "2 test"], [0, 0, 0, 0, 0, 1]),  # not a part of a term
        ("Alzheimer\u2019s disease", ["Alzheimer's disease"], [1, 2]),
        ("graph\n\ncut, graph\ncut", ["graph cut"], [0, 0, 0, 1, 2]),
        ("deep graph cuts", ["", "  ", "-"], [0, 0, 0]),
        ("deep graph cuts", [], [0, 0, 0]),
        ("", ["graph"], []),
    ],
)
def test_labels_of(text, keyphrases, expected):
    assert tag_words(split_words(text), keyphrases) == expected


def test_present_keeps_each_keyphrase_once_in_the_lists_order():
    words = split_words("Out-of-print books, and graph cuts")
    keyphrases = ["graph cut", "Out of print books", "quantum", "out-of-print books", "", "graph cuts"]
    assert present_keyphrases(words, keyphrases) == ["graph cut", "out of print books", "graph cuts"]
    assert present_keyphrases(words, ";".join(keyphrases)) == present_keyphrases(words, keyphrases)
    assert present_keyphrases(words, ["quantum"]) == []


# ---- rows for training


def pieces_of(tokenizer, text):
    """A text's pieces and their places, by the tokenizer alone."""
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False, truncation=False)
    return encoded["input_ids"], encoded["offset_mapping"]


def test_each_word_is_labelled_on_its_first_piece_and_nothing_else_is(tiny_tokenizer):
    text = "Semi-supervised xyz, graph cuts!"
    rows = tokenize_documents({"text": [text], "keyphrases": [["semi-supervised", "graph cut"]]}, tiny_tokenizer)
    _, places = pieces_of(tiny_tokenizer, text)
    labels_at = {0: 1, 5: 2, 16: 0, 19: 0, 21: 1, 27: 2, 31: 0}
    expected = [labels_at.get(start, -100) for start, _ in places]
    assert rows["labels"] == [[-100, *expected, -100]]
    assert len(rows["input_ids"][0]) == len(rows["attention_mask"][0]) == len(rows["labels"][0])


def long_document(count=300):
    """A text whose words take one to four pieces; every seventh pair of words is a keyphrase."""
    words = [("the", "bxy", "q", "graph", "abcd", "cuts", "x")[i % 7] for i in range(count)]
    return " ".join(words), ["bxy q", "cuts"]


@pytest.mark.parametrize("overlap", [None, 0, 1, 15, 40])
def test_the_rows_of_a_long_document_label_every_word_at_its_first_piece(tiny_tokenizer, overlap):
    text, keyphrases = long_document()
    words = split_words(text)
    tags = tag_words(words, keyphrases)
    assert set(tags) == {0, 1, 2}
    rows = tokenize_documents({"text": [text], "keyphrases": [keyphrases]}, tiny_tokenizer, overlap=overlap)
    ids, places = pieces_of(tiny_tokenizer, text)
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
    assert sum(rows["num_keyphrases"]) == 5 and sum(rows["num_present"]) == 3
    by_row = list(zip(rows["document"], rows["num_keyphrases"], rows["num_present"], strict=True))
    assert by_row[0] == (0, 3, 2) and by_row[-2:] == [(1, 2, 1), (2, 0, 0)]
    assert set(by_row[1:-2]) == {(0, 0, 0)}


def test_seke_rules_reach_the_rows(tiny_tokenizer):
    batch = {"text": ["deep graph cuts"], "keyphrases": [["graph cuts"]]}
    assert tokenize_documents(batch, tiny_tokenizer)["num_present"] == [1]
    rows = tokenize_documents(batch, tiny_tokenizer, rules="seke")
    assert rows["num_present"] == [0] and 1 not in rows["labels"][0]


def test_a_title_is_joined_to_the_text_unless_left_out(tiny_tokenizer):
    batch = {"title": ["Graph cuts", None], "text": ["They work.", "They work."], "keyphrases": [["graph cut"]] * 2}
    rows = tokenize_documents(batch, tiny_tokenizer)
    joined = tiny_tokenizer("Graph cuts. They work.")["input_ids"]
    alone = tiny_tokenizer("They work.")["input_ids"]
    assert rows["input_ids"] == [joined, alone]
    assert rows["num_present"] == [1, 0]
    assert tokenize_documents(batch, tiny_tokenizer, title_column=None)["input_ids"] == [alone, alone]
    renamed = {"heading": batch["title"], "body": batch["text"], "terms": batch["keyphrases"]}
    names = {"title_column": "heading", "text_column": "body", "keyphrases_column": "terms"}
    assert tokenize_documents(renamed, tiny_tokenizer, **names) == rows


def test_a_text_may_be_a_list_of_words(tiny_tokenizer):
    text = "semi-supervised graph cuts ."
    as_text = tokenize_documents({"text": [text], "keyphrases": [["graph cuts"]]}, tiny_tokenizer)
    as_words = tokenize_documents({"text": [text.split()], "keyphrases": [["graph cuts"]]}, tiny_tokenizer)
    assert as_words == as_text
    assert 1 in as_text["labels"][0]


@pytest.mark.parametrize(
    "columns, options, missing",
    [
        (("abstract", "keyphrases"), {}, "text"),
        (("text", "tags"), {}, "keyphrases"),
        (("text", "keyphrases"), {"title_column": "heading"}, "heading"),
    ],
)
def test_a_missing_column_is_named_with_the_existing_ones(tiny_tokenizer, columns, options, missing):
    names = ", ".join(map(repr, columns))
    with pytest.raises(ValueError, match=f"column '{missing}' is missing; the columns are {names}"):
        tokenize_documents({column: [["graph"]] for column in columns}, tiny_tokenizer, **options)


def test_it_maps_over_a_dataset_and_changes_the_number_of_rows(tiny_tokenizer):
    text, keyphrases = long_document(100)
    columns = {
        "id": [7, 8, 9],
        "title": ["Graph cuts", "", None],
        "text": ["They work.", text, "Nothing"],
        "keyphrases": [["graph cuts"], keyphrases, ["quantum"]],
    }
    dataset = Dataset.from_dict(columns)
    options = {"batched": True, "remove_columns": dataset.column_names, "fn_kwargs": {"tokenizer": tiny_tokenizer}}
    mapped = dataset.map(tokenize_documents, **options)
    assert "text" not in mapped.column_names and len(mapped) > len(dataset)
    direct = tokenize_documents(columns, tiny_tokenizer)
    assert {name: list(mapped[name]) for name in mapped.column_names} == direct
    assert all(a <= b for a, b in pairwise(direct["document"]))
    with pytest.raises(ValueError, match="'text'.*'id', 'title', 'keyphrases'"):
        dataset.remove_columns("text").map(tokenize_documents, **{**options, "remove_columns": ["id"]})


def test_texts_are_cleaned_as_the_pipeline_cleans_them(tiny_tokenizer):
    raw = {
        "title": ["Graph&nbsp;cuts"],
        "text": ["lithium bat-\nteries &amp; net\u00adworks"],
        "keyphrases": [["batteries"]],
    }
    clean = {"title": ["Graph\u00a0cuts"], "text": ["lithium batteries & networks"], "keyphrases": [["batteries"]]}
    for title_as in ("text", "meta", "both"):
        rows = tokenize_documents(raw, tiny_tokenizer, title_as=title_as)
        assert rows == tokenize_documents(clean, tiny_tokenizer, title_as=title_as) and rows["num_present"] == [1]
