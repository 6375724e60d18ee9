"""How a vector's memory reaches MPI: `host`, `direct` or `staged`. One path in comm.py serves all.

    host    host memory, as it is
    direct  GPU memory, passed to a CUDA-aware MPI
    staged  GPU memory, through pinned host memory

A chunk of a collective is a range of columns, start:stop, of a vector seen as equal rows (one row
for a shard, one per owner for a full vector). A way moves such columns; it deals in addresses and
imports no MPI.

A kernel may still run when its launch returns, and MPI knows no streams. So before MPI reads or
fills GPU memory, earlier kernels must finish: wait for an event on the current stream, never for
the whole device. This covers the last write to what is sent, and the last use of what is filled:
memory of a vector just freed may still be in use by a queued kernel.
"""

from collections import deque
from dataclasses import dataclass
from math import inf

import numpy as np

IN_FLIGHT = 2  # chunks in pinned memory at once


@dataclass(frozen=True)
class Place:
    """Memory that MPI reads or fills: `nbytes` at `address`, rows `extent` elements apart."""

    address: int
    nbytes: int
    extent: int


class Host:
    """Vectors in host memory, passed to MPI directly."""

    name = "host"
    depth = inf  # chunks of one collective in progress at once
    dropped = False  # an exception ended a step: complete what is in progress, start nothing

    def __init__(self, device, ledger):
        self.device, self.ledger = device, ledger

    def reserve(self, nbytes):
        """Allocate the buffers for chunks of at most `nbytes`, once."""

    def drop(self):
        """After an exception: start nothing more. The buffers stay MPI's; make a new way."""
        self.dropped = True

    def outgoing(self, vector, rows, start, stop):
        """The Place where MPI reads these columns."""
        return self._own(vector, rows, start)

    def incoming(self, vector, rows, start, stop):
        """The Place that MPI fills with these columns."""
        return self._own(vector, rows, start)

    def arrived(self, vector, rows, start, stop):
        """Move a filled Place into the vector. The chunks of a vector arrive in order."""

    def _own(self, vector, rows, start):
        skipped = start * vector.itemsize
        return Place(
            self.device.address(vector) + skipped, vector.nbytes - skipped, len(vector) // rows
        )


class Direct(Host):
    """GPU memory, passed to MPI. Kernels launched after MPI is done see the received data."""

    name = "direct"

    def outgoing(self, vector, rows, start, stop):
        self._settle()
        return self._own(vector, rows, start)

    def incoming(self, vector, rows, start, stop):
        self._settle()
        return self._own(vector, rows, start)

    def _settle(self):
        """Wait for all work launched so far."""
        self.device.xp.cuda.get_current_stream().record().synchronize()


class Slot:
    """A pinned buffer, and the last copy from or to it."""

    def __init__(self, device, ledger, nbytes):
        pinned = device.xp.cuda.alloc_pinned_memory(nbytes)
        self.memory = ledger.track("pinned", np.frombuffer(pinned, np.uint8, nbytes))
        self.address, self.copied = self.memory.ctypes.data, None

    def free(self):
        """Wait until the buffer can be reused."""
        if self.copied is not None:
            self.copied.synchronize()

    def place(self, vector, rows, start, stop):
        """The Place of these columns, packed, in the vector's type."""
        nbytes = rows * (stop - start) * vector.itemsize
        if nbytes > len(self.memory):
            raise ValueError(
                f"staging: expected chunks of at most {len(self.memory)} bytes, got {nbytes}"
            )
        return Place(self.address, nbytes, stop - start)


class Staged(Host):
    """GPU memory through pinned host memory, in chunks. Copies overlap with MPI and kernels.

    They have their own stream. With `ahead`, the next chunk to send is copied out while MPI sends
    this one: blocking collectives have one chunk in progress, so the other buffer is free.
    """

    name = "staged"
    depth = IN_FLIGHT

    def __init__(self, device, ledger, ahead=False):
        super().__init__(device, ledger)
        self.ahead = ahead
        self._copies = device.xp.cuda.Stream(non_blocking=True)
        self._out = self._in = None  # deques of slots, the next one first
        self._expected = deque()  # slots that MPI is filling, in order
        self._begun = {}  # columns being copied out -> their slot

    def reserve(self, nbytes):
        self._out, self._in = (
            deque(Slot(self.device, self.ledger, nbytes) for _ in range(IN_FLIGHT))
            for _ in range(2)
        )

    def drop(self):
        super().drop()
        self._copies.synchronize()  # they use vectors that are about to be freed

    def outgoing(self, vector, rows, start, stop):
        if start == 0:  # the vector's last write comes first
            self._follow()
        slot = self._begun.pop((self.device.address(vector), rows, start), None) or self._copy_out(
            vector, rows, start, stop
        )
        slot.free()
        after = min(2 * stop - start, len(vector) // rows)
        if self.ahead and after > stop:
            self._begun[self.device.address(vector), rows, stop] = self._copy_out(
                vector, rows, stop, after
            )
        return slot.place(vector, rows, start, stop)

    def incoming(self, vector, rows, start, stop):
        if start == 0:  # the last use of the vector's memory comes first
            self._follow()
        slot = self._next(self._in)
        slot.free()
        self._expected.append(slot)
        return slot.place(vector, rows, start, stop)

    def arrived(self, vector, rows, start, stop):
        slot = self._expected.popleft()
        self._copy(slot, vector, rows, (start, stop), out=False)
        self.device.xp.cuda.get_current_stream().wait_event(slot.copied)

    def _follow(self):
        """Order later copies after all work on the current stream."""
        self._copies.wait_event(self.device.xp.cuda.get_current_stream().record())

    def _next(self, slots):
        slots.rotate(-1)
        return slots[-1]

    def _copy_out(self, vector, rows, start, stop):
        slot = self._next(self._out)
        self._copy(slot, vector, rows, (start, stop), out=True)
        return slot

    def _copy(self, slot, vector, rows, columns, out):
        """Start copying columns from a vector to a slot, or back; `slot.copied` marks the end."""
        places = self._own(vector, rows, columns[0]), slot.place(vector, rows, *columns)
        source, target = places if out else reversed(places)
        runtime = self.device.xp.cuda.runtime
        runtime.memcpy2DAsync(
            target.address,
            target.extent * vector.itemsize,
            source.address,
            source.extent * vector.itemsize,
            (columns[1] - columns[0]) * vector.itemsize,
            rows,
            runtime.memcpyDeviceToHost if out else runtime.memcpyHostToDevice,
            self._copies.ptr,
        )
        slot.copied = self._copies.record()


class Paced:
    """One collective in chunks, at most `depth` in progress. Starts at once; Wait() completes it.

    After its way is dropped, no more chunks start, and arriving ones are discarded.
    """

    def __init__(self, way, cuts, post, arrived):
        self._left, self._open = deque(cuts), deque()
        self._way, self._post, self._arrived = way, post, arrived
        while self._left and len(self._open) < way.depth:
            self._next()

    def Wait(self):
        """Block until the last chunk has arrived; a second call returns at once."""
        while self._open:
            request, cut = self._open[0]
            request.Wait()
            self._open.popleft()
            if not self._way.dropped:
                self._arrived(*cut)
                if self._left:
                    self._next()
        self._post = self._arrived = None  # they hold the vectors

    def Test(self):
        """Whether MPI is done with it. Starts nothing and does not wait."""
        more = self._left and not self._way.dropped
        return not more and all(request.Test() for request, _ in self._open)

    def _next(self):
        cut = self._left.popleft()
        self._open.append((self._post(*cut), cut))


def check_vector(vector, length, dtype):
    """Raise ValueError unless MPI can use this buffer: a strided view would be sent wrongly."""
    if (
        vector.ndim != 1
        or not vector.flags.c_contiguous
        or vector.size != length
        or vector.dtype != dtype
    ):
        raise ValueError(
            f"message buffer: expected a contiguous vector of {length} elements of {dtype}, got"
            f" shape {vector.shape}, strides {vector.strides}, {vector.dtype}"
        )


def ways(name, device, ledger):
    """(way of all-gathers, way of reductions): they may overlap, so their buffers are separate."""
    if name == "staged":
        return Staged(device, ledger), Staged(device, ledger, ahead=True)
    way = {"host": Host, "direct": Direct}[name](device, ledger)
    return way, way


def chunks(length, limit):
    """Cut range(length) into chunks of at most `limit` elements: [(start, stop), ...], in order."""
    if limit < 1:
        raise ValueError(f"chunk limit: expected at least 1 element, got {limit}")
    return [(start, min(start + limit, length)) for start in range(0, length, limit)]
