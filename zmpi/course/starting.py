"""Starts a world of MPI processes for the grader, and makes sure that nothing of it is left."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import uuid
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


@contextmanager
def started_world(size, arguments, cwd):
    """`python ARGUMENTS` on `size` ranks, as a Popen; what they print is discarded, and none
    outlives the block.
    """
    mark = f"zmpi-grade-{uuid.uuid4().hex}"
    with subprocess.Popen(
        [find_mpirun(), "-n", str(size), sys.executable, *arguments],
        env=environment(mark),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            end(process, mark)


def find_mpirun():
    """MPIRUN if set, else the mpirun beside this Python (of the same MPI as its mpi4py), else that
    on PATH.
    """
    beside = Path(sys.executable).parent / "mpirun"
    found = os.environ.get("MPIRUN") or (str(beside) if beside.exists() else shutil.which("mpirun"))
    if not found:
        raise ValueError(
            "mpirun: not found (MPIRUN, next to this Python, PATH); pip install mpich brings one"
        )
    return found


def environment(mark):
    """What a world starts from: one thread a rank, ranks that may outnumber cores, also as root in
    a container.
    """
    polite = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    crowded = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMP_NUM_THREADS": "1",
    }
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    own = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "ZMPI_GRADE_WORLD": mark}
    return polite | crowded | dict(os.environ) | own


def end(world, mark):
    """Make sure that no process of a world is left."""
    if world.poll() is None:
        for process in _marked(mark):
            _signal(process, signal.SIGKILL)
        _signal(world.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            world.wait(timeout=3)
        _signal(world.pid, signal.SIGKILL)
    world.wait()
    for process in _marked(mark):
        _signal(process, signal.SIGKILL)


def _marked(mark):
    """The living processes whose environment holds the mark (Linux; elsewhere none is found)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
    return found


def _signal(process, number):
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)
