"""Processes that read many documents: their threads, and a limit of oneDNN."""

import os

import pytest
import torch

from keyphrase_tools.processes import PRIMITIVES, prepare_process

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
