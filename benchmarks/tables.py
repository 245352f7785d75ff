"""Writes the tables of README and docs from benchmarks/results, between <!-- table:NAME --> and <!-- end -->.

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

SYSTEMS = {
    "moesumm": "MoeSumm",
    "mix": "backbone, on the mix",
    "mix twice as long": "backbone, on the mix, twice as long",
    "single": "backbone, on one data set (out of domain: news)",
    "flat_moe": "FlatMoE",
    "no_dataset": "MoeSumm without dataset information",
    "no_margin": "MoeSumm without the margin loss",
    "random start": "MoeSumm, deputies that start at random",
    "all weights": "MoeSumm, all weights trained in few-shot",
}
TASKS = {
    "inspec": "Inspec",
    "ag_news": "AG News",
    "bbc_news": "BBC News",
    "squad_v1": "SQuAD 1.1",
    "squad_v2": "SQuAD 2.0",
}
READERS = {
    "hypernet": "hypernetwork",
    "hypernet, both ways": "hypernetwork, both ways",
    "hypernet, shared weights": "both ways, shared weights",
    "bilstm": "BiLSTM",
    "title-guided": "title-guided",
    "plain": "the states as they are",
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


def merge_speed() -> str:
    record = load("merge_speed")
    labels = {
        "floor": "floor: `copy_file_range` and fsync of the bytes to be written",
        "base": "merge-experts, `average: base`",
        "mean": "merge-experts, `average: mean`",
        "mergekit": f"mergekit-moe {(record['settings']['mergekit'] or {}).get('mergekit', '')} (what `average: base` does)",
        "check": "merge-experts check",
    }
    names = {"1b": "Llama-3.2-1B's shape", "8b-thin": "Llama-3-8B's width, 4 layers"}
    lines = ["| | | seconds | times the floor | peak anonymous memory |", "| --- | --- | --- | --- | --- |"]
    for shape, found in record["results"].items():
        what = f"{names[shape]}: {found['experts']} experts, {found['output_bytes'] / 1e9:.2f} GB written"
        for name, row in found["candidates"].items():
            ratio = f"{row['times_floor']:.2f}" if "times_floor" in row else ""
            memory = f"{row['peak_anonymous_mib']:,.0f} MiB"
            lines.append(f"| {what} | {labels[name]} | {row['median_seconds']:.1f} | {ratio} | {memory} |")
            what = ""
    rounds = record["settings"]["rounds"]
    told = f"Whole processes, medians of {rounds} interleaved rounds, sources in the page cache. "
    command = " `python benchmarks/merge_speed.py --work FOLDER --mergekit ENVIRONMENT`"
    return "\n".join([*lines, "", told + provenance(record) + command])


def moe_speed() -> str:
    record = load("moe_speed")
    columns = {
        "ours": "token, top 2, to Mixtral",
        "one domain": "one domain, to dense",
        "mixed domains": "mixed domains, to dense",
    }
    lines = [
        "Time of a mixture of 4 experts over that of the stock model with the same weights (below 1 is faster):",
        "",
        f"| | d, layers | sequences x length | {' | '.join(columns.values())} |",
        "| --- | --- | --- |" + " --- |" * len(columns),
    ]
    table: dict[tuple, dict] = {}
    for row in record["results"]:
        place = (row["way"], f"{row['d']}, {row['layers']}", f"{row['sequences']} x {row['length']}")
        table.setdefault(place, {}).update(row["ratios"])
    for place, ratios in sorted(table.items(), key=lambda item: ("prefill", "decode", "training").index(item[0][0])):
        cells = (f"{ratios[name]:.2f}" if name in ratios else "" for name in columns)
        lines.append(f"| {' | '.join(place)} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", provenance(record) + " `python benchmarks/moe_speed.py`"])


def lexicon_merge() -> str:
    record = load("lexicon_merge")
    rows = record["results"]["perplexity"]
    columns = [name for name in next(iter(rows.values())) if not name.startswith("ratio")]
    lines = [f"| perplexity of held-out definitions | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
    for label, row in rows.items():
        lines.append(f"| {label} | " + " | ".join(f"{row[name]:.1f}" for name in columns) + " |")
    return "\n".join([*lines, "", provenance(record) + " `python benchmarks/lexicon_merge.py --data PATH`"])


def moesumm_speed() -> str:
    record = load("moesumm_speed")
    columns = ("main only", "auto", "dense", "grouped", "loop")
    lines = [
        "Time of a BART with deputies of 512 over that of the stock BART with the same weights:",
        "",
        f"| | shape | deputies | {' | '.join(columns)} | margin loss, to a step without |",
        "| --- | --- | --- |" + " --- |" * (len(columns) + 1),
    ]
    names = {
        "forward": "forward",
        "generation": f"generation, beam {record['settings']['beams']}",
        "training": "training",
    }
    memory = [row for row in record["results"] if row["what"] == "memory"]
    timed = [row for row in record["results"] if row["what"] != "memory"]
    rows = sorted(timed, key=lambda row: list(names).index(row["what"]))
    for row in rows:
        cells = [f"{row['ratios'][name]:.2f}" if name in row["ratios"] else "" for name in columns]
        cells.append(f"{row['margin_ratio']:.2f}" if "margin_ratio" in row else "")
        lines.append(f"| {names[row['what']]} | {row['shape']} | {row['deputies']} | {' | '.join(cells)} |")
    lines += [
        "",
        "| peak MiB beside parameters and gradients | shape | stock | main only | 3 deputies | with the margin loss |",
    ]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for row in memory:
        found = row["peak_mib"]
        cells = [
            f"{found[name]:,.0f}" if name in found else ""
            for name in ("stock", "main only", "auto", "auto, margin loss")
        ]
        lines.append(f"| {names[row['way']]} | {row['shape']} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", provenance(record) + " `python benchmarks/moesumm_speed.py`"])


def moesumm_quality() -> str:
    record = load("moesumm_quality")
    settings = {result["setting"]: result for result in record["results"]}
    systems = list(dict.fromkeys(row["system"] for result in settings.values() for row in result["scores"]))
    lines = [
        "Mean of ROUGE-1, -2 and -L (F1, stemmed) over three data sets; in brackets the difference from the backbone on the",
        "mix with its 95 per cent interval over documents, and in how many runs it has this sign:",
        "",
        f"| | {' | '.join(settings)} |",
        "| --- |" + " --- |" * len(settings),
    ]

    def of_all(rows: list[dict], system: str) -> dict:
        return next((row for row in rows if row["system"] == system and row["data set"] == "mean of all"), {})

    for system in systems:
        cells = []
        for result in settings.values():
            score, test = of_all(result["scores"], system), of_all(result["tests"], system)
            cell = f"{score['mean R']:.2f}" if score else ""
            if test:
                cell += f" ({test['difference']:+.2f}, {test['low']:+.2f} to {test['high']:+.2f}; {test['agree']})"
            cells.append(cell)
        lines.append(f"| {SYSTEMS.get(system, system)} | {' | '.join(cells)} |")
    return "\n".join(
        [*lines, "", provenance(record) + " `python benchmarks/moesumm_quality.py --data PATH --work FOLDER`"]
    )


def hypernet_quality() -> str:
    record = load("hypernet_quality")
    found = {(row["task"], row["way"], row["reader"]): row for row in record["results"]}
    places = sorted({key[:2] for key in found}, key=lambda place: (list(TASKS).index(place[0]), place[1] != "frozen"))
    readers = [reader for reader in READERS if any(key[2] == reader for key in found)]
    lines = [
        "Test scores in per cent; where there are three seeds, their mean and standard deviation:",
        "",
        f"| | score | {' | '.join(READERS[reader] for reader in readers)} |",
        "| --- | --- |" + " --- |" * len(readers),
    ]

    def cell(row: dict | None, score: str) -> str:
        if row is None:
            return ""
        spread = row["spread"][score]
        return f"{row['means'][score]:.1f}" + (f" ± {spread:.1f}" if spread is not None else "")

    for task, way in places:
        rows = [found.get((task, way, reader)) for reader in readers]
        for score in next(row for row in rows if row)["means"]:
            cells = [cell(row, score) for row in rows]
            lines.append(f"| {TASKS[task]}, {way} | {score} | {' | '.join(cells)} |")
    command = "`python benchmarks/hypernet_quality.py --data PATH --work FOLDER`"
    return "\n".join([*lines, "", f"{provenance(record)} {command}"])


def hypernet_speed() -> str:
    record = load("hypernet_speed")
    of = {what: [row for row in record["results"] if row["what"] == what] for what in ("layer", "memory", "epoch")}
    lines = [
        "Sixteen texts, N_h 512, N_z 32; the loop's time over the layer's, and the layer's over that of one stock LSTM:",
        "",
        "| | N_x | tokens | over the loop | of the stock LSTM | with the writing of the weights |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in of["layer"]:
        shortest = int(row["shortest"] * row["longest"])
        tokens = str(row["longest"]) if row["shortest"] == 1 else f"{shortest} to {row['longest']}"
        lines.append(
            f"| {row['way']} | {row['input_size']} | {tokens} | {row['faster_than_loop']:.1f} | "
            f"{row['slower_than_stock']:.2f} | {row['written_slower_than_stock']:.2f} |"
        )
    lines += [
        "",
        "| peak MiB, 400 tokens | N_x | by text | by step | with the writing | stock LSTM | weights + gates |",
    ]
    lines.append("| --- |" + " --- |" * 6)
    candidates = ("by_text", "by_step", "written", "stock")
    peaks = {(row["way"], row["input_size"], row["candidate"]): row for row in of["memory"]}
    for way, size in dict.fromkeys(key[:2] for key in peaks):
        cells = [f"{peaks[way, size, name]['peak_MiB']:,.0f}" for name in candidates]
        of_both = peaks[way, size, "by_text"]
        parts = f"{of_both['weights_MiB']:,.0f} + {of_both['gates_MiB']:,.0f}"
        lines.append(f"| {way} | {size} | {' | '.join(cells)} | {parts} |")
    lines += [
        "",
        "| an epoch, frozen MiniLM-L6 | with the backbone | from kept states | |",
        "| --- | --- | --- | --- |",
    ]
    for row in of["epoch"]:
        seconds = [row["times"][name]["median_ms"] / 1e3 for name in ("backbone", "kept")]
        lines.append(
            f"| {row['windows']} pairs, N_h {row['hidden_size']}, N_z {row['meta_size']} | {seconds[0]:.1f} s | "
            f"{seconds[1]:.1f} s | {row['ratio']:.2f}x |"
        )
    return "\n".join([*lines, "", provenance(record) + " `python benchmarks/hypernet_speed.py --data PATH`"])


def first_screen() -> str:
    record = load("quickstart")
    scores = record["results"]["scores"]
    shown = "[" + ",\n ".join(map(str, record["results"]["first_screen"])) + "]"
    table = "; ".join(f"{name} {100 * s['f1@5']:.1f} / {100 * s['f1@10']:.1f}" for name, s in scores.items())
    return f"```\n{shown}\n```\n\nAfter {record['settings']['steps']} steps, F1@5 / F1@10 on the 50 texts held out: {table}."


MAKERS = {
    "table:seke_inspec": seke_inspec,
    "table:seke_head": seke_head,
    "table:merge_speed": merge_speed,
    "table:moe_speed": moe_speed,
    "table:lexicon_merge": lexicon_merge,
    "table:moesumm_speed": moesumm_speed,
    "table:moesumm_quality": moesumm_quality,
    "table:hypernet_quality": hypernet_quality,
    "table:hypernet_speed": hypernet_speed,
    "result:first_screen": first_screen,
}
PAGES = ("README.md", "docs/merging.md", "docs/summarization.md", "docs/hypernet.md")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    stale = []
    for page in PAGES:
        path = ROOT / page
        text = old = path.read_text(encoding="utf-8")
        for name, make in MAKERS.items():
            block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.S)
            text = block.sub(lambda match, make=make: match[1] + make() + "\n" + match[2], text)
        if args.check:
            stale += [page] * (text != old)
        else:
            path.write_text(text, encoding="utf-8")
    if stale:
        sys.exit(f"{', '.join(stale)}: not what the results say. Run: make tables")


if __name__ == "__main__":
    main()
