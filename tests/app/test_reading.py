"""What the app computes and writes, without a browser: readings at any threshold, marks, files, YAKE's phrases, the command."""

import copy
import csv
import json
import re
import resource
from datetime import date
from decimal import Decimal

import pyarrow.parquet
import pytest
from transformers import pipeline
from typer.testing import CliRunner

from keyphrase_tools.phrase_features import NAMES, NAMES_WITH_SHAPE
from lexperts.app import AppSettings
from lexperts.app.batch import extract_file, read_columns
from lexperts.app.marks import experts_html, keyphrases_html, message_html, yake_html
from lexperts.app.reading import Reader
from lexperts.app.yake_reader import find_mentions
from lexperts.cli import build_app
from tests.keyphrase_tools.known_answers import random_text

TEXT = random_text(150, seed=0)  # several windows
HOSTILE = '<script>alert(1)</script> graph cuts & "networks" ${7*7} {{7*7}} <img src=x onerror=alert(2)> learning'
RANKER = {"bias": -1.0, "gold": 1.2, **{name: 0.1 * i for i, name in enumerate(NAMES)}}
RANKER_OF_SHAPES = {**RANKER, **{name: 0.1 * i for i, name in enumerate(NAMES_WITH_SHAPE)}}


@pytest.fixture(scope="module")
def extract(tiny_seke, tiny_tokenizer):
    """A pipeline whose model has experts and styles."""
    model = tiny_seke(styles=["tags", "words"], num_experts=3)
    model.classifier.weight.data *= 30
    return pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)


def with_ranker(extract, ranker=RANKER, **rankers):
    """The same model with a ranker, and classes of words for it."""
    model = copy.deepcopy(extract.model)
    model.config.keyphrase_ranker, model.config.style_rankers = ranker, rankers
    model.config.keyphrase_word_classes = {
        name: [(7 * i * k % 11 - 5) / 10 for i in range(model.config.hidden_size + 1)]
        for k, name in enumerate(("other", "modifier", "noun"), start=2)
    }
    return pipeline("keyphrase-extraction", model=model, tokenizer=extract.tokenizer)


@pytest.mark.parametrize("style", [None, "tags"])
def test_one_pass_reads_the_probabilities_and_the_experts_of_each_word(extract, style):
    reading = Reader(extract).read(TEXT, style)
    ((words, p),) = extract.read_words([TEXT], style=style)
    assert reading._block.documents[0].words == words and (reading._block.probabilities.document(0) == p).all()
    assert [TEXT[start:end] for start, end, _ in reading.experts] == [word for word, _, _ in words]
    assert reading.num_experts == 3 and len({expert for _, _, expert in reading.experts}) > 1


def test_a_model_without_experts_has_none(tiny_seke, tiny_tokenizer):
    model = tiny_seke(use_moe=False)
    reading = Reader(pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)).read(TEXT)
    assert reading.num_experts == 0 and reading.experts == []


def test_a_threshold_selects_without_the_model_as_the_pipeline_would(extract):
    reading = Reader(extract).read(TEXT)
    assert reading.keyphrases() == extract(TEXT, top_k=200)
    extract.model.forward, forward = None, extract.model.forward
    try:
        found = {threshold: reading.keyphrases(threshold) for threshold in (0.3, 0.9)}
    finally:
        extract.model.forward = forward
    for threshold, phrases in found.items():
        assert phrases == extract(TEXT, top_k=200, threshold=threshold)
    assert found[0.3] != found[0.9]


@pytest.mark.parametrize("style", [None, "words"])
@pytest.mark.parametrize("ranker", [RANKER, RANKER_OF_SHAPES], ids=["words", "shapes"])
def test_a_ranker_gives_scores_among_which_the_threshold_selects(extract, ranker, style):
    ranked = with_ranker(extract, ranker, words={**ranker, "bias": 0.5})
    reader, options = Reader(ranked), {} if style is None else {"style": style}
    assert reader.ranks and reader.styles == ["tags", "words"]
    reading = reader.read(TEXT, style)
    assert reading.keyphrases() == ranked(TEXT, top_k=None, **options)
    least = reading.keyphrases()[2]["score"]
    assert reading.keyphrases(least) == ranked(TEXT, top_k=200, min_score=least, **options)
    assert len(reading.keyphrases(0.01)) >= len(reading.keyphrases(least)) >= 3


def test_an_unknown_style_is_refused(extract):
    with pytest.raises(ValueError, match="colour"):
        Reader(extract).read(TEXT, "colour")


def test_the_html_holds_the_text_and_no_tag_of_it(extract):
    reading = Reader(extract).read(HOSTILE)
    phrases = [{"keyphrase": HOSTILE, "score": 1.0, "mentions": [{"start": 0, "end": len(HOSTILE)}]}]
    pages = [
        keyphrases_html(reading, 0.01, 50),
        experts_html(reading),
        yake_html(HOSTILE, phrases),
        message_html(HOSTILE),
    ]
    for html in pages:
        assert "<script" not in html and "<img" not in html and "&lt;" in html
    marked = re.sub(r"<sup>.*?</sup>", "", re.search(r'<p class="lx-text">(.*?)</p>', pages[0]).group(1))
    plain = re.sub(r"<[^>]*>", "", marked)
    assert plain.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"').replace("&amp;", "&") == HOSTILE


def test_marks_show_rank_and_score_and_experts_more_than_a_colour(extract):
    reading = Reader(extract).read(TEXT)
    phrases = reading.keyphrases()
    html = keyphrases_html(reading, None, 5)
    assert f"{len(phrases)} found, the 5 best shown" in html and html.count('<th scope="row">') == 5
    assert f"{phrases[0]['score']:.2f}" in html and "keyphrase </span>1</sup>" in html
    assert "Lower the threshold" in keyphrases_html(Reader(extract).read("; ..."), 0.99)
    shares = [int(share) for share in re.findall(r"<strong>(\d+)%", experts_html(reading))]
    assert len(shares) == 3 and sum(shares) == pytest.approx(100, abs=2)


def test_yakes_phrases_are_found_in_any_case_and_as_whole_words():
    text = "Graph\ncuts; graph cutsy, GRAPH CUTS."
    assert [text[m["start"] : m["end"]] for m in find_mentions(text, "graph cuts")] == ["Graph\ncuts", "GRAPH CUTS"]


def write(path, rows):
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow.parquet import write_table

        write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, rows[0], delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return path


def read(path):
    if path.suffix == ".parquet":
        from pyarrow.parquet import read_table

        return read_table(path).to_pylist()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


ROWS = [{"n": str(i), "abstract": random_text(30, seed=i)} for i in range(3)] + [{"n": "3", "abstract": "graph " * 30}]


@pytest.mark.parametrize("format", ["CSV", "JSON Lines", "Parquet"])
def test_dates_and_decimals_of_a_parquet_file_are_written_as_texts(extract, format, tmp_path):
    row = {"text": ["The tide turns a turbine."], "day": [date(2026, 5, 1)], "price": [Decimal("1.50")]}
    pyarrow.parquet.write_table(pyarrow.table(row), tmp_path / "a.parquet")
    done = extract_file(
        extract, tmp_path / "a.parquet", tmp_path / "out", AppSettings(), text_column="text", format=format
    )
    content = (
        done.path.read_bytes()
        if format != "Parquet"
        else str(pyarrow.parquet.read_table(done.path).to_pylist()).encode()
    )
    assert (done.documents, done.errors) == (1, 0) and b"2026-05-01" in content and b"1.50" in content


def test_a_suffix_in_capitals_is_known(extract, tmp_path):
    path = tmp_path / "TEXTS.CSV"
    path.write_text("text\nThe tide turns a turbine.\n", encoding="utf-8")
    assert read_columns(path, AppSettings()) == ["text"]
    assert extract_file(extract, path, tmp_path / "out", AppSettings(), text_column="text").documents == 1


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
@pytest.mark.parametrize("format", ["CSV", "JSON Lines", "Parquet"])
def test_a_file_is_read_and_written_in_each_format(extract, suffix, format, tmp_path):
    path, shares = write(tmp_path / f"in{suffix}", ROWS), []
    settings = AppSettings(max_characters=170)
    assert read_columns(path, settings) == ["abstract", "n"]
    texts = [row["abstract"] for row in ROWS]
    settings = AppSettings(max_characters=max(map(len, texts[:3])))
    done = extract_file(
        extract, path, tmp_path / "out", settings, text_column="abstract", format=format, top_k=2,
        progress=lambda share, text: shares.append(share),
    )  # fmt: skip
    rows = read(done.path)
    too_long = [len(text) > settings.max_characters for text in texts]
    assert done.documents == len(rows) == 4 and done.errors == sum(too_long) and shares[-1] == 1
    assert [row["n"] for row in rows] == ["0", "1", "2", "3"]
    for row, text, is_error in zip(rows, texts, too_long, strict=True):
        expected = [] if is_error else [phrase["keyphrase"] for phrase in extract(text, top_k=2)]
        found = row.get("keyphrases") or []
        found = (
            [phrase for phrase in found.split("; ") if phrase]
            if isinstance(found, str)
            else [p["keyphrase"] for p in found]
        )
        assert found == expected and ("limit" in (row.get("error") or "")) == is_error


def test_bad_files_are_refused_with_what_to_do(extract, tmp_path):
    settings = AppSettings(max_file_mb=1, max_documents=3)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    with pytest.raises(ValueError, match=r"\.png.*\.csv"):
        read_columns(tmp_path / "picture.png", settings)
    (tmp_path / "large.csv").write_bytes(b"text\n" + b"a" * 1_000_001)
    with pytest.raises(ValueError, match=r"1\.0 MB.*1 MB"):
        read_columns(tmp_path / "large.csv", settings)
    for name, content in (
        ("latin.csv", "té".encode("latin-1")),
        ("list.jsonl", b"[1]"),
        ("no.parquet", b"no"),
        ("e.csv", b""),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=name):
            read_columns(tmp_path / name, settings)
    path = write(tmp_path / "many.csv", ROWS)
    with pytest.raises(ValueError, match="more than 3 documents"):
        extract_file(extract, path, tmp_path, settings, text_column="abstract")
    for name in ("keyphrases", "scores"):
        path = write(tmp_path / "taken.jsonl", [{"text": "graph cuts", name: []}])
        with pytest.raises(ValueError, match=f"'{name}'.*Rename"):
            extract_file(extract, path, tmp_path, settings, text_column="text")


def test_a_parquet_file_that_expands_is_refused_before_it_fills_the_memory(extract, tmp_path):
    path, settings = tmp_path / "bomb.parquet", AppSettings(max_file_mb=1)
    for rows, match in ((100, "10 MB"), (2001, "2,000 documents")):
        text = pyarrow.DictionaryArray.from_arrays(
            pyarrow.array([0] * rows, pyarrow.int32()), pyarrow.array(["a" * 200_000])
        )
        pyarrow.parquet.write_table(
            pyarrow.table({"text": text}), path, compression="zstd", store_schema=False, write_statistics=False
        )
        assert path.stat().st_size < 1000
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for reads in (
            lambda: read_columns(path, settings),
            lambda: extract_file(extract, path, tmp_path, settings, text_column="text"),
        ):
            with pytest.raises(ValueError, match=match) as error:
                reads()
            assert str(tmp_path) not in str(error.value)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB; 400 MB without the check


@pytest.mark.parametrize("format", ["CSV", "JSON Lines", "Parquet"])
def test_a_lone_surrogate_is_replaced_and_the_other_rows_are_as_they_were(extract, format, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a graph cut", "note": "b"}\n{"text": "a \\ud800 graph cut", "note": "\\udfff"}\n')
    done = extract_file(extract, path, tmp_path / "out", AppSettings(), text_column="text", format=format)
    rows = read(done.path)
    assert done.errors == 0 and [row["text"] for row in rows] == ["a graph cut", "a \ufffd graph cut"]
    assert [row["note"] for row in rows] == ["b", "\ufffd"] and all(row["keyphrases"] for row in rows)


def test_messages_name_the_upload_without_its_folder(extract, tmp_path):
    path = write(tmp_path / "in.csv", ROWS)
    with pytest.raises(ValueError, match="in.csv") as error:
        extract_file(extract, path, tmp_path, AppSettings(), text_column="nothing")
    assert str(tmp_path) not in str(error.value) and "nothing" in str(error.value)


def test_the_command_has_help_and_checks_its_limits():
    done = CliRunner().invoke(build_app(), ["app", "--help"])
    assert done.exit_code == 0 and "lexperts app --mixture" in done.output
    assert CliRunner().invoke(build_app(), ["app", "--max-documents", "0"]).exit_code == 2
    with pytest.raises(ValueError, match="max_characters=0"):
        AppSettings(max_characters=0)
