"""A unit: parameters that are gathered and reduced together, and all the memory they use.

Owned throughout training (a shard if the stage shards that kind, else the whole vector):
    parameters       in the recipe's parameter type
    gradients        in its gradient type: see gradient.py
    master, moments  in its master type (float32 parameters are their own master)
Only while in use:
    full     the gathered parameters, if they are sharded; from gather to free
    widened  a 16-bit full vector in float32, to compute with; from gather to free
    partial  the gradient of this rank's data, full length; from the first backward to reduce
    sum      the float32 sum over micro-batches, if no owned vector can hold it; to the last reduce
"""

import numpy as np

from zmpi.core.gradient import make_gradient
from zmpi.numbers.optim import Slice, sums_of_squares
from zmpi.numbers.sums import round_to


class Unit:
    """One unit on one rank, with the verbs gather, free, reduce and update."""

    def __init__(self, layout, shared):
        self.layout, self.shared = layout, shared
        self.cut = shared.comm.cut(layout)
        self.part = self.cut.slices[-1]  # the slice of the vector that this rank owns
        recipe = shared.recipe
        self.parameters = shared.own("parameters", self.cut, recipe.parameter)
        self.gradient = make_gradient(self.cut, shared)
        self.moments = {name: self._own_state() for name in shared.moments}
        self.master = self.parameters if recipe.own_master else self._own_state()
        self.owned = self._slice()
        self.full = self.widened = self._gather = None  # _gather: the one in progress
        self._handed = {}  # the views handed out, emptied when the full vector is dropped
        self.too_large = 0  # weights that the last update made infinite in 16 bits

    # -- gather and free ---------------------------------------------------------------------------

    def gather(self):
        """Start gathering the full vector, unless it is stored whole or the gather has started."""
        shared, owned = self.shared, self.parameters
        if owned.rung and self.full is None:
            self.full = shared.new("full", self.layout.padded, shared.recipe.parameter)
            self._gather = shared.comm.climb(self.cut, owned.stored, owned.rung, self.full)

    def weights(self):
        """{local name: view} of the full vector, after waiting for it. free() empties it."""
        self._arrive()
        if not self._handed:
            full = self.full if self.parameters.rung else self.parameters.stored
            self._handed = self.layout.views(self._in_compute_type(full))
        return self._handed

    def free(self):
        """Drop the full vector, after waiting for it: until then MPI writes to it."""
        self._arrive()
        self._handed.clear()
        self.full = self.widened = None

    def drop(self):
        """After an exception, drop everything not owned. Does not wait: a gather may never end."""
        self._gather = None
        self.free()
        self.gradient.drop()

    def _arrive(self):
        """Wait for the gather in progress, if any."""
        if self._gather:
            self._gather.wait()
            self._gather = None

    def _in_compute_type(self, full):
        """The full vector in the type to compute with: a CPU widens 16 bits to float32."""
        compute = self.shared.recipe.compute
        if full.dtype == compute:
            return full
        self.widened = self.shared.new("widened", self.layout.padded, compute)
        np.copyto(self.widened, full)
        return self.widened

    # -- reduce ------------------------------------------------------------------------------------

    def begin_step(self, micro_batches):
        """Expect this number of micro-batches."""
        self.gradient.begin_step(micro_batches)

    def partial(self):
        """{local name: view} of the partial gradient; backward adds to it, reduce() empties it."""
        return self.gradient.views()

    def reduce(self):
        """Sum the partial gradient over ranks and keep the shard. Ends the unit's micro-batch."""
        self.gradient.reduce()

    @property
    def summed(self):
        """This rank's shard of the gradient, summed over ranks."""
        return self.gradient.owned.shard

    def squares(self):
        """The sums of squares of this rank's pieces of the gradient: float64, on the host."""
        return sums_of_squares(self.summed, self.layout.pieces)

    # -- update ------------------------------------------------------------------------------------

    def update(self, optimizer, t, factor):
        """Update what this rank owns; then complete a vector that is kept whole."""
        optimizer.update(self.owned, t, factor)
        self._complete()

    def _complete(self):
        """After new owned parameters: count overflows, gather a vector that is kept whole."""
        self.too_large = self._infinite()
        owned, comm, updated = self.parameters, self.shared.comm, self.shared.rung("optimizer")
        if owned.stored is not owned.updated:
            comm.climb(self.cut, owned.updated, updated, owned.stored, owned.rung).wait()

    # -- what is owned -----------------------------------------------------------------------------

    def shards(self):
        """{"master" or a moment's name: this rank's shard}: the state saved in a checkpoint."""
        return {name: owned.shard for name, owned in self._state().items()}

    def restore(self):
        """Rebuild everything from the shards, after loading them on every rank."""
        self.drop()
        comm = self.shared.comm
        for owned in self._state().values():
            if owned.updated is not owned.shard:
                comm.climb(self.cut, owned.shard, comm.top, owned.stored, owned.rung).wait()
        self.owned.round()
        self._complete()

    def fill(self, full):
        """Set this rank's weights from a full vector on the host, in the master type."""
        full = self.shared.device.put(full)
        for owned in {id(owned): owned for owned in (self.master, self.parameters)}.values():
            round_to(owned.stored, full[self.cut.slices[owned.rung]])
        self.too_large = self._infinite()

    def vectors(self):
        """{kind: [vectors that this rank owns]}."""
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
        return shared.own("optimizer", self.cut, shared.recipe.master)

    def _state(self):
        return {"master": self.master, **self.moments}

    def _slice(self):
        """The Slice that this rank updates: views of its vectors."""
        layout = self.layout
        spans = layout.spans(self.cut.slices[self.shared.rung("optimizer")])
        decayed = [(start, stop, len(layout.shapes[name]) >= 2) for name, start, stop in spans]
        moments = {name: owned.updated for name, owned in self.moments.items()}
        stored = None if self.master is self.parameters else self.parameters.updated
        return Slice(self.master.updated, self.gradient.owned.updated, moments, decayed, stored)

    def _infinite(self):
        """The infinite 16-bit weights in this rank's shard: each counts on one rank."""
        if self.master is self.parameters:
            return 0
        return np.count_nonzero(np.isinf(self.parameters.shard))  # on a GPU an array: no waiting
