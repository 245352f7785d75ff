"""Tiny models for the pipeline."""

import pytest
import torch
from transformers import pipeline

import keyphrase_tools  # noqa: F401  (registers the pipeline, also for a file that is run alone)
from tests.keyphrase_tools.known_answers import Lookup


@pytest.fixture(scope="module")
def sharp_seke(tiny_seke):
    """A tiny SEKE with weights large enough that its scores spread."""

    def build(name="bert"):
        model = tiny_seke(name)
        model.classifier.weight.data *= 30
        return model

    return build


@pytest.fixture(scope="module")
def lookup(backbone_config, tiny_tokenizer):
    """lookup(**model) -> a pipeline over a model whose answers are known beforehand."""

    def build(by_place=False, id2label=None, **options):
        config = backbone_config("bert", id2label=id2label or {0: "O", 1: "B", 2: "I"})
        return pipeline(
            "keyphrase-extraction",
            model=Lookup(config, tiny_tokenizer, by_place),
            tokenizer=tiny_tokenizer,
            **options,
        )

    return build


@pytest.fixture(scope="module")
def extract(sharp_seke, tiny_tokenizer):
    """A pipeline over a tiny SEKE whose scores spread."""
    return pipeline("keyphrase-extraction", model=sharp_seke(), tokenizer=tiny_tokenizer)


@pytest.fixture(scope="module")
def everything(lookup):
    """A pipeline that finds a keyphrase at every word."""
    extract = lookup(top_k=None)
    extract.model.table.data[:] = torch.tensor([0.0, 5.0, 0.0])
    return extract
