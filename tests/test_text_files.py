"""Text files are read and written as UTF-8, whatever the machine's locale; ruff's PLW1514 misses paths whose type it cannot infer."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    "keyphrase_tools",
    "lexperts",
    "lexperts_lite",
    "merge_tools",
    "run_tools",
    "examples",
    "benchmarks",
    "modeling_*",
)
BEFORE_ENCODING = {"read_text": 0, "write_text": 1, "open": 1}  # arguments


def without_encoding(code: str) -> list[int]:
    """Lines that call read_text, write_text or open in text mode, as methods and without an encoding."""
    lines = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            options = {keyword.arg: keyword.value for keyword in node.keywords}
            modes = [str(getattr(value, "value", "b")) for value in (*node.args[:1], options.get("mode")) if value]
            is_text = node.func.attr != "open" or any(mode.isalpha() and "b" not in mode for mode in modes)
            if (
                is_text
                and len(node.args) == BEFORE_ENCODING.get(node.func.attr)
                and not {"encoding", None} & {*options}
            ):
                lines.append(node.lineno)
    return sorted(lines)


def test_the_check_finds_what_it_is_for():
    code = 'p.read_text()\np.write_text(x)\nwith p.open("a"):\n  pass\np.open("w", errors="ignore")\n'
    right = 'p.read_text("utf-8")\np.write_text(x, encoding=e)\np.open("rb")\nos.open(p, 0)\nM.open(f)\np.open(mode="wb")\nm.open(tokenizer=t)\n'
    assert without_encoding(code) == [1, 2, 3, 5] and without_encoding(right) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_encodings_are_named(folder):
    paths = list(ROOT.glob(f"{folder}/**/*.py"))
    assert paths and not {str(path): found for path in paths if (found := without_encoding(path.read_text("utf-8")))}
