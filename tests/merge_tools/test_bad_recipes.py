"""Invalid and hostile recipes, source paths and output paths: each error names the value, and nothing is written.

What is not YAML at all is tested in `tests/run_tools/test_yaml_files.py`.
"""

import errno
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file

from merge_tools import Recipe, check, compose, read_recipe
from run_tools.claims import Claim

from .conftest import recipe_of
from .corruptions import copied, refused


@pytest.fixture
def pair(tmp_path, experts):
    """birds and ships, copied."""
    return copied(experts(2), tmp_path / "experts")


def second(source="b", **keys):
    """Two experts, the second with these keys."""
    return {"experts": ["a", {"source_model": source, **keys}]}


NAN, INF = float("nan"), float("inf")
BAD_NAMES = (
    "\x1b[31mred", "two\nlines", "../up", "a/b", "a\\b", "\ud800", "..", ".", "tab\t", "\u202egnol", "\x00", "\x7f", "\r"
)  # fmt: skip
# name -> (changes to a recipe of two experts, what the message contains)
RECIPES = {
    **{f"name {name!r}": (second(name=name), "name") for name in BAD_NAMES},
    "unknown user": (second("~nosuchuser/model"), "user does not exist"),
    "unknown user as base": ({"base_model": "~nosuchuser/model"}, "user does not exist"),
    "unknown user of centroids": ({"centroids": "~nosuchuser/c.safetensors"}, "user does not exist"),
    "surrogate in a path": (second("models/\udcff"), "source_model"),
    "escape in a path": (second("models/\x1b[31m"), "x1b"),
    "newline in a path": (second("models/a\nerror: b"), r"\\n"),
    "path of dots": (second("../../../../../../etc"), "etc"),
    "surrogate in a prompt": (second(positive_prompts=["\ud800"]), "positive_prompts"),
    "key with an escape": ({"\x1b[31m": 1}, "x1b"),
    "2,000 keys": ({f"key{i}": i for i in range(2_000)}, "key0"),
    "embedder with a surrogate": ({"embedder": "\udfff"}, "embedder"),
    "huge dtype": ({"dtype": "x" * 100_000}, "dtype"),
    "huge k": ({"experts_per_token": 10**5000}, "experts_per_token"),
    "huge layer": ({"router_layers_index": [10**5000]}, "router_layers_index"),
    "index twice": ({"router_layers_index": [0, 0]}, "router_layers_index"),
    "infinite seed": ({"seed": INF}, "seed"),
    "unknown key": ({"expert": []}, "'expert' in the recipe. Did you mean 'experts'"),
    "unknown key of mergekit": ({"gate_model": "hidden"}, "'gate_model' in the recipe. Did you mean 'gate_mode'"),
    "unknown key far off": ({"x": 1}, "'x' in the recipe. Choose from: allow, attention, average"),
    "no key": ({None: 1}, "None in the recipe"),
    "k": ({"experts_per_token": 3}, r"experts_per_token=3 .* \(2\). Use 2"),
    "k of zero": ({"experts_per_token": 0}, "experts_per_token in the recipe must be a positive integer, got 0"),
    "k as a word": ({"experts_per_token": "two"}, "experts_per_token .* got 'two'"),
    "k as truth": ({"experts_per_token": True}, "experts_per_token .* got True"),
    "k as a fraction": ({"experts_per_token": 1.5}, "experts_per_token .* got 1.5"),
    "no experts": ({"experts": None}, r"experts: \[\{source_model: PATH\}, ...\]"),
    "experts as a number": ({"experts": 3}, "has experts=3, which is not a list. Give a list: experts: "),
    "experts as a mapping": (
        {"experts": {"source_model": "a"}},
        "has experts={'source_model': 'a'}, which is not a list",
    ),
    "an empty list of experts": ({"experts": []}, "The recipe has no experts"),
    "an expert of nothing": ({"experts": [None, None]}, "source_model, got None"),
    "a misspelt source": (
        {"experts": ["a", {"source_modell": "b"}]},
        "'source_modell' in expert number 2.* Did you mean 'source_model'",
    ),
    "an expert without a source": ({"experts": [{"name": "a"}, "b"]}, "The expert 'a' has no source_model"),
    "an expert with an unknown key": (
        {"experts": [{"source_model": "a", "positive_prompt": ["x"]}, "b"]},
        "'positive_prompt' in the expert 'a'. Did you mean 'positive_prompts'",
    ),
    "a name that is a date": (
        {"experts": [{"source_model": "a", "name": 2024}, "b"]},
        "name in the expert 2024 .*quotes.* got 2024",
    ),
    "prompts as a number": (
        {"experts": [{"source_model": "a", "positive_prompts": 3}, "b"]},
        "positive_prompts in .* got 3",
    ),
    "an empty prompt": (
        {"experts": [{"source_model": "a", "positive_prompts": ["x", " "]}, "b"]},
        r"positive_prompts in the expert 'a' .* got \['x', ' '\]",
    ),
    "a weight below 0": ({"experts": [{"source_model": "a", "weight": -1}, "b"]}, "weight in the expert 'a' .* got -1"),
    "weights as strings": ({"weights": ["a", "b"]}, r"weights in the recipe .* got \['a', 'b'\]"),
    "weights as one string": ({"weights": "12"}, "weights in the recipe .* got '12'"),
    "too few weights": ({"weights": [1]}, "weights has 1 values for 2 experts"),
    "weights of NaN": ({"weights": [NAN, 1]}, "weights in the recipe .* got .nan, 1."),
    "infinite weights": ({"weights": [INF, 1]}, "weights in the recipe .* got .inf, 1."),
    "weights of zero": ({"weights": [0, 0]}, "weights are 0 for all experts"),
    "layers as a number": ({"router_layers": 3}, "router_layers in the recipe .* got 3"),
    "unknown layers": ({"router_layers": ["mpl"]}, "router_layers: 'mpl'. Did you mean 'mlp'"),
    "layers twice": ({"router_layers": ["q_proj", "q_proj"]}, r"router_layers=\['q_proj', 'q_proj'\]"),
    "no layers": ({"router_layers": []}, r"router_layers=\[\]"),
    "mlp and its parts": ({"router_layers": ["mlp", "up_proj"]}, "mlp .* gate_proj, up_proj and down_proj"),
    "index as a number": ({"router_layers_index": 3}, "router_layers_index in the recipe .* got 3"),
    "empty index": ({"router_layers_index": []}, r"router_layers_index in the recipe .* got \[\]"),
    "index below 0": ({"router_layers_index": [-1]}, r"router_layers_index in the recipe .* got \[-1\]"),
    "index out of range": ({"router_layers_index": [0, 2]}, "router_layers_index: layer 2 .* 0 to 1"),
    "gate mode": ({"gate_mode": "hiden"}, "gate_mode: 'hiden'. Did you mean 'hidden'"),
    "gate mode as a list": ({"gate_mode": ["hidden"]}, "gate_mode: .'hidden'."),
    "no gates by token": ({"gate_mode": "none"}, "gate_mode: none .* routing_policy: token. Use random"),
    "policy": ({"routing_policy": "tokens"}, "routing_policy: 'tokens'. Did you mean 'token'"),
    "dtype": ({"dtype": "bf16"}, "dtype: 'bf16'. Did you mean 'bfloat16'"),
    "allow": ({"allow": ["vocabulary"]}, "allow: 'vocabulary'. Did you mean 'vocab'"),
    "allow as a number": ({"allow": 3}, "allow in the recipe .* vocab, tokenizer, rope, got 3"),
    "average": ({"average": "median"}, "average: 'median'. Did you mean 'mean'"),
    "average of a base": ({"average": "base"}, "average: base needs base_model"),
    "format": ({"format": "mixtrl"}, "format: 'mixtrl'. Did you mean 'mixtral'"),
    "format that cannot": ({"format": "mixtral", "routing_policy": "domain"}, "format: mixtral .* format: lexicon"),
    "base as a list": ({"base_model": ["a"]}, "base_model in the recipe .* got .'a'."),
    "base that does not exist": ({"base_model": "/nowhere/at/all"}, "base: Folder '/nowhere/at/all' does not exist"),
    "seed": ({"seed": -1}, "seed in the recipe .* got -1"),
    "seed as a word": ({"seed": "x"}, "seed in the recipe .* got 'x'"),
    "hidden without prompts": ({"gate_mode": "hidden"}, "gate_mode: hidden needs positive_prompts .* 'birds'"),
    "centroid without samples": ({"gate_mode": "centroid"}, "gate_mode: centroid needs samples .* 'birds'"),
    "no vectors": ({"gate_mode": "cheap_embed", "router_layers": ["o_proj"]}, "cheap_embed .* o_proj"),
    "centroids that do not exist": (
        {"centroids": "nowhere.safetensors", "format": "lexicon"},
        "centroids='nowhere.safetensors' does not exist",
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_an_invalid_recipe_is_refused(name, pair, tmp_path):
    changes, pattern = RECIPES[name]
    refused(tmp_path, recipe_of(pair) | changes, pattern)


FILES = {
    "empty": ("", "mapping.*experts: "),
    "invalid YAML": ("experts: [a, b\nbase_model: c\n", r"YAML: .* \(line 2\)"),
    "not UTF-8": (b"experts: \xff\xfe\n", "UTF-8"),
    "an invalid value": ("experts: [a, b]\nexperts_per_token: two\n", "experts_per_token .* got 'two'"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_not_a_recipe_is_refused(name, tmp_path):
    pytest.importorskip("yaml")
    content, pattern = FILES[name]
    file = tmp_path / "recipe.yml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    result = refused(tmp_path, file, pattern)
    assert len(result) == 1 and "\n" not in result[0]


def test_a_file_that_does_not_exist(tmp_path):
    refused(tmp_path, tmp_path / "recipe.yml", "recipe.yml' does not exist")


def test_all_errors_of_a_recipe_are_reported_at_once(pair):
    recipe = recipe_of(
        pair, gate_mode="hiden", dtype="int7", experts_per_token=5, router_layers=["mlp", "up_proj"], seed=-1
    )
    lines = [finding.message for finding in check(recipe).errors]
    names = ("hiden", "int7", "seed", "experts_per_token=5", "router_layers")
    assert len(lines) == len(names) and all(name in line for name, line in zip(names, lines, strict=True)), lines


@pytest.mark.parametrize(
    "keys, wrong",
    [
        ({"average": "tiez", "density": 0.4}, ["tiez"]),
        ({"gate_mode": "rigde", "gate_tokens": 9}, ["rigde"]),
        ({"routing_policy": "domian", "gate_mode": "none"}, ["domian"]),
        ({"base_model": 3, "average": "base", "rank": 4, "include_base": True}, ["base_model"]),
        ({"gate_mode": "uniform_random"}, ["uniform_random"]),
        ({"base_modle": "x", "average": "base", "dtype": "int7"}, ["base_modle", "int7"]),
        (second(name="a/b", weigth=2, weight=-1), ["weigth", "a/b", "weight in"]),
        ({"experts": [3, {"name": "x"}], "dtype": "int7"}, ["int7", "got 3", "no source_model"]),
    ],
)
def test_what_follows_from_another_error_is_not_reported(keys, wrong, pair):
    lines = [finding.message for finding in check(recipe_of(pair) | keys).errors]
    assert len(lines) == len(wrong) and all(name in line for name, line in zip(wrong, lines, strict=True)), lines


def test_keys_without_a_value_are_ignored_and_paths_are_relative_to_the_file(pair, tmp_path):
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


def test_allow_is_added_to_the_recipes(pair):
    recipe = read_recipe(recipe_of(pair, allow="vocab, rope"), allow=["tokenizer", "vocab"])
    assert recipe.allow == ["vocab", "rope", "tokenizer"]


def test_weights_and_a_weight_exclude_each_other(pair, tmp_path):
    recipe = recipe_of([{"source_model": str(pair[0]), "weight": 2}, pair[1]])
    refused(tmp_path, recipe | {"weights": [1, 2]}, "both weights and a weight of an expert")
    assert [e.weight for e in read_recipe(recipe, weights=[3, 4]).experts] == [3, 4]  # a change replaces


def test_one_expert_and_duplicate_names(pair, tmp_path):
    refused(tmp_path, recipe_of(pair[:1]), "one expert")
    shutil.copytree(pair[0], tmp_path / "more" / "birds")
    twice = recipe_of([pair[0], tmp_path / "more" / "birds"])
    refused(tmp_path, twice, "'birds': .*experts/birds and .*more/birds")
    twice["experts"][1]["name"] = "other birds"
    (warning,) = check(twice).warnings
    assert warning.check == "experts" and "birds" in warning.message


def test_an_expert_named_base_is_not_the_base(tmp_path, make_expert):
    """The base is a different folder: its vocabulary decides, and its weights with `average: base`."""
    folders = [make_expert(tmp_path / name, seed) for seed, name in enumerate(("real", "base", "other"))]
    recipe = recipe_of(folders[1:], base_model=str(folders[0]), average="base")
    compose(recipe, tmp_path / "out")
    norm = "model.norm.weight"
    stored, base = (load_file(folder / "model.safetensors")[norm] for folder in (tmp_path / "out", folders[0]))
    assert torch.equal(stored, base)


def test_a_source_that_does_not_exist(pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path, pattern in (
        ("experts/nothing", "'experts/nothing' does not exist, and no model .* from the Hub"),
        ("experts/shipz", "Did you mean 'experts/ships'"),
        ("./experts/shipz", "'./experts/shipz' does not exist. Did you mean 'experts/ships'"),
        ("/experts/nothing", "'/experts/nothing' does not exist"),
        ("nothing", "'nothing' does not exist"),
        ("someone/some-llama", "'someone/some-llama' does not exist, .*HF_HUB_OFFLINE is set"),
        (str(pair[1] / "config.json"), "config.json' is a file"),
        ("x" * 5000, "Folder 'xxx"),
        ("a\0b", r"source_model in the expert 'ships' .* got 'a.x00b'"),
        ("birds+adapter", "birds.adapter.* Use source_model: adapter alone, and base_model: birds"),
        ("org/m@v1.0", "org/m@v1.0.* hf download org/m --revision v1.0"),
    ):
        result = refused(tmp_path, recipe_of([pair[0], {"source_model": path, "name": "ships"}]), pattern)
        assert not any("epository" in line for line in result)  # huggingface_hub's own word for a wrong path


def test_output_paths_that_cannot_be_written_to(pair, tmp_path, monkeypatch):
    recipe, birds = recipe_of(pair), tmp_path / "experts" / "birds"
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "link").symlink_to(birds)
    monkeypatch.chdir(tmp_path)
    for out, pattern in (
        ("~nosuchuser/out", "the user does not exist"),
        ("a\0b", "is not a path that can be written"),
        ("\udcff", "is not UTF-8, or its name is too long"),
        ("x" * 300, "is not UTF-8, or its name is too long"),
        (".", "contains the source 'birds'"),
        (birds, "is the source 'birds'"),
        (tmp_path / "experts" / "." / "ships" / "..", "contains the source 'birds'"),
        (birds / "deep" / "out", "is inside the source 'birds'"),
        (tmp_path / "experts", "contains the source 'birds'"),
        (tmp_path / "link", "is the source 'birds'"),
        (tmp_path / "full", "full: exists and is not empty"),
        (tmp_path / "file", "file: exists and is not empty"),
        (tmp_path / "file" / "out", "cannot be created: .*file is a file"),
    ):
        assert len(refused(tmp_path, recipe, pattern, out)) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_path_without_permission(pair, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    refused(tmp_path, recipe_of(pair), "locked is not writable", tmp_path / "locked" / "out")


def test_an_empty_folder_is_free(pair, tmp_path):
    (tmp_path / "out").mkdir()
    compose(recipe_of(pair), tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()


def test_too_little_disk_space(pair, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=16 << 20))
    refused(tmp_path, recipe_of(pair), "16.9 MB .* 16.8 MB are free")


def test_partial_output_counts_as_free_space(pair, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=16 << 20))
    Claim.create(tmp_path / ".out.partial", "merge", {}).write("model.safetensors", b"x" * 400_000)
    assert check(recipe_of(pair), tmp_path / "out").ok


def test_a_disk_without_preallocation_works(pair, tmp_path, monkeypatch):
    def unable(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    compose(recipe_of(pair), tmp_path / "one")
    monkeypatch.setattr(os, "posix_fallocate", unable)
    compose(recipe_of(pair), tmp_path / "two")
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (
        tmp_path / "two" / "model.safetensors"
    ).read_bytes()
