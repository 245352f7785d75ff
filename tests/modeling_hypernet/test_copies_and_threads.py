"""Models are plain objects: pickled, copied, sent to other processes, and read by several threads at once."""

import copy
import io
import multiprocessing
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.testing import assert_close

from modeling_hypernet import HypernetModel

from .conftest import KINDS

PAIRS = [("graph cuts", "graph cuts in the network"), ("learning", "the problem of learning is the cut of a network")]
each_kind = pytest.mark.parametrize("kind", [*KINDS, "states"])


@pytest.fixture(scope="module")
def batches(tiny_tokenizer):
    return [dict(tiny_tokenizer(*pair, return_token_type_ids=True, return_tensors="pt")) for pair in PAIRS]


@pytest.fixture
def make(tiny_hypernet):
    """make(kind): a model of each of the four classes."""

    def make(kind, **options):
        if kind != "states":
            return tiny_hypernet(kind, **options)
        torch.manual_seed(0)
        return HypernetModel(tiny_hypernet("classes", **options).config).eval()

    return make


def read(model, batch):
    """Each class's first output."""
    with torch.no_grad():
        return model(**batch).to_tuple()[0]


def read_elsewhere(sent, batch):
    """In a process that was spawned: model as pickled bytes, as `torch.save` writes them -> logits."""
    torch.set_num_threads(1)
    return read(torch.load(io.BytesIO(sent), weights_only=False), batch).numpy()


@each_kind
def test_copies_give_the_same_and_share_nothing(kind, make, batches):
    model, saved = make(kind), io.BytesIO()
    expected = read(model, batches[0])
    torch.save(model, saved)
    saved.seek(0)
    copies = [torch.load(saved, weights_only=False), pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
    for again in copies:
        assert type(again) is type(model) and again.config is not model.config
        assert_close(read(again, batches[0]), expected, rtol=0, atol=1e-6)
        again.base_model.reader.generators[0].input.data.mul_(1.5)
        assert not torch.allclose(read(again, batches[0]), expected, atol=1e-5)
    assert torch.equal(read(model, batches[0]), expected)


def test_a_spawned_process_reads_as_this_one(make, batches):
    models, sent = [make(kind) for kind in [*KINDS, "states"]], []
    for model in models:
        saved = io.BytesIO()
        torch.save(model, saved)
        sent.append((saved.getvalue(), batches[1]))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.starmap(read_elsewhere, sent)
    for model, there in zip(models, found, strict=True):
        assert_close(torch.from_numpy(there), read(model, batches[1]), rtol=0, atol=1e-6)


@each_kind
@pytest.mark.parametrize("training", [False, True])
def test_two_threads_read_what_one_reads(kind, training, make, batches):
    model = make(kind)
    expected = [read(model, batch) for batch in batches]

    def run(i):
        if training:  # gradients reach the same parameters, and no thread sees the other's graph
            torch.autograd.grad(
                model(**batches[i % 2]).to_tuple()[0].square().sum(), model.base_model.reader.parameters()
            )
        return torch.equal(read(model, batches[i % 2]), expected[i % 2])

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(run, range(100)))
