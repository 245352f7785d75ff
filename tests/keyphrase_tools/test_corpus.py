"""Corpora: every kind of source, results in order, and nothing lost when a run is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import pipeline

from keyphrase_tools.corpus import Corpus, extract_corpus, whole_lines

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


def test_what_cannot_be_read_says_why_and_stops_nobody(extract, tmp_path):
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
    found = extract_corpus(extract, Corpus(str(source)), tmp_path / "out.jsonl")
    rows = lines(tmp_path / "out.jsonl")
    assert found == (9, 7) and [("error" in row) for row in rows] == [True, False, *[True] * 5, False, True]
    assert rows[0] == {"id": 0, "error": "'text' is 3 and no text; columns: 'text'"}
    assert [rows[i]["keyphrases"] for i in (1, 7)] == [without_mentions(own) for own in extract(TEXTS[:2])]
    for row, said in zip(
        rows[2:7],
        ("JSONDecodeError", "columns: 'body'", "not a str", "UnicodeDecodeError", "'title' is 1"),
        strict=True,
    ):
        assert said in row["error"]


class Stop(Exception):
    pass


def test_an_interrupted_run_goes_on_where_it_stopped(extract, tmp_path):
    texts = [f"graph {'cut ' * (i % 7)} network {i}" for i in range(60)]
    source = write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    extract_corpus(extract, Corpus(str(source)), tmp_path / "whole.jsonl")
    output, read = tmp_path / "out.jsonl", []

    class Interrupted:
        model = extract.model

        def __call__(self, documents, **options):
            for number, phrases in enumerate(extract(documents, batch_size=1)):
                if number == 7:
                    raise Stop
                read.append(number)
                yield phrases

    for _ in range(3):
        with pytest.raises(Stop):
            extract_corpus(Interrupted(), Corpus(str(source)), output)
        assert not output.exists()
    part = tmp_path / "out.jsonl.parts" / "0.jsonl"
    assert len(part.read_text().splitlines()) == 21
    with part.open("a") as file:
        file.write('21\t{"id": 21, "keyph')  # a line that was being written
    extract_corpus(extract, Corpus(str(source)), output)
    assert_same(output, tmp_path / "whole.jsonl")


@pytest.mark.parametrize(
    "content, end", [(b"", 0), (b"ab", 0), (b"ab\n", 3), (b"ab\ncd", 3), (b"a\n" + b"x" * 70_000, 2)]
)
def test_whole_lines_end_where_they_end(content, end, tmp_path):
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("rb") as file:
        assert whole_lines(file) == end


def test_processes_share_a_corpus_and_may_be_others_after_an_interruption(extract, tmp_path):
    """Their turns one after the other here; examples/seke/predict.py is tested with two at once."""
    texts = [f"graph cut {i}" for i in range(11)]
    source = write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    extract_corpus(extract, Corpus(str(source)), tmp_path / "whole.jsonl")
    output = tmp_path / "out.jsonl"
    with pytest.raises(RuntimeError, match="8 documents are missing: a process failed. Start the same command again"):
        extract_corpus(extract, Corpus(str(source)), output, rank=0, processes=4)
    extract_corpus(extract, Corpus(str(source)), output, rank=2, processes=4)
    assert len(list((tmp_path / "out.jsonl.parts").glob("*.jsonl"))) == 2
    assert extract_corpus(extract, Corpus(str(source)), output) == (11, 0)
    assert_same(output, tmp_path / "whole.jsonl")


def test_killed_at_any_moment_it_ends_with_the_same_file(folder, tmp_path):
    texts = [f"graph {'cut ' * (i % 9)} network {i}" for i in range(400)]
    source = write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    command = [sys.executable, "-c", "from lexperts_cli.keyphrases import main; main()", "extract", str(source)]
    options = ["--model", str(folder), "--batch-size", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def start(output):
        return subprocess.Popen(
            [*command, str(output), *options], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    whole = start(tmp_path / "whole.jsonl")
    assert whole.wait() == 0, whole.stderr.read().decode()[-2000:]
    output, part, killed = tmp_path / "out.jsonl", tmp_path / "out.jsonl.parts" / "0.jsonl", 0
    for wanted in (1, 100, 250):
        process = start(output)
        while process.poll() is None and not (part.exists() and part.read_bytes().count(b"\n") >= wanted):
            time.sleep(0.002)
        killed += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert killed >= 1
    last = start(output)
    assert last.wait() == 0, last.stderr.read().decode()[-2000:]
    assert_same(output, tmp_path / "whole.jsonl")


def test_what_cannot_be_run_is_named(extract, source, tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text("mine")
    with pytest.raises(FileExistsError, match="out.jsonl is there already, and finished"):
        extract_corpus(extract, Corpus(str(source)), output)
    assert output.read_text() == "mine"
    with pytest.raises(RuntimeError):
        extract_corpus(extract, Corpus(str(source)), tmp_path / "new.jsonl", processes=2, top_k=3)
    with pytest.raises(
        ValueError, match="unfinished run with top_k=3, and this one has 5. Go on with what it had, or delete"
    ):
        extract_corpus(extract, Corpus(str(source)), tmp_path / "new.jsonl", top_k=5)
    with pytest.raises(FileNotFoundError, match="There is no file nowhere.jsonl"):
        Corpus("nowhere.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(ValueError, match="There are no documents in"):
        Corpus(str(tmp_path / "empty.jsonl"))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(FileNotFoundError, match="no folder of .txt files and no .jsonl file"):
        Corpus(str(tmp_path / "nothing"))
