"""SEKE under the stock Trainer: learning, resuming, accumulating, LoRA, two processes."""

import json
import warnings

import pytest
import torch
from datasets import Dataset
from peft import AutoPeftModelForTokenClassification, PeftModel, get_peft_model
from torch.testing import assert_close
from transformers import (
    AutoModel,
    AutoModelForTokenClassification,
    DataCollatorForTokenClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    pipeline,
    set_seed,
)

from keyphrase_tools.labels import encode
from modeling_seke import SekeForTokenClassification
from tests.torchrun import run_by_torchrun

BACKBONES = ("bert", "deberta-v2", "modernbert")
each_backbone = pytest.mark.parametrize("backbone", BACKBONES)
TEXTS = [
    "the graph cut of the network",
    "learning in graph networks is the problem",
    "cuts and networks",
    "the problem of learning the graph cut for the network and the network cuts",
] * 6


@pytest.fixture(scope="module")
def rows(tiny_tokenizer):
    gold = [["graph cut", "network"], ["graph networks", "learning"], ["cuts"], ["graph cut", "network cuts"]] * 6
    return Dataset.from_dict(encode({"text": TEXTS, "keyphrases": gold}, tiny_tokenizer))


def make_trainer(model, rows, tokenizer, folder, **options):
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
    return Trainer(
        model,
        TrainingArguments(output_dir=str(folder), **{**defaults, **options}),
        train_dataset=rows,
        data_collator=DataCollatorForTokenClassification(tokenizer),
        processing_class=tokenizer,
    )


def weights(model):
    return {name: p.detach().clone() for name, p in model.state_dict().items()}


@each_backbone
def test_the_stock_trainer_lowers_the_loss(backbone, tiny_seke, tiny_tokenizer, rows, tmp_path):
    trainer = make_trainer(tiny_seke(backbone), rows, tiny_tokenizer, tmp_path, max_steps=25)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3])
    assert trainer.label_names == ["labels"]
    assert trainer.predict(rows).predictions.shape[-1] == 3  # logits alone, neither router nor choices


class Interrupt(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            raise KeyboardInterrupt


@each_backbone
@pytest.mark.parametrize("lora", [False, True])
def test_an_interrupted_run_resumes_to_the_same_weights_bit_for_bit(
    backbone, lora, tiny_seke, tiny_tokenizer, rows, tmp_path
):
    def model():
        made = tiny_seke(backbone)
        return get_peft_model(made, made.lora_config(r=4)) if lora else made

    def trainer(folder):
        set_seed(5)
        return make_trainer(
            model(), rows, tiny_tokenizer, folder, save_strategy="steps", save_steps=2, max_steps=8, seed=5
        )

    whole = trainer(tmp_path / "whole")
    whole.train()
    broken = trainer(tmp_path / "broken")
    broken.add_callback(Interrupt())
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    resumed = trainer(tmp_path / "broken")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 8
    expected, found = weights(whole.model), weights(resumed.model)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    start = weights(model())  # negative control: training moved them
    assert any(not torch.equal(expected[name], start[name]) for name in expected)


def quiet(model):
    """No dropout and no routing noise: two ways through the same batch must then agree."""
    for module in model.modules():
        for name in ("p", "dropout", "drop_prob", "attention_dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    torch.nn.init.constant_(model.moe.router.noise.bias, -1e4)
    torch.nn.init.zeros_(model.moe.router.noise.weight)
    return model


@each_backbone
def test_gradient_accumulation_changes_nothing(backbone, tiny_seke, tiny_tokenizer, rows, tmp_path):
    found = []
    for size, micro in ((8, 1), (2, 4)):
        trainer = make_trainer(
            quiet(tiny_seke(backbone)),
            rows,
            tiny_tokenizer,
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
        assert_close(micro[name], whole[name], rtol=1e-4, atol=1e-5)


@each_backbone
def test_lora_trains_and_saves_the_whole_head(backbone, tiny_seke, tiny_tokenizer, rows, tmp_path):
    base = tmp_path / "base"
    tiny_seke(backbone).save_pretrained(base)
    tiny_tokenizer.save_pretrained(base)
    model = SekeForTokenClassification.from_pretrained(base)
    peft_model = get_peft_model(model, model.lora_config())
    assert peft_model.peft_config["default"].r == peft_model.peft_config["default"].lora_alpha == 16
    trained = {name for name, p in peft_model.named_parameters() if p.requires_grad}
    for part in ("moe.", "rnn.", "classifier.", "lora_A", "lora_B"):
        assert any(part in name for name in trained), part
    assert not any("backbone" in name and "lora" not in name for name in trained)

    trainer = make_trainer(peft_model, rows, tiny_tokenizer, tmp_path / "run", save_strategy="steps", save_steps=3)
    trainer.train()
    before = tiny_seke(backbone)
    batch = tiny_tokenizer(TEXTS[:4], padding=True, return_tensors="pt")
    peft_model.eval()
    with torch.no_grad():
        expected = peft_model(**batch).logits
        assert not torch.allclose(expected, before(**batch).logits, atol=1e-3)
        checkpoint = tmp_path / "run" / "checkpoint-6"  # saved in mid-training by the Trainer itself
        for again in (
            AutoPeftModelForTokenClassification.from_pretrained(checkpoint),
            AutoModelForTokenClassification.from_pretrained(checkpoint),
            PeftModel.from_pretrained(SekeForTokenClassification.from_pretrained(base), checkpoint),
        ):
            assert_close(again.eval()(**batch).logits, expected, rtol=0, atol=1e-6)
        merged = peft_model.merge_and_unload()
        merged.save_pretrained(tmp_path / "merged")
        reloaded = SekeForTokenClassification.from_pretrained(tmp_path / "merged")
        assert_close(reloaded(**batch).logits, expected, rtol=0, atol=1e-5)
    assert pipeline("token-classification", model=str(checkpoint), tokenizer=tiny_tokenizer)(TEXTS[0]) is not None


def test_an_adapter_over_a_model_that_was_never_saved_is_warned_about(tiny_seke, backbone_config, tmp_path):
    AutoModel.from_config(backbone_config("bert")).save_pretrained(tmp_path / "backbone")
    model = SekeForTokenClassification.from_backbone(str(tmp_path / "backbone"))
    with pytest.warns(UserWarning, match="records no base model"):
        model.lora_config()
    model.name_or_path = model.config.text_config.name_or_path = "microsoft/deberta-v3-base"  # its backbone is not it
    with pytest.warns(UserWarning, match="records no base model"):
        model.lora_config()
    model.save_pretrained(tmp_path / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        SekeForTokenClassification.from_pretrained(tmp_path / "base").lora_config()


def test_lora_targets_fit_encoders_by_their_own_names(tiny_seke):
    targets = {name: tiny_seke(name).lora_config().target_modules for name in BACKBONES}
    assert targets == {"bert": {"query", "value"}, "deberta-v2": {"query_proj", "value_proj"}, "modernbert": {"Wqkv"}}
    assert tiny_seke(use_rnn=False).lora_config(r=2).modules_to_save == ["moe", "classifier"]
    assert tiny_seke().lora_config(target_modules=["dense"]).target_modules == {"dense"}


TWO_PROCESSES = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from modeling_seke import SekeForTokenClassification

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, folder, backbones = dist.get_rank(), sys.argv[1], sys.argv[2:]
batch = torch.load(f"{folder}/batch.pt", weights_only=True)
mine = {name: value[2 * rank : 2 * rank + 2] for name, value in batch.items()}
items = (batch["labels"] != -100).sum()
for backbone in backbones:
    model = SekeForTokenClassification.from_pretrained(f"{folder}/{backbone}")
    for name, p in model.named_parameters():
        p.requires_grad_(".noise." not in name)  # unused in eval mode, and DDP asks for every parameter
    parallel = DistributedDataParallel(model)
    (parallel(**mine, num_items_in_batch=items).loss * dist.get_world_size()).backward()
    if rank == 0:
        torch.save({n: p.grad for n, p in model.named_parameters() if p.requires_grad}, f"{folder}/{backbone}.pt")
dist.destroy_process_group()
"""


def test_two_processes_by_torchrun_give_the_gradients_of_one(tiny_seke, tiny_tokenizer, tmp_path):
    batch = dict(tiny_tokenizer(TEXTS[:4], padding=True, return_tensors="pt"))
    batch["labels"] = batch["input_ids"].remainder(3).masked_fill(batch["attention_mask"] == 0, -100)
    torch.save(batch, tmp_path / "batch.pt")
    for backbone in BACKBONES:
        tiny_seke(backbone).save_pretrained(tmp_path / backbone)
    run_by_torchrun(TWO_PROCESSES, tmp_path, *BACKBONES)
    for backbone in BACKBONES:
        model, parallel = tiny_seke(backbone), torch.load(tmp_path / f"{backbone}.pt", weights_only=True)
        model(**batch, num_items_in_batch=(batch["labels"] != -100).sum()).loss.backward()
        for name, gradient in parallel.items():
            assert_close(gradient, model.get_parameter(name).grad, rtol=1e-4, atol=1e-6, msg=f"{backbone} {name}")


FULLY_SHARDED = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from modeling_seke import SekeForTokenClassification

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, folder, backbones = dist.get_rank(), sys.argv[1], sys.argv[2:]
mesh = init_device_mesh("cpu", (2,))
batch = torch.load(f"{folder}/batch.pt", weights_only=True)
mine = {name: value[2 * rank : 2 * rank + 2] for name, value in batch.items()}
items = (batch["labels"] != -100).sum()
for backbone in backbones:
    model = SekeForTokenClassification.from_pretrained(f"{folder}/{backbone}")
    for part in (model.moe, model.rnn, model):
        fully_shard(part, mesh=mesh)
    sharded = sum(p.to_local().numel() for p in model.parameters())
    assert sharded < 0.6 * sum(p.numel() for p in model.parameters())
    (model(**mine, num_items_in_batch=items).loss * dist.get_world_size()).backward()
    found = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    stepped = {n: p.full_tensor().detach() for n, p in model.named_parameters()}
    if rank == 0:
        torch.save({"gradients": found, "stepped": stepped}, f"{folder}/{backbone}.pt")
dist.destroy_process_group()
"""


def test_fully_sharded_by_fsdp2_it_has_the_gradients_of_one(tiny_seke, tiny_tokenizer, tmp_path):
    batch = dict(tiny_tokenizer(TEXTS[:4], padding=True, return_tensors="pt"))
    batch["labels"] = batch["input_ids"].remainder(3).masked_fill(batch["attention_mask"] == 0, -100)
    torch.save(batch, tmp_path / "batch.pt")
    for backbone in BACKBONES:
        tiny_seke(backbone).save_pretrained(tmp_path / backbone)
    run_by_torchrun(FULLY_SHARDED, tmp_path, *BACKBONES)
    for backbone in BACKBONES:
        model, sharded = tiny_seke(backbone), torch.load(tmp_path / f"{backbone}.pt", weights_only=True)
        model(**batch, num_items_in_batch=(batch["labels"] != -100).sum()).loss.backward()
        expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert set(sharded["gradients"]) >= set(expected)
        for name, gradient in expected.items():
            assert_close(sharded["gradients"][name], gradient, rtol=1e-4, atol=1e-6, msg=f"{backbone} {name}")
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        for name, p in model.named_parameters():
            assert_close(sharded["stepped"][name], p.detach(), rtol=1e-4, atol=1e-6, msg=f"{backbone} {name}")


def test_a_run_under_torchrun_trains_with_the_stock_trainer(tiny_seke, tiny_tokenizer, rows, tmp_path):
    tiny_seke().save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    rows.save_to_disk(str(tmp_path / "rows"))
    run_by_torchrun(TRAINER_SCRIPT, tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["world"] == 2 and result["steps"] == 3
    SekeForTokenClassification.from_pretrained(tmp_path / "out")


TRAINER_SCRIPT = """
import json, sys
from datasets import load_from_disk
from transformers import AutoTokenizer, DataCollatorForTokenClassification, Trainer, TrainingArguments
from modeling_seke import SekeForTokenClassification

folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder + "/model")
arguments = TrainingArguments(output_dir=folder + "/out", max_steps=3, per_device_train_batch_size=2, report_to="none",
                              use_cpu=True, save_strategy="no", disable_tqdm=True)
trainer = Trainer(SekeForTokenClassification.from_pretrained(folder + "/model"), arguments,
                  train_dataset=load_from_disk(folder + "/rows"), data_collator=DataCollatorForTokenClassification(tokenizer))
trainer.train()
trainer.save_model()
if trainer.is_world_process_zero():
    json.dump({"world": arguments.world_size, "steps": trainer.state.global_step}, open(folder + "/result.json", "w"))
"""
