"""pipeline("keyphrase-generation"): documents of any form and length in, keyphrases with their places out."""

import math
from unittest.mock import patch

import pytest
import torch

from modeling_exhird.pipeline_keyphrase_generation import make_generator
from modeling_exhird.search_exhird import ExhirdGenerateOutput

from .conftest import (
    DOCUMENTS,
    PAIRS,
    check_places,
    copying,
    each_kind,
    generate_keyphrases,
    tiny_exhird,
    word_tokenizer,
)

TEXTS = DOCUMENTS["text"]


def generate(documents, kind="bigru", side="right", **options):
    return generate_keyphrases(copying(kind), word_tokenizer(side), documents, **options)


def close(found, expected):
    """The same phrases at the same places; scores as far as float32 agrees about other batches."""
    for own, other in zip(found, expected, strict=True):
        assert own == [{**phrase, "score": pytest.approx(phrase["score"], rel=1e-3)} for phrase in other]


@each_kind
def test_keyphrases_have_their_offsets_whatever_the_batch(kind):
    results = generate(PAIRS, kind)
    for document, found in zip(PAIRS, results, strict=True):
        check_places(document, found)
        stems = [tuple(phrase["keyphrase"].lower().split()) for phrase in found]
        assert found and len(set(stems)) == len(stems)
    assert sum(phrase["present"] for found in results for phrase in found) > 2
    close(generate(PAIRS[::-1], kind, batch_size=3)[::-1], results)
    close(generate(PAIRS, kind, "left", batch_size=1), results)
    close(generate([PAIRS[0], {"title": "", "text": TEXTS[1]}, TEXTS[3]], kind), [results[i] for i in (0, 1, 3)])


ROWS = [
    "<p_start> graph cuts ;",
    "<a_start> graph cut ;",  # the same by its stems
    "<p_start> zeta potentials ;",  # of words that the vocabulary lacks
    "<a_start> <unk> graph ;",
    "<p_start> ;",
    "<p_start> , ;",
    "<a_start> cuts zeta ;",  # over the end of the title: not there
    "images <a_start> by flow",  # a place is what it is, whatever the start says; no end
    "<a_start> machine translation ;",
    "<a_start> <digit> graph ;",  # absent, with an unknown number
    "</s>",
]


def test_rows_become_phrases_each_once_with_its_own_place():
    tokenizer, model = word_tokenizer(), copying()
    document = PAIRS[0]
    text = document["text"]
    ids = {word: len(tokenizer) + k for k, word in enumerate(tokenizer.encode_source(text, "Graph cuts").oov_words)}
    ids |= tokenizer.get_vocab()
    rows = [[ids.get(word, ids["<unk>"]) for word in row.split()] for row in ROWS]
    rows = torch.tensor([[row + [1] * (6 - len(row)) for row in rows]])

    def written(sign, **options):
        output = ExhirdGenerateOutput(rows, sign * torch.arange(11.0)[None])
        with patch.object(model, "generate_phrases", return_value=output):
            return next(make_generator(model, tokenizer, **options).stream([document]))

    found = written(-1)
    assert [(p["keyphrase"], p["present"], p.get("field"), p["start"], p["end"]) for p in found] == [
        ("Graph cuts", True, "title", 0, 10),
        ("Zeta potentials", True, "text", 0, 15),
        ("cuts zeta", False, None, None, None),
        ("images by flow", True, "text", text.index("images"), text.index(" in a")),
        ("machine translation", False, None, None, None),
    ]
    assert [p["score"] for p in found] == [math.exp(-i) for i in (0, 2, 6, 7, 8)]
    assert [p["keyphrase"] for p in written(1, num_keyphrases=2)] == ["images by flow", "machine translation"]
    raw = written(-1, raw=True)  # with repeats, `<unk>` and punctuation, which evaluation treats in its own ways
    assert (
        raw[:4] == [["graph", "cuts"], ["graph", "cut"], ["zeta", "potentials"], ["<unk>", "graph"]] and len(raw) == 9
    )


def test_the_most_probable_phrases_are_kept_in_their_order():
    every = generate(PAIRS[0])
    assert len(every) > 3
    for n in (1, 3, 99):
        best = sorted((phrase["score"] for phrase in every), reverse=True)[:n]
        assert [phrase for phrase in every if phrase["score"] in best] == generate(PAIRS[0], num_keyphrases=n)
    assert len(generate(PAIRS[0], max_phrases=2)) <= 2


@each_kind
def test_texts_without_words_have_no_keyphrases_and_do_not_change_others(kind):
    empty = ["", " \n\t", "[so] {so}", "\ud800", "—", "😀", {"title": "", "text": ""}, {"title": None, "text": "!"}]
    found = generate([*empty[:4], TEXTS[0], *empty[4:]], kind)
    assert found[:4] == [[]] * 4 and found[5:] == [[]] * 4
    close([found[4]], [generate(TEXTS[0], kind)])
    for text in ("...", "12 13, 14.5", "3 < 4"):  # signs and numbers alone
        for phrase in generate(text, kind):
            assert any(sign.isalnum() for sign in phrase["keyphrase"])


@each_kind  # untrained: they write words in place of a phrase's start
def test_no_phrase_has_more_words_than_the_limit(kind):
    for limit in (1, 2):
        found = generate_keyphrases(tiny_exhird(kind), word_tokenizer(), TEXTS, max_words_per_phrase=limit)
        assert max(len(p["keyphrase"].split()) for row in found for p in row) == limit


def test_a_model_in_training_is_put_back_to_it():
    model = tiny_exhird("transformer", dropout=0.5)
    expected = generate_keyphrases(model, word_tokenizer(), TEXTS)
    model.train()
    model.decoder.eval()
    assert generate_keyphrases(model.train(), word_tokenizer(), TEXTS) == expected  # no dropout
    model.decoder.eval()
    with pytest.raises(ValueError, match="max_phrases=0"):
        generate_keyphrases(model, word_tokenizer(), TEXTS, max_phrases=0)
    assert model.training and model.encoder.word_encoder.layers[0].dropout.training and not model.decoder.training
