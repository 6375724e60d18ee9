"""A unit's gradient on one rank: the partial one of its data, and its part of the sum over ranks.

Each micro-batch's comes down (mesh.py) to where gradients are stored, with `ordered` all the way;
after the last the sum comes down the rest of the way, and climbs to what the optimizer updates.

gradients, reduction  regime       the partial gradient is  micro-batches are added up in
sharded, mpi          ReducedEach  a vector of its own      what is stored
sharded, ordered      ReducedEach  a vector of its own      the owned shard; 16 bits, or a group's
                                                            slice is stored: a float32 sum
whole, ordered        ReducedEach  the owned vector;        a float32 sum (a single micro-batch:
                                   16 bits: one of its own  the owned shard)
whole, mpi            ReducedOnce  the owned vector         the owned vector
"""

from zmpi.numbers.sums import round_to


def make_gradient(cut, shared):
    """The Gradient of a unit. The only place that chooses its regime."""
    rest = shared.comm.top if shared.comm.ordered else shared.rung("gradients")
    return (ReducedEach if rest else ReducedOnce)(cut, shared, rest)


class Gradient:
    """What both regimes share. A step: begin_step(), then views() and reduce() per micro-batch."""

    def __init__(self, cut, shared, rest):
        self.cut, self.layout, self.shared = cut, cut.layout, shared
        self.rest = rest  # the rung to which each micro-batch comes down
        self.owned = shared.own("gradients", cut, shared.recipe.gradient)
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
        if not self._left:
            self._complete()

    def _complete(self):
        """Come down the rest of the way, then climb to what the optimizer updates."""
        comm, cut, owned = self.shared.comm, self.cut, self.owned
        if self.rest < comm.top:
            comm.come_down(cut, owned.stored, owned.rung, comm.top, owned.shard, True)
        if owned.updated is not owned.shard:
            rung = self.shared.rung("optimizer")
            comm.climb(cut, owned.shard, comm.top, owned.updated, rung).wait()

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


class ReducedEach(Gradient):
    """Reduced after every micro-batch; the owner adds up the results one by one."""

    def _make_partial(self):
        recipe, owned = self.shared.recipe, self.owned
        own = owned.rung or recipe.gradient != recipe.partial
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
        self.shared.comm.come_down(self.cut, sent, 0, self.rest, self.sum, self._first)
        if not self._left:
            if self.sum is not self._resting:
                round_to(self._resting, self.sum)
            self.sum = None

    def _rounded(self, partial):
        """The partial gradient to send, rounded once to 16 bits: into a whole owned vector."""
        dtype = self.shared.recipe.gradient
        if partial.dtype == dtype:
            return partial
        owned = self.owned
        rounded = self.shared.new("partial", len(partial), dtype) if owned.rung else owned.stored
        round_to(rounded, partial)
        return rounded

    @property
    def _resting(self):
        """Where the sum over micro-batches rests, in what is owned."""
        return self.owned.stored if self.rest == self.owned.rung else self.owned.shard

    def _place_for_sum(self):
        """That, if it is wide enough and unused between micro-batches; else a buffer."""
        place, master = self._resting, self.shared.recipe.master
        if not self._left or (self.rest == self.owned.rung and place.dtype == master):
            return place
        return self.shared.new("sum", len(place), master)
