"""Any encoder: each type named in the README is built, saved, opened again, trained for a step and adapted with LoRA."""

import pytest
import torch
from peft import get_peft_model
from transformers import AutoConfig, AutoModel, AutoModelForTextEncoding

from modeling_seke import SekeConfig, SekeForTokenClassification
from tests.tools import by_day

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
SMALL = {**SIZES, "pad_token_id": 0}
ENCODERS = {
    "roberta": {**SMALL, "max_position_embeddings": 66},
    "xlm-roberta": {**SMALL, "max_position_embeddings": 66},
    "electra": {**SMALL, "embedding_size": 32},
    "albert": {**SMALL, "embedding_size": 16},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "pad_token_id": 0},
    "mpnet": SMALL,
    "deberta": {**SMALL, "pos_att_type": ["c2p", "p2c"]},
    "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
    "longformer": {**SMALL, "attention_window": 8, "max_position_embeddings": 80},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "pad_token_id": 0},
}
EVERY_DAY = ("distilbert", "roberta", "t5", "xlnet")  # other names of sizes, types or projections
LORA = {"xlnet": {"target_modules": ["layer_1"]}}  # its projections are no Linear layers


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=by_day(kind in EVERY_DAY)) for kind in ENCODERS])
def test_from_backbone_accepts_it(kind, tiny_tokenizer, tmp_path):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=len(tiny_tokenizer), **ENCODERS[kind])
    auto = AutoModelForTextEncoding if kind == "t5" else AutoModel
    encoder = auto.from_config(config).eval()
    encoder.save_pretrained(tmp_path / "encoder")
    model = SekeForTokenClassification.from_backbone(tmp_path / "encoder")

    batch = tiny_tokenizer(["graph cuts in the network", "learning"], padding=True, return_tensors="pt")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        states, original = (each(**inputs).last_hidden_state[real] for each in (model.backbone, encoder))
        torch.testing.assert_close(states, original, rtol=0, atol=1e-5)
        expected = model(**batch).logits  # with token_type_ids, which some of them do not take
        model.save_pretrained(tmp_path / "seke")
        again = SekeForTokenClassification.from_pretrained(tmp_path / "seke")
        torch.testing.assert_close(again(**batch).logits, expected, rtol=0, atol=1e-6)
    assert all(torch.equal(p, again.get_parameter(name)) for name, p in model.named_parameters())

    labels = torch.zeros_like(batch["input_ids"]).masked_fill(~real, -100)
    adapted = get_peft_model(again, again.lora_config(r=2, **LORA.get(kind, {}))).train()
    adapted(**batch, labels=labels).loss.backward()
    gradients = {name for name, p in adapted.named_parameters() if p.grad is not None}
    assert any("lora_A" in name for name in gradients) and any("classifier" in name for name in gradients)


def test_projections_with_unknown_names_must_be_passed():
    model = SekeForTokenClassification(SekeConfig(text_config={"model_type": "xlnet", **ENCODERS["xlnet"]}))
    with pytest.raises(ValueError, match="target_modules"):
        get_peft_model(model, model.lora_config())


def test_attention_dropout_of_an_encoder_without_it_is_refused(tmp_path):
    AutoModelForTextEncoding.from_config(AutoConfig.for_model("t5", **ENCODERS["t5"])).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="attention_dropout.*'t5'"):
        SekeForTokenClassification.from_backbone(tmp_path, attention_dropout=0.5)
