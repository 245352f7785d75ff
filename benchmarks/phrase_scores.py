"""Which score ranks keyphrases best? Ways to score a mention by its words, and a keyphrase by its mentions.

    python benchmarks/phrase_scores.py --data PATH --model runs/inspec_moe_rnn --threshold 0.2

The model must have been trained by benchmarks/seke_inspec.py. The documents scored here are the 300 of Inspec's training
and validation files that it used for validation, so that the test set does not influence the choice.
"""

import argparse
from pathlib import Path

import numpy as np
from common import write
from transformers import pipeline

import keyphrase_tools  # noqa: F401
from keyphrase_tools.decoding import is_phrase, tag_spans, word_tags
from keyphrase_tools.jsonl import full_text
from keyphrase_tools.labels import present
from keyphrase_tools.metrics import keyphrase_f1
from keyphrase_tools.stemming import stem_phrase
from keyphrase_tools.words import split_words
from lexperts.recipes.seke.arguments import DataArguments
from lexperts.recipes.seke.data import load_documents

# p: each word's probability of its label (B first, then I); n: that it is not O; q: that the next word is not I
MENTIONS = {
    "mean": lambda p, n, q: p.mean(),
    "minimum": lambda p, n, q: p.min(),
    "geometric mean": lambda p, n, q: np.exp(np.log(p).mean()),
    "product": lambda p, n, q: p.prod(),
    "product with end": lambda p, n, q: p.prod() * q,
    "first word": lambda p, n, q: p[0],
    "mean, not O": lambda p, n, q: n.mean(),
    "minimum, not O": lambda p, n, q: n.min(),
    "geometric mean, not O": lambda p, n, q: np.exp(np.log(n).mean()),
    "first word, not O": lambda p, n, q: n[0],
    "last word, not O": lambda p, n, q: n[-1],
    "maximum, not O": lambda p, n, q: n.max(),
    "text order": lambda p, n, q: 1.0,
}
KEYPHRASES = {
    "maximum": max,
    "mean": lambda scores: sum(scores) / len(scores),
    "any (noisy or)": lambda scores: 1 - np.prod([1 - s for s in scores]),
    "sum": sum,
    "first": lambda scores: scores[0],
}


def word_probabilities(extract, texts: list[str]) -> list[np.ndarray]:
    """Probabilities `(W, 3)` of O, B and I for the words of each text."""
    block = extract.preprocess(texts)
    windows, probabilities = block["windows"], block["word_probabilities"]
    for start in range(0, len(windows), 16):
        batch = windows[start : start + 16]
        for window, values in zip(batch, extract._read(batch), strict=True):
            probabilities.add(window, *values)
    return [probabilities.document(i) for i in range(len(texts))]


def rank(words, p: np.ndarray, threshold, mention, keyphrase) -> list[str]:
    """The ten best phrases of a document, with the given scores of mentions and of keyphrases."""
    grouped = {}
    for start, end in tag_spans(word_tags(p, threshold)):
        if is_phrase([word for word, _, _ in words[start:end]]):
            label_probabilities = np.array([p[start, 1], *p[start + 1 : end, 2]])
            after = 1 - p[end, 2] if end < len(p) else 1.0
            phrase = " ".join(word.lower() for word, _, _ in words[start:end])
            grouped.setdefault(stem_phrase(phrase), []).append(
                (phrase, mention(label_probabilities, 1 - p[start:end, 0], after))
            )
    scored = [(mentions[0][0], keyphrase([score for _, score in mentions])) for mentions in grouped.values()]
    return [phrase for phrase, _ in sorted(scored, key=lambda pair: -pair[1])][:10]


def main():
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threshold", type=float, help="threshold for words; by default the most likely labels")
    args = parser.parse_args()
    files = [str(args.data / "keyphrases" / "inspec" / f"{split}.jsonl") for split in ("train", "validation")]
    documents = load_documents(DataArguments(train_files=files))["validation"]
    texts = [full_text(row) for row in documents]
    words = [split_words(text) for text in texts]
    gold = [present(w, row["keyphrases"]) for w, row in zip(words, documents, strict=True)]
    extract = pipeline("keyphrase-extraction", model=args.model)
    probabilities = word_probabilities(extract, texts)
    results = []
    for mention_name, mention in MENTIONS.items():
        for keyphrase_name, keyphrase in KEYPHRASES.items():
            ranked = [rank(w, p, args.threshold, mention, keyphrase) for w, p in zip(words, probabilities, strict=True)]
            scores = keyphrase_f1(ranked, gold, k=(1, 3, 5, 10))
            row = {
                "mention": mention_name,
                "keyphrase": keyphrase_name,
                **{f"f1@{k}": scores[f"f1@{k}"] for k in (1, 3, 5, 10)},
            }
            results.append(row)
    for row in sorted(results, key=lambda row: -row["f1@5"]):
        scores = "   ".join(f"F1@{k} {100 * row[f'f1@{k}']:.1f}" for k in (1, 3, 5, 10))
        print(f"{row['mention']:22} {row['keyphrase']:16} {scores}")
    write("phrase_scores", results, documents=len(texts), model="SEKE on MiniLM-L6, Inspec", threshold=args.threshold)


if __name__ == "__main__":
    main()
