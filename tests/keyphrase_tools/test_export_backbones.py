# needs: onnx, openvino
"""Graphs of SEKE on other encoders have PyTorch's values, wherever the padding is."""

import pytest
import torch
from transformers import (
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    ModernBertConfig,
    MPNetConfig,
    XLMRobertaConfig,
    pipeline,
)

from keyphrase_tools.export import export_model
from keyphrase_tools.exported_model import ExportedModel
from modeling_seke import SekeConfig, SekeForTokenClassification

from .test_export import padded_batch, save

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 130,
}
RELATIVE = {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"], "share_att_key": True}
BACKBONES = {
    "deberta-v2": lambda: DebertaV2Config(**SIZES, **RELATIVE, max_position_embeddings=64, norm_rel_ebd="layer_norm"),
    "distilbert": lambda: DistilBertConfig(
        dim=16, n_layers=2, n_heads=2, hidden_dim=24, vocab_size=130, max_position_embeddings=64
    ),
    "electra": lambda: ElectraConfig(**SIZES, embedding_size=16, max_position_embeddings=64),
    "modernbert": lambda: ModernBertConfig(
        **SIZES, max_position_embeddings=64, pad_token_id=0, local_attention=8, global_attn_every_n_layers=2
    ),
    "mpnet": lambda: MPNetConfig(**SIZES, max_position_embeddings=66),
    "xlm-roberta": lambda: XLMRobertaConfig(**SIZES, max_position_embeddings=66),
}


@pytest.mark.parametrize(("name", "format"), [*((name, "onnx") for name in BACKBONES), ("deberta-v2", "openvino")])
def test_logits_equal_those_of_pytorch_on_every_encoder(name, format, tiny_tokenizer, tmp_path):
    pytest.importorskip(format)
    torch.manual_seed(0)
    seke = SekeForTokenClassification(SekeConfig(text_config=BACKBONES[name]()))
    folder = save(seke, tiny_tokenizer, tmp_path / "seke")
    export_model(folder, tmp_path / "out", format=format)
    model, graph = pipeline("keyphrase-extraction", model=folder).model, ExportedModel(str(tmp_path / "out")).open()
    for side in ("left", "right"):
        for rows, length in ((1, 1), (1, 60), (5, 17), (32, 9)):
            ids, mask = padded_batch(rows, length, side)
            with torch.no_grad():
                expected = model(ids, mask)
            real = mask != 0
            torch.testing.assert_close(graph(ids, mask).logits[real], expected.logits[real], atol=1e-4, rtol=1e-4)
