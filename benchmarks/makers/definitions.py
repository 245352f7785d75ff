"""Definition modeling."""

from statistics import mean, stdev

from . import load, provenance

SYSTEMS = {
    "dense": "a dense model, trained as long",
    "main": "the recipe: four balanced clusters, top 2 per token",
    "no_split": "without a split",
    "random": "random split",
    "lexical": "lexical split",
    "semantic_gold": "clusters that read the gold definition",
    "token_top1": "top 1 per token",
    "sequence_soft": "by sequence, soft",
    "sequence_hard": "by sequence, hard",
    "domain": "by domain",
    "token_linear": "attention routed too, top 2 per token",
    "domain_linear": "attention routed too, by domain",
    "token_all": "attention routed, embeddings and norms tuned, top 2 per token",
    "domain_all": "attention routed, embeddings and norms tuned, by domain",
    "dense_branched": "a dense model, its linears alone trained in the second pass",
    "token_branched": "experts from a dense model, attention routed too, top 2 per token, untuned",
    "domain_branched": "experts from a dense model, attention routed too, by domain, untuned",
    "experts_1": "one expert: a dense model, its MLPs alone trained",
    "experts_2": "two experts",
    "experts_8": "eight experts",
}
CHOOSERS = {
    "main": "a reward that prefers the sample nearest to the gold definition",
    "reward_gold": "a reward that prefers the gold definition (Eq. 7)",
    "likelihood": "likelihood",
    "oracle": "the gold definition itself",
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


def less_dense(found: list[dict], rows: list[dict]) -> str:
    """BLEU and perplexity of a system less the dense model's, seed by seed, as means: systems can differ in their seeds."""
    dense = {row["seed"]: row for row in rows if row["system"] == "dense"}
    scores = (SCORES["BLEU, same context"], SCORES["perplexity"])
    differences = (mean(score(row) - score(dense[row["seed"]]) for row in found) for score in scores)
    return " / ".join(f"{value:+.2f}" for value in differences)


def systems_table(rows: list[dict]) -> list[str]:
    lines = [f"| | seeds | {' | '.join(SCORES)} | BLEU / perplexity, difference from the dense model |"]
    lines.append("| --- | --- |" + " --- |" * (len(SCORES) + 1))
    for name, title in SYSTEMS.items():
        if found := [row for row in rows if row["system"] == name]:
            cells = [cell([score(row) for row in found]) for score in SCORES.values()]
            cells.append("" if name == "dense" else less_dense(found, rows))
            lines.append(f"| {title} | {len(found)} | {' | '.join(cells)} |")
    return lines


def curves_table(rows: list[dict]) -> list[str]:
    lines = ["| chosen by | seeds | 1 | 2 | 4 | 8 |", "| --- | --- | --- | --- | --- | --- |"]
    for name, title in CHOOSERS.items():
        if found := [row["scores"] for row in rows if row["system"] == name and "best_of_8" in row["scores"]]:
            both = (
                [[scores[f"best_of_{n}"][f"{metric} (context)"] for scores in found] for metric in ("bleu", "rouge")]
                for n in (1, 2, 4, 8)
            )
            cells = (" / ".join(map(cell, pair)) for pair in both)
            lines.append(f"| {title} | {len(found)} | {' | '.join(cells)} |")
    return lines


def rows_read(record: dict) -> str:
    bases = [row["perplexity"] for row in record["results"] if row["system"] == "base"]
    return (
        f"WordNet's test rows, {record['settings']['rows']:,} training rows, from {'bases' if len(bases) > 1 else 'a base'} of "
        f"perplexity {cell(bases)}"
    )


def lexicon_quality() -> str:
    record = load("lexicon_quality")
    return "\n".join(
        [
            f"{rows_read(record)}; means over seeds, in per cent, except perplexity and entropy:",
            "",
            *systems_table(record["results"]),
            "",
            "BLEU / ROUGE-L, same context, of the best of several samples of the recipe's mixture:",
            "",
            *curves_table(record["results"]),
            "",
            f"{provenance(record)} `python benchmarks/lexicon_quality.py --data PATH --work FOLDER`",
        ]
    )


def lexicon_quality_medium() -> str:
    record = load("lexicon_quality_medium")
    return "\n".join(
        [
            f"{rows_read(record)}, with 10.6 million parameters besides the embeddings (`medium.yml`):",
            "",
            *systems_table(record["results"]),
            "",
            f"{provenance(record)} `python benchmarks/lexicon_quality.py --data PATH --work FOLDER --config medium.yml "
            "--rows 20000`",
        ]
    )


def lexicon_speed() -> str:
    record, generation = load("lexicon_speed"), load("lexicon_generation")
    found, settings = record["results"], generation["settings"]
    names = {
        "dense": "dense",
        "stock": "Mixtral, top 2",
        "token": "ours, top 2 per token",
        "domain": "by domain, all in a batch",
    }
    names["grouped"] = "by domain, one in a batch"
    lines = [
        f"Generation, tokens per second, {settings['new']} after each prompt, {settings['experts']} experts of the dense model's size:",
        "",
        f"| d, layers | rows per batch | {' | '.join(names.values())} |",
        "| --- | --- |" + " --- |" * len(names),
    ]
    for row in generation["results"]["generation"]:
        cells = " | ".join(f"{row['tokens_per_second'][name]:,.0f}" for name in names)
        lines.append(f"| {row['d']}, {row['layers']} | {row['batch']} | {cells} |")
    scores, command = found["scores"], "`python benchmarks/lexicon_speed.py --data PATH --work FOLDER"
    lines += ["", f"{provenance(generation)} {command} --only generation --name lexicon_generation`"]
    lines += [
        "",
        f"Scores of {scores['rows']:,} rows, {scores['pairs']:,} pairs, in seconds (BLEU is sacrebleu's on both sides):",
        "",
    ]
    lines += ["| | ours | the reference implementation, pair by pair |", "| --- | --- | --- |"]
    for name, seconds in scores["seconds"].items():
        lines.append(f"| {name} | {seconds['ours']:.1f} | {seconds['pair by pair']:.1f} |")
    lines += ["", "Balanced k-means of embeddings (384 numbers each), from the same first centroids:", ""]
    lines += ["| | rows | clusters | seconds | memory at the peak | mean squared distance |", "| --- |" + " --- |" * 5]
    for row in found["clusters"]:
        cells = f"{row['seconds']:,.1f} | {row['peak_mib']:,.0f} MiB | {row['inertia']:.5f}"
        lines.append(f"| {row['name']} | {row['rows']:,} | {row['k']} | {cells} |")
    return "\n".join([*lines, "", f"{provenance(record)} {command}`"])
