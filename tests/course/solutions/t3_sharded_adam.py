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
        self.comm, self.lr, self.beta1, self.beta2 = comm, lr, beta1, beta2
        self.eps, self.clip = eps, clip
        self.t = 0  # updates made
        self.m = np.zeros(parameters // comm.size, np.float32)
        self.v = np.zeros(parameters // comm.size, np.float32)

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
        comm, n = self.comm, len(self.m)
        rows = np.empty_like(gradient)
        comm.Alltoall(gradient, rows)
        rows = rows.reshape(comm.size, n)
        g = rows[0].copy()
        for row in rows[1:]:
            g += row
        g /= comm.size
        norm = sum(comm.allgather(float(np.sum(g.astype(np.float64) ** 2)))) ** 0.5
        if norm > self.clip:
            g *= self.clip / norm
        self.t += 1
        self.m *= self.beta1
        self.m += (1 - self.beta1) * g
        self.v *= self.beta2
        self.v += (1 - self.beta2) * g * g
        m_hat = self.m / (1 - self.beta1**self.t)
        v_hat = self.v / (1 - self.beta2**self.t)
        shard = weights[comm.rank * n : (comm.rank + 1) * n].copy()
        shard -= self.lr * m_hat / (np.sqrt(v_hat) + self.eps)
        comm.Allgather(shard, weights)
        return norm
