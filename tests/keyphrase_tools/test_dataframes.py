"""pandas and datasets: documents from a Series, a DataFrame or a data set, and keyphrases as a DataFrame."""

import subprocess
import sys

import pandas as pd
import pytest
from datasets import Dataset, DatasetDict

from lexperts_lite.dataframes import COLUMNS
from tests.keyphrase_tools.known_answers import names

TEXTS = ["x bx ix, bx ix c", "", "c p; bz", "b"]
TITLES = [None, "b graph", "p", float("nan")]


@pytest.fixture(scope="module")
def extract(lookup):
    return lookup()


@pytest.fixture(scope="module")
def titled(extract):
    """The results for documents with titles."""
    titles = [title if isinstance(title, str) else None for title in TITLES]
    return extract([{"title": title, "text": text} for title, text in zip(titles, TEXTS, strict=True)])


def frame(**columns):
    return pd.DataFrame({"n": range(4), "title": TITLES, "text": TEXTS, **columns}, index=[10, 11, 12, 13])


def rows_of(table):
    """A table's rows as dictionaries, with None for missing values."""
    return [{k: None if pd.isna(v) else v for k, v in row.items()} for row in table.to_dict("records")]


# ---- in


def test_a_series_is_a_list_of_texts(extract):
    for series in (pd.Series(TEXTS), pd.Series(TEXTS, index=list("wxyz")), pd.Series(TEXTS, dtype="string")):
        assert extract(series) == extract(TEXTS)
    words = [text.split() for text in TEXTS]
    assert extract(pd.Series(words), is_split_into_words=True) == extract(words, is_split_into_words=True)


def test_a_dataframe_is_read_by_its_columns_title_and_text(extract, titled):
    assert extract(frame()) == titled and titled[1][0]["field"] == "title"
    assert extract(frame()[["text"]]) == extract([{"text": text} for text in TEXTS]) == extract(TEXTS)
    assert extract(frame(title=pd.Series([None, "b graph", "p", None], dtype="string").array)) == titled
    assert extract(frame().iloc[:0]) == []


def test_results_become_a_column(extract):
    table = frame()
    table["keyphrases"] = extract(table["text"])
    assert [names(own) for own in table["keyphrases"]] == [names(own) for own in extract(TEXTS)]


def test_a_data_set_is_read_lazily_by_its_columns_title_and_text(extract, titled):
    titles = [title if isinstance(title, str) else None for title in TITLES]
    dataset = Dataset.from_dict({"text": TEXTS, "id": [1, 2, 3, 4], "title": titles})
    answers = extract(dataset)
    assert iter(answers) is answers and list(answers) == titled
    assert list(extract(dataset.to_iterable_dataset())) == titled
    assert list(extract(dataset["text"])) == extract(TEXTS)
    given = [["graph cut"]] * 4
    assert list(extract(dataset.to_iterable_dataset(), candidates=given)) == list(extract(dataset, candidates=given))
    with pytest.raises(ValueError, match="candidates has 1 lists, but none for document 1"):
        list(extract(dataset.to_iterable_dataset(), candidates=[["x"]]))
    with pytest.raises(ValueError, match="candidates has 1 lists for 4 documents"):
        extract(dataset, candidates=[["x"]])


def test_map_adds_a_column_to_a_data_set(extract):
    dataset = Dataset.from_dict({"text": TEXTS})
    mapped = dataset.map(lambda batch: {"keyphrases": extract(batch["text"])}, batched=True, batch_size=2)
    assert [list(own) for own in mapped["keyphrases"]] == extract(TEXTS)
    plain = dataset.map(lambda batch: {"names": [names(own) for own in extract(batch["text"])]}, batched=True)
    assert plain["names"][:] == [names(own) for own in extract(TEXTS)]


@pytest.mark.parametrize("make", [pd.DataFrame, Dataset.from_dict])
def test_a_table_without_texts_is_refused(extract, make):
    with pytest.raises(ValueError, match="'text'.*'title', 'abstract'.*rename"):
        extract(make({"title": ["b"], "abstract": ["b"]}))


def test_what_is_no_text_is_named_by_its_number(extract):
    with pytest.raises(TypeError, match="Document 1 .* float: nan"):
        extract(pd.Series(["b", float("nan")], dtype=object))
    with pytest.raises(TypeError, match="Document 0 has unknown keys 'train'"):
        extract(DatasetDict(train=Dataset.from_dict({"text": ["b"]})))


# ---- out


def test_one_row_per_keyphrase(extract, titled):
    table = extract.to_dataframe(frame())
    assert tuple(table.columns) == COLUMNS and list(table.index) == list(range(len(table)))
    expected = [
        {
            "document": 10 + number,
            "rank": rank,
            "field": None,
            **phrase,
            "mentions": len(phrase["mentions"]),
        }
        for number, phrases in enumerate(titled)
        for rank, phrase in enumerate(phrases, start=1)
    ]
    assert rows_of(table) == expected and len(expected) > 4
    assert max(table["mentions"]) == 2 and set(table["document"]) == {10, 11, 12, 13}


@pytest.mark.parametrize("kind", [list, tuple, iter, pd.Series, lambda texts: Dataset.from_dict({"text": texts})])
def test_any_documents_give_the_same_rows(extract, kind):
    expected = extract.to_dataframe(list(TEXTS))
    assert len(expected) == sum(map(len, extract(TEXTS))) > 3
    pd.testing.assert_frame_equal(extract.to_dataframe(kind(TEXTS)), expected)


def test_one_document_gives_rows_of_document_0(extract):
    for document, options in (
        (TEXTS[0], {}),
        ({"text": TEXTS[0]}, {}),
        (TEXTS[0].split(), {"is_split_into_words": True}),
    ):
        table = extract.to_dataframe(document, **options)
        assert len(table) == 1 and set(table["document"]) == {0} and table["keyphrase"][0].startswith("bx ix")


def test_a_table_without_rows_has_the_same_columns_and_types(extract):
    full = extract.to_dataframe(TEXTS)
    for inputs in ([], "", ["", "c"]):
        table = extract.to_dataframe(inputs)
        assert len(table) == 0 and tuple(table.columns) == COLUMNS
        for name in ("rank", "score", "start", "end", "mentions"):
            assert table[name].dtype == full[name].dtype


def test_absent_candidates_have_missing_values(extract):
    table = extract.to_dataframe(TEXTS[:1], candidates=["bx ix", "zebra"])
    assert table["keyphrase"].tolist() == ["bx ix", "zebra"] and table["mentions"].tolist() == [2, 0]
    assert table["score"].isna().tolist() == table["start"].isna().tolist() == [False, True]
    assert table["start"][0] == 2 and table["start"].dtype == "Int64"


def test_options_are_those_of_the_pipeline(extract):
    assert len(extract.to_dataframe(TEXTS, top_k=1, batch_size=2)) == sum(map(bool, extract(TEXTS)))
    with pytest.raises(TypeError, match="unexpected argument 'columns'"):
        extract.to_dataframe(TEXTS, columns=["text"])


def test_pandas_is_needed_for_tables_only(extract, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        extract.to_dataframe(TEXTS)
    assert extract(TEXTS[:1])


def test_the_package_imports_neither_pandas_nor_datasets():
    code = "import sys, lexperts_lite.dataframes; print({'pandas', 'datasets'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
