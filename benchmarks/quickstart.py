"""The scores that the quickstart prints, and the output of the README's first example.

python benchmarks/quickstart.py        # about 5 minutes on two cores
"""

import json
import subprocess
import sys
from pathlib import Path

from common import check_same_settings, make_parser, write
from transformers import pipeline

import lexperts  # noqa: F401  (registers the pipeline)

ROOT = Path(__file__).resolve().parent.parent
SCRIPT, CORPUS = ROOT / "examples" / "quickstart.py", ROOT / "examples" / "corpus"
STEPS = 200


def main():
    """Runs the quickstart unless it is finished, and records its results."""
    parser = make_parser(__doc__, "quickstart")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "quickstart_benchmark", help="folder of the run")
    options = parser.parse_args()
    output = options.work.resolve()
    check_same_settings(output, {"steps": STEPS, "script": SCRIPT, "corpus": CORPUS}, options.overwrite)
    if not (output / "results.json").exists():
        command = [sys.executable, str(SCRIPT), "--steps", str(STEPS), "--output", str(output)]
        subprocess.run(command, cwd=ROOT, check=True)
    results = json.loads((output / "results.json").read_text(encoding="utf-8"))
    text = (CORPUS / "paragraph.txt").read_text(encoding="utf-8")
    phrases = pipeline("keyphrase-extraction", model=str(output / "seke-minilm"))(text, top_k=3)
    write(options.name, {"scores": results["scores"], "first_screen": phrases}, steps=STEPS)


if __name__ == "__main__":
    main()
