"""`KeyphraseExtractor`: keyphrases of batches of documents, for Ray Data, `datasets.map` and plain Python."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from lexperts_lite.call_options import check_batch_size, check_call_options
from lexperts_lite.reader import KeyphraseReader
from run_tools.errors import UserError
from run_tools.processes import MemoryRelease, prepare_process
from run_tools.run_over import process_each

from .loading import locate_extractor, open_extractor
from .rows import to_document

FIELDS = ("keyphrase", "score", "start", "end", "field")
MENTION_FIELDS = ("start", "end", "field", "score")


class KeyphraseExtractor:
    """Extracts the keyphrases of batches of documents. A worker process loads the model on first use.

    A copy by pickle or cloudpickle holds the options only, unless `model` is a pipeline. Failures of single documents, such
    as a missing text, are reported in the column `error` and do not stop the batch.

    Args:
        model: as for `loading.open_extractor`; or a keyphrase-extraction pipeline.
        text_column: the column of texts, or of lists of words, which are joined by blanks.
        title_column: the column of titles, if there is one.
        mentions: add all mentions of a keyphrase.
        batch_size: windows per batch of the model.
        device, dtype: where and how the model runs, such as "cuda:0" and "bfloat16".
        trust_remote_code: run the code in the model's folder or repository.
        num_threads: threads of PyTorch. By default as many as Ray assigned cores to the worker, 1 in a forked process, or
            else unchanged.
        options: of the pipeline, such as `top_k`, `min_score`, `style` and `language`.

    Returns:
        A call with a dictionary of columns returns a dictionary of lists, one with a `pyarrow.Table` a table, each with these
        columns added:
        keyphrases: lists of `{"keyphrase", "score", "start", "end", "field"}`, best first, or `None` after an error. `field` is
            "title" or "text", whatever the columns are called, and `None` for a candidate that does not occur. With `mentions`, the
            last value is a list of `{"start", "end", "field", "score"}`.
        error: why a document has no keyphrases, `None` if it has not failed.
        The types of a table do not depend on its content (see `types`), so prefer tables where batches are written
        to Parquet.

    Raises:
        ValueError: if a column does not exist, or is named like one of the two; for invalid options, and when the model is loaded, for
            a style that it does not have.
        OSError: if the model cannot be opened.

    Example:

    ```python
    >>> extract = KeyphraseExtractor(top_k=5)
    >>> extract({"text": ["Graph cuts solve energy minimisation problems.", None]})["error"]
    [None, "'text' is None, not a text"]
    >>> ray.data.read_parquet("in/").map_batches(extract, batch_format="pyarrow").write_parquet("out/")
    ```
    """

    def __init__(
        self, model: str | Path | KeyphraseReader | None = None, text_column: str = "text", title_column: str | None = None, *,
        mentions: bool = False, batch_size: int = 16, device: str | None = None, dtype: str = "float32",
        num_threads: int | None = None, trust_remote_code: bool = False, **options,
    ):  # fmt: skip
        # a name is looked up by the process that loads the model
        self.model = model if not model or isinstance(model, KeyphraseReader) else str(model)
        self.text_column, self.title_column, self.mentions = text_column, title_column, mentions
        self.batch_size = check_batch_size(batch_size) or 16
        self.loading: dict[str, Any] = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
        self.num_threads, self.options = num_threads, check_call_options(**options)

    def open_pipeline(self) -> KeyphraseReader:
        """The pipeline, which is loaded if this process has not loaded it yet. Sets the number of threads."""
        prepare_process(self.num_threads)  # for this call: Ray uses a process again
        if isinstance(self.model, KeyphraseReader):
            return self.model
        name = locate_extractor(self.model, self.loading["device"], self.loading["dtype"])
        return load_pipeline(name, folder_state(name), **self.loading)

    def open(self) -> Callable[[Sequence[dict]], list[dict]]:
        """Loads the model -> a function from documents `{"title", "text"}` to their keyphrases, for `run_over`. Raises a
        `ValueError` for invalid options.
        """
        extract = self.open_pipeline()
        list(extract(["Keyphrases."], **self.options))
        return lambda documents: self._extract(extract, documents)

    def check(self, row: Mapping) -> dict:
        """A row as a document. Raises a `ValueError` if its text or title is not a text."""
        return to_document(row, self.text_column, self.title_column)

    def __call__(self, batch):
        """Adds the keyphrases of a batch; see the class."""
        every = list(getattr(batch, "column_names", None) or batch)
        if twice := [name for name, count in Counter(every).items() if count > 1]:
            raise UserError(f"The batch has two columns {twice[0]!r}.")
        columns: dict[str, Any] = {name: batch[name] for name in every}
        names = [self.text_column, *([self.title_column] if self.title_column else [])]
        if missing := [name for name in names if name not in columns]:
            raise UserError(f"The batch has no column {missing[0]!r}. Its columns are {', '.join(map(repr, columns))}.")
        if taken := {"keyphrases", "error"} & set(columns):
            raise UserError(f"The batch has a column {min(taken)!r}, which is the name of a result. Rename it.")
        values = [of.to_pylist() if hasattr(of, "to_pylist") else list(of) for of in (columns[name] for name in names)]
        rows = [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]
        extract = self.open_pipeline()
        results = process_each(lambda documents: self._extract(extract, documents), rows, self.check)
        added = {name: [result.get(name) for result in results] for name in ("keyphrases", "error")}
        if "pyarrow" in sys.modules and isinstance(batch, sys.modules["pyarrow"].Table):
            for name, type in self.types().items():
                batch = batch.append_column(name, sys.modules["pyarrow"].array(added[name], type))
            return batch
        return columns | added

    def _extract(self, extract, documents: Sequence[dict]) -> list[dict]:
        """The results of documents that are all valid, with the same fields for every document."""
        release, results = MemoryRelease(), []
        for phrases in extract(iter(documents), batch_size=self.batch_size, **self.options):
            found = [place(phrase, FIELDS) for phrase in phrases]
            if self.mentions:
                for one, phrase in zip(found, phrases, strict=True):
                    one["mentions"] = [place(mention, MENTION_FIELDS) for mention in phrase["mentions"]]
            results.append({"keyphrases": found})
            release()
        return results

    def types(self) -> dict:
        """The Arrow types of the columns that are added: of `keyphrases` a list of structs."""
        import pyarrow

        span = [("start", pyarrow.int64()), ("end", pyarrow.int64()), ("field", pyarrow.string())]
        phrase = [("keyphrase", pyarrow.string()), ("score", pyarrow.float64()), *span]
        if self.mentions:
            phrase.append(("mentions", pyarrow.list_(pyarrow.struct([*span, ("score", pyarrow.float64())]))))
        return {"keyphrases": pyarrow.list_(pyarrow.struct(phrase)), "error": pyarrow.string()}


def place(found: Mapping, fields: Sequence[str]) -> dict:
    """The fields of a keyphrase or mention, whose `field` is "text" if the document has no title."""
    values = {name: found.get(name) for name in fields}
    return values if values["field"] or values["start"] is None else values | {"field": "text"}


def folder_state(folder: str) -> tuple:
    """Names, modification times and sizes of the files in a model's folder; nothing for a Hub id."""
    files = [file for file in sorted(Path(folder).glob("*")) if file.is_file()]
    return tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files)


@lru_cache(maxsize=1)
def load_pipeline(model: str, state: tuple, **loading) -> KeyphraseReader:
    """The pipeline of a model, loaded once per process, and again if the `state` of its folder differs."""
    return open_extractor(model, **loading)
