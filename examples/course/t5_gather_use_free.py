"""Task 5: gather, use, free: ZeRO's stage 3. (About 25 lines are missing.)

Nobody keeps whole weights any more: each rank owns one shard of every layer. Just before a layer is
computed its weights are gathered, just after they are freed; the backward gathers them again. A
layer's gradient is reduce-scattered as soon as it is complete. So a rank holds its shards, and the
weights of one layer for the moment of use.

Freed means freed: the last name of the array is gone. `w` in your loop still names the previous
layer's weights while the next ones are being received, unless you `del w` (or return from a
function that had the name). A slice of an array (a view) keeps all of it alive; .copy() does not.

A layer is given. It has `size` (the number of its weights, which N divides) and two methods:
    y, saved = layer.forward(w, x)          w (size,) float32: its whole weights; x, y (A,) float32
    dx, dw = layer.backward(w, saved, dy)   dw (size,) float32, new: this rank's partial gradient
`saved` holds no weights. What the layers compute is not your concern.
"""

import numpy as np


class Stage3:
    """The own shard of every layer's weights, in `shards`: a list of (size / N,) float32 arrays, in
    the layers' order.
    """

    def __init__(self, comm, layers, weights):
        """weights: a list of (size,) float32 arrays, one for each layer, the same on all ranks;
        keep no name of them.
        """
        raise NotImplementedError

    def step(self, x, loss_gradient, lr):
        """One step of gradient descent on this rank's data; returns nothing.

        x              (A,) float32, this rank's input; it must not be changed
        loss_gradient  loss_gradient(y) -> (A,) float32: the gradient with respect to the last
                       layer's y
        lr             the learning rate, a Python float

        Forward through all layers, then backward from the last to the first; then, for every layer,
        shard -= lr * (sum / N), where sum = rank 0's dw + rank 1's + ..., added in this order in
        float32, own shard only. All weights of the step are those of its beginning.

        Every layer's weights are gathered twice a step (the last layer's too) and its gradient is
        reduced once: each rank sends three times (N - 1) / N of all weights. When a layer is
        called, a rank holds its shards, the sums of gradients that are done (own shards), and this
        layer's weights; after the step, its shards.
        """
        raise NotImplementedError
