"""Tiny keyphrase generators with every kind of encoder, their tokenizers, and documents for them."""

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

KINDS = ("transformer", "bigru", "bilstm", "cnn", "pretrained")
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
KIND_SIZES = {"transformer": {"num_attention_heads": 2, "intermediate_size": 24, **MASKS}}
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="session")
def tokenizer_for(tiny_tokenizer):
    """tokenizer_for(kind, padding_side) -> the words' tokenizer, for the pretrained kind with sub-words too."""

    def make(kind="transformer", padding_side="right"):
        tokenizer = ExhirdTokenizer.from_texts(VOCABULARY, padding_side=padding_side)
        return tokenizer.with_subword_tokenizer(tiny_tokenizer) if kind == "pretrained" else tokenizer

    return make


@pytest.fixture(scope="session")
def tiny_exhird(tokenizer_for, backbone_config):
    """tiny_exhird(kind, **options) -> a new model in eval mode, always the same weights."""

    def make(kind="transformer", **options):
        torch.manual_seed(0)
        if kind == "pretrained":
            options = {"text_config": backbone_config("bert"), **options}
        sizes = {**SIZES, **KIND_SIZES.get(kind, {"embedding_size": 8})}
        config = ExhirdConfig.from_tokenizer(tokenizer_for(kind), encoder_type=kind, **{**sizes, **options})
        return ExhirdForKeyphraseGeneration(config).eval()

    return make


@pytest.fixture(scope="session")
def rows_for(tokenizer_for):
    """rows_for(kind) -> the documents' rows, as `tokenize_documents` gives them."""

    def make(kind="transformer"):
        rows = tokenize_documents(DOCUMENTS, tokenizer_for(kind))
        return [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]

    return make


@pytest.fixture(scope="session")
def batch_for(tokenizer_for, rows_for):
    """batch_for(kind, only, padding_side, pad_to_multiple_of) -> all documents, or those of the given numbers."""

    def make(kind="transformer", only=None, padding_side="right", pad_to_multiple_of=None):
        rows = rows_for(kind)
        collate = DataCollatorForKeyphraseGeneration(tokenizer_for(kind, padding_side), pad_to_multiple_of)
        return collate([rows[i] for i in only] if only is not None else rows)

    return make


def generate_keyphrases(model, tokenizer, documents, **options):
    """What the pipeline returns."""
    return pipeline("keyphrase-generation", model=model, tokenizer=tokenizer, device="cpu")(documents, **options)


def without_labels(batch):
    """The inputs of `generate`."""
    return {name: x for name, x in batch.items() if name != "labels"}
