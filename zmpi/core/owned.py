"""The state of a unit that a rank owns throughout training: what it stores, and what it updates."""

from dataclasses import dataclass

import numpy as np

from zmpi.core.mesh import Mesh
from zmpi.core.stages import Placement
from zmpi.messages.device import Device
from zmpi.messages.ledger import Ledger
from zmpi.numbers.precision import Recipe


@dataclass(frozen=True)
class Owned:
    """One kind of state of one unit on this rank. Two of the three may be the same array.

    Compare them with `is`, never by length: one rank's are all equal, yet it makes the same calls.
    """

    rung: int  # of `stored`: 0 the whole vector, the mesh's top this rank's shard
    stored: np.ndarray
    shard: np.ndarray  # this rank's shard: `stored` itself, or a view into it
    updated: np.ndarray  # what the optimizer updates here: from all of `stored` to the shard


@dataclass(frozen=True)
class Shared:
    """What an engine's units have in common."""

    placement: Placement
    recipe: Recipe
    comm: Mesh
    ledger: Ledger
    device: Device
    moments: tuple  # names of the optimizer's moments

    def own(self, kind, cut, dtype):
        """The Owned of one kind of state, initially zero."""
        rung, updated, top = self.rung(kind), self.rung("optimizer"), self.comm.top
        stored = self.new(kind, cut.length(rung), dtype)
        stored.fill(0)
        at = {rung: stored}
        for other in (top, updated):
            if other not in at:
                at[other] = stored[cut.within(other, rung)]
        return Owned(rung, stored, at[top], at[updated])

    def rung(self, kind):
        """How many axes shard the kind."""
        return self.placement.rung(kind)

    def new(self, kind, length, dtype):
        """A new flat vector, booked in the ledger while it lives."""
        return self.ledger.track(kind, self.device.xp.empty(length, dtype))
