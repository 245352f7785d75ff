"""After training: the ranker or the temperature, fitted on validation documents, and scores of test documents."""

from collections.abc import Callable

import numpy as np
from transformers import pipeline

from keyphrase_tools.calibration import calibrate, calibration_error, describe_scores, match_to_gold
from keyphrase_tools.evaluation import score_phrases
from keyphrase_tools.labels import RULES
from keyphrase_tools.ranker_fit import fit_ranker
from keyphrase_tools.word_classes import FIELD
from run_tools.fingerprints import parse_named_path

from .arguments import DataArguments
from .data import Documents, parse_test_file

SHOWN = 10  # phrases of a document that the pipeline returns by default; their scores are the ones that users see
OTHER_STYLES = 0.02  # share of a file of another style, where its own style has 1


def check_gold_of_files(documents: dict[str, Documents], args: DataArguments, language: str | None) -> None:
    """Raises a `ValueError` if a validation or test file has no keyphrase that can be scored, before the model is trained."""
    for split in {"validation", "test"} & documents.keys():
        names = getattr(args, f"{split}_files")
        for (file, _), chosen in documents[split].by_file().items():
            where = f"--{split}-files {names[file]}" if names else f"the {split} documents"
            for rules in RULES if split == "test" else (args.rules,):
                documents[split].take(chosen).gold_by(rules, language, f"{where}, by the rules {rules!r}")


def format_f1(scores: dict) -> str:
    """ "F1@5 41.2   F1@10 44.0", in per cent."""
    return "   ".join(f"F1@{k} {100 * scores[f'f1@{k}']:.1f}" for k in (5, 10))


def score_test_set(phrases: list[list[dict]], test: Documents, language: str | None) -> dict:
    """Precision, recall and F1 of all extracted phrases, with gold keyphrases by both sets of rules."""
    scores = {rules: score_phrases(phrases, test.gold_by(rules, language), language=language) for rules in RULES}
    for rules, values in scores.items():
        print(f"test, {len(phrases):,} documents, gold by the rules {rules!r}: {format_f1(values)}")
    return scores


def measure_calibration(extract, documents: dict[str, Documents], rules: str) -> dict:
    """Fits the temperature on the validation documents and measures the calibration error on the test documents, if any;
    without a fit the model has no temperature, and `error` is the reason.
    """
    split = "test" if "test" in documents else "validation"
    fitted, measured = documents["validation"], documents[split]
    try:
        calibrate(extract, fitted.texts, fitted.gold, rules=rules)
    except ValueError as error:
        print(f"scores are not calibrated: {error}")
        return {"documents": "validation", "error": str(error)}
    errors = calibration_error(extract, measured.texts, measured.gold, rules=rules)
    print(
        f"calibration error on {split} documents: {100 * errors['before']:.1f}%, with temperature "
        f"{errors['temperature']:.2f}: {100 * errors['after']:.1f}%"
    )
    return {"documents": split, **errors}


def add_rankers(extract, validation: Documents, args: DataArguments):
    """Fits a ranker on validation documents, and one more for each of their styles; saves them in the configuration.

    A file of n documents has a share in proportion to n^(1/T), as in training. For the ranker of a style the documents of its
    files are read with this style, and all other files have a small share (`OTHER_STYLES`), so that few documents suffice. Styles of
    `--as-noun-phrases` have no part in the ranker without a style.

    Returns:
        A pipeline that ranks by them; their weights, and F1@10 on the validation documents, mean over the files.
    """
    config, language = extract.model.config, extract.language
    texts, files, gold = validation.texts, validation.files, validation.gold_by(args.rules, language)
    config.keyphrase_threshold = config.keyphrase_temperature = config.keyphrase_ranker = config.style_rankers = None
    by_file = validation.by_file()
    shares = {file: len(chosen) ** (1 / (args.mixing_temperature or 1)) for file, chosen in by_file.items()}
    rows = list(zip(texts, gold, files, strict=True))
    for number in args.ranker_joined:
        rows += join_neighbours(texts, gold, files, number)
    some_texts, some_gold, groups = map(list, zip(*rows, strict=True))

    def read(indices: list[int], style: str | None) -> list:
        block = extract.read([some_texts[i] for i in indices], batch_size=16, style=style)
        found = block.probabilities
        return [((d.words, found.document(i)), found.classes(i)) for i, d in enumerate(block.documents)]

    def fit(documents_and_classes: list, shares: dict) -> dict[str, float]:
        documents, classes = zip(*documents_and_classes, strict=True)
        known = getattr(config, FIELD, None) is not None
        return fit_ranker(documents, some_gold, groups, shares, language, classes if known else None)

    apart = args.as_noun_phrases or []
    together = {file: 0.0 if file[1] in apart else share for file, share in shares.items()}
    config.keyphrase_ranker = fit(with_styles([""] * len(rows), read), together)
    if styles := sorted({style for _, style in files if style}):
        config.style_rankers, with_their_styles = {}, with_styles([style for _, style in groups], read)
        for style in styles:
            own = {file: share * (1 if file[1] == style else OTHER_STYLES) for file, share in shares.items()}
            config.style_rankers[style] = fit(with_their_styles, own)
    extract = pipeline("keyphrase-extraction", model=extract.model, tokenizer=extract.tokenizer)
    phrases = extract(texts, batch_size=16)
    pairs = [([phrases[i] for i in chosen], [gold[i] for i in chosen]) for chosen in by_file.values()]
    f1 = float(np.mean([score_phrases(*pair, k=10, language=language)["f1@10"] for pair in pairs]))
    named = f", and for the styles {', '.join(styles)}" if styles else ""
    print(f"ranker: fitted on {len(rows):,} documents{named}, validation F1@10 {100 * f1:.1f}")
    fitted = {"weights": config.keyphrase_ranker, "style_weights": config.style_rankers}
    return extract, {"documents": len(rows), "validation_f1@10": f1, **fitted}


def with_styles(styles: list[str], call: Callable[[list[int], str | None], list]) -> list:
    """What `call` returns for each document: it gets the indices of those of a style, and the style, or `None` for ""."""
    results: list = [None] * len(styles)
    for wanted in sorted(set(styles)):
        chosen = [i for i, style in enumerate(styles) if style == wanted]
        for i, value in zip(chosen, call(chosen, wanted or None), strict=True):
            results[i] = value
    return results


def join_neighbours(texts: list[str], gold: list, files: list, number: int) -> list[tuple[str, list, object]]:
    """Documents put together from `number` neighbours of a file: their texts, gold keyphrases, and files."""
    joined = []
    for file in sorted(set(files)):
        rows = [i for i, f in enumerate(files) if f == file]
        for start in range(0, len(rows) - number + 1, number):
            part = rows[start : start + number]
            phrases = list(dict.fromkeys(phrase for i in part for phrase in gold[i]))
            joined.append(("\n\n".join(texts[i] for i in part), phrases, file))
    return joined


def extract_by_file(extract, test: Documents, args: DataArguments) -> list[list[dict]]:
    """All keyphrases of test documents; those of a file that was given as NAME:STYLE=FILE are asked for in this style."""
    styles = [parse_test_file(file)[1] for file in args.test_files or [""]]

    def call(indices: list[int], style: str | None) -> list:
        return extract([test.texts[i] for i in indices], batch_size=16, style=style, top_k=None)

    return with_styles([styles[file] for file, _ in test.files], call)


def score_test_files(
    phrases: list[list[dict]], test: Documents, args: DataArguments, language: str | None
) -> dict[str, dict]:
    """Scores of each test file that was given as NAME=FILE or NAME:STYLE=FILE.

    Returns:
        For each name, by both sets of rules, precision, recall and F1; and what `calibration.describe_scores` says of the scores that
        users see.
    """
    results = {}
    names = [parse_named_path(file)[0] for file in args.test_files or [""]]
    for (file, _), chosen in test.by_file().items():
        if name := names[file]:
            results[name] = row = score_file([phrases[i] for i in chosen], test.take(chosen), language)
            error = row["calibration_error"]
            calibration = "no phrase found" if error is None else f"calibration error {100 * error:.1f}%"
            print(f"{name}, {len(chosen):,} documents: {format_f1(row['seke'])}   {calibration}")
    return results


def score_file(phrases: list[list[dict]], documents: Documents, language: str | None) -> dict:
    """One entry of `score_test_files`."""
    gold = {rules: documents.gold_by(rules, language) for rules in RULES}
    shown = [of_document[:SHOWN] for of_document in phrases]
    row = {rules: score_phrases(phrases, some_gold, language=language) for rules, some_gold in gold.items()}
    return {**row, "documents": len(phrases), **describe_scores(*match_to_gold(shown, gold["lexperts"], language))}
