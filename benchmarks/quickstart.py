"""What does the quickstart print, and what does the README's first example answer?

python benchmarks/quickstart.py        # about 5 minutes on two cores
"""

import json
import re
import subprocess
import sys
from pathlib import Path

from common import write
from transformers import pipeline

import keyphrase_tools  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "runs" / "quickstart"
STEPS = 200


def main():
    command = [sys.executable, "examples/quickstart.py", "--steps", str(STEPS), "--output", str(OUTPUT)]
    subprocess.run(command, cwd=ROOT, check=True)
    results = json.loads((OUTPUT / "results.json").read_text())
    text = re.search(r'extract\("(At high water.*?)", top_k=2\)', (ROOT / "README.md").read_text())[1]
    phrases = pipeline("keyphrase-extraction", model=str(OUTPUT / "seke-minilm"))(text, top_k=2)
    write("quickstart", {"scores": results["scores"], "first_screen": phrases}, steps=STEPS)


if __name__ == "__main__":
    main()
