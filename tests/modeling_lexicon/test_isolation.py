"""Passes do not mix: threads, errors halfway, recomputation, copies and processes share no state of a model's modules."""

import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.modeling_lexicon.conftest import SIZES, each_policy, tiny_lexicon

PASSES, BATCHES = 500, 25


def inputs_of(thread, number):
    """A batch that differs for each thread and number, in its tokens and so in its experts."""
    generator = torch.Generator().manual_seed(1000 * thread + number)
    return {
        "input_ids": torch.randint(3, SIZES["vocab_size"], (2, 4), generator=generator),
        "domain_ids": torch.randint(4, (2,), generator=generator),
    }


def in_two_threads(call):
    """call(thread) in two threads at once, which take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(call, (0, 1)))
    finally:
        sys.setswitchinterval(interval)


@each_policy
def test_two_threads_on_one_model_get_the_logits_of_one(policy):
    model = tiny_lexicon(policy=policy, layers="attention and mlp", num_hidden_layers=1)

    @torch.no_grad()
    def run(thread, passes=PASSES):
        found = []
        for number in range(passes):
            try:
                found.append(model(**inputs_of(thread, number % BATCHES), use_cache=False).logits)
            except Exception as error:
                found.append(error)
        return found

    expected = [run(thread, BATCHES) for thread in (0, 1)]
    wrong = failed = 0
    for own, known in zip(in_two_threads(run), expected, strict=True):
        for number, found in enumerate(own):
            failed += isinstance(found, Exception)
            wrong += torch.is_tensor(found) and not torch.equal(found, known[number % BATCHES])
    assert (wrong, failed) == (0, 0), f"{wrong} wrong and {failed} failed passes of {2 * PASSES}"
    assert not torch.equal(expected[0][0], expected[1][0])  # negative control


@each_policy
def test_two_threads_write_what_one_writes(policy):
    model = tiny_lexicon(policy=policy)

    def run(thread):
        options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "num_beams": 1 + thread}
        return [model.generate(**inputs_of(thread, number), **options) for number in range(10)]

    expected = [run(0), run(1)]
    for own, known in zip(in_two_threads(run), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(own, known, strict=True))


@each_policy
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")
def test_two_threads_that_recompute_layers_get_the_gradients_of_one(policy, reentrant):
    """By the gradient of the embeddings: that of the parameters is one sum over both threads."""
    model = tiny_lexicon(policy=policy, layers="attention and mlp").train().requires_grad_(False)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})

    def run(thread):
        found = []
        for number in range(20):
            inputs = inputs_of(thread, number)
            x = model.get_input_embeddings()(inputs.pop("input_ids")).requires_grad_()
            model(inputs_embeds=x, **inputs, use_cache=False).logits.square().sum().backward()
            found.append(x.grad)
        return found

    expected = [run(0), run(1)]
    for own, known in zip(in_two_threads(run), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(own, known, strict=True))
    assert not torch.equal(expected[0][0], expected[1][0])


# --- errors halfway -------------------------------------------------------------------------------------------------


class Halfway(Exception):
    pass


def state_of(model):
    """Everything that lies on the modules themselves, by identity."""
    return [
        (name, key, id(value)) for name, module in model.named_modules() for key, value in sorted(vars(module).items())
    ]


@each_policy
@pytest.mark.parametrize("place", ["mlp.act_fn", "self_attn.o_proj.experts", "mlp.down_proj", "input_layernorm"])
def test_a_pass_that_fails_halfway_leaves_nothing_behind(policy, place):
    model, inputs = tiny_lexicon(policy=policy, layers="all linears"), inputs_of(0, 0)
    expected = model(**inputs).logits
    before = state_of(model)
    seen = []

    def fail(*_):
        raise Halfway

    model.model.layers[0].register_forward_hook(lambda module, given, made: seen.append(weakref.ref(made[0])))
    before = state_of(model)
    handle = model.model.layers[1].get_submodule(place).register_forward_hook(fail)
    with pytest.raises(Halfway):
        model(**inputs_of(1, 1))
    handle.remove()
    gc.collect()
    assert len(seen) == 1 and seen[0]() is None  # the failed pass's states, and with them its graph, are gone
    assert state_of(model) == before
    assert torch.equal(model(**inputs).logits, expected)


@each_policy
def test_a_pass_that_ends_leaves_nothing_behind(policy, batch):
    model = tiny_lexicon(policy=policy, layers="attention and mlp").train()
    before = state_of(model)
    model(**batch).loss.backward()
    assert state_of(model) == before
