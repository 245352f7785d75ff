"""What is refused: an error of this type names the value in one line."""

import re
from functools import partial

import pytest
import torch

import lexperts  # noqa: F401  (registers the pipelines)
from modeling_exhird import ExclusionLogitsProcessor, ExhirdConfig, ExhirdTokenizer
from modeling_exhird.prompted_generation_exhird import score_phrases
from modeling_exhird.prompts_exhird import PromptFormat

from .conftest import PAIRS, SIZES, generate_keyphrases, make_batch, tiny_exhird, without_labels, word_tokenizer
from .llamas import fitted, llama_config, llama_tokenizer, tiny_llama


def config(**changes):
    return ExhirdConfig(**{**SIZES, "num_attention_heads": 2, **changes})


def settings(**changes):
    return PromptFormat(llama_tokenizer(), llama_config(keyphrase_generation=changes))


def prompt_format(tokenizer=None, **changes):
    return PromptFormat(tokenizer or llama_tokenizer(), llama_config(**changes))


def exclude(width=2, **changes):
    exclusion = ExclusionLogitsProcessor(**{"tokenizer": llama_tokenizer(), "prompt_length": 3, **changes})
    return exclusion(torch.ones(1, width), torch.zeros(1, 9))


def phrases(call="generate_phrases", **changes):
    return getattr(tiny_exhird("bigru"), call)(**without_labels(make_batch()), **changes)


def bigru(document="graph", tokenizer=None, **changes):
    return list(generate_keyphrases(tiny_exhird("bigru"), tokenizer or word_tokenizer(), document, **changes))


def llama(document="graph", **changes):
    return generate_keyphrases(fitted(), llama_tokenizer(), document, **changes)


def damaged(make, tokenizer, weight):
    model = make()
    model.get_parameter(weight).data.fill_(torch.nan)
    return generate_keyphrases(model, tokenizer, PAIRS[0])


def scored(**changes):
    model = tiny_llama()
    model.config._attn_implementation = "flash_attention_2"
    return score_phrases(model, settings(), [5], [[5]], [True], **changes)


ALONE = {"use_window": False, "use_top_k": False}
FIELDS = [
    {"encoder_type": "gru"}, {"relative_attention": "both"}, {"hidden_size": 0}, {"window_size": -1},
    {"exclusive_loss_coef": -0.5}, {"dropout": 1.5}, {"exclusion_window": -2}, {"initializer_range": float("nan")},
    {"hidden_size": 15, "encoder_type": "bigru"}, {"num_attention_heads": 3}, {"embedding_size": 8}, {"pad_token_id": None},
    {"eos_token_id": [3, 4]}, {"end_phrase_token_id": 50004}, {"attention_top_k": 0},
    {"lead_size": 0, **ALONE}, {"num_attention_heads": 6, "hidden_size": 18, "relative_attention": "none"},
]  # fmt: skip
LIMITS = [{"exclusion_window": -2}, {"max_phrases": 0}, {"max_source_length": 0}, {"max_tokens_per_phrase": 0}]
TABLE = [
    *((config, change, ValueError, re.escape("{}={!r}".format(*next(iter(change.items()))))) for change in FIELDS),
    (partial(ExhirdConfig.from_tokenizer, word_tokenizer()), {"hiden_size": 3}, ValueError, "hiden_size"),
    *((settings, change, ValueError, next(iter(change))) for change in LIMITS),
    (prompt_format, {"keyphrase_generation": None}, ValueError, "'llama' .*keyphrase_generation"),
    (prompt_format, {"eos_token_id": None}, ValueError, "eos_token_id=None"),
    (prompt_format, {"vocab_size": 300}, ValueError, "300"),
    (prompt_format, {"tokenizer": word_tokenizer()}, ValueError, "' ;'"),
    (lambda **options: settings().encode([(None, "a")], **options), {"limits": [2]}, ValueError, "max_source_length=2"),
    (exclude, {"separator": " <absent>"}, ValueError, "' <absent>'"),
    (exclude, {"window": -2}, ValueError, "window=-2"),
    (exclude, {"width": 2}, ValueError, "prompt_length=3 .* 2"),
    (tiny_exhird("bigru").generate_batch, {"inputs": [[5, 6]]}, ValueError, "ExhirdForKeyphraseGeneration"),
    (ExhirdTokenizer.from_words, {"words": [";", "<a_start>", "<digit>", "graph"]}, ValueError, "<p_start>, <eot>"),
    (ExhirdTokenizer.from_texts, {"texts": "graph cuts"}, ValueError, "'graph cuts'"),
    *((phrases, {name: 0}, ValueError, f"{name}=0") for name in ("max_phrases", "max_words_per_phrase", "min_phrases")),
    (phrases, {"exclusion_window": -2}, ValueError, "exclusion_window=-2"),
    (phrases, {"min_phrases": 6}, ValueError, "min_phrases=6 .*max_phrases=5"),
    (phrases, {"call": "generate", "num_beams": 2}, TypeError, "num_beams"),
    (phrases, {"call": "generate", "inputs_embeds": torch.ones(1, 2, 8)}, TypeError, "inputs_embeds"),
    (bigru, {"document": 3}, TypeError, r"3 \(int\)"),
    (bigru, {"document": ["graph", None]}, TypeError, "Document 1 is None"),
    (bigru, {"document": {"title": "graph"}}, TypeError, "Document 0 .*'title': 'graph'"),
    (bigru, {"document": {"title": 3, "text": "graph"}}, TypeError, "Document 0 .*title=3"),
    (bigru, {"document": (text for text in ["graph"] * 130 + [7]), "max_phrases": 1}, TypeError, "Document 130 is 7"),
    *((bigru, {name: 0}, ValueError, f"{name}=0") for name in ("batch_size", "num_keyphrases", "max_words_per_phrase")),
    (bigru, {"max_tokens_per_phrase": 2}, TypeError, "'max_tokens_per_phrase'"),
    (bigru, {"tokenizer": ExhirdTokenizer.from_texts(["graph cuts"])}, ValueError, "11 words.* 35"),
    (bigru, {"document": PAIRS[0] | {"candidates": ["graph"]}}, ValueError, "candidates"),
    *(
        (llama, {"document": [PAIRS[0], PAIRS[0] | {"candidates": given}]}, TypeError, "Document 1 .*candidates=")
        for given in ("graph cuts", [1], [None])
    ),
    *((llama, {name: 0}, ValueError, f"{name}=0") for name in ("max_phrases", "max_tokens_per_phrase")),
    (llama, {"min_phrases": -1}, ValueError, "min_phrases=-1"),
    (llama, {"min_phrases": 6}, ValueError, "min_phrases=6 .*max_phrases=5"),
    (llama, {"max_words_per_phrase": 3}, TypeError, "'max_words_per_phrase'"),
    (damaged, {"make": tiny_llama, "tokenizer": llama_tokenizer(), "weight": "model.norm.weight"}, ValueError, "NaN"),
    (damaged, {"make": tiny_exhird, "tokenizer": word_tokenizer(), "weight": "generator.copy.bias"}, ValueError, "NaN"),
    (scored, {}, ValueError, "flash_attention_2"),
]  # fmt: skip


def name_of(value) -> str:
    """Of a part of a case, without addresses, which differ between processes."""
    return getattr(value, "__name__", re.sub(" at 0x[0-9a-f]+", "", str(value))[:60])


@pytest.mark.parametrize("call, change, kind, fragment", TABLE, ids=name_of)
def test_it_is_refused(call, change, kind, fragment):
    with pytest.raises(kind, match=fragment) as error:
        call(**change)
    assert "\n" not in str(error.value)


def test_what_a_pattern_does_not_need_may_be_anything():
    config(attention_top_k=0, use_top_k=False)
    config(hidden_size=18, num_attention_heads=6)  # heads of an odd size, without sinusoids of their own
