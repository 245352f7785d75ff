# needs: onnx, openvino
"""Export to ONNX and OpenVINO: values equal to PyTorch's, the pipeline on exported folders, the quality gate, errors."""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForTokenClassification, pipeline

from keyphrase_tools import export
from keyphrase_tools.export import export_model
from keyphrase_tools.exported_model import ExportedModel

from ..tiny_models import hypernet_config

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
FORMATS = ["onnx", pytest.param("openvino", marks=pytest.mark.skipif(not find_spec("openvino"), reason="no openvino"))]
TEXTS = ["the graph cut of networks and the graph cuts for learning", "energy", "networks for learning " * 30]


def save(model, tokenizer, folder):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def seke(tiny_seke, tiny_tokenizer, tmp_path_factory):
    """save(**config) -> the folder of a tiny SEKE with large scores."""

    def build(**config):
        model = tiny_seke(**config)
        model.classifier.weight.data *= 30
        return save(model, tiny_tokenizer, tmp_path_factory.mktemp("seke"))

    return build


@pytest.fixture(scope="module")
def exported(seke, tmp_path_factory):
    """For each format a model's folder and that of its graph."""
    made = {}

    def build(format="onnx"):
        if format not in made:
            model, output = seke(styles=["tags"]), tmp_path_factory.mktemp("exported") / format
            report = export_model(model, output, format=format)
            assert report["difference"] < 1e-4
            made[format] = model, str(output)
        return made[format]

    return build


def padded_batch(rows: int, length: int, side: str):
    """Random ids, rows of different lengths, and a mask with the padding on one side."""
    random = np.random.default_rng(rows * 1000 + length)
    ids = torch.tensor(random.integers(5, 90, (rows, length)))
    mask = torch.zeros_like(ids)
    for row in range(rows):
        real = length if row == 0 else int(random.integers(1, length + 1))
        mask[row, :real] = 1
    return ids, mask if side == "right" else mask.flip(1)


@pytest.mark.nightly
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_equal_those_of_pytorch_for_any_length_batch_and_padding(exported, format, side):
    folder, output = exported(format)
    model = pipeline("keyphrase-extraction", model=folder).model
    graph = ExportedModel(output).open()
    limit = model.config.text_config.max_position_embeddings
    for rows, length in ((1, 1), (1, limit), (2, 2), (5, 17), (32, 9)):
        ids, mask = padded_batch(rows, length, side)
        styles = torch.arange(rows) % 2
        with torch.no_grad():
            expected = model(ids, mask, style_ids=styles, output_hidden_states=True)
        found = graph(ids, mask, style_ids=styles, output_hidden_states=True)
        real = mask != 0
        torch.testing.assert_close(found.logits[real], expected.logits[real], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            found.hidden_states[-1][real], expected.hidden_states[-1][real], atol=1e-4, rtol=1e-4
        )


@pytest.mark.nightly
@pytest.mark.parametrize(
    "config",
    [{"rnn_type": "gru"}, {"use_moe": False}, {"use_rnn": False}, {"use_moe": False, "use_rnn": False}],
    ids=str,
)
def test_every_head_is_exported(seke, config, tmp_path):
    assert export_model(seke(**config), tmp_path / "out")["difference"] < 1e-4


@pytest.mark.parametrize("format", FORMATS)
def test_the_pipeline_answers_the_same_with_every_option(exported, format):
    folder, output = exported(format)
    plain, fast = (pipeline("keyphrase-extraction", model=name) for name in (folder, output))
    assert isinstance(fast.model, ExportedModel) and fast.model.backend == format
    for options in (
        {}, {"top_k": None, "min_score": 0.0}, {"threshold": 0.3}, {"style": "tags"}, {"diversity": 0.5}, {"language": None},
        {"candidates": ["graph cut", "tree"]}, {"max_length": 12, "overlap": 4}, {"on_long": "truncate"}, {"batch_size": 2},
    ):  # fmt: skip
        for expected, found in zip(plain(TEXTS, **options), fast(TEXTS, **options), strict=True):
            assert [phrase["keyphrase"] for phrase in found] == [phrase["keyphrase"] for phrase in expected], options
            assert [p["score"] for p in found] == pytest.approx([p["score"] for p in expected], abs=1e-4), options


def test_an_exported_folder_is_complete_and_the_code_of_the_model_is_not_loaded(exported):
    _, output = exported()
    code = (
        "import sys, json; from transformers import pipeline; import lexperts\n"
        f"extract = pipeline('keyphrase-extraction', model={output!r}, backend='onnx')\n"
        f"print(json.dumps([extract({TEXTS[0]!r}), any('SekeMoe' in type(m).__name__ for m in extract.model.modules())]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    phrases, has_experts = json.loads(done.stdout.splitlines()[-1])
    assert phrases == pipeline("keyphrase-extraction", model=output)(TEXTS[0]) and phrases and not has_experts


def test_a_token_classifier_of_transformers_is_exported_too(tiny_tokenizer, tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    labels = {0: "O", 1: "B", 2: "I"}
    config = BertConfig(vocab_size=len(tiny_tokenizer), max_position_embeddings=64, id2label=labels, **sizes)
    folder = save(BertForTokenClassification(config), tiny_tokenizer, tmp_path / "bert")
    assert export_model(folder, tmp_path / "out")["difference"] < 1e-4
    answers = [pipeline("keyphrase-extraction", model=name)(TEXTS) for name in (folder, str(tmp_path / "out"))]
    assert [[p["keyphrase"] for p in d] for d in answers[0]] == [[p["keyphrase"] for p in d] for d in answers[1]]


ROWS = [{"text": text, "keyphrases": ["graph cut", "learning"]} for text in TEXTS]


def test_a_graph_that_loses_quality_is_not_written(seke, tmp_path, monkeypatch):
    def collapse(extract, reopened, rows, batch_size):
        return {"documents": 3, "f1@10": {"model": 0.5, "exported": 0.494}, "agreement": 0.1}

    monkeypatch.setattr(export, "compare", collapse)
    with pytest.raises(ValueError, match="0.60 points"):
        export_model(seke(), tmp_path / "out", precision="int8", evaluation=ROWS)
    assert list(tmp_path.iterdir()) == []


def test_two_formats_share_a_folder_and_one_is_named(seke, exported, tmp_path):
    pytest.importorskip("openvino")
    folder, graph = exported()
    output = shutil.copytree(graph, tmp_path / "out")
    export_model(folder, output, format="openvino")
    output = str(output)
    with pytest.raises(ValueError, match="onnx and openvino"):
        pipeline("keyphrase-extraction", model=output)
    both = [pipeline("keyphrase-extraction", model=output, backend=name)(TEXTS[0]) for name in ("onnx", "openvino")]
    assert [p["keyphrase"] for p in both[0]] == [p["keyphrase"] for p in both[1]]
    with pytest.raises(ValueError, match="another model"):
        export_model(seke(use_rnn=False), output)


def test_a_file_of_the_user_beside_a_graph_is_named_and_stays(exported, tmp_path):
    folder, graph = exported()
    output = shutil.copytree(graph, tmp_path / "out")
    export_model(folder, output)  # again: the graph is replaced
    (output / "onnx" / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="notes.txt .* removed"):
        export_model(folder, output)
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("f1", [(float("nan"), 0.5), (0.5, float("nan")), (float("nan"), float("nan"))])
def test_nan_fails_the_gate(f1):
    with pytest.raises(ValueError, match="loses nan points"):
        export.check_quality(dict(zip(("model", "exported"), f1, strict=True)), "int8", 0.5)


@pytest.mark.parametrize("max_loss", [float("nan"), -1, float("inf"), "0.5", True])
def test_a_limit_that_is_no_number_of_points_is_refused(seke, tmp_path, max_loss):
    with pytest.raises(ValueError, match="max_loss="):
        export_model(seke(), tmp_path / "out", precision="int8", evaluation=ROWS, max_loss=max_loss)


@pytest.mark.parametrize("max_loss", [0.5, None])
def test_an_evaluation_without_a_usable_gold_phrase_is_refused(seke, tmp_path, max_loss):
    rows = [{"text": text, "keyphrases": ["graph, cut"]} for text in TEXTS]
    with pytest.raises(ValueError, match="evaluation: None of the 3 documents"):
        export_model(seke(), tmp_path / "out", precision="int8", evaluation=rows, max_loss=max_loss)
    assert list(tmp_path.iterdir()) == []


def test_invalid_requests_are_named(seke, tiny_tokenizer, tmp_path, monkeypatch):
    folder = seke()
    with pytest.raises(ValueError, match="'tflite'"):
        export_model(folder, tmp_path / "out", format="tflite")
    with pytest.raises(ValueError, match="'int4'"):
        export_model(folder, tmp_path / "out", precision="int4")
    with pytest.raises(ValueError, match="evaluation"):
        export_model(folder, tmp_path / "out", precision="int8")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        export_model(folder, tmp_path / "full")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"lexperts\[onnx\]"):
        export_model(folder, tmp_path / "out")


def test_a_model_whose_labels_are_decoded_together_is_refused(tiny_tokenizer, tmp_path):
    from modeling_hypernet import HypernetForTokenClassification

    folder = save(HypernetForTokenClassification(hypernet_config()), tiny_tokenizer, tmp_path / "hypernet")
    with pytest.raises(ValueError, match="HypernetForTokenClassification"):
        export_model(folder, tmp_path / "out")


def test_a_graph_with_another_backend_is_refused(exported, tmp_path, monkeypatch):
    _, output = exported()
    with pytest.raises(ValueError, match="'openvino'"):
        pipeline("keyphrase-extraction", model=output, backend="openvino")
    extract = pipeline("keyphrase-extraction", model=output)
    with pytest.raises(ValueError, match="'meta'"):
        extract.model.to("meta")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r"lexperts\[onnx\]"):
        pipeline("keyphrase-extraction", model=output)
