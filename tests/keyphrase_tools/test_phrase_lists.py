"""One reader of phrase lists: the forms of annotation tools, extractors and our own output, for gold and predictions alike."""

import json
import re

import pytest

from keyphrase_tools.evaluation import ExtractionMetrics, evaluate_pipeline, score_phrases
from keyphrase_tools.labels import find_keyphrases, present_keyphrases, tag_words, tokenize_documents
from keyphrase_tools.phrase_lists import FORMS, labelled_row, read_labelled, read_phrases, read_predicted
from lexperts_lite.words import split_words

TEXT = "Graph cuts solve an energy problem."
PHRASES = ["Graph cuts", "energy problem"]
SPANS = [(0, 10), (20, 34)]
LISTS = {
    "strings": PHRASES,
    "tuple": tuple(PHRASES),
    "joined": "Graph cuts; energy problem",
    "joined in a list": ["Graph cuts;energy problem"],
    "KeyBERT": [["Graph cuts", 0.1], ["energy problem", 0.25]],
    "YAKE": [("Graph cuts", 1), ("energy problem", 2)],
    "doccano": [[0, 10, "KEY"], [20, 34, "KEY"]],
    "doccano with relations": [{"id": 0, "label": "KEY", "start_offset": a, "end_offset": b} for a, b in SPANS],
    "spaCy": [{"start": a, "end": b, "label": "KEY"} for a, b in SPANS],
    "text": [{"text": phrase} for phrase in PHRASES],
    "phrase": [{"phrase": phrase, "score": 0.5} for phrase in PHRASES],
    "ours, with a candidate that does not occur": [
        *[{"keyphrase": phrase, "score": 0.5, "start": 0} for phrase in PHRASES],
        {"keyphrase": "absent", "score": None, "start": None, "end": None},
    ],
    "mixed": [PHRASES[0], {"start": 20, "end": 34}],
}
ROWS = {name: {"text": TEXT, "keyphrases": value} for name, value in LISTS.items()} | {
    "doccano, label": {"id": 1, "text": TEXT, "label": LISTS["doccano"]},
    "doccano, entities": {"id": 1, "text": TEXT, "entities": LISTS["doccano with relations"], "relations": []},
    "Prodigy": {"text": TEXT, "spans": LISTS["spaCy"]},
    "spaCy, ents": {"text": TEXT, "ents": LISTS["spaCy"], "tokens": []},
    "spaCy, span groups": {"text": TEXT, "spans": {"keyphrases": LISTS["spaCy"]}},
}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_each_form_is_read_as_gold_and_as_prediction(row, tmp_path):
    read = read_labelled(write(tmp_path / "row.jsonl", row))[0]
    assert [phrase.strip() for phrase in read["keyphrases"]] == PHRASES and read["text"] == TEXT
    (predicted,) = read_predicted(tmp_path / "row.jsonl")
    assert predicted["keyphrases"] == read["keyphrases"]


@pytest.mark.parametrize("name", ["joined", "KeyBERT", "doccano"])
@pytest.mark.parametrize("rules", ["lexperts", "seke"])
def test_labels_and_scores_read_any_form(tiny_tokenizer, name, rules):
    value = LISTS[name]
    expected = tokenize_documents({"text": [TEXT], "keyphrases": [PHRASES]}, tiny_tokenizer, rules=rules)
    assert tokenize_documents({"text": [TEXT], "keyphrases": [value]}, tiny_tokenizer, rules=rules) == expected
    metrics = ExtractionMetrics([TEXT], [value], tiny_tokenizer, {0: "O", 1: "B", 2: "I"}, rules=rules)
    assert metrics.rows == expected
    perfect = lambda texts, **options: [[{"keyphrase": phrase} for phrase in PHRASES]]  # noqa: E731
    assert evaluate_pipeline(perfect, [TEXT], [value], k=2, rules="lexperts")["f1@2"] == 1


WRONG = {
    "null": (None, "=None"),
    "an object": ({"Graph cuts": 0.5}, "={'Graph cuts': 0.5}"),
    "a number in it": (["Graph cuts", 0.5], r"\[1\]=0.5"),
    "another name": ([{"term": "Graph cuts"}], r"\[0\]={'term': 'Graph cuts'}"),
    "a phrase that is a number": ([{"keyphrase": 5}], r"\[0\]={'keyphrase': 5}"),
    "a span outside": ([[0, 99, "KEY"]], r"\[0\]=\[0, 99, 'KEY'\] .*35 characters"),
    "an empty span": ([[9, 9, "KEY"]], r"\[0\]=\[9, 9, 'KEY'\]"),
    "a negative span": ([{"start": -5, "end": 3}], r"\[0\]={'start': -5, 'end': 3}"),
    "offsets that are no integers": ([[0.0, 9.5, "KEY"]], r"\[0\]=\[0.0, 9.5, 'KEY'\]"),
}


@pytest.mark.parametrize("value, shown", WRONG.values(), ids=WRONG)
def test_any_other_form_is_an_error_with_file_line_value_and_forms(value, shown, tmp_path):
    good = {"text": TEXT, "keyphrases": PHRASES}
    path = write(tmp_path / "labels.jsonl", good, {"text": TEXT, "keyphrases": value})
    for read in (read_labelled, read_predicted):
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))}, line 2: keyphrases{shown}") as caught:
            read(path)
        assert "\n" not in str(caught.value) and (FORMS in str(caught.value) or "characters" in str(caught.value))
    for call in (tag_words, find_keyphrases, present_keyphrases):
        with pytest.raises(ValueError, match="^keyphrases"):
            call(split_words(TEXT), value)
    with pytest.raises(ValueError, match="^predictions of document 1"):
        score_phrases([PHRASES, value], [PHRASES, PHRASES])


@pytest.mark.parametrize("row, message", [
    ({"text": TEXT}, "there is no 'keyphrases'; the columns are 'text'"), ({"text": TEXT, "label": 3}, "the columns are 'text', 'label'"),
    ({"keyphrases": PHRASES}, "there is no 'text'; the columns are 'keyphrases'"), ({"text": 5, "keyphrases": PHRASES}, "text=5"),
    ({"text": [5], "keyphrases": PHRASES}, r"text=\[5\]"), ({"text": TEXT, "keyphrases": ", ".join(PHRASES)}, "keyphrases='Graph cuts, energy problem'"),
])  # fmt: skip
def test_a_row_that_cannot_be_read_is_named(row, message, tmp_path):
    path = write(tmp_path / "labels.jsonl", row)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}, line 1: .*{message}"):
        read_labelled(path)


def test_commas_are_allowed_where_a_row_has_the_separator_or_a_list(tmp_path):
    commas = ", ".join(PHRASES)
    rows = [{"text": TEXT, "keyphrases": value} for value in (commas, ";".join(PHRASES))]
    assert [row["keyphrases"] for row in read_labelled(write(tmp_path / "a.jsonl", *rows))] == [[commas], PHRASES]
    path = write(tmp_path / "list.jsonl", {"text": TEXT, "keyphrases": [commas]})
    assert [row["keyphrases"] for row in read_labelled(path)] == [[commas]]


def test_offsets_need_a_text(tmp_path):
    with pytest.raises(ValueError, match=r"keyphrases\[0\]=\[0, 10, 'KEY'\]"):
        read_predicted(write(tmp_path / "found.jsonl", {"keyphrases": LISTS["doccano"]}))
    with pytest.raises(ValueError, match="has offsets"):
        labelled_row({"text": TEXT.split(), "keyphrases": LISTS["doccano"]}, "row 0")


def test_a_row_with_an_error_has_no_predictions_and_one_without_either_is_named(tmp_path):
    rows = [{"keyphrases": PHRASES}, {"error": "'text' is None"}, {"keyphrases": None, "error": "'text' is None"}]
    found = read_predicted(write(tmp_path / "found.jsonl", *rows))
    assert [row["keyphrases"] for row in found] == [PHRASES, [], []]
    with pytest.raises(ValueError, match="line 1: .*'keyphrases'"):
        read_predicted(write(tmp_path / "none.jsonl", {"text": "a"}))


def test_empty_phrases_stay_for_the_rules_of_the_reference():
    assert read_phrases("a; b;") == ["a", " b", ""] and read_phrases(["a", ""]) == ["a", ""]
    assert present_keyphrases(["a", "b", "c"], "a;b;", rules="seke") == ["a", "b", ""]


def test_a_json_file_may_be_an_array_with_a_byte_order_mark(tmp_path):
    rows = [ROWS["Prodigy"], ROWS["doccano, label"]]
    (tmp_path / "export.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(rows, indent=1).encode())
    assert [row["keyphrases"] for row in read_labelled(tmp_path / "export.json")] == [PHRASES, PHRASES]
