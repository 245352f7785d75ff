"""Interruptions: the output is complete or does not exist, and every interrupted run can be resumed."""

import json
import os
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest

from merge_tools import MergeError, Progress, check, compose, staging, verify
from run_tools.claims import LOCK, RECORD, Claim

from .conftest import contents, edit_json, open_model, recipe_of, run_python, save_adapter
from .corruptions import snapshot

ROOT = Path(__file__).parents[2]
SHARD = 2_600_000
# Averaged linears of several blocks each, and copied experts, in four shards: a kill may fall within any of them.
SIZES = {"hidden_size": 768, "intermediate_size": 64, "num_hidden_layers": 1}
KILLS = {
    "read": (0, 17),  # the n-th event of a phase
    "write": (1, 14),
    "sync": (0, 2, 3, 7),  # one shard after the other: its start, then its end, so that 0, 1, 2 and 4 are complete
    "rename": ("start", 2, "last", "before", "after"),
}


@pytest.fixture(scope="module")
def merge(tmp_path_factory):
    """A recipe, and the files that an uninterrupted compose writes."""
    from .conftest import save_expert

    folder = tmp_path_factory.mktemp("merge")
    experts = [save_expert(folder / name, seed, **SIZES) for seed, name in enumerate(("birds", "ships"))]
    recipe = recipe_of(experts)
    compose(recipe, folder / "out", shard_bytes=SHARD)
    return recipe, contents(folder / "out")


class Stop(Progress):
    """Calls a function at the n-th event of a phase, and with `again` at all later ones."""

    def __init__(self, phase, number, act, again=False):
        self.phase, self.number, self.act, self.again, self.seen = phase, number, act, again, Counter()

    def start(self, phase, total):
        self.event(phase)

    def advance(self, phase, count):
        self.event(phase)

    def event(self, phase):
        self.seen[phase] += 1
        past = self.seen[phase] - 1 - self.number
        if phase == self.phase and (past == 0 or (past > 0 and self.again)):
            self.act()


def interrupt():
    raise KeyboardInterrupt


def interrupted(recipe, out, phase="write", number=22, **options):
    """Interrupts `compose` at the n-th event of a phase. Returns the staging folder."""
    with pytest.raises(KeyboardInterrupt):
        compose(recipe, out, shard_bytes=SHARD, progress=Stop(phase, number, interrupt, again=True), **options)
    assert not out.exists()
    return out.parent / f".{out.name}.partial"


def complete(partial):
    """The shards that the record of a staging folder lists as complete."""
    claim = Claim.read(partial)
    return {name: path for name, path in claim.complete().items() if name.endswith(".safetensors")} if claim else {}


# killed

KILLER = """
import json, os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import transformers  # the forks below check configurations in their own process, not each in another
from merge_tools import Progress, check, compose

def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)

class Kill(Progress):
    def __init__(self, phase, number):
        self.phase, self.number, self.seen = phase, number, -1

    def start(self, phase, total):
        self.event(phase, "start")

    def advance(self, phase, count):
        self.event(phase, None)

    def event(self, phase, kind):
        self.seen += phase == self.phase
        if phase == self.phase and self.number in (self.seen, kind):
            kill()

def around(name, before, after):
    function = getattr(os, name)
    def patched(*arguments):
        before(*arguments)
        function(*arguments)
        after(*arguments)
    setattr(os, name, patched)

def at_the_index(handle):
    if "model.safetensors.index.json" in os.readlink(f"/proc/self/fd/{handle}"):
        kill()

def nothing(*_): pass

recipe, shard, kills = json.loads(sys.stdin.read())
check(recipe)
for folder, phase, number in kills:
    child = os.fork()
    if not child:
        if number in ("before", "after"):
            around("rename", *((kill, nothing) if number == "before" else (nothing, kill)))
        if number == "last":
            around("fsync", nothing, at_the_index)
        compose(recipe, Path(folder) / "out", shard_bytes=shard, progress=Kill(phase, number))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def kill_all(recipe, folder):
    """Runs a compose for each of KILLS in a separate process that kills itself. Returns the exit codes."""
    kills = [(phase, number) for phase, numbers in KILLS.items() for number in numbers]
    places = [folder / f"{n:02d}" for n in range(len(kills))]
    for root in places:
        root.mkdir()
    specs = json.dumps([recipe, SHARD, [(str(p), *kill) for p, kill in zip(places, kills, strict=True)]])
    done = run_python("-c", KILLER, ROOT, input=specs)
    return list(zip(kills, places, map(int, done.stdout.split()), strict=True))


def test_a_run_killed_at_any_point_can_be_resumed(merge, tmp_path):
    recipe, expected = merge
    kept = set()
    for number, ((phase, event), root, code) in enumerate(kill_all(recipe, tmp_path)):
        assert code == -signal.SIGKILL
        out, partial = root / "out", root / ".out.partial"
        if event == "after":
            assert contents(out).items() >= expected.items() and verify(out)["ok"] and not partial.exists()
            assert set(contents(out)) <= {*expected, RECORD, LOCK}  # removed right after the rename
            continue
        assert not out.exists() and partial.is_dir(), (phase, event)
        again = root / "again"
        shutil.copytree(partial, again / ".out.partial")
        trusted = {name: path.stat().st_mtime_ns for name, path in complete(partial).items()}
        compose(recipe, out, resume=True, shard_bytes=SHARD)
        assert contents(out) == expected and not partial.exists()
        assert {name: (out / name).stat().st_mtime_ns for name in trusted} == trusted  # not written a second time
        kept.add(len(trusted))
        if number % 3 == 0:
            compose(recipe, again / "out", shard_bytes=SHARD)
            assert contents(again / "out") == expected and not (again / ".out.partial").exists()
    assert {0, 1, 4} <= kept


def test_the_uninterrupted_reference_opens_and_verifies(merge, tmp_path):
    recipe, expected = merge
    assert len([name for name in expected if name.endswith(".safetensors")]) >= 4
    compose(recipe, tmp_path / "out", shard_bytes=SHARD)
    assert contents(tmp_path / "out") == expected and verify(tmp_path / "out")["ok"]
    assert open_model(tmp_path / "out").config.num_local_experts == 2
    file = tmp_path / "out" / "model-00001-of-00004.safetensors"
    with open(file, "r+b") as handle:  # the negative control of `verify`: one bit
        handle.seek(-1, os.SEEK_END)
        last = handle.read(1)[0]
        handle.seek(-1, os.SEEK_END)
        handle.write(bytes([last ^ 1]))
    assert not verify(tmp_path / "out")["ok"]


INTERRUPT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs the tests in the background has it ignored
sys.path.insert(0, sys.argv.pop(1))
sent = sys.argv.pop(1)
from lexperts.cli import merge, merge_screen

class Interrupt(merge_screen.Progress):
    def advance(self, phase, count):
        if phase == "write":
            os.kill(os.getpid(), getattr(signal, sent))

merge_screen.Progress = Interrupt
merge.main()
"""


@pytest.mark.parametrize("sent, code", [("SIGINT", 130), ("SIGTERM", 143)])
def test_interrupting_the_command_line(sent, code, merge, tmp_path):
    recipe, _ = merge
    (tmp_path / "recipe.yml").write_text(json.dumps(recipe))
    arguments = ["compose", "recipe.yml", "out"]
    done = run_python("-c", INTERRUPT, ROOT, sent, *arguments, cwd=tmp_path, code=code)
    assert done.stdout == ""
    partial = tmp_path / ".out.partial"
    assert done.stderr.startswith("interrupted: out ") and done.stderr.count("\n") == 1
    assert f"{partial}. Continue with --resume" in done.stderr
    assert partial.is_dir() and not (tmp_path / "out").exists()
    compose(recipe, tmp_path / "out", resume=True)
    assert verify(tmp_path / "out")["ok"] and not partial.exists()


# resumed


def test_a_resume_requires_the_same_recipe_and_sources(merge, tmp_path):
    recipe, expected = merge
    partial = interrupted(recipe, tmp_path / "out")
    begun = snapshot(partial)
    ships = Path(recipe["experts"][1]["source_model"]) / "model.safetensors"
    status = ships.stat()

    def resume(**changes):
        compose(recipe, tmp_path / "out", resume=True, shard_bytes=changes.pop("shard_bytes", SHARD), **changes)

    pattern = "another recipe or other sources. Start again without --resume"
    for changes in ({"seed": 1}, {"weights": [1, 2]}, {"router_layers": ["mlp", "k_proj"]}, {"shard_bytes": 10**9}):
        with pytest.raises(MergeError, match=pattern):
            resume(**changes)
        assert snapshot(partial) == begun and not (tmp_path / "out").exists()
    resume_again = shutil.copytree(partial, tmp_path / "again" / ".out.partial").parent
    compose(recipe, resume_again / "out", resume=True, shard_bytes=SHARD)
    assert contents(resume_again / "out") == expected
    with ships.open("r+b") as file:  # another value, with the size and the time of before
        file.seek(-4, os.SEEK_END)
        last = file.read(4)
        file.seek(-4, os.SEEK_END)
        file.write(last[::-1])
    os.utime(ships, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (ships.stat().st_size, ships.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    with pytest.raises(MergeError, match=pattern):
        resume()
    assert snapshot(partial) == begun
    with ships.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(last)
    os.utime(ships, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("changed, options", [("birds", {}), ("birds", {"rank": 2}), ("base", {"rank": 2})])
def test_a_resume_requires_the_same_scaling_of_adapters(changed, options, experts, tmp_path):
    (root,) = experts(1)
    places = {name: save_adapter(tmp_path / name, root, seed=i) for i, name in enumerate(("birds", "ships", "base"))}
    recipe = recipe_of([places["birds"], places["ships"]], base_model=str(places["base"]), **options)
    interrupted(recipe, tmp_path / "out", "sync", 0)
    edit_json(places[changed] / "adapter_config.json", lora_alpha=16)
    with pytest.raises(MergeError, match="another recipe or other sources. Start again without --resume"):
        compose(recipe, tmp_path / "out", resume=True, shard_bytes=SHARD)
    edit_json(places[changed] / "adapter_config.json", lora_alpha=8)
    compose(recipe, tmp_path / "out", resume=True, shard_bytes=SHARD)


def test_each_of_several_interruptions_keeps_the_complete_shards(merge, tmp_path):
    recipe, expected = merge
    known = []
    for _ in range(3):
        partial = interrupted(recipe, tmp_path / "out", "sync", 2, resume=True)
        known.append(len(complete(partial)))
    assert known == [1, 2, 3]
    compose(recipe, tmp_path / "out", shard_bytes=SHARD, resume=True)
    assert contents(tmp_path / "out") == expected


def test_only_shards_that_were_synced_are_trusted(merge, tmp_path):
    """A shard that was not synced may be full of zeros after a crash; one that was deleted is written again, also when resuming twice."""
    recipe, expected = merge
    partial = interrupted(recipe, tmp_path / "out", "sync", 4)
    known = complete(partial)
    for file in partial.glob("*.safetensors"):
        if file.name not in known:
            file.write_bytes(bytes(file.stat().st_size))
    min(known.values()).unlink()
    interrupted(recipe, tmp_path / "out", "write", 3, resume=True)
    compose(recipe, tmp_path / "out", resume=True, shard_bytes=SHARD)
    assert contents(tmp_path / "out") == expected


def folder_of_a_user(partial, tmp_path):
    partial.mkdir()
    (partial / "thesis.txt").write_text("years of work")
    (partial / "model.safetensors").write_bytes(b"weights")


def linked_folder(partial, tmp_path):
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "thesis.txt").write_text("years of work")
    partial.symlink_to(tmp_path / "user")


def record_of_a_user(partial, tmp_path):
    partial.mkdir()
    (partial / RECORD).write_text('{"monday": "rain"}\n')


def other_command(partial, tmp_path):
    Claim.create(partial, "extract", {})


def linked_shard(partial, tmp_path):
    Claim.create(partial, "merge", {}).name_file("model.safetensors")
    (tmp_path / "weights").write_bytes(b"weights")
    (partial / "model.safetensors").symlink_to(tmp_path / "weights")


def plain_file(partial, tmp_path):
    partial.write_text("mine")


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    "occupy", [folder_of_a_user, linked_folder, record_of_a_user, other_command, linked_shard, plain_file]
)
def test_a_staging_folder_that_no_merge_wrote_is_not_touched(occupy, resume, merge, tmp_path):
    recipe, _ = merge
    occupy(tmp_path / ".out.partial", tmp_path)
    before = snapshot(tmp_path)
    assert any(finding.check == "output" for finding in check(recipe, tmp_path / "out").errors)
    with pytest.raises(MergeError, match="out.partial"):
        compose(recipe, tmp_path / "out", resume=resume)
    assert snapshot(tmp_path) == before


def test_an_interruption_while_the_last_files_are_written_can_be_followed_by_a_new_run(merge, tmp_path, monkeypatch):
    recipe, expected = merge

    def killed(*_):
        raise KeyboardInterrupt

    for resume in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(staging.os, "rename", killed)
            with pytest.raises(KeyboardInterrupt):
                compose(recipe, tmp_path / "out", shard_bytes=SHARD)
        assert (tmp_path / ".out.partial" / "config.json").is_file()
        compose(recipe, tmp_path / "out", shard_bytes=SHARD, resume=resume)
        assert contents(tmp_path / "out") == expected
        shutil.rmtree(tmp_path / "out")
