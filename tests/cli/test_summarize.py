# needs: parquet
"""`lexperts summarize`: a JSON Lines file in, summaries out, resumed after an interruption."""

import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from lexperts.cli import build_app
from modeling_moesumm.generation_moesumm import Summarizer
from tests.modeling_moesumm.summaries import small_tokenizer, story, summaries_by, writing_moesumm
from tests.tiny_models import make_model
from tests.tools import read_rows, write_rows

ROWS = [{"id": i, "document": story(8 + 3 * i, i), "kind": ["news", "papers"][i % 2]} for i in range(20)]
FAST = ["--max-length", "12", "--num-beams", "1", "--batch-size", "1", "--device", "cpu"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model, its tokenizer, and their folder."""
    folder, tokenizer = tmp_path_factory.mktemp("model"), small_tokenizer()
    model = writing_moesumm(tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer, folder


@pytest.fixture
def source(tmp_path):
    return write_rows(tmp_path / "in.jsonl", ROWS)


def run(*arguments):
    return CliRunner().invoke(build_app(), ["summarize", *map(str, arguments)])


def test_summaries_are_those_of_the_model(model, source, tmp_path, monkeypatch):
    lm, tokenizer, folder = model
    output = tmp_path / "new" / "out.jsonl"
    result = run(source, output, "--model", folder, "--dataset", "news", *FAST)
    assert result.exit_code == 0 and "20 documents" in result.stdout, result.output
    options = {"max_length": 12, "num_beams": 1}
    expected = summaries_by(lm, [row["document"] for row in ROWS], tokenizer, "news", **options)
    assert read_rows(output) == [row | {"summary_text": s} for row, s in zip(ROWS, expected, strict=True)]

    whole = output.read_bytes()
    output.unlink()
    summarize, left = Summarizer.__call__, iter(range(2))

    def some(self, *arguments):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return summarize(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Summarizer, "__call__", some)
        assert run(source, output, "--model", folder, "--dataset", "news", *FAST).exit_code == 130
    assert len(read_rows(output)) == 16
    error = run(source, output, "--model", folder, "--dataset", "papers", *FAST)
    assert error.exit_code == 2 and "dataset='news' before, 'papers' now" in error.stderr
    assert run(source, output, "--model", folder, "--dataset", "news", *FAST).exit_code == 0
    assert output.read_bytes() == whole
    error = run(source, output, "--model", folder, *FAST)
    assert error.exit_code == 2 and "dataset='news' before, None now" in error.stderr

    other = tmp_path / "other.parquet"
    assert run(source, other, "--model", folder, "--dataset-column", "kind", *FAST).exit_code == 0
    expected = summaries_by(lm, [r["document"] for r in ROWS], tokenizer, [r["kind"] for r in ROWS], **options)
    table = parquet.read_table(other)
    assert table["summary_text"].to_pylist() == expected and table["id"].to_pylist() == list(range(20))


def test_rows_without_text_do_not_stop_the_run(model, tmp_path):
    rows = [ROWS[0], {"document": " "}, {"document": None}, {"id": 3}, ROWS[1]]
    source, output = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    result = run(source, output, "--model", model[2], *FAST)
    assert "3 could not be processed" in result.stdout
    assert ["summary_text" in row for row in read_rows(output)] == [True, False, False, False, True]
    assert all("error" in row for row in read_rows(output)[1:4])
    done = run(write_rows(tmp_path / "in.jsonl", rows[1:4]), tmp_path / "none.jsonl", "--model", model[2], *FAST)
    assert done.exit_code == 1 and "none.jsonl" in done.stderr


def test_an_unknown_data_set_and_a_model_of_another_kind_are_errors_of_the_option(model, source, tmp_path):
    for part in (make_model("LexiconForCausalLM"), model[1]):
        part.save_pretrained(tmp_path / "other")
    for options, message in (
        (["-m", model[2], "--dataset", "newz"], "dataset='newz'"),
        (["-m", tmp_path / "other"], "LexiconForCausalLM"),
    ):
        done = run(source, tmp_path / "out.jsonl", *options, *FAST)
        assert done.exit_code == 2 and message in done.stderr.replace('"', "'"), done.stderr
