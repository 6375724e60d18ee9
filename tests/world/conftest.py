"""For tests that run on all ranks: none may leave the others waiting, or a message behind.

A failure on one rank ends the world, after it has said on which rank and in which test; a test that
does not end is ended; after each test all ranks meet, and make sure that they come from the same
one. Only rank 0 shows progress.
"""

import faulthandler
import os
import sys
import threading
import time
from pathlib import Path

import pytest
from mpi4py import MPI

LIMIT = 120  # seconds for a test, its meeting included
SHARE = 0.2  # seconds between two ranks' reports: if all fail alike, one speaks and ends the rest


@pytest.fixture(scope="session")
def comm():
    """The communicator of all ranks, as mpi4py made it."""
    return MPI.COMM_WORLD


@pytest.fixture
def world():
    """A World on the CPU. It shares the process's guard with those of other tests."""
    from zmpi import World

    return World(device="cpu", timeout=60)


@pytest.fixture
def folder(comm, tmp_path):
    """An empty folder, the same for all ranks."""
    return Path(comm.bcast(str(tmp_path)))


def pytest_addoption(parser):
    text = "file to which rank 0 writes the name of each test file as its first test starts"
    parser.addoption("--started", metavar="FILE", help=text)


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    config.pluginmanager.register(Manners(config), "world manners")


def pytest_collection_modifyitems(items):
    for item in items:
        sizes = item.get_closest_marker("sizes")
        if sizes and MPI.COMM_WORLD.size not in sizes.args:
            item.add_marker(pytest.mark.skip(reason=f"runs on {sizes.args} ranks"))


class Manners:
    """Watches the tests of this rank."""

    def __init__(self, config):
        self.config, self.rank, self.size = config, MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
        self.private = MPI.COMM_WORLD.Dup()
        self.stderr = os.fdopen(
            os.dup(2), "w"
        )  # what pytest captures is not shown any more after an Abort
        self.limits, self.timer = {}, None
        self.started = config.getoption("started")
        if self.rank:
            config.pluginmanager.unregister(name="terminalreporter")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        for item in items:
            marker = item.get_closest_marker("limit")
            self.limits[item.nodeid] = marker.args[0] if marker else LIMIT

    def pytest_runtest_logstart(self, nodeid):
        if self.rank == 0 and self.started:
            self.note(Path(nodeid.partition("::")[0]).name)
        self.start_timer(nodeid, self.limits[nodeid])

    def pytest_collection_finish(self):
        """All ranks meet before the first test: who cannot collect has ended the world by then."""
        self.start_timer("collection", LIMIT)
        self.meet()
        self.timer.cancel()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid):
        """All ranks meet. A broadcast without receivers would otherwise reach the next test's."""
        self.meet()
        where = self.private.allgather(nodeid)
        if set(where) != {nodeid}:
            self.end(f"{nodeid}: the ranks are not at the same test: {where}")
        if (
            any(MPI.COMM_WORLD.bcast(nodeid, root) != nodeid for root in range(self.size))
            or MPI.COMM_WORLD.iprobe()
        ):
            self.end(f"{nodeid}: left a message behind that the next test would have received")
        self.timer.cancel()

    def pytest_runtest_logreport(self, report):
        if report.failed:
            captured = "".join(f"--- {name} ---\n{text}\n" for name, text in report.sections)
            self.end(f"{report.nodeid} failed ({report.when}):\n{report.longreprtext}\n{captured}")

    def pytest_collectreport(self, report):
        if report.failed:
            self.end(f"{report.nodeid} cannot be collected:\n{report.longreprtext}")

    def pytest_internalerror(self, excrepr):
        self.end(f"pytest failed:\n{excrepr}")

    def overdue(self, nodeid, seconds):
        """Runs on the timer's thread: ranks print where they are; the first ends the world."""
        self.say(f"{nodeid} did not end within {seconds} s; it is here:")
        faulthandler.dump_traceback(self.stderr)
        time.sleep(1 + self.rank * SHARE)
        MPI.COMM_WORLD.Abort(1)

    def start_timer(self, what, seconds):
        self.timer = threading.Timer(seconds, self.overdue, (what, seconds))
        self.timer.daemon = True
        self.timer.start()

    def meet(self):
        meeting = self.private.Ibarrier()
        while not meeting.Test():
            # MPI itself would wait in a busy loop, on a core that a slower rank needs
            time.sleep(0.001)

    def note(self, name):
        """Whoever started this world reads there in which file it ended."""
        with open(self.started, "r+", encoding="utf-8") as file:
            if name not in file.read().splitlines():
                file.write(f"{name}\n")

    def end(self, text):
        time.sleep(self.rank * SHARE)
        self.say(text)
        time.sleep(0.1)  # for the launcher to carry it out
        MPI.COMM_WORLD.Abort(1)

    def say(self, text):
        self.stderr.write(f"\nrank {self.rank} of {self.size}: {text}\n")
        self.stderr.flush()


def pytest_keyboard_interrupt(excinfo):
    sys.stderr.flush()
    MPI.COMM_WORLD.Abort(130)
