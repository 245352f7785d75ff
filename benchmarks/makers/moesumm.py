"""Tables of MoeSumm's benchmarks."""

from . import load, page, ratio, rows_of, table

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
    "authors' settings": "MoeSumm, trained as in the authors' code",
    "margin of the last layer": "MoeSumm, the margin compares with the last layer's main expert",
}
# a way to run the model -> its name in the results, and in older ones
IMPLEMENTATIONS = {"batched_mm": "dense", "grouped_mm": "grouped", "eager": "loop"}


def moesumm_speed() -> str:
    """Time and memory of deputies, relative to the stock BART."""
    record = load("moesumm_speed")
    ways = {
        "forward": "forward",
        "generation": f"generation, beam {record['settings']['beams']}",
        "training": "training",
    }
    timed = [row for way in ways for row in rows_of(record, way)]
    names = {name for row in timed for name in row["times"]}
    columns = {"main only": "main only", "auto": "auto"}
    columns |= {name: new for new, old in IMPLEMENTATIONS.items() for name in (new, old) if name in names}
    rows, memory = [], []
    for row in timed:
        cells = [f"{ratio(row, name, 'stock'):.2f}" if name in row["times"] else "" for name in columns]
        margin = f"{ratio(row, 'auto, margin loss', 'auto'):.2f}" if "auto, margin loss" in row["times"] else ""
        rows.append((ways[row["what"]], row["shape"], row["deputies"], *cells, margin))
    for row in rows_of(record, "memory"):
        peaks, names = row["peak_mib"], ("stock", "main only", "auto", "auto, margin loss")
        cells = (f"{peaks[name]:,.0f}" if name in peaks else "" for name in names)
        memory.append((ways[row["way"]], row["shape"], *cells))
    header = (
        "peak MiB besides parameters and gradients",
        "shape",
        "stock",
        "main only",
        "3 deputies",
        "with the margin loss",
    )
    lines = ["Time of a BART with deputies of 512 relative to the stock BART with the same weights:", ""]
    lines += table(("", "shape", "deputies", *columns.values(), "margin loss, to a step without"), rows)
    return page([*lines, "", *table(header, memory)], record, "moesumm_speed.py")


def moesumm_quality() -> str:
    """Systems trained alike, in all settings."""
    return quality("moesumm_quality", "from the backbone on the\nmix", "moesumm_quality.py --data PATH --work FOLDER`")


def moesumm_authors() -> str:
    """Training as in the authors' code."""
    command = "moesumm_quality.py ... --name moesumm_authors` (the whole command is in its first lines)"
    return quality("moesumm_authors", "from MoeSumm with\nits defaults", command)


def quality(name: str, difference: str, command: str) -> str:
    """The table of a record of moesumm_quality.py; `difference` names the baseline in its caption."""
    record = load(name)
    settings = {result["setting"]: result for result in record["results"]}
    systems = dict.fromkeys(row["system"] for result in settings.values() for row in result["scores"])

    def of_all(rows: list[dict], system: str) -> dict:
        return next((row for row in rows if row["system"] == system and row["data set"] == "mean of all"), {})

    def cell(result: dict, system: str) -> str:
        score, test = of_all(result["scores"], system), of_all(result["tests"], system)
        interval = "{difference:+.2f}, {low:+.2f} to {high:+.2f}; {agree}".format(**test) if test else ""
        return (f"{score['mean R']:.2f}" if score else "") + (f" ({interval})" if test else "")

    rows = ((SYSTEMS.get(name, name), *(cell(result, name) for result in settings.values())) for name in systems)
    title = (
        f"Mean of ROUGE-1, -2 and -L (F1, stemmed) over three data sets; in brackets the difference {difference} with its 95 "
        "per cent interval over documents, and in how many runs it has this sign:"
    )
    return page([title, "", *table(("", *settings), rows)], record, command).removesuffix("`")


OVER_SMOLLM2 = {
    "default": "the default model, as installed",
    "prompted": "SmolLM2-135M-Instruct, asked in a conversation",
    "lead": "the first words of the text, as many as a summary has",
    "deputies": "MoeSumm, only deputies trained",
    "moesumm": "MoeSumm, all weights trained",
    "no_margin": "the same without the margin loss",
    "flat_moe": "FlatMoE",
    "mix": "SmolLM2, trained on the mix",
    "single": "SmolLM2, one model per data set",
    "lora": "LoRA, one per data set",
}


BASELINES = {"mix": "SmolLM2 trained on the mix", "prompted": "SmolLM2 asked in a conversation"}


def moesumm_smollm2() -> str:
    """The default model and what needs no training."""
    return over_smollm2("moesumm_smollm2")


def moesumm_smollm2_systems() -> str:
    """Systems over SmolLM2 that were trained on the same rows."""
    return over_smollm2("moesumm_smollm2_systems")


def moesumm_smollm2_few() -> str:
    """Few-shot with a hundred rows."""
    return over_smollm2("moesumm_smollm2_few", "few-shot, 100 rows")


def moesumm_smollm2_four() -> str:
    """The backbone, MoeSumm, and deputies beside an unchanged main expert, on four sets."""
    return over_smollm2("moesumm_smollm2_four")


def over_smollm2(result_name: str, part: str = "") -> str:
    """Systems over SmolLM2 in all settings, or one: ROUGE of each data set, and the difference from a baseline."""
    record = load(result_name)
    lines = []
    for result in record["results"]:
        if part not in result["setting"]:
            continue
        sets = dict.fromkeys(row["data set"] for row in result["scores"])
        sets.pop("mean of all", None)
        scores = {(row["system"], row["data set"]): row for row in result["scores"]}
        tests = {(row["system"], row["data set"]): row for row in result.get("tests", [])}
        rows = []
        for system in dict.fromkeys(row["system"] for row in result["scores"]):
            cells = []
            for name in sets:
                row, test = scores.get((system, name)), tests.get((system, name))
                less = f" ({test['difference']:+.1f} [{test['low']:+.1f}, {test['high']:+.1f}])" if test else ""
                cells.append(f"{row['R-1']:.1f} / {row['R-2']:.1f} / {row['R-L']:.1f}{less}" if row else "")
            rows.append((OVER_SMOLLM2[system], *cells))
        lines += ["", *table((result["setting"], *sets), rows)]
    title = "ROUGE-1 / -2 / -L of greedy summaries of test rows (F1 of stemmed words, in per cent)"
    settings = record["settings"]
    if any(result.get("tests") for result in record["results"]):
        baseline = BASELINES[settings.get("baseline") or "mix"]
        title += f"; in brackets the difference of their mean from {baseline}, with its 95% interval over documents"
    command = f"moesumm_smollm2.py --data PATH --work FOLDER --systems {' '.join(settings['systems'])}"
    command += "".join(f" --{name} {settings[name]}" for name in ("rows", "test_rows") if settings[name])
    command += " --all_sets" if len(settings["in_domain"]) > 2 else ""
    command += "" if settings["zero_shot"] else " --no_zero_shot"
    if settings["few_rows"] != [10, 100]:
        command += " " + " ".join(map(str, ("--few_rows", *settings["few_rows"])))
    command += f" --name {result_name}" if result_name != "moesumm_smollm2" else ""
    return page([f"{title}:", *lines], record, command)
