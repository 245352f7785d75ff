"""Sentence embeddings of many texts, kept on disk under the hash of text and model: a text is read once."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from tqdm import tqdm

from .errors import MergeError

BLOCK = 2048  # texts that are embedded, and then kept, at once


class Cache:
    """Vectors by keys of 32 bytes, in safetensors files of a folder; each is written whole or not at all."""

    def __init__(self, folder: str | Path | None):
        self.folder, self.places, self.files = Path(folder) if folder else None, {}, []
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(self.folder.glob("*.safetensors")):
                self.files.append(load_file(path))
                for row, key in enumerate(self.files[-1]["keys"]):
                    self.places[key.tobytes()] = (len(self.files) - 1, row)

    def __contains__(self, key: bytes) -> bool:
        return key in self.places

    def get(self, key: bytes) -> np.ndarray:
        number, row = self.places[key]
        return self.files[number]["vectors"][row]

    def add(self, keys: Sequence[bytes], vectors: np.ndarray):
        table = {"keys": np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32), "vectors": vectors}
        for row, key in enumerate(keys):
            self.places[key] = (len(self.files), row)
        self.files.append(table)
        if self.folder:
            name = hashlib.sha256(b"".join(keys)).hexdigest()[:24]
            new = self.folder / f"{name}.new-{os.getpid()}"
            save_file({name: np.ascontiguousarray(value) for name, value in table.items()}, new)
            new.replace(self.folder / f"{name}.safetensors")


def identity(embedder: str) -> str:
    """What tells one model from another: a Hub id, or the hash of a folder's whole content, wherever it lies.

    A model that was trained again in its place is another one, even where only its last layer was trained.
    """
    folder = Path(embedder)
    if not folder.is_dir():
        return embedder
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".json", ".safetensors", ".bin", ".txt", ".model"):
            status = path.stat()
            content = hash_of(str(path.resolve()), status.st_size, status.st_mtime_ns)
            found.update(json.dumps([path.relative_to(folder).as_posix(), content]).encode())
    return found.hexdigest()


@lru_cache(maxsize=1024)
def hash_of(path: str, size: int, changed: int) -> str:
    """Of a file, which is read again only if its size or time changed."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_embedder(embedder: str | Callable) -> Callable[[list[str]], np.ndarray]:
    """A sentence-transformers model by its name or folder, an object with `.encode`, or a callable -> texts to vectors.

    Raises:
        ImportError: for a name, without sentence-transformers.
        MergeError: for a name that cannot be opened.
    """
    if not isinstance(embedder, str):
        return getattr(embedder, "encode", embedder)
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ImportError(
            f"The embedder {embedder!r} is opened by sentence-transformers. Install it with: pip install lexperts[cluster]"
        ) from error
    try:
        model = SentenceTransformer(embedder)
    except (OSError, ValueError) as error:
        raise MergeError(f"The embedder {embedder!r} cannot be opened: {str(error):.300}") from error
    return lambda texts: model.encode(texts, show_progress_bar=False)


def embed_texts(
    texts: Sequence[str],
    embedder: str | Callable,
    *,
    cache: str | Path | None = None,
    name: str | None = None,
    block: int = BLOCK,
) -> np.ndarray:
    """Texts (n) -> unit vectors (n, c), float32.

    Args:
        embedder: as in `open_embedder`; it is opened only where a text is new.
        cache: a folder that keeps vectors; killed on the way, the next call goes on there.
        name: of an embedder that is a callable, for the cache; a folder is known by its content.
        block: texts that are embedded at once.

    Raises:
        MergeError: for vectors that are no numbers; the text is named.
    """
    if cache is not None and name is None and not isinstance(embedder, str):
        raise MergeError("A cache needs the embedder's name: pass name=, since a callable has none of its own.")
    who = identity(embedder) if isinstance(embedder, str) else name or ""
    keys = [hashlib.sha256(f"{who}\0{text}".encode()).digest() for text in texts]
    kept, encode = Cache(cache), None
    new = {key: text for key, text in zip(keys, texts, strict=True) if key not in kept}
    order = sorted(new, key=lambda key: len(new[key]), reverse=True)  # of like length together
    with tqdm(total=len(order), unit="text", desc="embeddings", disable=not order or None) as bar:
        for start in range(0, len(order), block):
            own = order[start : start + block]
            encode = encode or open_embedder(embedder)
            vectors = np.asarray(encode([new[key] for key in own]), dtype=np.float32)
            check_vectors(vectors, [new[key] for key in own])
            kept.add(own, vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
            bar.update(len(own))
    return np.stack([kept.get(key) for key in keys]) if keys else np.zeros((0, 1), np.float32)


def check_vectors(vectors: np.ndarray, texts: list[str]):
    if vectors.ndim != 2 or len(vectors) != len(texts):
        raise MergeError(f"The embedder gave {vectors.shape} for {len(texts)} texts, where a vector each is wanted.")
    bad = ~np.isfinite(vectors).all(1) | (np.abs(vectors).max(1) == 0)
    if bad.any():
        text = texts[int(bad.argmax())]
        raise MergeError(
            f"{int(bad.sum())} embeddings hold NaN or infinity, or are zero; the first is that of {text!r:.100}. Check the text "
            "and the embedder's precision."
        )
