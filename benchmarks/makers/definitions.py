"""Definition modeling."""

from statistics import mean, stdev

from . import load, provenance

SYSTEMS = {
    "dense": "a dense model, trained as long",
    "main": "the recipe: four balanced clusters, top 2 a token",
    "no_split": "without a split",
    "random": "random split",
    "lexical": "lexical split",
    "semantic_gold": "clusters that read the gold definition",
    "token_top1": "top 1 a token",
    "sequence_soft": "by sequence, soft",
    "sequence_hard": "by sequence, hard",
    "domain": "by domain",
    "experts_1": "one expert",
    "experts_2": "two experts",
    "experts_8": "eight experts",
}
SCORES = {
    "BLEU, same context": lambda row: row["scores"]["plain"]["bleu (context)"],
    "ROUGE-L, same context": lambda row: row["scores"]["plain"]["rouge (context)"],
    "BLEU, any sense": lambda row: row["scores"]["plain"]["bleu (term)"],
    "ROUGE-L, any sense": lambda row: row["scores"]["plain"]["rouge (term)"],
    "perplexity": lambda row: row["perplexity"],
    "routers' entropy, share of log E": lambda row: row.get("entropy"),
}


def cell(values: list[float | None]) -> str:
    if None in values:
        return ""
    return f"{mean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def lexicon_quality() -> str:
    record = load("lexicon_quality")
    runs = {name: [row for row in record["results"] if row["system"] == name] for name in SYSTEMS}
    lines = [
        f"WordNet's test rows, {record['settings']['rows']:,} to train on, means over seeds, per cent but for perplexity and entropy:",
        "",
        f"| | seeds | {' | '.join(SCORES)} |",
        "| --- | --- |" + " --- |" * len(SCORES),
    ]
    for name, rows in runs.items():
        if rows:
            cells = (cell([score(row) for row in rows]) for score in SCORES.values())
            lines.append(f"| {SYSTEMS[name]} | {len(rows)} | {' | '.join(cells)} |")
    curves = [row["scores"] for row in runs["main"] if "best_of_1" in row["scores"]]
    if curves:
        sizes = [name for name in curves[0] if name.startswith("best_of_")]
        lines += ["", f"| best of, by reward | {' | '.join(name.removeprefix('best_of_') for name in sizes)} |"]
        lines.append("| --- |" + " --- |" * len(sizes))
        for label, column in (("BLEU, same context", "bleu (context)"), ("ROUGE-L, same context", "rouge (context)")):
            cells = (cell([curve[name][column] for curve in curves]) for name in sizes)
            lines.append(f"| {label} | {' | '.join(cells)} |")
    command = "`python benchmarks/lexicon_quality.py --data PATH --work FOLDER`"
    return "\n".join([*lines, "", f"{provenance(record)} {command}"])
