"""Generation: datasets reach every layer and step, and stay with their rows through beams and cache."""

import pytest
import torch
from torch.testing import assert_close
from transformers import ContinuousBatchingConfig, GenerationConfig

from .conftest import DECODERS, each_kind, for_backbone, one_of_each, tiny_backbone, tiny_moesumm, without

NEW = 5
WAYS = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 2.0},
    "sampling": {"do_sample": True, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1},
}
NAMES = ["news", "papers", None, "letters"]


def generate(model, texts, way="greedy", **options):
    torch.manual_seed(0)
    return model.generate(**texts, **{"max_new_tokens": NEW, "min_new_tokens": NEW, **WAYS[way], **options})


@each_kind
@pytest.mark.parametrize("way", WAYS)
def test_a_cache_names_and_a_mixed_batch_change_nothing_and_the_main_expert_is_the_backbone(backbone, way, texts):
    model, stock, texts = tiny_moesumm(backbone), tiny_backbone(backbone), for_backbone(texts, backbone, "left")
    cached, plain = generate(model, texts, way), without(texts, "dataset_ids")
    assert torch.equal(cached, generate(model, texts, way, use_cache=False))
    assert torch.equal(cached, generate(model, plain, way, dataset=NAMES))
    other = {**texts, "dataset_ids": (texts["dataset_ids"] + 1) % 3}
    assert not torch.equal(cached, generate(model, other, way))  # negative control
    expected = generate(stock, plain, way)
    for given in ({}, {"main_expert_only": True}, {"dataset_ids": torch.full((4,), -1)}):
        assert torch.equal(generate(model, plain, way, **given), expected)
    if way == "sampling":
        return
    each, length = WAYS[way].get("num_return_sequences", 1), texts["input_ids"].shape[1] * (backbone in DECODERS)
    for row, mask in enumerate(texts["attention_mask"].bool()):
        alone = {"input_ids": texts["input_ids"][[row]][:, mask], "dataset_ids": texts["dataset_ids"][[row]]}
        written = generate(model, alone, way)[:, mask.sum() if length else 0 :]
        assert torch.equal(cached[each * row : each * (row + 1), length:], written)


def test_the_encoder_is_called_with_datasets(texts):
    model, plain = tiny_moesumm(), without(texts, "dataset_ids")
    encoder = model.get_encoder()
    with torch.no_grad():
        states = encoder(**texts)
        assert_close(states.last_hidden_state, model(**texts).encoder_last_hidden_state)
        assert torch.equal(encoder(**plain, dataset=NAMES).last_hidden_state, states.last_hidden_state)
        alone = encoder(**texts, main_expert_only=True).last_hidden_state
        assert not torch.allclose(alone, states.last_hidden_state)
    assert not any(name.startswith("encoder") for name in model.state_dict())  # it is not a part of the model
    given = {name: texts[name] for name in ("attention_mask", "dataset_ids")}
    assert torch.equal(generate(model, given, encoder_outputs=states), generate(model, texts))
    assert model.generate(**texts, max_length=40, min_length=40).shape == (4, 40)  # all positions


@one_of_each
def test_a_static_cache_embeddings_and_flat_moe_write_the_same(backbone, texts):
    model, texts = tiny_moesumm(backbone), for_backbone(texts, backbone, "left")
    expected = generate(model, texts)
    static = generate(model, texts, cache_implementation="static", disable_compile=True)
    assert torch.equal(static, expected)
    embedded = without(texts, "input_ids") | {"inputs_embeds": model.get_input_embeddings()(texts["input_ids"])}
    assert torch.equal(generate(model, embedded)[:, -NEW:], expected[:, -NEW:])
    flat = tiny_moesumm(backbone, main_expert=False)
    assert torch.equal(generate(flat, texts), generate(flat, without(texts, "dataset_ids"), use_cache=False))


@one_of_each
def test_a_stock_assistant_changes_nothing(backbone, texts):
    model, texts = tiny_moesumm(backbone), {"input_ids": texts["input_ids"][:1], "dataset": "news"}
    for options in ({"assistant_model": tiny_backbone(backbone)}, {"assistant_model": tiny_moesumm(backbone)}):
        assert torch.equal(generate(model, texts, **options), generate(model, texts))


def test_continuous_batching_writes_what_the_main_expert_writes(texts):
    model, texts = tiny_moesumm("llama"), for_backbone(texts, "llama", "left")
    prompts = [ids[mask].tolist() for ids, mask in zip(texts["input_ids"], texts["attention_mask"].bool(), strict=True)]
    options = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 1, "use_cuda_graph": False}
    config = GenerationConfig(max_new_tokens=NEW, **options)
    sizes = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    found = [output.generated_tokens for output in model.generate_batch(prompts, config, sizes).values()]
    expected = generate(model, texts, main_expert_only=True, eos_token_id=None)[:, -NEW:].tolist()
    assert sorted(found) == sorted(expected)
