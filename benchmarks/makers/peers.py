"""Tables of the default keyphrase model beside free tools on all sets, with intervals of the differences."""

from by_document import Difference, difference

from . import load, page, table

SETS = {
    "inspec": "inspec (abstracts)", "kp20k_sample": "kp20k sample (abstracts)", "semeval2010": "semeval2010 (abstracts)",
    "krapivin": "krapivin (abstracts)", "nus": "nus (abstracts)", "kpcrowd500": "kpcrowd500 (news)",
    "duc2001": "duc2001 (news)", "stackexchange": "stackexchange (questions)", "semeval2010_full": "semeval2010 (whole papers)",
    "citeulike180_full": "citeulike180 (whole papers)",
}  # fmt: skip
SYSTEMS = ("YAKE", "TF-IDF", "PositionRank", "MultipartiteRank", "KeyBERT", "SmolLM2")
LABELS = {"KeyBERT": "KeyBERT with noun phrases"}
TIMED = {"inspec": "processor seconds per abstract", "semeval2010_full": "processor seconds per whole paper"}
RESULT = "keyphrase_peers"


def peers() -> dict[tuple[str, str], dict]:
    """(system, set) -> the row of a free tool."""
    return {(row["system"], row["set"]): row for row in load(RESULT)["results"]}


def label(system: str) -> str:
    """A system and its configuration."""
    return LABELS.get(system, system)


def f1(scores: dict | None) -> str:
    """F1@5 / F1@10 in per cent, "" without scores."""
    return f"{100 * scores['f1@5']:.1f} / {100 * scores['f1@10']:.1f}" if scores else ""


def default_model() -> dict[str, dict]:
    """set -> the row of the default model."""
    return {row["set"]: row for row in load("default_model_sets")["results"]}


def closest(ours: dict, others: dict, name: str, k: int) -> tuple[str, Difference]:
    """The free tool that a model leads by least on the same documents of a set, and the lead in F1@k."""
    leads = {
        system: difference(ours["by_document"], others[system, name]["by_document"], k)
        for system in SYSTEMS
        if (system, name) in others
    }
    best = min(leads, key=lambda system: leads[system].value)
    return best, leads[best]


def describe_lead(ours: dict, others: dict, name: str, k: int) -> str:
    """The closest free tool with its F1@k, and a model's lead with its interval, in points."""
    system, lead = closest(ours, others, name, k)
    value, low, high = (100 * number for number in lead[:3])
    return f"{system} {100 * others[system, name]['seke'][f'f1@{k}']:.1f}: {value:+.1f} [{low:.1f}, {high:.1f}]"


def systems(others: dict) -> list[str]:
    """The free tools that were run."""
    return [system for system in SYSTEMS if any(name == system for name, _ in others)]


def documents_read(others: dict, system: str) -> str:
    """The least and the largest limit of the documents of a set that a tool has read; without one it has read whole sets."""
    limits = sorted({row["limit"] or row["documents"] for (name, _), row in others.items() if name == system})
    return " to ".join(f"{limit:,}" for limit in limits[:: max(len(limits) - 1, 1)])


def configurations() -> str:
    """How the free tools were run, in sentences."""
    settings, others = load(RESULT)["settings"], peers()
    versions, ran = settings["peers"], systems(others)
    sentences = [f"YAKE {versions['YAKE']} has its defaults, TF-IDF, PositionRank and MultipartiteRank those of pke."]
    if "KeyBERT" in ran:
        sentences.append(
            f"KeyBERT {versions['KeyBERT']} compares noun phrases with the document by MiniLM-L6, on the first "
            f"{documents_read(others, 'KeyBERT')} documents of each set."
        )
    if "SmolLM2" in ran:
        sentences.append(
            f"SmolLM2 (135M) is prompted with two examples and reads the first {settings['words_read']} words of the first "
            f"{documents_read(others, 'SmolLM2')} documents; what does not occur in the text is dropped."
        )
    return " ".join([*sentences, "None of them is trained on keyphrases."])


def free_tools() -> str:
    """F1 of all free tools on all sets, and their times."""
    record, others = load(RESULT), peers()
    ran, rows = systems(others), []
    for name, text in SETS.items():
        found = [others.get((system, name)) for system in ran]
        if any(found):
            read = max(row["documents"] for row in found if row)
            rows.append((text, f"{read:,}", *(f1(row["seke"]) if row else "not run" for row in found)))
    for name, text in TIMED.items():
        found = [others.get((system, name)) for system in ran]
        if any(found):
            rows.append((text, "", *(f"{row['cpu_seconds_per_document']:.2g}" if row else "not run" for row in found)))
    lines = [f"F1@5 / F1@10 in per cent (rules `seke`). {configurations()}", ""]
    return page([*lines, *table(("", "documents", *map(label, ran)), rows)], record, "keyphrase_peers.py --data PATH")
