"""Probes of a running engine that cost time, and are therefore not on by default: array memory, and who was late."""

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
    """(bytes of arrays made since tracemalloc was started and alive, highest since the last call).

    The first is exact. tracemalloc's peak is of all memory: what Python's own objects take now is subtracted, so the second
    may be off by what they took at the peak and no longer take, some kB.
    """
    if not tracemalloc.is_tracing():
        return 0, 0
    whole, highest = tracemalloc.get_traced_memory()
    arrays = traced_array_bytes()
    tracemalloc.reset_peak()
    return arrays, highest - (whole - arrays)


class TracedZeRO(WatchedZeRO):
    """An engine whose ledger is a watch.Memory over this process's arrays."""

    make_ledger = staticmethod(partial(Memory, array_bytes))

    def traced_step(self, micro_batches):
        """One training step, slower than others, with `ledger.moments` of all that was alive in it; returns the loss."""
        tracemalloc.start(1)
        try:
            return self.train_step(micro_batches)
        finally:
            tracemalloc.stop()


class ProbedCommunicator(Communicator):
    """A communicator that meets the other ranks before each collective, and so knows who was late."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        # (kind, unit) -> seconds waited for the slowest rank before the collective began
        self.skew_s = Counter()
        # (kind, unit) -> seconds from its start to its end, as the caller saw them
        self.in_flight_s = Counter()

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
    """A gather under way that knows when it was started."""

    def __init__(self, comm, unit, gather):
        self._comm, self._unit, self._gather, self._began = comm, unit, gather, perf_counter()

    def wait(self):
        self._gather.wait()
        self._comm.in_flight_s["all_gather", self._unit] += perf_counter() - self._began


class ProbedZeRO(WatchedZeRO):
    """An engine that measures skew and time in flight. The meetings themselves cost time: its parts need not add up."""

    make_communicator = ProbedCommunicator


class PeakResident:
    """The process's highest resident memory since `reset`, in bytes."""

    def __init__(self):
        self.exact = False  # whether the system could forget the peak before (Linux); else `read` includes it

    def reset(self):
        """Give freed memory back, and forget the peak so far."""
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        try:
            with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
                file.write("5")
            self.exact = True
        except OSError:
            self.exact = False

    def read(self):
        """Bytes, since the last reset where `exact`."""
        try:
            with open("/proc/self/status", encoding="ascii", errors="replace") as status:
                return next(
                    int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM")
                )
        except (OSError, StopIteration):
            return peak_resident_bytes()
