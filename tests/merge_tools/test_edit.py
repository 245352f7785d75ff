"""Adding, removing and extracting experts; exporting to the other format."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from torch.testing import assert_close
from transformers import AutoConfig, LlamaForCausalLM

from merge_tools import MergeError, add, compose, export, extract, inspect, remove, verify
from merge_tools.dense_run import DenseRun
from modeling_lexicon import LexiconForCausalLM

from .conftest import NAMES, contents, logits_of, open_model, read_tensors, recipe_of, save_expert

IDS = torch.arange(3, 43).reshape(2, 20)
EXPERT = "model.layers.{}.block_sparse_moe.experts.{}.{}.weight"
GATE = "model.layers.{}.block_sparse_moe.gate.weight"
PLACES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
PROMPTS = {name: [f"the {name} of the sea", f"a text in which {name} is a word"] for name in NAMES}
GATES = ("random", "zeros", "hidden", "cheap_embed")
LINEARS = {"router_layers": ["q_proj", "up_proj"], "router_layers_index": [1]}
each_gate = pytest.mark.parametrize("gate_mode", GATES)


def expert_of(folder):
    return {"source_model": str(folder), "positive_prompts": PROMPTS[folder.name]}


def mixture(out, folders, **options):
    options = {"average": "base", "base_model": str(folders[0])} | options
    options = {key: value for key, value in options.items() if value is not None}
    compose(recipe_of(map(expert_of, folders), **options), out)
    return out


def as_mean(**options):
    return {"average": "mean", "base_model": None, **options}


# extract


@pytest.mark.parametrize("options", [{}, as_mean(), {"format": "lexicon"}, {"routing_policy": "domain"}])
def test_extract_returns_the_mlps_byte_by_byte(experts, tmp_path, options):
    folders = experts(3, dtype="bfloat16")
    mixture(tmp_path / "out", folders, **options)
    for folder in folders:
        extract(tmp_path / "out", folder.name, tmp_path / folder.name)
        ours, theirs = read_tensors(tmp_path / folder.name), read_tensors(folder)
        assert ours.keys() == theirs.keys()
        for name in ours:
            if ".mlp." in name:
                assert torch.equal(ours[name].view(torch.int16), theirs[name].view(torch.int16))
    up = "model.layers.0.mlp.up_proj.weight"
    assert len({read_tensors(tmp_path / f.name)[up].float().sum().item() for f in folders}) == 3


@pytest.mark.parametrize("options", [{}, as_mean()])
@pytest.mark.parametrize("shape", [{}, {"tied": True, "rope": "llama3"}, {"attention_bias": True}])
def test_extract_is_the_expert_itself_when_all_share_one_base(experts, tmp_path, shape, options):
    folders = experts(3, same_shared=True, **shape)
    mixture(tmp_path / "out", folders, **options)
    done = extract(tmp_path / "out", "ships", tmp_path / "dense")
    assert done["shared"]["compared"] and done["shared"]["equal"] and done["shared"]["largest"] == 0
    ours, theirs = read_tensors(tmp_path / "dense"), read_tensors(folders[1])
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    model, expert = open_model(tmp_path / "dense"), open_model(folders[1])
    assert type(model) is LlamaForCausalLM
    assert torch.equal(logits_of(model, IDS), logits_of(expert, IDS))
    ignored = ("_name_or_path", "transformers_version")
    configs = [{k: v for k, v in m.config.to_dict().items() if k not in ignored} for m in (model, expert)]
    assert configs[0] == configs[1]
    assert not torch.equal(logits_of(open_model(folders[0]), IDS), logits_of(model, IDS))  # negative control


@pytest.mark.parametrize("source, written", [("float32", None), ("float32", "bfloat16"), ("bfloat16", "float32")])
def test_extract_reports_the_difference_of_shared_weights(experts, tmp_path, source, written):
    folders = experts(3, dtype=source)
    mixture(tmp_path / "out", folders, **as_mean(dtype=written))
    shared = extract(tmp_path / "out", "tools", tmp_path / "dense")["shared"]
    ours, theirs = read_tensors(tmp_path / "out"), read_tensors(folders[2])
    apart = {name: (ours[name].double() - theirs[name].double()).abs().max().item() for name in theirs if name in ours}
    assert shared["compared"] and not shared["equal"] and shared["tensors"] == len(apart)
    assert shared["differing"] == sum(gap > 0 for gap in apart.values())
    assert shared["largest"] == max(apart.values()) > 0.1


def test_extract_works_without_the_source(experts, tmp_path):
    folders = [shutil.copytree(folder, tmp_path / folder.name) for folder in experts(2)]
    mixture(tmp_path / "out", folders)
    shutil.rmtree(folders[1])
    shared = extract(tmp_path / "out", "ships", tmp_path / "dense")["shared"]
    assert not shared["compared"] and "ships' does not exist" in shared["why"]
    assert read_tensors(tmp_path / "dense").keys() == read_tensors(folders[0]).keys()


@pytest.mark.parametrize("gate_mode", [None, "random"])
def test_extract_equals_the_expert_selected_by_domain_ids(experts, tmp_path, gate_mode):
    folders = experts(3)
    mixture(tmp_path / "out", folders, **as_mean(routing_policy="domain", gate_mode=gate_mode))
    model, result = open_model(tmp_path / "out"), []
    for e, folder in enumerate(folders):
        extract(tmp_path / "out", folder.name, tmp_path / folder.name)
        result.append(logits_of(open_model(tmp_path / folder.name), IDS))
        assert_close(logits_of(model, IDS, domain_ids=torch.full((2,), e)), result[e], atol=1e-5, rtol=1e-5)
    assert (result[0] - result[1]).abs().max() > 0.5 and (result[1] - result[2]).abs().max() > 0.5


def test_extracted_experts_compose_to_the_same_mixture(experts, tmp_path):
    """All of them have the same shared weights, which are therefore also the mean."""
    mixture(tmp_path / "out", experts(3, dtype="bfloat16"), **as_mean())
    for name in NAMES[:3]:
        extract(tmp_path / "out", name, tmp_path / name)
    mixture(tmp_path / "again", [tmp_path / name for name in NAMES[:3]], **as_mean())
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "again")]
    assert weights[0] == weights[1]


def test_edits_of_sharded_and_single_file_mixtures_are_equal(experts, tmp_path):
    folders = experts(4)
    recipe = recipe_of(map(expert_of, folders[:3]), gate_mode="hidden")
    compose(recipe, tmp_path / "whole")
    compose(recipe, tmp_path / "parts", shard_bytes=30_000)
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 3
    for name in ("whole", "parts"):
        extract(tmp_path / name, "tools", tmp_path / f"{name} extract")
        add(tmp_path / name, expert_of(folders[3]), tmp_path / f"{name} add")
        export(tmp_path / name, tmp_path / f"{name} export", "lexicon")
    for what in ("extract", "add", "export"):
        assert contents(tmp_path / f"whole {what}") == contents(tmp_path / f"parts {what}")


# add and remove


@each_gate
@pytest.mark.parametrize("options", [{}, {"format": "lexicon"}, {**LINEARS, "routing_policy": "sequence_soft"}])
def test_add_then_remove_gives_the_same_folder_to_the_byte(experts, tmp_path, gate_mode, options):
    folders = experts(4, dtype="bfloat16")
    mixture(tmp_path / "three", folders[:3], gate_mode=gate_mode, **options)
    add(tmp_path / "three", expert_of(folders[3]), tmp_path / "four")
    remove(tmp_path / "four", "plants", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "three")
    remove(tmp_path / "four", "ships", tmp_path / "others")  # negative control
    assert contents(tmp_path / "others")["model.safetensors"] != contents(tmp_path / "three")["model.safetensors"]


@pytest.mark.parametrize("gate_mode", ["random", "zeros"])
@pytest.mark.parametrize("options", [{}, {"routing_policy": "domain"}, LINEARS])
def test_add_equals_a_new_compose_if_nothing_is_averaged(experts, tmp_path, gate_mode, options):
    folders = experts(4)
    options = {"gate_mode": gate_mode, **options}
    mixture(tmp_path / "three", folders[:3], **options)
    add(tmp_path / "three", expert_of(folders[3]), tmp_path / "four")
    mixture(tmp_path / "fresh", folders, **options)
    assert contents(tmp_path / "four") == contents(tmp_path / "fresh")


def test_add_computes_the_same_gate_row_as_compose(experts, tmp_path):
    folders = experts(4)
    mixture(tmp_path / "three", folders[:3], gate_mode="hidden")
    mixture(tmp_path / "fresh", folders, gate_mode="hidden")
    three, fresh = read_tensors(tmp_path / "three"), read_tensors(tmp_path / "fresh")
    add(tmp_path / "three", expert_of(folders[3]), tmp_path / "four")
    four = read_tensors(tmp_path / "four")
    for layer in range(2):
        gate = four[GATE.format(layer)]
        assert torch.equal(gate[:3], three[GATE.format(layer)])
        assert_close(gate[3], fresh[GATE.format(layer)][3], atol=1e-6, rtol=1e-5)
        # all prompts end with one token, whose embedding is the state in front of the first layer
        assert bool((gate[3] - gate[2]).abs().max() > 0.01) is (layer > 0)


def test_the_base_model_is_read_once_for_all_routers(experts, tmp_path, monkeypatch):
    folders, reads, honest = experts(3), [], DenseRun._weight
    mixture(tmp_path / "two", folders[:2], gate_mode="hidden")
    monkeypatch.setattr(DenseRun, "_weight", lambda self, name: (reads.append(name), honest(self, name))[1])
    add(tmp_path / "two", expert_of(folders[2]), tmp_path / "three")
    assert len(reads) == len(set(reads)) and "model.layers.0.mlp.up_proj.weight" in reads
    assert "model.layers.1.mlp.up_proj.weight" not in reads  # nothing after the last router's input


@each_gate
def test_with_recompose_add_and_remove_equal_a_new_compose(experts, tmp_path, gate_mode):
    folders, options = experts(4, dtype="bfloat16"), as_mean(gate_mode=gate_mode)
    mixture(tmp_path / "three", folders[:3], **options)
    mixture(tmp_path / "four", folders, **options)
    mixture(tmp_path / "last three", folders[1:], **options)
    add(tmp_path / "three", expert_of(folders[3]), tmp_path / "added", recompose=True)
    assert contents(tmp_path / "added") == contents(tmp_path / "four")
    remove(tmp_path / "four", "plants", tmp_path / "removed", recompose=True)
    assert contents(tmp_path / "removed") == contents(tmp_path / "three")
    remove(tmp_path / "four", "birds", tmp_path / "first", recompose=True)
    assert contents(tmp_path / "first") == contents(tmp_path / "last three")
    add(tmp_path / "three", expert_of(folders[3]), tmp_path / "as it was")  # negative control: without --recompose
    assert contents(tmp_path / "as it was")["model.safetensors"] != contents(tmp_path / "four")["model.safetensors"]


def test_without_recompose_shared_weights_do_not_change(experts, tmp_path):
    folders = experts(4)
    mixture(tmp_path / "three", folders[:3], **as_mean())
    add(tmp_path / "three", expert_of(folders[3]), tmp_path / "four")
    remove(tmp_path / "four", "birds", tmp_path / "others")
    three, four, others = (read_tensors(tmp_path / name) for name in ("three", "four", "others"))
    for name in three:
        if "block_sparse_moe" not in name:
            assert torch.equal(three[name], four[name]) and torch.equal(three[name], others[name])
    for layer in range(2):
        assert torch.equal(others[GATE.format(layer)], four[GATE.format(layer)][1:])
        for root in PLACES.values():
            for e in range(3):
                assert torch.equal(others[EXPERT.format(layer, e, root)], four[EXPERT.format(layer, e + 1, root)])
    assert inspect(tmp_path / "four")["shared"] == "mean of birds, ships, tools"
    for name, whose in (
        ("three", "birds, ships, tools"),
        ("four", "birds, ships, tools"),
        ("others", "birds (removed), "),
    ):
        assert f"not routed are the mean over {whose}" in (tmp_path / name / "README.md").read_text()
    assert AutoConfig.from_pretrained(tmp_path / "others").num_local_experts == 3


def test_random_gate_rows_are_not_reused_after_a_removal(experts, tmp_path):
    """Rows are seeded by the expert's index; the index of a removed expert must not be reused."""
    folders = experts(4)
    mixture(tmp_path / "three", folders[:3], gate_mode="random")
    remove(tmp_path / "three", "birds", tmp_path / "two")
    add(tmp_path / "two", expert_of(folders[3]), tmp_path / "out")
    for layer in range(2):
        gate = read_tensors(tmp_path / "out")[GATE.format(layer)]
        assert torch.equal(gate[:2], read_tensors(tmp_path / "three")[GATE.format(layer)][1:])
        assert not torch.equal(gate[2], gate[1]) and not torch.equal(gate[2], gate[0])
    for name in ("two", "out"):
        result = verify(tmp_path / name)
        assert result["ok"] and result["compared"]["gates"] == 2


def test_an_added_expert_of_another_dtype_is_converted(experts, tmp_path):
    folders = experts(2, dtype="bfloat16")
    new = experts(3)[2]
    mixture(tmp_path / "two", folders)
    add(tmp_path / "two", expert_of(new), tmp_path / "three")
    result = read_tensors(tmp_path / "three")[EXPERT.format(1, 2, "w2")]
    assert torch.equal(result, read_tensors(new)["model.layers.1.mlp.down_proj.weight"].bfloat16())


def test_an_incompatible_expert_is_not_added(experts, tmp_path):
    mixture(tmp_path / "two", experts(2), gate_mode="random")
    strange = save_expert(tmp_path / "strange", 9, intermediate_size=48)
    other_rope = save_expert(tmp_path / "other", 9, rope="linear")
    for specs, text in (
        (strange, "intermediate_size is 48"),
        (other_rope, "its RoPE settings differ"),
        (experts(1)[0], "has an expert 'birds' already"),
        (tmp_path / "nowhere", "nowhere' does not exist"),
    ):
        with pytest.raises(MergeError, match=text):
            add(tmp_path / "two", specs, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    assert add(tmp_path / "two", other_rope, tmp_path / "out", allow=["rope"])["warnings"]


def test_experts_that_cannot_be_removed(experts, tmp_path):
    folders = experts(3)
    mixture(tmp_path / "two", folders[:2])
    mixture(tmp_path / "three", folders, experts_per_token=3)
    with pytest.raises(MergeError, match="no expert 'horses'.* birds, ships, tools"):
        remove(tmp_path / "three", "horses", tmp_path / "out")
    with pytest.raises(MergeError, match="experts_per_token=3, but 2 experts"):
        remove(tmp_path / "three", "birds", tmp_path / "out")
    with pytest.raises(MergeError, match="'birds' would leave one expert. Use extract"):
        remove(tmp_path / "two", "birds", tmp_path / "out")
    with pytest.raises(MergeError, match="has no merge_record.json"):
        remove(folders[0], "birds", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("edit", [add, remove, extract, export])
def test_an_output_folder_that_is_not_free_is_not_changed(experts, tmp_path, edit):
    folders = experts(4)
    mixture(tmp_path / "three", folders[:3], gate_mode="random")
    before = contents(tmp_path / "three")
    argument = {add: folders[3], remove: "birds", extract: "birds"}
    for out, text in ((tmp_path / "three", "is the source"), (folders[0], "exists and is not empty")):
        with pytest.raises(MergeError, match=text):
            if edit is export:
                export(tmp_path / "three", out, "lexicon")
            else:
                edit(tmp_path / "three", argument[edit], out)
    assert contents(tmp_path / "three") == before


# export


@pytest.mark.parametrize("options", [{}, as_mean(gate_mode="hidden", experts_per_token=1)])
def test_a_mixture_exported_and_back_is_the_same(experts, tmp_path, options):
    mixture(tmp_path / "mixtral", experts(3), **options)
    export(tmp_path / "mixtral", tmp_path / "lexicon", "lexicon")
    export(tmp_path / "lexicon", tmp_path / "back", "mixtral")
    names = ("mixtral", "lexicon", "back")
    models = {name: open_model(tmp_path / name) for name in names}
    assert type(models["lexicon"]) is LexiconForCausalLM and type(models["back"]) is type(models["mixtral"])
    result = {name: logits_of(models[name], IDS) for name in names}
    assert torch.equal(result["mixtral"], result["back"])
    assert_close(result["lexicon"], result["mixtral"], atol=1e-5, rtol=1e-5)
    weights = {(tmp_path / name / "model.safetensors").read_bytes() for name in names}
    assert len(weights) == 1  # the layout on disk is one
    code = {"modeling_lexicon.py", "configuration_lexicon.py"}
    assert code <= contents(tmp_path / "lexicon").keys() and not code & contents(tmp_path / "back").keys()
    assert all(verify(tmp_path / name)["ok"] for name in names)


def test_a_stock_class_routes_by_token_without_the_centroids(experts, tmp_path):
    save_file({"centroids": torch.randn(3, 5)}, tmp_path / "centroids.safetensors")
    mixture(tmp_path / "plain", experts(3), format="lexicon")
    given = {"centroids": str(tmp_path / "centroids.safetensors"), "embedder": "minilm"}
    mixture(tmp_path / "lexicon", experts(3), format="lexicon", **given)
    result = export(tmp_path / "lexicon", tmp_path / "mixtral", "mixtral")
    assert result["notes"] == [
        "The centroids are left out: a mixtral has no assign_domains(). They do not route tokens."
    ]
    assert "notes" not in export(tmp_path / "plain", tmp_path / "other", "mixtral")
    assert contents(tmp_path / "mixtral") == contents(tmp_path / "other")
    model = open_model(tmp_path / "mixtral")
    assert_close(logits_of(open_model(tmp_path / "lexicon"), IDS), logits_of(model, IDS), atol=1e-5, rtol=1e-5)
    assert verify(tmp_path / "mixtral")["ok"]
    export(tmp_path / "lexicon", tmp_path / "kept", "lexicon")
    assert torch.equal(
        open_model(tmp_path / "kept").domain_centroids, open_model(tmp_path / "lexicon").domain_centroids
    )


def test_a_composed_lexicon_is_the_exported_one(experts, tmp_path):
    """Except for the recipe in the record."""
    mixture(tmp_path / "mixtral", experts(3))
    export(tmp_path / "mixtral", tmp_path / "exported", "lexicon")
    mixture(tmp_path / "composed", experts(3), format="lexicon")
    assert contents(tmp_path / "exported") == contents(tmp_path / "composed")


def test_export_rejects_what_a_mixtral_cannot_represent(experts, tmp_path):
    mixture(tmp_path / "soft", experts(2), routing_policy="sequence_soft")
    mixture(tmp_path / "biased", experts(2, attention_bias=True))
    assert json.loads((tmp_path / "biased" / "config.json").read_text())["model_type"] == "lexicon"
    for name, text in (("soft", "format: mixtral"), ("biased", "biased has attention biases")):
        with pytest.raises(MergeError, match=text):
            export(tmp_path / name, tmp_path / "out", "mixtral")
    with pytest.raises(MergeError, match="'onnx'. Use mixtral, lexicon or gguf"):
        export(tmp_path / "soft", tmp_path / "out", "onnx")
    assert not (tmp_path / "out").exists()
