"""model.save_pretrained and trainer.push_to_hub are enough: code, pipelines and endpoint handler are in the checkpoint."""

import copy
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForTokenClassification, Trainer, TrainingArguments, pipeline

import keyphrase_tools  # noqa: F401  (registers the pipelines)
from modeling_exhird import ExHirdConfig, ExHirdForKeyphraseGeneration, ExHirdTokenizer
from modeling_seke import SekeForTokenClassification

from .loopback_hub import LoopbackHub
from .tiny_models import CASES, make_model

ROOT = Path(__file__).parents[1]

TASKS = {
    "SekeForTokenClassification": ("keyphrase-extraction", "graph cuts segment images"),
    "HypernetForTokenClassification": ("keyphrase-extraction", {"title": "graph cuts", "text": "they segment images"}),
    "HypernetForQuestionAnswering": ("extractive-qa", {"question": "what", "context": "graph cuts segment images"}),
    "ExHirdForKeyphraseGeneration": ("keyphrase-generation", "graph cuts segment images"),
    "MoeSummForConditionalGeneration": ("moe-summarization", "graph cuts segment images"),
    "LexiconForCausalLM": ("definition-modeling", {"term": "cut", "context": "graph cuts segment images"}),
}
OPTIONS = {"moe-summarization": {"max_length": 8}, "definition-modeling": {"max_new_tokens": 4}}
PACKAGES = (
    "keyphrase_tools",
    "merge_tools",
    *(f"modeling_{name}" for name in ["seke", "hypernet", "exhird", "moesumm", "lexicon"]),
)

BLOCKED = f"""
import sys
class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {PACKAGES!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}")
sys.meta_path.insert(0, NotInstalled())
"""


def answer(run, task, inputs, options):
    if isinstance(inputs, dict) and task == "extractive-qa":
        return run(**inputs, **options)
    return run(inputs, **options)


OPEN = (
    BLOCKED
    + inspect.getsource(answer)
    + """
import importlib.util, json, pathlib
from transformers import pipeline

root, tasks, options = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
found = {}
for name, (task, inputs) in tasks.items():
    run = pipeline(task, model=str(root / name), trust_remote_code=True)
    again = root / "again" / name
    run.model.save_pretrained(again)
    run.tokenizer.save_pretrained(again)
    spec = importlib.util.spec_from_file_location("handler", again / "handler.py")
    handler = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(handler)
    serve = handler.EndpointHandler(str(again))
    found[name] = {
        "module": type(run.model).__module__,
        "answer": answer(run, task, inputs, options.get(task, {})),
        "served": serve({"inputs": inputs, "parameters": options.get(task, {})}),
    }
print("FOUND" + json.dumps(found))
"""
)
PUSH = """
import sys
import keyphrase_tools, modeling_moesumm
from transformers import AutoModelForSeq2SeqLM, AutoModelForTokenClassification, AutoTokenizer, Trainer, TrainingArguments

summariser, extractor = sys.argv[1:]
AutoModelForSeq2SeqLM.from_pretrained(summariser).push_to_hub("tester/summariser")
AutoTokenizer.from_pretrained(summariser).push_to_hub("tester/summariser")
model, tokenizer = AutoModelForTokenClassification.from_pretrained(extractor), AutoTokenizer.from_pretrained(extractor)
arguments = TrainingArguments("run", push_to_hub=True, hub_model_id="tester/run", use_cpu=True, report_to="none")
Trainer(model, arguments, processing_class=tokenizer).push_to_hub()
AutoModelForTokenClassification.from_pretrained("tester/run").save_pretrained("saved", push_to_hub=True, repo_id="tester/saved")
tokenizer.push_to_hub("tester/saved")
print("FOUND[]")
"""
PULL = (
    BLOCKED
    + """
import json
from transformers import pipeline

text, found = sys.argv[1], {}
for repository, task, options in (
    ("tester/summariser", "moe-summarization", {"max_length": 8}),
    ("tester/run", "keyphrase-extraction", {}),
    ("tester/saved", "keyphrase-extraction", {}),
):
    found[repository] = pipeline(task, model=repository, trust_remote_code=True)(text, **options)
print("FOUND" + json.dumps(found))
"""
)


@pytest.fixture(scope="module")
def checkpoints(tiny_tokenizer, tmp_path_factory):
    """A checkpoint of every class that has a pipeline, saved by `save_pretrained` of model and tokenizer alone."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in TASKS:
        tokenizer = copy.deepcopy(tiny_tokenizer)
        if name == "ExHirdForKeyphraseGeneration":
            tokenizer = ExHirdTokenizer.from_texts(["graph cuts segment images"])
            sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
            torch.manual_seed(0)
            model = ExHirdForKeyphraseGeneration(ExHirdConfig.for_tokenizer(tokenizer, **sizes)).eval()
        else:
            model = make_model(name)
            if name.startswith(("Lexicon", "MoeSumm")):
                tokenizer.bos_token, tokenizer.eos_token = tokenizer.cls_token, tokenizer.sep_token
        if "TokenClassification" in name:
            model.classifier.bias.data[1:] += 0.5  # an untrained model finds phrases too
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def run_fresh(code, *arguments, folder, **environment):
    """Runs code in a fresh process, in a folder that holds no code, with empty caches."""
    folder.mkdir(exist_ok=True)
    caches = {"HF_MODULES_CACHE": str(folder / "modules"), "HF_HOME": str(folder / "cache")}
    environment = {**{name: x for name, x in os.environ.items() if name != "PYTHONPATH"}, **caches, **environment}
    command = [sys.executable, "-P", "-c", code, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.split("FOUND")[1])


def test_a_stranger_opens_every_pipeline_saves_it_again_and_serves_it(checkpoints, tmp_path):
    """Without the packages: pipeline(..., trust_remote_code=True), a second save, and that save's handler.py."""
    expected = {
        name: json.loads(
            json.dumps(answer(pipeline(task, model=str(checkpoints / name)), task, x, OPTIONS.get(task, {})))
        )
        for name, (task, x) in TASKS.items()
    }
    found = run_fresh(OPEN, checkpoints, json.dumps(TASKS), json.dumps(OPTIONS), folder=tmp_path / "x")
    for name, entry in found.items():
        assert entry["module"].startswith("transformers_modules."), name
        assert entry["answer"] == entry["served"] == expected[name], name
    assert set(found) == set(TASKS)


def test_what_models_and_the_trainer_push_opens_as_a_pipeline(checkpoints, tmp_path):
    """model.push_to_hub, trainer.push_to_hub and save_pretrained(push_to_hub=True), opened without the packages."""
    text = "graph cuts segment images"
    with LoopbackHub() as hub:
        folders = (checkpoints / "MoeSummForConditionalGeneration", checkpoints / "SekeForTokenClassification")
        run_fresh(PUSH, *folders, folder=tmp_path / "a", PYTHONPATH=str(ROOT), **hub.env)
        found = run_fresh(PULL, text, folder=tmp_path / "b", **hub.env)
        assert hub.unknown == []
    for repository, folder, task in (
        ("tester/summariser", folders[0], "moe-summarization"),
        ("tester/run", folders[1], "keyphrase-extraction"),
        ("tester/saved", folders[1], "keyphrase-extraction"),
    ):
        expected = pipeline(task, model=str(folder))(text, **OPTIONS.get(task, {}))
        assert found[repository] == json.loads(json.dumps(expected)), repository


@pytest.mark.parametrize("name", TASKS)
def test_the_pipeline_survives_loading_with_the_package_and_saving_again(name, checkpoints, tmp_path):
    model = CASES[name].cls.from_pretrained(checkpoints / name)
    assert not hasattr(model.config, "custom_pipelines")  # with the package, the registered pipeline is used
    model.save_pretrained(tmp_path)
    assert (tmp_path / "handler.py").read_bytes() == (checkpoints / name / "handler.py").read_bytes()
    before, after = (json.loads((place / "config.json").read_text()) for place in (checkpoints / name, tmp_path))
    assert after["auto_map"] == before["auto_map"] and after["custom_pipelines"] == before["custom_pipelines"]
    entry = after["custom_pipelines"][TASKS[name][0]]
    assert (tmp_path / f"{entry['impl'].split('.')[0]}.py").exists()


def test_the_trainer_saves_the_pipeline(checkpoints, tmp_path):
    model = AutoModelForTokenClassification.from_pretrained(checkpoints / "SekeForTokenClassification")
    rows = [{"input_ids": [2, 9, 10, 3], "attention_mask": [1] * 4, "labels": [-100, 1, 2, -100]}] * 4
    arguments = TrainingArguments(
        tmp_path, max_steps=2, save_steps=1, use_cpu=True, report_to="none", disable_tqdm=True
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    trainer.save_model()
    for folder in (tmp_path, tmp_path / "checkpoint-1"):
        assert "keyphrase-extraction" in json.loads((folder / "config.json").read_text())["custom_pipelines"]
        assert (folder / "pipeline_keyphrase_extraction.py").exists() and (folder / "handler.py").exists()


def test_a_subclass_that_no_auto_class_opens_names_no_pipeline(tmp_path):
    kind = type("Mine", (SekeForTokenClassification,), {"_auto_class": None})
    kind(make_model("SekeForTokenClassification").config).save_pretrained(tmp_path)
    assert not json.loads((tmp_path / "config.json").read_text()).get("custom_pipelines")
