"""The model card of a training run states what was run and measured, and no more."""

import pytest
from huggingface_hub import ModelCard

from keyphrase_tools.cards import build_card, collect_settings

RECORD = {
    "model": {"type": "seke", "backbone": "minilm", "use_moe": True, "use_rnn": True, "parameters": 7},
    "data": {
        "train": {"source": "train.jsonl", "documents": 10, "keyphrases": 50, "present": 40},
        "validation": {"source": "train.jsonl", "documents": 5, "keyphrases": 20, "present": 20},
    },
    "training": {"learning_rate": 0.1, "num_train_epochs": 10, "seed": 1},
    "threshold": 0.2,
    "best_validation_f1@10": 0.0,
    "epochs": [{"loss": 1.0, "epoch": 0.5, "step": 2}, {"train_runtime": 1.0, "epoch": 0.75, "step": 3}],
}
FITTED = {"documents": "test", "before": 0.2, "after": 0.05, "temperature": 1.8}


@pytest.mark.parametrize("temperature", [0.05, 0.0500001, 20.0])
def test_a_degenerate_temperature_is_no_calibration(temperature):
    calibration = {**FITTED, "before": 0.1, "after": 0.0, "temperature": temperature}
    text = build_card(RECORD | {"calibration": calibration}, "mine").text
    assert "not calibrated" in text and "calibration error" not in text and "is the probability" not in text


def test_the_card_gives_the_reason_for_a_missing_temperature():
    text = build_card(
        RECORD | {"calibration": {"documents": "validation", "error": "0 of 4 phrases are gold."}}, "mine"
    ).text
    assert "not calibrated probabilities: 0 of 4 phrases" in text
    assert "no temperature" in build_card(RECORD, "mine").text


def test_a_fitted_temperature_is_measured():
    text = build_card(RECORD | {"calibration": FITTED}, "mine").text
    assert "20.0 per cent before" in text and "5.0 with temperature 1.80" in text and "not calibrated" not in text


def test_only_epochs_that_were_trained_are_settings():
    text = build_card(RECORD, "mine").text
    assert (
        "num_train_epochs" not in text and "| `trained_steps` | 3 |" in text and "| `trained_epochs` | 0.75 |" in text
    )
    whole = RECORD | {"epochs": [{"epoch": 10.0, "step": 40}]}
    assert collect_settings(whole) == {**RECORD["training"], "trained_steps": 40, "trained_epochs": 10.0}
    recorded = {"max_steps": 3, "trained_steps": 3, "trained_epochs": 0.75}
    assert collect_settings({"training": recorded, "epochs": [{"epoch": 1.0, "step": 4}]}) == recorded


def test_the_backbone_of_the_extra_has_a_hub_id_and_a_licence():
    data = build_card(RECORD, "mine").data
    assert data.base_model == "sentence-transformers/all-MiniLM-L6-v2"
    assert (data.license, data.language) == ("apache-2.0", "en")
    other = RECORD | {"model": RECORD["model"] | {"backbone": "folder"}}
    assert build_card(other, "mine").data.base_model is None and isinstance(build_card(other, "mine"), ModelCard)
