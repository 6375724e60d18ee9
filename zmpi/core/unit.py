"""A unit: parameters that are gathered and reduced together, and all the memory that they ever have.

Owned, from the first step to the last (a shard where the stage shards that kind, else the whole vector):
    parameters   in the recipe's parameter type
    gradients    in its gradient type: see gradient.py
    master, and the optimizer's moments   in its master type (float32 parameters are their own master)
For the moment of use:
    full         the gathered parameters, where they are sharded; between gather and free
    widened      a 16-bit full vector in float32, for the arithmetic; between gather and free
    partial      the gradient of this rank's data only, full length; from the first backward visit to reduce
    sum          where micro-batches are added up in float32, if no owned vector can hold that; until the last reduce

The padding of every vector stays zero: it starts so, gradients of it are zero, and so are the moments and the updates
that follow. It adds nothing to a norm.
"""

import numpy as np

from zmpi.core.gradient import make_gradient
from zmpi.numbers.optim import Slice, sums_of_squares
from zmpi.numbers.sums import round_to


class Unit:
    """One unit on one rank. Its verbs are gather, free, reduce and update."""

    def __init__(self, layout, shared):
        self.layout, self.shared = layout, shared
        self.part = layout.shard(shared.comm.shard)  # the slice of the vector that this rank owns
        stage, recipe = shared.stage, shared.recipe
        self.parameters = shared.own("parameters", layout, stage.parameters, recipe.parameter)
        self.gradient = make_gradient(layout, shared)
        self.moments = {name: self._own_state() for name in shared.moments}
        self.master = self.parameters if recipe.own_master else self._own_state()
        self.owned = self._slice()
        self.full = self.widened = self._gather = None  # _gather: the one under way
        self._handed = {}  # the views that were handed out, emptied when the full vector is dropped
        self.too_large = (
            0  # weights of the last update, finite in the master and infinite in 16 bits
        )

    # -- gather and free ---------------------------------------------------------------------------

    def gather(self):
        """Start to put the full vector together. Nothing to do where it is whole, or already under way."""
        if self.parameters.sharded and self.full is None:
            shared = self.shared
            self.full = shared.new("full", self.layout.padded, shared.recipe.parameter)
            self._gather = shared.comm.all_gather(self.layout, self.parameters.stored, self.full)

    def weights(self):
        """{local name: view} of the full vector, once it is there. free() empties it."""
        self._arrive()
        if not self._handed:
            full = self.full if self.parameters.sharded else self.parameters.stored
            self._handed = self.layout.views(self._in_compute_type(full))
        return self._handed

    def free(self):
        """Drop the full vector; what is owned stays. MPI writes to it until it is there, wanted or not."""
        self._arrive()
        self._handed.clear()
        self.full = self.widened = None

    def drop(self):
        """Let go of all that is not owned, after an exception. Waits for nothing: others may never start that gather."""
        self._gather = None
        self.free()
        self.gradient.drop()

    def _arrive(self):
        """Wait for the gather that is under way, if one is."""
        if self._gather:
            self._gather.wait()
            self._gather = None

    def _in_compute_type(self, full):
        """The full vector as the arithmetic takes it: a 16-bit one is widened to float32 on a CPU."""
        compute = self.shared.recipe.compute
        if full.dtype == compute:
            return full
        self.widened = self.shared.new("widened", self.layout.padded, compute)
        np.copyto(self.widened, full)
        return self.widened

    # -- reduce ------------------------------------------------------------------------------------

    def begin_step(self, micro_batches):
        """From now on there are so many micro-batches to reduce."""
        self.gradient.begin_step(micro_batches)

    def partial(self):
        """{local name: view} of the partial gradient, to which backward adds. reduce() empties it."""
        return self.gradient.views()

    def reduce(self):
        """Sum the partial gradient over ranks, keep the shard, and drop it. Ends the unit's micro-batch."""
        self.gradient.reduce()

    @property
    def summed(self):
        """The gradient, summed over ranks, of this rank's shard."""
        return self.gradient.owned.shard

    def squares(self):
        """The sums of squares of this rank's pieces of the gradient: a float64 array of the host."""
        return sums_of_squares(self.summed, self.layout.pieces)

    # -- update ------------------------------------------------------------------------------------

    def update(self, optimizer, t, factor):
        """Let the optimizer update what this rank owns; then the full vector is whole again where it is kept."""
        optimizer.update(self.owned, t, factor)
        self._complete()

    def _complete(self):
        """Bring what depends on the owned parameters up to date."""
        self.too_large = self._infinite()
        parameters = self.parameters
        if parameters.stored is not parameters.updated:
            self.shared.comm.all_gather(self.layout, parameters.shard, parameters.stored).wait()

    # -- what is owned -----------------------------------------------------------------------------

    def shards(self):
        """{"master" or a moment's name: view of this rank's shard of it}: the state that a checkpoint holds."""
        return {name: owned.shard for name, owned in self._state().items()}

    def restore(self):
        """Make all else from the shards, whose values have just been assigned on every rank."""
        self.drop()
        for owned in self._state().values():
            if owned.updated is not owned.shard:
                self.shared.comm.all_gather(self.layout, owned.shard, owned.stored).wait()
        self.owned.round()
        self._complete()

    def fill(self, full):
        """Take this rank's weights from a full vector of the host's in the master type (which is not kept)."""
        full = self.shared.device.put(full)
        mine = full[self.part]
        for owned in {id(owned): owned for owned in (self.master, self.parameters)}.values():
            round_to(owned.stored, mine if owned.sharded else full)
        self.too_large = self._infinite()

    def vectors(self):
        """{kind: [the live vectors that this rank owns]}."""
        optimizer = [owned.stored for owned in self._state().values()]
        if self.master is self.parameters:
            del optimizer[0]
        parameters, gradients = [self.parameters.stored], [self.gradient.owned.stored]
        return {"parameters": parameters, "gradients": gradients, "optimizer": optimizer}

    def owned_bytes(self):
        """{kind: bytes} of what this rank owns."""
        return {kind: sum(v.nbytes for v in found) for kind, found in self.vectors().items()}

    def _own_state(self):
        shared = self.shared
        return shared.own("optimizer", self.layout, shared.stage.optimizer, shared.recipe.master)

    def _state(self):
        return {"master": self.master, **self.moments}

    def _slice(self):
        """The Slice that this rank updates: views of the vectors it owns."""
        layout, stage = self.layout, self.shared.stage
        spans = layout.spans(self.part if stage.optimizer else slice(0, layout.padded))
        decayed = [(start, stop, len(layout.shapes[name]) >= 2) for name, start, stop in spans]
        moments = {name: owned.updated for name, owned in self.moments.items()}
        stored = None if self.master is self.parameters else self.parameters.updated
        return Slice(self.master.updated, self.gradient.owned.updated, moments, decayed, stored)

    def _infinite(self):
        """How many 16-bit weights of this rank's shard are infinite: each is counted on one rank, at every stage."""
        if self.master is self.parameters:
            return 0
        # an array on a GPU: nobody waits for it here
        return np.count_nonzero(np.isinf(self.parameters.shard))
