"""Message passing: the only file that imports mpi4py. `World` is the processes, `Communicator` the collectives of a run.

A shard is a contiguous slice of its unit's vector, so a collective over a unit needs no copy: message buffers are the
vectors themselves, cut into chunks of a bounded size (paper, section 6.2, C_B). In a chunk each rank's part is one
element of a derived datatype whose extent is a whole shard; so no count, no sum of counts and no displacement ever
comes near 2^31, however large the unit is.
"""

import os
import sys
from contextlib import contextmanager
from copy import copy
from time import perf_counter

import numpy as np
from mpi4py import MPI

from zmpi.device import choose_device
from zmpi.guard import UsageError, arm
from zmpi.launch import lonely_launch, set_threads
from zmpi.layout import chunks

CHUNK_BYTES = 16 << 20  # of one collective over all ranks: MPI's collectives are fastest between 1 and 16 MiB
REDUCE_BLOCK = 1 << 16  # elements that are summed over ranks at a time, so that the running sum stays in cache


class World:
    """The MPI processes of this run: who they are, what they were asked for, and that none of them waits for ever.

    Making one arms the process (see guard.py). `timeout` is in seconds; a collective that takes longer ends the run.
    """

    def __init__(self, device="auto", transport="auto", reduction="auto", timeout=300):
        self.mpi = MPI.COMM_WORLD
        self.rank, self.size = self.mpi.rank, self.mpi.size
        multiple = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.guard = arm(self.mpi, self.mpi.Abort, MPI.Is_finalized, multiple)
        self.guard.program = _program()
        self.guard.meet(timeout)
        with self.agreed():
            lonely = lonely_launch(os.environ, self.size, self.library)
            if lonely:
                raise ValueError(lonely)
            self.device = choose_device(device)
            if transport not in ("auto", "direct", "staged"):
                raise ValueError(f"--transport: expected auto, direct or staged; got {transport!r}")
            if reduction not in ("auto", "mpi", "ordered"):
                raise ValueError(f"--reduction: expected auto, mpi or ordered; got {reduction!r}")
        self.transport, self.reduction = "host", reduction
        self.threads = set_threads(os.environ)  # as they were set before NumPy was loaded

    def twin(self, reduction=None, alone=False):
        """This world with another reduction, or with this process as its only rank (every rank has its own then)."""
        twin = copy(self)
        twin.reduction = reduction or self.reduction
        if alone:
            twin.mpi, twin.rank, twin.size = MPI.COMM_SELF, 0, 1
        return twin

    @property
    def library(self):
        """The MPI library and its version, in one line."""
        return MPI.Get_library_version().split("\n")[0].strip().rstrip("\0")

    def reduction_for(self, recipe):
        """How gradients of this recipe are reduced, "mpi" or "ordered"; raises ValueError for what MPI cannot do."""
        narrow = recipe.gradient.itemsize < 4
        if self.reduction == "mpi" and narrow:
            raise ValueError(f"--reduction: mpi cannot sum {recipe.name} (MPI has no portable 16-bit float); use ordered")
        if self.reduction == "auto":
            return "ordered" if narrow or self.device.name != "cpu" else "mpi"
        return self.reduction

    def share(self, thing, name="agreement"):
        """Every rank's `thing` (small, of plain Python types), as a list in rank order, on every rank."""
        with self.guard.waiting(name):
            return self.mpi.allgather(thing)

    @contextmanager
    def agreed(self):
        """What goes wrong inside on any rank is one error on all ranks: ValueError and OSError become UsageError."""
        problem = None
        try:
            yield
        except (ValueError, OSError) as error:
            problem = str(error)
        problems = self.share(problem)
        found = [(rank, text) for rank, text in enumerate(problems) if text is not None]
        if found:
            rank, text = found[0]
            raise UsageError(text if len(found) == self.size else f"{text} (on rank {rank})")


class Communicator:
    """The collectives of one engine. Every call is booked in the ledger; one rank takes the same path as many.

    `size` and `rank` say who computes which data, `shards` and `shard` who owns which slice; here the two are one.
    Vectors are flat and contiguous, of a Layout's padded length (full) or shard length (shard). `reduction` is "mpi"
    (MPI sums, in an order of its own) or "ordered" (the owner adds the ranks' slices one by one, in rank order).
    """

    def __init__(self, world, ledger, reduction, chunk_bytes=CHUNK_BYTES):
        self.mpi, self.guard, self.ledger = world.mpi, world.guard, ledger
        self.size, self.rank = world.size, world.rank
        self.shards, self.shard = self.size, self.rank
        self.reduction, self.ordered = reduction, reduction == "ordered"
        self.chunk_bytes = chunk_bytes
        self.in_flight = 0  # gathers that were started and not yet waited for
        self._message = None  # the one receive (and packing) buffer of reductions
        self._rows = {}  # (elements, extent in elements, type) -> derived datatype

    # -- the three collectives ------------------------------------------------------------------------------------

    def all_gather(self, layout, shard, full):
        """Start putting `full` together from every owner's `shard`; returns a Gather, whose wait() ends it.

        Neither vector may be touched before that. Where `shard` is the owner's own slice of `full` it is sent from there.
        """
        _check(shard, layout.shard_length, full.dtype)
        _check(full, layout.padded, full.dtype)
        kind, length = _mpi_type(full), layout.shard_length
        in_place = _address(shard) == _address(full) + self.shard * shard.nbytes
        requests = []
        for start, stop in self._chunks(layout, full.itemsize):
            send = MPI.IN_PLACE if in_place else [_memory(shard, start, stop), stop - start, kind]
            into = [_memory(full, start), 1, self._row(stop - start, length, kind)]
            requests.append(self.mpi.Iallgather(send, into))
        padding = layout.padding(layout.shard(self.shard))
        self._book("all_gather", layout, len(requests), padding, full.itemsize)
        self.in_flight += 1
        return Gather(self, layout.name, requests, (shard, full))

    def reduce_scatter(self, layout, full, out, fresh):
        """Sum every rank's `full` and keep the own slice: assigned to `out` (`fresh`), or added onto it.

        `out` is of shard length; it may be the own slice of `full`. It is in the gradient type or wider; sums are always
        made in the wider type and rounded once, so a 16-bit `out` must be fresh.
        """
        _check(out, layout.shard_length, out.dtype)
        _check(full, layout.padded, full.dtype)
        pieces = self._chunks(layout, full.itemsize)
        for start, stop in pieces:
            began = perf_counter()
            with self.guard.waiting(f"reduce_scatter {layout.name}"):
                rows = self._exchange(layout, full, start, stop)
            self.ledger.book("reduce_scatter", layout.name, blocked_s=perf_counter() - began)
            add_in_order(rows, out[start:stop], fresh)
        padding = layout.padded - layout.elements - layout.padding(layout.shard(self.shard))
        self._book("reduce_scatter", layout, len(pieces), padding, full.itemsize)

    def gather_scalars(self, values):
        """Every rank's floats, as an array (size, len(values)): row r is rank r's. They are few, and sent as float64."""
        mine = np.array(values, np.float64)
        everyone = np.empty((self.size, len(mine)), np.float64)
        began = perf_counter()
        with self.guard.waiting("all_reduce scalars"):
            self.mpi.Allgather([mine, MPI.DOUBLE], [everyone, MPI.DOUBLE])
        sent = (self.size - 1) * mine.nbytes
        seconds = perf_counter() - began
        self.ledger.book("all_reduce", "scalars", calls=1, elements=len(mine), bytes_sent=sent, blocked_s=seconds)
        return everyone

    def reserve(self, layouts, dtype):
        """Allocate the message buffer of reductions, once: for one chunk of the largest unit, never more."""
        itemsize = np.dtype(dtype).itemsize
        longest = max(layout.shard_length for layout in layouts)
        chunk = min(longest, self._chunk_elements(itemsize))
        rows = self.shards if self.ordered or chunk < longest else 0  # `mpi` packs only what it has to cut
        self._message = self.ledger.track("message", np.empty((rows + (not self.ordered)) * chunk, dtype))

    # -- how they are made of MPI calls ---------------------------------------------------------------------------

    def _exchange(self, layout, full, start, stop):
        """One chunk of a reduce-scatter: rows (n, elements) of the message buffer whose sum is the own part."""
        length, elements = layout.shard_length, stop - start
        kind = _mpi_type(full)
        if self.ordered:
            rows = self._message[: self.shards * elements]
            send = [_memory(full, start), 1, self._row(elements, length, kind)]
            self.mpi.Alltoall(send, [_memory(rows), elements, kind])
            return rows.reshape(self.shards, elements)
        send, result = full, self._message[:elements]
        if elements < length:
            send = self._message[elements : elements + self.shards * elements]
            np.copyto(send.reshape(self.shards, elements), full.reshape(self.shards, length)[:, start:stop])
        self.mpi.Reduce_scatter_block([_memory(send), elements, kind], [_memory(result), elements, kind], op=MPI.SUM)
        return result.reshape(1, elements)

    def _chunk_elements(self, itemsize):
        return max(1, self.chunk_bytes // (itemsize * self.shards))

    def _chunks(self, layout, itemsize):
        """Cut a shard: the cuts depend on the layout and the number of ranks only, so they are the same at every stage."""
        return chunks(layout.shard_length, self._chunk_elements(itemsize))

    def _row(self, elements, extent, kind):
        """A datatype of `elements` contiguous elements, the next one of which lies `extent` elements further on."""
        key = elements, extent, kind.name
        if key not in self._rows:
            self._rows[key] = kind.Create_contiguous(elements).Create_resized(0, extent * kind.extent).Commit()
        return self._rows[key]

    def _book(self, kind, layout, calls, padding, itemsize):
        others = self.shards - 1
        sent = others * layout.shard_length * itemsize
        padding *= (others if kind == "all_gather" else 1) * itemsize
        entry = {"calls": calls, "elements": layout.elements, "bytes_sent": sent, "padding_bytes": padding}
        self.ledger.book(kind, layout.name, **entry)


class Gather:
    """An all-gather under way. It holds on to its vectors until wait() returns."""

    def __init__(self, comm, unit, requests, vectors):
        self._comm, self._unit, self._requests, self._vectors = comm, unit, requests, vectors

    def wait(self):
        """Block until the full vector is there."""
        began = perf_counter()
        with self._comm.guard.waiting(f"all_gather {self._unit}"):
            MPI.Request.Waitall(self._requests)
        self._comm.in_flight -= 1
        self._vectors = None
        self._comm.ledger.book("all_gather", self._unit, blocked_s=perf_counter() - began)


def add_in_order(rows, out, fresh):
    """Add the rows (n, elements) onto `out`, or (`fresh`) onto the first of them, one by one from the first to the last.

    A block of the sum is kept in float32 (float64 for float64), and rounded once where `out` is of 16 bits.
    """
    wide = out.dtype if out.itemsize >= 4 else np.dtype(np.float32)
    for start in range(0, len(out), REDUCE_BLOCK):
        part = out[start : start + REDUCE_BLOCK]
        total = part if part.dtype == wide else np.empty_like(part, dtype=wide)
        if fresh:
            np.copyto(total, rows[0, start : start + REDUCE_BLOCK], casting="same_kind")
        for row in rows[1:] if fresh else rows:
            np.add(total, row[start : start + REDUCE_BLOCK], out=total)
        if total is not part:
            with np.errstate(over="ignore"):  # an overflow is found in the norm
                np.copyto(part, total, casting="same_kind")


def _check(vector, length, dtype):
    """A buffer that MPI reads or writes must be what it seems: a strided view would be sent (or filled) wrongly."""
    if vector.ndim != 1 or not vector.flags.c_contiguous or vector.size != length or vector.dtype != dtype:
        raise ValueError(
            f"message buffer: expected a contiguous vector of {length} elements of {dtype}, got shape {vector.shape},"
            f" strides {vector.strides}, {vector.dtype}"
        )


def _mpi_type(vector):
    """The MPI type of a vector's elements. MPI knows no portable 16-bit float: these travel as 16-bit integers."""
    return {"f4": MPI.FLOAT, "f8": MPI.DOUBLE}.get(vector.dtype.str[1:], MPI.UINT16_T)


def _address(vector):
    """Where a vector's memory starts. The seam for device memory: MPI is handed addresses, never arrays."""
    return vector.ctypes.data


def _memory(vector, start=0, stop=None):
    """The memory of vector[start:stop], for MPI. The caller keeps the vector alive."""
    stop = len(vector) if stop is None else stop
    return MPI.buffer.fromaddress(_address(vector) + start * vector.itemsize, (stop - start) * vector.itemsize)


def _program():
    """What opens a line of error: the command that is running, or zmpi."""
    spec = sys.modules["__main__"].__spec__
    return spec.name if spec and spec.name.startswith("zmpi.") else "zmpi"
