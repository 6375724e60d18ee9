"""Where each named parameter lies in its unit's flat padded vector. Pure arithmetic, in elements; no memory, no MPI."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import lcm, prod

# The gradient's norm is summed in lcm(ranks, PIECES) equal pieces of each unit, and floating-point sums depend on where
# they are cut: so the bits are the same for every number of ranks that divides PIECES. 192 = 64 x 3 is divided by 1, 2, 3,
# 4, 6, 8, 12, 16, 24, 32, 48, 64, 96 and 192. It costs at most 191 elements of padding a unit, and 192 numbers a step.
PIECES = 192


@dataclass(frozen=True)
class Layout:
    """The vector of one unit, cut into `shards` equal shards.

    `shapes` maps a parameter's local name to its shape, in the order in which they lie; `prefix` + local name is its
    full name. Each starts at a multiple of `align` elements. Zeros lie between them where that leaves room, and follow
    the last one up to a multiple of lcm(shards, PIECES), so that every shard has the same length, a whole number of the
    norm's pieces.

    The padding of every vector stays zero, without anybody looking after it: vectors are filled with zeros when they
    are made, layers see views of parameters only, the optimizer updates spans of parameters only, and sums over ranks
    add zeros. So it adds nothing to the norm, and a checkpoint's padding need not be read.
    """

    name: str
    prefix: str
    shapes: dict
    shards: int
    align: int = 1

    @cached_property
    def offsets(self):
        """{local name: its first element}."""
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
    def pieces(self):
        """Pieces of the norm in each shard."""
        return lcm(self.shards, PIECES) // self.shards

    def shard(self, owner):
        """The slice of the vector that `owner` keeps."""
        return slice(owner * self.shard_length, (owner + 1) * self.shard_length)

    def padding(self, part):
        """Padding elements inside a slice of the vector."""
        return part.stop - part.start - sum(stop - start for _, start, stop in self.spans(part))

    def views(self, vector):
        """{local name: view} into a full vector, each in its parameter's shape. The views keep the vector alive."""
        at = self.offsets
        return {
            name: vector[at[name] : at[name] + prod(shape)].reshape(shape)
            for name, shape in self.shapes.items()
        }

    def spans(self, part):
        """The parameters inside a slice of the vector, as (local name, start, stop) counted from the slice's start."""
        found = []
        for name, shape in self.shapes.items():
            start = max(self.offsets[name], part.start)
            stop = min(self.offsets[name] + prod(shape), part.stop)
            if start < stop:
                found.append((name, start - part.start, stop - part.start))
        return found
