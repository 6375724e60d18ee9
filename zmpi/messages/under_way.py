"""What MPI may still read or write. A vector that is freed too early lets MPI write into whatever lies there next.

A collective that returns before it is complete is entered here with its vectors, and leaves when MPI has completed it,
whatever becomes of the step, the unit or the engine that started it. So nobody waits in a destructor, and whoever ends
by an exception simply lets go:

    a gather's wait()     completes that gather
    later collectives     test what earlier ones left behind
    the next step         brings the ranks back into step: World.settle
    the process's end     frees none of it: `keep`

The module knows no MPI library: a handle is whatever has test() and complete().
"""

import ctypes


class UnderWay:
    """The handles of this process whose vectors MPI may still touch, over all its communicators."""

    def __init__(self):
        self._handles = {}  # (lane, number) -> handle
        self._stranded = []  # handles that no rank will ever complete

    def __len__(self):
        return len(self._handles) + len(self._stranded)

    def enter(self, lane, number, handle):
        """Own the handle, and with it its vectors, until it leaves."""
        self.test()
        self._handles[lane, number] = handle

    def leave(self, lane, number):
        """MPI has completed it. A second time does nothing."""
        self._handles.pop((lane, number), None)

    def test(self):
        """Let go of what MPI has completed meanwhile. Waits for nothing."""
        for key, handle in list(self._handles.items()):
            if handle.test():
                del self._handles[key]

    def settle(self, lane, common):
        """Complete what all ranks have started on a lane, numbers up to `common`; the rest never will complete."""
        for key in [key for key in self._handles if key[0] is lane]:
            handle = self._handles[key]
            if key[1] <= common:
                handle.complete()
            else:
                self._stranded.append(handle)
            del self._handles[key]

    def keep(self):
        """At the process's end: MPI_Finalize may still move what is under way, so that memory is never freed."""
        for handle in [*self._handles.values(), *self._stranded]:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))


class Lane:
    """The communicator on which vectors travel, apart from that of scalars and agreements (World.mpi).

    Started collectives have numbers, 1, 2, ...: the same number is the same collective on every rank. An exception can
    leave ranks at different numbers; what one rank has started alone must meet nothing that comes later.
    """

    def __init__(self, mpi, under_way):
        self.mpi, self.under_way = mpi, under_way
        self.started = 0  # collectives, so far

    def enter(self, handle):
        """A collective was started; returns its number."""
        self.started += 1
        self.under_way.enter(self, self.started, handle)
        return self.started

    def settle(self, started, renew):
        """See World.settle. `started`: every rank's number of started collectives; renew(): a fresh communicator."""
        common, highest = int(min(started)), int(max(started))
        self.under_way.settle(self, common)
        if highest > common:
            self.mpi, self.started = renew(), highest
