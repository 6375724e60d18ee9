"""The ledger: what was moved and what is alive, in elements and bytes, counted where it happens."""

import weakref
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass

from zmpi.messages.memory import peak_resident_bytes

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "other")
OWNED = ("parameters", "gradients", "optimizer")
WORK = ("partial", "widened", "sum", "message", "pinned")  # kinds of work buffers


@dataclass
class Moved:
    """What one kind of collective moved in a step, as this rank saw it."""

    calls: int = 0  # MPI calls
    elements: int = 0  # the paper's count: unpadded, the same at one rank
    bytes_sent: int = 0  # (ranks - 1) x shard length x bytes per element, padding included
    padding_bytes: int = 0  # the padding in bytes_sent
    blocked_s: float = 0.0  # seconds the caller waited inside MPI
    elements_between: int = 0  # as `elements`, along the outer axis; 0 on a flat world
    bytes_between: int = 0  # of bytes_sent, those along the outer axis
    padding_between: int = 0  # of padding_bytes


class _Life(weakref.ref):
    """Calls the ledger when a tracked array dies, at a fraction of weakref.finalize's cost."""

    __slots__ = ("kind", "nbytes")


class Ledger:
    """One engine's books. `track` measures real lifetimes: an array lives until it is freed."""

    def __init__(self):
        self.moved = defaultdict(Moved)  # (kind, unit) -> Moved
        self._outside = defaultdict(
            Moved
        )  # the part of `moved` booked as other since the step began
        self.alive = Counter()  # kind of memory -> bytes
        self.peak = Counter()  # kind of memory -> highest bytes since the step began
        self.work_peak = 0  # highest sum over the kinds of work buffers
        self.peak_bytes = peak_resident_bytes  # the process's peak, everything included
        self._lives = {}  # id -> _Life of each live array
        self._as_other = False

    def begin_step(self):
        """Start a new step's books; what moved since the last step opens them, under "other"."""
        self.moved, self._outside = self._outside, defaultdict(Moved)
        self.peak = Counter(self.alive)
        self.work_peak = self._work()

    # -- what was moved ----------------------------------------------------------------------------

    def book(self, kind, unit, **amounts):
        """Add amounts (fields of Moved) to a kind of collective; inside `as_other` to "other"."""
        books = (self.moved, self._outside) if self._as_other else (self.moved,)
        for book in books:
            entry = book["other" if self._as_other else kind, unit]
            for field, amount in amounts.items():
                setattr(entry, field, getattr(entry, field) + amount)

    @contextmanager
    def as_other(self):
        """Book what moves inside the `with` block (evaluation, checkpoints) under "other"."""
        outer, self._as_other = self._as_other, True
        try:
            yield
        finally:
            self._as_other = outer

    # -- what is alive -----------------------------------------------------------------------------

    def track(self, kind, array):
        """Book the array's bytes until its memory is actually freed; returns the array.

        The array must own its memory: a view, a forgotten name or a reference in a closure keeps it
        alive, hence in the books.
        """
        alive = self.alive[kind] = self.alive[kind] + array.nbytes
        if alive > self.peak[kind]:
            self.peak[kind] = alive
        if kind in WORK:
            self.work_peak = max(self.work_peak, self._work())
        life = _Life(array, self._died)
        life.kind, life.nbytes = kind, array.nbytes
        self._lives[id(life)] = life
        return array

    def _died(self, life):
        del self._lives[id(life)]
        self.alive[life.kind] -= life.nbytes

    def _work(self):
        return sum(self.alive[kind] for kind in WORK)

    # -- the log's entries -------------------------------------------------------------------------

    def __getitem__(self, name):
        """This rank's log entry of the step: "comm" or "memory"."""
        return {"comm": self._comm, "memory": self._memory}[name]()

    def _comm(self):
        totals = {kind: Moved() for kind in COLLECTIVES}
        for (kind, _), entry in self.moved.items():
            for field, amount in vars(entry).items():
                setattr(totals[kind], field, getattr(totals[kind], field) + amount)
        return {kind: vars(total) for kind, total in totals.items()}

    def _memory(self):
        owned = {kind: self.peak[kind] for kind in OWNED}
        return {
            **owned,
            "full_peak": self.peak["full"],
            "work": self.work_peak,
            "peak": self.peak_bytes(),
        }


class Between:
    """The ledger for the outer axis: what it books is counted as between groups."""

    def __init__(self, ledger):
        self._ledger = ledger
        self.track = ledger.track

    def book(self, kind, unit, elements=0, bytes_sent=0, padding_bytes=0, **amounts):
        amounts |= {"bytes_sent": bytes_sent, "padding_bytes": padding_bytes}
        between = {"bytes_between": bytes_sent, "padding_between": padding_bytes}
        self._ledger.book(kind, unit, elements_between=elements, **amounts, **between)
