"""Checkpoints carry their code: fresh processes with and without the project, offline and from a Hub on loopback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.loopback_hub import LoopbackHub
from tests.modeling_moesumm.conftest import BACKBONES, tiny_moesumm

ROOT = Path(__file__).resolve().parents[2]

# The project cannot be imported there, and without the flag nothing of a checkpoint's code runs.
BLOCKED = """
import sys
class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "modeling_moesumm":
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, NotInstalled())
try:
    import modeling_moesumm
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("modeling_moesumm could be imported")
from transformers import AutoModelForSeq2SeqLM
try:
    AutoModelForSeq2SeqLM.from_pretrained(sys.argv[2])
except ValueError as error:
    assert "trust_remote_code" in str(error)
else:
    raise SystemExit("the checkpoint's code ran without the flag")
"""
OPEN = """
import json, sys
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

flag, *checkpoints = sys.argv[1:]
options = {"trust_remote_code": True} if flag == "flag" else {}
ids, found = torch.tensor([[5, 9, 11, 2], [7, 8, 30, 2]]), []
for checkpoint in checkpoints:
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint, **options)
    with torch.no_grad():
        logits = model(ids, decoder_input_ids=ids[:, :3], dataset=["papers", None]).logits
    written = model.generate(ids, dataset=["papers", "news"], num_beams=2, max_new_tokens=5)
    model.add_dataset("radio")
    found.append({
        "model": type(model).__module__, "config": type(model.config).__module__,
        "logits": logits.tolist(), "written": written.tolist(), "datasets": model.config.datasets,
    })
print("FOUND" + json.dumps(found))
"""
PUSH = """
model = AutoModelForSeq2SeqLM.from_pretrained(checkpoints[0])
model.push_to_hub("tester/moesumm-tiny")
"""


def run(code, *arguments, folder, **environment):
    """Runs code in a fresh process, in a folder that holds no code, with an empty cache."""
    folder.mkdir(exist_ok=True)
    places = {"HF_HOME": str(folder / "cache"), "HF_MODULES_CACHE": str(folder / "modules")}
    environment = {**os.environ, **places, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-P", "-c", code, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.split("FOUND")[1])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """One checkpoint a backbone, and what this process finds in each."""
    folder, expected = tmp_path_factory.mktemp("checkpoints"), []
    ids = torch.tensor([[5, 9, 11, 2], [7, 8, 30, 2]])
    for backbone in BACKBONES:
        model = tiny_moesumm(backbone)
        model.save_pretrained(folder / backbone)
        with torch.no_grad():
            logits = model(ids, decoder_input_ids=ids[:, :3], dataset=["papers", None]).logits
        written = model.generate(ids, dataset=["papers", "news"], num_beams=2, max_new_tokens=5)
        expected.append({"logits": logits.tolist(), "written": written.tolist()})
    return [folder / backbone for backbone in BACKBONES], expected


def test_a_checkpoint_is_flat_and_complete(checkpoints):
    parts = ("modeling", "configuration", "base", "experts", "layers", "loss", "outputs")
    code = {f"{part}_moesumm.py" for part in parts}
    for folder in checkpoints[0]:
        names = {path.name for path in folder.iterdir()}
        assert code | {"config.json", "generation_config.json", "model.safetensors"} <= names
        assert not any(name.endswith((".bin", ".pkl", ".pt")) for name in names)
        config = json.loads((folder / "config.json").read_text())
        assert set(config["auto_map"]) == {"AutoConfig", "AutoModelForSeq2SeqLM"}
        assert config["text_config"]["model_type"] == folder.name
        assert str(folder.parent) not in (folder / "config.json").read_text()


def same(entries, expected):
    for entry, wanted in zip(entries, expected, strict=True):
        torch.testing.assert_close(torch.tensor(entry["logits"]), torch.tensor(wanted["logits"]), rtol=0, atol=1e-5)
        assert entry["written"] == wanted["written"]
        assert entry["datasets"] == ["news", "letters", "papers", "radio"]


def test_fresh_processes_with_and_without_the_project_find_the_same_in_folders_and_on_a_hub(checkpoints, tmp_path):
    folders, expected = checkpoints
    with LoopbackHub() as hub:
        project = {"PYTHONPATH": str(ROOT), **hub.env}
        installed = run("import modeling_moesumm" + OPEN + PUSH, "no flag", *folders, folder=tmp_path / "a", **project)
        without = run(BLOCKED + OPEN, "flag", *folders, "tester/moesumm-tiny", folder=tmp_path / "b", **hub.env)
        assert hub.unknown == []
    same(installed, expected)
    same(without, [*expected, expected[0]])
    assert {entry["model"] for entry in installed} == {"modeling_moesumm.modeling_moesumm"}
    assert all(entry[part].startswith("transformers_modules.") for entry in without for part in ("model", "config"))
    assert without[-1]["model"].startswith("transformers_modules.tester")
    # negative control: another checkpoint, other logits
    assert without[0]["logits"] != without[1]["logits"]


def test_another_pipeline_is_named_only_where_its_file_is(tmp_path):
    model = tiny_moesumm()
    promised = {
        "moe-summarization": {"impl": "pipeline_somewhere.Some", "pt": ["AutoModelForSeq2SeqLM"], "type": "text"}
    }
    model.config.custom_pipelines = promised
    model.save_pretrained(tmp_path / "plain")
    impl = json.loads((tmp_path / "plain" / "config.json").read_text())["custom_pipelines"]["moe-summarization"]["impl"]
    assert impl == "pipeline_moesumm.MoeSummarizationPipeline"
    assert model.config.custom_pipelines == promised
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "pipeline_somewhere.py").touch()
    model.save_pretrained(tmp_path / "whole")
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["custom_pipelines"] == promised
