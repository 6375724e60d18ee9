"""Faults of file systems and neighbours that a folder survives: removal, sync, locks, strangers."""

import errno
import os
import subprocess
import threading

import pytest
from test_folder import names

from zmpi.process import files
from zmpi.saving import folder, found
from zmpi.saving.folder import Folder
from zmpi.saving.found import newest, read_checkpoint, with_newest
from zmpi.saving.manifest import JSON, Manifest


def run(path, *steps, keep=2):
    """A job that saves these steps as the command does, with manifests; returns its warnings."""
    target = Folder(path, keep)
    for step in steps:
        save(target, step)
    target.close()
    return target.warnings


def save(target, step, **entries):
    temporary = target.begin(step)
    (temporary / "rank-0000.bin").write_bytes(b"x" * step)
    Manifest(temporary, {**target.place_of(temporary), "step": step, **entries}).write()
    return target.commit(temporary)


def refusing(monkeypatch, owner, name, number, where=""):
    """owner.name fails with the error number, for paths or descriptors in which `where` occurs."""
    real = getattr(owner, name)

    def call(*arguments, **options):
        path = arguments[0]
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        if hasattr(path, "fileno"):
            path = path.name
        if where in str(path):
            raise OSError(number, os.strerror(number), str(path))
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, call)


# ---- what cannot be removed ----------------------------------------------------------------------

FAULTS = {
    "an immutable file": [
        ("unlink", errno.EPERM, "rank-0000"),
        ("remove", errno.EPERM, "rank-0000"),
    ],
    "rmdir on NFS": [("rmdir", errno.ENOTEMPTY, "")],
    "another user's": [("rename", errno.EPERM, "step-00000001"), ("unlink", errno.EACCES, JSON)],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_old_checkpoint_that_cannot_be_removed_ends_no_run_and_is_tried_again(
    tmp_path, monkeypatch, fault
):
    path = tmp_path / "dir"
    assert run(path, 1, 2) == []
    with monkeypatch.context() as patch:
        for name, number, where in FAULTS[fault]:
            refusing(patch, os, name, number, where)
        for first, last in ((3, 6), (7, 8)):  # a second job meets what the first one left
            warnings = run(path, *range(first, last + 1))
            assert newest(path).name == f"step-0000000{last}-save-{last}"
            told = [line for line in warnings if "step-00000001-save-1: cannot be removed" in line]
            assert len(told) == 1, warnings
    assert run(path, 9) == []
    assert names(path) == [".flock", "latest", "step-00000008-save-8", "step-00000009-save-9"]


def test_a_link_in_an_old_checkpoints_place_is_unlinked_and_its_target_stays(tmp_path):
    path = tmp_path / "dir"
    run(path, 1, 2)
    (path / "step-00000001-save-1").rename(tmp_path / "away")
    (path / "step-00000001-save-1").symlink_to(tmp_path / "away")
    (path / ".removing-step-00000000-save-0").symlink_to(tmp_path / "away")
    assert run(path, 3, 4, 5, 6) == []
    assert names(path) == [".flock", "latest", "step-00000005-save-5", "step-00000006-save-6"]
    assert names(tmp_path / "away") == ["manifest.json", "manifest.sha256", "rank-0000.bin"]


def test_a_folder_that_cannot_be_renamed_is_removed_where_it_is_its_manifest_first(
    tmp_path, monkeypatch
):
    """overlayfs's lower layer. Cut short after its manifest, it does not count and is removed."""
    path = tmp_path / "dir"
    run(path, 1, 2, 3, keep=3)
    refusing(monkeypatch, os, "rename", errno.EXDEV, "dir/step-0000000")
    with monkeypatch.context() as patch:
        patch.setattr(folder.shutil, "rmtree", lambda *_, **__: None)
        run(path, 4, keep=2)
    assert names(path / "step-00000001-save-1") == ["rank-0000.bin"]
    assert [one.name for one in Folder(path, 2).complete()] == [
        "step-00000003-save-3",
        "step-00000004-save-4",
    ]
    assert run(path, 5) == []
    assert names(path) == [".flock", "latest", "step-00000004-save-4", "step-00000005-save-5"]


def test_on_overlayfs_itself_the_lower_layers_checkpoints_are_removed(tmp_path):
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    run(tmp_path / "lower" / "dir", 1, 2, 3, keep=3)
    layers = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    command = ["mount", "-t", "overlay", "overlay", "-o", layers, tmp_path / "merged"]
    try:
        mounted = subprocess.run(command, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("mounting overlayfs is not permitted here")
    try:
        path = tmp_path / "merged" / "dir"
        with pytest.raises(OSError, match="cross-device"):
            (path / "step-00000001-save-1").rename(path / "other")
        assert run(path, 4, 5) == []
        assert names(path) == [".flock", "latest", "step-00000004-save-4", "step-00000005-save-5"]
    finally:
        subprocess.run(["umount", "--lazy", tmp_path / "merged"], check=True)


# ---- what the file system lacks ------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_folders_is_told_once_and_used(
    tmp_path, monkeypatch, number
):
    path = tmp_path / "dir"
    refusing(monkeypatch, files.os, "fsync", number, where="dir")
    real = files.os.fsync
    monkeypatch.setattr(
        files.os, "fsync", lambda fd: real(fd) if os.path.isdir(f"/proc/self/fd/{fd}") else None
    )
    warnings = run(path, 1, 2, 3)
    assert len(warnings) == 1 and "cannot sync folders" in warnings[0], warnings
    assert newest(path).name == "step-00000003-save-3"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_any_other_error_of_a_folders_fsync_is_one(tmp_path, monkeypatch, number):
    refusing(monkeypatch, files.os, "fsync", number, where="dir")
    with pytest.raises(ValueError, match=os.strerror(number)):
        Folder(tmp_path / "dir", keep=2)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_told_and_used(tmp_path, monkeypatch, number):
    refusing(monkeypatch, folder.fcntl, "flock", number)
    warnings = run(tmp_path / "dir", 1, 2)
    assert len(warnings) == 1 and "no locks" in warnings[0] and "other job" in warnings[0], warnings


def test_only_a_held_lock_means_another_job(tmp_path, monkeypatch):
    refusing(monkeypatch, folder.fcntl, "flock", errno.EIO)
    with pytest.raises(ValueError, match="dir: flock: Input/output error"):
        Folder(tmp_path / "dir", keep=2)


def test_a_pipe_in_the_locks_place_waits_for_nobody(tmp_path):
    (tmp_path / "dir").mkdir()
    os.mkfifo(tmp_path / "dir" / ".flock")
    with pytest.raises(ValueError, match="dir: No such device"):
        Folder(tmp_path / "dir", keep=2)


# ---- whose checkpoint it is ----------------------------------------------------------------------


def copied(source, target):
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


@pytest.mark.parametrize("saves", [(99, False), (2, False), (99, True)], ids=str)
def test_another_runs_checkpoint_never_takes_over(tmp_path, saves):
    """With a higher save number or an equal one; and an older zmpi's, whose manifest has no id."""
    save_number, old = saves
    mine, other = tmp_path / "mine", tmp_path / "other"
    run(mine, 1, 2)
    target = Folder(other, 1)
    save(target, 500, **({"run_id": "", "save": save_number} if not old else {}))
    foreign = copied(newest(other), mine / f"step-00000500-save-{save_number}")
    entries = Manifest.read(foreign).entries | {"save": save_number}
    if old:
        entries = {name: entries[name] for name in ("step", "byteorder")} | {"seed": 5}
    Manifest(foreign, entries).write()
    warnings = run(mine, 3)
    assert [line for line in warnings if "skipped: it belongs to another run" in line]
    assert foreign.exists() and Manifest.read(newest(mine))["step"] == 3
    assert {Manifest.read(one)["run_id"] for one in Folder(mine, 2).complete()} == {
        Manifest.read(newest(mine))["run_id"]
    }


def test_a_renamed_checkpoint_is_passed_over_and_refused_where_it_is_asked_for(tmp_path):
    path = tmp_path / "dir"
    run(path, 1, 13)
    renamed = copied(newest(path), path / "step-00000500-save-99")
    warnings = run(path, 14)
    assert "step-00000500-save-99: skipped: renamed: its manifest says step 13" in warnings[0]
    assert newest(path).name == "step-00000014-save-100"
    with pytest.raises(ValueError, match="save-99: renamed: its manifest says step 13, save 2"):
        read_checkpoint(renamed)


def test_without_a_mark_checkpoints_of_two_runs_are_refused(tmp_path):
    mine, other = tmp_path / "mine", tmp_path / "other"
    run(mine, 1)
    run(other, 1, 2)
    copied(newest(other), mine / "step-00000002-save-2")
    (mine / "latest").unlink()
    with pytest.raises(ValueError, match="save-1 and step-00000002-save-2 belong to different"):
        Folder(mine, 2)
    assert not (mine / "latest").exists()


def test_of_two_with_the_same_save_number_the_content_decides(tmp_path, monkeypatch):
    """The marked one; without a mark, the higher step: whatever order the file system has."""
    path = tmp_path / "dir"
    run(path, 1, 4)
    twin = copied(newest(path), path / "step-00000006-save-2")
    Manifest(twin, Manifest.read(twin).entries | {"step": 6}).write()
    real = folder.Path.iterdir
    for turned in (False, True):
        monkeypatch.setattr(
            folder.Path, "iterdir", lambda where, turned=turned: sorted(real(where), reverse=turned)
        )
        assert Folder(path, 3).complete()[-1].name == "step-00000004-save-2"
    (path / "latest").unlink()
    Folder(path, 3).close()
    assert newest(path) == twin


def test_checkpoints_that_have_no_id_go_on_as_one_run(tmp_path):
    """Of a zmpi before the id: the next saves carry the id that follows from them."""
    path = tmp_path / "dir"
    target = Folder(path, 3)
    for step in (1, 2):
        temporary = target.begin(step)
        Manifest(temporary, {"step": step, "seed": 3}).write()
        target.commit(temporary)
    target.close()
    assert run(path, 3, 4, keep=3) == []
    assert names(path)[2:] == [f"step-0000000{n}-save-{n}" for n in (2, 3, 4)]
    ids = [Manifest.read(one).entries.get("run_id") for one in Folder(path, 3).complete()]
    assert ids[0] is None and ids[1] == ids[2] and ids[1]


# ---- readers beside a job at work ----------------------------------------------------------------


def test_a_reader_that_meets_a_rotation_takes_the_newest_that_is_complete(tmp_path):
    path = tmp_path / "dir"
    target, read = Folder(path, keep=1), []
    save(target, 1)

    def use(checkpoint):
        if not read:
            save(target, 2)  # removes what the reader holds
        read.append(checkpoint.name)
        return Manifest.read(checkpoint)["step"]

    assert with_newest(path, use) == 2
    assert read == ["step-00000001-save-1", "step-00000002-save-2"]
    with pytest.raises(ValueError, match="damaged"):
        with_newest(path, lambda one: (one / JSON).write_text("{}") and Manifest.read(one))


def test_a_mark_that_moves_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    target, real, reads = Folder(tmp_path / "dir", keep=1), found.read_file, []
    save(target, 1)

    def slow(path, most):
        content = real(path, most)
        reads.append(content)
        if len(reads) == 1:
            save(target, 2)
        return content

    monkeypatch.setattr(found, "read_file", slow)
    assert newest(tmp_path / "dir").name == "step-00000002-save-2"
    (tmp_path / "dir" / "step-00000002-save-2").rename(tmp_path / "away")
    with pytest.raises(ValueError, match="latest: points to a missing checkpoint, step-00000002"):
        newest(tmp_path / "dir")


def test_readers_find_a_complete_checkpoint_at_every_moment(tmp_path):
    path = tmp_path / "dir"
    target, steps, done = Folder(path, keep=1), [], threading.Event()
    save(target, 1)

    def write():
        for step in range(2, 25):
            save(target, step)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        steps.append(with_newest(path, lambda one: Manifest.read(one)["step"]))
    writer.join()
    assert steps == sorted(steps) and len(set(steps)) > 1


# ---- a damaged checkpoint ------------------------------------------------------------------------


def test_what_a_damaged_checkpoints_error_says_to_delete_leads_to_the_one_before_it(tmp_path):
    path = tmp_path / "dir"
    run(path, 1, 2)
    (newest(path) / JSON).write_text("{}")
    with pytest.raises(ValueError, match="to resume from step-00000001-save-1, delete ") as error:
        with_newest(path, read_checkpoint)
    for victim in str(error.value).partition(", delete ")[2].split(" and "):
        subprocess.run(["rm", "-r", victim], check=True)
    Folder(path, 2).close()
    assert with_newest(path, read_checkpoint)["step"] == 1
    (newest(path) / JSON).write_text("{}")
    with pytest.raises(ValueError, match=r"dir holds no other complete checkpoint\)"):
        with_newest(path, read_checkpoint)


def test_a_damaged_mark_says_to_delete_it(tmp_path):
    path = tmp_path / "dir"
    run(path, 1, 2)
    (path / "latest").write_text("nonsense")
    with pytest.raises(ValueError, match="latest: damaged; delete this file to resume"):
        Folder(path, 2)
    (path / "latest").unlink()
    Folder(path, 2).close()
    assert newest(path).name == "step-00000002-save-2"
