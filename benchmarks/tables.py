"""Writes the tables of README and docs from benchmarks/results, between <!-- table:NAME --> and <!-- end -->.

python benchmarks/tables.py            # or: make tables
python benchmarks/tables.py --check    # says whether the README is up to date
"""

import argparse
import json
import re
import sys
from pathlib import Path
from statistics import mean, stdev

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
    rows = record["results"] if isinstance(record["results"], list) else []
    commits = sorted({row["commit"] for row in rows if "commit" in row}) or [record["commit"]]
    return (
        f"Measured {record['date']} at {', '.join(commits)} with torch {versions['torch']}, transformers "
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
    runs: dict[tuple, list[dict]] = {}
    for row in record["results"]:
        runs.setdefault((row["task"], row["way"], row["reader"]), []).append(row)
    found = {}
    for key, rows in runs.items():  # of the rates that the first seed tried, the one that did best on validation rows
        rate = max((row for row in rows if row["seed"] == 0), key=lambda row: row["validation"])["rate"]
        found[key] = [row["test"] for row in rows if row["rate"] == rate]
    places = sorted({key[:2] for key in found}, key=lambda place: (list(TASKS).index(place[0]), place[1] != "frozen"))
    readers = [reader for reader in READERS if any(key[2] == reader for key in found)]
    lines = [
        "Test scores in per cent, means over seeds, their standard deviation and number in brackets:",
        "",
        f"| | score | {' | '.join(READERS[reader] for reader in readers)} |",
        "| --- | --- |" + " --- |" * len(readers),
    ]

    def cell(tests: list[dict] | None, score: str) -> str:
        if not tests:
            return ""
        values = [test[score] for test in tests]
        spread = f" (± {stdev(values):.1f}, {len(values)})" if len(values) > 1 else " (1)"
        return f"{mean(values):.1f}{spread}"

    for task, way in places:
        rows = [found.get((task, way, reader)) for reader in readers]
        for score in next(tests for tests in rows if tests)[0]:
            lines.append(f"| {TASKS[task]}, {way} | {score} | {' | '.join(cell(tests, score) for tests in rows)} |")
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
        "| an epoch, frozen backbone | with the backbone | from kept states | |",
        "| --- | --- | --- | --- |",
    ]
    for row in of["epoch"]:
        seconds = [row["times"][name]["median_ms"] / 1e3 for name in ("backbone", "kept")]
        size = f"{'2 x ' if row['bidirectional'] else ''}{row['hidden_size']}"
        lines.append(
            f"| {row['backbone']}, {row['windows']} pairs, N_h {size}, N_z {row['meta_size']} | {seconds[0]:.1f} s | "
            f"{seconds[1]:.1f} s | {row['ratio']:.2f}x |"
        )
    return "\n".join([*lines, "", provenance(record) + " `python benchmarks/hypernet_speed.py --data PATH`"])


def exhird_speed() -> str:
    record = load("exhird_speed")
    of = {
        what: [row for row in record["results"] if row["what"] == what]
        for what in ("decoding", "training", "attention")
    }
    lines = ["| | encoder | ours | plain | ratio |", "| --- | --- | --- | --- | --- |"]
    for row in of["decoding"]:
        rates = row["documents_per_second"]
        cells = f"{rates['ours']:.1f} documents/s | {rates['plain']:.2f} documents/s | {row['ratio']:.1f}x"
        lines.append(f"| greedy decoding | {row['encoder']} | {cells} |")
    for row in of["training"]:
        seconds = [row["times"][name]["median_ms"] / 1e3 for name in ("ours", "plain")]
        lines.append(
            f"| training step | {row['encoder']} | {seconds[0]:.2f} s | {seconds[1]:.2f} s | {row['ratio']:.1f}x |"
        )
    lines += [
        "",
        "| attention, g 10, w 50 | words | dense | block-sparse | faster | memory |",
        "| --- |" + " --- |" * 5,
    ]
    for row in of["attention"]:
        cells = [
            f"{row['times'][name]['median_ms']:,.0f} ms, {row['peak_MiB'][name]:,.0f} MiB"
            for name in ("dense", "block")
        ]
        lines.append(
            f"| {row['way']} | {row['length']:,} | {' | '.join(cells)} | {row['faster']:.1f}x | 1/{row['smaller']:.1f} |"
        )
    return "\n".join([*lines, "", provenance(record) + " `python benchmarks/exhird_speed.py`"])


def exhird_quality() -> str:
    record = load("exhird_quality")
    systems: dict[str, list[dict]] = {}
    for row in record["results"]:
        systems.setdefault(row["system"], []).append(row["scores"])
    sets = list(next(iter(systems.values()))[0]["exclusion"])

    def average(runs: list[dict], value) -> float:
        return sum(map(value, runs)) / len(runs)

    lines = [
        "Present keyphrases, F1@M / F1@5 in per cent by the convention `exhird`, means over seeds:",
        "",
        f"| | seeds | {' | '.join(sets)} |",
        "| --- | --- |" + " --- |" * len(sets),
    ]
    for system, runs in systems.items():
        cells = []
        for name in sets:
            scores = (
                average(runs, lambda run, n=name, k=k: 100 * run["exclusion"][n]["present"][k])
                for k in ("F1@M", "F1@5")
            )
            cells.append(" / ".join(f"{score:.1f}" for score in scores))
        lines.append(f"| {system} | {len(runs)} | {' | '.join(cells)} |")
    lines += ["", "Repeats in per cent of all generated phrases, without exclusion and with it:", ""]
    lines += [f"| | {' | '.join(sets)} |", "| --- |" + " --- |" * len(sets)]
    for system, runs in systems.items():
        cells = []
        for name in sets:
            shares = (average(runs, lambda run, n=name, k=k: 100 * run[k][n]["repeats"]) for k in ("none", "exclusion"))
            cells.append(" → ".join(f"{share:.1f}" for share in shares))
        lines.append(f"| {system} | {' | '.join(cells)} |")
    command = "`python benchmarks/exhird_quality.py --data PATH --work FOLDER`"
    return "\n".join([*lines, "", f"{provenance(record)} {command}"])


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
    "table:exhird_quality": exhird_quality,
    "table:exhird_speed": exhird_speed,
    "result:first_screen": first_screen,
}
PAGES = ("README.md", "docs/merging.md", "docs/summarization.md", "docs/hypernet.md", "docs/exhird.md")


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
