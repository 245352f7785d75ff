"""A tiny model as a graph."""

import pytest

import keyphrase_tools  # noqa: F401  (registers the pipeline)
from keyphrase_tools.export import export_model


@pytest.fixture(scope="session")
def folder(tiny_seke, tiny_tokenizer, tmp_path_factory):
    """A folder whose `model` is a tiny model with styles, rankers and word classes."""
    from lexperts_lite.features import FEATURES

    model = tiny_seke("bert", styles=["phrases", "tags"])
    model.classifier.weight.data *= 30
    weights = {"bias": -1.0, "gold": 1.0, "span": 0.7, "mentions": 0.5, "noun_phrase": 0.2}
    model.config.keyphrase_ranker = dict.fromkeys(FEATURES, 0.0) | weights
    model.config.style_rankers = {"tags": model.config.keyphrase_ranker | {"one_word": 1.0}}
    model.config.keyphrase_temperature = 1.3
    size = model.config.hidden_size
    model.config.keyphrase_word_classes = {
        name: [(7 * i * (k + 2) % 11 - 5) / 10 for i in range(size + 1)]
        for k, name in enumerate(("other", "modifier", "noun"))
    }
    folder = tmp_path_factory.mktemp("exported")
    for part in (model, tiny_tokenizer):
        part.save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="session")
def exported(folder):
    """The model as an ONNX graph."""
    export_model(str(folder / "model"), folder / "onnx")
    return folder / "onnx"


@pytest.fixture(scope="session")
def exported_int8(folder):
    """The model as an ONNX graph in int8."""
    export_model(str(folder / "model"), folder / "int8", precision="int8")
    return folder / "int8"
