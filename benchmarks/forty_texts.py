"""Forty texts of ten kinds: how many of the top five keyphrases are fragments, verbs, too general, near-duplicates or labels.

    python benchmarks/forty_texts.py                                   # the default model; a minute on two cores
    python benchmarks/forty_texts.py --yake                            # and YAKE (pip install yake)
    python benchmarks/forty_texts.py --model runs/mine --name forty_texts_mine --show unknown

`forty_texts/verdicts.tsv` has a line for each judged phrase: the text, the phrase, and the verdict of a careful reader. Whether a
phrase is a near-duplicate depends on the phrases before it, so this is a rule and not on the list. A score such as F1 counts phrases
that the annotators of a set have chosen; this benchmark counts what no reader would choose. The list comes from several systems, so
that it favours none; phrases of a new model that are unknown must be added before its counts are compared.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from common import make_parser, write
from keyphrase_peers import yake_phrases

import lexperts  # noqa: F401  (registers the pipeline)
from keyphrase_tools.loading import open_extractor
from lexperts_lite.words import normalise, split_phrase, stem

FOLDER = Path(__file__).resolve().parent / "forty_texts"
DUPLICATE, UNKNOWN = "near-duplicate", "unknown"
LISTED = ("good", "acceptable", "fragment", "verb", "too general", "label", "other")
VERDICTS = (*LISTED, DUPLICATE, UNKNOWN)
WHOLE = ("good", "acceptable", "too general", UNKNOWN)  # of which a phrase may be a near-duplicate
TOP = 5


def read_texts(folder: Path = FOLDER) -> tuple[dict[str, str], dict[tuple[str, str], str]]:
    """Name -> text, in the order of the names, and (name, phrase) -> verdict.

    Raises:
        ValueError: for a line of verdicts with another text or verdict, or a second verdict on a phrase.
    """
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))}
    verdicts: dict[tuple[str, str], str] = {}
    for line in (folder / "verdicts.tsv").read_text(encoding="utf-8").splitlines():
        name, phrase, verdict = line.split("\t")
        if (
            name not in texts
            or verdict not in LISTED
            or verdicts.setdefault((name, normalise(phrase)), verdict) != verdict
        ):
            raise ValueError(
                f"verdicts.tsv: {line!r} names another text or verdict, or is the second verdict on a phrase."
            )
    return texts, verdicts


def near_duplicates(one: str, other: str) -> bool:
    """Whether two phrases differ by inflection or a possessive only, or one is the other with a word more in front or at the end.

    >>> near_duplicates("Nafta", "Nafta's"), near_duplicates("trade deals", "new trade deal"), near_duplicates("wheat", "wheat price index")
    (True, True, False)
    """
    stems = ([stem(word) for word in split_phrase(phrase) if word != "'"] for phrase in (one, other))
    short, long = sorted(stems, key=len)
    return short == long or (bool(short) and short in (long[1:], long[:-1]))


def judge(name: str, phrases: Sequence[str], verdicts: dict[tuple[str, str], str]) -> list[tuple[str, str]]:
    """The top phrases of a text with their verdicts; the second of two near-duplicates counts as such."""
    found: list[tuple[str, str]] = []
    for phrase in phrases[:TOP]:
        verdict = verdicts.get((name, normalise(phrase)), UNKNOWN)
        before = (other for other, one in found if one in (*WHOLE, DUPLICATE))
        if verdict in WHOLE and any(near_duplicates(other, phrase) for other in before):
            verdict = DUPLICATE
        found.append((phrase, verdict))
    return found


def count(system: str, phrases: Sequence[Sequence[str]], texts: dict[str, str], verdicts: dict) -> dict:
    """The row of a system: how many of its phrases have each verdict, of all texts and of each kind, and the verdicts."""
    judged = {name: judge(name, found, verdicts) for name, found in zip(texts, phrases, strict=True)}
    kinds: dict[str, Counter] = {}
    for name, pairs in judged.items():
        kinds.setdefault(name.rsplit("_", 1)[0], Counter()).update(verdict for _, verdict in pairs)
    counts = {
        kind: {"phrases": of.total(), **{verdict: of[verdict] for verdict in VERDICTS}} for kind, of in kinds.items()
    }
    total = {field: sum(of_kind[field] for of_kind in counts.values()) for field in ("phrases", *VERDICTS)}
    return {"system": system, "all": total, "kinds": counts, "texts": judged}


def main(argv: list[str] | None = None) -> None:
    """Judges the phrases of the default model, of its styles, of tiny, and of YAKE."""
    parser = make_parser(__doc__, "forty_texts")
    parser.add_argument("--model", help="a checkpoint; the default model by default")
    parser.add_argument("--yake", action="store_true", help="judge YAKE's keyphrases too")
    parser.add_argument("--show", nargs="+", choices=VERDICTS, default=[], help="print the phrases with these verdicts")
    options = parser.parse_args(argv)
    texts, verdicts = read_texts()
    strings = list(texts.values())
    extract = open_extractor(options.model, device="cpu")
    styles = [None, *(getattr(extract.model.config, "styles", None) or [])]
    found = {style or "without a style": extract(strings, style=style, top_k=TOP) for style in styles}
    found["nested=False"] = extract(strings, nested=False, top_k=TOP)
    if options.model is None:
        found["tiny"] = open_extractor("tiny", device="cpu")(strings, top_k=TOP)
    lists = {system: [[phrase["keyphrase"] for phrase in one] for one in of] for system, of in found.items()}
    if options.yake:
        lists["YAKE"] = yake_phrases(strings)
    rows = [count(system, phrases, texts, verdicts) for system, phrases in lists.items()]
    for row in rows:
        print(f"{row['system']}: " + ", ".join(f"{number} {name}" for name, number in row["all"].items() if number))
        for name, pairs in row["texts"].items():
            for phrase, verdict in pairs:
                if verdict in options.show:
                    print(f"  {name}\t{phrase}\t{verdict}")
    write(options.name, rows, model=options.model or "default")


if __name__ == "__main__":
    main()
