"""pipeline("keyphrase-generation"): documents of any form and length in, keyphrases with their places out."""

import math

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, pipeline

from modeling_exhird.generation_exhird import KeyphraseGenerator
from modeling_exhird.pipeline_keyphrase_generation import make_generator
from modeling_exhird.search_exhird import ExhirdGenerateOutput

from .conftest import DOCUMENTS, each_kind, generate_keyphrases, tiny_exhird, word_tokenizer

TEXTS = DOCUMENTS["text"]
PAIRS = [{"title": title, "text": text} for title, text in zip(DOCUMENTS["title"], TEXTS, strict=True)]
KEYS = ["keyphrase", "present", "score", "start", "end"]


def copying(kind="bigru", **options):
    """A model that copies much, so that there are present phrases among its own."""
    model = tiny_exhird(kind, **{"initializer_range": 0.7, "exclusion_window": -1, **options})
    with torch.no_grad():
        model.generator.copy.bias.fill_(0.0)
        model.generator.vocabulary.bias[4] += 8.0
    return model


def generate_for(kind="bigru", side="right", **options):
    parts = {"model": copying(kind), "tokenizer": word_tokenizer(side)}
    return pipeline("keyphrase-generation", **parts, device="cpu", **options)


@pytest.fixture(scope="module")
def generate():
    return generate_for()


def close(found, expected):
    """The same phrases at the same places; scores as far as float32 agrees about other batches."""
    assert [[{**phrase, "score": 0} for phrase in own] for own in found] == [
        [{**phrase, "score": 0} for phrase in own] for own in expected
    ]
    for own, other in zip(found, expected, strict=True):
        for phrase, same in zip(own, other, strict=True):
            assert phrase["score"] == pytest.approx(same["score"], rel=1e-3)


@each_kind
def test_keyphrases_have_their_offsets(kind):
    generate, presents, fields = generate_for(kind), 0, set()
    for document, found in zip(PAIRS, generate(PAIRS), strict=True):
        assert found
        for phrase in found:
            assert list(phrase) == KEYS or (document["title"] and list(phrase) == [*KEYS, "field"])
            assert 0 < phrase["score"] <= 1 and phrase["keyphrase"]
            if phrase["present"]:
                field = phrase.get("field", "text")
                assert document[field][phrase["start"] : phrase["end"]] == phrase["keyphrase"]
                presents, fields = presents + 1, fields | {phrase.get("field")}
            else:
                assert (phrase["start"], phrase["end"]) == (None, None) and "field" not in phrase
        stems = [tuple(phrase["keyphrase"].lower().split()) for phrase in found]
        assert len(set(stems)) == len(stems)
    assert presents > 2 and {None} < fields
    for text, found in zip(TEXTS, generate(TEXTS), strict=True):
        assert all(list(phrase) == KEYS for phrase in found)
        assert all(text[p["start"] : p["end"]] == p["keyphrase"] for p in found if p["present"])


def test_rows_become_phrases_each_once_with_its_own_place(monkeypatch):
    tokenizer, model = word_tokenizer(), copying()
    title, text = DOCUMENTS["title"][0], TEXTS[0]
    ids = {word: len(tokenizer) + k for k, word in enumerate(tokenizer.encode_source(text, title).oov_words)}
    ids |= tokenizer.get_vocab()
    phrases = [
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
    rows = [[ids.get(word, ids["<unk>"]) for word in row.split()] for row in phrases]
    rows = torch.tensor([[row + [1] * (6 - len(row)) for row in rows]])

    def written(sign, **options):
        scores = sign * torch.arange(11.0)[None]
        monkeypatch.setattr(model, "generate_phrases", lambda **_: ExhirdGenerateOutput(rows, scores))
        return next(make_generator(model, tokenizer, **options).stream([{"title": title, "text": text}]))

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


def test_each_batch_is_progress():
    """Documents are sorted within sixteen batches: a bar that waited for their order would stand still for minutes."""
    steps: list[int] = []
    documents = [*PAIRS, "", *PAIRS]
    generator = KeyphraseGenerator(copying(), word_tokenizer(), batch_size=2)
    found = list(generator.stream(documents, steps.append))
    assert len(found) == sum(steps) == len(documents)
    assert steps == [1, *[2] * (len(PAIRS))]  # first those that have no words


def test_raw_phrases_are_unfiltered():
    """With repeats, `<unk>` and punctuation, which evaluation conventions treat in their own ways."""
    tokenizer, documents = word_tokenizer(), [*PAIRS, ""]
    kept = list(KeyphraseGenerator(copying(), tokenizer).stream(documents))
    raw = list(KeyphraseGenerator(copying(), tokenizer, raw=True).stream(documents))
    assert [len(phrases) for phrases in raw] == [5, 5, 5, 5, 0] and sum(map(len, kept)) <= 20
    for own, every in zip(kept, raw, strict=True):
        every = list(
            dict.fromkeys(" ".join(words[:4]) for words in every)
        )  # a start may be a word, beyond the limit of 4
        assert [phrase["keyphrase"] for phrase in own if not phrase["present"]] == [
            phrase for phrase in every if phrase in {p["keyphrase"] for p in own if not p["present"]}
        ]


def test_documents_may_be_texts_or_have_titles(generate):
    expected = generate(PAIRS)
    assert generate([]) == [] and generate([{"text": text} for text in TEXTS]) == generate(TEXTS) != expected
    close(generate([PAIRS[0], TEXTS[1]]), [expected[0], generate(TEXTS[1])])
    found = generate({"title": "Zeta networks", "text": ""})
    assert found and all(p["field"] == "title" for p in found if p["present"])


def test_the_size_of_batches_and_the_order_change_nothing(generate):
    many = PAIRS * 3
    expected = generate(many)
    for options in ({"batch_size": 1}, {"batch_size": 5}, {"batch_size": 100}, {"num_workers": 0}):
        close(generate(many, **options), expected)
    close(generate(many[::-1]), expected[::-1])
    close(generate_for(batch_size=2, num_keyphrases=1)(many), [one[:1] for one in generate(many, num_keyphrases=1)])


@each_kind
def test_a_tokenizer_that_pads_on_the_left_changes_nothing(kind):
    close(generate_for(kind, "left")(PAIRS), generate_for(kind)(PAIRS))


def test_the_most_probable_phrases_are_kept_in_their_order(generate):
    every = generate(PAIRS[0])
    assert len(every) > 3
    for n in (1, 2, 3):
        found = generate(PAIRS[0], num_keyphrases=n)
        best = sorted((phrase["score"] for phrase in every), reverse=True)[:n]
        assert [phrase for phrase in every if phrase["score"] in best] == found and len(found) == n
    assert generate(PAIRS[0], num_keyphrases=99) == every
    assert len(generate(PAIRS[0], max_phrases=2)) <= 2
    short = generate(PAIRS[0], max_words_per_phrase=2, exclusion_window=0)
    assert max(len(p["keyphrase"].split()) for p in short) <= 2


@each_kind
def test_texts_without_words_have_no_keyphrases_and_do_not_change_others(kind):
    generate = generate_for(kind)
    empty = ["", " \n\t", "[so] {so}", "\ud800", "—", {"title": "", "text": ""}, {"title": None, "text": "!"}]
    expected = generate(TEXTS)
    found = generate([*empty[:4], TEXTS[0], *empty[4:], *TEXTS[1:]])
    assert found[:4] == [[]] * 4 and found[5:8] == [[]] * 3
    close([found[4], *found[8:]], expected)
    for text in ("...", "'", "12 13, 14.5", "3 < 4"):  # signs and numbers alone
        for phrase in generate(text):
            assert any(sign.isalnum() for sign in phrase["keyphrase"])
            assert not phrase["present"] or text[phrase["start"] : phrase["end"]] == phrase["keyphrase"]


def test_a_long_text_is_read_whole(monkeypatch):
    text = "graph cuts segment the images of deep networks " * 1_250 + "omega"
    model, shapes = copying(num_hidden_layers=1), []
    generate_phrases = model.generate_phrases
    monkeypatch.setattr(
        model, "generate_phrases", lambda **batch: shapes.append(batch["input_ids"].shape) or generate_phrases(**batch)
    )
    document = {"title": "Deep models", "text": text}
    found = generate_keyphrases(model, word_tokenizer(), document, max_phrases=3)
    assert shapes == [(1, 10_004)]
    assert found and all(text[p["start"] : p["end"]] == p["keyphrase"] for p in found if p.get("field") == "text")


def test_the_pipeline_works_in_a_reduced_precision(tmp_path):
    copying().save_pretrained(tmp_path)
    half = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    found = pipeline("keyphrase-generation", model=half, tokenizer=word_tokenizer(), device="cpu")(PAIRS)
    assert len(found) == 4 and all(isinstance(p["score"], float) for own in found for p in own)


@each_kind  # untrained: they write words in place of a phrase's start
def test_no_phrase_has_more_words_than_the_limit(kind):
    run = pipeline("keyphrase-generation", model=tiny_exhird(kind), tokenizer=word_tokenizer())
    for limit in (1, 2):
        lengths = [len(p["keyphrase"].split()) for row in run(TEXTS, max_words_per_phrase=limit) for p in row]
        assert max(lengths) == limit


def test_probabilities_that_are_nan_are_an_error():
    generate = generate_for()
    generate.model.generator.vocabulary.bias.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN. Check its weights"):
        generate(PAIRS[0])
