"""The files that a command writes: links, other people's files, and a full disk."""

import errno
import fcntl
import os
import resource

import pytest

from zmpi.cli.run_log import _kept, open_log
from zmpi.cost.page import START, open_page
from zmpi.cost.trace import as_chrome, as_text, open_trace
from zmpi.process.output import Output

HEADER = b'{"zmpi": "0", "unit_sizes": {}}\n'


def output(path):
    return open_log(path)


def written(path, data=HEADER):
    mine = output(path)
    mine.cut(0)
    mine.write(data)
    mine.close()


def listing(folder):
    return {
        path.name: (path.is_symlink(), path.read_bytes() if path.is_file() else None)
        for path in folder.iterdir()
    }


@pytest.mark.parametrize("target", [None, b"", HEADER], ids=["missing", "empty", "a log"])
def test_a_link_stays_a_link_and_its_target_is_written(tmp_path, target):
    if target is not None:
        (tmp_path / "target").write_bytes(target)
    (tmp_path / "link").symlink_to("target")
    written(tmp_path / "link")
    assert listing(tmp_path) == {"link": (True, HEADER), "target": (False, HEADER)}


def test_what_is_opened_and_not_written_leaves_everything_as_it_was(tmp_path):
    (tmp_path / "dangling").symlink_to("target")
    (tmp_path / "log").write_bytes(HEADER)
    (tmp_path / "empty").touch()
    before = listing(tmp_path)
    for name in ("dangling", "log", "empty", "new"):
        output(tmp_path / name).close()
    assert listing(tmp_path) == before


@pytest.mark.parametrize(
    "text",
    [
        b"mine\n",
        b"\0" * 99,
        b'{"step": 1, "loss": 2}\n',
        b'{"zmpi": "0", "stages": []}',
        b"[" * 9999,
    ],
    ids=["text", "zeros", "another tool's log", "a bench's JSON", "nested"],
)  # fmt: skip
def test_a_file_of_another_kind_is_refused_and_unchanged(tmp_path, text):
    (tmp_path / "file").write_bytes(text)
    with pytest.raises(ValueError, match=r"--log: .*/file exists and is not a log of zmpi\.train"):
        output(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == text


def test_one_job_at_a_time_has_the_file(tmp_path):
    first = output(tmp_path / "log")
    for _ in range(2):  # the first refusal must not take the new, still empty file away
        with pytest.raises(ValueError, match="in use by another job"):
            output(tmp_path / "log")
    first.write(HEADER)
    first.close()
    assert (tmp_path / "log").read_bytes() == HEADER
    output(tmp_path / "log").close()


def test_a_file_that_a_refused_job_removes_is_made_again(tmp_path, monkeypatch):
    """Between this job's open and its lock: without a second look the log would lose its name."""
    path, lock = tmp_path / "log", fcntl.flock

    def removing(*arguments):
        monkeypatch.setattr(fcntl, "flock", lock)
        path.unlink()
        lock(*arguments)

    monkeypatch.setattr(fcntl, "flock", removing)
    written(path)
    assert path.read_bytes() == HEADER


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_not_another_job(tmp_path, monkeypatch, number):
    def none(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", none)
    mine = output(tmp_path / "log")
    assert mine.unlocked and mine.regular
    mine.close()


def test_a_file_that_is_rotated_by_copy_and_truncate_begins_anew(tmp_path):
    mine = output(tmp_path / "log")
    mine.write(HEADER)
    os.truncate(tmp_path / "log", 0)
    mine.write(b"next\n")
    mine.close()
    assert (tmp_path / "log").read_bytes() == b"next\n"


def test_a_file_that_may_only_be_appended_to_is_continued(tmp_path, monkeypatch):
    """As after chattr +a: it may not be truncated, not even to its own length."""

    def refused(*arguments):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    written(tmp_path / "log")
    monkeypatch.setattr(os, "ftruncate", refused)
    mine = output(tmp_path / "log")
    mine.cut(len(HEADER))
    mine.write(b"next\n")
    mine.close()
    assert (tmp_path / "log").read_bytes() == HEADER + b"next\n"


def test_a_line_that_does_not_fit_is_not_written_in_part(tmp_path):
    mine = output(tmp_path / "log")
    mine.write(HEADER)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(HEADER) + 10, hard))
        with pytest.raises(ValueError, match=r"--log: .*/log: File too large"):
            mine.write(b"x" * 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    mine.close()
    assert (tmp_path / "log").read_bytes() == HEADER


def test_a_log_is_continued_after_the_steps_that_the_checkpoint_has(tmp_path):
    """Whatever a user wrote between them; not if it is the log of another model."""
    first = {"unit_sizes": {"outer": 3}}
    steps = [f'{{"step": {n}, "val_loss": null}}\n'.encode() for n in (1, 2, 3)]
    lines = [b'{"zmpi": "0", "unit_sizes": {"outer": 3}}\n', steps[0], b"a note\n", *steps[1:]]
    for log in (lines, lines[1:]):  # the second was rotated
        (tmp_path / "log").write_bytes(b"".join(log) + b'{"step": 3, "va')
        mine = output(tmp_path / "log")
        for step, kept in ((2, log[:-1]), (3, log), (0, log[:1] if b"zmpi" in log[0] else [])):
            assert _kept(mine, first, step) == len(b"".join(kept))
        mine.close()
    (tmp_path / "log").write_bytes(b"".join(lines))
    mine = output(tmp_path / "log")
    for other in ({"unit_sizes": {"outer": 4}}, first | {"data": {"source": "a", "tokens": 9}}):
        with pytest.raises(ValueError, match="is the log of another model or text"):
            _kept(mine, other, 2)
    assert _kept(mine, first | {"data": {"source": "elsewhere", "python": "3"}}, 9) == len(
        b"".join(lines)
    )
    mine.close()
    assert (tmp_path / "log").read_bytes() == b"".join(lines)


def test_nothing_is_taken_back_of_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    written(tmp_path / "pipe")
    assert os.read(reader, 999) == HEADER
    os.close(reader)


def test_a_trace_replaces_a_trace_and_nothing_else(tmp_path):
    event = {"step": 1, "verb": "step", "name": "1", "start": 0.0, "end": 1.0}
    texts = {".txt": as_text([[event]]), ".json": repr(as_chrome([[event]])).replace("'", '"')}
    for suffix, text in texts.items():
        path = tmp_path / f"trace{suffix}"
        for _ in range(2):
            trace = open_trace(path)
            trace.replace(text)
            trace.close()
        assert path.read_text() == text
        for other in (texts[".json" if suffix == ".txt" else ".txt"], "{}", "rank 0\n"):
            path.write_text(other)
            with pytest.raises(ValueError, match=r"is not a trace of zmpi\.train"):
                open_trace(path)
            assert path.read_text() == other


def test_a_report_spares_a_folder_of_pictures_and_a_page_of_another_kind(tmp_path):
    from contextlib import ExitStack

    folder = tmp_path / "report"
    for name, content in (("holiday.png", b"sea"), ("index.html", b"<html>mine")):
        folder.mkdir()
        (folder / name).write_bytes(content)
        with ExitStack() as held, pytest.raises(ValueError, match="--report: "):
            open_page(folder, held)
        assert listing(folder) == {name: (False, content)}
        (folder / name).unlink()
        folder.rmdir()
    with ExitStack() as held:
        open_page(folder, held)
    assert not folder.exists()
    for _ in range(2):
        with ExitStack() as held:
            open_page(folder, held).replace(f"{START} and the rest")
    assert (folder / "index.html").read_text() == f"{START} and the rest"


def test_the_output_of_a_stream_is_the_stream_itself(tmp_path):
    """This process's stdout redirected to a file, as /dev/stdout: both write at one position."""
    path, saved = tmp_path / "out", os.dup(1)
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.close(file)
        os.write(1, b"before\n")
        mine = Output("--log", path, lambda head: False, "a log")
        mine.cut(0)
        mine.write(b"mine\n")
        os.write(1, b"after\n")
        mine.close()
    finally:
        os.dup2(saved, 1)
        os.close(saved)
    assert path.read_bytes() == b"before\nmine\nafter\n"
