"""The processes of a run. Only this file imports mpi4py; only it and comm.py call MPI."""

import atexit
import ctypes
import os
import sys
from copy import copy

from zmpi.messages.cuda_aware import choose_transport, cuda_awareness
from zmpi.messages.device import choose_device
from zmpi.messages.under_way import Lane, UnderWay
from zmpi.numbers.domains import Domain
from zmpi.process.agree import agreed
from zmpi.process.blas import set_threads
from zmpi.process.guard import arm
from zmpi.process.launch import mismatched_launcher


class _Mpi:
    """mpi4py.MPI, imported (which starts MPI) on first use: zmpi.plan runs without MPI."""

    def __getattr__(self, name):
        from mpi4py import MPI

        self.__dict__[name] = getattr(MPI, name)
        return self.__dict__[name]


MPI = _Mpi()
TIMEOUT = Domain(above=True)  # seconds
GROUP = Domain(1, whole=True)  # ranks


class World:
    """The MPI processes of this run, their device, transport and reduction. None waits forever.

    Making one arms the guard (guard.py): a collective that takes longer than `timeout` seconds ends
    the run.
    """

    transport, transport_why = "host", ""  # how vectors reach MPI (see transport.py), and why
    group = None  # ranks per group; None: there are no groups

    def __init__(
        self, device="auto", transport="auto", reduction="auto", timeout=300, group=None, node=None
    ):
        self.mpi = MPI.COMM_WORLD
        self.rank, self.size = self.mpi.rank, self.mpi.size
        self.launched = range(self.size)  # the launcher's number of each rank
        multiple = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.guard = arm(self.mpi, self.mpi.Abort, MPI.Is_finalized, multiple)
        self.guard.program = _program()
        self.guard.meet(timeout if TIMEOUT.fits(timeout) else 300)
        local_rank, lowest = self._place_on_this_node()
        with self.agreed():
            TIMEOUT.of("--timeout", timeout)
            if line := mismatched_launcher(os.environ, self.size, self.library):
                raise ValueError(line)
            self.device = choose_device(device, local_rank)
            if reduction not in ("auto", "mpi", "ordered"):
                raise ValueError(f"--reduction: expected auto, mpi or ordered; got {reduction!r}")
        self.lane = self.guard.lane = self.guard.lane or self._new_lane()
        self.transport, self.transport_why = self.transport_for(self.device.name, transport)
        self.reduction = reduction
        self.threads = set_threads(os.environ)
        self._cut(group, self.share((group, node or lowest)))

    def _cut(self, group, everyone):
        """Number the ranks by node, and cut them into groups. `everyone`: (group, node) of each."""
        self._axes = self.group = None
        asked, nodes = zip(*everyone, strict=True)
        with self.agreed():
            if len(set(asked)) > 1:
                raise ValueError(f"--group: expected the same on all ranks, got {asked}")
        if group in (None, 1):
            return
        first = {name: nodes.index(name) for name in nodes}
        self.launched = sorted(range(self.size), key=lambda rank: (first[nodes[rank]], rank))
        with self.agreed():
            self.group = _group(group, nodes)
        with self.guard.waiting("agreement"):
            self.mpi = self.mpi.Split(0, self.launched.index(self.rank))
            self.rank = self.mpi.rank
            place, number = self.rank % self.group, self.rank // self.group
            inner, outer = self.mpi.Split(number, place), self.mpi.Split(place, number)
        groups = [nodes[rank] for rank in self.launched]
        starts = range(0, self.size, self.group)
        self.straddles = any(len({*groups[at : at + self.group]}) > 1 for at in starts)
        self._axes = self.part(inner), self.part(outer)
        for axis, where in zip(self._axes, ("within the group", "between the groups"), strict=True):
            axis.guard = NamedWaits(self.guard, where)

    @property
    def axes(self):
        """The Worlds along which state may be sharded, inner first; without groups, this one."""
        return self._axes or (self,)

    def twin(self, reduction=None, alone=False):
        """This world with another reduction, or (`alone`) with this process as its only rank."""
        twin = self.part(MPI.COMM_SELF) if alone else copy(self)
        twin.reduction = reduction or self.reduction
        return twin

    def part(self, mpi):
        """This world on a communicator of some of its ranks, including this one."""
        part = copy(self)
        part.mpi, part.rank, part.size = mpi, mpi.rank, mpi.size
        part.lane, part._axes, part.group = Lane(mpi, self.lane.under_way), None, None
        part.launched = range(part.size)
        return part

    def settle(self, started=None):
        """Resynchronise the ranks after exceptions. Collective.

        Completes the collectives that all ranks started. Those that only some started will never
        complete: they keep their vectors, and a new communicator carries later ones. `started`:
        every rank's `lane.started`, if known already.
        """
        started = self.share(self.lane.started) if started is None else started
        with self.guard.waiting("an earlier step's unfinished collectives"):
            self.lane.settle(started, self.mpi.Dup)

    def _new_lane(self):
        """Made once per process, however many Worlds it makes."""
        under_way = UnderWay()
        atexit.register(under_way.keep)
        with self.guard.waiting("agreement"):
            return Lane(self.mpi.Dup(), under_way)

    def transport_for(self, device, asked="auto"):
        """(transport, why) for arrays on a device, "cpu" or "cuda". Collective; touches no GPU."""
        kinds = self.mpi.Get_info().get("mpi_memory_alloc_kinds", "")
        answer = device, *cuda_awareness(ctypes.CDLL(MPI.__file__), kinds, os.environ)
        answers = self.share(answer)
        with self.agreed():
            return choose_transport(asked, answers)

    def _place_on_this_node(self):
        """(this rank's number on its node, the lowest rank there)."""
        with self.guard.waiting("agreement"):
            node = self.mpi.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
            place = node.rank, node.bcast(self.rank)
            node.Free()
        return place

    def nodes(self):
        """The node of every rank, numbered in the order of their lowest ranks. Collective."""
        lowest_ranks = self.share(self._place_on_this_node()[1])
        order = sorted(set(lowest_ranks))
        return [order.index(rank) for rank in lowest_ranks]

    @property
    def library(self):
        """The MPI library and its version, on one line."""
        return MPI.Get_library_version().split("\n")[0].strip().rstrip("\0")

    @property
    def standard(self):
        """(version of the MPI standard, name of this process's thread level)."""
        names = {
            MPI.THREAD_SINGLE: "single",
            MPI.THREAD_FUNNELED: "funneled",
            MPI.THREAD_SERIALIZED: "serialized",
        }
        return "{}.{}".format(*MPI.Get_version()), names.get(MPI.Query_thread(), "multiple")

    def reduction_for(self, recipe):
        """How this recipe's gradients are reduced: "mpi" or "ordered"; ValueError if MPI cannot."""
        narrow = recipe.gradient.itemsize < 4
        if self.reduction == "mpi" and narrow:
            raise ValueError(
                f"--reduction: mpi cannot sum {recipe.name} (MPI has no portable 16-bit float); "
                "use ordered"
            )
        if self.reduction == "auto":
            return "ordered" if narrow or self.device.name != "cpu" else "mpi"
        return self.reduction

    def share(self, thing, name="agreement"):
        """Every rank's `thing` (small, plain Python types), as a list in rank order. Collective."""
        with self.guard.waiting(name):
            return self.mpi.allgather(thing)

    def agreed(self):
        """Turn an error in the `with` block on any rank into one on all (agree.py). Collective."""
        return agreed(self)


class NamedWaits:
    """The guard, for the collectives of one axis: each wait says which."""

    def __init__(self, guard, where):
        self._guard, self._where = guard, where

    def waiting(self, name):
        return self._guard.waiting(f"{name} {self._where}")

    def __getattr__(self, name):
        return getattr(self._guard, name)


def _group(asked, nodes):
    """The number of ranks in a group; ValueError if the ranks cannot be cut so."""
    size = len(nodes)
    if asked == "node":
        counts = {nodes.count(name) for name in nodes}
        if len(counts) > 1:
            few, many = min(counts), max(counts)
            raise ValueError(
                f"--group: node needs as many ranks on each; they have {few} to {many}"
            )
        return counts.pop()
    GROUP.of("--group", asked)
    if size % asked:
        raise ValueError(f"--group: expected a number that divides the {size} ranks, got {asked}")
    return asked


def _program():
    """The name that starts an error line: the running command, or zmpi."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # pdb leaves none
    return spec.name if spec and spec.name.startswith("zmpi.") else "zmpi"
