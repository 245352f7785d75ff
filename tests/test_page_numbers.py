"""Numbers on pages are those of the code and of the results."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


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
