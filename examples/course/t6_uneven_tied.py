"""Task 6: sizes that do not divide, and tied weights. (About 35 lines are missing.)

Real layers' sizes are not multiples of N. A shard's length is rounded up, so that all are equal,
and the last shards are filled up with zeros: *padding*. Padding is sent along, but it is no weight:
it stays zero, and the norm does not see it. (np.resize repeats numbers, np.empty holds what was
there before: neither is zero.)

And some layers share their weights: an embedding and a head, say. A *unit* is what is cut, gathered
and reduced together; tied layers name the same unit. It has one shard on each rank, one gradient
(the sum of both layers'), which is complete only after the backward of the layer that is used
first, and it is updated once.

Layers are those of task 5, with one thing more: `layer.unit`, the number of its unit. A unit is
used by one layer or by two; both have its size.
"""

import numpy as np


def shard_length(elements, size):
    """Elements of each of `size` equal shards that hold `elements` weights: as few as possible."""
    raise NotImplementedError


def own_shard(full, rank, size):
    """This rank's shard of a whole vector (elements,): (shard_length,) of the same type, new
    memory, filled up with zeros.
    """
    raise NotImplementedError


class Stage3:
    """The own shard of every unit, in `shards`: {unit: (shard_length,) float32}."""

    def __init__(self, comm, layers, weights):
        """weights: {unit: (size,) float32}, the same on all ranks; keep no name of them."""
        self.comm, self.layers = comm, layers
        self.shards = {unit: own_shard(w, comm.rank, comm.size) for unit, w in weights.items()}

    def step(self, x, loss_gradient, lr):
        """One step of gradient descent; returns the norm of the whole mean gradient, a float, the
        same on all ranks.

        x, loss_gradient, lr: as in task 5.

        For every unit: mean = (rank 0's gradient + rank 1's + ...) / N, added in this order in
        float32, own shard only; then shard -= lr * mean. norm = sqrt(sum of the squares of all
        units' means), added up in float64.

        A unit's weights are gathered for every forward and every backward of its layers; its
        gradient is reduced once. All messages have N * shard_length elements (or are a few
        numbers). When a layer is called a rank holds what it held in task 5, and at most the
        gradient of one tied unit that is not complete.
        """
        raise NotImplementedError

    def _gather(self, layer):
        """The whole weights of a layer, without the padding."""
        shard = self.shards[layer.unit]
        full = np.empty(self.comm.size * len(shard), np.float32)
        self.comm.Allgather(shard, full)
        return full[: layer.size]
