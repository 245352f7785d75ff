"""Processes that read many documents: their threads, a limit of oneDNN, and free memory."""

import os
import platform

import psutil
import pytest
import torch

from run_tools import processes
from run_tools.processes import PRIMITIVES, SPINS, limit_spinning, prepare_process

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
    assert os.environ[CAPACITY] == PRIMITIVES
    monkeypatch.setenv(CAPACITY, "7")
    prepare_process()
    assert torch.get_num_threads() == 2
    assert os.environ[CAPACITY] == "7"
    monkeypatch.setattr("run_tools.processes.PROCESS", os.getppid())  # as in a forked process
    prepare_process()
    assert torch.get_num_threads() == 1
    prepare_process(2)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    "given, expected",
    [({}, SPINS), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
)
def test_threads_spin_for_a_short_time_unless_the_user_has_chosen(given, expected, monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that the end of the test restores it
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    limit_spinning()
    assert os.environ.get("GOMP_SPINCOUNT") == expected


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no malloc_trim")
def test_batches_leave_no_free_memory(monkeypatch):
    monkeypatch.setattr(processes, "RELEASE", 0)
    pieces = [bytearray(100_000) for _ in range(3000)]
    kept = pieces[::2]  # half of the heap is free, between pieces that are in use
    before = psutil.Process().memory_info().rss
    del pieces
    processes.MemoryRelease()()
    assert before - psutil.Process().memory_info().rss > 100e6 and kept
