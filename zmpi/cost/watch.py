"""An engine that reports each verb to its ledger, and takes the same steps, to the bit.

    WatchedZeRO  tells its ledger when each verb of the loop begins and ends
    Watch        a ledger that listens: trace.py records the verbs, Memory what is alive

The engine itself does not know about this, and pays nothing for it.
"""

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from models.layer import Layer
from zmpi.core.engine import ZeRO
from zmpi.core.unit import Unit
from zmpi.messages.comm import Communicator
from zmpi.messages.ledger import OWNED, WORK, Ledger


class Watch(Ledger):
    """A ledger that is told the current verb, and its unit (forward and backward: its layer)."""

    def __init__(self):
        super().__init__()
        self.place = ("", "")  # the current verb; between two, the last one

    def begin_step(self):
        super().begin_step()
        self.place = "at the start", ""

    @contextmanager
    def doing(self, verb, name):
        """Wraps a verb. Verbs do not nest."""
        self.place = verb, name
        self.began()
        yield
        self.place = f"after {verb}", name
        self.ended()

    def began(self):
        """The verb in `place` begins."""

    def ended(self):
        """The verb in `place` is over."""


class WatchedUnit(Unit):
    """A unit that reports its verbs, except those with nothing to do at this stage."""

    def gather(self):
        if self.parameters.rung and self.full is None:
            with self._doing("gather"):
                super().gather()

    def weights(self):
        if self._gather is None:
            return super().weights()
        with self._doing("wait"):
            return super().weights()

    def free(self):
        if self.full is not None or self.widened is not None:
            with self._doing("free"):
                super().free()

    def reduce(self):
        with self._doing("reduce"):
            super().reduce()

    def update(self, optimizer, t, factor):
        with self._doing("update"):
            super().update(optimizer, t, factor)

    def _doing(self, verb):
        return self.shared.ledger.doing(verb, self.layout.name)


class WatchedLayer(Layer):
    """A layer that reports when it computes."""

    def __init__(self, layer, ledger):
        self._layer, self._ledger = layer, ledger
        self.name, self.unit = layer.name, layer.unit
        self.backward_needs_weights = layer.backward_needs_weights

    def shapes(self):
        return self._layer.shapes()

    def forward(self, w, x):
        with self._ledger.doing("forward", self.name):
            return self._layer.forward(w, x)

    def backward(self, w, dw, saved, dy):
        with self._ledger.doing("backward", self.name):
            return self._layer.backward(w, dw, saved, dy)


class WatchedZeRO(ZeRO):
    """The engine, reporting to `make_ledger`, a Watch."""

    make_ledger = Watch
    make_unit = WatchedUnit

    def make_layer(self, layer):
        return WatchedLayer(super().make_layer(layer), self.ledger)

    def turn(self, model, *arguments):
        with self.ledger.doing("turn", model.layers[-1].name):
            return super().turn(model, *arguments)


def watched(engine, ledger):
    """The watched form of an engine class (ZeRO or your own); `ledger()` makes its Watch."""

    class Watched(joined(WatchedZeRO, engine)):
        make_ledger = staticmethod(ledger)

    return Watched


def joined(kind, engine):
    """A `kind` of WatchedZeRO (or ZeRO) with the parts of your own engine class."""
    if ZeRO in (kind, engine):
        return engine if kind is ZeRO else kind

    class Joined(kind, engine):
        make_unit = staticmethod(_both(kind.make_unit, engine.make_unit, Unit))
        make_communicator = staticmethod(
            _both(kind.make_communicator, engine.make_communicator, Communicator)
        )

    return Joined


def _both(outer, own, plain):
    """A class with what two classes add to a `plain` one. `own` may be a partial of its class."""
    if plain in (outer, own):
        return own if outer is plain else outer
    if isinstance(own, partial):
        return partial(_both(outer, own.func, plain), *own.args, **own.keywords)

    class Both(outer, own):
        pass

    return Both


@dataclass(frozen=True)
class Moment:
    """Live bytes at one point of a step."""

    verb: str
    name: str
    tracked: dict  # kind of memory -> bytes
    activations: int  # live between two verbs and not tracked: saved tensors, the next input
    total: int  # highest, until the next Moment

    @property
    def temporaries(self):
        """What the verb needs while it runs."""
        return self.total - self.activations - sum(self.tracked.values())

    def by_kind(self):
        """Bytes by kind: owned state, full, work, activations, temporaries and total."""
        owned = {kind: self.tracked.get(kind, 0) for kind in OWNED}
        work = sum(self.tracked.get(kind, 0) for kind in WORK)
        rest = {
            "activations": self.activations,
            "temporaries": self.temporaries,
            "total": self.total,
        }
        return {**owned, "full": self.tracked.get("full", 0), "work": work, **rest}


class Memory(Watch):
    """A ledger that also samples all array memory, at every verb and every array it books.

    `read()` returns (bytes of live arrays, highest since the last read). Untracked arrays from
    before the step (the inputs) do not count.
    """

    def __init__(self, read):
        super().__init__()
        self.moments = []  # of the last step
        self._read = read
        self._before = self._activations = 0
        self._open = None  # (place, tracked, activations) since the last sample

    def begin_step(self):
        super().begin_step()
        self.moments, self._open = [], None
        self._before = self._read()[0] - sum(self.alive.values())
        self._look(between=True)

    def began(self):
        self._look(between=True)

    def ended(self):
        self._look(between=True)

    def track(self, kind, array):
        super().track(kind, array)
        self._look()
        return array

    def _look(self, between=False):
        """Close the moment since the last sample, and open the next one."""
        now, highest = self._read()
        if self._open is not None:
            self.moments.append(Moment(*self._open, highest - self._before))
        if between:
            self._activations = now - self._before - sum(self.alive.values())
        tracked = {kind: nbytes for kind, nbytes in self.alive.items() if nbytes}
        self._open = (*self.place, tracked, self._activations)

    def highest(self):
        """The step's Moment with the most bytes; of equal ones the last, with all its arrays."""
        return max(reversed(self.moments), key=lambda moment: moment.total)

    def highest_activations(self):
        """The most bytes alive between two verbs."""
        return max(moment.activations for moment in self.moments)
