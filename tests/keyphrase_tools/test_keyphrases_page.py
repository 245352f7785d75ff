"""The lines of docs/keyphrases.md on candidates, diversity, languages, pandas and datasets run as they are written."""

import ast
import re
import shutil
from pathlib import Path

import pytest
from transformers import pipeline

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "keyphrases.md").read_text(encoding="utf-8")
SECTIONS = ("Your own candidates", "Different keyphrases", "Other languages", "pandas and datasets")
TEXT = (ROOT / "examples" / "corpus" / "paragraph.txt").read_text(encoding="utf-8")


def blocks_of(section, language="python"):
    body = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", body, re.S)


@pytest.mark.parametrize("section", SECTIONS)
def test_the_lines_of_a_section_run(section, sharp_seke, tiny_tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples" / "corpus", "examples/corpus")
    sharp_seke().save_pretrained("runs/seke-german")
    extract = pipeline("keyphrase-extraction", model=sharp_seke(), tokenizer=tiny_tokenizer)
    other = "A hash table stores keys."
    space = {
        "extract": extract,
        "text": TEXT,
        "bread": other,
        "other": other,
        "german": "Bäume im Wald",
        "chinese": "潮汐发电站",
    }
    results = []
    for statement in (s for block in blocks_of(section) for s in ast.parse(block).body):
        code = ast.unparse(statement)
        results += [eval(code, space)] if isinstance(statement, ast.Expr) else []
        None if isinstance(statement, ast.Expr) else exec(code, space)
    assert len(results) >= 2 and all(len(result) > 0 for result in results if result is not None)
    if section == "Other languages":
        assert '"keyphrase_language": "german"' in Path("runs/seke-german/config.json").read_text()


def test_the_output_of_the_page_has_the_offsets_of_the_text():
    (shown,) = blocks_of("Your own candidates", "text")
    tidal, tide, absent = ast.literal_eval(shown)
    assert [TEXT[c["start"] : c["end"]] for c in (tidal, tide)] == ["tidal barrage", "tide"]
    assert absent["score"] is None and absent["keyphrase"] not in TEXT
