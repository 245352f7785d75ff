"""The spaCy component "lexperts_keyphrases": keyphrases of a Doc as spans in `doc.spans["keyphrases"]`, with scores.

An entry point registers it, so that `nlp.add_pipe("lexperts_keyphrases")` needs no import.
"""

import os
import threading
from collections.abc import Iterable, Iterator

from spacy.language import Language
from spacy.tokens import Doc, SpanGroup
from spacy.util import minibatch

from run_tools.loading import open_pipeline
from run_tools.packaged import locate_model

from . import TASK

LABEL = "KEYPHRASE"


@Language.factory(
    "lexperts_keyphrases",
    default_config={"model": None, "spans_key": "keyphrases", "mentions": False, "options": {}},
    assigns=["doc.spans"],
)
class KeyphraseComponent:
    """Extracts the keyphrases of each Doc.

    Spans are whole tokens: where spaCy's tokens do not end with a keyphrase's words, the span includes the whole token. The scores
    are in `doc.spans[key].attrs["scores"]`, as spaCy's span categorizer has them, and the component's settings are saved in the
    configuration of `nlp`.

    Args:
        nlp, name: given by spaCy.
        model: folder or Hub id of a keyphrase model, or tiny; by default the default model.
        spans_key: the name of the span group.
        mentions: all mentions of each keyphrase, not only the first.
        options: of the pipeline, such as `{"top_k": 5, "style": "phrases", "device": "cuda"}`.

    Example:

    ```python
    >>> nlp = spacy.blank("en")
    >>> nlp.add_pipe("lexperts_keyphrases", config={"options": {"top_k": 3}})
    >>> doc = nlp("A barrage across an estuary makes electricity from the tides.")
    >>> list(zip(doc.spans["keyphrases"], doc.spans["keyphrases"].attrs["scores"]))
    ```
    """

    def __init__(
        self,
        nlp: Language,
        name: str,
        model: str | None = None,
        spans_key: str = "keyphrases",
        mentions: bool = False,
        options: dict | None = None,
    ):
        self.name, self.spans_key = name, spans_key
        self._model, self._mentions, self._options = model, mentions, dict(options or {})
        self._extract, self._lock, self._process = None, threading.Lock(), os.getpid()

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_extract": None, "_lock": None}  # another process opens the model for itself

    def __setstate__(self, state: dict) -> None:
        self.__dict__ = state | {"_lock": threading.Lock(), "_process": os.getpid()}

    @property
    def extract(self):
        """The pipeline, opened on first use.

        Raises:
            RuntimeError: in a forked process, where PyTorch would wait for threads that do not exist.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                "lexperts_keyphrases cannot run in a forked process. For nlp.pipe(n_process=...), call "
                "multiprocessing.set_start_method('spawn') first."
            )
        with self._lock:
            if self._extract is None:
                self._extract = open_pipeline(TASK, locate_model(self._model), **self._options)
        return self._extract

    def __call__(self, doc: Doc) -> Doc:
        """Adds the keyphrases of one Doc."""
        return next(self.pipe([doc]))

    def pipe(self, stream: Iterable[Doc], batch_size: int = 64) -> Iterator[Doc]:
        """Adds the keyphrases of each Doc; `batch_size` Docs are read together."""
        for docs in minibatch(stream, batch_size):
            for doc, phrases in zip(docs, self.extract([doc.text for doc in docs]), strict=True):
                doc.spans[self.spans_key] = self._spans(doc, phrases)
                yield doc

    def _spans(self, doc: Doc, phrases: list[dict]) -> SpanGroup:
        found = [m for phrase in phrases for m in (phrase["mentions"] if self._mentions else [phrase])]
        found = [place for place in found if place["start"] is not None]  # candidates that do not occur
        spans = [doc.char_span(m["start"], m["end"], label=LABEL, alignment_mode="expand") for m in found]
        scores = [m["score"] for m in found]
        return SpanGroup(doc, name=self.spans_key, spans=spans, attrs={"scores": scores})
