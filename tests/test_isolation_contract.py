"""Passes and rows do not mix, for all classes, backbones, heads and policies: padding, batches, threads, errors halfway."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from .modeling_hypernet.conftest import tiny_hypernet  # noqa: F401  (a fixture)
from .test_training_contract import TRANSFORMER_OPTIONS, for_each, with_options, without_randomness
from .tiny_models import ONE_EACH, TRAINABLE, make_trainable


@pytest.fixture
def trainable(request):
    return make_trainable(request.param, request.getfixturevalue)


# what padding adds to the columns of a row; 0 to the others
FILL = {"labels": -100, "copy_ids": 1, "subword_word_ids": -1}


def join(batches, side, pad_token_id, more=3):
    """Batches of one row as one batch, with padding on a side; a decoder's labels and sub-words are padded on the right."""
    joined, longest = {}, max(batch["input_ids"].shape[1] for batch in batches) + more
    for name, first in batches[0].items():
        parts = [batch[name] for batch in batches]
        shifts = [longest - batch["input_ids"].shape[1] for batch in batches]
        if first.dim() == 1:
            moved = name.endswith("_positions") and side == "left"  # places in the text
            joined[name] = torch.cat([part + moved * shift for part, shift in zip(parts, shifts, strict=True)])
            continue
        of_text = first.dim() == 2 and first.shape == batches[0]["input_ids"].shape
        width = longest if of_text else max(part.shape[-1] for part in parts) + more
        fill = pad_token_id if name == "input_ids" else FILL.get(name, 0)
        pads = [((n, 0) if of_text and side == "left" else (0, n)) for n in (width - part.shape[-1] for part in parts)]
        joined[name] = torch.cat([F.pad(part, pad, value=fill) for part, pad in zip(parts, pads, strict=True)])
    return joined


@with_options(
    {
        "ExHiRD transformer": TRANSFORMER_OPTIONS,
        "SEKE": [{}, {"rnn_type": "gru"}],
        "hypernet": [{"bidirectional": True}],
    }
)
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_and_company_change_nothing(side, trainable, options, request):
    """Each row is in a batch, among longer ones, what it is alone."""
    family = request.node.callspec.params["trainable"].split()[0]
    if family == "MoeSumm" and side == "left":
        pytest.skip("absolute positions, which transformers' own models do not count from the first real token either")
    model = trainable.make(**options)
    batches = [dict(trainable.collate([trainable.row(i, i % 3)])) for i in range(4)]
    batch = join(batches, side, model.config.get_text_config().pad_token_id)
    if family in ("SEKE", "hypernet"):  # absolute positions count from the first real token
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    together, outputs = trainable.read(model, batch), []
    for row, one in enumerate(batches):
        alone, found = trainable.read(model, one)[0], together[row]
        if trainable.over:
            alone, found = (x[y[trainable.over][i] > 0] for x, y, i in ((alone, one, 0), (found, batch, row)))
        assert_close(found, alone, rtol=0, atol=2e-5)
        outputs.append(found)
    size = min(len(outputs[0]), len(outputs[1]))
    assert not torch.allclose(outputs[0][:size], outputs[1][:size], atol=1e-4)  # negative control


@pytest.fixture
def in_two_threads():
    """in_two_threads(call) -> the results of call(0) and call(1), which take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    with ThreadPoolExecutor(2) as pool:
        yield lambda call: list(pool.map(call, (0, 1)))
    sys.setswitchinterval(interval)


@for_each(every_day=("SEKE bert", "MoeSumm bart"))
def test_two_threads_share_a_model_that_reads_or_trains(trainable, in_two_threads):
    model, batches = trainable.make(), (trainable.batch(4), dict(trainable.collate(trainable.rows[1:4])))
    expected = [trainable.read(model, batch) for batch in batches]

    def repeat(i):
        return sum(not torch.equal(trainable.read(model, batches[i]), expected[i]) for _ in range(12))

    def train(_):
        for _ in range(5):
            model(**batches[0]).loss.backward()
        return 0

    assert in_two_threads(repeat) == [0, 0]
    assert in_two_threads(lambda i: (repeat, train)[i](1)) == [0, 0]
    assert not torch.equal(expected[0][:3], expected[1])  # negative control


@for_each([name for name in TRAINABLE if not name.startswith(("SEKE", "hypernet")) and "classes" not in name], ONE_EACH)
def test_two_threads_write_what_one_writes(trainable, in_two_threads):
    model, options = trainable.make(), {"max_new_tokens": 5}

    def write(i):
        batch = trainable.collate(trainable.rows[i : i + 3])
        inputs = {name: x for name, x in batch.items() if name != "labels"}
        more = {"max_phrases": 2 - i} if "copy_ids" in inputs else {"num_beams": 1 + i}
        return [model.generate(**inputs, **options, **more) for _ in range(3)]

    expected = [write(0), write(1)]
    for found, wanted in zip(in_two_threads(write), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert not torch.equal(expected[0][0], expected[1][0])


def state_of(model):
    """Everything that lies on the modules themselves, by identity."""
    return [
        (name, key, id(value)) for name, module in model.named_modules() for key, value in sorted(vars(module).items())
    ]


@for_each(every_day=ONE_EACH)
def test_a_pass_that_fails_halfway_leaves_nothing_behind(trainable):
    model, batch, ran = without_randomness(trainable.make()), trainable.batch(), []
    leaves = [module for module in model.modules() if not list(module.children())]
    hooks = [leaf.register_forward_hook(lambda module, *_: ran.append(module)) for leaf in leaves]
    expected = model(**batch)[trainable.output].detach()
    for hook in hooks:
        hook.remove()
    before = state_of(model)
    for place in (len(ran) // 2, -2):
        hook = ran[place].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**batch)
        hook.remove()
        assert state_of(model) == before
        assert torch.equal(model(**batch)[trainable.output], expected)
