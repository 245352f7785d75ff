"""Sources are found from every working directory, and folders of other contents with the same names are never taken for them."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants

from merge_tools import MergeError, add, compose, export, extract, remove, route, tune, verify
from merge_tools.checkpoints import open_source

from .conftest import edit_json, read_tensors, recipe_of, save_adapter
from .corruptions import value

NAMES = ("e0", "e1", "e2", "e3")


def card_of(folder):
    return yaml.safe_load((folder / "README.md").read_text().split("---")[1])


def record_of(folder):
    return json.loads((folder / "merge_record.json").read_text())


@pytest.fixture
def project(tmp_path, experts, monkeypatch):
    """A folder `work` with experts m/e0 to m/e3 and a mixture of three; the working directory has other models of these names."""
    for number, folder in enumerate(experts(8)):
        shutil.copytree(folder, tmp_path / ("work" if number < 4 else "other") / "m" / NAMES[number % 4])
    monkeypatch.chdir(tmp_path / "work")
    compose(recipe_of(["m/e0", "m/e1", "m/e2"], base_model="m/e0", average="base", gate_mode="random"), "mixture")
    monkeypatch.chdir(tmp_path / "other")
    return tmp_path / "work"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """hub(folder, "org/m") puts a model into the Hub's cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))

    def publish(folder, model):
        root = tmp_path / "cache" / f"models--{model.replace('/', '--')}"
        shutil.copytree(folder, root / "snapshots" / "abc")
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text("abc")
        return root

    return publish


def test_verify_extract_and_route_take_no_other_models(project):
    assert verify(project / "mixture")["ok"]
    shared = extract(project / "mixture", "e0", project / "dense")["shared"]
    assert shared["compared"] and shared["equal"]
    assert route(project / "mixture", ["the sea"])[0].names == ["e0", "e1", "e2"]


@pytest.mark.parametrize("name", ["remove", "add", "export", "remove again", "add again"])
def test_edited_mixtures_know_their_sources(name, project, tmp_path):
    out, recompose = tmp_path / "deep" / "out", "again" in name
    if "remove" in name:
        remove(project / "mixture", "e2", out, recompose=recompose)
    elif "add" in name:
        add(project / "mixture", str(project / "m" / "e3"), out, recompose=recompose)
    else:
        export(project / "mixture", out, "lexicon")
    assert verify(out)["ok"]
    places = record_of(out)["beside"]
    assert {(out / place).resolve() for place in places.values()} <= {project / "m" / name for name in NAMES}
    assert len(places) == (2 if "remove" in name else 3) and "base_model" not in card_of(out)


def test_an_added_expert_of_the_same_path_as_another_is_not_confused_with_it(project, tmp_path):
    add(project / "mixture", {"source_model": "m/e1", "name": "mine"}, tmp_path / "out")
    assert verify(tmp_path / "out")["ok"]
    assert record_of(tmp_path / "out")["experts"][3]["source"] == str(tmp_path / "other" / "m" / "e1")


def test_a_tuned_mixture_knows_its_sources(project, tmp_path):
    (tmp_path / "texts.txt").write_text("the sea is a\nthe song of the birds\nthe tools\nthe ships\n")
    tune(project / "mixture", tmp_path / "deep" / "out", {"sea": tmp_path / "texts.txt"}, steps=1)
    assert verify(tmp_path / "deep" / "out")["ok"]


def test_missing_sources_are_not_replaced_by_others(project, tmp_path):
    (project / "m" / "e1").rename(tmp_path / "moved")
    with pytest.raises(MergeError, match="e1:.*work/m/e1'.*exist.* --moved e1=FOLDER"):
        verify(project / "mixture")
    for edit in (partial(remove, expert="e2"), partial(add, expert=str(project / "m" / "e3"))):
        with pytest.raises(MergeError, match="e1:.*work/m/e1'.*exist.* --moved e1=FOLDER"):
            edit(project / "mixture", out=tmp_path / "none", recompose=True)
    remove(project / "mixture", "e1", tmp_path / "without", recompose=True)
    assert not extract(project / "mixture", "e1", tmp_path / "one")["shared"]["compared"]
    moved = {"e1": tmp_path / "moved"}
    assert verify(project / "mixture", sources=moved)["ok"]
    with pytest.raises(MergeError, match="'e4'.*e0, e1, e2"):
        verify(project / "mixture", sources={"e4": tmp_path / "moved"})
    assert extract(project / "mixture", "e1", tmp_path / "two", sources=moved)["shared"]["compared"]
    remove(project / "mixture", "e2", tmp_path / "three", recompose=True, sources=moved)
    assert verify(tmp_path / "three")["ok"]
    value("model.norm.weight", 3, 0.5)(tmp_path / "moved")
    (fault,) = verify(project / "mixture", sources=moved)["faults"]
    assert fault.startswith("e1: ") and "has changed since the merge" in fault


def test_paths_of_a_recipe_are_relative_to_it(project, tmp_path):
    (project / "recipe.yml").write_text(json.dumps(recipe_of(["m/e0", "m/e1"], base_model="m/e2", average="base")))
    compose(project / "recipe.yml", tmp_path / "out")
    norm = "model.norm.weight"
    assert read_tensors(tmp_path / "out")[norm].equal(read_tensors(project / "m" / "e2")[norm])
    assert verify(tmp_path / "out")["ok"]


def test_models_of_the_hub_are_not_folders_here(project, hub, tmp_path, monkeypatch):
    """A mixture of a Hub model, edited from a folder that has another model at the same path."""
    hub(project / "m" / "e3", "m/e9")
    compose(recipe_of([str(project / "m" / "e0"), "m/e9"]), tmp_path / "mixture")
    shutil.copytree("m/e1", "m/e9")
    assert verify(tmp_path / "mixture")["ok"] and card_of(tmp_path / "mixture")["base_model"] == ["m/e9"]
    with pytest.raises(MergeError, match="'m/e9' is a model of the Hub .* and also a folder"):
        add(tmp_path / "mixture", "m/e1", tmp_path / "out", recompose=True)
    add(tmp_path / "mixture", {"source_model": "m/e9", "name": "mine"}, tmp_path / "out")
    assert verify(tmp_path / "out")["ok"] and card_of(tmp_path / "out")["base_model"] == ["m/e9"]
    assert record_of(tmp_path / "out")["experts"][2]["source"] == str(tmp_path / "other" / "m" / "e9")


def test_bases_of_adapters_are_not_folders_here(project, tmp_path, monkeypatch):
    adapters = [save_adapter(project / "adapters" / name, "m/e0", rank=2) for name in ("one", "two")]
    assert open_source("one", str(adapters[0])).checkpoint.folder == project / "m" / "e0"
    monkeypatch.chdir(project)
    edit_json(adapters[1] / "adapter_config.json", lora_alpha=4)
    compose(recipe_of(["adapters/one", "adapters/two"]), "low_rank")
    monkeypatch.chdir(tmp_path / "other")
    assert (
        verify(project / "low_rank")["ok"]
        and not Path(record_of(project / "low_rank")["base"]["adapter_over"]).is_absolute()
    )
    extract(project / "low_rank", "one", tmp_path / "dense")
    assert read_tensors(tmp_path / "dense")["model.norm.weight"].equal(
        read_tensors(project / "m" / "e0")["model.norm.weight"]
    )


def test_a_card_has_no_places_of_this_machine_and_the_record_has(experts, tmp_path):
    specs = []
    for folder in experts(2):
        (tmp_path / f"{folder.name}.txt").write_text(f"a text of {folder.name}\n" * 3)
        specs.append({"source_model": str(folder), "samples": str(tmp_path / f"{folder.name}.txt")})
    base = specs[0]["source_model"]
    compose({"base_model": base, "average": "base", "gate_mode": "centroid", "experts": specs}, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "/" + experts(2)[0].parent.name not in card and str(tmp_path) not in card
    recipe = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    assert [(e["source_model"], e["samples"]) for e in recipe["experts"]] == [
        ("birds", "birds.txt"),
        ("ships", "ships.txt"),
    ]
    assert recipe["base_model"] == "birds" and "copied from birds" in card
    assert record_of(tmp_path / "out")["recipe"]["base_model"] == base
