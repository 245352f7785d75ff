"""Every family: its mixture opens in stock transformers, and identical experts equal the dense model."""

import json
import re

import pytest
import torch
from tokenizers import Tokenizer
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from merge_tools import MergeError, add, check, compose, export, extract, inspect, remove, verify
from merge_tools.checkpoints import open_source
from merge_tools.dense_run import DenseRun
from merge_tools.families import FAMILIES, MIXTURES

from .conftest import (
    SIZES,
    edit_json,
    logits_of,
    open_model,
    randomize,
    read_tensors,
    recipe_of,
    save_expert,
    tiny_tokenizer,
)
from .corruptions import refused

IDS = torch.arange(3, 43).reshape(2, 20)
# name -> (model_type, fields of its configuration)
MODELS = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral with a window": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3 with biases": ("qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    "olmo2": ("olmo2", {}),
}


def save(folder, name, seed, dtype=torch.float32, tokenizer=None, **changes):
    """Saves a tiny model of the family, with norms and biases drawn too, and its tokenizer."""
    model_type, options = MODELS[name]
    tokenizer = tokenizer or tiny_tokenizer()
    config = CONFIG_MAPPING[model_type](**{**SIZES, "vocab_size": len(tokenizer), **options, **changes})
    model = randomize(AutoModelForCausalLM.from_config(config), seed)
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def opened(folder, **options):
    """The model, opened by stock transformers without a missing or unexpected tensor."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


@pytest.mark.parametrize("gate_mode", ["random", "hidden"])
def test_identical_experts_equal_the_dense_model(name, gate_mode, tmp_path):
    folders = [save(tmp_path / expert, name, 3) for expert in ("birds", "ships", "tools")]
    prompts = [
        {"source_model": str(f), "positive_prompts": [t]} for f, t in zip(folders, ("a", "the", "of"), strict=True)
    ]
    compose(recipe_of(prompts, gate_mode=gate_mode), tmp_path / "out")
    family = FAMILIES[MODELS[name][0]]
    mixture, dense = opened(tmp_path / "out"), open_model(folders[0])
    assert type(mixture).__name__ == MIXTURES[family.mixture].architecture
    assert type(mixture).__module__.startswith("transformers.")
    assert_close(logits_of(mixture, IDS), logits_of(dense, IDS), atol=2e-4, rtol=1e-4)
    generate = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0}
    assert torch.equal(mixture.generate(IDS, **generate), dense.generate(IDS, **generate))


def test_other_experts_differ_and_are_copied_and_verified(name, tmp_path):
    """The control: with other experts the logits differ. Every tensor is that of an expert, a mean or a gate."""
    folders = [save(tmp_path / expert, name, seed, torch.bfloat16) for seed, expert in enumerate(("birds", "ships"))]
    compose(recipe_of(folders), tmp_path / "out")
    assert verify(tmp_path / "out")["ok"]
    assert inspect(tmp_path / "out")["format"] == FAMILIES[MODELS[name][0]].mixture
    mixture, dense = opened(tmp_path / "out", dtype=torch.float32), open_model(folders[0], dtype=torch.float32)
    assert (logits_of(mixture, IDS) - logits_of(dense, IDS)).abs().max() > 0.05
    state, one, two = (read_tensors(folder) for folder in (tmp_path / "out", *folders))
    for shared in set(one) & set(state):
        assert torch.equal(state[shared], ((one[shared].double() + two[shared].double()) / 2).to(torch.bfloat16)), (
            shared
        )


def test_an_extracted_expert_is_a_dense_model(name, tmp_path):
    """With the base's shared weights, which are the expert's too, an extracted expert equals its source."""
    folders = [save(tmp_path / expert, name, 5) for expert in ("birds", "ships")]
    randomize_mlps(folders[1])
    compose(recipe_of(folders), tmp_path / "out")
    extract(tmp_path / "out", "ships", tmp_path / "dense")
    dense, source = opened(tmp_path / "dense"), open_model(folders[1])
    assert type(dense) is type(source)
    assert torch.equal(logits_of(dense, IDS), logits_of(source, IDS))


def randomize_mlps(folder):
    model = randomize(AutoModelForCausalLM.from_pretrained(folder), 77, ("gate_proj", "up_proj", "down_proj"))
    model.save_pretrained(folder)


def test_adding_and_removing_an_expert(name, tmp_path):
    folders = [save(tmp_path / expert, name, seed) for seed, expert in enumerate(("birds", "ships", "tools"))]
    compose(recipe_of(folders), tmp_path / "three")
    compose(recipe_of(folders[:2]), tmp_path / "two")
    add(tmp_path / "two", folders[2], tmp_path / "added", recompose=True)
    assert read_tensors(tmp_path / "added").keys() == read_tensors(tmp_path / "three").keys()
    for key, tensor in read_tensors(tmp_path / "added").items():
        assert torch.equal(tensor, read_tensors(tmp_path / "three")[key])
    add(tmp_path / "two", folders[2], tmp_path / "grown")
    remove(tmp_path / "grown", "tools", tmp_path / "shrunk")
    assert read_tensors(tmp_path / "shrunk").keys() == read_tensors(tmp_path / "two").keys()
    opened(tmp_path / "grown")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_inputs_of_all_modules_are_those_of_transformers(name, dtype, tmp_path):
    """Texts longer than the window, and of several lengths, run together. The control: other texts before them."""
    folder = save(tmp_path / "birds", name, 3, dtype)
    model, found = open_model(folder, dtype=dtype), {}
    for module_name, module in model.model.layers.named_modules():
        if re.fullmatch(r"\d+(\.mlp|\..*_proj)?", module_name):
            module.register_forward_pre_hook(
                lambda _, args, kwargs, key=module_name: found.setdefault(key, []).append(
                    (args[0] if args else kwargs["hidden_states"])[0]
                ),
                with_kwargs=True,
            )
    texts = [list(range(3, 43)), [7], [9, 3, 11, 4]]
    with torch.no_grad():
        for ids in texts:
            model.model(input_ids=torch.tensor([ids]))
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 0.05, "rtol": 0.05}
    seen = 0
    for layer, module, x in DenseRun(open_source("birds", str(folder))).module_inputs(texts):
        expected = torch.cat(found[f"{layer}.{module}".rstrip(".")])
        assert_close(x.cpu(), expected, **tolerance)
        seen += 1
        if layer and module == "mlp":
            assert (x[-1] - x[-2]).abs().max() > 0.1
    assert seen == len(found) == 2 * 9


@pytest.mark.parametrize(
    "option",
    [
        {"format": "lexicon"},
        {"routing_policy": "domain"},
        {"routing_policy": "sequence_soft"},
        {"routing_policy": "sequence_hard", "router_layers": ["v_proj", "down_proj"], "router_layers_index": [1]},
        {"router_layers": ["q_proj", "k_proj", "o_proj", "mlp"]},
    ],
)
def test_lexicon_takes_the_families_that_it_can_represent(name, option, tmp_path):
    folders = [save(tmp_path / expert, name, 3) for expert in ("birds", "ships")]
    recipe = recipe_of(folders, **option)
    if FAMILIES[MODELS[name][0]].lexicon is not None and "window" not in name:
        compose(recipe, tmp_path / "out")
        ids = {"domain_ids": torch.tensor([1, 1])} if option.get("routing_policy") == "domain" else {}
        mixture = open_model(tmp_path / "out")
        assert type(mixture).__name__ == "LexiconForCausalLM"
        assert_close(logits_of(mixture, IDS, **ids), logits_of(open_model(folders[0]), IDS), atol=2e-4, rtol=1e-4)
    else:
        able = "of these types can be routed like this: " + ", ".join(
            n for n, f in FAMILIES.items() if f.lexicon is not None
        )
        reason = "sliding_window is 8" if "window" in name else able
        refused(tmp_path, recipe, reason)


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3 with biases"])
def test_a_stock_mixture_is_exported_to_lexicon_and_back(kind, tmp_path):
    folders = [save(tmp_path / expert, kind, seed) for seed, expert in enumerate(("birds", "ships", "tools"))]
    compose(recipe_of(folders), tmp_path / "out")
    export(tmp_path / "out", tmp_path / "lexicon", "lexicon")
    mixture, stock = opened(tmp_path / "lexicon"), open_model(tmp_path / "out")
    assert type(mixture).__name__ == "LexiconForCausalLM"
    assert_close(logits_of(mixture, IDS), logits_of(stock, IDS), atol=2e-4, rtol=1e-4)
    assert verify(tmp_path / "lexicon")["ok"]
    export(tmp_path / "lexicon", tmp_path / "back", FAMILIES[MODELS[kind][0]].mixture)
    before, after = read_tensors(tmp_path / "out"), read_tensors(tmp_path / "back")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    add(tmp_path / "lexicon", {"source_model": str(folders[0]), "name": "again"}, tmp_path / "four")
    extract(tmp_path / "four", "again", tmp_path / "dense")
    assert type(opened(tmp_path / "dense")) is type(open_model(folders[0]))


@pytest.mark.parametrize("family", [family for family, about in FAMILIES.items() if about.lexicon is None])
def test_formats_that_cannot_hold_a_mixture_are_refused(family, tmp_path):
    folders = [save(tmp_path / expert, family, seed) for seed, expert in enumerate(("birds", "ships"))]
    compose(recipe_of(folders), tmp_path / "out")
    with pytest.raises(MergeError, match=f"lexicon: it cannot represent the layers of {family}"):
        export(tmp_path / "out", tmp_path / "other", "lexicon")
    own = FAMILIES[family].mixture
    with pytest.raises(MergeError, match=f"Use {own}, lexicon or gguf"):
        export(tmp_path / "out", tmp_path / "other", next(name for name in MIXTURES if name != own))


def test_a_window_is_carried_and_two_that_differ_are_warned_about(tmp_path):
    folders = [save(tmp_path / expert, "mistral with a window", 3) for expert in ("birds", "ships")]
    edit_json(folders[1] / "config.json", sliding_window=16)
    assert any("sliding_window is 16 (8 in birds)" in f.message for f in check(recipe_of(folders)).warnings)
    compose(recipe_of(folders), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["sliding_window"] == 8
    extract(tmp_path / "out", "ships", tmp_path / "dense")
    assert AutoConfig.from_pretrained(tmp_path / "dense").sliding_window == 8


def window_of(folder):
    return AutoConfig.from_pretrained(folder).sliding_window


def test_edits_keep_a_window(tmp_path):
    folders = [save(tmp_path / expert, "mistral with a window", seed) for seed, expert in enumerate(("a", "b", "c"))]
    compose(recipe_of(folders), tmp_path / "three")
    remove(tmp_path / "three", "c", tmp_path / "removed")
    add(tmp_path / "removed", folders[2], tmp_path / "added")
    export(tmp_path / "three", tmp_path / "exported", "mixtral")
    for edited in ("removed", "added", "exported"):
        assert window_of(tmp_path / edited) == 8 and verify(tmp_path / edited)["ok"]
    extract(tmp_path / "added", "c", tmp_path / "dense")
    assert window_of(tmp_path / "dense") == 8


@pytest.mark.parametrize("format", ["mixtral", "lexicon"])
def test_edits_add_no_window(format, tmp_path):
    """Mistral's configuration has one by default."""
    folders = [save(tmp_path / expert, "mistral", seed) for seed, expert in enumerate(("a", "b", "c"))]
    compose(recipe_of(folders, format=format), tmp_path / "three")
    remove(tmp_path / "three", "c", tmp_path / "removed")
    assert verify(tmp_path / "removed")["ok"]
    edit_json(tmp_path / "removed" / "config.json", sliding_window=None)  # the key is left out
    export(tmp_path / "removed", tmp_path / "exported", "mixtral")
    for mixture in ("three", "removed", "exported"):
        extract(tmp_path / mixture, "a", tmp_path / f"{mixture} dense")
        assert window_of(tmp_path / f"{mixture} dense") is None


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_windows_of_some_layers_are_refused(kind, tmp_path):
    folders = [save(tmp_path / expert, kind, 3) for expert in ("birds", "ships")]
    for folder in folders:
        edit_json(folder / "config.json", use_sliding_window=True, max_window_layers=1)
    refused(tmp_path, recipe_of(folders), "use_sliding_window=True is not supported")
    for folder in folders:
        layers = ["full_attention", "sliding_attention"]
        edit_json(folder / "config.json", use_sliding_window=False, layer_types=layers)
    refused(tmp_path, recipe_of(folders), "layer_types=.*is not supported")


@pytest.mark.parametrize("other", [kind for kind in FAMILIES if kind != "llama"])
def test_families_are_not_mixed(other, tmp_path):
    folders = [save_expert(tmp_path / "birds", 3), save(tmp_path / "ships", other, 3)]
    refused(tmp_path, recipe_of(folders), "ships: .*only models of one family can be merged|ships: .*is not a tensor")


def test_the_tokenizer_travels_with_a_class_of_transformers_4_and_5(name, tmp_path):
    folders = [save(tmp_path / expert, name, 3) for expert in ("birds", "ships")]
    compose(recipe_of(folders), tmp_path / "out")
    ours, theirs = (json.loads((f / "tokenizer_config.json").read_text()) for f in (tmp_path / "out", folders[0]))
    assert theirs["tokenizer_class"] == "TokenizersBackend"  # which transformers 4 does not know
    assert ours == {**theirs, "tokenizer_class": "PreTrainedTokenizerFast"}
    expected = Tokenizer.from_file(str(folders[0] / "tokenizer.json")).encode("the owl").ids
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("the owl")["input_ids"] == expected
