"""`experts_implementation` of a whole model, with transformers' names and methods."""

import pytest
import torch
import transformers
from packaging.version import Version
from torch.testing import assert_close

from modeling_seke import layers_seke

NAMES = ("eager", "batched_mm", "grouped_mm")


@pytest.fixture(scope="module")
def batch(tiny_tokenizer):
    texts = ["graph cuts in the network", "learning", "the problem of learning graph networks is the cut of a network"]
    batch = tiny_tokenizer(texts, padding=True, return_tensors="pt")
    return {**batch, "labels": torch.where(batch["attention_mask"] == 1, batch["input_ids"] % 3, -100)}


@pytest.fixture
def ran(monkeypatch):
    """The names of the implementations that ran."""
    ran = []
    for name, run in layers_seke.EXPERTS_IMPLEMENTATIONS.items():
        monkeypatch.setitem(
            layers_seke.EXPERTS_IMPLEMENTATIONS, name, lambda *args, name=name, run=run: ran.append(name) or run(*args)
        )
    return ran


def values_and_gradients(model, batch):
    model.zero_grad()
    outputs = model(**batch)
    outputs.loss.backward()
    return outputs.logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_every_implementation_gives_the_same_logits_and_gradients(tiny_seke, batch, ran):
    model = tiny_seke()
    assert model.get_experts_implementation()[""] == "eager"
    logits, gradients = values_and_gradients(model, batch)
    for name in NAMES:
        model.set_experts_implementation(name)
        assert model.config._experts_implementation == name
        other_logits, other_gradients = values_and_gradients(model, batch)
        assert_close(other_logits, logits, rtol=0, atol=1e-5)
        assert_close(other_gradients, gradients, rtol=1e-3, atol=1e-5)
    assert ran == ["eager", *NAMES]
    model.moe.experts.up_proj.data[1] *= 1.5  # negative control
    assert not torch.allclose(model(**batch).logits, logits, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "batched_mm",
        pytest.param(
            "grouped_mm",
            marks=pytest.mark.xfail(
                Version(transformers.__version__) < Version("5.23"),
                reason="before transformers 5.23 the backward pass of its grouped product depends on the data",
                strict=True,
            ),
        ),
    ],
)
def test_without_synchronisation_the_experts_compile_into_one_graph(name, tiny_seke):
    moe, x = tiny_seke().moe, torch.randn(40, 32)
    torch._dynamo.reset()
    compiled = torch.compile(moe, backend="aot_eager", fullgraph=True)
    assert_close(compiled(x, name)[0], moe(x)[0], rtol=0, atol=1e-5)


def test_without_experts_the_implementation_has_no_effect(tiny_seke, batch, ran):
    model = tiny_seke(use_moe=False)
    before = model(**batch).logits
    model.set_experts_implementation("grouped_mm")
    assert torch.equal(model(**batch).logits, before) and ran == []
