# needs: onnx
"""Export to ONNX: values equal to PyTorch's on every head and encoder, what int8 leaves in float32, what is refused."""

from functools import cache

import pytest
import torch
from transformers import (
    BertConfig,
    BertForTokenClassification,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    ModernBertConfig,
    MPNetConfig,
    XLMRobertaConfig,
    pipeline,
)

from keyphrase_tools.export import export_model, sensitive_nodes
from keyphrase_tools.loading import locate_extractor, open_extractor
from lexperts_lite import KeyphraseExtractor, runtime
from lexperts_lite.runtime import open_graph, read_config
from modeling_seke import SekeConfig, SekeForTokenClassification
from run_tools.loading import PipelineLoadingError
from run_tools.packaged import locate_model

from ..tiny_models import hypernet_config

onnx = pytest.importorskip("onnx")
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 130,
}
SMALL = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "vocab_size": 130}
RELATIVE = {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"], "share_att_key": True}
LOCAL = {"pad_token_id": 0, "local_attention": 8, "global_attn_every_n_layers": 2}
BERT = BertConfig(**SIZES, max_position_embeddings=64, id2label=dict(enumerate("OBI")))
ENCODERS = {  # whose graphs are compared every night
    "deberta-v2": lambda: DebertaV2Config(**SIZES, max_position_embeddings=64, **RELATIVE, norm_rel_ebd="layer_norm"),
    "distilbert": lambda: DistilBertConfig(**SMALL, max_position_embeddings=64),
    "electra": lambda: ElectraConfig(**SIZES, max_position_embeddings=64, embedding_size=16),
    "modernbert": lambda: ModernBertConfig(**SIZES, max_position_embeddings=64, **LOCAL),
    "mpnet": lambda: MPNetConfig(**SIZES, max_position_embeddings=66),
    "xlm-roberta": lambda: XLMRobertaConfig(**SIZES, max_position_embeddings=66),
}
MODELS = {
    "styles": lambda: seke(BERT, styles=["tags"]),
    "stock": lambda: BertForTokenClassification(BERT),
    "gru": lambda: seke(BERT, rnn_type="gru"),
    "no experts": lambda: seke(BERT, use_moe=False),
    "linear": lambda: seke(BERT, use_rnn=False, use_moe=False),
} | {name: lambda encoder=encoder: seke(encoder()) for name, encoder in ENCODERS.items()}


def seke(encoder, **head):
    return SekeForTokenClassification(SekeConfig(text_config=encoder, **head))


@pytest.fixture(scope="module")
def export(tiny_tokenizer, tmp_path_factory):
    """export(name) -> the model, and a folder with it as `model` and its graph as `fp32`."""

    @cache
    def build(name):
        torch.manual_seed(0)
        folder, model = tmp_path_factory.mktemp(name), MODELS[name]().eval()
        for part in (model, tiny_tokenizer):
            part.save_pretrained(folder / "model")
        assert export_model(str(folder / "model"), folder / "fp32")["difference"] < 1e-4
        return model, folder

    return build


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "stock" else pytest.mark.nightly) for n in MODELS])
def test_logits_and_states_equal_those_of_pytorch_for_any_length_batch_and_padding(name, export):
    model, folder = export(name)
    run, names = open_graph(folder / "fp32", read_config(folder / "fp32"), 1)
    for rows, length in ((1, 1), (1, 60), (5, 17)):
        right = (torch.arange(length) < torch.linspace(length, 1, rows)[:, None]).long()
        for mask in (right, right.flip(1)):
            values = {"input_ids": torch.randint(5, 90, mask.shape), "attention_mask": mask, "token_type_ids": 0 * mask}
            values["style_ids"] = torch.arange(rows) % 2
            values = {name: values[name] for name in names}
            with torch.no_grad():
                expected = model(**values, output_hidden_states=True)
            logits, states = map(torch.from_numpy, run({name: of.numpy() for name, of in values.items()}, True))
            real = mask != 0
            torch.testing.assert_close(logits[real], expected.logits[real], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(states[real], expected.hidden_states[-1][real], atol=1e-4, rtol=1e-4)


@pytest.mark.nightly
def test_int8_is_smaller_and_router_and_classifier_stay_in_float32(export, tmp_path):
    _, folder = export("styles")
    report = export_model(str(folder / "model"), tmp_path / "int8", precision="int8")
    exported = read_config(folder / "fp32").exported["onnx"]
    assert report["size"] < exported["size"] and exported["difference"] < 1e-4 < report["difference"] < 1
    names = sensitive_nodes(folder / "fp32" / "onnx" / "model.onnx")
    graph = onnx.load(tmp_path / "int8" / "onnx" / "model_int8.onnx").graph
    kinds = {node.name: node.op_type for node in graph.node}
    assert [kinds.get(name) for name in names] == ["MatMul", "MatMul"]
    int8 = onnx.TensorProto.INT8
    weights = [onnx.numpy_helper.to_array(value) for value in graph.initializer if value.data_type == int8]
    assert len(weights) > 10 and all(abs(weight.astype(int)).max() <= 64 for weight in weights)  # seven bits
    card = (tmp_path / "int8" / "README.md").read_text(encoding="utf-8")
    assert "onnx/model_int8.onnx" in card and "library_name: lexperts" in card
    (tmp_path / "usual").mkdir()
    modes = {path.stat().st_mode for path in (tmp_path / "usual", tmp_path / "int8", tmp_path / "int8" / "onnx")}
    assert len(modes) == 1


def test_default_and_tiny_are_graphs_on_a_cpu_and_weights_otherwise(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("keyphrase_tools.loading.GPUS", ())
    for name in ("default", "tiny"):
        assert locate_extractor(name) == locate_extractor(name, "cpu") == str(runtime.MODELS[name])
        for options in ({"device": "cuda:0"}, {"dtype": "bfloat16"}):
            assert locate_extractor(name, **options) == locate_model(name)
    assert locate_extractor() == str(runtime.MODELS["default"]) and locate_extractor("a/b") == "a/b"
    (tmp_path / "tiny").mkdir()
    assert locate_extractor("tiny") == "tiny"
    monkeypatch.setattr("keyphrase_tools.loading.GPUS", ("/dev/null",))
    assert locate_extractor() == locate_model("default") and locate_extractor(None, "cpu") == str(
        runtime.MODELS["default"]
    )


def test_commands_open_a_graph_by_its_folder_on_the_cpu(export):
    _, folder = export("stock")
    extract, text = open_extractor(str(folder / "fp32")), "the graph cut of networks and the graph cuts for learning"
    assert isinstance(extract, KeyphraseExtractor)
    expected = pipeline("keyphrase-extraction", model=str(folder / "model"))(text, threshold=0.4)
    assert [p["keyphrase"] for p in extract(text, threshold=0.4)] == [p["keyphrase"] for p in expected] != []
    for options in ({"device": "cuda:0"}, {"dtype": "bfloat16"}):
        with pytest.raises(ValueError, match=next(iter(options.values()))):
            open_extractor(str(folder / "fp32"), **options)
    with pytest.raises(PipelineLoadingError, match="model.safetensors.*fp32"):
        pipeline("keyphrase-extraction", model=str(folder / "fp32"))


def test_what_cannot_be_exported_is_named_and_nothing_is_written(export, tiny_tokenizer, tmp_path, monkeypatch):
    from modeling_hypernet import HypernetForTokenClassification

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    for part in (HypernetForTokenClassification(hypernet_config()), tiny_tokenizer):
        part.save_pretrained(tmp_path / "hypernet")
    model = str(export("stock")[1] / "model")
    monkeypatch.setattr("keyphrase_tools.export.write_graph", lambda *arguments: arguments[-1].touch())
    monkeypatch.setattr("keyphrase_tools.export.open_graph", lambda *_: (None, []))
    monkeypatch.setattr("keyphrase_tools.export.compare_logits", lambda *_: float("nan"))
    for options, shown in (
        ({"precision": "int4"}, "'int4'"),
        ({"output": tmp_path / "full"}, "full is not empty"),
        ({"model": str(tmp_path / "hypernet")}, "HypernetForTokenClassification"),
        ({}, "differ .* nan"),
    ):
        with pytest.raises(ValueError, match=shown):
            export_model(**{"model": model, "output": tmp_path / "out", **options})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "hypernet"]
