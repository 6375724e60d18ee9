"""P4 by planted faults: all ranks end within 10 s of any fault, and one line gives the rank.

Here runs a part of the table, each fault at each place, with ranks and sizes taking turns; the
whole is `python tests/faults/table.py`.
"""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
from faults.table import AT_ONCE, DRIVER, FAULTS, PLACES, Run
from mpirun import run_world

TURNS = itertools.cycle([(0, 3), (2, 4), (1, 3), (0, 4)])
RUNS = [Run(fault, place, *next(TURNS)) for fault, place in itertools.product(FAULTS, PLACES)]
RUNS += [Run("together", "post", 1, 3), Run("caught", "post", 2, 4)]
RUNS += [
    Run("SIGTERM", "MPI", 1, 3),
    Run("exception", "MPI", 0, 3),
]  # while the main thread stands inside MPI


@pytest.fixture(scope="module")
def started():
    """The worlds of this file, some at a time: run -> the future of how it ended."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        healthy = pool.submit(run_world, 3, [DRIVER, "healthy", "-", 0, 7], timeout=60)
        yield {"healthy": healthy} | {run: pool.submit(run.make) for run in RUNS}


@pytest.mark.parametrize("run", RUNS, ids=lambda run: "-".join(str(run).split()))
def test_a_fault_on_one_rank_ends_all(started, run):
    ended = started[run].result()
    assert not run.wrong(ended), ended.output


def test_a_world_whose_first_rank_still_writes_is_healthy(started):
    """7 s: more than the 5 s after which a rank in a collective gives up on one that exited."""
    ended = started["healthy"].result()
    assert (ended.status, ended.output, ended.left) == (0, "written\n", [])
