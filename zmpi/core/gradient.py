"""A unit's gradient on one rank: the partial one of its data, and its part of the sum over ranks.

gradients, reduction  regime       the partial gradient is  micro-batches are added up in
sharded, either       ReducedEach  a vector of its own      the owned shard; 16 bits: a float32 sum
whole, ordered        ReducedEach  the owned vector;        a float32 sum (a single micro-batch:
                                   16 bits: one of its own  the owned shard)
whole, mpi            ReducedOnce  the owned vector         the owned vector
"""

from zmpi.numbers.sums import round_to


def make_gradient(layout, shared):
    """The Gradient of a unit. The only place that chooses its regime."""
    each = shared.stage.gradients or shared.comm.ordered
    return (ReducedEach if each else ReducedOnce)(layout, shared)


class Gradient:
    """What both regimes share. A step: begin_step(), then views() and reduce() per micro-batch."""

    def __init__(self, layout, shared):
        self.layout, self.shared = layout, shared
        sharded, dtype = shared.stage.gradients, shared.recipe.gradient
        self.owned = shared.own("gradients", layout, sharded, dtype)
        self.partial = self.sum = None  # exist only while in use
        self._handed = {}  # the views handed out, emptied when the partial gradient is dropped
        self._first = True  # whether this is the step's first micro-batch
        self._left = 1  # micro-batches not yet reduced

    def begin_step(self, micro_batches):
        """Expect this number of micro-batches."""
        self._first, self._left = True, micro_batches

    def views(self):
        """{local name: view} of the partial gradient, initially zero; backward adds to it."""
        if self.partial is None:
            self.partial = self._make_partial()
            self._handed = self.layout.views(self.partial)
        return self._handed

    def reduce(self):
        """Add the sum over ranks onto the part this rank owns. Ends the micro-batch."""
        self._left -= 1
        self._reduce()
        self._first = False
        if not self._left and self.owned.updated is not self.owned.shard:
            comm, owned = self.shared.comm, self.owned
            comm.all_gather(self.layout, owned.shard, owned.stored).wait()

    def drop(self):
        """Drop everything not owned."""
        self._handed.clear()
        self.partial = self.sum = None


class ReducedOnce(Gradient):
    """Added up over micro-batches in the owned vector, and reduced once, after the last."""

    def _make_partial(self):
        if self._first:
            self.owned.stored.fill(0)
        return self.owned.stored

    def _reduce(self):
        self.drop()
        if not self._left:
            stored, shard = self.owned.stored, self.owned.shard
            self.shared.comm.reduce_scatter(self.layout, stored, shard, True)


class ReducedEach(Gradient):
    """Reduced after every micro-batch; the owner adds up the results one by one."""

    def _make_partial(self):
        recipe, owned = self.shared.recipe, self.owned
        own = owned.sharded or recipe.gradient != recipe.partial
        length = self.layout.padded
        partial = self.shared.new("partial", length, recipe.partial) if own else owned.stored
        partial.fill(0)
        return partial

    def _reduce(self):
        sent = self._rounded(self.partial)
        self.partial = None
        self._handed.clear()
        if self._first:
            self.sum = self._place_for_sum()
        self.shared.comm.reduce_scatter(self.layout, sent, self.sum, self._first)
        if not self._left:
            if self.sum is not self.owned.shard:
                round_to(self.owned.shard, self.sum)
            self.sum = None

    def _rounded(self, partial):
        """The partial gradient to send, rounded once to 16 bits: into a whole owned vector."""
        dtype = self.shared.recipe.gradient
        if partial.dtype == dtype:
            return partial
        own, owned = self.owned.sharded, self.owned.stored
        rounded = self.shared.new("partial", len(partial), dtype) if own else owned
        round_to(rounded, partial)
        return rounded

    def _place_for_sum(self):
        """The owned shard, if it is wide enough and unused between micro-batches; else a buffer."""
        shard, master = self.owned.shard, self.shared.recipe.master
        if not self._left or (self.owned.sharded and shard.dtype == master):
            return shard
        return self.shared.new("sum", len(shard), master)
