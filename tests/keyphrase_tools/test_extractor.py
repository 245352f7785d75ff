# needs: parquet
"""`KeyphraseExtractor`: batches of every kind, failures of single documents, copies in other processes."""

import pickle
import shutil
import subprocess
import sys

import datasets
import numpy as np
import pyarrow
import pytest
import torch
from transformers import pipeline

from keyphrase_tools.extractor import KeyphraseExtractor, load_pipeline
from tests.corpora import as_written

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


def test_columns_that_are_missing_or_named_like_a_result_are_named(folder):
    batch = {"text": TEXTS[:1], "keyphrases": [["gold"]], "n": [1]}
    with pytest.raises(ValueError, match="'keyphrases'"):
        KeyphraseExtractor(folder)(batch)
    with pytest.raises(ValueError, match="'body'.*'text', 'keyphrases', 'n'"):
        KeyphraseExtractor(folder, "body")(batch)


def test_a_table_has_the_same_types_whatever_it_contains(folder):
    extract = KeyphraseExtractor(folder, mentions=True)
    tables = [
        extract(pyarrow.table({"text": pyarrow.array(texts, pyarrow.string())})) for texts in ([""], [None], TEXTS, [])
    ]
    assert len({str(table.schema) for table in tables}) == 1
    assert pyarrow.concat_tables(tables)["keyphrases"].null_count == 1
    assert any(phrase["mentions"] for phrases in tables[2]["keyphrases"].to_pylist() for phrase in phrases)


def test_failures_are_rows_with_their_reasons(folder):
    extract = KeyphraseExtractor(folder, title_column="title")
    texts = [TEXTS[0], None, 3, ["deep", "cuts"], TEXTS[1]]
    found = extract({"text": texts, "title": [None] * 4 + [7]})
    assert found["error"][1:3] == ["'text' is None, not a text", "'text' is 3, not a text"]
    assert found["error"][4] == "'title' is 7, not a text"
    assert [phrases is None for phrases in found["keyphrases"]] == [False, True, True, False, True]
    plain = pipeline("keyphrase-extraction", model=folder)
    assert [found["keyphrases"][i] for i in (0, 3)] == [as_written(plain(text)) for text in (TEXTS[0], "deep cuts")]


def test_a_failure_of_all_documents_is_that_of_the_model(folder, monkeypatch):
    extract = pipeline("keyphrase-extraction", model=folder)
    forward = extract._forward

    def fail(batch, **options):
        if batch["input_ids"].shape[0] > 1 or (batch["input_ids"] == bad).any():
            raise RuntimeError("out of memory")
        return forward(batch, **options)

    monkeypatch.setattr(extract, "_forward", fail)
    bad = extract.tokenizer("Deep", add_special_tokens=False)["input_ids"][0]
    found = KeyphraseExtractor(extract)({"text": TEXTS[:3]})
    assert found["error"] == [None, "out of memory", None] and found["keyphrases"][0]
    bad = extract.tokenizer.cls_token_id
    with pytest.raises(RuntimeError, match="out of memory"):
        KeyphraseExtractor(extract)({"text": TEXTS[:2]})


def test_a_copy_has_the_options_only_and_loads_the_model_in_its_process(folder, expected):
    extract = KeyphraseExtractor(folder, title_column="title", top_k=3)
    extract({"text": TEXTS, "title": TITLES})
    copied = pickle.dumps(extract)
    assert len(copied) < 1000
    code = (
        "import pickle, sys; extract = pickle.loads(sys.stdin.buffer.read()); from keyphrase_tools.extractor import load_pipeline\n"
        "assert load_pipeline.cache_info().currsize == 0\n"
        f"print(extract({{'text': {TEXTS}, 'title': {TITLES}}})['keyphrases'])\n"
        "assert load_pipeline.cache_info().currsize == 1"
    )
    done = subprocess.run([sys.executable, "-c", code], input=copied, capture_output=True)
    assert eval(done.stdout) == expected, done.stderr.decode()[-2000:]


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


def test_errors_of_options_and_models_are_raised_when_the_model_is_loaded(folder):
    for options, message in (({"threshold": 2.0}, "threshold=2.0"), ({"top": 3}, "unexpected argument 'top'")):
        with pytest.raises((ValueError, TypeError), match=message):
            KeyphraseExtractor(folder, **options).open()
    with pytest.raises(OSError, match="'no/such-model' cannot be opened"):
        KeyphraseExtractor("no/such-model").open()


def test_a_folder_without_weights_is_named_with_what_it_lacks(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(OSError, match="no.*model.safetensors") as error:
        KeyphraseExtractor(tmp_path / "model").open()
    assert "Traceback" not in str(error.value) and str(tmp_path / "model") in str(error.value)


def test_threads_are_those_that_were_asked_for(folder):
    code = f"""
import torch
from keyphrase_tools.extractor import KeyphraseExtractor
KeyphraseExtractor({folder!r}, num_threads=1)({{"text": ["graph"]}})
print(torch.get_num_threads())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=None)
    assert done.stdout.strip() == "1", done.stderr[-2000:]
    assert torch.get_num_threads() >= 1


@pytest.mark.parametrize("processes", [None, 2])
def test_data_sets_are_mapped(processes, folder, expected):
    data = datasets.Dataset.from_dict({"text": [*TEXTS, None], "title": [*TITLES, None]})
    extract = KeyphraseExtractor(folder, title_column="title", top_k=3, num_threads=1)
    found = data.with_format("arrow").map(extract, batched=True, batch_size=5, num_proc=processes).with_format(None)
    assert found["keyphrases"][:4] == expected or processes  # scores may differ in the last digit with the batches
    assert [len(phrases or []) for phrases in found["keyphrases"]] == [*map(len, expected), 0]
    assert found["error"] == [None] * 4 + ["'text' is None, not a text"]
