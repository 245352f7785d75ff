"""Definitions into domains, one an expert: `merge-experts cluster` (LM-Lexicon, Sect. 3; Appendix B).

Methods: "balanced", k-means over embeddings with sizes that differ by at most one; "kmeans"; "tfidf", k-means over TF-IDF of the
texts, a lexical split; "random"; "source", the data sets themselves. What is embedded is the prompt, which is all there is when a
definition is to be written; "prompt+definition" reads the gold definition too, as the authors do.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from .balancing import balanced_kmeans
from .embedding import embed_texts
from .errors import MergeError, nearest

METHODS = ("balanced", "kmeans", "tfidf", "random", "source")
EMBEDDED = ("prompt", "prompt+definition")
TERMS = 12  # of a cluster that are named
SAMPLE = 5000  # rows that the silhouette is measured on
DRAWN = 3000  # rows in the plot


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
    """Splits rows of term, context and definition into clusters, one JSON Lines file each.

    The folder `out` then holds 0.jsonl, ..., each row with its `domain`; clusters.json, what is returned; where there is an
    embedder centroids.safetensors (`centroids` (K, c), the means of unit vectors; the embedder's name in its metadata), and
    clusters.png. `centroids: out/centroids.safetensors` in a recipe of `compose` lets the mixture route rows that it never saw.

    Args:
        data: JSON Lines, or a folder of them.
        out: a folder, which must be free.
        k: clusters; with "source" as many as there are sources.
        method: see above.
        embedder: a sentence-transformers name or folder, an object with `.encode`, or a callable from texts to vectors. "random",
            "tfidf" and "source" do without, and then have no centroids.
        name: the embedder's, which is saved with the centroids; by default what `embedder` says, of a folder the last part.
        embedded: "prompt" or "prompt+definition".
        cache: a folder that keeps embeddings.
        seed: of everything that is drawn.
        plot: whether to draw clusters.png.

    Returns: `method`, `sizes`, `terms` (of each cluster, by TF-IDF over clusters), `dropped` rows and those whose term is `absent`
        from its context; of embeddings `silhouette` (on a sample), `calinski_harabasz`, and `nearest`, the share of rows whose
        nearest centroid is that of their own cluster.

    Raises:
        MergeError: for an unknown method, a folder that is not free, more clusters than rows, an empty cluster, rows without a
            source, an embedding that is no number.
        ImportError: without scikit-learn, or with `plot` without matplotlib.
    """
    check_options(method, embedded, k, embedder)
    for package in ("sklearn", *["matplotlib"] * plot):
        if find_spec(package) is None:
            raise ImportError(f"Clustering needs {package}. Install it with: pip install lexperts[cluster]")
    out = Path(out)
    if out.exists() and any(out.iterdir()):
        raise MergeError(f"{out} is not empty. Choose a new folder, or empty it.")
    rows, dropped = read_rows(data)
    if method != "source" and k > len(rows):
        raise MergeError(f"{len(rows):,} rows cannot fill {k} clusters. Use at most as many clusters as rows.")
    texts = embedded_texts(rows, embedded)
    x = None
    if embedder is not None:
        x = embed_texts(texts, embedder, cache=cache, name=name if not isinstance(embedder, str) else None)
    labels, names = split(rows, texts, x, method, k, seed)
    sizes = np.bincount(labels, minlength=len(names))
    if not sizes.all():
        raise MergeError(
            f"Cluster {int(sizes.argmin())} is empty: the texts are too much alike for {len(names)} clusters. Use fewer."
        )
    found = {"method": method, "names": names, "sizes": sizes.tolist(), "rows": len(rows), "dropped": dropped}
    found["absent"] = sum(row["term"].lower() not in row["context"].lower() for row in rows)
    found["terms"] = top_terms(texts, labels, len(names))
    if x is not None:
        who = name or (Path(embedder).name if isinstance(embedder, str) and Path(embedder).is_dir() else str(embedder))
        found |= {"embedder": who, "embedded": embedded} | quality(x, labels, seed)
    write(out, rows, labels, x, found, plot, seed)
    return found


def check_options(method: str, embedded: str, k: int, embedder):
    if method not in METHODS:
        raise MergeError(f"method={method!r} is not known.{nearest(method, METHODS)}")
    if embedded not in EMBEDDED:
        raise MergeError(f"embedded={embedded!r} is not known.{nearest(embedded, EMBEDDED)}")
    if k < 1:
        raise MergeError(f"k={k}: there must be at least one cluster.")
    if embedder is None and method in ("balanced", "kmeans"):
        raise MergeError(
            f"method={method!r} splits embeddings. Name an embedder, such as sentence-transformers/all-MiniLM-L6-v2."
        )


def read_rows(data) -> tuple[list[dict], int]:
    # here: torch takes seconds, and no other command needs it
    from modeling_lexicon.data_lexicon import read_definitions

    paths = [Path(path) for path in ([data] if isinstance(data, str | Path) else data)]
    paths = [file for path in paths for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    if not paths:
        raise MergeError(f"There are no .jsonl files in {data}.")
    try:
        return read_definitions(paths)
    except ValueError as error:
        raise MergeError(str(error)) from error


def embedded_texts(rows: list[dict], embedded: str) -> list[str]:
    from modeling_lexicon.data_lexicon import prompt

    texts = [prompt(row["term"], row["context"]) for row in rows]
    if embedded == "prompt":
        return texts
    return [f"{text} {row['definition']}" for text, row in zip(texts, rows, strict=True)]


def split(rows, texts, x, method: str, k: int, seed: int) -> tuple[np.ndarray, list[str]]:
    """-> labels (n,), and the clusters' names."""
    names = [str(number) for number in range(k)]
    if method == "balanced":
        return balanced_kmeans(x, k, seed=seed)[0], names
    if method == "kmeans":
        from sklearn.cluster import KMeans

        return KMeans(
            k, n_init=1, algorithm="elkan" if k > 1 else "lloyd", max_iter=1000, tol=1e-8, random_state=seed
        ).fit_predict(x), names
    if method == "tfidf":
        from sklearn.cluster import KMeans
        from sklearn.feature_extraction.text import TfidfVectorizer

        counted = TfidfVectorizer(sublinear_tf=True, max_features=50_000, dtype=np.float32).fit_transform(texts)
        return KMeans(k, n_init=1, max_iter=300, random_state=seed).fit_predict(counted), names
    if method == "random":
        places = np.arange(len(rows)) % k
        return np.random.default_rng(seed).permutation(places), names
    without = sum(not isinstance(row.get("source"), str) for row in rows)
    if without:
        raise MergeError(f"{without:,} of {len(rows):,} rows have no 'source', which method='source' splits by.")
    names = sorted({row["source"] for row in rows})
    return np.array([names.index(row["source"]) for row in rows]), names


def top_terms(texts: list[str], labels: np.ndarray, k: int) -> list[list[str]]:
    """Each cluster's words with the largest TF-IDF, a cluster taken for one text."""
    from sklearn.feature_extraction.text import CountVectorizer

    counter = CountVectorizer(stop_words="english", token_pattern=r"(?u)\b[^\W\d_]{3,}\b")
    try:
        counts = counter.fit_transform(texts)
    except ValueError:  # stop words alone
        return [[] for _ in range(k)]
    words = counter.get_feature_names_out()
    of_clusters = np.stack([np.asarray(counts[labels == c].sum(0)).ravel() for c in range(k)]).astype(np.float64)
    share = of_clusters / np.maximum(of_clusters.sum(1, keepdims=True), 1)
    weight = share * np.log(1 + of_clusters.sum() / k / np.maximum(of_clusters.sum(0), 1))
    asked = {"definition"}  # of every prompt
    return [[words[i] for i in np.argsort(-row) if words[i] not in asked and row[i] > 0][:TERMS] for row in weight]


def centroids_of(x: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return np.stack([x[labels == c].mean(0) for c in range(labels.max() + 1)]).astype(np.float32)


def quality(x: np.ndarray, labels: np.ndarray, seed: int) -> dict:
    from sklearn.metrics import calinski_harabasz_score, silhouette_score

    m = centroids_of(x, labels)
    own = ((m**2).sum(1) - 2 * x @ m.T).argmin(1) == labels
    found = {"nearest": float(own.mean())}
    if 1 < len(m) < len(x):
        found["silhouette"] = float(silhouette_score(x, labels, sample_size=min(SAMPLE, len(x)), random_state=seed))
        found["calinski_harabasz"] = float(calinski_harabasz_score(x, labels))
    return found


def write(out: Path, rows, labels, x, found: dict, plot: bool, seed: int):
    """All files in a folder beside it, which then takes its name."""
    new = out.parent / f".{out.name}.partial"
    if new.exists():
        shutil.rmtree(new)
    new.mkdir(parents=True)
    for c in range(len(found["sizes"])):
        with (new / f"{c}.jsonl").open("w", encoding="utf-8") as file:
            for i in np.flatnonzero(labels == c):
                file.write(json.dumps({**rows[i], "domain": c}, ensure_ascii=False) + "\n")
    if x is not None:
        about = {"embedder": found["embedder"], "embedded": found["embedded"]}
        save_file({"centroids": centroids_of(x, labels)}, new / "centroids.safetensors", metadata=about)
        if plot:
            draw(x, labels, found, new / "clusters.png", seed)
    (new / "clusters.json").write_text(json.dumps(found, ensure_ascii=False, indent=1), encoding="utf-8")
    if out.exists():
        out.rmdir()
    new.rename(out)


def draw(x: np.ndarray, labels: np.ndarray, found: dict, path: Path, seed: int):
    """A sample of the rows in two dimensions (t-SNE), with each cluster's first terms in the legend.

    Raises:
        ImportError: without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("The plot needs matplotlib. Install it with: pip install lexperts[cluster]") from error
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    chosen = np.random.default_rng(seed).permutation(len(x))[:DRAWN]
    y = np.zeros((1, 1))  # one row has no variance to look along
    if len(chosen) > 1:
        y = PCA(min(50, *x[chosen].shape), random_state=seed).fit_transform(x[chosen])
    if len(chosen) > 5 and y.shape[1] > 2:
        y = TSNE(2, perplexity=min(30, (len(chosen) - 1) / 3), random_state=seed, init="pca").fit_transform(y)
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    axes = figure.subplots()
    for c, (size, terms) in enumerate(zip(found["sizes"], found["terms"], strict=True)):
        own = y[labels[chosen] == c]
        said = f"{found['names'][c]}: {', '.join(terms[:5])}  ({size:,})"
        axes.scatter(
            own[:, 0],
            own[:, 1] if y.shape[1] > 1 else 0 * own[:, 0],
            s=7,
            color=f"C{c % 10}",
            alpha=0.7,
            label=said,
            linewidths=0,
        )
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(f"{found['rows']:,} definitions, {found['method']}, by embeddings of {found['embedder']}")
    figure.legend(loc="outside right upper", fontsize=9, frameon=False, markerscale=2.5)
    figure.savefig(path, dpi=140)
