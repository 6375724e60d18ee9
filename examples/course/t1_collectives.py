"""Task 1: two collectives by hand, and what they move. (About 20 lines are missing.)

A world has N ranks; `comm.rank` is yours, `comm.size` is N. A *shard* is one rank's slice of a
vector, and a vector of N * n elements has N shards of n elements each. Rank r's shard is
vector[r * n : (r + 1) * n].

Use messages from one rank to another only: comm.Send, Recv, Isend, Irecv, Sendrecv. Those with a
capital letter move a NumPy array's memory as it is; the receiver hands over an array that is large
enough. A Send may wait until somebody receives: if all ranks send first, all may wait for ever.
Shards may be of any length.
"""

import numpy as np


def all_gather(comm, shard):
    """Every rank's shard, one after the other in rank order, on every rank.

    shard    (n,) array of any type, the same n and type on every rank; it must not be changed
    returns  (N * n,) array of the same type, in new memory

    Each rank sends (N - 1) * n elements, all its messages together.
    """
    raise NotImplementedError


def reduce_scatter(comm, full):
    """The own shard of the sum of all ranks' vectors.

    full     (N * n,) float32, a different one on every rank; it must not be changed
    returns  (n,) float32, in new memory: elements r * n to (r + 1) * n (r is the own rank) of
             (rank 0's + rank 1's) + rank 2's + ..., added in this order

    The order matters: floating-point addition is not associative, and another order gives other
    last bits. Each rank sends (N - 1) * n elements.
    """
    raise NotImplementedError


def bytes_sent(collective, elements, itemsize, size):
    """The bytes that each rank sends in one collective: a whole number.

    collective  "all_gather", "reduce_scatter", or "all_reduce" (a reduce-scatter and an all-gather
                of its result)
    elements    of the full vector, which `size` divides
    itemsize    bytes of one element
    size        the number of ranks
    """
    raise NotImplementedError
