"""Optimizers over one rank's slice of a unit: element by element, in blocks that stay in cache.

What is updated is a flat slice: the master weights, the gradient summed over ranks, and the moments, all of one length.
Nothing here knows of ranks; the slices of all ranks together are updated as one vector would be.
"""

from dataclasses import dataclass, fields
from math import cos, inf, pi
from types import SimpleNamespace

import numpy as np

from models.twins import on_gpu
from zmpi.numbers.domains import Domain, switch
from zmpi.numbers.sums import round_to

# elements of a block: the five vectors of a block stay within a core's second-level cache
CACHE_BLOCK = 1 << 16


@dataclass
class Slice:
    """What the optimizer updates of one unit. Every vector is owned by the unit and changed in place."""

    master: np.ndarray  # weights, in the master type
    # summed over ranks, in the gradient type; possibly still multiplied by the loss scale
    gradient: np.ndarray
    moments: dict  # {name: vector in the master type}
    decayed: list  # [(start, stop, whether weight decay applies), ...], covering the parameters (not the padding)
    stored: np.ndarray | None = None  # the parameters, where they are the master rounded to 16 bits

    def blocks(self):
        """(start, stop, decays) of at most CACHE_BLOCK elements each, in order."""
        for start, stop, decays in self.decayed:
            for first in range(start, stop, CACHE_BLOCK):
                yield first, min(first + CACHE_BLOCK, stop), decays

    def round(self):
        """Bring what is stored up to date."""
        if self.stored is not None:
            round_to(self.stored, self.master)


BELOW_ONE = Domain(below=1)
DOMAINS = {  # of hyperparameters, by their names, whichever optimizer has them
    "lr": Domain(highest=1e30),  # 0: nothing is updated
    "warmup": Domain(whole=True),
    "decay_steps": Domain(whole=True),
    "clip": Domain(),
    "weight_decay": Domain(),
    "beta1": BELOW_ONE,
    "beta2": BELOW_ONE,
    "momentum": BELOW_ONE,
    # Times sqrt(1 - beta2), which is above 1e-8, it is still a float32 above 0: 0 / (0 + eps) must be a number.
    "eps": Domain(1e-30),
}
ANY_NUMBER = Domain(-inf)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An update rule: the base class of AdamW and SGD, and of one of your own.

    A subclass is a frozen, keyword-only dataclass. Its fields are its hyperparameters: each has a default, and the domain
    of its name in DOMAINS (one that is not there is any finite number, where its default is a number). It declares
    `moments`, the names of the vectors that it keeps, one element per parameter, all zero at first; and it implements
    `update`. The engine shards, books, saves and resumes moments as it does weights.

    The base class has the learning rate's course and clipping: `lr` is reached after `warmup` updates and then kept
    (`schedule="constant"`) or decayed by a half cosine to lr/10 at update `decay_steps` (`"cosine"`). `clip` bounds the
    global norm of the gradient (0: off).
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
                f" {self.decay_steps}: a cosine schedule decays after the warm-up"
            )
        if self.lr * self.weight_decay > 1:
            raise ValueError(
                f"weight_decay: expected at most 1/lr = {1 / self.lr:g}, got {self.weight_decay:g}:"
                " decay would turn weights over"
            )

    def _checked(self, name, default):
        value = getattr(self, name)
        if isinstance(default, bool):
            return switch(name, value)
        if name in DOMAINS:
            return DOMAINS[name].of(name, value)
        return ANY_NUMBER.of(name, value) if isinstance(default, (int, float)) else value

    def update(self, owned, t, factor):
        """Update `owned`, a Slice, in place: update t (counted from 1), with the gradient multiplied by `factor`.

        Shards end anywhere: an element may depend on its own weight, gradient and moments, and on t, never on another
        element, or the stages train differently. Walk through `owned.blocks()`, so that temporaries stay in cache; work
        in the master's type (a gradient may have 16 bits); end with `owned.round()`.
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
        """What the gradient is multiplied by: 1 where it is not clipped."""
        return self.clip / norm if self.clip and norm > self.clip else 1.0


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (arXiv 1711.05101, algorithm 2), on tensors of two and more dimensions only.

    Embeddings are matrices and decay too; biases and norm gains do not.
    """

    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8

    moments = ("m", "v")  # first and second moment, in the master type

    def update(self, owned, t, factor):
        """Update a Slice in place: update t (counted from 1), with the gradient multiplied by `factor`."""
        lr, numbers = (
            self.rate(t),
            {"factor": factor, "beta1": self.beta1, "beta2": self.beta2, "eps": self.eps},
        )
        numbers |= {"kept": 1.0 - lr * self.weight_decay, "step_size": lr / (1.0 - self.beta1**t)}
        adamw(
            owned.master,
            owned,
            SimpleNamespace(**numbers, root_of_correction=(1.0 - self.beta2**t) ** 0.5),
        )


@on_gpu
def adamw(master, owned, by):
    """AdamW's arithmetic on a Slice, whose `master` comes first; `by` holds the numbers of one update.

    With g' = (1 - beta1) g, which m needs, (1 - beta2) g^2 is a multiple of g'^2; and the root of v's correction goes
    into the step size and eps. So a block is passed over 13 times, not 16.
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
    """Stochastic gradient descent with (heavy-ball) momentum; weight decay, if any, is decoupled as in AdamW."""

    momentum: float = 0.0

    @property
    def moments(self):
        return ("momentum",) if self.momentum else ()

    def update(self, owned, t, factor):
        """Update a Slice in place: update t (counted from 1), with the gradient multiplied by `factor`."""
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
                velocity = owned.moments["momentum"][
                    start:stop
                ]  # velocity = momentum x velocity + g
                velocity *= self.momentum
                velocity += g_
                np.copyto(g_, velocity)
            g_ *= lr
            p -= g_
        owned.round()


@on_gpu
def sums_of_squares(vector, pieces):
    """The sums of squares of a vector's equal pieces, from the first to the last: a float64 array (pieces,) of the host.

    A piece of at most CACHE_BLOCK elements is one sum of NumPy's, a longer one is added up from equal blocks: the bits depend
    on the piece's values and length alone. Short pieces are squared several at a time, since a call costs as much as
    some thousand elements.
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
            np.copyto(wide, block)  # a pass of its own: faster than a square that widens as it goes
            np.square(wide, out=wide)
            sums = sums + wide.sum(axis=1)
        found += sums.tolist()
    return np.array(found)
