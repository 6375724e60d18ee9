"""The MPI that a student's code is given: mpi4py's, with every message counted below that code.

A communicator is a subclass of mpi4py's own, so that it can do all that a course needs, and a
module with it in the place of `mpi4py.MPI` answers `from mpi4py import MPI`. What would carry
messages uncounted (windows, files, persistent requests, other processes) raises an error that says
so.
"""

import pickle
import sys
import types
from dataclasses import asdict, dataclass

import numpy as np

from zmpi.messages.world import MPI

UNCOUNTED = (  # beginnings of names; so are persistent requests, whose names end with _init
    *("Accept", "Bsend", "Clone", "Connect", "Create", "Disconnect", "Dup_", "Ibsend", "Idup"),
    *("Irsend", "Isendrecv", "Ishrink", "Join", "Rsend", "Sendrecv_", "Shrink", "Spawn"),
    *("Split_", "Alltoallw", "Ialltoallw", "bsend", "ibsend"),
)
MISSING = (  # of the module
    *("Win", "File", "Session", "Intercomm", "Grequest", "Prequest", "Open_port", "Topocomm"),
    "Cartcomm",
)


@dataclass
class Call:
    """One MPI call of one rank: bytes by the count of a ring (or a direct send), not of this MPI's
    own algorithm.
    """

    name: str  # "Allgather"; mpi4py's own names
    sent: int  # bytes that this rank sends to others
    largest: int  # bytes of the larger of the two buffers
    kind: str  # the elements' NumPy type, "" where it is not known


def _bytes(spec):
    """(bytes, whether a count was given, element type) of what mpi4py takes for a message."""
    if spec is None or spec is MPI.IN_PLACE or spec is MPI.BOTTOM:
        return 0, False, ""
    if not isinstance(spec, (list, tuple)):
        return memoryview(spec).nbytes, False, _kind(spec)
    buffer, *rest = spec
    types_given = [part for part in rest if isinstance(part, (MPI.Datatype, str))]
    counts = [part for part in rest if part is not None and part not in types_given]
    if not counts:
        return memoryview(buffer).nbytes, False, _kind(buffer)
    count = counts[0][0] if isinstance(counts[0], (tuple, list)) else counts[0]
    itemsize = getattr(buffer, "itemsize", 1)
    if types_given and isinstance(types_given[0], MPI.Datatype):
        itemsize = types_given[0].Get_size()
    return int(np.sum(count)) * itemsize, True, _kind(buffer)


def _kind(buffer):
    return getattr(getattr(buffer, "dtype", None), "str", "")[1:]


def _each(spec, size):
    """Bytes of one rank's part, where `spec` holds a part for each rank."""
    length, counted, _ = _bytes(spec)
    return length if counted else length // size


# What a rank sends in a call: (communicator, send, receive, root) -> bytes. N ranks, of which N - 1
# are others.
def _gathered(comm, send, receive, root):
    return (comm.size - 1) * (_bytes(send)[0] or _each(receive, comm.size))


def _gathered_v(comm, send, receive, root):
    return (comm.size - 1) * (_bytes(send)[0] or _bytes(receive)[0] // comm.size)


def _scattered_sum(comm, send, receive, root):
    whole = send is MPI.IN_PLACE
    return (comm.size - 1) * (_each(receive, comm.size) if whole else _bytes(receive)[0])


def _scattered_sum_v(comm, send, receive, root):
    return max(0, (_bytes(send)[0] or _bytes(receive)[0]) - _bytes(receive)[0])


def _all_reduced(comm, send, receive, root):
    return 2 * (comm.size - 1) * (_bytes(send)[0] or _bytes(receive)[0]) // comm.size


def _exchanged(comm, send, receive, root):
    return (comm.size - 1) * _each(receive if send is MPI.IN_PLACE else send, comm.size)


def _exchanged_v(comm, send, receive, root):
    return (comm.size - 1) * _bytes(send)[0] // comm.size


def _from_root(comm, send, receive, root):
    return (comm.size - 1) * _bytes(send)[0] if comm.rank == root else 0


def _parts_from_root(comm, send, receive, root):
    return (comm.size - 1) * _each(send, comm.size) if comm.rank == root else 0


def _to_root(comm, send, receive, root):
    return _bytes(send)[0] if comm.rank != root else 0


def _to_other(comm, send, receive, other):
    return _bytes(send)[0] if other != comm.rank and other >= 0 else 0


def _nothing(comm, send, receive, root):
    return 0


RULES = {  # name: (rule, whether the second argument receives, place of root or partner)
    "Allgather": (_gathered, True, None),
    "Allgatherv": (_gathered_v, True, None),
    "Reduce_scatter_block": (_scattered_sum, True, None),
    "Reduce_scatter": (_scattered_sum_v, True, None),
    "Allreduce": (_all_reduced, True, None),
    "Alltoall": (_exchanged, True, None),
    "Alltoallv": (_exchanged_v, True, None),
    "Bcast": (_from_root, False, 1),
    "Scatter": (_parts_from_root, True, 2),
    "Scatterv": (_parts_from_root, True, 2),
    "Gather": (_to_root, True, 2),
    "Gatherv": (_to_root, True, 2),
    "Reduce": (_to_root, True, 3),
    "Scan": (_to_other, True, None),
    "Exscan": (_to_other, True, None),
    "Send": (_to_other, False, 1),
    "Ssend": (_to_other, False, 1),
    "Sendrecv": (_to_other, False, 1),
    "Recv": (_nothing, False, None),
    "Barrier": (_nothing, False, None),
}
RULES |= {f"I{name.lower()}": rule for name, rule in RULES.items()}
# Of objects, which mpi4py pickles: how often a rank sends its own.
PICKLED = {
    "allgather": lambda n: n - 1,
    "alltoall": lambda n: (n - 1) / n,
    "allreduce": lambda n: 2 * (n - 1) / n,
    **dict.fromkeys(("send", "ssend", "isend", "issend", "sendrecv"), lambda n: 1),
    **dict.fromkeys(("gather", "reduce", "scan", "exscan"), lambda n: 1),
    **dict.fromkeys(("bcast", "scatter"), lambda n: n - 1),
    **dict.fromkeys(("recv", "irecv", "barrier"), lambda n: 0),
}


class Log:
    """One rank's calls, and its requests that are not complete; `entered(name)` and `left()` are
    told where it is.
    """

    def __init__(self, entered, left):
        self.entered, self.left = entered, left
        self.calls, self._requests = [], []

    def in_flight(self):
        """Requests that MPI has not completed, or that nobody has waited for."""
        self._requests = [r for r in self._requests if r != MPI.REQUEST_NULL]
        return len(self._requests)

    def started(self, request):
        """Remember a request until it is complete."""
        self._requests = [r for r in self._requests if r != MPI.REQUEST_NULL]
        self._requests.append(request)

    def taken(self, since):
        """The calls since that many, as dictionaries."""
        return [asdict(call) for call in self.calls[since:]]


class CountedComm(MPI.Intracomm):
    """mpi4py's communicator, whose calls go into a Log."""

    def of(self, log):
        """This communicator, with its log."""
        self.log = log
        return self

    def Dup(self, *arguments):
        """A copy that is counted alike."""
        return CountedComm(super().Dup(*arguments)).of(self.log)

    def Split(self, color=0, key=0):
        """A part that is counted alike."""
        part = super().Split(color, key)
        return part if part == MPI.COMM_NULL else CountedComm(part).of(self.log)


class Request(MPI.Request):
    """mpi4py's request; its wait is seen from outside."""

    log = None

    def Wait(self, status=None):
        """As mpi4py's."""
        self.log.entered("Wait")
        done = super().Wait(status)
        self.log.left()
        return done

    def wait(self, status=None):
        """As mpi4py's."""
        self.log.entered("wait")
        done = super().wait(status)
        self.log.left()
        return done


def _counting(name, count):
    """A method that counts and then does what mpi4py's does; count(comm, arguments) -> Call."""
    original = getattr(MPI.Intracomm, name)

    def method(self, *arguments, **named):
        self.log.calls.append(count(self, arguments, named))
        self.log.entered(name)
        found = original(self, *arguments, **named)
        self.log.left()
        if not isinstance(found, MPI.Request):
            return found
        request = Request(found)
        request.log = self.log
        self.log.started(request)
        return request

    method.__name__ = name
    return method


def _vector(name):
    rule, receives, place = RULES[name]

    def count(comm, given, named):
        send = given[0] if given else next(iter(named.values()), None)
        receive = given[1] if receives and len(given) > 1 else named.get("recvbuf")
        root = named.get("root", named.get("dest", 0))
        if place is not None and len(given) > place:
            root = given[place]
        sent = rule(comm, send, receive, root)
        sizes = [_bytes(part) for part in (send, receive) if part is not None]
        kinds = [kind for _, _, kind in sizes if kind]
        each = comm.size if "gather" in name else 1  # a count is that of one rank's part
        largest = max([size * (each if counted else 1) for size, counted, _ in sizes], default=0)
        return Call(name, sent, largest, kinds[0] if kinds else "")

    return count


def _object(name):
    def count(comm, given, named):
        if name in ("recv", "irecv", "barrier"):
            return Call(name, 0, 0, "")
        thing = given[0] if given else next(iter(named.values()), None)
        length = len(pickle.dumps(thing))
        return Call(name, int(length * PICKLED[name](comm.size)), length, "")

    return count


def _refused(name):
    def method(self, *arguments, **named):
        raise RuntimeError(f"{name} is not part of the course: the grader does not count it")

    return method


for _name in dir(MPI.Intracomm):
    if _name in RULES:
        setattr(CountedComm, _name, _counting(_name, _vector(_name)))
    elif _name in PICKLED:
        setattr(CountedComm, _name, _counting(_name, _object(_name)))
    elif (_name.startswith(UNCOUNTED) or _name.endswith("_init")) and "keyval" not in _name:
        setattr(CountedComm, _name, _refused(_name))


def _missing(name):
    raise AttributeError(f"MPI.{name} is not part of the course, or of mpi4py")


def stand_in():
    """The module that `from mpi4py import MPI` finds from now on; its COMM_WORLD is set anew for
    every case.
    """
    real = sys.modules["mpi4py.MPI"]
    module = types.ModuleType("mpi4py.MPI", real.__doc__)
    module.__dict__.update({k: v for k, v in vars(real).items() if k not in MISSING})
    module.Comm = module.Intracomm = CountedComm
    module.Request = Request
    module.__getattr__ = _missing
    sys.modules["mpi4py.MPI"] = sys.modules["mpi4py"].MPI = module
    return module
