"""`KeyphraseExtractor`: keyphrases of batches of documents, for Ray Data, `datasets.map` and plain Python."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from lexperts_lite.call_options import check_batch_size, check_call_options
from lexperts_lite.input_documents import split_into_blocks
from lexperts_lite.reader import SORT_WINDOW
from run_tools.packaged import locate_model
from run_tools.processes import MemoryRelease, prepare_process
from run_tools.run_over import process_each

from .loading import open_extractor
from .pipeline_keyphrase_extraction import KeyphraseExtractionPipeline
from .rows import to_document

FIELDS = ("keyphrase", "score", "start", "end", "field")
MENTION_FIELDS = ("start", "end", "field", "score")
LONG = 20_000  # characters of a document whose windows are shown as progress on any device


class KeyphraseExtractor:
    """Extracts the keyphrases of batches of documents. A worker process loads the model on first use.

    A copy by pickle or cloudpickle holds the options only, unless `model` is a pipeline. Failures of single documents, such
    as a missing text, are reported in the column `error` and do not stop the batch.

    Args:
        model: folder or Hub id of a token classifier, by default lexperts-seke-minilm, "tiny" for lexperts-seke-tiny; or a
            keyphrase-extraction pipeline.
        text_column: the column of texts, or of lists of words, which are joined by blanks.
        title_column: the column of titles, if there is one.
        columns: input columns that the result keeps, by default all.
        mentions: add all mentions of a keyphrase.
        batch_size: windows per batch of the model.
        device, dtype, backend: where and how the model runs, such as "cuda:0", "bfloat16" and "onnx".
        trust_remote_code: run the code in the model's folder or repository.
        num_threads: threads of PyTorch. By default as many as Ray assigned cores to the worker, 1 in a forked process, or
            else unchanged.
        options: of the pipeline, such as `top_k`, `min_score`, `style` and `language`.

    Returns:
        A call with a dictionary of columns returns a dictionary of lists, one with a `pyarrow.Table` a table, and one with a
        pandas DataFrame a DataFrame, each with these columns added:
        keyphrases: lists of `{"keyphrase", "score", "start", "end", "field"}`, best first, or `None` after an error. `field` is
            "title" or "text", whatever the columns are called, and `None` for a candidate that does not occur. With `mentions`, the last value is a list of
            `{"start", "end", "field", "score"}`.
        error: why a document has no keyphrases, `None` if it has not failed.
        The types of a table do not depend on its content (see `types`), so prefer tables where batches are written
        to Parquet.

    Raises:
        ValueError: if a column does not exist, or a kept column is named like one of the two; for invalid options, and when the
            model is loaded, for a style that it does not have.
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
        self,
        model: str | Path | KeyphraseExtractionPipeline | None = None,
        text_column: str = "text",
        title_column: str | None = None,
        *,
        columns: Sequence[str] | None = None,
        mentions: bool = False,
        batch_size: int = 16,
        device: str | None = None,
        dtype: str = "float32",
        backend: str | None = None,
        num_threads: int | None = None,
        trust_remote_code: bool = False,
        **options,
    ):
        is_fixed = not model or isinstance(model, KeyphraseExtractionPipeline)
        # a name is looked up by the process that loads the model
        self.model = model if is_fixed else str(model)
        self.text_column, self.title_column = text_column, title_column
        self.columns, self.mentions = None if columns is None else list(columns), mentions
        self.batch_size = check_batch_size(batch_size) or 16
        self.loading = {"device": device, "dtype": dtype, "backend": backend, "trust_remote_code": trust_remote_code}
        self.num_threads, self.options = num_threads, check_call_options(**options)
        if (candidates := self.options.get("candidates")) is not None and candidates.per_document:
            raise ValueError(
                "candidates has one list per document. Batches need one list or mapping for all documents."
            )

    def open_pipeline(self) -> KeyphraseExtractionPipeline:
        """The pipeline, which is loaded if this process has not loaded it yet. Sets the number of threads."""
        prepare_process(self.num_threads)  # for this call: Ray uses a process again
        if isinstance(self.model, KeyphraseExtractionPipeline):
            return self.model
        name = locate_model(self.model)
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
        columns = {name: batch[name] for name in _names(batch)}
        kept = list(columns) if self.columns is None else self.columns
        needed = [self.text_column, *([self.title_column] if self.title_column else []), *kept]
        if missing := [name for name in needed if name not in columns]:
            known = ", ".join(map(repr, columns))
            raise ValueError(f"The batch has no column {missing[0]!r}. Its columns are {known}.")
        if taken := [name for name in ("keyphrases", "error") if name in kept]:
            raise ValueError(
                f"The input has a column {taken[0]!r}, which is the name of a result. Rename it, or list the columns to keep "
                "without it: columns=[...]."
            )
        names = [self.text_column, *([self.title_column] if self.title_column else [])]
        values = zip(*(_values(columns[name]) for name in names), strict=True)
        rows = [dict(zip(names, row, strict=True)) for row in values]
        extract = self.open_pipeline()
        results = process_each(lambda documents: self._extract(extract, documents), rows, self.check)
        added = {name: [result.get(name) for result in results] for name in ("keyphrases", "error")}
        if "pyarrow" in sys.modules and isinstance(batch, sys.modules["pyarrow"].Table):
            import pyarrow

            table = batch.select(kept)
            for name, type in self.types().items():
                table = table.append_column(name, pyarrow.array(added[name], type))
            return table
        if "pandas" in sys.modules and isinstance(batch, sys.modules["pandas"].DataFrame):
            return batch[kept].assign(**added)
        return {name: columns[name] for name in kept} | added

    def _extract(self, extract, documents: Sequence[dict]) -> list[dict]:
        """The results of documents that are all valid."""
        is_long = any(len(document["text"]) > LONG for document in documents)
        if extract.device.type != "cpu" and not is_long:  # the pipeline prepares batches ahead
            found = extract(iter(documents), batch_size=self.batch_size, **self.options)
            return [{"keyphrases": self._result(phrases)} for phrases in found]
        of_document: dict[int, list[dict]] = {}
        release = MemoryRelease()
        for block in split_into_blocks(documents, SORT_WINDOW * self.batch_size):
            first = len(of_document)
            for read in extract.read_block(block, batch_size=self.batch_size, **self.options):
                of_document |= {first + i: self._result(phrases) for i, phrases in read.finished.items()}
                release()
        return [{"keyphrases": of_document[i]} for i in range(len(documents))]

    def _result(self, phrases: list[dict]) -> list[dict]:
        """The keyphrases of one document with the same fields for every document."""
        results = [_with_field({name: phrase.get(name) for name in FIELDS}) for phrase in phrases]
        if self.mentions:
            for result, phrase in zip(results, phrases, strict=True):
                result["mentions"] = [
                    _with_field({name: mention.get(name) for name in MENTION_FIELDS}) for mention in phrase["mentions"]
                ]
        return results

    def types(self) -> dict:
        """The Arrow types of the columns that are added."""
        import pyarrow

        return {"keyphrases": keyphrases_type(self.mentions), "error": pyarrow.string()}


def folder_state(folder: str) -> tuple:
    """Names, modification times and sizes of the files in a model's folder; nothing for a Hub id."""
    return tuple(
        (f.name, f.stat().st_mtime_ns, f.stat().st_size) for f in sorted(Path(folder).glob("*")) if f.is_file()
    )


@lru_cache(maxsize=1)
def load_pipeline(model: str, state: tuple, backend: str | None, **loading) -> KeyphraseExtractionPipeline:
    """The pipeline of a model, loaded once per process.

    Args:
        state: of the model's folder; a changed model is loaded again.
        backend, loading: arguments of `loading.open_extractor`.
    """
    return open_extractor(model, **loading, **({} if backend is None else {"backend": backend}))


def keyphrases_type(mentions: bool = False):
    """The Arrow type of the column `keyphrases`: a list of structs."""
    import pyarrow

    place = [("start", pyarrow.int64()), ("end", pyarrow.int64()), ("field", pyarrow.string())]
    phrase = [("keyphrase", pyarrow.string()), ("score", pyarrow.float64()), *place]
    if mentions:
        phrase.append(("mentions", pyarrow.list_(pyarrow.struct([*place, ("score", pyarrow.float64())]))))
    return pyarrow.list_(pyarrow.struct(phrase))


def _with_field(place: dict) -> dict:
    """A place whose field is "text" if the document has no title."""
    return place if place["field"] or place["start"] is None else place | {"field": "text"}


def _names(batch) -> list[str]:
    """The columns of a batch."""
    return list(getattr(batch, "column_names", None) or batch)


def _values(column) -> Sequence:
    """A column of a batch as Python values."""
    return column.to_pylist() if hasattr(column, "to_pylist") else list(column)
