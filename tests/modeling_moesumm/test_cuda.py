"""On a CUDA device as on a CPU: losses, gradients, summaries. Run by `make cuda`."""

import pytest
import torch
from transformers import pipeline

from .conftest import each_backbone, tiny_moesumm
from .summaries import small_tokenizer, story, writing_moesumm


@each_backbone
def test_losses_and_gradients_are_the_cpus(backbone, batch, same_on_cuda):
    same_on_cuda(tiny_moesumm(backbone), batch)


@pytest.mark.parametrize("implementation", ["auto", "batched_mm", "grouped_mm", "eager"])
def test_every_implementation_is_the_cpus(implementation, batch, same_on_cuda):
    model = tiny_moesumm()
    model.set_experts_implementation(implementation)
    same_on_cuda(model, batch)


def test_in_bfloat16_grouped_products_are_eager(batch, same_on_cuda):
    model = tiny_moesumm(deputy_intermediate_size=24).to("cuda", torch.bfloat16)
    found = {}
    for name in ("grouped_mm", "eager"):
        model.set_experts_implementation(name)
        with torch.no_grad():
            found[name] = model(**{k: x.cuda() for k, x in batch.items()}).logits.float()
    torch.testing.assert_close(found["grouped_mm"], found["eager"], rtol=0.1, atol=0.2)


def test_summaries_are_the_cpus(same_on_cuda):
    tokenizer = small_tokenizer()
    model, texts = writing_moesumm(tokenizer), [story(12), story(25, 1), story(70, 2)]
    found = [
        pipeline("moe-summarization", model=model.to(device), tokenizer=tokenizer, device=device, max_length=12)(texts)
        for device in ("cpu", "cuda")
    ]
    assert found[0] == found[1]
