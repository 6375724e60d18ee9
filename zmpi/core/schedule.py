"""The order in which a micro-batch visits the layers, as a table computed in advance.

Forward through the layers, the turn at the last one (forward, loss and backward in one visit), and
backward. A unit is gathered if the visit needs it and the previous one did not keep it, freed if
the next visit does not need it, and reduced at the last visit that adds to its gradient. This does
not depend on the stage: if parameters are not sharded, gather and free do nothing.
"""

from collections import Counter
from dataclasses import dataclass, replace

from zmpi.process.table import in_columns


@dataclass(frozen=True)
class Visit:
    """One layer's part in a pass."""

    layer: int  # index in model.layers
    unit: str | None  # None: the layer has no parameters
    forward: bool
    backward: bool
    weights: bool  # whether the computation needs the unit's full vector
    gather: bool = False
    free: bool = False
    reduce: bool = False
    next: str | None = None  # the unit that the next visit gathers

    @property
    def turn(self):
        """The last layer's visit, where forward becomes backward."""
        return self.forward and self.backward

    def verbs(self):
        """What happens in this visit, in order."""
        verbs = {
            "gather": self.gather,
            "forward": self.forward,
            "loss": self.turn,
            "backward": self.backward,
            "free": self.free,
            "reduce": self.reduce,
        }
        return [verb for verb, happens in verbs.items() if happens]


class Schedule(tuple):
    """A tuple of visits that prints as a table. Each knows what the next one gathers."""

    heading = ()  # lines above the table

    def __new__(cls, visits):
        visits = list(visits)
        after = [visit.unit if visit.gather else None for visit in visits[1:]]
        return super().__new__(cls, map(_before, visits, [*after, None]))

    @property
    def parts(self):
        """(visits of the forward pass, the turn or None, visits of the backward pass)."""
        turn = next((visit for visit in self if visit.turn), None)
        forward = [visit for visit in self if visit.forward and visit is not turn]
        return forward, turn, [visit for visit in self if visit.backward and visit is not turn]

    @property
    def gathers(self):
        """Counter {unit: gathers per micro-batch}, if parameters are sharded."""
        return Counter(visit.unit for visit in self if visit.gather)

    @property
    def reduces(self):
        """Counter {unit: reductions per micro-batch}, if gradients are sharded."""
        return Counter(visit.unit for visit in self if visit.reduce)

    def __str__(self):
        rows = [("visit", "layer", "unit", "what happens")]
        rows += [
            (str(i), str(v.layer), v.unit or "-", ", ".join(v.verbs())) for i, v in enumerate(self)
        ]
        return "\n".join([*self.heading, in_columns(rows, left=4)])


def training_schedule(layers, units):
    """The schedule of a micro-batch: `layers` follow the Layer contract, `units` are their units.

    A layer without parameters has no unit (None): it is computed, but nothing is moved.
    """
    last = len(layers) - 1
    walk = [
        Visit(i, unit, forward=True, backward=i == last, weights=unit is not None)
        for i, unit in enumerate(units)
    ]
    for i in reversed(range(last)):
        weights = units[i] is not None and layers[i].backward_needs_weights
        walk.append(Visit(i, units[i], forward=False, backward=True, weights=weights))
    return _with_moves(walk)


def evaluation_schedule(layers, units):
    """The forward pass alone, gathering and freeing as in training."""
    return _with_moves(
        [
            Visit(i, unit, forward=True, backward=False, weights=unit is not None)
            for i, unit in enumerate(units)
        ]
    )


def _with_moves(walk):
    """Decide for each visit whether it gathers, frees and reduces its unit."""
    schedule = []
    for i, visit in enumerate(walk):
        before = walk[i - 1] if i else None
        after = walk[i + 1] if i + 1 < len(walk) else None
        last = not any(v.backward and v.unit == visit.unit for v in walk[i + 1 :])
        moves = {
            "gather": visit.weights and not _needs(before, visit.unit),
            "free": visit.weights and not _needs(after, visit.unit),
            "reduce": visit.backward and visit.unit is not None and last,
        }
        schedule.append(replace(visit, **moves))
    return Schedule(schedule)


def _before(visit, following):
    """The visit, with what the next one gathers."""
    return replace(visit, next=following)


def _needs(visit, unit):
    return visit is not None and visit.unit == unit and visit.weights
