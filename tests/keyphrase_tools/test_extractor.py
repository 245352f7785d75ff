# needs: parquet
"""`KeyphraseExtractor`: batches of every kind, failures of single documents, copies in other processes."""

import os
import pickle
import signal

import datasets
import numpy as np
import pandas
import pyarrow
import pytest
import torch
from transformers import pipeline

from keyphrase_tools.extractor import KeyphraseExtractor, load_pipeline
from tests.corpora import as_written
from tests.keyphrase_tools.known_answers import names

TEXTS = ["Graph cuts solve energy problems.", "Deep networks learn cuts.", "", "The network of the graph is cut. " * 30]
TITLES = ["Cut graphs", None, "Networks", ""]


@pytest.fixture(scope="module")
def expected(folder):
    documents = [{"title": title, "text": text} for title, text in zip(TITLES, TEXTS, strict=True)]
    found = [as_written(phrases) for phrases in pipeline("keyphrase-extraction", model=folder)(documents, top_k=3)]
    assert {phrase["field"] for phrases in found for phrase in phrases} == {"title", "text"}
    return found


@pytest.mark.parametrize("kind", ["lists", "arrays", "table"])
def test_batches_of_every_kind_give_what_the_pipeline_gives(kind, folder, expected):
    columns = {"key": [1, 2, 3, 4], "body": TEXTS, "head": TITLES}
    batch = {
        "lists": columns,
        "arrays": {name: np.array(values, object) for name, values in columns.items()},
        "table": pyarrow.table(columns),
    }[kind]
    found = KeyphraseExtractor(folder, "body", "head", top_k=3)(batch)
    assert type(found) is type(batch)
    assert list(found.column_names if kind == "table" else found) == ["key", "body", "head", "keyphrases", "error"]
    plain = found.to_pydict() if kind == "table" else found
    assert plain["keyphrases"] == expected and plain["error"] == [None] * 4 and list(plain["key"]) == [1, 2, 3, 4]


TWICE = pandas.DataFrame([["graph", "cut"]], columns=["text", "text"])


@pytest.mark.parametrize("batch, column, shown", [
    ({"text": TEXTS[:1], "keyphrases": [["gold"]]}, "text", "'keyphrases'"),
    ({"text": TEXTS[:1], "n": [1]}, "body", "'body'.*'text', 'n'"),
    (TWICE, "text", "two columns 'text'"), (pyarrow.table([["graph"], ["cut"]], ["text", "text"]), "text", "two columns 'text'"),
])  # fmt: skip
def test_columns_that_cannot_be_used_are_named(folder, batch, column, shown):
    with pytest.raises(ValueError, match=shown):
        KeyphraseExtractor(folder, column)(batch)


def test_a_table_has_the_same_types_whatever_it_contains(folder):
    extract = KeyphraseExtractor(folder, mentions=True)
    tables = [extract(pyarrow.table({"text": pyarrow.array(of, pyarrow.string())})) for of in ([""], [None], TEXTS, [])]
    assert len({str(table.schema) for table in tables}) == 1
    assert pyarrow.concat_tables(tables)["keyphrases"].null_count == 1
    assert any(phrase["mentions"] for phrases in tables[2]["keyphrases"].to_pylist() for phrase in phrases)


def test_failures_are_rows_with_their_reasons(folder):
    texts = [TEXTS[0], None, 3, ["deep", "cuts"], TEXTS[1]]
    found = KeyphraseExtractor(folder, title_column="title")({"text": texts, "title": [None] * 4 + [7]})
    assert found["error"][1:3] == ["'text' is None, not a text", "'text' is 3, not a text"]
    assert found["error"][4] == "'title' is 7, not a text"
    assert [phrases is None for phrases in found["keyphrases"]] == [False, True, True, False, True]
    plain = pipeline("keyphrase-extraction", model=folder)
    assert [found["keyphrases"][i] for i in (0, 3)] == [as_written(plain(text)) for text in (TEXTS[0], "deep cuts")]


MISSING = [None, float("nan"), pandas.NA, pandas.NaT]


def test_a_missing_text_fails_only_its_row_in_the_pipeline_too(lookup, caplog):
    documents = ["b x", *MISSING, *({"title": "b", "text": missing} for missing in MISSING)]
    documents += [{"title": missing, "text": "p"} for missing in MISSING]
    expected = [["b"], *[[]] * 8, *[["p"]] * 4]
    assert [names(phrases) for phrases in lookup()(documents)] == expected
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("input_documents")]
    assert [f"document {i} " in line for i, line in enumerate(lines, 1)] == [True] * 8
    assert [names(phrases) for phrases in lookup()(pandas.Series(documents[:2]))] == expected[:2]


def test_a_forked_process_reads_too(extract):
    """Two threads of PyTorch, which the child process lacks."""
    threads, numbers = torch.get_num_threads(), torch.rand(1 << 20)
    torch.set_num_threads(2)
    try:
        expected = extract(TEXTS), numbers.exp().sum()
        if not (child := os.fork()):
            signal.alarm(100)
            os._exit(int((extract(TEXTS), numbers.exp().sum()) != expected))
        assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(threads)


def test_a_copy_has_the_options_only(folder, expected):
    extract = KeyphraseExtractor(folder, title_column="title", top_k=3, num_threads=1)
    extract({"text": TEXTS, "title": TITLES})
    copied = pickle.dumps(extract)
    torch.set_num_threads(2)
    assert pickle.loads(copied)({"text": TEXTS, "title": TITLES})["keyphrases"] == expected
    assert len(copied) < 1000 and torch.get_num_threads() == 1


def test_a_model_is_loaded_once_and_again_if_it_was_replaced(folder, tiny_seke, tmp_path):
    load_pipeline.cache_clear()
    for _ in range(3):
        KeyphraseExtractor(folder)({"text": TEXTS[:1]})
    assert load_pipeline.cache_info().misses == 1
    model = tiny_seke("bert", keyphrase_threshold=0.4)
    tokenizer = KeyphraseExtractor(folder).open_pipeline().tokenizer
    pipeline("keyphrase-extraction", model=model, tokenizer=tokenizer).save_pretrained(tmp_path)
    first = KeyphraseExtractor(tmp_path)({"text": TEXTS[:1]})
    model.classifier.weight.data *= 2
    model.save_pretrained(tmp_path)
    assert KeyphraseExtractor(tmp_path)({"text": TEXTS[:1]}) != first


@pytest.mark.parametrize("processes", [None, pytest.param(2, marks=pytest.mark.nightly)])
def test_data_sets_are_mapped(processes, folder, expected):
    data = datasets.Dataset.from_dict({"text": [*TEXTS, None], "title": [*TITLES, None]})
    extract = KeyphraseExtractor(folder, title_column="title", top_k=3, num_threads=1)
    found = data.with_format("arrow").map(extract, batched=True, batch_size=5, num_proc=processes).with_format(None)
    assert found["keyphrases"][:4] == expected or processes  # scores may differ in the last digit with the batches
    assert [len(phrases or []) for phrases in found["keyphrases"]] == [*map(len, expected), 0]
    assert found["error"] == [None] * 4 + ["'text' is None, not a text"]
