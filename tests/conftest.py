"""What pytest collects where.

Tests under world/ run on every rank of an MPI world. Plain `pytest` leaves them to test_worlds.py,
which starts the worlds; under mpirun only they run (`mpirun -n 3 python -m pytest tests/world`),
since a rank cannot start a world.
"""

import os

import mpirun  # noqa: F401  (takes down the environment before any test imports zmpi)

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
