"""The README's section on keyphrases, run as it is written."""

import ast
import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).resolve().parents[2] / "README.md"


def section(name: str) -> str:
    return re.search(rf"^## {name}\n(.*?)^## ", README.read_text(encoding="utf-8"), re.S | re.M).group(1)


@pytest.fixture
def quickstart(tiny_seke, tiny_tokenizer, tmp_path, monkeypatch):
    """A model where the quickstart leaves its own, to which every word is a keyphrase."""
    model = tiny_seke("bert")
    model.classifier.weight.data *= 0
    model.classifier.bias.data[:] = torch.tensor([0.0, 5.0, 0.0])
    for part in (model, tiny_tokenizer):
        part.save_pretrained(tmp_path / "runs" / "quickstart" / "seke-minilm")
    monkeypatch.chdir(tmp_path)


def test_the_sections_snippets_run_as_written_and_print_keyphrases(quickstart, capsys):
    blocks, namespace = re.findall(r"```python\n(.*?)```", section("Keyphrases"), re.S), {}
    assert blocks
    for block in blocks:
        exec(block, namespace)
    printed = [ast.literal_eval(line) for line in capsys.readouterr().out.splitlines()]
    one, several, first, second, titled, split = printed
    assert all(printed) and all(several) and len(several) == 2
    assert first == [phrase["keyphrase"] for phrase in one] and second != first
    assert all(phrase["field"] in ("title", "text") for phrase in titled)
    assert all("field" not in phrase for phrase in one + split)
