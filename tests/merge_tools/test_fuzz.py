"""Random bytes and unusual values: an expert either merges or raises MergeError, never another exception."""

import json
import random
import shutil
from collections import Counter
from dataclasses import fields

import pytest

from merge_tools import MergeError, Recipe, check, compose, read_recipe
from merge_tools.recipe import ExpertRecipe

from .conftest import recipe_of, save_adapter
from .corruptions import INDEX, MODEL, copied, shard

ODD = (None, "", "5", -1, 0, 3, 1.5, 10**30, float("nan"), True, [], [None], {"x": 1})


@pytest.fixture
def pair(tmp_path, experts):
    """birds and ships, copied."""
    return copied(experts(2), tmp_path / "experts")


def outcome(recipe, out):
    """Whether the recipe merges. `check` and `compose` must agree, and only MergeError may be raised."""
    report = check(recipe, out)
    try:
        compose(recipe, out)
    except MergeError as error:
        assert str(error).strip() and not out.exists()
        return "refused"
    assert report.ok
    shutil.rmtree(out)
    return "merged"


def damaged(content, random):
    """Changes bytes, flips bits, deletes or duplicates a piece, or truncates."""
    content = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 5))):
        at = random.randrange(len(content))
        match random.randrange(6):
            case 0:
                content[at] = random.randrange(256)
            case 1:
                content[at] ^= 1 << random.randrange(8)
            case 2:
                content[at] = random.choice(b'0123456789"{}[],:-. e')
            case 3:
                del content[at : at + random.randrange(1, 20)]
            case 4:
                content[at:at] = content[at : at + random.randrange(1, 20)]
            case 5 if len(content) > 1:
                del content[random.randrange(1, len(content)) :]
        if not content:
            break
    return bytes(content)


@pytest.mark.parametrize(
    "name, count",
    [("header", 120), ("config.json", 100), ("tokenizer.json", 60), (INDEX, 60), ("adapter_config.json", 60)],
)
def test_damaged_files(name, count, pair, tmp_path):
    ships = pair[1]
    if name == INDEX:
        shard(ships)
    if name == "adapter_config.json":
        ships = save_adapter(tmp_path / "experts" / "lora", pair[0])
    file = ships / (MODEL if name == "header" else name)
    whole, seen = file.read_bytes(), Counter()
    length = 8 + int.from_bytes(whole[:8], "little") if name == "header" else len(whole)
    chance = random.Random(f"{name} 1")
    for _ in range(count):
        file.write_bytes(damaged(whole[:length], chance) + whole[length:])
        seen[outcome(recipe_of([pair[0], ships]), tmp_path / "out")] += 1
    assert seen["refused"] > count // 3, seen
    file.write_bytes(whole)
    assert outcome(recipe_of([pair[0], ships]), tmp_path / "out") == "merged"


@pytest.mark.parametrize("which", [0, 1])
def test_every_key_of_a_configuration_with_every_unusual_value(which, pair, tmp_path):
    """In the base, and in another expert."""
    file = pair[which] / "config.json"
    known = json.loads(file.read_text())
    for key in [*known, "rope_scaling", "rope_theta", "quantization_config"]:
        for value in ODD:
            file.write_text(json.dumps({**known, key: value}))
            check(recipe_of(pair), tmp_path / "out")
    for key in known["rope_parameters"]:
        for value in ODD:
            file.write_text(json.dumps({**known, "rope_parameters": {**known["rope_parameters"], key: value}}))
            check(recipe_of(pair), tmp_path / "out")


@pytest.mark.parametrize("gone", [False, True])
def test_every_key_of_an_adapter_with_every_unusual_value(gone, pair, tmp_path):
    folder = save_adapter(tmp_path / "experts" / "lora", pair[0], rank_pattern={}, alpha_pattern={}, use_rslora=False)
    known = json.loads((folder / "adapter_config.json").read_text())
    for key in known:
        for value in ODD:
            (folder / "adapter_config.json").write_text(json.dumps({**known, key: value}))
            check(recipe_of([pair[0], folder], **({"base_model": str(pair[0])} if gone else {})))


def test_every_key_of_a_recipe_with_every_unusual_value(pair):
    plain = recipe_of(pair)
    for known, root in ((fields(Recipe), lambda r: r), (fields(ExpertRecipe), lambda r: r["experts"][1])):
        for key in (field.name for field in known):
            for value in (*ODD, 2024, ("x",), b"x", {1: 2}, [1, "x"], "x\0y", "x" * 5000):
                recipe = json.loads(json.dumps(plain))
                root(recipe)[key] = value
                try:
                    read_recipe(recipe)
                except MergeError as error:
                    assert str(error).strip() and len(str(error)) < 500
                    continue
                check(recipe)


def test_values_that_are_not_recipes():
    for value in ([], 3, None, "", b"x", {}, {"experts": [{}, {}]}):
        with pytest.raises(MergeError):
            read_recipe(value)
