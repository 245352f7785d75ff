"""Writes the README's tables from benchmarks/results, between <!-- table:NAME --> and <!-- end -->.

python benchmarks/tables.py            # or: make tables
python benchmarks/tables.py --check    # says whether the README is up to date
"""

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAMES = {"moe_rnn": "SEKE (MoE+RNN)", "vanilla": "vanilla head", "moe": "MoE", "rnn": "RNN"}
# the authors' own script with the same backbone, recipe and number of documents, as measured for this project
AUTHORS = {
    "moe_rnn": [(28.4, 33.9), (33.3, 39.4), (36.6, 43.2), (37.5, 43.8)],
    "vanilla": [(0.0, 0.0), (2.2, 2.5), (29.2, 34.9), (32.2, 38.4)],
}


def load(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def provenance(record: dict) -> str:
    where = record["machine"]
    versions = record["versions"]
    return (
        f"Measured {record['date']} at {record['commit']} with torch {versions['torch']}, transformers "
        f"{versions['transformers']}, {where['threads']} threads of {where['processor']}."
    )


def seke_inspec() -> str:
    record = load("seke_inspec")
    heads = record["results"]
    epochs = sorted({row["epoch"] for head in heads.values() for row in head["epochs"]})
    lines = [
        "Inspec's 500 test documents after each epoch on 1,200 others, F1@5 / F1@10 (convention `seke`), MiniLM-L6 with LoRA:",
        "",
        "| | " + " | ".join(f"epoch {epoch}" for epoch in epochs) + " |",
        "| --- |" + " --- |" * len(epochs),
    ]

    def add(name: str, scores: dict[int, tuple[float, float]]):
        cells = ("{:.1f} / {:.1f}".format(*scores[epoch]) if epoch in scores else "" for epoch in epochs)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")

    for head, found in heads.items():
        tuned = {row["epoch"]: (row["threshold_f1@5"], row["threshold_f1@10"]) for row in found["checkpoints"]}
        add(f"{NAMES[head]}, threshold from validation documents", tuned)
        add(
            f"{NAMES[head]}, likeliest labels", {r["epoch"]: (r["test_f1@5"], r["test_f1@10"]) for r in found["epochs"]}
        )
        add(f"the authors' script, {NAMES[head]}", dict(enumerate(AUTHORS.get(head, []), start=1)))
    return "\n".join([*lines, "", provenance(record) + " `python benchmarks/seke_inspec.py --data PATH`"])


def seke_head() -> str:
    record = load("seke_head")
    lines = [
        "The head's ways of computing, forward and backward, d = 384, in milliseconds:",
        "",
        "| documents x longest (tokens) | experts: loop, dense, sorted | BiLSTM: packed, padded passes | head: plain, ours |",
        "| --- | --- | --- | --- |",
    ]
    sizes = {}
    for row in record["results"]:
        if row["way"] == "forward and backward":
            place = f"{row['documents']} x {row['longest']} ({row['tokens']:,})"
            times = ", ".join(f"{entry['median_ms']:.0f}" for entry in row["times"].values())
            sizes.setdefault(place, []).append(f"{times} ({row['ratio']:.2f}x)")
    lines += [f"| {place} | " + " | ".join(cells) + " |" for place, cells in sizes.items()]
    return "\n".join([*lines, "", provenance(record) + " `python benchmarks/seke_head.py`"])


def first_screen() -> str:
    record = load("quickstart")
    scores = record["results"]["scores"]
    shown = "[" + ",\n ".join(map(str, record["results"]["first_screen"])) + "]"
    table = "; ".join(f"{name} {100 * s['f1@5']:.1f} / {100 * s['f1@10']:.1f}" for name, s in scores.items())
    return f"```\n{shown}\n```\n\nAfter {record['settings']['steps']} steps, F1@5 / F1@10 on the 50 texts held out: {table}."


MAKERS = {"table:seke_inspec": seke_inspec, "table:seke_head": seke_head, "result:first_screen": first_screen}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    readme = ROOT / "README.md"
    text = old = readme.read_text(encoding="utf-8")
    for name, make in MAKERS.items():
        block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.S)
        text = block.sub(lambda match, make=make: match[1] + make() + "\n" + match[2], text)
    if args.check:
        sys.exit(0 if text == old else "README.md is not what the results say. Run: make tables")
    readme.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
