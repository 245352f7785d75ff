"""Greedy decoding in a batch that shrinks gives what `generate` gives."""

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)

from modeling_lexicon import LexiconConfig, LexiconForCausalLM
from modeling_lexicon.cache_lexicon import CACHE
from modeling_lexicon.greedy_lexicon import can_shrink, decode_greedily

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 12}
ENDS, PAD = [1, 2], 0


def tiny(kind: str):
    torch.manual_seed(3)
    options = {**SIZES, "initializer_range": 0.6, "pad_token_id": PAD, "bos_token_id": None, "eos_token_id": ENDS}
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**options)).eval()
    return LexiconForCausalLM(LexiconConfig(**options, num_local_experts=3)).eval()


def prompts(rows: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 12, (rows, 7), generator=generator)
    mask = (torch.arange(7) >= torch.randint(0, 5, (rows, 1), generator=generator)).long()
    return ids * mask, mask


@pytest.mark.parametrize("kind", ["llama", "lexicon"])
@pytest.mark.parametrize("rows, length", [(24, 15), (1, 15), (24, 1)])
def test_tokens_and_their_probabilities_are_those_of_generate(kind, rows, length):
    model, (ids, mask) = tiny(kind), prompts(rows)
    sizes = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    with torch.no_grad():
        tokens, log_p = decode_greedily(model, ids, mask, DynamicCache(config=model.config), length, ENDS, PAD)
    hook.remove()
    expected = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=length,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    assert torch.equal(tokens, expected.sequences[:, 7:])
    own = torch.stack([step.log_softmax(-1) for step in expected.logits], 1).gather(2, tokens[..., None])[..., 0]
    written = tokens != PAD
    torch.testing.assert_close(log_p[written], own[written], rtol=1e-5, atol=1e-5)
    if (rows, length) == (24, 15):
        assert sizes[0] == 24 and sizes[-1] < 12 and len(set(written.sum(1).tolist())) > 3


def test_other_loops_are_left_to_generate():
    model, usual = tiny("llama"), StoppingCriteriaList([MaxLengthCriteria(9), EosTokenCriteria(ENDS)])
    greedy = GenerationConfig(do_sample=False)
    inputs = {"attention_mask": None, CACHE: DynamicCache(), "use_cache": True}
    assert can_shrink(model, [], usual, greedy, inputs)
    assert not can_shrink(model, [], usual, GenerationConfig(do_sample=True), inputs)
    assert not can_shrink(model, [], usual, GenerationConfig(num_beams=2), inputs)
    assert not can_shrink(model, [print], usual, greedy, inputs)
    assert not can_shrink(model, [], [*usual, MaxTimeCriteria(1.0)], greedy, inputs)
    assert not can_shrink(model, [], usual, greedy, inputs | {CACHE: None})
    assert not can_shrink(model, [], usual, greedy, inputs | {"domain_ids": torch.zeros(1)})
    model.config.routing_policy = "sequence_hard"
    assert not can_shrink(model, [], usual, greedy, inputs)
