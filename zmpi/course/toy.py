"""The models that the tasks train: element by element, so that every machine computes the same
bits.

Matrix products would do for one machine; their bits depend on its BLAS and threads, and the judge
is another process than the world that it judges.
"""

import numpy as np

STEPS = 3  # of every training


def pull_gradient(weights, micro_batch):
    """The gradient of 0.5 * sum(pull * (weights - aim)**2); micro_batch = (aim, pull), all (P,)
    float32.
    """
    aim, pull = micro_batch
    return (weights - aim) * pull


def micro_batch(draw, parameters):
    """A micro-batch for `pull_gradient`, whose sums over ranks show their order."""
    aim = draw.standard_normal(parameters).astype(np.float32)
    pull = draw.uniform(0.1, 3.0, parameters).astype(np.float32)
    return aim, pull


class ToyLayer:
    """y = x * (1 + w[0] + w[1] / 2 + ...), with w (rows, A) in a flat vector of `size` elements; x,
    y are (A,).

    `watch`, if any, is told of every use: watch(verb, layer, w), and of every gradient that is
    handed out.
    """

    def __init__(self, rows, width, unit=None, watch=None, handed=None):
        self.rows, self.width, self.size, self.unit = rows, width, rows * width, unit
        self._watch, self._handed = watch, handed

    def _factor(self, w):
        total = np.ones(self.width, np.float32)
        for i, row in enumerate(w.reshape(self.rows, self.width)):
            total += row / (i + 1)
        return total

    def forward(self, w, x):
        """(y, saved) of flat weights w (size,) float32 and x (width,) float32. `saved` holds no
        weights.
        """
        if self._watch:
            self._watch("forward", self, w)
        return x * self._factor(w), x.copy()

    def backward(self, w, saved, dy):
        """(dx, dw) of dy (width,): dw is flat, (size,) float32, new memory."""
        if self._watch:
            self._watch("backward", self, w)
        dx = dy * self._factor(w)
        dw = np.empty(self.size, np.float32)
        for i, row in enumerate(dw.reshape(self.rows, self.width)):
            row[...] = saved * dy / (i + 1)
        if self._handed:
            self._handed(dw)
        return dx, dw


def loss_gradient(y, target):
    """The gradient of 0.5 * sum((y - target)**2) with respect to y."""
    return y - target


def chain_gradients(layers, weights, x, target):
    """{unit: flat gradient} of a chain of layers on one process; a unit used twice gets the sum of
    both.
    """
    saved = []
    for layer in layers:
        x, kept = layer.forward(weights[layer.unit], x)
        saved.append(kept)
    dy, found = loss_gradient(x, target), {}
    for layer in reversed(layers):
        dy, dw = layer.backward(weights[layer.unit], saved.pop(), dy)
        found[layer.unit] = found[layer.unit] + dw if layer.unit in found else dw
    return found
