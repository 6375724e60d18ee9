"""ZeRO-3 by hand, in mpi4py and NumPy, without zmpi: two layers, each sharded over the ranks.

Run:        mpirun -n 4 python examples/03_by_hand.py
Last line:  03 ok: the loss fell tenfold, with 1/4 of the weights on each rank
"""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
SHAPES = [(8, 32), (32, 1)]  # (in, out) of each layer


def shard_of(layer):
    """This rank's shard of a layer's initial weights. Every rank draws all, and keeps its part."""
    full = np.random.default_rng(layer).standard_normal(SHAPES[layer]) / np.sqrt(SHAPES[layer][0])
    return np.resize(full, (size, -(-full.size // size)))[
        rank
    ].copy()  # the last slice is filled up


def gather(layer):
    """Put a layer's weights together, to use and free them."""
    full = np.empty(size * len(shards[layer]))
    comm.Allgather(shards[layer], full)
    return full[: np.prod(SHAPES[layer])].reshape(SHAPES[layer])


def reduce_scatter(layer, gradient):
    """Sum a layer's gradient over the ranks; keep the own slice."""
    length = len(shards[layer])
    full = np.zeros(size * length)
    full[: gradient.size] = gradient.ravel()
    mine = np.empty(length)
    comm.Reduce_scatter_block(full, mine)
    return mine


shards = [shard_of(layer) for layer in range(2)]
velocities = [
    np.zeros_like(shard) for shard in shards
]  # the optimizer's state is cut in the same way
draw = np.random.default_rng(100 + rank)  # different data on every rank
losses = []
for _ in range(400):
    x = draw.standard_normal((16, 8))
    target = np.sin(x[:, :1] + x[:, 1:2])

    w = gather(0)  # forward: gather, use, free
    hidden = np.tanh(x @ w)
    del w
    w = gather(1)  # the turn: the last layer's forward, the loss, and its backward in one visit
    # divided by all ranks' samples, so that the sum is the mean
    error = (hidden @ w - target) / (16 * size)
    # half the mean square, whose gradient is `error`
    losses.append(comm.allreduce(float(np.sum(error**2)) * 8 * size))
    d_hidden = error @ w.T * (1 - hidden**2)
    del w
    gradients = {
        1: reduce_scatter(1, hidden.T @ error)
    }  # backward: reduce as soon as a gradient is complete
    gradients[0] = reduce_scatter(0, x.T @ d_hidden)  # the first layer's backward needs no weights

    for layer, gradient in gradients.items():  # every rank updates what it owns
        velocities[layer] = 0.9 * velocities[layer] + gradient
        shards[layer] -= 0.1 * velocities[layer]

start, end = np.mean(losses[:10]), np.mean(losses[-10:])
if rank == 0:
    print(
        f"loss {start:.4f} -> {end:.4f};"
        f" weights on this rank {sum(map(len, shards))} of {sum(map(np.prod, SHAPES))}"
    )
assert end < start / 10, (start, end)
if rank == 0:
    print(f"03 ok: the loss fell tenfold, with 1/{size} of the weights on each rank")
