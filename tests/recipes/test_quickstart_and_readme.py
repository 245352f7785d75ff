"""The quickstart and the README as a user runs them, on tiny models."""

import importlib.util
import json
import re
import subprocess
import sys

import pytest

from run_tools.rows import read_jsonl
from tests.recipes.test_seke import CORPUS, ROOT
from tests.tools import write_rows


@pytest.mark.nightly
def test_the_quickstart_trains_scores_saves_and_reads_again(tmp_path, monkeypatch, capsys):
    """Five steps cannot learn much: what is tested is that every part runs, on the real backbone and parts of texts."""
    spec = importlib.util.spec_from_file_location("quickstart", ROOT / "examples" / "quickstart.py")
    quickstart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quickstart)
    for name, number in {"train": 15, "test": 6}.items():
        rows = [{**row, "text": row["text"][:200]} for row in read_jsonl(CORPUS / f"{name}.jsonl")[:number]]
        write_rows(tmp_path / "corpus" / f"{name}.jsonl", rows)
    monkeypatch.setattr(quickstart, "HERE", tmp_path)
    with pytest.raises(SystemExit):
        quickstart.main(["--steps", "4"])
    assert "--steps 4" in capsys.readouterr().err
    quickstart.main(["--steps", "5", "--output", str(tmp_path / "out"), "--text", "A hash table stores keys."])
    printed = capsys.readouterr().out
    for part in ("vanilla head", "SEKE (experts + BiLSTM)", "F1@5   F1@10", "A hash table stores keys.", "new process"):
        assert part in printed
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert set(results["scores"]) == {"vanilla head", "SEKE (experts + BiLSTM)"}
    assert (tmp_path / "out" / "seke-minilm" / "pipeline_keyphrase_extraction.py").exists()


def test_the_numbers_of_the_scoring_example_are_right():
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    scoring = next(block for block in blocks if "keyphrase_f1(" in block)
    statement, expected = scoring.strip().rsplit("# ", 1)
    namespace = {}
    *imports, call = statement.strip().split("\n")
    exec("\n".join(imports), namespace)
    assert eval(call, namespace) == float(expected)


def test_the_readmes_tables_are_those_of_the_results():
    command = [sys.executable, ROOT / "benchmarks" / "tables.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
