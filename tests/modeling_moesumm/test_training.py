"""MoeSumm under the stock Seq2SeqTrainer: predictions by `generate`, and a new dataset."""

import pytest
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from tests import tiny_models
from tests.modeling_moesumm.conftest import each_backbone, tiny_moesumm
from tests.tiny_models import weights


@pytest.fixture(scope="module")
def rows():
    return tiny_models.trainable_moesumm("bart", None).rows


def make_trainer(model, rows, folder, **options):
    kinds = {"trainer": Seq2SeqTrainer, "arguments": Seq2SeqTrainingArguments}
    return tiny_models.make_trainer(model, rows, folder, **kinds, **{"learning_rate": 1e-2, **options})


@each_backbone
def test_the_seq2seq_trainer_predicts_with_generate(backbone, rows, tmp_path):
    options = {"predict_with_generate": True, "generation_max_length": 5}
    trainer = make_trainer(tiny_moesumm(backbone), rows, tmp_path, **options)
    trainer.train()
    written = trainer.predict(rows[:4]).predictions
    wanted = trainer.model.generate(
        torch.stack([row["input_ids"] for row in rows[:4]]),
        dataset_ids=torch.tensor([row["dataset_ids"] for row in rows[:4]]),
        max_length=5,
    )
    assert torch.equal(torch.tensor(written)[:, : wanted.shape[1]], wanted)


def test_a_new_dataset_is_learnt_by_deputies_and_selectors_alone(rows, tmp_path):
    model = tiny_moesumm()
    model.add_dataset("radio")
    trained = model.freeze_all_but_deputies()
    assert trained == sum(p.numel() for name, p in model.named_parameters() if ".deputies." in name)
    start = weights(model)
    make_trainer(model, [{**row, "dataset_ids": 3} for row in rows], tmp_path, max_steps=3).train()
    moved = {name for name, p in weights(model).items() if not torch.equal(p, start[name])}
    assert moved == {name for name in start if ".deputies." in name}
