"""The built package, and a small exported model."""

import subprocess
import sys
from pathlib import Path

import pytest

from keyphrase_tools.export import export_model

LITE = Path(__file__).resolve().parents[2] / "lite"


@pytest.fixture(scope="session")
def lite(tmp_path_factory):
    """The installed package."""
    folder = tmp_path_factory.mktemp("lite")
    build = ["build", "--build-base", folder / "base", "--build-lib", folder / "lib"]
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", folder, *build]
    subprocess.run(list(map(str, command)), cwd=LITE, check=True, capture_output=True)
    return folder / "lib"


@pytest.fixture(scope="session")
def exported(tiny_seke, tiny_tokenizer, tmp_path_factory):
    """A tiny model with styles, rankers and word classes, as an ONNX graph."""
    from keyphrase_tools.phrase_features import NAMES_WITH_SHAPE

    model = tiny_seke("bert", styles=["phrases", "tags"])
    model.classifier.weight.data *= 30
    ranker = dict.fromkeys(NAMES_WITH_SHAPE, 0.0) | {
        "bias": -1.0,
        "gold": 1.0,
        "span": 0.7,
        "mentions": 0.5,
        "noun_phrase": 0.2,
    }
    model.config.keyphrase_ranker = ranker
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
    export_model(str(folder / "model"), folder / "onnx")
    export_model(str(folder / "model"), folder / "int8", precision="int8", max_loss=None)
    return folder / "onnx"
