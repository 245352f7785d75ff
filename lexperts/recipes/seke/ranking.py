"""After training: rankers of phrases, fitted on validation documents, and scores of test documents."""

from collections.abc import Mapping, Sequence

import numpy as np
from transformers import pipeline

from keyphrase_tools.calibration import describe_scores, match_to_gold
from keyphrase_tools.evaluation import score_phrases
from keyphrase_tools.labels import RULES
from keyphrase_tools.ranker_fit import fit_ranker
from lexperts_lite.features import CLASSIFIER

from .arguments import DataArguments
from .data import Documents

SHOWN = 10  # phrases of a document that the pipeline returns by default; their scores are the ones that users see
OTHER_STYLES = 0.02  # share of a file of another style, where its own style has 1


def fit_rankers(extract, files: Sequence[Documents], args: DataArguments):
    """Fits a ranker on validation documents, and one more for each of their styles; saves them in the configuration.

    A file of n documents has a share in proportion to n^(1/T), as in training. For the ranker of a style documents are
    read with it, and files of others have a small share (`OTHER_STYLES`), so that few documents suffice. Returns a
    pipeline that ranks by them, and its F1@10 on the validation documents, mean over the files.
    """
    config, language = extract.model.config, extract.language
    config.keyphrase_threshold = config.keyphrase_temperature = config.keyphrase_ranker = config.style_rankers = None
    gold = [file.gold("lexperts", language) for file in files]
    numbers = [number for number, file in enumerate(files) for _ in file.texts]
    shares = [len(file.texts) ** (1 / args.mixing_temperature) for file in files]

    def read(file: Documents, style: str) -> list:
        block = extract.read(file.texts, batch_size=16, style=style or None)
        found = block.probabilities
        return [((d.words, found.document(i)), found.classes(i)) for i, d in enumerate(block.documents)]

    def fit(read_files: list, weights: Mapping[str, float], other: float) -> dict[str, float]:
        documents, classes = zip(*(document for file in read_files for document in file), strict=True)
        known = getattr(config, CLASSIFIER, None) is not None
        by_file = {n: share * weights.get(files[n].style, other) for n, share in enumerate(shares)}
        return fit_ranker(documents, sum(gold, []), numbers, by_file, language, classes if known else None)

    config.keyphrase_ranker = fit([read(file, "") for file in files], {}, 1.0)
    if styles := sorted({file.style for file in files if file.style}):
        read_files = [read(file, file.style) for file in files]
        config.style_rankers = {style: fit(read_files, {style: 1.0}, OTHER_STYLES) for style in styles}
    extract = pipeline("keyphrase-extraction", model=extract.model, tokenizer=extract.tokenizer)
    phrases = [extract(file.texts, batch_size=16) for file in files]
    scores = [score_phrases(*pair, k=10, language=language)["f1@10"] for pair in zip(phrases, gold, strict=True)]
    print(f"ranker: fitted on {len(numbers):,} documents, validation F1@10 {100 * np.mean(scores):.1f}")
    return extract, float(np.mean(scores))


def score_tests(extract, files: Sequence[Documents]) -> dict[str, dict]:
    """For each test file, read in its style: the scores of all phrases by both sets of rules, and
    what `describe_scores` says of those that users see. Files without a name are scored together, as "test".
    """
    names, language, results = [file.name or "test" for file in files], extract.language, {}
    phrases = [extract(file.texts, batch_size=16, style=file.style or None, top_k=None) for file in files]
    for name in dict.fromkeys(names):
        chosen = [i for i, other in enumerate(names) if other == name]
        found = sum((phrases[i] for i in chosen), [])
        gold = {rules: sum((files[i].gold(rules, language) for i in chosen), []) for rules in RULES}
        scores: dict = {rules: score_phrases(found, gold[rules], language=language) for rules in RULES}
        shown = [of_document[:SHOWN] for of_document in found]
        scores |= {"documents": len(found), **describe_scores(*match_to_gold(shown, gold["lexperts"], language))}
        f1 = "   ".join(f"F1@{k} {100 * scores['lexperts'][f'f1@{k}']:.1f}" for k in (5, 10))
        print(f"{name}, {len(found):,} documents: {f1}")
        results[name] = scores
    return results
