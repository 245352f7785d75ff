"""Tables of the default keyphrase model: all test sets, long documents, and the README's first screen."""

import json
from statistics import median

from . import RESULTS, load, provenance

SETS = {
    "inspec": "inspec (abstracts)", "kp20k_sample": "kp20k sample (abstracts)", "semeval2010": "semeval2010 (abstracts)",
    "krapivin": "krapivin (abstracts)", "nus": "nus (abstracts)", "kpcrowd500": "kpcrowd500 (news)",
    "stackexchange": "stackexchange (questions)",
}  # fmt: skip


def training_run() -> dict:
    """The results.json of the default model's training run."""
    folder = RESULTS.parents[1] / "models" / "seke-minilm" / "lexperts_seke_minilm"
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def f1(scores: dict | None) -> str:
    """F1@5 / F1@10 in per cent, "" without scores."""
    return f"{100 * scores['f1@5']:.1f} / {100 * scores['f1@10']:.1f}" if scores else ""


def peer_cells(others: dict, name: str) -> str:
    """The cells of YAKE, and of KeyBERT if it was run, for a set."""
    return " | ".join(f1(others[system, name]["seke"]) for system in systems(others))


def systems(others: dict) -> list[str]:
    """The systems that were run on all sets."""
    return [system for system in ("YAKE", "KeyBERT") if all((system, name) in others for name in SETS)]


def peers() -> dict[tuple[str, str], dict]:
    """(system, set) -> the row of YAKE or KeyBERT."""
    return {(row["system"], row["set"]): row for row in load("seke_domains_peers")["results"]}


def all_sets() -> str:
    """The default model on every test set, beside YAKE and KeyBERT."""
    record, others, trained = load("default_model"), peers(), training_run()
    lines = [
        "F1@5 / F1@10 in per cent (rules `seke`) of the default model on whole test splits. krapivin and nus have no training "
        "documents; of the other sets it was trained on the training split. Scores are those that the training run recorded, with "
        "weights in float32; the package has them in float16.",
        "",
        f"| test set | documents | default model | {' | '.join(systems(others))} | calibration error | scores over 0.8: number, right |",
        "| --- | --- | --- | --- | --- |" + " --- |" * len(systems(others)),
    ]
    for name, label in SETS.items():
        row = trained["test_files"][name]
        sure = f"{row['confident']}, {100 * row['confident_right']:.0f}%" if row["confident"] else "none"
        lines.append(
            f"| {label} | {row['documents']:,} | {f1(row['seke'])} | "
            f"{peer_cells(others, name)} | {100 * row['calibration_error']:.1f}% | {sure} |"
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
    others, trained = peers(), training_run()
    names = list(SETS)
    rows = {
        "**default model**": [trained["test_files"][name]["seke"] for name in names],
    } | {system: [others[system, name]["seke"] for name in names] for system in systems(others)}
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
