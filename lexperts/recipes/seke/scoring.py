"""After training: the ranker or the temperature, fitted on validation documents, and scores of test documents."""

import numpy as np
from transformers import pipeline

from keyphrase_tools.calibration import calibrate, calibration_error, expected_calibration_error, match_to_gold
from keyphrase_tools.evaluation import gold_phrases, score_phrases
from keyphrase_tools.labels import RULES
from keyphrase_tools.ranking import fit_ranker
from run_tools.fingerprints import parse_named_path

from .arguments import DataArguments
from .data import parse_test_file

CONFIDENT = 0.8  # scores above it are counted
SHOWN = 10  # phrases of a document that the pipeline returns by default; their scores are the ones that users see
OTHER_STYLES = 0.02  # share of a file of another style, where its own style has 1


def best_threshold(state) -> float:
    """The threshold with which the best model got its validation score."""
    evaluations = [entry for entry in state.log_history if "eval_threshold" in entry]
    return max(evaluations, key=lambda entry: entry["eval_f1@10"])["eval_threshold"]


def check_gold_of_files(texts: dict, gold: dict, files: dict, args: DataArguments, language: str | None) -> None:
    """Raises a `ValueError` if a validation or test file has no keyphrase that can be scored, before the model is trained."""
    for split, named in (("validation", args.validation_files), ("test", args.test_files)):
        for file in sorted({file for file, _ in files.get(split, [])}):
            chosen = [i for i, (of_document, _) in enumerate(files[split]) if of_document == file]
            rows = [texts[split][i] for i in chosen], [gold[split][i] for i in chosen]
            where = f"--{split}-files {named[file]}" if named else f"the {split} documents"
            for rules in RULES if split == "test" else (args.rules,):
                gold_phrases(*rows, rules, language, f"{where}, by the rules {rules!r}")


def score_test_set(phrases: list[list[dict]], texts: list[str], gold: list, language: str | None) -> dict:
    """Precision, recall and F1 of all extracted phrases, with gold keyphrases by both sets of rules."""
    scores_by_rules = {}
    for rules in RULES:
        of_rules = gold_phrases(texts, gold, rules, language)
        scores = scores_by_rules[rules] = score_phrases(phrases, of_rules, language=language)
        f1 = "   ".join(f"F1@{k} {100 * scores[f'f1@{k}']:.1f}" for k in (5, 10))
        print(f"test, {len(texts):,} documents, gold by the rules {rules!r}: {f1}")
    return scores_by_rules


def measure_calibration(extract, texts: dict, gold: dict, rules: str) -> dict:
    """Fits the temperature on the validation documents and measures the calibration error on the test documents, if any;
    without a fit the model has no temperature, and `error` is the reason.
    """
    try:
        calibrate(extract, texts["validation"], gold["validation"], rules=rules)
    except ValueError as error:
        print(f"scores are not calibrated: {error}")
        return {"documents": "validation", "error": str(error)}
    split = "test" if "test" in texts else "validation"
    errors = calibration_error(extract, texts[split], gold[split], rules=rules)
    print(
        f"calibration error on {split} documents: {100 * errors['before']:.1f}%, with temperature "
        f"{errors['temperature']:.2f}: {100 * errors['after']:.1f}%"
    )
    return {"documents": split, **errors}


def add_rankers(extract, texts: list[str], gold: list, files: list[tuple[int, str]], args: DataArguments):
    """Fits a ranker on validation documents, and one more for each of their styles; saves them in the configuration.

    A file of n documents has a share in proportion to n^(1/T), as in training. For the ranker of a style the documents of its
    files are read with this style, and all other files have a small share (`OTHER_STYLES`), so that few documents suffice.

    Args:
        files: for each document the index and the style of its file.

    Returns:
        A pipeline that ranks by them; their weights, and F1@10 on the validation documents, mean over the files.
    """
    config, language = extract.model.config, extract.language
    gold = gold_phrases(texts, gold, args.rules, language)
    config.keyphrase_threshold = config.keyphrase_temperature = config.keyphrase_ranker = config.style_rankers = None
    shares = {file: files.count(file) ** (1 / (args.mixing_temperature or 1)) for file in files}
    documents = list(zip(texts, gold, files, strict=True))
    for number in args.ranker_joined:
        documents += join_neighbours(texts, gold, files, number)
    groups = [file for _, _, file in documents]
    all_gold = [phrases for _, phrases, _ in documents]
    config.keyphrase_ranker = fit_ranker(read(extract, documents), all_gold, groups, shares, language)
    if styles := sorted({style for _, style in files if style}):
        words = read(extract, documents, with_styles=True)
        config.style_rankers = {}
        for style in styles:
            own = {file: share * (1 if file[1] == style else OTHER_STYLES) for file, share in shares.items()}
            config.style_rankers[style] = fit_ranker(words, all_gold, groups, own, language)
    extract = pipeline("keyphrase-extraction", model=extract.model, tokenizer=extract.tokenizer)
    f1 = mean_f1(extract(texts, batch_size=16), gold, files, language)
    named = f", and for the styles {', '.join(styles)}" if styles else ""
    print(f"ranker: fitted on {len(documents):,} documents{named}, validation F1@10 {100 * f1:.1f}")
    fitted = {"weights": config.keyphrase_ranker, "style_weights": config.style_rankers}
    return extract, {"documents": len(documents), "validation_f1@10": f1, **fitted}


def read(extract, documents: list[tuple], with_styles: bool = False) -> list[tuple]:
    """The words of documents and their probabilities, as `read_words` returns them; optionally each with the style of its file."""
    words = [None] * len(documents)
    for wanted in {style if with_styles else "" for _, _, (_, style) in documents}:
        chosen = [i for i, (_, _, (_, style)) in enumerate(documents) if not with_styles or style == wanted]
        found = extract.read_words([documents[i][0] for i in chosen], batch_size=16, style=wanted or None)
        for i, values in zip(chosen, found, strict=True):
            words[i] = values
    return words


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


def extract_by_file(extract, texts: list[str], files: list, args: DataArguments) -> list[list[dict]]:
    """All keyphrases of test documents; those of a file that was given as NAME:STYLE=FILE are asked for in this style."""
    styles = [parse_test_file(file)[1] for file in args.test_files or [""]]
    phrases = [None] * len(texts)
    for wanted in sorted(set(styles)):
        chosen = [i for i, (file, _) in enumerate(files) if styles[file] == wanted]
        found = extract([texts[i] for i in chosen], batch_size=16, style=wanted or None, top_k=None)
        for i, values in zip(chosen, found, strict=True):
            phrases[i] = values
    return phrases


def mean_f1(phrases: list, gold: list, files: list, language: str | None) -> float:
    """F1@10, averaged over files."""
    scores = []
    for file in sorted(set(files)):
        chosen = [i for i, f in enumerate(files) if f == file]
        of_file = [phrases[i] for i in chosen], [gold[i] for i in chosen]
        scores.append(score_phrases(*of_file, k=10, language=language)["f1@10"])
    return float(np.mean(scores))


def score_test_files(
    phrases: list[list[dict]],
    texts: list[str],
    gold: list,
    files: list[tuple[int, str]],
    args: DataArguments,
    language: str | None,
) -> dict[str, dict]:
    """Scores of each test file that was given as NAME=FILE or NAME:STYLE=FILE.

    Returns:
        For each name, by both sets of rules, precision, recall and F1; the calibration error (`None` if no phrase was found), the
        number of scores above 0.8, and the share of these that are right.
    """
    results = {}
    for index, name in enumerate(parse_named_path(file)[0] for file in args.test_files or []):
        chosen = [i for i, (file, _) in enumerate(files) if file == index]
        if name and chosen:
            some = [texts[i] for i in chosen]
            own = [phrases[i] for i in chosen], some, [gold[i] for i in chosen]
            results[name] = row = score_file(*own, language)
            f1 = "   ".join(f"F1@{k} {100 * row['seke'][f'f1@{k}']:.1f}" for k in (5, 10))
            error = row["calibration_error"]
            calibration = "no phrase found" if error is None else f"calibration error {100 * error:.1f}%"
            print(f"{name}, {len(some):,} documents: {f1}   {calibration}")
    return results


def score_file(phrases: list[list[dict]], texts: list[str], gold: list, language: str | None) -> dict:
    """One entry of `score_test_files`."""
    of_rules = {rules: gold_phrases(texts, gold, rules, language) for rules in RULES}
    shown = [of_document[:SHOWN] for of_document in phrases]
    scores, right = (np.array(values) for values in match_to_gold(shown, of_rules["lexperts"], language))
    confident = scores > CONFIDENT
    row = {rules: score_phrases(phrases, some_gold, language=language) for rules, some_gold in of_rules.items()}
    row |= {"documents": len(texts), "phrases": len(scores), "confident": int(confident.sum())}
    row["calibration_error"] = expected_calibration_error(scores, right) if len(scores) else None
    return row | {"confident_right": float(right[confident].mean()) if confident.any() else None}
