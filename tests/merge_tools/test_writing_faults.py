"""Two runs at once, sources that change, disks that fill up, copies by hand, and memory: nothing half-done stays."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from merge_tools import MergeError, compose, verify, writing
from merge_tools.tensor_files import audit, read_header

from .broken import copied, snapshot
from .conftest import contents, recipe_of
from .test_writing import ROOT, Stop, interrupt


@pytest.fixture
def recipe(tmp_path, experts):
    return recipe_of(copied(experts(2), tmp_path / "experts"))


@pytest.fixture
def expected(recipe, tmp_path):
    compose(recipe, tmp_path / "expected")
    return contents(tmp_path / "expected")


def source(recipe, number=0):
    return Path(recipe["experts"][number]["source_model"]) / "model.safetensors"


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_run_into_one_output_is_refused_and_the_first_unharmed(resume, recipe, expected, tmp_path):
    refusals = []

    def second():
        with pytest.raises(MergeError) as refusal:
            compose(recipe, tmp_path / "out", resume=resume)
        refusals.append(str(refusal.value))

    compose(recipe, tmp_path / "out", progress=Stop("write", 5, second))
    assert refusals == [
        f"Another run is writing in {tmp_path / '.out.partial'}. Wait for it, or choose another output."
    ]
    assert contents(tmp_path / "out") == expected


def test_a_file_system_without_locks_is_written_to_all_the_same(recipe, expected, tmp_path, monkeypatch):
    def unable(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(writing.fcntl, "flock", unable)
    compose(recipe, tmp_path / "out")
    assert contents(tmp_path / "out") == expected


def test_a_run_that_ends_while_the_next_one_waits_for_its_lock_keeps_its_output(
    recipe, expected, tmp_path, monkeypatch
):
    """What was opened as the folder that grows is the first run's output by the time it is locked."""

    def late(*_):
        (tmp_path / ".out.partial").rename(tmp_path / "out")

    compose(recipe, tmp_path / "first")
    (tmp_path / "first").rename(tmp_path / ".out.partial")
    monkeypatch.setattr(writing.fcntl, "flock", late)
    with pytest.raises(MergeError, match="Another run is writing in"):
        compose(recipe, tmp_path / "out")
    assert contents(tmp_path / "out") == expected


def test_an_output_that_appears_meanwhile_is_not_overwritten_and_nothing_is_lost(recipe, expected, tmp_path):
    def occupy():
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "notes.txt").write_text("mine")

    with pytest.raises(
        MergeError, match="has been occupied meanwhile. The mixture lies whole in .*.out.partial: move it"
    ):
        compose(recipe, tmp_path / "out", progress=Stop("rename", 0, occupy))
    assert contents(tmp_path / "out") == {"notes.txt": b"mine"}
    assert contents(tmp_path / ".out.partial") == expected


@pytest.mark.parametrize("phase", ["read", "write"])
def test_a_source_that_is_cut_short_during_the_merge(phase, recipe, tmp_path):
    """At the first event of writing all is still to be copied, at that of reading all is still to be hashed."""
    file = source(recipe)
    before = snapshot(tmp_path / "experts")

    def cut():
        os.truncate(file, 20_000)

    with pytest.raises(MergeError, match="became shorter while|was changed while it was merged"):
        compose(recipe, tmp_path / "out", progress=Stop(phase, 0, cut))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["experts"]
    assert [name for name, seen in snapshot(tmp_path / "experts").items() if seen != before[name]] == [
        "birds/model.safetensors"
    ]


def test_a_source_cut_short_at_the_very_moment_it_is_read_is_told_and_kills_nothing(tmp_path, monkeypatch):
    """A mapped file would end the process with a bus error here."""
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(1 << 20)}, file)
    read = os.preadv

    def cut_then_read(handle, buffers, offset):
        os.truncate(file, 1000)
        return read(handle, buffers, offset)

    monkeypatch.setattr(os, "preadv", cut_then_read)
    with pytest.raises(MergeError, match="became shorter while it was read"):
        audit(file, read_header(file))
    monkeypatch.undo()
    save_file({"a": torch.zeros(1 << 20)}, file)
    assert audit(file, read_header(file)).nbytes == file.stat().st_size


def test_a_source_that_is_rewritten_during_the_merge(recipe, tmp_path):
    """The same length, other values: what was hashed may not be what was copied."""
    file = source(recipe, 1)

    def rewrite():
        content = file.read_bytes()
        file.write_bytes(content[:-4] + b"\0\0\0\0")

    with pytest.raises(
        MergeError, match="ships/model.safetensors was changed while it was merged. Start over when nothing"
    ):
        compose(recipe, tmp_path / "out", progress=Stop("sync", 0, rewrite))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["experts"]


def without(monkeypatch):
    monkeypatch.delattr(os, "copy_file_range")


def across_file_systems(monkeypatch):
    def refuse(*_):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", refuse)


def in_small_pieces(monkeypatch):
    copy, write = os.copy_file_range, os.pwrite
    monkeypatch.setattr(os, "copy_file_range", lambda a, b, count, *rest: copy(a, b, min(count, 777), *rest))
    monkeypatch.setattr(os, "pwrite", lambda handle, data, at: write(handle, data[:999], at))


def in_small_pieces_by_hand(monkeypatch):
    in_small_pieces(monkeypatch)
    without(monkeypatch)


def from_the_middle(monkeypatch):
    copy, calls = os.copy_file_range, []

    def once(a, b, count, *rest):
        calls.append(count)
        if len(calls) > 1:
            raise OSError(errno.ENOSYS, "Function not implemented")
        return copy(a, b, min(count, 100), *rest)

    monkeypatch.setattr(os, "copy_file_range", once)


@pytest.mark.parametrize(
    "way", [without, across_file_systems, in_small_pieces, in_small_pieces_by_hand, from_the_middle]
)
def test_however_bytes_are_copied_they_are_the_same(way, recipe, expected, tmp_path, monkeypatch):
    way(monkeypatch)
    compose(recipe, tmp_path / "out")
    assert contents(tmp_path / "out") == expected


def test_a_disk_error_keeps_what_was_begun_for_a_resume(recipe, expected, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "copy_file_range", full)
        with pytest.raises(OSError, match="No space left"):
            compose(recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists() and (tmp_path / ".out.partial" / "journal.jsonl").is_file()
    compose(recipe, tmp_path / "out", resume=True)
    assert contents(tmp_path / "out") == expected


@pytest.mark.parametrize("fails", ["read", "sync"])
def test_an_error_of_the_disk_in_another_thread_is_told_and_not_swallowed(fails, recipe, tmp_path):
    def fault():
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        compose(recipe, tmp_path / "out", progress=Stop(fails, 1, fault))
    assert not (tmp_path / "out").exists()


def test_folders_made_on_the_way_go_when_the_merge_is_refused_and_stay_when_it_is_interrupted(recipe, tmp_path):
    out = tmp_path / "a" / "b" / "out"
    with pytest.raises(MergeError):
        compose(recipe, out, progress=Stop("sync", 0, lambda: os.utime(source(recipe))))
    assert not (tmp_path / "a").exists()
    with pytest.raises(KeyboardInterrupt):
        compose(recipe, out, progress=Stop("write", 5, interrupt))
    assert (tmp_path / "a" / "b" / ".out.partial").is_dir()
    compose(recipe, out, resume=True)
    assert verify(out)["ok"]


MEMORY = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from merge_tools import Progress, compose

def anonymous():
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

class Watch(Progress):
    peak = 0.0
    def start(self, phase, total):
        self.peak = max(self.peak, anonymous())
    def advance(self, phase, count):
        self.peak = max(self.peak, anonymous())

recipe, out = json.loads(sys.argv[2]), sys.argv[3]
before, watch = anonymous(), Watch()
compose(recipe, out, progress=watch)
grown = watch.peak - before
held = b"x" * (150 << 20)  # the negative control: a source in memory would be seen
print(json.dumps([grown, anonymous() - before]))
"""


def sparse_expert(folder, layers):
    """A Llama of zeros that take no room on the disk."""
    from merge_tools.llama import LlamaShape
    from merge_tools.tensor_files import pack_header

    config = {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": layers, "num_attention_heads": 8}
    config |= {"vocab_size": 1000, "model_type": "llama", "tie_word_embeddings": True}
    tensors = [(name, "BF16", shape) for name, shape in LlamaShape.of(config).tensors().items()]
    prefix, starts = pack_header(tensors)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    with open(folder / "model.safetensors", "wb") as file:
        file.write(prefix)
        file.truncate(starts[-1] + 2 * 1024 * (1 if tensors[-1][0].endswith("norm.weight") else 1000))
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell")
def test_memory_does_not_grow_with_the_model(tmp_path):
    """Two experts of 177 MB: means and copies together stay below a third of what one of them would take."""
    recipe = recipe_of([sparse_expert(tmp_path / name, 3) for name in ("birds", "ships")])
    assert sum(source(recipe, n).stat().st_size for n in (0, 1)) > 340e6
    command = [sys.executable, "-c", MEMORY, ROOT, json.dumps(recipe), tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr[-3000:]
    grown, with_a_source = json.loads(done.stdout)
    assert 0 < grown < 60 and with_a_source > 140, (grown, with_a_source)
