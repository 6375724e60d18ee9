"""What pytest collects where.

Tests under world/ run on every rank of an MPI world. Plain `pytest` leaves them to test_worlds.py,
which starts the worlds; under mpirun only they run (`mpirun -n 3 python -m pytest tests/world`),
since a rank cannot start a world.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import mpirun  # which takes down the environment before any test imports zmpi
import pytest

UNDER_A_LAUNCHER = any(
    name in os.environ for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK")
)

collect_ignore_glob = (
    ["test_*.py", "faults/*"] if UNDER_A_LAUNCHER else ["world", "world/*", "faults/*"]
)


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "sizes(n, ...): the numbers of ranks at which this test runs"
    )
    config.addinivalue_line(
        "markers", "limit(seconds): after which a test in a world is ended (default: 120)"
    )


@pytest.fixture(scope="session", autouse=True)
def failed(request, tmp_path_factory):
    """A function of a size: {file: what its world printed} of the files of world/ that failed.

    Their worlds run beside the other tests, which often leave a core idle, and are started by a
    process of their own, which no test can change.
    """
    chosen = {}
    for item in request.session.items:
        if item.path.name == "test_worlds.py":
            file, size = item.callspec.params["file"], item.callspec.params["size"]
            chosen.setdefault(size, []).append(str(file))
    if not chosen:
        yield
        return
    folder = tmp_path_factory.mktemp("worlds")
    script = [
        sys.executable,
        mpirun.ROOT / "tests/worlds.py",
        folder,
        json.dumps([*chosen.items()]),
    ]
    settings = {"cwd": mpirun.ROOT, "env": mpirun.ENVIRONMENT, "start_new_session": True}
    with subprocess.Popen(script, **settings) as process:
        yield lambda size: outcome(folder / f"{size}.json", process)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # if not all were waited for


def outcome(file, process):
    """What the process has written into the file, once it is there."""
    while not file.exists():
        assert process.poll() is None or file.exists(), "tests/worlds.py ended by an error"
        time.sleep(0.1)
    return json.loads(file.read_text())
