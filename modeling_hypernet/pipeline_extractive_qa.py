# SPDX-License-Identifier: Apache-2.0
"""`pipeline("extractive-qa", model=...)`: answers to questions, as spans of their texts.

Works with any model for question answering whose outputs have `start_logits` and `end_logits`.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, islice

import numpy as np
import torch

from .data_hypernet import QuestionWindow, pad_column, question_windows
from .shared_hypernet import TextPipeline

SORT_WINDOW = 16  # batches of questions whose windows are sorted by length together
POSTPROCESS_OPTIONS = ("top_k", "max_answer_len", "handle_impossible_answer", "null_score_diff_threshold")
PREPROCESS_OPTIONS = ("max_seq_len", "doc_stride", "max_question_len")


class ExtractiveQAPipeline(TextPipeline):
    """Extractive question answering. The options have the names of the pipeline that transformers 5 removed.

    Args:
        inputs: `{"question": ..., "context": ...}`; a list or a `datasets` column of them; or any other iterable or a PyTorch
            data set of them, which is read lazily. Or the strings `question=` and `context=`.
        top_k (`int`, default 1): number of answers per question.
        handle_impossible_answer (`bool`, default `False`): whether "no answer" (`""`) is a candidate.
        null_score_diff_threshold (`float`, default 0): "no answer" is ranked first only if its score exceeds the best
            answer's by more than this.
        max_answer_len (`int`, default 30): maximum tokens of an answer.
        batch_size (`int`, default 8): windows per batch of the model; windows are sorted by length first.
        max_seq_len (`int`, default 384, or the tokenizer's limit): tokens of a window.
        doc_stride, max_question_len (`int`): as in `question_windows`.

    Returns:
        For each question `{"score", "start", "end", "answer"}` with `context[start:end] == answer`; with `top_k` above 1 a
        list of them, best first. `score` is the answer's probability among all candidates of all windows: the softmax of
        its start logit plus its end logit. For "no answer" the lowest sum over the windows is used. It is the only answer to a
        context without visible characters.

    Example:

    ```python
    >>> answer = pipeline("extractive-qa", model="my-hypernet")
    >>> answer(question="What holds the water back?", context="A barrage holds the water back.")
    {'score': 0.83, 'start': 2, 'end': 9, 'answer': 'barrage'}
    ```
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._forward_arguments = set(inspect.signature(self.model.forward).parameters)

    def _sanitize_parameters(self, **options):
        options.pop("batch_size", None)
        self.check_options(options, (*PREPROCESS_OPTIONS, *POSTPROCESS_OPTIONS))
        for name in ("top_k", "max_answer_len"):
            if options.get(name) is not None and options[name] < 1:
                raise ValueError(f"{name}={options[name]} must be at least 1.")
        preprocess = {name: options[name] for name in PREPROCESS_OPTIONS if name in options}
        return preprocess, {}, {name: options[name] for name in POSTPROCESS_OPTIONS if name in options}

    def __call__(self, inputs=None, *, question=None, context=None, batch_size=None, num_workers=None, **kwargs):
        """See the class."""
        preprocess, _, postprocess = self._sanitize_parameters(batch_size=batch_size, **kwargs)
        preprocess, postprocess = (  # None: the option's default
            {name: value for name, value in (own | given).items() if value is not None}
            for own, given in ((self._preprocess_params, preprocess), (self._postprocess_params, postprocess))
        )
        batch_size = batch_size or self._batch_size or 8
        if inputs is None:
            inputs = {"question": question, "context": context}
        if isinstance(inputs, Mapping):
            return next(self._stream([inputs], batch_size, preprocess, postprocess))
        examples = self.iterate(inputs, "{'question': ..., 'context': ...}")
        results = self._stream(examples, batch_size, preprocess, postprocess)
        return list(results) if isinstance(inputs, Sequence) else results

    def _stream(self, examples: Iterable, batch_size: int, preprocess: dict, postprocess: dict) -> Iterator:
        """Examples -> results, in order; `SORT_WINDOW` batches are prepared together."""
        examples = (check_example(*pair) for pair in zip(examples, count(), strict=False))
        self.model.eval()
        while chunk := list(islice(examples, SORT_WINDOW * max(batch_size, 1))):
            prepared = self.preprocess(chunk, **preprocess)
            windows = prepared["windows"]
            by_length = sorted(range(len(windows)), key=lambda i: len(windows[i].offsets), reverse=True)
            for start in range(0, len(by_length), batch_size):
                indices = by_length[start : start + batch_size]
                outputs = self.forward(self._pad([windows[i] for i in indices]))
                for i, logits in zip(indices, outputs["logits"].numpy(), strict=True):
                    prepared["logits"][i] = logits[:, : len(windows[i].offsets)]
            yield from self.postprocess(prepared, **postprocess)

    def preprocess(self, examples, *, max_seq_len=None, **options) -> dict:
        """Examples -> their windows, and placeholders for the logits of each window."""
        questions, contexts = ([example[name] for example in examples] for name in ("question", "context"))
        limit = min(max_seq_len or 384, self.tokenizer.model_max_length)
        windows = question_windows(questions, contexts, self.tokenizer, max_seq_len=limit, **options)
        return {"examples": examples, "windows": windows, "logits": [None] * len(windows)}

    def _pad(self, windows: list[QuestionWindow]) -> dict[str, torch.Tensor]:
        names = [name for name in windows[0].inputs if name in self._forward_arguments]
        columns = {name: [window.inputs[name] for window in windows] for name in names}
        return {name: pad_column(name, values, self.tokenizer, "right") for name, values in columns.items()}

    def _forward(self, batch: dict) -> dict:
        """A padded batch -> logits of start and end (n, 2, S), in float32 or float64. Raises a `ValueError` if they are NaN."""
        outputs = self.model(**batch)
        logits = torch.stack([outputs.start_logits, outputs.end_logits], 1)
        if logits.isnan().any():
            raise ValueError("The model's scores are NaN. Check its weights, or open it with dtype='float32'.")
        return {"logits": logits.to(torch.promote_types(logits.dtype, torch.float32))}

    def postprocess(
        self,
        prepared: dict,
        *,
        top_k: int = 1,
        max_answer_len: int = 30,
        handle_impossible_answer: bool = False,
        null_score_diff_threshold: float = 0.0,
    ) -> list:
        """Logits of each window -> the answers of each example, best first."""
        windows_by_example: list[list] = [[] for _ in prepared["examples"]]
        for window, logits in zip(prepared["windows"], prepared["logits"], strict=True):
            windows_by_example[window.example].append((window, logits))
        results = []
        for example, windows in zip(prepared["examples"], windows_by_example, strict=True):
            options = (top_k, max_answer_len, handle_impossible_answer, null_score_diff_threshold)
            answers = rank_answers(example["context"], windows, *options)
            results.append(answers if top_k > 1 else answers[0])
        return results


def rank_answers(
    context: str,
    windows: list[tuple[QuestionWindow, np.ndarray]],
    top_k: int,
    max_answer_len: int,
    with_null: bool,
    null_score_diff_threshold: float,
) -> list[dict]:
    """The answers of a question, best first, from its windows with their logits of start and end (2, S). Without windows, which
    is without tokens in the context, "no answer" is certain.
    """
    if not windows:
        return [{"score": 1.0, "start": 0, "end": 0, "answer": ""}]
    spans, scores = answer_scores(windows, max_answer_len)
    if with_null:
        null_score = min(float(logits[0, 0] + logits[1, 0]) for _, logits in windows)
        spans, scores = np.vstack([spans, [[0, 0]]]), np.append(scores, null_score)
    p = np.exp(scores - scores.max())
    p /= p.sum()
    rank_scores = scores - null_score_diff_threshold * (spans[:, 1] == 0)
    order = np.argsort(-rank_scores, kind="stable")[:top_k]
    return [
        {"score": round(float(p[i]), 6), "start": start, "end": end, "answer": context[start:end]}
        for i, (start, end) in zip(order, spans[order].tolist(), strict=True)
    ]


def answer_scores(
    windows: list[tuple[QuestionWindow, np.ndarray]], max_answer_len: int
) -> tuple[np.ndarray, np.ndarray]:
    """Character spans (n, 2) and scores (n,) of all candidates; for a span in several windows the best score."""
    of_windows, scores_of_windows = [], []
    for window, logits in windows:
        text = np.flatnonzero(window.in_text)
        sums = np.add.outer(logits[0, text].astype(np.float64), logits[1, text])
        i, j = np.nonzero(np.tril(np.triu(np.ones(sums.shape, dtype=bool)), max_answer_len - 1))
        of_windows.append(np.stack([window.offsets[text[i], 0], window.offsets[text[j], 1]], 1))
        scores_of_windows.append(sums[i, j])
    spans, scores = np.concatenate(of_windows), np.concatenate(scores_of_windows)
    if len(windows) == 1:
        return spans, scores
    order = np.argsort(-scores, kind="stable")
    spans, first = np.unique(spans[order], axis=0, return_index=True)
    return spans, scores[order][first]


def check_example(example, number: int) -> Mapping:
    """The example. Raises a `TypeError` or `ValueError` without the texts `question` and `context`."""
    for name in ("question", "context"):
        value = example.get(name) if isinstance(example, Mapping) else None
        if not isinstance(value, str):
            raise TypeError(
                f"The {name} of example {number} is a {type(value).__name__}, not a string: {example!r:.80}."
            )
        if not value.strip():
            raise ValueError(f"The {name} of example {number} is empty.")
    return example
