"""Clusters definitions into domains, one per expert: `lexperts merge cluster` (LM-Lexicon, Sect. 3; Appendix B).

The prompt is embedded, without the definition, which is not known at inference.
"""

import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tqdm import tqdm

from run_tools.errors import UserError, did_you_mean

from .texts import read_definitions
from .writer import new_folder

METHODS = ("balanced", "kmeans", "tfidf", "random")
TERMS = 12  # per cluster, at most
ROUNDS = 100  # of balanced k-means, at most
BLOCK = 1024  # texts per step of the progress bar


def cluster(
    data: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    k: int = 4,
    method: str = "balanced",
    embedder: str | Callable | None = None,
    seed: int = 42,
) -> dict:
    """Splits rows of term, context and definition into clusters.

    Writes the rows of each cluster with their `domain` (0.jsonl, 1.jsonl, ...), clusters.json (the returned dict), and with an embedder
    centroids.safetensors: `centroids` `(K, c)`, the means of unit vectors, for the key `centroids` of a recipe.

    Args:
        data: JSON Lines files, or folders of them.
        out: output folder, which must not exist or be empty.
        k: number of clusters.
        method: "balanced" (k-means over embeddings, with sizes that differ by at most one), "kmeans" (over embeddings),
            "tfidf" (k-means over TF-IDF) or "random". The last two have no centroids without an embedder.
        embedder: as in `embed_texts`.

    Returns:
        `method`, `names`, `sizes`, `rows`, `dropped` (number of incomplete rows), `terms` (those with the highest TF-IDF per cluster), and
        the name of the `embedder`.

    Raises:
        UserError: for an output that is not free, more clusters than rows, an empty cluster, and embeddings that are not finite.
    """
    if method not in METHODS:
        raise UserError(f"Invalid method={method!r}.{did_you_mean(method, METHODS)}")
    if embedder is None and method in ("balanced", "kmeans"):
        raise UserError(f"method={method!r} needs an embedder, for example sentence-transformers/all-MiniLM-L6-v2.")
    if find_spec("sklearn") is None:
        raise ImportError("Clustering needs scikit-learn. Install the extra lexperts[cluster].")
    from modeling_lexicon.data_lexicon import format_prompt  # imports torch, which takes seconds

    with new_folder(out) as folder:
        given = [Path(path) for path in ([data] if isinstance(data, str | Path) else data)]
        files = [file for path in given for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
        rows, dropped = read_definitions(files or given)
        if not 1 <= k <= len(rows):
            raise UserError(f"k={k} is not between 1 and the number of rows, {len(rows):,}.")
        texts = [format_prompt(row["term"], row["context"]) for row in rows]
        x = None if embedder is None else embed_texts(texts, embedder)
        labels = assign_clusters(texts, x, method, k, seed)
        sizes = np.bincount(labels, minlength=k)
        if not sizes.all():
            raise UserError(f"Cluster {sizes.argmin()} of k={k} is empty: the texts are too similar. Use a smaller k.")
        result = {"method": method, "names": [str(c) for c in range(k)], "sizes": sizes.tolist(), "rows": len(rows)}
        result |= {"dropped": dropped, "terms": top_terms(texts, labels, k)}
        if x is not None:
            name = result["embedder"] = embedder_name(embedder)
            centroids = {"centroids": compute_means(x, labels, k)}
            save_file(centroids, folder / "centroids.safetensors", {"embedder": name})
        for c in range(k):
            lines = [json.dumps({**rows[i], "domain": c}, ensure_ascii=False) for i in np.flatnonzero(labels == c)]
            (folder / f"{c}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (folder / "clusters.json").write_text(json.dumps(result, ensure_ascii=False, indent=1), encoding="utf-8")
    return result


def embed_texts(texts: Sequence[str], embedder: str | Callable, *, progress: bool = True) -> np.ndarray:
    """Embeds n texts, at least one, as unit vectors `(n, c)`, float32.

    Args:
        embedder: name or folder of a sentence-transformers model, "minilm", an object with `.encode`, or a callable from texts to vectors.

    Raises a `UserError` that names the text if a vector is zero or not finite.
    """
    from modeling_lexicon.generation_lexicon import load_embedder

    encode, starts = load_embedder(embedder), range(0, len(texts), BLOCK)
    starts = tqdm(starts, desc="embeddings", disable=None if progress else True)
    vectors = np.concatenate([np.asarray(encode(list(texts[i : i + BLOCK])), dtype=np.float32) for i in starts])
    if vectors.ndim != 2 or len(vectors) != len(texts):
        raise UserError(f"The embedder returned shape {vectors.shape} for {len(texts)} texts, not a vector for each.")
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    bad = np.flatnonzero(~(np.isfinite(norms) & (norms > 0)))
    if len(bad):
        raise UserError(f"{len(bad)} embeddings are zero or not finite; the first is of {texts[bad[0]]!r:.100}.")
    return vectors / norms


def embedder_name(embedder) -> str:
    """The name that is saved with the centroids."""
    if not isinstance(embedder, str):
        return getattr(embedder, "__name__", type(embedder).__name__)
    if embedder == "minilm":
        return "sentence-transformers/all-MiniLM-L6-v2"
    return Path(embedder).resolve().name if Path(embedder).is_dir() else embedder


def assign_clusters(texts: list[str], x, method: str, k: int, seed: int) -> np.ndarray:
    """The labels `(n,)` of texts with embeddings x `(n, c)`."""
    from sklearn.cluster import KMeans
    from sklearn.feature_extraction.text import TfidfVectorizer

    if method == "random":
        return np.random.default_rng(seed).permutation(np.arange(len(texts)) % k)
    if method == "tfidf":
        x = TfidfVectorizer(sublinear_tf=True, max_features=50_000, dtype=np.float32).fit_transform(texts)
    model = KMeans(k, n_init=1, max_iter=1000, tol=1e-8, random_state=seed).fit(x)
    if method != "balanced" or k == 1:
        return model.labels_
    centroids, labels = model.cluster_centers_, None
    for _ in range(ROUNDS):
        # |x - m|^2 without |x|^2, which is the same for all clusters
        previous, labels = labels, balanced_labels((centroids**2).sum(1) - 2 * x @ centroids.T)
        if np.array_equal(labels, previous):
            break
        centroids = compute_means(x, labels, k)
    return labels


def compute_means(x: np.ndarray, labels: np.ndarray, k: int) -> np.ndarray:
    """The means of the clusters `(k, c)`."""
    return np.stack([x[labels == c].mean(0) for c in range(k)])


def balanced_labels(d: np.ndarray) -> np.ndarray:
    """The nearest clusters with room; rows that would lose most by their second nearest one choose first.

    Distances d `(n, K)` -> labels `(n,)`, with counts that differ by at most one.
    """
    n, K = d.shape
    labels, room, rest = np.zeros(n, int), np.full(K, n // K), np.arange(n)
    while len(rest):
        if not room.any():
            room[:] = 1  # for the n % K last rows
        free = np.where(room, d[rest], np.inf)
        nearest, second = np.partition(free, 1, axis=1)[:, :2].T
        order = np.argsort(nearest - second, kind="stable")
        rest, choices = rest[order], free[order].argmin(1)
        counts = (choices[:, None] == np.arange(K)).cumsum(0)
        fits = (counts <= room).all(1)  # up to the first row without room, whose next choice differs
        labels[rest[fits]] = choices[fits]
        room, rest = room - counts[fits][-1], rest[~fits]
    return labels


def top_terms(texts: list[str], labels: np.ndarray, k: int) -> list[list[str]]:
    """The words of each cluster with the highest TF-IDF, where a cluster counts as one document."""
    from sklearn.feature_extraction.text import CountVectorizer

    counter = CountVectorizer(stop_words="english", token_pattern=r"(?u)\b[^\W\d_]{3,}\b")
    try:
        counts = counter.fit_transform(texts)
    except ValueError:  # only stop words
        return [[] for _ in range(k)]
    words = counter.get_feature_names_out()
    counts = np.stack([np.asarray(counts[labels == c].sum(0)).ravel() for c in range(k)])  # (k, words)
    weight = counts * np.log(1 + counts.sum() / k / counts.sum(0))
    weight[:, words == "definition"] = 0  # occurs in every prompt
    return [[words[i] for i in np.argsort(-row)[:TERMS] if row[i] > 0] for row in weight]
