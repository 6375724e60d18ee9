"""Task 7: prefetch, and what it may not change. (About 15 lines are missing.)

In task 5 a rank waits for every gather. While a layer is computed, the network is idle: so start
the next layer's gather first, compute, and wait for it afterwards. comm.Iallgather(send, receive)
starts a gather and returns a request; request.Wait() ends it. Until then neither array may be
touched, and both must stay alive.

Prefetch may not change a bit, nor a byte that is sent. It costs one more layer in memory: at most
two are alive. And it never crosses the update: what was gathered before it is stale after it.
"""

import numpy as np


def train(comm, shards, visits, use, update, steps):
    """`steps` times: visit the layers in order, then update; returns nothing.

    shards  a list of this rank's shards, (n,) float32 each, of different lengths
    visits  a list of numbers of shards, such as [0, 1, 2, 2, 1, 0]: forward and backward
    use     use(k, full): computes visit k, where k is a place in `visits` (0, 1, 2, ...), with the
            whole weights of its layer, (N * n,) float32: all ranks' shards, in rank order
    update  update(): changes this rank's shards in place

    When use is called for a visit that is not the step's last, the next visit's gather is under
    way: started and not yet waited for. When update is called nothing is under way. Of whole
    weights those of two layers are alive at most (this visit's, and the next one's), at the update
    none are. Every visit is gathered once, the same layer twice in a row too.
    """
    raise NotImplementedError
