"""Corpora: every kind of source, results in order, and resumption after a killed run."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import AutoTokenizer, pipeline

import keyphrase_tools.corpus
from keyphrase_tools.clean_text import clean
from keyphrase_tools.corpus import Corpus, extract_corpus
from keyphrase_tools.corpus_parts import end_of_last_line

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ["Graph cuts solve energy problems.", "Deep networks learn cuts.", "", "The network of the graph is cut. " * 30]


def lines(path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def write_jsonl(path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tiny_seke, tiny_tokenizer, tmp_path_factory):
    """A saved model that finds keyphrases."""
    folder = tmp_path_factory.mktemp("model")
    model = tiny_seke("bert", keyphrase_threshold=0.4)
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def extract(folder):
    return pipeline("keyphrase-extraction", model=str(folder))


@pytest.fixture
def source(tmp_path):
    return write_jsonl(tmp_path / "texts.jsonl", [{"id": f"d{i}", "text": text} for i, text in enumerate(TEXTS)])


def assert_same(path, other):
    """The same documents and keyphrases; a score's last digit may turn with the batch that a document was read in."""
    for one, two in zip(lines(path), lines(other), strict=True):
        assert one["id"] == two["id"]
        for p, q in zip(one["keyphrases"], two["keyphrases"], strict=True):
            assert p.pop("score") == pytest.approx(q.pop("score"), abs=2e-6) and p == q


def without_mentions(phrases):
    return [{name: value for name, value in phrase.items() if name != "mentions"} for phrase in phrases]


def test_a_file_of_rows_gives_what_the_pipeline_gives(extract, source, tmp_path):
    found = extract_corpus(extract, Corpus(str(source)), tmp_path / "out.jsonl", top_k=3)
    assert found == (4, 0) and not (tmp_path / "out.jsonl.parts").exists()
    expected = [without_mentions(phrases) for phrases in extract(TEXTS, top_k=3)]
    assert any(expected)
    assert lines(tmp_path / "out.jsonl") == [{"id": f"d{i}", "keyphrases": own} for i, own in enumerate(expected)]
    extract_corpus(extract, Corpus(str(source)), tmp_path / "all.jsonl", mentions=True)
    assert lines(tmp_path / "all.jsonl")[3]["keyphrases"] == extract(TEXTS[3])


def test_titles_and_lists_of_words_are_read_as_the_pipeline_reads_them(extract, tmp_path):
    rows = [{"title": "Cut graphs", "body": ["deep", "graph", "cuts"]}, {"title": None, "body": "cut"}]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    extract_corpus(extract, Corpus(str(source), text_column="body"), tmp_path / "out.jsonl")
    expected = extract([{"title": "Cut graphs", "text": "deep graph cuts"}, "cut"])
    assert lines(tmp_path / "out.jsonl") == [
        {"id": i, "keyphrases": without_mentions(own)} for i, own in enumerate(expected)
    ]


def test_folders_of_texts_and_data_sets(extract, tmp_path):
    (tmp_path / "texts" / "sub").mkdir(parents=True)
    for name, text in zip(("b.txt", "a.txt", "sub/c.txt", "notes.md"), TEXTS, strict=True):
        (tmp_path / "texts" / name).write_text(text)
    corpus = Corpus(str(tmp_path / "texts"))
    assert [(d.number, d.id, d.content["text"]) for d in corpus.read()] == [
        (0, "a.txt", TEXTS[1]),
        (1, "b.txt", TEXTS[0]),
        (2, "sub/c.txt", TEXTS[2]),
    ]
    (tmp_path / "set").mkdir()
    Dataset.from_dict({"text": TEXTS, "id": list("abcd")}).to_parquet(tmp_path / "set" / "test.parquet")
    corpus = Corpus(str(tmp_path / "set"))
    assert len(corpus) == 4 and [d.id for d in corpus.read()] == list("abcd")
    assert [d.id for d in corpus.read(lambda number: number % 2)] == ["b", "d"]


def test_unreadable_documents_are_reported_and_do_not_stop_the_run(extract, tmp_path):
    source = tmp_path / "texts.jsonl"
    good = [json.dumps({"text": text}).encode() for text in TEXTS[:2]]
    bad = [
        b'{"text": 3}',
        b"{no json",
        b'{"body": "graph"}',
        b'"graph"',
        b'{"text": "\xff"}',
        b'{"text": "a", "title": 1}',
    ]
    source.write_bytes(b"\n".join([bad[0], good[0], *bad[1:], b"  ", good[1], bad[0]]) + b"\n")
    summary = extract_corpus(extract, Corpus(str(source)), tmp_path / "out.jsonl")
    rows = lines(tmp_path / "out.jsonl")
    assert summary == (9, 7) and [("error" in row) for row in rows] == [True, False, *[True] * 5, False, True]
    assert rows[0] == {"id": 0, "error": "'text' is 3, not a text; columns: 'text'"}
    assert [rows[i]["keyphrases"] for i in (1, 7)] == [without_mentions(own) for own in extract(TEXTS[:2])]
    for row, message in zip(
        rows[2:7],
        ("JSONDecodeError", "columns: 'body'", "got a str", "UnicodeDecodeError", "'title' is 1"),
        strict=True,
    ):
        assert message in row["error"]


class Stop(Exception):
    pass


def mixed_texts(count):
    """Texts all different, some of which take several windows."""
    return [" ".join(f"graph {i} cut {j}" for j in range(1 + i % 3 if i % 5 else 18 + i % 40)) for i in range(count)]


@pytest.mark.parametrize("batches", [1, 3])
def test_an_interrupted_run_reads_no_batch_twice_and_ends_in_the_same_bytes(extract, tmp_path, monkeypatch, batches):
    source = write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in mixed_texts(60)])
    read, plain, left = [], extract._launch, 10**6

    def counted(windows, *args, **kwargs):
        nonlocal left
        if not left:
            raise Stop
        left -= 1
        read.extend(tuple(window.inputs["input_ids"]) for window in windows)
        return plain(windows, *args, **kwargs)

    monkeypatch.setattr(extract, "_launch", counted)
    extract_corpus(extract, Corpus(source), tmp_path / "whole.jsonl", batch_size=2)
    whole, starts, output = Counter(read), 0, tmp_path / "out.jsonl"
    assert len(whole) == whole.total() > 90
    read.clear()
    while not output.exists():
        left, starts = batches, starts + 1
        with contextlib.suppress(Stop):
            extract_corpus(extract, Corpus(source), output, batch_size=2)
    assert starts >= 8 and Counter(read) == whole
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_lines_that_were_being_written_are_read_again(extract, tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in mixed_texts(20)])
    extract_corpus(extract, Corpus(source), tmp_path / "whole.jsonl", batch_size=2)
    output, plain, batches = tmp_path / "out.jsonl", extract._launch, iter(range(5))

    def five(windows, *args, **kwargs):
        if next(batches, None) is None:
            raise Stop
        return plain(windows, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(extract, "_launch", five)
        extract_corpus(extract, Corpus(source), output, batch_size=2)
    parts = tmp_path / "out.jsonl.parts"
    assert (parts / "0.windows").read_bytes().count(b"\n") > 2
    for name in ("0.jsonl", "0.windows"):
        with (parts / name).open("ab") as file:
            file.write(b'21\t{"id": 21, "keyph')
    extract_corpus(extract, Corpus(source), output, batch_size=2)
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_long_text_shows_progress_by_its_windows(extract, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(keyphrase_tools.corpus, "tqdm", partial(tqdm, mininterval=0))
    source = write_jsonl(tmp_path / "texts.jsonl", [{"text": "graph cut " * 1500}, {"text": 3}, {"text": "cut"}])
    assert extract_corpus(extract, Corpus(source), tmp_path / "out.jsonl") == (3, 1)
    shown = capsys.readouterr().err
    percents = [int(percent) for percent in re.findall(r"(\d+)%", shown)]
    assert percents == sorted(percents) and percents[-1] == 100 and len(set(percents)) >= 8
    assert "3 of 3 documents" in shown


@pytest.mark.parametrize(
    "content, end", [(b"", 0), (b"ab", 0), (b"ab\n", 3), (b"ab\ncd", 3), (b"a\n" + b"x" * 70_000, 2)]
)
def test_the_end_of_the_last_whole_line(content, end, tmp_path):
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("rb") as file:
        assert end_of_last_line(file) == end


def test_processes_share_a_corpus_and_may_be_others_after_an_interruption(extract, tmp_path):
    """One process after the other here; tests/recipes/test_seke.py runs two at once."""
    texts = [f"graph cut {i}" for i in range(11)]
    source = write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    extract_corpus(extract, Corpus(str(source)), tmp_path / "whole.jsonl")
    output = tmp_path / "out.jsonl"
    with pytest.raises(RuntimeError, match="8 documents are missing"):
        extract_corpus(extract, Corpus(str(source)), output, rank=0, processes=4)
    extract_corpus(extract, Corpus(str(source)), output, rank=2, processes=4)
    assert len(list((tmp_path / "out.jsonl.parts").glob("*.jsonl"))) == 2
    assert extract_corpus(extract, Corpus(str(source)), output) == (11, 0)
    assert_same(output, tmp_path / "whole.jsonl")


def test_killed_after_its_first_batches_it_ends_with_the_same_bytes(folder, tmp_path):
    texts = mixed_texts(200)
    source = write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    command = [sys.executable, "-c", "from lexperts.cli.keyphrases import main; main()", "extract", str(source)]
    options = ["--model", str(folder), "--batch-size", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def start(output):
        return subprocess.Popen(
            [*command, str(output), *options], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    whole = start(tmp_path / "whole.jsonl")
    assert whole.wait() == 0, whole.stderr.read().decode()[-2000:]
    output, part = tmp_path / "out.jsonl", tmp_path / "out.jsonl.parts" / "0.jsonl"
    process = start(output)
    while process.poll() is None and not (part.exists() and part.read_bytes().count(b"\n") >= 20):
        time.sleep(0.002)
    killed = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert killed
    last = start(output)
    assert last.wait() == 0, last.stderr.read().decode()[-2000:]
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_what_cannot_be_run_is_named(extract, source, tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text("mine")
    with pytest.raises(FileExistsError, match="out.jsonl already exists"):
        extract_corpus(extract, Corpus(str(source)), output)
    assert output.read_text() == "mine"
    source = write_jsonl(tmp_path / "many.jsonl", [{"text": text} for text in [*["graph"] * 70, "cut " * 99]])
    with pytest.raises(ValueError, match=r"Document 70 .396 characters. is longer than 64"):
        extract_corpus(extract, Corpus(source), tmp_path / "new.jsonl", batch_size=2, on_long="error")
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl"):
        Corpus("nowhere.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(ValueError, match="There are no documents in"):
        Corpus(str(tmp_path / "empty.jsonl"))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(FileNotFoundError, match="nothing.* is neither a folder of .txt files"):
        Corpus(str(tmp_path / "nothing"))


@pytest.mark.parametrize("name", ["out.csv", "out.parquet", "out.jsonl.gz"])
def test_an_output_with_the_suffix_of_another_format_is_refused(extract, source, tmp_path, name):
    with pytest.raises(ValueError, match=f"{name} ends in '{Path(name).suffix}'"):
        extract_corpus(extract, Corpus(source), tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == {"texts.jsonl"}


@pytest.fixture
def unfinished(folder, tmp_path):
    """A run that has stopped, of a copy of the model and of a source, and how it is started again."""
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    source = write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])

    def start(model=model, source=source, of_pipeline=(), **options):
        extract = pipeline("keyphrase-extraction", model=str(model), **dict(of_pipeline))
        return extract_corpus(extract, Corpus(source), tmp_path / "out.jsonl", **{"top_k": 3, **options})

    with pytest.raises(RuntimeError, match="2 documents are missing"):
        start(processes=2)
    return start


def test_an_unfinished_run_resumes_with_a_model_and_a_source_that_were_moved(unfinished, tmp_path):
    moved = {name: (tmp_path / name).rename(tmp_path / f"moved-{name}") for name in ("model", "texts.jsonl")}
    assert unfinished(model=moved["model"], source=moved["texts.jsonl"]) == (4, 0)


@pytest.mark.parametrize("change", ["weights", "config", "tokenizer", "source", "option", "option of the pipeline"])
def test_what_differs_from_an_unfinished_run_is_named(unfinished, tmp_path, change):
    model, options, config = tmp_path / "model", {}, tmp_path / "model" / "config.json"
    if change == "weights":
        weights = load_file(model / "model.safetensors")
        weights["classifier.bias"] += 0.1  # trained a little more, in the same place
        save_file(weights, model / "model.safetensors", {"format": "pt"})
        difference = "the model's weights"
    elif change == "config":
        settings = json.loads(config.read_text()) | {"keyphrase_threshold": 0.2}
        config.write_text(json.dumps(settings))
        difference = "config.keyphrase_threshold='0.4' before, '0.2' now"
    elif change == "tokenizer":
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.model_max_length = 40
        tokenizer.save_pretrained(model)
        difference = "the tokenizer"
    elif change == "source":
        write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in ["a graph", *TEXTS[1:]]])
        difference = "the documents of the source"
    else:
        options = {"top_k": 5} if change == "option" else {"of_pipeline": {"min_score": 0.5}}
        difference = "top_k=3 before, 5 now" if change == "option" else "min_score=None before, 0.5 now"
    with pytest.raises(ValueError, match="out.jsonl.parts holds an unfinished run") as error:
        unfinished(**options)
    assert difference in str(error.value) and str(error.value).count(";") == 0


def test_a_folder_and_a_data_set_that_have_changed_are_noticed(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("graph")
    before = Corpus(tmp_path / "texts").fingerprint()
    assert Corpus(str(tmp_path / "texts")).fingerprint() == before
    (tmp_path / "texts" / "a.txt").write_text("graphs")
    assert Corpus(tmp_path / "texts").fingerprint() != before
    (tmp_path / "set").mkdir()
    prints = []
    for texts in (TEXTS, TEXTS, TEXTS[::-1]):
        Dataset.from_dict({"text": texts}).to_parquet(tmp_path / "set" / "test.parquet")
        prints.append(Corpus(tmp_path / "set").fingerprint())
    assert prints[0] != prints[2]


def test_sizes_follow_the_texts(tmp_path):
    rows = [{"text": "graph"}, {"text": "graph cuts " * 100}]
    (tmp_path / "texts").mkdir()
    (tmp_path / "set").mkdir()
    for number, row in enumerate(rows):
        (tmp_path / "texts" / f"{number}.txt").write_text(row["text"])
    Dataset.from_list(rows).to_parquet(tmp_path / "set" / "test.parquet")
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    assert list(Corpus(tmp_path / "texts").sizes()) == list(Corpus(tmp_path / "set").sizes()) == [5, 1100]
    assert list(Corpus(source).sizes()) == [18, 1113]
    assert list(Corpus(tmp_path / "set", text_column="body").sizes()) == [0, 0]


def test_a_lone_surrogate_in_a_keyphrase_is_written_as_json_escapes_it(extract, tmp_path):
    text = "graph\ud800cut network"
    source = write_jsonl(tmp_path / "texts.jsonl", [{"id": "\ud800", "text": text}])
    extract_corpus(extract, Corpus(source), tmp_path / "out.jsonl")
    (row,) = lines(tmp_path / "out.jsonl")
    assert row == {"id": "\ud800", "keyphrases": without_mentions(extract(text))}


def test_places_are_those_in_the_rows_own_fields(tiny_seke, tiny_tokenizer, tmp_path):
    model = tiny_seke("bert")
    model.classifier.weight.data *= 0
    model.classifier.bias.data[:] = torch.tensor([0.0, 5.0, 0.0])  # every word begins a phrase
    extract = pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)
    rows = [
        {"title": "  Graph cuts\tof networks ", "text": " Deep net-\nworks of &amp; in graph\n  cuts"},
        {"title": "The network?", "text": "graph cuts"},
        {"title": None, "text": "\n graph cuts"},
        {"title": " ", "text": "cuts of a network"},
    ]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    extract_corpus(extract, Corpus(source), tmp_path / "out.jsonl", mentions=True)
    fields = Counter()
    for row, found in zip(rows, lines(tmp_path / "out.jsonl"), strict=True):
        for phrase in found["keyphrases"]:
            for mention in phrase["mentions"]:
                assert ("field" in mention) == bool((row["title"] or "").strip())
                fields[mention.get("field")] += 1
            piece = row[phrase.get("field", "text")][phrase["start"] : phrase["end"]]
            assert clean(" ".join(piece.split())) == phrase["keyphrase"]
    assert fields == {"title": 6, "text": 8, None: 6}
