"""Tables of the default keyphrase model: all test sets, long documents, and the README's first screen."""

import json
from statistics import median

from . import DOCS, RESULTS, grouped, load, page, table

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


def with_style(trained: dict, name: str) -> tuple[str, dict]:
    """The style of a test set, and its scores with this style."""
    return next(
        (key.partition(":")[2], row) for key, row in trained["test_files"].items() if key.startswith(f"{name}:")
    )


def peer_cells(others: dict, name: str) -> list[str]:
    """The cells of YAKE, and of KeyBERT if it was run, for a set."""
    return [f1(others[system, name]["seke"]) for system in systems(others)]


def systems(others: dict) -> list[str]:
    """The systems that were run on all sets."""
    return [system for system in ("YAKE", "KeyBERT") if all((system, name) in others for name in SETS)]


def peers() -> dict[tuple[str, str], dict]:
    """(system, set) -> the row of YAKE or KeyBERT."""
    return {(row["system"], row["set"]): row for row in load("seke_domains_peers")["results"]}


def confident(row: dict) -> str:
    """The number of scores over 0.8, and the share that is right."""
    return f"{row['confident']}, {100 * row['confident_right']:.0f}%" if row["confident"] else "none"


def all_sets() -> str:
    """The default model on every test set, without and with a style, beside YAKE and KeyBERT."""
    record, others, trained = load("default_model"), peers(), training_run()
    title = (
        "F1@5 / F1@10 in per cent (rules `seke`) of the default model on whole test splits. krapivin and nus have no training "
        "documents; of the other sets it was trained on the training split. Scores are those that the training run recorded, with "
        "weights in float32; the package has them in float16." + keybert_note(others)
    )
    rows = []
    for name, label in SETS.items():
        row = trained["test_files"][name]
        style, styled = with_style(trained, name)
        errors = ", ".join(f"{100 * one['calibration_error']:.1f}%" for one in (row, styled))
        scores = (f1(row["seke"]), style, f1(styled["seke"]), *peer_cells(others, name))
        rows.append((label, f"{row['documents']:,}", *scores, errors, confident(styled)))
    header = ("test set", "documents", "default model", "`style=`", "with the style", *systems(others))
    header += ("calibration error, without and with", "scores over 0.8 with the style: number, right")
    seconds = record["results"]["first_result_seconds"]
    note = f"A new process prints its first keyphrases after {median(seconds):.1f} s (median of {len(seconds)}). "
    return page([title, "", *table(header, rows)], record, "default_model.py --data PATH", note)


def keybert_note(others: dict) -> str:
    """How many documents KeyBERT has read."""
    read = [row["documents"] for (system, _), row in others.items() if system == "KeyBERT"]
    if not read:
        return ""
    return (
        f" {peer('seke_domains_peers', 'YAKE')} and {peer('seke_domains_peers', 'KeyBERT')} are unsupervised; KeyBERT runs on MiniLM-L6 as well, with phrases of one to three words, on the first "
        f"{max(read)} documents of each set."
    )


def peer(name: str, system: str) -> str:
    """A system for comparison, with its version in a result."""
    return f"{system} {load(name)['settings']['peers'][system]}"


def left_out() -> str:
    """Models that were trained without a set, on this set: the full head, the recurrent encoder alone, YAKE and KeyBERT."""
    record, others = load("seke_domains"), peers()
    found = grouped((row for row in record["results"] if row["left_out"]), "system", "set")
    seeds = "" if max(map(len, found.values())) > 1 else ", one seed"
    title = (
        "F1@5 / F1@10 in per cent (rules `seke`) on whole test splits of models that were trained on the other four sets, one epoch of "
        f"4,000 documents{seeds}. Scores over 0.8 and the calibration error are those of SEKE." + keybert_note(others)
    )
    rows = []
    for name, label in SETS.items():
        if ("moe_rnn", name) in found:
            row = found["moe_rnn", name][0]
            scores = (mean_f1(found.get((head, name))) for head in ("moe_rnn", "rnn"))
            error = f"{100 * row['calibration_error']:.1f}%"
            rows.append((label, *scores, *peer_cells(others, name), error, confident(row)))
    header = ("set left out", "SEKE", "BiLSTM without experts", *systems(others), "calibration error")
    lines = [title, "", *table((*header, "scores over 0.8: number, right"), rows)]
    return page(lines, record, "seke_domains.py --data PATH --work FOLDER")


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
    return "```\n" + "\n".join(map(str, load("default_model")["results"]["first_screen"])) + "\n```"


def comparison() -> str:
    """F1@5 of the default model on each test set, in one line per system."""
    others, trained = peers(), training_run()
    systems_scores = {
        "**default model**": [trained["test_files"][name]["seke"] for name in SETS],
        "default model, `style=`": [with_style(trained, name)[1]["seke"] for name in SETS],
    } | {system: [others[system, name]["seke"] for name in SETS] for system in systems(others)}
    rows = (
        (name, *(f"{100 * row['f1@5']:.1f}" if row else "" for row in scores))
        for name, scores in systems_scores.items()
    )
    header = ("F1@5 (%)", *(name.removesuffix("_sample").removesuffix("500") for name in SETS))
    return "\n".join([
        *table(header, rows), "",
        "The first five are abstracts of papers, kpcrowd is news, stackexchange are questions. Phrases are compared by their stems. kpcrowd "
        "has so many gold keyphrases that no F1@5 can exceed about "
        f"{100 * best_of_five(trained['test_files']['kpcrowd500']['seke']):.0f}. The default model was trained on the training splits of all sets "
        "but krapivin and nus. Styles follow the annotators of a set, not its scores: `authors` for papers, `phrases` "
        f"for inspec, `words` for kpcrowd, `tags` for stackexchange. {keybert_note(others).strip()} The default model is a SEKE: MiniLM-L6, a BiLSTM and "
        f"experts. Trained on inspec alone, {inspec_alone()}. "
        f"[All scores, and sets left out in training]({DOCS}/keyphrases.md#the-default-model).",
    ])  # fmt: skip


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


def speed() -> str:
    """Documents a second of the default model, of its int8 graph, and of its peers, in one line."""
    rows = load("export")["results"]
    names = {
        "PyTorch float32": "default model",
        "openvino int8": "in int8 (OpenVINO)",
        "YAKE": f"{peer('export', 'YAKE')} (on one core)",
        "KeyBERT": "KeyBERT (which encodes every candidate)",
    }
    speeds = ", ".join(f"{name} {rows[row]['per_second']:.0f}" for row, name in names.items())
    return f"Abstracts a second on two CPU cores: {speeds}. [How measured]({DOCS}/export.md)."


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
        f"{settings['documents']} test documents of Inspec from texts to keyphrases, median of {settings['rounds']} rounds; KeyBERT read "
        f"the first 50. Compared with {peer('export', 'YAKE')} and {peer('export', 'KeyBERT')}. The share of equal keyphrases is that of validation documents. "
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
