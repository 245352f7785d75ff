"""Definition modeling."""

from statistics import mean

from . import load, page, rows_of, spread, table

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
    """Mean and standard deviation; empty without values."""
    return "" if None in values else spread(values, 2)


def less_dense(found: list[dict], rows: list[dict]) -> str:
    """BLEU and perplexity of a system less the dense model's, seed by seed, as means: systems can differ in their seeds."""
    dense = {row["seed"]: row for row in rows if row["system"] == "dense"}
    scores = (SCORES["BLEU, same context"], SCORES["perplexity"])
    differences = (mean(score(row) - score(dense[row["seed"]]) for row in found) for score in scores)
    return " / ".join(f"{value:+.2f}" for value in differences)


def systems_table(rows: list[dict]) -> list[str]:
    """All scores of all systems."""
    lines = []
    for name, title in SYSTEMS.items():
        if found := [row for row in rows if row["system"] == name]:
            cells = (cell([score(row) for row in found]) for score in SCORES.values())
            lines.append((title, len(found), *cells, "" if name == "dense" else less_dense(found, rows)))
    return table(("", "seeds", *SCORES, "BLEU / perplexity, difference from the dense model"), lines)


def curves_table(rows: list[dict]) -> list[str]:
    """Scores of the best of several samples."""
    lines = []
    for name, title in CHOOSERS.items():
        if found := [row["scores"] for row in rows if row["system"] == name and "best_of_8" in row["scores"]]:
            both = (
                [[scores[f"best_of_{n}"][f"{metric} (context)"] for scores in found] for metric in ("bleu", "rouge")]
                for n in (1, 2, 4, 8)
            )
            lines.append((title, len(found), *(" / ".join(map(cell, pair)) for pair in both)))
    return table(("chosen by", "seeds", "1", "2", "4", "8"), lines)


def rows_read(record: dict) -> str:
    """How many rows the systems were trained on, from which bases."""
    bases = [row["perplexity"] for row in record["results"] if row["system"] == "base"]
    return (
        f"WordNet's test rows, {record['settings']['rows']:,} training rows, from {'bases' if len(bases) > 1 else 'a base'} of "
        f"perplexity {cell(bases)}"
    )


def lexicon_quality() -> str:
    """The recipe and its ablations, and the best of several samples."""
    record = load("lexicon_quality")
    title = f"{rows_read(record)}; means over seeds, in per cent, except perplexity and entropy:"
    lines = [title, "", *systems_table(record["results"]), ""]
    lines += ["BLEU / ROUGE-L, same context, of the best of several samples of the recipe's mixture:", ""]
    return page([*lines, *curves_table(record["results"])], record, "lexicon_quality.py --data PATH --work FOLDER")


def lexicon_quality_medium() -> str:
    """The same with larger models."""
    record = load("lexicon_quality_medium")
    title = f"{rows_read(record)}, with 10.6 million parameters besides the embeddings (`medium.yml`):"
    command = "lexicon_quality.py --data PATH --work FOLDER --config medium.yml --rows 20000"
    return page([title, "", *systems_table(record["results"])], record, command)


SMOLLM2 = {
    "lexicon-smollm2": "the default model, as installed",
    "lexicon-smollm2, token_top1": "top 1 per token",
    "lexicon-smollm2, sequence_soft": "by sequence, soft",
    "lexicon-smollm2, sequence_hard": "by sequence, hard",
    "lexicon-smollm2, best of 1": "one sample",
    "lexicon-smollm2, best of 2": "the best of two samples",
    "lexicon-smollm2, best of 4": "the best of four",
    "lexicon-smollm2, best of 8": "the best of eight",
    "lexicon-smollm2, best of 8 by a reward for gold": "the best of eight, by a reward that prefers gold definitions",
    "lexicon-smollm2, best of 8 by a reward for nearest": "the best of eight, by a reward that prefers the nearest sample",
    "main": "the recipe: a model fine-tuned on all rows, four experts from it, ridge gates, top 2 per token",
    "experts_1": "the same training without a split: a dense model",
    "paper": "experts from SmolLM2 itself",
    "token_top1": "the recipe, top 1 per token",
    "domain": "the recipe, by domain",
    "random": "the recipe, random split",
    "lexical": "the recipe, lexical split",
    "experts_2": "the recipe, two experts",
    "experts_8": "the recipe, eight experts",
}


def lexicon_smollm2(name: str = "lexicon_smollm2") -> str:
    """The recipe over SmolLM2, dictionary by dictionary."""
    record = load(name)
    settings, counts = record["settings"], {name: record["settings"].get(name) for name in ("rows", "test_rows")}
    title = "Greedy definitions of test rows, in per cent, with 95% intervals over rows"
    if counts["rows"]:
        title += f", {counts['rows']:,} rows of each dictionary for training and {counts['test_rows']:,} for tests"
    if settings["systems"]:
        title += (
            f", and in brackets the difference from the dense model; seeds {', '.join(map(str, settings['seeds']))}"
        )
    command = f"lexicon_smollm2.py --data PATH --work FOLDER {' '.join(['--systems', *settings['systems']])}"
    if name == "lexicon_smollm2":
        command += " --packaged"
    else:
        names = " ".join(row["dictionary"] for row in record["results"])
        command += f" --dictionaries {names} --seeds {' '.join(map(str, settings['seeds']))} --name {name}"
    command += "".join(f" --{name} {count}" for name, count in counts.items() if count)
    command += f" --prompted --shots {' '.join(map(str, settings['shots']))}" if settings["shots"] else ""
    return page([f"{title}:", "", *over_smollm2(record)], record, command)


def over_smollm2(record: dict) -> list[str]:
    """A row for each dictionary and system, with differences where there is a baseline."""
    lines = []
    for row in record["results"]:
        for system, own in row["systems"].items():
            cells = []
            for protocol in ("context", "term"):
                for metric in ("bleu", "rouge"):
                    value, test = own[protocol][metric], row["tests"].get(system, {}).get(protocol, {}).get(metric)
                    difference = (
                        f" ({test['difference']:+.1f} [{test['low']:+.1f}, {test['high']:+.1f}])" if test else ""
                    )
                    cells.append(f"{value['mean']:.1f} [{value['low']:.1f}, {value['high']:.1f}]{difference}")
            lines.append((row["dictionary"], SMOLLM2.get(system, f"SmolLM2, {system}"), *cells))
    head = ("", "", "BLEU, same context", "ROUGE-L, same context", "BLEU, any sense", "ROUGE-L, any sense")
    return table(head, lines)


def lexicon_smollm2_policies() -> str:
    """Other policies of the default model, and the best of its samples."""
    record = load("lexicon_smollm2_policies")
    settings = record["settings"]
    title = (
        f"The default model on the first {settings['test_rows']:,} test rows, in per cent, with 95% intervals over rows, and in brackets the "
        "difference from its own greedy definitions (the best of several samples is the most likely one, unless a reward is named):"
    )
    command = f"lexicon_smollm2.py --data PATH --work FOLDER --systems --packaged --test_rows {settings['test_rows']} "
    command += f"--best_of {settings['best_of']} --policies {' '.join(settings['policies'])} "
    if settings.get("rewards"):
        command += f"--rewards {' '.join(settings['rewards'])} --reward_rows {settings['reward_rows']} "
    command += "--name lexicon_smollm2_policies"
    return page([title, "", *over_smollm2(record)], record, command)


def lexicon_smollm2_dictionaries() -> str:
    """The same for other dictionaries."""
    return lexicon_smollm2("lexicon_smollm2_dictionaries")


def lexicon_smollm2_all() -> str:
    """The same for the three dictionaries together."""
    return lexicon_smollm2("lexicon_smollm2_all")


def lexicon_speed() -> str:
    """Tokens per second of generation, and seconds of scores and clusterings."""
    record, generation = load("lexicon_speed"), load("lexicon_generation")
    new, experts = (generation["settings"][name] for name in ("new", "experts"))
    names = {
        "dense": "dense",
        "stock": "Mixtral, top 2",
        "token": "ours, top 2 per token",
        "domain": "by domain, all in a batch",
        "grouped": "by domain, one in a batch",
    }
    speeds = []
    for row in rows_of(generation, "generation"):
        cells = (f"{row['tokens_per_second'][name]:,.0f}" for name in names)
        speeds.append((f"{row['d']}, {row['layers']}", row["batch"], *cells))
    scores, clusters = rows_of(record, "scores"), []
    seconds = ((row["metric"], *(f"{row['seconds'][way]:.1f}" for way in ("ours", "pair by pair"))) for row in scores)
    for row in rows_of(record, "clusters"):
        cells = (f"{row['seconds']:,.1f}", f"{row['peak_mib']:,.0f} MiB", f"{row['inertia']:.5f}")
        clusters.append((row["name"], f"{row['rows']:,}", row["k"], *cells))
    command, first = "lexicon_speed.py --data PATH --work FOLDER", scores[0]
    title = f"Generation, tokens per second, {new} after each prompt, {experts} experts of the dense model's size:"
    lines = [title, "", *table(("d, layers", "rows per batch", *names.values()), speeds)]
    lines = [page(lines, generation, f"{command} --only generation --name lexicon_generation"), ""]
    lines += [
        f"Scores of {first['rows']:,} rows, {first['pairs']:,} pairs, in seconds (BLEU is sacrebleu's on both sides):",
        "",
        *table(("", "ours", "the reference implementation, pair by pair"), seconds),
        "",
        "Balanced k-means of embeddings (384 numbers each), from the same first centroids:",
        "",
        *table(("", "rows", "clusters", "seconds", "memory at the peak", "mean squared distance"), clusters),
    ]
    return page(lines, record, command)
