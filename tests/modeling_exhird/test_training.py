"""The generator under the stock Trainer: memorised documents, perplexity, predictions by `generate`, adapters."""

import math

import numpy as np
import pytest
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, pipeline

from modeling_exhird import DataCollatorForKeyphraseGeneration
from tests import tiny_models

from .conftest import DOCUMENTS, generate_keyphrases, without_labels


@pytest.fixture(scope="module")
def rows(rows_for):
    return {kind: rows_for(kind) * 2 for kind in ("transformer", "bigru", "pretrained")}


def make_trainer(model, rows, tokenizer, folder, **options):
    parts = {name: options.pop(name) for name in ("compute_metrics", "eval_dataset") if name in options}
    parts |= {"data_collator": DataCollatorForKeyphraseGeneration(tokenizer), "processing_class": tokenizer}
    return tiny_models.make_trainer(model, rows, folder, parts=parts, **options)


@pytest.mark.parametrize("kind", ["transformer", "bigru", "pretrained"])
def test_the_stock_trainer_lowers_the_loss_until_the_model_generates_its_labels(
    kind, tiny_exhird, tokenizer_for, backbone_config, rows, tmp_path
):
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # the model is to memorise its documents
    backbone = {"text_config": backbone_config("bert", **still)} if kind == "pretrained" else {}
    tokenizer, model = tokenizer_for(kind), tiny_exhird(kind, max_words_per_phrase=6, **backbone)
    options = {"max_steps": 200 if kind == "pretrained" else 120, "learning_rate": 0.01, "lr_scheduler_type": "linear"}
    trainer = make_trainer(model, rows[kind], tokenizer, tmp_path, **options)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-3:]) < 0.3 * sum(losses[:3])
    documents = [{"title": t, "text": x} for t, x in zip(DOCUMENTS["title"], DOCUMENTS["text"], strict=True)]
    found = generate_keyphrases(model, tokenizer, documents)
    phrases = [[(phrase["keyphrase"].lower(), phrase["present"]) for phrase in row] for row in found]
    assert phrases[0][:2] == [("graph cuts", True), ("zeta potentials", True)]
    assert phrases[1] == [("omega", True), ("machine translation", False)]
    assert phrases[0][2:] == [("energy minimisation", False), ("image segmentation", False)]
    assert phrases[3] == [("network flow", True)]
    trainer.save_model()  # all that a pipeline needs
    opened = pipeline("keyphrase-generation", model=str(tmp_path), device="cpu")
    assert [p["keyphrase"] for p in opened(documents[0])] == [p["keyphrase"] for p in found[0]]


def perplexity(prediction):
    """Over all words of all batches, starts, `;` and `</s>` among them."""
    log_probs = [p[labels != -100] for p, labels in zip(prediction.predictions, prediction.label_ids, strict=True)]
    return {"perplexity": math.exp(-np.concatenate(log_probs).mean())}


@pytest.mark.parametrize("size", [1, 3, 8])
def test_evaluation_gives_log_probabilities_and_nothing_else(
    size, tiny_exhird, tokenizer_for, rows, batch_for, tmp_path
):
    model = tiny_exhird("bigru", exclusive_loss_coef=1.0)
    options = {"per_device_eval_batch_size": size, "compute_metrics": perplexity}
    trainer = make_trainer(
        model, rows["bigru"], tokenizer_for("bigru"), tmp_path, eval_dataset=rows["bigru"], **options
    )
    metrics = trainer.evaluate()
    with torch.no_grad():
        expected = model(**batch_for("bigru"))
    words = int((batch_for("bigru")["labels"] != -100).sum())
    total = -float(expected.log_probs.sum())
    assert metrics["eval_loss"] == pytest.approx(total / 4, rel=1e-5)  # a mean over documents, whatever the batches
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(total / words), rel=1e-5)
    predicted = trainer.predict(rows["bigru"])
    assert trainer.label_names == ["labels"] and len(predicted.predictions) == 8
    log_probs, labels = predicted.predictions, predicted.label_ids  # as wide as the Trainer made them, with -100
    assert log_probs.shape == labels.shape and (log_probs[labels != -100] < 0).all()
    assert set(np.unique(log_probs[labels == -100])) <= {0.0, -100.0}  # the model's padding, and the Trainer's
    to_predict = [without_labels(row) for row in rows["bigru"]]
    assert trainer.predict(to_predict).label_ids is None


@pytest.mark.parametrize(
    "kind, options", [("bigru", {}), ("bigru", {"num_beams": 2}), ("pretrained", {"max_length": 9})]
)
def test_seq2seq_trainer_predicts_with_generate(kind, options, tiny_exhird, tokenizer_for, rows, batch_for, tmp_path):
    """Several batches: sequences of unlike lengths and labels of unlike widths are gathered, and none is cut."""
    model, tokenizer, seen = tiny_exhird(kind), tokenizer_for(kind), {}

    def compute_metrics(prediction):
        seen["predictions"], seen["labels"] = prediction.predictions, prediction.label_ids
        phrases = (prediction.predictions == tokenizer.end_phrase_token_id).sum(1)
        return {"phrases": float(phrases.mean())}

    arguments = {"max_steps": 2, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 3, "report_to": "none"}
    arguments |= {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "predict_with_generate": True}
    generation = {f"generation_{name}": value for name, value in options.items()}
    trainer = Seq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(output_dir=str(tmp_path), **arguments, **generation),
        train_dataset=rows[kind],
        eval_dataset=rows[kind],
        data_collator=DataCollatorForKeyphraseGeneration(tokenizer),
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] > 0 and metrics["eval_phrases"] >= 1
    batch = batch_for(kind)
    expected = model.eval().generate(**without_labels(batch), **options)
    for number, row in enumerate(seen["predictions"]):
        own = expected[number % 4].tolist()
        assert row[: len(own)].tolist() == own and set(row[len(own) :]) <= {1, -100}
    labels = np.where(seen["labels"] == 1, -100, seen["labels"])  # the Trainer pads them with pad
    T = batch["labels"].shape[1]
    assert (labels[:4, :T] == batch["labels"].numpy()).all() and (labels[:, T:] == -100).all()
    assert trainer.predict(rows[kind][:3], max_length=7).predictions.shape[1] <= 32
    if not options:
        assert (seen["predictions"] == 3).any(1).all() or max(map(len, expected)) > 20


def test_the_trainer_leaves_the_ids_of_a_pretrained_encoder(tiny_exhird, tokenizer_for, rows, tmp_path, caplog):
    model, kind = tiny_exhird("pretrained"), "pretrained"
    before = model.config.text_config.to_dict()
    make_trainer(model, rows[kind], tokenizer_for(kind), tmp_path, max_steps=1).train()
    assert model.config.text_config.to_dict() == before
    assert "new PAD/BOS/EOS tokens" not in caplog.text


def test_adapters_need_a_pretrained_encoder_that_is_trained(tiny_exhird):
    with pytest.raises(ValueError, match="encoder_type='bigru'"):
        tiny_exhird("bigru").lora_config()
    with pytest.raises(ValueError, match="freeze_backbone=True.*freeze_backbone=False"):
        tiny_exhird("pretrained", freeze_backbone=True).lora_config()
    with pytest.warns(UserWarning, match="records its base"):
        found = tiny_exhird("pretrained", decoder_init="zeros").lora_config()
    assert "encoder.start" not in found.modules_to_save


def test_the_trainers_label_smoothing_is_refused(request, tmp_path):
    family = tiny_models.make_trainable("ExHiRD transformer", request.getfixturevalue)
    parts, options = {"data_collator": family.collate}, {"label_smoothing_factor": 0.1, "max_steps": 1}
    with pytest.raises(ValueError, match="label_smoothing_factor=0"):
        tiny_models.make_trainer(family.make(), family.rows, tmp_path, parts=parts, **options).train()
