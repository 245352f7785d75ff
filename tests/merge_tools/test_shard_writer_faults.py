"""Concurrent runs, sources that change, full disks, fallback copies, and memory: no partial output is left."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from merge_tools import MergeError, compose, verify
from merge_tools.source_scan import scan_file
from merge_tools.tensor_files import read_header
from run_tools import claims

from .conftest import contents, recipe_of, run_python
from .corruptions import copied, snapshot
from .test_shard_writer import ROOT, Stop, interrupt


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
def test_a_second_run_into_the_same_output_fails_and_the_first_is_unharmed(resume, recipe, expected, tmp_path):
    refusals = []

    def second():
        with pytest.raises(BlockingIOError) as refusal:
            compose(recipe, tmp_path / "out", resume=resume)
        refusals.append(str(refusal.value))

    compose(recipe, tmp_path / "out", progress=Stop("write", 5, second))
    assert len(refusals) == 1 and f"Another process writes {tmp_path / '.out.partial'}." in refusals[0]
    assert contents(tmp_path / "out") == expected


def test_a_file_system_without_locks_works(recipe, expected, tmp_path, monkeypatch):
    def unable(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(claims.fcntl, "flock", unable)
    compose(recipe, tmp_path / "out")
    assert contents(tmp_path / "out") == expected


@pytest.fixture(name="synced_names")
def fixture_synced_names(watch_drive):
    """synced_names(refuse) -> the paths that are synced and renamed, in order; `refuse(path)` is the number of its error, if any."""

    def watch(refuse):
        events = []

        def note_sync(path):
            if number := refuse(path):
                raise OSError(number, os.strerror(number))
            events.append(path.name)

        watch_drive(note_sync, lambda new, path: events.append(("replaced by", new.name)))
        return events

    return watch


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_drive_that_cannot_sync_folders_works(number, recipe, expected, tmp_path, synced_names):
    events = synced_names(lambda path: number if path.is_dir() else 0)
    compose(recipe, tmp_path / "out")
    assert contents(tmp_path / "out") == expected and "model.safetensors" in events


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_cannot_be_synced_is_an_error_that_names_it(name, recipe, tmp_path, synced_names):
    synced_names(lambda path: errno.EIO if name in path.name else 0)
    with pytest.raises(OSError, match=f"Input/output error.*{name}"):
        compose(recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_record_is_on_the_disk_before_the_files_that_it_names(recipe, tmp_path, synced_names):
    events = synced_names(lambda path: 0)
    compose(recipe, tmp_path / "out")
    named = [i for i, event in enumerate(events) if "config.json" in event[1] and event[0] == "replaced by"]
    assert named and all(events[i - 2] == claims.RECORD and events[i - 1] == events[i][1] for i in named)
    assert events[-3:] == [".out.partial", "out", tmp_path.name]  # before and after it is renamed


def test_a_run_that_ends_while_another_waits_for_its_lock_keeps_its_output(recipe, expected, tmp_path, monkeypatch):
    """The staging folder that the second run opened has become the first run's output when it gets the lock."""

    def late(*_):
        (tmp_path / ".out.partial" / claims.LOCK).unlink()
        (tmp_path / ".out.partial").rename(tmp_path / "out")

    claim = claims.Claim.create(tmp_path / ".out.partial", "merge", {})
    for name, content in expected.items():
        claim.write(name, content)
    monkeypatch.setattr(claims.fcntl, "flock", late)
    with pytest.raises(MergeError, match="Another run has just written .*out"):
        compose(recipe, tmp_path / "out")
    assert {name: content for name, content in contents(tmp_path / "out").items() if name != claims.RECORD} == expected


def test_an_output_created_during_the_merge_is_not_overwritten(recipe, expected, tmp_path):
    def occupy():
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "notes.txt").write_text("mine")

    with pytest.raises(MergeError, match="complete mixture is in .*.out.partial"):
        compose(recipe, tmp_path / "out", progress=Stop("rename", 0, occupy))
    assert contents(tmp_path / "out") == {"notes.txt": b"mine"}
    assert contents(tmp_path / ".out.partial") == {**expected, claims.LOCK: b""}


@pytest.mark.parametrize("phase", ["read", "write"])
def test_a_source_truncated_during_the_merge(phase, recipe, tmp_path):
    """At the first write event nothing is copied yet; at the first read event nothing is hashed yet."""
    file = source(recipe)
    before = snapshot(tmp_path / "experts")

    def truncate():
        os.truncate(file, 20_000)

    with pytest.raises(MergeError, match="was truncated while|was modified during the merge"):
        compose(recipe, tmp_path / "out", progress=Stop(phase, 0, truncate))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["experts"]
    assert [name for name, seen in snapshot(tmp_path / "experts").items() if seen != before[name]] == [
        "birds/model.safetensors"
    ]


def test_a_source_truncated_while_it_is_read_raises_an_error(tmp_path, monkeypatch):
    """With a memory-mapped file this would end the process with a bus error."""
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(1 << 20)}, file)
    read = os.preadv

    def cut_then_read(handle, buffers, offset):
        os.truncate(file, 1000)
        return read(handle, buffers, offset)

    monkeypatch.setattr(os, "preadv", cut_then_read)
    with pytest.raises(MergeError, match="model.safetensors.*'a'"):
        scan_file(file, read_header(file))
    monkeypatch.undo()
    save_file({"a": torch.zeros(1 << 20)}, file)
    assert scan_file(file, read_header(file)).nbytes == file.stat().st_size


def test_a_source_modified_during_the_merge(recipe, tmp_path):
    """Same length, different values: the hashed bytes may differ from the copied ones."""
    file = source(recipe, 1)

    def rewrite():
        with file.open("r+b") as stream:  # write_bytes truncates first, which another thread may see
            stream.seek(-4, os.SEEK_END)
            stream.write(b"\0\0\0\0")

    with pytest.raises(MergeError, match="ships/model.safetensors was modified during the merge"):
        compose(recipe, tmp_path / "out", progress=Stop("sync", 0, rewrite))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["experts"]


def without(monkeypatch):
    monkeypatch.delattr(os, "copy_file_range")


def across_file_systems(monkeypatch):
    def fail(*_):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", fail)


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
def test_all_ways_of_copying_give_the_same_bytes(way, recipe, expected, tmp_path, monkeypatch):
    """Sources that are not verified are copied inside the kernel."""
    way(monkeypatch)
    compose(recipe, tmp_path / "out", verify=False)
    assert contents(tmp_path / "out")["model.safetensors"] == expected["model.safetensors"]
    compose(recipe, tmp_path / "verified")
    assert contents(tmp_path / "verified") == expected


@pytest.mark.parametrize("call", ["pwrite", "posix_fallocate"])
def test_a_disk_error_keeps_the_partial_output_for_a_resume(call, recipe, expected, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(OSError, match="No space left"):
            compose(recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists() and (tmp_path / ".out.partial" / claims.RECORD).is_file()
    compose(recipe, tmp_path / "out", resume=True)
    assert contents(tmp_path / "out") == expected


@pytest.mark.parametrize("fails", ["read", "sync"])
def test_a_disk_error_in_another_thread_is_raised(fails, recipe, tmp_path):
    def fault():
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        compose(recipe, tmp_path / "out", progress=Stop(fails, 1, fault))
    assert not (tmp_path / "out").exists()


def test_new_parent_folders_are_removed_after_an_error_and_kept_after_an_interruption(recipe, tmp_path):
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
    """A Llama of zeros in a sparse file, which uses no disk space."""
    from merge_tools.layout import Shape
    from merge_tools.tensor_files import pack_header

    config = {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": layers, "num_attention_heads": 8}
    config |= {"vocab_size": 1000, "model_type": "llama", "tie_word_embeddings": True}
    tensors = [(name, "BF16", shape) for name, shape in Shape.from_config(config).tensors().items()]
    prefix, starts = pack_header(tensors)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    with open(folder / "model.safetensors", "wb") as file:
        file.write(prefix)
        file.truncate(starts[-1] + 2 * 1024 * (1 if tensors[-1][0].endswith("norm.weight") else 1000))
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_memory_does_not_grow_with_the_model(tmp_path):
    """Two experts of 177 MB: memory grows by less than a third of one of them."""
    recipe = recipe_of([sparse_expert(tmp_path / name, 3) for name in ("birds", "ships")])
    assert sum(source(recipe, n).stat().st_size for n in (0, 1)) > 340e6
    done = run_python("-c", MEMORY, ROOT, json.dumps(recipe), tmp_path / "out")
    grown, with_a_source = json.loads(done.stdout)
    assert 0 < grown < 60 and with_a_source > 140, (grown, with_a_source)
