"""Task 4: sharded gradients, and accumulation: ZeRO's stage 2. (About 15 lines are missing.)

A step may have several micro-batches on each rank. Whoever adds up their whole gradients first
keeps P elements for the sum. Stage 2 reduce-scatters after every micro-batch instead: the whole
gradient of one micro-batch is gone before the next one is computed, and what adds up is the own
shard only. The price: M micro-batches move M reduce-scatters.

An array is freed when its last name is gone. A local variable of a loop is a name too, and so is
`rows` in a function that has not returned: let a small function of your own do the messages, and
its names end with it.
"""

import numpy as np


class Stage2:
    """Whole weights, and the own shard of the gradient."""

    def __init__(self, comm, weights):
        """weights: (P,) float32, the same on all ranks; N divides P. They are yours, to be changed
        in place.
        """
        self.comm, self.weights = comm, weights
        self.gradient = np.zeros(len(weights) // comm.size, np.float32)

    def step(self, gradient_of, micro_batches, lr):
        """One step of gradient descent over all micro-batches of all ranks; returns nothing.

        gradient_of    gradient_of(weights, micro_batch) -> (P,) float32, new memory: a partial
                       gradient
        micro_batches  this rank's, a list of M; micro-batch m of rank r is number j = m * N + r of
                       the step
        lr             the learning rate, a Python float

        self.gradient = the own shard of the sum over j = 0, 1, 2, ... of the partial gradients,
        added one by one in this order in float32; every step starts from zero.
        Then weights -= lr * (sum / (M * N)), on the own shard, and all ranks put the weights
        together.

        When gradient_of is called, this rank holds the weights and its shard of the gradient, and
        no other array of P elements. Each rank sends as many bytes as M reduce-scatters and one
        all-gather of P float32 elements.
        """
        raise NotImplementedError
