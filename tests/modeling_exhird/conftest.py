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

KINDS = ("transformer", "bigru")
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
each_kind = pytest.mark.parametrize("kind", KINDS)


def word_tokenizer(padding_side="right"):
    return ExhirdTokenizer.from_texts(VOCABULARY, padding_side=padding_side)


def tiny_exhird(kind="transformer", **options):
    """A new model in eval mode, always the same weights."""
    torch.manual_seed(0)
    sizes = {**SIZES, **KIND_SIZES[kind], **options}
    return ExhirdForKeyphraseGeneration(
        ExhirdConfig.from_tokenizer(word_tokenizer(), encoder_type=kind, **sizes)
    ).eval()


def document_rows():
    """The documents' rows, as `tokenize_documents` gives them."""
    rows = tokenize_documents(DOCUMENTS, word_tokenizer())
    return [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]


def make_batch(only=None, padding_side="right", pad_to_multiple_of=None):
    """All documents, or those of the given numbers."""
    rows = document_rows()
    collate = DataCollatorForKeyphraseGeneration(word_tokenizer(padding_side), pad_to_multiple_of)
    return collate([rows[i] for i in only] if only is not None else rows)


def generate_keyphrases(model, tokenizer, documents, **options):
    """What the pipeline returns."""
    return pipeline("keyphrase-generation", model=model, tokenizer=tokenizer, device="cpu")(documents, **options)


def without_labels(batch):
    """The inputs of `generate`."""
    return {name: x for name, x in batch.items() if name != "labels"}
