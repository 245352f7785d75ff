"""After training: the ranker or the temperature, fitted on validation documents, and scores of test documents."""

import numpy as np
from transformers import pipeline

from keyphrase_tools.calibration import calibrate, calibration_error, expected_calibration_error, match_to_gold
from keyphrase_tools.evaluation import score_phrases
from keyphrase_tools.labels import present
from keyphrase_tools.ranking import fit_ranker
from keyphrase_tools.words import split_words

from ..common.fingerprints import parse_named_path
from .arguments import DataArguments

CONFIDENT = 0.8  # scores above it are counted


def best_threshold(state) -> float:
    """The threshold with which the best model got its validation score."""
    evaluations = [entry for entry in state.log_history if "eval_threshold" in entry]
    return max(evaluations, key=lambda entry: entry["eval_f1@10"])["eval_threshold"]


def score_test_set(phrases: list[list[dict]], texts: list[str], gold: list) -> dict:
    """Precision, recall and F1 of extracted phrases, with gold keyphrases by both sets of rules."""
    scores_by_rules = {}
    for rules in ("lexperts", "seke"):
        scores = scores_by_rules[rules] = score_phrases(phrases, gold_phrases(texts, gold, rules))
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


def gold_phrases(texts: list[str], gold: list, rules: str) -> list[list[str]]:
    """For each document the gold keyphrases that occur in it."""
    return [present(split_words(text), phrases, rules=rules) for text, phrases in zip(texts, gold, strict=True)]


def add_ranker(extract, texts: list[str], gold: list, files: list[int], rules: str, joined: list[int]):
    """Fits a ranker on validation documents, in which all files count the same, and on neighbours joined to long
    documents -> a pipeline that ranks by it; its weights, and F1@10 on the validation documents, mean over the files.
    """
    config, gold = extract.model.config, gold_phrases(texts, gold, rules)
    config.keyphrase_threshold = config.keyphrase_temperature = None
    fitted = [texts, gold, [str(file) for file in files]]
    for number in joined:
        for column, more in zip(fitted, join_neighbours(texts, gold, files, number), strict=True):
            column[len(column) :] = more
    read = extract.read_words(fitted[0], batch_size=16)
    config.keyphrase_ranker = fit_ranker(read, fitted[1], fitted[2])
    extract = pipeline("keyphrase-extraction", model=extract.model, tokenizer=extract.tokenizer)
    f1 = mean_f1(extract(texts, batch_size=16), gold, files)
    print(f"ranker: fitted on {len(fitted[0]):,} documents, validation F1@10 {100 * f1:.1f}")
    return extract, {"documents": len(fitted[0]), "validation_f1@10": f1, "weights": config.keyphrase_ranker}


def join_neighbours(texts: list[str], gold: list, files: list[int], number: int) -> tuple[list[str], list, list[str]]:
    """Documents put together from `number` neighbours of a file: their texts, gold keyphrases, and groups such as "0 x 4"."""
    columns: tuple[list, list, list] = [], [], []
    for file in sorted(set(files)):
        rows = [i for i, f in enumerate(files) if f == file]
        for start in range(0, len(rows) - number + 1, number):
            part = rows[start : start + number]
            columns[0].append("\n\n".join(texts[i] for i in part))
            columns[1].append(list(dict.fromkeys(phrase for i in part for phrase in gold[i])))
            columns[2].append(f"{file} x {number}")
    return columns


def mean_f1(phrases: list, gold: list, files: list[int]) -> float:
    """F1@10, averaged over files."""
    scores = []
    for file in sorted(set(files)):
        chosen = [i for i, f in enumerate(files) if f == file]
        scores.append(score_phrases([phrases[i] for i in chosen], [gold[i] for i in chosen])["f1@10"])
    return float(np.mean(scores))


def score_test_files(
    phrases: list[list[dict]], texts: list[str], gold: list, files: list[int], args: DataArguments
) -> dict[str, dict]:
    """Scores of each test file given as NAME=FILE by both sets of rules, the calibration error, the number of scores
    above 0.8, and the share of these that are right.
    """
    results = {}
    for index, (name, _) in enumerate(map(parse_named_path, args.test_files or [])):
        chosen = [i for i, file in enumerate(files) if file == index]
        if name and chosen:
            some = [texts[i] for i in chosen]
            results[name] = row = score_file([phrases[i] for i in chosen], some, [gold[i] for i in chosen])
            f1 = "   ".join(f"F1@{k} {100 * row['seke'][f'f1@{k}']:.1f}" for k in (5, 10))
            print(f"{name}, {len(some):,} documents: {f1}   calibration error {100 * row['calibration_error']:.1f}%")
    return results


def score_file(phrases: list[list[dict]], texts: list[str], gold: list) -> dict:
    """One entry of `score_test_files`."""
    of_rules = {rules: gold_phrases(texts, gold, rules) for rules in ("lexperts", "seke")}
    scores, right = (np.array(values) for values in match_to_gold(phrases, of_rules["lexperts"]))
    confident = scores > CONFIDENT
    row = {rules: score_phrases(phrases, some_gold) for rules, some_gold in of_rules.items()}
    row |= {"documents": len(texts), "phrases": len(scores), "confident": int(confident.sum())}
    row["calibration_error"] = expected_calibration_error(scores, right) if len(scores) else 0.0
    return row | {"confident_right": float(right[confident].mean()) if confident.any() else None}
