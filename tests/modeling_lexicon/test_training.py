"""LM-Lexicon under the stock Trainer: sharded checkpoints; adapters' copies of routed MLPs."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.testing import assert_close
from transformers.trainer_utils import load_sharded_checkpoint

from modeling_lexicon import LexiconForCausalLM
from tests import tiny_models
from tests.modeling_lexicon.conftest import each_policy, tiny_lexicon
from tests.tiny_models import weights


@pytest.fixture(scope="module")
def rows():
    return tiny_models.trainable_lexicon("token", None).rows


def test_a_run_resumes_from_a_checkpoint_in_several_files_and_takes_up_its_best_model(rows, tmp_path):
    """Experts of one layer lie in different files, which the Trainer loads one after the other."""
    model = tiny_lexicon()
    model.save_pretrained(tmp_path / "checkpoint", max_shard_size="30KB")
    files = list((tmp_path / "checkpoint").glob("model-*.safetensors"))
    assert len(files) > 2
    other = tiny_lexicon(seed=1)
    load_sharded_checkpoint(other, tmp_path / "checkpoint", strict=False)
    expected = weights(model)
    assert all(torch.equal(p, expected[name]) for name, p in weights(other).items())

    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    options["max_steps"] = 4
    worse = [{**row, "labels": row["labels"].clamp(max=3)} for row in rows[:4]]  # what training unlearns
    options |= {"learning_rate": 1e-2, "load_best_model_at_end": True}
    trainer = tiny_models.make_trainer(model, rows, tmp_path / "run", parts={"eval_dataset": worse}, **options)
    trainer.train()
    best = LexiconForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    assert all(torch.equal(p, weights(model)[name]) for name, p in weights(best).items())


@each_policy
def test_an_adapters_copy_of_a_routed_module_gets_its_routing(policy, rows):
    """peft wraps a module that it saves: what the layer passes goes through the wrapper."""
    model = tiny_lexicon(policy=policy)
    batch = {name: torch.stack([row[name] for row in rows[:3]]) for name in rows[0]}
    expected = model(**batch).loss
    lora = LoraConfig(r=4, target_modules=["k_proj"], modules_to_save=["mlp"], task_type="CAUSAL_LM")
    adapted = get_peft_model(copy.deepcopy(model), lora)
    loss = adapted(**batch).loss
    assert_close(loss, expected)
    loss.backward()
    trained = {name: p.grad for name, p in adapted.named_parameters() if p.requires_grad}
    assert any(".experts." in name and "mlp.modules_to_save" in name for name in trained)
    assert all(gradient is not None for gradient in trained.values())
