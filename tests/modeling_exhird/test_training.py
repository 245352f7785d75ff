"""The generator under the stock Trainer: memorised documents, losses, predictions by `generate`."""

import numpy as np
import pytest
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from modeling_exhird import DataCollatorForKeyphraseGeneration
from tests.tiny_models import make_trainer

from .conftest import (
    PAIRS,
    document_rows,
    generate_keyphrases,
    make_batch,
    tiny_exhird,
    without_labels,
    word_tokenizer,
)

PARTS = {"data_collator": DataCollatorForKeyphraseGeneration(word_tokenizer()), "processing_class": word_tokenizer()}


@pytest.mark.parametrize("kind", ["bigru", pytest.param("transformer", marks=pytest.mark.nightly)])
def test_the_stock_trainer_memorises_documents(kind, tmp_path):
    """Phrases of the vocabulary, copied ones and absent ones."""
    model = tiny_exhird(kind, max_words_per_phrase=6)
    options = {"max_steps": 120, "learning_rate": 0.01, "lr_scheduler_type": "linear", "parts": PARTS}
    make_trainer(model, document_rows() * 2, tmp_path, **options).train()
    found = generate_keyphrases(model, word_tokenizer(), PAIRS)
    phrases = [[phrase["keyphrase"].lower() + "-" * (not phrase["present"]) for phrase in row] for row in found]
    assert phrases[0] == ["graph cuts", "zeta potentials", "energy minimisation-", "image segmentation-"]
    assert phrases[1] == ["omega", "machine translation-"] and phrases[3] == ["network flow"]


@pytest.mark.parametrize("options", [{}, {"generation_max_length": 9}])
def test_seq2seq_trainer_predicts_with_generate(options, tmp_path):
    """Several batches: sequences of unlike lengths and labels of unlike widths are gathered, and none is cut."""
    model, rows = tiny_exhird("bigru"), document_rows() * 2
    given = {"arguments": Seq2SeqTrainingArguments, "trainer": Seq2SeqTrainer, "parts": PARTS}
    given |= {"per_device_eval_batch_size": 3, "predict_with_generate": True}
    trainer = make_trainer(model, rows, tmp_path, **given, **options)
    predicted, batch = trainer.predict(rows), make_batch()
    assert predicted.metrics["test_loss"] > 0
    limit = {name.removeprefix("generation_"): value for name, value in options.items()}
    expected = model.generate(**without_labels(batch), **limit)
    for number, row in enumerate(predicted.predictions):
        own = expected[number % 4].tolist()
        assert row[: len(own)].tolist() == own and set(row[len(own) :]) <= {1, -100}
    labels = np.where(predicted.label_ids == 1, -100, predicted.label_ids)  # the Trainer pads them with pad
    T = batch["labels"].shape[1]
    assert (labels[:4, :T] == batch["labels"].numpy()).all() and (labels[:, T:] == -100).all()
