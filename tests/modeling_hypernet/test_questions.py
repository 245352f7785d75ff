"""Windows of questions and texts, positions of answers, and the pipeline."""

import logging

import numpy as np
import pytest
import torch
from transformers import AutoModelForQuestionAnswering, BertForQuestionAnswering, pipeline

from modeling_hypernet import DataCollatorForTextPairs, ExtractiveQAPipeline, tokenize_pairs, tokenize_questions
from modeling_hypernet.data_hypernet import answer_tokens, question_windows
from modeling_hypernet.pipeline_extractive_qa import answer_scores, rank_answers

QUESTION = "is the graph cut"
CONTEXT = "the network of graph cuts is learning in the network and the graph " * 6
LONG = {"max_seq_len": 32, "doc_stride": 8}


@pytest.fixture(scope="module")
def answer(tiny_hypernet, tiny_tokenizer):
    return pipeline("extractive-qa", model=tiny_hypernet("answers"), tokenizer=tiny_tokenizer)


def test_windows_cover_the_text_and_each_has_the_question(tiny_tokenizer):
    windows = question_windows([QUESTION, "of"], [CONTEXT, "the graph"], tiny_tokenizer, **LONG)
    assert [w.example for w in windows][-1] == 1 and len(windows) > 4
    question = tiny_tokenizer(QUESTION, add_special_tokens=False)["input_ids"]
    seen = set()
    for window in windows[:-1]:
        assert len(window.offsets) <= 32 and window.inputs["input_ids"][1 : 1 + len(question)] == question
        seen.update(map(tuple, window.offsets[window.in_text].tolist()))
    words = tiny_tokenizer(CONTEXT, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    assert seen == set(words)


def test_answers_are_at_their_tokens_or_at_the_first(tiny_tokenizer, caplog):
    start = CONTEXT.index("learning")
    batch = {
        "id": ["a", "b", "c"],
        "question": [QUESTION] * 3,
        "context": [CONTEXT] * 3,
        "answers": [
            {"text": ["learning in"], "answer_start": [start]},
            {"text": [], "answer_start": []},
            {"text": [CONTEXT.strip()], "answer_start": [0]},
        ],
    }
    logger = logging.getLogger("modeling_hypernet")
    logger.addHandler(caplog.handler)
    rows = tokenize_questions(batch, tiny_tokenizer, **LONG)
    logger.removeHandler(caplog.handler)
    assert "1 of 3 answers" in caplog.text
    windows = question_windows(batch["question"], batch["context"], tiny_tokenizer, **LONG)
    complete = 0
    for window, first, last in zip(windows, rows["start_positions"], rows["end_positions"], strict=True):
        if not last:
            assert first == 0
            continue
        complete += 1
        assert window.example == 0
        assert CONTEXT[window.offsets[first, 0] : window.offsets[last, 1]] == "learning in"
    assert complete >= 1
    assert answer_tokens(windows[0], (10_000, 10_004)) == (0, 0)


def test_an_answer_that_is_not_at_its_start_is_named(tiny_tokenizer):
    batch = {
        "id": ["q7"],
        "question": ["of"],
        "context": ["the graph"],
        "answers": [{"text": ["graph"], "answer_start": [3]}],
    }
    with pytest.raises(ValueError, match="q7:.*'graph'.*answer_start=3.*' grap'"):
        tokenize_questions(batch, tiny_tokenizer)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"on_long": "error", **LONG}, "example 0 .*max_seq_len=32.*on_long='window'"),
        ({"on_long": "cut"}, "on_long='cut'"),
        ({"max_seq_len": 32, "doc_stride": 30}, "max_seq_len=32 leaves 25 tokens.*question of 4.*doc_stride=30"),
        ({"top_k": 0}, "top_k=0"),
    ],
)
def test_invalid_options_are_named(options, message, answer):
    with pytest.raises(ValueError, match=message):
        answer(question=QUESTION, context=CONTEXT, **options)


def test_invalid_inputs_are_named(answer):
    for inputs, message in (
        ("text", "{'question': ..., 'context': ...}.*'text' .str"),
        ([{"question": "of"}], "Example 0 "),
        ([{"question": "of", "context": 3}], "context of example 0 is a int"),
    ):
        with pytest.raises(TypeError, match=message):
            answer(inputs)
    with pytest.raises(ValueError, match="context of example 1"):
        answer([{"question": "of", "context": "the"}, {"question": "of", "context": " "}])
    with pytest.raises(TypeError, match="'tok_k'.*top_k"):
        answer(question="of", context="the", tok_k=3)
    with pytest.raises(TypeError, match="question=5 must be a string, or a list"):
        answer(question=5, context="the")
    with pytest.raises(TypeError, match="question= and context="):
        answer(question="of")


def test_an_answer_is_a_piece_of_its_text_alone_and_in_a_batch(answer):
    examples = [{"question": QUESTION, "context": CONTEXT}, {"question": "of", "context": "the graph cut"}] * 3
    together = answer(examples, batch_size=4, **LONG)
    for example, actual in zip(examples, together, strict=True):
        assert actual["answer"] == example["context"][actual["start"] : actual["end"]] != ""
        alone = answer(**example, **LONG)
        assert alone["answer"] == actual["answer"] and abs(alone["score"] - actual["score"]) < 1e-5
    assert [actual["answer"] for actual in answer(iter(examples), **LONG)] == [actual["answer"] for actual in together]
    assert answer(question=["of", "is"], context="the graph cut")[0] == together[1]


def test_scores_are_probabilities_and_no_answer_is_one_of_them(answer):
    actual = answer(question="of", context="the graph cut", top_k=100, handle_impossible_answer=True)
    assert abs(sum(one["score"] for one in actual) - 1) < 1e-4
    assert len(actual) == 3 + 2 + 1 + 1 and sum(one["answer"] == "" for one in actual) == 1
    assert actual == sorted(actual, key=lambda one: -one["score"])
    last = answer(
        question="of", context="the graph cut", handle_impossible_answer=True, null_score_diff_threshold=1e6, top_k=100
    )[-1]
    assert last["answer"] == ""
    assert (
        answer(question="of", context="the graph cut", handle_impossible_answer=True, null_score_diff_threshold=-1e6)[
            "answer"
        ]
        == ""
    )


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


def test_a_stock_model_answers_too(backbone_config, tiny_tokenizer, tmp_path):
    torch.manual_seed(0)
    BertForQuestionAnswering(backbone_config("bert")).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    answer = pipeline("extractive-qa", model=str(tmp_path))
    assert type(answer) is ExtractiveQAPipeline
    assert answer(question=QUESTION, context=CONTEXT)["answer"] in CONTEXT


def test_the_pipeline_finds_the_trained_answers(tiny_hypernet, tiny_tokenizer, tmp_path):
    """A model trained on two answers and one question without an answer, opened from a checkpoint."""
    contexts = ["the graph of the network", "learning is in the cut", "and networks for cuts"]
    batch = {
        "question": ["graph", "cut", "of"],
        "context": contexts,
        "answers": [
            {"text": ["network"], "answer_start": [17]},
            {"text": ["learning"], "answer_start": [0]},
            {"text": [], "answer_start": []},
        ],
    }
    model = tiny_hypernet("answers").train()
    encoded = tokenize_questions(batch, tiny_tokenizer)
    rows = [dict(zip(encoded, values, strict=True)) for values in zip(*encoded.values(), strict=True)]
    inputs = DataCollatorForTextPairs(tiny_tokenizer)(rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(100):
        optimizer.zero_grad()
        model(**inputs).loss.backward()
        optimizer.step()
    pipeline("extractive-qa", model=model.eval(), tokenizer=tiny_tokenizer).save_pretrained(tmp_path)
    assert type(AutoModelForQuestionAnswering.from_pretrained(tmp_path)) is type(model)
    answer = pipeline("extractive-qa", model=str(tmp_path))
    actual = answer(question=batch["question"], context=contexts, handle_impossible_answer=True)
    assert [one["answer"] for one in actual] == ["network", "learning", ""]
    assert min(one["score"] for one in actual) > 0.5


NOTHING = {"score": 1.0, "start": 0, "end": 0, "answer": ""}


@pytest.mark.parametrize("context", ["\u200b\0", "\u200b", "\0"])
def test_a_context_without_visible_characters_has_no_answer(context, answer):
    seen = {"question": QUESTION, "context": "the graph cut"}
    for options in ({}, {"handle_impossible_answer": True}):
        assert answer(question=QUESTION, context=context, **options) == NOTHING
        results = answer([seen, {"question": QUESTION, "context": context}, seen], **options)
        assert results[1] == NOTHING and results[0] == results[2] == answer(seen, **options) != NOTHING
    assert answer(question=QUESTION, context=context, top_k=3) == [NOTHING]


def test_a_lone_surrogate_changes_no_offset(answer):
    given = {"question": QUESTION, "context": "a \ud800 graph cut"}
    expected = answer({**given, "context": "a \ufffd graph cut"}, top_k=3)
    results = answer(given, top_k=3)
    assert [(a["start"], a["end"], a["score"]) for a in results] == [
        (a["start"], a["end"], a["score"]) for a in expected
    ]
    assert all(given["context"][a["start"] : a["end"]] == a["answer"] for a in results)
    assert answer({**given, "question": "is \ud800"})["score"] > 0


def test_an_invisible_text_is_not_replaced_by_its_title(tiny_tokenizer):
    with pytest.raises(ValueError, match="no tokens"):
        tokenize_pairs(["graph"], ["\u200b"], tiny_tokenizer)
    assert tokenize_pairs(["graph \ud800"], ["cut \ud800"], tiny_tokenizer)["input_ids"]


def test_scores_that_are_nan_are_an_error(tiny_hypernet, tiny_tokenizer):
    model = tiny_hypernet("answers")
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN. Check its weights"):
        pipeline("extractive-qa", model=model, tokenizer=tiny_tokenizer)({"question": QUESTION, "context": CONTEXT})
