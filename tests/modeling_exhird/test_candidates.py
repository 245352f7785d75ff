"""Given phrases beside generated ones: their probabilities, their order, and what is refused."""

import copy
import math

import pytest
import torch
from transformers import pipeline

from modeling_exhird import candidates_exhird
from modeling_exhird.candidates_exhird import score_phrases
from modeling_exhird.causal_data_exhird import PLAIN

from .causal import BACKBONES, causal_tokenizer, fit, fitted, tiny_causal
from .test_causal_data import documents, without_scores
from .test_causal_model import prompts

PHRASES = ["graph cuts", "maximum flow", "trees", "image segmentation of an image", "x"]


def token_ids(phrases=PHRASES):
    return causal_tokenizer()([f" {phrase}" for phrase in phrases], **PLAIN)["input_ids"]


def scored_alone(model, prompt, ids):
    """log P of one phrase, of a forward pass over it alone."""
    ends = [*model.config.marks, *model.config.ends]
    with torch.no_grad():
        log_p = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 :].log_softmax(-1)
    return (log_p[torch.arange(len(ids)), torch.tensor(ids)].sum() + log_p[len(ids), ends].logsumexp(0)).item()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", BACKBONES)
def test_phrases_have_the_probability_that_they_have_alone(kind, attention, monkeypatch):
    model, ids = tiny_causal(kind), token_ids()
    model.set_attn_implementation(attention)
    absent, mark = [False, True, True, False, True], model.config.absent_token_id
    for limit in (512, 7):  # of tokens in one pass
        monkeypatch.setattr(candidates_exhird, "MAX_TOKENS", limit)
        for prompt in prompts():
            found = score_phrases(model, prompt, ids, absent)
            contexts = [[*prompt, mark] if is_absent else prompt for is_absent in absent]
            assert found == pytest.approx(
                [scored_alone(model, *both) for both in zip(contexts, ids, strict=True)], rel=1e-4
            )


def test_the_first_generated_phrase_has_the_score_of_the_search():
    model, compared = fitted(), 0
    generate = pipeline("keyphrase-generation", model=model, tokenizer=causal_tokenizer(), device="cpu")
    for document in documents():
        if not (phrases := generate(document)) or not phrases[0]["present"]:
            continue
        ranked = generate(document | {"candidates": PHRASES})
        (same,) = [phrase for phrase in ranked if phrase["keyphrase"] == phrases[0]["keyphrase"]]
        assert same["score"] == pytest.approx(phrases[0]["score"], rel=1e-3)
        compared += 1
    assert compared


@pytest.fixture(scope="module")
def generate():
    return pipeline("keyphrase-generation", model=fitted(), tokenizer=causal_tokenizer(), device="cpu")


def test_candidates_compete_with_generated_phrases(generate):
    given = [document | {"candidates": [*PHRASES, "Graph  cut", "...", ""]} for document in documents()]
    for document, ranked, plain in zip(given, generate(given), generate(documents()), strict=True):
        found = [phrase["keyphrase"] for phrase in ranked]
        assert {phrase["keyphrase"] for phrase in plain} <= set(found) and "" not in found
        assert sum(phrase.lower().startswith("graph cut") for phrase in found) <= 1  # equal by stems
        assert [phrase["score"] for phrase in ranked] == sorted((phrase["score"] for phrase in ranked), reverse=True)
        for phrase in ranked:
            assert 0 < phrase["score"] <= 1
            if phrase["present"]:
                assert document[phrase.get("field", "text")][phrase["start"] : phrase["end"]] == phrase["keyphrase"]
        assert generate(document) == ranked  # alone as in a batch
        assert generate(document, num_keyphrases=2) == ranked[:2]
        assert not math.isclose(ranked[0]["score"], ranked[-1]["score"])
    mixed = generate([given[0], documents()[0]])
    assert mixed[0] == generate(given[0]) and without_scores(mixed[1]) == without_scores(generate(documents()[0]))
    assert generate({"text": "", "candidates": PHRASES}) == []
    assert generate(documents()[0] | {"candidates": None}) == generate(documents()[0])
    assert generate(documents()[0] | {"candidates": []})  # the generated ones, ranked


def test_phrases_that_differ_in_their_signs_are_different(generate, caplog):
    names = ["C++", "c++ ", "C#", "C", "C#  developer", "銀行"]
    document = {"title": "Lists of C#", "text": "How to call a C# developer from Python?"}
    found = {phrase["keyphrase"]: phrase for phrase in generate(document | {"candidates": names})}
    assert {"C++", "C#", "C", "C# developer"} <= set(found) and "c++" not in found
    assert not found["C++"]["present"] and found["C# developer"]["present"]
    assert (found["C#"]["field"], found["C#"]["start"], found["C#"]["end"]) == ("title", 9, 11)
    developer = found["C# developer"]
    assert document[developer["field"]][developer["start"] : developer["end"]] == "C# developer"
    assert "A candidate without a Latin letter or a digit is left out: '銀行'" in caplog.text


def test_low_rank_models_score_as_merged_ones():
    model = fit(tiny_causal(adapter_rank=2), steps=3)
    prompt, ids, absent = prompts()[0], token_ids(), [False, True] * 2 + [True]
    scores = score_phrases(model, prompt, ids, absent)
    assert score_phrases(copy.deepcopy(model).merge_adapter(), prompt, ids, absent) == pytest.approx(scores, rel=1e-4)


def test_longer_phrases_than_the_model_writes_are_left_out_with_a_warning(generate, caplog):
    document, long = documents()[0], "graph " * 20
    found = generate(document | {"candidates": [long, "trees"]})
    assert found == generate(document | {"candidates": ["trees"]})
    assert "A phrase of more than max_tokens_per_phrase=12 tokens is left out: 'graph graph" in caplog.text
    assert generate(document | {"candidates": [long]})  # the generated ones


@pytest.mark.parametrize("given", ["graph cuts", [1], {"graph": 1}, [None]])
def test_other_candidates_are_named(generate, given):
    with pytest.raises(TypeError, match=r"Document 1 has candidates=.*Pass a list of phrases"):
        generate([documents()[0], documents()[0] | {"candidates": given}])


def test_what_cannot_score_says_so(tiny_exhird, tokenizer_for):
    encoder = pipeline("keyphrase-generation", model=tiny_exhird("bigru"), tokenizer=tokenizer_for("bigru"))
    with pytest.raises(ValueError, match="scores no candidates: only a pretrained decoder"):
        encoder({"text": "Graph cuts.", "candidates": ["graph"]})
    model = copy.deepcopy(fitted())
    model.config.text_config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="flash_attention_2.*'sdpa' or 'eager'"):
        score_phrases(model, prompts()[0], token_ids(), [True] * len(PHRASES))
