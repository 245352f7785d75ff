"""LM-Lexicon under the stock Trainer and beside it: learning, resuming, accumulating, LoRA, two processes, sharding."""

import copy

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from torch.testing import assert_close
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import load_sharded_checkpoint

from modeling_lexicon import LexiconForCausalLM, LexiconForSequenceClassification
from tests.modeling_lexicon.conftest import POLICIES, each_policy, gradients, tiny_lexicon
from tests.torchrun import run_by_torchrun


@pytest.fixture(scope="module")
def rows():
    """24 texts of two domains: in each the answer is one token, repeated."""
    torch.manual_seed(0)
    made = []
    for i in range(24):
        domain = i % 2
        prompt = torch.randint(3, 24, (4,)) + 24 * domain
        ids = torch.cat([prompt, torch.full((4,), 5 + domain)])
        labels = ids.clone()
        labels[:4] = -100
        made.append({"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)})
    return made


def make_trainer(model, rows, folder, held_out=None, **options):
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
    arguments = TrainingArguments(output_dir=str(folder), **{**defaults, **options})
    return Trainer(model, arguments, train_dataset=rows, eval_dataset=held_out)


def weights(model):
    return {name: p.detach().clone() for name, p in model.state_dict().items()}


@each_policy
def test_the_stock_trainer_lowers_the_loss(policy, rows, tmp_path):
    trainer = make_trainer(tiny_lexicon(policy=policy, router_aux_loss_coef=0.01), rows, tmp_path, max_steps=16)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-3:]) < 0.3 * sum(losses[:3])
    assert trainer.label_names == ["labels"]
    assert trainer.predict(rows[:4]).predictions.shape == (4, 8, 48)  # logits alone: no routes, no cache


def test_domain_ids_reach_the_model_as_a_column_of_the_data(rows, tmp_path):
    known = [{**row, "domain_ids": i % 2} for i, row in enumerate(rows)]
    trainer = make_trainer(tiny_lexicon(policy="domain", domain_gate=False), known, tmp_path, max_steps=20)
    start = weights(trainer.model)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-3:]) < 0.3 * sum(losses[:3])
    moved = (
        weights(trainer.model)["model.layers.0.mlp.experts.down_proj"] - start["model.layers.0.mlp.experts.down_proj"]
    )
    assert [bool(expert.abs().max() > 0) for expert in moved] == [True, True, False, False]


class Interrupt(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            raise KeyboardInterrupt


@pytest.mark.parametrize("policy", ["token", "sequence_hard"])
def test_an_interrupted_run_resumes_to_the_same_weights_bit_for_bit(policy, rows, tmp_path):
    def model():
        return tiny_lexicon(policy=policy, layers="attention and mlp", attention_dropout=0.1)

    def trainer(folder):
        set_seed(5)
        return make_trainer(model(), rows, folder, save_strategy="steps", save_steps=2, max_steps=8, seed=5)

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


def test_a_run_resumes_from_a_checkpoint_in_several_files_and_takes_up_its_best_model(rows, tmp_path):
    """Experts of one layer lie in different files, which the Trainer loads one after the other."""
    model = tiny_lexicon(layers="attention and mlp")
    model.save_pretrained(tmp_path / "checkpoint", max_shard_size="30KB")
    files = list((tmp_path / "checkpoint").glob("model-*.safetensors"))
    assert len(files) > 2
    other = tiny_lexicon(seed=1, layers="attention and mlp")
    load_sharded_checkpoint(other, tmp_path / "checkpoint", strict=False)
    expected = weights(model)
    assert all(torch.equal(p, expected[name]) for name, p in weights(other).items())

    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    options["max_steps"] = 4
    worse = [{**row, "labels": row["labels"].clamp(max=3)} for row in rows[:4]]  # what training unlearns
    trainer = make_trainer(model, rows, tmp_path / "run", worse, load_best_model_at_end=True, **options)
    trainer.train()
    best = LexiconForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    assert all(torch.equal(p, weights(model)[name]) for name, p in weights(best).items())


@each_policy
def test_gradient_accumulation_changes_nothing(policy, rows, tmp_path):
    uneven = [dict(row) for row in rows]
    for i, row in enumerate(uneven):  # so that micro-batches have unlike numbers of labels
        row["labels"] = row["labels"].clone()
        row["labels"][4 : 4 + i % 4] = -100
        if policy == "domain":
            row["domain_ids"] = i % 2
    found = []
    for size, micro in ((8, 1), (2, 4)):
        trainer = make_trainer(
            tiny_lexicon(policy=policy),
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
        assert_close(micro[name], whole[name], rtol=0, atol=1e-6)
    assert not torch.allclose(whole["lm_head.weight"], tiny_lexicon(policy=policy).lm_head.weight, atol=1e-4)


@pytest.mark.parametrize("num_labels", [1, 3])
def test_the_classifier_accumulates_too(num_labels, rows, tmp_path):
    found = []
    labelled = [{**row, "labels": float(i % 3) if num_labels == 1 else i % 3} for i, row in enumerate(rows)]
    for size, micro in ((8, 1), (2, 4)):
        model = tiny_lexicon(LexiconForSequenceClassification, num_labels=num_labels)
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": micro, "max_steps": 2}
        trainer = make_trainer(model, labelled, tmp_path, optim="sgd", max_grad_norm=0, learning_rate=0.05, **options)
        trainer.train()
        found.append(weights(trainer.model))
    for name in found[0]:
        assert_close(found[1][name], found[0][name], rtol=0, atol=1e-6)


def test_only_gates_and_experts_move_in_the_last_step(rows, tmp_path):
    model = tiny_lexicon(router_aux_loss_coef=0.01)
    start = weights(model)
    model.train_only("gates", "experts")
    make_trainer(model, rows, tmp_path, max_steps=3).train()
    moved = {name for name, p in weights(model).items() if not torch.equal(p, start[name])}
    assert moved == {name for name in start if ".mlp." in name}


# --- LoRA -----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
@pytest.mark.parametrize("policy, saved", [("token", "gate"), ("sequence_hard", "mlp"), ("sequence_soft", "gate")])
def test_lora_on_attention_with_gates_or_experts_saved_reloads_the_same(policy, saved, rows, tmp_path):
    base = tmp_path / "base"
    tiny_lexicon(policy=policy).save_pretrained(base)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=[saved], task_type="CAUSAL_LM")
    model = get_peft_model(LexiconForCausalLM.from_pretrained(base), lora)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert any("lora_A" in name for name in trained) and any(f".{saved}." in name for name in trained)
    assert not any("lora" not in name and f".{saved}." not in name for name in trained)
    make_trainer(model, rows, tmp_path / "run", save_strategy="steps", save_steps=6).train()
    ids = torch.stack([row["input_ids"] for row in rows[:3]])
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits
        assert not torch.allclose(expected, tiny_lexicon(policy=policy)(ids).logits, atol=1e-2)
        checkpoint = tmp_path / "run" / "checkpoint-6"  # saved by the Trainer itself
        for again in (
            AutoPeftModelForCausalLM.from_pretrained(checkpoint),
            PeftModel.from_pretrained(LexiconForCausalLM.from_pretrained(base), checkpoint),
        ):
            assert_close(again.eval()(input_ids=ids).logits, expected, rtol=0, atol=1e-6)
        options = {"max_new_tokens": 4, "do_sample": False}
        written = model.generate(input_ids=ids, **options)
        assert torch.equal(written, again.generate(input_ids=ids, **options))
        merged = model.merge_and_unload()
        merged.save_pretrained(tmp_path / "merged")
        reloaded = LexiconForCausalLM.from_pretrained(tmp_path / "merged")
        assert_close(reloaded(ids).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("policy", ["token", "sequence_soft", "sequence_hard", "domain"])
@pytest.mark.parametrize("layers, wrapped", [("two linears", "q_proj"), ("two linears", "up_proj"), ("mlp", "mlp")])
def test_an_adapters_copy_of_a_routed_module_gets_its_routing(policy, layers, wrapped, rows):
    """peft wraps a module that it saves: what the layer passes goes through the wrapper."""
    model = tiny_lexicon(policy=policy, layers=layers)
    batch = {name: torch.stack([row[name] for row in rows[:3]]) for name in rows[0]}
    expected = model(**batch).loss
    lora = LoraConfig(r=4, target_modules=["k_proj"], modules_to_save=[wrapped], task_type="CAUSAL_LM")
    adapted = get_peft_model(copy.deepcopy(model), lora)
    loss = adapted(**batch).loss
    assert_close(loss, expected)
    loss.backward()
    trained = {name: p.grad for name, p in adapted.named_parameters() if p.requires_grad}
    assert any(".experts." in name and f"{wrapped}.modules_to_save" in name for name in trained)
    assert all(gradient is not None for gradient in trained.values())


@pytest.mark.parametrize("policy", ["token", "sequence_hard"])
def test_lora_on_the_experts_parameters_trains_and_merges(policy, rows):
    model = tiny_lexicon(policy=policy)
    batch = {name: torch.stack([row[name] for row in rows[:3]]) for name in rows[0]}
    expected = model(**batch).logits
    lora = LoraConfig(
        r=2, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], task_type="CAUSAL_LM"
    )
    adapted = get_peft_model(copy.deepcopy(model), lora)
    assert_close(adapted(**batch).logits, expected)
    step = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):
        step.zero_grad()
        adapted(**batch).loss.backward()
        step.step()
    adapted.eval()
    with torch.no_grad():
        moved = adapted(**batch).logits
        assert not torch.allclose(moved, expected, atol=1e-3)
        assert_close(adapted.merge_and_unload()(**batch).logits, moved, rtol=1e-4, atol=1e-4)


# --- several processes ----------------------------------------------------------------------------------------------

TWO_PROCESSES = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from modeling_lexicon import LexiconForCausalLM

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, folder, policies = dist.get_rank(), sys.argv[1], sys.argv[2:]
batch = torch.load(f"{folder}/batch.pt", weights_only=True)
mine = {name: value[2 * rank : 2 * rank + 2] for name, value in batch.items()}
items = (batch["labels"][:, 1:] != -100).sum()
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
for policy in policies:
    model = LexiconForCausalLM.from_pretrained(f"{folder}/{policy}").train()
    parallel = DistributedDataParallel(model)
    (parallel(**mine, num_items_in_batch=items).loss * dist.get_world_size()).backward()
    replicated = {name: p.grad for name, p in model.named_parameters()}

    model = LexiconForCausalLM.from_pretrained(f"{folder}/{policy}").train()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    (model(**mine, num_items_in_batch=items).loss * dist.get_world_size()).backward()
    sharded = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    if rank == 0:
        torch.save({"replicated": replicated, "sharded": sharded}, f"{folder}/{policy}.pt")
dist.destroy_process_group()
"""


def test_two_processes_replicated_or_sharded_give_the_gradients_of_one(rows, tmp_path):
    batch = {name: torch.stack([row[name] for row in rows[:4]]) for name in rows[0]}
    batch["labels"][3, :6] = -100
    torch.save(batch, tmp_path / "batch.pt")
    for policy in POLICIES:
        tiny_lexicon(policy=policy, layers="attention and mlp").save_pretrained(tmp_path / policy)
    run_by_torchrun(TWO_PROCESSES, tmp_path, *POLICIES)
    for policy in POLICIES:
        model = tiny_lexicon(policy=policy, layers="attention and mlp")
        model(**batch, num_items_in_batch=(batch["labels"][:, 1:] != -100).sum()).loss.backward()
        found = torch.load(tmp_path / f"{policy}.pt", weights_only=True)
        for way in ("replicated", "sharded"):
            assert set(found[way]) == set(gradients(model))
            for name, gradient in found[way].items():
                expected = model.get_parameter(name).grad
                assert_close(gradient, expected, rtol=1e-4, atol=1e-6, msg=f"{policy} {way} {name}")
