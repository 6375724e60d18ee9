"""Folders of checkpoints: one job at a time; whenever it is killed, a complete one remains."""

import contextlib
import fcntl
import os
import subprocess
import sys

import pytest

from zmpi.saving import folder
from zmpi.saving.folder import Folder, newest
from zmpi.saving.manifest import Manifest


def add(target, step, then=None):
    """Save a checkpoint of that step; `then` may stop it before it counts."""
    temporary = target.begin(step)
    (temporary / "rank-0000.bin").write_bytes(b"x" * step)
    if then == "killed":
        return
    Manifest(temporary, {"step": step}).write()
    target.commit(temporary)


def names(path):
    return sorted(entry.name for entry in path.iterdir())


def test_the_last_few_are_kept(tmp_path):
    target = Folder(tmp_path / "dir", keep=2)
    for step in (1, 2, 3, 4):
        add(target, step)
        assert Manifest.read(newest(tmp_path / "dir"))["step"] == step
    assert names(tmp_path / "dir") == [
        ".flock",
        "latest",
        "step-00000003-save-3",
        "step-00000004-save-4",
    ]


def test_a_step_that_is_saved_again_does_not_replace_the_first_before_it_is_complete(tmp_path):
    target = Folder(tmp_path / "dir", keep=1)
    add(target, 5)
    add(target, 5, then="killed")
    assert Manifest.read(newest(tmp_path / "dir"))["step"] == 5
    target.close()
    target = Folder(tmp_path / "dir", keep=1)
    add(target, 3)
    assert names(tmp_path / "dir") == [".flock", "latest", "step-00000003-save-2"]


def test_one_job_at_a_time(tmp_path):
    first = Folder(tmp_path / "dir", keep=3)
    with pytest.raises(ValueError, match="dir: in use by another job"):
        Folder(tmp_path / "dir", keep=3)
    first.close()
    Folder(tmp_path / "dir", keep=3).close()


def test_a_lock_dies_with_its_process(tmp_path):
    """What is left of it on disk locks nobody out."""
    script = "from zmpi.saving.folder import Folder; import os;"
    script += f" f = Folder({str(tmp_path / 'dir')!r}, 3); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    assert (tmp_path / "dir" / ".flock").exists()
    Folder(tmp_path / "dir", keep=3).close()


def test_a_folder_that_cannot_be_opened_is_not_held(tmp_path):
    """Even while the error is, with all that was alive where it arose."""
    add(Folder(tmp_path / "dir", keep=3), 1)
    (tmp_path / "dir" / "latest").write_text("nonsense")
    kept = []
    for _ in range(2):
        with pytest.raises(ValueError, match="latest: damaged; delete this file") as error:
            Folder(tmp_path / "dir", keep=3)
        kept.append(error)


def test_a_file_in_the_folders_place_is_refused(tmp_path):
    (tmp_path / "dir").write_text("")
    with pytest.raises(ValueError, match="dir: not a folder"):
        Folder(tmp_path / "dir", keep=3)
    with pytest.raises(ValueError, match="sub: Not a directory"):
        Folder(tmp_path / "dir" / "sub", keep=3)


class Crash(BaseException):
    """The process ends here."""


STEPS_OF_A_COMMIT = [
    (Manifest, "write"),
    (folder.Path, "rename"),
    (folder, "sync_folder"),
    (folder, "write_text"),
    (folder.Path, "replace"),
    (folder.shutil, "rmtree"),
]


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("place", STEPS_OF_A_COMMIT, ids=lambda place: place[1])
@pytest.mark.parametrize("count", [1, 2])
def test_a_crash_at_any_moment_leaves_a_complete_checkpoint(
    tmp_path, monkeypatch, place, before, count
):
    """Before and after the first and second of every call that writes: a save counts, or not."""
    path = tmp_path / "dir"
    target = Folder(path, keep=1)
    add(target, 1)
    owner, name = place
    real, calls = getattr(owner, name), []

    def crashing(*arguments, **options):
        calls.append(name)
        if before and len(calls) == count:
            raise Crash
        result = real(*arguments, **options)
        if len(calls) == count:
            raise Crash
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, crashing)
        with contextlib.suppress(Crash):
            add(target, 2)
    assert Manifest.read(newest(path))["step"] in (1, 2), "readers find a complete one meanwhile"
    target.close()
    target = Folder(path, keep=1)
    step = Manifest.read(newest(path))["step"]
    assert step in (1, 2) and newest(path) == target.complete()[-1]
    assert not [
        name for name in names(path) if name.startswith((".saving", ".removing", ".latest"))
    ]
    add(target, step + 1)
    assert (
        names(path) == [".flock", "latest", newest(path).name]
        and Manifest.read(newest(path))["step"] == step + 1
    )


def test_a_checkpoint_is_no_folder_of_them(tmp_path):
    """Saves would lie in it, where no resume looks."""
    add(Folder(tmp_path / "dir", keep=3), 1)
    with pytest.raises(
        ValueError, match="save-1: expected a folder of checkpoints, got one checkpoint"
    ):
        Folder(newest(tmp_path / "dir"), keep=3)


def test_nothing_is_left_in_a_folder_without_a_checkpoint_to_go_on_from(tmp_path):
    with pytest.raises(ValueError, match="no complete checkpoint in it"):
        Folder(tmp_path, keep=3, make=False)
    assert names(tmp_path) == []


def test_a_checkpoint_that_cannot_be_marked_does_not_count_later(tmp_path, monkeypatch):
    def full(path, text):
        raise ValueError("No space left on device")

    target = Folder(tmp_path / "dir", keep=3)
    add(target, 1)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="No space left"):
        patch.setattr(folder, "write_text", full)
        add(target, 2)
    target.close()
    target = Folder(tmp_path / "dir", keep=3)
    assert [path.name for path in target.complete()] == ["step-00000001-save-1"]
    assert Manifest.read(newest(tmp_path / "dir"))["step"] == 1


def test_jobs_that_are_all_killed_before_they_remove_old_ones_leave_one_too_many_not_one_each(
    tmp_path, monkeypatch
):
    def marked_then_killed(target, final):
        real_mark(target, final)
        raise Crash

    real_mark = Folder._mark
    monkeypatch.setattr(Folder, "_mark", marked_then_killed)
    for step in range(1, 7):
        target = Folder(tmp_path / "dir", keep=2)
        with pytest.raises(Crash):
            add(target, step)
        target.close()
        assert len(target.complete()) == min(step, 3)
        assert Manifest.read(newest(tmp_path / "dir"))["step"] == step
    monkeypatch.undo()
    add(Folder(tmp_path / "dir", keep=2), 7)
    assert names(tmp_path / "dir") == [
        ".flock",
        "latest",
        "step-00000006-save-6",
        "step-00000007-save-7",
    ]


def test_a_damaged_mark_is_named(tmp_path):
    target = Folder(tmp_path / "dir", keep=3)
    add(target, 1)
    add(target, 3)
    mark = tmp_path / "dir" / "latest"
    good = mark.read_bytes()
    for bit in range(len(good) * 8):
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        mark.write_bytes(damaged)
        with pytest.raises(ValueError, match="latest"):
            newest(tmp_path / "dir")
    for length in range(len(good)):
        mark.write_bytes(good[:length])
        with pytest.raises(ValueError, match="latest"):
            newest(tmp_path / "dir")


def test_nothing_to_go_on_from_is_told(tmp_path):
    with pytest.raises(ValueError, match="none: no such folder"):
        newest(tmp_path / "none")
    with pytest.raises(ValueError, match="no complete checkpoint in it"):
        newest(tmp_path)


def test_reading_takes_no_lock(tmp_path):
    """A checkpoint can be exported while its job goes on."""
    target = Folder(tmp_path / "dir", keep=3)
    add(target, 1)
    assert Manifest.read(newest(tmp_path / "dir"))["step"] == 1
    with open(tmp_path / "dir" / ".flock", "ab") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert os.path.exists(target.path)
