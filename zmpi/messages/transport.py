"""How a vector's memory reaches MPI: `host` memory as it is, a GPU's `direct` to a CUDA-aware MPI, or `staged` through
pinned host memory. One path in comm.py serves all three.

A chunk of a collective is a range of columns, start:stop, of a vector seen as equal rows (one row for a shard, one for
each owner for a full vector). A way takes such columns across and speaks in addresses only. It knows no MPI.

A kernel is not finished when its launch returns, and MPI looks at no stream. So before MPI reads or fills memory of a GPU,
what was launched before must be done: by an event on the current stream, never by a wait for the whole device. That
covers the last write of what is sent and also the last use of what is filled, which may be memory that a vector freed a
moment ago still lends to a kernel in the queue.
"""

from collections import deque
from dataclasses import dataclass
from math import inf

import numpy as np

IN_FLIGHT = 2  # chunks, through pinned memory


@dataclass(frozen=True)
class Place:
    """Memory that MPI reads or fills: so many bytes from `address`, the next row `extent` elements further on."""

    address: int
    nbytes: int
    extent: int


class Host:
    """Vectors lie in host memory: MPI is handed their own."""

    name = "host"
    depth = inf  # chunks of one collective that may be under way
    dropped = False  # whether an exception ended a step: what is under way is completed, nothing more is started

    def __init__(self, device, ledger):
        self.device, self.ledger = device, ledger

    def reserve(self, nbytes):
        """Allocate what chunks of at most so many bytes need, once."""

    def drop(self):
        """Let go of what is under way, after an exception. The caller takes a new way; this one's buffers are MPI's."""
        self.dropped = True

    def outgoing(self, vector, rows, start, stop):
        """The Place of these columns, ready for MPI to read."""
        return self._own(vector, rows, start)

    def incoming(self, vector, rows, start, stop):
        """The Place that MPI may fill with these columns."""
        return self._own(vector, rows, start)

    def arrived(self, vector, rows, start, stop):
        """MPI has filled the Place: bring it into the vector. The chunks of a vector arrive in order."""

    def _own(self, vector, rows, start):
        skipped = start * vector.itemsize
        return Place(
            self.device.address(vector) + skipped, vector.nbytes - skipped, len(vector) // rows
        )


class Direct(Host):
    """MPI is handed the GPU's own memory. What is launched after MPI is done sees what it brought."""

    name = "direct"

    def outgoing(self, vector, rows, start, stop):
        self._settle()
        return self._own(vector, rows, start)

    def incoming(self, vector, rows, start, stop):
        self._settle()
        return self._own(vector, rows, start)

    def _settle(self):
        """Wait until what was launched so far is done."""
        self.device.xp.cuda.get_current_stream().record().synchronize()


class Slot:
    """A pinned buffer, and the last copy out of it or into it."""

    def __init__(self, device, ledger, nbytes):
        pinned = device.xp.cuda.alloc_pinned_memory(nbytes)
        self.memory = ledger.track("pinned", np.frombuffer(pinned, np.uint8, nbytes))
        self.address, self.copied = self.memory.ctypes.data, None

    def free(self):
        """Wait until the buffer may be used again."""
        if self.copied is not None:
            self.copied.synchronize()

    def place(self, vector, rows, start, stop):
        """The Place of so many columns of a vector's type, packed."""
        nbytes = rows * (stop - start) * vector.itemsize
        if nbytes > len(self.memory):
            raise ValueError(
                f"staging: a chunk of {nbytes} bytes does not fit into the {len(self.memory)} that were reserved"
            )
        return Place(self.address, nbytes, stop - start)


class Staged(Host):
    """Through pinned host memory, in chunks; copies have a stream of their own, so that they run beside MPI and kernels.

    With `ahead`, the next chunk to be sent is copied out while MPI carries this one (for blocking collectives, which have
    one chunk under way: the other buffer is free).
    """

    name = "staged"
    depth = IN_FLIGHT

    def __init__(self, device, ledger, ahead=False):
        super().__init__(device, ledger)
        self.ahead = ahead
        self._copies = device.xp.cuda.Stream(non_blocking=True)
        self._out = self._in = None  # deques of slots, the next one first
        self._expected = deque()  # slots that MPI is filling, in order
        self._begun = {}  # columns that are on their way out -> their slot

    def reserve(self, nbytes):
        self._out, self._in = (
            deque(Slot(self.device, self.ledger, nbytes) for _ in range(IN_FLIGHT))
            for _ in range(2)
        )

    def drop(self):
        super().drop()
        self._copies.synchronize()  # they read and write vectors that are about to be freed

    def outgoing(self, vector, rows, start, stop):
        if start == 0:  # the whole vector is as it will be sent, once this is done
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
        if start == 0:  # what was launched on the vector's memory comes first
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
        """Copies from now on run after what is on the current stream."""
        self._copies.wait_event(self.device.xp.cuda.get_current_stream().record())

    def _next(self, slots):
        slots.rotate(-1)
        return slots[-1]

    def _copy_out(self, vector, rows, start, stop):
        slot = self._next(self._out)
        self._copy(slot, vector, rows, (start, stop), out=True)
        return slot

    def _copy(self, slot, vector, rows, columns, out):
        """Start to copy columns out of a vector into a slot, or back; `slot.copied` is the event of its end."""
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
    """One collective in chunks, at most `depth` of them under way. Made, the first are; after Wait() all have arrived.

    Once its way was dropped, no further chunk is started, and what was started arrives nowhere.
    """

    def __init__(self, way, cuts, post, arrived):
        self._left, self._open = deque(cuts), deque()
        self._way, self._post, self._arrived = way, post, arrived
        while self._left and len(self._open) < way.depth:
            self._next()

    def Wait(self):
        """Block until the last chunk is there. Once is enough; a second time returns at once."""
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
        """Whether MPI is done with it. Starts nothing, and waits for nothing."""
        more = self._left and not self._way.dropped
        return not more and all(request.Test() for request, _ in self._open)

    def _next(self):
        cut = self._left.popleft()
        self._open.append((self._post(*cut), cut))


def check_vector(vector, length, dtype):
    """A buffer that MPI reads or writes must be what it seems: a strided view would be sent (or filled) wrongly."""
    if (
        vector.ndim != 1
        or not vector.flags.c_contiguous
        or vector.size != length
        or vector.dtype != dtype
    ):
        raise ValueError(
            f"message buffer: expected a contiguous vector of {length} elements of {dtype}, got shape {vector.shape},"
            f" strides {vector.strides}, {vector.dtype}"
        )


def ways(name, device, ledger):
    """(the way of all-gathers, the way of reductions): both may be under way together, so their buffers are apart."""
    if name == "staged":
        return Staged(device, ledger), Staged(device, ledger, ahead=True)
    way = {"host": Host, "direct": Direct}[name](device, ledger)
    return way, way


def chunks(length, limit):
    """Cut range(length) into pieces of at most `limit` elements: [(start, stop), ...], in order, each element once."""
    if limit < 1:
        raise ValueError(f"chunk limit: expected at least 1 element, got {limit}")
    return [(start, min(start + limit, length)) for start in range(0, length, limit)]
