"""`pipeline("extractive-qa", model=...)`: questions and texts in, answers with their places out.

Works with any model for question answering that gives `start_logits` and `end_logits`.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

import numpy as np
import torch
from transformers import Pipeline

from .questions_hypernet import QuestionWindow, question_windows

BATCHES_AT_A_TIME = 16  # so many batches of questions are sorted by length together
OPTIONS = ("top_k", "max_answer_length", "handle_impossible_answer", "null_margin")
READING = ("max_length", "stride", "max_question_length", "on_long")
NO_LIMIT = 1_000_000  # tokenizers without a limit of their own say something like 1e30


class ExtractiveQAPipeline(Pipeline):
    """Answers questions by a piece of a text.

    Args:
        inputs: `{"question": ..., "context": ...}`, a list of such, or any other iterable of them, which is read as it is
            asked for. Or `question=` and `context=`, each a text or a list of texts.
        top_k (`int`, default 1): answers for a question.
        handle_impossible_answer (`bool`, default `False`): whether "no answer" (`""`) is among them.
        null_margin (`float`, default 0): "no answer" comes first only where its score beats the best answer's by so much.
        max_answer_length (`int`, default 30): tokens of an answer.
        batch_size (`int`, default 8): windows that the model reads at once. They are sorted by length first.
        max_length (`int`, default 384, or the model's limit): tokens of a window.
        stride (`int`, default 128, or a third of a window): tokens that neighbouring windows of a long text share.
        max_question_length (`int`, default 64): tokens of a question; the rest is cut, which the log says.
        on_long (default `"window"`): texts longer than a window are read in several; `"error"` refuses them, `"truncate"`
            reads their beginning only.

    Returns:
        For each question `{"score", "start", "end", "answer"}` with `context[start:end] == answer`, or a list of such, best
        first, for `top_k` above 1. `score` is the answer's probability among all that the windows allow: the softmax of the
        sum of its start's and its end's logits. "No answer" has its lowest sum over the windows.

    Example:

    ```python
    >>> answer = pipeline("extractive-qa", model="my-hypernet")
    >>> answer(question="Who was lynched?", context="...", handle_impossible_answer=True)
    {'score': 0.83, 'start': 31, 'end': 47, 'answer': 'Mohammad Ikhlaq'}
    ```
    """

    _load_tokenizer = True
    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._names = set(inspect.signature(self.model.forward).parameters)

    def _upload_modified_files(self, working_dir, repo_id, *args, **kwargs):
        # the last step of push_to_hub, with transformers' blank card in place
        if hasattr(self.model, "write_model_card"):
            self.model.write_model_card(working_dir, repo_id=repo_id)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    def _sanitize_parameters(self, **given):
        unknown = [name for name in given if name not in OPTIONS + READING]
        if unknown:
            raise TypeError(
                f"extractive-qa got {', '.join(map(repr, unknown))}. It takes question, context, batch_size, "
                f"{', '.join(OPTIONS + READING)}."
            )
        for name in ("top_k", "max_answer_length"):
            if name in given and given[name] < 1:
                raise ValueError(f"{name}={given[name]}: it must be 1 or more.")
        reading = {name: given[name] for name in READING if name in given}
        return reading, {}, {name: given[name] for name in OPTIONS if name in given}

    def __call__(self, inputs=None, *, question=None, context=None, batch_size=None, num_workers=None, **kwargs):
        reading, _, choosing = self._sanitize_parameters(**kwargs)
        reading = {**self._preprocess_params, **reading}
        choosing = {**self._postprocess_params, **choosing}
        batch_size = batch_size or self._batch_size or 8
        if inputs is None:
            inputs = examples_of(question, context)
        if isinstance(inputs, Mapping):
            return next(self._stream([inputs], batch_size, reading, choosing))
        if isinstance(inputs, (str, bytes)) or not isinstance(inputs, Iterable):
            raise TypeError(
                f"extractive-qa reads {{'question': ..., 'context': ...}} or an iterable of them, not a "
                f"{type(inputs).__name__}: {inputs!r:.60}."
            )
        results = self._stream(inputs, batch_size, reading, choosing)
        return list(results) if isinstance(inputs, (list, tuple)) else results

    def _stream(self, examples: Iterable, batch_size: int, reading: dict, choosing: dict) -> Iterator:
        """Examples -> results, in order, some batches at a time."""
        examples, first = iter(examples), 0
        self.model.eval()
        while chunk := list(islice(examples, BATCHES_AT_A_TIME * batch_size)):
            prepared = self.preprocess(chunk, first=first, **reading)
            windows = prepared["windows"]
            places = sorted(range(len(windows)), key=lambda i: len(windows[i].offsets), reverse=True)
            for start in range(0, len(places), batch_size):
                chosen = places[start : start + batch_size]
                said = self.forward(self._padded([windows[i] for i in chosen]))
                for i, logits in zip(chosen, said["logits"].numpy(), strict=True):
                    prepared["logits"][i] = logits[:, : len(windows[i].offsets)]
            yield from self.postprocess(prepared, **choosing)
            first += len(chunk)

    def preprocess(self, examples, *, first=0, max_length=None, stride=None, **reading) -> dict:
        """Examples -> their windows, and room for what the model will say of each."""
        for number, example in enumerate(examples, start=first):
            check_example(example, number)
        limit = min(max_length or 384, self._limit())
        windows = question_windows(
            [example["question"] for example in examples],
            [example["context"] for example in examples],
            self.tokenizer,
            max_length=limit,
            stride=min(128, limit // 3) if stride is None else stride,
            first=first,
            **reading,
        )
        return {"examples": examples, "windows": windows, "logits": [None] * len(windows)}

    def _limit(self) -> int:
        """The longest window that both the tokenizer and the model's position embeddings take."""
        limits = [self.tokenizer.model_max_length]
        for name, module in self.model.named_modules():
            if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
                padding = module.padding_idx  # RoBERTa and its kin number positions from padding_idx + 1
                limits.append(module.num_embeddings - (0 if padding is None else padding + 1))
        return min(min(limits), NO_LIMIT)

    def _padded(self, windows: list[QuestionWindow]) -> dict[str, torch.Tensor]:
        masks = ("meta_mask", "main_mask")
        rows = [{name: x for name, x in window.inputs.items() if name not in masks} for window in windows]
        batch = dict(self.tokenizer.pad(rows, padding_side="right", return_tensors="pt"))
        for name in masks:
            if name in self._names:
                full = torch.zeros_like(batch["input_ids"])
                for i, window in enumerate(windows):
                    full[i, : len(window.offsets)] = torch.tensor(window.inputs[name])
                batch[name] = full
        return batch

    def _forward(self, batch: dict) -> dict:
        """A padded batch -> logits of start and end (n, 2, S), in float32 or better."""
        outputs = self.model(**batch)
        logits = torch.stack([outputs.start_logits, outputs.end_logits], 1)
        return {"logits": logits.to(torch.promote_types(logits.dtype, torch.float32))}

    def postprocess(
        self,
        prepared: dict,
        *,
        top_k: int = 1,
        max_answer_length: int = 30,
        handle_impossible_answer: bool = False,
        null_margin: float = 0.0,
    ) -> list:
        """What the model said of each window -> each example's answers, best first."""
        of_example: list[list] = [[] for _ in prepared["examples"]]
        for window, logits in zip(prepared["windows"], prepared["logits"], strict=True):
            of_example[window.example].append((window, logits))
        results = []
        for example, read in zip(prepared["examples"], of_example, strict=True):
            limits = (top_k, max_answer_length, handle_impossible_answer, null_margin)
            found = rank_answers(example["context"], read, *limits)
            results.append(found if top_k > 1 else found[0])
        return results


def rank_answers(
    context: str, read: list, top_k: int, max_answer_length: int, with_null: bool, null_margin: float
) -> list[dict]:
    """[(window, logits of start and end (2, S))] of one question -> its answers, best first."""
    places, scores = answer_scores(read, max_answer_length)
    if with_null:
        null = min(float(logits[0, 0] + logits[1, 0]) for _, logits in read)
        places, scores = np.vstack([places, [[0, 0]]]), np.append(scores, null)
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    ranked = scores - null_margin * (places[:, 1] == 0)
    order = np.argsort(-ranked, kind="stable")[:top_k]
    return [
        {"score": round(float(weights[i]), 6), "start": start, "end": end, "answer": context[start:end]}
        for i, (start, end) in zip(order, places[order].tolist(), strict=True)
    ]


def answer_scores(read: list, max_answer_length: int) -> tuple[np.ndarray, np.ndarray]:
    """All answers that the windows allow: their characters (n, 2) and scores (n,), the best one for a place in several."""
    places, scores = [], []
    for window, logits in read:
        text = np.flatnonzero(window.in_text)
        sums = np.add.outer(logits[0, text].astype(np.float64), logits[1, text])
        i, j = np.nonzero(np.tril(np.triu(np.ones(sums.shape, dtype=bool)), max_answer_length - 1))
        places.append(np.stack([window.offsets[text[i], 0], window.offsets[text[j], 1]], 1))
        scores.append(sums[i, j])
    places, scores = np.concatenate(places), np.concatenate(scores)
    if len(read) == 1:
        return places, scores
    order = np.argsort(-scores, kind="stable")
    places, first = np.unique(places[order], axis=0, return_index=True)
    return places, scores[order][first]


def examples_of(question, context) -> list[dict] | dict:
    """`question=` and `context=`, texts or lists of them -> examples."""
    if question is None or context is None:
        raise TypeError("extractive-qa needs both question= and context=, or {'question': ..., 'context': ...}.")
    if isinstance(question, str) and isinstance(context, str):
        return {"question": question, "context": context}
    count = max(len(x) for x in (question, context) if not isinstance(x, str))
    questions, contexts = ([x] * count if isinstance(x, str) else list(x) for x in (question, context))
    if len(questions) != len(contexts):
        raise ValueError(
            f"There are {len(questions)} questions and {len(contexts)} contexts. Pass as many, or one of one kind."
        )
    return [{"question": q, "context": c} for q, c in zip(questions, contexts, strict=True)]


def check_example(example, number: int):
    if not isinstance(example, Mapping) or not {"question", "context"} <= set(example):
        raise TypeError(f"Example {number} has no question and context: {example!r:.80}.")
    for name in ("question", "context"):
        if not isinstance(example[name], str):
            raise TypeError(f"The {name} of example {number} is a {type(example[name]).__name__}, not a text.")
