"""`lexperts merge`, command by command: text output, JSON output, errors and exit status."""

import json
import logging
import os
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from lexperts.cli.merge import app
from merge_tools import inspect
from tests.loopback_hub import LoopbackHub, Repo

from .conftest import edit_json, recipe_of, save_adapter


def run(*arguments, code=0):
    """Returns the standard output and the standard error."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == code, (done.stdout, done.stderr, done.exception)
    assert "Traceback" not in done.output
    return done.stdout, done.stderr


@pytest.fixture
def folder(tmp_path, experts, monkeypatch):
    """A working directory with experts/birds, ships, tools, a recipe and texts."""
    for expert in experts(3):
        shutil.copytree(expert, tmp_path / "experts" / expert.name)
    (tmp_path / "recipe.yml").write_text(json.dumps(recipe_of(["experts/birds", "experts/ships"], gate_mode="random")))
    for name, text in (("birds", "the owl is in the nest"), ("ships", "the sail is of the ship")):
        (tmp_path / f"{name}.txt").write_text("\n".join(f"{text} {i}" for i in "abcdefgh"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_mixture_is_made_looked_at_edited_and_used(folder):
    """Each command prints what it has done, its warnings on the standard error, and with --json one value."""
    edit_json(folder / "experts" / "ships" / "config.json", max_position_embeddings=64)
    before = sorted(folder.iterdir())
    assert "nothing was written" in run("compose", "recipe.yml", "two", "--dry-run")[0]
    assert sorted(folder.iterdir()) == before
    out, err = run("compose", "recipe.yml", "two")
    assert out.splitlines()[-1] == "wrote two" and "birds, ships" in out and "warning" not in out
    assert err.startswith("warning: ships: max_position_embeddings is 64")
    facts = inspect("two")
    assert "mixtral" in run("inspect", "two")[0] and json.loads(run("inspect", "two", "--json")[0]) == facts
    assert "no differences" in run("verify", "two")[0]
    assert "birds, ships, tools" in run("add", "two", "three", "--source", "experts/tools")[0]
    made = json.loads(run("remove", "three", "fewer", "--expert", "birds", "--json")[0])
    assert made["experts"] == ["ships", "tools"]
    assert "wrote dense" in run("extract", "two", "dense", "--expert", "ships")[0]
    assert "wrote lexicon" in run("export", "two", "lexicon", "--format", "lexicon")[0]
    domains = ("--domain", "birds=birds.txt", "--domain", "ships=ships.txt")
    assert "gain kept" in run("evaluate", "two", *domains)[0]
    out, _ = run("tune", "two", "tuned", *domains, "--steps", 2, "--learning-rate", 0.01)
    assert "perplexity before" in out and inspect("tuned")["confusion"] is None
    edit_json(folder / "two" / "config.json", num_experts_per_tok=1)
    out, _ = run("verify", "two", code=1)
    assert "num_experts_per_tok is 1" in out and "1 differences" in out


@pytest.mark.parametrize("mode", ["hidden", "ridge"])
def test_a_good_recipe_says_nothing_on_the_standard_error(mode, folder, caplog, recwarn, monkeypatch):
    """Also of an expert that is an adapter. The summary names the gates, and the average that is the default."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    save_adapter(folder / "experts/birds-lora", "../birds", target_modules=["gate_proj"], layers_to_transform=[0])
    sources = []
    for name in ("birds-lora", "ships"):
        (folder / f"{name}.txt").write_text("".join(f"the {name} of {i:b}\n" for i in range(40)))
        sources.append({"source_model": f"experts/{name}", "samples": f"{name}.txt", "positive_prompts": [name]})
    (folder / "recipe.yml").write_text(json.dumps(recipe_of(sources, base_model="experts/birds", gate_mode=mode)))
    out, err = run("compose", "recipe.yml", "out")
    assert err == "" and not caplog.messages
    assert not [w for w in recwarn if issubclass(w.category, (FutureWarning, UserWarning))]
    assert out.split("gates")[1].split()[:3] == [mode, "average", "base"]


PUSH = """
import os
from lexperts.cli.merge import app
from transformers import AutoModelForCausalLM

app(["compose", "recipe.yml", "out", "--push-to-hub", "tester/mixture", "--private"], standalone_mode=False)
print(type(AutoModelForCausalLM.from_pretrained("tester/mixture")).__name__)
os.environ["HF_TOKEN"] = "x"
app(["compose", "recipe.yml", "two", "--push-to-hub", "a/b"])
"""


@pytest.mark.nightly
def test_a_pushed_mixture_opens_from_the_hub_without_the_shards_of_an_earlier_one(folder):
    """Nor are the statistics of ridge gates uploaded, which are states of the user's texts."""
    sources = [{"source_model": f"experts/{name}", "samples": f"{name}.txt"} for name in ("birds", "ships")]
    (folder / "recipe.yml").write_text(json.dumps(recipe_of(sources, gate_mode="ridge")))
    shards = ("model-00001-of-00002.safetensors", "model.safetensors.index.json")
    with LoopbackHub() as hub:
        hub.repos["model", "tester/mixture"] = repository = Repo("tester/mixture", "model", private=True)
        repository.commit("main", "earlier", dict.fromkeys((*shards, "notes.md"), (b"old", None)))
        environment = {**os.environ, **hub.env, "HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "0"}
        done = subprocess.run([sys.executable, "-c", PUSH], env=environment, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 2, done.stderr[-3000:]
        files = {name: content for name, (content, _) in repository.commit_of("main")["tree"].items()}
        assert hub.unknown == []
    assert f"{hub.url}/tester/mixture" in done.stdout and "MixtralForCausalLM" in done.stdout
    assert "two is complete" in done.stderr and "hf upload a/b two" in done.stderr
    assert (folder / "out" / "gate_statistics").is_dir()
    local = {path.name: path.read_bytes() for path in (folder / "out").iterdir() if path.is_file()}
    assert files == {**local, "notes.md": b"old"}
    assert not any(b"/tmp" in files[name] for name in ("README.md", "config.json"))
