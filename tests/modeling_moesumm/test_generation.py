"""Generation: datasets reach the encoder and every step, and stay with their rows through beams and cache."""

import pytest
import torch
from torch.testing import assert_close

from tests.modeling_moesumm.conftest import each_backbone, tiny_backbone, tiny_moesumm, without

NEW = 7
WAYS = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 4},
    "beams returned": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 2.0},
    "sampling": {"do_sample": True, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1},
    "constrained": {"do_sample": False, "num_beams": 2, "no_repeat_ngram_size": 2, "min_length": 5},
}
each_way = pytest.mark.parametrize("way", WAYS)


def generate(model, texts, way="greedy", **options):
    torch.manual_seed(0)
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, **WAYS[way], **options}
    options |= {"max_new_tokens": NEW} if "min_length" in options else {}
    return model.generate(**texts, **options)


@each_backbone
@each_way
def test_the_summary_is_the_same_with_and_without_a_cache(backbone, way, texts):
    model = tiny_moesumm(backbone)
    cached = generate(model, texts, way)
    assert torch.equal(cached, generate(model, texts, way, use_cache=False))
    if way == "greedy":  # what the forward pass of training finds most likely; no end before the last place
        logits = model(**texts, decoder_input_ids=cached[:, :-1]).logits.index_fill(2, torch.tensor([2]), -torch.inf)
        assert torch.equal(logits.argmax(-1)[:, :-1], cached[:, 1:-1])
    # negative control: other datasets, other summaries
    other = {**texts, "dataset_ids": (texts["dataset_ids"] + 1) % 3}
    assert not torch.equal(cached, generate(model, other, way))


@each_backbone
@each_way
def test_main_expert_only_writes_what_the_backbone_writes(backbone, way, texts):
    stock, model = tiny_backbone(backbone), tiny_moesumm(backbone)
    plain = without(texts, "dataset_ids")
    expected = generate(stock, plain, way)
    for given in ({}, {"dataset": None}, {"main_expert_only": True}, {"dataset_ids": torch.full((4,), -1)}):
        assert torch.equal(generate(model, plain, way, **given), expected)
    assert torch.equal(generate(model, texts, way, main_expert_only=True), expected)
    assert not torch.equal(generate(model, texts, way), expected)


@each_backbone
@pytest.mark.parametrize("way", ["greedy", "beams", "beams returned"])
def test_a_row_of_a_mixed_batch_is_written_as_alone(backbone, way, texts):
    model, each = tiny_moesumm(backbone), WAYS[way].get("num_return_sequences", 1)
    together = generate(model, texts, way)
    for row, length in enumerate(texts["attention_mask"].sum(1).tolist()):
        alone = {name: value[row : row + 1] for name, value in texts.items()}
        alone |= {name: alone[name][:, :length] for name in ("input_ids", "attention_mask")}
        assert torch.equal(together[each * row : each * (row + 1)], generate(model, alone, way))


@each_way
def test_names_write_what_ids_write(way, texts):
    model, plain = tiny_moesumm(), without(texts, "dataset_ids")
    by_ids = generate(model, texts, way)
    assert torch.equal(generate(model, plain, way, dataset=["news", "papers", None, "letters"]), by_ids)
    one = generate(model, plain, way, dataset="papers")
    assert torch.equal(one, generate(model, plain, way, dataset_ids=[2, 2, 2, 2]))
    assert not torch.equal(one, by_ids)


@each_way
def test_a_forced_deputy_speaks_in_encoder_and_decoder(way, texts):
    model = tiny_moesumm()
    written = [generate(model, texts, way, deputy_id=i) for i in range(3)]
    assert torch.equal(written[0], generate(model, without(texts, "dataset_ids"), way, deputy_id=0))
    assert torch.equal(written[0], generate(model, texts, way, deputy_id=0, use_cache=False))
    assert not torch.equal(written[0], written[1]) and not torch.equal(written[1], written[2])


def test_the_encoder_is_called_with_datasets(texts):
    model = tiny_moesumm()
    encoder = model.get_encoder()
    with torch.no_grad():
        states = encoder(**texts)
        assert_close(states.last_hidden_state, model(**texts).encoder_last_hidden_state)
        by_name = encoder(
            **without(texts, "dataset_ids"), dataset=["news", "papers", None, "letters"]
        ).last_hidden_state
        assert torch.equal(by_name, states.last_hidden_state)
        by_name_too = model(**without(texts, "dataset_ids"), dataset=["news", "papers", None, "letters"])
        assert torch.equal(by_name_too.logits, model(**texts).logits)
        assert not torch.allclose(encoder(**texts, main_expert_only=True).last_hidden_state, by_name)
    assert {id(p) for p in encoder.parameters()} < {id(p) for p in model.parameters()}
    assert not any(name.startswith("encoder") for name in model.state_dict())  # it is not a part of the model
    given = {name: texts[name] for name in ("attention_mask", "dataset_ids")}
    assert torch.equal(
        model.generate(encoder_outputs=states, **given, max_new_tokens=NEW), generate(model, texts, min_new_tokens=None)
    )


def test_flat_moe_writes(texts):
    model = tiny_moesumm(main_expert=False)
    assert torch.equal(
        generate(model, texts, "beams"), generate(model, without(texts, "dataset_ids"), "beams", use_cache=False)
    )


def test_a_static_cache_writes_the_same(texts):
    model = tiny_moesumm()
    assert torch.equal(
        generate(model, texts, cache_implementation="static", disable_compile=True), generate(model, texts)
    )


def test_scores_come_with_their_rows(texts):
    model = tiny_moesumm()
    output = generate(model, texts, return_dict_in_generate=True, output_scores=True, min_new_tokens=None)
    with torch.no_grad():
        again = model(**texts, decoder_input_ids=output.sequences[:, :-1]).logits
    assert_close(torch.stack(output.scores, 1)[:, :-1], again[:, :-1], rtol=1e-4, atol=1e-4)


def test_a_misspelt_argument_is_refused(texts):
    with pytest.raises(ValueError, match="dataset_id'"):
        tiny_moesumm().generate(**without(texts, "dataset_ids"), dataset_id=texts["dataset_ids"])


def test_a_summary_longer_than_the_decoder_is_refused_before_it_is_begun(texts):
    with pytest.raises(ValueError, match=r"max_length=42.*max_length=40"):
        tiny_moesumm().generate(**texts, max_length=42)
    assert tiny_moesumm().generate(**texts, max_length=40, min_length=40).shape == (4, 40)
