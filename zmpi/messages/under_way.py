"""Owns vectors that MPI may still read or write: freed too early, their memory would be corrupted.

A non-blocking collective is entered here with its vectors, and leaves when MPI has completed it,
whatever happens to the step, unit or engine that started it. So no destructor waits, and code that
ends with an exception need not clean up:

    a gather's wait()     completes that gather
    later collectives     test what earlier ones left behind
    the next step         resynchronises the ranks: World.settle
    the process's end     frees none of it: `keep`

Nothing here imports MPI: a handle is anything with test() and complete().
"""

import ctypes


class UnderWay:
    """This process's handles, on all communicators, whose vectors MPI may still touch."""

    def __init__(self):
        self._handles = {}  # (lane, number) -> handle
        self._stranded = []  # handles that will never complete

    def __len__(self):
        return len(self._handles) + len(self._stranded)

    def enter(self, lane, number, handle):
        """Own the handle, and so its vectors, until it leaves."""
        self.test()
        self._handles[lane, number] = handle

    def leave(self, lane, number):
        """Release a handle that MPI has completed. A second call does nothing."""
        self._handles.pop((lane, number), None)

    def test(self):
        """Release the handles that MPI has completed. Does not wait."""
        for key, handle in list(self._handles.items()):
            if handle.test():
                del self._handles[key]

    def settle(self, lane, common):
        """Complete what all ranks started on a lane, up to number `common`; strand the rest."""
        for key in [key for key in self._handles if key[0] is lane]:
            handle = self._handles[key]
            if key[1] <= common:
                handle.complete()
            else:
                self._stranded.append(handle)
            del self._handles[key]

    def keep(self):
        """At exit, never free these vectors: MPI_Finalize may still move them."""
        for handle in [*self._handles.values(), *self._stranded]:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))


class Lane:
    """The communicator that carries vectors; World.mpi carries scalars and agreements.

    Started collectives are numbered 1, 2, ..., the same on every rank. An exception can leave ranks
    at different numbers; a collective that only some ranks started must not match a later one.
    """

    def __init__(self, mpi, under_way):
        self.mpi, self.under_way = mpi, under_way
        self.started = 0  # collectives, so far

    def enter(self, handle):
        """Register a started collective; returns its number."""
        self.started += 1
        self.under_way.enter(self, self.started, handle)
        return self.started

    def settle(self, started, renew):
        """See World.settle. `started`: every rank's `started`; renew(): a new communicator."""
        common, highest = int(min(started)), int(max(started))
        self.under_way.settle(self, common)
        if highest > common:
            self.mpi, self.started = renew(), highest
