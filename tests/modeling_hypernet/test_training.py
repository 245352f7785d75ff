"""The hypernetwork under the stock Trainer: learning, resuming, accumulating, LoRA, two processes."""

import pytest
import torch
from datasets import Dataset
from peft import AutoPeftModelForTokenClassification, get_peft_model
from torch.testing import assert_close
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from modeling_hypernet import HypernetCollator, HypernetForTokenClassification, encode_pairs, encode_questions
from tests.torchrun import run_by_torchrun

from .conftest import KINDS

TITLES = ["graph cut", "learning", None, "network cuts"] * 6
TEXTS = [
    "the graph cut of the network",
    "learning in graph networks is the problem",
    "cuts and networks",
    "the problem of learning the graph cut for the network and the network cuts",
] * 6
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def rows(tiny_tokenizer):
    """rows[kind]: what each head learns."""
    pairs = encode_pairs(TITLES, TEXTS, tiny_tokenizer)
    masks = zip(pairs["input_ids"], pairs["main_mask"], strict=True)
    tags = [[(i % 3 > 0) + 0 if main else -100 for i, main in zip(*row, strict=True)] for row in masks]
    for row in tags:  # what follows a B goes on with it
        row[:] = [2 if label == 1 and before >= 1 else label for label, before in zip(row, [0, *row], strict=False)]
    answers = [{"text": [text.split()[-1]], "answer_start": [text.rindex(" ") + 1]} for text in TEXTS]
    asked = {"question": [title or "of" for title in TITLES], "context": TEXTS, "answers": answers}
    return {
        "tags": Dataset.from_dict({**pairs, "labels": tags}),
        "classes": Dataset.from_dict({**pairs, "labels": [i % 4 for i in range(len(TEXTS))]}),
        "answers": Dataset.from_dict(encode_questions(asked, tiny_tokenizer, max_length=60, stride=8)),
    }


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
    return Trainer(
        model,
        TrainingArguments(output_dir=str(folder), **{**defaults, **options}),
        train_dataset=rows,
        data_collator=HypernetCollator(tokenizer),
        processing_class=tokenizer,
    )


def weights(model):
    return {name: p.detach().clone() for name, p in model.state_dict().items()}


@each_kind
def test_the_stock_trainer_lowers_the_loss(kind, tiny_hypernet, tiny_tokenizer, rows, tmp_path):
    trainer = make_trainer(tiny_hypernet(kind), rows[kind], tiny_tokenizer, tmp_path, max_steps=100, learning_rate=3e-3)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3])
    predicted = trainer.predict(rows[kind]).predictions
    assert len(predicted) == 2 if kind == "answers" else predicted.shape[-1] in (3, 4)  # logits, and nothing else


class Interrupt(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            raise KeyboardInterrupt


@pytest.mark.parametrize("lora", [False, True])
def test_an_interrupted_run_resumes_to_the_same_weights_bit_for_bit(
    lora, tiny_hypernet, tiny_tokenizer, rows, tmp_path
):
    def model():
        made = tiny_hypernet("tags")
        return get_peft_model(made, made.lora_config(r=4)) if lora else made

    def trainer(folder):
        set_seed(5)
        options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 8, "seed": 5}
        return make_trainer(model(), rows["tags"], tiny_tokenizer, folder, **options)

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


@each_kind
def test_gradient_accumulation_changes_nothing(kind, tiny_hypernet, tiny_tokenizer, rows, tmp_path):
    found = []
    for size, micro in ((8, 1), (2, 4)):
        model = tiny_hypernet(kind)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": micro, "max_steps": 2}
        options |= {"optim": "sgd", "max_grad_norm": 0, "learning_rate": 0.05}
        trainer = make_trainer(model, rows[kind], tiny_tokenizer, tmp_path, **options)
        trainer.train()
        found.append((weights(trainer.model), trainer.state.log_history[0]["loss"]))
    (whole, loss), (micro, micro_loss) = found
    assert_close(micro_loss, loss, rtol=1e-3, atol=1e-3)
    for name in whole:
        assert_close(micro[name], whole[name], rtol=1e-4, atol=1e-5)


def test_lora_trains_and_saves_the_whole_hypernetwork(tiny_hypernet, tiny_tokenizer, rows, tmp_path):
    tiny_hypernet().save_pretrained(tmp_path / "base")
    model = HypernetForTokenClassification.from_pretrained(tmp_path / "base")
    peft_model = get_peft_model(model, model.lora_config())
    trained = {name for name, p in peft_model.named_parameters() if p.requires_grad}
    for part in ("meta_encoder.", "reader.", "classifier.", "crf.", "lora_A", "lora_B"):
        assert any(part in name for name in trained), part
    assert not any("backbone" in name and "lora" not in name for name in trained)
    options = {"save_strategy": "steps", "save_steps": 6}
    make_trainer(peft_model, rows["tags"], tiny_tokenizer, tmp_path / "run", **options).train()
    batch = HypernetCollator(tiny_tokenizer)([rows["tags"][i] for i in range(4)])
    peft_model.eval()
    with torch.no_grad():
        expected = peft_model(**batch).logits
        assert not torch.allclose(expected, tiny_hypernet()(**batch).logits, atol=1e-3)
        again = AutoPeftModelForTokenClassification.from_pretrained(tmp_path / "run" / "checkpoint-6").eval()
        assert_close(again(**batch).logits, expected, rtol=0, atol=1e-6)
        merged = peft_model.merge_and_unload()
        merged.save_pretrained(tmp_path / "merged")
        reloaded = HypernetForTokenClassification.from_pretrained(tmp_path / "merged")
        assert_close(reloaded(**batch).logits, expected, rtol=0, atol=1e-5)
    with pytest.warns(UserWarning, match="records no base model"):
        tiny_hypernet().lora_config()
    with pytest.raises(ValueError, match="The backbone is frozen and runs without gradients"):
        tiny_hypernet(freeze_backbone=True).lora_config()


TWO_PROCESSES = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from modeling_hypernet import HypernetForTokenClassification

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, folder = dist.get_rank(), sys.argv[1]
batch = torch.load(f"{folder}/batch.pt", weights_only=True)
mine = {name: value[2 * rank : 2 * rank + 2] for name, value in batch.items()}
model = HypernetForTokenClassification.from_pretrained(f"{folder}/model")
parallel = DistributedDataParallel(model)
loss = parallel(**mine, num_items_in_batch=(batch["labels"] != -100).sum()).loss
(loss * dist.get_world_size()).backward()
if rank == 0:
    torch.save({n: p.grad for n, p in model.named_parameters() if p.requires_grad}, f"{folder}/gradients.pt")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("frozen", [True, False])
def test_two_processes_by_torchrun_give_the_gradients_of_one(frozen, tiny_hypernet, tiny_tokenizer, rows, tmp_path):
    batch = HypernetCollator(tiny_tokenizer)([rows["tags"][i] for i in range(4)])
    torch.save(batch, tmp_path / "batch.pt")
    model = tiny_hypernet(freeze_backbone=frozen)
    model.save_pretrained(tmp_path / "model")
    run_by_torchrun(TWO_PROCESSES, tmp_path)
    gradients = torch.load(tmp_path / "gradients.pt", weights_only=True)
    model(**batch, num_items_in_batch=(batch["labels"] != -100).sum()).loss.backward()
    assert set(gradients) == {name for name, p in model.named_parameters() if p.grad is not None}
    for name, gradient in gradients.items():
        assert_close(gradient, model.get_parameter(name).grad, rtol=1e-4, atol=1e-6, msg=name)
