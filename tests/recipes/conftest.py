"""A tiny encoder with its tokenizer, the backbone of extractors; a cache of `datasets` that is empty."""

import datasets.config
import pytest
import torch
from transformers import AutoModel


@pytest.fixture(scope="module")
def backbone(backbone_config, tiny_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("backbone")
    torch.manual_seed(0)
    AutoModel.from_config(backbone_config("bert", max_position_embeddings=128)).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session", autouse=True)
def empty_cache(tmp_path_factory):
    """No rows of an earlier run of the tests are used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield
