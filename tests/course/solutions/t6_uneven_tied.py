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
    return -(-elements // size)


def own_shard(full, rank, size):
    """This rank's shard of a whole vector (elements,): (shard_length,) of the same type, new
    memory, filled up with zeros.
    """
    n = shard_length(len(full), size)
    shard = np.zeros(n, full.dtype)
    part = full[rank * n : (rank + 1) * n]
    shard[: len(part)] = part
    return shard


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
        saved, means = [], {}
        for layer in self.layers:
            x, kept = layer.forward(self._gather(layer), x)
            saved.append(kept)
        dy, partial = loss_gradient(x), {}
        for k in reversed(range(len(self.layers))):
            layer = self.layers[k]
            dy, dw = layer.backward(self._gather(layer), saved.pop(), dy)
            if layer.unit in partial:
                dw += partial.pop(layer.unit)
            if any(other.unit == layer.unit for other in self.layers[:k]):
                partial[layer.unit] = dw
            else:
                means[layer.unit] = self._reduce(dw)
            del dw
        squares = sum(float(np.sum(mean.astype(np.float64) ** 2)) for mean in means.values())
        for unit, mean in means.items():
            self.shards[unit] -= lr * mean
        return sum(self.comm.allgather(squares)) ** 0.5

    def _gather(self, layer):
        """The whole weights of a layer, without the padding."""
        shard = self.shards[layer.unit]
        full = np.empty(self.comm.size * len(shard), np.float32)
        self.comm.Allgather(shard, full)
        return full[: layer.size]

    def _reduce(self, dw):
        size = self.comm.size
        n = shard_length(len(dw), size)
        padded = np.zeros(size * n, np.float32)
        padded[: len(dw)] = dw
        rows = np.empty((size, n), np.float32)
        self.comm.Alltoall(padded, rows)
        total = rows[0].copy()
        for row in rows[1:]:
            total += row
        return total / size
