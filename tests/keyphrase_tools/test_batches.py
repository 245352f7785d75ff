"""Work ahead: order, errors where they are due, how far ahead, and the same keyphrases as without it."""

import threading

import pytest
import torch

from keyphrase_tools.pipeline_keyphrase_extraction import KeyphraseExtractionPipeline
from lexperts_lite.batches import prepare_ahead
from modeling_seke.layers_seke import PackedTokens


def test_items_are_prepared_in_order_and_not_further_ahead():
    read, threads = [], set()

    def items():
        for n in range(8):
            read.append((n, threading.current_thread()))
            yield n

    def prepare(n):
        threads.add(threading.current_thread())
        return n * n

    results = prepare_ahead(items(), prepare)
    assert next(results) == 0 and len(read) == 2
    assert list(results) == [n * n for n in range(1, 8)]
    assert {thread for _, thread in read} == {threading.current_thread()}
    assert threading.current_thread() not in threads


def test_an_error_comes_after_the_items_before_it():
    def items():
        yield from (1, 2, 3)
        raise OSError("the file ended")

    results = prepare_ahead(items(), lambda n: 6 / n)
    assert [next(results) for _ in range(3)] == [6, 3, 2]
    with pytest.raises(OSError, match="ended"):
        next(results)
    results = prepare_ahead([1, 0, 2], lambda n: 6 / n)
    assert next(results) == 6
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_the_thread_ends_with_the_iterator():
    before = threading.active_count()
    results = prepare_ahead(iter(range(10)), abs)
    next(results)
    assert threading.active_count() == before + 1
    results.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_batches_are_launched_ahead_and_come_in_order(lookup, monkeypatch, ahead):
    extract, launched = lookup(), []
    extract._ahead, forward = ahead, extract._forward
    monkeypatch.setattr(extract, "_forward", lambda batch, **options: launched.append(1) or forward(batch, **options))
    block = extract.preprocess([f"graph {'x ' * n}" for n in range(4)])
    read = extract.read_windows(block, batch_size=1)
    assert [window.document for window in next(read)] == [3] and len(launched) == 1 + ahead
    assert [window.document for (window,) in read] == [2, 1, 0]
    assert list(extract.read_windows(extract.preprocess([]))) == []


def test_the_keyphrases_are_those_without_looking_ahead(sharp_seke, tiny_tokenizer):
    model = sharp_seke()
    extract = KeyphraseExtractionPipeline(model, tiny_tokenizer)
    texts = [f"graph cut {'learning networks ' * (n % 90)} the graph {n}" for n in range(60)] + [""]
    for options in ({}, {"diversity": 0.4}, {"threshold": 0.2, "top_k": None}):
        expected = extract(texts, batch_size=2, **options)
        extract._ahead = 1
        assert extract(texts, batch_size=2, **options) == expected and any(expected)
        extract._ahead = 0
    extract._ahead = 1
    with pytest.raises(TypeError, match="text of document 61"):
        list(extract(iter([*texts, 5]), batch_size=2))


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))],
)
def test_a_model_takes_positions_that_are_known_already(sharp_seke, tiny_tokenizer, device):
    model = sharp_seke().to(device)
    batch = tiny_tokenizer(["graph cut networks", "the", "graph cut " * 9], padding=True, return_tensors="pt")
    tokens = model.pack_tokens(batch["attention_mask"])
    assert isinstance(tokens, PackedTokens) and tokens.to(device).batch_sizes.device.type == "cpu"
    batch = batch.to(device)
    with torch.no_grad():
        expected = model(**batch).logits
        assert torch.equal(model(**batch, packed_tokens=tokens.to(device)).logits, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_gives_the_keyphrases_of_a_cpu(sharp_seke, tiny_tokenizer):
    model = sharp_seke()
    texts = [f"graph cut {'learning networks ' * (n % 90)} the graph {n}" for n in range(300)]
    expected = KeyphraseExtractionPipeline(model, tiny_tokenizer)(texts)
    found = KeyphraseExtractionPipeline(model, tiny_tokenizer, device="cuda")(iter(texts), batch_size=4)
    for ours, theirs in zip(found, expected, strict=True):
        assert [phrase["keyphrase"] for phrase in ours] == [phrase["keyphrase"] for phrase in theirs]
