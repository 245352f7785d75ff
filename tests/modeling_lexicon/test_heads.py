"""The classifier, what is trained, and the domains of texts by saved centroids."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForSequenceClassification

from modeling_lexicon import LexiconForCausalLM, LexiconForSequenceClassification
from tests.modeling_lexicon.conftest import SIZES, E, each_policy, put_experts, tiny_lexicon


@each_policy
@pytest.mark.parametrize("labels", [1, 3])
def test_a_text_is_scored_at_its_last_real_token(policy, labels, prompts):
    torch.manual_seed(0)
    dense = LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=labels)).eval()
    model = put_experts(tiny_lexicon(LexiconForSequenceClassification, policy=policy, num_labels=labels), [dense] * E)
    ids, mask = prompts["input_ids"], prompts["attention_mask"]
    with torch.no_grad():
        expected = dense(ids, attention_mask=mask).logits
        assert expected.shape == (3, labels)
        assert_close(model(ids, attention_mask=mask).logits, expected, rtol=0, atol=1e-5)
        order = mask.argsort(dim=1, stable=True)
        left = model(ids.gather(1, order), attention_mask=mask.gather(1, order)).logits
        assert_close(left, expected, rtol=0, atol=1e-5)
        by_embeds = model(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask).logits
        assert_close(by_embeds, expected, rtol=0, atol=1e-5)
        assert not torch.allclose(model(ids[:, :5]).logits, expected, atol=1e-2)  # negative control


def test_a_text_that_ends_in_the_padding_token_is_scored_there():
    """Many Llamas pad with their end-of-text token: with a mask, a real one counts."""
    model = tiny_lexicon(LexiconForSequenceClassification, pad_token_id=2)
    ids = torch.tensor([[5, 6, 7, 2]])
    with torch.no_grad():
        masked, unmasked = model(ids, attention_mask=torch.ones_like(ids)).logits, model(ids).logits
        assert_close(model(ids[:, :3]).logits, unmasked)
    assert not torch.allclose(masked, unmasked, atol=1e-3)
    model.config.pad_token_id = None
    with pytest.raises(ValueError, match="2 rows without attention_mask"):
        model(ids.repeat(2, 1))
    assert model(ids).logits.shape == (1, 2)


def test_the_classifiers_loss_has_the_router_loss_and_adds_up(prompts):
    for num_labels, labels in ((3, torch.tensor([2, 0, 1])), (1, torch.tensor([0.5, -1.0, 2.0]))):
        model = tiny_lexicon(LexiconForSequenceClassification, num_labels=num_labels)
        plain = model(**prompts, labels=labels, output_router_logits=True)
        expected = F.mse_loss(plain.logits[:, 0], labels) if num_labels == 1 else F.cross_entropy(plain.logits, labels)
        assert_close(plain.loss, expected)
        parts = [{name: value[i : i + 1] for name, value in prompts.items()} for i in range(3)]
        summed = sum(
            model(**part, labels=label[None], num_items_in_batch=3).loss
            for part, label in zip(parts, labels, strict=True)
        )
        assert_close(summed, plain.loss, rtol=1e-5, atol=1e-6)
        owing = tiny_lexicon(LexiconForSequenceClassification, num_labels=num_labels, router_aux_loss_coef=0.1)
        assert_close(owing(**prompts, labels=labels).loss, plain.loss + 0.1 * plain.aux_loss)


def test_rows_without_a_label_are_not_counted(prompts):
    model = tiny_lexicon(LexiconForSequenceClassification, num_labels=3)
    one = model(**prompts, labels=torch.tensor([-100, 1, -100]))
    assert_close(one.loss, F.cross_entropy(one.logits[1:2], torch.tensor([1])))
    assert model(**prompts, labels=torch.full((3,), -100), num_items_in_batch=4).loss == 0


def test_lora_config_targets_the_attention_and_saves_gates_and_heads():
    config = tiny_lexicon(LexiconForSequenceClassification, qk_norm=True).lora_config(r=2)
    assert (config.r, config.lora_alpha, {*config.modules_to_save}) == (2, 32, {"gate", "score"})
    assert config.target_modules == {"q_proj", "k_proj", "v_proj", "o_proj"}


def with_centroids(**options):
    model = tiny_lexicon(policy="domain", centroid_size=2, num_local_experts=3, domain_gate=False, **options)
    model.domain_centroids.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-0.6, -0.8]]))
    return model


VECTORS = {"law": [5.0, 0.1], "medicine": [0.0, 0.3], "sports": [-3.0, -4.0]}


def lookup(texts):
    return [VECTORS[text] for text in texts]


@pytest.mark.parametrize(
    "embedder", [lookup, SimpleNamespace(encode=lambda texts: torch.tensor(lookup(texts)).numpy())]
)
def test_texts_are_given_the_domain_of_the_nearest_centroid(embedder, prompts):
    model = with_centroids()
    ids, distances = model.assign_domains(["sports", "law", "medicine"], embedder, return_distances=True)
    assert ids.tolist() == [2, 0, 1] and distances.shape == (3, 3) and distances[0, 2] < 1e-6
    assert torch.equal(model.assign_domains(["law"], embedder), torch.tensor([0]))
    model(**prompts, domain_ids=ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_centroids_are_saved_exactly_in_any_precision(dtype, tmp_path):
    model = with_centroids().to(dtype)
    model.save_pretrained(tmp_path)
    again = LexiconForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert again.lm_head.weight.dtype == dtype and again.domain_centroids.dtype == torch.float32
    assert torch.equal(again.domain_centroids, with_centroids().domain_centroids)
    assert again.to(torch.float16).domain_centroids.dtype == torch.float32


@pytest.mark.parametrize(
    "model, texts, embedder, error, message",
    [
        (tiny_lexicon, ["law"], lookup, ValueError, "no centroids.*centroid_size"),
        (lambda: tiny_lexicon(centroid_size=2), ["law"], lookup, ValueError, "no centroids"),  # never filled
        (with_centroids, ["law"], lambda texts: [[1.0, 2.0, 3.0]], ValueError, r"shape \(1, 3\)"),
        (with_centroids, ["law", "x"], lambda texts: [[1.0, 2.0], [float("nan"), 1.0]], ValueError, "text 1 contains NaN"),
        (with_centroids, "law", lookup, ValueError, r"list of texts.*\[text\]"),
        (with_centroids, ["law"], None, ValueError, "has no embedder"),
        (lambda: with_centroids(embedder="no/such-embedder"), ["law"], None, ImportError, "sentence_transformers"),
    ],
)  # fmt: skip
def test_assign_domains_names_what_is_missing(model, texts, embedder, error, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(error, match=message):
        model().assign_domains(texts, embedder)
