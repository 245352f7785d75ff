"""Tables of the default keyphrase model: all test sets, long documents, and the README's first screen."""

from statistics import median

from . import DOCS, grouped, load, page, table
from .peers import (
    SETS,
    closest,
    configurations,
    default_model,
    describe_lead,
    f1,
    label,
    peers,
    systems,
)


def calibration_cell(row: dict | None) -> str:
    """The calibration error of some scores, and the number of those over 0.7 with the share that is right."""
    if not row or row["calibration_error"] is None:
        return "not measured"
    over = f"{row['confident']:,}, {100 * row['confident_right']:.0f}%" if row["confident"] else "none"
    return f"{100 * row['calibration_error']:.1f}%; {over}"


def all_sets() -> str:
    """The default model on every set, without and with a style, and its lead over the best free tool."""
    record, ours, others = load("default_model_sets"), default_model(), peers()
    title = (
        "F1@5 / F1@10 in per cent (rules `seke`) of the default model. krapivin, nus, duc2001 and citeulike180 have no training documents; "
        "of the other sets it was trained on the training split. The nearest free tool is "
        "that with the smallest distance to the default model without a style on the same documents; after its F1 follows the default "
        f"model's lead with a 95% interval (paired bootstrap over documents). {configurations()}"
    )
    rows = []
    for name in filter(ours.__contains__, SETS):
        row = ours[name]
        scores = f1(row["unstyled"]["seke"]), row["style"], f1(row["styled"]["seke"])
        leads = (describe_lead(row["unstyled"], others, name, k) for k in (5, 10))
        rows.append((SETS[name], f"{row['documents']:,}", *scores, *leads))
    header = (
        "set",
        "documents",
        "default model",
        "`style=`",
        "with the style",
        "nearest free tool, F1@5: lead",
        "F1@10: lead",
    )
    note = (
        "kpcrowd has so many gold keyphrases that no F1@5 can exceed about "
        f"{100 * best_of_five(default_model()['kpcrowd500']['unstyled']['seke']):.0f}. Trained on inspec alone, {inspec_alone()}. "
    )
    seconds = load("default_model")["results"]["first_result_seconds"]
    note += f"A new process prints its first keyphrases after {median(seconds):.1f} s (median of {len(seconds)}). "
    return page([title, "", *table(header, rows)], record, "default_model.py --data PATH", note)


def peer(name: str, system: str) -> str:
    """A system for comparison, with its version in a result."""
    return f"{system} {load(name)['settings']['peers'][system]}"


def left_out() -> str:
    """Models that were trained without a set, on this set, and the best free tool."""
    record, others = load("seke_domains"), peers()
    found = grouped((row for row in record["results"] if row["left_out"]), "system", "set")
    seeds = "" if max(map(len, found.values())) > 1 else ", one seed"
    title = (
        "F1@5 / F1@10 in per cent (rules `seke`) on whole test splits of models that were trained on the other four sets, one epoch of "
        f"4,000 windows{seeds}. The best free tool is that with the highest F1@5, on the [documents that it has read](#free-tools)."
    )
    rows = []
    for name, text in SETS.items():
        if ("moe_rnn", name) in found:
            row = found["moe_rnn", name][0]
            found_by = best_tool(row, others, name)
            rows.append((text, mean_f1(found["moe_rnn", name]), *found_by, calibration_cell(row["scores"]["all"])))
    header = (
        "set left out",
        "SEKE",
        "best free tool",
        "SEKE's lead, F1@5",
        "calibration error; scores over 0.7, right",
    )
    lines = [title, "", *table(header, rows)]
    return page(lines, record, "seke_domains.py --data PATH --work FOLDER")


def calibration() -> str:
    """Whether scores mean what they say, by set and length: of the default model, of the one before, and with the set left out."""
    record, before = load("default_model_sets"), load("default_model_before_sets")
    old = {row["set"]: row["unstyled"]["scores"] for row in before["results"]}
    left_out = {row["set"]: row.get("scores", {}) for row in load("seke_domains")["results"]}
    title = (
        "Calibration error of the first ten keyphrases of a document without a style, then the number of scores over 0.7 and the share of "
        "these that is right. The error is the mean distance between score and share that is right, over ten bins of scores. The column "
        "before is the earlier default model, which had no word classes and whose ranker was fitted on the crowd's single words, too, on "
        f"{documents_of(before)}."
    )
    rows = []
    for name, row in default_model().items():
        styled, plain = row["styled"]["scores"], row["unstyled"]["scores"]
        lengths = [length for length in plain if length != "all" or len(plain) != 2]
        for length in lengths:
            found = (old.get(name, {}), plain, styled, left_out.get(name, {}))
            cells = (calibration_cell(scores.get(length)) for scores in found)
            rows.append((SETS[name], length, f"{plain[length]['documents']:,}", *cells))
    header = ("set", "words of a document", "documents", "before", "default model", "with its style", "set left out")
    return page([title, "", *table(header, rows)], record, "default_model.py --data PATH --only sets")


def best_tool(row: dict, others: dict, name: str) -> tuple[str, str]:
    """The free tool with the highest F1@5 on a set and its scores; a model's lead, if its documents were counted."""
    found = {system: other for (system, of_set), other in others.items() if of_set == name}
    best = max(found, key=lambda system: found[system]["seke"]["f1@5"])
    lead = describe_lead(row, {(best, name): found[best]}, name, 5) if "by_document" in row else "not measured"
    return f"{best} {f1(found[best]['seke'])}", lead.rpartition(": ")[2]


def mean_f1(rows: list[dict] | None) -> str:
    """F1@5 / F1@10, mean over seeds."""
    return f1({k: sum(row["seke"][k] for row in rows) / len(rows) for k in ("f1@5", "f1@10")}) if rows else "not run"


def long_documents() -> str:
    """Ways to read documents that were put together from neighbours."""
    record = load("default_model")
    title = (
        "F1@5 / F1@10 in per cent (rules `seke`) on long documents, each put together from 15 neighbouring test documents (6 of "
        "kpcrowd500). Their gold is that of all parts, so recall at 5 and 10 is low for every system. Compared with "
        f"{peer('default_model', 'YAKE')}."
    )
    ways = {
        "default": "whole, by all evidence (default)",
        "beginning": "the beginning only",
        "best mention": "whole, by the best mention",
        "YAKE": "YAKE",
    }
    rows = (
        (SETS[name], row["documents"], f"{row['words']:,.0f}", *(f1(row["scores"][way]) for way in ways), f"{row['seconds_per_1000_words']:.2f}")
        for name, row in record["results"]["long"].items()
    )  # fmt: skip
    header = ("set", "documents", "words", *ways.values(), "seconds per 1,000 words")
    return page([title, "", *table(header, rows)], record, "default_model.py --data PATH")


def diversity() -> str:
    """Scores of the default model by the strength of `diversity=`."""
    record = load("default_model_diversity")
    rows = (
        (SETS[name], row["documents"], f"`{row['style']}`", *map(f1, row["scores"].values()))
        for name, row in record["results"].items()
    )
    strengths = (f"`diversity={strength}`" for strength in record["results"]["inspec"]["scores"])
    lines = table(("first test documents of", "number", "`style=`", *strengths), rows)
    title = "F1@5 / F1@10 in per cent (rules `seke`) of the default model:"
    return page([title, "", *lines], record, "default_model.py --data PATH --only diversity")


def first_screen() -> str:
    """The output of the README's first example."""
    rows = load("default_model")["results"]["first_screen"]
    lines = ("{keyphrase} {score} {start} {end}".format(**row) for row in rows)
    return "\n".join(["```", *lines, "```"])


def comparison() -> str:
    """F1@5 of the default model on each set, and its lead over the nearest free tool on the documents that the tool has read."""
    ours, others, rows = default_model(), peers(), []
    for name in filter(ours.__contains__, SETS):
        tool, lead = closest(ours[name]["unstyled"], others, name, 5)
        theirs, ahead = (round(100 * value, 1) for value in (others[tool, name]["seke"]["f1@5"], lead.value))
        read = others[tool, name]["documents"]
        documents = f" (first {read})" if read < ours[name]["documents"] else ""
        scores = (f"{100 * ours[name][kind]['seke']['f1@5']:.1f}" for kind in ("unstyled", "styled"))
        rows.append(
            (SETS[name], *scores, f"{tool} {theirs:.1f}", f"{theirs + ahead:.1f}{documents}", f"**{ahead:+.1f}**")
        )
    return "\n".join([
        *table(("F1@5 (%)", "default model", "with its `style=`", "nearest free tool", "ours on its documents", "lead"), rows), "",
        f"The tool is that of {', '.join(map(label, systems(others)))} with the smallest distance to ours; slow ones have read a part of a set. "
        f"[Intervals, styles, and how the sets were used]({DOCS}/keyphrases.md#the-default-model), [every tool]({DOCS}/keyphrase_results.md#free-tools).",
    ])  # fmt: skip


def documents_of(*records: dict) -> str:
    """How many documents of each set were read."""
    limits = {row["limit"] for record in records for row in record["results"]}
    numbers = ", ".join(map(str, sorted(limits - {None})))
    parts = ["whole test splits"] * (None in limits) + [f"the first {numbers} documents"] * bool(numbers)
    return " or ".join(parts)


def best_of_five(scores: dict) -> float:
    """F1@5 if all five keyphrases were right, from a set's precision and recall at 5: their ratio is that of gold to five."""
    recall = scores["recall@5"] / scores["precision@5"]
    return 2 * recall / (1 + recall)


def inspec_alone() -> str:
    """The mean F1@5 of three heads that were trained on Inspec alone, and the number of seeds, as a phrase."""
    heads = {"moe_rnn": "a SEKE scores", "rnn": "one without experts", "vanilla": "a linear head"}
    rows = grouped(load("seke_quality")["results"], "system")
    scores = {head: [row["test"]["by score"]["F1@5, seke"] for row in rows[head]] for head in heads}
    means = ", ".join(f"{name} {sum(scores[head]) / len(scores[head]):.1f}" for head, name in heads.items())
    return f"{means} (means of {min(map(len, scores.values()))} seeds)"


def exported() -> str:
    """The default model in PyTorch and as graphs, beside YAKE and KeyBERT: speed, quality, size, start-up and memory."""
    record, rows = load("export"), []
    base = record["results"]["PyTorch float32"]["per_second"]
    for system, row in record["results"].items():
        export = row["export"]
        graph = (f"{100 * export['agreement']:.0f}%", f"{export['size'] / 1e6:.0f}") if export else ("", "")
        speeds = (f"{row['per_second']:.1f}", f"{row['per_second'] / base:.2f}", f"{100 * row['f1@10']:.1f}")
        rows.append((system, *speeds, *graph, f"{row['startup']:.1f}", f"{row['megabytes']:,.0f}"))
    header = ("", "documents a second", "times float32", "F1@10", "keyphrases as in float32", "file, MB", "start-up, s")
    settings = record["settings"]
    note = (
        f"{settings['documents']} test documents of Inspec from texts to keyphrases, median of {settings['rounds']} rounds; KeyBERT has n-grams of one "
        f"to three words for candidates, and read the first 50. Compared with {peer('export', 'YAKE')} and {peer('export', 'KeyBERT')}. The share of equal keyphrases is that of validation documents. "
    )
    return page(table((*header, "peak memory, MB"), rows), record, "export.py --data PATH --work FOLDER", note)


def pipeline_profile() -> str:
    """Milliseconds per document of the pipeline's stages, and how speed and memory grow."""
    record = load("pipeline_profile")
    results, growth = record["results"], record["results"]["growth"]
    stages = {
        "clean": "cleaning, words", "tokenize": "tokenizer, windows", "pad": "padding", "model": "model", "rank": "phrases and ranks",
        "rest": "everything else", "total": "together",
    }  # fmt: skip
    times = ((text, f"{results['after'][name]:.2f}") for name, text in stages.items())
    lengths = (f"{int(length):,}" for length in growth["words"])
    speeds = [("words a second", *(f"{speed:,.0f}" for speed in growth["words"].values()))]
    sizes = ", ".join(f"{speed:.1f} at `batch_size={size}`" for size, speed in growth["batch_size"].items())
    first, last = growth["stream"][0], growth["stream"][-1]
    lines = [*table(("", "milliseconds per document"), times), "", *table(("words per document", *lengths), speeds), ""]
    lines += [
        f"Documents a second: {sizes}. A stream of {last['documents']:,} short documents took {first['megabytes']:,.0f} MB after "
        f"{first['documents']:,} of them and {last['megabytes']:,.0f} MB at the end."
    ]
    note = f"{record['settings']['documents']} test documents of Inspec, the default model. "
    return page(lines, record, "pipeline_profile.py --data PATH", note)
