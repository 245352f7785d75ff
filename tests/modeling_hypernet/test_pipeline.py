"""The pipeline that answers questions, and what the package refuses."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForQuestionAnswering, BertForQuestionAnswering, pipeline

from modeling_hypernet import (
    DataCollatorForTextPairs,
    ExtractiveQAPipeline,
    HypernetConfig,
    tokenize_pairs,
    tokenize_questions,
)
from modeling_hypernet.crf_hypernet import LinearChainCrf
from modeling_hypernet.data_hypernet import question_windows
from modeling_hypernet.pipeline_extractive_qa import answer_scores, rank_answers

from ..tools import as_rows
from .test_data import CONTEXT, LONG, QUESTION

NOTHING = {"score": 1.0, "start": 0, "end": 0, "answer": ""}


@pytest.fixture(scope="module")
def answer(tiny_hypernet, tiny_tokenizer):
    return pipeline("extractive-qa", model=tiny_hypernet("answers"), tokenizer=tiny_tokenizer)


def squad(text, start):
    return {"id": ["q7"], "question": ["of"], "context": ["the graph"],
            "answers": [{"text": [text], "answer_start": [start]}]}  # fmt: skip


def nan_answer(at):
    model = at.tiny_hypernet("answers")
    model.qa_outputs.weight.data.fill_(torch.nan)
    return pipeline("extractive-qa", model=model, tokenizer=at.tokenizer)(question="of", context="the graph")


# a part of the message: the type of the error, and the call that raises it
REFUSALS = {
    "meta_embedding_size=1": (ValueError, lambda at: HypernetConfig(meta_embedding_size=1)),
    "hidden_size=0": (ValueError, lambda at: HypernetConfig(hidden_size=0)),
    "pooling='max'": (ValueError, lambda at: HypernetConfig(pooling="max")),
    "classifier_dropout=1.0": (ValueError, lambda at: HypernetConfig(classifier_dropout=1.0)),
    "keyphrase_threshold=2.0": (ValueError, lambda at: HypernetConfig(keyphrase_threshold=2.0)),
    "model_type='bert'": (ValueError, lambda at: HypernetConfig.from_dict({"model_type": "bert"})),
    "input_ids, inputs_embeds or": (ValueError, lambda at: at.answer.model()),
    "main_mask=None needs input_ids": (ValueError, lambda at: at.answer.model(inputs_embeds=torch.zeros(1, 3, 32))),
    "Text 1 has no tokens: ' '": (ValueError, lambda at: tokenize_pairs(["a", None], ["b", " "], at.tokenizer)),
    "Text 0 has no tokens": (ValueError, lambda at: tokenize_pairs(["graph"], ["\u200b"], at.tokenizer)),
    "q7: its context has ' grap'": (ValueError, lambda at: tokenize_questions(squad("graph", 3), at.tokenizer)),
    "doc_stride=30": (ValueError, lambda at: at.answer(question="of", context=CONTEXT, max_seq_len=32, doc_stride=30)),
    "top_k=0": (ValueError, lambda at: at.answer(question="of", context=CONTEXT, top_k=0)),
    "context of example 1 is empty": (
        ValueError,
        lambda at: at.answer([{"question": "of", "context": c} for c in "a "]),
    ),
    "context of example 0 is a int": (TypeError, lambda at: at.answer([{"question": "of", "context": 3}])),
    "context of example 0 is a NoneType": (TypeError, lambda at: at.answer(question="of")),
    "question of example 0 is a list": (TypeError, lambda at: at.answer(question=["of"], context="the")),
    "{'question': ..., 'context': ...}": (TypeError, lambda at: at.answer("text")),
    "'tok_k'": (TypeError, lambda at: at.answer(question="of", context="the", tok_k=3)),
    "scores are NaN": (ValueError, nan_answer),
    "(2, 5, 4)": (ValueError, lambda at: LinearChainCrf(3).log_marginals(torch.zeros(2, 5, 4), torch.ones(2, 5))),
}


@pytest.mark.parametrize("fragment", REFUSALS)
def test_a_refusal_names_the_value_in_one_line(fragment, answer, tiny_hypernet, tiny_tokenizer):
    error, call = REFUSALS[fragment]
    with pytest.raises(error) as found:
        call(SimpleNamespace(answer=answer, tokenizer=tiny_tokenizer, tiny_hypernet=tiny_hypernet))
    assert fragment in str(found.value) and "\n" not in str(found.value)


def test_an_answer_is_a_piece_of_its_text_alone_and_in_a_batch(answer):
    examples = [{"question": QUESTION, "context": CONTEXT}, {"question": "of", "context": "the graph cut"}] * 3
    together = answer(examples, batch_size=4, **LONG)
    for example, actual in zip(examples, together, strict=True):
        assert actual["answer"] == example["context"][actual["start"] : actual["end"]] != ""
        alone = answer(**example, **LONG)
        assert alone["answer"] == actual["answer"] and abs(alone["score"] - actual["score"]) < 1e-5
    assert [actual["answer"] for actual in answer(iter(examples), **LONG)] == [actual["answer"] for actual in together]


def test_scores_are_probabilities_and_no_answer_is_one_of_them(answer):
    given = {"question": "of", "context": "the graph cut", "handle_impossible_answer": True}
    actual = answer(**given, top_k=100)
    assert abs(sum(one["score"] for one in actual) - 1) < 1e-4
    assert len(actual) == 3 + 2 + 1 + 1 and sum(one["answer"] == "" for one in actual) == 1
    assert actual == sorted(actual, key=lambda one: -one["score"])
    assert answer(**given, null_score_diff_threshold=1e6, top_k=100)[-1]["answer"] == ""
    assert answer(**given, null_score_diff_threshold=-1e6)["answer"] == ""


def test_answers_are_ranked_as_by_hand(tiny_tokenizer):
    """Start plus end over all pairs of all windows, with a maximum length."""
    rng = np.random.default_rng(0)
    windows = question_windows(["of"], [CONTEXT], tiny_tokenizer, max_seq_len=16, doc_stride=4)
    windows = [(window, rng.normal(size=(2, len(window.offsets))).astype(np.float32)) for window in windows]
    expected = {}
    for window, (start, end) in windows:
        text = np.flatnonzero(window.in_text)
        for i in text:
            for j in text:
                if 0 <= j - i < 3:
                    span = window.offsets[i, 0], window.offsets[j, 1]
                    expected[span] = max(expected.get(span, -np.inf), np.float64(start[i]) + end[j])
    spans, scores = answer_scores(windows, 3)
    assert {tuple(span) for span in spans.tolist()} == set(expected)
    for span, score in zip(spans.tolist(), scores, strict=True):
        assert abs(score - expected[tuple(span)]) < 1e-6
    best = rank_answers(CONTEXT, windows, 1, 3, False, 0.0)[0]
    assert (best["start"], best["end"]) == max(expected, key=expected.get)
    first, *others = rank_answers(CONTEXT, windows, 10_000, 3, True, 0.0)
    (null,) = (one["score"] for one in others if not one["answer"])
    lowest = min(start[0] + end[0] for _, (start, end) in windows)
    assert np.log(null / first["score"]) == pytest.approx(lowest - max(expected.values()), abs=0.1)


def test_a_stock_model_answers_too(backbone_config, tiny_tokenizer, tmp_path):
    torch.manual_seed(0)
    BertForQuestionAnswering(backbone_config("bert")).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    answer = pipeline("extractive-qa", model=str(tmp_path))
    assert type(answer) is ExtractiveQAPipeline
    assert answer(question=QUESTION, context=CONTEXT)["answer"] in CONTEXT


@pytest.mark.nightly
def test_the_pipeline_finds_the_trained_answers(tiny_hypernet, tiny_tokenizer, tmp_path):
    """A model trained on two answers and one question without an answer, opened from a checkpoint."""
    contexts = ["the graph of the network", "learning is in the cut", "and networks for cuts"]
    answers = [{"text": ["network"], "answer_start": [17]}, {"text": ["learning"], "answer_start": [0]}]
    answers.append({"text": [], "answer_start": []})
    batch = {"question": ["graph", "cut", "of"], "context": contexts, "answers": answers}
    model = tiny_hypernet("answers").train()
    rows = as_rows(tokenize_questions(batch, tiny_tokenizer, doc_stride=8))
    inputs = DataCollatorForTextPairs(tiny_tokenizer)(rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(100):
        optimizer.zero_grad()
        model(**inputs).loss.backward()
        optimizer.step()
    pipeline("extractive-qa", model=model.eval(), tokenizer=tiny_tokenizer).save_pretrained(tmp_path)
    assert type(AutoModelForQuestionAnswering.from_pretrained(tmp_path)) is type(model)
    answer = pipeline("extractive-qa", model=str(tmp_path))
    examples = [{"question": q, "context": c} for q, c in zip(batch["question"], contexts, strict=True)]
    actual = answer(examples, handle_impossible_answer=True)
    assert [one["answer"] for one in actual] == ["network", "learning", ""]
    assert min(one["score"] for one in actual) > 0.5


@pytest.mark.parametrize("context", ["\u200b\0", "\u200b", "\0"])
def test_a_context_without_visible_characters_has_no_answer(context, answer):
    seen = {"question": QUESTION, "context": "the graph cut"}
    for options in ({}, {"handle_impossible_answer": True}):
        assert answer(question=QUESTION, context=context, **options) == NOTHING
        results = answer([seen, {"question": QUESTION, "context": context}, seen], **options)
        assert results[1] == NOTHING and results[0] == results[2] == answer(seen, **options) != NOTHING
    assert answer(question=QUESTION, context=context, top_k=3) == [NOTHING]
