# needs: onnx, openvino
"""What an export writes, and how its files are opened: precision of single layers, cards, damaged files, threads, pickling."""

import os
import pickle
import shutil
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import pipeline

from keyphrase_tools import keyphrase_model
from keyphrase_tools.export import export_model, sensitive_nodes
from keyphrase_tools.exported_model import ExportedModel
from lexperts_lite import graphs
from lexperts_lite.graphs import PACKAGES, graph_file, has_vnni
from run_tools.loading import PipelineLoadingError

from ..loopback_hub import LoopbackHub
from .servers import ROOT
from .test_export import FORMATS, ROWS, TEXTS, padded_batch, save

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.fixture(name="folder", scope="module")
def fixture_folder(tiny_seke, tiny_tokenizer, tmp_path_factory):
    """A tiny SEKE with large scores."""
    model = tiny_seke()
    model.classifier.weight.data *= 30
    return save(model, tiny_tokenizer, tmp_path_factory.mktemp("seke"))


@pytest.fixture(name="outputs", scope="module")
def fixture_outputs(folder, tmp_path_factory):
    """outputs(format, precision) -> the folder of an export, whose report is `outputs.reports[format, precision]`."""
    made = {}

    def build(format="onnx", precision="fp32"):
        key = format, precision
        if key not in made:
            made[key] = tmp_path_factory.mktemp("exported") / "out"
            options = {"format": format, "precision": precision, "evaluation": ROWS, "max_loss": 100}
            build.reports[key] = export_model(folder, made[key], **options)
        return made[key]

    build.reports = {}
    return build


@pytest.mark.parametrize("format", FORMATS)
def test_int8_is_smaller_and_measured(outputs, format):
    output = outputs(format, "int8")
    report = outputs.reports[format, "int8"]
    assert report["documents"] == 3 and set(report["f1@10"]) == {"model", "exported"} and 0 <= report["agreement"] <= 1
    assert (output / graph_file(format, "int8")).exists()
    assert isinstance(pipeline("keyphrase-extraction", model=str(output))(TEXTS[0]), list)
    assert ExportedModel(str(output)).config.exported[format]["precision"] == "int8"


def test_router_and_classifier_stay_in_float32_in_onnx(outputs):
    path = outputs("onnx", "fp32") / "onnx" / "model.onnx"
    names = sensitive_nodes(path)
    graph = onnx.load(outputs("onnx", "int8") / "onnx" / "model_int8.onnx").graph
    kinds = {node.name: node.op_type for node in graph.node}
    assert len(names) == 2 and [kinds.get(name) for name in names] == ["MatMul", "MatMul"]
    weights = [
        onnx.numpy_helper.to_array(value) for value in graph.initializer if value.data_type == onnx.TensorProto.INT8
    ]
    assert len(weights) > 10 and all(abs(weight.astype(int)).max() <= 64 for weight in weights)  # seven bits


def test_router_and_classifier_stay_in_float32_in_openvino(outputs):
    openvino, _ = pytest.importorskip("openvino"), pytest.importorskip("nncf")
    graph = openvino.Core().read_model(outputs("openvino", "int8") / graph_file("openvino", "int8"))
    kinds = {}  # of the first input of the products before a bias
    for add in (op for op in graph.get_ops() if op.get_type_name() == "Add"):
        product, bias = (add.input_value(place).get_node() for place in range(2))
        if product.get_type_name() == "MatMul":
            kinds[bias.get_friendly_name()] = product.input_value(0).get_node().get_type_name()
    exact = {name: kind for name, kind in kinds.items() if "router" in name or "classifier" in name}
    assert len(exact) == 2 and "FakeQuantize" not in exact.values()
    assert sum(kind == "FakeQuantize" for kind in kinds.values()) >= 3


def test_another_precision_replaces_the_graph_and_the_gate_is_left_out_only_on_request(folder, outputs, tmp_path):
    output = shutil.copytree(outputs(), tmp_path / "out")
    with pytest.raises(ValueError, match="max_loss=None"):
        export_model(folder, output, precision="int8")
    assert [file.name for file in (output / "onnx").iterdir()] == ["model.onnx"]
    report = export_model(folder, output, precision="int8", max_loss=None)
    assert "f1@10" not in report
    assert [file.name for file in (output / "onnx").iterdir()] == ["model_int8.onnx"]
    assert ExportedModel(str(output)).open().backend == "onnx"


def test_the_card_has_the_files_and_their_scores(outputs):
    card = (outputs("onnx", "int8") / "README.md").read_text(encoding="utf-8")
    assert "onnx/model_int8.onnx" in card and "library_name: lexperts" in card and "| 3 |" in card
    assert 'backend="onnx"' in card


@pytest.mark.parametrize("format", FORMATS)
def test_a_damaged_graph_is_named(outputs, format, tmp_path):
    source = outputs(format)
    for file in source.rglob("*"):
        if file.is_file():
            target = tmp_path / file.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(file.read_bytes())
    graph = tmp_path / graph_file(format, "fp32")
    graph.write_bytes(graph.read_bytes()[:200])
    with pytest.raises(OSError, match=rf"{graph.name} .*opset is 22.*pip install -U {PACKAGES[format]}"):
        pipeline("keyphrase-extraction", model=str(tmp_path))


def test_a_graph_for_a_later_onnxruntime_is_named(outputs, tmp_path):
    save_to = tmp_path / "onnx" / "model.onnx"
    save_to.parent.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((outputs() / name).read_bytes())
    graph = onnx.load(outputs() / "onnx" / "model.onnx")
    graph.opset_import[0].version = 99
    onnx.save(graph, save_to)
    with pytest.raises(OSError, match="Upgrade"):
        ExportedModel(str(tmp_path)).open()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("exported", ["onnx"], r"exported=\['onnx'\]"),
        ("exported", {"onnx": None}, "backend='onnx' with precision=None"),
        ("exported", {"onnx": {"precision": "int4"}}, "precision='int4'"),
        ("exported", {"tensorrt": {"precision": "int8"}}, "backend='tensorrt'"),
        ("id2label", {0: "O", 1: "B", 2: "I", 3: "B-X"}, "has 3 labels, but config.json has 4"),
        ("styles", ["tags"], "no input for the styles tags"),
    ],
)
def test_a_configuration_that_is_not_that_of_the_graph_is_named(outputs, field, value, message):
    model = ExportedModel(str(outputs()))
    setattr(model.config, field, value)
    with pytest.raises(ValueError, match=message):
        model.open()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda graph: graph.input.append(onnx.helper.make_tensor_value_info("pixels", 1, [1])), "input 'pixels'"),
        (lambda graph: graph.output.pop(), "cannot be run with 0 styles"),
    ],
)
def test_a_graph_with_other_inputs_or_outputs_is_named(outputs, tmp_path, edit, message):
    folder = shutil.copytree(outputs(), tmp_path / "out")
    model = onnx.load(folder / "onnx" / "model.onnx")
    edit(model.graph)
    onnx.save(model, folder / "onnx" / "model.onnx")
    with pytest.raises(ValueError, match=message):
        ExportedModel(str(folder)).open()


def test_a_text_has_the_same_answer_in_int8_alone_and_in_a_batch(outputs):
    """With ranges of activations for the whole batch it would not: scores differed in the second digit."""
    extract = pipeline(
        "keyphrase-extraction", model=str(outputs("onnx", "int8")), top_k=None, min_score=0.0, threshold=0.01
    )
    texts = ["graph", "graph cuts of networks", "the networks learn " * 40, "learning of the graph"]
    together = extract(texts, batch_size=8)
    assert together == [extract(text) for text in texts] and all(together)
    model, tokenizer = extract.model, extract.tokenizer
    batch = tokenizer(texts[:2], padding=True, return_tensors="pt")
    left = {name: rows.flip(1) for name, rows in batch.items()}  # padding on the other side, and other places of tokens
    (length,) = {int(batch["attention_mask"][0].sum())}
    outputs_of = model(**batch, output_hidden_states=True)
    assert not outputs_of.logits[0, length:].any() and not outputs_of.hidden_states[-1][0, length:].any()
    assert not model(**left).logits[0, :-length].any()


def test_int8_without_vnni_works_and_warns(outputs, monkeypatch):
    monkeypatch.setattr(graphs, "has_vnni", lambda: False)
    with pytest.warns(UserWarning, match="VNNI"):
        extract = pipeline("keyphrase-extraction", model=str(outputs("onnx", "int8")))
    assert isinstance(extract(TEXTS[0]), list)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ExportedModel(str(outputs())).open()


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="no /proc/cpuinfo")
def test_vnni_is_read_from_the_flags(monkeypatch):
    monkeypatch.setattr(graphs.platform, "machine", lambda: "x86_64")
    for flags, expected in (("avx2 avx512_vnni", True), ("avx2 avx_vnni", True), ("avx2 avx512f", False)):
        text = f"processor : 0\nflags : fpu {flags}\nbugs : vnni\n"
        monkeypatch.setattr(Path, "read_text", lambda *_, text=text, **__: text)
        assert has_vnni() is expected
    monkeypatch.setattr(graphs.platform, "machine", lambda: "aarch64")
    assert has_vnni() is None


@pytest.mark.parametrize("format", FORMATS)
def test_threads_and_copies_answer_the_same(outputs, format):
    model = ExportedModel(str(outputs(format))).open()
    ids, mask = padded_batch(8, 40, "right")
    expected = model(ids, mask).logits
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: model(ids, mask).logits, range(16)))
    again = pickle.loads(pickle.dumps(model))(ids, mask).logits
    for logits in [*found, again]:
        torch.testing.assert_close(logits, expected)


def test_half_precision_is_not_taken_silently(outputs, caplog):
    with pytest.raises(PipelineLoadingError, match="bfloat16"):
        keyphrase_model.KeyphraseModel.from_pretrained(str(outputs()), dtype=torch.bfloat16)


def test_a_folder_has_the_usual_permissions(outputs, tmp_path):
    (tmp_path / "usual").mkdir()
    folders = [outputs(), outputs() / "onnx"]
    assert [oct(folder.stat().st_mode) for folder in folders] == [oct((tmp_path / "usual").stat().st_mode)] * 2


OPEN_FROM_HUB = """
import sys
from pathlib import Path
from huggingface_hub import HfApi
import lexperts
from transformers import pipeline

folder, token, cache = sys.argv[1:]
api = HfApi(token=token)
api.create_repo("tester/graph", private=True)
api.create_branch("tester/graph", branch="v1")
api.upload_folder(repo_id="tester/graph", folder_path=folder, path_in_repo="part", revision="v1")
options = {"revision": "v1", "token": token, "model_kwargs": {"cache_dir": cache, "subfolder": "part"}}
extract = pipeline("keyphrase-extraction", model="tester/graph", **options)
assert type(extract.model).__name__ == "ExportedModel" and Path(cache) in extract.model.folder.parents
assert extract.model.folder.name == "part" and extract("a graph cut") == pipeline("keyphrase-extraction", model=folder)("a graph cut")
options["local_files_only"] = True
assert pipeline("keyphrase-extraction", model="tester/graph", **options)("a graph cut") == extract("a graph cut")
"""


def test_hub_options_reach_the_graph(outputs, tmp_path):
    """A private repository, in which only a branch has the graph, in a folder; another cache; then from that cache only."""
    with LoopbackHub() as hub:
        environment = (
            os.environ
            | hub.env
            | {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "home"), "TRANSFORMERS_OFFLINE": "0"}
        )
        token = environment.pop("HF_TOKEN")
        words = [sys.executable, "-c", OPEN_FROM_HUB, outputs(), token, tmp_path / "cache"]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
