"""Generation: a decision is taken once, on the prompt, and kept with the cache, beams, padding and rows that move."""

import copy

import pytest
import torch
from torch.testing import assert_close
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig

from modeling_lexicon.cache_lexicon import CACHE
from modeling_lexicon.routing_lexicon import CACHE_ATTR

from .conftest import dense_domains, each_policy, each_row_policy, put_experts, tiny_dense, tiny_lexicon

NEW = 5
WAYS = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "temperature": 0.6, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.05},
}
each_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture(scope="module")
def texts():
    torch.manual_seed(3)
    return [torch.randint(3, 48, (1, n)) for n in (7, 3, 5)]


def left_padded(texts):
    T = max(text.shape[1] for text in texts)
    pad = [torch.zeros(1, T - text.shape[1], dtype=torch.long) for text in texts]
    ids = torch.cat([torch.cat([p, text], dim=1) for p, text in zip(pad, texts, strict=True)])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def generate(model, inputs, way="greedy", **options):
    torch.manual_seed(0)
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, **WAYS[way], **options}
    return model.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :]


@each_policy
@each_way
def test_the_text_is_the_same_with_and_without_a_cache_and_alone(policy, way, texts):
    model, inputs = tiny_lexicon(policy=policy), left_padded(texts)
    cached = generate(model, inputs, way)
    assert torch.equal(cached, generate(model, inputs, way, use_cache=False))
    assert cached.shape[1] == NEW
    if way == "greedy":  # what the forward pass of training finds most likely, routed by the prompt
        mask, ids = inputs["attention_mask"], torch.cat([inputs["input_ids"], cached], 1)
        whole = torch.cat([mask, torch.ones_like(cached)], 1)
        given = {} if policy == "token" else {"prompt_mask": torch.cat([mask, torch.zeros_like(cached)], 1)}
        with torch.no_grad():
            logits = model(ids, attention_mask=whole, position_ids=(whole.cumsum(1) - 1).clamp(min=0), **given).logits
        likely = logits.index_fill(2, torch.tensor([2]), -torch.inf).argmax(-1)  # min_new_tokens: no end
        assert torch.equal(likely[:, -NEW - 1 : -1], cached)
    for row, text in enumerate(texts) if way != "sampling" else ():  # and alone, without padding
        n = len(cached) // 3
        assert torch.equal(cached[row * n : row * n + n], generate(model, {"input_ids": text}, way))
    other = tiny_lexicon(seed=1, policy=policy)  # negative control
    assert not torch.equal(cached, generate(other, inputs, way))


@each_way
def test_given_domains_are_their_dense_models_texts(way, texts):
    denses = dense_domains()
    model = put_experts(tiny_lexicon(policy="domain", domain_gate=False), denses)
    inputs, ids = left_padded(texts), torch.tensor([3, 0, 3])
    together = generate(model, inputs, way, domain_ids=ids)
    assert torch.equal(together, generate(model, inputs, way, domain_ids=ids, use_cache=False))
    for domain in (0, 3):  # all rows by one dense model: its own rows are the same
        n = len(together) // 3
        rows = (ids == domain).repeat_interleave(n)
        # sampling draws row by row from one stream: equal logits, equal draws
        assert torch.equal(together[rows], generate(denses[domain], inputs, way)[rows])
    assert not torch.equal(together, generate(model, inputs, way, domain_ids=torch.tensor([1, 1, 1])))


@each_row_policy
def test_a_prompt_mask_holds_through_generation(policy, texts):
    """Only what the mask names decides: the end of the prompt may be anything the routes do not see."""
    model, mask = tiny_lexicon(policy=policy), torch.tensor([[1, 1, 0, 0, 0, 0, 0]])
    written = [generate(model, {"input_ids": texts[0]}, prompt_mask=mask, use_cache=use) for use in (True, False)]
    assert torch.equal(*written)
    with torch.no_grad():
        routes = model(texts[0][:, :2], output_router_logits=True).expert_index
        masked = model(texts[0], prompt_mask=mask, output_router_logits=True).expert_index
    assert torch.equal(routes[0], masked[0])


@each_row_policy
def test_a_static_cache_and_a_reused_one_decide_anew_for_each_text(policy, texts):
    model = tiny_lexicon(policy=policy)
    for text in texts:
        static = generate(model, {"input_ids": text}, cache_implementation="static", disable_compile=True)
        assert torch.equal(static, generate(model, {"input_ids": text}))


@each_row_policy
def test_a_prompt_in_pieces_is_refused(policy, texts):
    model = tiny_lexicon(policy=policy)
    with pytest.raises(ValueError, match="prefill_chunk_size=None"):
        generate(model, {"input_ids": texts[0]}, prefill_chunk_size=2)
    if policy == "domain":  # nothing is read from the prompt when the ids are given
        ids = torch.tensor([1])
        chunked = generate(model, {"input_ids": texts[0]}, prefill_chunk_size=2, domain_ids=ids)
        assert torch.equal(chunked, generate(model, {"input_ids": texts[0]}, domain_ids=ids))


@each_row_policy
def test_rows_that_are_repeated_chosen_or_reordered_take_their_decisions_along(policy, texts):
    model, inputs = tiny_lexicon(policy=policy), left_padded(texts)
    token = torch.randint(3, 48, (3, 1))
    with torch.no_grad():

        def step(move, rows):
            cache = model(**inputs)[CACHE]
            move(cache)
            mask = torch.cat([inputs["attention_mask"], torch.ones_like(token)], dim=1)[rows]
            position = inputs["attention_mask"].sum(1, keepdim=True)[rows]
            return model(token[rows], attention_mask=mask, position_ids=position, cache=cache).logits

        expected = step(lambda cache: None, torch.arange(3))
        for rows, move in (
            ([2, 0, 1], lambda cache: cache.reorder_cache(torch.tensor([2, 0, 1]))),
            ([2, 0], lambda cache: cache.batch_select_indices(torch.tensor([2, 0]))),
            ([0, 0, 1, 1, 2, 2], lambda cache: cache.batch_repeat_interleave(2)),
        ):
            assert_close(step(move, rows), expected[rows], rtol=0, atol=1e-5)
        with pytest.raises(ValueError, match="3.*2.*batch_select_indices"):
            cache = model(**inputs)[CACHE]
            model(token[:2], cache=cache)


@each_row_policy
def test_a_copied_prompt_cache_serves_several_continuations(policy, texts):
    model, prompt = tiny_lexicon(policy=policy), texts[0]
    with torch.no_grad():
        cache = model(prompt, cache=DynamicCache(config=model.config))[CACHE]
        for end in (texts[1], texts[2]):
            found = model(end, cache=copy.deepcopy(cache)).logits
            mask = torch.cat([torch.ones_like(prompt), torch.zeros_like(end)], dim=1)
            expected = model(torch.cat([prompt, end], dim=1), prompt_mask=mask).logits[:, prompt.shape[1] :]
            assert_close(found, expected, rtol=0, atol=1e-5)
        assert cache.get_seq_length() == prompt.shape[1]  # the original was not touched


@each_row_policy
def test_a_cache_with_tokens_and_without_decisions_is_refused(policy, texts):
    filled = tiny_lexicon(policy="token")(texts[0])[CACHE]
    assert not hasattr(filled, CACHE_ATTR)
    with pytest.raises(ValueError, match="no routing decisions"):
        tiny_lexicon(policy=policy)(texts[1], cache=filled)
    if policy == "domain":
        tiny_lexicon(policy=policy)(texts[1], cache=filled, domain_ids=torch.tensor([0]))
    else:  # a cache of another model's decisions
        other = tiny_lexicon(policy=policy, num_hidden_layers=1)(texts[0])[CACHE]
        with pytest.raises(ValueError, match="no routing decisions"):
            tiny_lexicon(policy=policy)(texts[1], cache=other)


@each_policy
def test_any_assistant_and_looked_up_candidates_change_nothing(policy, texts):
    """They are no part of the prompt. A stock Llama drafts, which has no routing inputs; `domain_ids` are the user's."""
    model, dense, prompt = tiny_lexicon(policy=policy), tiny_dense(), {"input_ids": texts[0]}
    options = {"domain_ids": torch.tensor([1])} if policy == "domain" else {}
    expected = generate(model, prompt, **options)
    for assistant in (dense, tiny_lexicon(seed=1, policy="sequence_soft")):
        assert torch.equal(generate(model, prompt, assistant_model=assistant, **options), expected)
    assert torch.equal(generate(dense, prompt, assistant_model=model), generate(dense, prompt))
    repeated = {"input_ids": texts[0].repeat(1, 3)}
    assert torch.equal(generate(model, repeated, prompt_lookup_num_tokens=4), generate(model, repeated))


def test_domain_ids_are_kept_and_the_last_ones_given_hold(texts, caplog):
    model = tiny_lexicon(policy="domain", domain_gate=False, output_router_logits=True)
    with torch.no_grad():
        cache = model(texts[0], domain_ids=torch.tensor([2]))[CACHE]
        assert model(texts[1], cache=cache).expert_index[0].tolist() == [2]
        assert model(texts[1], cache=cache, domain_ids=torch.tensor([3])).expert_index[0].tolist() == [3]
        assert model(texts[1], cache=cache).expert_index[0].tolist() == [3]
    generate(tiny_lexicon(), {"input_ids": texts[0]}, domain_ids=torch.tensor([2]))
    assert "routing_policy='token' does not read domain_ids" in caplog.text


@each_policy
def test_embeddings_of_a_prompt_are_generated_from_as_its_tokens_are(policy, texts):
    model, inputs = tiny_lexicon(policy=policy), left_padded(texts)
    mask, embeds = inputs["attention_mask"], model.get_input_embeddings()(inputs["input_ids"])
    found = model.generate(inputs_embeds=embeds, attention_mask=mask, max_new_tokens=NEW, **WAYS["beams"])
    assert torch.equal(found, generate(model, inputs, "beams", min_new_tokens=None))


@each_policy
def test_continuous_batching_and_packed_rows_give_the_same_or_name_the_policy(policy, texts):
    model = tiny_lexicon(policy=policy)
    packed, positions = torch.cat(texts, 1), torch.cat([torch.arange(text.shape[1]) for text in texts])[None]
    if policy != "token":
        with pytest.raises(ValueError, match=f"routing_policy='{policy}'"):
            model.generate_batch([texts[0][0].tolist()])
        with pytest.raises(ValueError, match=f"routing_policy='{policy}'"):
            model(packed, position_ids=positions)
        return
    expected = torch.cat([model(text).logits for text in texts], 1)
    assert_close(model(packed, position_ids=positions, use_cache=False).logits, expected, rtol=0, atol=1e-5)
    options = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    found = model.generate_batch([text[0].tolist() for text in texts], options, sizes)
    for text, one in zip(texts, sorted(found.values(), key=lambda one: one.request_id), strict=True):
        expected = model.generate(text, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        assert one.generated_tokens == expected[0, text.shape[1] :].tolist()
