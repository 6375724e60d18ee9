"""Optimizers on one rank's slice of a unit: element by element, in blocks that stay in cache.

A slice holds master weights, the gradient summed over ranks, and moments, all of one length.
Nothing here knows about ranks: updating all ranks' slices equals updating one vector.
"""

from dataclasses import dataclass, fields
from math import cos, inf, pi
from types import SimpleNamespace

import numpy as np

from models.twins import on_gpu
from zmpi.numbers.domains import Domain, switch
from zmpi.numbers.sums import round_to

# elements of a block: its five vectors fit into a core's second-level cache
CACHE_BLOCK = 1 << 16


@dataclass
class Slice:
    """The part of a unit that the optimizer updates, in place. The unit owns every vector."""

    master: np.ndarray  # weights, in the master type
    # summed over ranks, in the gradient type; may still carry the loss scale
    gradient: np.ndarray
    moments: dict  # {name: vector in the master type}
    decayed: list  # [(start, stop, whether weight decay applies), ...], without the padding
    stored: np.ndarray | None = None  # the parameters, if they are the master rounded to 16 bits

    def blocks(self):
        """(start, stop, decays) of at most CACHE_BLOCK elements each, in order."""
        for start, stop, decays in self.decayed:
            for first in range(start, stop, CACHE_BLOCK):
                yield first, min(first + CACHE_BLOCK, stop), decays

    def round(self):
        """Round the master into the stored parameters."""
        if self.stored is not None:
            round_to(self.stored, self.master)


BELOW_ONE = Domain(below=1)
DOMAINS = {  # of hyperparameters by name, for every optimizer
    "lr": Domain(highest=1e30),  # 0: no update
    "warmup": Domain(whole=True),
    "decay_steps": Domain(whole=True),
    "clip": Domain(),
    "weight_decay": Domain(),
    "beta1": BELOW_ONE,
    "beta2": BELOW_ONE,
    "momentum": BELOW_ONE,
    # Times sqrt(1 - beta2) > 1e-8 it is still a positive float32: 0 / (0 + eps) must be a number.
    "eps": Domain(1e-30),
}
ANY_NUMBER = Domain(-inf)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An update rule: the base class of AdamW, SGD and your own.

    A subclass is a frozen, keyword-only dataclass. Its fields are its hyperparameters, each with a
    default and the domain of its name in DOMAINS (other names: any finite number, if the default is
    a number). It declares `moments`, the names of the vectors that it keeps: one element per
    parameter, initially zero. It implements `update`. The engine shards, books, saves and resumes
    moments like weights.

    The base class has the learning rate schedule and clipping: `lr` is reached after `warmup`
    updates, then kept (`schedule="constant"`) or decayed by a half cosine to lr/10 at update
    `decay_steps` (`"cosine"`). `clip` bounds the gradient's global norm (0: off).
    """

    lr: float = 3e-4
    warmup: int = 0  # updates
    schedule: str = "constant"
    decay_steps: int = 0  # updates
    clip: float = 0.0
    weight_decay: float = 0.0

    moments = ()  # names; "master" is taken

    def __post_init__(self):
        """Raise ValueError for the first hyperparameter outside its domain."""
        for field in fields(self):
            value = self._checked(field.name, field.default)
            object.__setattr__(self, field.name, value)  # NumPy's numbers become Python's
        if self.schedule not in ("constant", "cosine"):
            raise ValueError(f"schedule: expected constant or cosine, got {self.schedule!r}")
        if self.schedule == "cosine" and self.decay_steps <= self.warmup:
            raise ValueError(
                f"decay_steps: expected more than the warm-up's {self.warmup} steps, got"
                f" {self.decay_steps}: the cosine schedule decays after the warm-up"
            )
        if self.lr * self.weight_decay > 1:
            raise ValueError(
                f"weight_decay: expected at most 1/lr = {1 / self.lr:g}, got {self.weight_decay:g}:"
                " more would flip the sign of weights"
            )

    def _checked(self, name, default):
        value = getattr(self, name)
        if isinstance(default, bool):
            return switch(name, value)
        if name in DOMAINS:
            return DOMAINS[name].of(name, value)
        return ANY_NUMBER.of(name, value) if isinstance(default, (int, float)) else value

    def update(self, owned, t, factor):
        """Update `owned`, a Slice, in place: update t (from 1), with the gradient times `factor`.

        Shards end anywhere, so an element may depend on t and its own weight, gradient and moments,
        never on another element; otherwise the stages train differently. Loop over `owned.blocks()`
        to keep temporaries in cache; compute in the master's type (a gradient may have 16 bits);
        finish with `owned.round()`.
        """
        raise NotImplementedError

    def rate(self, t):
        """The learning rate of update t (counted from 1)."""
        if t < self.warmup:
            return self.lr * t / self.warmup
        if self.schedule == "constant":
            return self.lr
        along = min(1.0, (t - self.warmup) / max(1, self.decay_steps - self.warmup))
        return self.lr * (0.1 + 0.9 * 0.5 * (1.0 + cos(pi * along)))

    def clip_factor(self, norm):
        """The factor on the gradient: 1 if it is not clipped."""
        return self.clip / norm if self.clip and norm > self.clip else 1.0


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (arXiv 1711.05101, algorithm 2).

    Tensors of two or more dimensions decay (embeddings too); biases and norm gains do not.
    """

    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8

    moments = ("m", "v")  # first and second moment, in the master type

    def update(self, owned, t, factor):
        """Update a Slice in place: update t (from 1), with the gradient times `factor`."""
        lr = self.rate(t)
        by = SimpleNamespace(factor=factor, beta1=self.beta1, beta2=self.beta2, eps=self.eps)
        by.kept, by.step_size = 1.0 - lr * self.weight_decay, lr / (1.0 - self.beta1**t)
        by.root_of_correction = (1.0 - self.beta2**t) ** 0.5
        adamw(owned.master, owned, by)


@on_gpu
def adamw(master, owned, by):
    """AdamW's arithmetic on a Slice and its `master`; `by` holds the numbers of one update.

    m needs g' = (1 - beta1) g, and (1 - beta2) g^2 is a multiple of g'^2; the root of v's
    correction is folded into the step size and eps. So a block is traversed 13 times, not 16.
    """
    new, root = 1.0 - by.beta1, by.root_of_correction
    of_square = (1.0 - by.beta2) / new**2
    scratch = np.empty_like(master, shape=min(CACHE_BLOCK, len(master)))
    for start, stop, decays in owned.blocks():
        p, m, v = (x[start:stop] for x in (master, owned.moments["m"], owned.moments["v"]))
        s = scratch[: stop - start]
        if decays:
            p *= by.kept
        np.multiply(owned.gradient[start:stop], new * by.factor, out=s, dtype=s.dtype)
        m *= by.beta1  # m = beta1 m + (1 - beta1) g
        m += s
        s *= s  # v = beta2 v + (1 - beta2) g^2
        s *= of_square
        v *= by.beta2
        v += s
        # p -= lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps), both times sqrt(1 - beta2^t)
        np.sqrt(v, out=s)
        s += by.eps * root
        np.divide(m, s, out=s)
        s *= by.step_size * root
        p -= s
    owned.round()


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent with (heavy-ball) momentum; weight decay is decoupled."""

    momentum: float = 0.0

    @property
    def moments(self):
        return ("momentum",) if self.momentum else ()

    def update(self, owned, t, factor):
        """Update a Slice in place: update t (from 1), with the gradient times `factor`."""
        lr = self.rate(t)
        g = np.empty_like(owned.master, shape=min(CACHE_BLOCK, len(owned.master)))
        for start, stop, decays in owned.blocks():
            p, g_ = owned.master[start:stop], g[: stop - start]
            if factor == 1.0:
                np.copyto(g_, owned.gradient[start:stop])
            else:
                np.multiply(owned.gradient[start:stop], factor, out=g_, dtype=g_.dtype)
            if decays and self.weight_decay:
                p *= 1.0 - lr * self.weight_decay
            if self.momentum:
                velocity = owned.moments["momentum"][start:stop]
                velocity *= self.momentum  # velocity = momentum x velocity + g
                velocity += g_
                np.copyto(g_, velocity)
            g_ *= lr
            p -= g_
        owned.round()


@on_gpu
def sums_of_squares(vector, pieces):
    """The sum of squares of each of a vector's equal pieces: a float64 array (pieces,) on the host.

    A piece of at most CACHE_BLOCK elements is one NumPy sum, a longer one is summed in equal
    blocks: the bits depend only on the piece's values and length. Short pieces are squared several
    at a time, since a call costs as much as a few thousand elements.
    """
    rows = vector.reshape(pieces, len(vector) // pieces)
    length, found = rows.shape[1], []
    blocks = max(1, -(-length // CACHE_BLOCK))  # of one piece
    width = max(1, -(-length // blocks))  # elements of a block
    height = max(1, CACHE_BLOCK // width)  # pieces at a time
    scratch = np.empty_like(vector, shape=min(CACHE_BLOCK, len(vector)), dtype=np.float64)
    for top in range(0, pieces, height):
        sums = 0.0
        for start in range(0, blocks * width, width):
            block = rows[top : top + height, start : start + width]
            wide = scratch[: block.size].reshape(block.shape)
            np.copyto(wide, block)  # widening first is faster than a widening square
            np.square(wide, out=wide)
            sums = sums + wide.sum(axis=1)
        found += sums.tolist()
    return np.array(found)
