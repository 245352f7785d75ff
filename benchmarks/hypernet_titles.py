"""What does the title do? Keyphrases of a trained hypernetwork by each text's own title, by another text's, and by none.

    python examples/hypernet/train_keyphrases.py examples/hypernet/inspec_cpu.yml --train_files ... --validation_files ...
    python benchmarks/hypernet_titles.py --data PATH --model runs/hypernet-minilm      # PATH/keyphrases/inspec/test.jsonl

F1 of the texts' test keyphrases, and how many of its keyphrases a text keeps (intersection over union, of the ten best).
"""

import argparse
from pathlib import Path

from common import write
from transformers import pipeline

import keyphrase_tools  # noqa: F401  (registers the pipeline)
from keyphrase_tools.documents import read_jsonl
from keyphrase_tools.evaluation import score_phrases
from keyphrase_tools.labels import present
from keyphrase_tools.words import split_words


def kept(own: list[list[dict]], other: list[list[dict]]) -> float:
    """The mean share of keyphrases, over texts, that both have."""
    pairs = [[{p["keyphrase"].lower() for p in phrases} for phrases in pair] for pair in zip(own, other, strict=True)]
    return sum(len(a & b) / max(len(a | b), 1) for a, b in pairs) / len(pairs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", required=True)
    options = parser.parse_args()
    rows = read_jsonl(Path(options.data) / "keyphrases" / "inspec" / "test.jsonl")
    extract = pipeline("keyphrase-extraction", model=options.model)
    gold = [present(split_words(row["text"]), row["keyphrases"]) for row in rows]
    titles = [row["title"] for row in rows]
    half = len(rows) // 2
    given = {"own": titles, "another's": titles[half:] + titles[:half], "none": [""] * len(rows)}
    results, phrases = {}, {}
    for name, chosen in given.items():
        pairs = [{"title": title, "text": row["text"]} for title, row in zip(chosen, rows, strict=True)]
        phrases[name] = extract(pairs, top_k=10, batch_size=16)
        scores = score_phrases(phrases[name], gold, k=(5, 10))
        results[name] = {f"F1@{k}": 100 * scores[f"f1@{k}"] for k in (5, 10)}
        results[name]["kept"] = kept(phrases["own"], phrases[name])
        print(f"{name}: " + "   ".join(f"{key} {value:.2f}" for key, value in results[name].items()), flush=True)
    write("hypernet_titles", results, documents=len(rows))


if __name__ == "__main__":
    main()
