"""Probes that slow an engine down, so are off by default: array memory, and which rank was late."""

import ctypes
import tracemalloc
from collections import Counter
from contextlib import suppress
from functools import partial
from time import perf_counter

from zmpi.cost.watch import Memory, WatchedZeRO
from zmpi.messages.comm import Communicator
from zmpi.messages.memory import peak_resident_bytes, traced_array_bytes


def array_bytes():
    """(live bytes of arrays made since tracemalloc was started, highest since the last call).

    The first is exact. tracemalloc's peak covers all memory; the current size of Python's objects
    is subtracted, so the second is off by what they have freed since the peak, some kB.
    """
    if not tracemalloc.is_tracing():
        return 0, 0
    whole, highest = tracemalloc.get_traced_memory()
    arrays = traced_array_bytes()
    tracemalloc.reset_peak()
    return arrays, highest - (whole - arrays)


class TracedZeRO(WatchedZeRO):
    """An engine whose ledger is a watch.Memory of this process's arrays."""

    make_ledger = staticmethod(partial(Memory, array_bytes))

    def traced_step(self, micro_batches):
        """One slow training step that fills `ledger.moments`; returns the loss."""
        tracemalloc.start(1)
        try:
            return self.train_step(micro_batches)
        finally:
            tracemalloc.stop()


class ProbedCommunicator(Communicator):
    """A communicator with a barrier before each collective, which shows who was late."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.skew_s = Counter()  # (kind, unit) -> seconds waited for the slowest rank
        self.in_flight_s = Counter()  # (kind, unit) -> seconds from start to end, for the caller

    def all_gather(self, layout, shard, full):
        self._meet("all_gather", layout)
        return _Timed(self, layout.name, super().all_gather(layout, shard, full))

    def reduce_scatter(self, layout, full, out, fresh):
        self._meet("reduce_scatter", layout)
        began = perf_counter()
        super().reduce_scatter(layout, full, out, fresh)
        self.in_flight_s["reduce_scatter", layout.name] += perf_counter() - began

    def _meet(self, kind, layout):
        began = perf_counter()
        with self.guard.waiting(f"the meeting before {kind} {layout.name}"):
            self.mpi.Barrier()
        self.skew_s[kind, layout.name] += perf_counter() - began


class _Timed:
    """A gather in progress that knows when it started."""

    def __init__(self, comm, unit, gather):
        self._comm, self._unit, self._gather, self._began = comm, unit, gather, perf_counter()

    def wait(self):
        self._gather.wait()
        self._comm.in_flight_s["all_gather", self._unit] += perf_counter() - self._began


class ProbedZeRO(WatchedZeRO):
    """An engine that measures skew and time in flight. Barriers cost time: parts may not add up."""

    make_communicator = ProbedCommunicator


class PeakResident:
    """The process's highest resident memory since `reset`, in bytes."""

    def __init__(self):
        self.exact = (
            False  # the system could reset the peak (Linux); else `read` includes older ones
        )

    def reset(self):
        """Return freed memory to the system, and reset the peak."""
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        try:
            with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
                file.write("5")
            self.exact = True
        except OSError:
            self.exact = False

    def read(self):
        """Peak bytes, since the last reset if `exact`."""
        try:
            with open("/proc/self/status", encoding="ascii", errors="replace") as status:
                return next(
                    int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM")
                )
        except (OSError, StopIteration):
            return peak_resident_bytes()
