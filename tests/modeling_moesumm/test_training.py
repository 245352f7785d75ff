"""MoeSumm under the stock Seq2SeqTrainer and beside it: learning, resuming, accumulating, LoRA, two processes."""

import pytest
import torch
from peft import AutoPeftModelForSeq2SeqLM, LoraConfig, PeftModel, get_peft_model
from torch.testing import assert_close
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback, set_seed

from modeling_moesumm import MoeSummForConditionalGeneration
from tests.modeling_moesumm.conftest import V, each_backbone, gradients, tiny_moesumm
from tests.torchrun import run_by_torchrun

DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1}


@pytest.fixture(scope="module")
def rows():
    """24 texts of three datasets and of none: the summary is one token of the text's dataset, repeated."""
    torch.manual_seed(0)
    made = []
    for i in range(24):
        dataset = i % 4 - 1
        ids = torch.randint(20, V, (7,))
        ids[-1] = 2
        labels = torch.tensor([10 + dataset, 10 + dataset, 10 + dataset, 2])
        made.append(
            {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, "dataset_ids": dataset}
        )
    return made


def make_trainer(model, rows, folder, **options):
    defaults = {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    arguments = Seq2SeqTrainingArguments(output_dir=str(folder), **{**defaults, **options})
    return Seq2SeqTrainer(model, arguments, train_dataset=rows)


def weights(model):
    return {name: p.detach().clone() for name, p in model.state_dict().items()}


@each_backbone
def test_the_stock_trainer_lowers_the_loss_and_evaluates(backbone, rows, tmp_path):
    options = {"max_steps": 20, "predict_with_generate": True, "generation_max_length": 5}
    trainer = make_trainer(tiny_moesumm(backbone), rows, tmp_path, **options)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-3:]) < 0.6 * sum(losses[:3])
    assert trainer.label_names == ["labels"]
    # the first token is forced by no one: it is the dataset's
    written = trainer.predict(rows[:4]).predictions
    wanted = trainer.model.generate(
        torch.stack([row["input_ids"] for row in rows[:4]]),
        dataset_ids=torch.tensor([row["dataset_ids"] for row in rows[:4]]),
        max_length=5,
    )
    assert torch.equal(torch.tensor(written)[:, : wanted.shape[1]], wanted)
    trainer.args.predict_with_generate = False
    assert trainer.predict(rows[:4]).predictions.shape == (4, 4, V)  # logits alone: no margins, no cache


class Interrupt(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            raise KeyboardInterrupt


@each_backbone
def test_an_interrupted_run_resumes_to_the_same_weights_bit_for_bit(backbone, rows, tmp_path):
    def model():
        return tiny_moesumm(backbone, changes=DROPOUT)

    def trainer(folder):
        set_seed(5)
        return make_trainer(model(), rows, folder, save_strategy="steps", save_steps=2, max_steps=6, seed=5)

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
    start = weights(model())  # negative control: training moved them
    assert any(not torch.equal(expected[name], start[name]) for name in expected)


@each_backbone
@pytest.mark.parametrize("options", [{}, {"main_expert": False}])
def test_gradient_accumulation_changes_nothing(backbone, options, rows, tmp_path):
    uneven = [dict(row) for row in rows]
    for i, row in enumerate(uneven):  # so that micro-batches have unlike numbers of labels
        row["labels"] = row["labels"].clone()
        row["labels"][1 : 1 + i % 4] = -100
    found = []
    for size, micro in ((8, 1), (2, 4)):
        trainer = make_trainer(
            tiny_moesumm(backbone, **options),
            uneven,
            tmp_path,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=micro,
            max_steps=2,
            optim="sgd",
            max_grad_norm=0,
            learning_rate=0.1,
        )
        trainer.train()
        found.append((weights(trainer.model), trainer.state.log_history[0]["loss"]))
    (whole, loss), (micro, micro_loss) = found
    assert_close(micro_loss, loss, rtol=1e-3, atol=1e-3)
    for name in whole:
        assert_close(micro[name], whole[name], rtol=1e-4, atol=1e-5, msg=name)
    start = weights(tiny_moesumm(backbone, **options))
    assert not torch.allclose(whole["backbone.lm_head.weight"], start["backbone.lm_head.weight"], atol=1e-3)


def test_gradient_checkpointing_under_the_trainer_changes_nothing(rows, tmp_path):
    found = []
    for options in ({}, {"gradient_checkpointing": True}):
        trainer = make_trainer(tiny_moesumm(), rows, tmp_path, max_steps=2, optim="sgd", learning_rate=0.1, **options)
        trainer.train()
        found.append(weights(trainer.model))
    for name in found[0]:
        assert_close(found[1][name], found[0][name], rtol=0, atol=1e-5)


def test_a_new_dataset_is_learnt_by_deputies_and_selectors_alone(rows, tmp_path):
    model = tiny_moesumm()
    model.add_dataset("radio")
    model.train_deputies_only()
    start = weights(model)
    new = [{**row, "dataset_ids": 3} for row in rows]
    make_trainer(model, new, tmp_path, max_steps=3).train()
    moved = {name for name, p in weights(model).items() if not torch.equal(p, start[name])}
    assert moved == {name for name in start if ".deputies." in name}


def test_lora_on_attention_together_with_deputies_reloads_the_same(rows, tmp_path):
    base = tmp_path / "base"
    tiny_moesumm().save_pretrained(base)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["deputies"], task_type="SEQ_2_SEQ_LM")
    model = get_peft_model(MoeSummForConditionalGeneration.from_pretrained(base), lora)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert any("lora_A" in name for name in trained) and any(".selectors." in name for name in trained)
    assert not any("lora" not in name and ".deputies." not in name for name in trained)
    make_trainer(model, rows, tmp_path / "run", save_strategy="steps", save_steps=6).train()
    texts = {
        name: torch.stack([torch.as_tensor(row[name]) for row in rows[:4]]) for name in ("input_ids", "dataset_ids")
    }
    reading = {**texts, "decoder_input_ids": torch.randint(3, V, (4, 3))}
    with torch.no_grad():
        expected = model.eval()(**reading).logits
        assert not torch.allclose(expected, tiny_moesumm()(**reading).logits, atol=1e-2)
        checkpoint = tmp_path / "run" / "checkpoint-6"  # saved by the Trainer itself
        for again in (
            AutoPeftModelForSeq2SeqLM.from_pretrained(checkpoint),
            PeftModel.from_pretrained(MoeSummForConditionalGeneration.from_pretrained(base), checkpoint),
        ):
            assert_close(again.eval()(**reading).logits, expected, rtol=0, atol=1e-5)
        options = {"max_new_tokens": 5, "num_beams": 3}
        written = model.generate(**texts, **options)
        assert torch.equal(written, again.generate(**texts, **options))
        merged = model.merge_and_unload()
        merged.save_pretrained(tmp_path / "merged")
        reloaded = MoeSummForConditionalGeneration.from_pretrained(tmp_path / "merged")
        assert_close(reloaded(**reading).logits, expected, rtol=0, atol=1e-5)


# --- several processes ----------------------------------------------------------------------------------------------

TWO_PROCESSES = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from modeling_moesumm import MoeSummForConditionalGeneration

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, folder, backbones = dist.get_rank(), sys.argv[1], sys.argv[2:]
batch = torch.load(f"{folder}/batch.pt", weights_only=True)
mine = {name: value[2 * rank : 2 * rank + 2] for name, value in batch.items()}
items = (batch["labels"] != -100).sum()
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
for backbone in backbones:
    model = MoeSummForConditionalGeneration.from_pretrained(f"{folder}/{backbone}").train()
    model.gradient_checkpointing_enable({"use_reentrant": True})  # it wants every parameter used once
    parallel = DistributedDataParallel(model)
    (parallel(**mine, num_items_in_batch=items).loss * dist.get_world_size()).backward()
    replicated = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    model = MoeSummForConditionalGeneration.from_pretrained(f"{folder}/{backbone}").train()
    base = model.backbone.model
    for layer in (*base.encoder.layers, *base.decoder.layers):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    (model(**mine, num_items_in_batch=items).loss * dist.get_world_size()).backward()
    sharded = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    if rank == 0:
        torch.save({"replicated": replicated, "sharded": sharded}, f"{folder}/{backbone}.pt")
dist.destroy_process_group()
"""


def test_two_processes_replicated_or_sharded_give_the_gradients_of_one(batch, tmp_path):
    backbones = ("bart", "pegasus")
    # the second process has no dataset at all: its deputies get zeros, and nobody waits for them
    batch = {**batch, "dataset_ids": torch.tensor([0, 2, -1, -1])}
    torch.save(batch, tmp_path / "batch.pt")
    for backbone in backbones:
        tiny_moesumm(backbone).save_pretrained(tmp_path / backbone)
    run_by_torchrun(TWO_PROCESSES, tmp_path, *backbones)
    for backbone in backbones:
        model = tiny_moesumm(backbone).train()
        model(**batch, num_items_in_batch=(batch["labels"] != -100).sum()).loss.backward()
        found = torch.load(tmp_path / f"{backbone}.pt", weights_only=True)
        for way in ("replicated", "sharded"):
            assert set(found[way]) == set(gradients(model))
            for name, gradient in found[way].items():
                expected = model.get_parameter(name).grad
                assert_close(gradient, expected, rtol=1e-4, atol=1e-5, msg=f"{backbone} {way} {name}")
