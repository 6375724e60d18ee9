"""The collectives of one engine, on MPI.

A shard is a contiguous slice of its unit's vector, so a collective needs no copy: the vectors
themselves are the message buffers, cut into chunks of bounded size (paper, section 6.2, C_B).
transport.py hands their memory to MPI, as addresses. In a chunk, each rank's part is one element of
a derived datatype whose extent is a whole shard, so no count, sum of counts or displacement comes
near 2^31, however large the unit.
"""

from functools import partial
from math import inf
from time import perf_counter

import numpy as np

from zmpi.messages.transport import Paced, check_vector, chunks, ways
from zmpi.messages.world import MPI
from zmpi.numbers.sums import add_in_order

CUT = 8  # reductions that must cut a shard, or sum it themselves, use 1/8 of a chunk
CHUNK_BYTES = 16 << 20  # over all ranks: MPI's collectives are fastest between 1 and 16 MiB


class Communicator:
    """The collectives of one engine. The ledger books every call, on one rank too.

    `size` and `rank` say who computes which data, `shards` and `shard` who owns which slice: the
    same here. Vectors are flat and contiguous, of a Layout's padded length (full) or shard length
    (shard). `reduction` is "mpi" (MPI sums, in its own order) or "ordered" (the owner adds the
    ranks' slices one by one, in rank order).

    A subclass that rounds its messages declares it to zmpi.verify: `block`, the elements that share
    a scale, and `declared_bytes(kind, layout, itemsize, whole)`, the bytes that a rank sends in an
    "all_gather" or "reduce_scatter", with padding (`whole`: the stage keeps the vector whole).
    """

    block = declared_bytes = None  # messages are exact; their bytes follow P2's formula

    def __init__(self, world, ledger, reduction, chunk_bytes=CHUNK_BYTES):
        if isinstance(chunk_bytes, bool) or not isinstance(chunk_bytes, int) or chunk_bytes < 1:
            raise ValueError(
                f"chunk_bytes: expected a whole number, 1 or more; got {chunk_bytes!r}"
            )
        self.world, self.guard, self.ledger, self.xp = world, world.guard, ledger, world.device.xp
        self.size, self.rank = world.size, world.rank
        self.shards, self.shard = self.size, self.rank
        self.reduction, self.ordered = reduction, reduction == "ordered"
        self.chunk_bytes = chunk_bytes
        self._gathers, self._reductions = ways(world.transport, world.device, ledger)
        self.in_flight = 0  # gathers started and not yet waited for
        self._latest = None  # the last gather's requests
        self._message = None  # the only receive (and packing) buffer of reductions
        self._rows = {}  # (elements, extent in elements, type) -> derived datatype

    @property
    def mpi(self):
        """The communicator that carries vectors (World.settle may replace it)."""
        return self.world.lane.mpi

    # -- the three collectives ---------------------------------------------------------------------

    def all_gather(self, layout, shard, full):
        """Start gathering every owner's `shard` into `full`; returns a Gather, to wait() for.

        Touch neither vector before. A `shard` that is the own slice of `full` is sent in place.
        """
        check_vector(shard, layout.shard_length, full.dtype)
        check_vector(full, layout.padded, full.dtype)
        way, cuts = self._gathers, self._chunks(layout, full.itemsize)
        if self._latest and way.depth < inf:
            self._latest.Wait()  # to reuse its pinned buffers
        self._latest = Paced(
            way, cuts, partial(self._post, shard, full), partial(way.arrived, full, self.shards)
        )
        self._book("all_gather", layout, len(cuts), full.itemsize)
        self.in_flight += 1
        return Gather(self, layout.name, [self._latest], (shard, full))

    def reduce_scatter(self, layout, full, out, fresh):
        """Sum every rank's `full`; assign the own slice to `out` (`fresh`), or add it onto `out`.

        `out` has shard length, and may be the own slice of `full`. Its type is the gradient's or
        wider: sums are made in the wider type and rounded once, so a 16-bit `out` must be fresh.
        """
        check_vector(full, layout.padded, self._message.dtype)
        wide = np.result_type(full.dtype, np.float32)
        check_vector(out, layout.shard_length, full.dtype if out.dtype == full.dtype else wide)
        pieces = self._cuts(layout, full.itemsize)
        for start, stop in pieces:
            began = perf_counter()
            with self.guard.waiting(f"reduce_scatter {layout.name}"):
                rows = self._exchange(layout, full, start, stop)
            self.ledger.book("reduce_scatter", layout.name, blocked_s=perf_counter() - began)
            add_in_order(rows, out[start:stop], fresh)
        self._book("reduce_scatter", layout, len(pieces), full.itemsize)

    def gather_scalars(self, values):
        """Every rank's few floats, as a float64 array (size, len(values)): row r is rank r's."""
        mine = np.array(values, np.float64)
        everyone = np.empty((self.size, len(mine)), np.float64)
        began = perf_counter()
        with self.guard.waiting("all_reduce scalars"):
            self.world.mpi.Allgather([mine, MPI.DOUBLE], [everyone, MPI.DOUBLE])
        sent = (self.size - 1) * mine.nbytes
        seconds = perf_counter() - began
        self.ledger.book(
            "all_reduce", "scalars", calls=1, elements=len(mine), bytes_sent=sent, blocked_s=seconds
        )
        return everyone

    def reserve(self, layouts, dtype):
        """Allocate the message buffer of reductions, once: one chunk of the largest unit."""
        needed = []
        for layout in layouts:
            elements = min(layout.shard_length, self._longest_cut(layout, np.dtype(dtype).itemsize))
            packed = (
                self.shards if elements < layout.shard_length else 0
            )  # `mpi` packs what it cuts
            needed.append(elements * (self.shards if self.ordered else 1 + packed))
        self._message = self.ledger.track("message", self.xp.empty(max(needed), dtype))
        longest = max(layout.shard_length for layout in layouts)
        widest = 8 * self.shards  # bytes
        self._reserved = max(widest, min(self.chunk_bytes, widest * longest))
        self._reserve_ways()

    def drop(self):
        """After an exception: leave MPI the buffers of unfinished messages, and make new ones."""
        self.in_flight, self._latest = 0, None
        for way in {self._gathers, self._reductions}:
            way.drop()
        self._gathers, self._reductions = ways(self.world.transport, self.world.device, self.ledger)
        self._reserve_ways()

    def _reserve_ways(self):
        for way in {self._gathers, self._reductions}:
            way.reserve(self._reserved)

    # -- their MPI calls ---------------------------------------------------------------------------

    def _post(self, shard, full, start, stop):
        """Start the gather of one chunk."""
        kind, way = _mpi_type(full), self._gathers
        mine = way.outgoing(shard, 1, start, stop)
        into = way.incoming(full, self.shards, start, stop)
        in_place = mine.address == into.address + self.shard * into.extent * full.itemsize
        send = MPI.IN_PLACE if in_place else [_memory(mine), stop - start, kind]
        return self.mpi.Iallgather(
            send, [_memory(into), 1, self._row(stop - start, into.extent, kind)]
        )

    def _exchange(self, layout, full, start, stop):
        """One chunk of a reduce-scatter: the rows (n, elements) whose sum is the own part."""
        elements, kind, way = stop - start, _mpi_type(full), self._reductions
        rows = self._message[: (self.shards if self.ordered else 1) * elements]
        send = way.outgoing(full, self.shards, start, stop)
        if self.ordered:
            into = way.incoming(rows, 1, 0, len(rows))
            self.mpi.Alltoall(
                [_memory(send), 1, self._row(elements, send.extent, kind)],
                [_memory(into), elements, kind],
            )
        else:
            if send.extent > elements:  # Reduce_scatter_block needs rows without gaps
                packed = self._message[elements : elements + self.shards * elements]
                np.copyto(
                    packed.reshape(self.shards, elements),
                    full.reshape(self.shards, layout.shard_length)[:, start:stop],
                )
                send = way.outgoing(packed, 1, 0, len(packed))
            into = way.incoming(rows, 1, 0, len(rows))
            self.mpi.Reduce_scatter_block(
                [_memory(send), elements, kind], [_memory(into), elements, kind], op=MPI.SUM
            )
        way.arrived(rows, 1, 0, len(rows))
        return rows.reshape(-1, elements)

    def _chunk_elements(self, itemsize):
        return max(1, self.chunk_bytes // (itemsize * self.shards))

    def _chunks(self, layout, itemsize):
        """Cut a shard for gathers. Depends on layout and ranks only: the same at every stage."""
        return chunks(layout.shard_length, self._chunk_elements(itemsize))

    def _cuts(self, layout, itemsize):
        """Cut a shard for reductions."""
        return chunks(layout.shard_length, self._longest_cut(layout, itemsize))

    def _longest_cut(self, layout, itemsize):
        """MPI sums a whole shard if it fits into a chunk; otherwise small cuts stay in cache."""
        limit, length = self._chunk_elements(itemsize), layout.shard_length
        return length if length <= limit and not self.ordered else max(1, limit // CUT)

    def _row(self, elements, extent, kind):
        """A datatype of `elements` contiguous elements, with the next item `extent` elements on."""
        key = elements, extent, kind.name
        if key not in self._rows:
            self._rows[key] = (
                kind.Create_contiguous(elements).Create_resized(0, extent * kind.extent).Commit()
            )
        return self._rows[key]

    def _book(self, kind, layout, calls, itemsize):
        """Book the bytes sent to each other owner: our slice in a gather, theirs in a reduction."""
        others, own = self.shards - 1, layout.padding(layout.shard(self.shard))
        sent = others * layout.shard_length * itemsize
        padding = (own * others if kind == "all_gather" else layout.blank - own) * itemsize
        self.ledger.book(
            kind,
            layout.name,
            calls=calls,
            elements=layout.elements,
            bytes_sent=sent,
            padding_bytes=padding,
        )


class Gather:
    """An all-gather in progress. It, and the process, own its vectors until MPI completes it."""

    def __init__(self, comm, unit, requests, vectors):
        self._comm, self._unit, self._requests, self._vectors = comm, unit, requests, vectors
        self._lane = comm.world.lane
        self._number = self._lane.enter(self)

    def wait(self):
        """Block until the full vector has arrived."""
        began = perf_counter()
        with self._comm.guard.waiting(f"all_gather {self._unit}"):
            for request in self._requests:
                request.Wait()
        self._comm.in_flight -= 1
        self._lane.under_way.leave(self._lane, self._number)
        self._vectors = None
        self._comm.ledger.book("all_gather", self._unit, blocked_s=perf_counter() - began)

    def test(self):
        """Whether MPI has completed it."""
        return all(request.Test() for request in self._requests)

    def complete(self):
        """Wait until MPI has completed it, discarding the result. The watchdog times the caller."""
        for request in self._requests:
            request.Wait()


def _mpi_type(vector):
    """The MPI type of a vector's elements. MPI has no 16-bit float: these are sent as integers."""
    return {"f4": MPI.FLOAT, "f8": MPI.DOUBLE}.get(vector.dtype.str[1:], MPI.UINT16_T)


def _memory(place):
    """A Place's memory, for MPI. The caller keeps its owner alive."""
    return MPI.buffer.fromaddress(place.address, place.nbytes)
