"""Runs a check: whatever happens inside ends in a row, or in one line, on all ranks."""

from time import monotonic, sleep

import numpy as np

from zmpi.proof.rows import Row
from zmpi.proof.trial import sentence

CHECK_PATIENCE = 5.0  # seconds for the other ranks to fail too, or reach the end of the check
CHECK_POLL = 0.002  # seconds


def conducted(check, promise, trial):
    """Yield the rows of check(trial); returns the trial for the next check. Collective.

    An error on all ranks is a row. The next check then gets its own communicator, out of reach of
    this one's messages. An error that leaves other ranks waiting ends the run, with one line.
    """
    world, fault = trial.world, ""
    with world.guard.waiting("the start of a check"):
        apart = world.mpi.Dup()
    try:
        with np.errstate(all="ignore"):  # NaN is a figure, not a warning
            yield from check(trial)
    except Exception as error:
        fault = sentence(error)
    faults = _met(apart, world, fault)
    apart.Free()
    found = [(rank, text) for rank, text in enumerate(faults) if text]
    if not found:
        return trial
    rank, text = found[0]
    on_rank = "" if len(found) == world.size else f" (on rank {rank})"
    yield Row(promise, check.__name__.replace("_", " "), "ended by an error", False, text + on_rank)
    return trial.but(world=world.part(world.mpi.Dup()))


def _met(apart, world, fault):
    """Every rank's fault or "", once all have ended the check. A rank with a fault may end all."""
    mine, everyone = np.array([bool(fault)], np.int64), np.empty(world.size, np.int64)
    began, request = monotonic(), apart.Iallgather(mine, everyone)
    with world.guard.waiting("the end of a check"):
        while not request.Test():
            if fault and monotonic() - began > CHECK_PATIENCE:
                line = f"rank {world.rank}: {fault}; other ranks wait for it"
                world.guard.end(1, line)
            sleep(CHECK_POLL)
        return apart.allgather(fault)
