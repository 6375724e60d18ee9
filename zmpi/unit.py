"""A unit: parameters that are gathered and reduced together, and all the memory that they ever have.

Owned, from the first step to the last (a slice where the stage shards that kind, else the whole vector):
    parameters   in the recipe's parameter type
    gradients    in its gradient type
    master, and the optimizer's moments   in its master type (float32 parameters are their own master)
For the moment of use:
    full         the gathered parameters, where they are sharded; between gather and free
    widened      a 16-bit full vector in float32, for the arithmetic; between gather and free
    partial      the gradient of this rank's data only, full length; from the first backward visit to reduce
    sum          where micro-batches are added up in float32, if no owned vector can hold that; until the last reduce
"""

from dataclasses import dataclass

import numpy as np

from zmpi.comm import Communicator
from zmpi.device import Device
from zmpi.ledger import Ledger
from zmpi.optim import Slice, sums_of_squares
from zmpi.precision import Recipe
from zmpi.stages import Stage
from zmpi.sums import round_to


@dataclass(frozen=True)
class Rules:
    """What all units of an engine share."""

    stage: Stage
    recipe: Recipe
    comm: Communicator
    ledger: Ledger
    device: Device
    moments: tuple  # names of the optimizer's moments

    @property
    def reduce_each(self):
        """Whether a unit is reduced after every micro-batch, or once, after the last."""
        return self.stage.gradients or self.comm.ordered


class Unit:
    """One unit on one rank. Its verbs are gather, free, reduce and update."""

    def __init__(self, layout, rules):
        self.layout, self.rules = layout, rules
        self.part = layout.shard(
            rules.comm.shard
        )  # the slice of the full vector that this rank owns
        stage, recipe = rules.stage, rules.recipe
        self.parameters = self._own("parameters", stage.parameters, recipe.parameter)
        self.gradients = self._own("gradients", stage.gradients, recipe.gradient)
        self.moments = {
            name: self._own("optimizer", stage.optimizer, recipe.master) for name in rules.moments
        }
        self.master = (
            None if recipe.own_master else self._own("optimizer", stage.optimizer, recipe.master)
        )
        self.full = self.widened = self.partial = self.sum = self._gather = (
            None  # _gather: the one under way
        )
        self.too_large = (
            0  # weights of the last update that are finite in the master and infinite in 16 bits
        )

    # -- gather and free ------------------------------------------------------------------------------------------

    def gather(self):
        """Start to put the full vector together. Nothing to do where it is kept whole, or already under way."""
        if self.rules.stage.parameters and self.full is None:
            self.full = self._new("full", self.layout.padded, self.rules.recipe.parameter)
            self._gather = self.rules.comm.all_gather(self.layout, self.parameters, self.full)

    def weights(self):
        """{local name: view} of the full vector, once it is there. The caller drops the views before free()."""
        self._arrive()
        full = self.full if self.rules.stage.parameters else self.parameters
        if full.dtype != self.rules.recipe.compute:
            if self.widened is None:
                self.widened = self._new("widened", self.layout.padded, self.rules.recipe.compute)
                np.copyto(self.widened, full)
            full = self.widened
        return self.layout.views(full)

    def free(self):
        """Drop the full vector; what is owned stays. MPI writes to it until it is there, wanted or not."""
        self._arrive()
        self.full = self.widened = None

    def _arrive(self):
        """Wait for the gather that is under way, if one is."""
        if self._gather:
            self._gather.wait()
            self._gather = None

    def drop(self):
        """Let go of all that is not owned, after an exception. Waits for nothing: others may never start that gather."""
        self.full = self.widened = self.partial = self.sum = self._gather = None

    # -- gradients ------------------------------------------------------------------------------------------------

    def gradient_views(self, first):
        """{local name: view} of the partial gradient, zeroed at a micro-batch's first visit; backward adds to it.

        Where gradients are kept whole in the type of the arithmetic, the owned vector is the partial gradient. If it is
        reduced only once, it goes on adding up over the micro-batches, of which `first` is the first.
        """
        if self.partial is None:
            if self.rules.stage.gradients or self.gradients.dtype != self.rules.recipe.partial:
                self.partial = self._new("partial", self.layout.padded, self.rules.recipe.partial)
                self.partial.fill(0)
            else:
                self.partial = self.gradients
                if first or self.rules.reduce_each:
                    self.partial.fill(0)
        return self.layout.views(self.partial)

    def reduce(self, first, last):
        """Sum the partial gradient over ranks onto what this rank owns, and drop it.

        `first` and `last` say which of the step's micro-batches this is. Where all of them are added up before the one
        reduction, nothing happens until the last.
        """
        rules, mine = self.rules, self.summed
        sent, self.partial = self._rounded(self.partial), None
        if not (last or rules.reduce_each):
            return
        fresh = first or not rules.reduce_each
        if fresh:
            self.sum = self._place_for_sum(mine, only=last)
        rules.comm.reduce_scatter(self.layout, sent, self.sum, fresh)
        if last:
            if self.sum is not mine:
                round_to(mine, self.sum)
            self.sum = None
            if not rules.stage.optimizer:
                rules.comm.all_gather(self.layout, mine, self.gradients).wait()

    def _rounded(self, partial):
        """The partial gradient as it travels: rounded once to 16 bits, in the owned vector where that has the length."""
        if partial.dtype == self.rules.recipe.gradient:
            return partial
        whole = not self.rules.stage.gradients
        rounded = (
            self.gradients
            if whole
            else self._new("partial", len(partial), self.rules.recipe.gradient)
        )
        round_to(rounded, partial)
        return rounded

    def _place_for_sum(self, mine, only):
        """Where the micro-batches are added up: the owned slice, if it is wide enough and is not written in between."""
        lasting = self.rules.stage.gradients and mine.dtype == self.rules.recipe.master
        return mine if only or lasting else self._new("sum", len(mine), self.rules.recipe.master)

    def squares(self):
        """The sums of squares of this rank's pieces of the gradient: a float64 array of the host."""
        return sums_of_squares(self.summed, self.layout.pieces)

    # -- update ---------------------------------------------------------------------------------------------------

    def update(self, optimizer, t, factor):
        """Let the optimizer update what this rank owns, and make the full vector whole again where it is kept."""
        optimizer.update(self.owned(), t, factor)
        self._complete()

    def _complete(self):
        """Bring what depends on the owned parameters up to date: the full vector is whole again where it is kept."""
        self.too_large = 0 if self.master is None else self._infinite()
        if self.rules.stage.optimizer and not self.rules.stage.parameters:
            self.rules.comm.all_gather(
                self.layout, self._mine(self.parameters), self.parameters
            ).wait()

    def shards(self):
        """{"master" or a moment's name: view of this rank's shard of it}: the state that a checkpoint holds."""
        return {
            name: self._mine(vector)
            for name, vector in {"master": self._master, **self.moments}.items()
        }

    def restore(self):
        """Make all else from the shards, whose values have just been assigned on every rank."""
        self.drop()
        if not self.rules.stage.optimizer:
            for whole in (self._master, *self.moments.values()):
                self.rules.comm.all_gather(self.layout, self._mine(whole), whole).wait()
        self.owned().round()
        self._complete()

    @property
    def _master(self):
        """The vector in the master type: a copy, or the parameters themselves."""
        return self.parameters if self.master is None else self.master

    def owned(self):
        """The Slice that this rank updates: views of the vectors it owns."""
        part = self.part if self.rules.stage.optimizer else slice(0, self.layout.padded)
        decayed = [
            (a, b, len(self.layout.shapes[name]) >= 2) for name, a, b in self.layout.spans(part)
        ]
        stored = None if self.master is None else self._updated(self.parameters)
        return Slice(
            self._updated(self._master),
            self._updated(self.gradients),
            self.moments,
            decayed,
            stored,
        )

    def fill(self, full):
        """Take this rank's weights from a full vector of the host's in the master type (which is not kept)."""
        full = self.rules.device.put(full)
        if self.master is not None:
            np.copyto(self.master, full[self.part] if self.rules.stage.optimizer else full)
        round_to(self.parameters, full[self.part] if self.rules.stage.parameters else full)
        self.too_large = 0 if self.master is None else self._infinite()

    @property
    def summed(self):
        """The gradient, summed over ranks, of this rank's shard: a view."""
        return self._mine(self.gradients)

    def owned_bytes(self):
        """{kind: bytes} of the live vectors that this rank owns."""
        optimizer = (
            [*self.moments.values()]
            if self.master is None
            else [*self.moments.values(), self.master]
        )
        vectors = {
            "parameters": [self.parameters],
            "gradients": [self.gradients],
            "optimizer": optimizer,
        }
        return {kind: sum(vector.nbytes for vector in owned) for kind, owned in vectors.items()}

    def _infinite(self):
        """How many 16-bit weights of this rank's slice are infinite: each is counted on one rank, at every stage."""
        return np.count_nonzero(
            np.isinf(self._mine(self.parameters))
        )  # an array on a GPU: nobody waits for it here

    # -- memory ---------------------------------------------------------------------------------------------------

    def _mine(self, vector):
        """The slice of an owned vector that belongs to this rank's shard, whether the vector is whole or a slice."""
        return vector if len(vector) == self.layout.shard_length else vector[self.part]

    def _updated(self, vector):
        """The part of an owned vector that this rank updates: its shard, or all of it where optimizer states are whole."""
        return self._mine(vector) if self.rules.stage.optimizer else vector

    def _own(self, kind, sharded, dtype):
        vector = self._new(kind, self.layout.shard_length if sharded else self.layout.padded, dtype)
        vector.fill(0)
        return vector

    def _new(self, kind, length, dtype):
        return self.rules.ledger.track(kind, self.rules.device.xp.empty(length, dtype))
