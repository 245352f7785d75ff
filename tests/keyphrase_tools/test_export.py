# needs: onnx
"""Export to ONNX: values equal to PyTorch's on every head and encoder, what int8 leaves in float32, what is refused."""

import numpy as np
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
from keyphrase_tools.loading import open_extractor
from lexperts_lite import KeyphraseExtractor
from lexperts_lite.runtime import open_graph, read_config
from modeling_seke import SekeConfig, SekeForTokenClassification
from run_tools.loading import PipelineLoadingError

from ..tiny_models import hypernet_config

onnx = pytest.importorskip("onnx")
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 130,
}
POSITIONS = {"max_position_embeddings": 64}
RELATIVE = {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"], "share_att_key": True}
LOCAL = {"pad_token_id": 0, "local_attention": 8, "global_attn_every_n_layers": 2}
SMALL = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "vocab_size": 130}
MODELS = {
    "styles": lambda: seke(BertConfig(**SIZES, **POSITIONS), styles=["tags"]),
    "gru": lambda: seke(BertConfig(**SIZES, **POSITIONS), rnn_type="gru"),
    "no experts": lambda: seke(BertConfig(**SIZES, **POSITIONS), use_moe=False),
    "no rnn": lambda: seke(BertConfig(**SIZES, **POSITIONS), use_rnn=False),
    "linear": lambda: seke(BertConfig(**SIZES, **POSITIONS), use_rnn=False, use_moe=False),
    "deberta-v2": lambda: seke(DebertaV2Config(**SIZES, **POSITIONS, **RELATIVE, norm_rel_ebd="layer_norm")),
    "distilbert": lambda: seke(DistilBertConfig(**SMALL, **POSITIONS)),
    "electra": lambda: seke(ElectraConfig(**SIZES, **POSITIONS, embedding_size=16)),
    "modernbert": lambda: seke(ModernBertConfig(**SIZES, **POSITIONS, **LOCAL)),
    "mpnet": lambda: seke(MPNetConfig(**SIZES, max_position_embeddings=66)),
    "xlm-roberta": lambda: seke(XLMRobertaConfig(**SIZES, max_position_embeddings=66)),
    "stock": lambda: BertForTokenClassification(
        BertConfig(**SIZES, **POSITIONS, id2label=dict(enumerate("OBI"))),
    ),
}


def seke(encoder, **head):
    return SekeForTokenClassification(SekeConfig(text_config=encoder, **head))


@pytest.fixture
def save(tiny_tokenizer, tmp_path):
    def build(model):
        for part in (model, tiny_tokenizer):
            part.save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

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


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_states_equal_those_of_pytorch_for_any_length_batch_and_padding(name, save, tmp_path):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    assert export_model(save(model), tmp_path / "out")["difference"] < 1e-4
    run, names = open_graph(tmp_path / "out", read_config(tmp_path / "out"), 1)
    for side in ("left", "right"):
        for rows, length in ((1, 1), (1, 60), (5, 17), (32, 9)):
            ids, mask = padded_batch(rows, length, side)
            values = {"input_ids": ids, "attention_mask": mask, "token_type_ids": 0 * ids}
            values["style_ids"] = torch.arange(rows) % 2
            values = {name: values[name] for name in names}
            with torch.no_grad():
                expected = model(**values, output_hidden_states=True)
            logits, states = map(torch.from_numpy, run({name: of.numpy() for name, of in values.items()}, True))
            real = mask != 0
            torch.testing.assert_close(logits[real], expected.logits[real], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(states[real], expected.hidden_states[-1][real], atol=1e-4, rtol=1e-4)


def test_int8_is_smaller_and_router_and_classifier_stay_in_float32(save, tiny_seke, tmp_path):
    folder = save(tiny_seke())
    reports = {name: export_model(folder, tmp_path / name, precision=name) for name in ("fp32", "int8")}
    assert reports["int8"]["size"] < reports["fp32"]["size"] and 1e-4 < reports["int8"]["difference"] < 1
    names = sensitive_nodes(tmp_path / "fp32" / "onnx" / "model.onnx")
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


def test_commands_open_a_graph_by_its_folder_on_the_cpu(save, tiny_seke, tmp_path):
    folder = save(tiny_seke(keyphrase_threshold=0.4))
    export_model(folder, tmp_path / "out")
    extract = open_extractor(str(tmp_path / "out"))
    assert isinstance(extract, KeyphraseExtractor)
    text = "the graph cut of networks and the graph cuts for learning"
    expected = pipeline("keyphrase-extraction", model=folder)(text)
    assert [p["keyphrase"] for p in extract(text)] == [p["keyphrase"] for p in expected] != []
    for options in ({"device": "cuda:0"}, {"dtype": "bfloat16"}):
        with pytest.raises(ValueError, match=next(iter(options.values()))):
            open_extractor(str(tmp_path / "out"), **options)
    with pytest.raises(PipelineLoadingError, match="model.safetensors.*out"):
        pipeline("keyphrase-extraction", model=str(tmp_path / "out"))


def test_what_cannot_be_exported_is_named_and_nothing_is_written(save, tiny_seke, tmp_path, monkeypatch):
    from modeling_hypernet import HypernetForTokenClassification

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    folder = save(tiny_seke())
    for options, shown in (({"precision": "int4"}, "'int4'"), ({"output": tmp_path / "full"}, "full is not empty")):
        with pytest.raises(ValueError, match=shown):
            export_model(folder, **{"output": tmp_path / "out", **options})
    with pytest.raises(ValueError, match="HypernetForTokenClassification"):
        export_model(save(HypernetForTokenClassification(hypernet_config())), tmp_path / "out")
    monkeypatch.setattr("keyphrase_tools.export.compare_logits", lambda *_: float("nan"))
    with pytest.raises(ValueError, match="differ .* nan"):
        export_model(save(tiny_seke()), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "model"]
