"""On a CUDA device as on a CPU: losses, gradients, what is written. Run by `make cuda`."""

import pytest
import torch

from .conftest import each_policy, tiny_lexicon


@pytest.mark.parametrize("rank", [None, 8])
@each_policy
def test_losses_and_gradients_are_the_cpus(policy, rank, batch, same_on_cuda):
    same_on_cuda(tiny_lexicon(policy=policy, expert_rank=rank, router_aux_loss_coef=0.1), batch, torch.float32)


@each_policy
def test_the_same_text_is_written(policy, prompts, same_on_cuda):
    written = []
    for device in ("cpu", "cuda"):
        model, given = (
            tiny_lexicon(policy=policy).to(device),
            {name: x[:2, :4].to(device) for name, x in prompts.items()},
        )
        written.append(model.generate(**given, do_sample=False, max_new_tokens=6, min_new_tokens=6).cpu())
    assert torch.equal(*written)
