"""Recipes, places and adapters that cannot work: refused by name, with the mend, before anything is written."""

import errno
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file

from merge_tools import MergeError, Recipe, check, compose, read_recipe

from .broken import copied, refused, snapshot
from .conftest import recipe_of


@pytest.fixture
def pair(tmp_path, experts):
    """birds and ships, copied."""
    return copied(experts(2), tmp_path / "experts")


PROMPTS = {"positive_prompts": ["the birds sing"]}
# what is added to a recipe of two experts -> what is said
RECIPES = {
    "unknown key": ({"expert": []}, "Unknown key 'expert' in the recipe. Did you mean 'experts'"),
    "unknown key of mergekit": (
        {"gate_model": "hidden"},
        "Unknown key 'gate_model' in the recipe. Did you mean 'gate_mode'",
    ),
    "unknown key far off": ({"x": 1}, "Unknown key 'x' in the recipe. Known: allow, average, base_model"),
    "no key": ({None: 1}, "Unknown key None in the recipe"),
    "k": (
        {"experts_per_token": 3},
        "experts_per_token=3 is more than the 2 experts: a token cannot choose one twice. Use 2",
    ),
    "k of nothing": (
        {"experts_per_token": 0},
        "experts_per_token in the recipe is 0, and takes a whole number from 1 on",
    ),
    "k as a word": ({"experts_per_token": "two"}, "experts_per_token in the recipe is 'two', and takes a whole number"),
    "k as truth": ({"experts_per_token": True}, "experts_per_token in the recipe is True"),
    "k as a fraction": ({"experts_per_token": 1.5}, "experts_per_token in the recipe is 1.5"),
    "no experts": (
        {"experts": None},
        r"The recipe names no experts. Give a list: experts: \[\{source_model: PATH\}, ...\]",
    ),
    "experts as a number": ({"experts": 3}, "The recipe names no experts"),
    "experts as a mapping": ({"experts": {"source_model": "a"}}, "The recipe names no experts"),
    "an empty list of experts": ({"experts": []}, "The recipe names no experts"),
    "an expert of nothing": ({"experts": [None, None]}, "An expert is a path or a mapping with source_model, not None"),
    "an expert without a source": ({"experts": [{"name": "a"}, "b"]}, "An expert has no source_model"),
    "an expert with an unknown key": (
        {"experts": [{"source_model": "a", "positive_prompt": ["x"]}, "b"]},
        "Unknown key 'positive_prompt' in the expert 'a'. Did you mean 'positive_prompts'",
    ),
    "a name that is a date": (
        {"experts": [{"source_model": "a", "name": 2024}, "b"]},
        r"name in the expert 2024 is 2024, and takes a text \(put quotes around a number or a date\)",
    ),
    "prompts as a number": (
        {"experts": [{"source_model": "a", "positive_prompts": 3}, "b"]},
        "positive_prompts in .* is 3",
    ),
    "an empty prompt": (
        {"experts": [{"source_model": "a", "positive_prompts": ["x", " "]}, "b"]},
        r"positive_prompts in the expert 'a' is \['x', ' '\], and takes a text or a list of texts, none of them empty",
    ),
    "a weight below 0": (
        {"experts": [{"source_model": "a", "weight": -1}, "b"]},
        "weight in the expert 'a' is -1, and takes",
    ),
    "weights as texts": (
        {"weights": ["a", "b"]},
        r"weights in the recipe is \['a', 'b'\], and takes a list of numbers",
    ),
    "weights as one text": ({"weights": "12"}, "weights in the recipe is '12', and takes a list of numbers from 0 on"),
    "too few weights": ({"weights": [1]}, "weights has 1 values for 2 experts. Give each one"),
    "weights of NaN": ({"weights": [float("nan"), 1]}, "weights in the recipe is .nan, 1., and takes"),
    "endless weights": ({"weights": [float("inf"), 1]}, "weights in the recipe is .inf, 1., and takes"),
    "weights of nothing": ({"weights": [0, 0]}, "weights are 0 for all experts: there is nothing to average"),
    "layers as a number": ({"router_layers": 3}, "router_layers in the recipe is 3, and takes mlp, or a list of names"),
    "unknown layers": ({"router_layers": ["mpl"]}, "router_layers: 'mpl' is no part of a layer. Did you mean 'mlp'"),
    "layers twice": ({"router_layers": ["q_proj", "q_proj"]}, "routes nothing, or something twice"),
    "no layers": ({"router_layers": []}, "routes nothing, or something twice"),
    "mlp and its parts": (
        {"router_layers": ["mlp", "up_proj"]},
        "mlp routes gate_proj, up_proj and down_proj together",
    ),
    "index as a number": (
        {"router_layers_index": 3},
        "router_layers_index in the recipe is 3, and takes a list of layers'",
    ),
    "index of nothing": ({"router_layers_index": []}, r"router_layers_index in the recipe is \[\], and takes a list"),
    "index below 0": ({"router_layers_index": [-1]}, r"router_layers_index in the recipe is \[-1\], and takes"),
    "index out of range": ({"router_layers_index": [0, 2]}, "there is no layer 2: layers are 0 to 1"),
    "gate mode": ({"gate_mode": "hiden"}, "gate_mode: 'hiden' is not known. Did you mean 'hidden'"),
    "gate mode as a list": ({"gate_mode": ["hidden"]}, "gate_mode: .'hidden'. is not known"),
    "no gates by token": ({"gate_mode": "none"}, "gate_mode: none leaves the token policy without gates. Use random"),
    "policy": ({"routing_policy": "tokens"}, "routing_policy: 'tokens' is not known. Did you mean 'token'"),
    "dtype": ({"dtype": "bf16"}, "dtype: 'bf16' cannot be written. Did you mean 'bfloat16'"),
    "allow": (
        {"allow": ["vocabulary"]},
        "allow: 'vocabulary' is no difference that can be allowed. Did you mean 'vocab'",
    ),
    "allow as a number": (
        {"allow": 3},
        "allow in the recipe is 3, and takes names of differences: vocab, tokenizer, rope",
    ),
    "average": ({"average": "median"}, "average: 'median' is not known. Did you mean 'mean'"),
    "average of a base": ({"average": "base"}, "average: base needs base_model"),
    "format": ({"format": "mixtrl"}, "format: 'mixtrl' is not known. Did you mean 'mixtral'"),
    "format that cannot": ({"format": "mixtral", "routing_policy": "domain"}, "format: mixtral can hold whole MLPs"),
    "base as a list": ({"base_model": ["a"]}, "base_model in the recipe is .'a'., and takes a path or a Hub id"),
    "base that is not there": ({"base_model": "/nowhere/at/all"}, "base: There is no folder '/nowhere/at/all'"),
    "seed": ({"seed": -1}, "seed in the recipe is -1, and takes a whole number from 0 on"),
    "seed as a word": ({"seed": "x"}, "seed in the recipe is 'x'"),
    "hidden without prompts": (
        {"gate_mode": "hidden"},
        "needs positive_prompts for every expert, and 'birds' has none",
    ),
    "centroid without samples": ({"gate_mode": "centroid"}, "needs samples for every expert, and 'birds' has none"),
    "no vectors": ({"gate_mode": "cheap_embed", "router_layers": ["o_proj"]}, "cheap_embed has no vectors for o_proj"),
    "centroids not there": (
        {"centroids": "nowhere.safetensors", "format": "lexicon"},
        "There is no file of centroids 'nowhere",
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_that_makes_no_sense_is_refused(name, pair, tmp_path):
    changes, pattern = RECIPES[name]
    refused(tmp_path, recipe_of(pair) | changes, pattern)


@pytest.mark.parametrize("name", [name for name, (changes, _) in RECIPES.items() if None not in changes])
def test_the_same_from_a_file(name, pair, tmp_path):
    """What YAML makes of it is refused alike, in one line."""
    yaml = pytest.importorskip("yaml")
    changes, pattern = RECIPES[name]
    (tmp_path / "recipe.yml").write_text(yaml.safe_dump(recipe_of(pair) | changes))
    found = refused(tmp_path, tmp_path / "recipe.yml", pattern)
    assert all("\n" not in line for line in found)


FILES = {
    "empty": ("", "holds no keys. A recipe starts with: experts: "),
    "a list": ("- a\n- b\n", "holds no keys"),
    "a text": ("experts", "holds no keys"),
    "no YAML": ("experts: [a, b\nbase_model: c\n", r"is no valid YAML: .* \(line 2\)"),
    "a tab": ("experts:\n\t- a\n", r"is no valid YAML: .* \(line 2\)"),
    "a key twice": ("experts: [a, b]\nexperts: [c, d]\n", r"'experts' is given twice \(line 1\)"),
    "an object": ("experts: !!python/object/apply:os.system ['true']\n", "is no valid YAML: could not determine"),
    "not UTF-8": (b"experts: \xff\xfe\n", "cannot be read as YAML"),
    "a nest": ("[" * 700, "cannot be read as YAML|is no valid YAML"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_recipe_is_refused(name, tmp_path):
    pytest.importorskip("yaml")
    content, pattern = FILES[name]
    file = tmp_path / "recipe.yml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    found = refused(tmp_path, file, pattern)
    assert len(found) == 1 and "\n" not in found[0]


def test_a_file_that_is_not_there(tmp_path):
    refused(tmp_path, tmp_path / "recipe.yml", "There is no recipe '.*recipe.yml'")


def test_keys_without_a_value_are_left_out_and_paths_count_from_the_file(pair, tmp_path):
    pytest.importorskip("yaml")
    text = "base_model:\nrouter_layers:\nweights:\nexperts_per_token:\nexperts:\n- experts/birds\n"
    (tmp_path / "recipe.yml").write_text(text + "- source_model: experts/ships\n  positive_prompts:\n  name: other\n")
    recipe = read_recipe(tmp_path / "recipe.yml")
    assert recipe.names == ["birds", "other"] and recipe.experts_per_token == 2 and recipe.router_layers == ["mlp"]
    assert recipe.experts[0].source_model == str(tmp_path / "experts" / "birds")


def test_a_recipe_made_in_python_may_hold_paths_tuples_and_names(pair, tmp_path):
    recipe = Recipe(experts=[str(folder) for folder in pair], base_model=pair[0], router_layers=("mlp",))
    compose(recipe, tmp_path / "out", weights=(1, 3))
    known = json.loads((tmp_path / "out" / "merge_record.json").read_text())["recipe"]
    assert known["base_model"] == str(pair[0]) and [e.get("weight") for e in known["experts"]] == [None, 3]


def test_what_is_allowed_on_the_way_adds_to_what_the_recipe_allows(pair):
    recipe = read_recipe(recipe_of(pair, allow="vocab, rope"), allow=["tokenizer", "vocab"])
    assert recipe.allow == ["vocab", "rope", "tokenizer"]


def test_weights_and_a_weight_are_one_too_many(pair, tmp_path):
    recipe = recipe_of([{"source_model": str(pair[0]), "weight": 2}, pair[1]])
    refused(tmp_path, recipe | {"weights": [1, 2]}, "has weights, and an expert has a weight of its own. Give either")
    assert [e.weight for e in read_recipe(recipe, weights=[3, 4]).experts] == [3, 4]  # a change replaces


def test_one_expert_and_two_of_one_name(pair, tmp_path):
    refused(tmp_path, recipe_of(pair[:1]), "One expert makes no mixture: copy its folder, or give two or more")
    shutil.copytree(pair[0], tmp_path / "more" / "birds")
    twice = recipe_of([pair[0], tmp_path / "more" / "birds"])
    refused(tmp_path, twice, "Two experts are called 'birds': .*experts/birds and .*more/birds. Give each its own")
    twice["experts"][1]["name"] = "other birds"
    assert [f.message for f in check(twice).warnings] == [
        "has the same weights as birds in every sample of its routed layers: routing between them changes nothing."
    ]


def test_an_expert_called_base_is_not_taken_for_the_base(tmp_path, make_expert):
    """The base is another folder of the name: its vocabulary must decide, and its weights with `average: base`."""
    folders = [make_expert(tmp_path / name, seed) for seed, name in enumerate(("real", "base", "other"))]
    recipe = recipe_of(folders[1:], base_model=str(folders[0]), average="base")
    compose(recipe, tmp_path / "out")
    norm = "model.norm.weight"
    stored, base = (load_file(folder / "model.safetensors")[norm] for folder in (tmp_path / "out", folders[0]))
    assert torch.equal(stored, base)


def test_a_source_that_is_not_there(pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given, pattern in (
        (
            "experts/nothing",
            "There is no folder 'experts/nothing', and no model of that name could be fetched from the Hub",
        ),
        ("experts/shipz", "Did you mean 'experts/ships'"),
        ("./experts/shipz", "There is no folder './experts/shipz'. Did you mean 'experts/ships'"),
        ("/experts/nothing", "There is no folder '/experts/nothing'"),
        ("nothing", "There is no folder 'nothing'"),
        (
            "someone/some-llama",
            "There is no folder 'someone/some-llama', and no model .*HF_HUB_OFFLINE is set.* Mind the spelling",
        ),
        (str(pair[1] / "config.json"), "is a file. A source is the folder that holds config.json and the weights"),
        ("x" * 5000, "There is no folder 'xxx"),
        ("a\0b", r"source_model in the expert 'ships' is 'a.x00b', and takes a path or a Hub id"),
    ):
        found = refused(tmp_path, recipe_of([pair[0], {"source_model": given, "name": "ships"}]), pattern)
        assert not any("epository" in line for line in found)  # huggingface_hub's own word for a wrong path


def test_places_that_cannot_be_written_to(pair, tmp_path):
    recipe, birds = recipe_of(pair), tmp_path / "experts" / "birds"
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "link").symlink_to(birds)
    for out, pattern in (
        (birds, "is the source 'birds', which is never written to"),
        (tmp_path / "experts" / "." / "ships" / "..", "holds the source 'birds'"),
        (birds / "deep" / "out", "lies in the source 'birds'"),
        (tmp_path / "experts", "holds the source 'birds'"),
        (tmp_path / "link", "is the source 'birds'"),
        (tmp_path / "full", "is occupied already. Choose another place, or remove it first"),
        (tmp_path / "file", "is occupied already"),
        (tmp_path / "file" / "out", "cannot be made: .*file is a file"),
    ):
        refused(tmp_path, recipe, pattern, out)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_without_permission(pair, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    refused(tmp_path, recipe_of(pair), "locked is not writable", tmp_path / "locked" / "out")


def test_an_empty_folder_is_free(pair, tmp_path):
    (tmp_path / "out").mkdir()
    compose(recipe_of(pair), tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()


def test_not_enough_disk_is_seen_before(pair, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=16 << 20))
    refused(tmp_path, recipe_of(pair), r"16.8 MB are free where 16.9 MB are needed. Make room, or write elsewhere")


def test_what_an_interrupted_run_holds_counts_as_room_for_the_next(pair, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=16 << 20))
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "model.safetensors").write_bytes(b"x" * 400_000)
    assert check(recipe_of(pair), tmp_path / "out").ok


def test_a_disk_that_fills_up_leaves_nothing(pair, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = snapshot(tmp_path)
    with pytest.raises(MergeError, match="The disk is full: .* are needed for the next file. Make room"):
        compose(recipe_of(pair), tmp_path / "out")
    assert snapshot(tmp_path) == before


def test_a_disk_that_cannot_reserve_is_written_to_all_the_same(pair, tmp_path, monkeypatch):
    def unable(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    compose(recipe_of(pair), tmp_path / "one")
    monkeypatch.setattr(os, "posix_fallocate", unable)
    compose(recipe_of(pair), tmp_path / "two")
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (
        tmp_path / "two" / "model.safetensors"
    ).read_bytes()
