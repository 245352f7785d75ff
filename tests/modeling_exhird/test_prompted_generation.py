"""Keyphrases of stock decoders: greedy search against a slow one, candidates, and what the pipeline returns."""

import copy
import logging
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, pipeline

import lexperts  # noqa: F401  (registers the pipelines)
from modeling_exhird import ExhirdForKeyphraseGeneration, prompted_generation_exhird
from modeling_exhird.generation_exhird import Document
from modeling_exhird.pipeline_keyphrase_generation import make_generator
from modeling_exhird.prompted_generation_exhird import score_phrases
from run_tools.loading import PipelineLoadingError

from .conftest import tiny_exhird, word_tokenizer
from .llamas import BACKBONES, documents, fitted, llama_tokenizer, prompt_format, tiny_llama

PHRASES = ["graph cuts", "maximum flow", "trees", "image segmentation of an image", "x"]


def prompts() -> list[list[int]]:
    pairs = [(document["title"], document["text"]) for document in documents()]
    return [prompt.input_ids for prompt in prompt_format(tiny_llama()).encode(pairs, [128] * 4)]


def next_log_p(model, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)


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
            log_p = next_log_p(model, prompt + answer + ids)
            if not ids:
                recent = (
                    phrases if exclusion_window < 0 else phrases[len(phrases) - min(exclusion_window, len(phrases)) :]
                )
                log_p[[phrase[0][0] for phrase in recent]] = -torch.inf
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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"exclusion_window": 0},
        {"exclusion_window": 3, "max_tokens_per_phrase": 2},
        {"exclusion_window": -1, "max_phrases": 9, "max_tokens_per_phrase": 3},
        {"min_phrases": 4, "exclusion_window": 0},
        {"max_phrases": 2, "max_tokens_per_phrase": 1, "min_phrases": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("trained", [True, False])
def test_phrases_and_scores_are_those_of_a_slow_search(trained, options):
    """In a batch of prompts of unlike lengths, whose answers end after unlike numbers of tokens."""
    model, compared = fitted() if trained else tiny_llama(), 0
    generator = make_generator(model, llama_tokenizer(), **options)
    sources = generator.encode([Document(d["title"], d["text"], None) for d in documents()])
    for source, found in zip(sources, generator.generate_batch(sources), strict=True):
        expected = slow_search(model, source.input_ids, **options)
        ends = set(generator.format.ends)
        texts = [llama_tokenizer().decode([i for i in ids if i not in ends]).split() for ids, _ in expected]
        kept = [(text, log_p) for text, (_, log_p) in zip(texts, expected, strict=True) if text]
        spoken = [(phrase.text.split(), phrase.log_p) for phrase in found]
        kept = [(text, log_p) for text, log_p in kept if text in [each for each, _ in spoken]]  # others have no word
        assert [text for text, _ in spoken] == [text for text, _ in kept]
        assert [log_p for _, log_p in spoken] == pytest.approx([log_p for _, log_p in kept], abs=1e-3)
        compared += len(spoken)
    assert compared >= 4


@pytest.mark.parametrize("kind", BACKBONES)
def test_every_kind_of_decoder_writes_in_a_batch_what_it_writes_alone(kind):
    model = tiny_llama(kind)
    model.config.keyphrase_generation = {"max_phrases": 3, "max_tokens_per_phrase": 4}
    generator = make_generator(model, llama_tokenizer(), raw=True)
    together = list(generator.stream(documents()))
    assert together == [next(generator.stream([document])) for document in documents()]
    assert len({str(phrases) for phrases in together}) > 1


@pytest.fixture(scope="module")
def generate():
    return pipeline("keyphrase-generation", model=fitted(), tokenizer=llama_tokenizer(), device="cpu")


def without_scores(phrases):
    return [{name: value for name, value in phrase.items() if name != "score"} for phrase in phrases]


@pytest.mark.parametrize("options", [{}, {"min_phrases": 4}, {"exclusion_window": -1}])
def test_the_pipeline_finds_phrases_with_offsets_and_scores(generate, options):
    results = generate(documents(), **options)
    found = [phrase for phrases in results for phrase in phrases]
    assert any(phrase["present"] for phrase in found) and any(not phrase["present"] for phrase in found)
    for document, phrases in zip(documents(), results, strict=True):
        for phrase in phrases:
            assert 0 < phrase["score"] <= 1
            if phrase["present"]:
                text = document[phrase.get("field", "text")]
                assert text[phrase["start"] : phrase["end"]] == phrase["keyphrase"]
            else:
                assert phrase["start"] is phrase["end"] is None and phrase["keyphrase"]
        assert ("field" in phrases[0]) == bool(document["title"] and phrases[0]["present"])
        alone = generate(document, **options)
        assert without_scores(alone) == without_scores(phrases)
        assert [p["score"] for p in alone] == pytest.approx([p["score"] for p in phrases], rel=1e-2)
    assert generate("", **options) == generate("...", **options) == []


def test_the_task_opens_both_kinds_of_models(generate, tmp_path):
    generate.save_pretrained(tmp_path / "decoder")
    for part in (tiny_exhird("bigru"), word_tokenizer()):
        part.save_pretrained(tmp_path / "encoder")
    opened = {name: pipeline("keyphrase-generation", model=str(tmp_path / name)) for name in ("decoder", "encoder")}
    assert type(opened["decoder"].model) is type(fitted())
    assert type(opened["encoder"].model) is ExhirdForKeyphraseGeneration
    for found, expected in zip(opened["decoder"](documents()), generate(documents()), strict=True):
        assert without_scores(found) == without_scores(expected)
        assert [p["score"] for p in found] == pytest.approx([p["score"] for p in expected], abs=1e-5)
    weights = tmp_path / "decoder" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(PipelineLoadingError, match="header"):
        pipeline("keyphrase-generation", model=str(tmp_path / "decoder"))


def choose(texts: list[str], document: str) -> list[dict]:
    """The keyphrases of an answer."""
    generator, ids = make_generator(fitted(), llama_tokenizer()), llama_tokenizer()("".join(texts))["input_ids"]
    read = Document(None, document, None)
    (source,) = generator.encode([read])
    return generator.choose(generator.split(ids, [-1.0] * len(ids)), source, read)


def test_duplicates_by_stems_are_dropped_and_signs_belong_to_a_phrase():
    """And phrases without a letter or digit; numbers in absent phrases are kept."""
    found = choose(
        [" graph cut ;", " graph cuts ;", " ... ;", " ;", " 12 networks |", " tides</s>"], "Graph cuts of 3 networks"
    )
    assert [(phrase["keyphrase"], phrase["present"]) for phrase in found] == [
        ("Graph cuts", True), ("12 networks", False), ("tides", False),
    ]  # fmt: skip
    found = choose([" ref work; ref workbreak|tides ;"], "Rebase")  # other tokens than the marks
    assert [phrase["keyphrase"] for phrase in found] == ["ref work", "ref workbreak", "tides"]
    (three,) = choose([" 3 network ;"], "Graph cuts of 3 networks")
    assert three["keyphrase"] == "3 networks" and three["present"]
    found = choose([" c++ ;", " c# ;", " at&t ;", " c"], "Does (c++11) need AT&T in C++?")
    assert [(phrase["keyphrase"], phrase["start"]) for phrase in found] == [
        ("C++", 26),
        ("c#", None),
        ("AT&T", 18),
        ("c", 6),
    ]


def test_what_is_left_out_is_said(generate, caplog):
    logging.getLogger("transformers").propagate = True
    document, long = documents()[0], "graph " * 20
    found = generate(document | {"candidates": [long, "trees", "銀行"]})
    assert found == generate(document | {"candidates": ["trees"]})
    generate("zeta " * 400)
    for part in (
        "A phrase of more than max_tokens_per_phrase=12 tokens is left out: 'graph graph",
        "A candidate without a Latin letter or a digit is left out: '銀行'",
        "1 of 1 documents have more than max_source_length=128 tokens",
    ):
        assert part in caplog.text


def test_probabilities_that_are_nan_are_an_error():
    model = copy.deepcopy(fitted())
    model.model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN. Check its weights"):
        pipeline("keyphrase-generation", model=model, tokenizer=llama_tokenizer(), device="cpu")(documents()[0])


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
    for limit in (512, 7):  # of tokens in one pass
        monkeypatch.setattr(prompted_generation_exhird, "MAX_TOKENS", limit)
        for prompt in prompts():
            contexts = [[*prompt, written.absent] if is_absent else prompt for is_absent in absent]
            expected = [scored_alone(model, *both) for both in zip(contexts, ids, strict=True)]
            assert score_phrases(model, written, prompt, ids, absent) == pytest.approx(expected, rel=1e-4)


def test_candidates_compete_with_generated_phrases(generate):
    given, compared = [document | {"candidates": [*PHRASES, "Graph  cut", "...", ""]} for document in documents()], 0
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
        if plain and plain[0]["present"]:  # the first generated phrase has the score of the search
            (same,) = [phrase for phrase in ranked if phrase["keyphrase"] == plain[0]["keyphrase"]]
            assert same["score"] == pytest.approx(plain[0]["score"], rel=1e-3)
            compared += 1
    assert compared
    assert generate({"text": "", "candidates": PHRASES}) == []
    assert generate(documents()[0] | {"candidates": None}) == generate(documents()[0])
    assert generate(documents()[0] | {"candidates": []})  # the generated ones, ranked


def test_phrases_that_differ_in_their_signs_are_different(generate):
    names = ["C++", "c++ ", "C#", "C", "C#  developer"]
    document = {"title": "Lists of C#", "text": "How to call a C# developer from Python?"}
    found = {phrase["keyphrase"]: phrase for phrase in generate(document | {"candidates": names})}
    assert {"C++", "C#", "C", "C# developer"} <= set(found) and "c++" not in found
    assert not found["C++"]["present"] and found["C# developer"]["present"]
    assert (found["C#"]["field"], found["C#"]["start"], found["C#"]["end"]) == ("title", 9, 11)


def test_what_cannot_score_says_so():
    encoder = pipeline("keyphrase-generation", model=tiny_exhird("bigru"), tokenizer=word_tokenizer())
    with pytest.raises(ValueError, match="scores no candidates"):
        encoder({"text": "Graph cuts.", "candidates": ["graph"]})
    model = AutoModelForCausalLM.from_config(fitted().config)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="flash_attention_2"):
        score_phrases(model, prompt_format(model), prompts()[0], [[5]], [True])
