"""Seconds by op and by collective, and a step's matrix products: wraps functions from outside."""

from collections import Counter
from contextlib import contextmanager
from time import perf_counter

import numpy as np

from models import attention, fused, ops, transformer
from zmpi.core import engine, unit
from zmpi.messages import comm
from zmpi.numbers import optim

OPS = [
    name
    for module in (ops, attention, fused)
    for name in vars(module)
    if callable(getattr(transformer, name, None))
]
# (where a name is looked up, the name, what it is called in the table)
WRAPPED = (
    *((transformer, name, name) for name in sorted({*OPS} - {"flat_rows"})),
    (np, "matmul", "matmul"),
    (comm.Communicator, "all_gather", "all-gather: start"),
    (comm.Gather, "wait", "all-gather: wait"),
    (comm.Communicator, "_exchange", "reduce-scatter: exchange"),
    (comm, "add_in_order", "reduce-scatter: add"),
    (comm.Communicator, "gather_scalars", "scalars"),
    (optim.AdamW, "update", "AdamW"),
    (unit, "sums_of_squares", "norm"),
    (unit.Unit, "partial", "partial gradients: zero"),
    (engine.ZeRO, "forward_backward", "rest of forward and backward"),
)


@contextmanager
def replaced(owner, name, value):
    """owner.name is `value` inside."""
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class Profile:
    """Seconds and calls of the wrapped functions, each without the wrapped functions it calls."""

    def __init__(self):
        self.seconds, self.calls = Counter(), Counter()
        self._inner = [0.0]  # seconds of wrapped calls inside each open one

    def wrap(self, function, label):
        """`function`, timed under `label`; a matrix product is told apart by who asks for it."""

        def timed(*args, **kwargs):
            self._inner.append(0.0)
            began = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                total = perf_counter() - began
                self.seconds[label] += total - self._inner.pop()
                self.calls[label] += 1
                self._inner[-1] += total

        return timed

    def of(self, run):
        """Run it with everything wrapped; returns its seconds."""

        def nested(rest):
            if not rest:
                began = perf_counter()
                run()
                return perf_counter() - began
            owner, name, label = rest[0]
            with replaced(owner, name, self.wrap(owner.__dict__[name], label)):
                return nested(rest[1:])

        total = nested(WRAPPED)
        self.seconds["rest"] += total - self._inner[0]
        self._inner[0] = 0.0
        return total


class Gemms:
    """Records every matrix product of a step, to run it again alone with the same layouts."""

    def __init__(self, run):
        self._made, self.calls = {}, []  # signature -> array

        def recorded(a, b, out=None):
            made = matmul(a, b, out=out) if out is not None else matmul(a, b)
            self.calls.append((self._like(a, "a"), self._like(b, "b"), self._like(made, "out")))
            return made

        matmul = np.matmul
        with replaced(np, "matmul", recorded):
            run()

    def _like(self, array, role):
        """A new array of the same shape, strides and cache-line alignment, with other numbers."""
        lowest = array.__array_interface__["data"][0] % 64
        key = role, array.shape, array.strides, lowest
        if key not in self._made:
            itemsize = array.itemsize
            length = (
                sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True))
                // itemsize
                + 1
            )
            vector = (
                np.random.default_rng(0)
                .standard_normal(length + 32, dtype=np.float32)
                .astype(array.dtype)
            )
            first = (lowest - vector.__array_interface__["data"][0]) % 64 // itemsize
            self._made[key] = np.lib.stride_tricks.as_strided(
                vector[first:], array.shape, array.strides
            )
        return self._made[key]

    def seconds(self):
        """Do them once."""
        began = perf_counter()
        for a, b, out in self.calls:
            np.matmul(a, b, out=out)
        return perf_counter() - began

    @property
    def flops(self):
        """Multiplications and additions."""
        return sum(2 * out.size * a.shape[-1] for a, _, out in self.calls)
