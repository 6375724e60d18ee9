"""The axes of a world, and how vectors climb and come down along them.

A vector is cut along the inner axis first (the ranks of a group), then the outer one (the groups).
At rung 0 it is whole, at rung 1 a rank has its group's slice, at the top rung the slice it owns. It
climbs to be used: an all-gather per axis, the outermost first. It comes down to be summed: a
reduce-scatter per axis, the innermost first. A rung's slices are contiguous: both work in place.

    place l of G in a group, group n of R: the data are rank n*G + l's, the slice is owner l*R + n's
"""

from math import prod

from zmpi.core.layout import Stretch
from zmpi.messages.ledger import Between


class Cut:
    """Where this rank's slices of one layout lie. Made once for each unit."""

    def __init__(self, layout, axes):
        self.layout = layout
        self.slices = [slice(0, layout.padded)]  # of each rung, in the whole vector
        self.stretches = []  # what each axis cuts: to its Communicator, a Layout
        for axis in axes:
            above = self.slices[-1]
            stretch = layout if len(axes) == 1 else Stretch(layout, above, axis.shards)
            mine = stretch.shard(axis.shard)
            self.slices.append(slice(above.start + mine.start, above.start + mine.stop))
            self.stretches.append(stretch)

    def length(self, rung):
        """Elements of a rung's slice."""
        return self.slices[rung].stop - self.slices[rung].start

    def within(self, rung, of):
        """A rung's slice, counted from the start of a lower rung's."""
        start = self.slices[rung].start - self.slices[of].start
        return slice(start, start + self.length(rung))


class Mesh:
    """An engine's Communicators: one for each axis, inner first, and one of all ranks for scalars.

    `size`, `rank`: who computes which data. `shards`, `shard`: who owns which slice.
    """

    def __init__(self, engine, reduction):
        world, books = engine.world, (engine.ledger, Between(engine.ledger))
        pairs = zip(world.axes, books, strict=False)
        self.axes = [engine.make_communicator(*pair, reduction) for pair in pairs]
        self.top = len(self.axes)  # the rung of what a rank owns alone
        one = self.top == 1
        everyone = self.axes[0] if one else engine.make_communicator(world, books[0], reduction)
        self.size, self.rank, self.gather_scalars = world.size, world.rank, everyone.gather_scalars
        self.reduction, self.ordered = reduction, everyone.ordered
        self.block, self.declared_bytes = everyone.block, everyone.declared_bytes
        self.sizes = tuple(axis.shards for axis in self.axes)
        self.shards = prod(self.sizes)
        self.owners = [self._owner(rank) for rank in range(self.size)]  # each rank's shard
        self.shard = self.owners[self.rank]
        self.in_flight = 0  # climbs started and not yet waited for

    def _owner(self, rank):
        owner = 0
        for size in self.sizes:
            owner, rank = owner * size + rank % size, rank // size
        return owner

    def cut(self, layout):
        """The Cut of a unit's vectors."""
        return Cut(layout, self.axes)

    def climb(self, cut, source, rung, target, to=0):
        """Start gathering rung `to` in `target` from a higher one; returns a Climb to wait for."""
        steps = []
        for number in range(rung - 1, to - 1, -1):
            axis, stretch = self.axes[number], cut.stretches[number]
            if number and axis.shards == 1:  # it has nothing to add
                axis.ledger.book("all_gather", stretch.name, elements=stretch.elements)
                continue
            into = target[cut.within(number, to)] if number > to else target
            steps.append((axis, stretch, source, into))
            source = into
        return Climb(self, steps)

    def come_down(self, cut, vector, rung, to, out, fresh):
        """Sum every rank's slice of `rung`; assign a higher rung's to `out` (`fresh`), or add it.

        What an axis leaves replaces its slice of `vector`, and the next axis sends that.
        """
        for number in range(rung, to):
            axis, stretch = self.axes[number], cut.stretches[number]
            last = number == to - 1
            mine = out if last else vector[stretch.shard(axis.shard)]
            axis.reduce_scatter(stretch, vector, mine, fresh or not last)
            vector = mine

    def reserve(self, layouts, dtype):
        """Allocate each axis's message buffer: one chunk of its largest stretch."""
        cuts = [self.cut(layout) for layout in layouts]
        for number, axis in enumerate(self.axes):
            axis.reserve([cut.stretches[number] for cut in cuts], dtype)

    def drop(self):
        """Let go of what an exception left half done."""
        self.in_flight = 0
        for axis in self.axes:
            axis.drop()

    @property
    def started(self):
        """Collectives started so far, on all axes; ranks start the same ones, in the same order."""
        return sum(axis.world.lane.started for axis in self.axes)

    def settle(self, started=None):
        """World.settle on every axis. `started`: every rank's, if known. Collective."""
        level = started is not None and min(started) == max(started)
        for axis in self.axes:
            axis.world.settle([axis.world.lane.started] if level else None)


class Climb:
    """A vector on its way up: its first gather is in progress, wait() starts each further one."""

    def __init__(self, mesh, steps):
        self._mesh, self._steps = mesh, steps
        mesh.in_flight += 1
        self._gather = self._start()

    def _start(self):
        if self._steps:
            axis, *vectors = self._steps.pop(0)
            return axis.all_gather(*vectors)

    def wait(self):
        """Block until all of it has arrived."""
        while self._gather:
            self._gather.wait()
            self._gather = self._start()
        self._mesh.in_flight -= 1
