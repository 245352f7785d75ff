"""Everything that people push comes back the same in a fresh process: private, by revision, as a pull request, as an
adapter, and from the middle of a training run.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loopback_hub import LoopbackHub

ROOT = Path(__file__).resolve().parents[2]

COMMON = """
import json, sys
import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer, Trainer, TrainingArguments, pipeline
import keyphrase_tools
TEXT = "the graph cut of the network is the problem of learning in graph networks"

def logits(model, tokenizer):
    with torch.no_grad():
        return model.eval()(**tokenizer(TEXT, return_tensors="pt")).logits.flatten().tolist()
"""

PUSH = (
    COMMON
    + """
from huggingface_hub import HfApi
from peft import get_peft_model
folder, api, said = sys.argv[1], HfApi(), {}
model, tokenizer = AutoModelForTokenClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)

def change(amount):
    with torch.no_grad():
        model.classifier.bias += torch.tensor([amount, 0.0, -amount])

model.push_to_hub("tester/private", private=True)
tokenizer.push_to_hub("tester/private", private=True)
said["v1"] = logits(model, tokenizer)
api.create_tag("tester/private", tag="v1")
change(0.5)
model.push_to_hub("tester/private")
said["main"] = logits(model, tokenizer)
change(0.5)
said["pull request"] = logits(model, tokenizer)
pr = model.push_to_hub("tester/private", create_pr=True)
said["pr"] = pr.pr_revision
api.create_branch("tester/private", branch="dev")
change(0.5)
model.push_to_hub("tester/private", revision="dev")
said["dev"] = logits(model, tokenizer)

model = AutoModelForTokenClassification.from_pretrained(folder)
model.push_to_hub("tester/base")
tokenizer.push_to_hub("tester/base")
base = AutoModelForTokenClassification.from_pretrained("tester/base")
adapted = get_peft_model(base, base.lora_config(r=2))
for name, p in adapted.named_parameters():
    if p.requires_grad:
        torch.nn.init.normal_(p, std=0.2)
adapted.push_to_hub("tester/adapter")
said["adapter"] = logits(adapted, tokenizer)

rows = [{**tokenizer(TEXT), "labels": [i % 3 for i in range(len(tokenizer(TEXT)["input_ids"]))]}] * 4
arguments = TrainingArguments(
    "run", push_to_hub=True, hub_model_id="tester/run", hub_strategy="checkpoint", save_steps=2, max_steps=4,
    per_device_train_batch_size=2, learning_rate=0.05, use_cpu=True, report_to="none", disable_tqdm=True, hub_private_repo=True,
)
trainer = Trainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
trainer.train()
trainer.push_to_hub()
said["run"] = logits(trainer.model, tokenizer)
pipeline("keyphrase-extraction", model=model, tokenizer=tokenizer).push_to_hub("tester/pipeline", private=True)
said["phrases"] = pipeline("keyphrase-extraction", model=model, tokenizer=tokenizer)(TEXT, top_k=None)
print("SAID" + json.dumps(said))
"""
)

PULL = (
    COMMON
    + """
from peft import AutoPeftModelForTokenClassification, PeftModel
revision, said = sys.argv[1], {}
tokenizer = AutoTokenizer.from_pretrained("tester/private")
open_ = AutoModelForTokenClassification.from_pretrained
for name, given in (("v1", "v1"), ("main", None), ("pull request", revision), ("dev", "dev")):
    options = {} if given is None else {"revision": given}
    said[name] = logits(open_("tester/private", **options), tokenizer)
said["adapter"] = logits(PeftModel.from_pretrained(open_("tester/base"), "tester/adapter"), tokenizer)
said["adapter alone"] = logits(AutoPeftModelForTokenClassification.from_pretrained("tester/adapter"), tokenizer)
said["run"] = logits(open_("tester/run"), AutoTokenizer.from_pretrained("tester/run"))
said["middle"] = logits(open_("tester/run", subfolder="last-checkpoint"), tokenizer)
said["phrases"] = pipeline("keyphrase-extraction", model="tester/pipeline")(TEXT, top_k=None)
print("SAID" + json.dumps(said))
"""
)


def run(code, *arguments, folder, **environment):
    folder.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HOME": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    } | environment
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def said(done):
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.split("SAID")[1])


@pytest.fixture(scope="module")
def round_trip(tiny_seke, tiny_tokenizer, tmp_path_factory):
    """What was pushed, what a fresh process found, and what one without a token was told."""
    folder = tmp_path_factory.mktemp("hub")
    tiny_seke("bert").save_pretrained(folder / "model")
    tiny_tokenizer.save_pretrained(folder / "model")
    with LoopbackHub() as hub:
        pushed = said(run(PUSH, folder / "model", folder=folder / "a", **hub.env))
        pulled = said(run(PULL, pushed["pr"], folder=folder / "b", **hub.env))
        code = COMMON + "AutoModelForTokenClassification.from_pretrained('tester/private')"
        stranger = run(code, folder=folder / "c", **hub.env | {"HF_TOKEN": "", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"})
        names = {name for _, name in hub.repos}
        tree = dict(hub.repos["model", "tester/run"].commits[hub.repos["model", "tester/run"].branches["main"]]["tree"])
        private = {name: repo.private for (_, name), repo in hub.repos.items()}
        assert hub.unknown == []
    return pushed, pulled, stranger, {"names": names, "run": set(tree), "private": private}


@pytest.mark.parametrize("name", ["v1", "main", "pull request", "dev", "adapter", "run"])
def test_what_was_pushed_is_what_is_pulled(name, round_trip):
    pushed, pulled, *_ = round_trip
    assert pulled[name] == pytest.approx(pushed[name], abs=1e-6)


def test_revisions_are_different_models(round_trip):
    pushed, *_ = round_trip
    found = [pushed[name] for name in ("v1", "main", "pull request", "dev")]
    assert all(one != other for i, one in enumerate(found) for other in found[:i])


def test_an_adapter_finds_its_base_by_itself(round_trip):
    pushed, pulled, *_ = round_trip
    assert pulled["adapter alone"] == pytest.approx(pushed["adapter"], abs=1e-6)


def test_a_run_pushes_checkpoints_that_open_and_can_be_gone_on_with(round_trip):
    pushed, pulled, _, hub = round_trip
    assert len(pulled["middle"]) == len(pushed["run"])
    files = {name.split("/", 1)[1] for name in hub["run"] if name.startswith("last-checkpoint/")}
    assert {"model.safetensors", "config.json", "optimizer.pt", "trainer_state.json"} <= files
    assert {"model.safetensors", "config.json", "README.md", "modeling_seke.py"} <= hub["run"]


def test_a_pipeline_comes_back_with_its_keyphrases(round_trip):
    pushed, pulled, *_ = round_trip
    assert pulled["phrases"] == pushed["phrases"] and pushed["phrases"]


def test_what_is_private_stays_so(round_trip):
    *_, stranger, hub = round_trip
    assert hub["private"] == {
        "tester/private": True, "tester/base": False, "tester/adapter": False, "tester/run": True, "tester/pipeline": True,
    }  # fmt: skip
    assert stranger.returncode != 0 and "tester/private" in stranger.stderr
