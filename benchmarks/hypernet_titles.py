"""What does the title contribute? Keyphrases of a trained hypernetwork with each text's title, another text's, and none.

    lexperts train hypernet-keyphrases inspec_cpu --train_files ... --validation_files ...
    python benchmarks/hypernet_titles.py --data PATH --model runs/hypernet-minilm      # PATH/keyphrases/inspec/test.jsonl

Prints F1 of the test texts' keyphrases, and the share of its keyphrases that a text keeps (intersection over union, top ten).
"""

from common import make_parser, write
from keyphrase_sets import data_file
from transformers import pipeline

import keyphrase_tools  # noqa: F401  (registers the pipeline)
from keyphrase_tools.evaluation import score_phrases
from keyphrase_tools.labels import present_keyphrases
from keyphrase_tools.words import split_words
from run_tools.jsonl import read_jsonl


def mean_overlap(first: list[list[dict]], second: list[list[dict]]) -> float:
    """Intersection over union of two lists of keyphrases, averaged over texts."""
    pairs = [
        [{p["keyphrase"].lower() for p in phrases} for phrases in pair] for pair in zip(first, second, strict=True)
    ]
    return sum(len(a & b) / max(len(a | b), 1) for a, b in pairs) / len(pairs)


def main():
    """Extracts with each kind of title and writes the scores."""
    parser = make_parser(__doc__, "hypernet_titles", "keyphrases/inspec/test.jsonl")
    parser.add_argument("--model", required=True, help="folder of a trained model")
    options = parser.parse_args()
    rows = read_jsonl(data_file(options.data, "inspec", "test"))
    extract = pipeline("keyphrase-extraction", model=options.model)
    gold = [present_keyphrases(split_words(row["text"]), row["keyphrases"]) for row in rows]
    titles = [row["title"] for row in rows]
    half = len(rows) // 2
    titles_by_kind = {"own": titles, "another's": titles[half:] + titles[:half], "none": [""] * len(rows)}
    results, phrases = {}, {}
    for name, chosen in titles_by_kind.items():
        pairs = [{"title": title, "text": row["text"]} for title, row in zip(chosen, rows, strict=True)]
        phrases[name] = extract(pairs, top_k=10, batch_size=16)
        scores = score_phrases(phrases[name], gold, k=(5, 10))
        results[name] = {f"F1@{k}": 100 * scores[f"f1@{k}"] for k in (5, 10)}
        results[name]["kept"] = mean_overlap(phrases["own"], phrases[name])
        print(f"{name}: " + "   ".join(f"{key} {value:.2f}" for key, value in results[name].items()), flush=True)
    write(options.name, results, documents=len(rows))


if __name__ == "__main__":
    main()
