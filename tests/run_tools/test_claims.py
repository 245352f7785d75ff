"""Claims on folders: what is of a run is read and removed, and nothing else."""

import json
import os

import pytest

from run_tools.claims import LOCK, RECORD, TEMPORARY, Claim, FileEntry, find_foreign
from run_tools.errors import UserError


@pytest.fixture
def claim(tmp_path):
    claim = Claim.create(tmp_path / "parts", "test", {"k": 3})
    claim.write("a.jsonl", b"one\n")
    claim.write("b.jsonl", b"two\n")
    return claim


def test_a_claim_is_read_as_it_was_written(claim):
    claim.name_file("joined.jsonl")
    again = Claim.read(claim.folder)
    assert (again.command, again.settings, again.files) == ("test", {"k": 3}, claim.files)
    assert list(again.complete()) == ["a.jsonl", "b.jsonl"]
    again.remove()
    assert not claim.folder.exists()


def test_a_file_is_named_on_the_disk_before_it_is_written(tmp_path, watch_drive):
    """And each name is given to content that is on the disk."""
    events, folder = [], tmp_path / "parts"

    def note_sync(path):
        named = [json.loads(line)["file"] for line in path.read_text().splitlines()[1:]] if path.name == RECORD else []
        events.append(("synced", TEMPORARY.sub(r"new \1", path.name), *named, (folder / "a.jsonl").exists()))

    watch_drive(note_sync, lambda new, path: events.append(("renamed", path.name)))
    Claim.create(folder, "test", {}).write("a.jsonl", b"one\n")
    assert events == [
        ("synced", f"new {RECORD}", False),
        ("renamed", RECORD),
        ("synced", RECORD, "a.jsonl", False),
        ("synced", "new a.jsonl", False),
        ("renamed", "a.jsonl"),
    ]


def test_files_in_a_folder_are_of_the_claim_and_others_beside_them_are_not(claim):
    claim.write("templates/rag.jinja", b"rag")
    assert Claim.read(claim.folder).complete()["templates/rag.jinja"].read_bytes() == b"rag"
    (claim.folder / "templates" / "mine.jinja").write_text("mine")
    with pytest.raises(UserError, match="'templates/mine.jinja', which its record does not name"):
        Claim.read(claim.folder)
    claim.clear()
    assert [path.name for path in claim.folder.rglob("*")] == ["templates", "mine.jinja"]
    (claim.folder / "templates" / "mine.jinja").unlink()
    (claim.folder / "templates").rmdir()
    again = Claim.create(claim.folder, "test", {})
    again.write("templates/rag.jinja", b"rag")
    again.clear()
    assert not list(claim.folder.iterdir())


def plant(folder, kind):
    path = folder / "thesis.txt"
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path = folder / "a.jsonl"
        path.unlink()
        path.symlink_to(folder.parent / "mine.txt")
    elif kind == "hard link":
        path = folder / "a.jsonl"
        path.unlink()
        path.hardlink_to(folder.parent / "mine.txt")
    elif kind == "temporary file of another name":
        path = folder / ".thesis.txt.17.tmp"
        path.write_text("mine")
    elif kind == "lock that is not empty":
        path = folder / LOCK
        path.write_text("mine")
    else:
        path.write_text("mine")
    return path


@pytest.mark.parametrize(
    "kind", ["file", "folder", "link", "hard link", "temporary file of another name", "lock that is not empty"]
)
@pytest.mark.parametrize("record", [True, False], ids=["with a record", "without"])
def test_a_folder_with_a_file_that_is_not_in_the_record_is_refused(kind, record, claim):
    (claim.folder.parent / "mine.txt").write_text("mine")
    path = plant(claim.folder, kind)
    if not record:
        (claim.folder / RECORD).unlink()
    with pytest.raises(UserError) as error:
        Claim.read(claim.folder)
    with pytest.raises(UserError):
        Claim.create(claim.folder, "test", {})
    assert str(claim.folder) in str(error.value) and "Move" in str(error.value)
    assert path.name in str(error.value) or not record  # without a record, the first file is named
    claim.remove()
    assert (claim.folder.parent / "mine.txt").read_text() == "mine"
    if kind not in ("link", "hard link", "lock that is not empty"):
        assert path.exists()


@pytest.mark.parametrize(
    "content", [b"", b"{}\n", b"[1]\n", b'{"command": 3, "settings": {}}\n', b"\xff\n", b'{"a":' * 9999 + b"\n"]
)
def test_a_damaged_record_is_refused(content, claim):
    (claim.folder / RECORD).write_bytes(content)
    with pytest.raises(UserError, match="is damaged"):
        Claim.read(claim.folder)
    assert (claim.folder / "a.jsonl").exists()


@pytest.mark.parametrize("name", ["../mine.txt", "/etc/passwd", "a/../b", "a/b/c", "..", "", None, 3])
def test_a_record_names_files_of_its_own_folder_only(name, claim):
    with (claim.folder / RECORD).open("a") as file:
        file.write(json.dumps({"file": name}) + "\n")
    with pytest.raises(UserError, match="is damaged"):
        Claim.read(claim.folder)
    if isinstance(name, str):
        with pytest.raises(ValueError, match="not the name of a file"):
            claim.name_file(name)


def test_a_file_that_has_changed_is_refused_until_it_is_deleted(claim):
    path = claim.folder / "b.jsonl"
    path.write_bytes(b"tw")
    with pytest.raises(UserError, match=r"b\.jsonl.*2.*4.*Delete"):
        Claim.read(claim.folder)
    path.unlink()
    assert list(Claim.read(claim.folder).complete()) == ["a.jsonl"]
    with pytest.raises(UserError, match="its content has changed"):
        claim.check_hash("b.jsonl", "0")


@pytest.mark.parametrize("size", range(0, 220, 7))
def test_a_record_that_was_cut_anywhere_by_a_kill_goes_on_or_is_refused(size, tmp_path):
    claim = Claim.create(tmp_path / "parts", "test", {})
    first = (claim.folder / RECORD).stat().st_size
    claim.name_file("a.jsonl", FileEntry(4, "x" * 64))
    claim.name_file("b.jsonl", FileEntry(4, "x" * 64))
    record = claim.folder / RECORD
    if size >= record.stat().st_size:
        return
    os.truncate(record, size)
    if size < first:  # the first line is written as one file, so no kill leaves this
        with pytest.raises(UserError, match="damaged"):
            Claim.read(claim.folder)
        return
    again = Claim.read(claim.folder)
    again.write("c.jsonl", b"three")
    assert list(Claim.read(claim.folder).complete()) == ["c.jsonl"]


def test_what_is_not_a_folder_is_refused_and_what_is_empty_is_free(tmp_path):
    assert Claim.read(tmp_path / "none") is None
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / LOCK).touch()
    (tmp_path / "empty" / f".{RECORD}.12.tmp").write_text('{"comm')  # killed while the record was written
    assert Claim.read(tmp_path / "empty") is None
    assert Claim.create(tmp_path / "empty", "test", {}).files == {}
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for name in ("file", "link"):
        with pytest.raises(UserError, match="is in the way"):
            Claim.read(tmp_path / name)
    assert find_foreign(tmp_path, ()) == "empty"
