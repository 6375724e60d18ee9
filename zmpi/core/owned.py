"""What a rank owns of a unit from the first step to the last: which part is stored, and which part it updates."""

from dataclasses import dataclass

import numpy as np

from zmpi.core.stages import Stage
from zmpi.messages.comm import Communicator
from zmpi.messages.device import Device
from zmpi.messages.ledger import Ledger
from zmpi.numbers.precision import Recipe


@dataclass(frozen=True)
class Owned:
    """One kind of state of one unit on this rank. Two of the three may be one array, and `is` says which.

    Compare identities, never lengths: on one rank all lengths are equal, and its calls are made and booked all the same.
    """

    stored: np.ndarray  # the whole vector, or this rank's shard of it
    shard: np.ndarray  # this rank's shard: what is stored, or a view into it
    # what the optimizer updates here: the shard, or at stage 0 all that is stored
    updated: np.ndarray

    @property
    def sharded(self):
        """Whether this rank stores its shard alone."""
        return self.stored is self.shard


@dataclass(frozen=True)
class Shared:
    """What all units of an engine share."""

    stage: Stage
    recipe: Recipe
    comm: Communicator
    ledger: Ledger
    device: Device
    moments: tuple  # names of the optimizer's moments

    def own(self, kind, layout, sharded, dtype):
        """The Owned of one kind of state, all zeros."""
        stored = self.new(kind, layout.shard_length if sharded else layout.padded, dtype)
        stored.fill(0)
        shard = stored if sharded else stored[layout.shard(self.comm.shard)]
        return Owned(stored, shard, shard if self.stage.optimizer else stored)

    def new(self, kind, length, dtype):
        """A flat vector, in the ledger's books for as long as it lives."""
        return self.ledger.track(kind, self.device.xp.empty(length, dtype))
