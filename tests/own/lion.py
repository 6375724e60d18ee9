"""An optimizer of your own: Lion (arXiv 2302.06675, program 1). One class, one flag:

mpirun -n 4 python -m zmpi.train --optimizer tests/own/lion.py:Lion --lr 3e-4 --weight-decay 1
"""

from dataclasses import dataclass

import numpy as np

from zmpi import Optimizer


@dataclass(frozen=True, kw_only=True)
class Lion(Optimizer):
    """Steps by the sign of a moving average of the gradient; one moment, where Adam has two."""

    lr: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.99

    moments = ("m",)

    def update(self, owned, t, factor):
        lr = self.rate(t)
        for start, stop, decays in owned.blocks():
            p, m = owned.master[start:stop], owned.moments["m"][start:stop]
            g = np.multiply(owned.gradient[start:stop], factor, dtype=p.dtype)
            step = np.sign(self.beta1 * m + (1 - self.beta1) * g)
            m *= self.beta2
            m += (1 - self.beta2) * g
            if decays:
                p *= 1 - lr * self.weight_decay
            p -= lr * step
        owned.round()
