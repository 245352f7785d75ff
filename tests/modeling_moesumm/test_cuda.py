"""On a CUDA device as on a CPU: losses, gradients, summaries. Run by `make cuda`."""

import pytest
import torch
from transformers import pipeline

from .conftest import tiny_moesumm
from .summaries import small_tokenizer, story, writing_moesumm


@pytest.mark.parametrize("backbone", ["bart", "pegasus"])
@pytest.mark.parametrize("implementation", ["auto", "batched_mm", "grouped_mm", "eager"])
def test_losses_and_gradients_are_the_cpus(backbone, implementation, batch, same_on_cuda):
    model = tiny_moesumm(backbone)
    model.set_experts_implementation(implementation)
    same_on_cuda(model, batch)


def test_in_bfloat16_grouped_products_are_eager(batch, same_on_cuda):
    model, found = tiny_moesumm(deputy_intermediate_size=24).to("cuda", torch.bfloat16), []
    for name in ("grouped_mm", "eager"):
        model.set_experts_implementation(name)
        with torch.no_grad():
            found.append(model(**{k: x.cuda() for k, x in batch.items()}).logits.float())
    torch.testing.assert_close(*found, rtol=0.1, atol=0.2)


def test_summaries_are_the_cpus(same_on_cuda):
    tokenizer, texts, found = small_tokenizer(), [story(12), story(25, 1), story(70, 2)], []
    for device in ("cpu", "cuda"):
        model = writing_moesumm(tokenizer).to(device)
        run = pipeline("moe-summarization", model=model, tokenizer=tokenizer, device=device, max_length=12)
        found.append(run(texts))
    assert found[0] == found[1]
