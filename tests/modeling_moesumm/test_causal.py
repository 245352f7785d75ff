"""MoeSumm over decoders: padding, scored positions, saving beside a backbone's file, generation; what is refused."""

import json
import shutil

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, BertConfig, DynamicCache, Gemma2Config

from modeling_moesumm import (
    MoeSummCausalLMOutput,
    MoeSummConfig,
    MoeSummForCausalLM,
    MoeSummForConditionalGeneration,
    MoeSummModel,
    MoeSummModelOutput,
)
from modeling_moesumm.routing_moesumm import RoutingContext
from tests.modeling_moesumm.conftest import (
    DATASETS,
    V,
    backbone_config,
    each_decoder,
    for_backbone,
    gradients,
    surer,
    tiny_backbone,
    tiny_moesumm,
    without,
)
from tests.modeling_moesumm.test_generation import NEW, WAYS, generate

KEY_MAPPING = {r"^(?=model\.|lm_head\.)": "backbone."}


@pytest.fixture
def prompts(texts):
    """The texts, padded on the left."""
    return for_backbone(texts, "llama", "left")


@pytest.fixture
def rows(batch):
    """The texts with their summaries, padded on the right."""
    return for_backbone(batch, "llama")


# --- the layer ------------------------------------------------------------------------------------------------------


@each_decoder
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_without_deputies_is_transformers_layer_bit_for_bit(backbone, dtype):
    stock = tiny_backbone(backbone).train().to(dtype).model
    ours = tiny_moesumm(backbone).train().to(dtype).backbone.model
    x = torch.randn(3, 5, 32, dtype=dtype)
    places = stock.rotary_emb(x, torch.arange(5)[None])
    found = []
    for layer, routing in ((stock.layers[1], {}), (ours.layers[1], {"routing": RoutingContext(False)})):
        y = layer(x, attention_mask=None, position_embeddings=places, **routing)
        (y.float() * torch.arange(y.numel()).view_as(y).sin()).sum().backward()
        found.append((y, gradients(layer)))
    (expected, wanted), (y, ours_gradients) = found
    assert torch.equal(y, expected) and set(wanted) == set(ours_gradients)
    assert all(torch.equal(ours_gradients[name], gradient) for name, gradient in wanted.items())


@pytest.mark.parametrize("mlp_bias", [False, True])
def test_a_layer_is_equations_4_to_7_for_swiglu(mlp_bias):
    layer = tiny_moesumm("llama", changes={"mlp_bias": mlp_bias}).backbone.model.layers[0].double()
    A, ids = torch.randn(2, 5, 32, dtype=torch.float64), torch.tensor([2, 0])
    experts, mlp = layer.deputies.experts, layer.mlp
    assert (experts.up_bias is not None) == mlp_bias
    expected = mlp(A)
    for row, e in enumerate(ids):
        G = (A[row] @ layer.deputies.selectors.weight[e].T).softmax(-1)
        for t, (g, p) in enumerate(zip(*G.max(-1), strict=True)):
            pre = A[row, t] @ experts.up_proj[p].T + (experts.up_bias[p] if mlp_bias else 0)
            H = torch.nn.functional.silu(g * pre[:20]) * pre[20:]
            expected[row, t] += H @ experts.down_proj[p]
    found, _ = layer.feed_forward(A, RoutingContext(True, ids))
    assert_close(found, expected)
    assert not torch.allclose(found, mlp(A), atol=1e-2)


# --- batches --------------------------------------------------------------------------------------------------------


@each_decoder
def test_padding_on_either_side_and_other_rows_change_nothing(backbone, batch):
    model = tiny_moesumm(backbone)
    right, left = (for_backbone(batch, backbone, side) for side in ("right", "left"))
    with torch.no_grad():
        one, other = model(**right), model(**left)
        assert_close(one.loss, other.loss)
        assert_close(one.margin_loss, other.margin_loss)
        masks = right["attention_mask"].bool(), left["attention_mask"].bool()
        assert_close(one.logits[masks[0]], other.logits[masks[1]], rtol=0, atol=1e-5)
        for row, mask in enumerate(masks[0]):
            alone = model(right["input_ids"][row : row + 1, mask], dataset_ids=right["dataset_ids"][row : row + 1])
            assert_close(alone.logits[0], one.logits[row, mask], rtol=0, atol=1e-5)
        changed = model(**{**right, "dataset_ids": right["dataset_ids"].flip(0)})
        assert not torch.allclose(changed.logits, one.logits, atol=1e-2)  # negative control


def test_a_later_token_changes_no_earlier_logits(rows):
    model, given = tiny_moesumm("llama"), without(rows, "labels")
    changed = {**given, "input_ids": torch.cat([given["input_ids"][:, :-1], torch.full((4, 1), 9)], 1)}
    with torch.no_grad():
        first, second = model(**given).logits, model(**changed).logits
    assert_close(first[:, :-1], second[:, :-1], rtol=0, atol=1e-5)
    assert not torch.allclose(first[0, -1], second[0, -1], atol=1e-2)


@pytest.mark.parametrize("margin_main", ["model", "last_layer"])
def test_the_last_positions_alone_give_the_same_losses_and_gradients(margin_main, batch):
    rows, K, found = for_backbone(batch, "llama", "left"), 6, []  # the longest summary
    for kept in ({}, {"labels": rows["labels"][:, -K - 1 :], "logits_to_keep": K + 1}):
        model = tiny_moesumm("llama", margin_main=margin_main).train()
        output = model(**{**rows, **kept})
        output.loss.backward()
        found.append((output.generation_loss, output.margin_loss, gradients(model)))
    assert output.logits.shape == (4, K + 1, V)
    assert_close(found[0], found[1])
    with pytest.raises(ValueError, match=r"labels has 15 positions, and 3 are scored"):
        model(**rows, logits_to_keep=3)


def test_the_margin_compares_with_the_model_or_its_last_layer(rows):
    losses = {}
    for kind in ("model", "last_layer"):
        model = surer(tiny_moesumm("llama", margin_main=kind))
        predicted = model(**without(rows, "labels")).logits.argmax(-1).roll(1, 1)  # so that margins are large
        rows = rows | {"labels": torch.where(rows["labels"] == -100, -100, predicted)}
        full = model(**rows)
        if kind == "last_layer":  # by hand: the last layer's deputies contribute nothing
            with torch.no_grad():
                model.backbone.model.layers[1].deputies.experts.down_proj.zero_()
        given = without(rows, "labels") if kind == "last_layer" else without(rows, "labels", "dataset_ids")
        main, labels = model(**given).logits[:, :-1], rows["labels"][:, 1:]
        real = labels != -100
        gold = labels[real][:, None]
        p, q = (logits.softmax(-1)[real].gather(1, gold) for logits in (full.logits[:, :-1], main))
        assert_close(full.margin_loss, ((1 - p) * (1 - (p - q) ** 5) / 2).mean())
        losses[kind] = full.margin_loss
    assert losses["model"] != losses["last_layer"]


def test_deputies_of_every_token_and_states_come_out(rows):
    model, stock = tiny_moesumm("llama"), tiny_backbone("llama")
    plain = model(**rows)
    assert isinstance(plain, MoeSummCausalLMOutput) and plain.expert_indices is plain.hidden_states is None
    output = model(**rows, output_router_indices=True, output_hidden_states=True)
    assert torch.equal(output.logits, plain.logits) and len(output.hidden_states) == 3
    for index, weight in zip(output.expert_indices, output.expert_weights, strict=True):
        assert index.shape == weight.shape == (4, 15)
        assert (index[2] == -1).all() and (weight[2] == 0).all() and (weight[[0, 1, 3]] >= 1 / 3).all()
    forced = model(**rows, deputy_id=1, output_router_indices=True)
    assert all((index == 1).all() for index in forced.expert_indices)
    given = {"output_hidden_states": True, **without(rows, "dataset_ids")}
    for expected, found in zip(stock(**given).hidden_states, model(**given).hidden_states, strict=True):
        assert torch.equal(expected, found)
    with torch.no_grad():
        doubled = model(**rows, output_hidden_states=True)
    assert all(len(states) == 4 for states in doubled.hidden_states)
    assert torch.equal(model(**rows, return_dict=False)[1], plain.logits)


# --- saving ---------------------------------------------------------------------------------------------------------


def test_a_checkpoint_shares_its_backbones_file(rows, tmp_path):
    """A folder of the backbone's own file and one of deputies, joined by an index and a `key_mapping`."""
    model = tiny_moesumm("llama")
    model.save_pretrained(tmp_path / "whole")
    names = set(model.state_dict())
    stock = tiny_backbone("llama")
    assert {f"backbone.{name}" for name in stock.state_dict()} == {name for name in names if "deputies" not in name}
    stock.save_pretrained(tmp_path / "stock")

    from safetensors.torch import load_file, save_file

    shared = tmp_path / "shared"
    shared.mkdir()
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    new = {name: tensor for name, tensor in whole.items() if ".deputies." in name}
    save_file(new, shared / "deputies.safetensors", metadata={"format": "pt"})
    shutil.copy(tmp_path / "stock" / "model.safetensors", shared / "backbone.safetensors")
    shutil.copy(tmp_path / "whole" / "config.json", shared)
    places = dict.fromkeys(load_file(shared / "backbone.safetensors"), "backbone.safetensors")
    places |= dict.fromkeys(new, "deputies.safetensors")
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (shared / "model.safetensors.index.json").write_text(json.dumps(index))

    again, info = MoeSummForCausalLM.from_pretrained(shared, key_mapping=KEY_MAPPING, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        assert torch.equal(again(**rows).logits, model(**rows).logits)
        # it is saved with its own names
        again.save_pretrained(tmp_path / "again")
        assert set(load_file(tmp_path / "again" / "model.safetensors")) == set(whole)
        assert torch.equal(
            AutoModelForCausalLM.from_pretrained(tmp_path / "again")(**rows).logits, again(**rows).logits
        )


def test_each_backbone_has_its_class(tmp_path):
    tiny_backbone("llama").save_pretrained(tmp_path / "llama")
    tiny_backbone("bart").save_pretrained(tmp_path / "bart")
    with pytest.raises(OSError, match=r"model_type='llama'.*MoeSummForCausalLM"):
        MoeSummForConditionalGeneration.from_backbone(tmp_path / "llama", DATASETS)
    with pytest.raises(OSError, match=r"model_type='bart'.*MoeSummForConditionalGeneration"):
        MoeSummForCausalLM.from_backbone(tmp_path / "bart", DATASETS)
    model = tiny_moesumm("llama")
    assert model.config.is_encoder_decoder is False and model.config.hidden_size == model.config.d_model == 32
    model.save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"'llama'.*MoeSummForCausalLM"):
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved")
    for config in (BertConfig(), Gemma2Config()):
        with pytest.raises(ValueError, match=rf"{config.model_type}.*Llama, Mistral, Qwen2, Qwen3"):
            MoeSummConfig(text_config=config)
    with pytest.raises(ValueError, match="summary_prompt=' '"):
        MoeSummConfig(text_config=backbone_config("llama"), summary_prompt=" ")


def test_the_model_without_a_head_opens_the_same_checkpoints(rows, tmp_path):
    model, given = tiny_moesumm("llama"), without(rows, "labels")
    model.save_pretrained(tmp_path / "lm")
    bare = AutoModel.from_pretrained(tmp_path / "lm")
    assert type(bare) is MoeSummModel and set(bare.state_dict()) == set(model.state_dict())
    wanted = {"output_router_indices": True, "output_hidden_states": True}
    with torch.no_grad():
        expected, found = model(**given, **wanted), bare(**given, **wanted)
        assert isinstance(found, MoeSummModelOutput)
        assert torch.equal(model._lm_logits(found.last_hidden_state), expected.logits)
        assert all(map(torch.equal, found.expert_indices, expected.expert_indices))
        assert all(map(torch.equal, found.hidden_states, expected.hidden_states))
        bare.save_pretrained(tmp_path / "bare")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "bare")
        assert torch.equal(again(**given).logits, expected.logits)
    with pytest.raises(ValueError, match="decoder_input_ids was given, but a 'llama' has no encoder"):
        bare(**given, decoder_input_ids=given["input_ids"])
    tiny_backbone("llama").save_pretrained(tmp_path / "stock")
    new = MoeSummModel.from_backbone(tmp_path / "stock", DATASETS, deputy_intermediate_size=8)
    assert_close(
        new(**given).last_hidden_state, tiny_backbone("llama").model(**without(given, "dataset_ids")).last_hidden_state
    )


# --- generation -----------------------------------------------------------------------------------------------------


@each_decoder
@pytest.mark.parametrize("way", WAYS)
def test_generation_with_a_cache_in_mixed_batches_and_by_the_main_expert(backbone, way, texts, prompts):
    model, stock, length = tiny_moesumm(backbone), tiny_backbone(backbone), prompts["input_ids"].shape[1]
    options = {"min_length": length + 5} if way == "constrained" else {}
    cached = generate(model, prompts, way, **options)
    assert torch.equal(cached, generate(model, prompts, way, **options, use_cache=False))
    other = {**prompts, "dataset_ids": (prompts["dataset_ids"] + 1) % 3}
    assert not torch.equal(cached, generate(model, other, way, **options))
    plain = without(prompts, "dataset_ids")
    expected = generate(stock, plain, way, **options)
    assert torch.equal(generate(model, plain, way, **options), expected)
    assert torch.equal(generate(model, prompts, way, **options, main_expert_only=True), expected)
    names = generate(model, plain, way, **options, dataset=["news", "papers", None, "letters"])
    assert torch.equal(names, cached)
    if way in ("greedy", "beams"):
        for row, mask in enumerate(prompts["attention_mask"].bool()):
            alone = {
                "input_ids": prompts["input_ids"][row : row + 1, mask],
                "dataset_ids": prompts["dataset_ids"][[row]],
            }
            assert torch.equal(cached[row, length:], generate(model, alone, way)[0, mask.sum() :])


def test_generation_refuses_what_it_cannot_use(prompts):
    model = tiny_moesumm("llama")
    with pytest.raises(ValueError, match="dataset_id'"):
        model.generate(**without(prompts, "dataset_ids"), dataset_id=prompts["dataset_ids"])
    with pytest.raises(ValueError, match="dataset='newz'"):
        model.generate(**without(prompts, "dataset_ids"), dataset="newz", max_new_tokens=NEW)
    with pytest.raises(ValueError, match="no tokens"):
        model(torch.empty(2, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="Neither input_ids nor inputs_embeds"):
        model(dataset="news")
    with pytest.raises(ValueError, match="labels with cache"):
        model(prompts["input_ids"], labels=prompts["input_ids"], dataset="news", cache=DynamicCache())


def test_a_static_cache_writes_the_same(prompts):
    model = tiny_moesumm("llama")
    static = generate(model, prompts, cache_implementation="static", disable_compile=True)
    assert torch.equal(static, generate(model, prompts))
