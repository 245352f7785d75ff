"""Checkpoints carry their code: fresh processes with and without the project, offline and from a Hub on loopback."""

import json
import os
import subprocess
import sys

import pytest
from transformers import pipeline

import keyphrase_tools  # noqa: F401  (registers the pipeline)
from tests.loopback_hub import LoopbackHub

BACKBONES = ("bert", "deberta-v2", "modernbert")
TEXT = "the graph cut of the network is the problem of learning in graph networks"

# What a fresh process finds in each checkpoint; BLOCKED makes the project impossible to import there.
BLOCKED = """
import sys
class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("modeling_seke", "keyphrase_tools"):
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, NotInstalled())
for name in ("modeling_seke", "keyphrase_tools"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"{name} could be imported")
"""
OPEN = """
import json, sys
from transformers import AutoModelForTokenClassification, pipeline

flag, text, *checkpoints = sys.argv[1:]
options = {"trust_remote_code": True} if flag == "flag" else {}
found = []
for checkpoint in checkpoints:
    model = AutoModelForTokenClassification.from_pretrained(checkpoint, **options)
    tags = pipeline("token-classification", model=checkpoint, **options)
    extract = pipeline("keyphrase-extraction", model=checkpoint, **options)
    found.append({
        "model": type(model).__module__, "extract": type(extract).__module__,
        "tags": [(tag["entity"], round(float(tag["score"]), 5), tag["start"]) for tag in tags(text)],
        "phrases": extract(text, top_k=None),
    })
print("FOUND" + json.dumps(found))
"""


def run(code, *arguments, folder, **environment):
    """Runs code in a fresh process, in a folder that holds no code, with an empty cache."""
    folder.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "HF_HOME": str(folder / "cache"),
        "HF_MODULES_CACHE": str(folder / "modules"),
        **environment,
    }
    command = [sys.executable, "-P", "-c", code, *map(str, arguments)]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL
    )


def found(done):
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.split("FOUND")[1])


@pytest.fixture(scope="module")
def checkpoints(tiny_seke, tiny_tokenizer, tmp_path_factory):
    """One checkpoint a backbone, saved through the keyphrase pipeline, and what this process finds in each."""
    folder, expected = tmp_path_factory.mktemp("checkpoints"), []
    for backbone in BACKBONES:
        model = tiny_seke(backbone)
        model.classifier.bias.data[1:] += 0.2  # an untrained model finds phrases too
        extract = pipeline("keyphrase-extraction", model=model, tokenizer=tiny_tokenizer)
        extract.save_pretrained(folder / backbone)
        tags = pipeline("token-classification", model=model, tokenizer=tiny_tokenizer)(TEXT)
        expected.append(
            {
                "tags": [[tag["entity"], round(float(tag["score"]), 5), tag["start"]] for tag in tags],
                "phrases": extract(TEXT, top_k=None),
            }
        )
    assert all(entry["phrases"] and entry["tags"] for entry in expected)
    return [folder / backbone for backbone in BACKBONES], expected


def results(entries):
    return [{name: entry[name] for name in ("tags", "phrases")} for entry in entries]


def test_a_checkpoint_is_flat_and_complete(checkpoints):
    for folder in checkpoints[0]:
        names = {path.name for path in folder.iterdir()}
        code = {"modeling_seke.py", "configuration_seke.py", "head_seke.py", "pipeline_keyphrase_extraction.py"}
        assert code | {"config.json", "model.safetensors", "tokenizer.json"} <= names
        assert not any(name.endswith((".bin", ".pkl", ".pt")) for name in names)
        config = json.loads((folder / "config.json").read_text())
        assert set(config["auto_map"]) == {"AutoConfig", "AutoModelForTokenClassification"}
        assert set(config["custom_pipelines"]) == {"keyphrase-extraction"}
        assert str(folder.parent) not in (folder / "config.json").read_text()


def test_without_the_project_the_checkpoints_own_code_runs(checkpoints, tmp_path):
    """All of it: model, stock token-classification pipeline and keyphrase pipeline, on three backbones, no network."""
    folders, expected = checkpoints
    entries = found(run(BLOCKED + OPEN, "flag", TEXT, *folders, folder=tmp_path / "x", HF_HUB_OFFLINE="1"))
    assert results(entries) == expected
    for entry in entries:
        assert entry["model"].startswith("transformers_modules.") and entry["extract"].startswith(
            "transformers_modules."
        )


def test_without_the_project_and_without_the_flag_nothing_runs(checkpoints, tmp_path):
    done = run(BLOCKED + OPEN, "no flag", TEXT, checkpoints[0][0], folder=tmp_path / "x", HF_HUB_OFFLINE="1")
    assert done.returncode != 0 and "trust_remote_code" in done.stderr


@pytest.mark.parametrize("flag", ["flag", "no flag"])
def test_with_the_project_imported_its_own_classes_run_with_and_without_the_flag(flag, checkpoints, tmp_path):
    """The checkpoint lists a custom pipeline, for which transformers asks for the flag: SekeConfig drops the list."""
    folders, expected = checkpoints
    code = "import keyphrase_tools" + OPEN
    entries = found(run(code, flag, TEXT, *folders, folder=tmp_path / "x", HF_HUB_OFFLINE="1"))
    assert results(entries) == expected
    for entry in entries:
        assert entry["model"] == "modeling_seke.modeling_seke"
        assert entry["extract"] == "keyphrase_tools.pipeline_keyphrase_extraction"


PUSH = """
import sys
import keyphrase_tools
from transformers import pipeline

checkpoint, name = sys.argv[1:]
pipeline("keyphrase-extraction", model=checkpoint).push_to_hub(name)
"""


def test_pushed_to_a_hub_and_pulled_by_a_fresh_process_it_is_the_same(checkpoints, tmp_path):
    (folder, *_), (expected, *_) = checkpoints
    with LoopbackHub() as hub:
        pushed = run(PUSH, folder, "tester/seke-tiny", folder=tmp_path / "a", **hub.env)
        assert pushed.returncode == 0, pushed.stderr[-3000:]
        with_project = run(
            "import keyphrase_tools" + OPEN, "no flag", TEXT, "tester/seke-tiny", folder=tmp_path / "b", **hub.env
        )
        without = run(BLOCKED + OPEN, "flag", TEXT, "tester/seke-tiny", folder=tmp_path / "c", **hub.env)
        assert results(found(with_project)) == results(found(without)) == [expected]
        assert hub.unknown == []
    assert found(without)[0]["model"].startswith("transformers_modules.tester")
    again = run(BLOCKED + OPEN, "flag", TEXT, "tester/seke-tiny", folder=tmp_path / "c", HF_HUB_OFFLINE="1")
    assert results(found(again)) == [expected]  # the Hub is gone; the cache is enough
