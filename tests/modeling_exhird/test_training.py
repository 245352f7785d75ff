"""The generator under the stock Trainer: memorised documents, perplexity, predictions by `generate`."""

import math

import numpy as np
import pytest
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, pipeline

from modeling_exhird import DataCollatorForKeyphraseGeneration
from tests import tiny_models

from .conftest import (
    DOCUMENTS,
    document_rows,
    each_kind,
    generate_keyphrases,
    make_batch,
    tiny_exhird,
    without_labels,
    word_tokenizer,
)


def make_trainer(model, rows, tokenizer, folder, **options):
    parts = {name: options.pop(name) for name in ("compute_metrics", "eval_dataset") if name in options}
    parts |= {"data_collator": DataCollatorForKeyphraseGeneration(tokenizer), "processing_class": tokenizer}
    return tiny_models.make_trainer(model, rows, folder, parts=parts, **options)


@each_kind
def test_the_stock_trainer_lowers_the_loss_until_the_model_generates_its_labels(kind, tmp_path):
    tokenizer, model = word_tokenizer(), tiny_exhird(kind, max_words_per_phrase=6)
    options = {"max_steps": 120, "learning_rate": 0.01, "lr_scheduler_type": "linear"}
    trainer = make_trainer(model, document_rows() * 2, tokenizer, tmp_path, **options)
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
def test_evaluation_gives_log_probabilities_and_nothing_else(size, tmp_path):
    model, rows = tiny_exhird("bigru", exclusive_loss_coef=1.0), document_rows() * 2
    options = {"per_device_eval_batch_size": size, "compute_metrics": perplexity}
    trainer = make_trainer(model, rows, word_tokenizer(), tmp_path, eval_dataset=rows, **options)
    metrics = trainer.evaluate()
    with torch.no_grad():
        expected = model(**make_batch())
    words = int((make_batch()["labels"] != -100).sum())
    total = -float(expected.log_probs.sum())
    assert metrics["eval_loss"] == pytest.approx(total / 4, rel=1e-5)  # a mean over documents, whatever the batches
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(total / words), rel=1e-5)
    predicted = trainer.predict(rows)
    assert trainer.label_names == ["labels"] and len(predicted.predictions) == 8
    log_probs, labels = predicted.predictions, predicted.label_ids  # as wide as the Trainer made them, with -100
    assert log_probs.shape == labels.shape and (log_probs[labels != -100] < 0).all()
    assert set(np.unique(log_probs[labels == -100])) <= {0.0, -100.0}  # the model's padding, and the Trainer's
    to_predict = [without_labels(row) for row in rows]
    assert trainer.predict(to_predict).label_ids is None


@pytest.mark.parametrize("options", [{}, {"max_length": 9}])
def test_seq2seq_trainer_predicts_with_generate(options, tmp_path):
    """Several batches: sequences of unlike lengths and labels of unlike widths are gathered, and none is cut."""
    model, tokenizer, rows, seen = tiny_exhird("bigru"), word_tokenizer(), document_rows() * 2, {}

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
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=DataCollatorForKeyphraseGeneration(tokenizer),
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] > 0 and metrics["eval_phrases"] >= 1
    batch = make_batch()
    expected = model.eval().generate(**without_labels(batch), **options)
    for number, row in enumerate(seen["predictions"]):
        own = expected[number % 4].tolist()
        assert row[: len(own)].tolist() == own and set(row[len(own) :]) <= {1, -100}
    labels = np.where(seen["labels"] == 1, -100, seen["labels"])  # the Trainer pads them with pad
    T = batch["labels"].shape[1]
    assert (labels[:4, :T] == batch["labels"].numpy()).all() and (labels[:, T:] == -100).all()
    assert trainer.predict(rows[:3], max_length=7).predictions.shape[1] <= 32
    if not options:
        assert (seen["predictions"] == 3).any(1).all() or max(map(len, expected)) > 20
