"""Clusters definitions into domains, one per expert: `merge-experts cluster` (LM-Lexicon, Sect. 3; Appendix B).

Methods:
- "balanced": k-means over embeddings, with cluster sizes that differ by at most one
- "kmeans": k-means over embeddings
- "tfidf": k-means over TF-IDF vectors
- "random": a random split
- "source": one cluster per source data set

By default only the prompt is embedded, because the definition is not known at inference. "prompt+definition" also
embeds the gold definition, as the authors do.
"""

import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from run_tools.definition_rows import load_definition_rows
from run_tools.errors import did_you_mean

from ..clustering.balanced_kmeans import balanced_kmeans
from ..clustering.embeddings import embed_texts
from ..errors import MergeError
from ..staging import open_claim, partial_folder, staging_folder

COMMAND = "merge cluster"  # in the record of the staging folder
METHODS = ("balanced", "kmeans", "tfidf", "random", "source")
EMBEDDED = ("prompt", "prompt+definition")
MAX_TERMS = 12  # per cluster
SILHOUETTE_SAMPLES = 5000  # rows that the silhouette is computed on
PLOT_SAMPLES = 3000  # rows in the plot


def cluster(
    data: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    k: int = 4,
    method: str = "balanced",
    embedder: str | Callable | None = None,
    name: str | None = None,
    embedded: str = "prompt",
    cache: str | Path | None = None,
    seed: int = 42,
    plot: bool = True,
) -> dict:
    """Splits rows of term, context and definition into clusters.

    Writes to `out`:
    - 0.jsonl, 1.jsonl, ...: the rows of each cluster, with their `domain`
    - clusters.json: the returned dict
    - with an embedder, centroids.safetensors: `centroids` `(K, c)`, the means of unit vectors, for the key `centroids`
      of a recipe; with them a mixture can route rows that it has not seen
    - with an embedder and `plot`, clusters.png

    Args:
        data: JSON Lines files, or folders of them.
        out: output folder, which must not exist or be empty.
        k: number of clusters; ignored by "source".
        method: "balanced", "kmeans", "tfidf", "random" or "source".
        embedder: name or folder of a sentence-transformers model, an object with `.encode`, or a callable from texts to
            vectors. Needed by "balanced" and "kmeans"; the other methods have no centroids without it.
        name: name of the embedder that is saved with the centroids; default: `embedder`, or the last part of its path.
        embedded: "prompt" or "prompt+definition".
        cache: folder that stores embeddings.
        seed: seed of clustering, sampling and plotting.
        plot: whether to draw clusters.png.

    Returns:
        `method`, `names`, `sizes`, `rows`, `terms` (those with the highest TF-IDF per cluster), `dropped` (number of dropped
        rows), `absent` (number of contexts without their term); with embeddings also `silhouette` (on a sample, if it has rows of
        several clusters), `calinski_harabasz`, and `nearest`, the share of rows whose nearest centroid is that of their own cluster.

    Raises:
        MergeError: for invalid options, an output folder that is not empty, a staging folder `.OUT.partial` that no such run has
            left, more clusters than rows, an empty cluster, rows
            without a source, or embeddings that are not finite.
        ImportError: if scikit-learn, or matplotlib with `plot`, is not installed.
    """
    check_options(method, embedded, k, embedder, plot)
    from modeling_lexicon.terms_lexicon import is_in_context  # imports torch, which takes seconds

    out = Path(out)
    if out.exists() and any(out.iterdir()):
        raise MergeError(f"{out} is not empty. Choose another folder, or delete its files.")
    open_claim(partial_folder(out), COMMAND)
    rows, dropped = read_rows(data)
    if method != "source" and k > len(rows):
        raise MergeError(f"{len(rows):,} rows cannot fill {k} clusters. Use k={len(rows)} or less.")
    texts = embedded_texts(rows, embedded)
    x = None
    if embedder is not None:
        x = embed_texts(texts, embedder, cache=cache, name=name if not isinstance(embedder, str) else None)
    labels, names = assign_clusters(rows, texts, x, method, k, seed)
    sizes = np.bincount(labels, minlength=len(names))
    if not sizes.all():
        raise MergeError(f"Cluster {sizes.argmin()} is empty: the texts are too similar for k={k}. Use a smaller k.")
    result = {"method": method, "names": names, "sizes": sizes.tolist(), "rows": len(rows), "dropped": dropped}
    result["absent"] = sum(not is_in_context(row["term"], row["context"]) for row in rows)
    result["terms"] = top_terms(texts, labels, len(names))
    if x is not None:
        is_folder = isinstance(embedder, str) and Path(embedder).is_dir()
        embedder_name = name or (Path(str(embedder)).name if is_folder else str(embedder))
        result |= {"embedder": embedder_name, "embedded": embedded} | cluster_quality(x, labels, seed)
    write_clusters(out, rows, labels, x, result, plot, seed)
    return result


def check_options(method: str, embedded: str, k: int, embedder, plot: bool):
    """Checks the options of `cluster`, and the packages that they need."""
    for option, value, choices in (("method", method, METHODS), ("embedded", embedded, EMBEDDED)):
        if value not in choices:
            raise MergeError(f"Invalid {option}={value!r}.{did_you_mean(value, choices)}")
    if k < 1:
        raise MergeError(f"k={k} must be at least 1.")
    if embedder is None and method in ("balanced", "kmeans"):
        raise MergeError(f"method={method!r} needs an embedder, for example sentence-transformers/all-MiniLM-L6-v2.")
    for package in ("sklearn", *["matplotlib"] * plot):
        if find_spec(package) is None:
            raise ImportError(f"Clustering needs {package}. Install it with: pip install 'lexperts[cluster]'")


def read_rows(data) -> tuple[list[dict], int]:
    """Reads rows of definitions. Returns them, and the number of dropped rows."""
    paths = [Path(path) for path in ([data] if isinstance(data, str | Path) else data)]
    paths = [file for path in paths for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    if not paths:
        raise MergeError(f"{data} contains no .jsonl files.")
    try:
        return load_definition_rows(paths)
    except ValueError as error:
        raise MergeError(str(error)) from error


def embedded_texts(rows: list[dict], embedded: str) -> list[str]:
    """The text of each row that is embedded."""
    from modeling_lexicon.data_lexicon import format_prompt

    texts = [format_prompt(row["term"], row["context"]) for row in rows]
    if embedded == "prompt":
        return texts
    return [f"{text} {row['definition']}" for text, row in zip(texts, rows, strict=True)]


def assign_clusters(rows, texts, x, method: str, k: int, seed: int) -> tuple[np.ndarray, list[str]]:
    """The labels of the rows `(n,)` and the names of the clusters."""
    from sklearn.cluster import KMeans
    from sklearn.feature_extraction.text import TfidfVectorizer

    names = [str(c) for c in range(k)]
    if method == "balanced":
        return balanced_kmeans(x, k, seed=seed)[0], names
    if method == "kmeans":
        options = {"algorithm": "elkan" if k > 1 else "lloyd", "max_iter": 1000, "tol": 1e-8}
        return KMeans(k, n_init=1, random_state=seed, **options).fit_predict(x), names
    if method == "tfidf":
        vectors = TfidfVectorizer(sublinear_tf=True, max_features=50_000, dtype=np.float32).fit_transform(texts)
        return KMeans(k, n_init=1, random_state=seed).fit_predict(vectors), names
    if method == "random":
        return np.random.default_rng(seed).permutation(np.arange(len(rows)) % k), names
    missing = sum(not isinstance(row.get("source"), str) for row in rows)
    if missing:
        raise MergeError(f"{missing:,} of {len(rows):,} rows have no field 'source', which method='source' needs.")
    names = sorted({row["source"] for row in rows})
    return np.array([names.index(row["source"]) for row in rows]), names


def top_terms(texts: list[str], labels: np.ndarray, k: int) -> list[list[str]]:
    """The words of each cluster with the highest TF-IDF, where a cluster counts as one document."""
    from sklearn.feature_extraction.text import CountVectorizer

    counter = CountVectorizer(stop_words="english", token_pattern=r"(?u)\b[^\W\d_]{3,}\b")
    try:
        counts = counter.fit_transform(texts)
    except ValueError:  # only stop words
        return [[] for _ in range(k)]
    words = counter.get_feature_names_out()
    counts_by_cluster = np.stack([np.asarray(counts[labels == c].sum(0)).ravel() for c in range(k)]).astype(np.float64)
    share = counts_by_cluster / np.maximum(counts_by_cluster.sum(1, keepdims=True), 1)
    weight = share * np.log(1 + counts_by_cluster.sum() / k / np.maximum(counts_by_cluster.sum(0), 1))
    weight[:, words == "definition"] = 0  # occurs in every prompt
    return [[words[i] for i in np.argsort(-row)[:MAX_TERMS] if row[i] > 0] for row in weight]


def compute_centroids(x: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The mean `(K, c)` of each cluster, float32."""
    return np.stack([x[labels == c].mean(0) for c in range(labels.max() + 1)]).astype(np.float32)


def cluster_quality(x: np.ndarray, labels: np.ndarray, seed: int) -> dict:
    """Measures of how well the clusters are separated."""
    from sklearn.metrics import calinski_harabasz_score, silhouette_score

    m = compute_centroids(x, labels)
    is_nearest = ((m**2).sum(1) - 2 * x @ m.T).argmin(1) == labels
    scores = {"nearest": float(is_nearest.mean())}
    if 1 < len(m) < len(x):
        sample = np.random.default_rng(seed).permutation(len(x))[:SILHOUETTE_SAMPLES]
        if 1 < len(np.unique(labels[sample])) < len(sample):  # a small cluster may have no row in it
            scores["silhouette"] = float(silhouette_score(x[sample], labels[sample]))
        scores["calinski_harabasz"] = float(calinski_harabasz_score(x, labels))
    return scores


def write_clusters(out: Path, rows, labels, x, result: dict, plot: bool, seed: int):
    """Writes all files to the staging folder, which becomes the output."""
    with staging_folder(out, COMMAND, {}) as claim:
        for c in range(len(result["sizes"])):
            with claim.name_file(f"{c}.jsonl").open("w", encoding="utf-8") as file:
                for i in np.flatnonzero(labels == c):
                    file.write(json.dumps({**rows[i], "domain": c}, ensure_ascii=False) + "\n")
        if x is not None:
            metadata = {"embedder": result["embedder"], "embedded": result["embedded"]}
            path = claim.name_file("centroids.safetensors")
            save_file({"centroids": compute_centroids(x, labels)}, path, metadata=metadata)
            if plot:
                plot_clusters(x, labels, result, claim.name_file("clusters.png"), seed)
        claim.write("clusters.json", json.dumps(result, ensure_ascii=False, indent=1).encode())


def plot_clusters(x: np.ndarray, labels: np.ndarray, result: dict, path: Path, seed: int):
    """Plots a sample of the rows in two dimensions (t-SNE); the legend shows the first terms of each cluster."""
    from matplotlib.figure import Figure
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    sample = np.random.default_rng(seed).permutation(len(x))[:PLOT_SAMPLES]
    y = np.zeros((1, 1))  # PCA needs two rows
    if len(sample) > 1:
        y = PCA(min(50, *x[sample].shape), random_state=seed).fit_transform(x[sample])
    if len(sample) > 5 and y.shape[1] > 2:
        y = TSNE(2, perplexity=min(30, (len(sample) - 1) / 3), random_state=seed, init="pca").fit_transform(y)
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    axes = figure.subplots()
    for c, (size, terms) in enumerate(zip(result["sizes"], result["terms"], strict=True)):
        points = y[labels[sample] == c]
        label = f"{result['names'][c]}: {', '.join(terms[:5])}  ({size:,})"
        y_axis = points[:, 1] if y.shape[1] > 1 else 0 * points[:, 0]
        axes.scatter(points[:, 0], y_axis, s=7, color=f"C{c % 10}", alpha=0.7, label=label, linewidths=0)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(f"{result['rows']:,} definitions, {result['method']}, embedded with {result['embedder']}")
    figure.legend(loc="outside right upper", fontsize=9, frameon=False, markerscale=2.5)
    figure.savefig(path, dpi=140)
