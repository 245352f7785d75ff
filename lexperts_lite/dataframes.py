# SPDX-License-Identifier: Apache-2.0
"""pandas and `datasets`: documents from a Series, a DataFrame or a data set, and keyphrases as a DataFrame.

Neither package is imported unless the caller uses it.
"""

import sys
from collections.abc import Iterator, Mapping

from .input_documents import KEYS

COLUMNS = ("document", "rank", "keyphrase", "score", "start", "end", "mentions", "field")


def read_documents(inputs):
    """Converts a pandas Series or DataFrame to a list of documents, and a data set to an iterator; other inputs are returned.

    Args:
        inputs: of a DataFrame or a data set, only the columns "text" and "title" are used. A missing title is `None`.

    Raises:
        ValueError: if the column "text" is missing.
    """
    pandas, datasets = sys.modules.get("pandas"), sys.modules.get("datasets")
    if pandas and isinstance(inputs, pandas.Series):
        return inputs.tolist()
    if pandas and isinstance(inputs, pandas.DataFrame):
        columns = _check_columns(list(inputs.columns))
        missing = inputs["title"].isna() if "title" in columns else None
        documents = inputs[columns].to_dict("records")
        return [d | {"title": None} if missing is not None and missing.iloc[i] else d for i, d in enumerate(documents)]
    if datasets and isinstance(inputs, (datasets.Dataset, datasets.IterableDataset)):
        kind = SizedRows if isinstance(inputs, datasets.Dataset) else Rows
        return kind(inputs, _check_columns(inputs.column_names or KEYS))
    return inputs


def _check_columns(names) -> list[str]:
    """The columns to read."""
    if "text" not in names:
        raise ValueError(
            f"The column 'text' is missing; the columns are {', '.join(map(repr, names))}. Pass a column, such as "
            "data['abstract'], or rename it: data.rename(columns={'abstract': 'text'}) in pandas, "
            "data.rename_column('abstract', 'text') in datasets."
        )
    return [name for name in KEYS if name in names]


class Rows:
    """The documents of a data set, read lazily."""

    def __init__(self, dataset, columns: list[str]):
        self._dataset, self._columns = dataset, columns

    def __iter__(self) -> Iterator[dict]:
        for row in self._dataset:
            yield {name: row[name] for name in self._columns if name in row}


class SizedRows(Rows):
    """Those of a data set whose size is known, which that of a stream is not."""

    def __len__(self) -> int:
        return len(self._dataset)


def tabulate(extract, inputs, **options):
    """The keyphrases of documents as a pandas DataFrame with one row per keyphrase.

    Args:
        extract: a keyphrase-extraction pipeline.
        inputs: a document, or anything else that the pipeline accepts.
        options: of the pipeline.

    Returns:
        A DataFrame with the columns
        document: the index of a Series or DataFrame, else the number of the document from 0;
        rank: from 1 for the best keyphrase of a document;
        keyphrase, score, start, end: as the pipeline returns them; missing for a candidate that does not occur;
        mentions: their number;
        field: "title" or "text", missing for a document without a title.

    Raises:
        ImportError: without pandas.
    """
    try:
        import pandas
    except ImportError as error:
        raise ImportError("to_dataframe needs pandas. Install it with: pip install pandas") from error
    index = inputs.index if isinstance(inputs, (pandas.Series, pandas.DataFrame)) else None
    results = extract(inputs, **options)
    is_one = isinstance(inputs, (str, Mapping)) or (
        isinstance(results, list) and results and isinstance(results[0], dict)
    )
    rows = []
    for number, phrases in enumerate([results] if is_one else results):
        document = number if index is None else index[number]
        for rank, phrase in enumerate(phrases, start=1):
            values = (phrase[name] for name in ("keyphrase", "score", "start", "end"))
            rows.append((document, rank, *values, len(phrase["mentions"]), phrase.get("field")))
    types = {"rank": "int64", "score": "float64", "start": "Int64", "end": "Int64", "mentions": "int64"}
    return pandas.DataFrame(rows, columns=COLUMNS).astype(types)
