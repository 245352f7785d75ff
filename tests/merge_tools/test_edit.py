"""`add`, `remove`, `extract` and `export`, and `inspect` of what they wrote."""

import json
import shutil

import pytest
import torch
from torch.testing import assert_close

from merge_tools import add, compose, export, extract, inspect, remove, verify
from merge_tools.families import FAMILIES
from run_tools.errors import UserError

from .conftest import MODELS, logits_of, open_model, randomize, read_tensors, recipe_of, same_tensors, save_expert
from .test_compose import IDS, STOCK, opened

TEXTS = {"birds": "the hen", "ships": "a ship of the line", "tools": "the saw"}


def with_prompts(folders):
    return [{"source_model": str(f), "positive_prompts": [TEXTS[f.name]]} for f in folders]


@pytest.mark.parametrize("gate_mode", ["random", "hidden"])
@pytest.mark.parametrize(
    "options", [{}, {"rank": 5, "dtype": "bfloat16"}, {"format": "lexicon", "routing_policy": "domain"}], ids=str
)
def test_an_expert_that_is_added_gives_the_tensors_of_a_new_mixture(options, gate_mode, experts, tmp_path):
    """With the base's shared weights; removed again, it leaves those of the old one."""
    folders = experts(3)
    recipe = {"base_model": str(folders[0]), "average": "base", "gate_mode": gate_mode, **options}
    compose(recipe_of(with_prompts(folders), **recipe), tmp_path / "three")
    compose(recipe_of(with_prompts(folders[:2]), **recipe), tmp_path / "two")
    assert not add(tmp_path / "two", with_prompts(folders)[2], tmp_path / "grown")["warnings"]
    assert same_tensors(tmp_path / "grown", tmp_path / "three")
    remove(tmp_path / "grown", "tools", tmp_path / "shrunk")
    assert same_tensors(tmp_path / "shrunk", tmp_path / "two")
    assert [expert["name"] for expert in inspect(tmp_path / "grown")["experts"]] == ["birds", "ships", "tools"]
    assert all(verify(tmp_path / name)["ok"] for name in ("grown", "shrunk"))


def test_means_stay_as_they_were(experts, tmp_path):
    folders = experts(3)
    compose(recipe_of(folders), tmp_path / "three")
    compose(recipe_of(folders[:2]), tmp_path / "two")
    norm = "model.norm.weight"
    add(tmp_path / "two", folders[2], tmp_path / "grown")
    assert torch.equal(read_tensors(tmp_path / "grown")[norm], read_tensors(tmp_path / "two")[norm])
    assert inspect(tmp_path / "grown")["shared_from"] == ["birds", "ships"] and verify(tmp_path / "grown")["ok"]
    remove(tmp_path / "three", "birds", tmp_path / "without")
    found = verify(tmp_path / "without")
    assert found["ok"] and "birds (removed)" in found["notes"][0] and found["compared"]["shared"] == 0


def test_a_row_of_random_gates_belongs_to_its_expert(experts, tmp_path):
    """A new expert does not get the row of one that was removed."""
    folders = experts(3)
    compose(recipe_of(folders), tmp_path / "three")
    remove(tmp_path / "three", "birds", tmp_path / "two")
    add(tmp_path / "two", {"source_model": str(folders[0]), "name": "new"}, tmp_path / "grown")
    gate = "model.layers.0.block_sparse_moe.gate.weight"
    old, new = (read_tensors(tmp_path / name)[gate] for name in ("three", "grown"))
    assert torch.equal(new[:2], old[1:]) and not any(torch.equal(new[2], row) for row in old)
    assert verify(tmp_path / "grown")["compared"]["gates"] == 2


@pytest.mark.parametrize("name", MODELS)
def test_an_extracted_expert_is_a_dense_model(name, experts, tmp_path):
    """With shared weights that are its own it equals its source."""
    folders = [tmp_path / "birds", tmp_path / "ships"]
    save_expert(folders[0], 5, name)
    shutil.copytree(folders[0], folders[1])
    randomize(open_model(folders[1]), 77, ("gate_proj", "up_proj", "down_proj")).save_pretrained(folders[1])
    compose(recipe_of(folders), tmp_path / "out")
    extract(tmp_path / "out", "ships", tmp_path / "dense")
    dense, source = opened(tmp_path / "dense"), open_model(folders[1])
    assert type(dense) is type(source) and torch.equal(logits_of(dense, IDS), logits_of(source, IDS))
    windows = [getattr(model.config, "sliding_window", None) for model in (dense, source)]
    assert windows[0] == windows[1]  # the class of a mistral has one of 4096 by default


def test_an_expert_of_a_lexicon_mixture_has_no_window(experts, tmp_path):
    """The class of a mixture has no such field, and that of the expert one of 4096 by default."""
    compose(recipe_of(experts(2, "mistral"), format="lexicon"), tmp_path / "out")
    extract(tmp_path / "out", "ships", tmp_path / "dense")
    assert opened(tmp_path / "dense").config.sliding_window is None


@pytest.mark.parametrize("name", [n for n in STOCK if FAMILIES[MODELS[n][0]].lexicon is not None and "window" not in n])
def test_a_mixture_is_exported_to_lexicon_and_back(name, experts, tmp_path):
    compose(recipe_of(experts(3, name)), tmp_path / "out")
    export(tmp_path / "out", tmp_path / "lexicon", "lexicon")
    mixture, stock = opened(tmp_path / "lexicon"), opened(tmp_path / "out")
    assert type(mixture).__name__ == "LexiconForCausalLM"
    assert_close(logits_of(mixture, IDS), logits_of(stock, IDS), atol=2e-4, rtol=1e-4)
    assert verify(tmp_path / "lexicon")["ok"]
    export(tmp_path / "lexicon", tmp_path / "back", FAMILIES[MODELS[name][0]].mixture.model_type)
    assert same_tensors(tmp_path / "back", tmp_path / "out")


def test_experts_of_low_rank_are_exported_and_extracted_whole(experts, tmp_path):
    folders, name = experts(3), "model.layers.0.mlp.up_proj.weight"
    compose(recipe_of(folders, base_model=folders[0], average="base", rank=32), tmp_path / "out")
    export(tmp_path / "out", tmp_path / "whole", "mixtral")
    whole, thin = (logits_of(opened(tmp_path / name), IDS) for name in ("whole", "out"))
    assert_close(whole, thin, atol=1e-3, rtol=1e-3)
    found = verify(tmp_path / "whole")
    assert found["ok"] and "rank 32" in found["notes"][0]
    extract(tmp_path / "out", "ships", tmp_path / "dense")
    assert_close(read_tensors(tmp_path / "dense")[name], read_tensors(folders[1])[name], atol=1e-5, rtol=1e-5)


def test_sources_that_were_moved(experts, tmp_path):
    """A mixture and its sources that are moved together are found; otherwise the message says what to pass."""
    for folder in experts(3):
        shutil.copytree(folder, tmp_path / "all" / folder.name)
    compose(recipe_of([tmp_path / "all" / name for name in TEXTS]), tmp_path / "all" / "out")
    (tmp_path / "all").rename(tmp_path / "moved")
    assert verify(tmp_path / "moved" / "out")["ok"]
    (tmp_path / "moved" / "ships").rename(tmp_path / "here")
    with pytest.raises(UserError, match="--moved ships=FOLDER"):
        verify(tmp_path / "moved" / "out")
    moved = {"ships": tmp_path / "here"}
    assert verify(tmp_path / "moved" / "out", sources=moved)["ok"]


def test_mistakes_are_named_and_nothing_is_written(experts, tmp_path):
    folders = experts(3)
    compose(recipe_of(folders[:2]), tmp_path / "two")
    compose(recipe_of(with_prompts(folders[:2]), gate_mode="hidden"), tmp_path / "prompts")
    window = save_expert(tmp_path / "window", 3, "mistral with a window")
    compose(recipe_of([window] * 2), tmp_path / "windows")
    for action, fragments in (
        (lambda out: add(tmp_path / "two", folders[0], out), ("birds", "name")),
        (lambda out: add(tmp_path / "two", window, out), ("window", "model_type", "mistral")),
        (lambda out: add(tmp_path / "prompts", folders[2], out), ("tools", "positive_prompts")),
        (lambda out: add(tmp_path / "nothing", folders[2], out), ("nothing", "merge_record.json")),
        (lambda out: remove(tmp_path / "two", "tools", out), ("tools", "birds, ships")),
        (lambda out: remove(tmp_path / "two", "ships", out), ("ships", "extract")),
        (lambda out: export(tmp_path / "two", out, "qwen3_moe"), ("qwen3_moe", "mixtral")),
        (lambda out: export(tmp_path / "windows", out, "lexicon"), ("sliding_window is 8",)),
    ):
        with pytest.raises(UserError) as error:
            action(tmp_path / "out")
        assert all(fragment in str(error.value) for fragment in fragments) and "\n" not in str(error.value), error.value
        assert not list(tmp_path.glob("out*"))


def test_a_damaged_record_is_named(experts, tmp_path):
    compose(recipe_of(experts(3)), tmp_path / "out")
    record = tmp_path / "out" / "merge_record.json"
    content, broken = json.loads(record.read_text()), {"recipe": {"experts": [1]}}
    for change in ({"experts": None}, {"experts": []}, {"base": {}}, {"family": "gpt2"}, {"format": 3}, broken):
        record.write_text(json.dumps(content | change))
        with pytest.raises(UserError, match="merge_record.json"):
            inspect(tmp_path / "out")
