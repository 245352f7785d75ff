"""Tiny keyphrase generators with both encoders, their tokenizers, and documents for them."""

import pytest
import torch
from transformers import pipeline

from modeling_exhird import (
    DataCollatorForKeyphraseGeneration,
    ExhirdConfig,
    ExhirdForKeyphraseGeneration,
    ExhirdTokenizer,
    tokenize_documents,
)
from tests.tools import as_rows

VOCABULARY = [
    "graph cuts segment images by the flow in a network",
    "neural networks learn the cut of a graph, and deep models learn languages",
    "image segmentation, energy minimisation, machine translation",
]
# Of different lengths, with and without a title; zeta, omega, potentials and embeddings are not in the vocabulary.
DOCUMENTS = {
    "title": ["Graph cuts", None, "Deep models", None],
    "text": [
        "Zeta potentials segment the images by flow in a network, and graph cuts find it.",
        "Omega",
        "Neural networks learn omega embeddings of languages",
        "The network flow of a deep graph",
    ],
    "keyphrases": [
        ["graph cuts", "zeta potentials", "energy minimisation", "image segmentation"],
        ["omega", "machine translation"],
        ["omega embedding", "neural network", "deep learning of languages"],
        ["network flow"],
    ],
}
PAIRS = [{"title": title, "text": text} for title, text in zip(DOCUMENTS["title"], DOCUMENTS["text"], strict=True)]
# Small masks, so that words have invisible keys; weights large enough that documents differ visibly.
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "max_phrases": 5,
    "max_words_per_phrase": 4,
    "initializer_range": 0.5,
}
MASKS = {"lead_size": 1, "window_size": 3, "attention_top_k": 2}
KIND_SIZES = {
    "transformer": {"num_attention_heads": 2, "intermediate_size": 24, **MASKS},
    "bigru": {"embedding_size": 8},
}
each_kind = pytest.mark.parametrize("kind", KIND_SIZES)


def word_tokenizer(padding_side="right"):
    return ExhirdTokenizer.from_texts(VOCABULARY, padding_side=padding_side)


def tiny_exhird(kind="transformer", **options):
    """A new model in eval mode, always the same weights."""
    torch.manual_seed(0)
    sizes = {**SIZES, **KIND_SIZES[kind], "encoder_type": kind, **options}
    return ExhirdForKeyphraseGeneration(ExhirdConfig.from_tokenizer(word_tokenizer(), **sizes)).eval()


def copying(kind="bigru", **options):
    """A model that copies much, so that there are present phrases among its own."""
    model = tiny_exhird(kind, **{"initializer_range": 0.7, "exclusion_window": -1, **options})
    with torch.no_grad():
        model.generator.copy.bias.fill_(0.0)
        model.generator.vocabulary.bias[4] += 8.0
    return model


def document_rows():
    """The documents' rows, as `tokenize_documents` gives them."""
    return as_rows(tokenize_documents(DOCUMENTS, word_tokenizer()))


def make_batch(only=None, padding_side="right"):
    """All documents, or those of the given numbers."""
    rows = document_rows()
    collate = DataCollatorForKeyphraseGeneration(word_tokenizer(padding_side))
    return collate([rows[i] for i in only] if only is not None else rows)


def generate_keyphrases(model, tokenizer, documents, **options):
    """What the pipeline returns."""
    return pipeline("keyphrase-generation", model=model, tokenizer=tokenizer, device="cpu")(documents, **options)


def without_labels(batch):
    """The inputs of `generate`."""
    return {name: x for name, x in batch.items() if name != "labels"}


def check_places(document, phrases):
    """Present phrases are where they say."""
    for phrase in phrases:
        assert list(phrase)[:5] == ["keyphrase", "present", "score", "start", "end"] and 0 < phrase["score"] <= 1
        assert ("field" in phrase) == bool(document["title"] and phrase["present"])
        if phrase["present"]:
            text = document[phrase.get("field", "text")]
            assert text[phrase["start"] : phrase["end"]] == phrase["keyphrase"]
        else:
            assert phrase["start"] is phrase["end"] is None and phrase["keyphrase"]
