"""The generator under the stock Trainer: learning, evaluating, resuming, accumulating, LoRA, two processes."""

import math

import numpy as np
import pytest
import torch
from peft import AutoPeftModel, PeftModel, get_peft_model
from torch.testing import assert_close
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    pipeline,
    set_seed,
)

from modeling_exhird import ExHirdCollator, ExHirdForKeyphraseGeneration
from tests.torchrun import run_by_torchrun

from .conftest import DOCUMENTS, each_kind, without_labels

TRAINED_KINDS = pytest.mark.parametrize("kind", ["transformer", "bigru", "pretrained"])


@pytest.fixture(scope="module")
def rows(rows_for):
    return {kind: rows_for(kind) * 2 for kind in ("transformer", "bigru", "bilstm", "cnn", "pretrained")}


def make_trainer(model, rows, tokenizer, folder, **options):
    defaults = {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    more = {name: options.pop(name) for name in ("compute_metrics", "eval_dataset") if name in options}
    return Trainer(
        model,
        TrainingArguments(output_dir=str(folder), **{**defaults, **options}),
        train_dataset=rows,
        data_collator=ExHirdCollator(tokenizer),
        processing_class=tokenizer,
        **more,
    )


def weights(model):
    return {name: p.detach().clone() for name, p in model.state_dict().items()}


@each_kind
def test_the_stock_trainer_lowers_the_loss_until_the_model_says_what_it_was_taught(
    kind, tiny_exhird, tokenizer_for, backbone_config, rows, tmp_path
):
    still = {
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }  # to the end: what is learnt is learnt by heart
    backbone = {"text_config": backbone_config("bert", **still)} if kind == "pretrained" else {}
    tokenizer, model = tokenizer_for(kind), tiny_exhird(kind, max_phrase_length=7, **backbone)
    steps, schedule = (300, "linear") if kind == "pretrained" else (120, "constant")  # falling, against its jumps
    options = {"max_steps": steps, "learning_rate": 5e-3, "lr_scheduler_type": schedule}
    trainer = make_trainer(model, rows[kind], tokenizer, tmp_path, **options)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-3:]) < 0.3 * sum(losses[:3])
    documents = [{"title": t, "text": x} for t, x in zip(DOCUMENTS["title"], DOCUMENTS["text"], strict=True)]
    found = model.generate_keyphrases(documents, tokenizer)
    said = [[(phrase["keyphrase"].lower(), phrase["present"]) for phrase in own] for own in found]
    assert said[0][:2] == [("graph cuts", True), ("zeta potentials", True)]
    assert said[1] == [("omega", True), ("machine translation", False)]
    assert said[0][2:] == [("energy minimisation", False), ("image segmentation", False)]
    assert said[3] == [("network flow", True)]


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


@pytest.mark.parametrize("kind", ["bigru", "pretrained"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"max_length": 9}])
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
        data_collator=ExHirdCollator(tokenizer),
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


class Interrupt(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            raise KeyboardInterrupt


@TRAINED_KINDS
def test_an_interrupted_run_resumes_to_the_same_weights_bit_for_bit(kind, tiny_exhird, tokenizer_for, rows, tmp_path):
    def trainer(folder):
        set_seed(5)
        model = tiny_exhird(kind, dropout=0.1, exclusive_loss_coef=1.0)
        options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "seed": 5}
        return make_trainer(model, rows[kind], tokenizer_for(kind), folder, **options)

    whole = trainer(tmp_path / "whole")
    whole.train()
    broken = trainer(tmp_path / "broken")
    broken.add_callback(Interrupt())
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    resumed = trainer(tmp_path / "broken")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6
    expected, found = weights(whole.model), weights(resumed.model)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    start = weights(tiny_exhird(kind))  # negative control: training moved them
    assert not any(torch.equal(expected[name], start[name]) for name in expected if "decoder" in name)
    # a checkpoint of the Trainer is all that a pipeline needs
    opened = pipeline("keyphrase-generation", model=str(tmp_path / "whole" / "checkpoint-6"), device="cpu")
    again = whole.model.generate_keyphrases(DOCUMENTS["text"][0], tokenizer_for(kind))
    assert [p["keyphrase"] for p in opened(DOCUMENTS["text"][0])] == [p["keyphrase"] for p in again]


@TRAINED_KINDS
def test_gradient_accumulation_and_checkpointing_change_nothing(kind, tiny_exhird, tokenizer_for, rows, tmp_path):
    """With micro-batches of as many documents each: the loss is a mean over documents."""
    found = []
    for size, micro, checkpointing in ((8, 1, False), (2, 4, False), (4, 2, True)):
        model = tiny_exhird(kind, exclusive_loss_coef=1.0)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": micro, "max_steps": 2}
        options |= {"optim": "sgd", "max_grad_norm": 0, "learning_rate": 0.01, "gradient_checkpointing": checkpointing}
        trainer = make_trainer(model, rows[kind], tokenizer_for(kind), tmp_path, **options)
        trainer.train()
        found.append((weights(trainer.model), trainer.state.log_history[0]["loss"]))
    (whole, loss), *others = found
    for micro, micro_loss in others:
        assert_close(micro_loss, loss, rtol=1e-4, atol=0)
        assert_close(micro, whole, rtol=1e-4, atol=1e-5)
    start = weights(tiny_exhird(kind))
    assert not torch.allclose(whole["mixture.vocabulary.weight"], start["mixture.vocabulary.weight"], atol=1e-3)


def test_lora_trains_and_saves_the_whole_generator(tiny_exhird, tokenizer_for, rows, batch_for, tmp_path):
    tiny_exhird("pretrained").save_pretrained(tmp_path / "base")
    base = ExHirdForKeyphraseGeneration.from_pretrained(tmp_path / "base")
    model, batch = get_peft_model(base, base.lora_config(r=4)), batch_for("pretrained")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    for part in ("lora_A", "lora_B", "embeddings", "reader.project", "reader.nothing", "start", "decoder", "mixture"):
        assert any(part in name for name in trained), part
    assert not any("backbone" in name and "lora" not in name for name in trained)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert all("backbone" in name or "original_module" in name for name in frozen)
    options = {"save_strategy": "steps", "save_steps": 6}
    make_trainer(model, rows["pretrained"], tokenizer_for("pretrained"), tmp_path / "run", **options).train()
    model.eval()
    with torch.no_grad():
        expected = model(**batch).log_probs
        assert not torch.allclose(expected, tiny_exhird("pretrained")(**batch).log_probs, atol=1e-2)
        checkpoint = tmp_path / "run" / "checkpoint-6"
        fresh = ExHirdForKeyphraseGeneration.from_pretrained(tmp_path / "base")
        found = AutoPeftModel.from_pretrained(checkpoint, import_allowlist=["modeling_exhird.modeling_exhird"])
        for again in (PeftModel.from_pretrained(fresh, checkpoint), found):
            assert_close(again.eval()(**batch).log_probs, expected, rtol=0, atol=1e-5)
        rows_ = model.generate_rows(**without_labels(batch))
        merged = model.merge_and_unload()
        merged.save_pretrained(tmp_path / "merged")
        reloaded = ExHirdForKeyphraseGeneration.from_pretrained(tmp_path / "merged")
        assert_close(reloaded(**batch).log_probs, expected, rtol=0, atol=1e-5)
        assert torch.equal(reloaded.generate_rows(**without_labels(batch)).ids, rows_.ids)


def test_adapters_need_a_pretrained_encoder_that_is_trained(tiny_exhird):
    with pytest.raises(ValueError, match="this model's of encoder_type='bigru' has none. Train all its weights"):
        tiny_exhird("bigru").lora_config()
    with pytest.raises(ValueError, match="this model's is frozen. .*freeze_backbone=False"):
        tiny_exhird("pretrained", freeze_backbone=True).lora_config()
    with pytest.warns(UserWarning, match="records no base model"):
        found = tiny_exhird("pretrained", phrase_start="zeros").lora_config()
    assert "encoder.start" not in found.modules_to_save


TWO_PROCESSES = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from modeling_exhird import ExHirdForKeyphraseGeneration

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, folder, kinds = dist.get_rank(), sys.argv[1], sys.argv[2:]
for kind in kinds:
    batch = torch.load(f"{folder}/{kind}-batch.pt", weights_only=True)
    mine = {name: value[2 * rank : 2 * rank + 2] for name, value in batch.items()}
    model = ExHirdForKeyphraseGeneration.from_pretrained(f"{folder}/{kind}").train()
    parallel = DistributedDataParallel(model)
    parallel(**mine).loss.backward()
    if rank == 0:
        torch.save({name: p.grad for name, p in model.named_parameters() if p.requires_grad}, f"{folder}/{kind}.pt")
dist.destroy_process_group()
"""


def test_two_processes_by_torchrun_give_the_gradients_of_one(tiny_exhird, batch_for, tmp_path):
    kinds = {
        "transformer": {"exclusive_loss_coef": 1.0},
        "bigru": {},
        "pretrained": {"freeze_backbone": True},  # and so without dropout
    }
    for kind, options in kinds.items():
        tiny_exhird(kind, **options).save_pretrained(tmp_path / kind)
        torch.save(batch_for(kind), tmp_path / f"{kind}-batch.pt")
    run_by_torchrun(TWO_PROCESSES, tmp_path, *kinds)
    for kind, options in kinds.items():
        model = tiny_exhird(kind, **options).train()
        model(**batch_for(kind)).loss.backward()
        found = torch.load(tmp_path / f"{kind}.pt", weights_only=True)
        assert set(found) == {name for name, p in model.named_parameters() if p.grad is not None}
        for name, gradient in found.items():
            assert_close(gradient, model.get_parameter(name).grad, rtol=1e-4, atol=1e-5, msg=f"{kind} {name}")
