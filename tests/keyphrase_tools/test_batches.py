"""Work ahead: order, errors where they are due, how far ahead, and the same keyphrases as without it."""

import re
import threading
from itertools import count
from types import SimpleNamespace

import pytest

from keyphrase_tools.pipeline_keyphrase_extraction import KeyphraseExtractionPipeline
from lexperts_lite.batches import prepare_ahead

TEXTS = [f"graph cut {'learning networks ' * n} the graph {n}" for n in range(16)] + [""]


def test_a_thread_prepares_items_in_order_and_not_further_ahead():
    read, threads, before = [], set(), threading.active_count()

    def items():
        for n in range(8):
            read.append(threading.current_thread())
            yield n

    results = prepare_ahead(items(), lambda n: threads.add(threading.current_thread()) or n * n)
    assert next(results) == 0 and len(read) == 2 and threading.active_count() == before + 1
    assert list(results) == [n * n for n in range(1, 8)]
    assert set(read) == {threading.current_thread()} and not threads & set(read)
    results = prepare_ahead(iter(range(10)), abs)
    next(results)
    results.close()
    assert threading.active_count() == before


def test_an_error_comes_after_the_items_before_it():
    def items():
        yield from (1, 2, 3)
        raise OSError("the file ended")

    for source, expected, error in ((items(), [6, 3, 2], OSError), ([1, 0, 2], [6], ZeroDivisionError)):
        results = prepare_ahead(source, lambda n: 6 / n)
        assert [next(results) for _ in expected] == expected
        with pytest.raises(error):
            next(results)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_batches_are_launched_ahead_and_come_in_order(lookup, monkeypatch, ahead):
    extract, launched = lookup(), []
    extract._ahead, forward = ahead, extract._forward
    monkeypatch.setattr(extract, "_forward", lambda batch, **options: launched.append(1) or forward(batch, **options))
    read = extract.read_windows(extract.preprocess([f"graph {'x ' * n}" for n in range(4)]), batch_size=1)
    assert [window.document for window in next(read)] == [3] and len(launched) == 1 + ahead
    assert [window.document for (window,) in read] == [2, 1, 0]
    assert list(extract.read_windows(extract.preprocess([]))) == []


def test_the_keyphrases_are_those_without_looking_ahead(sharp_seke, tiny_tokenizer):
    extract = KeyphraseExtractionPipeline(sharp_seke(), tiny_tokenizer)
    for options in ({}, {"diversity": 0.4}, {"threshold": 0.2, "top_k": None}):
        extract._ahead = 0
        expected = extract(TEXTS, batch_size=2, **options)
        extract._ahead = 1
        assert extract(TEXTS, batch_size=2, **options) == expected and any(expected)
    with pytest.raises(TypeError, match="text of document 17"):
        list(extract(iter([*TEXTS, 5]), batch_size=2))


def test_the_progress_within_a_long_document_is_shown(lookup, monkeypatch, caplog):
    """One minute a window."""
    monkeypatch.setattr("lexperts_lite.reader.time", SimpleNamespace(monotonic=count(0, 60).__next__))
    lookup()(["graph b " * 50, "b"], batch_size=1)
    assert not caplog.records
    lookup()(["graph b " * 1800], batch_size=1)
    found = re.findall(r"(\d+)% is read, .* (\d+)\.\d minutes", caplog.text)
    shares, minutes = ([int(each[group]) for each in found] for group in (0, 1))
    assert shares == sorted(shares) and minutes == list(range(minutes[0], minutes[0] - len(minutes), -1))
    assert minutes[0] > 60 and minutes[-1] <= 1
