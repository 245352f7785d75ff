"""Processes that read many documents: their threads, a limit of oneDNN, and free memory."""

import os
import platform

import psutil
import pytest
import torch

from run_tools import processes
from run_tools.processes import prepare_process

CAPACITY = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_threads_are_set_and_a_limit_of_the_user_stays(monkeypatch, threads):
    monkeypatch.delenv(CAPACITY, raising=False)
    prepare_process(2)
    assert torch.get_num_threads() == 2
    assert os.environ[CAPACITY] == "64"
    monkeypatch.setenv(CAPACITY, "7")
    prepare_process()
    assert torch.get_num_threads() == 2
    assert os.environ[CAPACITY] == "7"
    monkeypatch.setattr("run_tools.processes.PROCESS", os.getppid())  # as in a forked process
    prepare_process()
    assert torch.get_num_threads() == 1
    prepare_process(2)  # more would wait for ever
    assert torch.get_num_threads() == 1


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no malloc_trim")
def test_batches_leave_no_free_memory(monkeypatch):
    pieces = [bytearray(100_000) for _ in range(3000)]
    kept = pieces[::2]  # half of the heap is free, between pieces that are in use
    before = psutil.Process().memory_info().rss
    del pieces
    processes.MemoryRelease()()
    assert before - psutil.Process().memory_info().rss > 100e6 and kept
