"""Checkpoints carry their code: fresh processes with and without the project, offline and from a Hub on loopback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import pipeline

import modeling_exhird  # noqa: F401  (registers the pipeline)
from tests.loopback_hub import LoopbackHub

from .conftest import DOCUMENTS

ROOT = Path(__file__).resolve().parents[2]
HUB_KINDS = ("transformer", "bilstm", "pretrained")
PARTS = ("attention", "base", "configuration", "data", "decoder", "encoders", "generating", "keyphrases", "modeling")
PARTS += ("outputs", "patterns", "targets", "tokenization", "words")
PAIRS = [{"title": t, "text": x} for t, x in zip(DOCUMENTS["title"], DOCUMENTS["text"], strict=True)]

BLOCKED = """
import sys
class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("modeling_exhird", "modeling_seke", "keyphrase_tools"):
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, NotInstalled())
try:
    import modeling_exhird
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("modeling_exhird could be imported")
"""
OPEN = """
import json, sys
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

flags, documents, *places = sys.argv[1:]
found = []
for flag, place in [(flag, place) for flag in flags.split(",") for place in places]:
    options = {"trust_remote_code": True} if flag == "flag" else {}
    run = pipeline("keyphrase-generation", model=place, device="cpu", **options)
    model = AutoModelForSeq2SeqLM.from_pretrained(place, **options)
    tokenizer = AutoTokenizer.from_pretrained(place, **options)
    answer = run(json.loads(documents))
    assert model.generate_keyphrases(json.loads(documents), tokenizer) == answer
    parts = {"model": model, "pipeline": run, "tokenizer": tokenizer, "config": model.config}
    found.append({"answer": answer, **{name: type(part).__module__ for name, part in parts.items()}})
"""
PUSH = """
place = places[-1]
made = pipeline("keyphrase-generation", model=place, device="cpu")
made.push_to_hub("tester/exhird-tiny")
made = pipeline("keyphrase-generation", model="tester/exhird-tiny", device="cpu")
assert made(json.loads(documents)) == found[-1]["answer"]
"""
TELL = """
print("FOUND" + json.dumps(found))
"""


def run(code, *arguments, folder, **environment):
    """Runs code in a fresh process, in a folder that holds no code, with an empty cache."""
    folder.mkdir(exist_ok=True)
    caches = {"HF_HOME": str(folder / "cache"), "HF_MODULES_CACHE": str(folder / "modules")}
    command = [sys.executable, "-P", "-c", code, *map(str, arguments)]
    environment = {**os.environ, **caches, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.split("FOUND")[1])


@pytest.fixture(scope="module")
def checkpoints(tiny_exhird, tokenizer_for, tmp_path_factory):
    """A checkpoint of some kinds of encoder, saved through its pipeline, and what each gives here."""
    folder, expected = tmp_path_factory.mktemp("checkpoints"), []
    for kind in HUB_KINDS:
        made = pipeline("keyphrase-generation", model=tiny_exhird(kind), tokenizer=tokenizer_for(kind), device="cpu")
        made.save_pretrained(folder / kind)
        expected.append(made(PAIRS))
    assert all(any(own) for own in expected) and expected[0] != expected[1]
    return [folder / kind for kind in HUB_KINDS], expected


def same(entries, expected):
    for entry, wanted in zip(entries, expected, strict=True):
        for own, other in zip(entry["answer"], wanted, strict=True):
            scores = [phrase.pop("score") for phrase in own]
            assert scores == pytest.approx([phrase["score"] for phrase in other], rel=1e-3)
            assert own == [{name: x for name, x in phrase.items() if name != "score"} for phrase in other]


def test_a_checkpoint_is_flat_and_complete(checkpoints):
    code = {f"{part}_exhird.py" for part in (*PARTS, "backbone", "saving", "validation")} | {
        "pipeline_keyphrase_generation.py",
        "card.py",
        "handler.py",
    }
    for folder in checkpoints[0]:
        names = {path.name for path in folder.iterdir()}
        assert code | {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
        assert {name for name in names if name.endswith(".py")} == code
        assert not any(name.endswith((".bin", ".pkl", ".pt")) for name in names)
        assert {path.name for path in folder.iterdir() if path.is_dir()} == (
            {"pieces"} if folder.name == "pretrained" else set()
        )
        config = json.loads((folder / "config.json").read_text())
        assert set(config["auto_map"]) == {"AutoConfig", "AutoModelForSeq2SeqLM"}
        assert list(config["custom_pipelines"]) == ["keyphrase-generation"]
        tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
        assert tokenizer["auto_map"]["AutoTokenizer"][0] == "tokenization_exhird.ExHirdTokenizer"
        for name in ("config.json", "tokenizer_config.json"):
            assert str(folder.parent) not in (folder / name).read_text()


def test_with_the_project_imported_its_own_classes_run(checkpoints, tmp_path):
    folders, expected = checkpoints
    code, project = "import modeling_exhird" + OPEN + TELL, {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    entries = run(code, "no flag,flag", json.dumps(PAIRS), *folders, folder=tmp_path / "x", **project)
    same(entries, expected * 2)
    for number, entry in enumerate(entries):
        assert entry["model"] == "modeling_exhird.modeling_exhird"
        assert entry["config"] == "modeling_exhird.configuration_exhird"
        if number < len(folders):  # with the flag transformers takes a checkpoint's own tokenizer and pipeline
            assert entry["tokenizer"] == "modeling_exhird.tokenization_exhird"
            assert entry["pipeline"] == "modeling_exhird.pipeline_keyphrase_generation"


def test_without_the_project_the_checkpoints_own_code_runs_from_folders_and_from_a_hub(checkpoints, tmp_path):
    folders, expected = checkpoints
    with LoopbackHub() as hub:
        project = {"PYTHONPATH": str(ROOT), **hub.env}
        code = "import modeling_exhird" + OPEN + PUSH + TELL
        pushed = run(code, "no flag", json.dumps(PAIRS), folders[-1], folder=tmp_path / "a", **project)
        names = [*folders, "tester/exhird-tiny"]
        entries = run(BLOCKED + OPEN + TELL, "flag", json.dumps(PAIRS), *names, folder=tmp_path / "b", **hub.env)
        assert hub.unknown == []
    same(pushed, expected[-1:])
    same(entries, [*expected, expected[-1]])
    for part in ("model", "pipeline", "tokenizer", "config"):
        assert all(entry[part].startswith("transformers_modules.") for entry in entries), part
    assert entries[-1]["model"].startswith("transformers_modules.tester")
