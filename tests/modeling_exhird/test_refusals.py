"""What is refused: an error of this type names the value in one line."""

import re

import pytest
import torch
from transformers import pipeline

import lexperts  # noqa: F401  (registers the pipelines)
from modeling_exhird import (
    DataCollatorForKeyphraseGeneration,
    ExclusionLogitsProcessor,
    ExhirdConfig,
    ExhirdTokenizer,
    tokenize_documents,
    tokenize_prompts,
)
from modeling_exhird.prompts_exhird import PromptFormat
from modeling_exhird.tokenization_exhird import MARKS, SPECIAL

from .conftest import DOCUMENTS, SIZES, make_batch, tiny_exhird, without_labels, word_tokenizer
from .llamas import documents, fitted, llama_config, llama_tokenizer


def config(**changes):
    return ExhirdConfig(**{**SIZES, "num_attention_heads": 2, **changes})


def settings(**changes):
    return PromptFormat(llama_tokenizer(), llama_config(keyphrase_generation=changes))


def prompt_format(tokenizer=None, **changes):
    return PromptFormat(tokenizer or llama_tokenizer(), llama_config(**changes))


def exclusion(**changes):
    return ExclusionLogitsProcessor(**{"tokenizer": llama_tokenizer(), "prompt_length": 3, **changes})


def tokens(batch=DOCUMENTS, **changes):
    return tokenize_documents(batch, word_tokenizer(), **changes)


def collate(rows):
    return DataCollatorForKeyphraseGeneration(word_tokenizer())(rows)


def phrases(**changes):
    return tiny_exhird("bigru").generate_phrases(**without_labels(make_batch()), **changes)


def bigru(document="graph", tokenizer=None, **changes):
    parts = {"model": tiny_exhird("bigru"), "tokenizer": tokenizer or word_tokenizer()}
    return list(pipeline("keyphrase-generation", **parts, device="cpu")(document, **changes))


def llama(document="graph", **changes):
    return pipeline("keyphrase-generation", model=fitted(), tokenizer=llama_tokenizer(), device="cpu")(
        document, **changes
    )


NAN, INF = float("nan"), float("inf")
ALONE = {"use_window": False, "use_top_k": False}
TABLE = [
    *(
        (config, change, ValueError, re.escape("{}={!r}".format(*next(iter(change.items())))))
        for change in (
            {"encoder_type": "gru"}, {"relative_attention": "both"}, {"decoder_init": "first"}, {"hidden_size": 0},
            {"num_hidden_layers": 0}, {"max_phrases": 0}, {"segment_length": 0}, {"window_size": -1},
            {"exclusive_loss_coef": -0.5}, {"dropout": 1.5}, {"max_words_per_phrase": 0}, {"exclusion_window": -2},
            {"exclusive_loss_window": -2}, {"hidden_size": 15, "encoder_type": "bigru"}, {"decoder_init": "last"},
            {"num_attention_heads": 3}, {"embedding_size": 8}, {"pad_token_id": None}, {"eos_token_id": [3, 4]},
            {"end_phrase_token_id": 50004}, {"present_token_id": -1}, {"absent_token_id": 5}, {"attention_top_k": 0},
            {"lead_size": 0, **ALONE}, {"initializer_range": NAN}, {"exclusive_loss_coef": INF}, {"dropout": NAN},
            {"num_attention_heads": 6, "hidden_size": 18, "relative_attention": "none"},
        )
    ),
    (config, {"vocab_size": 7}, ValueError, "title_end_token_id=7"),
    (lambda **options: ExhirdConfig.from_tokenizer(word_tokenizer(), **options), {"hiden_size": 3}, ValueError, "hiden_size"),
    *(
        (settings, change, ValueError, next(iter(change)))
        for change in (
            {"exclusion_window": -2}, {"max_phrases": 0}, {"max_source_length": 0}, {"max_tokens_per_phrase": 0},
        )
    ),
    (settings, {"max_phrase": 2}, TypeError, "max_phrase"),
    (prompt_format, {"keyphrase_generation": None}, ValueError, "'llama' .*keyphrase_generation"),
    (prompt_format, {"eos_token_id": None}, ValueError, "eos_token_id=None"),
    (prompt_format, {"vocab_size": 300}, ValueError, "300"),
    (prompt_format, {"tokenizer": word_tokenizer()}, ValueError, "' ;'"),
    (lambda **options: settings().encode([(None, "a")], **options), {"limits": [2]}, ValueError, "max_source_length=2"),
    (exclusion, {"separator": " <absent>"}, ValueError, "' <absent>'"),
    (exclusion, {"window": -2}, ValueError, "window=-2"),
    (exclusion, {"prompt_length": -1}, ValueError, "prompt_length=-1"),
    (lambda **ids: exclusion()(scores=torch.zeros(1, 9), **ids), {"input_ids": torch.ones(1, 2)}, ValueError, "prompt_length=3 .* 2"),
    (tokens, {"batch": {"abstract": ["a"], "keyphrases": ["a"]}}, ValueError, "'text'.*'abstract', 'keyphrases'"),
    (tokens, {"batch": {"text": ["a"]}}, ValueError, "'keyphrases'.*'text'"),
    (tokens, {"title_column": "head"}, ValueError, "'head'"),
    (tokens, {"on_long": "cut"}, ValueError, "on_long='cut'.*'drop', 'truncate'"),
    (lambda **batch: tokenize_prompts(batch, llama_tokenizer(), llama_config()), {"text": ["a"]}, ValueError, "'keyphrases'"),
    (collate, {"rows": [{"text": "graph"}]}, ValueError, "Row 0 .*'text'"),
    (collate, {"rows": [word_tokenizer().encode_source(t)._asdict() for t in ("graph", "")]}, ValueError, "Row 1 "),
    (ExhirdTokenizer.from_words, {"words": [";", "<a_start>", "<digit>", "graph"]}, ValueError, "<p_start>, <eot>"),
    (ExhirdTokenizer.from_words, {"words": [*MARKS, "graph", "graph"]}, ValueError, "'graph'"),
    (ExhirdTokenizer.from_words, {"words": [*MARKS, "<unk>"]}, ValueError, "'<unk>'"),
    (ExhirdTokenizer, {"vocab": {word: i for i, word in enumerate([*MARKS, *SPECIAL])}}, ValueError, "<unk>, <blank>"),
    (ExhirdTokenizer.from_texts, {"texts": "graph cuts"}, ValueError, "'graph cuts'"),
    (ExhirdTokenizer.from_texts, {"texts": ["graph"], "vocab_size": 4}, ValueError, "vocab_size=4"),
    (ExhirdTokenizer.from_texts, {"texts": ["", "--"]}, ValueError, "words"),
    (word_tokenizer().convert_ids_to_words, {"ids": [99], "oov_words": ["zeta"]}, ValueError, "99"),
    *((phrases, {name: 0}, ValueError, f"{name}=0") for name in ("max_phrases", "max_words_per_phrase", "min_phrases")),
    (phrases, {"exclusion_window": -2}, ValueError, "exclusion_window=-2"),
    (phrases, {"min_phrases": 6}, ValueError, "min_phrases=6 .*max_phrases=5"),
    (bigru, {"document": 3}, TypeError, r"3 \(int\)"),
    (bigru, {"document": b"graph"}, TypeError, r"\(bytes\)"),
    (bigru, {"document": None}, TypeError, "None"),
    (bigru, {"document": ["graph", None]}, TypeError, "Document 1 is None"),
    (bigru, {"document": {"title": "graph"}}, TypeError, "Document 0 .*'title': 'graph'"),
    (bigru, {"document": {"title": 3, "text": "graph"}}, TypeError, "Document 0 .*title=3"),
    (bigru, {"document": (text for text in ["graph"] * 130 + [7]), "max_phrases": 1}, TypeError, "Document 130 is 7"),
    (bigru, {"batch_size": 0}, ValueError, "batch_size=0"),
    (bigru, {"num_keyphrases": 0}, ValueError, "num_keyphrases=0"),
    (bigru, {"max_words_per_phrase": 0}, ValueError, "max_words_per_phrase=0"),
    (bigru, {"max_tokens_per_phrase": 2}, TypeError, "'max_tokens_per_phrase'"),
    (bigru, {"tokenizer": ExhirdTokenizer.from_texts(["graph cuts"])}, ValueError, "11 words.* 35"),
    *(
        (llama, {"document": [documents()[0], documents()[0] | {"candidates": given}]}, TypeError, "Document 1 .*candidates=")
        for given in ("graph cuts", [1], {"graph": 1}, [None])
    ),
    *((llama, {name: 0}, ValueError, f"{name}=0") for name in ("max_phrases", "max_tokens_per_phrase")),
    (llama, {"min_phrases": -1}, ValueError, "min_phrases=-1"),
    (llama, {"min_phrases": 6}, ValueError, "min_phrases=6 .*max_phrases=5"),
    (llama, {"max_words_per_phrase": 3}, TypeError, "'max_words_per_phrase'"),
]  # fmt: skip


def name_of(value) -> str:
    """Of a part of a case, without addresses, which differ between processes."""
    return getattr(value, "__name__", re.sub(" at 0x[0-9a-f]+", "", str(value))[:60])


@pytest.mark.parametrize("call, change, kind, fragment", TABLE, ids=name_of)
def test_it_is_refused(call, change, kind, fragment):
    with pytest.raises(kind, match=fragment) as error:
        call(**change)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"lead_size": 0},
        {"lead_size": 0, "window_size": 0, "attention_top_k": 0, "use_lead": False, "use_top_k": False},
        {"hidden_size": 18, "num_attention_heads": 6},  # heads of an odd size, without sinusoids of their own
    ],
)
def test_what_a_pattern_does_not_need_may_be_anything(changes):
    config(**changes)
