"""What does the quickstart print, and what does the README's first example answer?

python benchmarks/quickstart.py        # about 5 minutes on two cores
"""

import json
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
    if not (OUTPUT / "results.json").exists():
        command = [sys.executable, "examples/quickstart.py", "--steps", str(STEPS), "--output", str(OUTPUT)]
        subprocess.run(command, cwd=ROOT, check=True)
    results = json.loads((OUTPUT / "results.json").read_text(encoding="utf-8"))
    text = (ROOT / "examples" / "corpus" / "paragraph.txt").read_text(encoding="utf-8")
    phrases = pipeline("keyphrase-extraction", model=str(OUTPUT / "seke-minilm"))(text, top_k=3)
    write("quickstart", {"scores": results["scores"], "first_screen": phrases}, steps=STEPS)


if __name__ == "__main__":
    main()
