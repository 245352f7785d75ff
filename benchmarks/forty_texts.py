"""Forty texts of ten kinds: how many of the top five keyphrases are fragments, verbs, too general, near-duplicates or labels.

    python benchmarks/forty_texts.py                                   # the default model; a minute on two cores
    python benchmarks/forty_texts.py --yake                            # and YAKE (pip install yake)
    python benchmarks/forty_texts.py --model runs/mine --name forty_texts_mine --show unknown

The texts and the verdicts on their phrases are in the folder forty_texts; `verdicts.py` has the rules for phrases that are on no list.
A score such as F1 counts phrases that the annotators of a set have chosen. This benchmark counts what no reader would choose. The lists
come from several systems, so that they favour none; phrases of a new model that are UNKNOWN must be added before its counts are compared.
"""

from collections import Counter
from collections.abc import Sequence

from common import make_parser, peer_versions, write
from keyphrase_sets import yake_phrases
from transformers import pipeline
from verdicts import FOLDER, GOAL, VERDICTS, JudgedText, Verdict, read_texts

import lexperts  # noqa: F401  (registers the pipeline)
from run_tools.fingerprints import fingerprint

TOP = 5


def count_verdicts(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """The number of phrases, and of each verdict."""
    counts = Counter(one.verdict for one in verdicts)
    return {"phrases": len(verdicts), **{verdict: counts[verdict] for verdict in VERDICTS}}


def judge(texts: Sequence[JudgedText], phrases: Sequence[Sequence[dict]]) -> dict:
    """Counts of all texts and of each kind, and the verdicts on each phrase."""
    verdicts_of = {
        text.name: text.judge([phrase["keyphrase"] for phrase in found[:TOP]])
        for text, found in zip(texts, phrases, strict=True)
    }
    kinds = {
        kind: count_verdicts([one for text in texts if text.kind == kind for one in verdicts_of[text.name]])
        for kind in dict.fromkeys(text.kind for text in texts)
    }
    return {
        "all": count_verdicts([one for verdicts in verdicts_of.values() for one in verdicts]),
        "kinds": kinds,
        "texts": {name: [list(one) for one in verdicts] for name, verdicts in verdicts_of.items()},
    }


def describe(row: dict) -> str:
    """The counts of a row as text."""
    counts = row["all"]
    share = 100 * sum(counts[verdict] for verdict in GOAL) / max(counts["phrases"], 1)
    parts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    return f"{row['system']}: {counts['phrases']} phrases, {share:.1f}% {', '.join(GOAL)}; {parts}"


def main():
    """Runs the benchmark."""
    parser = make_parser(__doc__, "forty_texts")
    parser.add_argument("--model", help="a checkpoint; the default model by default")
    parser.add_argument("--yake", action="store_true", help="judge YAKE's keyphrases too")
    parser.add_argument("--show", nargs="+", choices=VERDICTS, default=[], help="print the phrases with these verdicts")
    options = parser.parse_args()
    texts = read_texts()
    strings = [text.text for text in texts]
    extract = pipeline("keyphrase-extraction", **({"model": options.model} if options.model else {}))
    styles = [None, *(getattr(extract.model.config, "styles", None) or [])]
    found = {style or "without a style": extract(strings, style=style, top_k=TOP) for style in styles}
    found["nested=False"] = extract(strings, nested=False, top_k=TOP)
    if options.yake:
        found["YAKE"] = yake_phrases(strings)
    rows = [{"system": system, **judge(texts, phrases)} for system, phrases in found.items()]
    for row in rows:
        print(describe(row))
        for name, verdicts in row["texts"].items():
            for phrase, verdict, reason in verdicts:
                if verdict in options.show:
                    print(f"  {name}\t{phrase}\t{verdict}" + (f" ({reason})" if reason else ""))
    write(options.name, rows, model=options.model or "default", texts=fingerprint(FOLDER), peers=peer_versions())


if __name__ == "__main__":
    main()
