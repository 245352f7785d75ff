"""Text files are read and written as UTF-8, whatever the machine's locale; ruff's PLW1514 misses paths whose type it cannot infer."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("keyphrase_tools", "lexperts", "merge_tools", "run_tools", "examples", "benchmarks", "modeling_*")
BEFORE_ENCODING = {"read_text": 0, "write_text": 1}  # arguments
OPEN_OPTIONS = {
    "file",
    "mode",
    "buffering",
    "errors",
    "newline",
    "closefd",
    "opener",
}  # of a file, besides its encoding


def without_encoding(code: str) -> list[int]:
    """Lines that call read_text, write_text or open in text mode without an encoding."""
    lines = []
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Call) or any(keyword.arg in ("encoding", None) for keyword in node.keywords):
            continue
        is_method = isinstance(node.func, ast.Attribute)
        name = node.func.attr if is_method else getattr(node.func, "id", None)
        if name == "open":
            owner = node.func.value if is_method else None
            if isinstance(owner, ast.Name) and (owner.id == "os" or owner.id[0].isupper()):  # os.open, Mixture.open
                continue
            if not {keyword.arg for keyword in node.keywords} <= OPEN_OPTIONS:  # not a file
                continue
            modes = [*node.args[0 if is_method else 1 :], *(k.value for k in node.keywords if k.arg == "mode")]
            if not any("b" in str(getattr(mode, "value", "b")) for mode in modes[:1]):
                lines.append(node.lineno)
        elif len(node.args) == BEFORE_ENCODING.get(name):
            lines.append(node.lineno)
    return sorted(lines)


def test_the_check_finds_what_it_is_for():
    code = 'p.read_text()\np.write_text(x)\nopen("f")\nwith p.open("a"):\n  pass\nopen("f", mode="w")\np.open(errors="ignore")\n'
    right = 'p.read_text("utf-8")\np.write_text(x, encoding=e)\nopen("f", "rb")\nos.open(p, 0)\nM.open(f)\np.open(mode="wb")\nm.open(tokenizer=t)\n'
    assert without_encoding(code) == [1, 2, 3, 4, 6, 7] and without_encoding(right) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_encodings_are_named(folder):
    paths = list(ROOT.glob(f"{folder}/**/*.py"))
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in paths
        for line in without_encoding(path.read_text(encoding="utf-8"))
    }
    assert paths and not found
