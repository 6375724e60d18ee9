"""Where each parameter lies in its unit's flat padded vector. Pure arithmetic, in elements."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import lcm, prod

# The gradient's norm is summed in lcm(ranks, PIECES) equal pieces of each unit. Floating-point sums
# depend on where they are cut, so the bits agree for all numbers of ranks that divide PIECES: 1, 2,
# 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 192. Costs at most 191 elements of padding per unit, and
# 192 numbers per step.
PIECES = 192


@dataclass(frozen=True)
class Layout:
    """The vector of one unit, cut into `shards` equal shards.

    `shapes` maps local parameter names to shapes, in vector order; `prefix` + local name is the
    full name. Each parameter starts at a multiple of `align` elements. Zeros fill the gaps, and pad
    the end to a multiple of lcm(shards, PIECES): all shards have the same length, a whole number of
    the norm's pieces.

    Padding stays zero by itself: vectors start as zeros, layers and the optimizer see parameters
    only, and sums over ranks add zeros. So it adds nothing to the norm, and loading a checkpoint
    skips it.
    """

    name: str
    prefix: str
    shapes: dict
    shards: int
    align: int = 1

    @cached_property
    def offsets(self):
        """{local name: index of its first element}."""
        rooms = (-(-prod(shape) // self.align) * self.align for shape in self.shapes.values())
        return dict(zip(self.shapes, accumulate(rooms, initial=0), strict=False))

    @cached_property
    def elements(self):
        """Elements without padding."""
        return sum(map(prod, self.shapes.values()))

    @cached_property
    def padded(self):
        """Elements of the full vector."""
        multiple = lcm(self.shards, PIECES)
        end = max(self.offsets[name] + prod(shape) for name, shape in self.shapes.items())
        return -(-end // multiple) * multiple

    @cached_property
    def shard_length(self):
        """Elements of one shard."""
        return self.padded // self.shards

    @property
    def blank(self):
        """Padding elements of the whole vector."""
        return self.padded - self.elements

    @property
    def pieces(self):
        """Pieces of the norm in each shard."""
        return lcm(self.shards, PIECES) // self.shards

    def shard(self, owner):
        """The slice of the vector that `owner` owns."""
        return slice(owner * self.shard_length, (owner + 1) * self.shard_length)

    def padding(self, part):
        """Padding elements inside a slice of the vector."""
        return part.stop - part.start - sum(stop - start for _, start, stop in self.spans(part))

    def views(self, vector):
        """{local name: view} of a full vector, in the parameters' shapes. Views keep it alive."""
        at = self.offsets
        return {
            name: vector[at[name] : at[name] + prod(shape)].reshape(shape)
            for name, shape in self.shapes.items()
        }

    def spans(self, part):
        """The parameters in a slice: [(local name, start, stop), ...], relative to the slice."""
        found = []
        for name, shape in self.shapes.items():
            start = max(self.offsets[name], part.start)
            stop = min(self.offsets[name] + prod(shape), part.stop)
            if start < stop:
                found.append((name, start - part.start, stop - part.start))
        return found


class Stretch:
    """A slice of a layout's vector, cut along one axis of the world: to a Communicator, a Layout.

    `elements` are the whole unit's, so that every axis counts as the paper does.
    """

    def __init__(self, layout, part, shards):
        self.name, self.elements, self.shards = layout.name, layout.elements, shards
        self.padded = part.stop - part.start
        self.shard_length = self.padded // shards
        starts = range(part.start, part.stop, self.shard_length)
        self._padding = [layout.padding(slice(at, at + self.shard_length)) for at in starts]
        self.blank = sum(self._padding)

    def shard(self, owner):
        """The slice of the stretch that `owner` keeps."""
        return slice(owner * self.shard_length, (owner + 1) * self.shard_length)

    def padding(self, part):
        """Padding elements in a shard of the stretch."""
        return self._padding[part.start // self.shard_length]
