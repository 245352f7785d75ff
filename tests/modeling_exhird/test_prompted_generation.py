"""Keyphrases of stock decoders: greedy search against a slow one, candidates, and what the pipeline returns."""

import copy
import logging
import re
from functools import partial
from unittest.mock import patch

import pytest
import torch
from transformers import pipeline

import lexperts  # noqa: F401  (registers the pipelines)
from modeling_exhird import generation_exhird, prompted_generation_exhird
from modeling_exhird.generation_exhird import Document
from modeling_exhird.pipeline_keyphrase_generation import make_generator
from modeling_exhird.prompted_generation_exhird import score_phrases

from .conftest import PAIRS, check_places, generate_keyphrases, tiny_exhird, word_tokenizer
from .llamas import BACKBONES, fitted, llama_tokenizer, prompt_format, tiny_llama

PHRASES = ["graph cuts", "maximum flow", "trees", "image segmentation of an image", "x"]


@torch.no_grad()
def slow_search(model, prompt, max_phrases=5, max_tokens_per_phrase=12, exclusion_window=1, min_phrases=0):
    """The phrases of one prompt, a token and a whole forward pass at a time: ids and log P of each."""
    written = prompt_format(model)
    ends, answer, phrases = written.ends, [], []
    while len(phrases) < max_phrases:
        ids, total = [], 0.0
        while not ids or ids[-1] not in ends:
            if len(ids) == max_tokens_per_phrase:
                ids.append(written.separator)
                break
            log_p = model(torch.tensor([prompt + answer + ids])).logits[0, -1].log_softmax(-1)
            if not ids:
                first = 0 if exclusion_window < 0 else len(phrases) - min(exclusion_window, len(phrases))
                log_p[[phrase[0][0] for phrase in phrases[first:]]] = -torch.inf
            at_ends, limited = log_p[ends].logsumexp(0), log_p.clone()
            if len(phrases) < min_phrases - (len(ids) > 0):
                limited[written.stops] = -torch.inf
            ids.append(int(limited.argmax()))
            total += float(at_ends if ids[-1] in ends else log_p[ids[-1]])
        answer += ids
        phrases.append((ids, total))
        if ids[-1] in written.stops:
            break
    return phrases


SEARCHES = [
    {"exclusion_window": 0},
    {"exclusion_window": 3, "max_tokens_per_phrase": 2},
    {"exclusion_window": -1, "max_phrases": 9, "max_tokens_per_phrase": 3},
    {"min_phrases": 4, "exclusion_window": 0},
    {"max_phrases": 2, "max_tokens_per_phrase": 1, "min_phrases": 2},
]


@pytest.mark.parametrize("options", SEARCHES, ids=str)
@pytest.mark.parametrize("trained", [True, False])
def test_phrases_and_scores_are_those_of_a_slow_search(trained, options):
    """In a batch of prompts of unlike lengths, whose answers end after unlike numbers of tokens."""
    model, compared = fitted() if trained else tiny_llama(), 0
    generator = make_generator(model, llama_tokenizer(), **options)
    sources = generator.encode([Document(d["title"], d["text"], None) for d in PAIRS])
    for source, found in zip(sources, generator.generate_batch(sources), strict=True):
        expected = slow_search(model, source.input_ids, **options)
        ends = set(generator.format.ends)
        decode = partial(llama_tokenizer().decode, skip_special_tokens=True)
        texts = [(decode([i for i in ids if i not in ends]), log_p) for ids, log_p in expected]
        spoken = [(phrase.text.split(), phrase.log_p) for phrase in found]
        kept = [(part.split(), log_p) for text, log_p in texts for part in re.split("[;|]", text)]
        kept = [(text, log_p) for text, log_p in kept if text in [each for each, _ in spoken]]  # others have no word
        assert [text for text, _ in spoken] == [text for text, _ in kept]
        assert [log_p for _, log_p in spoken] == pytest.approx([log_p for _, log_p in kept], abs=1e-3)
        compared += len(spoken)
    assert compared >= 4


def generate(documents, **options):
    return generate_keyphrases(fitted(), llama_tokenizer(), documents, **options)


def without_scores(phrases):
    return [{name: value for name, value in phrase.items() if name != "score"} for phrase in phrases]


@pytest.mark.parametrize("options", [{}, {"min_phrases": 4}])
def test_the_pipeline_finds_phrases_with_offsets_and_scores(options):
    results = generate(PAIRS, **options)
    assert {phrase["present"] for phrases in results for phrase in phrases} == {True, False}
    for document, phrases in zip(PAIRS, results, strict=True):
        check_places(document, phrases)
        assert without_scores(generate(document, **options)) == without_scores(phrases)
    assert generate("", **options) == generate("...", **options) == []


def test_a_saved_pipeline_is_a_stock_model(tmp_path):
    pipeline("keyphrase-generation", model=fitted(), tokenizer=llama_tokenizer()).save_pretrained(tmp_path)
    opened = pipeline("keyphrase-generation", model=str(tmp_path))
    assert type(opened.model) is type(fitted())
    for found, expected in zip(opened(PAIRS), generate(PAIRS), strict=True):
        assert without_scores(found) == without_scores(expected)


def choose(texts: list[str], document: str) -> list[dict]:
    """The keyphrases of an answer."""
    generator, ids = make_generator(fitted(), llama_tokenizer()), llama_tokenizer()("".join(texts))["input_ids"]
    read = Document(None, document, None)
    (source,) = generator.encode([read])
    return generator.choose(generator.split(ids, [-1.0] * len(ids)), source, read)


@pytest.mark.parametrize(
    "answer, text, expected",
    [
        ("graph cut ; graph cuts ; ... ; ; 12 networks | tides</s>", "Graph cuts of 3 networks", ["Graph cuts", "12 networks-", "tides-"]),
        ("ref work; ref workbreak|tides ;", "Rebase", ["ref work-", "ref workbreak-", "tides-"]),  # not the marks
        ("3 network ;", "Graph cuts of 3 networks", ["3 networks"]),
        ("c++ ; c# ; at&t ; c", "Does (c++11) need AT&T in C++?", ["C++", "c#-", "AT&T", "c"]),
    ],
)  # fmt: skip
def test_an_answer_is_divided_and_duplicates_by_stems_are_dropped(answer, text, expected):
    """Signs belong to a phrase, and so do numbers; phrases without a letter or digit are dropped. -: absent."""
    found = choose([f" {answer}"], text)
    assert [phrase["keyphrase"] + "-" * (not phrase["present"]) for phrase in found] == expected


# ---- candidates


def scored_alone(model, prompt, ids):
    """log P of one phrase, of a forward pass over it alone."""
    with torch.no_grad():
        log_p = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 :].log_softmax(-1)
    at_ends = log_p[len(ids), prompt_format(model).ends].logsumexp(0)
    return (log_p[torch.arange(len(ids)), torch.tensor(ids)].sum() + at_ends).item()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", BACKBONES)
def test_phrases_have_the_probability_that_they_have_alone(kind, attention, monkeypatch):
    model = tiny_llama(kind)
    model.set_attn_implementation(attention)
    written, absent = prompt_format(model), [False, True, True, False, True]
    ids = written.phrase_ids(PHRASES)
    (prompt,) = (read.input_ids for read in written.encode([("Graph cuts", PAIRS[0]["text"])], [128]))
    contexts = [[*prompt, written.absent] if is_absent else prompt for is_absent in absent]
    expected = [scored_alone(model, *both) for both in zip(contexts, ids, strict=True)]
    for limit in (512, 7):  # of tokens in one pass
        monkeypatch.setattr(prompted_generation_exhird, "MAX_TOKENS", limit)
        assert score_phrases(model, written, prompt, ids, absent) == pytest.approx(expected, rel=1e-4)


def test_candidates_compete_with_generated_phrases():
    given, compared = [document | {"candidates": [*PHRASES, "Graph  cut", "...", ""]} for document in PAIRS], 0
    for document, ranked, plain in zip(given, generate(given), generate(PAIRS), strict=True):
        found = [phrase["keyphrase"] for phrase in ranked]
        assert {phrase["keyphrase"] for phrase in plain} <= set(found) and "" not in found
        assert sum(phrase.lower().startswith("graph cut") for phrase in found) <= 1  # equal by stems
        scores = [phrase["score"] for phrase in ranked]
        assert scores == sorted(scores, reverse=True) and scores[0] > scores[-1]
        check_places(document, ranked)
        assert generate(document, num_keyphrases=2) == ranked[:2]  # alone as in a batch
        if plain and plain[0]["present"]:  # the first generated phrase has the score of the search
            (same,) = [phrase for phrase in ranked if phrase["keyphrase"] == plain[0]["keyphrase"]]
            assert same["score"] == pytest.approx(plain[0]["score"], rel=1e-3)
            compared += 1
    assert compared
    assert generate({"text": "", "candidates": PHRASES}) == []
    assert generate(PAIRS[0] | {"candidates": []})  # the generated ones, ranked


def test_candidates_that_differ_in_their_signs_are_different():
    names = ["C++", "c++ ", "C#", "C", "C#  developer; tides"]
    document = {"title": "Lists of C#", "text": "How to call a C# developer from Python?", "candidates": names}
    found = {phrase["keyphrase"]: phrase for phrase in generate(document)}
    assert {"C++", "C#", "C", "C# developer", "tides"} <= set(found) and "c++" not in found
    assert not found["C++"]["present"] and found["C# developer"]["present"]
    assert (found["C#"]["field"], found["C#"]["start"], found["C#"]["end"]) == ("title", 9, 11)


def test_what_is_left_out_is_said(caplog):
    logging.getLogger("transformers").propagate = True
    found = generate(PAIRS[0] | {"candidates": [" ".join(PAIRS[0]["text"].split()[:12]), "trees", "銀行"]})
    assert found == generate(PAIRS[0] | {"candidates": ["trees"]})
    generate("zeta " * 400)
    for part in ("max_tokens_per_phrase=12", "'銀行'", "1 of 1 documents", "max_source_length=128"):
        assert part in caplog.text


def test_a_known_keyphrase_in_the_title_is_a_candidate():
    model = copy.deepcopy(fitted())
    known = "graph; C;c#; graph cuts; tides; flow"
    model.config.keyphrase_generation = model.config.keyphrase_generation | {"known_keyphrases": known}
    document = {"title": "Tides of C++ and C# in graph cuts", "text": PAIRS[0]["text"]}
    with patch.object(generation_exhird, "LEAST_SCORE", 0.0):
        found, plain = generate_keyphrases(model, llama_tokenizer(), document), generate(document)
    names = [phrase["keyphrase"] for phrase in found]
    assert {"Tides", "C#"} <= set(names) and not {"C", "flow"} & set(names)
    assert found[: len(plain)] == plain  # the generated ones, as ever
    check_places(document, found)
    with patch.object(generation_exhird, "LEAST_SCORE", 1.0):
        assert generate_keyphrases(model, llama_tokenizer(), document) == plain
    assert generate_keyphrases(model, llama_tokenizer(), document["text"]) == generate(document["text"])


GERMAN = "Wie kann ich eine Datei jeden Abend umbenennen? Der Dienst schreibt in eine Datei."


def test_what_is_hardly_a_text_or_in_another_language_is_reported(caplog):
    logging.getLogger("transformers").propagate = True
    model = copy.deepcopy(fitted())
    model.config.keyphrase_generation = {"frequent_words": "the of a", "max_phrases": 1}
    encoder, text = (tiny_exhird("bigru"), word_tokenizer()), "the network flow of a deep graph learns languages"
    for parts in ((model, llama_tokenizer()), encoder):
        caplog.clear()
        for fine in (text, "zeta omega kappa", "", "😀"):
            generate_keyphrases(*parts, fine)
        assert not caplog.records
        generate_keyphrases(*parts, [text, "Hello", "12345", GERMAN])
        assert "3 of 4 documents" in caplog.text and "'Hello'" in caplog.text


def test_an_answer_that_goes_in_circles_is_left_out():
    assert [phrase["keyphrase"] for phrase in choose([" a tree a tree a tree ; log of a log"], "Graph")] == [
        "log of a log"
    ]
