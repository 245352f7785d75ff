# SPDX-License-Identifier: Apache-2.0
"""The keyphrase pipeline over a graph of onnxruntime: the same answers as `pipeline("keyphrase-extraction")` with the model's weights."""

import ctypes
import json
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any

import numpy as np

from .batches import Block
from .call_options import UNSET, check_batch_size, check_whole_number
from .decoding import read_labels
from .ranking import read_rankers, read_word_classes
from .reader import KeyphraseReader
from .tokenizer import NO_LIMIT, FastTokenizer

MODELS = {"default": Path(__file__).resolve().parent / "model", "tiny": Path(__file__).resolve().parent / "tiny"}
GRAPHS = {"fp32": "onnx/model.onnx", "int8": "onnx/model_int8.onnx"}  # as optimum and sentence-transformers name them


class KeyphraseExtractor(KeyphraseReader):
    """Extracts keyphrases from texts, as the pipeline of Lexperts does; one object may be used by several threads, and after a fork.

    Args:
        model: a folder that `lexperts keyphrases export` has written, or a model of this package: "default" (if there is none) or "tiny".
        num_threads: that the graph may use, at most one per core; `None` for one.
        batch_size, options: defaults of calls.

    Returns:
        A call reads a text, a mapping with `text` and `title`, or any iterable of them, with the options of
        `KeyphraseExtractionPipeline`: `top_k`, `min_score`, `style`, `candidates`, `diversity`, ... It returns as the pipeline does: for
        one document a list of `{"keyphrase", "score", "start", "end", "mentions"}`, best first, for a list of them a list.

    Raises:
        FileNotFoundError: if a file of the model is missing.
        OSError: if the graph cannot be opened.
        ValueError: if the folder holds no exported graph, and for options that are not valid.

    Example:

    ```python
    >>> extract = KeyphraseExtractor(top_k=5)
    >>> [phrase["keyphrase"] for phrase in extract("Graph cuts solve energy minimisation problems.")]
    ['Graph cuts', 'energy minimisation problems', 'energy']
    ```
    """

    reads_titles, joins_titles, _ahead = False, True, 0

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        num_threads: int | None = 1,
        batch_size: int | None = None,
        **options,
    ):
        if not isinstance(model, (str, os.PathLike, NoneType)):
            raise TypeError(f"model={model!r:.80} is not a folder. Use a path, or None for the model of this package.")
        self.folder = MODELS.get(str(model or "default"), Path(model or ""))
        self.model = SimpleNamespace(config=read_config(self.folder))
        config = self.model.config
        self.tokenizer = self._open_tokenizer()
        self._limit = self.tokenizer.model_max_length if self.tokenizer.model_max_length < NO_LIMIT else None
        self.num_threads = min(check_whole_number("num_threads", num_threads) or 1, os.cpu_count() or 1)
        self._tags = read_labels(config.id2label)
        self._rankers, self._classifier = read_rankers(config), read_word_classes(config)
        self._batch_size = check_batch_size(batch_size)
        self._preprocess_params, self._postprocess_params = {}, {}
        self._preprocess_params, _, self._postprocess_params = self._sanitize_parameters(**options)
        self._start()
        self._process = os.getpid()

    def _open_tokenizer(self) -> FastTokenizer:
        """The tokenizer in the folder."""
        return FastTokenizer(self.folder)

    def _start(self) -> None:
        """Opens the graph."""
        self._run, self._inputs = open_graph(self.folder, self.model.config, self.num_threads)
        self._forward_names = set(self._inputs)

    def _start_after_fork(self) -> None:
        """Opens the tokenizer and the graph again in a forked process: locks that other threads held stay locked there, and the
        graph's threads do not exist.
        """
        if self._process != os.getpid():
            self.tokenizer = self._open_tokenizer()
            self._start()
            self._process = os.getpid()

    def __getstate__(self) -> dict:
        raise TypeError("A KeyphraseExtractor cannot be pickled. Open it in each process: KeyphraseExtractor(folder).")

    def iterate(self, inputs, expected: str) -> Iterable:
        """See `KeyphraseReader`."""
        if isinstance(inputs, Iterable) and not isinstance(inputs, (str, bytes, Mapping)):
            return inputs
        raise TypeError(f"{inputs!r:.60} ({type(inputs).__name__}) is not {expected} or an iterable of them.")

    def preprocess(self, documents: Sequence, **options) -> Block:
        """See `KeyphraseReader`."""
        self._start_after_fork()
        return super().preprocess(documents, **options)

    def launch(
        self, batch: dict[str, np.ndarray], decode: bool, with_states: bool, with_gates: bool
    ) -> Callable[[], dict[str, np.ndarray]]:
        """See `KeyphraseReader`."""
        self._start_after_fork()
        logits, states = self._run(self.feeds(batch), with_states or self._classifier is not None)
        results = self.results(logits, states)
        return lambda: results

    def feeds(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The inputs of the graph for a batch `(n, S)`."""
        ids = batch["input_ids"]
        missing = {"token_type_ids": np.zeros_like(ids), "style_ids": np.zeros(len(ids), dtype=np.int64)}
        return {name: (missing | batch)[name] for name in self._inputs}

    def results(self, logits: np.ndarray, states: np.ndarray | None) -> dict[str, np.ndarray]:
        """What `launch` returns, of the graph's logits `(n, S, C)` and last hidden states `(n, S, d)`."""
        p = softmax(logits)  # (n, S, C)
        results = {"probabilities": np.zeros((*p.shape[:2], 3), dtype=p.dtype)}
        for label, tag in enumerate(self._tags):
            results["probabilities"][..., tag] += p[..., label]
        if states is not None:
            results["states"] = states
            if self._classifier is not None:
                weight, bias = self._classifier
                results["classes"] = softmax(states @ weight.T + bias)
        return results


def softmax(x: np.ndarray) -> np.ndarray:
    """exp(x_i) / sum_j exp(x_j) over the last dimension."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def read_config(folder: Path) -> SimpleNamespace:
    """The configuration of an exported model.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if it cannot be read, or names no graph.
    """
    path = folder / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"{folder} has no config.json. Name a folder that `lexperts keyphrases export` wrote.")
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        labels = {int(i): str(name) for i, name in values["id2label"].items()}
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not the configuration of a keyphrase model: {error!r}.") from error
    if (values.get("exported") or {}).get("onnx", {}).get("precision") not in GRAPHS:
        raise ValueError(f"{folder} holds no ONNX graph. Write one with `lexperts keyphrases export {folder} OUT`.")
    return SimpleNamespace(**values | {"id2label": labels})


def open_graph(folder: Path, config, threads: int):
    """A function that runs a graph, `run(values, with_states)` -> logits and last hidden states, and the names of its inputs.

    An int8 graph reads one row at a time, without its padding: onnxruntime chooses the range of activations for all that it reads at
    once, and a text would not have the same answer alone and in a batch.

    Args:
        folder: of the model.
        config: its configuration; `exported` names the graph's precision.
        threads: that the graph may use.

    Raises:
        OSError: if the file is missing or damaged, or needs a later version of onnxruntime.
    """
    os.environ.setdefault(
        "ORT_DISABLE_TELEMETRY", "1"
    )  # before the import: from 1.29 on it sends statistics of its use
    import onnxruntime

    precision = config.exported["onnx"]["precision"]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4  # errors are raised, and not also printed
    path = folder / GRAPHS[precision]
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no common class
        raise OSError(f"{path} cannot be opened: {' '.join(str(error).split()):.300}") from error

    if hasattr(
        os, "register_at_fork"
    ):  # in a child, to end a session would wait for threads that are not there: it stays
        weak = weakref.ref(session)
        os.register_at_fork(after_in_child=lambda: ctypes.pythonapi.Py_IncRef(ctypes.py_object(weak())))

    def run(values: dict[str, np.ndarray], with_states: bool) -> tuple:
        names = ["logits", "last_hidden_state"] if with_states else ["logits"]
        return (*session.run(names, values), None)[:2]

    return (one_by_one(run) if precision == "int8" else run), [value.name for value in session.get_inputs()]


def one_by_one(run: Callable[[dict[str, np.ndarray], bool], tuple]):
    """A function that runs a graph on one row after the other without their padding, where the outputs are 0."""

    def run_rows(values: dict[str, np.ndarray], with_states: bool) -> tuple:
        mask = values["attention_mask"] != 0  # (B, S)
        found: list = [None, None]
        for row in np.flatnonzero(mask.any(1)):
            real = mask[row]
            one = {name: of[row : row + 1] if of.ndim == 1 else of[row : row + 1, real] for name, of in values.items()}
            for i, output in enumerate(run(one, with_states)):
                if output is not None:
                    if found[i] is None:
                        found[i] = np.zeros((*mask.shape, output.shape[-1]), dtype=output.dtype)
                    found[i][row, real] = output[0]
        return tuple(found)

    return run_rows


@lru_cache(maxsize=1)
def _default_extractor() -> KeyphraseExtractor:
    """The extractor of the package's model."""
    return KeyphraseExtractor()


def extract_keyphrases(document, *, batch_size: int | None = UNSET, **options) -> list:
    """The keyphrases of one or more documents by the package's model; see `KeyphraseExtractor`."""
    return _default_extractor()(document, batch_size=batch_size, **options)
