"""How long do the commands take to start?

    python benchmarks/startup.py      # about a minute

Whole processes, medians of interleaved rounds: a bare interpreter (the floor), `--help` of every group and of some commands,
`import lexperts`, and for comparison `import lexperts` followed by `import transformers`, which registers the models.
"""

import argparse
import subprocess
import sys

from common import interleaved, write

HELPS = (
    "lexperts",
    *(f"lexperts {group}" for group in ("keyphrases", "merge", "define", "summarize", "train", "evaluate")),
    "lexperts keyphrases extract",
    "lexperts merge compose",
    "lexperts train seke",
    "lexperts define run",
)


def command_of(name: str) -> list[str]:
    """The command line of a candidate."""
    if name.startswith("lexperts"):
        return [sys.executable, "-m", *name.split(), "--help"]
    return [sys.executable, "-c", "pass" if name == "python" else name]


def main():
    """Times all candidates in turn."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    names = ("python", *HELPS, "import lexperts", "import lexperts, transformers")

    def run_of(name: str):
        return lambda: subprocess.run(command_of(name), check=True, capture_output=True)

    times = interleaved({name: run_of(name) for name in names}, args.rounds)
    for name, entry in times.items():
        print(f"{name:36} {entry['median_ms'] / 1e3:6.2f} s")
    write("startup", [{"command": name, **entry} for name, entry in times.items()], rounds=args.rounds)


if __name__ == "__main__":
    main()
