"""Checkpoints carry their code: fresh processes with and without the project, offline and from a Hub on loopback."""

import json
import os
import subprocess
import sys

import pytest
from transformers import pipeline

import keyphrase_tools  # noqa: F401  (registers the pipeline)
from tests.loopback_hub import LoopbackHub

TITLE, TEXT = "the graph cut", "the graph cut of the network is the problem of learning in graph networks"
QUESTION = {"question": "is the network", "context": TEXT}
TASKS = {"tags": "keyphrase-extraction", "answers": "extractive-qa", "classes": "text-classification"}

BLOCKED = """
import sys
class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("modeling_hypernet", "modeling_seke", "keyphrase_tools"):
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, NotInstalled())
for name in ("modeling_hypernet", "keyphrase_tools"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"{name} could be imported")
"""
OPEN = """
import json, sys
from transformers import pipeline

flag, title, text, question, *places = sys.argv[1:]
options = {"trust_remote_code": True} if flag == "flag" else {}
found = []
for place in places:
    task, _, place = place.partition("=")
    run = pipeline(task, model=place, **options)
    if task == "keyphrase-extraction":
        answer = run({"title": title, "text": text}, top_k=None)
    elif task == "extractive-qa":
        answer = run(json.loads(question), handle_impossible_answer=True, top_k=5)
    else:
        answer = run({"text": title, "text_pair": text})
        answer["score"] = round(answer["score"], 5)
    found.append({"model": type(run.model).__module__, "pipeline": type(run).__module__, "answer": answer})
print("FOUND" + json.dumps(found))
"""


def run(code, *arguments, folder, **environment):
    """Runs code in a fresh process, in a folder that holds no code, with an empty cache."""
    folder.mkdir(exist_ok=True)
    caches = {"HF_HOME": str(folder / "cache"), "HF_MODULES_CACHE": str(folder / "modules")}
    command = [sys.executable, "-P", "-c", code, *map(str, arguments)]
    environment = {**os.environ, **caches, **environment}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.split("FOUND")[1])


@pytest.fixture(scope="module")
def checkpoints(tiny_hypernet, tiny_tokenizer, tmp_path_factory):
    """One checkpoint a head, saved through its pipeline -> task=folder of each, and what each gives here."""
    folder, places, expected = tmp_path_factory.mktemp("checkpoints"), [], []
    for kind, task in TASKS.items():
        model = tiny_hypernet(kind, freeze_backbone=True)
        if kind == "tags":
            model.classifier.bias.data[1:] += 0.3  # an untrained model finds phrases too
        made = pipeline(task, model=model, tokenizer=tiny_tokenizer)
        made.save_pretrained(folder / kind)
        places.append(f"{task}={folder / kind}")
        if kind == "tags":
            expected.append(made({"title": TITLE, "text": TEXT}, top_k=None))
        elif kind == "answers":
            expected.append(made(QUESTION, handle_impossible_answer=True, top_k=5))
        else:
            found = made({"text": TITLE, "text_pair": TEXT})
            expected.append({**found, "score": round(found["score"], 5)})
    assert all(expected)
    return places, expected


def arguments(flag, places):
    return flag, TITLE, TEXT, json.dumps(QUESTION), *places


def answers(entries):
    return [entry["answer"] for entry in entries]


def test_a_checkpoint_is_flat_and_complete(checkpoints):
    folders = [place.partition("=")[2] for place in checkpoints[0]]
    for folder, pipeline_file in zip(
        folders, ("pipeline_keyphrase_extraction.py", "pipeline_extractive_qa.py", None), strict=True
    ):
        names = set(os.listdir(folder))
        code = {
            f"{part}_hypernet.py"
            for part in ("modeling", "configuration", "base", "crf", "lstm", "segments", "outputs")
        }
        assert code | {"config.json", "model.safetensors", "tokenizer.json"} | {pipeline_file} - {None} <= names
        assert not any(name.endswith((".bin", ".pkl", ".pt")) for name in names)
        with open(os.path.join(folder, "config.json")) as file:
            assert str(folder) not in file.read()


def test_without_the_project_the_checkpoints_own_code_runs(checkpoints, tmp_path):
    places, expected = checkpoints
    entries = run(BLOCKED + OPEN, *arguments("flag", places), folder=tmp_path / "x", HF_HUB_OFFLINE="1")
    assert answers(entries) == expected
    assert all(entry["model"].startswith("transformers_modules.") for entry in entries)
    assert all(entry["pipeline"].startswith("transformers_modules.") for entry in entries[:2])


@pytest.mark.parametrize("flag", ["flag", "no flag"])
def test_with_the_project_imported_its_own_classes_run(flag, checkpoints, tmp_path):
    places, expected = checkpoints
    code = "import keyphrase_tools" + OPEN
    entries = run(code, *arguments(flag, places), folder=tmp_path / "x", HF_HUB_OFFLINE="1")
    assert answers(entries) == expected
    assert all(entry["model"] == "modeling_hypernet.modeling_hypernet" for entry in entries)
    assert entries[1]["pipeline"] == "modeling_hypernet.pipeline_extractive_qa"


PUSH = """
import sys
import keyphrase_tools
from transformers import pipeline

task, _, place = sys.argv[1].partition("=")
pipeline(task, model=place).push_to_hub(sys.argv[2])
print("FOUND[]")
"""


def test_pushed_to_a_hub_and_pulled_by_a_fresh_process_it_is_the_same(checkpoints, tmp_path):
    (place, *_), (expected, *_) = checkpoints
    with LoopbackHub() as hub:
        run(PUSH, place, "tester/hypernet-tiny", folder=tmp_path / "a", **hub.env)
        pulled = arguments("flag", ["keyphrase-extraction=tester/hypernet-tiny"])
        entries = run(BLOCKED + OPEN, *pulled, folder=tmp_path / "b", **hub.env)
        assert answers(entries) == [expected] and hub.unknown == []
    assert entries[0]["model"].startswith("transformers_modules.tester")
