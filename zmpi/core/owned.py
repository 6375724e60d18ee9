"""The state of a unit that a rank owns throughout training: what it stores, and what it updates."""

from dataclasses import dataclass

import numpy as np

from zmpi.core.stages import Stage
from zmpi.messages.comm import Communicator
from zmpi.messages.device import Device
from zmpi.messages.ledger import Ledger
from zmpi.numbers.precision import Recipe


@dataclass(frozen=True)
class Owned:
    """One kind of state of one unit on this rank. Two of the three may be the same array.

    Compare them with `is`, never by length: one rank's are all equal, yet it makes the same calls.
    """

    stored: np.ndarray  # the whole vector, or this rank's shard of it
    shard: np.ndarray  # this rank's shard: `stored` itself, or a view into it
    updated: np.ndarray  # what the optimizer updates here: the shard, or at stage 0 all of `stored`

    @property
    def sharded(self):
        """Whether this rank stores only its shard."""
        return self.stored is self.shard


@dataclass(frozen=True)
class Shared:
    """What an engine's units have in common."""

    stage: Stage
    recipe: Recipe
    comm: Communicator
    ledger: Ledger
    device: Device
    moments: tuple  # names of the optimizer's moments

    def own(self, kind, layout, sharded, dtype):
        """The Owned of one kind of state, initially zero."""
        stored = self.new(kind, layout.shard_length if sharded else layout.padded, dtype)
        stored.fill(0)
        shard = stored if sharded else stored[layout.shard(self.comm.shard)]
        return Owned(stored, shard, shard if self.stage.optimizer else stored)

    def new(self, kind, length, dtype):
        """A new flat vector, booked in the ledger while it lives."""
        return self.ledger.track(kind, self.device.xp.empty(length, dtype))
