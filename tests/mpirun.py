"""Start a small MPI world from a test, and make sure that nothing of it is left behind."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What a world starts from. Importing zmpi sets this process's threads, as if it had both cores: not
# for four ranks.
ENVIRONMENT = dict(os.environ)


@dataclass(frozen=True)
class Ended:
    """How a world ended."""

    status: int  # mpirun's own; 124: it did not end in time and was ended
    output: str  # stdout and stderr of all ranks, as they came
    ended: float  # when the last of its processes was gone, as time.time()
    left: list  # process ids that outlived mpirun by more than a second (they have been killed)


def mpirun():
    """The launcher: MPIRUN if set, else the one next to this Python (its mpi4py's), or on PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    found = os.environ.get("MPIRUN") or (str(beside) if beside.exists() else shutil.which("mpirun"))
    if not found:
        raise FileNotFoundError(
            "no mpirun: neither MPIRUN, nor beside the Python in use, nor on PATH"
        )
    return found


def run_world(size, arguments, timeout, **environment):
    """Run `python ARGUMENTS` on `size` ranks to the end; kill it after `timeout` seconds."""
    mark = (
        f"world-{uuid.uuid4().hex}"  # in every rank's environment, so that a survivor is recognised
    )
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    polite = {
        "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"
    }  # MPICH's waiting ranks give up their core: here ranks outnumber cores
    settings = polite | ENVIRONMENT | {"PYTHONPATH": path, "ZMPI_TEST_WORLD": mark} | environment
    command = [mpirun(), "-n", str(size), sys.executable, *map(str, arguments)]
    with subprocess.Popen(
        command, env=settings, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as world:
        try:
            output, _ = world.communicate(timeout=timeout)
            status = world.returncode
        except subprocess.TimeoutExpired:
            for process in [world.pid, *_marked(mark)]:
                _kill(process)
            output, status = world.communicate()[0], 124
    ended = time.time()
    left = _marked(mark)
    while left and time.time() < ended + 1:
        time.sleep(0.02)
        left = _marked(mark)
    for process in left:
        _kill(process)
    return Ended(status, output, time.time() if left else ended, left)


def run_lines(size, folder, lines, command="train", timeout=110):
    """Run command lines of zmpi.COMMAND one after the other in one world of `size` ranks.

    Returns an entry for each, see refusals.py: the ranks' [status, line of error, other output].
    """
    file = folder / f"lines-{uuid.uuid4().hex}.json"
    file.write_text(json.dumps([[str(word) for word in line] for line in lines]))
    world = run_world(size, [ROOT / "tests/refusals.py", file, command], timeout)
    file.unlink()
    assert world.status == 0 and not world.left, world.output
    return json.loads(world.output.splitlines()[-1])


def assert_refused(size, folder, expected, command="train"):
    """Each line of `expected`, {words: texts}, ends in status 2 and one line with these texts."""
    found = run_lines(size, folder, expected, command)
    wrong = [
        f"{line}: {ranks}"
        for (line, texts), ranks in zip(expected.items(), found, strict=True)
        if ranks != [ranks[0]] * size
        or ranks[0][::2] != [2, ""]
        or not all(text in ranks[0][1] for text in texts)
    ]
    assert not wrong, "\n".join(wrong)


def _marked(mark):
    """The living processes whose environment holds the mark (Linux; elsewhere none is found)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in entry.read_bytes():  # that of a zombie is empty
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def _kill(process):
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, 9)
