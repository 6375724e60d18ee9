"""The optimizers by the textbook, in float64, per array; shares nothing with zmpi.numbers.optim."""

from math import cos, pi, sqrt

import numpy as np


def rate(of, t):
    """The learning rate of update t (from 1): linear warm-up, then constant or cosine to lr/10."""
    warm = min(1.0, t / of.warmup) if of.warmup else 1.0
    if of.schedule == "constant" or t <= of.warmup:
        return of.lr * warm
    progress = min(1.0, (t - of.warmup) / (of.decay_steps - of.warmup))
    return of.lr * (0.1 + 0.9 * (1 + cos(pi * progress)) / 2)


def clipped(of, norm):
    """The factor on gradients that keeps the global norm within `clip` (0: off)."""
    return min(1.0, of.clip / norm) if of.clip and norm else 1.0


def adamw(of, t, w, g, moments):
    """AdamW (arXiv 1711.05101, algorithm 2), where matrices decay: (new weights, new moments)."""
    decay = rate(of, t) * of.weight_decay if w.ndim >= 2 else 0.0
    m = of.beta1 * moments["m"] + (1 - of.beta1) * g
    v = of.beta2 * moments["v"] + (1 - of.beta2) * g**2
    m_hat, v_hat = m / (1 - of.beta1**t), v / (1 - of.beta2**t)
    return w - decay * w - rate(of, t) * m_hat / (np.sqrt(v_hat) + of.eps), {"m": m, "v": v}


def sgd(of, t, w, g, moments):
    """Gradient descent with heavy-ball momentum (Polyak 1964): (new weights, new moments)."""
    decay = rate(of, t) * of.weight_decay if w.ndim >= 2 else 0.0
    if not of.momentum:
        return w - decay * w - rate(of, t) * g, {}
    velocity = of.momentum * moments["momentum"] + g
    return w - decay * w - rate(of, t) * velocity, {"momentum": velocity}


def norm_of(squares):
    """The global norm of a gradient, from the sums of squares of its parts."""
    return sqrt(sum(squares))


def norm_in_order(squares):
    """The same of one number after the other, from left to right."""
    total = 0.0
    for square in squares.tolist():
        total += square
    return sqrt(total)
