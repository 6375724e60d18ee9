"""Task 3: a sharded Adam, with a global norm: ZeRO's stage 1. (About 25 lines are missing.)

Adam keeps two moments for every weight: twice the weights' memory, and the same numbers on every
rank. Stage 1 cuts them: rank r keeps the moments of shard r only, updates shard r of the weights
only, and then all ranks put the weights together again. What travels is what data parallelism sends
anyway: the gradient is reduce-scattered, and the new weights are all-gathered.

Clipping needs the norm of the whole gradient, of which a rank has one shard: each rank sums its own
squares, and these N numbers are shared (comm.allgather takes a Python float).
"""

import numpy as np


class ShardedAdam:
    """Adam over this rank's shard of P weights. Its arrays are its moments, P / N elements each."""

    def __init__(self, comm, parameters, lr, beta1, beta2, eps, clip):
        """parameters: P, which N divides. lr, beta1, beta2, eps, clip: Python floats."""
        raise NotImplementedError

    def step(self, weights, gradient):
        """One update of `weights` in place; returns the gradient's norm, a float, the same on all
        ranks.

        weights   (P,) float32, whole, equal on all ranks before and after
        gradient  (P,) float32 of this rank's data; it must not be changed

        g = the mean of all ranks' gradients (added in rank order, then divided by N)
        norm = sqrt(sum of the squares of all P elements of g), added up in float64
        where norm > clip: g = g * (clip / norm)
        t = t + 1;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
        weights = weights - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

        All arrays in float32. Each rank sends as many bytes as a reduce-scatter and an all-gather
        of P float32 elements, and a few numbers for the norm. Between steps the moments are all
        that it holds.
        """
        raise NotImplementedError
