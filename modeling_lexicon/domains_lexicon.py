"""The domain of a text: the nearest cluster centroid to its embedding (LM-Lexicon, paper's Sect. 3).

Letters: B texts, E experts (one a cluster), c the embedding's size.
"""

from collections.abc import Callable

import torch


def open_embedder(embedder) -> Callable:
    """A callable, an object with `.encode`, or a model's name -> what takes a list of texts to their embeddings.

    Raises:
        ValueError: without an embedder.
        ImportError: for a name, without sentence-transformers.
    """
    if embedder is None:
        raise ValueError(
            "No embedder is known: the configuration names none. Pass embedder=, a callable from texts to an array, an "
            "object with .encode, or a sentence-transformers name; the same one that the centroids were found with."
        )
    if isinstance(embedder, str):
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise ImportError(
                f"embedder={embedder!r} is opened by sentence-transformers, which is not installed. "
                "Install it with: pip install sentence-transformers"
            ) from error
        embedder = SentenceTransformer(embedder)
    return getattr(embedder, "encode", embedder)


def embed(texts: list[str], embedder) -> torch.Tensor:
    """texts (B) -> embeddings (B, c), float32, by what `open_embedder` takes.

    Raises: as `open_embedder`.
    """
    return torch.as_tensor(open_embedder(embedder)(list(texts))).detach().to("cpu", torch.float32)


def nearest_centroids(vectors: torch.Tensor, centroids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """argmin_e |v / |v| - c_e|

    vectors (B, c), centroids (E, c) -> ids (B,), int64; distances (B, E), float32.

    Raises:
        ValueError: for embeddings of another size, or that are not numbers.
    """
    centroids = centroids.to("cpu", torch.float32)
    if vectors.dim() != 2 or vectors.shape[1] != centroids.shape[1]:
        raise ValueError(
            f"The embeddings have the shape {tuple(vectors.shape)}, and the centroids {tuple(centroids.shape)}: they "
            "are not of one space. Use the embedder that the centroids were found with."
        )
    if not torch.isfinite(vectors).all():
        row = int((~torch.isfinite(vectors)).any(1).nonzero()[0])
        raise ValueError(f"The embedding of text {row} holds NaN or infinity, and is near to nothing. Check that text.")
    distances = torch.cdist(torch.nn.functional.normalize(vectors, dim=1), centroids)
    return distances.argmin(1), distances
