"""`compose`: every tensor of a mixture is that of a plain reference, and stock transformers opens it."""

import json
import os
import signal

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import save_file
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

from merge_tools import compose, verify, writer
from merge_tools.families import FAMILIES, FORMATS
from run_tools.errors import UserError
from tests.tools import run_in_child

from .conftest import (
    MODELS,
    NAMES,
    contents,
    edit_json,
    logits_of,
    open_model,
    read_tensors,
    recipe_of,
    save_expert,
    tiny_tokenizer,
)

IDS = torch.arange(3, 43).reshape(2, 20)
STOCK = [name for name in MODELS if name != "llama with biases"]


def opened(folder, **options):
    """The model, opened by transformers without a missing or unexpected tensor."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def expected_tensors(folders, kind, average, seed=42, gated=range(2)):
    """All tensors of a mixture with random gates by plain loops: names of experts, means in float64, rows from a seeded generator."""
    experts = [read_tensors(folder) for folder in folders]
    found = {}
    for name, own in experts[0].items():
        parts = name.split(".")
        if "mlp" not in parts:
            mean = torch.stack([expert[name].double() for expert in experts]).mean(0).to(own.dtype)
            found[name] = own if average == "base" else mean
            continue
        prefix = f"model.layers.{parts[2]}.{kind.block}"
        for i, expert in enumerate(experts):
            found[f"{prefix}.experts.{i}.{kind.names[parts[4]]}.weight"] = expert[name]
        if int(parts[2]) in gated:
            seeds = ([seed, int(parts[2]), *b"mlp", e] for e in range(len(folders)))
            rows = [np.random.default_rng(own).standard_normal(32) * 0.02 for own in seeds]
            found[f"{prefix}.gate.weight"] = torch.tensor(np.stack(rows)).float().to(own.dtype)
    return found


def check_equal(folder, expected):
    """All tensors of a folder are the expected ones, but for those of a shared expert, which are zero."""
    found = read_tensors(folder)
    extra = {name: found.pop(name) for name in list(found) if "shared_expert" in name}
    assert found.keys() == expected.keys() and not any(tensor.any() for tensor in extra.values())
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("average", ["base", "mean"])
@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_is_that_of_a_plain_reference(name, average, experts, tmp_path):
    dtype = torch.float32 if average == "mean" or "tied" in name else torch.bfloat16
    folders, model_type = experts(3, name, dtype), MODELS[name][0]
    made = compose(recipe_of(folders, base_model=folders[0], average=average, gate_mode="random"), tmp_path / "out")
    kind = FORMATS[made["format"]]
    assert kind is (FAMILIES[model_type].mixture if name in STOCK else FORMATS["lexicon"])
    check_equal(tmp_path / "out", expected_tensors(folders, kind, average))
    assert verify(tmp_path / "out")["ok"]


@pytest.mark.parametrize("policy", ["token", "sequence_soft", "sequence_hard", "domain"])
@pytest.mark.parametrize("name", ["llama with biases", "qwen3"])
def test_every_policy_of_a_lexicon_mixture(name, policy, experts, tmp_path):
    folders, gated = experts(3, name), 1 if policy == "domain" else 2
    options = {"routing_policy": policy, "format": "lexicon", "gate_mode": "random"}
    made = compose(recipe_of(folders, **options), tmp_path / "out")
    check_equal(tmp_path / "out", expected_tensors(folders, FORMATS["lexicon"], "mean", gated=range(gated)))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["routing_policy"], config["domain_gate"]) == (policy, policy == "domain")
    model, chosen = opened(tmp_path / "out"), {"token": 2, "sequence_soft": 3}.get(policy, 1)
    routed = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert type(model).__name__ == "LexiconForCausalLM"
    assert made["parameters"] - made["active_parameters"] == routed * (3 - chosen) // 3


@pytest.mark.parametrize("format", ["auto", "lexicon"])
@pytest.mark.parametrize("name", STOCK)
def test_identical_experts_equal_the_dense_model_and_others_do_not(name, format, experts, tmp_path):
    folders, window = experts(3, name), "window" in name
    if format == "lexicon" and (FAMILIES[MODELS[name][0]].lexicon is None or window):
        with pytest.raises(UserError, match="sliding_window is 8" if window else "olmo2"):
            compose(recipe_of(folders, format=format), tmp_path / "out")
        return
    compose(recipe_of(folders[:1] * 3, format=format), tmp_path / "same")
    compose(recipe_of(folders, format=format), tmp_path / "other")
    dense = open_model(folders[0])
    same = opened(tmp_path / "same")
    assert_close(logits_of(same, IDS), logits_of(dense, IDS), atol=2e-4, rtol=1e-4)
    windows = [getattr(model.config, "sliding_window", None) or None for model in (same, dense)]
    assert windows[0] == windows[1]  # the class of a mistral has one of 4096 by default
    assert (logits_of(opened(tmp_path / "other"), IDS) - logits_of(dense, IDS)).abs().max() > 0.05


def test_a_recipe_of_mergekit_means_the_same(experts, tmp_path):
    """Gates from prompts, and the shared weights of the base; keys of mergekit without an effect are accepted."""
    base, one, two = experts(3)
    (tmp_path / "recipe.yml").write_text(
        f"base_model: {base}\ndtype: float32\nexperts_per_token: 1\nshared_experts: []\narchitecture: mixtral\nexperts:\n"
        f"  - source_model: {one}\n    noise_scale: 0.0\n    positive_prompts:\n      - the birds\n      - a bird is\n"
        f'    negative_prompts: ["ships"]\n  - source_model: {two}\n    residual_scale: 1.0\n    positive_prompts: [the ships]\n'
    )
    compose(tmp_path / "recipe.yml", tmp_path / "out")
    record = json.loads((tmp_path / "out" / "merge_record.json").read_text())
    assert (record["recipe"]["gate_mode"], record["recipe"]["average"]) == ("hidden", "base")
    found, ours = read_tensors(tmp_path / "out"), read_tensors(base)
    assert all(torch.equal(found[name], ours[name]) for name in ours if ".mlp." not in name)


def test_shards_and_weights_and_dtypes(experts, tmp_path):
    """Sources of several files, an output of several files, unequal weights of the mean, and another dtype."""
    folders = experts(3)
    for folder in folders:
        open_model(folder).save_pretrained(tmp_path / folder.name, max_shard_size="30KB")
        (tmp_path / folder.name / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    assert len(list((tmp_path / "birds").glob("*.safetensors"))) > 2
    names = zip(NAMES, (1, 2, 0), strict=False)
    experts = [{"source_model": tmp_path / name, "weight": weight} for name, weight in names]
    compose(recipe_of(experts, dtype="bfloat16"), tmp_path / "out", shard_bytes=30_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 2 and index.keys() == read_tensors(tmp_path / "out").keys()
    one, two = (read_tensors(folder)["model.norm.weight"].double() for folder in folders[:2])
    model = opened(tmp_path / "out", dtype="auto")
    assert torch.equal(model.model.norm.weight.double(), ((one + 2 * two) / 3).bfloat16().double())
    assert verify(tmp_path / "out")["ok"]


def test_experts_of_low_rank_keep_what_that_rank_can(experts, tmp_path):
    """At full rank they are the experts; at a lower one W + B A is the best approximation, by the singular values of the difference."""
    folders = experts(3)
    for rank in (32, 3):
        compose(recipe_of(folders, base_model=folders[0], average="base", rank=rank), tmp_path / str(rank))
        found, base, own = (read_tensors(f) for f in (tmp_path / str(rank), folders[0], folders[1]))
        name, stored = "model.layers.1.mlp.down_proj.weight", "model.layers.1.block_sparse_moe.{}w2{}.weight"
        assert torch.equal(found[stored.format("base.", "")], base[name])
        a, b = (found[stored.format("experts.1.", f".{half}")] for half in "AB")
        error = torch.linalg.matrix_norm(base[name] + b @ a - own[name])
        best = torch.linalg.svdvals(own[name] - base[name])[rank:].norm()
        assert a.shape == (rank, 64) and abs(float(error - best)) < 1e-4
        record = json.loads((tmp_path / str(rank) / "merge_record.json").read_text())
        assert record["energies"]["birds"] == 1 and (record["energies"]["ships"] == 1) == (rank == 32)
        assert verify(tmp_path / str(rank))["ok"]
        opened(tmp_path / str(rank))


def test_rope_settings_are_written_in_both_spellings(tmp_path):
    """Transformers 4 would silently take its default for a theta that it does not find."""
    rope = {"rope_type": "linear", "rope_theta": 500000.0, "factor": 4.0}
    folders = [save_expert(tmp_path / name, seed, rope_parameters=rope) for seed, name in enumerate(NAMES[:3])]
    compose(recipe_of(folders), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["rope_theta"], config["rope_scaling"]) == (500000.0, {"rope_type": "linear", "factor": 4.0})
    assert config["rope_parameters"] == rope == AutoConfig.from_pretrained(tmp_path / "out").rope_parameters
    assert config["torch_dtype"] == config["dtype"] == "float32"


def test_the_base_provides_the_tokenizer_and_centroids_are_stored(experts, tmp_path):
    folders = experts(3)
    save_file({"centroids": torch.eye(3, 5)}, tmp_path / "centroids.safetensors")
    options = {"routing_policy": "domain", "centroids": tmp_path / "centroids.safetensors", "embedder": "minilm"}
    compose(recipe_of(folders, **options), tmp_path / "out")
    assert torch.equal(read_tensors(tmp_path / "out")["domain_centroids"], torch.eye(3, 5))
    assert opened(tmp_path / "out").config.embedder == "minilm"
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folders[0] / name).read_bytes()
    assert verify(tmp_path / "out")["ok"]


def test_an_expert_with_another_vocabulary_is_accepted_with_the_base_s(experts, tmp_path):
    folders, tokenizer = [experts(3)[0], experts(3, "llama", torch.bfloat16)[1]], tiny_tokenizer(["<extra>"])
    model = open_model(folders[1])
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path / "longer")
    tokenizer.save_pretrained(tmp_path / "longer")
    recipe = recipe_of([folders[0], tmp_path / "longer"], average="mean")
    with pytest.raises(UserError, match="longer: its vocabulary has 46 rows.*tokenizer: base"):
        compose(recipe, tmp_path / "out")
    compose({**recipe, "tokenizer": "base"}, tmp_path / "out")
    found, base, other = (read_tensors(folder) for folder in (tmp_path / "out", folders[0], folders[1]))
    assert torch.equal(found["model.embed_tokens.weight"], base["model.embed_tokens.weight"])
    mean = (base["model.norm.weight"].double() + other["model.norm.weight"].double()) / 2
    assert torch.equal(found["model.norm.weight"], mean.float())


def test_with_the_base_s_tokenizer_embeddings_are_in_no_mean(experts, tmp_path):
    """Vocabularies of one size may have other tokens."""
    folders, name = experts(3), "model.embed_tokens.weight"
    compose(recipe_of(folders[:2], average="mean", tokenizer="base"), tmp_path / "out")
    assert torch.equal(read_tensors(tmp_path / "out")[name], read_tensors(folders[0])[name])


def test_what_a_user_should_know_is_a_warning(experts, tmp_path):
    folders = [tmp_path / name for name in NAMES[:2]]
    for folder, source in zip(folders, experts(3), strict=False):
        save_expert(folder, 1 + (source.name == "ships"))
    edit_json(folders[1] / "config.json", max_position_embeddings=64)
    (folders[1] / "chat_template.jinja").write_text("{{ messages }}")
    warnings = compose(recipe_of(folders), tmp_path / "out")["warnings"]
    assert len(warnings) == 2 and "chat template" in warnings[1]
    assert "max_position_embeddings is 64, but 128 in birds" in warnings[0]
    (folders[0] / "tokenizer.json").unlink()
    assert "birds has no tokenizer" in compose(recipe_of(folders), tmp_path / "without")["warnings"][0]


@pytest.mark.parametrize(("other", "common"), [("mit", "mit"), ("apache-2.0", None), ("[a", None)])
def test_the_card_names_the_licences_of_the_sources(other, common, tmp_path):
    folders = [tmp_path / name for name in NAMES[:2]]
    for folder, license in zip(folders, ("mit", other), strict=True):
        save_expert(folder, len(license))
        (folder / "README.md").write_text(f"---\nlicense: {license}\n---\n")
    compose(recipe_of(folders), tmp_path / "out")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.license == common and "mit" in card.text
    assert ("not stated" if other == "[a" else other) in card.text


def test_a_dry_run_writes_nothing_and_the_same_recipe_gives_the_same_bytes(experts, tmp_path):
    recipe = recipe_of(experts(3))
    planned = compose(recipe, tmp_path / "out", dry_run=True)
    assert not list(tmp_path.iterdir())
    made = compose(recipe, tmp_path / "out")
    assert made == planned | {"out": str(tmp_path / "out")}
    compose(recipe, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "out")


@pytest.mark.parametrize("fault", [OSError(28, "No space left"), KeyboardInterrupt()], ids=["fsync", "interrupted"])
def test_a_run_that_fails_leaves_nothing(fault, experts, tmp_path, monkeypatch):
    def fail(*_):
        raise fault

    monkeypatch.setattr(writer.os, "fsync", fail)
    with pytest.raises(type(fault)):
        compose(recipe_of(experts(3)), tmp_path / "out")
    assert not list(tmp_path.iterdir())
    assert isinstance(fault, KeyboardInterrupt) or fault.filename.endswith("model.safetensors")


def test_a_killed_run_leaves_no_folder_that_looks_finished(experts, tmp_path, monkeypatch):
    """The folder of the run that was killed is not touched: the next one names it."""
    recipe = recipe_of(experts(3))

    def run():
        torch.set_num_threads(1)  # more would wait for those of this process
        compose(recipe, tmp_path / "out")

    with monkeypatch.context() as patch:
        patch.setattr(writer.os, "fsync", lambda _: os.kill(os.getpid(), signal.SIGKILL))
        run_in_child(run)
    (left,) = tmp_path.iterdir()
    assert left.name == "out.partial" and not (left / "config.json").exists()
    with pytest.raises(UserError, match=r"out\.partial"):
        compose(recipe, tmp_path / "out")
