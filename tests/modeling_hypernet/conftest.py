"""Tiny hypernetworks over tiny encoders, and batches of pairs for them."""

import logging

import pytest
import torch

from modeling_hypernet import (
    HypernetConfig,
    HypernetForQuestionAnswering,
    HypernetForSequenceClassification,
    HypernetForTokenClassification,
)

KINDS = {
    "tags": HypernetForTokenClassification,
    "classes": HypernetForSequenceClassification,
    "answers": HypernetForQuestionAnswering,
}
TITLES = ["graph cuts", "the problem of learning", "networks"]
TEXTS = ["graph cuts in the network", "learning", "the problem of learning graph networks is the cut of a network"]


@pytest.fixture(scope="session")
def tiny_hypernet(backbone_config, tiny_tokenizer):
    """tiny_hypernet("tags" | "classes" | "answers", backbone, **options) -> a new model in eval mode, always the same."""

    def make(kind="tags", backbone="bert", **options):
        torch.manual_seed(0)
        sizes = {"meta_embedding_size": 4, "meta_hidden_size": 12, "hidden_size": 8, "freeze_backbone": False}
        ids = {"cls_token_id": tiny_tokenizer.cls_token_id, "sep_token_id": tiny_tokenizer.sep_token_id}
        names = {"tags": {"id2label": {0: "O", 1: "B-KEY", 2: "I-KEY"}}, "classes": {"num_labels": 4}, "answers": {}}
        options = {"text_config": backbone_config(backbone), **sizes, **ids, **names[kind], **options}
        return KINDS[kind](HypernetConfig(**options)).eval()

    return make


@pytest.fixture(scope="session")
def batch(tiny_tokenizer):
    return dict(tiny_tokenizer(TITLES, TEXTS, padding=True, return_token_type_ids=True, return_tensors="pt"))


@pytest.fixture(scope="session")
def target():
    """target(kind, batch) -> the batch with something to learn, and its main text's mask."""

    def add(kind, batch):
        main = (batch["token_type_ids"] == 1) & (batch["input_ids"] > 4)
        torch.manual_seed(1)
        if kind == "tags":
            labels = torch.randint(0, 3, main.shape)
            for t in range(1, main.shape[1]):  # BIO: no I after an O
                labels[(labels[:, t] == 2) & (labels[:, t - 1] == 0), t] = 1
            return {**batch, "labels": labels.masked_fill(~main, -100)}
        if kind == "classes":
            return {**batch, "labels": torch.arange(len(main)) % 4}
        first = main.int().argmax(1)
        return {**batch, "start_positions": first, "end_positions": first}

    return add


@pytest.fixture
def log(caplog):
    """Captures the package's logger, which does not propagate."""
    logger = logging.getLogger("modeling_hypernet")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
