"""Models are plain objects: pickled, copied, sent to other processes, and read by several threads at once."""

import copy
import io
import multiprocessing
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.testing import assert_close

TEXTS = ["graph cuts in the network", "the problem of learning graph networks is the cut of a network"]
HEADS = [{}, {"use_moe": False, "rnn_type": "gru"}]
each_head = pytest.mark.parametrize("head", HEADS, ids=["MoE + LSTM", "GRU"])


@pytest.fixture(scope="module")
def batches(tiny_tokenizer):
    return [dict(tiny_tokenizer([text], return_tensors="pt")) for text in TEXTS]


def read(model, batch):
    with torch.no_grad():
        return model(**batch).logits


def read_elsewhere(sent, batch):
    """In a process that was spawned: model as pickled bytes, as `torch.save` writes them -> logits."""
    torch.set_num_threads(1)
    return read(torch.load(io.BytesIO(sent), weights_only=False), batch).numpy()


@each_head
def test_copies_give_the_same_and_share_nothing(head, tiny_seke, batches):
    model, saved = tiny_seke(**head), io.BytesIO()
    expected = read(model, batches[0])
    torch.save(model, saved)
    saved.seek(0)
    copies = [torch.load(saved, weights_only=False), pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
    for again in copies:
        assert type(again) is type(model) and again.config is not model.config
        assert_close(read(again, batches[0]), expected, rtol=0, atol=1e-6)
        again.set_experts_implementation("batched_mm")
        again.classifier.weight.data.add_(0.1)
        assert not torch.allclose(read(again, batches[0]), expected)
    assert model.config._experts_implementation == "eager"
    assert torch.equal(read(model, batches[0]), expected)


def test_a_spawned_process_reads_as_this_one(tiny_seke, batches):
    model, saved = tiny_seke(), io.BytesIO()
    torch.save(model, saved)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(read_elsewhere, (saved.getvalue(), batches[1]))
    assert_close(torch.from_numpy(found), read(model, batches[1]), rtol=0, atol=1e-6)


@each_head
@pytest.mark.parametrize("training", [False, True])
def test_two_threads_read_what_one_reads(head, training, tiny_seke, batches):
    model = tiny_seke(**head)
    expected = [read(model, batch) for batch in batches]

    def run(i):
        if training:  # gradients reach the same parameters, and no thread sees the other's graph
            torch.autograd.grad(model(**batches[i % 2]).logits.square().sum(), model.classifier.weight)
        return torch.equal(read(model, batches[i % 2]), expected[i % 2])

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(run, range(100)))
