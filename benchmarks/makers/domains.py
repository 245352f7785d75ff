"""Tables of the default keyphrase model: sets that it was not trained for, all test sets, long documents."""

from statistics import median

from . import load, provenance

SETS = {
    "inspec": "inspec (abstracts)", "kp20k_sample": "kp20k sample (abstracts)", "semeval2010": "semeval2010 (abstracts)",
    "krapivin": "krapivin (abstracts)", "nus": "nus (abstracts)", "kpcrowd500": "kpcrowd500 (news)",
    "stackexchange": "stackexchange (questions)",
}  # fmt: skip


def f1(scores: dict | None) -> str:
    """F1@5 / F1@10 in per cent, "" without scores."""
    return f"{100 * scores['f1@5']:.1f} / {100 * scores['f1@10']:.1f}" if scores else ""


def peers() -> dict[tuple[str, str], dict]:
    """(system, set) -> the row of YAKE or KeyBERT."""
    return {(row["system"], row["set"]): row for row in load("seke_domains_peers")["results"]}


def left_out() -> str:
    """Each training set left out in turn, beside YAKE and KeyBERT."""
    record, others = load("seke_domains"), peers()
    rows = [row for row in record["results"] if row["left_out"] and row["system"] == "moe_rnn"]
    documents = {row["documents"] for (system, _), row in others.items() if system == "KeyBERT"}
    lines = [
        "F1@5 / F1@10 in per cent (rules `seke`) on the test documents of a set that the model has not seen: trained and ranked on "
        "the other four training sets, one seed.",
        "",
        "| set left out | SEKE, trained on the others | YAKE | KeyBERT | calibration error | scores over 0.8: number, right |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in SETS:
        for row in (row for row in rows if row["set"] == name):
            sure = f"{row['confident']}, {100 * row['confident_right']:.0f}%" if row["confident"] else "none"
            lines.append(
                f"| {SETS[name]} | {f1(row['seke'])} | {f1(others['YAKE', name]['seke'])} | {f1(others['KeyBERT', name]['seke'])} | "
                f"{100 * row['calibration_error']:.1f}% | {sure} |"
            )
    note = f"KeyBERT read the first {max(documents)} documents of each set, the others all."
    return "\n".join(
        [*lines, "", f"{note} {provenance(record)} `python benchmarks/seke_domains.py --data PATH --work FOLDER`"]
    )


def all_sets() -> str:
    """The default model on every test set, beside YAKE and KeyBERT."""
    record, others = load("default_model"), peers()
    lines = [
        "F1@5 / F1@10 in per cent (rules `seke`) of the default model on whole test splits. krapivin and nus have no training "
        "documents; of the other sets it was trained on the training split.",
        "",
        "| test set | documents | default model | YAKE | KeyBERT | calibration error | scores over 0.8: number, right |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, label in SETS.items():
        row = record["results"]["sets"][name]
        sure = f"{row['confident']}, {100 * row['confident_right']:.0f}%" if row["confident"] else "none"
        lines.append(
            f"| {label} | {row['documents']:,} | {f1(row['seke'])} | {f1(others['YAKE', name]['seke'])} | "
            f"{f1(others['KeyBERT', name]['seke'])} | {100 * row['calibration_error']:.1f}% | {sure} |"
        )
    seconds = median(record["results"]["first_result_seconds"])
    note = f"A new process prints its first keyphrases after {seconds:.1f} s (median of {len(record['results']['first_result_seconds'])})."
    return "\n".join([*lines, "", f"{note} {provenance(record)} `python benchmarks/default_model.py --data PATH`"])


def long_documents() -> str:
    """Ways to read documents that were put together from neighbours."""
    record = load("default_model")
    ways = ("default", "beginning", "best mention", "YAKE")
    lines = [
        "F1@5 / F1@10 in per cent (rules `seke`) on long documents, each put together from 15 neighbouring test documents (6 of "
        "kpcrowd500). Their gold is that of all parts, so recall at 5 and 10 is low for every system.",
        "",
        "| set | documents | words | whole, by all evidence (default) | the beginning only | whole, by the best mention | YAKE | seconds per 1,000 words |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in record["results"]["long"].items():
        cells = " | ".join(f1(row["scores"][way]) for way in ways)
        lines.append(
            f"| {SETS[name]} | {row['documents']} | {row['words']:,.0f} | {cells} | {row['seconds_per_1000_words']:.2f} |"
        )
    return "\n".join([*lines, "", provenance(record) + " `python benchmarks/default_model.py --data PATH`"])


def first_screen() -> str:
    """The output of the README's first example."""
    record = load("default_model")
    return "```\n[" + ",\n ".join(map(str, record["results"]["first_screen"])) + "]\n```"


def comparison() -> str:
    """F1@5 of the default model on each test set, in one line per system."""
    record, others = load("default_model"), peers()
    names = list(SETS)
    rows = {
        "**default model**": [record["results"]["sets"][name]["seke"] for name in names],
        "YAKE": [others["YAKE", name]["seke"] for name in names],
        "KeyBERT": [others["KeyBERT", name]["seke"] for name in names],
    }
    lines = [
        "| F1@5, in per cent | "
        + " | ".join(name.removesuffix("_sample").removesuffix("500") for name in names)
        + " |",
        "| --- |" + " --- |" * len(names),
    ]
    lines += [
        f"| {name} | " + " | ".join(f"{100 * row['f1@5']:.1f}" for row in scores) + " |"
        for name, scores in rows.items()
    ]
    return "\n".join([
        *lines, "",
        "krapivin and nus are unseen; of the other sets the default model was trained on the training documents. "
        "[All scores, and sets left out in training](docs/keyphrases.md#the-default-model).",
    ])  # fmt: skip
