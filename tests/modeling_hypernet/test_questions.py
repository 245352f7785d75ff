"""Questions: windows, where answers stand in them, and the pipeline."""

import logging

import numpy as np
import pytest
import torch
from transformers import AutoModelForQuestionAnswering, BertForQuestionAnswering, pipeline

from modeling_hypernet import ExtractiveQAPipeline, HypernetCollator, encode_questions
from modeling_hypernet.pipeline_extractive_qa import answer_scores, rank_answers
from modeling_hypernet.questions_hypernet import answer_tokens, question_windows

QUESTION = "is the graph cut"
CONTEXT = "the network of graph cuts is learning in the network and the graph " * 6
LONG = {"max_length": 32, "stride": 8}


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


def test_answers_stand_at_their_tokens_or_at_the_first(tiny_tokenizer, caplog):
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
    rows = encode_questions(batch, tiny_tokenizer, **LONG)
    logger.removeHandler(caplog.handler)
    assert "1 of 3 answers stand whole in no window" in caplog.text
    windows = question_windows(batch["question"], batch["context"], tiny_tokenizer, **LONG)
    found = 0
    for window, first, last in zip(windows, rows["start_positions"], rows["end_positions"], strict=True):
        if not last:
            assert first == 0
            continue
        found += 1
        assert window.example == 0
        assert CONTEXT[window.offsets[first, 0] : window.offsets[last, 1]] == "learning in"
    assert found >= 1
    assert answer_tokens(windows[0], (10_000, 10_004)) == (0, 0)


def test_an_answer_that_is_not_at_its_place_is_named(tiny_tokenizer):
    batch = {
        "id": ["q7"],
        "question": ["of"],
        "context": ["the graph"],
        "answers": [{"text": ["graph"], "answer_start": [3]}],
    }
    with pytest.raises(ValueError, match="Example q7: the answer 'graph' does not stand at character 3 .* ' grap'"):
        encode_questions(batch, tiny_tokenizer)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"on_long": "error", **LONG}, "The text of example 0 .* is longer than a window of 32 tokens"),
        ({"on_long": "cut"}, "on_long='cut' is not known"),
        ({"max_length": 32, "stride": 30}, "max_length=32 leaves 25 tokens for the text beside a question of 4"),
        ({"top_k": 0}, "top_k=0: it must be 1 or more"),
    ],
)
def test_options_that_cannot_work_are_named(options, message, answer):
    with pytest.raises(ValueError, match=message):
        answer(question=QUESTION, context=CONTEXT, **options)


def test_inputs_that_cannot_work_are_named(answer):
    for inputs, message in (
        ("text", "reads {'question': ..., 'context': ...} or an iterable of them, not a str"),
        ([{"question": "of"}], "Example 0 has no question and context"),
        ([{"question": "of", "context": 3}], "The context of example 0 is a int, not a text"),
    ):
        with pytest.raises(TypeError, match=message):
            answer(inputs)
    with pytest.raises(ValueError, match="The context of example 1 is empty"):
        answer([{"question": "of", "context": "the"}, {"question": "of", "context": " "}])
    with pytest.raises(TypeError, match="got 'tok_k'"):
        answer(question="of", context="the", tok_k=3)
    with pytest.raises(TypeError, match="needs both question= and context="):
        answer(question="of")


def test_an_answer_is_a_piece_of_its_text_alone_and_in_a_batch(answer):
    examples = [{"question": QUESTION, "context": CONTEXT}, {"question": "of", "context": "the graph cut"}] * 3
    together = answer(examples, batch_size=4, **LONG)
    for example, found in zip(examples, together, strict=True):
        assert found["answer"] == example["context"][found["start"] : found["end"]] != ""
        alone = answer(**example, **LONG)
        assert alone["answer"] == found["answer"] and abs(alone["score"] - found["score"]) < 1e-5
    assert [found["answer"] for found in answer(iter(examples), **LONG)] == [found["answer"] for found in together]
    assert answer(question=["of", "is"], context="the graph cut")[0] == together[1]


def test_scores_are_probabilities_and_no_answer_is_one_of_them(answer):
    found = answer(question="of", context="the graph cut", top_k=100, handle_impossible_answer=True)
    assert abs(sum(one["score"] for one in found) - 1) < 1e-4
    assert len(found) == 3 + 2 + 1 + 1 and sum(one["answer"] == "" for one in found) == 1
    assert found == sorted(found, key=lambda one: -one["score"])
    last = answer(question="of", context="the graph cut", handle_impossible_answer=True, null_margin=1e6, top_k=100)[-1]
    assert last["answer"] == ""
    assert (
        answer(question="of", context="the graph cut", handle_impossible_answer=True, null_margin=-1e6)["answer"] == ""
    )


def test_answers_are_ranked_as_by_hand(tiny_tokenizer):
    """Start plus end over all pairs, windows together, at most so many tokens; no answer by its lowest sum."""
    rng = np.random.default_rng(0)
    windows = question_windows(["of"], [CONTEXT], tiny_tokenizer, max_length=16, stride=4)
    read = [(window, rng.normal(size=(2, len(window.offsets))).astype(np.float32)) for window in windows]
    expected = {}
    for window, (start, end) in read:
        text = np.flatnonzero(window.in_text)
        for i in text:
            for j in text:
                if 0 <= j - i < 3:
                    place = window.offsets[i, 0], window.offsets[j, 1]
                    expected[place] = max(expected.get(place, -np.inf), np.float64(start[i]) + end[j])
    places, scores = answer_scores(read, 3)
    assert {tuple(place) for place in places.tolist()} == set(expected)
    for place, score in zip(places.tolist(), scores, strict=True):
        assert abs(score - expected[tuple(place)]) < 1e-6
    best = rank_answers(CONTEXT, read, 1, 3, False, 0.0)[0]
    assert (best["start"], best["end"]) == max(expected, key=expected.get)


def test_a_stock_model_answers_too(backbone_config, tiny_tokenizer, tmp_path):
    torch.manual_seed(0)
    BertForQuestionAnswering(backbone_config("bert")).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    answer = pipeline("extractive-qa", model=str(tmp_path))
    assert type(answer) is ExtractiveQAPipeline
    assert answer(question=QUESTION, context=CONTEXT)["answer"] in CONTEXT


def test_the_pipeline_finds_what_training_taught(tiny_hypernet, tiny_tokenizer, tmp_path):
    """A model that learns two answers and one question without: the pipeline gives them back from a checkpoint."""
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
    encoded = encode_questions(batch, tiny_tokenizer)
    rows = [dict(zip(encoded, values, strict=True)) for values in zip(*encoded.values(), strict=True)]
    inputs = HypernetCollator(tiny_tokenizer)(rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(100):
        optimizer.zero_grad()
        model(**inputs).loss.backward()
        optimizer.step()
    pipeline("extractive-qa", model=model.eval(), tokenizer=tiny_tokenizer).save_pretrained(tmp_path)
    assert type(AutoModelForQuestionAnswering.from_pretrained(tmp_path)) is type(model)
    answer = pipeline("extractive-qa", model=str(tmp_path))
    found = answer(question=batch["question"], context=contexts, handle_impossible_answer=True)
    assert [one["answer"] for one in found] == ["network", "learning", ""]
    assert min(one["score"] for one in found) > 0.5
