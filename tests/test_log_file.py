"""A user's log and trace: through links, pipes and rotation, and on a full disk."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from mpirun import ROOT
from test_train_command import MLP, alone, log_of, train, words

TRAIN = [sys.executable, "-m", "zmpi.train", *MLP]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def shell(command, *flags):
    """`command` for sh, in which "$@" is a run of one rank with the flags."""
    arguments = ["sh", "-c", command, "sh", *TRAIN, *map(str, flags)]
    settings = {"capture_output": True, "text": True, "timeout": 100, "env": ENVIRONMENT}
    return subprocess.run(arguments, check=False, **settings)


def names(folder):
    return sorted(path.name for path in folder.rglob("*"))


@pytest.fixture
def at_work(tmp_path):
    """A long run that has logged its first steps, and saves when told to end; then its process."""
    flags = ["--steps", 100_000, "--log", tmp_path / "log", "--checkpoint", tmp_path / "dir"]
    with subprocess.Popen([*TRAIN, *map(str, flags)], env=ENVIRONMENT, stderr=subprocess.PIPE) as p:
        try:
            until(lambda: lines_of(tmp_path / "log") > 3)
            yield p
        finally:
            p.kill()


def until(true):
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def lines_of(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_log_at_work_is_refused_to_others_and_may_be_rotated(at_work, tmp_path):
    """Rotation by copy and truncate left zeros in the log, and --resume then refused it."""
    log = tmp_path / "log"
    for flags in (["--log", log], ["--log", tmp_path / "other", "--trace", log]):
        other = alone(*MLP, "--steps", 1, *flags)
        assert other.returncode == 2 and not other.stdout
        assert (
            other.stderr.endswith(f"{log} is in use by another job\n") or "--trace" in other.stderr
        )
    assert not (tmp_path / "other").exists()
    shutil.copy(log, tmp_path / "log.1")
    os.truncate(log, 0)
    until(lambda: lines_of(log) > 3)
    at_work.send_signal(signal.SIGTERM)
    assert at_work.wait(60) == 143
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert entries[-1]["end"] == "stopped by SIGTERM" and "zmpi" not in entries[0]
    steps = [entry["step"] for entry in entries[:-1]]
    assert steps == list(range(steps[0], steps[-1] + 1))
    first = log_of(tmp_path / "log.1")[1]
    assert [entry["step"] for entry in first] == list(range(1, len(first) + 1))
    more = ["--device", "cpu", "--checkpoint", tmp_path / "dir", "--resume"]
    resumed = alone(*more, "--steps", steps[-1] + 1, "--log", log)
    assert resumed.returncode == 0, resumed.stderr
    after = [json.loads(line) for line in log.read_text().splitlines()]
    assert after[: len(entries)] == entries
    assert [entry.get("step") for entry in after[len(entries) :]] == [steps[-1] + 1] * 3


def test_a_dangling_link_stays_a_link_and_a_refusal_changes_nothing(tmp_path):
    """On three ranks: rank 0 alone opens the files, all give them back."""
    for name in ("log", "trace.json"):
        (tmp_path / name).symlink_to(f"target-{name}")
    before = names(tmp_path)
    flags = [*MLP, "--steps", 1, "--log", tmp_path / "log", "--trace", tmp_path / "trace.json"]
    refused = train(3, *flags, "--comm", f"{__file__}:Nothing")  # found when the files are open
    assert refused.status == 2 and len(refused.output.splitlines()) == 1, refused.output
    assert names(tmp_path) == before
    ended = alone(*flags)
    assert ended.returncode == 0, ended.stderr
    assert all((tmp_path / name).is_symlink() for name in ("log", "trace.json"))
    assert len(log_of(tmp_path / "target-log")[1]) == 1
    assert json.loads((tmp_path / "target-trace.json").read_text())["traceEvents"]


def test_a_log_in_an_appended_stdout_and_a_validation_loss_that_is_not_finite(tmp_path):
    """Two in one run. The file's content stays, and all is saved; the summary used to fail."""
    (tmp_path / "out").write_text("precious\n")
    diverging = words("--steps 1 --optimizer sgd --lr 1e30 --warmup 0 --clip 0 --log /dev/stdout")
    ended = shell(f'exec "$@" >> {tmp_path}/out', *diverging, "--checkpoint", tmp_path / "dir")
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr
    lines = (tmp_path / "out").read_text().splitlines()
    logged = [json.loads(line) for line in lines if line.startswith("{")]
    assert lines[0] == "precious" and [entry.get("step") for entry in logged] == [None, 1, 1, 1]
    (summary,) = [line for line in lines if line.startswith("loss ")]
    assert summary.endswith("; validation not finite (nats per token)")
    assert logged[2]["val_loss"] is None
    assert "zmpi.train: warning: step 1: the validation loss is " in ended.stderr
    assert "step-00000001-save-1" in names(tmp_path / "dir")


def test_a_run_outlives_its_streams(tmp_path):
    """Closed, its reader gone, full: training ends and saves; no file becomes number 1 or 2."""
    cases = {
        "closed": 'exec "$@" >&- 2>&-',
        "left": '"$@" 2>&1 | head -1',
        "full": 'exec "$@" > /dev/full',
    }
    for name, command in cases.items():
        log, folder = tmp_path / f"{name}.log", tmp_path / name
        ended = shell(command, "--steps", 3, "--log", log, "--checkpoint", folder)
        assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr
        assert len(log_of(log)[1]) == 3 and "step-00000003-save-1" in names(folder), name
        warned = ended.stderr.count("zmpi.train: warning: stdout: No space left on device")
        assert warned == (name == "full")
        assert len(ended.stdout.splitlines()) == (name == "left")


# ---- a disk that fills ---------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 kB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder]
    try:
        ended = subprocess.run(mount, check=False, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if ended.returncode:
        pytest.skip(f"a file system cannot be mounted here: {ended.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


LIMIT = 80_000  # bytes of a file: the model's shards, the largest of the others, have 4,680 x 12


def last_word(output):
    (line,) = [line for line in output.splitlines() if "error" in line]
    assert "Traceback" not in output
    return line


def check_saved_up_to_the_logs_end(log, folder, output):
    """All lines of the log are whole; the checkpoint is of the next step, or of the one after."""
    _, steps, _ = log_of(log)
    (saved,) = folder.glob("step-*")
    assert log.read_bytes().endswith(b"\n")
    assert int(saved.name.split("-")[1]) - len(steps) in (1, 2), output


def test_a_disk_that_fills_under_the_log_ends_a_run_after_its_checkpoint(small_disk, tmp_path):
    log, folder = small_disk / "log", tmp_path / "dir"
    ended = train(3, *MLP, "--steps", 1000, "--log", log, "--checkpoint", folder)
    expected = f"zmpi.train: error: --log: {log}: No space left on device"
    assert ended.status == 2 and last_word(ended.output) == expected, ended.output
    check_saved_up_to_the_logs_end(log, folder, ended.output)


def test_a_log_that_grows_too_large_ends_a_run_after_its_checkpoint(tmp_path):
    """The same without a mount: by a limit on file size, set after MPI has made its own files."""
    log, folder = tmp_path / "log", tmp_path / "dir"
    limited = f"""
import resource, sys
from zmpi import World, train
World(device="cpu")
resource.setrlimit(resource.RLIMIT_FSIZE, ({LIMIT}, {LIMIT}))
train.main(sys.argv[1:])
"""
    flags = [*MLP, "--steps", 1000, "--log", log, "--checkpoint", folder]
    ended = subprocess.run(
        [sys.executable, "-c", limited, *map(str, flags)],
        env=ENVIRONMENT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    expected = f": error: --log: {log}: File too large"  # the program is python -c
    assert ended.returncode == 2 and last_word(ended.stderr).endswith(expected), ended.stderr
    check_saved_up_to_the_logs_end(log, folder, ended.stderr)


def test_where_the_checkpoint_fails_with_the_log_one_line_says_both(small_disk):
    log, folder = small_disk / "log", small_disk / "dir"
    ended = alone(*MLP, "--steps", 1000, "--log", log, "--checkpoint", folder)
    line = last_word(ended.stderr)
    assert ended.returncode == 2 and line.count("No space left on device") == 2, ended.stderr
    assert line.startswith(f"zmpi.train: error: --log: {log}: ") and str(folder) in line
