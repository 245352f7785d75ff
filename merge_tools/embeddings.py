"""Sentence embeddings of texts, as unit vectors."""

from collections.abc import Callable, Sequence

import numpy as np
from tqdm import tqdm

from .errors import MergeError

BLOCK = 1024  # texts per step of the progress bar


def embed_texts(texts: Sequence[str], embedder: str | Callable, *, progress: bool = True) -> np.ndarray:
    """Embeds n texts, at least one, as unit vectors `(n, c)`, float32.

    Args:
        embedder: name or folder of a sentence-transformers model, "minilm", or a callable from texts to vectors.

    Raises a `MergeError` that names the text if a vector is zero or not finite.
    """
    from modeling_lexicon.generation_lexicon import load_embedder

    encode, starts = load_embedder(embedder), range(0, len(texts), BLOCK)
    starts = tqdm(starts, desc="embeddings", disable=None if progress else True)
    vectors = np.concatenate([np.asarray(encode(list(texts[i : i + BLOCK])), dtype=np.float32) for i in starts])
    if vectors.ndim != 2 or len(vectors) != len(texts):
        raise MergeError(f"The embedder returned shape {vectors.shape} for {len(texts)} texts, not a vector for each.")
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    bad = np.flatnonzero(~(np.isfinite(norms) & (norms > 0)))
    if len(bad):
        raise MergeError(f"{len(bad)} embeddings are zero or not finite; the first is of {texts[bad[0]]!r:.100}.")
    return vectors / norms
